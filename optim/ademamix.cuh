// ademamix.cuh - AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137): a second, slow mean of gradients beside Adam's:
// d = (m1 / (1 - b1^t) + alpha m2) / (sqrt(vhat) + eps); m2 is not corrected; alpha and b3 rise to their values over the run (trainer/update.cuh).
#pragma once
#include "optimizer.h"

// One element: its gradient, its fast and slow mean and second moment (changed); the direction is returned.
DEVICE float ademamix_direction(float g, float* fast, float* slow, float* v, const StepScalars* s) {
    float step1 = 1.0f / s->correction1, root2 = 1.0f / sqrtf(s->correction2); // of the step: they leave the loop
    *fast = s->beta1 * *fast + (1.0f - s->beta1) * g;
    *slow = s->beta3 * *slow + (1.0f - s->beta3) * g;
    *v = s->beta2 * *v + (1.0f - s->beta2) * g * g;
    return (step1 * *fast + s->alpha * *slow) / (sqrtf(*v) * root2 + s->eps);
}
