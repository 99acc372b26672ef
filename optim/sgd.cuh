// sgd.cuh - stochastic gradient descent with momentum (Polyak 1964; Sutskever et al. 2013): b = mu b + g, d = b, or with Nesterov's
// look-ahead d = g + mu b. As in PyTorch the learning rate stands outside b, and b starts at the first gradient (no dampening);
// decay is part of g.
#pragma once
#include "optimizer.h"

// One element: its gradient, its momentum (changed); the direction is returned.
DEVICE float sgd_direction(float g, float* b, bool nesterov, const StepScalars* s) {
    *b = s->momentum * *b + g;
    return nesterov ? g + s->momentum * *b : *b;
}
