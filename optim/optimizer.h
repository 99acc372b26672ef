// optimizer.h - the interface behind which optimizers live. An optimizer says which arrays of state a unit needs (optimizers.cuh has
// the list); the trainer owns all memory and hands out one unit at a time. Scalars of a step and the factor of each unit's gradient
// live on the device, so that an update needs nothing from the host.
// A unit is one tensor of one layer, or a block of rows of an embedding (kernels/params.h): whatever is taken "per tensor" in a paper
// (trust ratio, factored moments, update clipping) is taken per unit here, whoever owns it.
#pragma once
#include "../kernels/floatx.cuh"
#include "../kernels/params.h"
#include "../kernels/philox.h"

#define OPTIMIZER_MAX_ARRAYS 12 // of state, of one unit
#define OPTIMIZER_CHUNK 2048    // elements per team of an elementwise optimizer; a multiple of all block sizes of state formats
#define OPTIMIZER_ALIGN WORK_ALIGN // bytes: each array of state begins at a multiple
#define MATRIX_RMS 0.2f            // of an orthogonalised update, as AdamW's: one learning rate serves both (Liu et al. 2025, arXiv 2502.16982)

// In the order of the words of --optimizer.
typedef enum {
    OPTIMIZER_ADAMW, OPTIMIZER_ADAM, OPTIMIZER_SGD, OPTIMIZER_ADAGRAD, OPTIMIZER_ADAFACTOR, OPTIMIZER_LARS, OPTIMIZER_LAMB, OPTIMIZER_LION,
    OPTIMIZER_ADEMAMIX, OPTIMIZER_MUON, OPTIMIZER_NORMUON, OPTIMIZER_SOAP, OPTIMIZER_KAPPA, OPTIMIZER_KINDS
} OptimizerKind;

// How elementwise optimizers keep their state: in the order of the words of --state-format.
typedef enum { STATE_FP32, STATE_BF16, STATE_INT8, STATE_INT4, STATE_FORMATS } StateFormat;

typedef enum { ARRAY_F32, ARRAY_BF16, ARRAY_U8 } ArrayType;

// One array of a unit's state. Its name goes into checkpoints: "kappa.m.qkvw".
typedef struct {
    const char* name;
    ArrayType type;
    size_t count;
    size_t at; // byte of the unit's state at which it begins
} StateArray;

typedef struct {
    StateArray arrays[OPTIMIZER_MAX_ARRAYS];
    int count;
    size_t bytes;
} UnitState;

static inline size_t array_type_bytes(ArrayType type) { return type == ARRAY_F32 ? 4 : type == ARRAY_BF16 ? 2 : 1; }

static inline void state_add(UnitState* s, const char* name, ArrayType type, size_t count) {
    assert(s->count < OPTIMIZER_MAX_ARRAYS);
    StateArray a = {name, type, count, s->bytes};
    s->arrays[s->count++] = a;
    s->bytes = round_up(s->bytes + count * array_type_bytes(type), OPTIMIZER_ALIGN);
}

// What the user asked of the optimizer: the same on all ranks, for the whole run.
typedef struct {
    OptimizerKind kind;
    StateFormat format;      // of elementwise state
    float lr_embedding, lr_vector; // factors on the learning rate of those roles
    bool nesterov;           // sgd, muon, normuon, kappa
    bool cautious_decay;     // decay only where it and the update pull the same way (Chen et al. 2025, arXiv 2510.12402)
    float trust_low, trust_high, trust_base; // trust ratio |w| / (|update| base), kept within low..high; high = 0: none
    float update_clip;       // an update of a greater RMS is scaled down to it; 0 = never
    float trust;             // lars: the trust coefficient
    int soap_every;          // steps between new bases of SOAP
    double kappa_bytes;      // kappa: the momentum's bytes a parameter of the matrices
    double kappa_target;     // kappa: least kappa of a width (without residual)
    int kappa_every;         // steps between choices of widths
    int kappa_bits;          // 0: chosen; 2, 4, 6, 8: fixed; 32: fp32 momentum
    bool kappa_residual;     // what rounding loses at 4 bits and below stays in the gradient buffer
    bool kappa_equilibrate;  // rows and columns are scaled before rounding
    bool kappa_stochastic;   // stochastic rounding instead of to nearest
    int kappa_embedding;     // second moment of embeddings: KAPPA_V_*
    double kappa_spike;      // a matrix's gradient above so many times its usual RMS is scaled down; 0 = never
} OptimizerConfig;

