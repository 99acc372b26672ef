// adamw.cuh - AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): m = lerp(m, g, 1-b1), v = lerp(v, g^2, 1-b2),
// w -= lr (mhat / (sqrt(vhat) + eps) + decay w), mhat and vhat corrected for their start at zero, eps outside the corrected root.
#pragma once
#include "optimizer.h"

static const OptimizerInfo adamw_info = {"adamw", 2, {"m", "v"}};

DEVICE void adamw_chunk(Team t, size_t chunk, OptimizerUnit u, const StepScalars* scalars) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int count = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    floatX* w = u.params + first;
    float* master = u.master ? u.master + first : NULL;
    const floatX* grad = u.grads + first;
    float *m = u.slots[0] + first, *v = u.slots[1] + first;
    const StepScalars s = *scalars;
    float decay = u.decay ? s.weight_decay : 0.0f, step1 = s.lr / s.correction1, root2 = 1.0f / sqrtf(s.correction2);
    TEAM_FOR(i, count) {
        float g = load(grad + i) * s.grad_scale;
        float weight = master ? master[i] : load(w + i);
        m[i] = s.beta1 * m[i] + (1.0f - s.beta1) * g;
        v[i] = s.beta2 * v[i] + (1.0f - s.beta2) * g * g;
        float next = weight - (step1 * m[i] / (sqrtf(v[i]) * root2 + s.eps) + s.lr * decay * weight);
        weight_store(w, master, (size_t)i, next, &s, u.tensor, u.first + first + (size_t)i);
    }
}

// scalars: on the device
void adamw_update(const OptimizerUnit* unit, const StepScalars* scalars) {
    LAUNCH(ceil_div(unit->count, OPTIMIZER_CHUNK), BLOCK_TEAM, adamw_chunk, *unit, scalars);
}
