// adagrad.cuh - Adagrad (Duchi et al. 2011, its diagonal form): G += g^2, d = g / (sqrt(G) + eps), G from zero. Decay is part of g.
#pragma once
#include "optimizer.h"

// One element: its gradient, its sum of squares (changed); the direction is returned.
DEVICE float adagrad_direction(float g, float* sum, const StepScalars* s) {
    *sum += g * g;
    return g / (sqrtf(*sum) + s->eps);
}
