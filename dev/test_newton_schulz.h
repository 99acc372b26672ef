// test_newton_schulz.h - products with factors, symmetric products, and Newton-Schulz against reference_muon.h. Its rows stand in
// test_muon.h. Tolerances are two to three times what was found:
//   step by step in fp32 rounding stays below 1e-4; on the Gram matrix alone it is amplified, most where singular values are far apart;
//   bf16 rounds every product.
#pragma once
#include "../optim/newton_schulz.cuh"
#include "op_tensor.h"
#include "reference_muon.h"

#if defined(FLOATX_BF16) || (ON_GPU && !defined(CUDA_ON_CPU))
#define MUON_TOLERANCE 0.15
#define MUON_STEEP_TOLERANCE 0.15
#else
#define MUON_TOLERANCE 2e-3
#define MUON_STEEP_TOLERANCE 3e-2
#endif

// ---- products ----

typedef struct {
    size_t M, N, K;
} MuonProductShape;

static void test_muon_product_shape(MuonProductShape s, int which) {
    bool ta = which & 1, tb = which & 2, adds = which & 4;
    size_t lda = (ta ? s.M : s.K) + 8, ldb = (tb ? s.K : s.N) + 16, ldc = s.N + 24;
    size_t a_n = (ta ? s.K : s.M) * lda, b_n = (tb ? s.N : s.K) * ldb;
    OpsTensor a = ops_normal(a_n, 1.0, 0.0, 0), b = ops_normal(b_n, 1.0, 0.0, 0);
    OpsTensor c = ops_normal(s.M * ldc, 1.0, 0.0, 0);
    double* want = reference_zeros(s.M * ldc);
    memcpy(want, c.was, s.M * ldc * sizeof(double));
    for (size_t i = 0; i < s.M; i++) {
        for (size_t j = 0; j < s.N; j++) {
            double sum = 0.0;
            for (size_t k = 0; k < s.K; k++) {
                sum += (ta ? a.was[k * lda + i] : a.was[i * lda + k]) * (tb ? b.was[j * ldb + k] : b.was[k * ldb + j]);
            }
            want[i * ldc + j] = -0.5 * sum + (adds ? 2.0 * want[i * ldc + j] : 0.0);
        }
    }
    Product p = {ta, tb, s.M, s.N, s.K, -0.5f, adds ? 2.0f : 0.0f, a.x, b.x, adds ? c.x : NULL, c.x, lda, ldb, ldc};
    product_run(&p);
    char label[80];
    snprintf(label, sizeof(label), "product %zu x %zu x %zu%s%s%s", s.M, s.N, s.K, ta ? ", A^T" : "", tb ? ", B^T" : "", adds ? ", added" : "");
    ops_check(label, &c, want, 1.5 * OPS_GEMM_TOLERANCE);
    free(want);
    ops_free(&a);
    ops_free(&b);
    ops_free(&c);
}

static void test_muon_products(void) {
    const MuonProductShape shapes[] = {{1, 1, 1}, {5, 7, 3}, {33, 20, 48}, {70, 130, 65},
#if !OPS_SMALL
                                       {300, 530, 40},
#endif
    };
    ops_random.state = 11;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        for (int which = 0; which < 8; which++) { test_muon_product_shape(shapes[i], which); }
    }
}

// C = alpha X^T X + beta D + diagonal, D symmetric; D may be C
static void test_muon_symmetric_shape(size_t m, size_t k, bool transposed, bool in_place) {
    size_t ld = transposed ? m : k;
    OpsTensor x = ops_normal(m * k, 1.0, 0.0, 0);
    double *d = reference_zeros(m * m), *want = reference_zeros(m * m);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j <= i; j++) { d[i * m + j] = d[j * m + i] = reference_normal(&ops_random); }
    }
    OpsTensor D = ops_upload(d, m * m, 0, false), C = ops_normal(m * m, 1.0, 0.0, 0);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < m; j++) {
            double sum = 0.0;
            for (size_t l = 0; l < k; l++) {
                sum += transposed ? x.was[l * m + i] * x.was[l * m + j] : x.was[i * k + l] * x.was[j * k + l];
            }
            want[i * m + j] = 0.25 * sum - 3.0 * D.was[i * m + j] + (i == j ? 2.0 : 0.0);
        }
    }
    OpsTensor* out = in_place ? &D : &C;
    Symmetric s = {transposed, !transposed, m, k, 0.25f, -3.0f, 2.0f, x.x, x.x, D.x, out->x, ld, ld};
    symmetric_run(&s, 1);
    char label[80];
    snprintf(label, sizeof(label), "symmetric %zu x %zu%s%s", m, k, transposed ? ", X^T X" : ", X X^T", in_place ? ", in place" : "");
    ops_check(label, out, want, 2.0 * OPS_GEMM_TOLERANCE);
    double* got = ops_download(out, label);
    size_t uneven = 0;
    for (size_t i = 0; i < m * m; i++) { uneven += got[i] != got[i % m * m + i / m]; }
#if ON_GPU && defined(FLOATX_BF16)
    uneven = 0; // not promised there
