// soap.cuh - SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner. For a matrix with gradient G:
//     L = lerp(L, G G^T, 1 - beta2), R = lerp(R, G^T G, 1 - beta2)       Q_L, Q_R: their eigenvectors
//     M = lerp(M, G, 1 - beta1)                                          in the space of the weights
//     V = lerp(V, (Q_L^T G Q_R)^2, 1 - beta2)                            in the rotated space
//     D = Q_L (Mhat' / (sqrt(Vhat) + eps)) Q_R^T,   M' = Q_L^T M Q_R     both corrected for their start at zero
// As in the authors' program: the first step only sets up L, R and their bases: weights (decay too) and moments stay as they are, and
// the moments' steps are counted from the next one on. L, R and the bases change after the step, so that no gradient is projected onto
// a basis that has seen it. Every `soap_every` steps each basis takes one step of power iteration, the Q of L Q_L with Q_L's vectors
// sorted by their share of L, greatest first, and V's rows and columns follow the sorting. Sides above SOAP_LARGEST are not rotated.
// Ours: the first basis of the shorter side comes from SOAP_FIRST_ROUNDS such steps from the identity (the authors' from an eigensolver),
// so that vectors whose eigenvalues differ by less than 1 part in SOAP_FIRST_ROUNDS stay mixed, and that of the longer side from it; eps
// is added to the corrected root, as in adam.cuh.
// Groups of rows (Q, K, V of qkvw) are matrices of their own. State is fp32 whatever --state-format says, and so are all products
// (orthonormal.cuh): in bf16 builds nothing but the gradient's own rounding is lost.
#pragma once
#include "apply.cuh"
#include "orthonormal.cuh"

#define SOAP_LARGEST 10000
#define SOAP_FIRST_ROUNDS 20
#define SOAP_CHUNK 2048

enum { SOAP_LEFT, SOAP_RIGHT, SOAP_SIDES };

// One matrix: a group of rows of a unit.
typedef struct {
    size_t rows, cols, side[SOAP_SIDES];
    const floatX* grads;
    float *m, *v, *direction;                      // (rows, cols)
    float *gram[SOAP_SIDES], *basis[SOAP_SIDES];   // (side, side): L and R; row j of a basis is its j-th vector. NULL: not rotated
    float *g, *x, *y;                              // work, (rows, cols)
    float *square, *energy;                        // work, (side, side) and (side) of the longer rotated side
    int* order[SOAP_SIDES];                        // work, (side)
    char* rest;
} SoapMatrix;

static inline size_t soap_longest(size_t rows, size_t cols) {
    return max_size(rows <= SOAP_LARGEST ? rows : 0, cols <= SOAP_LARGEST ? cols : 0);
}

// rows, cols: of the unit, `parts` matrices of equal size. All fp32, whatever the format asked for.
void soap_declare(UnitState* s, const OptimizerConfig* c, size_t rows, size_t cols, int parts) {
    size_t own = rows / (size_t)parts;
    (void)c;
    state_add(s, "m", ARRAY_F32, rows * cols);
    state_add(s, "v", ARRAY_F32, rows * cols);
    if (own <= SOAP_LARGEST) {
        state_add(s, "left", ARRAY_F32, (size_t)parts * own * own);
        state_add(s, "left.basis", ARRAY_F32, (size_t)parts * own * own);
    }
    if (cols <= SOAP_LARGEST) {
        state_add(s, "right", ARRAY_F32, (size_t)parts * cols * cols);
        state_add(s, "right.basis", ARRAY_F32, (size_t)parts * cols * cols);
    }
}

// Places of one matrix's work behind `work`; returns the bytes.
static inline size_t soap_layout(SoapMatrix* s, size_t rows, size_t cols, char* work) {
    size_t longest = soap_longest(rows, cols), at = 0;
    size_t counts[] = {rows * cols, rows * cols, rows * cols, longest * longest, longest};
    float** places[] = {&s->g, &s->x, &s->y, &s->square, &s->energy};
    for (size_t i = 0; i < COUNT_OF(places); i++) { *places[i] = (float*)work_take(work, &at, counts[i] * sizeof(float)); }
    for (int k = 0; k < SOAP_SIDES; k++) { s->order[k] = (int*)work_take(work, &at, longest * sizeof(int)); }
    s->rest = (char*)work_take(work, &at, qr_work_bytes(longest));
    return at;
}

size_t soap_work_bytes(size_t rows, size_t cols, int parts) {
    SoapMatrix s;
    memset(&s, 0, sizeof(s));
    return apply_work_bytes(rows * cols) + soap_layout(&s, rows / (size_t)parts, cols, NULL);
}

