// reference_muon.h - Newton-Schulz, Muon and NorMuon once more in double precision, as plainly as the mathematics allows, and singular
// values by Jacobi's one-sided method (Hestenes 1958): columns are turned pair by pair until all are orthogonal; their norms are what is
// sought, small ones as exactly as large ones.
#pragma once
#include "reference.h"

typedef struct {
    double a[5], b[5], c[5];
    double margin; // 0: the input's Frobenius norm becomes 1; else margin times the fourth root of sum s^4 does
} ReferenceNewtonSchulz;

static const ReferenceNewtonSchulz reference_ns_muon = {{3.4445, 3.4445, 3.4445, 3.4445, 3.4445},
                                                        {-4.7750, -4.7750, -4.7750, -4.7750, -4.7750},
                                                        {2.0315, 2.0315, 2.0315, 2.0315, 2.0315},
                                                        0.0};
static const ReferenceNewtonSchulz reference_ns_polar = {
    {8.156554524902461, 4.042929935166739, 3.8916678022926607, 3.285753657755655, 2.3465413258596377},
    {-22.48329292557795, -2.808917465908714, -2.772484153217685, -2.3681294933425376, -1.7097828382687081},
    {15.878769915207462, 0.5000178451051316, 0.5060648178503393, 0.46449024233003106, 0.42323551169305323},
    1.02};

// out (M, N) = a (M, K) b (K, N)
static void reference_muon_product(double* out, const double* a, const double* b, size_t M, size_t N, size_t K) {
    memset(out, 0, M * N * sizeof(double));
    for (size_t i = 0; i < M; i++) {
        for (size_t k = 0; k < K; k++) {
            for (size_t j = 0; j < N; j++) { out[i * N + j] += a[i * K + k] * b[k * N + j]; }
        }
    }
}

// out (n, m) = x (m, n)^T
static void reference_muon_transpose(double* out, const double* x, size_t m, size_t n) {
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++) { out[j * m + i] = x[i * n + j]; }
    }
}

static double reference_muon_norm(const double* x, size_t n) {
    double most = 0.0, sum = 0.0;
    for (size_t i = 0; i < n; i++) { most = fmax(most, fabs(x[i])); }
    for (size_t i = 0; i < n && most > 0.0; i++) { sum += x[i] / most * (x[i] / most); }
    return most * sqrt(sum);
}

// x (m, n), m <= n: five times X = a X + (b A + c A^2) X with A = X X^T
static void reference_ns_short(double* x, size_t m, size_t n, const ReferenceNewtonSchulz* k) {
    double *turned = reference_zeros(n * m), *A = reference_zeros(m * m), *B = reference_zeros(m * m), *next = reference_zeros(m * n);
    double norm = reference_muon_norm(x, m * n);
    for (size_t i = 0; i < m * n; i++) { x[i] = norm > 0.0 ? x[i] / norm : 0.0; }
    for (int step = 0; step < 5; step++) {
        reference_muon_transpose(turned, x, m, n);
        reference_muon_product(A, x, turned, m, m, n);
        if (step == 0 && k->margin > 0.0 && norm > 0.0) {
            double bound = k->margin * sqrt(reference_muon_norm(A, m * m));
            for (size_t i = 0; i < m * n; i++) { x[i] /= bound; }
            for (size_t i = 0; i < m * m; i++) { A[i] /= bound * bound; }
        }
        reference_muon_product(B, A, A, m, m, m);
        for (size_t i = 0; i < m * m; i++) { B[i] = k->b[step] * A[i] + k->c[step] * B[i]; }
        reference_muon_product(next, B, x, m, n, m);
        for (size_t i = 0; i < m * n; i++) { x[i] = k->a[step] * x[i] + next[i]; }
    }
    free(turned);
    free(A);
    free(B);
    free(next);
}

static void reference_newton_schulz(double* x, size_t rows, size_t cols, const ReferenceNewtonSchulz* k) {
    if (rows <= cols) {
        reference_ns_short(x, rows, cols, k);
        return;
    }
    double* turned = reference_zeros(rows * cols);
    reference_muon_transpose(turned, x, rows, cols);
    reference_ns_short(turned, cols, rows, k);
    reference_muon_transpose(x, turned, cols, rows);
    free(turned);
}

