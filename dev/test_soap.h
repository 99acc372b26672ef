// test_soap.h - SOAP: its bases on a fixed matrix, whole updates against the double reference; with the rows of test_orthonormal.h.
// Tolerance: an update is Adam's in the bases, where directions of small second moment count as much as others: rounding of L's small
// eigenvalues shows there first (found: 5e-7).
#pragma once
#include "../optim/soap.cuh"
#include "optimizer_rig.h"
#include "reference_soap.h"
#include "test_orthonormal.h"

#define SOAP_TOLERANCE 1e-5

#define SOAP_SCALE 0.5 // of gradients
#define SOAP_LR 0.05
#define SOAP_DECAY 0.1

static OptimizerRig soap_rig_new(size_t rows, size_t cols, int parts, int every) {
    OptimizerConfig config;
    UnitState state;
    memset(&config, 0, sizeof(config));
    memset(&state, 0, sizeof(state));
    config.kind = OPTIMIZER_SOAP;
    config.format = STATE_INT4; // asks for nothing here
    config.soap_every = every;
    soap_declare(&state, &config, rows, cols, parts);
    OptimizerRig r = rig_new(&config, &state, soap_work_bytes(rows, cols, parts), rows, cols, parts);
    r.host.lr = (float)SOAP_LR;
    r.host.beta1 = 0.875f;
    r.host.beta2 = 0.9375f;
    r.host.eps = 1e-8f;
    r.host.weight_decay = (float)SOAP_DECAY;
    r.host.correction1 = r.host.correction2 = NAN; // Adam's, one step further
    return r;
}

static void soap_rig_step(OptimizerRig* r, double* g, uint32_t step) {
    r->host.late1 = (float)(1.0 - pow(0.875, step));
    r->host.late2 = (float)(1.0 - pow(0.9375, step));
    rig_set_step(r, g, SOAP_SCALE, step);
    soap_update(&r->config, &r->unit, r->scalars);
    device_sync();
}

// A gradient whose rows and columns differ in size: eigenvalues a few per cent to decades apart.
static void soap_fill(double* g, size_t rows, size_t cols) {
    for (size_t i = 0; i < rows * cols; i++) {
        g[i] = 1e-3 * reference_normal(&ops_random) / sqrt((1.0 + 0.3 * (double)(i / cols)) * (1.0 + 0.3 * (double)(i % cols)));
    }
}

// The bases after the first step: orthonormal, and L (R) nearly diagonal in them; the reference goes on from them.
static void soap_adopt(double* q, const double* basis, const double* matrix, size_t n, const char* label) {
    double *image = reference_zeros(n * n), *inner = reference_zeros(n * n), off = 0.0, worst = test_orthonormal(basis, n);
    CHECK(worst <= QR_TOLERANCE, "%s: first basis orthonormal within %.1e, found %.3g", label, QR_TOLERANCE, worst);
    for (size_t i = 0; i < n * n; i++) { q[i] = basis[i % n * n + i / n]; }
    reference_product(image, matrix, false, q, false, n, n, n);
    reference_product(inner, q, true, image, false, n, n, n);
    double all = reference_norm(inner, n * n);
    for (size_t i = 0; i < n; i++) { inner[i * n + i] = 0.0; }
    off = reference_norm(inner, n * n);
    CHECK(off <= 0.03 * all, "%s: first basis leaves %.3g of the matrix off the diagonal, allowed 0.03", label, off / all);
    free(image);
    free(inner);
}

// After step 0: weights as they were, and bases that the reference goes on from.
static void soap_check_first(const OptimizerRig* rig, ReferenceSoap* soap, const double* start, const char* label) {
    size_t cols = rig->unit.cols, r = rig->unit.rows / (size_t)rig->unit.parts;
    double *now = rig_get_weights(rig), *left = rig_get_state(rig, 3), *right = rig_get_state(rig, 5);
    CHECK(memcmp(now, start, rig->unit.count * sizeof(double)) == 0, "%s: the first step changed the weights", label);
    for (int p = 0; p < rig->unit.parts; p++) {
        soap_adopt(soap[p].q_left, left + (size_t)p * r * r, soap[p].left, r, label);
        soap_adopt(soap[p].q_right, right + (size_t)p * cols * cols, soap[p].right, cols, label);
    }
    free(now);
    free(left);
    free(right);
}

