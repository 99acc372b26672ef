// matmul.cuh - linear layers: out = inp weight^T + bias, with weight (OC, C) as llm.c and PyTorch keep it. Forward with the bias or
// bias+GELU fused, backward to the input and to the weight. cuBLASLt on the GPU, the CPU's library otherwise (also for the
// emulation and the bf16 CPU build, which converts to fp32 panels: right, not fast).
#pragma once
#include "device.cuh"
#include "gelu.cuh"
#include "reduce.cuh"
#if ON_GPU && !defined(CUDA_ON_CPU)
#include "gemm_gpu.cuh"
#else
#include "gemm_cpu.h"
#endif

#if !ON_GPU || defined(CUDA_ON_CPU)
#ifdef FLOATX_BF16
static void widen(float* out, const floatX* in, size_t n) {
    DO_PRAGMA(omp parallel for simd schedule(static))
    for (size_t i = 0; i < n; i++) { out[i] = bits_float((uint32_t)in[i].bits << 16); }
}

static float* matmul_panel(int which, size_t n) {
    static float* panels[3];
    static size_t capacity[3];
    if (n > capacity[which]) {
        free(panels[which]);
        panels[which] = (float*)need(malloc(n * sizeof(float)));
        capacity[which] = n;
    }
    return panels[which];
}
#endif

// C (M,N) = op(A) op(B), or += when accumulate; all floatX, row-major, dense
static void gemm_floatx(bool ta, bool tb, size_t M, size_t N, size_t K, const floatX* A, const floatX* B, floatX* C, bool accumulate) {
    size_t lda = ta ? M : K, ldb = tb ? K : N;
#ifdef FLOATX_BF16
    float *a = matmul_panel(0, M * K), *b = matmul_panel(1, N * K), *c = matmul_panel(2, M * N);
    widen(a, A, M * K);
    widen(b, B, N * K);
    if (accumulate) { widen(c, C, M * N); }
    gemm(ta, tb, M, N, K, 1.0f, a, lda, b, ldb, accumulate ? 1.0f : 0.0f, c, N);
    DO_PRAGMA(omp parallel for simd schedule(static))
    for (size_t i = 0; i < M * N; i++) { C[i].bits = float_to_bf16(c[i]); }
#else
    gemm(ta, tb, M, N, K, 1.0f, &A->value, lda, &B->value, ldb, accumulate ? 1.0f : 0.0f, &C->value, N);
#endif
}
#endif

// out (N, OC) += bias (OC)
DEVICE void bias_add_row(Team t, size_t row, floatX* out, const floatX* bias, int OC) {
    floatX* y = out + row * (size_t)OC;
    TEAM_VEC_FOR(i, OC) {
        floatV v = load_vec(y + i, OC - i), b = load_vec(bias + i, OC - i);
        VEC_FOR(k) { vec_set(&v, k, vec_get(v, k) + vec_get(b, k)); }
        store_vec(y + i, v, OC - i);
    }
}

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC, or NULL)
void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, size_t N, int C, int OC) {
    if (N == 0) { return; } // a rank without rows
#if ON_GPU && !defined(CUDA_ON_CPU)
    gemm_gpu(out, weight, inp, bias, NULL, OC, N, C, true, false, false, GEMM_EPILOGUE_NONE);
#else
    gemm_floatx(false, true, N, (size_t)OC, (size_t)C, inp, weight, out, false);
    if (bias) { LAUNCH(N, BLOCK_TEAM, bias_add_row, out, bias, OC); }
#endif
}

// pre (N, OC) = inp weight^T + bias; out = gelu(pre)
void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp, const floatX* weight, const floatX* bias, size_t N, int C, int OC) {
    if (N == 0) { return; } // a rank without rows
#if ON_GPU && !defined(CUDA_ON_CPU)
    if (gemm_gpu_fuses_gelu(1, OC)) {
        gemm_gpu(out, weight, inp, bias, pre, OC, N, C, true, false, false, GEMM_EPILOGUE_GELU);
    } else {
        gemm_gpu(pre, weight, inp, bias, NULL, OC, N, C, true, false, false, GEMM_EPILOGUE_NONE);
        gelu_forward(out, pre, N * (size_t)OC);
    }
#else
    gemm_floatx(false, true, N, (size_t)OC, (size_t)C, inp, weight, pre, false);
    bias_gelu_forward(out, pre, bias, N, OC);
#endif
}

// dinp (N, C) = dout (N, OC) weight (OC, C), or += when accumulate
void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, size_t N, int C, int OC, bool accumulate) {
    if (N == 0) { return; } // a rank without rows
#if ON_GPU && !defined(CUDA_ON_CPU)
    gemm_gpu(dinp, weight, dout, NULL, NULL, C, N, OC, false, false, accumulate, GEMM_EPILOGUE_NONE);
#else
    gemm_floatx(false, false, N, (size_t)C, (size_t)OC, dout, weight, dinp, accumulate);
#endif
}

// As matmul_backward_input, followed by the gradient of a GELU whose input was pre (N, C).
void matmul_gelu_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pre, size_t N, int C, int OC) {
    if (N == 0) { return; } // a rank without rows
#if ON_GPU && !defined(CUDA_ON_CPU)
    if (gemm_gpu_fuses_gelu(2, C)) {
        gemm_gpu(dinp, weight, dout, NULL, (floatX*)pre, C, N, OC, false, false, false, GEMM_EPILOGUE_DGELU);
        return;
    }
#endif
    matmul_backward_input(dinp, dout, weight, N, C, OC, false);
    gelu_backward(dinp, pre, N * (size_t)C);
}

// dweight (OC, C) = dout (N, OC)^T inp (N, C), or += when accumulate
void matmul_backward_weight(floatX* dweight, const floatX* dout, const floatX* inp, size_t N, int C, int OC, bool accumulate) {
    if (N == 0) {
        if (!accumulate) { device_zero(dweight, (size_t)OC * (size_t)C * sizeof(floatX)); }
        return;
    }
#if ON_GPU && !defined(CUDA_ON_CPU)
    gemm_gpu(dweight, inp, dout, NULL, NULL, C, OC, N, false, true, accumulate, GEMM_EPILOGUE_NONE);
#else
    gemm_floatx(true, false, (size_t)OC, (size_t)C, N, dout, inp, dweight, accumulate);
#endif
}
