// test_optimizers.h - the elementwise optimizers and Adafactor against their double-precision references (reference_optimizers.h): one
// table of cases (an optimizer under some settings), one runner. Weights are kept in every way a build has: as they are, with an fp32
// master, with a split master, or (bf16) rounded at every step. Gradients are of normal size or, every other one, as small as eps, so that
// an eps inside the root, or before the correction, would show.
#pragma once
#include "../optim/adafactor.cuh"
#include "../optim/elementwise.cuh"
#include "op_tensor.h"
#include "reference_optimizers.h"
#include "test_emulation.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#define OPTIMIZER_STEPS (OPS_SMALL ? 3 : 10)

typedef struct {
    const char* name;
    OptimizerKind kind;
    ReferenceStep step;
    double lr;
    bool nesterov, cautious, vector;
    double lr_scale, low, high, base, clip;
} OptimizerCase;

static const OptimizerCase optimizer_cases[] = {
    {"adamw", OPTIMIZER_ADAMW, reference_step_adamw, 0.01, false, false, false, 1, 0, 0, 1, 0},
    {"adam", OPTIMIZER_ADAM, reference_step_adam, 0.01, false, false, false, 1, 0, 0, 1, 0},
    {"sgd", OPTIMIZER_SGD, reference_step_sgd, 0.02, false, false, false, 1, 0, 0, 1, 0},
    {"sgd, Nesterov", OPTIMIZER_SGD, reference_step_sgd, 0.02, true, false, false, 1, 0, 0, 1, 0},
    {"adagrad", OPTIMIZER_ADAGRAD, reference_step_adagrad, 0.02, false, false, false, 1, 0, 0, 1, 0},
    {"lars", OPTIMIZER_LARS, reference_step_lars, 0.1, false, false, false, 1, 0, 0, 1, 0},
    {"lars, a vector", OPTIMIZER_LARS, reference_step_lars, 0.02, false, false, true, 1, 0, 0, 1, 0},
    {"lamb", OPTIMIZER_LAMB, reference_step_lamb, 0.1, false, false, false, 1, 0, 0, 1, 0},
    {"lion", OPTIMIZER_LION, reference_step_lion, 0.01, false, false, false, 1, 0, 0, 1, 0},
    {"ademamix", OPTIMIZER_ADEMAMIX, reference_step_ademamix, 0.01, false, false, false, 1, 0, 0, 1, 0},
    {"adafactor", OPTIMIZER_ADAFACTOR, reference_step_adafactor, 0.02, false, false, false, 1, 0, 0, 1, 0},
};

// Rules around a direction; lr_scale is at work in all of them.
static const OptimizerCase optimizer_rules[] = {
    {"adamw, cautious decay", OPTIMIZER_ADAMW, reference_step_adamw, 0.02, false, true, false, 0.25, 0, 0, 1, 0},
    {"lion, cautious decay", OPTIMIZER_LION, reference_step_lion, 0.02, false, true, false, 0.25, 0, 0, 1, 0},
    {"ademamix, cautious decay", OPTIMIZER_ADEMAMIX, reference_step_ademamix, 0.02, false, true, false, 0.25, 0, 0, 1, 0},
    {"adafactor, cautious, a lower bound", OPTIMIZER_ADAFACTOR, reference_step_adafactor, 0.04, false, true, false, 0.5, 0, 0, 1, 0.25},
    {"adamw, trust ratio", OPTIMIZER_ADAMW, reference_step_adamw, 0.02, false, false, false, 0.5, 0.5, 2, 1, 0},
    {"adamw, trust ratio, cautious decay", OPTIMIZER_ADAMW, reference_step_adamw, 0.02, false, true, false, 0.5, 0.01, 100, 3, 0},
    {"adamw, trust ratio at its upper end", OPTIMIZER_ADAMW, reference_step_adamw, 0.02, false, false, false, 0.5, 0.5, 2, 0.1, 0},
    {"lion, trust ratio at its lower end", OPTIMIZER_LION, reference_step_lion, 0.02, false, false, false, 0.5, 0.5, 2, 100, 0},
    {"adam, update clipped", OPTIMIZER_ADAM, reference_step_adam, 0.04, false, false, false, 0.5, 0, 0, 1, 0.3},
    {"sgd, trust ratio and update clipped", OPTIMIZER_SGD, reference_step_sgd, 0.04, true, false, false, 0.5, 0.1, 10, 1, 0.3},
    {"adagrad, update clipped", OPTIMIZER_ADAGRAD, reference_step_adagrad, 0.02, false, false, false, 0.5, 0, 0, 1, 0.3},
    {"lars, lr scaled", OPTIMIZER_LARS, reference_step_lars, 0.2, false, false, false, 0.5, 0, 0, 1, 0},
    {"lamb, lr scaled", OPTIMIZER_LAMB, reference_step_lamb, 0.2, false, false, false, 0.5, 0, 0, 1, 0},
};

