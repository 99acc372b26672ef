#!/usr/bin/env bash
# compare_report.sh - tables (on stdout, as Markdown) and pictures from the results of scripts/compare_optimizers.sh: for each length of
# runs NAME_curves_STEPS.png (validation loss of each arm's best setting) and NAME_rates_STEPS.png (loss over learning rate).
# usage: scripts/compare_report.sh RESULTS.jsonl [FOLDER_OF_PICTURES]    ALL=1 lists every setting, too; DATA_ID: that of the shards
#                                                                        (otherwise that of the last line)
# Step times are those of scripts/compare_times.sh where RESULTS.times is there: a sweep's own are of a machine that does other things, too.
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

# One line for each data file PREFIX_ARM, the best 12 of them by their loss at the end.
draw() { # picture, prefix of data files, steps, label of x, more settings
    local file arm plots=() left=()
    while read -r arm; do
        file=$2_$arm
        if [ ! -s "$file" ]; then continue; fi
        if [ ${#plots[@]} -ge 12 ]; then left+=("$arm") && continue; fi
        plots+=("'$file' using 1:2 with linespoints linewidth 2 pointtype 7 pointsize 0.5 title '$arm'")
    done < "$work/order_$3"
    [ ${#plots[@]} -gt 0 ] || return 0
    [ ${#left[@]} -eq 0 ] || echo "notice: $1 shows the best 12; left out: ${left[*]}" >&2
    file=$(printf ', %s' "${plots[@]}")
    gnuplot << END || fail "gnuplot could not draw $1"
set terminal pngcairo noenhanced size 1000,600 font "sans,11"
set output '$1'
set xlabel "$4"
set ylabel "validation loss"
set grid linecolor "#dddddd"
set key top right
$5
plot ${file:2}
END
    echo "$1" >&2
}

mkdir -p "$folder"
name=$folder/$(basename "$results" .jsonl)
for order in "$work"/order_*; do
    [ -s "$order" ] || continue
    steps=${order##*_}
    draw "${name}_curves_$steps.png" "$work/curve_$steps" "$steps" "tokens, millions" ""
    draw "${name}_rates_$steps.png" "$work/rate_$steps" "$steps" "learning rate over the arm's best one, log2" ""
done
