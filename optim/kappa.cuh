// kappa.cuh - the updates of Kappa, on the device.
// Matrices: M' = mu M + (1 - mu) G;  U = (1 - mu) G + mu M' (Nesterov; M' itself without, and at 2 bits);  X = orthogonalised U, rows
// evened out (normuon.cuh);  w -= lr (0.2 X + decay w): the RMS of an AdamW step, so that one learning rate serves all roles.
// M is kept in codes (kappa_codec.cuh). G is the gradient buffer, which at 4 bits and below also holds what the last rounding lost:
//     e = M - decode(M);  buffer = mu / (1 - mu) e + g;  mu decode(M) + (1 - mu) buffer = mu M + (1 - mu) g
// so that the momentum is followed exactly but for the buffer's own rounding, and no memory is spent on e. Only the look-ahead (1 - mu) G
// sees mu e: noise where M' has none, which orthogonalisation would blow up in the small directions of a momentum with a few large ones.
// So U = M' + share (1 - mu) (G - M'): the whole look-ahead where e meets kappa_target (kappa.h), min(1, kappa / (target sqrt(1 - mu^2)))^2
// of it at 4 bits, with the unit's kappa of the step before; none at 2 bits, where e is 44 % of M.
// M' is never kept: it is made twice from codes and gradient, once for U and the squares of rows and columns, once to be rounded.
// Embeddings: one second moment a row (the mean of g^2 over it; or one an element), momentum in 8 bits, d = mhat / (sqrt(vhat) + eps), and
// the step is divided by max(1, RMS(g / sqrt(vhat))) of the unit (StableAdamW, Wortsman et al. 2023, arXiv 2304.13013).
#pragma once
#include "apply.cuh"
#include "kappa.h"
#include "newton_schulz.cuh"

#define KAPPA_TILE 512       // columns of a task
#define KAPPA_BAND 16        // rows of a task
#define KAPPA_CHUNK 16       // blocks of a task: OPTIMIZER_CHUNK elements
#define KAPPA_LINES 1024     // rows or columns of a task
#define KAPPA_LEAST 1e-37f   // factors below it count as zero: their inverse is no number

// A matrix's momentum.
typedef struct {
    uint8_t* codes;        // (blocks, kappa_block_bytes)
    uint16_t *scale;       // bf16 (blocks)
    uint16_t *rows, *cols; // bf16 (rows), (cols): factors of equilibration
    float* error;          // (2): mean square of the residual that the buffer holds, in equilibrated units; share of the look-ahead
    int bits;
} KappaMomentum;

static inline KappaMomentum kappa_momentum(const OptimizerUnit* u, int bits) {
    KappaMomentum m = {(uint8_t*)u->state[0], (uint16_t*)(void*)u->state[1], (uint16_t*)(void*)u->state[2], (uint16_t*)(void*)u->state[3],
                       (float*)(void*)u->state[4], bits};
    return m;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Work space behind apply.cuh's: sums of squares and new factors; afterwards Newton-Schulz's and normuon's.

typedef struct {
    float *row_squares; // (tiles, rows), then rows alone
    float* col_squares; // (bands, cols)
    float* total;       // (1)
    float* partial;     // (OPTIMIZER_MEASURED, chunks)
    uint16_t *rows, *cols;
} KappaWork;

static inline size_t kappa_tiles(size_t cols) { return ceil_div(cols, KAPPA_TILE); }
static inline size_t kappa_bands(size_t rows) { return ceil_div(rows, KAPPA_BAND); }
static inline size_t kappa_chunks(size_t count) { return ceil_div(kappa_blocks(count), KAPPA_CHUNK); }

static inline size_t kappa_layout(KappaWork* w, size_t rows, size_t cols, char* work) {
    const size_t floats[] = {kappa_tiles(cols) * rows, kappa_bands(rows) * cols, 1, OPTIMIZER_MEASURED * kappa_chunks(rows * cols)};
    float** places[] = {&w->row_squares, &w->col_squares, &w->total, &w->partial};
    size_t at = 0;
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        *places[i] = (float*)work_take(work, &at, floats[i] * sizeof(float));
    }
    w->rows = (uint16_t*)work_take(work, &at, rows * sizeof(uint16_t));
    w->cols = (uint16_t*)work_take(work, &at, cols * sizeof(uint16_t));
    return at;
}

