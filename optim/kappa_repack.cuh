// kappa_repack.cuh - other widths: the states of all held units move to the places that the new widths give them, inside the one arena.
// First, in ascending order, every unit goes as far left as it can, and those that get narrower are re-encoded on the way; then, in
// descending order, every unit goes right to its new place, and those that get wider are re-encoded. A unit never stands in another's way:
// in between, each takes the lesser of its two sizes. What passes through the work space is one unit's decoded momentum.
// Factors of equilibration stay. With residual feedback the owner adds what re-encoding lost to the gradient buffer, times
// mu / (1 - mu) like any residual: the momentum stays what it was.
#pragma once
#include "kappa.cuh"

// A held unit.
typedef struct {
    OptimizerUnit unit;
    UnitState before, after; // its arrays at the old and the new widths
    size_t from, to;         // bytes of the arena at which its state begins; both ascend with the unit
    int tensor;
} KappaMove;

#define KAPPA_COPY_WORDS 16384

DEVICE void kappa_copy_chunk(Team t, size_t chunk, uint32_t* out, const uint32_t* in, size_t words) {
    size_t first = chunk * KAPPA_COPY_WORDS;
    int n = (int)min_size(KAPPA_COPY_WORDS, words - first);
    TEAM_FOR(i, n) { out[first + (size_t)i] = in[first + (size_t)i]; }
}

// bytes: a multiple of 4, as all of a state's places are; the two do not overlap
static inline void kappa_copy(char* out, const char* in, size_t bytes) {
    size_t words = bytes / sizeof(uint32_t);
    LAUNCH(ceil_div(words, KAPPA_COPY_WORDS), BLOCK_TEAM, kappa_copy_chunk, (uint32_t*)(void*)out, (const uint32_t*)(const void*)in, words);
}

// The two may overlap: piece by piece through the work space, from the end that is free.
static inline void kappa_shift(char* out, const char* in, size_t bytes, char* work, size_t room) {
    if (out == in) { return; }
    for (size_t done = 0, n; done < bytes; done += n) {
        n = min_size(room, bytes - done);
        size_t at = out < in ? done : bytes - done - n;
        kappa_copy(work, in + at, n);
        kappa_copy(out + at, work, n);
    }
}

// values (blocks, KAPPA_BLOCK): equilibrated
DEVICE void kappa_decode_chunk(Team t, size_t chunk, float* values, const uint8_t* codes, const uint16_t* scale, int bits, size_t count) {
    size_t blocks = (count + KAPPA_BLOCK - 1) / KAPPA_BLOCK, end = min_size(blocks, (chunk + 1) * KAPPA_CHUNK);
    for (size_t i = chunk * KAPPA_CHUNK; i < end; i++) {
        kappa_decode(t, values + i * KAPPA_BLOCK, codes + i * kappa_block_bytes(bits), bf16_to_float(scale[i]), bits);
    }
}

// Adds feedback times what rounding took from a block to the gradient buffer; returns this thread's sum of its squares, equilibrated.
DEVICE float kappa_reencode_residual(Team t, KappaBlock b, size_t first, int n, const KappaMomentum* m, const OptimizerUnit* u,
                                     float feedback) {
    float error = 0.0f;
    (void)t;
    for (int k = 0, run; k < n; k += run) {
        size_t row = (first + (size_t)k) / u->cols, col = (first + (size_t)k) % u->cols;
        run = (int)min_size((size_t)(n - k), u->cols - col);
        floatX* g = u->grads + first + k;
        const uint16_t* gamma = m->cols + col;
        const float *x = b.x + k, *values = b.values + k;
        float rho = feedback * bf16_to_float(m->rows[row]);
        if (feedback > 0.0f) {
            TEAM_FOR(i, run) { store(g + i, load(g + i) + (x[i] - values[i]) * (rho * bf16_to_float(gamma[i]))); }
        }
        TEAM_SUM_FOR(i, run, error) { error += (x[i] - values[i]) * (x[i] - values[i]); }
    }
    return error;
}

