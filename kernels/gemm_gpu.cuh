// gemm_gpu.cuh - matrix products by cuBLASLt, with the epilogues that save a pass over memory: bias, GELU (keeping its input for
// the backward pass) and the gradient of GELU. cuBLASLt is column-major: a row-major (N, OC) tensor is its (OC x N) matrix.
#pragma once
#include "device.cuh"
#include <cublasLt.h>

#define GEMM_WORKSPACE ((size_t)32 << 20) // what cuBLASLt asks for on Hopper

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

// tf32: fp32 builds may use the tensor cores' shorter mantissa.
bool gemm_gpu_open(bool tf32, int gelu_fusion, Error* error) {
    if (cublasLtCreate(&gemm_state.handle) != CUBLAS_STATUS_SUCCESS) { return fail(error, "cuBLASLt cannot start: is the driver as new as the toolkit?"); }
    gemm_state.workspace = device_alloc(GEMM_WORKSPACE);
    if (!gemm_state.workspace) { return fail(error, "out of GPU memory for the %zu MiB of cuBLASLt", GEMM_WORKSPACE >> 20); }
    gemm_state.compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    gemm_state.gelu_fusion = gelu_fusion;
    size_t version = cublasLtGetVersion();
    snprintf(gemm_state.description, sizeof(gemm_state.description), "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return true;
}

const char* gemm_description(void) { return gemm_state.description; }

// The GELU epilogues want the kept tensor's rows at 16 bytes.
static bool gemm_gpu_fuses_gelu(int level, int columns) { return gemm_state.gelu_fusion >= level && columns % 8 == 0; }

#ifdef FLOATX_BF16
#define GEMM_TYPE CUDA_R_16BF
#else
#define GEMM_TYPE CUDA_R_32F
#endif

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

static cublasLtMatrixLayout_t gemm_layout(size_t rows, size_t columns) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, GEMM_TYPE, rows, columns, (int64_t)rows));
    return layout;
}

// The largest power of two up to 256 that divides the address: cuBLASLt may only choose kernels that keep to it.
static uint32_t gemm_alignment(const void* p) { return (uint32_t)min_size(256, (size_t)((uintptr_t)p & (~(uintptr_t)p + 1))); }

// Column-major: D (m,n) = op(A) op(B) (+ D when accumulate), op(A) is (m,k), op(B) is (k,n), all dense.
static void gemm_gpu(floatX* D, const floatX* A, const floatX* B, const floatX* bias, floatX* aux, size_t m, size_t n, size_t k, bool transa,
                     bool transb, bool accumulate, GemmEpilogue epilogue) {
    if (m == 0 || n == 0) { return; }
    cublasLtMatmulDesc_t desc = gemm_describe(transa, transb, bias, aux, m, epilogue);
    cublasLtMatrixLayout_t a = transa ? gemm_layout(k, m) : gemm_layout(m, k);
    cublasLtMatrixLayout_t b = transb ? gemm_layout(n, k) : gemm_layout(k, n);
    cublasLtMatrixLayout_t d = gemm_layout(m, n);
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    size_t workspace = GEMM_WORKSPACE;
    uint32_t align_a = gemm_alignment(A), align_b = gemm_alignment(B), align_d = gemm_alignment(D);
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_a, sizeof(align_a)));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_b, sizeof(align_b)));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_d, sizeof(align_d)));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_d, sizeof(align_d)));
    cublasLtMatmulHeuristicResult_t choice;
    int found = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(gemm_state.handle, desc, a, b, d, d, preference, 1, &choice, &found));
    if (found == 0) {
        fprintf(stderr, "error: cuBLASLt has no kernel for m %zu, n %zu, k %zu, epilogue %d; try --gelu-fusion 0\n", m, n, k, (int)epilogue);
        exit(1);
    }
    float one = 1.0f, beta = accumulate ? 1.0f : 0.0f;
    CUBLAS_CHECK(cublasLtMatmul(gemm_state.handle, desc, &one, A, a, B, b, &beta, D, d, D, d, &choice.algo, gemm_state.workspace, GEMM_WORKSPACE,
                                device_stream));
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(desc);
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatrixLayoutDestroy(b);
    cublasLtMatrixLayoutDestroy(d);
}