static inline SoapMatrix soap_matrix(const OptimizerUnit* u, int part) {
    ApplyWork w = apply_work(u);
    SoapMatrix s;
    memset(&s, 0, sizeof(s));
    s.rows = u->rows / (size_t)u->parts;
    s.cols = u->cols;
    size_t first = (size_t)part * s.rows * s.cols;
    s.grads = u->grads + first;
    s.m = (float*)(void*)u->state[0] + first;
    s.v = (float*)(void*)u->state[1] + first;
    s.direction = w.direction + first;
    soap_layout(&s, s.rows, s.cols, w.rest);
    int array = 2;
    for (int k = 0; k < SOAP_SIDES; k++) {
        s.side[k] = k == SOAP_LEFT ? s.rows : s.cols;
        if (s.side[k] > SOAP_LARGEST) { continue; }
        s.gram[k] = (float*)(void*)u->state[array++] + (size_t)part * s.side[k] * s.side[k];
        s.basis[k] = (float*)(void*)u->state[array++] + (size_t)part * s.side[k] * s.side[k];
    }
    return s;
}

// ---- bodies ----

// The scaled gradient of a chunk; from the second step on the momentum takes it in.
DEVICE void soap_gradient(Team t, size_t chunk, float* g, float* m, const floatX* grads, const float* factor, size_t count,
                          const StepScalars* scalars) {
    size_t first = chunk * SOAP_CHUNK;
    int n = (int)min_size(SOAP_CHUNK, count - first);
    float scale = *factor, beta1 = scalars->beta1;
    const floatX* in = grads + first;
    float *out = g + first, *mean = m ? m + first : NULL;
    TEAM_FOR(i, n) { out[i] = load(in + i) * scale; }
    if (!mean) { return; }
    TEAM_FOR(i, n) { mean[i] = beta1 * mean[i] + (1.0f - beta1) * out[i]; }
}

// x: the rotated momentum, becomes the rotated direction; y: the rotated gradient. Adam's moments began at the second step.
DEVICE void soap_adam(Team t, size_t chunk, float* x, const float* y, float* v, size_t count, const StepScalars* scalars) {
    size_t first = chunk * SOAP_CHUNK;
    int n = (int)min_size(SOAP_CHUNK, count - first);
    float beta2 = scalars->beta2, eps = scalars->eps, step1 = 1.0f / scalars->late1, root2 = 1.0f / sqrtf(scalars->late2);
    float *d = x + first, *square = v + first;
    const float* g = y + first;
    TEAM_FOR(i, n) {
        square[i] = beta2 * square[i] + (1.0f - beta2) * g[i] * g[i];
        d[i] = step1 * d[i] / (sqrtf(square[i]) * root2 + eps);
    }
}

// gram = lerp(gram, square, 1 - beta2)
DEVICE void soap_lerp(Team t, size_t chunk, float* gram, const float* square, size_t count, const StepScalars* scalars) {
    size_t first = chunk * SOAP_CHUNK;
    int n = (int)min_size(SOAP_CHUNK, count - first);
    float beta = scalars->beta2;
    TEAM_FOR(i, n) { gram[first + (size_t)i] = beta * gram[first + (size_t)i] + (1.0f - beta) * square[first + (size_t)i]; }
}

// energy[row] = q^T L q of vector q of the basis; image (n,n): its row is (L q)^T
DEVICE void soap_energy(Team t, size_t row, float* energy, const float* basis, const float* image, int n) {
    const float *q = basis + row * (size_t)n, *p = image + row * (size_t)n;
    float sum = 0.0f;
    TEAM_SUM_FOR(i, n, sum) { sum += q[i] * p[i]; }
    sum = team_sum(t, sum);
    if (t.rank == 0) { energy[row] = sum == sum ? sum : -INFINITY; } // whatever comes, the order is a permutation
}

// order[k] = the vector of k-th greatest energy; of equal ones the first
DEVICE void soap_rank(Team t, size_t row, int* order, const float* energy, int n) {
    float own = energy[row], before = 0.0f;
    int me = (int)row;
    TEAM_SUM_FOR(i, n, before) { before += energy[i] > own || (energy[i] == own && i < me) ? 1.0f : 0.0f; }
    before = team_sum(t, before);
    if (t.rank == 0) { order[(int)before] = me; }
}

// out[i][j] = in[rows[i]][cols[j]]; an order that is NULL leaves its side as it is
DEVICE void soap_reorder(Team t, size_t row, float* out, const float* in, const int* rows, const int* cols, int n) {
    const float* from = in + (rows ? (size_t)rows[row] : row) * (size_t)n;
    float* to = out + row * (size_t)n;
    if (cols) {
        TEAM_FOR(i, n) { to[i] = from[cols[i]]; }
    } else {
        TEAM_FOR(i, n) { to[i] = from[i]; }
    }
}

static inline void soap_copy(float* out, const float* in, size_t rows, size_t cols) {
    LAUNCH(rows, WARP_TEAM, soap_reorder, out, in, NULL, NULL, (int)cols);
}

// ---- one matrix ----

