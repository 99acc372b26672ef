// orthonormal.cuh - an orthonormal basis of the column space of a square matrix: the Q of its QR factors, and the fp32 products that it
// and its callers run on. Householder reflectors in blocks (compact WY: Schreiber and Van Loan 1989): Q is orthonormal to rounding for any
// input; columns that depend on earlier ones get some completion of the basis, a matrix of zeros the identity.
// Everything is stored transposed: row j of `a` is column j of the matrix, and row j of `q` is the j-th vector of the basis, so that
// reflectors and vectors are contiguous.
// All of it is fp32 in every build: rounded to bf16 (or on tensor cores to TF32's 11 bits), vectors would be orthogonal to 1e-3 only.
// Results do not depend on the number of threads: work is cut at fixed sizes, and each piece is run by one team.
#pragma once
#include "../kernels/device.cuh"
#if !ON_GPU
#include "../kernels/gemm_cpu.h"
#endif

// Row-major: C (M,N) = alpha op(A) op(B) + beta C, op(A) is (M,K), op(B) is (K,N); ld = row length as stored. C overlaps neither.
typedef struct {
    bool ta, tb;
    size_t M, N, K;
    float alpha, beta;
    const float *A, *B;
    float* C;
    size_t lda, ldb, ldc;
} FloatProduct;

#if ON_GPU
#define FLOAT_TILE 64  // rows and columns of C of one team
#define FLOAT_DEPTH 16 // K per pass
#define FLOAT_MICRO 4  // rows and columns of C of one thread
#define FLOAT_ACROSS (FLOAT_TILE / FLOAT_MICRO)
#define FLOAT_PITCH (FLOAT_TILE + 4) // of a panel's row: spreads the banks of shared memory
#define FLOAT_SCRATCH (2 * FLOAT_DEPTH * FLOAT_PITCH * sizeof(float))

// panel (FLOAT_DEPTH, FLOAT_TILE): op(X) from (k0, first) on, zeros past the end; along_k says that k is the unit stride of X.
DEVICE void float_product_panel(Team t, float* panel, const float* X, size_t ld, bool along_k, size_t first, size_t count, size_t k0,
                                size_t depth) {
    for (int i = t.rank; i < FLOAT_DEPTH * FLOAT_TILE; i += t.size) {
        size_t k = (size_t)(along_k ? i % FLOAT_DEPTH : i / FLOAT_TILE), c = (size_t)(along_k ? i / FLOAT_DEPTH : i % FLOAT_TILE);
        bool inside = k0 + k < depth && first + c < count;
        size_t at = along_k ? (first + c) * ld + k0 + k : (k0 + k) * ld + first + c;
        panel[k * FLOAT_PITCH + c] = inside ? X[at] : 0.0f;
    }
}

DEVICE void float_product_tile(Team t, size_t tile, FloatProduct p) {
    size_t across = (p.N + FLOAT_TILE - 1) / FLOAT_TILE, row = tile / across * FLOAT_TILE, col = tile % across * FLOAT_TILE;
    float *a = (float*)(void*)t.scratch, *b = a + FLOAT_DEPTH * FLOAT_PITCH;
    for (int first = 0; first < FLOAT_ACROSS * FLOAT_ACROSS; first += t.size) { // once, with a team of 256
        int micro = first + t.rank, r = micro / FLOAT_ACROSS * FLOAT_MICRO, c = micro % FLOAT_ACROSS * FLOAT_MICRO;
        float sum[FLOAT_MICRO][FLOAT_MICRO] = {{0.0f}};
        for (size_t k0 = 0; k0 < p.K; k0 += FLOAT_DEPTH) {
            float_product_panel(t, a, p.A, p.lda, !p.ta, row, p.M, k0, p.K);
            float_product_panel(t, b, p.B, p.ldb, p.tb, col, p.N, k0, p.K);
            team_sync(t);
            for (int k = 0; k < FLOAT_DEPTH; k++) {
                const float *x = a + k * FLOAT_PITCH + r, *y = b + k * FLOAT_PITCH + c;
                for (int i = 0; i < FLOAT_MICRO; i++) {
                    for (int j = 0; j < FLOAT_MICRO; j++) { sum[i][j] += x[i] * y[j]; }
                }
            }
            team_sync(t);
        }
        for (int i = 0; i < FLOAT_MICRO; i++) {
            for (int j = 0; j < FLOAT_MICRO; j++) {
                size_t m = row + (size_t)(r + i), n = col + (size_t)(c + j);
                if (m >= p.M || n >= p.N) { continue; }
                float* out = p.C + m * p.ldc + n;
                *out = p.alpha * sum[i][j] + (p.beta == 0.0f ? 0.0f : p.beta * *out);
            }
        }
    }
}

void float_product(const FloatProduct* p) {
    LAUNCH_SCRATCH(ceil_div(p->M, FLOAT_TILE) * ceil_div(p->N, FLOAT_TILE), BLOCK_TEAM, FLOAT_SCRATCH, float_product_tile, *p);
}
#else
#define FLOAT_ROWS 128 // of a piece of C: measured best of 64..256, the library's speed on a whole product but for 5 %
#define FLOAT_COLS 256
#define FLOAT_SMALL ((size_t)1 << 19) // multiply-adds: fewer cost less than to wake the threads