// All state but the bases, whose vectors' signs are free.
static void soap_check_state(const OptimizerRig* rig, const ReferenceSoap* soap) {
    for (int array = 0; array < 6; array++) {
        if (array == 3 || array == 5) { continue; }
        double* got = rig_get_state(rig, array);
        size_t count = rig->state.arrays[array].count / (size_t)rig->unit.parts;
        for (int p = 0; p < rig->unit.parts; p++) {
            const double* want = array == 0 ? soap[p].m : array == 1 ? soap[p].v : array == 2 ? soap[p].left : soap[p].right;
            ops_compare(rig->state.arrays[array].name, got + (size_t)p * count, want, count, array == 1 ? SOAP_TOLERANCE : 2e-6);
        }
        free(got);
    }
}

static void test_soap_shape(size_t rows, size_t cols, int parts, int every, int steps) {
    OptimizerRig rig = soap_rig_new(rows, cols, parts, every);
    size_t n = rows * cols, r = rows / (size_t)parts, own = r * cols;
    double *g = reference_zeros(n), *w = reference_zeros(n), *start = reference_zeros(n);
    ReferenceSoap soap[3];
    char label[64];
    snprintf(label, sizeof(label), "SOAP %zu x %zu, %d part(s)", rows, cols, parts);
    for (int p = 0; p < parts; p++) {
        soap[p] = reference_soap_new(r, cols, (size_t)every);
        soap[p].lr = (float)SOAP_LR;
        soap[p].beta1 = 0.875;
        soap[p].beta2 = 0.9375;
        soap[p].eps = 1e-8f;
        soap[p].decay = (float)SOAP_DECAY;
    }
    for (size_t i = 0; i < n; i++) { w[i] = 0.1 * reference_normal(&ops_random); }
    rig_put_weights(&rig, w);
    memcpy(start, w, n * sizeof(double));
    for (int step = 0; step < steps; step++) {
        soap_fill(g, rows, cols);
        soap_rig_step(&rig, g, (uint32_t)step);
        for (int p = 0; p < parts; p++) { reference_soap_step(&soap[p], w + (size_t)p * own, g + (size_t)p * own); }
        if (step == 0) { soap_check_first(&rig, soap, start, label); }
    }
    double* now = rig_get_weights(&rig);
    for (size_t i = 0; i < n; i++) {
        now[i] -= start[i];
        w[i] -= start[i];
    }
    ops_compare(label, now, w, n, SOAP_TOLERANCE);
    soap_check_state(&rig, soap);
    for (int p = 0; p < parts; p++) { reference_soap_free(&soap[p]); }
    free(now);
    free(g);
    free(w);
    free(start);
    rig_free(&rig);
}

// Turning the bases begins where L and R have full rank: only there are they determined.
static void test_soap_update(void) {
    ops_random.state = 7;
    test_soap_shape(5, 7, 1, 3, 10);
    test_soap_shape(1, 9, 1, 9, 11);
    test_soap_shape(7, 1, 1, 7, 9);
    test_soap_shape(6, 6, 1, 1, 4);
    if (OPS_SMALL) {
        test_soap_shape(9, 4, 3, 4, 6);
        return;
    }
    test_soap_shape(48, 20, 1, 4, 10);
    test_soap_shape(96, 24, 3, 3, 10);
}

