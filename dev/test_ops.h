// test_ops.h - every op but attention against the double-precision reference, at awkward shapes: one row, one column tile less or
// more, C that is no multiple of a vector, odd vocabularies, bases that are not aligned. The same rows run on the CPU, on the GPU
// and on the emulated GPU (small shapes there: it is about a thousand times slower). Tolerances are in op_tensor.h.
#pragma once
#include "../kernels/classifier.cuh"
#include "../kernels/embedding.cuh"
#include "../kernels/layernorm.cuh"
#include "../kernels/matmul.cuh"
#include "op_tensor.h"
#include "test_numbers.h"
#include "test_team.h"

// ---- linear layers ----

typedef struct {
    size_t N;
    int C, OC;
} OpsShape;

static const OpsShape ops_matmul_shapes[] = {{1, 48, 257}, {3, 20, 60}, {65, 80, 320}, {63, 48, 144}, {5, 3, 7}, {2, 1600, 80},
#if !OPS_SMALL
                                             {65, 1600, 480}, {3, 48, 50257}, {257, 96, 384},
#endif
};

// Bases off by one value; cuBLASLt wants 4-byte addresses or better.
#if ON_GPU && !defined(CUDA_ON_CPU)
#define OPS_SHIFT 4
#else
#define OPS_SHIFT 1
#endif

static void ops_matmul_forward_shape(OpsShape s) {
    size_t C = (size_t)s.C, OC = (size_t)s.OC, n = s.N * OC;
    OpsTensor inp = ops_normal(s.N * C, 1.0, 0.0, OPS_SHIFT), weight = ops_normal(OC * C, 0.5, 0.0, OPS_SHIFT);
    OpsTensor bias = ops_normal(OC, 1.0, 0.5, OPS_SHIFT), out = ops_normal(n, 1.0, 0.0, OPS_SHIFT), pre = ops_normal(n, 1.0, 0.0, 0);
    double* want = reference_zeros(n);
    char label[96];
    snprintf(label, sizeof(label), "matmul N %zu C %d OC %d", s.N, s.C, s.OC);
    matmul_forward(out.x, inp.x, weight.x, NULL, s.N, s.C, s.OC);
    reference_matmul(want, inp.was, weight.was, NULL, s.N, C, OC);
    ops_check(label, &out, want, OPS_GEMM_TOLERANCE);
    snprintf(label, sizeof(label), "matmul+bias N %zu C %d OC %d", s.N, s.C, s.OC);
    matmul_forward(out.x, inp.x, weight.x, bias.x, s.N, s.C, s.OC);
    reference_matmul(want, inp.was, weight.was, bias.was, s.N, C, OC);
    ops_check(label, &out, want, OPS_GEMM_TOLERANCE);
    matmul_gelu_forward(out.x, pre.x, inp.x, weight.x, bias.x, s.N, s.C, s.OC);
    snprintf(label, sizeof(label), "matmul+bias+gelu, pre N %zu C %d OC %d", s.N, s.C, s.OC);
    ops_check(label, &pre, want, OPS_GEMM_TOLERANCE);
    for (size_t i = 0; i < n; i++) { want[i] = reference_gelu(want[i]); }
    snprintf(label, sizeof(label), "matmul+bias+gelu, out N %zu C %d OC %d", s.N, s.C, s.OC);
    ops_check(label, &out, want, 1.5 * OPS_GEMM_TOLERANCE); // the GELU may read the rounded pre
    OpsTensor* all[] = {&inp, &weight, &bias, &out, &pre};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    free(want);
}

static void ops_matmul_forward(void) {
    ops_random.state = 1;
    for (size_t i = 0; i < COUNT_OF(ops_matmul_shapes); i++) { ops_matmul_forward_shape(ops_matmul_shapes[i]); }
}

