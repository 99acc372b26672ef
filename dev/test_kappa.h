// test_kappa.h - rows for Kappa: codes, one step of every width from the state that the device holds against double, what is carried from
// step to step, embeddings, the law of kappa, the choice of widths, spikes, repacking, bytes.
#pragma once
#include "../optim/kappa_repack.cuh"
#include "op_tensor.h"
#include "reference_kappa.h"
#include "test_emulation.h"

static const int kappa_test_bits[] = {2, 4, 6, 8};

// ---- codes ----

DEVICE void kappa_test_decode_block(Team t, size_t block, float* out, const uint8_t* codes, const float* scale, int bits) {
    kappa_decode(t, out + block * KAPPA_BLOCK, codes + block * kappa_block_bytes(bits), scale[block], bits);
}

DEVICE void kappa_test_encode_block(Team t, size_t block, uint8_t* codes, float* values, const float* x, const float* scale, int bits, bool stochastic,
                                    uint32_t step) {
    KappaRounding r = {stochastic, 5, (uint64_t)block * KAPPA_BLOCK, step, 3};
    kappa_encode(t, codes + block * kappa_block_bytes(bits), values + block * KAPPA_BLOCK, x + block * KAPPA_BLOCK, scale[block], r, bits);
}

// Blocks of codes on the device with a scale each.
typedef struct {
    OpsTensor x, values, scale;
    uint8_t *codes, *host; // on the device; here
    size_t blocks, bytes;
    int bits;
} KappaBlocks;

static KappaBlocks kappa_blocks_new(size_t blocks, int bits, const double* x) {
    KappaBlocks b;
    b.blocks = blocks;
    b.bits = bits;
    b.bytes = blocks * kappa_block_bytes(bits);
    b.x = ops_upload(x, blocks * KAPPA_BLOCK, 0, true);
    b.values = ops_floats(blocks * KAPPA_BLOCK);
    double* scale = reference_zeros(blocks);
    for (size_t i = 0; i < blocks; i++) { scale[i] = reference_kappa_bf16(0.37 + 0.11 * (double)i); }
    b.scale = ops_upload(scale, blocks, 0, true);
    free(scale);
    b.codes = (uint8_t*)need(device_alloc(b.bytes));
    b.host = (uint8_t*)need(calloc(1, b.bytes));
    return b;
}

static void kappa_blocks_free(KappaBlocks* b) {
    ops_free(&b->x);
    ops_free(&b->values);
    ops_free(&b->scale);
    device_free(b->codes, b->bytes);
    free(b->host);
}

// Every byte pattern decodes as its bits say, and codes of values that are codes come back.
static void kappa_patterns_once(void) {
    for (size_t w = 0; w < COUNT_OF(kappa_test_bits); w++) {
        int bits = kappa_test_bits[w], wrong = 0, changed = 0;
        size_t bytes_a_block = kappa_block_bytes(bits), blocks = 17;
        KappaBlocks b = kappa_blocks_new(blocks, bits, NULL);
        for (size_t i = 0; i < b.bytes; i++) { b.host[i] = (uint8_t)(i * 37 + i / 256); } // 37 is odd: all 256 bytes at each place
        device_upload(b.codes, b.host, b.bytes);
        LAUNCH(blocks, WARP_TEAM, kappa_test_decode_block, b.values.f, b.codes, b.scale.f, bits);
        double* got = ops_download(&b.values, "decoded");
        for (size_t i = 0; i < blocks * KAPPA_BLOCK; i++) {
            int code = reference_kappa_code(b.host + i / KAPPA_BLOCK * bytes_a_block, bits, (int)(i % KAPPA_BLOCK));
            wrong += got[i] != (double)((float)code * (float)b.scale.was[i / KAPPA_BLOCK]);
        }
        CHECK(wrong == 0, "%d bits: %d values of patterns are wrong", bits, wrong);
        device_upload(b.codes, b.host, b.bytes);
        LAUNCH(blocks, WARP_TEAM, kappa_test_encode_block, b.codes, b.x.f, b.values.f, b.scale.f, bits, false, 0);
        uint8_t* after = (uint8_t*)need(malloc(b.bytes));
        device_download(after, b.codes, b.bytes);
        for (size_t i = 0; i < blocks * KAPPA_BLOCK; i++) {
            size_t block = i / KAPPA_BLOCK * bytes_a_block;
            int code = reference_kappa_code(b.host + block, bits, (int)(i % KAPPA_BLOCK)), least = 1 - (1 << (bits - 1));
            changed += (code < least ? least : code) != reference_kappa_code(after + block, bits, (int)(i % KAPPA_BLOCK));
        }
        CHECK(changed == 0, "%d bits: %d codes do not come back", bits, changed);
        free(after);
        free(got);
        kappa_blocks_free(&b);
    }
}

static void kappa_patterns(void) { emulation_each(kappa_patterns_once); }

// Rounding to nearest and clamping against double; stochastic rounding is right on average and the same for the same key.
static void kappa_rounding(void) {
    ops_random.state = 11;
    for (size_t w = 0; w < COUNT_OF(kappa_test_bits); w++) {
        int bits = kappa_test_bits[w], wrong = 0;
        size_t n = 4 * KAPPA_BLOCK;
        double *x = reference_zeros(n), *mean = reference_zeros(n), levels = (double)((1 << (bits - 1)) - 1), worst = 0.0;
        for (size_t i = 0; i < n; i++) { x[i] = 0.35 * levels * reference_normal(&ops_random); }
        KappaBlocks b = kappa_blocks_new(4, bits, x);
        LAUNCH(b.blocks, WARP_TEAM, kappa_test_encode_block, b.codes, b.values.f, b.x.f, b.scale.f, bits, false, 0);
        device_download(b.host, b.codes, b.bytes);
        double* values = ops_download(&b.values, "rounded");
        for (size_t i = 0; i < n; i++) {
            double scale = b.scale.was[i / KAPPA_BLOCK], exact = fmin(levels, fmax(-levels, b.x.was[i] / scale));
            int code = reference_kappa_code(b.host + i / KAPPA_BLOCK * kappa_block_bytes(bits), bits, (int)(i % KAPPA_BLOCK));
            wrong += fabs(exact - code) > 0.5 + 1e-5 || values[i] != (double)((float)code * (float)scale);
        }
        CHECK(wrong == 0, "%d bits: %d of %zu values are rounded wrongly", bits, wrong, n);
        free(values);
        const int rounds = OPS_SMALL ? 64 : 400;
        for (int r = 0; r < rounds; r++) {
            LAUNCH(b.blocks, WARP_TEAM, kappa_test_encode_block, b.codes, b.values.f, b.x.f, b.scale.f, bits, true, (uint32_t)r);
            values = ops_download(&b.values, "rounded");
            for (size_t i = 0; i < n; i++) { mean[i] += values[i] / rounds; }
            free(values);
        }
        for (size_t i = 0; i < n; i++) {
            double scale = b.scale.was[i / KAPPA_BLOCK], exact = fmin(levels, fmax(-levels, b.x.was[i] / scale));
            worst = fmax(worst, fabs(mean[i] / scale - exact));
        }
        CHECK(worst < 5.0 * 0.5 / sqrt(rounds), "%d bits: the mean of %d stochastic roundings is off by %.3g steps", bits, rounds, worst);
        free(x);
        free(mean);
        kappa_blocks_free(&b);
    }
}