#endif
    CHECK(uneven == 0, "%s: %zu values differ from their mirror image", label, uneven);
    free(got);
    free(d);
    free(want);
    ops_free(&x);
    ops_free(&C);
    ops_free(&D);
}

static void test_muon_symmetric(void) {
    const size_t sides[] = {1, 2, 31, 48, 49, 97, OPS_SMALL ? 20 : 200};
    ops_random.state = 12;
    for (size_t i = 0; i < COUNT_OF(sides); i++) {
        for (int which = 0; which < 4; which++) {
            if (which && !(which & 2) && sides[i] > 100) { continue; }
            test_muon_symmetric_shape(sides[i], 37, which & 1, which & 2);
        }
    }
}

// ---- Newton-Schulz ----

typedef enum { MUON_NORMAL, MUON_STEEP, MUON_RANK_ONE, MUON_NOISE, MUON_SPECTRA } MuonSpectrum;
static const char* const muon_spectrum_names[MUON_SPECTRA] = {"normal", "steep", "rank one", "rank two and noise"};

// steep: rows fall off to 1e-6 of the first
static double* muon_values(size_t rows, size_t cols, MuonSpectrum which) {
    double *x = reference_zeros(rows * cols), *u = reference_zeros(2 * rows), *v = reference_zeros(2 * cols);
    for (size_t i = 0; i < 2 * rows; i++) { u[i] = reference_normal(&ops_random); }
    for (size_t i = 0; i < 2 * cols; i++) { v[i] = reference_normal(&ops_random); }
    for (size_t i = 0; i < rows * cols; i++) {
        size_t r = i / cols, c = i % cols;
        double normal = reference_normal(&ops_random), along = rows <= cols ? (double)r / (double)rows : (double)c / (double)cols;
        x[i] = which == MUON_NORMAL     ? normal
               : which == MUON_STEEP    ? normal * pow(10.0, -6.0 * along)
               : which == MUON_RANK_ONE ? u[r] * v[c]
                                        : u[r] * v[c] + u[rows + r] * v[cols + c] + 1e-3 * normal;
    }
    free(u);
    free(v);
    return x;
}

// values become what the device saw; to be freed
static double* muon_newton_schulz(const NewtonSchulz* k, double* values, size_t rows, size_t cols, bool in_place) {
    size_t n = rows * cols, bytes = newton_schulz_work_bytes(rows, cols);
    OpsTensor in = ops_upload(values, n, 0, true), out = ops_floats(n);
    char *work = (char*)need(device_alloc(bytes)), *empty = (char*)need(malloc(bytes));
    memset(empty, 0xff, bytes);
    device_upload(work, empty, bytes);
    device_sync();
    memcpy(values, in.was, n * sizeof(double));
    size_t calls = newton_schulz_calls;
    newton_schulz_with(k, in_place ? in.f : out.f, in.f, rows, cols, work);
    CHECK(newton_schulz_calls == calls + 1, "%zu calls counted", newton_schulz_calls - calls);
    double* got = ops_download(in_place ? &in : &out, "newton_schulz");
    ops_free(&in);
    ops_free(&out);
    device_free(work, bytes);
    free(empty);
    return got;
}

static double muon_distance(const double* got, const double* want, size_t n) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(difference / fmax(norm, 1e-300));
}

static void test_muon_against_double(size_t rows, size_t cols, MuonSpectrum which, bool muon) {
    double *values = muon_values(rows, cols, which), *want = reference_zeros(rows * cols);
    double* got = muon_newton_schulz(muon ? &newton_schulz_muon : &newton_schulz_polar, values, rows, cols, which == MUON_STEEP);
    memcpy(want, values, rows * cols * sizeof(double));
    reference_newton_schulz(want, rows, cols, muon ? &reference_ns_muon : &reference_ns_polar);
#ifdef FLOATX_BF16
    // rounding of the input to bf16 fills the directions that these spectra leave (nearly) empty: all that can be asked is a bound
    if (which == MUON_RANK_ONE || which == MUON_NOISE) {
        double* s = reference_zeros(min_size(rows, cols)), most = 0.0;
        reference_singular_values(s, got, rows, cols);
        for (size_t i = 0; i < min_size(rows, cols); i++) { most = fmax(most, s[i]); }
        CHECK(most <= (muon ? 1.27 : 1.2), "%zu x %zu, %s: greatest singular value %.4f", rows, cols, muon_spectrum_names[which], most);
#ifdef OPS_VERBOSE
        printf("      %4zu x %4zu, %-20s %-14s greatest %.4f\n", rows, cols, muon_spectrum_names[which], muon ? "Muon" : "Polar Express", most);
#endif
        memcpy(got, want, rows * cols * sizeof(double));
        free(s);
    }
#endif
    double off = muon_distance(got, want, rows * cols), allowed = which == MUON_NORMAL ? MUON_TOLERANCE : MUON_STEEP_TOLERANCE;
    const char* name = muon ? "Muon" : "Polar Express";
    CHECK(off <= allowed, "%zu x %zu, %s, %s: off by %.3g, allowed %.3g", rows, cols, muon_spectrum_names[which], name, off, allowed);
#ifdef OPS_VERBOSE
    printf("      %4zu x %4zu, %-20s %-14s off by %.2e\n", rows, cols, muon_spectrum_names[which], muon ? "Muon" : "Polar Express", off);
#endif
    free(values);
    free(want);
    free(got);
}

