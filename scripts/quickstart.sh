#!/usr/bin/env bash
# From nothing to a sample: installs what is missing, builds, takes real English text (the King James Bible from Debian's package
# bible-kjv, or any file given), trains a tokenizer on it and a small GPT for about two minutes, and shows what it learned.
#     bash scripts/quickstart.sh [text file]            results go to ./quickstart
# STEPS=200 shortens the training (default 700).
set -euo pipefail
cd "$(dirname "$0")/.."
text=${1:-}
out=quickstart
steps=${STEPS:-700}

say() { printf '\n== %s\n' "$*"; }

packages="gcc make libpcre2-dev libdnnl-dev gnuplot-nox"
[ -n "$text" ] || packages="$packages bible-kjv"
say "1/6 packages: $packages"
# shellcheck disable=SC2086  # one word per package
bash scripts/setup.sh $packages

say "2/6 build"
make train_gpt

say "3/6 text"
mkdir -p $out
if [ -z "$text" ]; then
  text=$out/bible.txt
  PATH=$PATH:/usr/games bible -f "gen1:1-rev22:21" | sed 's/^[^ ]* //' > $text
fi
[ -s "$text" ] || { echo "error: $text is empty or not there; give a text file" >&2; exit 1; }
printf '%s: %s bytes\n' "$text" "$(wc -c < "$text")"

say "4/6 tokenizer and token shards"
./train_gpt tokenize "$text" --output $out/data --vocab-size 1024

say "5/6 training: 4 layers, 128 channels, $steps steps of 4,096 tokens"
rm -rf $out/run # of an earlier quickstart: a new run does not mix with old checkpoints
./train_gpt --train-data "$out/data_train_*.bin" --val-data "$out/data_val_*.bin" --model layers=4,heads=4,channels=128,context=128 \
  --batch 32 --steps "$steps" --lr 3e-3 --output $out/run --val-every 100 --sample-every 0 --log-every 50 --progress on --checkpoint-every 250

say "6/6 what it learned"
./train_gpt generate --model $out/run --prompt "And the LORD said" --tokens 160 --temperature 0.8 --top-p 0.95
bash scripts/plot_loss.sh -o $out/loss.png $out/run

cat <<EOF

The run is in $out/run (main.log, main.jsonl, checkpoints), its loss curve in $out/loss.png. To try next:
  ./train_gpt generate --model $out/run --prompt "In the beginning" --temperature 0.7 --seed 1
  ./train_gpt eval --model $out/run --val-data "$out/data_val_*.bin" --batch 32
  ./train_gpt --train-data "$out/data_train_*.bin" --val-data "$out/data_val_*.bin" \\
      --model layers=6,heads=6,channels=192,context=256 --steps 2000 --output $out/larger
  ./train_gpt --help
EOF
