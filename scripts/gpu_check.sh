#!/usr/bin/env bash
# gpu_check.sh - one check of the GPU build on a machine with a GPU, in under 5 minutes: builds, runs the tests, trains a small model
# on text made into tokens here, and prints a summary. The tests run NCCL as a job of one rank; where there are several GPUs, the same
# training runs on all of them (at most 8), one rank each, and must come to the same loss.
# Exit code 0: all passed. Where there is no GPU it says so and exits with 1.
# usage: scripts/gpu_check.sh [TEXT_FILE]
#   STEPS=200 MODEL=layers=4,... scripts/gpu_check.sh     another run; LIMIT: seconds for the tests and for the training, each
set -euo pipefail
cd "$(dirname "$0")/.."

steps=${STEPS:-100}
model=${MODEL:-layers=4,heads=8,channels=512,context=512}
limit=${LIMIT:-120}

if ! command -v nvidia-smi >/dev/null ||
  ! device=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null | sed -n 1p) ||
    [ -z "$device" ]; then
    echo "gpu_check: no GPU here (nvidia-smi finds none): nothing was checked" >&2
    exit 1
fi
if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "gpu_check: there is a GPU ($device) but no nvcc: install the CUDA toolkit" >&2
    exit 1
fi

export PATH=$PATH:/usr/local/cuda/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
started=$SECONDS

# A text of up to 4 MB: what was given, or files that every checkout and most systems have.
make_text() {
    if [ $# -gt 0 ]; then
        cat -- "$1"
    else
        head -c 4000000 < <(find README.md doc dataloader kernels trainer dev /usr/share/common-licenses /usr/share/perl5 /usr/share/perl \
            -type f \( -name '*.md' -o -name '*.h' -o -name '*.cuh' -o -name '*.pm' -o -path '*licenses*' \) -exec cat -- {} + 2>/dev/null)
    fi
}

run() { # name, log file, command...
    local name=$1 log=$2
    shift 2
    echo "+ $*"
    if ! timeout "$limit" "$@" >"$log" 2>&1; then
        tail -n 30 "$log"
        echo "gpu_check: $name failed (the last lines are above)" >&2
        exit 1
    fi
}

# this machine's kind of GPU alone: a third of the compile time
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sed -n '1s/[^0-9]//gp')
echo "+ make CUDA_ARCHS=$arch cuda train_gpt"
build_started=$SECONDS
make -j"$(nproc)" CUDA_ARCHS="$arch" cuda train_gpt >"$work/build.log" 2>&1 || {
    tail -n 30 "$work/build.log"
    echo "gpu_check: the build failed" >&2
    exit 1
}
build_seconds=$((SECONDS - build_started))

test_started=$SECONDS
run "test_gpt_cuda" "$work/test.log" ./test_gpt_cuda
test_seconds=$((SECONDS - test_started))

make_text "$@" >"$work/text.txt"
run "tokenize" "$work/tokenize.log" ./train_gpt tokenize --vocab-size 2048 --output "$work/text" "$work/text.txt"

training=(train --train-data "$work/text_train*.bin" --val-data "$work/text_val*.bin" --model "$model" --batch 16 --steps "$steps"
    --val-every "$steps" --sample-every 0 --progress off)
run "train_gpt_cuda" "$work/train.log" ./train_gpt_cuda "${training[@]}" --output "$work/run"

# One rank on each GPU, started as torchrun would start them; every one ends by itself, at the time limit at the latest.
train_ranks() { # number of ranks
    local rank bad=0 pids=()
    for ((rank = 0; rank < $1; rank++)); do
        RANK=$rank WORLD_SIZE=$1 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) \
            timeout "$limit" ./train_gpt_cuda "${training[@]}" --output "$work/ranks" >"$work/rank$rank.log" 2>&1 &
        pids+=($!)
    done
    for rank in "${!pids[@]}"; do wait "${pids[$rank]}" || { [ $bad -eq 1 ] || tail -n 15 "$work/rank$rank.log"; bad=1; }; done
    return $bad
}

gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
[ -z "${CUDA_VISIBLE_DEVICES:-}" ] || gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
ranks=$((gpus < 8 ? gpus : 8))
if [ "$ranks" -gt 1 ]; then
    echo "+ RANK=0..$((ranks - 1)) WORLD_SIZE=$ranks ./train_gpt_cuda ${training[*]}"
    train_ranks "$ranks" || {
        echo "gpu_check: training on $ranks GPUs failed (the last lines of a rank are above)" >&2
        exit 1
    }
fi

# main.log has lines "s:STEP trl:LOSS ... ms:MILLISECONDS tps:TOKENS_A_SECOND ..." and "s:STEP tel:VALIDATION_LOSS"
field() { grep -o "$1:[^ ]*" "$work/${2:-run}/main.log" | cut -d: -f2; }
first=$(field trl | sed -n 1p)
last=$(field trl | tail -n 1)

echo
echo "device      $device"
echo "build       $build_seconds s"
echo "tests       $(tail -n 1 "$work/test.log") in $test_seconds s, of NCCL $(grep -c '^ok .* nccl:' "$work/test.log") rows"
echo "model       $model, $steps steps"
echo "loss        $first -> $last, validation $(field tel | tail -n 1)"
echo "speed       $(field tps | tail -n 1) tokens a second, last step $(field ms | tail -n 1) ms"
if [ "$ranks" -gt 1 ]; then
    together=$(field trl ranks | tail -n 1)
    echo "$ranks GPUs      loss $together, $(field tps ranks | tail -n 1) tokens a second, last step $(field ms ranks | tail -n 1) ms"
else
    together=$last
    echo "several GPUs: not checked, there is one here"
fi
echo "all         $((SECONDS - started)) s"
if ! awk -v a="$first" -v b="$last" 'BEGIN { exit !(b > 0 && b < 0.9 * a) }'; then
    echo "gpu_check: the loss did not fall by a tenth in $steps steps: training on this GPU does not work" >&2
    exit 1
fi
if ! awk -v a="$last" -v b="$together" 'BEGIN { exit !(b > 0.99 * a && b < 1.01 * a) }'; then
    echo "gpu_check: $ranks GPUs came to a loss of $together, one to $last; expected the same within 1 %" >&2
    exit 1
fi
