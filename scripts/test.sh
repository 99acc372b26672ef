#!/usr/bin/env bash
# test.sh - builds everything and runs every test; the last line is the sum of all: "N passed, N failed". Exit code 1 if any failed.
# Each program and script ends with such a line of its own: one that crashes, takes too long or ends without it counts as a failure.
# usage: scripts/test.sh [word...]      only the steps whose heading holds one of the words; V=1 shows all output
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
child=""
finish() {
    [ -z "$child" ] || { kill -TERM "$child" 2> /dev/null && wait "$child"; } || true
    rm -rf "$work"
}
trap finish EXIT
trap 'echo "interrupted" >&2; exit 130' INT TERM HUP
mkdir "$work/tmp"
export TMPDIR="$work/tmp" LC_ALL=C
words=("$@")
passed=0 failed=0 start=$SECONDS

wanted() {
    local word
    [ ${#words[@]} -gt 0 ] || return 0
    for word in "${words[@]}"; do [[ $1 != *"$word"* ]] || return 0; done
    return 1
}

# Runs a command of at most so many seconds, its output in the file `log`; the exit code goes to rc.
run() {
    local limit=$1
    shift
    rc=0
    timeout -k 10 "$limit" "$@" > "$work/log" 2>&1 < /dev/null &
    child=$!
    wait "$child" || rc=$?
    child=""
    [ -z "${V:-}" ] || cat "$work/log"
}

say_seconds() { printf '%s, %d s\n' "$1" $((SECONDS - began)); }

# What went wrong: failed rows and the lines after them, and the end.
complain() {
    [ $rc -ne 124 ] && [ $rc -ne 137 ] || echo "    took too long"
    grep -n -A 8 -E '^FAIL|^ *error|runtime error|ERROR: ' "$work/log" | head -n 60 || true
    echo "    exit code $rc; it ends:"
    tail -n 12 "$work/log" | grep -v '^ok ' | sed 's/^/    /' || true
}

# step HEADING SECONDS COMMAND...: a program that ends with "N passed, N failed"
step() {
    local heading=$1 limit=$2 began=$SECONDS last good=0 bad=0
    shift 2
    wanted "$heading" || return 0
    echo "== $heading"
    run "$limit" "$@"
    last=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/log" | tail -n 1) || true
    if [ -n "$last" ]; then
        good=${last%% *}
        bad=${last#*, }
        bad=${bad%% *}
    else
        last="no closing line"
        bad=1
    fi
    [ $rc -eq 0 ] || [ "$bad" -gt 0 ] || { last="$last, but exit code $rc" bad=1; }
    [ "$bad" -eq 0 ] || complain
    passed=$((passed + good))
    failed=$((failed + bad))
    say_seconds "$last"
}

# silent HEADING SECONDS COMMAND...: a command that has nothing to say when all is well, such as make -s: one test
silent() {
    local heading=$1 limit=$2 began=$SECONDS
    shift 2
    wanted "$heading" || return 0
    echo "== $heading"
    run "$limit" "$@"
    if [ $rc -eq 0 ] && [ ! -s "$work/log" ]; then
        passed=$((passed + 1))
        say_seconds "passed"
    else
        failed=$((failed + 1))
        complain
        say_seconds "failed"
    fi
}

echo "== packages"
bash scripts/setup.sh gcc g++ libc6-dev make libpcre2-dev libdnnl-dev libopenmpi-dev openmpi-bin iproute2 procps
silent "build: make" 900 make -s -j2 train_gpt test_gpt build/test_gpt_bf16 build/test_gpt_emulated build/test_gpt_emulated_bf16 \
    debug
step "test_gpt: fp32" 300 ./test_gpt
step "test_gpt: bf16" 300 build/test_gpt_bf16
step "test_gpt: the CUDA branch on the CPU" 400 build/test_gpt_emulated
step "test_gpt: the CUDA branch on the CPU, bf16" 400 build/test_gpt_emulated_bf16

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 # more ranks than cores, as root too
step "ranks: 8 processes, fp32" 200 mpirun -np 8 ./test_gpt ranks
step "ranks: 8 processes, bf16" 200 mpirun -np 8 build/test_gpt_bf16 ranks
step "ranks: 3 processes on the emulated GPU" 200 mpirun -np 3 build/test_gpt_emulated ranks
step "test_ranks: several ranks as their user meets them" 300 bash dev/test_ranks.sh
step "test_restart: the restart loop and the batch script" 60 bash dev/test_restart.sh
step "test_lab: a cluster with slow links on one machine" 120 bash dev/test_lab.sh

# Scratch memory of threads that the OpenMP library has ended is not given back. The leak checker itself crashes where threads
# share a matrix library that was loaded late, so it watches one thread (and dev/test_cli.sh below, which runs with one).
echo "leak:team_arena" > "$work/leaks"
export LSAN_OPTIONS="suppressions=$work/leaks:print_suppressions=0"
step "test_gpt: address and undefined-behaviour checks" 400 env ASAN_OPTIONS=detect_leaks=0 build/test_gpt_debug
step "ranks: 3 processes with address and undefined-behaviour checks" 300 env ASAN_OPTIONS=detect_leaks=0 mpirun -np 3 build/test_gpt_debug ranks
step "test_cli: the program as its user meets it" 300 bash dev/test_cli.sh
step "test_cli: the same with address, leak and undefined-behaviour checks" 400 bash dev/test_cli.sh build/train_gpt_debug
step "test_compare: the sweep over optimizers" 150 bash dev/test_compare.sh
if echo '#include <omp.h>' | clang -fopenmp -fsyntax-only -x c - 2> /dev/null; then
    step "test_threads: no data race" 300 bash dev/test_threads.sh
else
    wanted threads && echo "== test_threads: no clang with libomp here, so the thread sanitizer is left out"
fi
step "test_builds: compilers, levels, instruction sets" 500 bash dev/test_builds.sh

fuzz() { # what is read is never what was written: no reader may crash, hang or keep silent
    gcc -x c -std=gnu11 -D_GNU_SOURCE -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined dev/fuzz_readers.c -o "$TMPDIR/fuzz" \
        -x none -lpcre2-8 -lm -ldl
    cd "$TMPDIR" || return 1
    ./fuzz 1000 1 > fuzz.log 2>&1 || { cat fuzz.log && return 1; }
}
export -f fuzz
silent "fuzz: broken files for every reader" 200 bash -c 'set -e; fuzz'
if command -v nvcc > /dev/null; then
    silent "cuda: without MPI" 600 make -s -B train_gpt_cuda MPI=no CUDA_ARCHS=90a
    silent "cuda: sm_80, sm_90a and sm_100 without a warning" 900 make -s -B cuda CUDA_ARCHS="80 90a 100"
    if [ -e /dev/nvidiactl ]; then step "test_gpt: on the GPU" 600 ./test_gpt_cuda; fi
else
    wanted cuda && echo "== cuda: no nvcc here, so the GPU build is left out"
fi
step "lint: warnings, vectorised loops, text" 300 bash scripts/lint.sh

echo "all of it took $((SECONDS - start)) s"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
