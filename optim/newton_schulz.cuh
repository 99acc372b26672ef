// newton_schulz.cuh - the nearest (semi-)orthogonal matrix: X = U V^T of M = U S V^T, by five steps of an odd polynomial that pulls every
// singular value towards 1 (Newton-Schulz; Jordan et al. 2024, Muon):
//     X = M / ||M||_F;   five times: G = X^T X, X = X (a I + b G + c G^2)
// Coefficients: Muon's, the same at each step (singular values end within about 0.7..1.2), or Polar Express's (Amsel et al. 2025,
// arXiv 2505.16932), each step the best for the interval that the last one left.
// Products run in floatX, with G on the shorter side: a wide matrix is transposed first.
#pragma once
#include "../kernels/product.cuh"
#include "optimizer.h"

#define NEWTON_SCHULZ_STEPS 5
#define NEWTON_SCHULZ_CHUNK 2048

typedef struct {
    float a[NEWTON_SCHULZ_STEPS], b[NEWTON_SCHULZ_STEPS], c[NEWTON_SCHULZ_STEPS];
    float margin; // 0: X starts with Frobenius norm 1; else with singular values up to 1 / margin (newton_schulz_factor)
} NewtonSchulz;

static const NewtonSchulz newton_schulz_muon = {{3.4445f, 3.4445f, 3.4445f, 3.4445f, 3.4445f},
                                                {-4.7750f, -4.7750f, -4.7750f, -4.7750f, -4.7750f},
                                                {2.0315f, 2.0315f, 2.0315f, 2.0315f, 2.0315f},
                                                0.0f};

static const NewtonSchulz newton_schulz_polar = {
    {8.156554524902461f, 4.042929935166739f, 3.8916678022926607f, 3.285753657755655f, 2.3465413258596377f},
    {-22.48329292557795f, -2.808917465908714f, -2.772484153217685f, -2.3681294933425376f, -1.7097828382687081f},
    {15.878769915207462f, 0.5000178451051316f, 0.5060648178503393f, 0.46449024233003106f, 0.42323551169305323f},
    1.02f};

static size_t newton_schulz_calls; // matrices since the start of the program

// partial: sums of chunks. figures: the greatest value; the norm over it; the bound on X's singular values. squares: (s, s) of each
// array; s: the shorter side. x, y: (longer, s)
#define NEWTON_SCHULZ_SQUARES 5
typedef struct {
    float *figures, *partial;
    floatX *x, *y, *squares[NEWTON_SCHULZ_SQUARES];
} NewtonSchulzWork;

// On the Gram matrix alone rounding errors grow with each step: fp32 has digits enough, shorter formats have not. Measured against double:
// 1e-5 for random matrices, up to 1.2e-2 where singular values lie a thousandfold apart (step by step: 1e-6, 2e-4). Products that it saves:
// none of a square matrix, a fifth of 2 : 3, more than half of 1 : 4.
static inline bool newton_schulz_by_gram(size_t rows, size_t cols) {
#ifdef FLOATX_BF16
    (void)rows, (void)cols;
    return false;
#else
#if ON_GPU && !defined(CUDA_ON_CPU)
    if (gemm_state.compute != CUBLAS_COMPUTE_32F) { return false; } // TF32 rounds what it reads
#endif
    return 2 * max_size(rows, cols) >= 3 * min_size(rows, cols);
#endif
}

static inline size_t newton_schulz_layout(NewtonSchulzWork* w, size_t rows, size_t cols, bool by_gram, char* work) {
    size_t at = 0, n = rows * cols, s = min_size(rows, cols), partial = max_size(ceil_div(n, NEWTON_SCHULZ_CHUNK), s);
    w->figures = (float*)work_take(work, &at, OPTIMIZER_ALIGN);
    w->partial = (float*)work_take(work, &at, partial * sizeof(float));
    w->x = (floatX*)work_take(work, &at, n * sizeof(floatX));
    w->y = (floatX*)work_take(work, &at, by_gram ? 0 : n * sizeof(floatX));
    for (int i = 0; i < (by_gram ? NEWTON_SCHULZ_SQUARES : 2); i++) {
        w->squares[i] = (floatX*)work_take(work, &at, s * s * sizeof(floatX));
    }
    return at;
}

// Enough for either way: which it will be may not be known yet.
size_t newton_schulz_work_bytes(size_t rows, size_t cols) {
    NewtonSchulzWork w;
    return max_size(newton_schulz_layout(&w, rows, cols, false, NULL), newton_schulz_layout(&w, rows, cols, true, NULL));
}

