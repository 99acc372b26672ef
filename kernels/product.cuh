// product.cuh - matrix products with factors and leading dimensions, and symmetric ones of which about half is computed: what
// orthogonalising optimizers are made of. cuBLASLt on the GPU; on the CPU products are cut into tiles, each the work of one thread: sizes
// depend on the shapes alone, so that results do not depend on the number of threads.
#pragma once
#include "matmul.cuh"

// Row-major: C (M,N) = alpha op(A) op(B) + beta D, op(A) is (M,K), op(B) is (K,N); ld = row length as stored. D is laid out like C, may
// be C, and NULL with beta 0. C is neither A nor B.
typedef struct {
    bool ta, tb;
    size_t M, N, K;
    float alpha, beta;
    const floatX *A, *B, *D;
    floatX* C;
    size_t lda, ldb, ldc;
} Product;

// C (m,m) = alpha op(A) op(B) + beta D + diagonal I, known to be symmetric: about half of it is computed, the rest mirrored. op(A) is
// (m,k), op(B) is (k,m); C and D are dense.
typedef struct {
    bool ta, tb;
    size_t m, k;
    float alpha, beta, diagonal;
    const floatX *A, *B, *D;
    floatX* C;
    size_t lda, ldb;
} Symmetric;

static inline void product_tile_of(Product* tile, const Product* p, size_t row, size_t col, size_t rows, size_t cols) {
    *tile = *p;
    tile->M = min_size(rows, p->M - row);
    tile->N = min_size(cols, p->N - col);
    tile->A = p->A + (p->ta ? row : row * p->lda);
    tile->B = p->B + (p->tb ? col * p->ldb : col);
    tile->C = p->C + row * p->ldc + col;
    tile->D = p->D ? p->D + row * p->ldc + col : NULL;
}

#if !ON_GPU || defined(CUDA_ON_CPU)
#define PRODUCT_TILE 256

// This thread's scratch for tiles, kept for the life of the thread.
static inline float* product_arena(size_t n) {
    static __thread float* arena = NULL;
    static __thread size_t capacity = 0;
    if (n > capacity) {
        free(arena);
        capacity = round_up(n, 1024);
        arena = (float*)need(aligned_alloc(64, capacity * sizeof(float)));
    }
    return arena;
}

// C here is fp32, whatever floatX is; p's own C is not touched.
static void product_sgemm(const Product* p, const float* A, size_t lda, const float* B, size_t ldb, float beta, float* C, size_t ldc) {
    gemm_piece(p->ta, p->tb, p->M, p->N, p->K, p->alpha, A, lda, B, ldb, beta, C, ldc);
}

#ifdef FLOATX_BF16
static void product_widen(float* out, const floatX* in, size_t rows, size_t cols, size_t ld) {
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < cols; j++) { out[i * cols + j] = load(in + i * ld + j); }
    }
}
#endif

// Floats of scratch that product_tile needs beside its result.
static inline size_t product_scratch(const Product* p) {
#ifdef FLOATX_BF16
    return round_up((p->M + p->N) * p->K, 16);
#else
    (void)p;
    return 0;
#endif
}

// out (M, N; row length ld) = alpha op(A) op(B) + beta out, in fp32
static void product_tile(const Product* p, float beta, float* out, size_t ld, float* scratch) {
#ifdef FLOATX_BF16
    size_t a_rows = p->ta ? p->K : p->M, a_cols = p->ta ? p->M : p->K, b_rows = p->tb ? p->N : p->K, b_cols = p->tb ? p->K : p->N;
    float *a = scratch, *b = a + a_rows * a_cols;
    product_widen(a, p->A, a_rows, a_cols, p->lda);
    product_widen(b, p->B, b_rows, b_cols, p->ldb);
    product_sgemm(p, a, a_cols, b, b_cols, beta, out, ld);
#else
    (void)scratch;
    product_sgemm(p, &p->A->value, p->lda, &p->B->value, p->ldb, beta, out, ld);
#endif
}

static void product_one(const Product* p) {
#ifdef FLOATX_BF16
    float *scratch = product_arena(product_scratch(p) + p->M * p->N), *c = scratch + product_scratch(p);
    if (p->D) { product_widen(c, p->D, p->M, p->N, p->ldc); }
    product_tile(p, p->D ? p->beta : 0.0f, c, p->N, scratch);
    for (size_t i = 0; i < p->M; i++) {
        for (size_t j = 0; j < p->N; j++) { store(p->C + i * p->ldc + j, c[i * p->N + j]); }
    }
#else
    for (size_t i = 0; i < p->M && p->D && p->D != p->C; i++) { memcpy(p->C + i * p->ldc, p->D + i * p->ldc, p->N * sizeof(floatX)); }
    product_tile(p, p->D ? p->beta : 0.0f, &p->C->value, p->ldc, NULL);
#endif
}

// A library with threads of its own is called by one thread at a time.
static inline bool product_threads(size_t tasks) { return tasks > 1 && gemm_state.library != GEMM_OPENBLAS; }
#endif

