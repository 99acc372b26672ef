// test_muon.h - NorMuon's normalisation and whole updates of Muon and NorMuon against reference_muon.h, and the table of rows.
#pragma once
#include "../optim/muon.cuh"
#include "optimizer_rig.h"
#include "test_newton_schulz.h"
#ifdef _OPENMP
#include <omp.h>
#endif

// ---- NorMuon's normalisation ----

static void test_normuon_shape(size_t rows, size_t cols) {
    size_t n = rows * cols, moments = normuon_moments(rows, cols);
    double *x = reference_zeros(n), *want = reference_zeros(n), *v = reference_zeros(moments);
    OpsTensor tensor = ops_floats(n), state = ops_floats(moments), work = ops_floats(normuon_work_bytes(rows, cols) / sizeof(float));
    StepScalars host, *scalars = (StepScalars*)need(device_alloc(sizeof(StepScalars)));
    char label[64];
    memset(&host, 0, sizeof(host));
    host.beta2 = 0.9375f;
    device_upload(scalars, &host, sizeof(host));
    for (int step = 0; step < 3; step++) {
        for (size_t i = 0; i < n; i++) {
            size_t line = rows >= cols ? i / cols : i % cols;
            bool empty = line == 2 && step < 2; // comes in late: its moment is 0 until then
            x[i] = empty ? 0.0 : (0.01 + (double)line) * reference_normal(&ops_random);
        }
        ops_free(&tensor);
        tensor = ops_upload(x, n, 0, true);
        memcpy(want, tensor.was, n * sizeof(double));
        reference_normuon(want, v, rows, cols, 0.9375);
        normuon_normalise(tensor.f, state.f, rows, cols, work.f, scalars);
        snprintf(label, sizeof(label), "NorMuon's lines, %zu x %zu, step %d", rows, cols, step + 1);
        ops_check(label, &tensor, want, 2e-6);
        ops_check("its moments", &state, v, 2e-6);
        double *got = ops_download(&tensor, label), all = reference_muon_norm(got, n) / sqrt((double)n), worst = 0.0, ref = 0.0;
        CHECK(fabs(all - 1.0) < 1e-5, "%s: RMS %.7f", label, all);
        for (size_t line = 0; step == 0 && line < moments; line++) { // all but the empty one have one size
            double sum = 0.0;
            for (size_t i = 0; i < n; i++) { sum += (rows >= cols ? i / cols : i % cols) == line ? got[i] * got[i] : 0.0; }
            ref = line == 0 ? sum : ref;
            worst = line == 2 ? fmax(worst, sum) : fmax(worst, fabs(sum / ref - 1.0));
        }
        CHECK(worst < 1e-5, "%s: lines differ by %.3g", label, worst);
        free(got);
    }
    memset(x, 0, n * sizeof(double));
    ops_free(&tensor);
    tensor = ops_upload(x, n, 0, true);
    normuon_normalise(tensor.f, state.f, rows, cols, work.f, scalars);
    ops_check("zeros stay zeros", &tensor, x, 0.0);
    device_free(scalars, sizeof(StepScalars));
    ops_free(&tensor);
    ops_free(&state);
    ops_free(&work);
    free(x);
    free(want);
    free(v);
}

static void test_normuon(void) {
    const size_t shapes[][2] = {{1, 1}, {7, 5}, {5, 7}, {9, 1}, {1, 9}, {20, 70}, {66, 20}, {6, 6}};
    ops_random.state = 16;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) { test_normuon_shape(shapes[i][0], shapes[i][1]); }
    if (!OPS_SMALL) { test_normuon_shape(150, 333); }
}

// ---- updates ----

static OptimizerRig muon_rig_new(OptimizerKind kind, StateFormat format, size_t rows, size_t cols, int parts) {
    OptimizerConfig config;
    UnitState state;
    memset(&config, 0, sizeof(config));
    memset(&state, 0, sizeof(state));
    config.kind = kind;
    config.format = format;
    config.nesterov = true;
    muon_declare(&state, &config, kind, rows, cols, parts);
    OptimizerRig r = rig_new(&config, &state, muon_work_bytes(rows, cols, parts), rows, cols, parts);
    r.unit.lr_scale = 0.5f;
    r.host.lr = 0.1f;
    r.host.momentum = 0.875f;
    r.host.beta2 = 0.9375f;
    r.host.weight_decay = 0.25f;
    r.host.seed = 5;
    return r;
}

#define MUON_SCALE 0.25 // of gradients

static void muon_rig_step(OptimizerRig* r, double* g, uint32_t step) {
    rig_set_step(r, g, MUON_SCALE, step);
    muon_update(&r->config, r->config.kind, &r->unit, r->scalars);
    device_sync();
}