// want (n) = old + sum (new gradients), with old taken as zero where the op overwrites
static void ops_matmul_backward_shape(OpsShape s, bool accumulate) {
    size_t C = (size_t)s.C, OC = (size_t)s.OC;
    OpsTensor dout = ops_normal(s.N * OC, 1.0, 0.0, OPS_SHIFT), weight = ops_normal(OC * C, 0.5, 0.0, OPS_SHIFT);
    OpsTensor inp = ops_normal(s.N * C, 1.0, 0.0, OPS_SHIFT), dinp = ops_normal(s.N * C, 1.0, 0.0, OPS_SHIFT);
    OpsTensor dweight = ops_normal(OC * C, 1.0, 0.0, OPS_SHIFT), dbias = ops_normal(OC, 1.0, 0.0, OPS_SHIFT);
    OpsTensor partial = ops_floats(bias_backward_partials(s.N, s.OC));
    double *want_inp = reference_zeros(s.N * C), *want_weight = reference_zeros(OC * C), *want_bias = reference_zeros(OC);
    memcpy(want_bias, dbias.was, OC * sizeof(double));
    if (accumulate) {
        memcpy(want_inp, dinp.was, s.N * C * sizeof(double));
        memcpy(want_weight, dweight.was, OC * C * sizeof(double));
    }
    reference_matmul_backward(want_inp, want_weight, want_bias, dout.was, inp.was, weight.was, s.N, C, OC);
    matmul_backward_input(dinp.x, dout.x, weight.x, s.N, s.C, s.OC, accumulate);
    matmul_backward_weight(dweight.x, dout.x, inp.x, s.N, s.C, s.OC, accumulate);
    bias_backward(dbias.x, partial.f, dout.x, s.N, s.OC);
    char label[96];
    snprintf(label, sizeof(label), "dinp%s N %zu C %d OC %d", accumulate ? " +=" : "", s.N, s.C, s.OC);
    ops_check(label, &dinp, want_inp, OPS_GEMM_TOLERANCE);
    snprintf(label, sizeof(label), "dweight%s N %zu C %d OC %d", accumulate ? " +=" : "", s.N, s.C, s.OC);
    ops_check(label, &dweight, want_weight, OPS_GEMM_TOLERANCE);
    snprintf(label, sizeof(label), "dbias += N %zu OC %d", s.N, s.OC);
    ops_check(label, &dbias, want_bias, OPS_TOLERANCE);
    free(ops_download(&partial, label)); // its guards
    OpsTensor* all[] = {&dout, &weight, &inp, &dinp, &dweight, &dbias, &partial};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    free(want_inp);
    free(want_weight);
    free(want_bias);
}

static void ops_matmul_backward(void) {
    ops_random.state = 2;
    for (size_t i = 0; i < COUNT_OF(ops_matmul_shapes); i++) {
        ops_matmul_backward_shape(ops_matmul_shapes[i], false);
        ops_matmul_backward_shape(ops_matmul_shapes[i], true);
    }
}

// dinp (N, C) = (dout weight) gelu'(pre): the fused form of the second matrix of the MLP
static void ops_matmul_gelu_backward(void) {
    ops_random.state = 3;
    for (size_t k = 0; k < COUNT_OF(ops_matmul_shapes); k++) {
        OpsShape s = ops_matmul_shapes[k];
        size_t C = (size_t)s.C, OC = (size_t)s.OC, n = s.N * C;
        OpsTensor dout = ops_normal(s.N * OC, 1.0, 0.0, OPS_SHIFT), weight = ops_normal(OC * C, 0.5, 0.0, OPS_SHIFT);
        OpsTensor pre = ops_normal(n, 1.5, 0.0, OPS_SHIFT), dinp = ops_normal(n, 1.0, 0.0, OPS_SHIFT);
        double* want = reference_zeros(n);
        reference_matmul_backward(want, NULL, NULL, dout.was, NULL, weight.was, s.N, C, OC);
        for (size_t i = 0; i < n; i++) { want[i] *= reference_gelu_slope(pre.was[i]); }
        matmul_gelu_backward_input(dinp.x, dout.x, weight.x, pre.x, s.N, s.C, s.OC);
        char label[96];
        snprintf(label, sizeof(label), "dinp gelu' N %zu C %d OC %d", s.N, s.C, s.OC);
        ops_check(label, &dinp, want, 1.5 * OPS_GEMM_TOLERANCE); // rounded twice where it is not fused
        OpsTensor* all[] = {&dout, &weight, &pre, &dinp};
        for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
        free(want);
    }
}

// ---- gelu ----

