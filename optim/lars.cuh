// lars.cuh - LARS (You et al. 2017, arXiv 1708.03888, algorithm 1): v = mu v + lambda (g + decay w), w -= lr v, with the local rate
// lambda = trust |w| / (|g| + decay |w|) of each unit; 1 where a norm is 0.
// Published variants differ. Ours: decay stands in the local rate's denominator, as in the paper (some leave it out); the learning rate
// multiplies v as in PyTorch's SGD (the paper has it inside v: the same while it is constant); vectors have local rate 1 and no decay.
#pragma once
#include "apply.cuh"

// One element: lambda (g + decay w), its momentum (changed); the direction is returned.
DEVICE float lars_direction(float g, float* v, const StepScalars* s) {
    *v = s->momentum * *v + g;
    return *v;
}

DEVICE void lars_ratio(Team t, size_t task, float* figures, float trust, bool decay, const StepScalars* s) {
    (void)task;
    float weights = sqrtf(figures[APPLY_WEIGHT_SQUARES]), grads = sqrtf(figures[APPLY_UPDATE_SQUARES]);
    float below = grads + (decay ? s->weight_decay : 0.0f) * weights;
    if (t.rank == 0) { figures[APPLY_RATIO] = weights > 0.0f && grads > 0.0f ? trust * weights / below : 1.0f; }
}
