#!/usr/bin/env bash
# test_cli.sh - the program as its user meets it: rows of a name, what is expected and a command, run on the real program with a
# text, a model and broken files made here. Ends with "N passed, N failed"; exit code 1 if any row failed.
# usage: dev/test_cli.sh [program]       (default ./train_gpt; build/train_gpt_debug shows memory errors as well)
# V=1 shows the line of each refusal.
# An option in the --help of a command that no row has used with success is a failure too.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
program=$(realpath "${1:-./train_gpt}")
rows=$PWD/dev/rows.sh
[ -x "$program" ] || { echo "error: $program is not there; type make first" >&2; exit 1; }

work=$(mktemp -d)
background=""
finish() {
    [ -z "$background" ] || kill -KILL "$background" 2> /dev/null
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
ln -s "$program" "$work/train_gpt"
cd "$work" || exit 1
export OMP_NUM_THREADS=1 LC_ALL=C # a model as small as this gains nothing from a second thread
ulimit -c 0
# shellcheck source=dev/rows.sh
. "$rows"

# ---- rows

# The options that a command which went well was given, for the last row.
note_options() {
    local command=train word
    shift
    case ${1:-} in [a-z]*) command=$1 ;; esac
    for word in "$@"; do
        case $word in -[a-z]* | --*) echo "$command ${word%%=*}" >> used ;; esac
    done
}

last_loss() { sed -n -E 's/^s:[0-9]+ trl:([0-9.]+) .*/\1/p' "$1/main.log" | tail -n 1; }
val_loss() { grep -o -E 'val loss [0-9.]+' "$1" | tail -n 1; }
below() { awk "BEGIN { exit !($1 < $2) }" || { echo "$1 is not below $2"; return 1; }; }

# ---- what the rows work on

word16() { for n in "$@"; do printf '%b' "$(printf '\\x%02x\\x%02x' $((n & 255)) $((n >> 8)))"; done; }
word32() { for n in "$@"; do word16 $((n & 65535)) $((n >> 16)); done; }
zeros() { head -c "$1" /dev/zero; }

# Words drawn by a fixed generator, the first ones more often: 40 kB of something that can be learned.
make_text() {
    awk 'BEGIN {
        n = split("the of and to in is that it was for on are as with they be at one have this from by hot word what some out other" \
            " were all there when up use your how said an each she which do their time if will way about many then them write", w, " ")
        s = 1
        for (i = 0; i < 900; i++) {
            s = s * 16807 % 2147483647
            k = 6 + s % 9
            line = ""
            for (j = 0; j < k; j++) {
                s = s * 16807 % 2147483647
                line = line (j ? " " : "") w[1 + int((s / 2147483647) ^ 2 * n)]
            }
            print line "."
        }
    }'
}

# Two questions with a context of 3 tokens and endings of 2.
make_hellaswag() {
    word32 20240522 1 2 40
    zeros 1008
    for i in 0 1; do
        word16 65535 42 $i $i 4 3 65 66 67
        for e in 1 2 3 4; do word16 2 $((32 + e)) $((40 + e)); done
    done
}

make_files() {
    make_text > text.txt
    sed 's/.*/{"id": 1, "body": "&"}/' text.txt > text.jsonl
    printf 'first document\n\nsecond\n\nthird\n' > short.txt
    make_hellaswag > questions.bin
    : > empty.bin
    printf 'steps = 7\n# a comment\nlr = 1e-3\n' > good.config
    printf 'steps = 7\nlr 1e-3\n' > bad_line.config
    printf 'stepz = 7\n' > bad_name.config
    printf "vocab-size = 260\n" > vocab.config
    printf 'batch = many\n' > bad_value.config
}

data=(--train-data data_train_000000.bin --val-data data_val_000000.bin)
small=(--model "layers=2,heads=2,channels=32,context=32")
tiny=(./train_gpt "${data[@]}" --model "layers=1,heads=1,channels=8,context=16" --sample-every 0) # for what is refused anyway
# 7 sequences a step in micro-batches of 4 and 3; an epoch has no whole number of steps
plain=("${data[@]}" "${small[@]}" --batch 4 --total-batch 224 --lr 3e-3 --val-batches 2 --sample-every 0)

# ---- tokenize