static void ops_gelu(void) {
    ops_random.state = 4;
    const size_t sizes[] = {1, 3, 63, 4095, 4097, 12289};
    for (size_t k = 0; k < COUNT_OF(sizes); k++) {
        size_t n = sizes[k];
        double* want = reference_zeros(n);
        OpsTensor x = ops_normal(n, 2.0, 0.0, 1), y = ops_normal(n, 1.0, 0.0, 1), d = ops_normal(n, 1.0, 0.0, 1);
        char label[64];
        snprintf(label, sizeof(label), "gelu n %zu", n);
        for (size_t i = 0; i < n; i++) { want[i] = reference_gelu(x.was[i]); }
        gelu_forward(y.x, x.x, n);
        ops_check(label, &y, want, OPS_TOLERANCE);
        for (size_t i = 0; i < n; i++) { want[i] = d.was[i] * reference_gelu_slope(x.was[i]); }
        gelu_backward(d.x, x.x, n);
        snprintf(label, sizeof(label), "gelu backward n %zu", n);
        ops_check(label, &d, want, OPS_TOLERANCE);
        gelu_forward(x.x, x.x, n); // in place
        for (size_t i = 0; i < n; i++) { want[i] = reference_gelu(x.was[i]); }
        ops_check("gelu in place", &x, want, OPS_TOLERANCE);
        ops_free(&x);
        ops_free(&y);
        ops_free(&d);
        free(want);
    }
}

// Far out on either side GELU is x or 0 and its slope 1 or 0, without overflow; NaN stays NaN.
static void ops_gelu_extremes(void) {
    const double values[] = {0.0, -0.0, 30.0, -30.0, 1e4, -1e4, 1e10, -1e10, 1e-20, -1e-20, NAN};
    size_t n = COUNT_OF(values);
    double ones[COUNT_OF(values)];
    for (size_t i = 0; i < n; i++) { ones[i] = 1.0; }
    OpsTensor x = ops_upload(values, n, 0, false), y = ops_upload(NULL, n, 0, false), d = ops_upload(ones, n, 0, false);
    gelu_forward(y.x, x.x, n);
    gelu_backward(d.x, x.x, n);
    double *out = ops_download(&y, "gelu extremes"), *slope = ops_download(&d, "gelu slope extremes");
    for (size_t i = 0; i + 1 < n; i++) {
        double want = fabs(values[i]) < 1.0 ? 0.5 * x.was[i] : values[i] > 0.0 ? x.was[i] : 0.0;
        double want_slope = fabs(values[i]) < 1.0 ? 0.5 : values[i] > 0.0 ? 1.0 : 0.0;
        CHECK(fabs(out[i] - want) <= 1e-6 * fabs(want), "gelu(%g) = %g, expected %g", values[i], out[i], want);
        CHECK(fabs(slope[i] - want_slope) <= 1e-6, "gelu'(%g) = %g, expected %g", values[i], slope[i], want_slope);
    }
    CHECK(isnan(out[n - 1]) && isnan(slope[n - 1]), "gelu(NaN) = %g, slope %g", out[n - 1], slope[n - 1]);
    ops_free(&x);
    ops_free(&y);
    ops_free(&d);
    free(out);
    free(slope);
}

// ---- layernorm ----

// C = 1 and 2 have no gradient but rounding.
static const OpsShape ops_norm_shapes[] = {{1, 48, 0}, {3, 20, 0}, {65, 80, 0}, {33, 33, 0}, {2, 1600, 0}, {1, 3, 0},
#if !OPS_SMALL
                                           {65, 1600, 0}, {511, 128, 0},
#endif
};

static void ops_layernorm_statistics(const char* label, const OpsTensor* mean, const OpsTensor* rstd, const double* x, size_t N, size_t C) {
    double *want_mean = reference_zeros(N), *want_rstd = reference_zeros(N);
    for (size_t n = 0; n < N; n++) {
        reference_moments(&want_mean[n], &want_rstd[n], x + n * C, C);
        want_rstd[n] = 1.0 / want_rstd[n];
    }
    ops_check(label, mean, want_mean, 2e-6); // statistics are fp32 in every build
    ops_check(label, rstd, want_rstd, 2e-6);
    free(want_mean);
    free(want_rstd);
}