DEVICE void newton_schulz_greatest(Team t, size_t chunk, float* partial, const float* x, size_t n) {
    const float* p = x + chunk * NEWTON_SCHULZ_CHUNK;
    int count = (int)min_size(NEWTON_SCHULZ_CHUNK, n - chunk * NEWTON_SCHULZ_CHUNK);
    float most = 0.0f;
    TEAM_MAX_FOR(i, count, most) { // fmaxf would be a call for each value
        float r = fabsf(p[i]);
        most = r > most ? r : most;
    }
    most = team_max(t, most);
    if (t.rank == 0) { partial[chunk] = most; }
}

DEVICE void newton_schulz_greatest_of(Team t, size_t task, float* figures, const float* partial, int chunks) {
    float most = 0.0f;
    TEAM_MAX_FOR(i, chunks, most) { most = partial[i] > most ? partial[i] : most; }
    most = team_max(t, most);
    if (t.rank == 0) { figures[task] = most; }
}

// Squares of x over its greatest value: they neither overflow nor vanish.
DEVICE void newton_schulz_squares(Team t, size_t chunk, float* partial, const float* figures, const float* x, size_t n) {
    const float *p = x + chunk * NEWTON_SCHULZ_CHUNK, most = figures[0];
    int count = (int)min_size(NEWTON_SCHULZ_CHUNK, n - chunk * NEWTON_SCHULZ_CHUNK);
    float sum = 0.0f;
    TEAM_SUM_FOR(i, count, sum) {
        float r = p[i] / most;
        sum += r * r;
    }
    sum = team_sum(t, sum);
    if (t.rank == 0) { partial[chunk] = most > 0.0f ? sum : 0.0f; }
}

DEVICE void newton_schulz_norm(Team t, size_t task, float* figures, const float* partial, int chunks) {
    float sum = team_sum_of(t, partial, chunks);
    if (t.rank == 0) { figures[1 + task] = sqrtf(sum); }
}

// in over its norm
DEVICE void newton_schulz_begin(Team t, size_t chunk, floatX* out, const float* in, const float* figures, size_t n) {
    size_t first = chunk * NEWTON_SCHULZ_CHUNK;
    int count = (int)min_size(NEWTON_SCHULZ_CHUNK, n - first);
    float most = figures[0] > 0.0f ? figures[0] : 1.0f, norm = figures[0] > 0.0f ? figures[1] : 1.0f;
    TEAM_FOR(i, count) { store(out + first + (size_t)i, in[first + (size_t)i] / most / norm); }
}

DEVICE void newton_schulz_end(Team t, size_t chunk, float* out, const floatX* in, size_t n) {
    size_t first = chunk * NEWTON_SCHULZ_CHUNK;
    int count = (int)min_size(NEWTON_SCHULZ_CHUNK, n - first);
    TEAM_FOR(i, count) { out[first + (size_t)i] = load(in + first + (size_t)i); }
}

#define NEWTON_SCHULZ_TILE 32
#define NEWTON_SCHULZ_TILE_BYTES (NEWTON_SCHULZ_TILE * (NEWTON_SCHULZ_TILE + 1) * sizeof(float))

// The same for a matrix (rows, cols) that is wider than tall: transposed on the way. task = tile row * tiles of a row + tile column
DEVICE void newton_schulz_begin_wide(Team t, size_t task, floatX* out, const float* in, const float* figures, size_t rows, size_t cols) {
    size_t tiles = (cols + NEWTON_SCHULZ_TILE - 1) / NEWTON_SCHULZ_TILE, row = task / tiles * NEWTON_SCHULZ_TILE;
    size_t col = task % tiles * NEWTON_SCHULZ_TILE;
    int height = (int)min_size(NEWTON_SCHULZ_TILE, rows - row), width = (int)min_size(NEWTON_SCHULZ_TILE, cols - col);
    float *tile = (float*)(void*)t.scratch, most = figures[0] > 0.0f ? figures[0] : 1.0f, norm = figures[0] > 0.0f ? figures[1] : 1.0f;
    for (int r = 0; r < height; r++) {
        const float* p = in + (row + (size_t)r) * cols + col;
        TEAM_FOR(i, width) { tile[r * (NEWTON_SCHULZ_TILE + 1) + i] = p[i] / most / norm; }
    }
    team_sync(t);
    for (int c = 0; c < width; c++) {
        floatX* p = out + (col + (size_t)c) * rows + row;
        TEAM_FOR(i, height) { store(p + i, tile[i * (NEWTON_SCHULZ_TILE + 1) + c]); }
    }
}

