// test_orthonormal.h - fp32 products of sub-blocks, and QR on matrices of every kind, deficient ones too: row i of the input must lie in
// the span of the first i + 1 vectors. Tolerance: a few units of fp32 rounding, whatever the matrix (found: 8e-7). Rows: test_soap.h.
#pragma once
#include "../optim/orthonormal.cuh"
#include "op_tensor.h"
#include "reference_soap.h"

#define QR_TOLERANCE 4e-6

typedef enum { QR_NORMAL, QR_ZERO, QR_RANK_ONE, QR_TWINS, QR_STEEP, QR_SMALL, QR_LARGE, QR_CASES } QrCase;
static const char* const qr_case_names[QR_CASES] = {"normal", "zero", "rank one", "equal pairs", "steep spectrum", "1e-18", "1e18"};

static void test_qr_fill(double* a, size_t n, QrCase which) {
    for (size_t i = 0; i < n * n; i++) {
        double x = reference_normal(&ops_random);
        a[i] = which == QR_ZERO       ? 0.0
               : which == QR_RANK_ONE ? (double)(1 + i / n) * cos((double)(i % n))
               : which == QR_TWINS    ? (i / n % 2 ? a[i - n] : x)
               : which == QR_STEEP    ? x * pow(10.0, -10.0 * (double)(i / n) / (double)n)
               : which == QR_SMALL    ? 1e-18 * x
               : which == QR_LARGE    ? 1e18 * x
                                      : x;
    }
}

// Greatest |q_i q_j - (i = j)|, infinite where a value is no number.
static double test_orthonormal(const double* q, size_t n) {
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j <= i; j++) {
            double dot = i == j ? -1.0 : 0.0;
            for (size_t k = 0; k < n; k++) { dot += q[i * n + k] * q[j * n + k]; }
            worst = dot == dot ? fmax(worst, fabs(dot)) : INFINITY;
        }
    }
    return worst;
}

static void test_qr_case(size_t n, QrCase which) {
    double* values = reference_zeros(n * n);
    test_qr_fill(values, n, which);
    OpsTensor a = ops_upload(values, n * n, 0, true), q = ops_floats(n * n), work = ops_floats(qr_work_bytes(n) / sizeof(float));
    char label[64];
    snprintf(label, sizeof(label), "QR of %zu x %zu, %s", n, n, qr_case_names[which]);
    orthonormal_rows(q.f, a.f, n, (char*)work.f);
    double *got = ops_download(&q, label), worst = test_orthonormal(got, n), outside = 0.0;
    free(ops_download(&a, label));
    free(ops_download(&work, label));
    CHECK(worst <= QR_TOLERANCE, "%s: orthonormal within %.1e, found %.3g", label, QR_TOLERANCE, worst);
    for (size_t i = 0; i < n; i++) { // row i of the input lies in the span of the first i + 1 vectors
        double norm = reference_norm(a.was + i * n, n);
        for (size_t j = i + 1; j < n && norm > 0.0; j++) {
            double dot = 0.0;
            for (size_t k = 0; k < n; k++) { dot += a.was[i * n + k] * got[j * n + k]; }
            outside = fmax(outside, fabs(dot) / norm);
        }
    }
    CHECK(outside <= QR_TOLERANCE, "%s: spans within %.1e, found %.3g", label, QR_TOLERANCE, outside);
    free(values);
    free(got);
    ops_free(&a);
    ops_free(&q);
    ops_free(&work);
}

static void test_qr(void) {
    const size_t sizes[] = {1, 5, 33, 2, 31, 32, 64, 70, 150, 200};
    ops_random.state = 5;
    for (size_t i = 0; i < (OPS_SMALL ? 3 : COUNT_OF(sizes)); i++) {
        for (int which = 0; which < QR_CASES; which++) { test_qr_case(sizes[i], (QrCase)which); }
    }
}

// form: bit 0 and 1 = A and B transposed. C lies in longer rows, between which nothing may change.
static void test_float_product_form(size_t M, size_t N, size_t K, int form, float beta) {
    bool ta = form & 1, tb = form & 2;
    size_t ld = N + 3;
    double *x = reference_zeros(M * K), *y = reference_zeros(N * K), *z = reference_zeros(M * ld), *want = reference_zeros(M * N);
    for (size_t k = 0; k < M * K; k++) { x[k] = (float)reference_normal(&ops_random); }
    for (size_t k = 0; k < N * K; k++) { y[k] = (float)reference_normal(&ops_random); }
    for (size_t k = 0; k < M * ld; k++) { z[k] = (float)reference_normal(&ops_random); }
    OpsTensor a = ops_upload(x, M * K, 0, true), b = ops_upload(y, N * K, 0, true), c = ops_upload(z, M * ld, 0, true);
    FloatProduct p = {ta, tb, M, N, K, -2.0f, beta, a.f, b.f, c.f, ta ? M : K, tb ? K : N, ld};
    float_product(&p);
    reference_product(want, x, ta, y, tb, M, N, K);
    for (size_t k = 0; k < M * N; k++) {
        double* at = z + k / N * ld + k % N;
        *at = -2.0 * want[k] + (double)beta * *at;
    }
    ops_check("fp32 product", &c, z, 2e-6);
    ops_free(&a);
    ops_free(&b);
    ops_free(&c);
    free(x);
    free(y);
    free(z);
    free(want);
}

static void test_float_product(void) {
    const size_t shapes[][3] = {{1, 1, 1}, {5, 7, 3}, {64, 64, 16}, {65, 33, 17}, {130, 300, 40}};
    ops_random.state = 6;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        float beta = i % 2 ? 0.5f : 0.0f;
        for (int form = 0; form < 4; form++) { test_float_product_form(shapes[i][0], shapes[i][1], shapes[i][2], form, beta); }
    }
}
