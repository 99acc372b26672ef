// gemm_cpu.h - fp32 matrix products on the CPU by the best library at hand, chosen at run time: oneDNN's sgemm, else OpenBLAS,
// else the loops below. Nothing is linked, so the program starts and trains where none is installed.
// OpenBLAS picks its kernel in its constructor and falls back to SSE for CPUs it does not know: the core is named from CPUID
// before it is loaded, unless the user has done so (OPENBLAS_CORETYPE).
#pragma once
#include "base.h"
#include <dlfcn.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef enum { GEMM_AUTO, GEMM_ONEDNN, GEMM_OPENBLAS, GEMM_OWN } GemmLibrary;

// oneDNN: row-major, C = alpha op(A) op(B) + beta C
typedef int (*OnednnSgemm)(char transa, char transb, int64_t M, int64_t N, int64_t K, float alpha, const float* A, int64_t lda,
                           const float* B, int64_t ldb, float beta, float* C, int64_t ldc);
typedef void (*CblasSgemm)(int order, int transa, int transb, int M, int N, int K, float alpha, const float* A, int lda,
                           const float* B, int ldb, float beta, float* C, int ldc);

static struct {
    GemmLibrary library;
    OnednnSgemm onednn;
    CblasSgemm cblas;
    char description[128];
} gemm_state;

static bool gemm_load_onednn(void) {
    const char* names[] = {"libdnnl.so.3", "libdnnl.so.2", "libdnnl.so"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        void* library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) { continue; }
        gemm_state.onednn = (OnednnSgemm)dlsym(library, "dnnl_sgemm");
        typedef struct {
            int major, minor, patch;
        } Version; // the first fields of dnnl_version_t
        typedef const Version* (*VersionFunction)(void);
        VersionFunction version = (VersionFunction)dlsym(library, "dnnl_version");
        if (!gemm_state.onednn) { continue; }
        const Version* v = version ? version() : NULL;
        snprintf(gemm_state.description, sizeof(gemm_state.description), "oneDNN %d.%d.%d", v ? v->major : 0, v ? v->minor : 0, v ? v->patch : 0);
        gemm_state.library = GEMM_ONEDNN;
        return true;
    }
    return false;
}

static bool gemm_load_openblas(int threads) {
#ifdef __x86_64__
    const char* core = NULL;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        core = "SkylakeX";
    } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        core = "Haswell";
    }
    if (core) { setenv("OPENBLAS_CORETYPE", core, 0); }
#endif
    const char* names[] = {"libopenblas.so.0", "libopenblas.so"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        void* library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) { continue; }
        gemm_state.cblas = (CblasSgemm)dlsym(library, "cblas_sgemm");
        if (!gemm_state.cblas) { continue; }
        typedef char* (*NameFunction)(void);
        typedef void (*ThreadsFunction)(int);
        NameFunction name = (NameFunction)dlsym(library, "openblas_get_corename");
        ThreadsFunction set_threads = (ThreadsFunction)dlsym(library, "openblas_set_num_threads");
        if (set_threads) { set_threads(threads); }
        snprintf(gemm_state.description, sizeof(gemm_state.description), "OpenBLAS (%s kernels)", name ? name() : "unknown");
        gemm_state.library = GEMM_OPENBLAS;
        return true;
    }
    return false;
}

// Call once before the first gemm; again to change the library.
bool gemm_open(GemmLibrary wanted, int threads, Error* error) {
    if ((wanted == GEMM_AUTO || wanted == GEMM_ONEDNN) && gemm_load_onednn()) { return true; }
    if (wanted == GEMM_ONEDNN) { return fail(error, "--gemm onednn: libdnnl is not installed; try apt-get install libdnnl-dev, or --gemm auto"); }
    if ((wanted == GEMM_AUTO || wanted == GEMM_OPENBLAS) && gemm_load_openblas(threads)) { return true; }
    if (wanted == GEMM_OPENBLAS) {
        return fail(error, "--gemm openblas: libopenblas is not installed; try apt-get install libopenblas0, or --gemm auto");
    }
    gemm_state.library = GEMM_OWN;
    snprintf(gemm_state.description, sizeof(gemm_state.description), "own loops (slow: install libdnnl-dev)");
    return true;
}

