#!/usr/bin/env bash
# lint.sh - what can be said of the source without running it: warnings of gcc, clang and g++ are errors, the hot loops are vectorised,
# scripts pass shellcheck, no line is too long, no path of one machine is written down.
# Ends with "N passed, N failed"; exit code 1 if any failed. usage: scripts/lint.sh
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
export LC_ALL=C
passed=0 failed=0

report() { # name, what went wrong (empty: nothing)
    if [ -z "$2" ]; then passed=$((passed + 1)) && echo "ok    $1"; else failed=$((failed + 1)) && echo "FAIL  $1"; fi
    [ -z "$2" ] || head -n 60 <<< "$2" | sed 's/^/    /'
}

skip() { echo "      ($1: left out)"; }

# The files of the project; outside a git clone, all that are here.
files() { git ls-files -- "$@" 2> /dev/null | grep . || find . -type f -not -path './build/*' | sed 's|^\./||'; }

# ---- compilers. `make flags` prints those of the Makefile, quoted for a shell.

compile() { # compiler, more options..., file
    local compiler=$1 flags
    shift
    flags=$(make -s flags CC="$compiler" ${OPENMP+OPENMP="$OPENMP"})
    eval "$compiler $flags -Werror -o /dev/null $*" 2>&1
}

for options in "" "-DFLOATX_BF16"; do
    report "gcc: test_gpt.cu $options" "$(compile gcc "$options" -fsyntax-only test_gpt.cu)"
done
for file in dev/*.cu dev/*.c; do
    report "gcc: $file" "$(compile gcc -fsyntax-only "$file")"
done
if command -v clang > /dev/null; then
    if ! echo '#include <omp.h>' | clang -fopenmp -fsyntax-only -x c - 2> /dev/null; then OPENMP="" && skip "clang without libomp: OpenMP"; fi
    for file in train_gpt.cu test_gpt.cu; do
        report "clang: $file" "$(compile clang -fsyntax-only $file)"
    done
    unset OPENMP
else
    skip "clang is not here"
fi
if command -v g++ > /dev/null; then
    strict="-x c++ -std=c++20 -D_GNU_SOURCE -fsyntax-only -Wall -Wextra -Werror -fopenmp"
    strict+=" $(make -s flags | tr ' ' '\n' | grep -E '^-(DUSE_MPI|DOMPI_SKIP_MPICXX|I)' | tr '\n' ' ')"
    # shellcheck disable=SC2086  # several words
    report "g++: test_gpt.cu" "$(g++ $strict test_gpt.cu 2>&1)"
    # shellcheck disable=SC2086
    report "g++: test_gpt.cu, the CUDA branch" "$(g++ $strict -DCUDA_ON_CPU -DFLOATX_BF16 test_gpt.cu 2>&1)"
else
    skip "g++ is not here"
fi

# ---- loops over a row (TEAM_FOR and its kind) that gcc does not vectorise are a regression: a plain sum or a pointer that may alias
# is enough to lose five times the speed without an error. Exempt: fills with zero, which become calls of memset, and the tiles of
# attention.cuh, which are for the GPU (the CPU has attention_cpu.h). A loop that is written plainly is not seen so; therefore each
# file also has a least number of vectorised loops, to be raised or lowered with the loops it has (gcc 12, x86-64-v3).

vectorised() { # more options; writes file:line of each vectorised loop
    local arch=""
    [ "$(uname -m)" != x86_64 ] || arch="-march=x86-64-v3"
    rm -f "$work/vec" # gcc appends
    compile gcc "$arch" "$@" -fopt-info-vec-optimized="$work/vec" -S train_gpt.cu
    grep 'loop vectorized' "$work/vec" | awk -F: '{ print $1 ":" $2 }' | sort -u > "$work/vectorised"
}

scalar_loops() {
    grep -n -E '\bTEAM_[A-Z_]*FOR\(' kernels/*.cuh optim/*.cuh |
        grep -v -E '#define|= 0\.0f; *}|^kernels/(attention|team|vector).cuh|^[^:]*:[0-9]+://' |
        while IFS=: read -r file line rest; do
            grep -q -x "$file:$line" "$work/vectorised" || echo "$file:$line: not vectorised: ${rest#"${rest%%[! ]*}"}"
        done
    # gcc calls a sum that it must keep in order vectorised, too, and it is slow
    grep -n -E '\bTEAM_(VEC_)?FOR\([^{]*\{ *[a-z_]+ \+= ' kernels/*.cuh optim/*.cuh | sed 's/$/ (a sum: TEAM_SUM_FOR)/'
}

for options in "" "-DFLOATX_BF16"; do
    report "gcc: train_gpt.cu $options, optimised" "$(vectorised $options)"
    report "vectorised: every loop over a row $options" "$(scalar_loops)"
done
vectorised
while read -r file least; do
    found=$(grep -c "^$file:" "$work/vectorised")
    wrong=""
    [ "$found" -ge "$least" ] || wrong="gcc vectorised $found loops of $file, expected $least"
    report "vectorised: $file, at least $least loops ($found)" "$wrong"
done << 'LEAST'
kernels/attention.cuh 14
kernels/attention_cpu.h 12
kernels/classifier.cuh 4
kernels/embedding.cuh 5
kernels/gelu.cuh 3
kernels/gemm_cpu.h 4
kernels/init.cuh 2
kernels/kv_cache.cuh 1
kernels/layernorm.cuh 10
kernels/matmul.cuh 1
kernels/reduce.cuh 7
optim/adafactor.cuh 7
optim/apply.cuh 5
optim/elementwise.cuh 2
optim/kappa.cuh 24
optim/kappa_codec.cuh 5
optim/kappa_repack.cuh 5
optim/newton_schulz.cuh 3
optim/normuon.cuh 5
LEAST

# ---- text

if command -v shellcheck > /dev/null; then
    # shellcheck disable=SC2046  # one word per file
    report "shellcheck" "$(shellcheck $(files 'scripts/*.sh' 'dev/*.sh' .ci/run | grep -E '\.sh$|^\.ci/run$') 2>&1)"
else
    skip "shellcheck is not here"
fi
mapfile -t sources < <(files | grep -E '\.(cu|cuh|h|c|sh|awk|sbatch|py|md)$|^Makefile$|^\.ci/run$')
code=()
for file in "${sources[@]}"; do [[ $file == *.md || $file == *.py ]] || code+=("$file"); done
report "lines of at most 150 characters" "$(awk 'length($0) > 150 { print FILENAME ":" FNR ": " length($0) " characters" }' "${code[@]}")"
report "no blanks at the ends of lines" "$(grep -n -E '[[:blank:]]+$' "${code[@]}")"
report "no path of one machine" "$(grep -n -E '(^|[^A-Za-z0-9_.])/(home|root|work|mnt|Users)/' "${sources[@]}" | grep -v '^scripts/lint.sh')"
report "no notes of unfinished work" "$(grep -n -E '\b(TO''DO|FIX''ME|XX''X)\b' "${sources[@]}")"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