rows_tokenize() {
    accept "tokenize: a text" 'training +[0-9]+ tokens' ./train_gpt tokenize text.txt --output data --vocab-size 320 --progress off \
        --threads 1
    accept "tokenize: many shards, a tokenizer that exists" 'in [0-9]{2} shards' \
        ./train_gpt tokenize --input text.txt --tokenizer data_tokenizer.bin --shard-tokens 1024 -o many
    holds "tokenize: shards hold the same tokens however many they are" cmp <(for f in data_train_*.bin; do tail -c +1025 "$f"; done) \
        <(for f in many_train_*.bin; do tail -c +1025 "$f"; done)
    accept "tokenize: JSON lines" '900 documents' ./train_gpt tokenize text.jsonl --format jsonl --json-field body --output lines \
        --vocab-size 300
    accept "tokenize: blank lines end documents, nothing held back" 'validation +0 tokens' \
        ./train_gpt tokenize short.txt --document-separator blank --val-fraction 0 --output short --vocab-size 257
    accept "tokenize: the same from a file of options" 'training' ./train_gpt tokenize short.txt --output short --config vocab.config
    refuse "tokenize: no text" 'no text to read' ./train_gpt tokenize --output x
    refuse "tokenize: no output" 'output is missing' ./train_gpt tokenize text.txt
    refuse "tokenize: a text that is not there" 'missing.txt.*No such file' ./train_gpt tokenize missing.txt --output x
    refuse "tokenize: an empty text" 'no text' ./train_gpt tokenize empty.bin --output x
    refuse "tokenize: JSON lines without the field" 'text.jsonl:1|text.jsonl.*field' ./train_gpt tokenize text.jsonl \
        --json-field nothing --output x
    refuse "tokenize: a tokenizer and a vocabulary size" 'exclude each other' \
        ./train_gpt tokenize text.txt --tokenizer data_tokenizer.bin --vocab-size 300 --output x
    refuse "tokenize: a foreign tokenizer" 'text.txt' ./train_gpt tokenize text.txt --tokenizer text.txt --output x
    refuse "tokenize: a folder that cannot be made" 'a file of that name' ./train_gpt tokenize text.txt --vocab-size 260 --output text.txt/x/y
    accept "tokenize: a folder that is made" 'training' ./train_gpt tokenize text.txt --vocab-size 260 --output made/x/data
}

# ---- the command line

rows_options() {
    refuse "options: none at all, and no data" 'no file matches .*tokenize' ./train_gpt
    refuse "options: an unknown option gets a hint" '--batsh.*--batch' "${tiny[@]}" --batsh 4
    refuse "options: an unknown letter" 'unknown option -Q' "${tiny[@]}" -Q 4
    refuse "options: a long name with one dash" 'two dashes: --batch' "${tiny[@]}" -batch 4
    refuse "options: a value stuck to its letter" 'write it apart: -b 4' "${tiny[@]}" -b4
    refuse "options: an unknown command" 'unknown command "trian".*train' ./train_gpt trian
    refuse "options: a value without an option" 'unexpected argument "4"' "${tiny[@]}" 4
    refuse "options: a missing value" 'a value is missing' "${tiny[@]}" --batch
    refuse "options: an option in place of a value" 'a value is missing' "${tiny[@]}" --batch --steps 3
    refuse "options: given twice" 'given twice' "${tiny[@]}" --batch 4 -b 4
    local row
    for row in "-b abc" "-b 0" "-b -1" "-b 4x" "-b 99999999999999999999" "--val-every -1" "--val-every 1.5" "--lr nan" "--lr -1" \
        "--lr 1e999" "--steps -2" "--max-time 5y" "--max-time -1s" "--shuffle maybe" "--schedule cosin" "--beta1 1" "--recompute 4" \
        "--seed -1"; do
        # shellcheck disable=SC2086  # an option and its value
        refuse "options: $row" "${row% *}: expected .*found \"${row#* }\"" "${tiny[@]}" $row
    done
    refuse "options: ZeRO has stages 0 to 3" '0 to 3' "${tiny[@]}" -z 4
    refuse "options: -h without a value" '--help' "${tiny[@]}" -h
    refuse "options: an option of another command" 'unknown option --prompt of train' "${tiny[@]}" --prompt hello
    refuse "options: a line without an equals sign" 'bad_line.config:2: expected "name = value"' "${tiny[@]}" --config bad_line.config
    refuse "options: an unknown name in a file" 'bad_name.config:1.*--steps|bad_name.config:1.*steps' "${tiny[@]}" --config bad_name.config
    refuse "options: a bad value in a file" 'bad_value.config:1: batch: expected' "${tiny[@]}" --config bad_value.config
    refuse "options: no such file of options" 'missing.config' "${tiny[@]}" --config missing.config
    refuse "options: a folder as file of options" "not a regular file" "${tiny[@]}" --config .
    refuse "options: resume without a folder" '--output' "${tiny[@]}" --resume on
    refuse "options: checkpoints without a folder" '--output' "${tiny[@]}" --checkpoint-every 5
    refuse "options: keep without checkpoints" '--keep 2' "${tiny[@]}" --output x --keep 2 --checkpoint-minutes 0
    refuse "options: major checkpoints that are never written" 'not a multiple' "${tiny[@]}" --output x --checkpoint-every 10 \
        --major-every 15
    refuse "options: a warm-up longer than the run" '--warmup 10 is longer' "${tiny[@]}" --steps 5 --warmup 10
    refuse "options: validation on no batches" '--val-batches 0' "${tiny[@]}" --val-batches 0
    refuse "options: a batch that is no multiple of the length" 'nearest are 96 and 112' "${tiny[@]}" --total-batch 100 --seq-len 16
    refuse "options: the same with the model's length" 'not a multiple' "${tiny[@]}" --total-batch 100
    refuse "options: a sequence beyond the context" '--seq-len 17 is beyond' "${tiny[@]}" --seq-len 17
    accept "options: --val-every 0 is never" 'step +2/2' "${tiny[@]}" --steps 2 --val-every 0
    holds "options: --val-every 0 measures nothing" test -z "$(val_loss out)"
    accept "options: llm.c's letters" 'step +4/4' ./train_gpt -i "data_train_*.bin" -j "data_val_*.bin" \
        -e "layers=1,heads=1,channels=8,context=16" -b 2 -t 8 -d 32 -x 4 -l 0.001 -u 1 -q 0 -c 0.1 -v 2 -m 1 -s 2 -g 4 -h 0 \
        -k linear -a 0 -r 1 -f 0 -ge 0 -w 1 -sl 5.0 -sg 5.0 \
        -o letters -n 2 -nk 1 -nm 4 -y 0 -z 0 -pn 1
    accept "options: a file of options, the command line wins" 'step +3/3 ' "${tiny[@]}" --config good.config --steps 3
    accept "options: the file alone" 'lr +\| 0?.?0*1e?-?0*3? ' "${tiny[@]}" --config good.config
    local command
    for command in "" train tokenize generate eval convert selfcheck plan; do
        # shellcheck disable=SC2086  # none or one word
        accept "options: ${command:-no command} --help" '^usage: ./train_gpt' ./train_gpt $command --help
        # shellcheck disable=SC2086
        accept "options: ${command:-no command} --version" '^train_gpt [0-9a-f]|^train_gpt unknown' ./train_gpt $command --version
    done
}

