// elementwise.cuh - the optimizers whose state is a few values per element. Each is one function in a file of its own that turns an
// element's gradient into a direction (adam.cuh, sgd.cuh, ...); here are their table, the formats of their state around them, and decay:
//   coupled    Adam, SGD, Adagrad, LARS: g + decay w takes the place of g
//   decoupled  AdamW, Lion, AdEMAMix: w -= lr decay w beside the direction; the only ones for which decay may be cautious
//   inside     LAMB: d + decay w is the direction
// A chunk is read, updated and written in one loop that takes fp32 weights and fp32 state where they stand: its speed is that of memory.
// Only where a figure of the whole unit is needed first (LAMB, trust ratio, update clipping) is the direction kept and applied in a second
// pass. LARS and LAMB have ratios of their own: the run's trust ratio and update clipping do not apply to them.
#pragma once
#include "adagrad.cuh"
#include "adam.cuh"
#include "ademamix.cuh"
#include "apply.cuh"
#include "codec.cuh"
#include "lamb.cuh"
#include "lars.cuh"
#include "lion.cuh"
#include "sgd.cuh"

#define ELEMENTWISE_SLOTS 3

typedef struct {
    OptimizerKind kind;
    int slots;
    const char *names[ELEMENTWISE_SLOTS], *scales[ELEMENTWISE_SLOTS]; // of arrays, and of their scales
    bool is_signed[ELEMENTWISE_SLOTS];
    bool coupled, inside;
} ElementwiseInfo;

static const ElementwiseInfo elementwise_table[] = {
    {OPTIMIZER_ADAMW, 2, {"m", "v", NULL}, {"m.scale", "v.scale", NULL}, {true, false, false}, false, false},
    {OPTIMIZER_ADAM, 2, {"m", "v", NULL}, {"m.scale", "v.scale", NULL}, {true, false, false}, true, false},
    {OPTIMIZER_SGD, 1, {"m", NULL, NULL}, {"m.scale", NULL, NULL}, {true, false, false}, true, false},
    {OPTIMIZER_ADAGRAD, 1, {"v", NULL, NULL}, {"v.scale", NULL, NULL}, {false, false, false}, true, false},
    {OPTIMIZER_LARS, 1, {"m", NULL, NULL}, {"m.scale", NULL, NULL}, {true, false, false}, true, false},
    {OPTIMIZER_LAMB, 2, {"m", "v", NULL}, {"m.scale", "v.scale", NULL}, {true, false, false}, false, true},
    {OPTIMIZER_LION, 1, {"m", NULL, NULL}, {"m.scale", NULL, NULL}, {true, false, false}, false, false},
    {OPTIMIZER_ADEMAMIX, 3, {"m", "slow", "v"}, {"m.scale", "slow.scale", "v.scale"}, {true, true, false}, false, false},
};

// NULL for an optimizer of matrices.
static inline const ElementwiseInfo* elementwise_info(OptimizerKind kind) {
    for (size_t i = 0; i < COUNT_OF(elementwise_table); i++) {
        if (elementwise_table[i].kind == kind) { return &elementwise_table[i]; }
    }
    return NULL;
}

// Vectors are kept in fp32: nothing is gained there. All units of a tensor have one format, or they could not share a tensor of a checkpoint.
static inline StateFormat elementwise_format(const OptimizerConfig* c, Role role) {
    return role == ROLE_VECTOR ? STATE_FP32 : c->format;
}

static inline void elementwise_declare(UnitState* state, const OptimizerConfig* c, OptimizerKind kind, Role role, size_t count) {
    const ElementwiseInfo* info = elementwise_info(kind);
    StateFormat format = elementwise_format(c, role);
    for (int i = 0; i < info->slots; i++) { codec_declare(state, format, info->names[i], info->scales[i], count); }
}

// Scratch of an update: none where one pass does.
static inline size_t elementwise_work_bytes(const OptimizerConfig* c, OptimizerKind kind, size_t count) {
    return kind == OPTIMIZER_LAMB || kind == OPTIMIZER_LARS || apply_has_rule(c) ? apply_work_bytes(count) : 0;
}

// What bodies need to know; passed by value.
typedef struct {
    OptimizerKind kind;
    int slots;
    StateSlot slot[ELEMENTWISE_SLOTS];
    bool coupled, inside, nesterov, cautious;
} Elementwise;