DEVICE void newton_schulz_end_wide(Team t, size_t task, float* out, const floatX* in, size_t rows, size_t cols) {
    size_t tiles = (cols + NEWTON_SCHULZ_TILE - 1) / NEWTON_SCHULZ_TILE, row = task / tiles * NEWTON_SCHULZ_TILE;
    size_t col = task % tiles * NEWTON_SCHULZ_TILE;
    int height = (int)min_size(NEWTON_SCHULZ_TILE, rows - row), width = (int)min_size(NEWTON_SCHULZ_TILE, cols - col);
    float* tile = (float*)(void*)t.scratch;
    for (int c = 0; c < width; c++) {
        const floatX* p = in + (col + (size_t)c) * rows + row;
        TEAM_FOR(i, height) { tile[i * (NEWTON_SCHULZ_TILE + 1) + c] = load(p + i); }
    }
    team_sync(t);
    for (int r = 0; r < height; r++) {
        float* p = out + (row + (size_t)r) * cols + col;
        TEAM_FOR(i, width) { p[i] = tile[r * (NEWTON_SCHULZ_TILE + 1) + i]; }
    }
}

// partial[row] = sum of squares
DEVICE void newton_schulz_row_squares(Team t, size_t row, float* partial, const floatX* x, int s) {
    const floatX* p = x + row * (size_t)s;
    float sum = 0.0f;
    TEAM_SUM_FOR(i, s, sum) { sum += load(p + i) * load(p + i); }
    sum = team_sum(t, sum);
    if (t.rank == 0) { partial[row] = sum; }
}

// The greatest singular value of X is at most sqrt ||X^T X||_F: with a margin for rounding, its inverse brings X closer to 1 than the
// Frobenius norm does. figures[2] = that factor
DEVICE void newton_schulz_factor(Team t, size_t task, float* figures, const float* partial, int s, float margin) {
    float sum = 0.0f;
    TEAM_SUM_FOR(i, s, sum) { sum += partial[i]; }
    sum = team_sum(t, sum);
    if (t.rank == 0) { figures[2 + task] = sum > 0.0f ? 1.0f / (margin * sqrtf(sqrtf(sum))) : 1.0f; }
}

// row of x times that factor, or its square
DEVICE void newton_schulz_times(Team t, size_t row, floatX* x, const float* figures, bool squared, int s) {
    floatX* p = x + row * (size_t)s;
    float f = squared ? figures[2] * figures[2] : figures[2];
    TEAM_FOR(i, s) { store(p + i, f * load(p + i)); }
}

// gram, of an X of Frobenius norm 1, becomes that of figures[2] X
static inline void newton_schulz_scale(NewtonSchulzWork* w, const NewtonSchulz* k, size_t s) {
    floatX* gram = w->squares[0];
    LAUNCH(s, WARP_TEAM, newton_schulz_row_squares, w->partial, gram, (int)s);
    LAUNCH(1, BLOCK_TEAM, newton_schulz_factor, w->figures, w->partial, (int)s, k->margin);
    LAUNCH(s, WARP_TEAM, newton_schulz_times, gram, w->figures, true, (int)s);
}

// Where a I is added: to the polynomial at no cost as a tile is finished, or, as a X, by the product with X, which the GPU's library does
// at no cost, and where bf16 does not round it.
#if ON_GPU || defined(FLOATX_BF16)
#define NEWTON_SCHULZ_APART true
#else
#define NEWTON_SCHULZ_APART false
#endif

// X = X (a I + b G + c G^2) with G = X^T X, step by step; ends in w->x
static inline void newton_schulz_direct(NewtonSchulzWork* w, const NewtonSchulz* k, size_t longer, size_t s) {
    floatX *gram = w->squares[0], *polynomial = w->squares[1];
    for (int i = 0; i < NEWTON_SCHULZ_STEPS; i++) {
        float inside = NEWTON_SCHULZ_APART ? 0.0f : k->a[i], outside = NEWTON_SCHULZ_APART ? k->a[i] : 0.0f;
        Symmetric g = {true, false, s, longer, 1.0f, 0.0f, 0.0f, w->x, w->x, NULL, gram, s, s};
        symmetric_run(&g, 1);
        if (i == 0 && k->margin > 0.0f) {
            newton_schulz_scale(w, k, s);
            LAUNCH(longer, WARP_TEAM, newton_schulz_times, w->x, w->figures, false, (int)s);
        }
        Symmetric p = {false, false, s, s, k->c[i], k->b[i], inside, gram, gram, gram, polynomial, s, s};
        symmetric_run(&p, 1);
        Product next = {false, false, longer, s, s, 1.0f, outside, w->x, polynomial, outside != 0.0f ? w->x : NULL, w->y, s, s, s};
        product_run(&next);
        floatX* x = w->x;
        w->x = w->y;
        w->y = x;
    }
}