static void ops_layernorm_forward_shape(size_t N, int channels) {
    size_t C = (size_t)channels;
    OpsTensor x = ops_normal(N * C, 1.5, 0.7, 1), weight = ops_normal(C, 0.3, 1.0, 1), bias = ops_normal(C, 0.3, 0.0, 1);
    OpsTensor y = ops_normal(N * C, 1.0, 0.0, 1), branch = ops_normal(N * C, 1.0, 0.0, 1), extra = ops_normal(C, 1.0, 0.0, 1);
    OpsTensor mean = ops_floats(N), rstd = ops_floats(N);
    double *want = reference_zeros(N * C), *sum = reference_zeros(N * C);
    char label[64];
    snprintf(label, sizeof(label), "layernorm N %zu C %d", N, channels);
    layernorm_forward(y.x, mean.f, rstd.f, x.x, weight.x, bias.x, N, channels);
    reference_layernorm(want, x.was, weight.was, bias.was, N, C);
    ops_check(label, &y, want, OPS_TOLERANCE);
    ops_layernorm_statistics(label, &mean, &rstd, x.was, N, C);
    for (int in_place = 0; in_place < 2; in_place++) { // the second time in place: x = x + branch + extra
        OpsTensor old = x;
        OpsTensor residual = ops_normal(N * C, 1.0, 0.0, 1);
        snprintf(label, sizeof(label), "residual+layernorm%s N %zu C %d", in_place ? " in place" : "", N, channels);
        residual_layernorm_forward(in_place ? x.x : residual.x, y.x, mean.f, rstd.f, x.x, branch.x, extra.x, weight.x,
                                   bias.x, N, channels);
        for (size_t i = 0; i < N * C; i++) { sum[i] = old.was[i] + branch.was[i] + extra.was[i % C]; }
        ops_check(label, in_place ? &x : &residual, sum, OPS_TOLERANCE);
        double* stored = ops_download(in_place ? &x : &residual, label); // the norm reads what was stored, rounded
        reference_layernorm(want, stored, weight.was, bias.was, N, C);
        ops_check(label, &y, want, OPS_TOLERANCE);
        ops_layernorm_statistics(label, &mean, &rstd, stored, N, C);
        free(stored);
        ops_free(&residual);
    }
    OpsTensor* all[] = {&x, &weight, &bias, &y, &branch, &extra, &mean, &rstd};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    free(want);
    free(sum);
}

static void ops_layernorm_forward(void) {
    ops_random.state = 5;
    for (size_t i = 0; i < COUNT_OF(ops_norm_shapes); i++) { ops_layernorm_forward_shape(ops_norm_shapes[i].N, ops_norm_shapes[i].C); }
}

static void ops_layernorm_backward_shape(size_t N, int channels) {
    size_t C = (size_t)channels;
    OpsTensor x = ops_normal(N * C, 1.5, 0.7, 1), weight = ops_normal(C, 0.3, 1.0, 1), bias = ops_normal(C, 0.3, 0.0, 1);
    OpsTensor y = ops_normal(N * C, 1.0, 0.0, 1), dy = ops_normal(N * C, 1.0, 0.0, 1), dx = ops_normal(N * C, 1.0, 0.0, 1);
    OpsTensor dweight = ops_normal(C, 1.0, 0.0, 1), dbias = ops_normal(C, 1.0, 0.0, 1);
    OpsTensor mean = ops_floats(N), rstd = ops_floats(N), partial = ops_floats(layernorm_backward_partials(N, channels));
    double *want_x = reference_zeros(N * C), *want_weight = reference_zeros(C), *want_bias = reference_zeros(C);
    memcpy(want_x, dx.was, N * C * sizeof(double));
    memcpy(want_weight, dweight.was, C * sizeof(double));
    memcpy(want_bias, dbias.was, C * sizeof(double));
    reference_layernorm_backward(want_x, want_weight, want_bias, dy.was, x.was, weight.was, N, C);
    layernorm_forward(y.x, mean.f, rstd.f, x.x, weight.x, bias.x, N, channels);
    layernorm_backward(dx.x, dweight.x, dbias.x, partial.f, dy.x, x.x, weight.x, mean.f, rstd.f, N, channels);
    char label[64];
    snprintf(label, sizeof(label), "layernorm backward N %zu C %d", N, channels);
    ops_check(label, &dx, want_x, OPS_TOLERANCE);
    ops_check(label, &dweight, want_weight, OPS_TOLERANCE);
    ops_check(label, &dbias, want_bias, OPS_TOLERANCE);
    free(ops_download(&partial, label));
    OpsTensor* all[] = {&x, &weight, &bias, &y, &dy, &dx, &dweight, &dbias, &mean, &rstd, &partial};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    free(want_x);
    free(want_weight);
    free(want_bias);
}