# ---- models and data

rows_files() {
    refuse "model: an unknown size" 'd6, d12' "${tiny[@]:0:5}" --model d13
    refuse "model: a part is missing" 'context is missing' "${tiny[@]:0:5}" --model layers=2,heads=2,channels=32
    refuse "model: an unknown part" 'unknown part width' "${tiny[@]:0:5}" --model layers=2,heads=2,width=32,context=8
    refuse "model: heads that do not divide the channels" 'do not divide' "${tiny[@]:0:5}" --model layers=2,heads=3,channels=32,context=8
    refuse "model: a size beyond any memory" 'memory|bytes|too large' "${tiny[@]:0:5}" \
        --model layers=4096,heads=65536,channels=16777216,context=1048576 --seq-len 16
    refuse "model: activations beyond any memory" 'memory|bytes|too large' "${tiny[@]:0:5}" --model gpt2:d84 --batch 65536 \
        --total-batch 1G --steps 1
    refuse "model: two vocabularies" 'vocab=99' "${tiny[@]:0:5}" --model layers=1,heads=1,channels=8,context=8,vocab=99
    refuse "model: a vocabulary too small for the data" 'vocabulary|token' "${tiny[@]}" --vocab-size 257 --steps 3
    head -c 5000 good/step_00000010/model_00000010.bin > cut.bin
    refuse "model: no such file" 'missing.bin' "${tiny[@]:0:5}" --model missing.bin
    refuse "model: an empty file" 'empty.bin' "${tiny[@]:0:5}" --model empty.bin
    refuse "model: a file that was cut" 'cut.bin.*(bytes|short)' "${tiny[@]:0:5}" --model cut.bin
    refuse "model: a file of something else" 'text.txt' "${tiny[@]:0:5}" --model text.txt
    refuse "model: a folder without checkpoints" 'nothing' ./train_gpt generate --model nothing --prompt x
    local command
    for command in generate "eval --val-data data_val_000000.bin"; do
        for file in missing.bin empty.bin cut.bin text.txt; do
            # shellcheck disable=SC2086  # the command and its options
            refuse "${command%% *}: the model $file" "$file" ./train_gpt $command --model $file
        done
    done
    refuse "generate: no model" '--model is missing' ./train_gpt generate --prompt x
    refuse "eval: no model" '--model is missing' ./train_gpt eval --val-data data_val_000000.bin
    refuse "eval: nothing to measure" 'nothing to measure' ./train_gpt eval --model good
    refuse "eval: a sequence beyond the context" '--seq-len 999 is beyond' ./train_gpt eval --model good --val-data data_val_000000.bin \
        --seq-len 999
    refuse "eval: questions that are something else" 'text.txt' ./train_gpt eval --model good --hellaswag-data text.txt
    refuse "convert: no file to write" '--to is missing' ./train_gpt convert --from good
    refuse "convert: onto itself" 'the same file' ./train_gpt convert --from cut.bin --to cut.bin
    refuse "convert: a file that was cut" 'cut.bin' ./train_gpt convert --from cut.bin --to x.safetensors
    refuse "convert: text named .safetensors" 'text.safetensors' ./train_gpt convert --from text.safetensors --to x.bin
    refuse "convert: a folder that is not there" 'nowhere/x.bin' ./train_gpt convert --from good --to nowhere/x.bin

    head -c 3001 data_train_000000.bin > cut_data.bin
    refuse "data: no such file" 'no file matches missing_\*.bin' "${tiny[@]:0:1}" --train-data "missing_*.bin"
    refuse "data: an empty file" 'empty.bin' "${tiny[@]:0:1}" --train-data empty.bin
    refuse "data: a file that was cut" 'cut_data.bin' "${tiny[@]:0:1}" --train-data cut_data.bin
    refuse "data: a file of something else" 'text.txt' "${tiny[@]:0:1}" --train-data text.txt
    refuse "data: a folder" 'folder|directory|nothing' "${tiny[@]:0:1}" --train-data nothing
    refuse "data: no validation file" 'missing.bin' ./train_gpt "${data[@]:0:2}" --val-data missing.bin --model d6
    refuse "data: fewer tokens than one sequence" 'tokens in 1 file' ./train_gpt --train-data short_train_000000.bin --model d6
    cp data_train_000000.bin flipped.bin
    cp data_train_000000.bin.crc32c flipped.bin.crc32c
    printf 'x' | dd of=flipped.bin bs=1 seek=3000 conv=notrunc status=none
    refuse "data: a byte that changed" 'flipped.bin' ./train_gpt --train-data flipped.bin "${small[@]}"
    refuse "data: no questions" 'missing.bin' "${tiny[@]}" --hellaswag on --hellaswag-data missing.bin --steps 1

    refuse "output: below a file" 'text.txt' "${tiny[@]}" --output text.txt/x
    refuse "output: where nothing can be made" '/proc' "${tiny[@]}" --output /proc/train_gpt
    if [ "$(id -u)" -ne 0 ]; then
        mkdir -m 555 locked
        refuse "output: a folder without write permission" 'Permission denied' "${tiny[@]}" --output locked
    fi
}