static void test_muon_newton_schulz(void) {
    const size_t shapes[][2] = {{1, 1}, {5, 7}, {1, 9}, {9, 1}, {48, 20},
#if !OPS_SMALL
                                {33, 70}, {64, 256}, {96, 96}, {256, 64}, {130, 150},
#endif
    };
    ops_random.state = 13;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        for (int which = 0; which < MUON_SPECTRA; which++) {
            test_muon_against_double(shapes[i][0], shapes[i][1], (MuonSpectrum)which, false);
            test_muon_against_double(shapes[i][0], shapes[i][1], (MuonSpectrum)which, true);
        }
    }
}

// Muon's polynomial ends within 0.68..1.21 (singular values above 0.01 of the norm), Polar Express's within 0.858..1.142 (above 0.002).
static void test_muon_singular_values(void) {
    const size_t rows = OPS_SMALL ? 12 : 48, cols = OPS_SMALL ? 30 : 112;
    double s[48];
    ops_random.state = 14;
    for (int tall = 0; tall < 2; tall++) {
        for (int muon = 0; muon < 2; muon++) {
            double *values = muon_values(tall ? cols : rows, tall ? rows : cols, MUON_NORMAL), least = 1e9, most = 0.0;
            for (size_t i = 0; i < rows * cols; i++) { values[i] *= 1.0 + (double)(i % 5); }
            const NewtonSchulz* k = muon ? &newton_schulz_muon : &newton_schulz_polar;
            double* got = muon_newton_schulz(k, values, tall ? cols : rows, tall ? rows : cols, tall);
            reference_singular_values(s, got, tall ? cols : rows, tall ? rows : cols);
            for (size_t i = 0; i < rows; i++) {
                least = fmin(least, s[i]);
                most = fmax(most, s[i]);
            }
            double low = muon ? 0.66 : 0.84, high = muon ? 1.23 : 1.16;
            const char* name = muon ? "Muon" : "Polar Express";
            CHECK(low <= least && most <= high, "%s: singular values %.4f..%.4f, allowed %.2f..%.2f", name, least, most, low, high);
            free(values);
            free(got);
        }
    }
    // two directions a thousandfold above the rest: none may pass the upper bound, and the great ones are there
    double* values = muon_values(rows, cols, MUON_NOISE);
    double *got = muon_newton_schulz(&newton_schulz_polar, values, rows, cols, true), most = 0.0;
    size_t near = 0;
    reference_singular_values(s, got, rows, cols);
    for (size_t i = 0; i < rows; i++) {
        most = fmax(most, s[i]);
        near += s[i] > 0.84;
    }
    CHECK(most <= 1.16 && near >= 2, "rank two and noise: greatest singular value %.4f, %zu near 1", most, near);
    free(values);
    free(got);
}

static void test_muon_scales(void) {
    const size_t rows = 20, cols = OPS_SMALL ? 24 : 70, n = rows * cols;
    const double scales[] = {1e-20, 1e20, 7.0, 0x1p-60, 0x1p60, 1e-36, 1e36};
    ops_random.state = 15;
    double *x = muon_values(rows, cols, MUON_NORMAL), *scaled = reference_zeros(n);
    double* plain = muon_newton_schulz(&newton_schulz_polar, x, rows, cols, false);
    for (size_t i = 0; i < COUNT_OF(scales); i++) {
        for (size_t k = 0; k < n; k++) { scaled[k] = x[k] * scales[i]; }
        double *got = muon_newton_schulz(&newton_schulz_polar, scaled, rows, cols, false), off = muon_distance(got, plain, n);
        bool exact = scales[i] == 0x1p-60 || scales[i] == 0x1p60;
        CHECK(off <= (exact ? 0.0 : MUON_TOLERANCE), "times %.3g: off by %.3g", scales[i], off);
        free(got);
    }
    memset(scaled, 0, n * sizeof(double));
    double* got = muon_newton_schulz(&newton_schulz_polar, scaled, rows, cols, false);
    size_t wrong = 0;
    for (size_t k = 0; k < n; k++) { wrong += !(got[k] == 0.0); }
    CHECK(wrong == 0, "a matrix of zeros: %zu values are not 0", wrong);
    free(got);
    scaled[3] = 5.0; // one value: the matrix is that unit vector pair
    got = muon_newton_schulz(&newton_schulz_muon, scaled, rows, cols, false);
    wrong = 0;
    for (size_t k = 0; k < n; k++) { wrong += k == 3 ? !(got[k] > 0.6 && got[k] < 1.25) : !(got[k] == 0.0); }
    CHECK(wrong == 0, "one value: %zu values are wrong, it became %.3g", wrong, got[3]);
    free(got);
    free(x);
    free(plain);
    free(scaled);
}
