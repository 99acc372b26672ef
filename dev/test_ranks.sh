#!/usr/bin/env bash
# test_ranks.sh - several ranks as their user meets them: one curve, resuming on fewer ranks and at another ZeRO stage, and what happens
# when a rank is wrong, dies, stalls or cannot write: one line of ours, exit code not 0, earlier checkpoints whole, never a hang.
# Ends with "N passed, N failed". usage: dev/test_ranks.sh [program]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
program=$(realpath "${1:-./train_gpt}")
rows=$PWD/dev/rows.sh
[ -x "$program" ] || { echo "error: $program is not there; type make first" >&2; exit 1; }
command -v mpirun > /dev/null || { echo "error: no mpirun: install openmpi-bin" >&2; exit 1; }

work=$(mktemp -d)
background=""
finish() {
    [ -z "$background" ] || kill -TERM "$background" 2> /dev/null
    pkill -KILL -f "^$work/train_gpt" 2> /dev/null
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
ln -s "$program" "$work/train_gpt"
cd "$work" || exit 1
export OMP_NUM_THREADS=1 LC_ALL=C OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
ulimit -c 0
# shellcheck source=dev/rows.sh
. "$rows"

# ---- rows

ranks() { # count, then the program's arguments
    local count=$1
    shift
    timeout -k 5 90 mpirun -np "$count" "$work/train_gpt" "$@"
}

# Beside mpirun's own banner a failed job says one line of error; its code is not 0.
refuse_ranks() { # name, pattern, command...
    local name=$1 pattern=$2 wrong=""
    shift 2
    run "$@"
    [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ] && [ "$rc" -ne 137 ] || wrong="expected a failure; $(saw)"
    [ "$(grep -c '^error: ' err)" -eq 1 ] || wrong="expected one line of error; $(saw)"
    grep -q -E -e "^error: .*($pattern)" err || wrong="expected an error with \"$pattern\"; $(saw)"
    report "$name" "$wrong" "$(grep '^error' err)"
}

# The losses of two runs differ by at most 1e-5 of their value.
near_run() { # folder, folder, steps
    losses "$1" | tr ',:' '  ' > near_1
    losses "$2" | tr ',:' '  ' > near_2
    [ "$(wc -l < near_1)" -eq "$3" ] || { echo "expected $3 losses in $1, found $(wc -l < near_1)"; return 1; }
    paste -d ' ' near_1 near_2 | awk '{ d = $4 - $12; d = d < 0 ? -d : d }
        $2 != $10 || d > 1e-5 * $4 { print "step " $2 ": " $4 " and " $12; bad = 1 } END { exit bad }'
}

make_files() {
    local i
    for ((i = 0; i < 6000; i++)); do echo "line $((i * 7919 % 10007)) of a text with words $((i * 104729 % 1009)) and $((i % 13))."; done > text.txt
    ./train_gpt tokenize text.txt --output data --vocab-size 300 > /dev/null 2>&1 || { echo "error: cannot make data" >&2; exit 1; }
}

data=(--train-data data_train_000000.bin --val-data data_val_000000.bin)
small=(--model "layers=2,heads=2,channels=32,context=32" --batch 2 --total-batch 352)
plain=("${data[@]}" "${small[@]}" --val-batches 2 --sample-every 0)
base=("${plain[@]}" --lr 3e-3 --val-every 10)

rows_curves() {
    accept "one rank, without mpirun" 'step 12 reached' ./train_gpt "${base[@]}" --steps 12 -o one
    local p z=0
    for p in 2 3 4 5 8; do
        accept "$p ranks at ZeRO $z" "network, rank $((p - 1)): .* bytes sent" ranks $p "${base[@]}" --steps 12 -o "p$p" --zero $z
        holds "... the curve of one rank" near_run one "p$p" 12
        z=$(((z + 1) % 4))
    done
    accept "again, 3 ranks at ZeRO 1" 'step 12 reached' ranks 3 "${base[@]}" --steps 12 -o again --zero 1
    holds "... bit for bit" same_run p3 again 12
    accept "an MPI program alone under mpirun -np 1" 'step 2 reached' ranks 1 "${base[@]}" --steps 2
    accept "more ranks than sequences" 'step 3 reached' \
        ranks 5 "${data[@]}" --model "layers=1,heads=1,channels=8,context=16" --batch 2 --sample-every 0 --steps 3 --zero 3
    accept "samples come from rank 0" 'generating:' ranks 2 "${data[@]}" "${small[@]}" --steps 2 --sample-every 1
    accept "no samples at ZeRO 3, with a notice" 'notice: no samples' ranks 2 "${data[@]}" "${small[@]}" --steps 2 --sample-every 1 --zero 3
    accept "help is printed once" '^usage' ranks 2 --help
    holds "... by rank 0 alone" test "$(grep -c '^usage' out)" -eq 1
}

# The table of memory that rank 0 prints, without what stands around it.
memory_table() { sed -n -E '/^\| parameters .*MiB/,/^\| total .*MiB/s/ +/ /gp' "$1"; }

# What `plan` says before a run is what the run then says, to the byte.
planned() { # ranks, ZeRO
    local ledger plan
    run ranks "$1" "${data[@]}" "${small[@]}" --val-every 0 --sample-every 0 --steps 5 --zero "$2" -o "plan$1$2"
    [ "$rc" -eq 0 ] || { saw; return 1; }
    mv out ran
    run ./train_gpt plan "${small[@]}" --vocab-size 300 --sample-every 0 --zero "$2" --ranks "$1" --tflops 0.1
    [ "$rc" -eq 0 ] || { saw; return 1; }
    memory_table ran > table_ran
    memory_table out > table_planned
    [ "$(wc -l < table_ran)" -gt 15 ] && cmp table_ran table_planned || return 1
    ledger=$(sed -n -E 's/^network, rank .*gradient ([0-9]+), weights ([0-9]+), norm ([0-9]+),.*/\1 \2 \3/p' ran |
        awk -v n=$((5 * $1)) '{ s += $1 + $2 + $3 } END { printf "%.0f", s / n }')
    plan=$(awk -F'|' -v z="$2" '$2 + 0 == z && $3 ~ /^ all / { printf "%d", $4 }' out)
    [ "$ledger" = "$plan" ] || { echo "ledger $ledger, plan $plan bytes a step and rank"; return 1; }
}

rows_plan() {
    local zero
    for zero in 0 1 2 3; do holds "plan: 3 ranks at ZeRO $zero, memory table and bytes as in the run" planned 3 $zero; done
    holds "plan: 8 ranks at ZeRO 1" planned 8 1
}

rows_resume() {
    accept "resume: 20 steps at once on 4 ranks" 'step 20 reached' ranks 4 "${base[@]}" --steps 20 -o whole --zero 1
    parts=("${base[@]}" --steps 20 -o part --zero 1 --checkpoint-every 10 --keep 0)
    accept "resume: with a checkpoint at 10" 'step 20 reached' ranks 4 "${parts[@]}"
    rm -rf part/step_00000020
    cp -r part part3
    accept "resume: the second 10, same ranks" 'resuming from .*step 10' ranks 4 "${parts[@]}" --resume on
    holds "... bit for bit" same_run whole part 20
    accept "resume: on 3 ranks at ZeRO 3" 'resuming from' ranks 3 "${base[@]}" --steps 15 -o part3 --zero 3 --resume on --warmup 1
    rm -rf part3/step_00000020 part3
    chain=("${base[@]}" --warmup 1 --schedule constant)
    accept "resume: 4 ranks, ZeRO 0" 'step 8 reached' ranks 4 "${chain[@]}" --steps 8 -o chain --zero 0
    accept "resume: then 3 ranks, ZeRO 3" 'step 14 reached' ranks 3 "${chain[@]}" --steps 14 -o chain --zero 3 --resume on
    accept "resume: then one" 'step 20 reached' ./train_gpt "${chain[@]}" --steps 20 -o chain --resume on
    accept "resume: and one from the start" 'step 20 reached' ./train_gpt "${chain[@]}" --steps 20 -o straight
    holds "... the same curve" near_run straight chain 20
    accept "resume: an llm.c model file on 2 ranks at ZeRO 3" 'weights from' \
        ranks 2 "${data[@]}" --batch 2 --sample-every 0 --model chain/step_00000020/model_00000020.bin --steps 2 --zero 3
}

rows_differences() {
    refuse_ranks "options: wrong on all ranks" 'unknown option --bach' ranks 3 "${base[@]}" --bach 4
    refuse_ranks "options: wrong on one rank" 'rank 1: unknown option --bach' \
        mpirun -np 1 ./train_gpt "${base[@]}" : -np 1 ./train_gpt "${base[@]}" --bach 4
    refuse_ranks "options: different on one rank" 'values of --lr differ.*rank 1 has 0.001' \
        mpirun -np 1 ./train_gpt "${plain[@]}" : -np 1 ./train_gpt "${plain[@]}" --lr 1e-3
    refuse_ranks "commands that run as one process" 'tokenize runs as one process' ranks 2 tokenize text.txt -o x
    mkdir -p other && cp data_*.bin other/
    printf '\1\0' | dd of=other/data_train_000000.bin bs=1 seek=5000 conv=notrunc status=none
    refuse_ranks "data: other tokens on one rank" 'the training data differ' \
        mpirun -np 1 ./train_gpt "${base[@]}" : -np 1 -wdir "$work/other" "$work/train_gpt" "${base[@]}"
    cp data_train_000000.bin other/
    printf '\1\0' | dd of=other/data_val_000000.bin bs=1 seek=1500 conv=notrunc status=none
    refuse_ranks "data: other validation tokens on one rank" 'the validation data differ' \
        mpirun -np 1 ./train_gpt "${base[@]}" : -np 1 -wdir "$work/other" "$work/train_gpt" "${base[@]}"
    mkdir -p dev/data/tinyshakespeare && cp data_val_000000.bin dev/data/tinyshakespeare/tiny_shakespeare_val.bin
    train_only=(--train-data data_train_000000.bin "${small[@]}" --val-batches 2 --sample-every 0 --steps 3)
    refuse_ranks "data: the default validation data on one rank only" 'rank 1: .*tiny_shakespeare_val' \
        mpirun -np 1 ./train_gpt "${train_only[@]}" : -np 1 -wdir "$work/other" "$work/train_gpt" "${train_only[@]}"
    rm -r dev
    rm other/data_train_000000.bin
    refuse_ranks "data: missing on one rank" 'rank 1: no file matches|rank 1: cannot open' \
        mpirun -np 1 ./train_gpt "${base[@]}" : -np 1 -wdir "$work/other" "$work/train_gpt" "${base[@]}"
    mkdir -p fake && echo 'int nothing_here;' | gcc -shared -fPIC -x c -o fake/libdnnl.so -
    cp fake/libdnnl.so fake/libdnnl.so.2
    cp fake/libdnnl.so fake/libdnnl.so.3
    refuse_ranks "libraries: another matrix library on one rank" 'the matrix libraries differ' \
        mpirun -np 1 ./train_gpt "${base[@]}" : -np 1 env LD_LIBRARY_PATH="$work/fake" ./train_gpt "${base[@]}"
    refuse_ranks "WORLD_SIZE without mpirun, on the CPU" 'mpirun' env RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost ./train_gpt "${base[@]}"
}

# Starts a job in the background and waits for its first checkpoint.
start_job() { # ranks, arguments
    rm -f job.out job.err
    local count=$1
    shift
    mpirun -np "$count" "$work/train_gpt" "$@" > job.out 2> job.err < /dev/null &
    background=$!
    await job.out '^Writing checkpoint'
}

# The job ends by itself within so many seconds, with a code that is not 0.
job_fails() { # seconds, pattern of the error line
    local i code=0
    for ((i = 0; i < $1 * 10; i++)); do
        kill -0 "$background" 2> /dev/null || break
        sleep 0.1
    done
    if kill -0 "$background" 2> /dev/null; then
        echo "the job hangs"
        kill -KILL "$background"
        pkill -KILL -f "^$work/train_gpt"
        background=""
        return 1
    fi
    wait "$background" || code=$?
    background=""
    [ $code -ne 0 ] || { echo "expected a code that is not 0"; return 1; }
    [ -z "$2" ] || [ "$(grep -c '^error: ' job.err)" -eq 1 ] || { echo "expected one line of error, found $(head -n 5 job.err)"; return 1; }
    [ -z "$2" ] || grep -q -E -e "^error: .*($2)" job.err || { echo "expected \"$2\", found $(head -n 3 job.err)"; return 1; }
    ! pgrep -f "^$work/train_gpt" > left || { sleep 2; ! pgrep -f "^$work/train_gpt" > left || { echo "processes are left"; return 1; }; }
}

rank_pid() { pgrep -f "^$work/train_gpt" | sed -n "$1p"; } # the n-th of the job's processes

long=("${plain[@]}" --steps 1000000 --checkpoint-every 5 --val-every 0)

rows_failures() {
    stop_one() { start_job 3 "${long[@]}" -o stalled --rank-timeout 3s && kill -STOP "$(rank_pid 2)" && job_fails 25 'has not answered for'; }
    holds "a rank that stalls is named within the time-out, and the job ends" stop_one
    kill_one() { start_job 3 "${long[@]}" -o killed && kill -KILL "$(rank_pid 3)" && job_fails 20 ''; }
    holds "a rank that is killed ends the job" kill_one
    holds "... and nothing broken is left to resume" test -n "$(find killed -maxdepth 1 -name 'step_*' | head -n 1)"
    accept "... two ranks go on from there" 'resuming from' ranks 2 "${long[@]}" -o killed --resume on --max-time 1s
    rows_killed_saves
    usr1() {
        start_job 3 "${long[@]}" -o usr1 && kill -USR1 "$background" && wait "$background" || return 1
        background=""
        grep -q 'stopped by SIGUSR1; to go on' job.out || { echo "no farewell: $(tail -n 3 job.out)"; return 1; }
    }
    holds "SIGUSR1 to mpirun: a checkpoint, and a clean end" usr1
    stop_file() {
        start_job 2 "${long[@]}" -o stopped && touch stopped/STOP && wait "$background" || return 1
        background=""
        grep -q 'stopped by the file STOP' job.out && [ ! -e stopped/STOP ]
    }
    holds "the file STOP does the same" stop_file
    busy() {
        start_job 2 "${long[@]}" -o busy || return 1
        run ranks 2 "${long[@]}" -o busy
        kill -USR1 "$background" && wait "$background"
        background=""
        if [ "$rc" -eq 0 ] || [ "$(grep -c '^error: .*in use by' err)" -ne 1 ]; then saw && return 1; fi
    }
    holds "a second job in the same folder is refused" busy
}

# Kills a rank at any moment of a save, several times.
rows_killed_saves() {
    killed_saves() {
        local i
        for i in 1 2 3 4 5; do
            start_job 3 "${plain[@]}" --steps 1000000 --val-every 0 --checkpoint-every 1 -o saves --resume on || return 1
            sleep 0.0$((i * 17 % 9))
            kill -KILL "$(rank_pid $((i % 3 + 1)))" && job_fails 20 '' || return 1
            run ranks 2 "${long[@]}" -o saves --resume on --max-time 0.1s
            if [ "$rc" -ne 0 ] || grep -q 'passed over' err; then saw && return 1; fi
        done
        [ -z "$(find saves -maxdepth 1 -name '.step_*')" ] || { echo "left behind: $(ls -A saves)"; return 1; }
    }
    holds "a rank killed while saving: what is there is whole, the rest goes on" killed_saves
}

rows_disks() {
    accept "disk: a first checkpoint" 'step 4 reached' ranks 3 "${base[@]}" --steps 4 -o full
    cp -r full before
    more=("${base[@]}" --steps 8 -o full --resume on)
    # shellcheck disable=SC2016
    limited='ulimit -f 40; exec "$0" "$@"' # without shared memory: its backing file is a file too
    refuse_ranks "disk: one rank cannot write" 'cannot save the checkpoint|earlier checkpoints are untouched' \
        mpirun --mca btl tcp,self -np 2 "$work/train_gpt" "${more[@]}" : -np 1 bash -c "$limited" "$work/train_gpt" "${more[@]}"
    holds "... the checkpoint before is as it was" diff -r full/step_00000004 before/step_00000004
    holds "... nothing half written is left" test -z "$(find full -name '.step_*' -o -name '*tmp*')"
    refuse_ranks "disk: an output folder that cannot be made" 'cannot make the folder' ranks 2 "${base[@]}" --steps 2 -o text.txt/x
    cp -r full broken
    printf 'x' | dd of=broken/step_00000004/state.safetensors bs=1 seek=4000 conv=notrunc status=none
    refuse_ranks "a checkpoint with a flipped byte" 'none is whole|checksum|passed over' ranks 2 "${base[@]}" --steps 8 -o broken --resume on
}

make_files
rows_curves
rows_plan
rows_resume
rows_differences
rows_failures
rows_disks
rows_end
