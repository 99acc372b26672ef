#!/usr/bin/env bash
# Step time and peak memory on the CPU beside PyTorch and llm.c, in turn, so that a drifting machine meets all of them: prints
# medians and ratios. Rounds of 10 steps each.
#     bash scripts/bench_cpu.sh [rounds]
# PYTHON: an interpreter with torch (unset: without PyTorch). LLMC: a folder with llm.c built (`make train_gpt2`), its
# gpt2_124M.bin and dev/data/tinyshakespeare shards (unset: without llm.c; it runs its one shape, B=4 T=64).
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3}
threads=$(nproc)
export OMP_NUM_THREADS=$threads
make build/bench > /dev/null
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

ratio() { awk -v a="$1" -v b="$2" 'BEGIN { print a / b }'; }
median() { sort -g | awk '{ v[NR] = $1 } END { print (NR % 2) ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

ours() { # model batch length -> "ms MiB floor"
  build/bench "$1" "$2" "$3" 10 | awk '/^step:/ { ms = $3; for (i = 1; i <= NF; i++) if ($i == "memory") mib = $(i + 1) }
    /floor \(/ { for (i = 1; i <= NF; i++) if ($i == "traffic)") floor = $(i + 1) } END { print ms, mib, floor }'
}
peer() { # layers heads channels batch length -> "ms MiB"
  env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE "$PYTHON" dev/torch_gpt.py --layers "$1" --heads "$2" --channels "$3" --batch "$4" \
    --seq-len "$5" --steps 10 --threads "$threads" | sed -E 's/.*"ms_median": ([0-9.]+).*"peak_rss_mib": ([0-9]+).*/\1 \2/'
}
llmc() { # -> ms
  (cd "$LLMC" && { stdbuf -oL ./train_gpt2 2> /dev/null || true; } |
    sed -n 's/^step [0-9]*: train loss .*took \([0-9.]*\) ms.*/\1/p' | head -n 5 | tail -n 4) | median
}

shape() { # name model layers heads channels batch length
  local name=$1 model=$2
  shift 2
  rm -f "$scratch"/*
  for _ in $(seq "$rounds"); do
    ours "$model" "$4" "$5" >> "$scratch/ours"
    [ -z "${PYTHON:-}" ] || peer "$@" >> "$scratch/torch"
    [ -z "${LLMC:-}" ] || [ "$name" != "gpt2:d12 B=4 T=64" ] || llmc >> "$scratch/llmc"
  done
  local ms mib floor tms tmib lms
  ms=$(awk '{ print $1 }' "$scratch/ours" | median)
  mib=$(awk '{ print $2 }' "$scratch/ours" | median)
  floor=$(awk '{ print $3 }' "$scratch/ours" | median)
  printf '| %s | %.0f ms, %.0f MiB | %.0f ms (%.2fx)' "$name" "$ms" "$mib" "$floor" "$(ratio "$ms" "$floor")"
  if [ -s "$scratch/torch" ]; then
    tms=$(awk '{ print $1 }' "$scratch/torch" | median); tmib=$(awk '{ print $2 }' "$scratch/torch" | median)
    printf ' | %.0f ms, %.0f MiB | **%.2f** time, **%.2f** memory' "$tms" "$tmib" "$(ratio "$ms" "$tms")" "$(ratio "$mib" "$tmib")"
  else
    printf ' | - | -'
  fi
  if [ -s "$scratch/llmc" ]; then
    lms=$(median < "$scratch/llmc")
    printf ' | %.0f ms | **%.3f** |\n' "$lms" "$(ratio "$ms" "$lms")"
  else
    printf ' | - | - |\n'
  fi
}

printf '%s, %s threads, load %s\n' "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$threads" "$(cut -d' ' -f1 /proc/loadavg)"
echo '| shape | train_gpt | floor (ours / floor) | PyTorch | ours / PyTorch | llm.c | ours / llm.c |'
echo '|---|---|---|---|---|---|---|'
shape "gpt2:d12 B=4 T=64" gpt2:d12 12 12 768 4 64
shape "6 layers, 384 channels, V=50304, B=8 T=256" layers=6,heads=6,channels=384,context=1024,vocab=50304 6 6 384 8 256
shape "gpt2:d12 B=2 T=1024" gpt2:d12 12 12 768 2 1024