# ---- training and the options that change it

rows_train() {
    accept "train: writes a checkpoint" 'Writing checkpoint at step 10' ./train_gpt "${plain[@]}" --steps 10 --output good
    accept "train: again" 'step +10/10' ./train_gpt "${plain[@]}" --steps 10 --output again
    holds "train: two runs give the same bits" same_run good again 10
    ASAN_OPTIONS=detect_leaks=0 accept "train: two threads" 'step +10/10' ./train_gpt "${plain[@]}" --steps 10 --output two --threads 2
    holds "train: two threads give the bits of one" same_run good two 10
    accept "train: many shards" 'step +10/10' ./train_gpt --train-data "many_train_*.bin" --val-data "many_val_*.bin" "${plain[@]:4}" \
        --steps 10 --output shards
    holds "train: many shards give the bits of one" same_run good shards 10
    accept "train: everything is computed again" 'step +10/10' ./train_gpt "${plain[@]}" --steps 10 --output blocks --recompute 3
    holds "train: recomputing changes no bit" same_run good blocks 10
    accept "train: the options of a saved run" 'step +10/10' ./train_gpt --config good/step_00000010/config.txt --output repeat
    holds "train: they repeat it bit for bit" same_run good repeat 10
    accept "train: another seed" 'step +10/10' ./train_gpt "${plain[@]}" --steps 10 --output seed --seed 7
    holds "train: another seed is another run" test "$(losses good)" != "$(losses seed)"
    accept "train: in order" 'step +10/10' ./train_gpt "${plain[@]}" --steps 10 --output order --shuffle off
    holds "train: --shuffle off is another order" test "$(losses good)" != "$(losses order)"
    accept "train: own GEMM loops" 'matrix products: own' ./train_gpt "${plain[@]}" --steps 3 --gemm own
    accept "train: from the weights of a file" 'weights from good/step_00000010/model' ./train_gpt "${data[@]}" --model good --steps 2 \
        --sample-every 0 --val-every 0
    accept "train: one batch by heart" 'step +150/150' ./train_gpt "${plain[@]:0:10}" "${plain[@]:12}" --steps 150 --overfit on \
        --lr 1e-2 --output overfit
    holds "train: the loss of one batch falls below 0.5" below "$(last_loss overfit)" 0.5
    accept "train: one epoch by default" 'step +([0-9]+)/\1 ' ./train_gpt "${data[@]}" "${small[@]}" --batch 64 --val-every 0 \
        --sample-every 0
    refuse "train: a loss that is not finite names the first bad tensor" 'not finite; the first bad tensor is: [a-z]' \
        ./train_gpt "${plain[@]:0:10}" --lr 100 --clip 0 --warmup 0 --schedule constant --steps 300 --sample-every 0
    accept "train: every option of the optimizer" 'step +6/6' ./train_gpt "${plain[@]}" --steps 6 --optimizer adamw --schedule wsd \
        --warmup 2 --final-lr-frac 0.2 --weight-decay 0.05 --beta1 0.8 --beta2 0.9 --eps 1e-7 --clip 0.5 --skip-loss-z 50 \
        --skip-norm-z 50 --master-weights off --vocab-size 321 --seq-len 16 --tf32 off --gelu-fusion 2 --progress on \
        --tokenizer data_tokenizer.bin --checkpoint-minutes 0 --log-every 1
    accept "train: sgd, and rules around the update" 'step +6/6' ./train_gpt "${plain[@]}" --steps 6 --optimizer sgd --momentum 0.8 \
        --nesterov on --lr-embedding 0.5 --lr-vector 2 --update-clip 1 --trust-low 0.2 --trust-high 3 --trust-base 0.2 --skip-not-finite 0
    accept "train: adamw with short state and a growing batch" 'step +6/6' ./train_gpt "${plain[@]}" --steps 6 --state-format 8bit \
        --master-format split --cautious-decay on --base-batch 1K --beta2-half-life 64K --batch-warmup 3
    accept "train: ademamix" 'step +6/6' ./train_gpt "${plain[@]}" --steps 6 --optimizer ademamix --beta3 0.99 --alpha 4
    accept "train: lars" 'step +6/6' ./train_gpt "${plain[@]}" --steps 6 --optimizer lars --lars-trust 0.01
    accept "train: soap" 'step +6/6' ./train_gpt "${plain[@]}" --steps 6 --optimizer soap --soap-every 3
    accept "train: kappa says what it measures" '^kappa: qkvw +[2468] bits, kappa [0-9.]+, rounding variance' ./train_gpt "${plain[@]}" \
        --steps 6 --optimizer kappa --kappa-every 3 --kappa-bytes 0.7 --kappa-target 1.5 --kappa-spike 4 --output kappa
    holds "train: so does main.jsonl" grep -q '"step":5,"event":"kappa".*"tensor":"fcw","bits":[2468],"next_bits":[2468],"kappa":' kappa/main.jsonl
    holds "train: with both variances and spikes" grep -q '"variance_predicted":[0-9.e-]*,"variance_measured":[0-9.e-]*,"spikes":[0-9]*}' \
        kappa/main.jsonl
    accept "train: kappa as one wants it" 'step +6/6' ./train_gpt "${plain[@]}" --steps 6 --optimizer kappa --kappa-bits 2 \
        --kappa-residual off --kappa-equilibrate off --kappa-rounding stochastic --kappa-embedding 8bit
    refuse "train: another optimizer's option" '[-][-]kappa-bits is an option of --optimizer kappa' ./train_gpt "${plain[@]}" --kappa-bits 4
    refuse "train: a state of another format" 'was written with --state-format fp32; this run has 8bit' ./train_gpt "${plain[@]}" \
        --steps 12 --output good --resume on --state-format 8bit
    refuse "train: a state of another optimizer" 'was written by optimizer adamw; this run uses lion' ./train_gpt "${plain[@]}" \
        --steps 12 --output good --resume on --optimizer lion
    accept "train: a line every third step" 'step +9/9' ./train_gpt "${plain[@]}" --steps 9 --log-every 3
    holds "train: three lines in nine steps" test "$(grep -c '^step .*/9 ' out)" -eq 3
    accept "train: HellaSwag" '^HellaSwag: [012]/2' ./train_gpt "${plain[@]}" --steps 4 --val-every 2 --hellaswag on \
        --hellaswag-data questions.bin --output swag
    holds "train: its score is in main.log" grep -q -E '^s:4 eval:[01]\.[0-9]{4}$' swag/main.log
    accept "train: samples" '^generating:' ./train_gpt "${plain[@]:0:14}" --steps 6 --sample-every 3 --sample-tokens 12 --output samples
    holds "train: samples are in main.jsonl" grep -q '"step":6,"event":"sample".*"text":"' samples/main.jsonl
    accept "train: newest two checkpoints and every tenth" 'at step 30' \
        ./train_gpt "${plain[@]}" --steps 30 --checkpoint-every 5 --keep 2 --major-every 10 --output kept
    holds "train: those and no others" test "$(cd kept && echo step_*)" = "step_00000010 step_00000020 step_00000025 step_00000030"
    accept "train: checkpoints by the clock" 'at step 400' ./train_gpt "${plain[@]}" --steps 400 --checkpoint-minutes 0.003 --keep 0 \
        --output clock
    holds "train: more than one of them" test "$(find clock -name DONE | wc -l)" -gt 1
    accept "train: --max-time ends and saves" 'stopped by --max-time; to go on:' ./train_gpt "${plain[@]}" --steps 100000000 \
        --max-time 0.5s --output late
    holds "train: all lines of main.log are llm.c's or notes" \
        test -z "$(cat ./*/main.log | grep -v -E '^#|^s:[0-9]+ (tel:|eval:|trl:)[0-9.]+( |$)')"
    local string='"([^"\\]|\\["\\/bfnrt]|\\u[0-9a-f]{4})*"' value pair
    value="($string|-?[0-9]+(\\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null)"
    pair="$string:($value|\\{$string:$value(,$string:$value)*\\})"
    holds "train: all lines of main.jsonl are JSON objects" test -z "$(cat ./*/main.jsonl | grep -v -x -E "\\{$pair(,$pair)*\\}")"
}