static void test_muon_update_shape(OptimizerKind kind, size_t rows, size_t cols, int parts, bool nesterov, bool cautious) {
    OptimizerRig rig = muon_rig_new(kind, STATE_FP32, rows, cols, parts);
    const int steps = OPS_SMALL ? 3 : 10;
    size_t n = rows * cols, own = n / (size_t)parts, longer = max_size(rows / (size_t)parts, cols), calls = newton_schulz_calls;
    double *w = reference_zeros(n), *start = reference_zeros(n), *g = reference_zeros(n), *m = reference_zeros(n);
    double* v = reference_zeros(3 * longer);
    rig.config.nesterov = nesterov;
    rig.config.cautious_decay = cautious;
    for (size_t i = 0; i < n; i++) { w[i] = 0.1 * reference_normal(&ops_random); }
    rig_put_weights(&rig, w);
    memcpy(start, w, n * sizeof(double));
    for (int step = 0; step < steps; step++) {
        for (size_t i = 0; i < n; i++) { g[i] = 1e-3 * (1.0 + (double)step) * reference_normal(&ops_random); }
        muon_rig_step(&rig, g, (uint32_t)step);
        for (int p = 0; p < parts; p++) {
            size_t at = (size_t)p * own;
            ReferenceMuon r = {rows / (size_t)parts, cols, kind == OPTIMIZER_NORMUON, nesterov, cautious, 0.1 * 0.5, 0.875, 0.9375, 0.25,
                               m + at, v + (size_t)p * longer};
            reference_muon_step(&r, w + at, g + at);
        }
    }
    double* got = rig_get_weights(&rig);
    for (size_t i = 0; i < n; i++) {
        got[i] -= start[i];
        w[i] -= start[i];
    }
    double off = muon_distance(got, w, n);
    const char* name = kind == OPTIMIZER_MUON ? "Muon" : "NorMuon";
    CHECK(off <= MUON_TOLERANCE, "%s %zu x %zu, %d part(s): %d steps off by %.3g, allowed %.3g", name, rows, cols, parts, steps, off, MUON_TOLERANCE);
#ifdef OPS_VERBOSE
    printf("      %-8s %4zu x %4zu, %d part(s): off by %.2e\n", name, rows, cols, parts, off);
#endif
    calls = newton_schulz_calls - calls;
    CHECK(calls == (size_t)(parts * steps), "%zu matrices orthogonalised in %d steps of %d part(s)", calls, steps, parts);
    double* all[] = {w, start, g, m, v, got};
    for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
    rig_free(&rig);
}

static void test_muon_updates(void) {
    ops_random.state = 17;
    for (int i = 0; i < 2; i++) {
        OptimizerKind kind = i ? OPTIMIZER_NORMUON : OPTIMIZER_MUON;
        test_muon_update_shape(kind, 1, 1, 1, true, false);
        test_muon_update_shape(kind, 5, 7, 1, true, false);
        test_muon_update_shape(kind, 15, 4, 3, false, true);
        if (OPS_SMALL) { continue; }
        test_muon_update_shape(kind, 48, 20, 1, true, true);
        test_muon_update_shape(kind, 64, 256, 1, true, false);
        test_muon_update_shape(kind, 96, 24, 3, true, false);
    }
}

// The size of V's gradient, and what it is, must not be felt in Q and K.
static void test_muon_parts(void) {
    const size_t rows = 36, cols = 20, n = rows * cols, first = 2 * n / 3;
    double *w = reference_zeros(n), *g = reference_zeros(n), *got[2];
    for (int i = 0; i < 2; i++) {
        OptimizerRig rig = muon_rig_new(OPTIMIZER_NORMUON, STATE_FP32, rows, cols, 3);
        ops_random.state = 18;
        for (size_t k = 0; k < n; k++) { w[k] = reference_normal(&ops_random); }
        for (size_t k = 0; k < n; k++) { g[k] = reference_normal(&ops_random) * (i && k >= first ? 1e4 * (double)(k % 7) : 1.0); }
        rig_put_weights(&rig, w);
        muon_rig_step(&rig, g, 0);
        got[i] = rig_get_weights(&rig);
        rig_free(&rig);
    }
    size_t other = 0, same = 0;
    for (size_t k = 0; k < n; k++) {
        other += k < first && got[0][k] != got[1][k];
        same += k >= first && got[0][k] == got[1][k];
    }
    CHECK(other == 0, "V's gradient changed %zu weights of Q and K", other);
    CHECK(same < n / 9, "V's gradient left %zu weights of V alone", same);
    free(got[0]);
    free(got[1]);
    free(w);
    free(g);
}

