// test_numbers.h - rows that need no model: sums, rounding to bf16, random numbers, learning-rate schedules, and the
// reference's own gradients against finite differences. They are listed in test_ops.h.
#pragma once
#include "../kernels/layernorm.cuh"
#include "../kernels/philox.h"
#include "../kernels/reduce.cuh"
#include "../optim/schedule.h"
#include "op_tensor.h"

// ---- sums ----

static void ops_square_sum(void) {
    ops_random.state = 9;
    const size_t sizes[] = {1, 63, 8191, 8192, 8193, OPS_SMALL ? 16400 : 1000003};
    for (size_t k = 0; k < COUNT_OF(sizes); k++) {
        OpsTensor x = ops_normal(sizes[k], 1.0, 0.0, 1), sum = ops_floats(1), partial = ops_floats(square_sum_partials(sizes[k]));
        double want = 0.0;
        for (size_t i = 0; i < sizes[k]; i++) { want += x.was[i] * x.was[i]; }
        square_sum(partial.f, x.x, sizes[k]);
        sum_floats(sum.f, partial.f, (int)partial.n);
        char label[64];
        snprintf(label, sizeof(label), "square sum of %zu", sizes[k]);
        free(ops_download(&partial, label));
        ops_check(label, &sum, &want, 4e-6); // fp32 in every build
        ops_free(&x);
        ops_free(&sum);
        ops_free(&partial);
    }
    const double sick[3] = {1.0, NAN, 2.0};
    OpsTensor x = ops_upload(sick, 3, 0, false), partial = ops_floats(1), sum = ops_floats(1);
    square_sum(partial.f, x.x, 3);
    sum_floats(sum.f, partial.f, 1);
    double* got = ops_download(&sum, "sum");
    CHECK(isnan(got[0]), "the square sum of a NaN is %g", got[0]);
    free(got);
    ops_free(&x);
    ops_free(&partial);
    ops_free(&sum);
}

// Sums are cut at fixed sizes: any number of threads gives the same bits.
static void ops_same_bits(void) {
    ops_random.state = 10;
#if defined(_OPENMP) && !ON_GPU
    enum { N = 130, COLS = 80 };
    double* first[4] = {NULL, NULL, NULL, NULL};
    const int before = omp_get_max_threads();
    OpsTensor x = ops_normal(N * COLS, 1.0, 0.2, 0), weight = ops_normal(COLS, 0.3, 1.0, 0), dy = ops_normal(N * COLS, 1.0, 0.0, 0);
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        OpsTensor y = ops_upload(NULL, N * COLS, 0, false), dx = ops_upload(NULL, N * COLS, 0, false);
        OpsTensor dw = ops_upload(NULL, COLS, 0, false), db = ops_upload(NULL, COLS, 0, false);
        OpsTensor mean = ops_floats(N), rstd = ops_floats(N), norm = ops_floats(2);
        OpsTensor partial = ops_floats(layernorm_backward_partials(N, COLS));
        layernorm_forward(y.x, mean.f, rstd.f, x.x, weight.x, weight.x, N, COLS);
        layernorm_backward(dx.x, dw.x, db.x, partial.f, dy.x, x.x, weight.x, mean.f, rstd.f, N, COLS);
        bias_backward(db.x, partial.f, dy.x, N, COLS);
        square_sum(norm.f, dx.x, N * COLS);
        const OpsTensor* results[4] = {&dx, &dw, &db, &norm};
        for (int i = 0; i < 4; i++) {
            double* got = ops_download(results[i], "same bits");
            CHECK(!first[i] || memcmp(first[i], got, results[i]->n * sizeof(double)) == 0, "result %d differs with %d threads", i, threads);
            free(first[i]);
            first[i] = got;
        }
        OpsTensor* all[] = {&y, &dx, &dw, &db, &mean, &rstd, &norm, &partial};
        for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    }
    omp_set_num_threads(before);
    for (int i = 0; i < 4; i++) { free(first[i]); }
    ops_free(&x);
    ops_free(&weight);
    ops_free(&dy);
