// test_kappa.h - rows for Kappa: codes, one step of every width from the state that the device holds against double, what is carried from
// step to step, embeddings, the law of kappa, how well fp32 momentum is followed.
#pragma once
#include "test_emulation.h"
#include "test_kappa_unit.h"
#include "test_kappa_widths.h"

// ---- codes ----

DEVICE void kappa_test_decode_block(Team t, size_t block, float* out, const uint8_t* codes, const float* scale, int bits) {
    kappa_decode(t, out + block * KAPPA_BLOCK, codes + block * kappa_block_bytes(bits), scale[block], bits);
}

DEVICE void kappa_test_encode_block(Team t, size_t block, uint8_t* codes, float* values, const float* x, const float* scale, int bits,
                                    bool stochastic, uint32_t step) {
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

// After a step: factors, codes and buffer are right for the momentum m that must be held.
static void kappa_check_encoded(const KappaRun* r, const char* label, const double* m) {
    size_t rows = r->unit.rows, cols = r->unit.cols, n = rows * cols;
    int bits = r->kappa.width[0], far = 0;
    double *rho = reference_zeros(rows), *gamma = reference_zeros(cols), *codes = reference_zeros(n);
    double levels = (double)((1 << (bits - 1)) - 1);
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
    CHECK(sqrt(apart) <= KAPPA_BUFFER_TOLERANCE * sqrt(left_size) + 1e-6 * sqrt(size), "%s: the buffer is off by %.3g of %.3g", label,
          sqrt(apart), sqrt(left_size));
    double* all[] = {rho, gamma, codes, stored, scale, rows_got, cols_got, buffer, want};
    for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
}

// One step in double from the state and buffer that the device has, then the device's own; g: the new gradient.
static void kappa_check_step(KappaRun* r, const char* label, const double* g, int step, float factor) {
    size_t n = r->unit.count, parts = (size_t)r->unit.parts, rows = r->unit.rows / parts, cols = r->unit.cols;
    size_t moments = max_size(rows, cols);
    int bits = r->kappa.width[0];
    ReferenceKappa k = kappa_reference_of(r);
    kappa_add_gradient(r, g);
    double *m = kappa_run_momentum(r, NULL), *u = ops_download(&r->grads, label), *w = kappa_run_weights(r);
    double* v = kappa_host_floats(r->unit.state[bits == 32 ? 1 : 5], parts * moments);
    for (size_t i = 0; i < n; i++) { u[i] *= factor; }
    reference_kappa_momentum(m, u, n, &k);
    for (size_t p = 0; p < parts; p++) {
        kappa_orthogonalise(u + p * rows * cols, rows, cols);
        reference_normuon(u + p * rows * cols, v + p * moments, rows, cols, k.beta2);
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
    CHECK(kappa_relative(moved, wanted, n) <= KAPPA_DIRECTION_TOLERANCE, "%s, step %d: weights move otherwise by %.3g", label, step,
          kappa_relative(moved, wanted, n));
    CHECK(kappa_relative(v_got, v, parts * moments) <= KAPPA_DIRECTION_TOLERANCE, "%s, step %d: row moments are off by %.3g", label, step,
          kappa_relative(v_got, v, parts * moments));
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

static void kappa_steps(const OptimizerConfig* c, KappaShape shape, int bits, int steps, bool owner) {
    char label[128];
    snprintf(label, sizeof(label), "%zu x %zu, %d parts, %d bits%s%s%s%s", shape.rows, shape.cols, shape.parts, bits,
             c->kappa_residual ? "" : ", no residual",
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

// Weights after 10 steps beside a run in double that never looks at the device: with the residual, few bits walk as fp32 does.
static void kappa_walks(void) {
    ops_random.state = 26;
    const int widths[] = {2, 4, 32};
    const size_t rows = 48, cols = 20, n = rows * cols;
    for (size_t i = 0; i < COUNT_OF(widths); i++) {
        OptimizerConfig c = kappa_test_config();
        c.nesterov = false;
        const KappaShape shape = {rows, cols, 1, ROLE_MATRIX};
        KappaRun r = kappa_run_open(&c, shape, widths[i]);
        ReferenceKappa k = kappa_reference_of(&r);
        double *g = reference_zeros(n), *m = reference_zeros(n), *v = reference_zeros(rows), *w = kappa_run_weights(&r), *start = kappa_copy_of(w, n);
        for (int step = 0; step < 10; step++) {
            kappa_random_gradient(g, rows, cols, 1e-3);
            kappa_add_gradient(&r, g);
            kappa_run_update(&r, step, 1.0f);
            reference_kappa_momentum(m, g, n, &k);
            kappa_orthogonalise(g, rows, cols);
            reference_normuon(g, v, rows, cols, k.beta2);
            reference_kappa_apply(w, g, n, 0.2, k.lr, k.decay, k.cautious);
        }
        double* got = kappa_run_weights(&r);
        for (size_t j = 0; j < n; j++) {
            got[j] -= start[j];
            w[j] -= start[j];
        }
        double off = kappa_relative(got, w, n);
        CHECK(off <= KAPPA_WALK_TOLERANCE, "%d bits: after 10 steps weights are off by %.3g", widths[i], off);
#ifdef OPS_VERBOSE
        printf("      %2d bits: off by %.2e\n", widths[i], off);
#endif
        double* all[] = {g, m, v, w, start, got};
        for (size_t j = 0; j < COUNT_OF(all); j++) { free(all[j]); }
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
            for (int decays = 0; decays < 3; decays++) { // never, where it may, everywhere
                r.unit.decay = decays > 0;
                r.config.cautious_decay = decays == 1;
                kappa_run_update(&r, 0, 1.0f);
                got = kappa_run_weights(&r);
                for (size_t i = 0; i < n && decays > 0; i++) { start[i] *= 1.0 - (double)r.now.lr * (double)r.now.weight_decay; }
                double off = kappa_relative(got, start, n);
                CHECK(off <= (decays ? 1e-6 : 0.0), "weights are off by %.3g without a gradient", off);
                free(got);
            }
            r.unit.decay = false;
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
        for (int step = 0; step < (OPS_SMALL ? 6 : 10); step++) {
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
            CHECK(off < 0.03, "embedding %zu x %zu, step %d: momentum of 8 bits is off by %.3g", rows, cols, step, off);
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
static void kappa_noise_figures(double* kappa, double* excess, int bits, bool residual, bool stochastic, double mu) {
    OptimizerConfig c = kappa_test_config();
    const KappaShape shape = {64, 128, 1, ROLE_MATRIX};
    c.kappa_residual = residual;
    c.kappa_stochastic = stochastic;
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
static void kappa_law_of(int bits, bool residual, bool stochastic) {
    double mu = 0.95, kappa, excess, law = kappa_of_noise(bits, mu);
    OptimizerConfig c = kappa_test_config();
    c.kappa_stochastic = stochastic;
    kappa_noise_figures(&kappa, &excess, bits, residual, stochastic, mu);
    double says = kappa_step_excess(&c, bits, kappa);
    CHECK(fabs(kappa / law - 1.0) < 0.15, "%d bits%s%s: kappa %.3g, the law says %.3g", bits, residual ? ", residual" : "",
          stochastic ? ", stochastic" : "", kappa, law);
    CHECK(fabs(excess / says - 1.0) < 0.15, "%d bits%s%s: excess variance %.3g, the law says %.3g", bits, residual ? ", residual" : "",
          stochastic ? ", stochastic" : "", excess, says);
}

static void kappa_law(void) {
    ops_random.state = 41;
    for (size_t w = 0; w < COUNT_OF(kappa_test_bits); w++) {
        for (int i = 0; i < 4; i++) {
            int bits = kappa_test_bits[w];
            bool residual = i % 2 == 1, stochastic = i >= 2;
            // 2 bits alone: not a small error
            if ((bits == 2 && !residual) || (bits > 4 && residual) || (OPS_SMALL && (bits != 4 || stochastic))) { continue; }
            kappa_law_of(bits, residual, stochastic);
        }
    }
}

// ---- how well the momentum is followed ----

// Rank-4 signal that turns slowly, noise of the size it has in the momentum, rows and columns of unequal size.
static void kappa_tracking_gradient(double* g, size_t rows, size_t cols, int step, const double* left, const double* right) {
    kappa_random_gradient(g, rows, cols, 1e-3);
    for (int k = 0; k < 4; k++) {
        double weight = 2e-5 * sin(0.05 * step + k) * (4 - k);
        const double *l = left + (size_t)k * rows, *r = right + (size_t)k * cols;
        for (size_t i = 0; i < rows * cols; i++) { g[i] += weight * l[i / cols] * r[i % cols]; }
    }
}

// Mean cosine of the direction of `bits` with that of fp32 momentum over the last steps.
static double kappa_tracking_cosine(int bits, bool residual, bool ahead, double mu) {
    OptimizerConfig c = kappa_test_config();
    const KappaShape shape = {OPS_SMALL ? 32 : 64, 96, 1, ROLE_MATRIX};
    const int steps = OPS_SMALL ? 8 : 40, last = OPS_SMALL ? 4 : 10;
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

// Found: 1.0000, 1.0000, 0.58, 0.965, 0.954. The momentum itself is followed; what the look-ahead loses is the residual in it.
static void kappa_tracking(void) {
    const struct {
        int bits;
        bool residual, ahead;
        double least, most;
    } rows[] = {{4, true, false, 0.999, 1.0}, {2, true, false, 0.999, 1.0}, {4, false, false, 0.3, 0.9}, {6, false, true, 0.96, 1.0},
                {4, true, true, 0.94, 1.0}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        if (OPS_SMALL && i > 0) { continue; }
        double cosine = kappa_tracking_cosine(rows[i].bits, rows[i].residual, rows[i].ahead, 0.95);
        CHECK(cosine >= rows[i].least && cosine <= rows[i].most + 1e-6, "%d bits%s%s: cosine with fp32 momentum %.4f, expected %g to %g",
              rows[i].bits, rows[i].residual ? ", residual" : "", rows[i].ahead ? ", look-ahead" : "", cosine, rows[i].least, rows[i].most);
#ifdef OPS_VERBOSE
        printf("      %d bits%s%s: cosine %.4f\n", rows[i].bits, rows[i].residual ? ", residual" : "", rows[i].ahead ? ", look-ahead" : "",
               cosine);
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
    {"kappa: weights beside a run in double, over 10 steps", kappa_walks},
    {"kappa: without a gradient, decay alone; zeros stay zeros", kappa_zeros},
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
