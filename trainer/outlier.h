// outlier.h - how unusual a value is among the last WINDOW ones: z = (x - mean) / deviation, NaN until the window is full (llm.c's
// outlier detector). Sums are made anew from the window each time: 128 additions do not drift.
#pragma once
#include "../kernels/base.h"

#define OUTLIER_WINDOW 128

typedef struct {
    double values[OUTLIER_WINDOW]; // a ring
    int64_t seen;
} Outlier;

// The z-score of x against the window as it was before; x then joins the window.
double outlier_add(Outlier* o, double x) {
    double z = (double)NAN;
    if (o->seen >= OUTLIER_WINDOW) {
        double sum = 0.0, square = 0.0;
        for (int i = 0; i < OUTLIER_WINDOW; i++) { sum += o->values[i]; }
        double mean = sum / OUTLIER_WINDOW;
        for (int i = 0; i < OUTLIER_WINDOW; i++) { square += (o->values[i] - mean) * (o->values[i] - mean); }
        double deviation = sqrt(square / OUTLIER_WINDOW);
        z = deviation > 0.0 ? (x - mean) / deviation : 0.0;
    }
    o->values[o->seen++ % OUTLIER_WINDOW] = x;
    return z;
}
