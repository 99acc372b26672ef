#!/usr/bin/env bash
# compare_optimizers.sh - trains every arm of a plan at equal tokens, data order and batch, and prints a table: best setting, loss and its
# spread over seeds, tokens to AdamW's final loss, state bytes per parameter, step time. Draws loss curves and learning-rate sensitivity.
# usage: scripts/compare_optimizers.sh quick            a small model on the Bible, under 5 minutes
#        scripts/compare_optimizers.sh full             scripts/compare_full.plan: 3.7 million parameters, 45 MB of text; hours
#        scripts/compare_optimizers.sh PLAN [report]    a plan of your own; report: only the table and the pictures
# Each run adds one JSON line to the results file. A run whose line is there is skipped, so a sweep that was killed goes on where it was.
# A run's key is a hash of its options, seed, steps and data (not of paths); one that ends by "not finite" is a result, too.
# Variables: PROGRAM (./train_gpt), RESULTS (build/compare/<form>.jsonl; full: doc/sweeps/optimizers.jsonl), DATA (prefix of the token
# shards), THREADS (all cores), PICTURES (folder of the pictures: that of RESULTS), DRY=1 says what would run and runs nothing.
#
# A plan has lines of these forms; # begins a comment:
#     base OPTIONS                 of every run
#     length NAME STEPS POINTS     a length of runs, and the number of points of its validation curve
#     ARM LENGTH SEEDS OPTIONS     runs: SEEDS such as 1,2,3; braces make a grid: --lr {1e-3,2e-3} --weight-decay {0.1,0.3}
# OPTIONS may begin with @ARM:LENGTH:N: those of the N best settings of that arm and length among the runs of lines above (most seeds,
# then lowest mean loss), which later options override; then a value such as x0.5 multiplies the setting's own, and none takes the option away.
# `--warmup 5%` is a share of the steps. The key knows the options that a plan gives, not the program's defaults: where those may change, give all.
# Sweeps of several plans may share a results file.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C

fail() {
    echo "error: $*" >&2
    exit 1
}
say() { echo "$*" >&2; }

[ $# -ge 1 ] || fail "usage: scripts/compare_optimizers.sh quick|full|PLAN [report]"
form=$1 only=${2:-}
[ -z "$only" ] || [ "$only" = report ] || fail "$only: expected report or nothing"
program=${PROGRAM:-./train_gpt} threads=${THREADS:-$(nproc)} work=build/compare
mkdir -p $work
case $form in
    quick | full) plan=scripts/compare_$form.plan ;;
    *) plan=$form ;;