static void float_product_piece(const FloatProduct* p, size_t piece) {
    size_t across = ceil_div(p->N, FLOAT_COLS), row = piece / across * FLOAT_ROWS, col = piece % across * FLOAT_COLS;
    size_t M = min_size(FLOAT_ROWS, p->M - row), N = min_size(FLOAT_COLS, p->N - col);
    const float *A = p->ta ? p->A + row : p->A + row * p->lda, *B = p->tb ? p->B + col * p->ldb : p->B + col;
    float* C = p->C + row * p->ldc + col;
    gemm_piece(p->ta, p->tb, M, N, p->K, p->alpha, A, p->lda, B, p->ldb, p->beta, C, p->ldc);
}

// Even a lone piece is run inside a parallel region: there oneDNN keeps to one thread. OpenBLAS has threads of its own, and cuts by them.
void float_product(const FloatProduct* p) {
    if (p->M * p->N * p->K <= FLOAT_SMALL) {
        OwnGemm own = {p->ta, p->tb, p->M, p->N, p->K, p->alpha, p->beta, p->A, p->B, p->C, p->lda, p->ldb, p->ldc};
        for (size_t band = 0; band < ceil_div(p->M, OWN_BAND); band++) { own_band(&own, band); }
        return;
    }
    size_t pieces = ceil_div(p->M, FLOAT_ROWS) * ceil_div(p->N, FLOAT_COLS);
    DO_PRAGMA(omp parallel for schedule(static) if (gemm_state.library != GEMM_OPENBLAS))
    for (size_t i = 0; i < pieces; i++) { float_product_piece(p, i); }
}
#endif

// C (M,N) = op(A) op(B), dense
void float_product_dense(bool ta, bool tb, size_t M, size_t N, size_t K, const float* A, const float* B, float* C) {
    FloatProduct p = {ta, tb, M, N, K, 1.0f, 0.0f, A, B, C, ta ? M : K, tb ? K : N, N};
    float_product(&p);
}

// ---- QR ----

#define QR_BLOCK 32 // reflectors applied at once

typedef struct {
    float *tau, *triangles, *y, *z; // (n), (blocks, QR_BLOCK, QR_BLOCK), (n, QR_BLOCK) twice
} QrWork;

static inline size_t qr_layout(QrWork* w, size_t n, char* work) {
    size_t blocks = ceil_div(n, QR_BLOCK), at = 0;
    w->tau = (float*)work_take(work, &at, n * sizeof(float));
    w->triangles = (float*)work_take(work, &at, blocks * QR_BLOCK * QR_BLOCK * sizeof(float));
    w->y = (float*)work_take(work, &at, n * QR_BLOCK * sizeof(float));
    w->z = (float*)work_take(work, &at, n * QR_BLOCK * sizeof(float));
    return at;
}

size_t qr_work_bytes(size_t n) {
    QrWork w;
    return qr_layout(&w, n, NULL);
}

// Row j becomes the vector v of its reflector H = I - tau v v^T, which brings it to a multiple of the j-th unit vector: v[j] = 1, zeros
// before. What R would hold there is not needed. Divided by the greatest value, squares neither overflow nor vanish.
DEVICE void qr_reflector(Team t, float* row, float* tau, int j, int n) {
    float* x = row + j;
    int count = n - j;
    float first = x[0], most = 0.0f, squares = 0.0f;
    TEAM_MAX_FOR(i, count, most) { most = fmaxf(most, fabsf(x[i])); }
    most = team_max(t, most);
    float divisor = most > 0.0f ? most : 1.0f;
    TEAM_SUM_FOR(i, count, squares) {
        float r = x[i] / divisor;
        squares += r * r;
    }
    float norm = sqrtf(team_sum(t, squares)), head = first / divisor, target = head > 0.0f ? -norm : norm;
    float below = head - target; // no cancellation: the signs differ
    TEAM_FOR(i, count) { x[i] = i == 0 ? 1.0f : below != 0.0f ? x[i] / divisor / below : 0.0f; }
    TEAM_FOR(i, j) { row[i] = 0.0f; }
    if (t.rank == 0) { tau[j] = below != 0.0f ? (target - head) / target : 0.0f; }
}

// Team `task` brings row j + task up to date by reflector j - 1 (unless the block begins at j); the first then makes reflector j.
DEVICE void qr_column(Team t, size_t task, float* a, float* tau, int j, bool begins, int n) {
    float* row = a + ((size_t)j + task) * (size_t)n;
    if (!begins) {
        const float* v = a + (size_t)(j - 1) * (size_t)n + (j - 1);
        float *x = row + (j - 1), dot = 0.0f;
        int count = n - (j - 1);
        TEAM_SUM_FOR(i, count, dot) { dot += v[i] * x[i]; }
        dot = tau[j - 1] * team_sum(t, dot);
        TEAM_FOR(i, count) { x[i] -= dot * v[i]; }
        team_sync(t);
    }
    if (task == 0) { qr_reflector(t, row, tau, j, n); }
}

