// kappa.h - the host's side of Kappa, an optimizer whose momentum takes half a byte a parameter: which arrays a unit's state has, and how
// many bits each tensor's momentum gets.
// Whether an update survives rounding is one ratio (kappa.cuh measures it on the equilibrated momentum):
//     kappa = (1 - mu) RMS(g - m) / step          relative excess variance of the momentum = 1 / (12 kappa^2)
// Rounding to nearest adds step^2 / 12 a step where the gradient adds ((1 - mu) RMS(g - m))^2. Where what was lost comes back with the next
// gradient (residual feedback, at 4 bits and below), errors do not add up over the momentum's memory of 1 / (1 - mu^2) steps; only the
// latest is felt: in the look-ahead, and where a step is left out and its residual with it. The excess is (1 - mu^2) times as large.
// The rule, every kappa_every steps, from the figures of all units (so that it is the same on all ranks and for any number of them):
//   1. a tensor needs the cheapest width whose excess is that of kappa_target or less, 8 bits if there is none. A cheaper width than now
//      must meet the target with KAPPA_MARGIN to spare, the present one may miss it by as much: widths do not flap;
//   2. if all needs fit in the arena, they are it: no more is used than the target takes;
//   3. else of all combinations that fit, no tensor above its need, the one with the least sum of elements x excess; a new one must
//      lower the present sum by KAPPA_MARGIN squared. Ties go to fewer bytes, then to narrower first tensors.
// The arena: kappa_bytes an element of the matrices, for codes and the scales of blocks. What grows with rows + columns alone (factors of
// equilibration, NorMuon's moments) comes on top; kappa_state_bound counts all.
#pragma once
#include "codec.cuh"
#include "kappa_codec.cuh"
#include "normuon.cuh"

enum { KAPPA_V_ROW, KAPPA_V_8BIT, KAPPA_V_FP32 }; // kappa_embedding

#define KAPPA_WIDTHS 4
#define KAPPA_RESIDUAL_BITS 4   // widths up to this one feed their residual back
#define KAPPA_MARGIN 1.15       // of kappa
#define KAPPA_MAX_MATRICES 8    // tensors among which widths are chosen: 4^8 combinations
#define KAPPA_SPREAD 3.0        // greatest of 128 values over their RMS
#define KAPPA_TERNARY_SPREAD 1.224 // step at 2 bits over the RMS
// The error's mean square over step^2 / 12, rounded to nearest and stochastically; at 2 bits of a normal x, whose greatest values lie
// beyond the last code.
#define KAPPA_STOCHASTIC_EXCESS 2.0
#define KAPPA_TERNARY_EXCESS 1.52
#define KAPPA_TERNARY_STOCHASTIC_EXCESS 2.31
#define KAPPA_SPIKE_MEMORY 0.9     // of the usual RMS of a gradient

static const int kappa_width_list[KAPPA_WIDTHS] = {2, 4, 6, 8};

// Of a run. By tensor: bits, kappa as last measured, and by it the relative excess variance that the law says and that rounding had.
typedef struct {
    int width[PARAMS_MAX_TENSORS], bits[PARAMS_MAX_TENSORS]; // in force; when kappa was measured
    double kappa[PARAMS_MAX_TENSORS], predicted[PARAMS_MAX_TENSORS], measured[PARAMS_MAX_TENSORS];
    double* rms; // (units) usual RMS of the gradient, 0 = none yet
    size_t units;
    int64_t spikes;
} Kappa;

// Figures of a unit's last encode (OptimizerUnit.measured), in equilibrated units.
// sums of (g - m)^2, greatest^2 of the block, e^2, (step at 2 bits)^2
enum { KAPPA_CHANGE, KAPPA_GREATEST, KAPPA_ERROR, KAPPA_TERNARY_STEP };

static inline bool kappa_feeds_back(const OptimizerConfig* c, int bits) { return c->kappa_residual && bits <= KAPPA_RESIDUAL_BITS; }

// ---------------------------------------------------------------------------------------------------------------------------------
// State