// ---- one unit ----

typedef struct {
    size_t rows, cols;
    int parts;
    Role role;
} KappaShape;

static const KappaShape kappa_shapes[] = {{1, 1, 1, ROLE_MATRIX}, {5, 7, 1, ROLE_MATRIX}, {48, 20, 1, ROLE_MATRIX}, {96, 24, 3, ROLE_MATRIX},
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
#else
#define KAPPA_DIRECTION_TOLERANCE 2e-3 // orthogonalisation amplifies the smallest singular values some hundredfold
#define KAPPA_BUFFER_TOLERANCE 2e-6
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
    ReferenceKappa k = {r->now.lr, r->now.momentum, r->now.beta1, r->now.beta2, r->now.eps, r->now.weight_decay, share, r->config.cautious_decay};
    return k;
}

// After a step: factors, codes and buffer are right for the momentum m that must be held.
static void kappa_check_encoded(const KappaRun* r, const char* label, const double* m) {
    size_t rows = r->unit.rows, cols = r->unit.cols, n = rows * cols;
    int bits = r->kappa.width[0], far = 0;
    double *rho = reference_zeros(rows), *gamma = reference_zeros(cols), *codes = reference_zeros(n), levels = (double)((1 << (bits - 1)) - 1);
    double *stored = kappa_run_momentum(r, codes), *scale = kappa_host_bf16(r->unit.state[1], kappa_blocks(n));
    double *rows_got = kappa_host_bf16(r->unit.state[2], rows), *cols_got = kappa_host_bf16(r->unit.state[3], cols), off = 0.0;
    reference_kappa_factors(rho, gamma, m, rows, cols, r->config.kappa_equilibrate);
    for (size_t i = 0; i < rows; i++) { off = fmax(off, fabs(rows_got[i] - rho[i]) / (rho[i] + 1e-30)); }
    for (size_t i = 0; i < cols; i++) { off = fmax(off, fabs(cols_got[i] - gamma[i]) / (gamma[i] + 1e-30)); }
    CHECK(off <= 1.0 / 128, "%s: factors of rows or columns are off by %.3g", label, off); // one unit of bf16
    for (size_t block = 0; block < kappa_blocks(n); block++) {
        size_t first = block * KAPPA_BLOCK, end = min_size(n, first + KAPPA_BLOCK);
        double greatest = 0.0, sum = 0.0;
        for (size_t i = first; i < end; i++) {
            double f = rows_got[i / cols] * cols_got[i % cols], x = f > 0.0 ? m[i] / f : 0.0;
            greatest = fmax(greatest, fabs(x));
            sum += fabs(x) / (double)(end - first);
        }
        double step = bits == 2 ? 1.53 * sum : greatest / levels;
        CHECK(fabs(scale[block] - step) <= step / 128, "%s: block %zu has step %g, wanted %g", label, block, scale[block], step);
        for (size_t i = first; i < end; i++) {
            double f = rows_got[i / cols] * cols_got[i % cols], x = f * scale[block] > 0.0 ? m[i] / f / scale[block] : 0.0;
            far += fabs(fmin(levels, fmax(-levels, x)) - codes[i]) > 0.5 + 1e-4 * levels;
        }
    }
    CHECK(r->config.kappa_stochastic || far == 0, "%s: %d codes are not the nearest", label, far);
    double *buffer = ops_download(&r->grads, label), *want = reference_zeros(n), back = r->now.momentum / (1.0 - r->now.momentum);
    bool feeds_back = r->config.kappa_residual && bits <= 4 && r->unit.owner;
    for (size_t i = 0; i < n && feeds_back; i++) { want[i] = back * (m[i] - stored[i]); }
    double size = 0.0, left_size = 0.0, apart = 0.0;
    for (size_t i = 0; i < n; i++) {
        size += back * back * m[i] * m[i];
        left_size += want[i] * want[i];
        apart += (buffer[i] - want[i]) * (buffer[i] - want[i]);
    }
    CHECK(sqrt(apart) <= KAPPA_BUFFER_TOLERANCE * sqrt(left_size) + 1e-6 * sqrt(size), "%s: the buffer is off by %.3g of %.3g", label, sqrt(apart), sqrt(left_size));
    double* all[] = {rho, gamma, codes, stored, scale, rows_got, cols_got, buffer, want};
    for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
}

