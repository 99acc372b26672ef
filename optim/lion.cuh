// lion.cuh - Lion (Chen et al. 2023, arXiv 2302.06675): d = sign(b1 m + (1-b1) g), m = b2 m + (1-b2) g; decoupled decay. sign(0) = 0.
#pragma once
#include "optimizer.h"

// One element: its gradient, its momentum (changed); the direction is returned.
DEVICE float lion_direction(float g, float* m, const StepScalars* s) {
    float c = s->beta1 * *m + (1.0f - s->beta1) * g;
    *m = s->beta2 * *m + (1.0f - s->beta2) * g;
    return c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : 0.0f;
}
