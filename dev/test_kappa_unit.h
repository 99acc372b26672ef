// test_kappa_unit.h - one unit of Kappa's for test rows: its memory on the device, backward passes that add to what the buffer holds,
// steps, and its state as double.
#pragma once
#include "../optim/kappa_repack.cuh"
#include "op_tensor.h"
#include "reference_kappa.h"
#include "reference_muon.h"

static const int kappa_test_bits[] = {2, 4, 6, 8};

typedef struct {
    size_t rows, cols;
    int parts;
    Role role;
} KappaShape;

static const KappaShape kappa_shapes[] = {{1, 1, 1, ROLE_MATRIX}, {5, 7, 1, ROLE_MATRIX}, {48, 20, 1, ROLE_MATRIX},
                                          {96, 24, 3, ROLE_MATRIX},
                                          {257, 33, 1, ROLE_MATRIX}, {32, 128, 1, ROLE_MATRIX}, {9, 600, 1, ROLE_MATRIX}};

typedef struct {
    OptimizerConfig config;
    Kappa kappa;
    TensorSpec spec;
    Unit place;
    UnitState layout;
    OptimizerUnit unit;
    OpsTensor params, master, grads, figures; // master: fp32 weights, used in bf16 builds; figures: factor of the gradient, then measured
    char *state, *work, *scalars;
    size_t work_bytes, state_room;
    StepScalars now;
} KappaRun;

static OptimizerConfig kappa_test_config(void) {
    OptimizerConfig c;
    memset(&c, 0, sizeof(c));
    c.kind = OPTIMIZER_KAPPA;
    c.nesterov = c.cautious_decay = c.kappa_residual = c.kappa_equilibrate = true;
    c.trust_base = 1.0f;
    c.kappa_bytes = 0.53;
    c.kappa_target = 2.0;
    c.kappa_every = 10;
    return c;
}

static StepScalars kappa_test_scalars(void) {
    StepScalars s;
    memset(&s, 0, sizeof(s));
    s.lr = 0.01f;
    s.beta1 = 0.9f;
    s.beta2 = 0.95f;
    s.eps = 1e-8f;
    s.weight_decay = 0.1f;
    s.momentum = 0.95f;
    s.seed = 7;
    return s;
}

static void kappa_run_place(KappaRun* r) {
    memset(&r->layout, 0, sizeof(r->layout));
    kappa_declare(&r->layout, &r->config, &r->kappa, &r->spec, &r->place);
    for (int i = 0; i < r->layout.count; i++) { r->unit.state[i] = r->state + r->layout.arrays[i].at; }
}

// Weights from a normal distribution, state and buffer zero.
static KappaRun kappa_run_open(const OptimizerConfig* config, KappaShape shape, int bits) {
    KappaRun r;
    memset(&r, 0, sizeof(r));
    size_t n = shape.rows * shape.cols;
    r.config = *config;
    r.config.kappa_bits = bits;
    r.kappa.width[0] = bits;
    r.spec.name = "test";
    r.spec.layers = 1;
    r.spec.rows = r.spec.real_rows = shape.rows;
    r.spec.cols = shape.cols;
    r.spec.role = shape.role;
    r.spec.parts = shape.parts;
    r.place.rows = shape.rows;
    r.place.cols = shape.cols;
    r.place.count = n;
    r.work_bytes = kappa_work_bytes(&r.config, &r.spec, &r.place);
    r.state_room = 8 * n + 16 * (shape.rows + shape.cols) + 4096;
    r.state = (char*)need(device_alloc(r.state_room));
    r.work = (char*)need(device_alloc(r.work_bytes + 256));
    r.scalars = (char*)need(device_alloc(sizeof(StepScalars)));
    r.params = ops_normal(n, 0.1, 0.0, 1);
    r.master = ops_upload(r.params.was, n, 0, true);
    r.grads = ops_upload(NULL, n, 1, false);
    r.figures = ops_floats(1 + OPTIMIZER_MEASURED);
    r.now = kappa_test_scalars();
    OptimizerUnit u = r.unit;
    u.rows = shape.rows;
    u.cols = shape.cols;
    u.count = n;
    u.parts = shape.parts;
    u.role = shape.role;
    u.params = r.params.x;
#ifdef FLOATX_BF16
    u.master = r.master.f; // else a step is lost in the rounding of the weights
#endif
    u.grads = r.grads.x;
    u.work = r.work;
    u.grad_scale = r.figures.f;
    u.measured = r.figures.f + 1;
    u.lr_scale = 1.0f;
    u.decay = u.owner = true;
    r.unit = u;
    kappa_run_place(&r);
    return r;
}

static double* kappa_run_weights(const KappaRun* r) { return ops_download(r->unit.master ? &r->master : &r->params, "weights"); }

static void kappa_run_close(KappaRun* r) {
    ops_free(&r->params);
    ops_free(&r->master);
    ops_free(&r->grads);
    ops_free(&r->figures);
    device_free(r->state, r->state_room);
    device_free(r->work, r->work_bytes + 256);
    device_free(r->scalars, sizeof(StepScalars));
}

// Writes values over a tensor of floatX, rounded; returns nothing else.
static void kappa_set(OpsTensor* tensor, const double* values) {
    OpsTensor fresh = ops_upload(values, tensor->n, 0, false);
    floatX* host = (floatX*)need(malloc(max_size(1, tensor->n) * sizeof(floatX)));
    device_download(host, fresh.x, tensor->n * sizeof(floatX));
    device_upload(tensor->x, host, tensor->n * sizeof(floatX));
    device_sync();
    free(host);
    ops_free(&fresh);
}

