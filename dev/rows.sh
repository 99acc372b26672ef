# shellcheck shell=bash
# rows.sh - what the scripts of tests share: rows of a name, what is expected and a command. A script sources it after it has gone to its
# work folder, and ends with rows_end.
passed=0 failed=0 rc=0 row_start=$EPOCHREALTIME
note_options() { :; } # called with each ./train_gpt command that went well

report() { # name, what went wrong (empty: nothing), what V=1 shows
    local now=$EPOCHREALTIME
    if [ -z "$2" ]; then
        passed=$((passed + 1))
        printf 'ok    '
    else
        failed=$((failed + 1))
        printf 'FAIL  '
    fi
    printf '%-76s %6.2f s\n' "$1" "$(awk "BEGIN { print $now - $row_start }")"
    [ -z "$2" ] || printf '    %s\n' "$2"
    [ -z "${V:-}" ] || [ -z "${3:-}" ] || printf '      %s\n' "$3"
    row_start=$now
}

# Runs a command, for 60 s at most: its output goes to the files out and err, its exit code to rc.
run() {
    ran="$*"
    if [ "$(type -t "$1")" = function ]; then "$@"; else timeout -k 5 60 "$@"; fi > out 2> err < /dev/null
    rc=$?
    [ $rc -ne 0 ] || [ "$1" != ./train_gpt ] || note_options "$@"
}

saw() { printf 'command: %s\n    exit code %d, stdout ends: %s\n    stderr: %s' "$ran" "$rc" "$(tail -n 2 out)" "$(head -n 4 err)"; }

# refuse NAME PATTERN COMMAND...: exit code 1 and one line on stderr, "error: " and the pattern (notes may stand before it).
refuse() {
    local name=$1 pattern=$2 wrong=""
    shift 2
    run "$@"
    [ "$rc" -eq 1 ] || wrong="expected exit code 1; $(saw)"
    [ "$(grep -c -v -E '^(notice|note): ' err)" -eq 1 ] || wrong="expected one line of error; $(saw)"
    grep -q -E -e "^error: .*($pattern)" err || wrong="expected an error with \"$pattern\"; $(saw)"
    report "$name" "$wrong" "$(cat err)"
}

# accept NAME PATTERN COMMAND...: exit code 0, no error, and the pattern in a line of the output.
accept() {
    local name=$1 pattern=$2 wrong=""
    shift 2
    run "$@"
    [ "$rc" -eq 0 ] || wrong="expected exit code 0; $(saw)"
    grep -q '^error' err && wrong="expected no error; $(saw)"
    grep -q -E -e "$pattern" out err || wrong="expected \"$pattern\"; $(saw)"
    report "$name" "$wrong"
}

# holds NAME COMMAND...: the command (often a function below, which says on stdout what is wrong) succeeds.
holds() {
    local name=$1 said
    shift
    said=$("$@" 2>&1) && said="" || said="${said:-failed}: $*"
    report "$name" "$said"
}

# Waits until a line of the file matches.
await() {
    local i
    for ((i = 0; i < 1500; i++)); do
        grep -q -s -E -e "$2" "$1" && return 0
        sleep 0.02
    done
    echo "no \"$2\" in $1 after 30 s"
    return 1
}

# The training losses of a run, step by step, with all digits; the times differ between runs.
losses() { sed -n -E 's/.*("step":[0-9]+),"event":"train",.*("loss":[^,]*,"norm":[^,]*,"lr":[^,]*),.*/\1 \2/p' "$1/main.jsonl"; }

# Two runs ended at the same step with the same bits.
same_run() { # folder, folder, step
    local step
    step=$(printf '%08d' "$3")
    cmp "$1/step_$step/model_$step.bin" "$2/step_$step/model_$step.bin" || return 1
    cmp "$1/step_$step/state.safetensors" "$2/step_$step/state.safetensors" || return 1
    losses "$1" > losses_1
    losses "$2" > losses_2
    [ "$(wc -l < losses_1)" -eq "$3" ] || { echo "expected $3 losses, found $(wc -l < losses_1)"; return 1; }
    cmp losses_1 losses_2
}

rows_end() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}