// What a change of widths takes (kappa_repack.cuh): the values of all codes, the arrays that do not change, sums over chunks.
static inline size_t kappa_repack_bytes(const UnitState* s, size_t count) {
    size_t bytes = round_up(kappa_blocks(count) * KAPPA_BLOCK * sizeof(float), OPTIMIZER_ALIGN);
    return bytes + (s->count > 2 ? s->bytes - s->arrays[2].at : 0) + round_up(kappa_chunks(count) * sizeof(float), OPTIMIZER_ALIGN);
}

size_t kappa_work_bytes(const OptimizerConfig* c, const TensorSpec* spec, const Unit* unit) {
    UnitState s;
    KappaWork w;
    memset(&s, 0, sizeof(s));
    size_t apply = apply_work_bytes(unit->count), chunks = round_up(max_size(kappa_chunks(unit->count), unit->rows) * sizeof(float),
                                                                    OPTIMIZER_ALIGN);
    if (spec->role == ROLE_EMBEDDING) { return apply + chunks; }
    size_t rows = unit->rows / (size_t)spec->parts, own = kappa_layout(&w, unit->rows, unit->cols, NULL);
    size_t others = max_size(newton_schulz_work_bytes(rows, unit->cols), normuon_work_bytes(rows, unit->cols));
    kappa_declare_width(&s, c, c->kappa_bits ? c->kappa_bits : 8, spec, unit);
    return max_size(apply + max_size(own, others), kappa_repack_bytes(&s, unit->count));
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Matrices: from codes and gradient to U

#define KAPPA_BLEND_SCRATCH ((2 * KAPPA_TILE + 2 * KAPPA_BLOCK) * sizeof(float))

// direction (rows, cols) = U, row_squares (tiles, rows) and col_squares (bands, cols): sums of squares of M'; task = band * tiles + tile
// ahead: the look-ahead, all of it (1), none (0) or by the momentum's share (-1)
DEVICE void kappa_blend_tile(Team t, size_t task, KappaMomentum m, OptimizerUnit u, KappaWork w, float* direction, float ahead,
                             const StepScalars* scalars) {
    size_t tiles = (u.cols + KAPPA_TILE - 1) / KAPPA_TILE, tile = task % tiles, band = task / tiles, col = tile * KAPPA_TILE;
    size_t end = min_size(u.rows, (band + 1) * KAPPA_BAND), bytes = kappa_block_bytes(m.bits);
    int width = (int)min_size(KAPPA_TILE, u.cols - col);
    float *values = (float*)(void*)t.scratch, *squares = values + KAPPA_TILE + 2 * KAPPA_BLOCK;
    float mu = scalars->momentum, scale = *u.grad_scale, look = 1.0f - (ahead < 0.0f ? m.error[1] : ahead) * (1.0f - mu);
    const uint16_t* gamma = m.cols + col;
    TEAM_FOR(i, width) { squares[i] = 0.0f; }
    for (size_t row = band * KAPPA_BAND; row < end; row++) {
        size_t first = row * u.cols + col, block = first / KAPPA_BLOCK;
        for (size_t b = block; b * KAPPA_BLOCK < first + (size_t)width; b++) {
            kappa_decode(t, values + (b - block) * KAPPA_BLOCK, m.codes + b * bytes, bf16_to_float(m.scale[b]), m.bits);
        }
        team_sync(t);
        const float* x = values + first % KAPPA_BLOCK;
        const floatX* g = u.grads + first;
        float *d = direction + first, rho = bf16_to_float(m.rows[row]), sum = 0.0f;
        TEAM_SUM_FOR(i, width, sum) {
            float grad = scale * load(g + i), next = mu * (x[i] * (rho * bf16_to_float(gamma[i]))) + (1.0f - mu) * grad;
            d[i] = (1.0f - look) * grad + look * next;
            squares[i] += next * next;
            sum += next * next;
        }
        sum = team_sum(t, sum);
        if (t.rank == 0) { w.row_squares[tile * u.rows + row] = sum; }
        team_sync(t); // the next row overwrites the values
    }
    float* out = w.col_squares + band * u.cols + col;
    TEAM_FOR(i, width) { out[i] = squares[i]; }
}

// The same with fp32 momentum: nothing is rounded, nothing is left.
DEVICE void kappa_blend_plain(Team t, size_t chunk, float* momentum, OptimizerUnit u, float* direction, bool ahead,
                              const StepScalars* scalars) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    float mu = scalars->momentum, scale = *u.grad_scale, look = ahead ? mu : 1.0f;
    float *m = momentum + first, *d = direction + first;
    floatX* g = u.grads + first;
    TEAM_FOR(i, n) {
        float grad = scale * load(g + i), next = mu * m[i] + (1.0f - mu) * grad;
        m[i] = next;
        d[i] = (1.0f - look) * grad + look * next;
        store(g + i, 0.0f);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Factors of equilibration

// row_squares (rows): the sum over tiles
DEVICE void kappa_sum_rows(Team t, size_t task, KappaWork w, size_t rows, size_t tiles) {
    size_t first = task * KAPPA_LINES;
    int n = (int)min_size(KAPPA_LINES, rows - first);
    float* sum = w.row_squares + first;
    for (size_t tile = 1; tile < tiles; tile++) {
        const float* p = w.row_squares + tile * rows + first;
        TEAM_FOR(i, n) { sum[i] = sum[i] + p[i]; }
    }
}

DEVICE void kappa_row_factors(Team t, size_t task, KappaWork w, size_t rows, size_t cols, bool equilibrate) {
    size_t first = task * KAPPA_LINES;
    int n = (int)min_size(KAPPA_LINES, rows - first);
    const float* squares = w.row_squares + first;
    float all = sqrtf(w.total[0] / ((float)rows * (float)cols)), over = 1.0f / (float)cols;
    uint16_t* out = w.rows + first;
    TEAM_FOR(i, n) { out[i] = kappa_scale_bits(equilibrate ? sqrtf(squares[i] * over) : all); }
}

// scratch: KAPPA_LINES floats
DEVICE void kappa_col_factors(Team t, size_t task, KappaWork w, size_t rows, size_t cols, bool equilibrate) {
    size_t first = task * KAPPA_LINES, bands = (rows + KAPPA_BAND - 1) / KAPPA_BAND;
    int n = (int)min_size(KAPPA_LINES, cols - first);
    float *sum = (float*)(void*)t.scratch, all = w.total[0] / ((float)rows * (float)cols), over = 1.0f / ((float)rows * all);
    TEAM_FOR(i, n) { sum[i] = 0.0f; }
    for (size_t band = 0; band < bands; band++) {
        const float* p = w.col_squares + band * cols + first;
        TEAM_FOR(i, n) { sum[i] = sum[i] + p[i]; }
    }
    uint16_t* out = w.cols + first;
    TEAM_FOR(i, n) { out[i] = kappa_scale_bits(equilibrate ? sqrtf(sum[i] * over) : 1.0f); }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// From M' to codes and residual

#define KAPPA_ENCODE_SCRATCH (4 * KAPPA_BLOCK * sizeof(float))

// A block's arrays (KAPPA_BLOCK each): old values, then rounded ones; M'; its factor rho gamma; x = M' / (rho gamma).
typedef struct {
    float *values, *next, *factor, *x;
} KappaBlock;

DEVICE KappaBlock kappa_block(Team t) {
    float* scratch = (float*)(void*)t.scratch;
    KappaBlock b = {scratch, scratch + KAPPA_BLOCK, scratch + 2 * KAPPA_BLOCK, scratch + 3 * KAPPA_BLOCK};
    return b;
}

DEVICE float kappa_inverse(float factor) { return factor > KAPPA_LEAST ? 1.0f / factor : 0.0f; }

// Elements first .. first + n - 1, a block: M', its factors and x; returns this thread's sum of (g - M')^2 in equilibrated units.
DEVICE float kappa_block_next(Team t, KappaBlock b, size_t first, int n, const KappaMomentum* m, const OptimizerUnit* u, const KappaWork* w,
                              float mu) {
    float change = 0.0f, scale = *u->grad_scale;
    for (int k = 0, run; k < n; k += run) {
        size_t row = (first + (size_t)k) / u->cols, col = (first + (size_t)k) % u->cols;
        run = (int)min_size((size_t)(n - k), u->cols - col);
        const floatX* g = u->grads + first + k;
        const uint16_t *before = m->cols + col, *after = w->cols + col;
        float *values = b.values + k, *next = b.next + k, *factor = b.factor + k, *x = b.x + k;
        float rho = bf16_to_float(m->rows[row]), new_rho = bf16_to_float(w->rows[row]);
        TEAM_SUM_FOR(i, run, change) {
            float grad = scale * load(g + i), now = mu * (values[i] * (rho * bf16_to_float(before[i]))) + (1.0f - mu) * grad;
            float f = new_rho * bf16_to_float(after[i]), inverse = kappa_inverse(f), d = (grad - now) * inverse;
            next[i] = now;
            factor[i] = f;
            x[i] = now * inverse;
            change += d * d;
        }
    }
    TEAM_FOR(i, KAPPA_BLOCK - n) { b.x[n + i] = 0.0f; }
    return change;
}

// What a chunk's encode has to add up.
typedef struct {
    float change, greatest, error, ternary;
} KappaSums;

// Leaves feedback times the residual in the buffer, zero where there is none; returns this thread's sum of squares of it.
DEVICE float kappa_block_residual(Team t, KappaBlock b, floatX* g, int n, float feedback) {
    (void)t;
    float error = 0.0f;
    if (feedback > 0.0f) {
        TEAM_SUM_FOR(i, n, error) {
            float e = b.x[i] - b.values[i];
            error += e * e;
            store(g + i, feedback * (b.next[i] - b.values[i] * b.factor[i]));
        }
    } else {
        TEAM_SUM_FOR(i, n, error) {
            float e = b.x[i] - b.values[i];
            error += e * e;
            store(g + i, 0.0f);
        }
    }
    return error;
}

// Codes and scales of the new M' with the new factors; the gradient buffer. w.partial (OPTIMIZER_MEASURED, chunks)
DEVICE void kappa_encode_chunk(Team t, size_t chunk, KappaMomentum m, OptimizerUnit u, KappaWork w, bool feed_back, bool stochastic,
                               const StepScalars* scalars) {
    size_t blocks = (u.count + KAPPA_BLOCK - 1) / KAPPA_BLOCK, end = min_size(blocks, (chunk + 1) * KAPPA_CHUNK);
    size_t bytes = kappa_block_bytes(m.bits);
    size_t chunks = (blocks + KAPPA_CHUNK - 1) / KAPPA_CHUNK;
    float mu = scalars->momentum, feedback = feed_back ? mu / (1.0f - mu) : 0.0f;
    KappaBlock b = kappa_block(t);
    KappaSums sums = {0.0f, 0.0f, 0.0f, 0.0f};
    for (size_t i = chunk * KAPPA_CHUNK; i < end; i++) {
        size_t first = i * KAPPA_BLOCK;
        int n = (int)min_size(KAPPA_BLOCK, u.count - first);
        kappa_decode(t, b.values, m.codes + i * bytes, bf16_to_float(m.scale[i]), m.bits);
        team_sync(t);
        sums.change += kappa_block_next(t, b, first, n, &m, &u, &w, mu);
        team_sync(t);
        KappaSize size = kappa_size(t, b.x, n);
        uint16_t scale = kappa_scale_bits(kappa_step(size, m.bits));
        KappaRounding rounding = {stochastic, scalars->seed, (uint64_t)(u.first + first), scalars->step, u.tensor};
        kappa_encode(t, m.codes + i * bytes, b.values, b.x, bf16_to_float(scale), rounding, m.bits);
        if (t.rank == 0) { m.scale[i] = scale; }
        team_sync(t);
        sums.error += kappa_block_residual(t, b, u.grads + first, n, feedback);
        team_sync(t);
        sums.greatest += (float)n * size.greatest * size.greatest;
        sums.ternary += (float)n * size.mean * size.mean * (KAPPA_TERNARY * KAPPA_TERNARY);
    }
    sums.change = team_sum(t, sums.change);
    sums.error = team_sum(t, sums.error);
    if (t.rank == 0) {
        w.partial[KAPPA_CHANGE * chunks + chunk] = mu > 0.0f ? sums.change / (mu * mu) : 0.0f; // g - M' = mu (g - M)
        w.partial[KAPPA_GREATEST * chunks + chunk] = sums.greatest;
        w.partial[KAPPA_ERROR * chunks + chunk] = sums.error;
        w.partial[KAPPA_TERNARY_STEP * chunks + chunk] = sums.ternary;
    }
}

// figures (OPTIMIZER_MEASURED, may be NULL) = sums over chunks. For the next step: the residual's mean square, which it takes off, and the
// share of its look-ahead.
DEVICE void kappa_figures(Team t, size_t task, float* figures, float* error, const float* partial, int chunks, float count, bool feeds_back,
                          int bits, float target, const float* grad_scale, const StepScalars* scalars) {
    (void)task;
    float sums[OPTIMIZER_MEASURED], mu = scalars->momentum, part = *grad_scale * mu / (1.0f - mu);
    float times = bits == 2 ? part : 1.0f + part; // buffer - decode(M) = g - M + (1 + part) e; at 2 bits e goes with M, and takes some of it back
    for (int j = 0; j < OPTIMIZER_MEASURED; j++) {
        sums[j] = team_sum_of(t, partial + (size_t)j * (size_t)chunks, chunks);
    }
    if (t.rank != 0) { return; }
    float change = sums[KAPPA_CHANGE] - times * times * count * error[0];
    sums[KAPPA_CHANGE] = change > 0.0f ? change : 0.0f;
    float levels = kappa_levels(KAPPA_RESIDUAL_BITS);
    float kappa = sums[KAPPA_GREATEST] > 0.0f ? sqrtf(sums[KAPPA_CHANGE] / sums[KAPPA_GREATEST]) : 0.0f;
    float share = (1.0f - mu) * levels * kappa / (target * sqrtf(1.0f - mu * mu));
    error[0] = feeds_back ? sums[KAPPA_ERROR] / count : 0.0f;
    error[1] = share < 1.0f ? share * share : 1.0f;
    for (int j = 0; j < OPTIMIZER_MEASURED && figures; j++) { figures[j] = sums[j]; }
}

DEVICE void kappa_copy_factors(Team t, size_t task, KappaMomentum m, KappaWork w, size_t rows, size_t cols) {
    bool is_row = task * KAPPA_LINES < rows;
    size_t tasks = (rows + KAPPA_LINES - 1) / KAPPA_LINES, first = (is_row ? task : task - tasks) * KAPPA_LINES;
    int n = (int)min_size(KAPPA_LINES, (is_row ? rows : cols) - first);
    uint16_t* out = (is_row ? m.rows : m.cols) + first;
    const uint16_t* in = (is_row ? w.rows : w.cols) + first;
    TEAM_FOR(i, n) { out[i] = in[i]; }
}

// Momentum and buffer for the next step, U into direction.
static inline void kappa_momentum_update(const OptimizerConfig* c, int bits, const OptimizerUnit* u, float* direction, char* rest,
                                         const StepScalars* scalars) {
    KappaMomentum m = kappa_momentum(u, bits);
    KappaWork w;
    kappa_layout(&w, u->rows, u->cols, rest);
    size_t tiles = kappa_tiles(u->cols), chunks = kappa_chunks(u->count), row_tasks = ceil_div(u->rows, KAPPA_LINES);
    size_t col_tasks = ceil_div(u->cols, KAPPA_LINES);
    bool feeds_back = kappa_feeds_back(c, bits);
    float ahead = !c->nesterov || bits == 2 ? 0.0f : feeds_back ? -1.0f : 1.0f;
    LAUNCH_SCRATCH(kappa_bands(u->rows) * tiles, WARP_TEAM, KAPPA_BLEND_SCRATCH, kappa_blend_tile, m, *u, w, direction, ahead, scalars);
    LAUNCH(row_tasks, WARP_TEAM, kappa_sum_rows, w, u->rows, tiles);
    sum_floats(w.total, w.row_squares, (int)u->rows);
    LAUNCH(row_tasks, WARP_TEAM, kappa_row_factors, w, u->rows, u->cols, c->kappa_equilibrate);
    LAUNCH_SCRATCH(col_tasks, WARP_TEAM, KAPPA_LINES * sizeof(float), kappa_col_factors, w, u->rows, u->cols, c->kappa_equilibrate);
    LAUNCH_SCRATCH(chunks, WARP_TEAM, KAPPA_ENCODE_SCRATCH, kappa_encode_chunk, m, *u, w, feeds_back && u->owner, c->kappa_stochastic,
                   scalars);
    LAUNCH(1, BLOCK_TEAM, kappa_figures, u->measured, m.error, w.partial, (int)chunks, (float)u->count, feeds_back, bits,
           (float)c->kappa_target, u->grad_scale, scalars);
    LAUNCH(row_tasks + col_tasks, WARP_TEAM, kappa_copy_factors, m, w, u->rows, u->cols);
}

static inline void kappa_matrix_update(const OptimizerConfig* c, int bits, const OptimizerUnit* u, const StepScalars* scalars) {
    ApplyWork work = apply_work(u);
    size_t parts = (size_t)u->parts, rows = u->rows / parts, moments = normuon_moments(rows, u->cols);
    float* v = (float*)(void*)u->state[bits == 32 ? 1 : 5];
    if (bits == 32) {
        LAUNCH(apply_chunks(u->count), BLOCK_TEAM, kappa_blend_plain, (float*)(void*)u->state[0], *u, work.direction, c->nesterov, scalars);
    } else {
        kappa_momentum_update(c, bits, u, work.direction, work.rest, scalars);
    }
    for (size_t p = 0; p < parts; p++) {
        float* x = work.direction + p * rows * u->cols;
        newton_schulz(x, x, rows, u->cols, work.rest);
        normuon_normalise(x, v + p * moments, rows, u->cols, (float*)(void*)work.rest, scalars);
    }
    update_apply(c, u, work.direction, MATRIX_RMS, scalars);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Embeddings

// An embedding's state.
typedef struct {
    uint8_t* codes;
    uint16_t* scale;
    float* rows;    // second moments of rows, or NULL
    StateSlot slot; // second moments by element
} KappaEmbedding;

static inline KappaEmbedding kappa_embedding(const OptimizerConfig* c, const OptimizerUnit* u) {
    bool by_row = c->kappa_embedding == KAPPA_V_ROW;
    KappaEmbedding e = {(uint8_t*)u->state[0], (uint16_t*)(void*)u->state[1], by_row ? (float*)(void*)u->state[2] : NULL,
                        codec_slot(u, 2, kappa_v_format(c), false, 1)};
    return e;
}

// v, and ratios[row] = sum over the row of g^2 / vhat; one team per row
DEVICE void kappa_row_moment(Team t, size_t row, OptimizerUnit u, float* v, float* ratios, const StepScalars* scalars) {
    const floatX* g = u.grads + row * u.cols;
    float sum = 0.0f, scale = *u.grad_scale, beta2 = scalars->beta2;
    TEAM_SUM_FOR(i, (int)u.cols, sum) {
        float x = scale * load(g + i);
        sum += x * x;
    }
    sum = team_sum(t, sum);
    float moment = beta2 * v[row] + (1.0f - beta2) * (sum / (float)u.cols);
    team_sync(t); // all have read v
    if (t.rank == 0) {
        v[row] = moment;
        ratios[row] = moment > 0.0f ? sum / moment * scalars->correction2 : 0.0f;
    }
}

// The same by element; ratios[chunk]. scratch: OPTIMIZER_CHUNK floats for codes
DEVICE void kappa_element_moment(Team t, size_t chunk, OptimizerUnit u, StateSlot slot, float* ratios, const StepScalars* scalars) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    float* v = codec_open(t, slot, first, n, (float*)(void*)t.scratch);
    const floatX* g = u.grads + first;
    float sum = 0.0f, scale = *u.grad_scale, beta2 = scalars->beta2;
    team_sync(t);
    TEAM_SUM_FOR(i, n, sum) {
        float x = scale * load(g + i), moment = beta2 * v[i] + (1.0f - beta2) * x * x;
        v[i] = moment;
        sum += moment > 0.0f ? x * x / moment : 0.0f;
    }
    sum = team_sum(t, sum);
    codec_close(t, slot, first, n, v, scalars, u.tensor, u.first + first);
    if (t.rank == 0) { ratios[chunk] = sum * scalars->correction2; }
}

// figures[APPLY_OWN] = 1 / max(1, RMS(g / sqrt(vhat)))
DEVICE void kappa_clip(Team t, size_t task, float* figures, const float* ratios, int n, float count) {
    float rms = sqrtf(team_sum_of(t, ratios, n) / count);
    if (t.rank == 0) { figures[APPLY_OWN + task] = rms > 1.0f ? 1.0f / rms : 1.0f; }
}

// Momentum of a block's elements into b.x, the direction into b.next; v: of its elements, or NULL for those of rows.
DEVICE void kappa_embedding_block(Team t, KappaBlock b, size_t first, int n, const OptimizerUnit* u, const float* rows, const float* v,
                                  float clip, const StepScalars* s) {
    float beta1 = s->beta1, scale = *u->grad_scale, step = clip / s->correction1, root = 1.0f / sqrtf(s->correction2), eps = s->eps;
    for (int k = 0, run; k < n; k += run) {
        size_t row = (first + (size_t)k) / u->cols, col = (first + (size_t)k) % u->cols;
        run = v ? n : (int)min_size((size_t)(n - k), u->cols - col);
        const floatX* g = u->grads + first + k;
        float *values = b.values + k, *next = b.next + k, *x = b.x + k, factor = v ? 0.0f : step / (sqrtf(rows[row]) * root + eps);
        if (v) {
            TEAM_FOR(i, run) {
                x[i] = beta1 * values[i] + (1.0f - beta1) * (scale * load(g + i));
                next[i] = x[i] * step / (sqrtf(v[i]) * root + eps);
            }
        } else {
            TEAM_FOR(i, run) {
                x[i] = beta1 * values[i] + (1.0f - beta1) * (scale * load(g + i));
                next[i] = x[i] * factor;
            }
        }
    }
    TEAM_FOR(i, KAPPA_BLOCK - n) { b.x[n + i] = 0.0f; }
}

// direction: where to leave it (count floats), or NULL to apply it. scratch: a block's, its weights, and a chunk of v where that is coded
DEVICE void kappa_embedding_chunk(Team t, size_t chunk, OptimizerUnit u, KappaEmbedding e, float* direction, const float* clip,
                                  bool cautious, const StepScalars* scalars) {
    size_t begin = chunk * OPTIMIZER_CHUNK, blocks = (u.count + KAPPA_BLOCK - 1) / KAPPA_BLOCK;
    size_t end = min_size(blocks, (chunk + 1) * KAPPA_CHUNK);
    const StepScalars s = *scalars;
    KappaBlock b = kappa_block(t);
    float lr = s.lr * u.lr_scale, decay = u.decay ? s.weight_decay : 0.0f;
    const float* v = NULL;
    if (!e.rows) { v = codec_open(t, e.slot, begin, (int)min_size(OPTIMIZER_CHUNK, u.count - begin), b.x + 2 * KAPPA_BLOCK); }
    for (size_t i = chunk * KAPPA_CHUNK; i < end; i++) {
        size_t first = i * KAPPA_BLOCK;
        int n = (int)min_size(KAPPA_BLOCK, u.count - first);
        uint8_t* codes = e.codes + i * KAPPA_BLOCK;
        kappa_decode(t, b.values, codes, bf16_to_float(e.scale[i]), 8);
        team_sync(t);
        kappa_embedding_block(t, b, first, n, &u, e.rows, v ? v + (first - begin) : NULL, *clip, &s);
        team_sync(t);
        uint16_t scale = kappa_scale_bits(kappa_step(kappa_size(t, b.x, n), 8));
        KappaRounding nearest = {false, 0, 0, 0, 0};
        kappa_encode(t, codes, b.values, b.x, bf16_to_float(scale), nearest, 8);
        if (t.rank == 0) { e.scale[i] = scale; }
        const float* d = b.next;
        if (direction) {
            float* out = direction + first;
            TEAM_FOR(j, n) { out[j] = d[j]; }
        } else {
            float* w = weights_open(t, &u, first, n, b.x + KAPPA_BLOCK);
            TEAM_FOR(j, n) { w[j] = weight_step(w[j], d[j], lr, decay, cautious); }
            weights_close(t, &u, first, n, w, &s);
        }
        team_sync(t);
    }
}

static inline void kappa_embedding_update(const OptimizerConfig* c, const OptimizerUnit* u, const StepScalars* scalars) {
    ApplyWork work = apply_work(u);
    KappaEmbedding e = kappa_embedding(c, u);
    size_t chunks = apply_chunks(u->count), coded = e.slot.format == STATE_FP32 || e.rows ? 0 : OPTIMIZER_CHUNK * sizeof(float);
    float *ratios = (float*)(void*)work.rest, *clip = work.figures + APPLY_OWN, *direction = apply_has_rule(c) ? work.direction : NULL;
    if (e.rows) {
        LAUNCH(u->rows, WARP_TEAM, kappa_row_moment, *u, e.rows, ratios, scalars);
    } else {
        LAUNCH_SCRATCH(chunks, BLOCK_TEAM, coded, kappa_element_moment, *u, e.slot, ratios, scalars);
    }
    LAUNCH(1, BLOCK_TEAM, kappa_clip, work.figures, ratios, (int)(e.rows ? u->rows : chunks), (float)u->count);
    LAUNCH_SCRATCH(chunks, WARP_TEAM, KAPPA_ENCODE_SCRATCH + KAPPA_BLOCK * sizeof(float) + coded, kappa_embedding_chunk, *u, e, direction,
                   clip, c->cautious_decay, scalars);
    if (direction) { update_apply(c, u, direction, 1.0f, scalars); }
}

// One unit's weights and state, once a step. A matrix's gradient buffer is left at zero or at its residual; an embedding's is the caller's.
void kappa_update(const OptimizerConfig* c, const Kappa* k, const OptimizerUnit* u, const StepScalars* scalars) {
    if (u->role == ROLE_MATRIX) { kappa_matrix_update(c, k->width[u->tensor], u, scalars); }
    if (u->role == ROLE_EMBEDDING) { kappa_embedding_update(c, u, scalars); }
}

// The residual in the unit's gradient buffer is gone: nothing is to be subtracted for it. bits: of the momentum.
void kappa_forget(const OptimizerUnit* u, int bits) {
    if (bits <= 8) { device_zero(kappa_momentum(u, bits).error, sizeof(float)); }
}