void product_run(const Product* p) {
    if (p->M == 0 || p->N == 0) { return; }
#if ON_GPU && !defined(CUDA_ON_CPU)
    GemmCall g = {p->C, p->B, p->A, p->D, NULL, NULL, p->N, p->M, p->K, p->ldb, p->lda, p->ldc, p->tb, p->ta, p->alpha, p->D ? p->beta : 0.0f,
                  GEMM_EPILOGUE_NONE};
    gemm_gpu_call(&g);
#else
    // at least four tiles, where they are not too small
    size_t rows = min_size(PRODUCT_TILE, max_size(64, round_up(ceil_div(p->M, 2), 16))), row_tiles = ceil_div(p->M, rows);
    size_t cols = min_size(PRODUCT_TILE, max_size(64, round_up(ceil_div(p->N, 2), 16))), tiles = row_tiles * ceil_div(p->N, cols);
    DO_PRAGMA(omp parallel for schedule(dynamic, 1) if (product_threads(tiles)))
    for (size_t i = 0; i < tiles; i++) {
        Product tile;
        product_tile_of(&tile, p, i % row_tiles * rows, i / row_tiles * cols, rows, cols);
        product_one(&tile);
    }
#endif
}

static inline Product symmetric_product(const Symmetric* s) {
    Product p = {s->ta, s->tb, s->m, s->m, s->k, s->alpha, s->beta, s->A, s->B, s->D, s->C, s->lda, s->ldb, s->m};
    return p;
}

#if ON_GPU
#define SYMMETRIC_STRIP 1024 // rows a call of the library

#ifdef FLOATX_BF16
#define SYMMETRIC_EXACTLY false // of two values that differ by rounding alone
#else
#define SYMMETRIC_EXACTLY true
#endif

// Row of the lower triangle: the diagonal; and its mirror image.
DEVICE void symmetric_finish_row(Team t, size_t row, floatX* C, float diagonal, size_t m) {
    for (int i = t.rank; i <= (int)row; i += t.size) {
        float x = load(C + row * m + (size_t)i) + ((size_t)i == row ? diagonal : 0.0f);
        store(C + row * m + (size_t)i, x);
        store(C + (size_t)i * m + row, x);
    }
}

static void symmetric_one(const Symmetric* s) {
    Product all = symmetric_product(s), strip;
    for (size_t row = 0; row < s->m; row += SYMMETRIC_STRIP) {
        product_tile_of(&strip, &all, row, 0, SYMMETRIC_STRIP, min_size(s->m, row + SYMMETRIC_STRIP));
        product_run(&strip);
    }
    if (SYMMETRIC_EXACTLY || s->m > SYMMETRIC_STRIP || s->diagonal != 0.0f) {
        LAUNCH(s->m, WARP_TEAM, symmetric_finish_row, s->C, s->diagonal, s->m);
    }
}
#else
// About an eighth of m, by which 9/16 of the whole is computed.
static inline size_t symmetric_tile(size_t m) { return min_size(128, max_size(48, round_up(ceil_div(m, 8), 16))); }

// Tile (row, col), row >= col, and its mirror image.
static void symmetric_one_tile(const Symmetric* s, size_t row, size_t col, size_t size) {
    Product all = symmetric_product(s), tile;
    product_tile_of(&tile, &all, row, col, size, size);
    size_t M = tile.M, N = tile.N, extra = product_scratch(&tile);
    float *scratch = product_arena(extra + M * N), *c = scratch + extra;
    product_tile(&tile, 0.0f, c, N, scratch);
    for (size_t i = 0; i < M; i++) {
        size_t end = row == col ? i + 1 : N;
        for (size_t j = 0; tile.D && j < end; j++) { c[i * N + j] += s->beta * load(tile.D + i * s->m + j); }
        if (row == col) { c[i * N + i] += s->diagonal; }
        for (size_t j = 0; j < end; j++) { store(tile.C + i * s->m + j, c[i * N + j]); }
    }
    floatX* mirror = s->C + col * s->m + row;
    for (size_t j = 0; j < N; j++) {
        for (size_t i = row == col ? j : 0; i < M; i++) { store(mirror + j * s->m + i, c[i * N + j]); }
    }
}
#endif

// Several at once: none may read what another writes.
void symmetric_run(const Symmetric* list, size_t count) {
#if ON_GPU
    for (size_t i = 0; i < count; i++) { symmetric_one(&list[i]); }
#else
    size_t tile = symmetric_tile(list[0].m), side = ceil_div(list[0].m, tile), each = side * (side + 1) / 2; // all of one size
    DO_PRAGMA(omp parallel for schedule(dynamic, 1) if (product_threads(count * each)))
    for (size_t i = 0; i < count * each; i++) {
        size_t rest = i % each, row = 0;
        while (rest > row) { rest -= ++row; }
        symmetric_one_tile(&list[i / each], row * tile, rest * tile, tile);
    }
#endif
}