// A step's numbers, one struct on the device.
typedef struct {
    float lr;                        // of this step
    float beta1, beta2, beta3, eps, weight_decay;
    float momentum;                  // sgd, lars, muon, normuon, kappa's matrices
    float correction1, correction2;  // 1 - beta^t of Adam's moments, t counted from 1
    float late1, late2;              // soap: the same of moments that begin at the second update
    float alpha;                     // ademamix: weight of the slow moment
    float decay_rate;                // adafactor: 1 - t^-0.8
    uint32_t step;                   // 0-based, keys the random rounding
    uint32_t updates;                // done before this one: steps that were left out are none
    uint64_t seed;
} StepScalars;

// One unit's memory on the device, and what bodies need to know of it; passed by value.
typedef struct {
    size_t rows, cols, count;
    int parts;             // equal groups of rows that are matrices of their own: 3 in qkvw, else 1
    Role role;
    floatX* params;
    floatX* grads;         // the summed gradient; what is left there is used only by kappa (zero.cuh: carry)
    float* master;         // fp32 weights, or NULL: params are the weights
    uint16_t* master_low;  // the lower halves of fp32 weights whose upper halves are params (bf16 builds), or NULL
    char* state[OPTIMIZER_MAX_ARRAYS]; // the arrays, in the order in which they were declared
    char* work;            // scratch of optimizer_work_bytes, shared by all units: nothing in it outlives the update
    const float* grad_scale; // factor of this unit's gradient: clipping, spikes
    float* measured;       // (OPTIMIZER_MEASURED) figures of the update for the host (kappa), or NULL
    float lr_scale;        // factor on the learning rate, by role
    bool decay;
    bool owner;            // this rank answers for the unit: a residual is left by it alone
    uint32_t tensor;       // number of the tensor in the table
    size_t first;          // element of the tensor at which the unit starts: together they key the random rounding
    uint32_t updates;      // as in StepScalars: for what the host decides by it (soap_every)
} OptimizerUnit;

#define OPTIMIZER_MEASURED 4

// ---------------------------------------------------------------------------------------------------------------------------------
// Weights: with an fp32 master the bf16 weight follows it by stochastic rounding; a split master (bf16 weight + 16 more bits) is rounded
// to nearest, so that both halves together are the fp32 number; without one the weight itself is rounded stochastically.

// Half away from zero: what the upper half lacks fits in 16 bits. A NaN stays one.
HOST_DEVICE void weight_split(float value, uint16_t* high, uint16_t* low) {
    uint32_t bits = float_bits(value);
    *high = isnan(value) ? 0x7fc0 : (uint16_t)((bits + 0x8000u) >> 16);
    *low = isnan(value) ? 0 : (uint16_t)bits;
}

HOST_DEVICE float weight_split_load(uint16_t high, uint16_t low) { return bits_float(((uint32_t)high << 16) + (uint32_t)(int32_t)(int16_t)low); }

DEVICE void weight_store(const OptimizerUnit* u, size_t i, float value, const StepScalars* s) {
#ifdef FLOATX_BF16
    if (u->master_low) {
        weight_split(value, &u->params[i].bits, u->master_low + i);
        return;
    }
    Philox random = philox_at(s->seed, RANDOM_WEIGHT_ROUNDING, s->step, u->tensor, u->first + i);
    store_stochastic(u->params + i, value, random.x[0]);
    if (u->master) { u->master[i] = value; }
#else
    (void)s;
    store(u->params + i, value);
#endif
}
