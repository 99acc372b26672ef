// newton_schulz.cuh - the nearest (semi-)orthogonal matrix: X = U V^T of M = U S V^T, by five steps of an odd polynomial that pulls every
// singular value towards 1 (Newton-Schulz; Jordan et al. 2024, Muon):
//     X = M / ||M||_F;   five times: A = X X^T, X = (a I + b A + c A^2) X
// Coefficients: Muon's, the same at each step (singular values end within about 0.7..1.2), or Polar Express's (Amsel et al. 2025,
// arXiv 2505.16932), each step the best for the interval that the last one left.
// Products run in floatX on the shorter side: a wide matrix is taken as X X^T from the left, a tall one as X^T X from the right.
#pragma once
#include "../kernels/matmul.cuh"
#include "optimizer.h"

#define NEWTON_SCHULZ_STEPS 5
#define NEWTON_SCHULZ_CHUNK 2048

typedef struct {
    float a[NEWTON_SCHULZ_STEPS], b[NEWTON_SCHULZ_STEPS], c[NEWTON_SCHULZ_STEPS];
    float margin; // the input's norm is 1 / margin: rounding must not push a singular value beyond 1
} NewtonSchulz;

static const NewtonSchulz newton_schulz_muon = {{3.4445f, 3.4445f, 3.4445f, 3.4445f, 3.4445f},
                                                {-4.7750f, -4.7750f, -4.7750f, -4.7750f, -4.7750f},
                                                {2.0315f, 2.0315f, 2.0315f, 2.0315f, 2.0315f},
                                                1.0f};

static const NewtonSchulz newton_schulz_polar = {
    {8.156554524902461f, 4.042929935166739f, 3.8916678022926607f, 3.285753657755655f, 2.3465413258596377f},
    {-22.48329292557795f, -2.808917465908714f, -2.772484153217685f, -2.3681294933425376f, -1.7097828382687081f},
    {15.878769915207462f, 0.5000178451051316f, 0.5060648178503393f, 0.46449024233003106f, 0.42323551169305323f},
    1.02f};

static size_t newton_schulz_calls; // matrices since the start of the program

typedef struct {
    float *partial, *figures;          // partial (chunks); figures: greatest value, norm over it
    floatX *x, *y, *gram, *polynomial; // (rows, cols) twice, (s, s) twice with s the shorter side
} NewtonSchulzWork;

static inline size_t newton_schulz_layout(NewtonSchulzWork* w, size_t rows, size_t cols, char* work) {
    size_t at = 0, n = rows * cols, s = min_size(rows, cols), chunks = ceil_div(n, NEWTON_SCHULZ_CHUNK);
    w->figures = (float*)(void*)work;
    at += OPTIMIZER_ALIGN;
    w->partial = (float*)(void*)(work + at);
    at += round_up(chunks * sizeof(float), OPTIMIZER_ALIGN);
    floatX** places[] = {&w->x, &w->y, &w->gram, &w->polynomial};
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        *places[i] = (floatX*)(void*)(work + at);
        at += round_up((i < 2 ? n : s * s) * sizeof(floatX), OPTIMIZER_ALIGN);
    }
    return at;
}

size_t newton_schulz_work_bytes(size_t rows, size_t cols) {
    NewtonSchulzWork w;
    return newton_schulz_layout(&w, rows, cols, NULL);
}

DEVICE void newton_schulz_greatest(Team t, size_t chunk, float* partial, const float* x, size_t n) {
    const float* p = x + chunk * NEWTON_SCHULZ_CHUNK;
    int count = (int)min_size(NEWTON_SCHULZ_CHUNK, n - chunk * NEWTON_SCHULZ_CHUNK);
    float most = 0.0f;
    TEAM_MAX_FOR(i, count, most) { most = fmaxf(most, fabsf(p[i])); }
    most = team_max(t, most);
    if (t.rank == 0) { partial[chunk] = most; }
}

DEVICE void newton_schulz_greatest_of(Team t, size_t task, float* figures, const float* partial, int chunks) {
    float most = 0.0f;
    TEAM_MAX_FOR(i, chunks, most) { most = fmaxf(most, partial[i]); }
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
    float sum = 0.0f;
    TEAM_SUM_FOR(i, chunks, sum) { sum += partial[i]; }
    sum = team_sum(t, sum);
    if (t.rank == 0) { figures[1 + task] = sqrtf(sum); }
}

