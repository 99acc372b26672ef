#!/usr/bin/env bash
# plot_loss.sh - draws the training and validation losses of one or more runs as a PNG picture, from their main.log.
# usage: scripts/plot_loss.sh [-o picture.png] run-folder|main.log...      (picture: loss.png beside the first log)
set -euo pipefail

fail() {
    echo "plot_loss.sh: $*" >&2
    exit 1
}

picture=""
while getopts "o:" letter; do
    case $letter in
        o) picture=$OPTARG ;;
        *) fail "usage: plot_loss.sh [-o picture.png] run-folder|main.log..." ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || fail "name the output folder of a run, or its main.log"
command -v gnuplot > /dev/null || fail "gnuplot is missing; on Debian: apt-get install gnuplot-nox"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The lines of one kind (trl: training, tel: validation) as "step loss"; a loss that is not finite is left out.
losses() {
    awk -v kind="$2:" '$1 ~ /^s:[0-9]+$/ && index($2, kind) == 1 {
        loss = substr($2, length(kind) + 1)
        if (loss ~ /^[0-9.]+$/) print substr($1, 3), loss
    }' "$1"
}

# Text for gnuplot's single quotes, and without the marks of its enhanced text.
quoted() {
    printf "'%s'" "$(printf '%s' "$1" | sed "s/'/''/g")"
}

# A pale and a strong colour for each run: training, validation.
pale=("#9ecae1" "#fdae6b" "#a1d99b" "#bcbddc" "#bdbdbd" "#fa9fb5")
strong=("#08519c" "#d94801" "#006d2c" "#54278f" "#252525" "#ae017e")

plots=()
number=0
for run in "$@"; do
    log=$run
    [ -d "$run" ] && log=$run/main.log
    [ -f "$log" ] || fail "there is no $log"
    [ -n "$picture" ] || picture=$(dirname "$log")/loss.png
    colour=$((number % ${#pale[@]}))
    number=$((number + 1))
    name=""
    [ $# -gt 1 ] && name="$(basename "$(dirname "$(realpath "$log")")"): "
    losses "$log" trl > "$work/train$number"
    losses "$log" tel > "$work/val$number"
    [ -s "$work/train$number" ] || [ -s "$work/val$number" ] || fail "$log holds no losses"
    if [ -s "$work/train$number" ]; then
        plots+=("'$work/train$number' using 1:2 with lines linewidth 1 linecolor \"${pale[colour]}\" title $(quoted "${name}training")")
    fi
    if [ -s "$work/val$number" ]; then
        style="with linespoints linewidth 2 pointtype 7 pointsize 0.5 linecolor \"${strong[colour]}\""
        plots+=("'$work/val$number' using 1:2 $style title $(quoted "${name}validation")")
    fi
done

list=$(printf ', %s' "${plots[@]}")
gnuplot << END
set terminal pngcairo noenhanced size 1000,600 font "sans,11"
set output $(quoted "$picture")
set xlabel "step"
set ylabel "loss"
set grid linecolor "#dddddd"
set key top right
plot ${list:2}
END
echo "$picture"