static void ops_layernorm_backward(void) {
    ops_random.state = 6;
    for (size_t i = 0; i < COUNT_OF(ops_norm_shapes); i++) { ops_layernorm_backward_shape(ops_norm_shapes[i].N, ops_norm_shapes[i].C); }
}

// A mean far above the spread (a variance by E[x^2] - mean^2 would be noise), a constant row (variance 0), a NaN in one row only, and
// a variance of the size of eps.
static void ops_layernorm_extremes(void) {
    enum { ROWS = 4, COLS = 128 };
    double values[ROWS * COLS], ones[COLS], want[ROWS * COLS];
    for (size_t i = 0; i < COLS; i++) {
        values[i] = 2048.0 + 16.0 * (double)(i % 7); // exact in bf16
        values[COLS + i] = 3.0;
        values[2 * COLS + i] = i == 77 ? NAN : 1.0;
        values[3 * COLS + i] = (double)(i % 5) / 512.0;
        ones[i] = 1.0;
    }
    OpsTensor x = ops_upload(values, ROWS * COLS, 0, false);
    OpsTensor weight = ops_upload(ones, COLS, 0, false), bias = ops_upload(NULL, COLS, 0, false);
    OpsTensor y = ops_upload(NULL, ROWS * COLS, 0, false), mean = ops_floats(ROWS), rstd = ops_floats(ROWS);
    layernorm_forward(y.x, mean.f, rstd.f, x.x, weight.x, bias.x, ROWS, COLS);
    reference_layernorm(want, values, ones, bias.was, ROWS, COLS);
    double* got = ops_download(&y, "layernorm extremes");
    ops_compare("layernorm, mean 65 times the spread", got, want, COLS, OPS_TOLERANCE + 1e-5);
    ops_compare("layernorm, variance of the size of eps", got + 3 * COLS, want + 3 * COLS, COLS, OPS_TOLERANCE);
    for (size_t i = 0; i < COLS; i++) {
        CHECK(fabs(got[COLS + i]) < 1e-3, "a constant row gives %g, expected 0", got[COLS + i]);
        CHECK(isnan(got[2 * COLS + i]), "a row with a NaN gives %g", got[2 * COLS + i]);
    }
    OpsTensor* all[] = {&x, &weight, &bias, &y, &mean, &rstd};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    free(got);
}

// ---- embedding ----

typedef struct {
    size_t B, T, maxT;
    int C, V, distinct; // tokens are drawn from this many, both ends of the vocabulary among them
} OpsEmbedding;

static void ops_embedding_shape(OpsEmbedding s) {
    size_t N = s.B * s.T, C = (size_t)s.C, V = (size_t)s.V;
    int *tokens = (int*)need(calloc(N, sizeof(int))), *counts = (int*)need(calloc(V + 1, sizeof(int)));
    for (size_t n = 0; n < N; n++) {
        uint64_t pick = reference_random(&ops_random) % (uint64_t)s.distinct;
        tokens[n] = pick % 2 ? (int)(pick / 2) : s.V - 1 - (int)(pick / 2);
    }
    TokenOrder order = {(int*)need(calloc(N, sizeof(int))), (int*)need(calloc(N + 1, sizeof(int))), 0};
    token_order(&order, counts, tokens, N, s.V);
    CHECK(order.groups <= s.distinct && order.starts[0] == 0 && order.starts[order.groups] == (int)N,
          "%d groups of %d tokens", order.groups, s.distinct);
    int *d_tokens = ops_ints(tokens, N), *d_positions = ops_ints(order.positions, N);
    int* d_starts = ops_ints(order.starts, (size_t)order.groups + 1);
    OpsTensor wte = ops_normal(V * C, 1.0, 0.0, 1), wpe = ops_normal(s.maxT * C, 1.0, 0.0, 1), out = ops_normal(N * C, 1.0, 0.0, 1);
    OpsTensor dout = ops_normal(N * C, 1.0, 0.0, 1), dwte = ops_normal(V * C, 1.0, 0.0, 1), dwpe = ops_normal(s.maxT * C, 1.0, 0.0, 1);
    double* want = reference_zeros(N * C);
    char label[96];
    snprintf(label, sizeof(label), "embedding B %zu T %zu C %d V %d", s.B, s.T, s.C, s.V);
    embedding_forward(out.x, d_tokens, wte.x, wpe.x, N, (int)s.T, s.C);
    reference_embedding(want, tokens, wte.was, wpe.was, N, s.T, C);
    ops_check(label, &out, want, OPS_TOLERANCE);
    embedding_backward(dwte.x, dwpe.x, dout.x, d_tokens, d_positions, d_starts, order.groups, N, (int)s.T, s.C);
    reference_embedding_backward(dwte.was, dwpe.was, dout.was, tokens, N, s.T, C);
    snprintf(label, sizeof(label), "embedding backward B %zu T %zu C %d V %d", s.B, s.T, s.C, s.V);
    ops_check(label, &dwte, dwte.was, OPS_TOLERANCE);
    ops_check(label, &dwpe, dwpe.was, 2.0 * OPS_TOLERANCE); // rounded once for each sequence of the batch
    OpsTensor* all[] = {&wte, &wpe, &out, &dout, &dwte, &dwpe};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    device_free(d_tokens, N * sizeof(int));
    device_free(d_positions, N * sizeof(int));
    device_free(d_starts, ((size_t)order.groups + 1) * sizeof(int));
    free(want);
    free(tokens);
    free(counts);
    free(order.positions);
    free(order.starts);
}

