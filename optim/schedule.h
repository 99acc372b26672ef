// schedule.h - the learning rate at a step: linear warm-up, then cosine, linear, constant or WSD (warm-up, stable, decay: the last
// fifth falls as 1 - sqrt; Hagele et al. 2024, arXiv 2405.18392). Same shapes as llm.c's, clamped past the end.
#pragma once
#include "../kernels/base.h"

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } Schedule;

#define WSD_DECAY_SHARE 0.2

// step: 0-based; steps: the planned number of steps; final_fraction: last learning rate / peak
double schedule_lr(Schedule schedule, double peak, int64_t step, int64_t warmup, int64_t steps, double final_fraction) {
    if (step < warmup) { return peak * (double)(step + 1) / (double)warmup; }
    double span = (double)(steps - warmup), done = span > 0 ? fmin((double)(step - warmup) / span, 1.0) : 1.0;
    double final = peak * final_fraction;
    switch (schedule) {
    case SCHEDULE_COSINE: return final + 0.5 * (1.0 + cos(3.14159265358979323846 * done)) * (peak - final);
    case SCHEDULE_LINEAR: return peak - (peak - final) * done;
    case SCHEDULE_WSD: {
        double decay = (double)steps * WSD_DECAY_SHARE, left = (double)(steps - step);
        if (left >= decay) { return peak; }
        double falling = fmin(1.0, fmax(0.0, (decay - left) / decay));
        return final + (1.0 - sqrt(falling)) * (peak - final);
    }
    default: return peak;
    }
}