// out = Q_L^T in Q_R, or (back) Q_L in Q_R^T; middle: work. All (rows, cols), none the same as another.
static inline void soap_rotate(const SoapMatrix* s, float* out, const float* in, float* middle, bool back) {
    const float *left = s->basis[SOAP_LEFT], *right = s->basis[SOAP_RIGHT];
    if (!left && !right) { soap_copy(out, in, s->rows, s->cols); }
    if (left) { float_product_dense(back, false, s->rows, s->cols, s->rows, left, in, right ? middle : out); }
    if (right) { float_product_dense(false, !back, s->rows, s->cols, s->cols, left ? middle : in, right, out); }
}

// One step of power iteration of a basis; order[side] says where its vectors stood before.
static inline void soap_turn(const SoapMatrix* s, int side) {
    size_t n = s->side[side];
    float_product_dense(false, false, n, n, n, s->basis[side], s->gram[side], s->square);
    LAUNCH(n, WARP_TEAM, soap_energy, s->energy, s->basis[side], s->square, (int)n);
    LAUNCH(n, WARP_TEAM, soap_rank, s->order[side], s->energy, (int)n);
    LAUNCH(n, WARP_TEAM, soap_reorder, s->basis[side], s->square, s->order[side], NULL, (int)n);
    orthonormal_rows(s->square, s->basis[side], n, s->rest);
    soap_copy(s->basis[side], s->square, n, n);
}

// L and R take in the gradient.
static inline void soap_observe(const SoapMatrix* s, const StepScalars* scalars) {
    for (int k = 0; k < SOAP_SIDES; k++) {
        size_t n = s->side[k], other = s->side[1 - k];
        if (!s->basis[k]) { continue; }
        float_product_dense(k == SOAP_RIGHT, k == SOAP_LEFT, n, n, other, s->g, s->g, s->square);
        LAUNCH(ceil_div(n * n, SOAP_CHUNK), BLOCK_TEAM, soap_lerp, s->gram[k], s->square, n * n, scalars);
    }
}

// The first bases, of L ~ G G^T and R ~ G^T G: the shorter side's Q by turning the identity; G Q (or G^T Q) then holds the other side's
// vectors times their singular values, in the same order, and a basis of what is left completes them.
static inline void soap_begin(const SoapMatrix* s) {
    int side = s->rows <= s->cols ? SOAP_LEFT : SOAP_RIGHT, other = 1 - side;
    size_t n = s->side[side], longer = s->side[other];
    if (!s->basis[side]) { return; }
    identity_matrix(s->basis[side], n);
    for (int i = 0; i < SOAP_FIRST_ROUNDS; i++) { soap_turn(s, side); }
    if (!s->basis[other]) { return; }
    device_zero(s->basis[other], longer * longer * sizeof(float));
    float_product_dense(false, side == SOAP_RIGHT, n, longer, n, s->basis[side], s->g, s->basis[other]);
    orthonormal_rows(s->square, s->basis[other], longer, s->rest);
    soap_copy(s->basis[other], s->square, longer, longer);
}

// Both bases, and the second moment with them.
static inline void soap_refresh(const SoapMatrix* s) {
    const int* order[SOAP_SIDES] = {NULL, NULL};
    for (int k = 0; k < SOAP_SIDES; k++) {
        if (!s->basis[k]) { continue; }
        soap_turn(s, k);
        order[k] = s->order[k];
    }
    LAUNCH(s->rows, WARP_TEAM, soap_reorder, s->x, s->v, order[SOAP_LEFT], order[SOAP_RIGHT], (int)s->cols);
    soap_copy(s->v, s->x, s->rows, s->cols);
}

static inline void soap_step(const SoapMatrix* s, const StepScalars* scalars) {
    size_t count = s->rows * s->cols;
    soap_rotate(s, s->y, s->g, s->direction, false);
    soap_rotate(s, s->x, s->m, s->direction, false);
    LAUNCH(ceil_div(count, SOAP_CHUNK), BLOCK_TEAM, soap_adam, s->x, s->y, s->v, count, scalars);
    soap_rotate(s, s->direction, s->x, s->y, true);
}

// u: a matrix, its state zero before update 0; u->updates says which this is. Work: soap_work_bytes.
void soap_update(const OptimizerConfig* c, const OptimizerUnit* u, const StepScalars* scalars) {
    bool first = u->updates == 0, turns = c->soap_every <= 1 || u->updates % (uint32_t)c->soap_every == 0;
    for (int part = 0; part < u->parts; part++) {
        SoapMatrix s = soap_matrix(u, part);
        size_t count = s.rows * s.cols;
        LAUNCH(ceil_div(count, SOAP_CHUNK), BLOCK_TEAM, soap_gradient, s.g, first ? NULL : s.m, s.grads, u->grad_scale, count, scalars);
        if (!first) { soap_step(&s, scalars); }
        soap_observe(&s, scalars);
        if (first) {
            soap_begin(&s);
        } else if (turns) {
            soap_refresh(&s);
        }
    }
    if (!first) { update_apply(c, u, apply_work(u).direction, 1.0f, scalars); }
}