// One step in double from the state and buffer that the device has, then the device's own; g: the new gradient.
static void kappa_check_step(KappaRun* r, const char* label, const double* g, int step, float factor) {
    size_t n = r->unit.count, parts = (size_t)r->unit.parts, rows = r->unit.rows / parts, cols = r->unit.cols, moments = max_size(rows, cols);
    int bits = r->kappa.width[0];
    ReferenceKappa k = kappa_reference_of(r);
    kappa_add_gradient(r, g);
    double *m = kappa_run_momentum(r, NULL), *u = ops_download(&r->grads, label), *w = kappa_run_weights(r);
    double* v = kappa_host_floats(r->unit.state[bits == 32 ? 1 : 5], parts * moments);
    for (size_t i = 0; i < n; i++) { u[i] *= factor; }
    reference_kappa_momentum(m, u, n, &k);
    for (size_t p = 0; p < parts; p++) {
        kappa_orthogonalise(u + p * rows * cols, rows, cols);
        reference_kappa_normalise(u + p * rows * cols, v + p * moments, rows, cols, k.beta2);
    }
    double *start = kappa_copy_of(w, n), *got, *v_got, *moved = reference_zeros(n), *wanted = reference_zeros(n);
    reference_kappa_apply(w, u, n, 0.2, k.lr, k.decay, k.cautious);
    kappa_run_update(r, step, factor);
    got = kappa_run_weights(r);
    v_got = kappa_host_floats(r->unit.state[bits == 32 ? 1 : 5], parts * moments);
    for (size_t i = 0; i < n; i++) {
        moved[i] = got[i] - start[i];
        wanted[i] = w[i] - start[i];
    }
    CHECK(kappa_relative(moved, wanted, n) <= KAPPA_DIRECTION_TOLERANCE, "%s, step %d: weights move otherwise by %.3g", label, step, kappa_relative(moved, wanted, n));
    CHECK(kappa_relative(v_got, v, parts * moments) <= KAPPA_DIRECTION_TOLERANCE, "%s, step %d: row moments are off by %.3g", label, step, kappa_relative(v_got, v, parts * moments));
    if (bits == 32) {
        double *held = kappa_run_momentum(r, NULL), *buffer = ops_download(&r->grads, label), *zero = reference_zeros(n);
        CHECK(kappa_relative(held, m, n) <= 1e-6, "%s, step %d: momentum is off by %.3g", label, step, kappa_relative(held, m, n));
        CHECK(kappa_relative(buffer, zero, n) == 0.0, "%s, step %d: the buffer is not zero", label, step);
        free(held);
        free(buffer);
        free(zero);
    } else {
        kappa_check_encoded(r, label, m);
    }
    double* all[] = {m, u, w, v, start, got, v_got, moved, wanted};
    for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
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

static void kappa_steps(const OptimizerConfig* c, KappaShape shape, int bits, int steps, bool owner) {
    char label[128];
    snprintf(label, sizeof(label), "%zu x %zu, %d parts, %d bits%s%s%s%s", shape.rows, shape.cols, shape.parts, bits, c->kappa_residual ? "" : ", no residual",
             c->kappa_equilibrate ? "" : ", flat", c->kappa_stochastic ? ", stochastic" : "", owner ? "" : ", not the owner");
    KappaRun r = kappa_run_open(c, shape, bits);
    double* g = reference_zeros(r.unit.count);
    r.unit.owner = owner;
    for (int step = 0; step < steps; step++) {
        kappa_random_gradient(g, shape.rows, shape.cols, step == 3 ? 0.0 : 1e-3); // a step without a gradient, too
        kappa_check_step(&r, label, g, step, step == 2 ? 0.25f : 1.0f);
    }
    free(g);
    kappa_run_close(&r);
}

static void kappa_widths_and_shapes(void) {
    ops_random.state = 21;
    const int widths[] = {2, 4, 6, 8, 32};
    OptimizerConfig c = kappa_test_config();
    for (size_t s = 0; s < COUNT_OF(kappa_shapes); s++) {
        for (size_t w = 0; w < COUNT_OF(widths); w++) {
            if (OPS_SMALL && (w + s) % 5 > 1) { continue; }
            kappa_steps(&c, kappa_shapes[s], widths[w], OPS_SMALL ? 3 : 10, true);
        }
    }
}

static void kappa_options(void) {
    ops_random.state = 22;
    const KappaShape shape = {40, 48, 1, ROLE_MATRIX};
    for (size_t w = 0; w < COUNT_OF(kappa_test_bits); w++) {
        int bits = kappa_test_bits[w], steps = OPS_SMALL ? 2 : 5;
        OptimizerConfig c = kappa_test_config();
        kappa_steps(&c, shape, bits, steps, false);
        c.kappa_residual = false;
        kappa_steps(&c, shape, bits, steps, true);
        c.kappa_equilibrate = false;
        kappa_steps(&c, shape, bits, steps, true);
        c.kappa_stochastic = c.kappa_residual = true;
        c.nesterov = c.cautious_decay = false;
        kappa_steps(&c, shape, bits, steps, true);
    }
}

static void kappa_emulated_once(void) {
    ops_random.state = 23;
    OptimizerConfig c = kappa_test_config();
    const KappaShape matrix = {6, 50, 2, ROLE_MATRIX};
    kappa_steps(&c, matrix, 4, 2, true);
}

static void kappa_emulated(void) { emulation_each(kappa_emulated_once); }

// Codes plus what the buffer holds is the momentum that double keeps: over all steps, not from one to the next.
static void kappa_follows(void) {
    ops_random.state = 24;
    const KappaShape shape = {48, 20, 1, ROLE_MATRIX};
    const int widths[] = {2, 4};
    for (size_t w = 0; w < COUNT_OF(widths); w++) {
        OptimizerConfig c = kappa_test_config();
        KappaRun r = kappa_run_open(&c, shape, widths[w]);
        size_t n = r.unit.count;
        double *g = reference_zeros(n), *exact = reference_zeros(n), mu = r.now.momentum;
        for (int step = 0; step < 10; step++) {
            kappa_random_gradient(g, shape.rows, shape.cols, 1e-3);
            kappa_add_gradient(&r, g);
            kappa_run_update(&r, step, 1.0f);
            for (size_t i = 0; i < n; i++) { exact[i] = mu * exact[i] + (1.0 - mu) * g[i]; }
        }
        double *m = kappa_run_momentum(&r, NULL), *left = ops_download(&r.grads, "buffer"), coded = kappa_relative(m, exact, n);
        for (size_t i = 0; i < n; i++) { m[i] += (1.0 - mu) / mu * left[i]; }
        double off = kappa_relative(m, exact, n);
        CHECK(off <= 4.0 * KAPPA_BUFFER_TOLERANCE, "%d bits: codes and residual are off by %.3g (codes alone %.3g)", widths[w], off, coded);
        CHECK(coded > 0.02, "%d bits: codes alone are off by only %.3g: the row shows nothing", widths[w], coded);
        free(g);
        free(exact);
        free(m);
        free(left);
        kappa_run_close(&r);
    }
}

// Zero rows, columns, blocks and matrices give zeros, not NaN; a matrix without a gradient stands still but for decay.
static void kappa_zeros(void) {
    ops_random.state = 25;
    const KappaShape shapes[] = {{24, 128, 1, ROLE_MATRIX}, {9, 30, 3, ROLE_MATRIX}};
    for (size_t s = 0; s < COUNT_OF(shapes); s++) {
        for (size_t w = 0; w < COUNT_OF(kappa_test_bits); w++) {
            OptimizerConfig c = kappa_test_config();
            KappaRun r = kappa_run_open(&c, shapes[s], kappa_test_bits[w]);
            size_t n = r.unit.count, rows = shapes[s].rows, cols = shapes[s].cols;
            double *g = reference_zeros(n), *start = kappa_run_weights(&r), *got, *m;
            r.unit.decay = false;
            kappa_run_update(&r, 0, 1.0f);
            got = kappa_run_weights(&r);
            CHECK(kappa_relative(got, start, n) == 0.0, "weights moved by %.3g without a gradient", kappa_relative(got, start, n));
            free(got);
            kappa_random_gradient(g, rows, cols, 1e-3);
            for (size_t i = 0; i < n; i++) {
                if (i / cols == 2 || i % cols == 5 || i / cols >= rows / 3 * 2) { g[i] = 0.0; }
            }
            for (int step = 1; step < 4; step++) {
                kappa_add_gradient(&r, g);
                kappa_run_update(&r, step, 1.0f);
            }
            got = kappa_run_weights(&r);
            m = kappa_run_momentum(&r, NULL);
            int sick = 0;
            for (size_t i = 0; i < n; i++) { sick += !isfinite(got[i]) || !isfinite(m[i]) || (g[i] == 0.0 && m[i] != 0.0); }
            double* figures = kappa_host_floats(r.unit.measured, OPTIMIZER_MEASURED);
            for (int i = 0; i < OPTIMIZER_MEASURED; i++) { sick += !isfinite(figures[i]); }
            CHECK(sick == 0, "%d bits: %d values are not what zeros make", kappa_test_bits[w], sick);
            double* all[] = {g, start, got, m, figures};
            for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
            kappa_run_close(&r);
        }
    }
}

// ---- embeddings ----

// A few rows without a gradient, as rare tokens have.
static void kappa_embedding_steps(int second_moment, bool rule) {
    const KappaShape shapes[] = {{40, 20, 1, ROLE_EMBEDDING}, {OPS_SMALL ? 9 : 67, 128, 1, ROLE_EMBEDDING}, {3, 5, 1, ROLE_EMBEDDING}};
    for (size_t s = 0; s < COUNT_OF(shapes); s++) {
        OptimizerConfig c = kappa_test_config();
        c.kappa_embedding = second_moment;
        c.update_clip = rule ? 1e6f : 0.0f; // never reached: the direction takes the long way all the same
        KappaRun r = kappa_run_open(&c, shapes[s], 8);
        size_t n = r.unit.count, rows = shapes[s].rows, cols = shapes[s].cols;
        ReferenceKappa k = kappa_reference_of(&r);
        bool by_row = second_moment == KAPPA_V_ROW, coded = kappa_v_format(&c) == STATE_INT8;
        double *g = reference_zeros(n), *v = reference_zeros(n), worst = 0.0, allowed = coded ? 0.15 : 1e-4;
        for (int step = 0; step < 6; step++) {
            kappa_random_gradient(g, rows, cols, 1e-3);
            for (size_t i = 0; i < n; i++) { g[i] = (i / cols + (size_t)step) % 3 == 0 ? 0.0 : g[i] * (step == 4 ? 10.0 : 1.0); }
            kappa_set(&r.grads, g);
            double *used = ops_download(&r.grads, "gradient"), *m = kappa_run_momentum(&r, NULL), *w = kappa_run_weights(&r);
            double* start = kappa_copy_of(w, n);
            for (size_t i = 0; i < n; i++) { used[i] *= 0.5; }
            reference_kappa_embedding(w, m, used, v, rows, cols, by_row, &k, step + 1);
            kappa_run_update(&r, step, 0.5f);
            double *got = kappa_run_weights(&r), *held = kappa_run_momentum(&r, NULL);
            for (size_t i = 0; i < n; i++) {
                got[i] -= start[i];
                w[i] -= start[i];
            }
            double off = kappa_relative(held, m, n);
            worst = fmax(worst, kappa_relative(got, w, n));
            CHECK(off < 0.02, "embedding %zu x %zu, step %d: momentum of 8 bits is off by %.3g", rows, cols, step, off);
            double* all[] = {used, m, w, start, got, held};
            for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
        }
        CHECK(worst < allowed, "embedding %zu x %zu, second moment %d: weights move otherwise by %.3g", rows, cols, second_moment, worst);
        free(g);
        free(v);
        kappa_run_close(&r);
    }
}

static void kappa_embeddings(void) {
    ops_random.state = 31;
    for (int v = KAPPA_V_ROW; v <= KAPPA_V_FP32; v++) {
        kappa_embedding_steps(v, false);
        kappa_embedding_steps(v, true);
    }
}

static void kappa_embedding_once(void) {
    ops_random.state = 32;
    kappa_embedding_steps(KAPPA_V_ROW, false);
}

static void kappa_embeddings_emulated(void) { emulation_each_order(kappa_embedding_once); }

// ---- the law ----

// Figures of one matrix under a gradient of pure noise, after its momentum has settled.
static void kappa_noise_figures(double* kappa, double* excess, int bits, bool residual, double mu) {
    OptimizerConfig c = kappa_test_config();
    const KappaShape shape = {64, 128, 1, ROLE_MATRIX};
    c.kappa_residual = residual;
    KappaRun r = kappa_run_open(&c, shape, bits);
    r.now.momentum = (float)mu;
    size_t n = r.unit.count;
    double *g = reference_zeros(n), sums[OPTIMIZER_MEASURED] = {0.0, 0.0, 0.0, 0.0};
    const int settle = (int)(3.0 / (1.0 - mu)), steps = settle + 10;
    for (int step = 0; step < steps; step++) {
        kappa_random_gradient(g, shape.rows, shape.cols, 1e-3);
        kappa_add_gradient(&r, g);
        kappa_run_update(&r, step, 1.0f);
        double* figures = kappa_host_floats(r.unit.measured, OPTIMIZER_MEASURED);
        for (int i = 0; i < OPTIMIZER_MEASURED && step >= settle; i++) { sums[i] += figures[i]; }
        free(figures);
    }
    *kappa = kappa_measured(sums, bits, mu);
    *excess = sums[KAPPA_ERROR] / ((1.0 - mu) * (1.0 - mu) * sums[KAPPA_CHANGE]);
    free(g);
    kappa_run_close(&r);
}

// Measured kappa is that of the law for noise, with and without a residual in the buffer; so is the variance that rounding adds.
static void kappa_law(void) {
    ops_random.state = 41;
    for (size_t w = 0; w < COUNT_OF(kappa_test_bits); w++) {
        for (int residual = 0; residual < 2; residual++) {
            int bits = kappa_test_bits[w];
            double mu = 0.95, kappa, excess, law = kappa_of_noise(bits, mu);
            if ((bits == 2 && !residual) || (bits > 4 && residual) || (OPS_SMALL && bits != 4)) { continue; } // 2 bits alone: not a small error
            kappa_noise_figures(&kappa, &excess, bits, residual, mu);
            double says = (bits == 2 ? KAPPA_TERNARY_EXCESS : 1.0) / (12.0 * kappa * kappa);
            CHECK(fabs(kappa / law - 1.0) < 0.15, "%d bits%s: kappa %.3g, the law says %.3g", bits, residual ? ", residual" : "", kappa, law);
            CHECK(fabs(excess / says - 1.0) < 0.15, "%d bits%s: excess variance %.3g, the law says %.3g", bits, residual ? ", residual" : "", excess, says);
        }
    }
}

// ---- the choice of widths ----

static void kappa_test_table(ParamTable* table, size_t layers, size_t C, size_t V, size_t T) {
    const struct {
        const char* name;
        size_t layers, rows, cols;
        Role role;
        int parts;
    } rows[] = {{"wte", 1, V, C, ROLE_EMBEDDING, 1}, {"wpe", 1, T, C, ROLE_EMBEDDING, 1}, {"ln1w", layers, 1, C, ROLE_VECTOR, 1},
                {"ln1b", layers, 1, C, ROLE_VECTOR, 1}, {"qkvw", layers, 3 * C, C, ROLE_MATRIX, 3}, {"qkvb", layers, 1, 3 * C, ROLE_VECTOR, 1},
                {"attprojw", layers, C, C, ROLE_MATRIX, 1}, {"attprojb", layers, 1, C, ROLE_VECTOR, 1}, {"ln2w", layers, 1, C, ROLE_VECTOR, 1},
                {"ln2b", layers, 1, C, ROLE_VECTOR, 1}, {"fcw", layers, 4 * C, C, ROLE_MATRIX, 1}, {"fcb", layers, 1, 4 * C, ROLE_VECTOR, 1},
                {"fcprojw", layers, C, 4 * C, ROLE_MATRIX, 1}, {"fcprojb", layers, 1, C, ROLE_VECTOR, 1}, {"lnfw", 1, 1, C, ROLE_VECTOR, 1},
                {"lnfb", 1, 1, C, ROLE_VECTOR, 1}};
    memset(table, 0, sizeof(*table));
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        TensorSpec* s = &table->tensors[table->tensor_count++];
        s->name = rows[i].name;
        s->layers = rows[i].layers;
        s->rows = s->real_rows = rows[i].rows;
        s->cols = rows[i].cols;
        s->role = rows[i].role;
        s->parts = rows[i].parts;
    }
    params_layout(table, 4 * C);
}

