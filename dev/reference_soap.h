// reference_soap.h - SOAP (Vyas et al. 2024) once more in double precision, as plainly as the mathematics allows, for one matrix. Vectors
// of a basis are columns here, and the power step is orthonormalised by Gram-Schmidt. First bases are the caller's: where G G^T has a null
// space any basis of it will do, and what follows depends on the choice.
#pragma once
#include "reference.h"

typedef struct {
    size_t rows, cols, every, steps; // steps done
    double lr, beta1, beta2, eps, decay;
    double *m, *v, *left, *right, *q_left, *q_right; // (rows, cols) twice, (rows, rows), (cols, cols), and the bases of these
} ReferenceSoap;

static ReferenceSoap reference_soap_new(size_t rows, size_t cols, size_t every) {
    ReferenceSoap s;
    memset(&s, 0, sizeof(s));
    s.rows = rows;
    s.cols = cols;
    s.every = every;
    s.m = reference_zeros(rows * cols);
    s.v = reference_zeros(rows * cols);
    s.left = reference_zeros(rows * rows);
    s.q_left = reference_zeros(rows * rows);
    s.right = reference_zeros(cols * cols);
    s.q_right = reference_zeros(cols * cols);
    return s;
}

static void reference_soap_free(ReferenceSoap* s) {
    double* all[] = {s->m, s->v, s->left, s->right, s->q_left, s->q_right};
    for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
}

// out (M,N) = op(a) op(b), op(a) (M,K)
static void reference_product(double* out, const double* a, bool ta, const double* b, bool tb, size_t M, size_t N, size_t K) {
    for (size_t i = 0; i < M; i++) {
        for (size_t j = 0; j < N; j++) {
            double sum = 0.0;
            for (size_t k = 0; k < K; k++) { sum += (ta ? a[k * M + i] : a[i * K + k]) * (tb ? b[j * K + k] : b[k * N + j]); }
            out[i * N + j] = sum;
        }
    }
}

// columns of x (n,n) become orthonormal, from the first on; each is cleared twice of those before it
static void reference_gram_schmidt(double* x, size_t n) {
    for (size_t j = 0; j < n; j++) {
        for (size_t k = 0; k < 2 * j; k++) {
            size_t other = k % j;
            double dot = 0.0;
            for (size_t i = 0; i < n; i++) { dot += x[i * n + j] * x[i * n + other]; }
            for (size_t i = 0; i < n; i++) { x[i * n + j] -= dot * x[i * n + other]; }
        }
        double norm = 0.0;
        for (size_t i = 0; i < n; i++) { norm += x[i * n + j] * x[i * n + j]; }
        for (size_t i = 0; i < n; i++) { x[i * n + j] /= sqrt(norm); }
    }
}

// One power step of the basis q (n,n) of a symmetric matrix; order[k] = the vector that came to place k
static void reference_soap_turn(double* q, size_t* order, const double* matrix, size_t n) {
    double *image = reference_zeros(n * n), *share = reference_zeros(n);
    reference_product(image, matrix, false, q, false, n, n, n);
    for (size_t j = 0; j < n; j++) {
        for (size_t i = 0; i < n; i++) { share[j] += q[i * n + j] * image[i * n + j]; }
    }
    for (size_t k = 0; k < n; k++) { // selection
        size_t best = n;
        for (size_t j = 0; j < n; j++) {
            bool taken = false;
            for (size_t i = 0; i < k; i++) { taken = taken || order[i] == j; }
            if (!taken && (best == n || share[j] > share[best])) { best = j; }
        }
        order[k] = best;
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < n; k++) { q[i * n + k] = image[i * n + order[k]]; }
    }
    reference_gram_schmidt(q, n);
    free(image);
    free(share);
}

static void reference_soap_turn_both(ReferenceSoap* s) {
    size_t r = s->rows, c = s->cols;
    size_t* order = (size_t*)need(malloc((r + c) * sizeof(size_t)));
    double* old = reference_zeros(r * c);
    reference_soap_turn(s->q_left, order, s->left, r);
    reference_soap_turn(s->q_right, order + r, s->right, c);
    memcpy(old, s->v, r * c * sizeof(double));
    for (size_t i = 0; i < r; i++) {
        for (size_t j = 0; j < c; j++) { s->v[i * c + j] = old[order[i] * c + order[r + j]]; }
    }
    free(order);
    free(old);
}

// w (rows, cols) changes from the second step on; after the first the caller sets q_left and q_right.
static void reference_soap_step(ReferenceSoap* s, double* w, const double* g) {
    size_t r = s->rows, c = s->cols, n = r * c;
    double *half = reference_zeros(n), *rotated = reference_zeros(n), *mean = reference_zeros(n);
    double *square = reference_zeros(max_size(r * r, c * c)), t = (double)s->steps;
    if (s->steps > 0) {
        reference_product(half, s->q_left, true, g, false, r, c, r);
        reference_product(rotated, half, false, s->q_right, false, r, c, c);
        for (size_t i = 0; i < n; i++) {
            s->m[i] = s->beta1 * s->m[i] + (1.0 - s->beta1) * g[i];
            s->v[i] = s->beta2 * s->v[i] + (1.0 - s->beta2) * rotated[i] * rotated[i];
        }
        reference_product(half, s->q_left, true, s->m, false, r, c, r);
        reference_product(mean, half, false, s->q_right, false, r, c, c);
        for (size_t i = 0; i < n; i++) {
            mean[i] = mean[i] / (1.0 - pow(s->beta1, t)) / (sqrt(s->v[i] / (1.0 - pow(s->beta2, t))) + s->eps);
        }
        reference_product(half, s->q_left, false, mean, false, r, c, r);
        reference_product(rotated, half, false, s->q_right, true, r, c, c);
        for (size_t i = 0; i < n; i++) { w[i] -= s->lr * (rotated[i] + s->decay * w[i]); }
    }
    reference_product(square, g, false, g, true, r, r, c);
    for (size_t i = 0; i < r * r; i++) { s->left[i] = s->beta2 * s->left[i] + (1.0 - s->beta2) * square[i]; }
    reference_product(square, g, true, g, false, c, c, r);
    for (size_t i = 0; i < c * c; i++) { s->right[i] = s->beta2 * s->right[i] + (1.0 - s->beta2) * square[i]; }
    if (s->steps > 0 && s->steps % s->every == 0) { reference_soap_turn_both(s); }
    s->steps++;
    free(half);
    free(rotated);
    free(mean);
    free(square);
}
