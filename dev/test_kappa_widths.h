// test_kappa_widths.h - rows for the widths of Kappa's momentum: the choice, first widths, spikes, repacking in place, bytes of state.
// They are listed in test_kappa.h.
#pragma once
#include "test_kappa_unit.h"

// ---- the choice of widths ----

static void kappa_test_table(ParamTable* table, size_t layers, size_t C, size_t V, size_t T) {
    const struct {
        const char* name;
        size_t layers, rows, cols;
        Role role;
        int parts;
    } rows[] = {{"wte", 1, V, C, ROLE_EMBEDDING, 1}, {"wpe", 1, T, C, ROLE_EMBEDDING, 1}, {"ln1w", layers, 1, C, ROLE_VECTOR, 1},
                {"ln1b", layers, 1, C, ROLE_VECTOR, 1}, {"qkvw", layers, 3 * C, C, ROLE_MATRIX, 3},
                    {"qkvb", layers, 1, 3 * C, ROLE_VECTOR, 1},
                {"attprojw", layers, C, C, ROLE_MATRIX, 1}, {"attprojb", layers, 1, C, ROLE_VECTOR, 1},
                    {"ln2w", layers, 1, C, ROLE_VECTOR, 1},
                {"ln2b", layers, 1, C, ROLE_VECTOR, 1}, {"fcw", layers, 4 * C, C, ROLE_MATRIX, 1},
                    {"fcb", layers, 1, 4 * C, ROLE_VECTOR, 1},
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

// The target is 2. Kappa at 6 bits is 0.244 of that at 8, at 4 bits 0.055, at 2 bits 0.0193; with mu = 0.95 a residual lowers the target at
// 4 and 2 bits by 0.312, to 0.62 (0.76 at 2 bits, whose error is greater). A change to fewer bits wants 1.15 times the target.
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
            CHECK(c->before[j] != 8 || fabs(next.measured[t] / next.predicted[t] - 1.0) < 1e-5, "%s: excess %g", c->label,
                  next.measured[t]);
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
    } rows[] = {{0.53, 0.95, true, 0, 4}, {0.53, 0.98, true, 0, 4}, {2.0, 0.95, true, 0, 4}, {2.0, 0.95, false, 0, 6},
                {2.0, 0.9, false, 0, 6},
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
    CHECK(kappa_spike(&k, &c, 0, NAN) == 1.0 && kappa_spike(&k, &c, 0, INFINITY) == 1.0 && isfinite(usual[0]),
          "what is no number is not its business");
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
                memcpy(at + j * array_type_bytes(type), type == ARRAY_F32 ? (void*)&f : type == ARRAY_BF16 ? (void*)&half : (void*)&byte,
                       array_type_bytes(type));
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
        CHECK((double)bound <= 1.03 * (double)(bytes - vectors), "the bound of %zu bytes is far above the %zu in use", bound,
              bytes - vectors);
#ifdef OPS_VERBOSE
        printf("      d%zu: %.4f bytes a parameter\n", models[i].layers, each);
#endif
        free(held);
        kappa_free(&k);
        params_free(&table);
    }
}