enum { KAPPA_TEST_QKV = 4, KAPPA_TEST_PROJ = 6, KAPPA_TEST_FC = 10, KAPPA_TEST_FCPROJ = 12 };
static const int kappa_test_matrices[4] = {KAPPA_TEST_QKV, KAPPA_TEST_PROJ, KAPPA_TEST_FC, KAPPA_TEST_FCPROJ};

// Figures such that each matrix has the given kappa at 8 bits.
static float* kappa_test_figures(const ParamTable* table, const double* kappa8, double mu) {
    float* measured = (float*)need(calloc(table->unit_count * OPTIMIZER_MEASURED, sizeof(float)));
    for (size_t u = 0; u < table->unit_count; u++) {
        for (int i = 0; i < 4; i++) {
            if (table->units[u].tensor != kappa_test_matrices[i]) { continue; }
            float* f = measured + u * OPTIMIZER_MEASURED;
            double step8 = (1.0 - mu) / kappa8[i]; // for RMS(g - m) = 1
            f[KAPPA_CHANGE] = (float)table->units[u].count;
            f[KAPPA_GREATEST] = (float)((double)table->units[u].count * 127.0 * 127.0 * step8 * step8);
            f[KAPPA_TERNARY_STEP] = f[KAPPA_GREATEST] * 0.166f; // (1.224 / 3)^2
            f[KAPPA_ERROR] = (float)((double)table->units[u].count * step8 * step8 / 12.0);
        }
    }
    return measured;
}

