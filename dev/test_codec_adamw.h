// test_codec_adamw.h - AdamW with its moments in each format of state, beside a double-precision AdamW on exact moments (what a format
// costs over ten steps) and one whose moments are rounded by the independent maps of reference_codec.h (nothing else may differ).
// The row is listed in test_codec.h.
#pragma once
#include "../optim/elementwise.cuh"
#include "op_tensor.h"
#include "reference_codec.h"

typedef struct {
    OpsTensor w, master;
    char* state;
    OptimizerConfig config;
    OptimizerUnit unit;
    UnitState layout;
    float* one;
    StepScalars* scalars;
} CodecAdamW;

static CodecAdamW codec_adamw_open(StateFormat format, size_t n) {
    CodecAdamW a;
    const float one = 1.0f;
    memset(&a, 0, sizeof(a));
    a.config.kind = OPTIMIZER_ADAMW;
    a.config.format = format;
    elementwise_declare(&a.layout, &a.config, OPTIMIZER_ADAMW, ROLE_MATRIX, n);
    a.state = (char*)need(device_alloc(a.layout.bytes));
    device_zero(a.state, a.layout.bytes);
    a.w = ops_normal(n, 0.02, 0.0, 0);
    a.master = ops_upload(a.w.was, n, 0, true);
    a.one = (float*)need(device_alloc(sizeof(float)));
    a.scalars = (StepScalars*)need(device_alloc(sizeof(StepScalars)));
    device_upload(a.one, &one, sizeof(one));
    device_sync();
    OptimizerUnit* u = &a.unit;
    u->rows = 1;
    u->cols = u->count = n;
    u->parts = 1;
    u->role = ROLE_MATRIX;
    u->params = a.w.x;
    u->master = strcmp(FLOATX_NAME, "bf16") == 0 ? a.master.f : NULL;
    u->grad_scale = a.one;
    u->lr_scale = 1.0f;
    u->decay = u->owner = true;
    u->tensor = 3;
    for (int k = 0; k < a.layout.count; k++) { u->state[k] = a.state + a.layout.arrays[k].at; }
    return a;
}

static void codec_adamw_close(CodecAdamW* a) {
    ops_free(&a->w);
    ops_free(&a->master);
    device_free(a->state, a->layout.bytes);
    device_free(a->one, sizeof(float));
    device_free(a->scalars, sizeof(StepScalars));
}

static StepScalars codec_adamw_scalars(const ReferenceAdamW* r, int t) {
    StepScalars s;
    memset(&s, 0, sizeof(s));
    s.lr = (float)r->lr;
    s.beta1 = (float)r->beta1;
    s.beta2 = (float)r->beta2;
    s.eps = (float)r->eps;
    s.weight_decay = (float)r->weight_decay;
    s.correction1 = (float)(1.0 - pow(r->beta1, t));
    s.correction2 = (float)(1.0 - pow(r->beta2, t));
    s.step = (uint32_t)(t - 1);
    s.seed = 42;
    return s;
}

// How far w has moved away from where the reference has, relative to the reference's movement.
static double codec_distance(const double* w, const double* want, const double* start, size_t n) {
    double difference = 0.0, moved = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += (w[i] - want[i]) * (w[i] - want[i]);
        moved += (want[i] - start[i]) * (want[i] - start[i]);
    }
    return sqrt(difference / moved);
}

// A run of AdamW beside two of the reference; distances: from the one on exact moments, from the one on moments rounded after each step.
// Gradients have a direction that stays, noise three times as large, and sizes that differ by element.
static void codec_adamw_run(StateFormat format, size_t n, int steps, double distances[2]) {
    const ReferenceAdamW plain = {1e-3, 0.9, 0.95, 1e-8, 0.1};
    const size_t block = format == STATE_INT8 ? 256 : 128;
    CodecAdamW a = codec_adamw_open(format, n);
    ReferenceMoments exact = reference_moments_new(a.w.was, n), rounded = reference_moments_new(a.w.was, n);
    double *g = reference_zeros(n), *mean = reference_zeros(n), *size = reference_zeros(n);
    for (size_t i = 0; i < n; i++) {
        mean[i] = reference_normal(&ops_random);
        size[i] = 1e-4 * exp(0.5 * reference_normal(&ops_random));
    }
    for (int t = 1; t <= steps; t++) {
        for (size_t i = 0; i < n; i++) { g[i] = size[i] * (mean[i] + 3.0 * reference_normal(&ops_random)); }
        OpsTensor grads = ops_upload(g, n, 0, false);
        StepScalars s = codec_adamw_scalars(&plain, t);
        device_upload(a.scalars, &s, sizeof(s));
        a.unit.grads = grads.x;
        elementwise_update(&a.config, OPTIMIZER_ADAMW, &a.unit, a.scalars);
        device_sync();
        reference_adamw(exact.w, exact.m, exact.v, grads.was, n, plain, (size_t)t);
        reference_adamw(rounded.w, rounded.m, rounded.v, grads.was, n, plain, (size_t)t);
        if (format == STATE_INT8 || format == STATE_INT4) {
            reference_quantise(rounded.m, n, block, format == STATE_INT8 ? MAP_SIGNED8 : MAP_SIGNED4);
            reference_quantise(rounded.v, n, block, format == STATE_INT8 ? MAP_UNSIGNED8 : MAP_UNSIGNED4);
        }
        ops_free(&grads);
    }
    double* got = ops_download(a.unit.master ? &a.master : &a.w, "AdamW");
    distances[0] = codec_distance(got, exact.w, a.w.was, n);
    distances[1] = codec_distance(got, rounded.w, a.w.was, n);
    reference_moments_free(&exact);
    reference_moments_free(&rounded);
    double* all[] = {g, mean, size, got};
    for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
    codec_adamw_close(&a);
}

// The formats' own price over ten steps, and next to nothing beyond it: a few values lie so near to a midpoint that they take the other
// neighbour.
static void codec_adamw(void) {
    const char* names[STATE_FORMATS] = {"fp32", "bf16", "8bit", "4bit"};
    const double exact[STATE_FORMATS] = {1e-5, 4e-3, 0.03, 0.5}, rounded[STATE_FORMATS] = {1e-5, 4e-3, 4e-3, 0.02};
    for (int f = 0; f < STATE_FORMATS; f++) {
        double distances[2];
        ops_random.state = 24;
        codec_adamw_run((StateFormat)f, 6149, OPS_SMALL ? 3 : 10, distances);
        CHECK(distances[0] <= exact[f], "%s: %.3g away from exact moments' weights, tolerance %.3g", names[f], distances[0], exact[f]);
        CHECK(distances[1] <= rounded[f], "%s: %.3g away from rounded moments', tolerance %.3g", names[f], distances[1], rounded[f]);
#ifdef OPS_VERBOSE
        printf("      AdamW %s: distance %.3g, from rounded moments %.3g\n", names[f], distances[0], distances[1]);
#endif
    }
}
