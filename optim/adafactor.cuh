// adafactor.cuh - Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5) without momentum. A matrix keeps of its squared
// gradients only their means by row and by column:
//     R = lerp(R, mean over columns of g^2 + eps1, 1-b2), C = lerp(C, mean over rows of g^2 + eps1, 1-b2), b2 = 1 - t^-0.8
//     V = R C / mean(R),  U = g / sqrt(V),  U /= max(1, RMS(U) / d),  w -= rho max(eps2, RMS(w)) U
// eps1 = 1e-30, eps2 = 1e-3, d = 1 (the run's --update-clip where given), rho = the learning rate. Means stand where the paper has sums:
// V is the same. A unit is factored: of an embedding a block of rows. Vectors, and matrices of one row or column, keep V in full. The
// paper has no decay; ours is decoupled: w -= rho decay w, cautious where asked. The run's trust ratio does not apply: it has its own.
#pragma once
#include "../kernels/reduce.cuh"
#include "apply.cuh"

#define ADAFACTOR_ROWS 16  // a tile of squares: rows,
#define ADAFACTOR_COLS 256 // and columns
#define ADAFACTOR_EPS1 1e-30f
#define ADAFACTOR_EPS2 1e-3f
enum { ADAFACTOR_MEAN = APPLY_OWN }; // of R, in the update's figures

static inline bool adafactor_factors(size_t rows, size_t cols) { return rows > 1 && cols > 1; }

void adafactor_declare(UnitState* state, const OptimizerConfig* c, Role role, size_t rows, size_t cols) {
    (void)c, (void)role;
    if (adafactor_factors(rows, cols)) {
        state_add(state, "r", ARRAY_F32, rows);
        state_add(state, "c", ARRAY_F32, cols);
    } else {
        state_add(state, "v", ARRAY_F32, rows * cols);
    }
}

// Sums of squares over tiles: of rows (tiles of columns, rows), then of columns (tiles of rows, cols).
static inline size_t adafactor_row_sums(size_t rows, size_t cols) { return ceil_div(cols, ADAFACTOR_COLS) * rows; }
static inline size_t adafactor_col_sums(size_t rows, size_t cols) { return ceil_div(rows, ADAFACTOR_ROWS) * cols; }

size_t adafactor_work_bytes(size_t rows, size_t cols) {
    size_t sums = adafactor_factors(rows, cols) ? adafactor_row_sums(rows, cols) + adafactor_col_sums(rows, cols) : 0;
    return apply_work_bytes(rows * cols) + round_up(sums * sizeof(float), OPTIMIZER_ALIGN);
}

// task = tile of rows * tiles of columns + tile of columns; scratch: ADAFACTOR_COLS floats
DEVICE void adafactor_squares_tile(Team t, size_t task, float* row_sums, float* col_sums, OptimizerUnit u) {
    size_t tiles = (u.cols + ADAFACTOR_COLS - 1) / ADAFACTOR_COLS, down = task / tiles, across = task % tiles;
    size_t row = down * ADAFACTOR_ROWS, end = min_size(u.rows, row + ADAFACTOR_ROWS), begin = across * ADAFACTOR_COLS;
    int width = (int)min_size(ADAFACTOR_COLS, u.cols - begin);
    float *column = (float*)(void*)t.scratch, *out = col_sums + down * u.cols + begin, scale = *u.grad_scale;
    TEAM_FOR(i, width) { column[i] = 0.0f; }
    for (; row < end; row++) {
        const floatX* g = u.grads + row * u.cols + begin;
        float sum = 0.0f;
        TEAM_SUM_FOR(i, width, sum) {
            float x = load(g + i) * scale;
            column[i] += x * x;
            sum += x * x;
        }
        sum = team_sum(t, sum);
        if (t.rank == 0) { row_sums[across * u.rows + row] = sum; }
    }
    TEAM_FOR(i, width) { out[i] = column[i]; }
}

