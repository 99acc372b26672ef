// reference_optimizers.h - every elementwise optimizer and Adafactor once more, in double and as plainly as possible, written from the
// papers and from nothing of the program: the oracle of test_optimizers.h. A unit is a matrix of rows x cols; whatever a paper takes of a
// layer or a tensor is taken of it. Gradients come as they are used (already scaled by clipping); steps count from 1.
#pragma once
#include "reference.h"

typedef struct {
    double lr, beta1, beta2, beta3, eps, weight_decay, momentum, alpha;
    double trust;                                  // LARS's coefficient
    double low, high, base, clip;                  // trust ratio of any optimizer (high 0: none), bound on an update's RMS (0: none)
    bool nesterov, cautious, vector;
} ReferenceSettings;

typedef struct {
    size_t rows, cols, count;
    double* w;
    double* state[3]; // from zero
} ReferenceUnit;

typedef void (*ReferenceStep)(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t);

static ReferenceUnit reference_unit(const double* w, size_t rows, size_t cols) {
    ReferenceUnit u = {rows, cols, rows * cols, reference_zeros(rows * cols), {NULL, NULL, NULL}};
    memcpy(u.w, w, u.count * sizeof(double));
    for (int k = 0; k < 3; k++) { u.state[k] = reference_zeros(u.count); }
    return u;
}

static void reference_unit_free(ReferenceUnit* u) {
    free(u->w);
    for (int k = 0; k < 3; k++) { free(u->state[k]); }
}

// ---- from a direction to weights ----

// What the trust ratio (You et al. 2017, 2020: |w| / |d|, here over `base` and within low..high) and then the bound on the update's RMS
// (Shazeer and Stern 2018, section 6) make of a direction.
static double reference_ratio(const ReferenceUnit* u, const double* d, const ReferenceSettings* s) {
    double weights = reference_norm(u->w, u->count), updates = reference_norm(d, u->count), ratio = 1.0;
    if (s->high > 0.0 && weights > 0.0 && updates > 0.0) {
        ratio = weights / updates / s->base;
        if (ratio < s->low) { ratio = s->low; }
        if (ratio > s->high) { ratio = s->high; }
    }
    double rms = ratio * updates / sqrt((double)u->count);
    return s->clip > 0.0 && rms > s->clip ? ratio / (rms / s->clip) : ratio;
}

// Decoupled decay (Loshchilov and Hutter 2019, algorithm 2) beside the step; cautious (Chen et al. 2025, algorithm 1): only of weights
// that the step, too, moves towards zero or leaves.
static void reference_apply(ReferenceUnit* u, const double* d, double ratio, double decay, const ReferenceSettings* s) {
    for (size_t i = 0; i < u->count; i++) {
        double step = ratio * d[i], old = u->w[i];
        bool decays = !s->cautious || step * old >= 0.0;
        u->w[i] = old - s->lr * step - (decays ? s->lr * decay * old : 0.0);
    }
}

// ---- Adam's moments ----

static void reference_moment(double* m, const double* g, double beta, size_t count, bool squares) {
    for (size_t i = 0; i < count; i++) { m[i] = beta * m[i] + (1.0 - beta) * (squares ? g[i] * g[i] : g[i]); }
}

// Kingma and Ba 2015, algorithm 1, up to the direction: state 0 and 1 are m and v.
static void reference_adam_direction(ReferenceUnit* u, double* d, const double* g, const ReferenceSettings* s, size_t t) {
    reference_moment(u->state[0], g, s->beta1, u->count, false);
    reference_moment(u->state[1], g, s->beta2, u->count, true);
    double start1 = 1.0 - pow(s->beta1, (double)t), start2 = 1.0 - pow(s->beta2, (double)t);
    for (size_t i = 0; i < u->count; i++) { d[i] = u->state[0][i] / start1 / (sqrt(u->state[1][i] / start2) + s->eps); }
}

// g + decay w
static double* reference_coupled(const ReferenceUnit* u, const double* g, double decay) {
    double* sum = reference_zeros(u->count);
    for (size_t i = 0; i < u->count; i++) { sum[i] = g[i] + decay * u->w[i]; }
    return sum;
}

static void reference_step_adamw(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    double* d = reference_zeros(u->count);
    reference_adam_direction(u, d, g, s, t);
    reference_apply(u, d, reference_ratio(u, d, s), s->weight_decay, s);
    free(d);
}

static void reference_step_adam(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    double *d = reference_zeros(u->count), *own = reference_coupled(u, g, s->weight_decay);
    reference_adam_direction(u, d, own, s, t);
    reference_apply(u, d, reference_ratio(u, d, s), 0.0, s);
    free(d);
    free(own);
}

// ---- the others ----

// Sutskever et al. 2013 in PyTorch's form: b <- mu b + g; the step is b, or g + mu b.
static void reference_step_sgd(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    (void)t;
    double *d = reference_zeros(u->count), *own = reference_coupled(u, g, s->weight_decay), *b = u->state[0];
    for (size_t i = 0; i < u->count; i++) {
        b[i] = s->momentum * b[i] + own[i];
        d[i] = s->nesterov ? own[i] + s->momentum * b[i] : b[i];
    }
    reference_apply(u, d, reference_ratio(u, d, s), 0.0, s);
    free(d);
    free(own);
}

