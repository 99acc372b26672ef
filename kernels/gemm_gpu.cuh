// gemm_gpu.cuh - matrix products by cuBLASLt, with the epilogues that save a pass over memory: bias, GELU (keeping its input for
// the backward pass) and the gradient of GELU. cuBLASLt is column-major: a row-major (N, OC) tensor is its (OC x N) matrix.
#pragma once
#include "device.cuh"
#include <cublasLt.h>

#define GEMM_WORKSPACE ((size_t)32 << 20) // what cuBLASLt asks for on Hopper

#ifdef FLOATX_BF16
#define GEMM_TYPE CUDA_R_16BF
#else
#define GEMM_TYPE CUDA_R_32F
#endif

typedef enum { GEMM_EPILOGUE_NONE, GEMM_EPILOGUE_GELU, GEMM_EPILOGUE_DGELU } GemmEpilogue;

static struct {
    cublasLtHandle_t handle;
    void* workspace;
    cublasComputeType_t compute;
    int gelu_fusion; // 0 none, 1 forward, 2 forward and backward
    char description[128];
} gemm_state;

#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)
static void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    fprintf(stderr, "error: %s:%d: %s: %s\n", file, line, call, cublasLtGetStatusString(status));
    exit(1);
}

// tf32: fp32 builds may use the tensor cores' shorter mantissa. (The fast compute types are for fp32 operands alone; bf16 ones need none.)
bool gemm_gpu_open(bool tf32, int gelu_fusion, Error* error) {
    if (cublasLtCreate(&gemm_state.handle) != CUBLAS_STATUS_SUCCESS) {
        return fail(error, "cuBLASLt cannot start: is the driver as new as the toolkit?");
    }
    gemm_state.workspace = device_alloc(GEMM_WORKSPACE);
    if (!gemm_state.workspace) { return fail(error, "out of GPU memory for the %zu MiB of cuBLASLt", GEMM_WORKSPACE >> 20); }
    gemm_state.compute = tf32 && GEMM_TYPE == CUDA_R_32F ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    gemm_state.gelu_fusion = gelu_fusion;
    size_t version = cublasLtGetVersion();
    snprintf(gemm_state.description, sizeof(gemm_state.description), "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return true;
}

const char* gemm_description(void) { return gemm_state.description; }

// The GELU epilogues want the kept tensor's rows at 16 bytes.
static bool gemm_gpu_fuses_gelu(int level, int columns) { return gemm_state.gelu_fusion >= level && columns % 8 == 0; }

static void gemm_attribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name, const void* value, size_t bytes) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, name, value, bytes));
}

static cublasLtMatmulDesc_t gemm_describe(bool transa, bool transb, const floatX* bias, floatX* aux, size_t m, GemmEpilogue epilogue) {
    cublasLtMatmulDesc_t desc;
    cublasOperation_t yes = CUBLAS_OP_T, no = CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, gemm_state.compute, CUDA_R_32F));
    gemm_attribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, transa ? &yes : &no, sizeof(yes));
    gemm_attribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, transb ? &yes : &no, sizeof(yes));
    cublasLtEpilogue_t kind = epilogue == GEMM_EPILOGUE_GELU    ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                              : epilogue == GEMM_EPILOGUE_DGELU ? CUBLASLT_EPILOGUE_DGELU
                              : bias                            ? CUBLASLT_EPILOGUE_BIAS
                                                                : CUBLASLT_EPILOGUE_DEFAULT;
    gemm_attribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &kind, sizeof(kind));
    if (bias) {
        cudaDataType_t type = GEMM_TYPE;
        gemm_attribute(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type));
        gemm_attribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
    }
    if (aux) {
        int64_t ld = (int64_t)m;
        gemm_attribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof(ld));
        gemm_attribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof(aux));
    }
    return desc;
}

// A product's kernel is looked up once: the search takes longer on the host than many products on the device.
typedef struct {
    size_t m, n, k;
    size_t lda, ldb, ldd;
    uint32_t flags; // transa, transb, accumulate, bias, epilogue, alignments
    cublasLtMatmulAlgo_t algo;
} GemmChoice;

static struct {
    GemmChoice rows[256];
    size_t count;
} gemm_choices;

static cublasLtMatrixLayout_t gemm_layout(size_t rows, size_t columns, size_t ld) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, GEMM_TYPE, rows, columns, (int64_t)ld));
    return layout;
}

// log2 of the largest power of two up to 256 that divides the address: cuBLASLt may only choose kernels that keep to it.
static uint32_t gemm_alignment(const void* p) { return (uint32_t)__builtin_ctzll((unsigned long long)(uintptr_t)p | 256); }

