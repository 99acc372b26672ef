#!/usr/bin/env bash
# compare_times.sh - step times of the arms of a sweep, measured in turn so that a drifting machine meets all of them: each arm's best
# setting (at the greatest length it was run) takes 12 steps, three times. The median of the means of the last ten goes to RESULTS with
# .times for .jsonl, from where scripts/compare_report.sh takes it. Nothing else should run meanwhile. About 25 s an arm on 2 cores.
# usage: scripts/compare_times.sh [RESULTS.jsonl]      (doc/sweeps/optimizers.jsonl). DATA: prefix of the token shards (build/compare/full);
#                                                      PROGRAM (./train_gpt), THREADS (all cores), ROUNDS (3), STEPS (12), ARMS (a regular
#                                                      expression, such as 'adamw|kappa.*'; all of them)
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C

fail() {
    echo "error: $*" >&2
    exit 1
}

results=${1:-doc/sweeps/optimizers.jsonl} data=${DATA:-build/compare/full} program=${PROGRAM:-./train_gpt} threads=${THREADS:-$(nproc)}
[ -s "$results" ] || fail "$results: no results yet"
compgen -G "${data}_train_*.bin" > /dev/null || fail "there are no ${data}_train_*.bin; name the shards by DATA="
data_id=${DATA_ID:-$(tail -n 1 "$results" | sed -E 's/.*"data":"([^"]*)".*/\1/')}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

awk -v data="$data_id" -v mode=best -f scripts/compare_report.awk "$results" | grep -E "^(${ARMS:-.*})$(printf '\t')" > "$work/arms" ||
    fail "$results: no arm is named ${ARMS:-at all}"
for ((round = 0; round < ${ROUNDS:-3}; round++)); do
    while IFS=$'\t' read -r arm options; do
        options=$(sed -E 's/(^| )--warmup [^ ]+/ --warmup 0/' <<< "$options")
        read -r -a words <<< "$options"
        rm -rf "$work/run"
        if ! "$program" train --train-data "${data}_train_*.bin" "${words[@]}" --steps "${STEPS:-12}" --val-data "" --val-every 0 \
            --sample-every 0 --checkpoint-minutes 0 --log-every 0 --progress off --threads "$threads" --output "$work/run" \
            > "$work/out" 2>&1 < /dev/null; then
            echo "notice: $arm: $(grep -h -m 1 '^error' "$work/out")" >&2
            continue
        fi
        sed -n -E 's/.*"event":"train".*"ms":([0-9.]+),.*/\1/p' "$work/run/main.jsonl" |
            tail -n 10 | awk '{ sum += $1 } END { print sum / NR }' >> "$work/ms-$arm" # SOAP's new bases come every ten steps
    done < "$work/arms"
done
while IFS=$'\t' read -r arm options; do
    [ ! -s "$work/ms-$arm" ] || sort -g "$work/ms-$arm" | awk -v arm="$arm" '{ v[NR] = $1 } END { print arm, v[int((NR + 1) / 2)] }'
done < "$work/arms" | tee "${results%.jsonl}.times"