# ---- resume, stops, crashes

rows_resume() {
    accept "resume: the run that nothing interrupts" 'step +300/300' ./train_gpt "${plain[@]}" --steps 300 --output whole
    local how
    for how in TERM INT USR1 "the file STOP"; do
        holds "resume: stopped by $how, the printed command gives the same bits" stop_and_go "$how"
    done
    note_options ./train_gpt --resume
    holds "resume: SIGKILL while saving, again and again" kill_and_go
    accept "resume: no checkpoint yet is a new run" 'no checkpoint yet: starting a new run' ./train_gpt "${plain[@]}" --steps 10 \
        --output fresh --resume on
    holds "resume: the new run has the bits of any other" same_run good fresh 10
    accept "resume: a run that is over" 'resuming from good' ./train_gpt "${plain[@]}" --steps 10 --output good --resume
    refuse "resume: another shape" 'another shape' ./train_gpt "${data[@]}" --model "layers=1,heads=1,channels=8,context=16" \
        --output good --resume on --steps 20
    refuse "resume: sequences of another length" 'was written with --seq-len 32' \
        ./train_gpt "${plain[@]}" --seq-len 16 --output good --resume on --steps 20
    refuse "resume: a new run does not mix with the checkpoints of another" 'checkpoints of an earlier run, up to step 10: .*--resume on' \
        ./train_gpt "${plain[@]}" --steps 5 --output good
    holds "resume: they are still there" test -e good/step_00000010/DONE
    cp -r good broken
    printf 'x' | dd of=broken/step_00000010/model_00000010.bin bs=1 seek=5000 conv=notrunc status=none
    refuse "resume: no whole checkpoint among them" 'none is whole' ./train_gpt "${plain[@]}" --steps 20 --output broken --resume on
    accept "resume: names with blanks and quotes" 'to go on:' ./train_gpt "${plain[@]}" --steps 100000000 --max-time 0.3 --output "a 'b' \$c"
    holds "resume: the command quotes them" eval "timeout 20 $(tail -n 1 out)"
    cp -r good longer
    accept "resume: more steps" 'step +12/12' ./train_gpt "${plain[@]}" --steps 12 --schedule constant --output longer --resume on
    cp -r kept damaged
    printf 'x' | dd of=damaged/step_00000030/state.safetensors bs=1 seek=9000 conv=notrunc status=none
    rm damaged/step_00000025/DONE
    accept "resume: damaged checkpoints are passed over" 'step_00000020: step 20' ./train_gpt "${plain[@]}" --steps 30 --output damaged \
        --resume on
    holds "resume: from an older one to the same bits" cmp kept/step_00000030/model_00000030.bin damaged/step_00000030/model_00000030.bin
    holds "stop: signals amid large matrix products" signals_amid_products
    holds "output: a folder that goes while the run is on" removed_folder
    holds "output: in use by another run" busy_folder
    holds "output: a pipe that closes early does not hang" broken_pipe
}