// A fixed matrix of eigenvalues 1 / k: what a basis leaves off the diagonal falls from turn to turn.
static void test_soap_basis(void) {
    const size_t n = OPS_SMALL ? 10 : 60;
    double *q = reference_zeros(n * n), *scaled = reference_zeros(n * n), *matrix = reference_zeros(n * n), last = 0.0, first = 0.0;
    ops_random.state = 8;
    for (size_t i = 0; i < n * n; i++) { q[i] = reference_normal(&ops_random); }
    reference_gram_schmidt(q, n);
    for (size_t i = 0; i < n * n; i++) { scaled[i] = q[i] / (double)(1 + i % n); }
    reference_product(matrix, scaled, false, q, true, n, n, n);
    OpsTensor gram = ops_upload(matrix, n * n, 0, true), basis = ops_floats(n * n);
    OpsTensor work = ops_floats(soap_work_bytes(n, n, 1) / sizeof(float));
    SoapMatrix s;
    memset(&s, 0, sizeof(s));
    s.rows = s.cols = s.side[SOAP_LEFT] = s.side[SOAP_RIGHT] = n;
    s.gram[SOAP_LEFT] = gram.f;
    s.basis[SOAP_LEFT] = basis.f;
    soap_layout(&s, n, n, (char*)work.f);
    identity_matrix(basis.f, n);
    for (int round = 0; round < 25; round++) {
        double *now = ops_download(&basis, "basis"), *image = scaled, *inner = q, off;
        reference_product(image, now, false, matrix, false, n, n, n);
        reference_product(inner, image, false, now, true, n, n, n);
        double worst = test_orthonormal(now, n);
        CHECK(worst <= QR_TOLERANCE, "turn %d: orthonormal within %.1e, found %.3g", round, QR_TOLERANCE, worst);
        for (size_t i = 0; i < n; i++) { inner[i * n + i] = 0.0; }
        off = reference_norm(inner, n * n);
        if (round == 0) { first = off; }
        CHECK(round == 0 || off < last, "turn %d: %.4g off the diagonal, before it %.4g", round, off, last);
        last = off;
        free(now);
        soap_turn(&s, SOAP_LEFT);
    }
    CHECK(last < 0.02 * first, "25 turns leave %.3g of what was off the diagonal", last / first);
    free(ops_download(&work, "work"));
    free(q);
    free(scaled);
    free(matrix);
    ops_free(&gram);
    ops_free(&basis);
    ops_free(&work);
}

static void test_soap_zero(void) {
    const size_t rows = 12, cols = 5, n = rows * cols;
    OptimizerRig rig = soap_rig_new(rows, cols, 2, 2);
    double *g = reference_zeros(n), *w = reference_zeros(n);
    ops_random.state = 9;
    for (size_t i = 0; i < n; i++) { w[i] = reference_normal(&ops_random); }
    rig_put_weights(&rig, w);
    for (uint32_t step = 0; step < 5; step++) {
        double* now;
        memset(g, 0, n * sizeof(double));
        soap_rig_step(&rig, g, step);
        now = rig_get_weights(&rig);
        for (size_t i = 0; i < n && step > 0; i++) { w[i] *= 1.0 - (double)(float)SOAP_LR * (double)(float)SOAP_DECAY; }
        ops_compare("zero gradient: decay alone", now, w, n, 2e-6);
        free(now);
    }
    for (uint32_t step = 5; step < 8; step++) {
        soap_fill(g, rows, cols);
        soap_rig_step(&rig, g, step);
    }
    double *now = rig_get_weights(&rig), moved = 0.0;
    for (size_t i = 0; i < n; i++) { moved += fabs(now[i] - w[i]) / (double)n; }
    CHECK(moved > 0.01 && moved < 1.0, "gradients after zeros: weights moved by %.3g on average", moved);
    free(now);
    free(g);
    free(w);
    rig_free(&rig);
}