static inline Elementwise elementwise_of(const OptimizerConfig* c, OptimizerKind kind, const OptimizerUnit* u) {
    const ElementwiseInfo* info = elementwise_info(kind);
    StateFormat format = elementwise_format(c, u->role);
    int arrays = codec_is_scaled(format) ? 2 : 1; // a slot
    Elementwise e;
    memset(&e, 0, sizeof(e));
    e.kind = kind;
    e.slots = info->slots;
    for (int i = 0; i < info->slots; i++) { e.slot[i] = codec_slot(u, arrays * i, format, info->is_signed[i], i); }
    e.coupled = info->coupled;
    e.inside = info->inside;
    e.nesterov = c->nesterov;
    e.cautious = c->cautious_decay;
    return e;
}

// What a chunk's loop works on.
typedef struct {
    float *w, *x[ELEMENTWISE_SLOTS]; // weights and state as fp32
    const floatX* g;
    float* direction; // where to leave it, or NULL to apply it
    float scale, local, coupled, apart, inside, lr; // factors of the gradient, decay by its place
    bool nesterov, cautious;
} ElementwiseChunk;

// The direction of element i. kind and slots are constants where this is called, so that each call becomes a loop of its own.
DEVICE float elementwise_direction(const ElementwiseChunk* c, int i, OptimizerKind kind, int slots, const StepScalars* s) {
    float w = c->w[i], g = c->local * (load(c->g + i) * c->scale + c->coupled * w), d;
    float x0 = c->x[0][i], x1 = slots > 1 ? c->x[1][i] : 0.0f, x2 = slots > 2 ? c->x[2][i] : 0.0f;
    switch (kind) {
    case OPTIMIZER_SGD: d = sgd_direction(g, &x0, c->nesterov, s); break;
    case OPTIMIZER_ADAGRAD: d = adagrad_direction(g, &x0, s); break;
    case OPTIMIZER_LARS: d = lars_direction(g, &x0, s); break;
    case OPTIMIZER_LAMB: d = lamb_direction(g, w, &x0, &x1, c->inside, s); break;
    case OPTIMIZER_LION: d = lion_direction(g, &x0, s); break;
    case OPTIMIZER_ADEMAMIX: d = ademamix_direction(g, &x0, &x1, &x2, s); break;
    default: d = adam_direction(g, &x0, &x1, s); break;
    }
    c->x[0][i] = x0;
    if (slots > 1) { c->x[1][i] = x1; }
    if (slots > 2) { c->x[2][i] = x2; }
    return d;
}

DEVICE void elementwise_loop(Team t, int n, const ElementwiseChunk* c, OptimizerKind kind, int slots, const StepScalars* s) {
    if (c->direction) {
        TEAM_FOR(i, n) { c->direction[i] = elementwise_direction(c, i, kind, slots, s); }
    } else {
        TEAM_FOR(i, n) {
            float d = elementwise_direction(c, i, kind, slots, s);
            c->w[i] = weight_step(c->w[i], d, c->lr, c->apart, c->cautious);
        }
    }
}

DEVICE void elementwise_loops(Team t, int n, const ElementwiseChunk* c, OptimizerKind kind, const StepScalars* s) {
    switch (kind) {
    case OPTIMIZER_SGD: elementwise_loop(t, n, c, OPTIMIZER_SGD, 1, s); break;
    case OPTIMIZER_ADAGRAD: elementwise_loop(t, n, c, OPTIMIZER_ADAGRAD, 1, s); break;
    case OPTIMIZER_LARS: elementwise_loop(t, n, c, OPTIMIZER_LARS, 1, s); break;
    case OPTIMIZER_LAMB: elementwise_loop(t, n, c, OPTIMIZER_LAMB, 2, s); break;
    case OPTIMIZER_LION: elementwise_loop(t, n, c, OPTIMIZER_LION, 1, s); break;
    case OPTIMIZER_ADEMAMIX: elementwise_loop(t, n, c, OPTIMIZER_ADEMAMIX, 3, s); break;
    default: elementwise_loop(t, n, c, OPTIMIZER_ADAM, 2, s); break; // and AdamW
    }
}

