// normuon.cuh - NorMuon's normalisation (Li et al. 2025, arXiv 2510.05491): an orthogonalised update has rows (of a wide matrix:
// columns) of unequal size; each is divided by the root of a running mean of its squares, and the whole is scaled to RMS 1.
//     v = beta2 v + (1 - beta2) mean(x^2) over the shorter side;  x = x / sqrt(v);  x = x sqrt(rows cols) / ||x||_F
// One moment per line of the longer side. The last step undoes any common factor of v, so none of Adam's corrections is needed: the
// first update is the plain normalisation of the lines.
#pragma once
#include "../kernels/reduce.cuh"
#include "optimizer.h"

#define NORMUON_TILE 64  // columns of a task
#define NORMUON_BAND 128 // rows of a task

// Moments kept per matrix.
static inline size_t normuon_moments(size_t rows, size_t cols) { return max_size(rows, cols); }

static inline size_t normuon_bands(size_t rows) { return ceil_div(rows, NORMUON_BAND); }

// Work space: the squares of what each moment's line becomes, its factor, the common factor, and (wide) sums of bands of rows.
static inline size_t normuon_work_bytes(size_t rows, size_t cols) {
    size_t bands = rows < cols ? normuon_bands(rows) * cols : 0;
    return round_up((2 * normuon_moments(rows, cols) + 16 + bands) * sizeof(float), OPTIMIZER_ALIGN);
}

// From the sum of squares of a line of n values: its moment, its factor 1 / sqrt(v), and the squares it will have.
DEVICE void normuon_line(size_t line, float sum, float n, float* v, float* factor, float* squares, const StepScalars* scalars) {
    float moment = scalars->beta2 * v[line] + (1.0f - scalars->beta2) * (sum / n);
    float f = moment > 0.0f ? 1.0f / sqrtf(moment) : moment == 0.0f ? 0.0f : moment; // a NaN stays one
    v[line] = moment;
    factor[line] = f;
    squares[line] = moment > 0.0f ? sum / moment : sum * f;
}

// tall: one team per row
DEVICE void normuon_row(Team t, size_t row, const float* x, float* v, float* factor, float* squares, int cols, const StepScalars* scalars) {
    const float* p = x + row * (size_t)cols;
    float sum = 0.0f;
    TEAM_SUM_FOR(i, cols, sum) { sum += p[i] * p[i]; }
    sum = team_sum(t, sum);
    if (t.rank == 0) { normuon_line(row, sum, (float)cols, v, factor, squares, scalars); }
}

// wide: partial (bands, cols) = sums of squares of a band of rows; task = band * tiles + tile
DEVICE void normuon_band(Team t, size_t task, float* partial, const float* x, size_t rows, int cols, int tiles) {
    size_t band = task / (size_t)tiles, end = min_size(rows, (band + 1) * NORMUON_BAND);
    int begin = (int)(task % (size_t)tiles) * NORMUON_TILE, width = cols - begin < NORMUON_TILE ? cols - begin : NORMUON_TILE;
    float* sum = (float*)(void*)t.scratch;
    TEAM_FOR(i, width) { sum[i] = 0.0f; }
    for (size_t row = band * NORMUON_BAND; row < end; row++) {
        const float* p = x + row * (size_t)cols + begin;
        TEAM_FOR(i, width) { sum[i] += p[i] * p[i]; }
    }
    TEAM_FOR(i, width) { partial[band * (size_t)cols + (size_t)(begin + i)] = sum[i]; }
}

DEVICE void normuon_columns(Team t, size_t tile, const float* partial, float* v, float* factor, float* squares, size_t rows, int cols,
                            const StepScalars* scalars) {
    int begin = (int)tile * NORMUON_TILE, width = cols - begin < NORMUON_TILE ? cols - begin : NORMUON_TILE;
    size_t bands = (rows + NORMUON_BAND - 1) / NORMUON_BAND;
    float* sum = (float*)(void*)t.scratch;
    TEAM_FOR(i, width) { sum[i] = 0.0f; }
    for (size_t band = 0; band < bands; band++) {
        const float* p = partial + band * (size_t)cols + begin;
        TEAM_FOR(i, width) { sum[i] += p[i]; }
    }
    for (int i = t.rank; i < width; i += t.size) { // a few hundred lines: roots and divisions one by one
        normuon_line((size_t)(begin + i), sum[i], (float)rows, v, factor, squares, scalars);
    }
}

// common[0] = sqrt(count) / ||x / sqrt(v)||_F
DEVICE void normuon_common(Team t, size_t task, float* common, const float* squares, int moments, float root_count) {
    float sum = team_sum_of(t, squares, moments);
    if (t.rank == 0) { common[task] = sum > 0.0f ? root_count / sqrtf(sum) : sum; }
}

DEVICE void normuon_scale(Team t, size_t row, float* x, const float* factor, const float* common, int cols, bool wide) {
    float *p = x + row * (size_t)cols, f = *common;
    if (wide) {
        TEAM_FOR(i, cols) { p[i] *= factor[i] * f; }
    } else {
        f *= factor[row];
        TEAM_FOR(i, cols) { p[i] *= f; }
    }
}

// x (rows, cols), v (normuon_moments): as above, with beta2 of scalars (on the device). work: normuon_work_bytes. All-zero x stays zero.
void normuon_normalise(float* x, float* v, size_t rows, size_t cols, float* work, const StepScalars* scalars) {
    size_t moments = normuon_moments(rows, cols), tiles = ceil_div(cols, NORMUON_TILE);
    float *common = work, *factor = work + 16, *squares = factor + moments, *partial = squares + moments;
    bool wide = rows < cols;
    if (wide) {
        LAUNCH_SCRATCH(normuon_bands(rows) * tiles, WARP_TEAM, NORMUON_TILE * sizeof(float), normuon_band, partial, x, rows, (int)cols,
                       (int)tiles);
        LAUNCH_SCRATCH(tiles, WARP_TEAM, NORMUON_TILE * sizeof(float), normuon_columns, partial, v, factor, squares, rows, (int)cols, scalars);
    } else {
        LAUNCH(rows, WARP_TEAM, normuon_row, x, v, factor, squares, (int)cols, scalars);
    }
    LAUNCH(1, BLOCK_TEAM, normuon_common, common, squares, (int)moments, sqrtf((float)rows * (float)cols));
    LAUNCH(rows, WARP_TEAM, normuon_scale, x, factor, common, (int)cols, wide);
}