// state (n): rows or columns; sums (tiles, n); part: 1 / number of values of a mean; scratch: ADAFACTOR_COLS floats
DEVICE void adafactor_means(Team t, size_t chunk, float* state, const float* sums, size_t n, size_t tiles, float part,
                            const StepScalars* s) {
    size_t first = chunk * ADAFACTOR_COLS;
    int width = (int)min_size(ADAFACTOR_COLS, n - first);
    float *sum = (float*)(void*)t.scratch, *x = state + first, b2 = s->decay_rate;
    TEAM_FOR(i, width) { sum[i] = 0.0f; }
    for (size_t k = 0; k < tiles; k++) {
        const float* p = sums + k * n + first;
        TEAM_FOR(i, width) { sum[i] += p[i]; }
    }
    TEAM_FOR(i, width) { x[i] = b2 * x[i] + (1.0f - b2) * (sum[i] * part + ADAFACTOR_EPS1); }
}

// U before it is clipped. Roots are taken of R and C apart: with no gradient their product would be below the least fp32.
DEVICE void adafactor_direction_row(Team t, size_t row, float* direction, OptimizerUnit u, const float* r, const float* c,
                                    const float* figures) {
    const floatX* g = u.grads + row * u.cols;
    float *d = direction + row * u.cols, mean = figures[ADAFACTOR_MEAN] / (float)u.rows, scale = *u.grad_scale * sqrtf(mean / r[row]);
    int cols = (int)u.cols;
    TEAM_FOR(i, cols) { d[i] = load(g + i) * scale / sqrtf(c[i]); }
}

// The same from V in full.
DEVICE void adafactor_full_chunk(Team t, size_t chunk, float* direction, OptimizerUnit u, float* state, const StepScalars* s) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    const floatX* g = u.grads + first;
    float *d = direction + first, *v = state + first, scale = *u.grad_scale, b2 = s->decay_rate;
    TEAM_FOR(i, n) {
        float x = load(g + i) * scale, square = b2 * v[i] + (1.0f - b2) * (x * x + ADAFACTOR_EPS1);
        v[i] = square;
        d[i] = x / sqrtf(square);
    }
}

DEVICE void adafactor_ratio(Team t, size_t task, float* figures, float limit, size_t count) {
    (void)task;
    float weights = sqrtf(figures[APPLY_WEIGHT_SQUARES] / (float)count), updates = sqrtf(figures[APPLY_UPDATE_SQUARES] / (float)count);
    if (t.rank == 0) { figures[APPLY_RATIO] = fmaxf(ADAFACTOR_EPS2, weights) / fmaxf(1.0f, updates / limit); }
}

// Work: adafactor_work_bytes.
void adafactor_update(const OptimizerConfig* config, const OptimizerUnit* u, const StepScalars* scalars) {
    ApplyWork w = apply_work(u);
    size_t rows = u->rows, cols = u->cols, scratch = ADAFACTOR_COLS * sizeof(float);
    if (adafactor_factors(rows, cols)) {
        size_t across = ceil_div(cols, ADAFACTOR_COLS), down = ceil_div(rows, ADAFACTOR_ROWS);
        float *r = (float*)(void*)u->state[0], *c = (float*)(void*)u->state[1];
        float *row_sums = (float*)(void*)w.rest, *col_sums = row_sums + adafactor_row_sums(rows, cols);
        LAUNCH_SCRATCH(down * across, WARP_TEAM, scratch, adafactor_squares_tile, row_sums, col_sums, *u);
        float of_row = 1.0f / (float)cols, of_column = 1.0f / (float)rows;
        LAUNCH_SCRATCH(ceil_div(rows, ADAFACTOR_COLS), BLOCK_TEAM, scratch, adafactor_means, r, row_sums, rows, across, of_row, scalars);
        LAUNCH_SCRATCH(across, BLOCK_TEAM, scratch, adafactor_means, c, col_sums, cols, down, of_column, scalars);
        sum_floats(w.figures + ADAFACTOR_MEAN, r, (int)rows);
        LAUNCH(rows, BLOCK_TEAM, adafactor_direction_row, w.direction, *u, r, c, w.figures);
    } else {
        LAUNCH(apply_chunks(u->count), BLOCK_TEAM, adafactor_full_chunk, w.direction, *u, (float*)(void*)u->state[0], scalars);
    }
    apply_squares(u, w.direction);
    LAUNCH(1, WARP_TEAM, adafactor_ratio, w.figures, config->update_clip > 0.0f ? config->update_clip : 1.0f, u->count);
    apply_direction(u, w.direction, w.figures + APPLY_RATIO, 1.0f, config->cautious_decay, scalars);
}