stop_and_go() { # what stops it
    local out="stop_${1##* }" command step
    rm -f "$out.txt"
    ./train_gpt "${plain[@]}" --steps 300 --output "$out" > "$out.txt" 2> "$out.err" < /dev/null &
    background=$!
    await "$out.txt" '^step +[3-9][0-9]/300' || return 1
    if [ "$1" = "the file STOP" ]; then touch "$out/STOP"; else kill -"$1" $background; fi
    wait $background || { echo "exit code $?: $(cat "$out.err")"; return 1; }
    grep -q -E "^stopped by (SIG)?$1; to go on:" "$out.txt" || { echo "no word of the stop: $(tail -n 3 "$out.txt")"; return 1; }
    command=$(tail -n 1 "$out.txt")
    step=$(sed -n -E 's/^Writing checkpoint at step ([0-9]+).*/\1/p' "$out.txt" | tail -n 1)
    if [ "${step:-0}" -lt 30 ] || [ "$step" -ge 300 ]; then echo "stopped at step ${step:-none}, expected the middle" && return 1; fi
    if ! eval "timeout -k 5 60 $command" > "$out.2.txt" 2> "$out.err" < /dev/null; then
        echo "\"$command\" failed: $(cat "$out.err")"
        return 1
    fi
    same_run whole "$out" 300
}

leftovers() { find "$1" -name '*tmp*' -o -name '*trash*'; }

# A checkpoint after every step and a kill at any moment: what stands under a final name is whole, and the run goes on from it.
kill_and_go() {
    local i every=(./train_gpt "${plain[@]}" --steps 30 --checkpoint-every 1 --keep 2 --output killed --resume on) kills=0
    RANDOM=1
    for ((i = 0; i < 9; i++)); do
        rm -f killed.txt
        "${every[@]}" > killed.txt 2> killed.err < /dev/null &
        background=$!
        [ $((i % 3)) -eq 2 ] || await killed.txt '^Writing checkpoint|total average iteration' || return 1 # else while it starts
        sleep "0.0$((RANDOM % 90 + 10))"
        kill -KILL $background 2> /dev/null && kills=$((kills + 1))
        wait $background 2> /dev/null
        background=""
        grep -q 'passed over' killed.err && { echo "a kill left a broken checkpoint: $(cat killed.err)"; return 1; }
    done
    [ $kills -gt 2 ] || { echo "only $kills kills"; return 1; }
    timeout -k 5 60 "${every[@]}" > killed.txt 2>&1 < /dev/null || { echo "the last run failed: $(tail -n 2 killed.txt)"; return 1; }
    [ -z "$(leftovers killed)" ] || { echo "left behind: $(leftovers killed)"; return 1; }
    same_run kept killed 30
}

# Signals that come amid large matrix products, whose library uses the stack pointer for data, disturb nothing.
signals_amid_products() {
    local i
    for i in 1 2 3 4 5 6; do
        rm -rf amid amid.txt
        ./train_gpt "${data[@]}" --model "layers=4,heads=4,channels=128,context=32" --batch 16 --steps 100000000 --val-every 0 --sample-every 0 \
            --output amid > amid.txt 2>&1 < /dev/null &
        background=$!
        await amid.txt '^step +[3-9]/' || return 1
        sleep 0.0$i
        kill -USR1 $background
        wait $background || { echo "exit code $?: $(tail -n 3 amid.txt)"; background=""; return 1; }
        background=""
    done
}

# The folder goes while the run is on: it is made and held again, with a notice.
removed_folder() {
    ./train_gpt "${plain[@]}" --steps 100000000 --output gone > gone.txt 2>&1 < /dev/null &
    background=$!
    await gone.txt '^step ' || return 1
    rm -rf gone
    kill -USR1 $background
    wait $background || { echo "exit code $?: $(tail -n 3 gone.txt)"; background=""; return 1; }
    background=""
    grep -q '^notice: gone is not the folder' gone.txt && ls gone/step_*/DONE gone/LOCK > /dev/null
}

