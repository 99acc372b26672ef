// muon.cuh - Muon (Jordan et al. 2024) and NorMuon (Li et al. 2025, arXiv 2510.05491): the update of a matrix is its momentum with all
// singular values brought to 1. With M = mu M + (1 - mu) G and (Nesterov) U = mu M + (1 - mu) G, or U = M:
//     Muon      X = NS(U) with Muon's coefficients;  d = 0.2 sqrt(max(rows, cols)) X
//     NorMuon   X = NS(U) with Polar Express's, lines normalised (normuon.cuh);  d = 0.2 X
// Both have an RMS near 0.2, that of AdamW's updates, so that one learning rate serves all tensors (Liu et al. 2025, arXiv 2502.16982).
// Weight decay is decoupled. NS takes no notice of scale: the factor of the gradient matters only from one step to the next.
// Parts of a unit (Q, K and V) are matrices of their own.
#pragma once
#include "apply.cuh"
#include "codec.cuh"
#include "newton_schulz.cuh"
#include "normuon.cuh"

void muon_declare(UnitState* state, const OptimizerConfig* c, OptimizerKind kind, size_t rows, size_t cols, int parts) {
    codec_declare(state, c->format, "m", "m.scale", rows * cols);
    if (kind == OPTIMIZER_NORMUON) { state_add(state, "v", ARRAY_F32, (size_t)parts * normuon_moments(rows / (size_t)parts, cols)); }
}

size_t muon_work_bytes(size_t rows, size_t cols, int parts) {
    size_t r = rows / (size_t)parts;
    return apply_work_bytes(rows * cols) + max_size(newton_schulz_work_bytes(r, cols), normuon_work_bytes(r, cols));
}

// direction (count): U; the momentum goes on.
DEVICE void muon_momentum_chunk(Team t, size_t chunk, OptimizerUnit u, StateSlot slot, float* direction, bool nesterov,
                                const StepScalars* scalars) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, u.count - first);
    float *m = codec_open(t, slot, first, n, (float*)(void*)t.scratch), *d = direction + first;
    float mu = scalars->momentum, scale = *u.grad_scale;
    const floatX* grads = u.grads + first;
    TEAM_FOR(i, n) {
        float g = load(grads + i) * scale, moment = g + mu * (m[i] - g);
        m[i] = moment;
        d[i] = nesterov ? g + mu * (moment - g) : moment;
    }
    codec_close(t, slot, first, n, m, scalars, u.tensor, u.first + first);
}

// kind: OPTIMIZER_MUON or OPTIMIZER_NORMUON; scalars: on the device. Work: muon_work_bytes.
void muon_update(const OptimizerConfig* c, OptimizerKind kind, const OptimizerUnit* u, const StepScalars* scalars) {
    ApplyWork work = apply_work(u);
    StateFormat format = c->format;
    StateSlot slot = codec_slot(u, 0, format, true, 0);
    size_t parts = (size_t)u->parts, rows = u->rows / parts, moments = normuon_moments(rows, u->cols);
    LAUNCH_SCRATCH(apply_chunks(u->count), BLOCK_TEAM, OPTIMIZER_CHUNK * sizeof(float), muon_momentum_chunk, *u, slot, work.direction,
                   c->nesterov, scalars);
    for (size_t p = 0; p < parts; p++) {
        float* x = work.direction + p * rows * u->cols;
        newton_schulz_with(kind == OPTIMIZER_MUON ? &newton_schulz_muon : &newton_schulz_polar, x, x, rows, u->cols, work.rest);
        if (kind == OPTIMIZER_NORMUON) {
            float* v = (float*)(void*)u->state[codec_is_scaled(format) ? 2 : 1];
            normuon_normalise(x, v + p * moments, rows, u->cols, (float*)(void*)work.rest, scalars);
        }
    }
    update_apply(c, u, work.direction, kind == OPTIMIZER_MUON ? MATRIX_RMS * sqrtf((float)max_size(rows, u->cols)) : MATRIX_RMS, scalars);
}