typedef struct {
    size_t rows, cols;
} OptimizerShape;

static const OptimizerShape optimizer_elementwise_shapes[] = {{1, 1}, {1, 63}, {23, 89}, {1, OPS_SMALL ? 2049 : 8193}};
static const OptimizerShape optimizer_matrix_shapes[] = {{1, 70}, {5, 7}, {48, 20}, {257, 33}, {3, 515}, {9, 1}};

typedef enum { WEIGHTS_PLAIN, WEIGHTS_MASTER, WEIGHTS_SPLIT } WeightKind;
static const char* const optimizer_weight_words[] = {"", ", master", ", split master"};

// How a unit starts, and the gradient it gets.
typedef struct {
    OptimizerShape shape;
    WeightKind weights;
    bool decay;
    double size, gradient; // standard deviations
    int steps;
} OptimizerTrial;

// A unit on the device with its reference beside it.
typedef struct {
    OpsTensor w, master, state, work;
    uint16_t* low;
    UnitState layout;
    OptimizerUnit unit;
    OptimizerConfig config;
    StepScalars* scalars;
    float* scale;
    ReferenceSettings settings;
    ReferenceUnit want;
    char label[160];
} OptimizerRun;

static double optimizer_float(double x) { return (double)(float)x; } // settings reach the device as floats

static ReferenceSettings optimizer_settings(const OptimizerCase* c, bool decay) {
    ReferenceSettings s;
    memset(&s, 0, sizeof(s));
    s.lr = optimizer_float(c->lr) * c->lr_scale;
    s.beta1 = optimizer_float(0.9);
    s.beta2 = optimizer_float(c->kind == OPTIMIZER_LION ? 0.99 : 0.95);
    s.beta3 = optimizer_float(0.999);
    s.eps = optimizer_float(1e-8);
    s.weight_decay = decay ? optimizer_float(0.1) : 0.0;
    s.momentum = optimizer_float(0.9);
    s.alpha = 5.0;
    s.trust = optimizer_float(0.1);
    s.low = optimizer_float(c->low);
    s.high = optimizer_float(c->high);
    s.base = optimizer_float(c->base);
    s.clip = optimizer_float(c->clip);
    s.nesterov = c->nesterov;
    s.cautious = c->cautious;
    s.vector = c->vector;
    return s;
}

static StepScalars optimizer_scalars(const OptimizerCase* c, const ReferenceSettings* r, size_t t) {
    StepScalars s;
    memset(&s, 0, sizeof(s));
    s.lr = (float)c->lr;
    s.beta1 = (float)r->beta1;
    s.beta2 = (float)r->beta2;
    s.beta3 = (float)r->beta3;
    s.eps = (float)r->eps;
    s.weight_decay = 0.1f; // units without decay have a flag
    s.momentum = (float)r->momentum;
    s.correction1 = (float)(1.0 - pow(r->beta1, (double)t));
    s.correction2 = (float)(1.0 - pow(r->beta2, (double)t));
    s.alpha = (float)r->alpha;
    s.decay_rate = (float)(1.0 - pow((double)t, -0.8));
    s.step = (uint32_t)(t - 1);
    s.seed = 42;
    return s;
}

static void optimizer_run_unit(OptimizerRun* r, const OptimizerCase* c, const OptimizerTrial* trial) {
    OptimizerUnit* u = &r->unit;
    size_t rows = trial->shape.rows, cols = trial->shape.cols;
    memset(u, 0, sizeof(*u));
    u->rows = rows;
    u->cols = cols;
    u->count = rows * cols;
    u->parts = 1;
    u->role = c->vector ? ROLE_VECTOR : ROLE_MATRIX;
    u->params = r->w.x;
    u->master = trial->weights == WEIGHTS_MASTER ? r->master.f : NULL;
    u->master_low = trial->weights == WEIGHTS_SPLIT ? r->low : NULL;
    u->work = (char*)(void*)r->work.f;
    u->grad_scale = r->scale;
    u->lr_scale = (float)c->lr_scale;
    u->decay = trial->decay;
    u->owner = true;
    u->tensor = 3;
    for (int k = 0; k < r->layout.count; k++) { u->state[k] = (char*)(void*)r->state.f + r->layout.arrays[k].at; }
}