typedef struct {
    const char* label;
    double bytes;
    bool residual;
    double kappa8[4];         // at 8 bits: qkvw, attprojw, fcw, fcprojw
    int before[4], after[4];  // widths
} KappaChoice;

// The target is 2. Kappa at 6 bits is 0.244 of that at 8, at 4 bits 0.055, at 2 bits 0.0193; with mu = 0.95 a residual lowers the target at 4
// and 2 bits by 0.312, to 0.62 (0.76 at 2 bits, whose error is greater). A change to fewer bits wants 1.15 times the target.
static const KappaChoice kappa_choices[] = {
    {"room to spare, no residual: what the target needs", 2.0, false, {13, 13, 13, 13}, {8, 8, 8, 8}, {6, 6, 6, 6}},
    {"no width meets the target", 2.0, false, {1.5, 1.5, 1.5, 1.5}, {8, 8, 8, 8}, {8, 8, 8, 8}},
    {"needs differ", 2.0, false, {13, 5, 50, 13}, {6, 6, 6, 6}, {6, 8, 4, 6}},
    {"a residual lets 4 bits do", 2.0, true, {13.3, 13.3, 13.3, 13.3}, {8, 8, 8, 8}, {4, 4, 4, 4}},
    {"a very smooth momentum does with 2", 2.0, true, {60, 13.3, 60, 13.3}, {4, 4, 4, 4}, {2, 4, 2, 4}},
    {"the default arena holds 4 bits of all", 0.53, true, {6, 6, 6, 6}, {4, 4, 4, 4}, {4, 4, 4, 4}},
    {"the arena is too small: where it costs least", 0.45, true, {13.3, 13.3, 13.3, 40}, {4, 4, 4, 4}, {4, 4, 4, 2}},
    {"an arena of 2 bits", 0.266, true, {13.3, 13.3, 13.3, 13.3}, {4, 4, 4, 4}, {2, 2, 2, 2}},
    {"narrower only with a margin: 6 bits would just do", 2.0, false, {8.4, 8.4, 8.4, 8.4}, {8, 8, 8, 8}, {8, 8, 8, 8}},
    {"narrower with the margin", 2.0, false, {9.6, 9.6, 9.6, 9.6}, {8, 8, 8, 8}, {6, 6, 6, 6}},
    {"a near miss keeps the width", 2.0, false, {7.6, 7.6, 7.6, 7.6}, {6, 6, 6, 6}, {6, 6, 6, 6}},
    {"a miss does not", 2.0, false, {7.0, 7.0, 7.0, 7.0}, {6, 6, 6, 6}, {8, 8, 8, 8}},
    {"in a small arena a slightly better combination is none", 0.45, true, {13.3, 13.3, 14.0, 13.3}, {4, 4, 4, 2}, {4, 4, 4, 2}},
    {"nor the other way", 0.45, true, {13.3, 13.3, 13.3, 14.0}, {4, 4, 2, 4}, {4, 4, 2, 4}},
    {"a much better one is", 0.45, true, {13.3, 13.3, 40, 13.3}, {4, 4, 4, 2}, {4, 4, 2, 4}},
};

static void kappa_choosing(void) {
    ParamTable table;
    const double mu = 0.95;
    kappa_test_table(&table, 2, 64, 300, 32);
    for (size_t i = 0; i < COUNT_OF(kappa_choices); i++) {
        const KappaChoice* c = &kappa_choices[i];
        OptimizerConfig config = kappa_test_config();
        Kappa now, next;
        config.kappa_bytes = c->bytes;
        config.kappa_residual = c->residual;
        memset(&now, 0, sizeof(now));
        for (int j = 0; j < 4; j++) { now.width[kappa_test_matrices[j]] = c->before[j]; }
        float* measured = kappa_test_figures(&table, c->kappa8, mu);
        bool changed = kappa_choose(&next, &now, &config, &table, measured, mu), differs = false;
        for (int j = 0; j < 4; j++) {
            int t = kappa_test_matrices[j];
            CHECK(next.width[t] == c->after[j], "%s: tensor %d gets %d bits, expected %d", c->label, j, next.width[t], c->after[j]);
            differs = differs || c->before[j] != c->after[j];
            CHECK(c->before[j] != 8 || fabs(next.kappa[t] / c->kappa8[j] - 1.0) < 1e-5, "%s: kappa %g", c->label, next.kappa[t]);
            CHECK(c->before[j] != 8 || fabs(next.measured[t] / next.predicted[t] - 1.0) < 1e-5, "%s: excess %g", c->label, next.measured[t]);
        }
        CHECK(changed == differs, "%s: said to %schange", c->label, changed ? "" : "not ");
        Kappa again;
        bool flaps = kappa_choose(&again, &next, &config, &table, measured, mu);
        CHECK(!flaps, "%s: the same figures change the widths again", c->label);
        free(measured);
    }
    params_free(&table);
}