const char* gemm_description(void) { return gemm_state.library == GEMM_AUTO ? "not opened" : gemm_state.description; }

// --- own loops: tiles of C in registers, panels of A and B packed so that the inner loop runs at unit stride

#define OWN_ROWS 8    // rows of a register tile
#define OWN_COLS 32   // columns of a register tile
#define OWN_DEPTH 256 // K per pass
#define OWN_BAND 64   // rows of C per task: a panel of B is packed once for all of them

typedef struct {
    bool ta, tb;
    size_t M, N, K;
    float alpha, beta;
    const float *A, *B;
    float* C;
    size_t lda, ldb, ldc;
} OwnGemm;

// panel[k * width + i] = X(first + i, k0 + k), zeros beyond `count`; along_k says that k is the unit stride of X.
static void own_pack(float* panel, const float* X, size_t ld, bool along_k, size_t first, size_t count, size_t width, size_t k0, size_t depth) {
    if (count < width) { memset(panel, 0, depth * width * sizeof(float)); }
    for (size_t i = 0; along_k && i < count; i++) {
        const float* x = X + (first + i) * ld + k0;
        for (size_t k = 0; k < depth; k++) { panel[k * width + i] = x[k]; }
    }
    for (size_t k = 0; !along_k && k < depth; k++) { memcpy(panel + k * width, X + (k0 + k) * ld + first, count * sizeof(float)); }
}

static void own_tile(float* C, size_t ldc, const float* a, const float* b, size_t depth, size_t rows, size_t cols, float alpha) {
    float sum[OWN_ROWS][OWN_COLS] = {{0.0f}};
    for (size_t k = 0; k < depth; k++) {
        for (int i = 0; i < OWN_ROWS; i++) {
            for (int j = 0; j < OWN_COLS; j++) { sum[i][j] += a[k * OWN_ROWS + (size_t)i] * b[k * OWN_COLS + (size_t)j]; }
        }
    }
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < cols; j++) { C[i * ldc + j] += alpha * sum[i][j]; }
    }
}

static void own_band(const OwnGemm* g, size_t band) {
    size_t first = band * OWN_BAND, rows = min_size(OWN_BAND, g->M - first);
    float a[OWN_DEPTH * OWN_BAND], b[OWN_DEPTH * OWN_COLS];
    for (size_t i = first; i < first + rows; i++) { // beta = 0 overwrites, whatever stood there
        float* c = g->C + i * g->ldc;
        for (size_t j = 0; j < g->N; j++) { c[j] = g->beta == 0.0f ? 0.0f : g->beta * c[j]; }
    }
    for (size_t k0 = 0; k0 < g->K; k0 += OWN_DEPTH) {
        size_t depth = min_size(OWN_DEPTH, g->K - k0);
        for (size_t i = 0; i < rows; i += OWN_ROWS) {
            own_pack(a + i * OWN_DEPTH, g->A, g->lda, !g->ta, first + i, min_size(OWN_ROWS, rows - i), OWN_ROWS, k0, depth);
        }
        for (size_t col = 0; col < g->N; col += OWN_COLS) {
            size_t cols = min_size(OWN_COLS, g->N - col);
            own_pack(b, g->B, g->ldb, g->tb, col, cols, OWN_COLS, k0, depth);
            for (size_t i = 0; i < rows; i += OWN_ROWS) {
                own_tile(g->C + (first + i) * g->ldc + col, g->ldc, a + i * OWN_DEPTH, b, depth, min_size(OWN_ROWS, rows - i), cols, g->alpha);
            }
        }
    }
}