#else
    CHECK(true, "one device, one order");
#endif
}

// ---- number formats and random numbers ----

DEVICE void ops_philox_once(Team t, size_t i, uint32_t* out) {
    if (t.rank != 0 || i > 0) { return; }
    const Philox zero = {{0, 0, 0, 0}}, ones = {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}};
    const Philox pi = {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}};
    Philox a = philox4x32(0, zero), b = philox4x32(0xffffffffffffffffull, ones), c = philox4x32(0x299f31d0a4093822ull, pi);
    for (int k = 0; k < 4; k++) {
        out[k] = a.x[k];
        out[4 + k] = b.x[k];
        out[8 + k] = c.x[k];
    }
}

// The three known answers that its authors publish for philox4x32-10.
static void ops_philox(void) {
    const uint32_t want[12] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd,
                               0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    uint32_t got[12];
    uint32_t* device = (uint32_t*)need(device_alloc(sizeof(got)));
    LAUNCH(1, WARP_TEAM, ops_philox_once, device);
    device_download(got, device, sizeof(got));
    for (int i = 0; i < 12; i++) { CHECK(got[i] == want[i], "word %d is %08x, expected %08x", i, got[i], want[i]); }
    device_free(device, sizeof(got));
}

#define OPS_ROUNDINGS 4096

// out[i] = bf16 of x[i], nearest; out[n + i]: how often of 256 evenly spread random words the stochastic form rounds up
DEVICE void ops_round_row(Team t, size_t i, uint32_t* out, const float* x, int n) {
    if (t.rank != 0) { return; }
    uint16_t down = (uint16_t)(float_bits(x[i]) >> 16);
    uint32_t ups = 0;
    for (uint32_t k = 0; k < 256; k++) { ups += float_to_bf16_stochastic(x[i], k * 256u + 128u) != down; }
    out[i] = float_to_bf16(x[i]);
    out[(size_t)n + i] = ups;
}

// Nearest (ties to even) by comparing distances in double; stochastic rounding goes up with the probability of the remainder.
static void ops_bf16_rounding(void) {
    ops_random.state = 12;
    float* host = (float*)need(malloc(OPS_ROUNDINGS * sizeof(float)));
    uint32_t* got = (uint32_t*)need(malloc(2 * OPS_ROUNDINGS * sizeof(uint32_t)));
    for (uint32_t i = 0; i < OPS_ROUNDINGS; i++) {
        uint32_t u = (uint32_t)reference_random(&ops_random);
        if (i % 4 == 1) { u = (u & 0xffff0000u) | 0x8000u; } // a tie
        if ((u & 0x7f000000u) == 0x7f000000u) { u &= 0xbfffffffu; } // neither NaN nor next to infinity
        if ((u & 0x7f800000u) == 0) { u |= 0x00800000u; }
        memcpy(host + i, &u, sizeof(u));
    }
    float* x = (float*)need(device_alloc(OPS_ROUNDINGS * sizeof(float)));
    uint32_t* out = (uint32_t*)need(device_alloc(2 * OPS_ROUNDINGS * sizeof(uint32_t)));
    device_upload(x, host, OPS_ROUNDINGS * sizeof(float));
    LAUNCH(OPS_ROUNDINGS, WARP_TEAM, ops_round_row, out, x, OPS_ROUNDINGS);
    device_download(got, out, 2 * OPS_ROUNDINGS * sizeof(uint32_t));
    for (int i = 0; i < OPS_ROUNDINGS; i++) {
        uint32_t u, low, high;
        memcpy(&u, host + i, sizeof(u));
        low = u & 0xffff0000u;
        high = low + 0x10000u;
        float a, b;
        memcpy(&a, &low, sizeof(a));
        memcpy(&b, &high, sizeof(b));
        double below = fabs((double)host[i] - a), above = fabs((double)b - host[i]);
        bool up = above < below || (above == below && (low & 0x10000u));
        CHECK(got[i] == (up ? high : low) >> 16, "%.9g rounds to %04x, expected %04x", host[i], got[i], (up ? high : low) >> 16);
        double share = (double)(u & 0xffffu) / 65536.0, found = got[OPS_ROUNDINGS + i] / 256.0;
        CHECK(fabs(share - found) <= 1.0 / 256.0, "%.9g is rounded up in %.4f of the cases, expected %.4f", host[i], found, share);
    }
    device_free(x, OPS_ROUNDINGS * sizeof(float));
    device_free(out, 2 * OPS_ROUNDINGS * sizeof(uint32_t));
    free(host);
    free(got);
}