static void kappa_planning(void) {
    ParamTable table;
    Kappa k;
    Error error;
    kappa_test_table(&table, 2, 64, 300, 32);
    const struct {
        double bytes, mu;
        bool residual;
        int bits, width;
    } rows[] = {{0.53, 0.95, true, 0, 4}, {0.53, 0.98, true, 0, 4}, {2.0, 0.95, true, 0, 4}, {2.0, 0.95, false, 0, 6}, {2.0, 0.9, false, 0, 6},
                {0.27, 0.95, true, 0, 2}, {0.8, 0.98, false, 0, 6}, {0.01, 0.95, true, 8, 8}, {0.53, 0.95, true, 32, 32}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        OptimizerConfig c = kappa_test_config();
        c.kappa_bytes = rows[i].bytes;
        c.kappa_residual = rows[i].residual;
        c.kappa_bits = rows[i].bits;
        CHECK_OK(kappa_plan(&k, &c, &table, rows[i].mu, &error), error);
        for (int j = 0; j < 4; j++) {
            int width = k.width[kappa_test_matrices[j]];
            CHECK(width == rows[i].width, "row %zu: %d bits to begin with, expected %d", i, width, rows[i].width);
        }
        kappa_free(&k);
    }
    OptimizerConfig c = kappa_test_config();
    c.kappa_bytes = 0.2;
    CHECK_FAILS(kappa_plan(&k, &c, &table, 0.95, &error), error, "--kappa-bytes is 0.2");
    kappa_free(&k);
    params_free(&table);
}

// A figure that is no number, or no gradient at all, changes nothing.
static void kappa_choosing_nothing(void) {
    ParamTable table;
    Kappa now, next;
    const double kappa8[4] = {13, 13, 13, 13};
    OptimizerConfig c = kappa_test_config();
    kappa_test_table(&table, 2, 64, 300, 32);
    memset(&now, 0, sizeof(now));
    for (int j = 0; j < 4; j++) { now.width[kappa_test_matrices[j]] = 8; }
    c.kappa_bytes = 2.0;
    float* measured = kappa_test_figures(&table, kappa8, 0.95);
    for (size_t u = 0; u < table.unit_count; u++) {
        if (table.units[u].tensor != KAPPA_TEST_PROJ) { continue; }
        measured[u * OPTIMIZER_MEASURED + KAPPA_CHANGE] = NAN;
    }
    CHECK(!kappa_choose(&next, &now, &c, &table, measured, 0.95), "a NaN changes widths");
    memset(measured, 0, table.unit_count * OPTIMIZER_MEASURED * sizeof(float));
    CHECK(!kappa_choose(&next, &now, &c, &table, measured, 0.95), "no gradient changes widths");
    CHECK(next.width[KAPPA_TEST_FC] == 8, "a width is %d", next.width[KAPPA_TEST_FC]);
    free(measured);
    params_free(&table);
}

static void kappa_spikes(void) {
    double usual[2] = {0.0, 0.0};
    Kappa k;
    OptimizerConfig c = kappa_test_config();
    memset(&k, 0, sizeof(k));
    k.rms = usual;
    k.units = 2;
    c.kappa_spike = 5.0;
    CHECK(kappa_spike(&k, &c, 0, 0.0) == 1.0 && usual[0] == 0.0, "no gradient yet");
    CHECK(kappa_spike(&k, &c, 0, 2.0) == 1.0 && usual[0] == 2.0, "the first gradient is the usual one");
    CHECK(kappa_spike(&k, &c, 0, 9.9) == 1.0 && k.spikes == 0, "below the limit");
    double before = usual[0], factor = kappa_spike(&k, &c, 0, 1000.0);
    CHECK(fabs(factor - 5.0 * before / 1000.0) < 1e-12 && k.spikes == 1, "a spike's factor is %g", factor);
    CHECK(fabs(usual[0] - before * (0.9 + 0.1 * 5.0)) < 1e-12, "the usual RMS takes in what is left: %g from %g", usual[0], before);
    CHECK(kappa_spike(&k, &c, 1, 1000.0) == 1.0 && usual[1] == 1000.0, "units are apart");
    CHECK(kappa_spike(&k, &c, 0, NAN) == 1.0 && kappa_spike(&k, &c, 0, INFINITY) == 1.0 && isfinite(usual[0]), "what is no number is not its business");
    int steps = 0;
    while (kappa_spike(&k, &c, 0, 1000.0) < 1.0 && steps < 100) { steps++; }
    CHECK(steps > 3 && steps < 40, "a lasting change is believed after %d steps", steps);
    c.kappa_spike = 0.0;
    CHECK(kappa_spike(&k, &c, 0, 1e9) == 1.0, "0 is never");
}

// ---- repacking ----

#define KAPPA_MOVES 5 // three matrices, an embedding before and a vector after the first

typedef struct {
    OpsTensor grads[KAPPA_MOVES];
    KappaMove moves[KAPPA_MOVES];
    char *arena, *work, *scalars;
    size_t bytes, work_bytes;
    TensorSpec specs[KAPPA_MOVES];
    Unit units[KAPPA_MOVES];
    Kappa before, after;
} KappaPack;

static const KappaShape kappa_pack_shapes[KAPPA_MOVES] = {{10, 48, 1, ROLE_EMBEDDING}, {30, 48, 3, ROLE_MATRIX}, {1, 48, 1, ROLE_VECTOR},
                                                          {1, 3, 1, ROLE_MATRIX}, {OPS_SMALL ? 20 : 67, 70, 1, ROLE_MATRIX}};

static UnitState kappa_pack_state(const KappaPack* p, const OptimizerConfig* c, const Kappa* k, int i) {
    UnitState s;
    memset(&s, 0, sizeof(s));
    kappa_declare(&s, c, k, &p->specs[i], &p->units[i]);
    if (p->specs[i].role == ROLE_VECTOR) { state_add(&s, "v", ARRAY_F32, 2 * p->units[i].count); }
    return s;
}

static KappaPack kappa_pack_open(const OptimizerConfig* c, const int* before, const int* after) {
    KappaPack p;
    memset(&p, 0, sizeof(p));
    size_t from = 0, to = 0;
    for (int i = 0; i < KAPPA_MOVES; i++) {
        p.specs[i].role = kappa_pack_shapes[i].role;
        p.specs[i].parts = kappa_pack_shapes[i].parts;
        p.units[i].tensor = i;
        p.units[i].rows = kappa_pack_shapes[i].rows;
        p.units[i].cols = kappa_pack_shapes[i].cols;
        p.units[i].count = p.units[i].rows * p.units[i].cols;
        p.before.width[i] = before[i];
        p.after.width[i] = after[i];
        OptimizerUnit u = p.moves[i].unit;
        u.rows = p.units[i].rows;
        u.cols = p.units[i].cols;
        u.count = p.units[i].count;
        u.parts = p.specs[i].parts;
        u.role = p.specs[i].role;
        u.owner = i != 3;
        p.grads[i] = ops_upload(NULL, u.count, 1, false);
        u.grads = p.grads[i].x;
        p.moves[i].unit = u;
        p.moves[i].before = kappa_pack_state(&p, c, &p.before, i);
        p.moves[i].after = kappa_pack_state(&p, c, &p.after, i);
        p.moves[i].from = from;
        p.moves[i].to = to;
        p.moves[i].tensor = i;
        from += p.moves[i].before.bytes;
        to += p.moves[i].after.bytes;
        if (u.role != ROLE_VECTOR) { p.work_bytes = max_size(p.work_bytes, kappa_work_bytes(c, &p.specs[i], &p.units[i])); }
    }
    p.bytes = max_size(from, to);
    p.arena = (char*)need(device_alloc(p.bytes + 64));
    p.work = (char*)need(device_alloc(p.work_bytes));
    p.scalars = (char*)need(device_alloc(sizeof(StepScalars)));
    StepScalars s = kappa_test_scalars();
    device_upload(p.scalars, &s, sizeof(s));
    device_sync();
    for (int i = 0; i < KAPPA_MOVES; i++) { p.moves[i].unit.work = p.work; }
    return p;
}