// Ten steps in each format, all with the same gradients: how far the shorter formats end from fp32's.
static void test_muon_formats(void) {
    const size_t rows = 64, cols = OPS_SMALL ? 64 : 80, n = rows * cols;
    const double allowed[STATE_FORMATS] = {0.0, 0.04, 0.06, 0.5}; // found: 0.013, 0.021, 0.16
    const int arrays[STATE_FORMATS] = {2, 2, 3, 3}, steps = OPS_SMALL ? 3 : 10;
    double *w = reference_zeros(n), *g = reference_zeros(n), *base = NULL;
    for (int f = 0; f < STATE_FORMATS; f++) {
        OptimizerRig rig = muon_rig_new(OPTIMIZER_NORMUON, (StateFormat)f, rows, cols, 1);
        ArrayType type = f == 0 ? ARRAY_F32 : f == 1 ? ARRAY_BF16 : ARRAY_U8;
        CHECK(rig.state.count == arrays[f] && rig.state.arrays[0].type == type, "format %d: %d arrays", f, rig.state.count);
        ops_random.state = 19;
        memset(w, 0, n * sizeof(double));
        rig_put_weights(&rig, w);
        for (int step = 0; step < steps; step++) {
            for (size_t i = 0; i < n; i++) { g[i] = reference_normal(&ops_random); }
            muon_rig_step(&rig, g, (uint32_t)step);
        }
        double* got = rig_get_weights(&rig);
        double off = base ? muon_distance(got, base, n) : 0.0;
        CHECK(off <= allowed[f] && (f == 0 || off > 0.0), "format %d: after %d steps %.3g from fp32's, allowed %.3g", f, steps, off, allowed[f]);
#ifdef OPS_VERBOSE
        printf("      format %d differs from fp32 by %.3g\n", f, off);
#endif
        if (base) {
            free(got);
        } else {
            base = got;
        }
        rig_free(&rig);
    }
    free(base);
    free(w);
    free(g);
}

// Without a gradient there is decay alone, cautious (nothing is against it) or not.
static void test_muon_decay(void) {
    const size_t rows = 24, cols = 10, n = rows * cols;
    for (int i = 0; i < 4; i++) {
        OptimizerRig rig = muon_rig_new(i < 2 ? OPTIMIZER_MUON : OPTIMIZER_NORMUON, STATE_FP32, rows, cols, 3);
        double *w = reference_zeros(n), *g = reference_zeros(n);
        rig.config.cautious_decay = i % 2 == 1;
        ops_random.state = 21;
        for (size_t k = 0; k < n; k++) { w[k] = reference_normal(&ops_random); }
        rig_put_weights(&rig, w);
        for (uint32_t step = 0; step < 3; step++) {
            muon_rig_step(&rig, g, step);
            for (size_t k = 0; k < n; k++) { w[k] *= 1.0 - (double)0.1f * 0.5 * 0.25; }
        }
        double* got = rig_get_weights(&rig);
        ops_compare("decay alone", got, w, n, 2e-6);
        free(got);
        free(w);
        free(g);
        rig_free(&rig);
    }
}

// Bit for bit, with any number of threads.
static void test_muon_threads(void) {
#if defined(_OPENMP) && !ON_GPU
    const size_t shapes[][2] = {{130, 130}, {70, 200}, {200, 70}};
    int threads = omp_get_max_threads();
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        double* base = NULL;
        size_t n = shapes[i][0] * shapes[i][1];
        for (int count = 1; count <= 5; count += 2) {
            omp_set_num_threads(count);
            ops_random.state = 20;
            double *x = muon_values(shapes[i][0], shapes[i][1], MUON_NORMAL);
            double* got = muon_newton_schulz(&newton_schulz_polar, x, shapes[i][0], shapes[i][1], true);
            bool same = !base || memcmp(base, got, n * sizeof(double)) == 0;
            CHECK(same, "%zu x %zu: %d threads give another result", shapes[i][0], shapes[i][1], count);
            free(x);
            if (base) {
                free(got);
            } else {
                base = got;
            }
        }
        free(base);
    }
    omp_set_num_threads(threads);
#endif
    CHECK(true, "nothing to count");
}

static const TestRow muon_tests[] = {
    {"muon: products with factors and leading dimensions", test_muon_products},
    {"muon: symmetric products", test_muon_symmetric},
    {"muon: Newton-Schulz against double, all spectra", test_muon_newton_schulz},
    {"muon: singular values come near 1", test_muon_singular_values},
    {"muon: any scale, zeros, a single value", test_muon_scales},
    {"muon: NorMuon's lines against double", test_normuon},
    {"muon: updates against double", test_muon_updates},
    {"muon: Q, K and V are matrices of their own", test_muon_parts},
    {"muon: without a gradient, decay alone", test_muon_decay},
    {"muon: momentum in all formats", test_muon_formats},
    {"muon: the number of threads is not felt", test_muon_threads},
};
