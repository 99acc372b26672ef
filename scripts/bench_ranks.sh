#!/usr/bin/env bash
# bench_ranks.sh - what several ranks cost and gain on this machine: GPT-2 124M on one process with two threads and on two with one
# each, in turn; then a small model on 4 hosts with links of 100 Mbit/s, 1 Gbit/s and without limit (scripts/lab.sh, as root), at every
# ZeRO stage: step time, share of communication that was hidden, bytes by the ledger, by the plan and by the interfaces.
# usage: scripts/bench_ranks.sh [local|lab]      ROUNDS=2 of the first part, HOSTS=4, STEPS=5 of the second
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-all} hosts=${HOSTS:-4} steps=${STEPS:-5}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
make -s train_gpt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for _ in $(seq 60); do cat README.md doc/*.md; done > "$work/text.txt"
./train_gpt tokenize "$work/text.txt" --output "$work/data" --vocab-size 1024 > /dev/null 2>&1
data=(--train-data "$work/data_train_*.bin" --val-every 0 --sample-every 0 --warmup 0)

# The mean over all steps but the first of a field in the log, given as a sed expression.
mean() { sed -n -E "$2" "$1" | tail -n +2 | awk '{ s += $1; n++ } END { if (n) printf "%.1f", s / n; else printf "?" }'; }

if [ "$part" != lab ]; then
    model=(--model d12 --vocab-size 50257 --batch 2 --total-batch 4096 --steps 3)
    echo "GPT-2 124M, 4,096 tokens a step, tokens a second:"
    for ((i = 0; i < ${ROUNDS:-2}; i++)); do
        ./train_gpt "${data[@]}" "${model[@]}" --threads 2 > "$work/one"
        mpirun -np 2 ./train_gpt "${data[@]}" "${model[@]}" --threads 1 > "$work/two" 2> /dev/null
        one=$(mean "$work/one" 's/^step .* ([0-9.]+) ms .*/\1/p') two=$(mean "$work/two" 's/^step .* ([0-9.]+) ms .*/\1/p')
        awk -v one="$one" -v two="$two" 'BEGIN { printf "  one process, 2 threads %.1f   two ranks, 1 thread each %.1f   ratio %.3f",
            4096e3 / one, 4096e3 / two, one / two }'
        echo "   hidden $(mean "$work/two" 's/.*, ([0-9]+)% hidden.*/\1/p')%"
    done
    sed -n 's/^memory/  memory, one process/p' "$work/one"
    sed -n 's/^memory/  memory, each of two ranks/p' "$work/two"
fi
[ "$part" != local ] || exit 0

model=(--model "layers=6,heads=6,channels=384,context=256" --vocab-size 1024 --batch 1 --total-batch $((hosts * 512)) --steps "$steps")
echo "6 layers of 384 channels, $hosts hosts, $((hosts * 512)) tokens a step; times of rank 0, mean bytes of a rank, in a step:"
printf '%-8s %4s %9s %9s %7s %14s %14s %7s %s\n' rate ZeRO 'step ms' 'comm ms' hidden 'ledger bytes' 'plan bytes' equal 'links above ledger'
for rate in 100mbit 1gbit none; do
    for zero in 0 1 2 3; do
        run="$work/run-$rate-$zero" rc=0
        bash scripts/lab.sh with "$hosts" --rate "$rate" -- --check "$hosts" ./train_gpt "${data[@]}" "${model[@]}" --zero $zero --output "$run" \
            > "$work/log" 2>&1 || rc=$?
        [ $rc -eq 0 ] || { echo "the run failed:" && tail -n 5 "$work/log" && exit 1; }
        ./train_gpt plan "${model[@]:0:8}" --zero $zero --ranks "$hosts" --ranks-per-node 1 --tflops 0.1 > "$work/plan"
        ms=$(mean "$run/main.jsonl" 's/.*"event":"train".*,"ms":([0-9.]+).*/\1/p')
        comm=$(mean "$run/main.jsonl" 's/.*"event":"train".*"comm_ms":([0-9.]+).*/\1/p')
        exposed=$(mean "$run/main.jsonl" 's/.*"event":"train".*"exposed_ms":([0-9.]+).*/\1/p')
        ledger=$(sed -n -E 's/^network, rank .*gradient ([0-9]+), weights ([0-9]+), norm ([0-9]+),.*/\1 \2 \3/p' "$work/log" |
            awk -v n=$((hosts * steps)) '{ s += $1 + $2 + $3 } END { printf "%.0f", s / n }')
        plan=$(awk -F'|' -v z=$zero '$2 + 0 == z && $3 ~ /^ all / { printf "%d", $4 }' "$work/plan")
        above=$(sed -n -E 's/.*: ([0-9.]+) % above it.*/\1/p' "$work/log" | sort -n | tr '\n' ' ')
        printf '%-8s %4s %9s %9s %6.0f%% %14s %14s %7s %s%%\n' "$rate" $zero "$ms" "$comm" "$(awk "BEGIN { print 100 * (1 - $exposed / $comm) }")" \
            "$ledger" "$plan" "$([ "$ledger" = "$plan" ] && echo yes || echo NO)" "$above"
    done
done