static void kappa_pack_close(KappaPack* p) {
    for (int i = 0; i < KAPPA_MOVES; i++) { ops_free(&p->grads[i]); }
    device_free(p->arena, p->bytes + 64);
    device_free(p->work, p->work_bytes);
    device_free(p->scalars, sizeof(StepScalars));
}

// A state of any codes whatever, factors and scales of sensible size.
static void kappa_pack_fill(const KappaPack* p, uint8_t* arena) {
    memset(arena, 0xa5, p->bytes + 64);
    for (int i = 0; i < KAPPA_MOVES; i++) {
        const UnitState* s = &p->moves[i].before;
        for (int a = 0; a < s->count; a++) {
            uint8_t* at = arena + p->moves[i].from + s->arrays[a].at;
            for (size_t j = 0; j < s->arrays[a].count; j++) {
                double value = 0.5 + reference_uniform(&ops_random);
                float f = (float)value;
                uint16_t half = float_to_bf16(f);
                uint8_t byte = (uint8_t)reference_random(&ops_random);
                ArrayType type = s->arrays[a].type;
                memcpy(at + j * array_type_bytes(type), type == ARRAY_F32 ? (void*)&f : type == ARRAY_BF16 ? (void*)&half : (void*)&byte, array_type_bytes(type));
            }
        }
    }
}

// A unit of a packed arena, on the host: the momentum it stands for.
static double* kappa_pack_momentum(const KappaPack* p, const uint8_t* arena, int i, const UnitState* s, size_t at, int bits) {
    size_t n = p->units[i].count, cols = p->units[i].cols;
    double* m = reference_zeros(n);
    const uint8_t* codes = arena + at + s->arrays[0].at;
    uint16_t scale, rho, gamma;
    for (size_t j = 0; j < n; j++) {
        memcpy(&scale, arena + at + s->arrays[1].at + 2 * (j / KAPPA_BLOCK), 2);
        memcpy(&rho, arena + at + s->arrays[2].at + 2 * (j / cols), 2);
        memcpy(&gamma, arena + at + s->arrays[3].at + 2 * (j % cols), 2);
        int code = reference_kappa_code(codes + j / KAPPA_BLOCK * kappa_block_bytes(bits), bits, (int)(j % KAPPA_BLOCK));
        m[j] = (double)bf16_to_float(scale) * code * bf16_to_float(rho) * bf16_to_float(gamma);
    }
    return m;
}

static void kappa_pack_check(const KappaPack* p, const OptimizerConfig* c, const uint8_t* old, const uint8_t* now) {
    const double mu = kappa_test_scalars().momentum;
    for (int i = 0; i < KAPPA_MOVES; i++) {
        const KappaMove* m = &p->moves[i];
        int from = p->before.width[i], to = p->after.width[i];
        bool matrix = p->specs[i].role == ROLE_MATRIX;
        for (int a = matrix && from != to ? 2 : 0; a < m->after.count; a++) { // the residual's mean square grows
            size_t bytes = m->after.arrays[a].count * array_type_bytes(m->after.arrays[a].type);
            bool same = memcmp(old + m->from + m->before.arrays[a].at, now + m->to + m->after.arrays[a].at, bytes) == 0;
            CHECK(same || (matrix && a == 4 && c->kappa_residual), "%d to %d bits: array %d of unit %d changed on its way", from, to, a, i);
        }
        if (!matrix) { continue; }
        double *was = kappa_pack_momentum(p, old, i, &m->before, m->from, from), *is = kappa_pack_momentum(p, now, i, &m->after, m->to, to);
        double *left = ops_download(&p->grads[i], "buffer"), off = kappa_relative(is, was, p->units[i].count), fixed;
        double bound = to == 8 ? 0.02 : to == 6 ? 0.06 : to == 4 ? 0.25 : 0.8;
        CHECK(from == to ? off == 0.0 : off < bound, "unit %d, %d to %d bits: momentum is off by %.3g", i, from, to, off);
        for (size_t j = 0; j < p->units[i].count; j++) { is[j] += (1.0 - mu) / mu * left[j]; }
        fixed = kappa_relative(is, was, p->units[i].count);
        bool back = c->kappa_residual && m->unit.owner;
        CHECK(!back || fixed < KAPPA_BUFFER_TOLERANCE, "unit %d, %d to %d bits: with what was left it is off by %.3g", i, from, to, fixed);
        CHECK(back || fixed == off, "unit %d, %d to %d bits: something was left in the buffer", i, from, to);
        free(was);
        free(is);
        free(left);
    }
}

static void kappa_pack_try(const OptimizerConfig* c, const int* before, const int* after) {
    KappaPack p = kappa_pack_open(c, before, after);
    uint8_t *old = (uint8_t*)need(malloc(p.bytes + 64)), *now = (uint8_t*)need(malloc(p.bytes + 64));
    kappa_pack_fill(&p, old);
    device_upload(p.arena, old, p.bytes + 64);
    device_sync();
    kappa_repack(c, &p.before, &p.after, p.arena, p.moves, KAPPA_MOVES, (const StepScalars*)(const void*)p.scalars);
    device_download(now, p.arena, p.bytes + 64);
    kappa_pack_check(&p, c, old, now);
    CHECK(memcmp(old + p.bytes, now + p.bytes, 64) == 0, "bytes behind the arena were overwritten");
    free(old);
    free(now);
    kappa_pack_close(&p);
}

static void kappa_repacks(void) {
    ops_random.state = 51;
    OptimizerConfig c = kappa_test_config();
    for (int a = 0; a < 4; a++) {
        for (int b = 0; b < 4; b++) {
            int x = kappa_test_bits[a], y = kappa_test_bits[b];
            const int first[KAPPA_MOVES] = {8, x, 0, x, x}, second[KAPPA_MOVES] = {8, y, 0, y, y};
            const int mixed[KAPPA_MOVES] = {8, x, 0, y, y}, turned[KAPPA_MOVES] = {8, y, 0, x, x};
            if (OPS_SMALL && (a + 2 * b) % 4 != 1) { continue; }
            kappa_pack_try(&c, first, second);
            kappa_pack_try(&c, mixed, turned);
        }
    }
    const int wide[KAPPA_MOVES] = {8, 8, 0, 6, 2}, narrow[KAPPA_MOVES] = {8, 4, 0, 8, 6};
    c.kappa_residual = false;
    kappa_pack_try(&c, wide, narrow);
    kappa_pack_try(&c, narrow, wide);
}

// ---- bytes ----

