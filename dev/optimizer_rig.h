// optimizer_rig.h - one matrix with the state and work space of its optimizer on the device, for tests of whole updates.
#pragma once
#include "../optim/optimizer.h"
#include "op_tensor.h"

typedef struct {
    OptimizerConfig config;
    OptimizerUnit unit;
    UnitState state;
    StepScalars host, *scalars;
    char *memory, *empty; // on the device; what fresh work space holds: no numbers
    size_t bytes, work_bytes;
} OptimizerRig;

static OptimizerRig rig_new(const OptimizerConfig* config, const UnitState* state, size_t work_bytes, size_t rows, size_t cols, int parts) {
    OptimizerRig r;
    memset(&r, 0, sizeof(r));
    r.config = *config;
    r.state = *state;
    r.work_bytes = work_bytes;
    size_t n = rows * cols, place[7], at = 0;
    const size_t sizes[7] = {state->bytes,      work_bytes,          n * sizeof(floatX), n * sizeof(floatX),
                             n * sizeof(float), sizeof(StepScalars), sizeof(float)};
    for (int i = 0; i < 7; i++) {
        place[i] = at;
        at += round_up(sizes[i], OPTIMIZER_ALIGN);
    }
    r.bytes = at;
    r.memory = (char*)need(device_alloc(at));
    r.empty = (char*)need(malloc(work_bytes));
    memset(r.empty, 0xff, work_bytes);
    OptimizerUnit* u = &r.unit;
    u->rows = rows;
    u->cols = cols;
    u->count = n;
    u->parts = parts;
    u->role = ROLE_MATRIX;
    u->params = (floatX*)(void*)(r.memory + place[2]);
    u->grads = (floatX*)(void*)(r.memory + place[3]);
#ifdef FLOATX_BF16
    u->master = (float*)(void*)(r.memory + place[4]);
#endif
    r.scalars = (StepScalars*)(void*)(r.memory + place[5]);
    u->grad_scale = (float*)(void*)(r.memory + place[6]);
    u->work = r.memory + place[1];
    for (int i = 0; i < state->count; i++) { u->state[i] = r.memory + place[0] + state->arrays[i].at; }
    u->lr_scale = 1.0f;
    u->decay = u->owner = true;
    return r;
}

static void rig_free(OptimizerRig* r) {
    device_free(r->memory, r->bytes);
    free(r->empty);
}

// n values of fp32 or, if narrow, of floatX; they become what the device holds
static void rig_put(void* place, double* values, size_t n, bool narrow) {
    OpsTensor staged = ops_upload(values, n, 0, !narrow);
    size_t bytes = n * (narrow ? sizeof(floatX) : sizeof(float));
    void* host = need(malloc(bytes));
    device_download(host, narrow ? (void*)staged.x : (void*)staged.f, bytes);
    device_upload(place, host, bytes);
    device_sync();
    memcpy(values, staged.was, n * sizeof(double));
    ops_free(&staged);
    free(host);
}

static double* rig_get(const void* place, size_t n) {
    float* host = (float*)need(malloc(n * sizeof(float)));
    double* values = reference_zeros(n);
    device_download(host, place, n * sizeof(float));
    for (size_t i = 0; i < n; i++) { values[i] = host[i]; }
    free(host);
    return values;
}

static void rig_put_weights(OptimizerRig* r, double* w) {
    rig_put(r->unit.params, w, r->unit.count, true);
    if (r->unit.master) { rig_put(r->unit.master, w, r->unit.count, false); }
}

static double* rig_get_weights(const OptimizerRig* r) {
    return rig_get(r->unit.master ? (const void*)r->unit.master : (const void*)r->unit.params, r->unit.count);
}

static double* rig_get_state(const OptimizerRig* r, int array) { return rig_get(r->unit.state[array], r->state.arrays[array].count); }

// All that an update of `step` reads but weights and state. g is scaled as clipping does it: it becomes what the optimizer sees.
static void rig_set_step(OptimizerRig* r, double* g, double scale, uint32_t step) {
    float factor = (float)scale;
    rig_put(r->unit.grads, g, r->unit.count, true);
    for (size_t i = 0; i < r->unit.count; i++) { g[i] *= scale; }
    r->host.step = r->host.updates = r->unit.updates = step;
    device_upload(r->scalars, &r->host, sizeof(r->host));
    device_upload((void*)(uintptr_t)r->unit.grad_scale, &factor, sizeof(factor));
    device_upload(r->unit.work, r->empty, r->work_bytes);
    device_sync();
}