DEVICE void newton_schulz_begin(Team t, size_t chunk, floatX* out, const float* in, const float* figures, float margin, size_t n) {
    size_t first = chunk * NEWTON_SCHULZ_CHUNK;
    int count = (int)min_size(NEWTON_SCHULZ_CHUNK, n - first);
    float most = figures[0], divisor = figures[1] * margin;
    TEAM_FOR(i, count) { store(out + first + (size_t)i, most > 0.0f ? in[first + (size_t)i] / most / divisor : in[first + (size_t)i]); }
}

DEVICE void newton_schulz_end(Team t, size_t chunk, float* out, const floatX* in, size_t n) {
    size_t first = chunk * NEWTON_SCHULZ_CHUNK;
    int count = (int)min_size(NEWTON_SCHULZ_CHUNK, n - first);
    TEAM_FOR(i, count) { out[first + (size_t)i] = load(in + first + (size_t)i); }
}

// p (s, s) += b g; a on the diagonal
DEVICE void newton_schulz_polynomial(Team t, size_t row, floatX* p, const floatX* g, float a, float b, int s) {
    size_t at = row * (size_t)s;
    TEAM_FOR(i, s) { store(p + at + i, load(p + at + i) + b * load(g + at + i) + ((size_t)i == row ? a : 0.0f)); }
}

static inline void newton_schulz_direct(NewtonSchulzWork* w, const NewtonSchulz* k, size_t rows, size_t cols) {
    size_t s = min_size(rows, cols), longer = max_size(rows, cols);
    bool tall = rows > cols;
    for (int i = 0; i < NEWTON_SCHULZ_STEPS; i++) {
        Product gram = {tall, !tall, s, s, longer, 1.0f, 0.0f, w->x, w->x, w->gram, cols, cols, s};
        Product square = {false, false, s, s, s, k->c[i], 0.0f, w->gram, w->gram, w->polynomial, s, s, s};
        Product left = {false, false, rows, cols, s, 1.0f, 0.0f, w->polynomial, w->x, w->y, s, cols, cols};
        Product right = {false, false, rows, cols, s, 1.0f, 0.0f, w->x, w->polynomial, w->y, cols, s, cols};
        product_run(&gram, 1);
        product_run(&square, 1);
        LAUNCH(s, WARP_TEAM, newton_schulz_polynomial, w->polynomial, w->gram, k->a[i], k->b[i], (int)s);
        product_run(tall ? &right : &left, 1);
        floatX* x = w->x;
        w->x = w->y;
        w->y = x;
    }
}

// out, in: (rows, cols) fp32 on the device, out may be in; work: newton_schulz_work_bytes. Any scale of input; zeros give zeros.
void newton_schulz_with(const NewtonSchulz* k, float* out, const float* in, size_t rows, size_t cols, char* work) {
    size_t n = rows * cols, chunks = ceil_div(n, NEWTON_SCHULZ_CHUNK);
    NewtonSchulzWork w;
    newton_schulz_layout(&w, rows, cols, work);
    LAUNCH(chunks, BLOCK_TEAM, newton_schulz_greatest, w.partial, in, n);
    LAUNCH(1, BLOCK_TEAM, newton_schulz_greatest_of, w.figures, w.partial, (int)chunks);
    LAUNCH(chunks, BLOCK_TEAM, newton_schulz_squares, w.partial, w.figures, in, n);
    LAUNCH(1, BLOCK_TEAM, newton_schulz_norm, w.figures, w.partial, (int)chunks);
    LAUNCH(chunks, BLOCK_TEAM, newton_schulz_begin, w.x, in, w.figures, k->margin, n);
    newton_schulz_direct(&w, k, rows, cols);
    LAUNCH(chunks, BLOCK_TEAM, newton_schulz_end, out, w.x, n);
    newton_schulz_calls++;
}

void newton_schulz(float* out, const float* in, size_t rows, size_t cols, char* work) {
    newton_schulz_with(&newton_schulz_polar, out, in, rows, cols, work);
}