// All state of the model, vectors at AdamW's 8 bytes; and the bound is that of the widest admissible combination.
static void kappa_bytes(void) {
    const struct {
        size_t layers, C, V, T;
    } models[] = {{12, 768, 50257, 1024}, {4, 128, 256, 128}, {24, 1024, 50257, 1024}};
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        ParamTable table;
        OptimizerConfig c = kappa_test_config();
        Kappa k;
        Error error;
        size_t bytes = 0;
        kappa_test_table(&table, models[i].layers, models[i].C, models[i].V, models[i].T);
        CHECK_OK(kappa_plan(&k, &c, &table, 0.95, &error), error);
        bool* held = (bool*)need(malloc(table.unit_count * sizeof(bool)));
        for (size_t u = 0; u < table.unit_count; u++) {
            const TensorSpec* spec = &table.tensors[table.units[u].tensor];
            UnitState s;
            memset(&s, 0, sizeof(s));
            kappa_declare(&s, &c, &k, spec, &table.units[u]);
            held[u] = true;
            bytes += spec->role == ROLE_VECTOR ? 8 * table.units[u].count : s.bytes;
        }
        double each = (double)bytes / (double)table.packed;
        CHECK(i != 0 || each <= 0.70, "gpt2:d12 takes %.4f bytes a parameter", each);
        size_t vectors = 0;
        for (size_t u = 0; u < table.unit_count; u++) {
            if (table.tensors[table.units[u].tensor].role == ROLE_VECTOR) { vectors += 8 * table.units[u].count; }
        }
        size_t bound = kappa_state_bound(&c, &table, held);
        CHECK(bound >= bytes - vectors, "the bound of %zu bytes is below the %zu in use", bound, bytes - vectors);
        CHECK((double)bound <= 1.03 * (double)(bytes - vectors), "the bound of %zu bytes is far above the %zu in use", bound, bytes - vectors);
#ifdef OPS_VERBOSE
        printf("      d%zu: %.4f bytes a parameter\n", models[i].layers, each);
#endif
        free(held);
        kappa_free(&k);
        params_free(&table);
    }
}

// ---- how well the momentum is followed ----

// Rank-4 signal that turns slowly, noise of the size it has in the momentum, rows and columns of unequal size.
static void kappa_tracking_gradient(double* g, size_t rows, size_t cols, int step, const double* left, const double* right) {
    kappa_random_gradient(g, rows, cols, 1e-3);
    for (int k = 0; k < 4; k++) {
        double weight = 2e-5 * sin(0.05 * step + k) * (4 - k);
        for (size_t i = 0; i < rows * cols; i++) { g[i] += weight * left[(size_t)k * rows + i / cols] * right[(size_t)k * cols + i % cols]; }
    }
}

// Mean cosine of the direction of `bits` with that of fp32 momentum over the last steps.
static double kappa_tracking_cosine(int bits, bool residual, bool ahead, double mu) {
    OptimizerConfig c = kappa_test_config();
    const KappaShape shape = {OPS_SMALL ? 32 : 64, 96, 1, ROLE_MATRIX};
    const int steps = OPS_SMALL ? 8 : 60, last = OPS_SMALL ? 4 : 10;
    c.kappa_residual = residual;
    ops_random.state = 61;
    KappaRun coded = kappa_run_open(&c, shape, bits), exact = kappa_run_open(&c, shape, 32);
    size_t n = coded.unit.count;
    double *g = reference_zeros(n), *left = reference_zeros(4 * shape.rows), *right = reference_zeros(4 * shape.cols), cosine = 0.0;
    for (size_t i = 0; i < 4 * shape.rows; i++) { left[i] = reference_normal(&ops_random); }
    for (size_t i = 0; i < 4 * shape.cols; i++) { right[i] = reference_normal(&ops_random); }
    coded.now.momentum = exact.now.momentum = (float)mu;
    coded.config.nesterov = exact.config.nesterov = ahead;
    for (int step = 0; step < steps; step++) {
        kappa_tracking_gradient(g, shape.rows, shape.cols, step, left, right);
        kappa_add_gradient(&coded, g);
        kappa_add_gradient(&exact, g);
        kappa_run_update(&coded, step, 1.0f);
        kappa_run_update(&exact, step, 1.0f);
        double *a = kappa_host_floats(apply_work(&coded.unit).direction, n), *b = kappa_host_floats(apply_work(&exact.unit).direction, n);
        double dot = 0.0, aa = 0.0, bb = 0.0;
        for (size_t i = 0; i < n; i++) {
            dot += a[i] * b[i];
            aa += a[i] * a[i];
            bb += b[i] * b[i];
        }
        cosine += step >= steps - last ? dot / sqrt(aa * bb) / last : 0.0;
        free(a);
        free(b);
    }
    free(g);
    free(left);
    free(right);
    kappa_run_close(&coded);
    kappa_run_close(&exact);
    return cosine;
}

// Found: 1.0000, 1.0000, 0.62, 0.974, 0.965. The momentum itself is followed; what the look-ahead loses is the residual in it.
static void kappa_tracking(void) {
    const struct {
        int bits;
        bool residual, ahead;
        double least, most;
    } rows[] = {{4, true, false, 0.999, 1.0}, {2, true, false, 0.999, 1.0}, {4, false, false, 0.3, 0.9}, {6, false, true, 0.96, 1.0}, {4, true, true, 0.94, 1.0}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        if (OPS_SMALL && i > 0) { continue; }
        double cosine = kappa_tracking_cosine(rows[i].bits, rows[i].residual, rows[i].ahead, 0.95);
        CHECK(cosine >= rows[i].least && cosine <= rows[i].most + 1e-6, "%d bits%s%s: cosine with fp32 momentum %.4f, expected %g to %g", rows[i].bits,
              rows[i].residual ? ", residual" : "", rows[i].ahead ? ", look-ahead" : "", cosine, rows[i].least, rows[i].most);
#ifdef OPS_VERBOSE
        printf("      %d bits%s%s: cosine %.4f\n", rows[i].bits, rows[i].residual ? ", residual" : "", rows[i].ahead ? ", look-ahead" : "", cosine);
#endif
    }
}

static const TestRow kappa_tests[] = {
    {"kappa: packed codes of every pattern", kappa_patterns},
    {"kappa: rounding to nearest and stochastic", kappa_rounding},
    {"kappa: a step of every width and shape against double", kappa_widths_and_shapes},
    {"kappa: options, and the residual is the owner's", kappa_options},
    {"kappa: a step on every team size and order", kappa_emulated},
    {"kappa: codes and residual are the momentum over 10 steps", kappa_follows},
    {"kappa: zeros stay zeros", kappa_zeros},
    {"kappa: embeddings against double", kappa_embeddings},
    {"kappa: embeddings in every order", kappa_embeddings_emulated},
    {"kappa: the law of kappa for noise", kappa_law},
    {"kappa: the choice of widths", kappa_choosing},
    {"kappa: first widths", kappa_planning},
    {"kappa: no figures, no choice", kappa_choosing_nothing},
    {"kappa: spikes are scaled down", kappa_spikes},
    {"kappa: repacking in place, all pairs of widths", kappa_repacks},
    {"kappa: bytes a parameter", kappa_bytes},
    {"kappa: with its residual 4 bits follow fp32", kappa_tracking},
};