// direction: where to leave it (count floats), or NULL to apply it. factor: of the gradient, on the device (LARS), or NULL.
// coded (a constant): state is in another format than fp32. scratch: elementwise_scratch
DEVICE void elementwise_body(Team t, size_t chunk, OptimizerUnit u, const Elementwise e, float* direction, const float* factor, bool coded,
                             const StepScalars* scalars) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    const StepScalars s = *scalars;
    float *scratch = (float*)(void*)t.scratch, decay = u.decay ? s.weight_decay : 0.0f;
    ElementwiseChunk c;
    c.w = weights_open(t, &u, first, n, scratch);
    for (int k = 0; k < ELEMENTWISE_SLOTS; k++) {
        c.x[k] = k < e.slots ? (float*)(void*)e.slot[k].codes + first : NULL;
        if (coded && k < e.slots) { c.x[k] = codec_open(t, e.slot[k], first, n, scratch + (size_t)(k + 1) * OPTIMIZER_CHUNK); }
    }
    c.g = u.grads + first;
    c.direction = direction ? direction + first : NULL;
    c.scale = *u.grad_scale;
    c.local = factor ? *factor : 1.0f;
    c.coupled = e.coupled ? decay : 0.0f;
    c.inside = e.inside ? decay : 0.0f;
    c.apart = e.coupled || e.inside ? 0.0f : decay;
    c.lr = s.lr * u.lr_scale;
    c.nesterov = e.nesterov;
    c.cautious = e.cautious;
    elementwise_loops(t, n, &c, e.kind, &s);
    for (int k = 0; k < ELEMENTWISE_SLOTS; k++) {
        if (coded && k < e.slots) { codec_close(t, e.slot[k], first, n, c.x[k], &s, u.tensor, u.first + first); }
    }
    if (!direction) { weights_close(t, &u, first, n, c.w, &s); }
}

// Two kernels: the codecs take many registers, and fp32 state needs none of it.
DEVICE void elementwise_chunk(Team t, size_t chunk, OptimizerUnit u, Elementwise e, float* direction, const float* factor,
                              const StepScalars* scalars) {
    elementwise_body(t, chunk, u, e, direction, factor, false, scalars);
}

DEVICE void elementwise_coded_chunk(Team t, size_t chunk, OptimizerUnit u, Elementwise e, float* direction, const float* factor,
                                    const StepScalars* scalars) {
    elementwise_body(t, chunk, u, e, direction, factor, true, scalars);
}

// Of a chunk: weights, then the slots, as far as they are not taken where they stand.
static inline size_t elementwise_scratch(const Elementwise* e, const OptimizerUnit* u) {
    if (e->slot[0].format != STATE_FP32) { return (size_t)(1 + e->slots) * OPTIMIZER_CHUNK * sizeof(float); }
#ifdef FLOATX_BF16
    return u->master ? 0 : WEIGHTS_SCRATCH;
#else
    (void)u;
    return 0;
#endif
}

// kind: an elementwise one; scalars: on the device. Work: elementwise_work_bytes.
void elementwise_update(const OptimizerConfig* c, OptimizerKind kind, const OptimizerUnit* unit, const StepScalars* scalars) {
    OptimizerUnit u = *unit;
    float *direction = NULL, *factor = NULL;
    if (kind == OPTIMIZER_LARS) {
        u.decay = u.decay && u.role != ROLE_VECTOR;
        if (u.role != ROLE_VECTOR) {
            float* figures = apply_work(&u).figures;
            apply_squares(&u, NULL);
            LAUNCH(1, WARP_TEAM, lars_ratio, figures, c->trust, u.decay, scalars);
            factor = figures + APPLY_RATIO;
        }
    } else if (kind == OPTIMIZER_LAMB || apply_has_rule(c)) {
        direction = apply_work(&u).direction;
    }
    Elementwise e = elementwise_of(c, kind, &u);
    size_t scratch = elementwise_scratch(&e, &u);
    if (e.slot[0].format == STATE_FP32) {
        LAUNCH_SCRATCH(apply_chunks(u.count), BLOCK_TEAM, scratch, elementwise_chunk, u, e, direction, factor, scalars);
    } else {
        LAUNCH_SCRATCH(apply_chunks(u.count), BLOCK_TEAM, scratch, elementwise_coded_chunk, u, e, direction, factor, scalars);
    }
    if (!direction) { return; }
    if (e.coupled || e.inside) { u.decay = false; }
    if (kind == OPTIMIZER_LAMB) {
        float* figures = apply_work(&u).figures;
        apply_squares(&u, direction);
        LAUNCH(1, WARP_TEAM, lamb_ratio, figures);
        apply_direction(&u, direction, figures + APPLY_RATIO, 1.0f, false, scalars);
    } else {
        update_apply(c, &u, direction, 1.0f, scalars);
    }
}
