#!/usr/bin/env bash
# test_restart.sh - scripts/restart.sh and scripts/slurm.sbatch, with a stand-in for the trainer that makes checkpoint folders and fails
# as it is told, and stand-ins for mpirun, srun and scontrol. Ends with "N passed, N failed"; exit code 1 if any row failed.
# shellcheck disable=SC2016  # conditions of rows are evaluated later
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
here=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir "$work/bin" "$work/scripts" "$work/train_gpt.d"
cp scripts/restart.sh scripts/slurm.sbatch "$work/scripts/"
cd "$work" || exit 1
passed=0 failed=0

# The stand-in reads its fate from the file `plan`, one line a start: "STEP CODE" makes checkpoint STEP (- none) and ends with CODE;
# "STEP wait" waits for a signal, saves STEP on SIGUSR1 and ends with 0; "STEP kill" dies of SIGKILL.
cat > train_gpt << 'STUB'
#!/usr/bin/env bash
echo "$*" >> calls
read -r step code < <(sed -n "$(wc -l < calls)p" plan)
[ -n "$step" ] || { step=- code=9; }
save() {
    [ "$step" != - ] || return 0
    folder=out/$(printf 'step_%08d' "$step")
    mkdir -p "$folder" && touch "$folder/DONE" && echo "$step" >> out/main.log
}
trap 'echo USR1 >> signals; save; exit 0' USR1
trap 'echo TERM >> signals; exit 143' TERM
trap 'echo INT >> signals; exit 130' INT
if [ "$code" = wait ]; then
    touch waiting
    for _ in $(seq 100); do sleep 0.05; done
    exit 8