busy_folder() {
    rm -f busy.txt
    ./train_gpt "${plain[@]}" --steps 100000000 --output busy > busy.txt 2>&1 < /dev/null &
    background=$!
    await busy.txt '^step ' || return 1
    run ./train_gpt "${plain[@]}" --steps 3 --output busy
    kill -KILL $background
    wait $background 2> /dev/null
    if [ $rc -ne 1 ] || ! grep -q -E "^error: the folder busy is in use by process $background" err; then saw && return 1; fi
    background=""
    run ./train_gpt "${plain[@]}" --steps 3 --output busy
    [ $rc -eq 0 ] || { saw; return 1; }
}

broken_pipe() {
    timeout -k 5 30 ./train_gpt "${plain[@]}" --steps 100000000 --output pipe 2> err < /dev/null | head -n 1 > /dev/null
    [ "${PIPESTATUS[0]}" -ne 124 ] && [ "${PIPESTATUS[0]}" -ne 137 ]
}

# ---- disks

# Runs a command in a file system of its own of so many KiB, at ./disk; it goes when the command ends. 77: this user may not.
on_small_disk() {
    local size=$1 map=()
    shift
    [ "$(id -u)" -eq 0 ] || map=(-r)
    mkdir -p disk
    unshare "${map[@]}" -m true 2> /dev/null || return 77
    # shellcheck disable=SC2016  # the inner shell expands
    unshare "${map[@]}" -m bash -c 'size=$1; shift; mount -t tmpfs -o size="${size}k" none disk && cd . && "$@"' disk "$size" "$@"
}

rows_disks() {
    local full='free some space'
    if on_small_disk 100 true 2> /dev/null; then
        refuse "disk: too small from the start" 'are needed for 3 more checkpoint.*are free' on_small_disk 1500 ./train_gpt "${plain[@]}" \
            --steps 3 --output disk/x
        holds "disk: full while saving, the checkpoints before are whole" full_disk
    else
        echo "      (file systems of our own are not allowed here: a limit on file sizes takes their place)"
        refuse "disk: full while saving" "$full" limited ./train_gpt "${plain[@]}" --steps 3 --output limited
    fi
    refuse "disk: a file that may not grow" 'cannot save the checkpoint of step 3' limited ./train_gpt "${plain[@]}" --steps 3 \
        --output limited
    holds "disk: nothing half written is left" test -z "$(leftovers limited)"
    holds "disk: results that cannot be printed are no success" unprintable
}

limited() (
    ulimit -f 200 # KiB, between the sizes of the model and of the state
    exec timeout -k 5 60 "$@"
)

unprintable() {
    ! ./train_gpt generate --model good --tokens 5 > /dev/full 2> /dev/null
}

# All checkpoints are kept on a disk that holds four; then there is space again.
full_disk() {
    # shellcheck disable=SC2016  # the inner shell expands
    on_small_disk 2000 bash -c '
        timeout -k 5 60 ./train_gpt "$@" --output disk/x > out 2> err < /dev/null
        [ $? -eq 1 ] || { echo "expected exit code 1: $(tail -n 1 out) $(cat err)"; exit 1; }
        [ "$(wc -l < err)" -eq 1 ] || { echo "expected one line: $(cat err)"; exit 1; }
        grep -q "^error: cannot save the checkpoint.*free some space" err || { echo "expected another error: $(cat err)"; exit 1; }
        [ -z "$(find disk/x -name "*tmp*")" ] || { echo "left behind: $(ls -A disk/x)"; exit 1; }
        mount -o remount,size=8000k none disk
        timeout -k 5 60 ./train_gpt "$@" --output disk/x --resume on > out 2> err < /dev/null || { echo "resume: $(cat err)"; exit 1; }
        ! grep -q "passed over" err && grep -q "^resuming from disk/x/step_0000000[1-9]" out || { echo "resume: $(cat err)"; exit 1; }
        cmp disk/x/step_00000010/model_00000010.bin good/step_00000010/model_00000010.bin
    ' inner "${plain[@]}" --steps 10 --checkpoint-every 1 --keep 0
}

# ---- the trained model

say() { ./train_gpt generate --model whole --threads 1 "$@" 2> err < /dev/null; }
alike() { [ -n "$1" ] && [ "$1" = "$2" ]; }

