#!/usr/bin/env bash
# restart.sh - keeps a training run going: when the command fails (a rank died or stalled, a node was lost), it is started again from
# the newest checkpoint in the output folder.
# usage: scripts/restart.sh [--fewer] [--retries N] [--wait S] -- COMMAND...      such as: mpirun -np 4 ./train_gpt --output runs/a ...
#   --retries N   give up after N tries in a row that brought no newer checkpoint [3]
#   --wait S      seconds before a new try [10]
#   --fewer       every new try with one rank less (-np, -n or --ntasks of the launcher), down to one
# The command is everything up to and with the trainer's options; --resume on is added to these once there is a checkpoint. SIGUSR1,
# SIGTERM and SIGINT are passed on to the command, and nothing is started after them. Exit code: that of the last try.
set -euo pipefail
shopt -s nullglob

say() { echo "restart: $*" >&2; }
fail() {
    echo "error: $*" >&2
    exit 1
}

fewer=0 retries=3 pause=10
while [ $# -gt 0 ]; do
    case $1 in
        --fewer) fewer=1 ;;
        --retries | --wait)
            [[ ${2:-} =~ ^[0-9]{1,6}$ ]] || fail "$1 ${2:-}: expected a whole number"
            if [ "$1" = --retries ]; then retries=$2; else pause=$2; fi
            shift
            ;;
        --help | -h) sed -n '2,/^set/{ /^set/d; s/^# \{0,1\}//; p }' "$0" && exit 0 ;;
        --) break ;;
        *) fail "$1: expected --fewer, --retries, --wait, or -- and the command" ;;
    esac
    shift
done
if [ "${1:-}" != -- ] || [ $# -lt 2 ]; then
    fail "expected a command after --, such as: scripts/restart.sh -- mpirun -np 4 ./train_gpt --output runs/a"
fi
shift
words=("$@")

# ---- the command: launcher, trainer, the trainer's options

trainer=-1 ranks_at=-1 ranks_before="" output="" resume=""
for ((i = 0; i < ${#words[@]} && trainer < 0; i++)); do
    word=${words[i]}
    case $word in
        -np | --np | -n | --n | --ntasks) [[ ${words[i + 1]:-} =~ ^[1-9][0-9]{0,5}$ ]] && ranks_at=$((i + 1)) ranks_before="" ;;
        --np=[1-9]* | --n=[1-9]* | --ntasks=[1-9]*) ranks_at=$i ranks_before=${word%%=*}= ;;
        -*) ;;
        *) [[ ${word##*/} != *train_gpt* ]] || [ -d "$word" ] || trainer=$i ;;
    esac
done
[ $trainer -ge 0 ] || fail "no trainer in the command: expected a word such as ./train_gpt"
for ((i = trainer + 1; i < ${#words[@]}; i++)); do
    case ${words[i]} in
        -o | --output) output=${words[i + 1]:-} ;;
        --output=*) output=${words[i]#*=} ;;
        -y | --resume) resume=${words[i + 1]:-} ;;
        --resume=*) resume=${words[i]#*=} ;;
    esac
done
[ -n "$output" ] || fail "the trainer needs --output FOLDER: checkpoints are what a new try goes on from"
case $resume in off | 0 | false | no) fail "--resume $resume would begin anew at every try; leave it out" ;; esac
[ $fewer -eq 0 ] || [ $ranks_at -ge 0 ] || fail "--fewer needs the number of ranks in the command: -np N, -n N or --ntasks N"

# Step of the newest whole checkpoint, -1 without one.
newest() {
    local folder step best=-1
    for folder in "$output"/step_*; do
        step=${folder##*/step_}
        [[ $step =~ ^[0-9]{1,18}$ ]] && [ -e "$folder/DONE" ] && [ $((10#$step)) -gt $best ] && best=$((10#$step))
    done
    echo "$best"
}

logs() { stat -c '%n %s %Y' "$output/main.log" "$output/main.jsonl" 2> /dev/null || true; }

one_rank_less() {
    local ranks=${words[ranks_at]#"$ranks_before"}
    [ "$ranks" -gt 1 ] || return 0
    words[ranks_at]=$ranks_before$((ranks - 1))
    say "going on with $((ranks - 1)) rank(s)"
}

# ---- signals and tries

child="" stopped=""
pass_on() {
    stopped=$1
    [ -z "$child" ] || kill -s "$1" "$child" 2> /dev/null || true
    say "SIG$1 passed on; no new try after this one"
}
for signal in USR1 TERM INT; do
    # shellcheck disable=SC2064  # the name as it is now
    trap "pass_on $signal" $signal
done

# Runs a command in a process group of its own (a Ctrl-C reaches it once, from us) to its end, whatever signals come; rc: exit code.
run() {
    rc=0
    set -m
    "$@" < /dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2> /dev/null; do wait "$child" || true; done
    wait "$child" || rc=$?
    child=""
}

at=$(newest) tries=0 quick=0 # tries: new ones since the last that brought a checkpoint
while :; do
    seen=$(logs)
    say "${words[*]}"
    run "${words[@]}"
    code=$rc
    [ $code -ne 0 ] || exit 0
    [ -z "$stopped" ] || exit $code
    now=$(newest)
    if [ "$now" -gt "$at" ]; then
        tries=0
    elif [ $tries -ge "$retries" ]; then
        say "giving up: $tries new tries brought no newer checkpoint" && exit $code
    fi
    at=$now tries=$((tries + 1))
    # A wrong option looks like this, and no try will mend it.
    if [ $code -eq 1 ] && [ "$now" -lt 0 ] && [ "$(logs)" = "$seen" ]; then quick=$((quick + 1)); else quick=0; fi
    [ $quick -lt 2 ] || { say "it failed twice before its first step; see its message above" && exit $code; }
    if [ "$now" -ge 0 ] && [ -z "$resume" ]; then resume=on words+=(--resume on); fi
    if [ "$now" -ge 0 ]; then from="step $now"; else from="the start"; fi
    say "exit code $code; again from $from in $pause s"
    run sleep "$pause"
    [ -z "$stopped" ] || exit $code
    [ $fewer -eq 0 ] || one_rank_less
done