static inline Symmetric newton_schulz_square(const floatX* A, const floatX* B, floatX* C, size_t s) {
    Symmetric p = {false, false, s, s, 1.0f, 0.0f, 0.0f, A, B, NULL, C, s, s};
    return p;
}

// The same on G alone: with P = a I + b G + c G^2, all are polynomials of one G, symmetric, and commute:
//     X' = X P,  G' = P G P,  and after all steps X Q with Q = P1 P2 P3 P4 P5
static inline const floatX* newton_schulz_gram(NewtonSchulzWork* w, const NewtonSchulz* k, size_t longer, size_t s) {
    floatX *gram = w->squares[0], *p = w->squares[1], *pg = w->squares[2], *q = w->squares[3], *next = w->squares[4];
    bool scaled = k->margin > 0.0f;
    Symmetric start = {true, false, s, longer, 1.0f, 0.0f, 0.0f, w->x, w->x, NULL, gram, s, s};
    symmetric_run(&start, 1);
    if (scaled) { newton_schulz_scale(w, k, s); }
    for (int i = 0; i < NEWTON_SCHULZ_STEPS; i++) {
        bool first = i == 0, last = i == NEWTON_SCHULZ_STEPS - 1;
        floatX* P = first ? q : p;
        Symmetric polynomial = {false, false, s, s, k->c[i], k->b[i], k->a[i], gram, gram, gram, P, s, s};
        symmetric_run(&polynomial, 1);
        Symmetric two[2] = {newton_schulz_square(P, q, next, s), newton_schulz_square(P, gram, pg, s)}; // q P; P gram
        symmetric_run(first ? two + 1 : two, first || last ? 1 : 2);
        if (!last) {
            Symmetric again = newton_schulz_square(pg, P, gram, s);
            symmetric_run(&again, 1);
        }
        floatX* old = q;
        q = first ? q : next;
        next = first ? next : old;
    }
    if (scaled) { LAUNCH(s, WARP_TEAM, newton_schulz_times, q, w->figures, false, (int)s); }
    return q;
}

// out, in: (rows, cols) fp32 on the device, out may be in; work: newton_schulz_work_bytes. Any scale of input; zeros give zeros.
void newton_schulz_with(const NewtonSchulz* k, float* out, const float* in, size_t rows, size_t cols, char* work) {
    size_t n = rows * cols, chunks = ceil_div(n, NEWTON_SCHULZ_CHUNK), s = min_size(rows, cols), longer = max_size(rows, cols);
    size_t tiles = ceil_div(rows, NEWTON_SCHULZ_TILE) * ceil_div(cols, NEWTON_SCHULZ_TILE);
    bool wide = cols > rows, by_gram = newton_schulz_by_gram(rows, cols);
    NewtonSchulzWork w;
    newton_schulz_calls++;
    newton_schulz_layout(&w, rows, cols, by_gram, work);
    LAUNCH(chunks, BLOCK_TEAM, newton_schulz_greatest, w.partial, in, n);
    LAUNCH(1, BLOCK_TEAM, newton_schulz_greatest_of, w.figures, w.partial, (int)chunks);
    LAUNCH(chunks, BLOCK_TEAM, newton_schulz_squares, w.partial, w.figures, in, n);
    LAUNCH(1, BLOCK_TEAM, newton_schulz_norm, w.figures, w.partial, (int)chunks);
    if (wide) {
        LAUNCH_SCRATCH(tiles, WARP_TEAM, NEWTON_SCHULZ_TILE_BYTES, newton_schulz_begin_wide, w.x, in, w.figures, rows, cols);
    } else {
        LAUNCH(chunks, BLOCK_TEAM, newton_schulz_begin, w.x, in, w.figures, n);
    }
    if (by_gram) { // fp32 is floatX there
        const floatX* q = newton_schulz_gram(&w, k, longer, s);
        Product narrow = {false, false, rows, cols, s, 1.0f, 0.0f, w.x, q, NULL, (floatX*)(void*)out, s, s, cols};
        Product turned = {false, true, rows, cols, s, 1.0f, 0.0f, q, w.x, NULL, (floatX*)(void*)out, s, s, cols};
        product_run(wide ? &turned : &narrow);
        return;
    }
    newton_schulz_direct(&w, k, longer, s);
    if (wide) {
        LAUNCH_SCRATCH(tiles, WARP_TEAM, NEWTON_SCHULZ_TILE_BYTES, newton_schulz_end_wide, out, w.x, rows, cols);
    } else {
        LAUNCH(chunks, BLOCK_TEAM, newton_schulz_end, out, w.x, n);
    }
}

void newton_schulz(float* out, const float* in, size_t rows, size_t cols, char* work) {
    newton_schulz_with(&newton_schulz_polar, out, in, rows, cols, work);
}