static void gemm_own(const OwnGemm* g) {
    DO_PRAGMA(omp parallel for schedule(static))
    for (size_t band = 0; band < ceil_div(g->M, OWN_BAND); band++) { own_band(g, band); }
}

// ---- oneDNN on our own cut ----

#define GEMM_PIECE 128 // fewer rows or columns a thread are left to the library's own cut

static void gemm_onednn_call(char ta, char tb, size_t M, size_t N, size_t K, float alpha, const float* A, size_t lda, const float* B,
                             size_t ldb, float beta, float* C, size_t ldc) {
    int status = gemm_state.onednn(ta, tb, (int64_t)M, (int64_t)N, (int64_t)K, alpha, A, (int64_t)lda, B, (int64_t)ldb, beta, C, (int64_t)ldc);
    if (status != 0) {
        fprintf(stderr, "error: oneDNN's sgemm failed with status %d (M %zu, N %zu, K %zu); try --gemm own\n", status, M, N, K);
        exit(1);
    }
}

// Each thread takes an equal strip of the longer side and runs the library on it alone. For the few rows of a small batch the
// library's own cut is slower: forward of 256 x 768 x 3072 140 against 189 GFLOP/s on 2 threads, never better at the shapes tried.
static void gemm_onednn(bool ta, bool tb, size_t M, size_t N, size_t K, float alpha, const float* A, size_t lda, const float* B, size_t ldb,
                        float beta, float* C, size_t ldc) {
    char a = ta ? 'T' : 'N', b = tb ? 'T' : 'N';
    size_t threads = 1, longer = max_size(M, N);
#ifdef _OPENMP
    threads = (size_t)omp_get_max_threads();
#endif
    if (threads == 1 || longer < GEMM_PIECE * threads) {
        gemm_onednn_call(a, b, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
        return;
    }
    size_t strip = round_up(ceil_div(longer, threads), 16);
    DO_PRAGMA(omp parallel for schedule(static, 1))
    for (size_t first = 0; first < longer; first += strip) {
        size_t count = min_size(strip, longer - first);
        size_t m = N >= M ? M : count, n = N >= M ? count : N, row = N >= M ? 0 : first, col = N >= M ? first : 0;
        gemm_onednn_call(a, b, m, n, K, alpha, ta ? A + row : A + row * lda, lda, tb ? B + col * ldb : B + col, ldb, beta, C + row * ldc + col,
                         ldc);
    }
}

// Row-major: C (M,N) = alpha op(A) op(B) + beta C, op(A) is (M,K), op(B) is (K,N); ld = row length as stored.
void gemm(bool ta, bool tb, size_t M, size_t N, size_t K, float alpha, const float* A, size_t lda, const float* B, size_t ldb, float beta,
          float* C, size_t ldc) {
    if (M == 0 || N == 0) { return; }
    switch (gemm_state.library) {
    case GEMM_ONEDNN:
        gemm_onednn(ta, tb, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
        break;
    case GEMM_OPENBLAS:
        gemm_state.cblas(101, ta ? 112 : 111, tb ? 112 : 111, (int)M, (int)N, (int)K, alpha, A, (int)lda, B, (int)ldb, beta, C, (int)ldc);
        break;
    default: {
        OwnGemm g = {ta, tb, M, N, K, alpha, beta, A, B, C, lda, ldb, ldc};
        gemm_own(&g);
    }
    }
}

// The same for a piece of a product that its caller has cut for its threads: oneDNN runs it on the calling one.
void gemm_piece(bool ta, bool tb, size_t M, size_t N, size_t K, float alpha, const float* A, size_t lda, const float* B, size_t ldb,
                float beta, float* C, size_t ldc) {
    if (gemm_state.library == GEMM_ONEDNN) {
        gemm_onednn_call(ta ? 'T' : 'N', tb ? 'T' : 'N', M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
    } else {
        gemm(ta, tb, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
    }
}