fi
save
[ "$code" != kill ] || kill -KILL $$
exit "$code"
STUB
# A launcher: what comes before the trainer is its own; signals are handed on to the rank, and its exit code is that of the rank.
cat > bin/mpirun << 'STUB'
#!/usr/bin/env bash
echo "${0##*/} $*" >> launches
while [[ ${1:-} != ./* ]]; do shift; done
set -m # else the rank ignores SIGINT
"$@" &
child=$!
for signal in USR1 TERM INT; do trap "kill -$signal $child" $signal; done
while kill -0 $child 2> /dev/null; do wait $child; done
wait $child
STUB
cat > bin/scontrol << 'STUB'
#!/usr/bin/env bash
echo "$*" >> requeues
STUB
cp bin/mpirun bin/srun
cp train_gpt train_gpt_cuda
chmod +x bin/* train_gpt train_gpt_cuda
export PATH=$work/bin:$PATH

fresh() { # plan lines: a new folder out, nothing called yet
    rm -rf out calls launches signals requeues waiting err
    printf '%s\n' "$@" > plan
}
restart() { rc=0 && timeout 20 bash scripts/restart.sh "$@" > out.log 2> err || rc=$?; }

until_true() { # for 2 s at most
    for _ in $(seq 100); do
        "$@" && break
        sleep 0.02
    done
}

row() { # name, then conditions as commands in text: all must hold
    local name=$1 condition wrong=""
    shift
    for condition in "$@"; do
        eval "$condition" > /dev/null 2>&1 || { wrong=$condition && break; }
    done
    if [ -z "$wrong" ]; then
        passed=$((passed + 1))
        echo "ok    $name"
    else
        failed=$((failed + 1))
        echo "FAIL  $name: $wrong (rc $rc)"
        sed 's/^/      /' err 2> /dev/null | tail -n 12
    fi
}
# shellcheck disable=SC2317  # called by eval
calls() { [ "$(wc -l < calls)" -eq "$1" ]; }
# shellcheck disable=SC2317
call() { [ "$(sed -n "$1p" calls)" = "$2" ]; }
# shellcheck disable=SC2317
launch() { [ "$(sed -n "$1p" launches)" = "$2" ]; }
# shellcheck disable=SC2317
one_line() { [ "$(wc -l < err)" -eq 1 ] && grep -q "^error: .*$1" err && [ $rc -eq 1 ] && [ ! -e calls ]; }

fresh "10 0"
restart -- ./train_gpt --output out
row "a run that ends well is run once" '[ $rc -eq 0 ]' 'calls 1' 'call 1 "--output out"'
fresh "10 kill" "20 3" "30 0"
restart --wait 0 -- mpirun -np 4 --host "a b:2" ./train_gpt --lr 1e-3 --output out --steps 30
row "after a death it goes on from the checkpoint" '[ $rc -eq 0 ]' 'calls 3' 'call 1 "--lr 1e-3 --output out --steps 30"' \
    'call 2 "--lr 1e-3 --output out --steps 30 --resume on"' 'call 3 "--lr 1e-3 --output out --steps 30 --resume on"' \
    'launch 3 "mpirun -np 4 --host a b:2 ./train_gpt --lr 1e-3 --output out --steps 30 --resume on"'
fresh "10 7" "20 0"
restart --wait 0 -- ./train_gpt -o out -y 1
row "--resume that is there is not given twice" '[ $rc -eq 0 ]' 'call 2 "-o out -y 1"'
fresh "- 7" "5 0"
restart --wait 0 -- ./train_gpt --output=out
row "without a checkpoint it begins again, without --resume" '[ $rc -eq 0 ]' 'call 2 "--output=out"'
fresh "10 7" "- 7" "- 6"
restart --wait 0 --retries 2 -- ./train_gpt --output out
row "two tries without a newer checkpoint are the last" '[ $rc -eq 6 ]' 'calls 3' 'grep -q "giving up: 2 new tries" err'
fresh "10 7" "- 7" "20 7" "- 7" "- 7"
restart --wait 0 --retries 2 -- ./train_gpt --output out
row "a newer checkpoint gives new patience" '[ $rc -eq 7 ]' 'calls 5'
fresh "10 7" "20 7" "30 7" "40 0"
restart --wait 0 --retries 0 -- ./train_gpt --output out
row "--retries 0: only after progress" '[ $rc -eq 0 ]' 'calls 4'
fresh "- 1" "- 1" "- 1"
restart --wait 0 -- mpirun -np 2 ./train_gpt --output out --wrong
row "a wrong option ends it at the second try" '[ $rc -eq 1 ]' 'calls 2' 'grep -q "failed twice before its first step" err'
fresh "10 7" "20 7" "30 7" "40 0"
restart --wait 0 --fewer -- mpirun -np 3 ./train_gpt --output out -n 50
row "--fewer: one rank less each time, down to one" '[ $rc -eq 0 ]' 'launch 1 "mpirun -np 3 ./train_gpt --output out -n 50"' \
    'launch 2 "mpirun -np 2 ./train_gpt --output out -n 50 --resume on"' 'launch 4 "mpirun -np 1 ./train_gpt --output out -n 50 --resume on"'
fresh "10 7" "20 0"
restart --wait 0 --fewer -- srun --ntasks=8 ./train_gpt --output out
row "--fewer knows --ntasks=N" 'launch 2 "srun --ntasks=7 ./train_gpt --output out --resume on"'
fresh "10 7" "20 0"
mkdir -p out/step_00000090 # not whole
restart --wait 0 --retries 0 -- ./train_gpt --output out
row "a checkpoint that is not whole does not count" '[ $rc -eq 0 ]' 'grep -q "again from step 10" err'

for name in USR1:0 TERM:143 INT:130; do
    signal=${name%:*} code=${name#*:}
    fresh "10 wait" "20 0"
    set -m # else the background ignores SIGINT
    bash scripts/restart.sh --wait 0 -- mpirun -np 2 ./train_gpt --output out > out.log 2> err &
    pid=$!
    set +m
    until_true [ -e waiting ]
    kill -s "$signal" -- "-$pid" # as a terminal does: to the whole group
    rc=0 && wait $pid || rc=$?
    row "SIG$signal reaches the trainer once, and nothing follows" "[ \$rc -eq $code ]" "[ \"\$(cat signals)\" = $signal ]" 'calls 1'
done
fresh "10 7" "20 0"
bash scripts/restart.sh --wait 60 -- ./train_gpt --output out > out.log 2> err &
pid=$!
until_true grep -qs "in 60 s" err
sleep 0.1
kill -TERM $pid
rc=0 && wait $pid || rc=$?
row "a signal while it waits ends it" '[ $rc -eq 7 ]' 'calls 1'

fresh
restart -- ./train_gpt --steps 5
row "refused: no output folder" 'one_line "needs --output"'
restart -- mpirun -np 2 ./other --output out
row "refused: no trainer" 'one_line "no trainer"'
restart -- mpirun --wdir train_gpt.d ./other --output out
row "refused: a folder is no trainer" 'one_line "no trainer"'
restart --fewer -- ./train_gpt --output out
row "refused: --fewer without a number of ranks" 'one_line "needs the number of ranks"'
restart --retries x -- ./train_gpt --output out
row "refused: --retries x" 'one_line "whole number"'
restart -- ./train_gpt --output out --resume off
row "refused: --resume off" 'one_line "begin anew"'
restart ./train_gpt --output out
row "refused: no --" 'one_line "expected --fewer"'
restart --
row "refused: no command" 'one_line "expected a command"'

# ---- Slurm

export SLURM_SUBMIT_DIR=$work SLURM_JOB_ID=77 SLURM_JOB_NODELIST="n[1-2]" SLURM_NTASKS=16 SLURM_CPUS_PER_TASK=8
slurm() { rc=0 && timeout 20 "$@" bash scripts/slurm.sbatch > out.log 2>&1 < /dev/null || rc=$?; }
fresh "10 0"
slurm env OUTPUT=out
row "slurm: a run that ends well is not requeued" '[ $rc -eq 0 ]' 'calls 1' '[ ! -e requeues ]' \
    'grep -q "^srun --kill-on-bad-exit=1 --mpi=none ./train_gpt_cuda --train-data .*--output out --resume on$" launches'
fresh "10 0"
slurm env OUTPUT=out DEVICE=cpu
row "slurm: on CPUs by PMIx" '[ $rc -eq 0 ]' 'grep -q "^srun --kill-on-bad-exit=1 --mpi=pmix --cpu-bind=sockets ./train_gpt " launches'
fresh "10 wait"
OUTPUT=out bash scripts/slurm.sbatch > out.log 2>&1 &
pid=$!
until_true [ -e waiting ]
kill -USR1 $pid
rc=0 && wait $pid || rc=$?
row "slurm: SIGUSR1 saves, then the job goes back into the queue" '[ $rc -eq 0 ]' '[ "$(cat requeues)" = "requeue 77" ]' \
    '[ -e out/step_00000010/DONE ]' '[ "$(cat signals)" = USR1 ]'
fresh "10 wait"
OUTPUT=out SLURM_RESTART_COUNT=3 MAX_REQUEUES=3 bash scripts/slurm.sbatch > out.log 2>&1 &
pid=$!
until_true [ -e waiting ]
kill -USR1 $pid
rc=0 && wait $pid || rc=$?
row "slurm: but not for ever" '[ $rc -eq 0 ]' '[ ! -e requeues ]' 'grep -q "requeued 3 times" out.log'
fresh "- 1" "- 1"
sed -i 's/--wait 30/--wait 0/' scripts/slurm.sbatch
slurm env OUTPUT=out
row "slurm: a run that fails is not requeued" '[ $rc -eq 1 ]' '[ ! -e requeues ]'
fresh
slurm env DEVICE=tpu
row "slurm: another device is refused" '[ $rc -eq 1 ]' 'grep -q "expected gpu or cpu" out.log'
if command -v shellcheck > /dev/null; then
    cd "$here" || exit 1
    rc=0
    row "slurm: shellcheck" 'shellcheck scripts/slurm.sbatch'
fi
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
