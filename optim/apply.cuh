// apply.cuh - from a direction to new weights: w -= lr (ratio d + decay w), where ratio is 1, a clipped trust ratio, or what brings the
// RMS of the update down to a bound. Optimizers that know their direction in full before they apply it end here.
//   trust ratio (LARS, LAMB): |w| / (base |d|), kept within low..high, 1 where a norm is 0
//   update clipping (Adafactor; StableAdamW, Wortsman et al. 2023, arXiv 2304.13013): 1 / max(1, RMS(d) / bound)
//   cautious decay (Chen et al. 2025, arXiv 2510.12402): decay only where d w >= 0
#pragma once
#include "../kernels/reduce.cuh"
#include "weights.h"

// The work space of an update: figures of the unit, partial sums, then a direction of count floats; what follows is the optimizer's own.
#define APPLY_FIGURES 16
enum { APPLY_RATIO, APPLY_WEIGHT_SQUARES, APPLY_UPDATE_SQUARES, APPLY_OWN = 8 }; // from APPLY_OWN on: the optimizer's own

typedef struct {
    float* figures;   // (APPLY_FIGURES)
    float* partial;   // (2, chunks)
    float* direction; // (count)
    char* rest;
} ApplyWork;

static inline size_t apply_chunks(size_t count) { return ceil_div(count, OPTIMIZER_CHUNK); }

static inline size_t apply_work_bytes(size_t count) {
    return round_up((APPLY_FIGURES + round_up(2 * apply_chunks(count), 16) + count) * sizeof(float), OPTIMIZER_ALIGN);
}

static inline ApplyWork apply_work(const OptimizerUnit* u) {
    ApplyWork w;
    w.figures = (float*)(void*)u->work;
    w.partial = w.figures + APPLY_FIGURES;
    w.direction = w.partial + round_up(2 * apply_chunks(u->count), 16);
    w.rest = u->work + apply_work_bytes(u->count);
    return w;
}

// partial (2, chunks): sums of squares of the weights, and of the direction or (NULL) of the scaled gradient; scratch: WEIGHTS_SCRATCH
DEVICE void apply_squares_chunk(Team t, size_t chunk, float* partial, OptimizerUnit u, const float* direction) {
    size_t first = chunk * OPTIMIZER_CHUNK, chunks = (u.count + OPTIMIZER_CHUNK - 1) / OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    float weights = 0.0f, updates = 0.0f, scale = direction ? 1.0f : *u.grad_scale;
    const float* w = weights_open(t, &u, first, n, (float*)(void*)t.scratch);
    TEAM_SUM_FOR(i, n, weights) { weights += w[i] * w[i]; }
    if (direction) {
        const float* d = direction + first;
        TEAM_SUM_FOR(i, n, updates) { updates += d[i] * d[i]; }
    } else {
        const floatX* g = u.grads + first;
        TEAM_SUM_FOR(i, n, updates) {
            float x = load(g + i) * scale;
            updates += x * x;
        }
    }
    weights = team_sum(t, weights);
    updates = team_sum(t, updates);
    if (t.rank == 0) {
        partial[chunk] = weights;
        partial[chunks + chunk] = updates;
    }
}

DEVICE void apply_sum(Team t, size_t task, float* figures, const float* partial, int chunks) {
    float sum = team_sum_of(t, partial + task * (size_t)chunks, chunks);
    if (t.rank == 0) { figures[APPLY_WEIGHT_SQUARES + task] = sum; }
}

// figures[APPLY_WEIGHT_SQUARES], [APPLY_UPDATE_SQUARES] of the unit; direction as above
void apply_squares(const OptimizerUnit* u, const float* direction) {
    ApplyWork w = apply_work(u);
    size_t chunks = apply_chunks(u->count);
    LAUNCH_SCRATCH(chunks, BLOCK_TEAM, WEIGHTS_SCRATCH, apply_squares_chunk, w.partial, *u, direction);
    LAUNCH(2, BLOCK_TEAM, apply_sum, w.figures, w.partial, (int)chunks);
}

// What multiplies the direction.
typedef struct {
    float low, high, base, clip;
} ApplyRule;

DEVICE void apply_ratio(Team t, size_t task, float* figures, ApplyRule rule, float scale, size_t count) {
    (void)task;
    float weights = sqrtf(figures[APPLY_WEIGHT_SQUARES]), updates = sqrtf(figures[APPLY_UPDATE_SQUARES]) * scale, ratio = 1.0f;
    if (rule.high > 0.0f && weights > 0.0f && updates > 0.0f) {
        ratio = fminf(rule.high, fmaxf(rule.low, weights / (rule.base * updates)));
    }
    float rms = ratio * updates / sqrtf((float)count);
    if (rule.clip > 0.0f && rms > rule.clip) { ratio *= rule.clip / rms; }
    if (t.rank == 0) { figures[APPLY_RATIO] = ratio * scale; }
}

// w -= lr (ratio d + decay w). ratio: on the device, or NULL for `scale`; scratch: WEIGHTS_SCRATCH
DEVICE void apply_chunk(Team t, size_t chunk, OptimizerUnit u, const float* direction, const float* ratio, float scale, bool cautious,
                        const StepScalars* scalars) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    const StepScalars s = *scalars;
    const float* d = direction + first;
    float lr = s.lr * u.lr_scale, factor = ratio ? *ratio : scale, decay = u.decay ? s.weight_decay : 0.0f;
    float* w = weights_open(t, &u, first, n, (float*)(void*)t.scratch);
    TEAM_FOR(i, n) { w[i] = weight_step(w[i], factor * d[i], lr, decay, cautious); }
    weights_close(t, &u, first, n, w, &s);
}

// Changes the weights by the direction times *ratio (on the device), or times scale where ratio is NULL.
void apply_direction(const OptimizerUnit* u, const float* direction, const float* ratio, float scale, bool cautious,
                     const StepScalars* scalars) {
    LAUNCH_SCRATCH(apply_chunks(u->count), BLOCK_TEAM, WEIGHTS_SCRATCH, apply_chunk, *u, direction, ratio, scale, cautious, scalars);
}

static inline bool apply_has_rule(const OptimizerConfig* c) { return c->trust_high > 0.0f || c->update_clip > 0.0f; }

static inline ApplyRule apply_rule(const OptimizerConfig* c) {
    ApplyRule rule = {c->trust_low, c->trust_high, c->trust_base, c->update_clip};
    return rule;
}

// Changes the weights by scale times the direction (count floats), under the run's rules. Work: apply_work.
void update_apply(const OptimizerConfig* c, const OptimizerUnit* u, const float* direction, float scale, const StepScalars* scalars) {
    const float* ratio = NULL;
    if (apply_has_rule(c)) {
        float* figures = apply_work(u).figures;
        apply_squares(u, direction);
        LAUNCH(1, WARP_TEAM, apply_ratio, figures, apply_rule(c), scale, u->count);
        ratio = figures + APPLY_RATIO;
    }
    apply_direction(u, direction, ratio, scale, c->cautious_decay, scalars);
}