// ---- schedules ----

static void ops_schedules(void) {
    const char* names[] = {"cosine", "linear", "constant", "wsd"};
    const Schedule kinds[] = {SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD};
    const size_t warmups[] = {0, 1, 7, 100};
    for (size_t k = 0; k < COUNT_OF(names); k++) {
        for (size_t w = 0; w < COUNT_OF(warmups); w++) {
            for (size_t step = 0; step < 100; step++) {
                double want = reference_learning_rate(names[k], 6e-4, 0.1, warmups[w], 100, step);
                double got = schedule_lr(kinds[k], 6e-4, (int64_t)step, (int64_t)warmups[w], 100, 0.1);
                CHECK(fabs(got - want) <= 1e-12, "%s, warm-up %zu, step %zu: %.9g, expected %.9g", names[k], warmups[w], step, got, want);
            }
        }
        double past = schedule_lr(kinds[k], 1.0, 150, 10, 100, 0.25), last = k == 2 ? 1.0 : 0.25;
        CHECK(fabs(past - last) < 1e-12, "%s past the end: %g, expected %g", names[k], past, last);
    }
}

// ---- the reference itself ----

// Central differences in double precision; h = 1e-5 leaves about 1e-10 of truncation and as much of rounding.
static void ops_reference_differences(void) {
    const ReferenceConfig c = {2, 2, 6, 11, 16, 5};
    enum { B = 2, T = 4 };
    size_t elements = reference_elements(c);
    double *w = reference_zeros(elements), *g = reference_zeros(elements);
    int tokens[B * T], targets[B * T];
    ReferenceRandom random = {7};
    for (size_t i = 0; i < elements; i++) { w[i] = 0.4 * reference_normal(&random); }
    for (int i = 0; i < B * T; i++) {
        tokens[i] = (int)(reference_random(&random) % c.V);
        targets[i] = (int)(reference_random(&random) % c.V);
    }
    tokens[1] = tokens[2]; // a token that comes twice
    ReferenceRun run = reference_run_new(c, B, T);
    reference_forward(&run, w, tokens, targets);
    reference_backward(&run, w, g, tokens, targets);
    for (int k = 0; k < REFERENCE_TENSORS; k++) {
        ReferenceTensor tensor = reference_tensor(c, k);
        for (int pick = 0; pick < 16; pick++) {
            size_t i = tensor.offset + reference_random(&random) % tensor.count;
            if (k == REF_WTE && pick == 0) { i = tensor.offset + (size_t)tokens[1] * c.C; }
            double old = w[i], h = 1e-5;
            w[i] = old + h;
            double above = reference_forward(&run, w, tokens, targets);
            w[i] = old - h;
            double slope = (above - reference_forward(&run, w, tokens, targets)) / (2.0 * h);
            w[i] = old;
            CHECK(fabs(slope - g[i]) <= 1e-9 + 1e-7 * fabs(g[i]), "%s[%zu]: gradient %.12g, difference quotient %.12g", tensor.name,
                  i - tensor.offset, g[i], slope);
        }
    }
    double clipped = reference_clip(g, elements, 0.01), after = reference_norm(g, elements);
    CHECK(clipped > 0.01 && fabs(after - 0.01) < 1e-12, "norm %g is clipped to %g, expected 0.01", clipped, after);
    reference_run_free(&run);
    free(w);
    free(g);
}