// Duchi et al. 2011, section 1.1
static void reference_step_adagrad(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    (void)t;
    double *d = reference_zeros(u->count), *own = reference_coupled(u, g, s->weight_decay), *sum = u->state[0];
    for (size_t i = 0; i < u->count; i++) {
        sum[i] += own[i] * own[i];
        d[i] = own[i] / (sqrt(sum[i]) + s->eps);
    }
    reference_apply(u, d, reference_ratio(u, d, s), 0.0, s);
    free(d);
    free(own);
}

// You et al. 2017, algorithm 1, the global rate taken out of the momentum; vectors by plain momentum, without decay.
static void reference_step_lars(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    (void)t;
    double decay = s->vector ? 0.0 : s->weight_decay, local = 1.0;
    double weights = reference_norm(u->w, u->count), grads = reference_norm(g, u->count);
    if (!s->vector && weights > 0.0 && grads > 0.0) { local = s->trust * weights / (grads + decay * weights); }
    double *own = reference_coupled(u, g, decay), *v = u->state[0];
    for (size_t i = 0; i < u->count; i++) {
        v[i] = s->momentum * v[i] + local * own[i];
        u->w[i] -= s->lr * v[i];
    }
    free(own);
}

// You et al. 2020, algorithm 2 as of version 3: no correction of the moments; phi(x) = min(x, 10).
static void reference_step_lamb(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    (void)t;
    double* d = reference_zeros(u->count);
    reference_moment(u->state[0], g, s->beta1, u->count, false);
    reference_moment(u->state[1], g, s->beta2, u->count, true);
    for (size_t i = 0; i < u->count; i++) { d[i] = u->state[0][i] / (sqrt(u->state[1][i]) + s->eps) + s->weight_decay * u->w[i]; }
    double weights = reference_norm(u->w, u->count), updates = reference_norm(d, u->count);
    double ratio = weights > 0.0 && updates > 0.0 ? fmin(weights, 10.0) / updates : 1.0;
    for (size_t i = 0; i < u->count; i++) { u->w[i] -= s->lr * ratio * d[i]; }
    free(d);
}

// Chen et al. 2023, algorithm 2
static void reference_step_lion(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    (void)t;
    double *d = reference_zeros(u->count), *m = u->state[0];
    for (size_t i = 0; i < u->count; i++) {
        double c = s->beta1 * m[i] + (1.0 - s->beta1) * g[i];
        d[i] = (double)((c > 0.0) - (c < 0.0));
        m[i] = s->beta2 * m[i] + (1.0 - s->beta2) * g[i];
    }
    reference_apply(u, d, reference_ratio(u, d, s), s->weight_decay, s);
    free(d);
}

// Pagliardini et al. 2024, algorithm 1: state 0, 1, 2 are the fast mean, the slow mean and v.
static void reference_step_ademamix(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    double* d = reference_zeros(u->count);
    reference_moment(u->state[0], g, s->beta1, u->count, false);
    reference_moment(u->state[1], g, s->beta3, u->count, false);
    reference_moment(u->state[2], g, s->beta2, u->count, true);
    double start1 = 1.0 - pow(s->beta1, (double)t), start2 = 1.0 - pow(s->beta2, (double)t);
    for (size_t i = 0; i < u->count; i++) {
        d[i] = (u->state[0][i] / start1 + s->alpha * u->state[1][i]) / (sqrt(u->state[2][i] / start2) + s->eps);
    }
    reference_apply(u, d, reference_ratio(u, d, s), s->weight_decay, s);
    free(d);
}

// Shazeer and Stern 2018, algorithms 4 (matrices) and 5 (vectors) with the paper's proposed settings: state 0 and 1 are R (rows) and C
// (cols), sums as in the paper, or state 0 is V.
static void reference_step_adafactor(ReferenceUnit* u, const double* g, const ReferenceSettings* s, size_t t) {
    double *d = reference_zeros(u->count), *r = u->state[0], *c = u->state[1], beta2 = 1.0 - pow((double)t, -0.8), all = 0.0;
    bool matrix = u->rows > 1 && u->cols > 1;
    for (size_t i = 0; i < u->rows && matrix; i++) {
        double sum = 0.0;
        for (size_t j = 0; j < u->cols; j++) { sum += g[i * u->cols + j] * g[i * u->cols + j] + 1e-30; }
        r[i] = beta2 * r[i] + (1.0 - beta2) * sum;
        all += r[i];
    }
    for (size_t j = 0; j < u->cols && matrix; j++) {
        double sum = 0.0;
        for (size_t i = 0; i < u->rows; i++) { sum += g[i * u->cols + j] * g[i * u->cols + j] + 1e-30; }
        c[j] = beta2 * c[j] + (1.0 - beta2) * sum;
    }
    for (size_t i = 0; i < u->count; i++) {
        if (!matrix) { r[i] = beta2 * r[i] + (1.0 - beta2) * (g[i] * g[i] + 1e-30); }
        d[i] = g[i] / sqrt(matrix ? r[i / u->cols] * c[i % u->cols] / all : r[i]);
    }
    double root = sqrt((double)u->count), limit = s->clip > 0.0 ? s->clip : 1.0;
    double size = fmax(1e-3, reference_norm(u->w, u->count) / root), excess = fmax(1.0, reference_norm(d, u->count) / root / limit);
    reference_apply(u, d, size / excess, s->weight_decay, s);
    free(d);
}