esac
[ -f "$plan" ] || fail "there is no plan $plan"
name=$(basename "$plan" .plan)
name=${name#compare_}
results=$work/$name.jsonl
[ "$form" != full ] || results=doc/sweeps/optimizers.jsonl
results=${RESULTS:-$results}
mkdir -p "$(dirname "$results")"
touch "$results"

# ---- options: pairs of name and value

# The pairs of $1 sorted by name, numbers written one way; of a name given twice the later value counts, "x2" times the earlier, "none" takes
# the option away. With $2, only those that are not among the pairs of $2.
normal() {
    awk -v text="$1" -v base="${2:-}" 'function number(v) { return v ~ /^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?$/ }
        BEGIN {
            n = split(text, word, /[ \t]+/)
            for (i = 1; i <= n; i += 2) {
                if (word[i] == "") { i--; continue }
                if (word[i] !~ /^--/ || i == n) { print word[i] ": expected --name value" > "/dev/stderr"; exit 1 }
                v = word[i + 1]
                if (v ~ /^x[0-9.]+$/) {
                    if (!(word[i] in value)) { print word[i] " " v ": no earlier value to multiply" > "/dev/stderr"; exit 1 }
                    v = value[word[i]] * substr(v, 2) (value[word[i]] ~ /%$/ ? "%" : "")
                }
                if (number(v)) { v = sprintf("%.10g", v) }
                if (!(word[i] in value)) { order[++count] = word[i] }
                value[word[i]] = v
            }
            for (i = 2; i <= count; i++) {
                for (j = i; j > 1 && order[j] < order[j - 1]; j--) { t = order[j]; order[j] = order[j - 1]; order[j - 1] = t }
            }
            for (i = 1; i <= count; i++) {
                if (value[order[i]] == "none") { continue }
                pair = order[i] " " value[order[i]]
                if (index(" " base " ", " " pair " ")) { continue }
                line = line (line == "" ? "" : " ") pair
            }
            print line
        }'
}

expand() { # text: one line for each choice from its braces
    local item
    if [[ $1 =~ ^([^{]*)\{([^}]*)\}(.*)$ ]]; then
        local before=${BASH_REMATCH[1]} after=${BASH_REMATCH[3]} list=${BASH_REMATCH[2]}
        for item in ${list//,/ }; do expand "$before$item$after"; done
    else
        echo "$1"
    fi
}

# The options of the best settings of an arm at a length, one a line, among the keys in the file `seen`.
best_settings() { # arm steps count
    awk -v arm="$1" -v steps="$2" 'function get(name) {
            if (!match($0, "\"" name "\":(\"[^\"]*\"|[^,}]*)")) { return "" }
            text = substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3)
            gsub(/"/, "", text)
            return text
        }
        NR == FNR { seen[$1]; next }
        /\]}$/ && get("arm") == arm && get("steps") == steps && get("key") in seen && !(get("key") in known) {
            known[get("key")]
            o = get("options"); loss = get("loss")
            sum[o] += loss == "null" ? 1e9 : loss; n[o]++
        }
        END { for (o in sum) { printf "%d\t%.6f\t%s\n", n[o], sum[o] / n[o], o } }' "$seen" "$results" |
        sort -t "$(printf '\t')" -k 1,1nr -k 2,2g | sed -n "1,$3p" | cut -f 3
}

# ---- one run

