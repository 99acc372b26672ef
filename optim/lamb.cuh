// lamb.cuh - LAMB (You et al. 2020, arXiv 1904.00962): m and v as Adam's, d = m / (sqrt(v) + eps) + decay w, and the step is
// lr phi(|w|) / |d|, where phi(x) = min(x, 10), and 1 where a norm is 0. Norms are of a unit.
// Published variants differ. Ours is that of the paper's version 3: moments without correction for their start at zero (versions 1 and 2,
// and NVIDIA's, correct them), decay inside d, the ratio for every tensor, without decay too (NVIDIA's leaves those out unless told).
#pragma once
#include "apply.cuh"

#define LAMB_LARGEST_NORM 10.0f

// One element: its gradient, its weight, its moments (changed); the direction is returned.
DEVICE float lamb_direction(float g, float w, float* m, float* v, float decay, const StepScalars* s) {
    *m = s->beta1 * *m + (1.0f - s->beta1) * g;
    *v = s->beta2 * *v + (1.0f - s->beta2) * g * g;
    return *m / (sqrtf(*v) + s->eps) + decay * w;
}

DEVICE void lamb_ratio(Team t, size_t task, float* figures) {
    (void)task;
    float weights = sqrtf(figures[APPLY_WEIGHT_SQUARES]), updates = sqrtf(figures[APPLY_UPDATE_SQUARES]);
    if (t.rank == 0) { figures[APPLY_RATIO] = weights > 0.0f && updates > 0.0f ? fminf(weights, LAMB_LARGEST_NORM) / updates : 1.0f; }
}