// s (the shorter side), in no order: singular values of x (rows, cols)
static void reference_singular_values(double* s, const double* x, size_t rows, size_t cols) {
    size_t n = rows <= cols ? rows : cols, m = rows <= cols ? cols : rows; // n lines of m values
    double* lines = reference_zeros(n * m);
    if (rows <= cols) {
        memcpy(lines, x, n * m * sizeof(double));
    } else {
        reference_muon_transpose(lines, x, rows, cols);
    }
    bool turned = true;
    for (int sweep = 0; turned && sweep < 40; sweep++) {
        turned = false;
        for (size_t i = 0; i < n; i++) {
            for (size_t j = i + 1; j < n; j++) {
                double *p = lines + i * m, *q = lines + j * m, pp = 0.0, qq = 0.0, pq = 0.0;
                for (size_t k = 0; k < m; k++) {
                    pp += p[k] * p[k];
                    qq += q[k] * q[k];
                    pq += p[k] * q[k];
                }
                if (fabs(pq) <= 1e-13 * sqrt(pp * qq)) { continue; }
                double zeta = (qq - pp) / (2.0 * pq), tangent = (zeta < 0.0 ? -1.0 : 1.0) / (fabs(zeta) + sqrt(1.0 + zeta * zeta));
                double cosine = 1.0 / sqrt(1.0 + tangent * tangent), sine = cosine * tangent;
                for (size_t k = 0; k < m; k++) {
                    double old = p[k];
                    p[k] = cosine * old - sine * q[k];
                    q[k] = sine * old + cosine * q[k];
                }
                turned = true;
            }
        }
    }
    for (size_t i = 0; i < n; i++) { s[i] = reference_muon_norm(lines + i * m, m); }
    free(lines);
}

// x (rows, cols), v (the longer side): NorMuon's lines along the longer side share a moment (Li et al. 2025, arXiv 2510.05491), then RMS 1
static void reference_normuon(double* x, double* v, size_t rows, size_t cols, double beta2) {
    size_t lines = rows >= cols ? rows : cols, n = rows >= cols ? cols : rows;
    for (size_t line = 0; line < lines; line++) {
        double* p = rows >= cols ? x + line * cols : x + line;
        size_t stride = rows >= cols ? 1 : cols;
        double mean = 0.0;
        for (size_t i = 0; i < n; i++) { mean += p[i * stride] * p[i * stride] / (double)n; }
        v[line] = beta2 * v[line] + (1.0 - beta2) * mean;
        for (size_t i = 0; i < n; i++) { p[i * stride] = v[line] > 0.0 ? p[i * stride] / sqrt(v[line]) : 0.0; }
    }
    double norm = reference_muon_norm(x, rows * cols);
    for (size_t i = 0; i < rows * cols && norm > 0.0; i++) { x[i] *= sqrt((double)(rows * cols)) / norm; }
}

typedef struct {
    size_t rows, cols; // of one part
    bool normuon, nesterov, cautious;
    double lr, momentum, beta2, decay;
    double *m, *v; // (rows, cols), (the longer side)
} ReferenceMuon;

static void reference_muon_step(ReferenceMuon* r, double* w, const double* g) {
    size_t n = r->rows * r->cols;
    double* x = reference_zeros(n);
    for (size_t i = 0; i < n; i++) {
        r->m[i] = r->momentum * r->m[i] + (1.0 - r->momentum) * g[i];
        x[i] = r->nesterov ? r->momentum * r->m[i] + (1.0 - r->momentum) * g[i] : r->m[i];
    }
    reference_newton_schulz(x, r->rows, r->cols, r->normuon ? &reference_ns_polar : &reference_ns_muon);
    if (r->normuon) { reference_normuon(x, r->v, r->rows, r->cols, r->beta2); }
    double scale = r->normuon ? 0.2 : 0.2 * sqrt((double)max_size(r->rows, r->cols));
    for (size_t i = 0; i < n; i++) {
        double d = scale * x[i], decay = r->cautious && d * w[i] < 0.0 ? 0.0 : r->decay;
        w[i] -= r->lr * (d + decay * w[i]);
    }
    free(x);
}