static inline void kappa_declare_matrix(UnitState* s, int bits, int parts, const Unit* unit) {
    size_t blocks = kappa_blocks(unit->count), moments = (size_t)parts * normuon_moments(unit->rows / (size_t)parts, unit->cols);
    if (bits == 32) {
        state_add(s, "m", ARRAY_F32, unit->count);
    } else {
        state_add(s, "m.codes", ARRAY_U8, blocks * kappa_block_bytes(bits));
        state_add(s, "m.scale", ARRAY_BF16, blocks);
        state_add(s, "m.rows", ARRAY_BF16, unit->rows);
        state_add(s, "m.cols", ARRAY_BF16, unit->cols);
        state_add(s, "m.error", ARRAY_F32, 2); // mean square of the last residual, share of the look-ahead
    }
    state_add(s, "v", ARRAY_F32, moments);
}

static inline StateFormat kappa_v_format(const OptimizerConfig* c) {
    return c->kappa_embedding == KAPPA_V_8BIT ? STATE_INT8 : STATE_FP32;
}

static inline void kappa_declare_embedding(UnitState* s, const OptimizerConfig* c, const Unit* unit) {
    size_t blocks = kappa_blocks(unit->count);
    state_add(s, "m.codes", ARRAY_U8, blocks * kappa_block_bytes(8));
    state_add(s, "m.scale", ARRAY_BF16, blocks);
    if (c->kappa_embedding == KAPPA_V_ROW) {
        state_add(s, "v", ARRAY_F32, unit->rows);
    } else {
        codec_declare(s, kappa_v_format(c), "v", "v.scale", unit->count);
    }
}

static inline void kappa_declare_width(UnitState* s, const OptimizerConfig* c, int bits, const TensorSpec* spec, const Unit* unit) {
    if (spec->role == ROLE_MATRIX) { kappa_declare_matrix(s, bits, spec->parts, unit); }
    if (spec->role == ROLE_EMBEDDING) { kappa_declare_embedding(s, c, unit); }
}