// The backward pass: g on top of what the buffer holds.
static void kappa_add_gradient(KappaRun* r, const double* g) {
    double* sum = ops_download(&r->grads, "gradient");
    for (size_t i = 0; i < r->grads.n; i++) { sum[i] += g[i]; }
    kappa_set(&r->grads, sum);
    free(sum);
}

static void kappa_run_update(KappaRun* r, int step, float factor) {
    r->now.step = (uint32_t)step;
    r->now.correction1 = (float)(1.0 - pow(r->now.beta1, step + 1));
    r->now.correction2 = (float)(1.0 - pow(r->now.beta2, step + 1));
    device_upload(r->scalars, &r->now, sizeof(r->now));
    device_upload(r->figures.f, &factor, sizeof(factor));
    device_sync();
    kappa_update(&r->config, &r->kappa, &r->unit, (const StepScalars*)(const void*)r->scalars);
}

static double* kappa_host_floats(const void* device, size_t n) {
    float* host = (float*)need(malloc(max_size(1, n) * sizeof(float)));
    double* values = reference_zeros(n);
    device_download(host, device, n * sizeof(float));
    for (size_t i = 0; i < n; i++) { values[i] = host[i]; }
    free(host);
    return values;
}

static double* kappa_host_bf16(const void* device, size_t n) {
    uint16_t* host = (uint16_t*)need(malloc(max_size(1, n) * sizeof(uint16_t)));
    double* values = reference_zeros(n);
    device_download(host, device, n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) { values[i] = bf16_to_float(host[i]); }
    free(host);
    return values;
}

// The momentum that the state stands for. codes, rho, gamma, scales: also wanted where not NULL (codes without scale).
static double* kappa_run_momentum(const KappaRun* r, double* codes) {
    size_t n = r->unit.count, cols = r->unit.cols, blocks = kappa_blocks(n);
    int bits = r->unit.role == ROLE_EMBEDDING ? 8 : r->kappa.width[0];
    if (bits == 32) { return kappa_host_floats(r->unit.state[0], n); }
    uint8_t* packed = (uint8_t*)need(malloc(blocks * kappa_block_bytes(bits)));
    device_download(packed, r->unit.state[0], blocks * kappa_block_bytes(bits));
    double *scale = kappa_host_bf16(r->unit.state[1], blocks), *m = reference_zeros(n), *rho = NULL, *gamma = NULL;
    if (r->unit.role == ROLE_MATRIX) {
        rho = kappa_host_bf16(r->unit.state[2], r->unit.rows);
        gamma = kappa_host_bf16(r->unit.state[3], cols);
    }
    for (size_t i = 0; i < n; i++) {
        int code = reference_kappa_code(packed + i / KAPPA_BLOCK * kappa_block_bytes(bits), bits, (int)(i % KAPPA_BLOCK));
        if (codes) { codes[i] = code; }
        m[i] = code * scale[i / KAPPA_BLOCK] * (rho ? rho[i / cols] * gamma[i % cols] : 1.0);
    }
    free(packed);
    free(scale);
    free(rho);
    free(gamma);
    return m;
}

// The device's own orthogonalisation, which has tests of its own.
static void kappa_orthogonalise(double* x, size_t rows, size_t cols) {
    size_t bytes = newton_schulz_work_bytes(rows, cols);
    OpsTensor tensor = ops_upload(x, rows * cols, 0, true);
    char* work = (char*)need(device_alloc(bytes));
    newton_schulz(tensor.f, tensor.f, rows, cols, work);
    double* out = ops_download(&tensor, "orthogonalised");
    memcpy(x, out, rows * cols * sizeof(double));
    free(out);
    device_free(work, bytes);
    ops_free(&tensor);
}

#ifdef FLOATX_BF16
#define KAPPA_DIRECTION_TOLERANCE 0.06 // products of bf16: an input that differs by one rounding ends a rounding or two apart
#define KAPPA_BUFFER_TOLERANCE 4e-3
#define KAPPA_WALK_TOLERANCE 0.2
#else
#define KAPPA_DIRECTION_TOLERANCE 2e-3 // orthogonalisation amplifies the smallest singular values some hundredfold
#define KAPPA_BUFFER_TOLERANCE 2e-6
#define KAPPA_WALK_TOLERANCE 5e-5
#endif

static double kappa_relative(const double* got, const double* want, size_t n) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
}

static double* kappa_copy_of(const double* x, size_t n) {
    double* y = reference_zeros(n);
    memcpy(y, x, n * sizeof(double));
    return y;
}

static ReferenceKappa kappa_reference_of(const KappaRun* r) {
    int bits = r->kappa.width[0];
    double share = r->config.nesterov && bits != 2 ? 1.0 : 0.0;
    if (share > 0.0 && bits == 4 && r->config.kappa_residual) {
        double* kept = kappa_host_floats(r->unit.state[4], 2);
        share = kept[1];
        free(kept);
    }
    ReferenceKappa k = {r->now.lr, r->now.momentum, r->now.beta1, r->now.beta2, r->now.eps, r->now.weight_decay, share,
                        r->config.cautious_decay};
    return k;
}

// Rows and columns of very different size, as gradients have.
static void kappa_random_gradient(double* g, size_t rows, size_t cols, double scale) {
    ReferenceRandom sizes = {99};
    double *row = reference_zeros(rows), *col = reference_zeros(cols);
    for (size_t i = 0; i < rows; i++) { row[i] = exp(reference_normal(&sizes)); }
    for (size_t j = 0; j < cols; j++) { col[j] = exp(reference_normal(&sizes)); }
    for (size_t i = 0; i < rows * cols; i++) { g[i] = scale * row[i / cols] * col[i % cols] * reference_normal(&ops_random); }
    free(row);
    free(col);
}