// values -> codes and scales of m; partial[chunk] = sum of squares of what was lost. scratch: KAPPA_ENCODE_SCRATCH
DEVICE void kappa_reencode_chunk(Team t, size_t chunk, float* partial, const float* values, KappaMomentum m, OptimizerUnit u,
                                 bool feed_back, const StepScalars* scalars) {
    size_t blocks = (u.count + KAPPA_BLOCK - 1) / KAPPA_BLOCK, end = min_size(blocks, (chunk + 1) * KAPPA_CHUNK);
    float mu = scalars->momentum, feedback = feed_back ? mu / (1.0f - mu) : 0.0f, error = 0.0f;
    KappaBlock b = kappa_block(t);
    for (size_t i = chunk * KAPPA_CHUNK; i < end; i++) {
        size_t first = i * KAPPA_BLOCK;
        int n = (int)min_size(KAPPA_BLOCK, u.count - first);
        const float* in = values + first;
        TEAM_FOR(j, n) { b.x[j] = in[j]; }
        TEAM_FOR(j, KAPPA_BLOCK - n) { b.x[n + j] = 0.0f; }
        team_sync(t);
        uint16_t scale = kappa_scale_bits(kappa_step(kappa_size(t, b.x, n), m.bits));
        KappaRounding nearest = {false, 0, 0, 0, 0};
        kappa_encode(t, m.codes + i * kappa_block_bytes(m.bits), b.values, b.x, bf16_to_float(scale), nearest, m.bits);
        if (t.rank == 0) { m.scale[i] = scale; }
        team_sync(t);
        error += kappa_reencode_residual(t, b, first, n, &m, &u, feedback);
        team_sync(t);
    }
    error = team_sum(t, error);
    if (t.rank == 0) { partial[chunk] = error; }
}

DEVICE void kappa_reencode_error(Team t, size_t task, float* error, const float* partial, int chunks, float count) {
    float sum = team_sum_of(t, partial, chunks);
    if (t.rank == 0) { error[task] += sum / count; }
}

// From one width to another. in and out may overlap.
static inline void kappa_reencode(const OptimizerConfig* c, const KappaMove* move, int from_bits, int to_bits, char* out, const char* in,
                                  const StepScalars* scalars) {
    const StateArray *old = move->before.arrays, *next = move->after.arrays;
    OptimizerUnit u = move->unit;
    size_t chunks = kappa_chunks(u.count), values = round_up(kappa_blocks(u.count) * KAPPA_BLOCK * sizeof(float), OPTIMIZER_ALIGN);
    size_t kept = move->before.bytes - old[2].at;
    char* rest = u.work + values;
    float* partial = (float*)(void*)(rest + kept);
    LAUNCH(chunks, WARP_TEAM, kappa_decode_chunk, (float*)(void*)u.work, (const uint8_t*)in + old[0].at,
           (const uint16_t*)(const void*)(in + old[1].at), from_bits, u.count);
    kappa_copy(rest, in + old[2].at, kept);
    kappa_copy(out + next[2].at, rest, kept);
    for (int i = 0; i < move->after.count; i++) { u.state[i] = out + next[i].at; }
    KappaMomentum m = kappa_momentum(&u, to_bits);
    LAUNCH_SCRATCH(chunks, WARP_TEAM, KAPPA_ENCODE_SCRATCH, kappa_reencode_chunk, partial, (const float*)(const void*)u.work, m, u,
                   c->kappa_residual && u.owner, scalars);
    if (c->kappa_residual) { LAUNCH(1, BLOCK_TEAM, kappa_reencode_error, m.error, partial, (int)chunks, (float)u.count); }
}

// Part of the work space that is sure to be there.
static inline size_t kappa_move_room(const KappaMove* moves, size_t count) {
    size_t room = 0;
    for (size_t i = 0; i < count; i++) {
        if (moves[i].unit.role == ROLE_MATRIX) { room = max_size(room, kappa_repack_bytes(&moves[i].before, moves[i].unit.count)); }
    }
    return room / OPTIMIZER_ALIGN * OPTIMIZER_ALIGN;
}

// From the widths of now to those of next. moves: one a held unit, ascending; scalars: on the device, those of the last step.
void kappa_repack(const OptimizerConfig* c, const Kappa* now, const Kappa* next, char* arena, const KappaMove* moves, size_t count,
                  const StepScalars* scalars) {
    size_t room = kappa_move_room(moves, count), at = count > 0 ? min_size(moves[0].from, moves[0].to) : 0;
    if (room == 0) { return; } // no matrix, no other place
    char* work = moves[0].unit.work;
    for (size_t i = 0; i < count; i++) {
        const KappaMove* m = &moves[i];
        bool other = m->unit.role == ROLE_MATRIX && now->width[m->tensor] != next->width[m->tensor];
        if (other && m->after.bytes <= m->before.bytes) { // of very small matrices two widths may take the same bytes
            kappa_reencode(c, m, now->width[m->tensor], next->width[m->tensor], arena + at, arena + m->from, scalars);
        } else {
            kappa_shift(arena + at, arena + m->from, m->before.bytes, work, room);
        }
        at += min_size(m->before.bytes, m->after.bytes);
    }
    for (size_t i = count; i-- > 0;) {
        const KappaMove* m = &moves[i];
        at -= min_size(m->before.bytes, m->after.bytes);
        if (m->after.bytes > m->before.bytes) {
            kappa_reencode(c, m, now->width[m->tensor], next->width[m->tensor], arena + m->to, arena + at, scalars);
        } else {
            kappa_shift(arena + m->to, arena + at, m->after.bytes, work, room);
        }
    }
}
