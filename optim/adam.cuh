// adam.cuh - Adam (Kingma and Ba 2015, arXiv 1412.6980) and AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101):
// m = lerp(m, g, 1-b1), v = lerp(v, g^2, 1-b2), d = mhat / (sqrt(vhat) + eps), both moments corrected for their start at zero, eps outside
// the corrected root. They differ in the decay alone: Adam's is part of g, AdamW's is lr decay w beside the step (elementwise.cuh).
#pragma once
#include "optimizer.h"

// One element: its gradient, its moments (changed); the direction is returned.
DEVICE float adam_direction(float g, float* m, float* v, const StepScalars* s) {
    float step1 = 1.0f / s->correction1, root2 = 1.0f / sqrtf(s->correction2); // of the step: they leave the loop
    *m = s->beta1 * *m + (1.0f - s->beta1) * g;
    *v = s->beta2 * *v + (1.0f - s->beta2) * g * g;
    return step1 * *m / (sqrtf(*v) * root2 + s->eps);
}
