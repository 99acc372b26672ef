#!/usr/bin/env bash
# test_builds.sh - the same program from other compilers, levels, instruction sets and matrix products: each builds without a word,
# and ten steps of a small model give the losses of the first build. Rounding differs (sums in other orders, fused multiply-adds), so
# losses may differ by 1e-5 of their value (2e-7 is seen); bf16 weights have 8 bits and may differ by 2e-3 (2e-4 is seen).
# Ends with "N passed, N failed"; exit code 1 if any failed. usage: dev/test_builds.sh
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d)
finish() {
    # shellcheck disable=SC2046  # one word per process
    kill $(jobs -rp) 2> /dev/null
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
export LC_ALL=C
passed=0 failed=0

report() { # name, what went wrong (empty: nothing), seconds
    if [ -z "$2" ]; then passed=$((passed + 1)) && printf 'ok    '; else failed=$((failed + 1)) && printf 'FAIL  '; fi
    printf '%-76s %s\n' "$1" "${3:+$3 s}"
    [ -z "$2" ] || printf '    %s\n' "${2//$'\n'/$'\n'    }"
}

# ---- the builds: a name, then what make is told
builds=("gcc -O3" "gcc -O0|OPT=-O0" "gcc -O3, bf16 weights|PRECISION=bf16" "gcc -O3, without OpenMP|OPENMP=" "gcc -O3, without MPI|MPI=no")
[ "$(uname -m)" != x86_64 ] || builds+=("gcc -O3, x86-64-v3|ARCH=x86-64-v3")
if command -v clang > /dev/null; then
    threads=""
    echo 'int main(void) { return 0; }' > "$work/empty.c"
    clang -fopenmp "$work/empty.c" -o "$work/empty" 2> /dev/null || threads="OPENMP=" # libomp is a package of its own
    builds+=("clang -O3|CC=clang $threads")
else
    echo "      (no clang here: its build is left out)"
fi

# Each in a copy of the sources, two at a time.
build() { # number, what make is told
    local at="$work/$1" start=$EPOCHREALTIME
    shift
    mkdir "$at"
    cp -r Makefile train_gpt.cu kernels optim comm dataloader trainer "$at/" 2> /dev/null # an empty folder is not in a clone
    timeout -k 5 300 make -s -C "$at" "$@" train_gpt > "$at/make.log" 2>&1
    echo $? > "$at/rc"
    awk "BEGIN { printf \"%.2f\", $EPOCHREALTIME - $start }" > "$at/seconds"
}

for i in "${!builds[@]}"; do
    told=${builds[$i]#*|}
    [ "$told" != "${builds[$i]}" ] || told=""
    # shellcheck disable=SC2086  # several words
    build "$i" $told &
    running=$(jobs -rp)
    [ "$(wc -w <<< "$running")" -lt 2 ] || wait -n
done
wait

for i in "${!builds[@]}"; do
    wrong="exit code $(cat "$work/$i/rc"), expected 0 and no word of make: $(head -n 5 "$work/$i/make.log")"
    if [ "$(cat "$work/$i/rc")" -eq 0 ] && [ ! -s "$work/$i/make.log" ]; then wrong=""; fi
    report "builds: ${builds[$i]%%|*}: compiles without a warning" "$wrong" "$(cat "$work/$i/seconds")"
done

# ---- the runs

cd "$work" || exit 1
seq 1 4000 | awk '{ print ($1 * 7919) % 1013, ($1 * 104729) % 97 }' > numbers.txt
0/train_gpt tokenize numbers.txt --output data --vocab-size 300 > tokenize.log 2>&1 || { cat tokenize.log; report "builds: data" "tokenize failed"; }

train() { # folder of the program, folder of the run, options
    local program=$1 out=$2
    shift 2
    timeout -k 5 120 "$program/train_gpt" --train-data data_train_000000.bin --val-data "" --model layers=2,heads=3,channels=48,context=64 --batch 4 \
        --total-batch 448 --steps 10 --lr 1e-3 --warmup 2 --sample-every 0 --output "$out" "$@" > "$out.txt" 2> "$out.err" < /dev/null &&
        sed -n -E 's/.*"event":"train",.*"loss":([0-9.]+),.*/\1/p' "$out/main.jsonl" > "$out.losses"
}

compare() { # name, folder of the run, tolerance; the losses are held against those of the first build
    local said
    said=$(paste first.losses "$2.losses" 2> /dev/null | awk -v most="$3" '
        NF != 2 || $1 <= 0 { bad = bad " step " NR ": " $0 }
        NF == 2 { d = ($2 - $1) / $1; d = d < 0 ? -d : d; if (d > worst) worst = d; if (!(d <= most)) bad = bad " step " NR ": " $1 " and " $2 }
        END { if (NR != 10) bad = bad " " NR " steps, expected 10"; print (bad ? "FAIL" bad : sprintf("%.1e", worst)) }')
    case $said in
        FAIL*) report "builds: $1: ten steps" "tolerance $3:${said#FAIL} $(cat "$2.err")" ;;
        *) report "builds: $1: ten steps, losses differ by $said" "" ;;
    esac
}

train 0 first
report "builds: the first: ten steps" "$([ "$(wc -l < first.losses)" -eq 10 ] || cat first.err)"
for i in "${!builds[@]}"; do
    name=${builds[$i]%%|*}
    [ "$i" -gt 0 ] || continue
    train "$i" "run_$i"
    case $name in *bf16*) compare "$name" "run_$i" 2e-3 ;; *) compare "$name" "run_$i" 1e-5 ;; esac
    case $name in
        *without\ OpenMP) report "builds: $name: says so at start-up" "$(grep -q 'built without OpenMP' "run_$i.txt" || head -n 3 "run_$i.txt")" ;;
    esac
done
train 0 own --gemm own
compare "own matrix products" own 1e-5
train 0 one --threads 1
compare "one thread" one 1e-7
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