static void ops_embedding(void) {
    ops_random.state = 7;
    const OpsEmbedding shapes[] = {{1, 1, 1, 48, 257, 1}, {2, 3, 5, 20, 257, 3}, {3, 63, 64, 80, 257, 40},
                                   {1, 3, 3, 300, 257, 1}, {5, 7, 7, 257, 3, 3},
#if !OPS_SMALL
                                   {2, 63, 63, 20, 50257, 300}, {1, 65, 100, 1600, 257, 257},
#endif
    };
    for (size_t i = 0; i < COUNT_OF(shapes); i++) { ops_embedding_shape(shapes[i]); }
}

// ---- classifier ----

static void ops_classifier_shape(size_t N, int V, int Vp, double scale, double spread) {
    size_t stride = (size_t)Vp, used = (size_t)V;
    double *logits = reference_zeros(N * stride), *want = reference_zeros(N * stride), *want_loss = reference_zeros(N);
    int* targets = (int*)need(calloc(N, sizeof(int)));
    for (size_t i = 0; i < N * stride; i++) { // what stands in the padding must not matter
        logits[i] = i % stride < used ? spread * reference_normal(&ops_random) : 1e4;
    }
    OpsTensor x = ops_upload(logits, N * stride, 1, false), untouched = ops_upload(logits, N * stride, 1, false);
    OpsTensor losses = ops_floats(N), again = ops_floats(N);
    for (size_t n = 0; n < N; n++) {
        targets[n] = n == 0 ? V - 1 : n == 1 ? 0 : n == 2 ? -1 : (int)(reference_random(&ops_random) % (uint64_t)V);
        if (targets[n] < 0) { continue; }
        want_loss[n] = reference_cross_entropy(want + n * stride, x.was + n * stride, targets[n], used, scale);
    }
    int* d_targets = ops_ints(targets, N);
    char label[96];
    snprintf(label, sizeof(label), "classifier N %zu V %d spread %g", N, V, spread);
    classifier(again.f, untouched.x, d_targets, N, V, Vp, (float)scale, false);
    classifier(losses.f, x.x, d_targets, N, V, Vp, (float)scale, true);
    ops_check(label, &losses, want_loss, 4e-6); // losses are fp32 in every build; exp and log add a few roundings
    ops_check(label, &again, want_loss, 4e-6);
    ops_check(label, &untouched, untouched.was, 0.0);
    ops_check(label, &x, want, OPS_TOLERANCE + 4e-6);
    double* got = ops_download(&x, label);
    size_t not_zero = 0;
    for (size_t i = 0; i < N * stride; i++) { not_zero += (i % stride >= used || targets[i / stride] < 0) && got[i] != 0.0; }
    CHECK(not_zero == 0, "%s: %zu gradients in the padding or in a row without target", label, not_zero);
    OpsTensor* all[] = {&x, &untouched, &losses, &again};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    device_free(d_targets, N * sizeof(int));
    free(got);
    free(logits);
    free(want);
    free(want_loss);
    free(targets);
}

