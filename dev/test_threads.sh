#!/usr/bin/env bash
# test_threads.sh - two threads under clang's thread sanitizer: training (own GEMM loops: a library brings a second OpenMP runtime),
# sampling, evaluation, tokenizing. A report of a race is a failure. Ends with "N passed, N failed"; exit code 1 if any failed.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
export TSAN_OPTIONS="ignore_noninstrumented_modules=1"

row() { # name command...
    local name=$1 rc=0
    shift
    timeout 200 "$@" > "$work/log" 2>&1 || rc=$?
    if [ $rc -eq 0 ] && ! grep -q "ThreadSanitizer" "$work/log"; then
        passed=$((passed + 1))
        echo "ok    $name"
    else
        failed=$((failed + 1))
        echo "FAIL  $name (exit code $rc)"
        grep -A 12 "ThreadSanitizer" "$work/log" | head -n 40 || tail -n 5 "$work/log"
    fi
}

mpi=() mpi_libs=()
if command -v mpicc > /dev/null && command -v mpirun > /dev/null; then
    read -r -a mpi <<< "-DUSE_MPI -DOMPI_SKIP_MPICXX $(mpicc -show | tr ' ' '\n' | grep '^-I' | tr '\n' ' ')"
    read -r -a mpi_libs <<< "$(mpicc -show | tr ' ' '\n' | grep -E '^-(L|l|Wl)' | tr '\n' ' ')"
fi
clang -x c -std=gnu11 -D_GNU_SOURCE -O1 -g -march=native -fno-math-errno -fsanitize=thread -fopenmp -Wno-unknown-pragmas -Wno-pass-failed \
    "${mpi[@]}" train_gpt.cu -o "$work/train_gpt" -x none "${mpi_libs[@]}" -lpcre2-8 -lm -ldl
for _ in $(seq 40); do cat README.md doc/*.md; done > "$work/text.txt"
row "threads: tokenizing" "$work/train_gpt" tokenize "$work/text.txt" --output "$work/data" --vocab-size 300 --threads 2
row "threads: training, validation, samples, checkpoints" "$work/train_gpt" --train-data "$work/data_train_*.bin" --val-data "$work/data_val_*.bin" \
    --model layers=2,heads=2,channels=48,context=32 --batch 4 --steps 4 --gemm own --threads 2 --val-every 2 --sample-every 2 --sample-tokens 10 \
    --val-batches 2 --checkpoint-every 2 --output "$work/run"
row "threads: recomputing whole blocks" "$work/train_gpt" --train-data "$work/data_train_*.bin" --val-every 0 --sample-every 0 \
    --model layers=2,heads=3,channels=48,context=64 --batch 3 --total-batch 448 --recompute 3 --steps 2 --gemm own --threads 2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
for zero in 0 1 3; do # the communication thread beside the computing one
    [ ${#mpi[@]} -gt 0 ] || break
    row "threads: two ranks at ZeRO $zero" mpirun -np 2 "$work/train_gpt" --train-data "$work/data_train_*.bin" --val-data "$work/data_val_*.bin" \
        --model layers=2,heads=2,channels=48,context=32 --batch 2 --total-batch 224 --steps 3 --gemm own --threads 1 --val-every 2 --val-batches 2 \
        --sample-every 2 --checkpoint-every 2 --output "$work/ranks$zero" --zero $zero
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