// Work is handed over full of NaN: no update may lean on what it finds there.
static void optimizer_run_open(OptimizerRun* r, const OptimizerCase* c, const OptimizerTrial* trial) {
    OptimizerConfig* o = &r->config;
    size_t rows = trial->shape.rows, cols = trial->shape.cols, n = rows * cols, work;
    const float half = 0.5f;
    memset(r, 0, sizeof(*r));
    snprintf(r->label, sizeof(r->label), "%s, %zu x %zu%s%s", c->name, rows, cols, trial->decay ? ", decay" : "",
             optimizer_weight_words[trial->weights]);
    o->kind = c->kind;
    o->nesterov = c->nesterov;
    o->cautious_decay = c->cautious;
    o->trust_low = (float)c->low;
    o->trust_high = (float)c->high;
    o->trust_base = (float)c->base;
    o->update_clip = (float)c->clip;
    o->trust = 0.1f;
    if (c->kind == OPTIMIZER_ADAFACTOR) {
        adafactor_declare(&r->layout, o, ROLE_MATRIX, rows, cols);
        work = adafactor_work_bytes(rows, cols);
    } else {
        elementwise_declare(&r->layout, o, c->kind, ROLE_MATRIX, n);
        work = elementwise_work_bytes(o, c->kind, n);
    }
    double* nothing = reference_zeros(work / sizeof(float) + 1);
    for (size_t i = 0; i < work / sizeof(float); i++) { nothing[i] = NAN; }
    r->work = ops_upload(nothing, work / sizeof(float), 0, true);
    free(nothing);
    r->w = ops_normal(n, trial->size, 0.0, 1);
    r->master = ops_upload(r->w.was, n, 1, true);
    r->state = ops_floats(r->layout.bytes / sizeof(float));
    r->low = (uint16_t*)need(device_alloc(n * sizeof(uint16_t))); // zero: the weights start as bf16
    r->scalars = (StepScalars*)need(device_alloc(sizeof(StepScalars)));
    r->scale = (float*)need(device_alloc(sizeof(float)));
    device_upload(r->scale, &half, sizeof(half));
    r->settings = optimizer_settings(c, trial->decay);
    r->want = reference_unit(r->w.was, rows, cols);
    optimizer_run_unit(r, c, trial);
}

static void optimizer_run_step(OptimizerRun* r, const OptimizerCase* c, const OptimizerTrial* trial, size_t t) {
    size_t n = r->unit.count;
    double* g = reference_zeros(n);
    for (size_t i = 0; i < n; i++) { g[i] = trial->gradient * reference_normal(&ops_random) * (i % 2 ? 1e-8 : 1.0); }
    OpsTensor grads = ops_upload(g, n, 1, false);
    for (size_t i = 0; i < n; i++) { g[i] = 0.5 * grads.was[i]; }
    StepScalars s = optimizer_scalars(c, &r->settings, t);
    device_upload(r->scalars, &s, sizeof(s));
    r->unit.grads = grads.x;
    r->unit.updates = s.step;
    if (c->kind == OPTIMIZER_ADAFACTOR) {
        adafactor_update(&r->config, &r->unit, r->scalars);
    } else {
        elementwise_update(&r->config, c->kind, &r->unit, r->scalars);
    }
    device_sync();
    c->step(&r->want, g, &r->settings, t);
    ops_free(&grads);
    free(g);
}

static void optimizer_run_close(OptimizerRun* r) {
    OpsTensor* all[] = {&r->w, &r->master, &r->state, &r->work};
    for (size_t i = 0; i < COUNT_OF(all); i++) { ops_free(all[i]); }
    device_free(r->low, r->unit.count * sizeof(uint16_t));
    device_free(r->scalars, sizeof(StepScalars));
    device_free(r->scale, sizeof(float));
    reference_unit_free(&r->want);
}

