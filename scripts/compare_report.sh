#!/usr/bin/env bash
# compare_report.sh - tables (on stdout, as Markdown) and pictures from the results of scripts/compare_optimizers.sh: for each length of
# runs NAME_curves_STEPS.png (validation loss of each arm's best setting) and NAME_rates_STEPS.png (loss over learning rate).
# usage: scripts/compare_report.sh RESULTS.jsonl [FOLDER_OF_PICTURES]    ALL=1 lists every setting, too; DATA_ID: that of the shards
#                                                                        (otherwise that of the last line)
# Step times are those of scripts/compare_times.sh where RESULTS.times is there, else medians of the sweep, which mean something where
# nothing else ran.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C

fail() {
    echo "error: $*" >&2
    exit 1
}

[ $# -ge 1 ] || fail "usage: scripts/compare_report.sh RESULTS.jsonl [FOLDER_OF_PICTURES]"
results=$1 folder=${2:-}
[ -s "$results" ] || fail "$results: no results yet"
data=${DATA_ID:-$(tail -n 1 "$results" | sed -E 's/.*"data":"([^"]*)".*/\1/')}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

times=${results%.jsonl}.times
[ -s "$times" ] || times=""
awk -v data="$data" -v times="$times" -v folder="$work" -v every="${ALL:-0}" -f scripts/compare_report.awk "$results"

[ -n "$folder" ] || exit 0
if ! command -v gnuplot > /dev/null; then
    echo "notice: no pictures, since gnuplot is missing; on Debian: apt-get install gnuplot-nox" >&2
    exit 0
fi

# One line for each data file PREFIX_ARM, at most 12 of them.
draw() { # picture, prefix of data files, label of x, more settings
    local file plots=() number=0
    for file in "$2"_*; do
        if [ ! -s "$file" ] || [ $number -ge 12 ]; then continue; fi
        number=$((number + 1))
        plots+=("'$file' using 1:2 with linespoints linewidth 2 pointtype 7 pointsize 0.5 title '${file#"$2"_}'")
    done
    [ $number -gt 0 ] || return 0
    file=$(printf ', %s' "${plots[@]}")
    gnuplot << END || fail "gnuplot could not draw $1"
set terminal pngcairo noenhanced size 1000,600 font "sans,11"
set output '$1'
set xlabel "$3"
set ylabel "validation loss"
set grid linecolor "#dddddd"
set key top right
$4
plot ${file:2}
END
    echo "$1" >&2
}

mkdir -p "$folder"
name=$folder/$(basename "$results" .jsonl)
sed -E 's/.*"steps":([0-9]+).*/\1/' "$results" | sort -nu | while read -r steps; do
    draw "${name}_curves_$steps.png" "$work/curve_$steps" "tokens, millions" ""
    draw "${name}_rates_$steps.png" "$work/rate_$steps" "learning rate over the arm's best one, log2" ""
done
