// weights.h - a chunk of weights for bodies that change them: as fp32, wherever a build keeps them (optimizer.h: an fp32 master, a split
// one, or the parameters themselves), and what one step makes of a weight.
#pragma once
#include "optimizer.h"

// A chunk's weights as fp32: in place (fp32 builds and fp32 masters), else read into scratch (n); weights_close puts them back. Both touch
// an element by the thread that has it in TEAM_FOR, so that a body that does the same needs no sync.
DEVICE float* weights_open(Team t, const OptimizerUnit* u, size_t first, int n, float* scratch) {
#ifdef FLOATX_BF16
    if (u->master) { return u->master + first; }
    const floatX* p = u->params + first;
    if (u->master_low) {
        const uint16_t* low = u->master_low + first;
        TEAM_FOR(i, n) { scratch[i] = weight_split_load(p[i].bits, low[i]); }
    } else {
        TEAM_FOR(i, n) { scratch[i] = load(p + i); }
    }
    return scratch;
#else
    (void)t, (void)n, (void)scratch;
    return (float*)(void*)u->params + first;
#endif
}

DEVICE void weights_close(Team t, const OptimizerUnit* u, size_t first, int n, const float* w, const StepScalars* s) {
#ifdef FLOATX_BF16
    OptimizerUnit to = *u; // w is the master, where there is one; tests that are settled here leave the loops
    to.master = NULL;
    if (to.master_low) {
        TEAM_FOR(i, n) { weight_store(&to, first + (size_t)i, w[i], s); }
    } else {
        TEAM_FOR(i, n) { weight_store(&to, first + (size_t)i, w[i], s); }
    }
#else
    (void)t, (void)u, (void)first, (void)n, (void)w, (void)s;
#endif
}

// A weight after a step of d; cautious: decay only where it and the step pull the same way
DEVICE float weight_step(float w, float d, float lr, float decay, bool cautious) {
    return w - lr * (d + (cautious && d * w < 0.0f ? 0.0f : decay) * w);
}

#define WEIGHTS_SCRATCH (OPTIMIZER_CHUNK * sizeof(float))