// The weights as fp32 numbers: params, masters, or both halves together; to be freed.
static double* optimizer_run_weights(const OptimizerRun* r) {
    size_t n = r->unit.count;
    double* w = ops_download(&r->w, r->label);
    if (r->unit.master) {
        double* master = ops_download(&r->master, r->label);
        size_t far = 0; // stochastic rounding lands on one of the two neighbours of the master
        for (size_t i = 0; i < n; i++) { far += !(fabs(w[i] - master[i]) <= fabs(master[i]) / 127.0); }
        CHECK(far == 0, "%s: %zu weights are not next to their masters", r->label, far);
        free(w);
        return master;
    }
    if (r->unit.master_low) {
        uint16_t* low = (uint16_t*)need(malloc(n * sizeof(uint16_t)));
        device_download(low, r->low, n * sizeof(uint16_t));
        for (size_t i = 0; i < n; i++) {
            float x = (float)w[i];
            uint32_t u;
            memcpy(&u, &x, sizeof(u));
            u += low[i] < 0x8000u ? low[i] : low[i] - 0x10000u; // low is what nearest rounding took or gave
            memcpy(&x, &u, sizeof(x));
            w[i] = x;
        }
        free(low);
    }
    return w;
}

// `got` against `want` as movements from `start`, where an update of 1 % of the weight is not lost beside the weight
static void optimizer_check_movement(const char* label, const double* got, const double* want, const double* start, size_t n,
                                     double tolerance) {
    double *moved = reference_zeros(n), *wanted = reference_zeros(n);
    for (size_t i = 0; i < n; i++) {
        moved[i] = got[i] - start[i];
        wanted[i] = want[i] - start[i];
    }
    ops_compare(label, moved, wanted, n, tolerance);
    free(moved);
    free(wanted);
}

// State is fp32 in every build; Adafactor's has means where the reference has sums.
static void optimizer_check_state(const OptimizerRun* r, const OptimizerCase* c) {
    double* got = ops_download(&r->state, r->label);
    bool factored = c->kind == OPTIMIZER_ADAFACTOR && r->layout.count == 2;
    for (int k = 0; k < r->layout.count; k++) {
        const StateArray* a = &r->layout.arrays[k];
        double *want = reference_zeros(a->count), of = !factored ? 1.0 : (double)(k == 0 ? r->unit.cols : r->unit.rows);
        char label[200];
        snprintf(label, sizeof(label), "%s: %s", r->label, a->name);
        for (size_t i = 0; i < a->count; i++) { want[i] = r->want.state[k][i] / of; }
        ops_compare(label, got + a->at / sizeof(float), want, a->count, 4e-6);
        free(want);
    }
    free(got);
}

// Runs a trial and checks it; the weights at the end, to be freed.
static double* optimizer_trial(const OptimizerCase* c, OptimizerTrial trial) {
    OptimizerRun r;
    optimizer_run_open(&r, c, &trial);
    for (int t = 1; t <= trial.steps; t++) { optimizer_run_step(&r, c, &trial, (size_t)t); }
    size_t n = r.unit.count;
    double* w = optimizer_run_weights(&r);
    bool rounded = strcmp(FLOATX_NAME, "bf16") == 0 && trial.weights == WEIGHTS_PLAIN;
    bool coupled = c->kind == OPTIMIZER_ADAM || c->kind == OPTIMIZER_SGD || c->kind == OPTIMIZER_ADAGRAD;
    bool feeds_back = c->kind == OPTIMIZER_LARS || (coupled && trial.decay); // rounded weights change the state
    if (!rounded || !feeds_back) { optimizer_check_state(&r, c); }
    if (!rounded) { // steps of 1 %, each rounded at 2^-24 of the weight; a few may cancel
        optimizer_check_movement(r.label, w, r.want.w, r.w.was, n, n < 8 ? 5e-3 : n < 80 ? 1e-4 : 2e-5);
    } else if (n > 1000) {
        double drift = 0.0; // each update is rounded, but without bias: on average the weights arrive
        for (size_t i = 0; i < n; i++) { drift += (w[i] - r.want.w[i]) / (double)n; }
        CHECK(fabs(drift) < 5.0 * 0.015 / sqrt((double)n), "%s: the weights drift by %g", r.label, drift);
    }
    optimizer_run_close(&r);
    return w;
}