#if !ON_GPU
// All columns of a block by one thread: to wait for other threads at each takes longer than the columns themselves.
DEVICE void qr_columns(Team t, size_t task, float* a, float* tau, int first, int depth, int n) {
    for (int j = first + (int)task; j < first + depth; j++) {
        for (int k = j; k < first + depth; k++) { qr_column(t, (size_t)(k - j), a, tau, j, j == first, n); }
    }
}
#endif

// Rows first .. first + depth - 1 become vectors of reflectors. On the GPU a column a launch, with a team for each row that is left.
static inline void qr_reflectors(const QrWork* w, float* a, int first, int depth, int n) {
#if ON_GPU
    for (int j = first; j < first + depth; j++) { LAUNCH((size_t)(first + depth - j), BLOCK_TEAM, qr_column, a, w->tau, j, j == first, n); }
#else
    LAUNCH(1, BLOCK_TEAM, qr_columns, a, w->tau, first, depth, n);
#endif
}

// out (QR_BLOCK, QR_BLOCK): the upper triangular T of H_1 ... H_b = I - V^T T V; gram (b, QR_BLOCK) = V V^T, rows of V are the vectors
DEVICE void qr_triangle(Team t, size_t block, float* triangles, const float* gram, const float* tau, int b) {
    float* out = triangles + block * QR_BLOCK * QR_BLOCK;
    TEAM_FOR(i, QR_BLOCK * QR_BLOCK) { out[i] = 0.0f; }
    team_sync(t);
    for (int j = 0; j < b; j++) {
        float scale = tau[j];
        TEAM_FOR(i, j) {
            float sum = 0.0f;
            for (int k = i; k < j; k++) { sum += out[i * QR_BLOCK + k] * gram[k * QR_BLOCK + j]; }
            out[i * QR_BLOCK + j] = -scale * sum;
        }
        if (t.rank == 0) { out[j * QR_BLOCK + j] = scale; }
        team_sync(t);
    }
}

DEVICE void qr_identity(Team t, size_t row, float* q, int n) {
    TEAM_FOR(i, n) { q[row * (size_t)n + (size_t)i] = (size_t)i == row ? 1.0f : 0.0f; }
}

void identity_matrix(float* q, size_t n) { LAUNCH(n, WARP_TEAM, qr_identity, q, (int)n); }

// rows (count, width) -= y op(T) V, where y (count, QR_BLOCK) = rows V^T and V (depth, width) are a block's vectors; both have row length n
static inline void qr_apply(const QrWork* w, float* rows, const float* v, const float* y, size_t block, bool transposed, size_t count,
                            size_t width, size_t depth, size_t n) {
    const float* triangle = w->triangles + block * QR_BLOCK * QR_BLOCK;
    FloatProduct small = {false, transposed, count, depth, depth, 1.0f, 0.0f, y, triangle, w->z, QR_BLOCK, QR_BLOCK, QR_BLOCK};
    FloatProduct update = {false, false, count, width, depth, -1.0f, 1.0f, w->z, v, rows, QR_BLOCK, n, n};
    float_product(&small);
    float_product(&update);
}

// rows of `a` (n,n), the columns of a matrix, become the vectors of its reflectors
static inline void qr_factor(const QrWork* w, float* a, size_t n) {
    for (size_t first = 0; first < n; first += QR_BLOCK) {
        size_t depth = min_size(QR_BLOCK, n - first), rest = n - first - depth, block = first / QR_BLOCK;
        float* v = a + first * n + first;
        qr_reflectors(w, a, (int)first, (int)depth, (int)n);
        FloatProduct products = {false, true, depth + rest, depth, n - first, 1.0f, 0.0f, v, v, w->y, n, n, QR_BLOCK};
        float_product(&products);
        LAUNCH(1, WARP_TEAM, qr_triangle, w->triangles + block * QR_BLOCK * QR_BLOCK, w->y, w->tau + first, (int)depth);
        if (rest) { qr_apply(w, v + depth * n, v, w->y + depth * QR_BLOCK, block, false, rest, n - first, depth, n); }
    }
}

// q (n,n): row j is the j-th vector of an orthonormal basis such that the first j of them span the first j rows of `a` (n,n), which is
// used up; work: qr_work_bytes(n). A sign is free in each vector.
void orthonormal_rows(float* q, float* a, size_t n, char* work) {
    QrWork w;
    qr_layout(&w, n, work);
    qr_factor(&w, a, n);
    identity_matrix(q, n);
    for (size_t block = ceil_div(n, QR_BLOCK); block > 0; block--) { // H_1 ... H_n I, from the last
        size_t first = (block - 1) * QR_BLOCK, depth = min_size(QR_BLOCK, n - first), width = n - first;
        const float* v = a + first * n + first;
        float* rows = q + first * n + first;
        FloatProduct products = {false, true, width, depth, width, 1.0f, 0.0f, rows, v, w.y, n, n, QR_BLOCK};
        float_product(&products);
        qr_apply(&w, rows, v, w.y, block - 1, true, width, width, depth, n);
    }
}
