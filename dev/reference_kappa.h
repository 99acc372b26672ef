// reference_kappa.h - Kappa's updates in double, written plainly from the formulas at the head of optim/kappa.cuh: momentum, factors of
// equilibration, codes, the step; the embedding's moments and StableAdamW's bound. NorMuon's rows: reference_muon.h.
#pragma once
#include "reference.h"

static double reference_kappa_bf16(double x) {
    float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    memcpy(&f, &u, sizeof(f));
    return f;
}

// A code of a packed block: its bits are found one by one.
static int reference_kappa_code(const uint8_t* block, int bits, int element) {
    int lane = element % 32, value = 0;
    for (int i = 0; i < bits; i++) {
        int bit = element / 32 * bits + i;
        value |= (block[32 * (bit / 8) + lane] >> (bit % 8) & 1) << i;
    }
    return value >= 1 << (bits - 1) ? value - (1 << bits) : value;
}

// rho (rows): RMS of rows; gamma (cols): RMS of columns over that of the matrix; both rounded to bf16
static void reference_kappa_factors(double* rho, double* gamma, const double* m, size_t rows, size_t cols, bool equilibrate) {
    double all = 0.0;
    for (size_t i = 0; i < rows * cols; i++) { all += m[i] * m[i]; }
    all = sqrt(all / (double)(rows * cols));
    for (size_t i = 0; i < rows; i++) {
        double sum = 0.0;
        for (size_t j = 0; j < cols; j++) { sum += m[i * cols + j] * m[i * cols + j]; }
        rho[i] = reference_kappa_bf16(equilibrate ? sqrt(sum / (double)cols) : all);
    }
    for (size_t j = 0; j < cols; j++) {
        double sum = 0.0;
        for (size_t i = 0; i < rows; i++) { sum += m[i * cols + j] * m[i * cols + j]; }
        gamma[j] = reference_kappa_bf16(!equilibrate ? 1.0 : all > 0.0 ? sqrt(sum / (double)rows) / all : 0.0);
    }
}

static void reference_kappa_apply(double* w, const double* d, size_t count, double factor, double lr, double decay, bool cautious) {
    for (size_t i = 0; i < count; i++) {
        double step = factor * d[i];
        w[i] = w[i] - lr * step - (cautious && step * w[i] < 0.0 ? 0.0 : lr * decay * w[i]);
    }
}

typedef struct {
    double lr, mu, beta1, beta2, eps, decay, ahead; // ahead: share of the look-ahead
    bool cautious;
} ReferenceKappa;

// m = mu m + (1 - mu) g, and g becomes what is orthogonalised; g as the update sees it, with what the last one left
static void reference_kappa_momentum(double* m, double* g, size_t count, const ReferenceKappa* k) {
    for (size_t i = 0; i < count; i++) {
        m[i] = k->mu * m[i] + (1.0 - k->mu) * g[i];
        g[i] = m[i] + k->ahead * (1.0 - k->mu) * (g[i] - m[i]);
    }
}

// An embedding. by_row: v (rows), else v (rows, cols). t: the step, from 1.
static void reference_kappa_embedding(double* w, double* m, const double* g, double* v, size_t rows, size_t cols, bool by_row,
                                      const ReferenceKappa* k, int t) {
    double correct1 = 1.0 - pow(k->beta1, t), correct2 = 1.0 - pow(k->beta2, t), ratio = 0.0, *d = reference_zeros(rows * cols);
    for (size_t i = 0; i < rows; i++) {
        double mean = 0.0;
        for (size_t j = 0; j < cols; j++) { mean += g[i * cols + j] * g[i * cols + j] / (double)cols; }
        if (by_row) { v[i] = k->beta2 * v[i] + (1.0 - k->beta2) * mean; }
        for (size_t j = 0; j < cols; j++) {
            size_t at = i * cols + j;
            if (!by_row) { v[at] = k->beta2 * v[at] + (1.0 - k->beta2) * g[at] * g[at]; }
            double vhat = (by_row ? v[i] : v[at]) / correct2;
            m[at] = k->beta1 * m[at] + (1.0 - k->beta1) * g[at];
            d[at] = m[at] / correct1 / (sqrt(vhat) + k->eps);
            ratio += vhat > 0.0 ? g[at] * g[at] / vhat : 0.0;
        }
    }
    double rms = sqrt(ratio / (double)(rows * cols));
    reference_kappa_apply(w, d, rows * cols, rms > 1.0 ? 1.0 / rms : 1.0, k->lr, k->decay, k->cautious);
    free(d);
}