static void gemm_preference(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t name, uint32_t alignment) {
    uint32_t bytes = 1u << alignment;
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, name, &bytes, sizeof(bytes)));
}

static void gemm_search(GemmChoice* choice, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t d,
                        uint32_t align_a, uint32_t align_b, uint32_t align_d) {
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    size_t workspace = GEMM_WORKSPACE;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; // parts of a long sum are added in fp32, never in the output's type
    int found = 0;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof(reductions)));
    gemm_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align_a);
    gemm_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_b);
    gemm_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_d);
    gemm_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_d);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gemm_state.handle, desc, a, b, d, d, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
        fprintf(stderr, "error: cuBLASLt has no kernel for m %zu, n %zu, k %zu (%s)%s\n", choice->m, choice->n, choice->k,
                cublasLtGetStatusString(status), gemm_state.gelu_fusion ? "; try --gelu-fusion 0" : "");
        exit(1);
    }
    choice->algo = result.algo;
}

// A product in column-major terms: D (m,n) = alpha op(A) op(B) + beta C, op(A) is (m,k), op(B) is (k,n); ld = distance between columns as
// stored. C is laid out like D, may be D, and is NULL with beta 0.
typedef struct {
    floatX* D;
    const floatX *A, *B, *C, *bias;
    floatX* aux;
    size_t m, n, k, lda, ldb, ldd;
    bool transa, transb;
    float alpha, beta;
    GemmEpilogue epilogue;
} GemmCall;

static void gemm_gpu_call(const GemmCall* g) {
    if (g->m == 0 || g->n == 0) { return; }
    cublasLtMatmulDesc_t desc = gemm_describe(g->transa, g->transb, g->bias, g->aux, g->m, g->epilogue);
    cublasLtMatrixLayout_t a = g->transa ? gemm_layout(g->k, g->m, g->lda) : gemm_layout(g->m, g->k, g->lda);
    cublasLtMatrixLayout_t b = g->transb ? gemm_layout(g->n, g->k, g->ldb) : gemm_layout(g->k, g->n, g->ldb);
    cublasLtMatrixLayout_t d = gemm_layout(g->m, g->n, g->ldd);
    uint32_t align_a = gemm_alignment(g->A), align_b = gemm_alignment(g->B), align_d = gemm_alignment(g->D);
    const floatX* C = g->C ? g->C : g->D;
    if (gemm_alignment(C) < align_d) { align_d = gemm_alignment(C); }
    GemmChoice wanted;
    memset(&wanted, 0, sizeof(wanted));
    wanted.m = g->m;
    wanted.n = g->n;
    wanted.k = g->k;
    wanted.lda = g->lda;
    wanted.ldb = g->ldb;
    wanted.ldd = g->ldd;
    wanted.flags = (uint32_t)g->transa | (uint32_t)g->transb << 1 | (uint32_t)(g->beta != 0.0f) << 2 | (uint32_t)(g->bias != NULL) << 3 |
                   (uint32_t)g->epilogue << 4 | align_a << 8 | align_b << 12 | align_d << 16 | gemm_alignment(g->bias) << 20 |
                   gemm_alignment(g->aux) << 24;
    size_t i = 0;
    while (i < gemm_choices.count && memcmp(&gemm_choices.rows[i], &wanted, offsetof(GemmChoice, algo)) != 0) { i++; }
    if (i == gemm_choices.count) {
        if (i == COUNT_OF(gemm_choices.rows)) { i = gemm_choices.count = 0; } // full: start over
        gemm_search(&wanted, desc, a, b, d, align_a, align_b, align_d);
        gemm_choices.rows[gemm_choices.count++] = wanted;
    }
    CUBLAS_CHECK(cublasLtMatmul(gemm_state.handle, desc, &g->alpha, g->A, a, g->B, b, &g->beta, C, d, g->D, d, &gemm_choices.rows[i].algo,
                                gemm_state.workspace, GEMM_WORKSPACE, device_stream));
    cublasLtMatmulDescDestroy(desc);
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatrixLayoutDestroy(b);
    cublasLtMatrixLayoutDestroy(d);
}

// Column-major: D (m,n) = op(A) op(B) (+ D when accumulate), op(A) is (m,k), op(B) is (k,n), all dense.
static void gemm_gpu(floatX* D, const floatX* A, const floatX* B, const floatX* bias, floatX* aux, size_t m, size_t n, size_t k, bool transa,
                     bool transb, bool accumulate, GemmEpilogue epilogue) {
    GemmCall g = {D, A, B, D, bias, aux, m, n, k, transa ? k : m, transb ? n : k, m, transa, transb, 1.0f, accumulate ? 1.0f : 0.0f, epilogue};
    gemm_gpu_call(&g);
}