// The arrays of a unit's state at the widths of k; vectors are not Kappa's.
void kappa_declare(UnitState* s, const OptimizerConfig* c, const Kappa* k, const TensorSpec* spec, const Unit* unit) {
    kappa_declare_width(s, c, k->width[unit->tensor], spec, unit);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Combinations of widths

// The tensors among which widths are chosen, and what each width costs.
typedef struct {
    int count, tensor[KAPPA_MAX_MATRICES];
    double elements[KAPPA_MAX_MATRICES];
    double arena; // bytes
} KappaMatrices;

// Bytes an element, its share of the block's scale included.
static inline double kappa_cost(int bits) { return (double)bits / 8.0 + 2.0 / KAPPA_BLOCK; }

// False if there are too many.
static inline bool kappa_matrices(KappaMatrices* m, const OptimizerConfig* c, const ParamTable* table) {
    double elements = 0.0;
    memset(m, 0, sizeof(*m));
    for (int i = 0; i < table->tensor_count; i++) {
        const TensorSpec* s = &table->tensors[i];
        if (s->role != ROLE_MATRIX) { continue; }
        if (m->count == KAPPA_MAX_MATRICES) { return false; }
        m->tensor[m->count] = i;
        m->elements[m->count] = (double)s->layers * (double)s->real_rows * (double)s->cols;
        elements += m->elements[m->count++];
    }
    m->arena = c->kappa_bytes * elements;
    return true;
}

static inline size_t kappa_combinations(const KappaMatrices* m) { return (size_t)1 << (2 * m->count); }

// Width of the i-th matrix in a combination; combinations count up from all 2 bits, the last matrix fastest.
static inline int kappa_combined(const KappaMatrices* m, size_t combination, int i) {
    return kappa_width_list[combination >> (2 * (m->count - 1 - i)) & 3];
}

static inline double kappa_combination_bytes(const KappaMatrices* m, size_t combination) {
    double bytes = 0.0;
    for (int i = 0; i < m->count; i++) { bytes += m->elements[i] * kappa_cost(kappa_combined(m, combination, i)); }
    return bytes;
}

// An arena that is 0.53 to the last digit must hold what costs 0.53.
static inline bool kappa_fits(const KappaMatrices* m, double bytes) { return bytes <= m->arena * (1.0 + 1e-9); }

// What rounding adds in a step, relative to what the gradient adds, by the law.
static inline double kappa_step_excess(const OptimizerConfig* c, int bits, double kappa) {
    double linear = c->kappa_stochastic ? KAPPA_STOCHASTIC_EXCESS : 1.0;
    double ternary = c->kappa_stochastic ? KAPPA_TERNARY_STOCHASTIC_EXCESS : KAPPA_TERNARY_EXCESS;
    return (bits == 2 ? ternary : linear) / (12.0 * kappa * kappa);
}

// Relative excess variance of the momentum.
static inline double kappa_excess(const OptimizerConfig* c, int bits, double kappa, double mu) {
    double excess = kappa_step_excess(c, bits, kappa);
    return kappa_feeds_back(c, bits) ? excess * (1.0 - mu * mu) : excess;
}

// By how much kappa is above what the width needs: the target is met from 1 on.
static inline double kappa_reserve(const OptimizerConfig* c, int bits, double kappa, double mu) {
    return sqrt(1.0 / (12.0 * kappa_excess(c, bits, kappa, mu))) / c->kappa_target;
}

// Kappa of every width for each of the matrices, and their present widths (0: none yet).
typedef struct {
    double kappa[KAPPA_MAX_MATRICES][KAPPA_WIDTHS];
    int now[KAPPA_MAX_MATRICES];
} KappaFigures;

static inline int kappa_width_index(int bits) { return bits / 2 - 1; }

// Rule 1.
static inline int kappa_need(const OptimizerConfig* c, const double* kappa, int now, double mu) {
    for (int w = 0; w < KAPPA_WIDTHS; w++) {
        int bits = kappa_width_list[w];
        double least = now == 0 || bits > now ? 1.0 : bits == now ? 1.0 / KAPPA_MARGIN : KAPPA_MARGIN;
        if (kappa_reserve(c, bits, kappa[w], mu) >= least) { return bits; }
    }
    return 8;
}

static inline double kappa_combination_excess(const OptimizerConfig* c, const KappaMatrices* m, const KappaFigures* f, size_t combination,
                                              double mu) {
    double sum = 0.0;
    for (int i = 0; i < m->count; i++) {
        int bits = kappa_combined(m, combination, i);
        sum += m->elements[i] * kappa_excess(c, bits, f->kappa[i][kappa_width_index(bits)], mu);
    }
    return sum;
}

static inline bool kappa_within(const KappaMatrices* m, size_t combination, const int* need) {
    for (int i = 0; i < m->count; i++) {
        if (kappa_combined(m, combination, i) > need[i]) { return false; }
    }
    return kappa_fits(m, kappa_combination_bytes(m, combination));
}

// Rules 2 and 3: the combination to use. All at 2 bits must fit.
static inline size_t kappa_best(const OptimizerConfig* c, const KappaMatrices* m, const KappaFigures* f, double mu) {
    int need[KAPPA_MAX_MATRICES];
    size_t wanted = 0, now = 0, best = 0;
    bool chosen = true; // widths are in force already
    for (int i = 0; i < m->count; i++) {
        need[i] = kappa_need(c, f->kappa[i], f->now[i], mu);
        wanted = wanted << 2 | (size_t)kappa_width_index(need[i]);
        chosen = chosen && f->now[i] > 0;
        now = now << 2 | (size_t)(f->now[i] > 0 ? kappa_width_index(f->now[i]) : 0);
    }
    if (kappa_fits(m, kappa_combination_bytes(m, wanted))) { return wanted; }
    double least = kappa_combination_excess(c, m, f, 0, mu);
    for (size_t i = 1; i < kappa_combinations(m); i++) {
        if (!kappa_within(m, i, need)) { continue; }
        double excess = kappa_combination_excess(c, m, f, i, mu);
        bool equal = excess == least && kappa_combination_bytes(m, i) < kappa_combination_bytes(m, best);
        if (excess < least || equal) {
            least = excess;
            best = i;
        }
    }
    bool keep = chosen && kappa_within(m, now, need) && kappa_combination_excess(c, m, f, now, mu) <= least * KAPPA_MARGIN * KAPPA_MARGIN;
    return keep ? now : best;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Plan and choice

// Kappa of a momentum that is pure noise: sigma_m = sigma_g sqrt((1 - mu) / (1 + mu)), step = spread sigma_m / levels.
static inline double kappa_of_noise(int bits, double mu) {
    return sqrt(1.0 - mu * mu) * (bits == 2 ? 1.0 / KAPPA_TERNARY_SPREAD : kappa_levels(bits) / KAPPA_SPREAD);
}

// First widths, from the law for pure noise. Allocates k->rms; ends with kappa_free.
bool kappa_plan(Kappa* k, const OptimizerConfig* c, const ParamTable* table, double mu, Error* error) {
    KappaMatrices m;
    KappaFigures f;
    memset(k, 0, sizeof(*k));
    memset(&f, 0, sizeof(f));
    k->units = table->unit_count;
    if (!kappa_matrices(&m, c, table) && c->kappa_bits == 0) {
        return fail(error, "the model has more than %d kinds of matrices: give one width for all by --kappa-bits", KAPPA_MAX_MATRICES);
    }
    if (c->kappa_bits == 0 && !kappa_fits(&m, kappa_combination_bytes(&m, 0))) {
        return fail(error, "--kappa-bytes is %g; the least is %g (2 bits and the scales of blocks): give more", c->kappa_bytes,
                    kappa_cost(2));
    }
    for (int i = 0; i < m.count; i++) {
        for (int w = 0; w < KAPPA_WIDTHS; w++) { f.kappa[i][w] = kappa_of_noise(kappa_width_list[w], mu); }
    }
    size_t best = c->kappa_bits == 0 ? kappa_best(c, &m, &f, mu) : 0;
    for (int i = 0; i < m.count && c->kappa_bits == 0; i++) { k->width[m.tensor[i]] = kappa_combined(&m, best, i); }
    for (int t = 0; t < table->tensor_count && c->kappa_bits; t++) {
        if (table->tensors[t].role == ROLE_MATRIX) { k->width[t] = c->kappa_bits; }
    }
    k->rms = (double*)need(calloc(max_size(1, k->units), sizeof(double)));
    return true;
}

void kappa_free(Kappa* k) {
    free(k->rms);
    memset(k, 0, sizeof(*k));
}

// Adds up a tensor's figures over its units. False where there was no gradient.
static inline bool kappa_sum_figures(double* sum, const ParamTable* table, int tensor, const float* measured) {
    bool good = true;
    for (int j = 0; j < OPTIMIZER_MEASURED; j++) { // one by one: gcc 12.2 at -O3 swaps sums when it makes vectors of the four
        double total = 0.0;
        for (size_t u = 0; u < table->unit_count; u++) {
            if (table->units[u].tensor == tensor) { total += (double)measured[u * OPTIMIZER_MEASURED + (size_t)j]; }
        }
        sum[j] = total;
        good = good && isfinite(total);
    }
    return good && sum[KAPPA_CHANGE] > 0.0 && sum[KAPPA_GREATEST] > 0.0 && sum[KAPPA_TERNARY_STEP] > 0.0;
}

// Kappa at a width, from the sums.
static inline double kappa_measured(const double* sum, int bits, double mu) {
    double levels = (double)kappa_levels(bits), steps = bits == 2 ? sum[KAPPA_TERNARY_STEP] : sum[KAPPA_GREATEST] / (levels * levels);
    return (1.0 - mu) * sqrt(sum[KAPPA_CHANGE] / steps);
}

// measured (unit_count, OPTIMIZER_MEASURED): of all units. next gets kappa, predicted and measured for the log, and new widths; it shares
// now's rms and takes its place. True if a width changes. A tensor without a gradient keeps its width, and so does every other.
bool kappa_choose(Kappa* next, const Kappa* now, const OptimizerConfig* c, const ParamTable* table, const float* measured, double mu) {
    KappaMatrices m;
    KappaFigures f;
    bool all = kappa_matrices(&m, c, table) && c->kappa_bits == 0;
    memset(&f, 0, sizeof(f));
    *next = *now;
    for (int i = 0; i < m.count && now->width[m.tensor[i]] <= 8; i++) {
        int t = m.tensor[i], bits = now->width[t];
        double sum[OPTIMIZER_MEASURED];
        f.now[i] = bits;
        if (!kappa_sum_figures(sum, table, t, measured)) {
            all = false;
            continue;
        }
        for (int w = 0; w < KAPPA_WIDTHS; w++) { f.kappa[i][w] = kappa_measured(sum, kappa_width_list[w], mu); }
        next->kappa[t] = f.kappa[i][kappa_width_index(bits)];
        next->bits[t] = bits;
        next->predicted[t] = kappa_step_excess(c, bits, next->kappa[t]);
        next->measured[t] = sum[KAPPA_ERROR] / ((1.0 - mu) * (1.0 - mu) * sum[KAPPA_CHANGE]);
    }
    if (!all) { return false; }
    size_t best = kappa_best(c, &m, &f, mu);
    bool changed = false;
    for (int i = 0; i < m.count; i++) {
        next->width[m.tensor[i]] = kappa_combined(&m, best, i);
        changed = changed || next->width[m.tensor[i]] != now->width[m.tensor[i]];
    }
    return changed;
}

// Most bytes of state of the held units (unit_count flags), over all combinations of widths that fit in the arena.
size_t kappa_state_bound(const OptimizerConfig* c, const ParamTable* table, const bool* held) {
    KappaMatrices m;
    size_t fixed = 0, most = 0, bytes[KAPPA_MAX_MATRICES][KAPPA_WIDTHS];
    memset(bytes, 0, sizeof(bytes));
    bool many = !kappa_matrices(&m, c, table);
    for (size_t u = 0; u < table->unit_count; u++) {
        const Unit* unit = &table->units[u];
        const TensorSpec* spec = &table->tensors[unit->tensor];
        int slot = 0;
        if (!held[u]) { continue; }
        while (slot < m.count && m.tensor[slot] != unit->tensor) { slot++; }
        for (int w = 0; w < KAPPA_WIDTHS; w++) {
            UnitState s;
            memset(&s, 0, sizeof(s));
            bool free_width = spec->role == ROLE_MATRIX && c->kappa_bits == 0;
            kappa_declare_width(&s, c, free_width ? kappa_width_list[w] : c->kappa_bits, spec, unit);
            if (free_width && slot < m.count) { bytes[slot][w] += s.bytes; }
            if (!free_width && w == 0) { fixed += s.bytes; }
        }
    }
    for (size_t i = 0; i < kappa_combinations(&m) && c->kappa_bits == 0 && !many; i++) {
        size_t sum = 0;
        if (!kappa_fits(&m, kappa_combination_bytes(&m, i))) { continue; }
        for (int j = 0; j < m.count; j++) { sum += bytes[j][kappa_width_index(kappa_combined(&m, i, j))]; }
        most = max_size(most, sum);
    }
    return fixed + most;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Spikes

// The factor of a matrix's gradient of this RMS: what brings it down to kappa_spike times its usual RMS, an exponential mean that takes
// in what is left. A matrix's gradient is not clipped by norm; one a hundred times too large would rule the momentum for 1 / (1 - mu)
// steps. Depends on reduced values alone: the same on all ranks.
double kappa_spike(Kappa* k, const OptimizerConfig* c, size_t unit, double rms) {
    assert(unit < k->units);
    if (c->kappa_spike <= 0.0 || !isfinite(rms) || rms <= 0.0) { return 1.0; }
    double usual = k->rms[unit], limit = c->kappa_spike * usual, factor = usual > 0.0 && rms > limit ? limit / rms : 1.0;
    k->spikes += factor < 1.0;
    k->rms[unit] = usual > 0.0 ? KAPPA_SPIKE_MEMORY * usual + (1.0 - KAPPA_SPIKE_MEMORY) * factor * rms : rms;
    return factor;
}