# The JSON line of a run that has ended, from its folder.
record() { # folder arm setting options key seed steps
    local loss=null diverged=true state ms
    if grep -q 'not finite' "$1/out"; then :; else
        "$program" eval --model "$1/run" --val-data "${data}_val_*.bin" --batch 16 --threads "$threads" > "$1/eval" 2>&1 < /dev/null ||
            fail "eval of $1/run: $(grep -m 1 '^error' "$1/eval" || tail -n 1 "$1/eval")"
        loss=$(awk '$1 == "val" && $2 == "loss" { print $3 }' "$1/eval")
        [[ $loss =~ ^[0-9.]+$ ]] && diverged=false || loss=null
    fi
    state=$(sed -n -E 's/^optimizer state: ([0-9.]+) bytes a parameter$/\1/p' "$1/out")
    ms=$(sed -n -E 's/.*"event":"train".*"ms":([0-9.]+),.*/\1/p' "$1/run/main.jsonl" | sort -g |
        awk '{ v[NR] = $1 } END { printf "%.1f", v[int((NR + 1) / 2)] }')
    awk -v head="$(printf '"arm":"%s","setting":"%s","options":"%s","key":"%s","data":"%s","seed":%s,"steps":%s' \
        "$2" "$3" "$4" "$5" "$data_id" "$6" "$7")" -v loss="$loss" -v diverged="$diverged" -v state="${state:-null}" -v ms="$ms" '
        function get(name) { return match($0, "\"" name "\":[^,}]*") ? substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3) : "" }
        /"event":"config"/ { version = get("git"); gsub(/"/, "", version) }
        /"event":"train"/ { step = get("step") + 1; tokens = get("tokens"); per = tokens / step; l[++n] = get("loss") }
        /"event":"val"/ { at[++points] = get("step"); val[points] = get("loss") }
        END {
            for (i = n - int(n / 20); i <= n; i++) { if (i > 0) { sum += l[i]; count++ } }
            printf "{%s,\"tokens\":%d,\"loss\":%s,\"train\":%s,\"state\":%s,\"ms\":%s,\"program\":\"%s\",\"diverged\":%s,\"curve\":[", head,
                tokens, loss, count && l[n] ~ /^[0-9.]+$/ ? sprintf("%.6f", sum / count) : "null", state, ms,
                version, diverged
            for (i = 1; i <= points; i++) { if (val[i] ~ /^[0-9.]+$/) { printf "%s[%d,%.5f]", c++ ? "," : "", at[i] * per, val[i] } }
            print "]}"
        }' "$1/run/main.jsonl"
}

run_one() { # arm steps points seed options
    local arm=$1 steps=$2 points=$3 seed=$4 options=$5 setting key dir words given rc=0 began=$SECONDS
    setting=$(normal "$options" "$base")
    key=$(echo "$options seed $seed steps $steps data $data_id" | sha256sum | cut -c 1-16)
    echo "$key" >> "$seen"
    if grep -q "\"key\":\"$key\".*\]}\$" "$results"; then
        # the same run may be wanted under the name of another arm
        grep "\"key\":\"$key\"" "$results" | grep -q "\"arm\":\"$arm\"" ||
            grep -m 1 "\"key\":\"$key\"" "$results" | sed "s/\"arm\":\"[^\"]*\"/\"arm\":\"$arm\"/" >> "$work/$name.add"
        if [ -s "$work/$name.add" ]; then cat "$work/$name.add" >> "$results" && rm "$work/$name.add"; fi
        return 0
    fi
    say "run: $arm, $steps steps, seed $seed: $setting"
    [ -z "${DRY:-}" ] || return 0
    dir=$work/run-$name-$key
    rm -rf "$dir"
    mkdir -p "$dir"
    given=$options
    if [[ " $given " =~ \ --warmup\ ([0-9.]+)%\  ]]; then
        given=${given/--warmup ${BASH_REMATCH[1]}%/--warmup $(awk -v p="${BASH_REMATCH[1]}" -v n="$steps" 'BEGIN { printf "%d", n * p / 100 + 0.5 }')}
    fi
    read -r -a words <<< "$given"
    "$program" train --train-data "${data}_train_*.bin" --val-data "${data}_val_*.bin" "${words[@]}" --steps "$steps" --seed "$seed" \
        --val-every $((steps / points)) --sample-every 0 --checkpoint-minutes 0 --log-every 0 --progress off --threads "$threads" \
        --output "$dir/run" > "$dir/out" 2>&1 < /dev/null 9>&- &
    child=$!
    wait $child || rc=$?
    child=""
    # a run that somebody else ended politely has exit code 0 and too few steps
    if [ $rc -eq 0 ] && ! grep -q "^{\"step\":$((steps - 1)),\"event\":\"train\"" "$dir/run/main.jsonl"; then rc=1; fi
    if [ $rc -ge 128 ] || { [ $rc -ne 0 ] && ! grep -q 'not finite' "$dir/out"; }; then
        say "FAILED (exit code $rc): $(grep -h '^error' "$dir/out" | head -n 1 || true) (all of it: $dir/out)"
        bad=$((bad + 1))
        if [ $rc -eq 130 ] || [ $rc -eq 143 ]; then fail "interrupted"; fi
        return 0
    fi
    record "$dir" "$arm" "$setting" "$options" "$key" "$seed" "$steps" > "$dir/line"
    cat "$dir/line" >> "$results"
    say "     loss $(sed -E 's/.*"loss":([^,]*),.*/\1/' "$dir/line"), $((SECONDS - began)) s"
    rm -rf "$dir"
}

# ---- the plan

declare -A length_steps length_points
base="" bad=0 child="" seen=$work/$name.seen
trap '[ -z "$child" ] || kill -KILL "$child"' EXIT # a polite end would save what nobody needs
trap 'exit 143' TERM HUP
trap 'exit 130' INT

prepare_data() {
    local default=$work/$name
    [ "$form" != quick ] || default=$work/bible
    data=${DATA:-$default}
    if ! compgen -G "${data}_train_*.bin" > /dev/null; then
        [ -z "${DATA:-}" ] || fail "DATA=$data: there are no ${data}_train_*.bin"
        if [ "$form" = quick ]; then
            bash scripts/setup.sh bible-kjv
            PATH=$PATH:/usr/games bible -f "gen1:1-rev22:21" | sed 's/^[^ ]* //' > "$work/bible.txt"
            "$program" tokenize "$work/bible.txt" --output "$data" --vocab-size 1024 --val-fraction 0.05 >&2
        else
            bash scripts/text_corpus.sh "$data" >&2
        fi
    fi
    local file
    for file in "${data}"_train_*.bin "${data}"_val_*.bin; do
        [ -f "$file.crc32c" ] || fail "$file.crc32c is missing: shards of \`train_gpt tokenize\` have one beside each file"
    done
    data_id=$(cat "${data}"_train_*.crc32c "${data}"_val_*.crc32c | sha256sum | cut -c 1-8)
}

run_line() { # arm length seeds options...
    local arm=$1 length=$2 seeds=$3 steps points options found line seed
    shift 3
    [[ $arm =~ ^[a-z0-9_.-]+$ ]] || fail "plan, arm $arm: expected small letters, digits and -"
    [[ $seeds =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "plan, arm $arm: seeds $seeds: expected numbers such as 1,2,3"
    steps=${length_steps[$length]:-}
    points=${length_points[$length]:-}
    [ -n "$steps" ] || fail "plan, arm $arm: no line gives the length $length"
    line=$*
    found=$base # the settings that the line starts from: the same ones for all of its choices
    if [[ $line =~ ^@([^: ]+):([^: ]+):([0-9]+)(.*)$ ]]; then
        [ -n "${length_steps[${BASH_REMATCH[2]}]:-}" ] || fail "plan, arm $arm: no line gives the length ${BASH_REMATCH[2]}"
        found=$(best_settings "${BASH_REMATCH[1]}" "${length_steps[${BASH_REMATCH[2]}]}" "${BASH_REMATCH[3]}")
        line=${BASH_REMATCH[4]}
        [ -n "$found" ] || { say "skipped: $arm: there are no runs of ${BASH_REMATCH[1]} yet" && return 0; }
    fi
    while read -r line; do
        while read -r options; do
            options=$(normal "$options $line") || fail "plan, arm $arm: $line"
            for seed in ${seeds//,/ }; do run_one "$arm" "$steps" "$points" "$seed" "$options"; done
        done <<< "$found"
    done <<< "$(expand "$line")"
}

run_plan() {
    local words
    : > "$seen"
    while read -r -a words; do
        case ${words[0]:-#} in
            '#'*) ;;
            base) base=$(normal "${words[*]:1}") || fail "plan: base" ;;
            length)
                [[ "${words[*]}" =~ ^length\ [a-z0-9]+\ [0-9]+\ [0-9]+$ ]] || fail "plan: ${words[*]}: expected length NAME STEPS POINTS"
                length_steps[${words[1]}]=${words[2]} length_points[${words[1]}]=${words[3]}
                ;;
            *)
                [ ${#words[@]} -ge 4 ] || fail "plan: ${words[*]}: expected ARM LENGTH SEEDS OPTIONS"
                run_line "${words[@]}"
                ;;
        esac
    done < "$1"
}

if [ "$only" != report ]; then
    exec 9>> "$work/$name.lock" # held as long as this script runs; runs do not inherit it
    flock -n 9 || fail "a sweep of $plan is running already"
    if [ "$program" = ./train_gpt ] && [ -z "${DRY:-}" ]; then make train_gpt >&2; fi
    prepare_data
    if [ -s "$results" ] && [ -n "$(tail -c 1 "$results")" ]; then
        say "notice: the last line of $results was cut: it is taken out, and its run done again"
        sed -i '$d' "$results"
    fi
    say "plan $plan, data ${data}_*.bin ($data_id), program $program, results $results"
    run_plan "$plan"
    [ "$bad" -eq 0 ] || say "$bad runs failed: type the same command to try them again"
fi
[ -n "${DRY:-}" ] || DATA_ID=${data_id:-} bash scripts/compare_report.sh "$results" "${PICTURES:-$(dirname "$results")}"
[ "$bad" -eq 0 ]
