#!/usr/bin/env bash
# test_compare.sh - scripts/compare_optimizers.sh and its report: a sweep of tiny runs, how it goes on after a kill, what its table says;
# and what scripts/text_corpus.sh says where it cannot work. Ends with "N passed, N failed"; exit code 1 if any row failed.
# usage: dev/test_compare.sh [program]     (./train_gpt)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
here=$PWD
program=$(realpath "${1:-./train_gpt}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
cp -r scripts dev/rows.sh README.md doc/formats.md "$work"
cp "$program" "$work/train_gpt"
cd "$work" || exit 1
rc=0
printf 'train_gpt:\n' > Makefile # nothing to build here
# shellcheck source=/dev/null
. ./rows.sh
mkdir text build
for _ in 1 2 3 4 5 6; do cat README.md formats.md; done > text/text.txt
./train_gpt tokenize text/text.txt --output text/t --vocab-size 300 > /dev/null 2>&1
export DATA=text/t RESULTS=results.jsonl THREADS=1 PICTURES=pictures

cat > tiny.plan << 'PLAN'
# a comment
base --model layers=1,heads=1,channels=16,context=16 --batch 2 --warmup 10% --final-lr-frac 0
length short 20 4
adamw short 1,2 --optimizer adamw --lr {1e-3,2e-2} --weight-decay 0.1
decay short 1 @adamw:short:1 --weight-decay {x1,x2}
PLAN
sweep() { bash scripts/compare_optimizers.sh "$@"; }
lines() { wc -l < results.jsonl; }

accept "a sweep runs the grid and ends with a table" '^\| adamw \| --lr 0.02 --optimizer adamw --weight-decay 0.1 \| [0-9.]+ \| [0-9.]+ \| 2 \|' \
    sweep tiny.plan
cp err first
six_lines() {
    [ "$(lines)" -eq 6 ] || { echo "$(lines) lines, expected 4 runs, one under a second name, and one more" && return 1; }
    [ "$(grep -c '^run: ' first)" -eq 5 ] || { cat first && return 1; }
    grep -q '"arm":"decay".*--weight-decay 0.2' results.jsonl
}
holds "four runs of a grid, two for the best setting: a run under two names is made once" six_lines
whole_lines() {
    local want='^\{"arm":"[a-z]+","setting":"[^"]*","options":"[^"]*","key":"[0-9a-f]{16}","data":"[0-9a-f]{8}","seed":[12],"steps":20,"tokens":640,'
    want+='"loss":[0-9.]+,"train":[0-9.]+,"state":[0-9.]+,"ms":[0-9.]+,"program":"[^"]*","diverged":false,'
    want+='"curve":(\[?\[[0-9]+,[0-9.]+\][],]?){5}\]?\}$'
    if grep -v -E "$want" results.jsonl; then return 1; fi
}
holds "each run is one whole JSON line with equal tokens and a curve of 5 points" whole_lines
same_again() {
    cp results.jsonl before
    sweep tiny.plan > out 2> err || { cat err && return 1; }
    if grep '^run: ' err; then return 1; fi
    cmp results.jsonl before
}
holds "typed again, nothing runs and the results stay" same_again
elsewhere() {
    mkdir -p moved
    for file in text/t_*; do cp "$file" "moved/u${file#text/t}"; done
    DATA=moved/u sweep tiny.plan > out 2> err || { cat err && return 1; }
    if grep '^run: ' err; then return 1; fi
}
holds "the same shards under another name are the same data" elsewhere

killed() {
    local pid
    rm results.jsonl err
    bash scripts/compare_optimizers.sh tiny.plan > out 2> err &
    pid=$!
    await err 'loss ' || return 1
    kill -TERM $pid
    wait $pid
    [ $? -eq 143 ] || { echo "expected exit code 143" && return 1; }
    if pgrep -f "output build/compare/run-tiny-" > /dev/null; then echo "a run was left behind" && return 1; fi
    [ "$(lines)" -lt 6 ] || { echo "all was done before the kill" && return 1; }
    sweep tiny.plan > out 2> err || { cat err && return 1; }
    sort results.jsonl | sed -E 's/"ms":[0-9.]+//' > after
    sort before | sed -E 's/"ms":[0-9.]+//' | diff - after
}
holds "a killed sweep leaves nothing behind and goes on; the results are the same" killed

cut_line() {
    head -c -40 results.jsonl > shorter && mv shorter results.jsonl
    sweep tiny.plan > out 2> err || { cat err && return 1; }
    [ "$(grep -c '^run: ' err)" -eq 1 ] || { cat err && return 1; }
    grep -q '^notice: the last line' err || { cat err && return 1; }
    sort results.jsonl | sed -E 's/"ms":[0-9.]+//' | diff - after
}
holds "a line that was cut is taken out and its run done again" cut_line
without() {
    sed 's/^decay.*/plain short 1 @adamw:short:1 --weight-decay none --lr {x2,x4}/' tiny.plan > without.plan
    DRY=1 sweep without.plan > out 2> err || { cat err && return 1; }
    [ "$(grep '^run: ' err)" = "run: plain, 20 steps, seed 1: --lr 0.04 --optimizer adamw
run: plain, 20 steps, seed 1: --lr 0.08 --optimizer adamw" ] || { cat err && return 1; }
}
holds "none takes an option away; all choices of a line start from one setting" without

cat > wild.plan << 'PLAN'
base --model layers=2,heads=2,channels=64,context=64 --batch 4 --warmup 0 --clip 0
length short 20 4
adamw short 1 --optimizer adamw --lr {2e-3,100}
PLAN
accept "a run that ends by \"not finite\" is a result" '^\| adamw \| --lr 0.002 --optimizer adamw \| [0-9.]+ ' \
    env RESULTS=wild.jsonl bash scripts/compare_optimizers.sh wild.plan
holds "and is marked as such" grep -q '"loss":null.*"diverged":true' wild.jsonl
cat > bad.plan << 'PLAN'
length short 20 4
adamw short 1 --modle d12
adamw short 1 --model layers=1,heads=1,channels=16,context=16 --lr 1e-2
PLAN
failing() {
    sweep bad.plan > out 2> err
    [ $? -eq 1 ] || { echo "expected exit code 1" && return 1; }
    grep -q '^FAILED (exit code 1): error: .*modle' err && grep -q '^     loss [0-9]' err && return 0
    cat err
    return 1
}
holds "a run that fails is named, the others go on, the exit code is 1" failing

stopped() { # the program is told to stop, as a user would: not a result
    local count
    count=$(lines)
    printf 'base --model layers=1,heads=1,channels=16,context=16\nlength long 20000 4\nadamw long 1 --lr 1e-3\n' > long.plan
    rm err
    bash scripts/compare_optimizers.sh long.plan > out 2> err &
    await err '^run: ' && sleep 1
    pkill -TERM -P $! # its only child is the program
    wait $!
    [ $? -eq 1 ] || { echo "expected exit code 1" && return 1; }
    grep -q '^FAILED' err && [ "$(lines)" -eq "$count" ] && return 0
    cat err
    return 1
}
holds "a run that was stopped is not a result" stopped

plan_refused() { # what the plan holds, pattern
    printf '%b' "$1" > wrong.plan
    run bash scripts/compare_optimizers.sh wrong.plan
    [ "$rc" -eq 1 ] && grep -q -E "^error: .*$2" err && return 0
    saw
    return 1
}
holds "refused: an arm of an unknown length" plan_refused 'adamw long 1 --lr 1\n' 'no line gives the length long'
holds "refused: seeds that are none" plan_refused 'length short 20 4\nadamw short a --lr 1\n' 'seeds a'
holds "refused: a multiple of nothing" plan_refused 'length short 20 4\nadamw short 1 --lr x2\n' 'adamw: --lr x2'
holds "refused: an option without a value" plan_refused 'length short 20 4\nadamw short 1 --lr\n' 'adamw: --lr'
refuse "refused: no plan" "usage" bash scripts/compare_optimizers.sh
refuse "refused: a plan that is not there" "no plan nowhere" bash scripts/compare_optimizers.sh nowhere

# Runs made up so that the figures are known: AdamW's losses are 3 + seed / 100 at rate 1e-3 and 0.4 more at half and twice it, Kappa's
# are 0.5 less at its best rate, 2e-3, with differences between seeds; its curve falls straight from 7, AdamW's is at 6 half way.
awk 'function run(arm, lr, seed, loss, middle) {
        printf "{\"arm\":\"%s\",\"setting\":\"--lr %s\",\"options\":\"--lr %s\",\"key\":\"%s%s%s\",", arm, lr, lr, arm, lr, seed
        printf "\"data\":\"d\",\"seed\":%s,\"steps\":100,\"tokens\":1000,\"loss\":%s,\"train\":1,", seed, loss
        printf "\"state\":%s,\"ms\":10,\"program\":\"x\",\"diverged\":false,", arm == "adamw" ? "8.000" : "0.600"
        printf "\"curve\":[[0,7],[500,%s],[1000,%s]]}\n", middle, loss }
    BEGIN {
        for (seed = 1; seed <= 3; seed++) {
            run("adamw", 0.001, seed, 3 + seed / 100, 6)
            run("kappa", 0.002, seed, 2.5 + seed / 100 + (seed == 2) * 0.003, 4.75)
        }
        run("adamw", 0.0005, 1, 3.41, 6); run("adamw", 0.002, 1, 3.41, 6)
        run("kappa", 0.001, 1, 2.61, 6); run("kappa", 0.004, 1, 2.61, 6)
        run("kappa", 0.0005, 1, 2.81, 6); run("kappa", 0.008, 1, 2.81, 6)
        printf "{\"arm\":\"kappa\",\"options\":\"--lr 0.002\",\"key\":\"cut\",\"data\":\"d\",\"seed\":4,\"steps\":100,\"lo\n"
    }' > known.jsonl
printf 'adamw 10\nkappa 12.5\n' > known.times
tables() { ALL=1 DATA_ID=d bash scripts/compare_report.sh known.jsonl pictures; }
accept "the report: best setting, mean and spread over seeds" '^\| adamw \| --lr 0.001 \| 3.0200 \| 0.0100 \| 3 \|.*\| 8.000 \| 1.00 \|$' tables
accept "the report: tokens to AdamW's loss, seed by seed" \
    '^\| kappa \| --lr 0.002 \| 2.5210 \| 0.0101 \| 3 \| 0.00 M \| 1.13 \| 0.600 \| 1.25 \|' tables
accept "the report: paired seeds" '^\| kappa - adamw \| -0.4990 \| 0.0020 \| 3 \|$' tables
accept "the report: excess over learning rates, of the seed that all have" '^\| kappa \| 0.002 \| 2.5100 \| 0.1250 \| x0.25 .. x4 \|$' tables
accept "the report: none over fewer rates" '^\| adamw \| 0.001 \| 3.0100 \| - \| x0.5 .. x2 \|$' tables
pictures() {
    command -v gnuplot > /dev/null || return 0
    [ "$(head -c 4 pictures/known_curves_100.png | tail -c 3)" = PNG ] && [ "$(head -c 4 pictures/known_rates_100.png | tail -c 3)" = PNG ]
}
holds "the report: pictures, where there is gnuplot" pictures

timed() {
    ROUNDS=1 STEPS=5 bash scripts/compare_times.sh results.jsonl > out 2> err || { cat err && return 1; }
    grep -q '^adamw [0-9.]*$' results.times && return 0
    cat out err
    return 1
}
holds "step times are measured in turn" timed

plans_read() {
    local form
    for form in full quick; do
        DRY=1 RESULTS=none.jsonl bash scripts/compare_optimizers.sh $form > out 2> err < /dev/null || { cat err && return 1; }
        [ "$(grep -c '^run: ' err)" -gt 10 ] || { cat err && return 1; }
    done
}
holds "the plans quick and full are well formed" plans_read

mkdir bin
printf '#!/bin/sh\necho "E: Failed to fetch" >&2\nexit 100\n' > bin/apt-get
chmod +x bin/apt-get
refuse "text_corpus: where nothing can be fetched, one line" "cannot fetch the Debian package dict-gcide: E: Failed" \
    env PATH="$work/bin:$PATH" bash scripts/text_corpus.sh text/corpus
refuse "text_corpus: no name" "usage" bash scripts/text_corpus.sh
refuse "text_corpus: a folder as a name" "expected the beginning of file names" bash scripts/text_corpus.sh text/
cd "$here" || exit 1
rows_end