// A long side is not rotated: no state, and what is left is SOAP of one side.
static void test_soap_long(void) {
    UnitState s;
    memset(&s, 0, sizeof(s));
    soap_declare(&s, NULL, 2 * (SOAP_LARGEST + 1), 3, 2);
    CHECK(s.count == 4 && s.arrays[2].count == 2 * 3 * 3, "2 matrices of 10001 x 3: 4 arrays, found %d", s.count);
    if (OPS_SMALL) { return; }
    const size_t rows = SOAP_LARGEST + 1, cols = 3, n = rows * cols;
    OptimizerRig rig = soap_rig_new(rows, cols, 1, 2);
    double *g = reference_zeros(n), *w = reference_zeros(n), norm = 0.0;
    rig_put_weights(&rig, w);
    ops_random.state = 10;
    for (uint32_t step = 0; step < 4; step++) {
        for (size_t i = 0; i < n; i++) { g[i] = reference_normal(&ops_random); }
        soap_rig_step(&rig, g, step);
        if (step != 1) { continue; }
        // Adam's first update: every rotated entry is a sign, and a rotation keeps the norm
        double* now = rig_get_weights(&rig);
        norm = reference_norm(now, n) / SOAP_LR / sqrt((double)n);
        CHECK(fabs(norm - 1.0) < 1e-4, "first update of RMS 1, found %.6f", norm);
        free(now);
    }
    double* now = rig_get_weights(&rig);
    norm = reference_norm(now, n);
    CHECK(norm == norm && norm > 0.0, "weights are numbers");
    free(now);
    free(g);
    free(w);
    rig_free(&rig);
}

// Runs a few steps; the state and the weights, to be freed
static char* test_soap_bits(size_t rows, size_t cols, size_t* bytes) {
    OptimizerRig rig = soap_rig_new(rows, cols, 1, 2);
    size_t n = rows * cols;
    double *g = reference_zeros(n), *w = reference_zeros(n);
    ops_random.state = 11;
    rig_put_weights(&rig, w);
    for (uint32_t step = 0; step < 4; step++) {
        soap_fill(g, rows, cols);
        soap_rig_step(&rig, g, step);
    }
    double* now = rig_get_weights(&rig);
    *bytes = rig.state.bytes + n * sizeof(double);
    char* all = (char*)need(malloc(*bytes));
    device_download(all, rig.memory, rig.state.bytes);
    memcpy(all + rig.state.bytes, now, n * sizeof(double));
    free(now);
    free(g);
    free(w);
    rig_free(&rig);
    return all;
}

// The same bits with any number of threads, on the emulated GPU in any order of threads; on a GPU, twice.
static void test_soap_same(void) {
    const size_t rows = OPS_SMALL ? 9 : 140, cols = OPS_SMALL ? 4 : 150;
    size_t bytes = 0;
    char* first = NULL;
    for (int i = 0; i < 3; i++) {
#ifdef CUDA_ON_CPU
        cuda_on_cpu_order = (CudaOrder)i;
#elif defined(_OPENMP) && !ON_GPU
        int before = omp_get_max_threads();
        omp_set_num_threads(i + 1);
#endif
        char* now = test_soap_bits(rows, cols, &bytes);
#ifdef CUDA_ON_CPU
        cuda_on_cpu_order = cuda_order_from_environment();
#elif defined(_OPENMP) && !ON_GPU
        omp_set_num_threads(before);
#endif
        if (!first) {
            first = now;
            continue;
        }
        CHECK(memcmp(first, now, bytes) == 0, "run %d differs from the first in its bits", i);
        free(now);
    }
    free(first);
}

static const TestRow soap_tests[] = {
    {"soap: fp32 products of sub-blocks", test_float_product},
    {"soap: QR is orthonormal, also of deficient matrices", test_qr},
    {"soap: bases converge on a fixed matrix", test_soap_basis},
    {"soap: updates against the double reference", test_soap_update},
    {"soap: zero gradients", test_soap_zero},
    {"soap: sides too long to rotate", test_soap_long},
    {"soap: the same bits whatever the threads", test_soap_same},
};