// In every way to keep weights that the build has; the split master must be the fp32 master, bit for bit.
static void optimizer_trials(const OptimizerCase* c, OptimizerTrial trial) {
    uint64_t start = ops_random.state;
    double* all[3] = {NULL, NULL, NULL};
    int kinds = strcmp(FLOATX_NAME, "bf16") == 0 ? 3 : 1;
    for (int k = 0; k < kinds; k++) {
        ops_random.state = start;
        trial.weights = (WeightKind)k;
        all[k] = optimizer_trial(c, trial);
    }
    if (kinds == 3) {
        size_t n = trial.shape.rows * trial.shape.cols, apart = 0;
        for (size_t i = 0; i < n; i++) { apart += memcmp(&all[WEIGHTS_MASTER][i], &all[WEIGHTS_SPLIT][i], sizeof(double)) != 0; }
        CHECK(apart == 0, "%s: %zu of %zu split masters differ from the fp32 masters", c->name, apart, n);
    }
    for (int k = 0; k < 3; k++) { free(all[k]); }
}

// The first `most` shapes of each case, with and without decay.
static void optimizer_table(const OptimizerCase* cases, size_t count, size_t most) {
    for (size_t k = 0; k < count; k++) {
        bool matrix = cases[k].kind == OPTIMIZER_ADAFACTOR;
        const OptimizerShape* shapes = matrix ? optimizer_matrix_shapes : optimizer_elementwise_shapes;
        size_t shape_count = matrix ? COUNT_OF(optimizer_matrix_shapes) : COUNT_OF(optimizer_elementwise_shapes);
        for (size_t i = 0; i < min_size(shape_count, most); i++) {
            for (int decay = 0; decay < 2; decay++) {
                OptimizerTrial trial = {shapes[i], WEIGHTS_PLAIN, decay == 1, 1.0, 1.0, OPTIMIZER_STEPS};
                ops_random.state = 11 + i;
                optimizer_trials(&cases[k], trial);
            }
        }
    }
}

// Units this small are soonest done by one thread; what several may change is the matter of optimizers_same_bits.
static void optimizers_in_one_thread(void (*run)(void)) {
#ifdef _OPENMP
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    run();
    omp_set_num_threads(before);
#else
    run();
#endif
}

static void optimizers_formulas_once(void) { optimizer_table(optimizer_cases, COUNT_OF(optimizer_cases), SIZE_MAX); }
static void optimizers_rules_once(void) { optimizer_table(optimizer_rules, COUNT_OF(optimizer_rules), 3); }

// Weights that are all zero have no norm: every ratio is 1, and Adafactor's step the least.
static void optimizers_zero_weights_once(void) {
    for (size_t k = 0; k < COUNT_OF(optimizer_cases) + COUNT_OF(optimizer_rules); k++) {
        const OptimizerCase* c = k < COUNT_OF(optimizer_cases) ? &optimizer_cases[k] : &optimizer_rules[k - COUNT_OF(optimizer_cases)];
        OptimizerTrial trial = {{48, 43}, WEIGHTS_PLAIN, true, 0.0, 1.0, 1};
        ops_random.state = 12;
        optimizer_trials(c, trial);
    }
}

// Without a gradient a step is decay alone, and without decay nothing at all.
static void optimizer_zero_gradient(const OptimizerCase* c, OptimizerShape shape, bool decay) {
    OptimizerTrial trial = {shape, strcmp(FLOATX_NAME, "bf16") == 0 ? WEIGHTS_MASTER : WEIGHTS_PLAIN, decay, 1.0, 0.0, 1};
    OptimizerRun r;
    ops_random.state = 13;
    optimizer_run_open(&r, c, &trial);
    optimizer_run_step(&r, c, &trial, 1);
    double *w = optimizer_run_weights(&r), least = 1.0, most = 0.0;
    for (size_t i = 0; i < r.unit.count; i++) {
        least = fmin(least, w[i] / r.w.was[i]);
        most = fmax(most, w[i] / r.w.was[i]);
    }
    // Adam and Adagrad make of coupled decay a step of lr, LAMB one of lr phi(|w|); Nesterov's look-ahead counts it 1.9 times
    bool plain = c->kind != OPTIMIZER_ADAM && c->kind != OPTIMIZER_ADAGRAD && c->kind != OPTIMIZER_LAMB;
    double want = !decay || c->vector ? 1.0 : 1.0 - c->lr * 0.1 * (c->nesterov ? 1.9 : 1.0);
    if (plain || !decay) {
        CHECK(fabs(least - want) < 2e-7 && fabs(most - want) < 2e-7, "%s: weights are scaled by %.9g to %.9g, expected %.9g", r.label,
              least, most, want);
        CHECK(decay || (least == 1.0 && most == 1.0), "%s: weights moved by %g", r.label, most - least);
    }
    optimizer_check_movement(r.label, w, r.want.w, r.w.was, r.unit.count, 1e-4); // of a thousandth of the weight
    free(w);
    optimizer_run_close(&r);
}

