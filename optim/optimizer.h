// optimizer.h - the interface behind which optimizers live. An optimizer keeps a number of fp32 slots per element, by name; the
// trainer owns the memory and hands out one unit at a time. Scalars of a step live on the device, so that an update needs nothing
// from the host. Elementwise optimizers are one team body each in a file of their own.
#pragma once
#include "../kernels/floatx.cuh"
#include "../kernels/params.h"
#include "../kernels/philox.h"

#define OPTIMIZER_MAX_SLOTS 2
#define OPTIMIZER_CHUNK 8192 // elements per team

typedef struct {
    float lr;           // of this step
    float grad_scale;   // clipping factor; gradients are multiplied by it
    float beta1, beta2, eps, weight_decay;
    float correction1, correction2; // 1 - beta^t
    uint32_t step;      // 0-based, keys the random rounding
    uint64_t seed;
} StepScalars;

typedef struct {
    const char* name;
    int slots;
    const char* slot_names[OPTIMIZER_MAX_SLOTS];
} OptimizerInfo;

// One unit's memory. master is NULL when weights themselves are fp32 or kept without masters.
typedef struct {
    floatX* params;
    const floatX* grads;
    float* master;
    float* slots[OPTIMIZER_MAX_SLOTS];
    size_t count;
    bool decay;
    uint32_t tensor; // number of the tensor in the table
    size_t first;    // element of the tensor at which the unit starts: together they key the random rounding
} OptimizerUnit;

// Writes an updated weight: with a master the weight follows it by stochastic rounding, else it is rounded itself.
DEVICE void weight_store(floatX* param, float* master, size_t i, float value, const StepScalars* s, uint32_t tensor, size_t element) {
#ifdef FLOATX_BF16
    Philox random = philox_at(s->seed, RANDOM_WEIGHT_ROUNDING, s->step, tensor, element);
    store_stochastic(param + i, value, random.x[0]);
    if (master) { master[i] = value; }
#else
    (void)master, (void)s, (void)tensor, (void)element;
    store(param + i, value);
#endif
}