static void ops_classifier(void) {
    ops_random.state = 8;
    ops_classifier_shape(1, 257, 384, 1.0, 2.0);
    ops_classifier_shape(3, 257, 384, 1.0 / 3.0, 2.0);
    ops_classifier_shape(65, 257, 384, 1.0 / 524288.0, 1.0);
    ops_classifier_shape(4, 257, 384, 1.0, 1000.0); // one class takes all: no overflow
    ops_classifier_shape(2, 3, 3, 1.0, 1.0);
    if (!OPS_SMALL) {
        ops_classifier_shape(3, 50257, 50304, 1.0 / 3.0, 2.0);
        ops_classifier_shape(2, 65536, 65536, 1.0, 2.0);
    }
}

// A NaN or an infinite logit must show in the loss, and only in its own row.
static void ops_classifier_non_finite(void) {
    enum { ROWS = 4, COLS = 384, USED = 257 };
    double* logits = reference_zeros(ROWS * COLS);
    logits[1 * COLS + 100] = NAN;
    logits[2 * COLS + 200] = INFINITY;
    const int targets[ROWS] = {5, 6, 7, 8};
    int* d_targets = ops_ints(targets, ROWS);
    OpsTensor x = ops_upload(logits, ROWS * COLS, 0, false), losses = ops_floats(ROWS);
    classifier(losses.f, x.x, d_targets, ROWS, USED, COLS, 1.0f, true);
    double* loss = ops_download(&losses, "losses");
    for (int n = 0; n < ROWS; n++) {
        bool sick = n == 1 || n == 2;
        CHECK(sick ? !isfinite(loss[n]) : fabs(loss[n] - log(257.0)) < 1e-5, "row %d: loss %g", n, loss[n]);
    }
    ops_free(&x);
    ops_free(&losses);
    device_free(d_targets, ROWS * sizeof(int));
    free(loss);
    free(logits);
}

// On the emulated GPU once for each team size and order of threads, elsewhere once.
static void ops_matmul_forward_each(void) { emulation_each(ops_matmul_forward); }
static void ops_matmul_backward_each(void) { emulation_each(ops_matmul_backward); }
static void ops_matmul_gelu_backward_each(void) { emulation_each(ops_matmul_gelu_backward); }
static void ops_gelu_each(void) { emulation_each(ops_gelu); }
static void ops_gelu_extremes_each(void) { emulation_each(ops_gelu_extremes); }
static void ops_layernorm_forward_each(void) { emulation_each(ops_layernorm_forward); }
static void ops_layernorm_backward_each(void) { emulation_each(ops_layernorm_backward); }
static void ops_layernorm_extremes_each(void) { emulation_each(ops_layernorm_extremes); }
static void ops_embedding_each(void) { emulation_each(ops_embedding); }
static void ops_classifier_each(void) { emulation_each(ops_classifier); }
static void ops_classifier_non_finite_each(void) { emulation_each(ops_classifier_non_finite); }
static void ops_square_sum_each(void) { emulation_each(ops_square_sum); }

static const TestRow ops_tests[] = {
    {"reference: gradients equal finite differences", ops_reference_differences},
    {"ops: matmul forward, with bias, with GELU", ops_matmul_forward_each},
    {"ops: matmul backward to input, weight and bias", ops_matmul_backward_each},
    {"ops: matmul backward through a GELU", ops_matmul_gelu_backward_each},
    {"ops: gelu forward and backward", ops_gelu_each},
    {"ops: gelu far out and NaN", ops_gelu_extremes_each},
    {"ops: layernorm forward, with residual", ops_layernorm_forward_each},
    {"ops: layernorm backward", ops_layernorm_backward_each},
    {"ops: layernorm of a large mean, a constant row, a NaN", ops_layernorm_extremes_each},
    {"ops: embedding forward and backward", ops_embedding_each},
    {"ops: classifier loss and gradient", ops_classifier_each},
    {"ops: classifier shows NaN and infinity", ops_classifier_non_finite_each},
    {"ops: square sum", ops_square_sum_each},
    {"ops: same bits for any number of threads", ops_same_bits},
    {"ops: learning-rate schedules", ops_schedules},
    {"ops: philox known answers", ops_philox},
    {"ops: rounding to bf16, nearest and stochastic", ops_bf16_rounding},
};