static void optimizers_zero_gradient_once(void) {
    const OptimizerShape matrix = {48, 43}, vector = {1, 2100};
    for (size_t k = 0; k < COUNT_OF(optimizer_cases); k++) {
        for (int decay = 0; decay < 2; decay++) {
            optimizer_zero_gradient(&optimizer_cases[k], matrix, decay == 1);
            optimizer_zero_gradient(&optimizer_cases[k], vector, decay == 1);
        }
    }
}

// Sums are cut at fixed sizes: any number of threads gives the same bits.
static void optimizers_same_bits(void) {
#if defined(_OPENMP) && !ON_GPU
    static const OptimizerCase* const cases[] = {&optimizer_cases[10], &optimizer_cases[5], &optimizer_cases[7], &optimizer_rules[5]};
    const int before = omp_get_max_threads();
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        double* first = NULL;
        OptimizerTrial trial = {{257, 129}, WEIGHTS_PLAIN, true, 1.0, 1.0, 2};
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            ops_random.state = 14;
            double* got = optimizer_trial(cases[k], trial);
            CHECK(!first || memcmp(first, got, 257 * 129 * sizeof(double)) == 0, "%s: other bits with %d threads", cases[k]->name, threads);
            free(first);
            first = got;
        }
        free(first);
    }
    omp_set_num_threads(before);
#else
    CHECK(true, "one order of sums");
#endif
}

// On the emulated GPU every order of threads meets one shape that has more than a chunk, and a row of 40 that ends within a warp's width.
static void optimizers_order_once(void) {
    for (size_t k = 0; k < COUNT_OF(optimizer_cases); k += 5) { // adamw, lars, adafactor
        OptimizerTrial trial = {{52, 40}, WEIGHTS_PLAIN, true, 1.0, 1.0, 1};
        ops_random.state = 15;
        optimizer_trials(&optimizer_cases[k], trial);
    }
    OptimizerTrial trial = {{52, 40}, WEIGHTS_PLAIN, true, 1.0, 1.0, 1};
    optimizer_trials(&optimizer_rules[5], trial);
}

static void optimizers_order_each(void) { emulation_each(optimizers_order_once); }

static void optimizers_formulas(void) { optimizers_in_one_thread(optimizers_formulas_once); }
static void optimizers_rules(void) { optimizers_in_one_thread(optimizers_rules_once); }
static void optimizers_zero_weights(void) { optimizers_in_one_thread(optimizers_zero_weights_once); }
static void optimizers_zero_gradient(void) { optimizers_in_one_thread(optimizers_zero_gradient_once); }
static void optimizers_order(void) { optimizers_in_one_thread(optimizers_order_each); }

// Both halves together are the fp32 number; a NaN, whatever its bits, stays one in the weight that is used.
static void optimizers_split(void) {
    static const uint32_t patterns[] = {0, 0x80000000u, 1, 0x00007fffu, 0x00008000u, 0x3f800000u, 0x3f807fffu, 0x3f808000u, 0xbf80ffffu, 0x7f7fffffu,
                                        0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u, 0xffc00000u};
    for (size_t i = 0; i < COUNT_OF(patterns); i++) {
        uint16_t high, low;
        float value = bits_float(patterns[i]);
        weight_split(value, &high, &low);
        float back = weight_split_load(high, low), used = bf16_to_float(high);
        if (isnan(value)) {
            CHECK(isnan(used) && isnan(back), "%08x: NaN became %g, %g", patterns[i], used, back);
        } else {
            CHECK(float_bits(back) == patterns[i], "%08x came back as %08x", patterns[i], float_bits(back));
            bool near = !isfinite(used) || fabs((double)used - value) <= ldexp(fabs((double)value), -8) + 1e-39;
            CHECK(near, "%08x: the weight is %g", patterns[i], used);
        }
    }
}

static const TestRow optimizers_tests[] = {
    {"optimizers: fp32 weights in two halves", optimizers_split},
    {"optimizers: formulas against the reference", optimizers_formulas},
    {"optimizers: cautious decay, trust ratio, update clipping", optimizers_rules},
    {"optimizers: weights of zero", optimizers_zero_weights},
    {"optimizers: without a gradient decay alone", optimizers_zero_gradient},
    {"optimizers: same bits for any number of threads", optimizers_same_bits},
    {"optimizers: sums and scratch in any order of threads", optimizers_order},
};