rows_use() {
    local logged
    accept "generate: begins with the prompt" '^the word is' ./train_gpt generate --model whole --prompt "the word is" --tokens 20 \
        --seed 3 --gemm auto --tf32 off
    accept "generate: every option" 'sample 3' ./train_gpt generate --model whole/step_00000300/model_00000300.bin \
        --tokenizer data_tokenizer.bin -p "the" \
        -g 10 --temperature 0.9 --top-k 20 --top-p 0.9 --samples 3 --stop-at-eot off --kv-cache on --threads 1
    holds "generate: the same seed, the same text" alike "$(say --seed 5)" "$(say --seed 5)"
    holds "generate: another seed, another text" test "$(say --seed 5)" != "$(say --seed 6)"
    holds "generate: with and without the cache the same text" alike "$(say --seed 5 --tokens 100)" \
        "$(say --seed 5 --tokens 100 --kv-cache off)"
    holds "generate: temperature 0 needs no seed" alike "$(say --temperature 0 --seed 5)" "$(say --temperature 0 --seed 6)"
    holds "generate: so does the likeliest token alone" alike "$(say --temperature 0)" "$(say --top-k 1 --seed 9)"
    holds "generate: and the smallest nucleus" alike "$(say --temperature 0)" "$(say --top-p 0.000001 --seed 9)"
    holds "generate: a prompt longer than the context" test -n "$(say --prompt "$(head -n 40 text.txt)" --tokens 3)"
    note_options ./train_gpt generate --kv-cache --top-p --top-k
    accept "eval: the loss of the run's end" '^val loss [0-9.]+ \(perplexity' ./train_gpt eval --model whole --val-data "data_val_*.bin" \
        --batch 4 --val-batches 2
    logged=$(sed -n -E 's/.*"step":300,"event":"val",.*"loss":([0-9.]+).*/\1/p' whole/main.jsonl)
    holds "eval: to the last digit" alike "$(val_loss out)" "$(printf 'val loss %.6f' "$logged")"
    accept "eval: all of it, shorter sequences, HellaSwag" '^HellaSwag: [012]/2' ./train_gpt eval --model whole \
        --val-data data_val_000000.bin \
        --hellaswag-data questions.bin --seq-len 16 --threads 1 --gemm own --tf32 on
    local model=whole/step_00000300/model_00000300.bin
    accept "convert: to bf16" 'written' ./train_gpt convert --from whole --to half.bin --format bf16 --threads 1
    accept "convert: and back to fp32" 'written' ./train_gpt convert --from half.bin --to back.bin --format fp32
    accept "convert: and to bf16 again" 'written' ./train_gpt convert --from back.bin --to half2.bin --format bf16
    holds "convert: bf16 comes back the same" cmp half.bin half2.bin
    accept "convert: to safetensors" 'written' ./train_gpt convert --from $model --to whole.safetensors
    accept "convert: and back" 'written' ./train_gpt convert --from whole.safetensors --to back.bin
    holds "convert: safetensors come back the same" cmp $model back.bin
    accept "eval: the bf16 model" '^val loss' ./train_gpt eval --model half.bin --val-data data_val_000000.bin
    accept "selfcheck: passes" 'passed|ok|agree' ./train_gpt selfcheck --seed 1 --threads 1 --gemm auto
    accept "train: what is for several ranks, on one" 'step 1 reached' "${tiny[@]}" --steps 1 --zero 2 --ranks 1 --rank 0 --ranks-per-node 8 \
        --init auto --master "" --rank-timeout 1m --check-replicas 5
    accept "plan: every option" '^\| ZeRO 3 x 64' ./train_gpt plan --model d12 --vocab-size 50257 --batch 4 --seq-len 512 --total-batch 256K \
        --recompute 2 --optimizer adamw --state-format 8bit --master-weights off --master-format fp32 --sample-every 0 \
        --update-clip 1 --trust-low 0.5 --trust-high 2 --trust-base 0.1 --threads 1 --gemm auto --zero 3 --ranks 64 --ranks-per-node 8 \
        --rank-timeout 1m --link-mbit 25000 --link-latency-us 20 --node-mbit 100000 --tflops 100 --efficiency 0.4
    accept "plan: kappa" 'optimizer state' ./train_gpt plan --model d12 --optimizer kappa --kappa-bytes 0.6 --kappa-equilibrate on \
        --kappa-embedding row --tflops 1
    accept "plan: kappa at one width" 'optimizer state' ./train_gpt plan --model d12 --optimizer kappa --kappa-bits 4 --tflops 1
    refuse "plan: options of the optimizer that do not go together" 'leave --trust-high and --update-clip out' ./train_gpt plan --model d12 \
        --optimizer lamb --update-clip 1
    accept "plan: what the machine has" 'peak of this machine' ./train_gpt plan --ranks 3
    local command
    for command in eval convert generate selfcheck plan; do
        refuse "$command: a file of options that is not there" 'missing.config' ./train_gpt $command --config missing.config
    done
    printf 'tokens = 5\n' > generate.config
    printf 'seed = 5\n' > selfcheck.config
    printf 'ranks = 5\n' > plan.config
    printf 'batch = 2\n' > eval.config
    printf 'format = bf16\n' > convert.config
    accept "generate: options from a file" '.' ./train_gpt generate --model whole --config generate.config
    accept "plan: options from a file" '^ranks: 5' ./train_gpt plan --tflops 1 --config plan.config
    accept "selfcheck: options from a file" '.' ./train_gpt selfcheck --config selfcheck.config
    accept "eval: options from a file" 'val loss' ./train_gpt eval --model whole --val-data data_val_000000.bin --config eval.config
    accept "convert: options from a file" 'written' ./train_gpt convert --from whole --to half3.bin --config convert.config
    holds "convert: they count" cmp half.bin half3.bin
}

# ---- every option of --help has been used with success, by its name or its letter

unused_options() {
    local command letter name
    for command in train tokenize generate eval convert selfcheck plan; do
        ./train_gpt $command --help | sed -n -E 's/^  (-([a-z]+),)? +--([a-z0-9-]+) .*/\2 \3/p' | while read -r letter name; do
            [ -n "$name" ] || { name=$letter letter=""; }
            grep -q -x -e "$command --$name" used || { [ -n "$letter" ] && grep -q -x -e "$command -$letter" used; } || echo \
                "$command --$name"
        done
    done
}

: > used
mkdir nothing
make_files
cp text.txt text.safetensors
rows_tokenize
rows_train
rows_options
rows_files
rows_resume
rows_disks
rows_use
unused=$(unused_options)
report "options: each one is used by some row" "${unused:+no row uses: ${unused//$'\n'/, }}"
rows_end
