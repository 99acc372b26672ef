// optimizers.cuh - every optimizer behind one name: which arrays a unit's state has, how much scratch its update takes, and the update.
// Optimizers of matrices leave embeddings and vectors to AdamW (Jordan et al. 2024); kappa has its own way with embeddings.
#pragma once
#include "adafactor.cuh"
#include "elementwise.cuh"
#include "kappa_repack.cuh"
#include "muon.cuh"
#include "soap.cuh"

// A run's optimizer.
typedef struct {
    OptimizerConfig config;
    Kappa kappa;                // widths in force
    const StepScalars* scalars; // on the device
} Optimizer;

// Which of them updates a unit of this role.
static inline OptimizerKind optimizer_for(const OptimizerConfig* c, Role role) {
    switch (c->kind) {
    case OPTIMIZER_MUON:
    case OPTIMIZER_NORMUON:
    case OPTIMIZER_SOAP: return role == ROLE_MATRIX ? c->kind : OPTIMIZER_ADAMW;
    case OPTIMIZER_KAPPA: return role == ROLE_VECTOR ? OPTIMIZER_ADAMW : OPTIMIZER_KAPPA;
    default: return c->kind;
    }
}

// Whether the gradient's norm and clipping take the unit in: all but kappa's matrices, whose gradients carry a residual and whose
// updates have one size whatever the gradient's; a rule of their own guards them against spikes (kappa.h).
static inline bool optimizer_clips(const OptimizerConfig* c, Role role) { return c->kind != OPTIMIZER_KAPPA || role != ROLE_MATRIX; }

// Whether an update leaves something in the gradient buffer that the next accumulation must add to.
static inline bool optimizer_carries(const OptimizerConfig* c) { return c->kind == OPTIMIZER_KAPPA; }

// The arrays of a unit's state.
UnitState optimizer_unit_state(const Optimizer* o, const TensorSpec* spec, const Unit* unit) {
    const OptimizerConfig* c = &o->config;
    OptimizerKind kind = optimizer_for(c, spec->role);
    UnitState s;
    memset(&s, 0, sizeof(s));
    switch (kind) {
    case OPTIMIZER_ADAFACTOR: adafactor_declare(&s, c, spec->role, unit->rows, unit->cols); break;
    case OPTIMIZER_MUON:
    case OPTIMIZER_NORMUON: muon_declare(&s, c, kind, unit->rows, unit->cols, spec->parts); break;
    case OPTIMIZER_SOAP: soap_declare(&s, c, unit->rows, unit->cols, spec->parts); break;
    case OPTIMIZER_KAPPA: kappa_declare(&s, c, &o->kappa, spec, unit); break;
    default: elementwise_declare(&s, c, kind, spec->role, unit->count);
    }
    return s;
}

// Scratch that the update of a unit takes.
size_t optimizer_work_bytes(const Optimizer* o, const TensorSpec* spec, const Unit* unit) {
    const OptimizerConfig* c = &o->config;
    OptimizerKind kind = optimizer_for(c, spec->role);
    switch (kind) {
    case OPTIMIZER_ADAFACTOR: return adafactor_work_bytes(unit->rows, unit->cols);
    case OPTIMIZER_MUON:
    case OPTIMIZER_NORMUON: return muon_work_bytes(unit->rows, unit->cols, spec->parts);
    case OPTIMIZER_SOAP: return soap_work_bytes(unit->rows, unit->cols, spec->parts);
    case OPTIMIZER_KAPPA: return kappa_work_bytes(c, spec, unit);
    default: return elementwise_work_bytes(c, kind, unit->count);
    }
}

// One unit's weights and state, once a step.
void optimizer_update(const Optimizer* o, const OptimizerUnit* u) {
    const OptimizerConfig* c = &o->config;
    OptimizerKind kind = optimizer_for(c, u->role);
    switch (kind) {
    case OPTIMIZER_ADAFACTOR: adafactor_update(c, u, o->scalars); break;
    case OPTIMIZER_MUON:
    case OPTIMIZER_NORMUON: muon_update(c, kind, u, o->scalars); break;
    case OPTIMIZER_SOAP: soap_update(c, u, o->scalars); break;
    case OPTIMIZER_KAPPA: kappa_update(c, &o->kappa, u, o->scalars); break;
    default: elementwise_update(c, kind, u, o->scalars);
    }
}
