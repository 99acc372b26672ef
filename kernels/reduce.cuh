// reduce.cuh - sums over rows, and the sum of squares behind the gradient norm. Work is cut at fixed sizes and added in a fixed
// order, so that a result does not depend on threads or ranks.
#pragma once
#include "vector.cuh"

#define COLUMN_TILE 64
#define BIAS_CHUNK 64 // rows that one team adds up
#define FOLD_ROWS 32  // of partial sums, as many: a long column added up by one team would keep a GPU waiting

// One team takes COLUMN_TILE columns: out[c] += sum over rows of partial[row * stride + first + c].
DEVICE void sum_rows_tile(Team t, size_t tile, floatX* out, const float* partial, size_t rows, size_t stride, size_t first, int columns) {
    int begin = (int)tile * COLUMN_TILE;
    int width = columns - begin < COLUMN_TILE ? columns - begin : COLUMN_TILE;
    float* sum = (float*)t.scratch;
    TEAM_FOR(i, width) { sum[i] = 0.0f; }
    for (size_t row = 0; row < rows; row++) {
        const float* p = partial + row * stride + first + begin;
        TEAM_FOR(i, width) { sum[i] += p[i]; }
    }
    TEAM_FOR(i, width) { store(out + begin + i, load(out + begin + i) + sum[i]); }
}

// The first of FOLD_ROWS rows becomes their sum; task = fold * tiles + tile
DEVICE void sum_rows_fold(Team t, size_t task, float* partial, size_t rows, size_t stride, size_t first, int columns, int tiles) {
    size_t row = task / (size_t)tiles * FOLD_ROWS, end = min_size(rows, row + FOLD_ROWS);
    int begin = (int)(task % (size_t)tiles) * COLUMN_TILE;
    int width = columns - begin < COLUMN_TILE ? columns - begin : COLUMN_TILE;
    float* sum = partial + row * stride + first + begin;
    for (row++; row < end; row++) {
        const float* p = partial + row * stride + first + begin;
        TEAM_FOR(i, width) { sum[i] = sum[i] + p[i]; }
    }
}

// out (columns) += the sum of rows; partial is used up.
void sum_rows(floatX* out, float* partial, size_t rows, size_t stride, size_t first, int columns) {
    size_t tiles = ceil_div((size_t)columns, COLUMN_TILE);
    if (rows > 2 * FOLD_ROWS) {
        LAUNCH(ceil_div(rows, FOLD_ROWS) * tiles, WARP_TEAM, sum_rows_fold, partial, rows, stride, first, columns, (int)tiles);
        rows = ceil_div(rows, FOLD_ROWS);
        stride *= FOLD_ROWS;
    }
    LAUNCH_SCRATCH(tiles, WARP_TEAM, COLUMN_TILE * sizeof(float), sum_rows_tile, out, partial, rows,
                   stride, first, columns);
}

// partial (chunks, columns): the sum of BIAS_CHUNK rows of x (N, columns); task = chunk * tiles + tile
DEVICE void bias_partial_tile(Team t, size_t task, float* partial, const floatX* x, size_t N, int columns, int tiles) {
    size_t chunk = task / (size_t)tiles;
    int begin = (int)(task % (size_t)tiles) * COLUMN_TILE;
    int width = columns - begin < COLUMN_TILE ? columns - begin : COLUMN_TILE;
    float* sum = (float*)t.scratch;
    TEAM_FOR(i, width) { sum[i] = 0.0f; }
    size_t end = min_size(N, (chunk + 1) * BIAS_CHUNK);
    for (size_t row = chunk * BIAS_CHUNK; row < end; row++) {
        const floatX* p = x + row * (size_t)columns + begin;
        TEAM_FOR(i, width) { sum[i] += load(p + i); }
    }
    TEAM_FOR(i, width) { partial[chunk * (size_t)columns + (size_t)(begin + i)] = sum[i]; }
}

size_t bias_backward_partials(size_t N, int columns) { return ceil_div(N, BIAS_CHUNK) * (size_t)columns; }

// dbias (columns) += sum over rows of dout (N, columns); partial: bias_backward_partials floats of work space
void bias_backward(floatX* dbias, float* partial, const floatX* dout, size_t N, int columns) {
    size_t chunks = ceil_div(N, BIAS_CHUNK), tiles = ceil_div((size_t)columns, COLUMN_TILE);
    LAUNCH_SCRATCH(chunks * tiles, WARP_TEAM, COLUMN_TILE * sizeof(float), bias_partial_tile, partial, dout, N, columns, (int)tiles);
    sum_rows(dbias, partial, chunks, (size_t)columns, 0, columns);
}

#define NORM_CHUNK 8192

// partial[chunk] = sum of squares of NORM_CHUNK values
DEVICE void square_sum_chunk(Team t, size_t chunk, float* partial, const floatX* x, size_t n) {
    const floatX* p = x + chunk * NORM_CHUNK;
    int count = (int)min_size(NORM_CHUNK, n - chunk * NORM_CHUNK);
    float sum = 0.0f;
    TEAM_VEC_SUM_FOR(i, count, sum) {
        floatV v = load_vec(p + i, count - i); // zeros past the end add nothing
        VEC_FOR(k) { sum += vec_get(v, k) * vec_get(v, k); }
    }
    sum = team_sum(t, sum);
    if (t.rank == 0) { partial[chunk] = sum; }
}

size_t square_sum_partials(size_t n) { return ceil_div(n, NORM_CHUNK); }

// partial: square_sum_partials(n) floats, to be added up by sum_floats
void square_sum(float* partial, const floatX* x, size_t n) {
    LAUNCH(square_sum_partials(n), BLOCK_TEAM, square_sum_chunk, partial, x, n);
}

// The sum of n floats, on every thread of the team.
DEVICE float team_sum_of(Team t, const float* x, int n) {
    float sum = 0.0f;
    TEAM_SUM_FOR(i, n, sum) { sum += x[i]; }
    return team_sum(t, sum);
}

// out[0] = the sum of n floats, by one team
DEVICE void sum_floats_once(Team t, size_t index, float* out, const float* x, int n) {
    float sum = team_sum_of(t, x, n);
    if (t.rank == 0) { out[index] = sum; }
}

void sum_floats(float* out, const float* x, int n) { LAUNCH(1, BLOCK_TEAM, sum_floats_once, out, x, n); }
