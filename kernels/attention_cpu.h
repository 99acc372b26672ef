// attention_cpu.h - causal attention on the CPU. Tiled with an online softmax (Dao et al. 2022, arXiv 2205.14135): memory O(T),
// tiles above the diagonal are skipped, the diagonal tile computes little more than its lower half. fp32 arithmetic.
//
// All scores are kept transposed, S^T[key][query] = K (scale Q)^T, so that the softmax runs along vector lanes (a lane is a query)
// and only the tiles of Q and dO need transposing. The seven products of forward and backward all have the form of
// attention_product: rows of scalars, broadcast, times rows of vectors, summed in registers.
// Work is cut by shape alone and every output value has one writer: results do not depend on the number of threads.
#pragma once
#include "floatx.cuh"
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512F__)
#define ATTENTION_LANES 16
#define ATTENTION_VECTORS 4 // 4 rows x 4 vectors of sums stay in registers
#elif defined(__AVX__)
#define ATTENTION_LANES 8
#define ATTENTION_VECTORS 2
#else
#define ATTENTION_LANES 4
#define ATTENTION_VECTORS 2
#endif
#define ATTENTION_ROWS 4   // rows of a register block
#define ATTENTION_PAD 16   // rows of a tile are padded with zeros to a multiple of this
#define ATTENTION_TILE 64  // queries, and keys, of a tile
#define ATTENTION_LOWEST -80.0f // weights below exp(this) are zero: they vanish beside the sum, which is at least 1

// Without it gcc loads a vector again for each of its four uses, and loads, not sums, set the speed.
#ifdef __x86_64__
#define ATTENTION_IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define ATTENTION_IN_REGISTER(x)
#endif

typedef float AttentionVector __attribute__((vector_size(4 * ATTENTION_LANES), aligned(4), may_alias));

// width: HS padded. q, k, v of token t are at qkv + t * 3C, + C, + 2C of a head's base.
typedef struct {
    int T, C, NH, HS, width, tiles;
    float scale;
} AttentionShape;

static AttentionShape attention_shape(int T, int C, int NH) {
    int HS = C / NH;
    int width = (int)round_up((size_t)HS, ATTENTION_PAD), tiles = (int)ceil_div((size_t)T, ATTENTION_TILE);
    AttentionShape s = {T, C, NH, HS, width, tiles, 1.0f / sqrtf((float)HS)};
    return s;
}

static inline int attention_tile_rows(const AttentionShape* s, int tile) {
    int left = s->T - tile * ATTENTION_TILE;
    return left < ATTENTION_TILE ? left : ATTENTION_TILE;
}

// c[r][x] (+)= sum over k in [begin, end) of a[r * a_row + k * a_k] * b[k * b_k + x], r < 4, x < vectors * lanes
static inline __attribute__((always_inline)) void attention_block(const int vectors, float* c, size_t c_row, const float* a, size_t a_row,
                                                                  size_t a_k, const float* b, size_t b_k, int begin, int end, bool add) {
    AttentionVector sum[ATTENTION_ROWS][ATTENTION_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < ATTENTION_ROWS; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) { sum[r][v] = (AttentionVector){0}; }
    }
    for (int k = begin; k < end; k++) {
        const float *scalar = a + (size_t)k * a_k, *row = b + (size_t)k * b_k;
        AttentionVector y[ATTENTION_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            y[v] = ((const AttentionVector*)row)[v];
            ATTENTION_IN_REGISTER(y[v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ATTENTION_ROWS; r++) {
            float x = scalar[(size_t)r * a_row];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) { sum[r][v] += x * y[v]; }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ATTENTION_ROWS; r++) {
        AttentionVector* out = (AttentionVector*)(c + (size_t)r * c_row);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            if (add) { sum[r][v] += out[v]; }
            out[v] = sum[r][v];
        }
    }
}

// The same for columns [x_begin, x_end), multiples of the lane count, in blocks as even as possible.
static __attribute__((noinline)) void attention_product(float* c, size_t c_row, const float* a, size_t a_row, size_t a_k, const float* b,
                                                        size_t b_k, int x_begin, int x_end, int begin, int end, bool add) {
    int vectors = (x_end - x_begin) / ATTENTION_LANES, blocks = (vectors + ATTENTION_VECTORS - 1) / ATTENTION_VECTORS, x = x_begin;
    for (; blocks > 0; blocks--) {
        int count = (vectors + blocks - 1) / blocks;
        switch (count) {
        case 1: attention_block(1, c + x, c_row, a, a_row, a_k, b + x, b_k, begin, end, add); break;
        case 2: attention_block(2, c + x, c_row, a, a_row, a_k, b + x, b_k, begin, end, add); break;
#if ATTENTION_VECTORS == 4
        case 3: attention_block(3, c + x, c_row, a, a_row, a_k, b + x, b_k, begin, end, add); break;
        default: attention_block(4, c + x, c_row, a, a_row, a_k, b + x, b_k, begin, end, add); break;
#endif
        }
        x += count * ATTENTION_LANES;
        vectors -= count;
    }
}

// tile (rows padded to ATTENTION_PAD, width) = factor * x[row * stride + 0..HS), zeros elsewhere
static void attention_load_tile(float* tile, const floatX* x, size_t stride, int rows, const AttentionShape* s, float factor) {
    const Team t = {0, 1, NULL};
    (void)t;
    for (int r = 0; r < rows; r++) {
        float* to = tile + (size_t)r * s->width;
        const floatX* from = x + (size_t)r * stride;
        TEAM_FOR(d, s->HS) { to[d] = factor * load(from + d); }
        for (int d = s->HS; d < s->width; d++) { to[d] = 0.0f; }
    }
    size_t padded = round_up((size_t)rows, ATTENTION_PAD);
    memset(tile + (size_t)rows * s->width, 0, (padded - (size_t)rows) * (size_t)s->width * sizeof(float));
}

// to (width, ATTENTION_TILE) = the transpose of tile (rows, width), in blocks of 16 x 16. Interleaving the four quarters of a block
// rotates its 8-bit index by two bits; twice swaps row and column. Compilers turn it into vector permutes.
static void attention_transpose(float* to, const float* tile, int rows, const AttentionShape* s) {
    float x[256], y[256];
    for (int r0 = 0; r0 < rows; r0 += 16) {
        for (int d0 = 0; d0 < s->width; d0 += 16) {
            for (int r = 0; r < 16; r++) { memcpy(x + 16 * r, tile + (size_t)(r0 + r) * s->width + d0, 16 * sizeof(float)); }
            for (int k = 0; k < 64; k++) {
                y[4 * k] = x[k];
                y[4 * k + 1] = x[k + 64];
                y[4 * k + 2] = x[k + 128];
                y[4 * k + 3] = x[k + 192];
            }
            for (int k = 0; k < 64; k++) {
                x[4 * k] = y[k];
                x[4 * k + 1] = y[k + 64];
                x[4 * k + 2] = y[k + 128];
                x[4 * k + 3] = y[k + 192];
            }
            for (int d = 0; d < 16; d++) { memcpy(to + (size_t)(d0 + d) * ATTENTION_TILE + r0, x + 16 * d, 16 * sizeof(float)); }
        }
    }
}

// scores (keys padded to 4, ATTENTION_TILE): S^T = rows_tile (keys, width) x transposed (width, ATTENTION_TILE), where key <= query
static void attention_scores(float* scores, const float* rows_tile, const float* transposed, int keys, int columns, bool diagonal,
                             const AttentionShape* s) {
    for (int j = 0; j < keys; j += ATTENTION_ROWS) {
        int from = diagonal ? j / ATTENTION_LANES * ATTENTION_LANES : 0;
        attention_product(scores + (size_t)j * ATTENTION_TILE, ATTENTION_TILE, rows_tile + (size_t)j * s->width, (size_t)s->width, 1,
                          transposed, ATTENTION_TILE, from, columns, 0, s->HS, false);
    }
}

// exp(x) within 1e-7 for -80 <= x < 88; NaN stays NaN. Inlined into the loops, where a vector function would have to be
// called: x = n ln 2 + r, adding 1.5 * 2^23 leaves n in the lower bits, and the polynomial is the minimax one (Remez) on |r| <= ln 2 / 2.
static inline float attention_exp(float x) {
    const float shift = 12582912.0f, shifted = x * 1.44269504f + shift, n = shifted - shift;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; // ln 2 in two parts; n times the first is exact
    float p = 0.00138145986f;
    p = p * r + 0.00836871688f;
    p = p * r + 0.0416683880f;
    p = p * r + 0.166665206f;
    p = p * r + 0.499999934f;
    p = (p * r + 1.0f) * r + 1.0f;
    return p * bits_float((float_bits(shifted) << 23) + 0x3f800000u); // times 2^n: a product, which keeps a NaN whatever its bits
}

// The weight exp(exponent); zero where it is negligible, and for queries before the key.
static inline float attention_weight(float exponent, bool before) {
    float p = attention_exp(exponent < ATTENTION_LOWEST ? ATTENTION_LOWEST : exponent);
    return before || exponent < ATTENTION_LOWEST ? 0.0f : p;
}

// One tile of keys: scores become weights, high and sum (per query) are updated, factor is what earlier sums are to be scaled by.
static void attention_softmax(float* scores, float* high, float* sum, float* factor, int keys, int columns, bool diagonal) {
    const Team t = {0, 1, NULL};
    (void)t;
    float old[ATTENTION_TILE];
    memcpy(old, high, sizeof(old));
    for (int j = 0; j < keys; j++) {
        const float* row = scores + (size_t)j * ATTENTION_TILE;
        int first = diagonal ? j : 0;
        for (int i = first / ATTENTION_LANES * ATTENTION_LANES; i < columns; i++) {
            float x = i < first ? -INFINITY : row[i];
            high[i] = x > high[i] ? x : high[i];
        }
    }
    TEAM_FOR(c, columns) {
        factor[c] = attention_weight(old[c] - high[c], false);
        sum[c] *= factor[c];
    }
    for (int j = 0; j < keys; j++) {
        float* row = scores + (size_t)j * ATTENTION_TILE;
        int first = diagonal ? j : 0, from = first / ATTENTION_LANES * ATTENTION_LANES;
        TEAM_FOR(c, columns - from) {
            float p = attention_weight(row[from + c] - high[from + c], from + c < first);
            row[from + c] = p;
            sum[from + c] += p;
        }
    }
}

// A task takes this many query tiles, so that a tile of K and V is fetched once for all of them.
#define ATTENTION_GROUP 4

// The state of one query tile while it passes over the keys; arrays of ATTENTION_TILE queries.
typedef struct {
    float *q_transposed, *sums, *high, *sum; // (width, TILE), (TILE, width), (TILE), (TILE)
} AttentionQueries;

static size_t attention_forward_floats(const AttentionShape* s) {
    const size_t area = ATTENTION_TILE * (size_t)s->width;
    return 2 * area + ATTENTION_TILE * (ATTENTION_TILE + 1) + ATTENTION_GROUP * (2 * area + 2 * ATTENTION_TILE);
}

// One tile of queries against one tile of keys, with v (keys, width). first: no earlier key tile.
static void attention_forward_pair(const AttentionQueries* a, float* scores, float* factor, const float* k, const float* v, int rows,
                                   int keys, bool first, bool diagonal, const AttentionShape* s) {
    const size_t W = (size_t)s->width;
    int columns = (int)round_up((size_t)rows, ATTENTION_LANES);
    attention_scores(scores, k, a->q_transposed, keys, columns, diagonal, s);
    attention_softmax(scores, a->high, a->sum, factor, keys, columns, diagonal);
    for (int i = 0; i < rows; i += ATTENTION_ROWS) {
        float* sums = a->sums + (size_t)i * W;
        for (int r = 0; r < ATTENTION_ROWS && !first; r++) {
            for (size_t d = 0; d < W; d++) { sums[(size_t)r * W + d] *= factor[i + r]; }
        }
        int end = diagonal && i + ATTENTION_ROWS < keys ? i + ATTENTION_ROWS : keys;
        attention_product(sums, W, scores + i, 1, ATTENTION_TILE, v, W, 0, s->width, 0, end, !first);
    }
}

static void attention_store_output(floatX* out, float* lse, const AttentionQueries* a, int rows, const AttentionShape* s) {
    for (int i = 0; i < rows; i++) {
        floatX* o = out + (size_t)i * (size_t)s->C;
        const float* sums = a->sums + (size_t)i * (size_t)s->width;
        float inverse = 1.0f / a->sum[i];
        for (int d = 0; d < s->HS; d++) { store(o + d, sums[d] * inverse); }
        lse[i] = a->high[i] + logf(a->sum[i]);
    }
}

// Query tiles [begin, end) of one head, at most ATTENTION_GROUP. head: q of the head's first token; out likewise; lse (T)
static void attention_forward_group(floatX* out, float* lse, const floatX* head, int begin, int end, const AttentionShape* s,
                                    float* scratch) {
    const size_t C = (size_t)s->C, area = ATTENTION_TILE * (size_t)s->width, rows_before = (size_t)begin * ATTENTION_TILE;
    float *k = scratch, *v = k + area, *scores = v + area, *factor = scores + ATTENTION_TILE * ATTENTION_TILE;
    AttentionQueries group[ATTENTION_GROUP];
    for (int g = 0; g < end - begin; g++) {
        float* memory = factor + ATTENTION_TILE + (size_t)g * (2 * area + 2 * ATTENTION_TILE);
        AttentionQueries a = {memory, memory + area, memory + 2 * area, memory + 2 * area + ATTENTION_TILE};
        int rows = attention_tile_rows(s, begin + g);
        attention_load_tile(a.sums, head + (rows_before + (size_t)g * ATTENTION_TILE) * 3 * C, 3 * C, rows, s, s->scale);
        attention_transpose(a.q_transposed, a.sums, rows, s);
        for (int i = 0; i < ATTENTION_TILE; i++) {
            a.high[i] = -INFINITY;
            a.sum[i] = 0.0f;
        }
        group[g] = a;
    }
    for (int other = 0; other < end; other++) {
        int keys = attention_tile_rows(s, other);
        const floatX* base = head + (size_t)other * ATTENTION_TILE * 3 * C;
        attention_load_tile(k, base + C, 3 * C, keys, s, 1.0f);
        attention_load_tile(v, base + 2 * C, 3 * C, keys, s, 1.0f);
        for (int g = other > begin ? other - begin : 0; g < end - begin; g++) {
            int rows = attention_tile_rows(s, begin + g);
            attention_forward_pair(group + g, scores, factor, k, v, rows, keys, other == 0, other == begin + g, s);
        }
    }
    for (int g = 0; g < end - begin; g++) {
        size_t row = rows_before + (size_t)g * ATTENTION_TILE;
        attention_store_output(out + row * C, lse + row, group + g, attention_tile_rows(s, begin + g), s);
    }
}

// out (B,T,C); lse (B,NH,T): log of the sum of exp of the scaled scores; qkv (B,T,3C): q, k, v, head h at h * HS of each
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH) {
    const AttentionShape s = attention_shape(T, C, NH);
    const size_t heads = (size_t)B * (size_t)NH, groups = ceil_div((size_t)s.tiles, ATTENTION_GROUP), count = heads * groups;
#pragma omp parallel if (count > 1)
    {
        float* scratch = (float*)team_arena(attention_forward_floats(&s) * sizeof(float));
#pragma omp for schedule(dynamic)
        for (size_t task = 0; task < count; task++) {
            size_t index = task % heads, row = index / (size_t)NH * (size_t)T * (size_t)C, at = index % (size_t)NH * (size_t)s.HS;
            size_t begin = (groups - 1 - task / heads) * ATTENTION_GROUP; // the longest first
            int end = (int)min_size(begin + ATTENTION_GROUP, (size_t)s.tiles);
            attention_forward_group(out + row + at, lse + index * (size_t)T, qkv + 3 * row + at, (int)begin, end, &s, scratch);
        }
    }
}

// What one head's backward reads and writes; pointers at the head's first token.
typedef struct {
    floatX* dqkv;
    const floatX *dout, *out, *qkv;
    const float* lse;
} AttentionHead;

// Tiles of one thread: q (scaled), dout and their transposes, of the current query tile; k, v, dk, dv of all key tiles of the task.
typedef struct {
    float *q, *dout, *q_transposed, *dout_transposed, *dq, *weights, *dweights, *lse, *delta, *k, *v, *dk, *dv;
} AttentionTiles;

static size_t attention_backward_floats(const AttentionShape* s, int key_tiles) {
    return ATTENTION_TILE * ((5 + 4 * (size_t)key_tiles) * (size_t)s->width + 2 * ATTENTION_TILE + 2);
}

static AttentionTiles attention_tiles(float* scratch, const AttentionShape* s, int key_tiles) {
    const size_t area = ATTENTION_TILE * (size_t)s->width, square = ATTENTION_TILE * ATTENTION_TILE;
    const size_t range = (size_t)key_tiles * area;
    float *q = scratch, *weights = q + 5 * area, *lse = weights + 2 * square, *k = lse + 2 * ATTENTION_TILE;
    AttentionTiles a = {q, q + area, q + 2 * area, q + 3 * area, q + 4 * area, weights, weights + square, lse, lse + ATTENTION_TILE,
                        k, k + range, k + 2 * range, k + 3 * range};
    return a;
}

// The query side of one tile: q and dout in both orientations, lse, and delta = sum over d of dout * out.
static void attention_load_queries(const AttentionTiles* a, const AttentionHead* head, int tile, int rows, const AttentionShape* s) {
    size_t first = (size_t)tile * ATTENTION_TILE, C = (size_t)s->C;
    attention_load_tile(a->q, head->qkv + first * 3 * C, 3 * C, rows, s, s->scale);
    attention_load_tile(a->dout, head->dout + first * C, C, rows, s, 1.0f);
    attention_transpose(a->q_transposed, a->q, rows, s);
    attention_transpose(a->dout_transposed, a->dout, rows, s);
    for (int i = 0; i < ATTENTION_TILE; i++) {
        float sum = 0.0f;
        if (i < rows) {
            const floatX* o = head->out + (first + (size_t)i) * C;
            const float* g = a->dout + (size_t)i * s->width;
            TEAM_SUM_FOR(d, s->HS, sum) { sum += g[d] * load(o + d); }
        }
        a->delta[i] = sum;
        a->lse[i] = i < rows ? head->lse[first + (size_t)i] : 0.0f;
    }
}

// P = exp(S - lse) and dS = P * (dP - delta), in place, both (keys, queries)
static void attention_weights_backward(const AttentionTiles* a, int keys, int columns, bool diagonal) {
    const Team t = {0, 1, NULL};
    (void)t;
    for (int j = 0; j < keys; j++) {
        int first = diagonal ? j : 0, from = first / ATTENTION_LANES * ATTENTION_LANES;
        float *w = a->weights + (size_t)j * ATTENTION_TILE + from, *dw = a->dweights + (size_t)j * ATTENTION_TILE + from;
        const float *lse = a->lse + from, *delta = a->delta + from;
        TEAM_FOR(c, columns - from) {
            float p = attention_weight(w[c] - lse[c], from + c < first), g = p * (dw[c] - delta[c]);
            w[c] = p;
            dw[c] = from + c < first ? 0.0f : g;
        }
    }
}

// One pair of tiles, `at` is where the key tile lies in k, v, dk, dv: adds to dq, dk and dv as wanted.
static void attention_backward_pair(const AttentionTiles* a, size_t at, int keys, int rows, bool diagonal, bool want_dq, bool want_dkv,
                                    const AttentionShape* s) {
    const size_t W = (size_t)s->width;
    int columns = (int)round_up((size_t)rows, ATTENTION_LANES);
    attention_scores(a->weights, a->k + at, a->q_transposed, keys, columns, diagonal, s);
    attention_scores(a->dweights, a->v + at, a->dout_transposed, keys, columns, diagonal, s);
    attention_weights_backward(a, keys, columns, diagonal);
    for (int j = 0; j < keys && want_dkv; j += ATTENTION_ROWS) {
        const float *w = a->weights + (size_t)j * ATTENTION_TILE, *dw = a->dweights + (size_t)j * ATTENTION_TILE;
        size_t row = at + (size_t)j * W;
        int begin = diagonal ? j : 0;
        attention_product(a->dv + row, W, w, ATTENTION_TILE, 1, a->dout, W, 0, s->width, begin, rows, true);
        attention_product(a->dk + row, W, dw, ATTENTION_TILE, 1, a->q, W, 0, s->width, begin, rows, true);
    }
    for (int i = 0; i < rows && want_dq; i += ATTENTION_ROWS) {
        int end = diagonal && i + ATTENTION_ROWS < keys ? i + ATTENTION_ROWS : keys;
        attention_product(a->dq + (size_t)i * W, W, a->dweights + i, 1, ATTENTION_TILE, a->k + at, W, 0, s->width, 0, end, true);
    }
}

static void attention_store_tile(floatX* to, const float* tile, int rows, float factor, const AttentionShape* s) {
    for (int r = 0; r < rows; r++) {
        floatX* out = to + (size_t)r * 3 * (size_t)s->C;
        for (int d = 0; d < s->HS; d++) { store(out + d, factor * tile[(size_t)r * s->width + d]); }
    }
}

// Query tiles [q_begin, q_end) against key tiles [k_begin, k_end): writes dq of the former if want_dq (then all of their keys must
// be in the range), dk and dv of the latter if want_dkv (likewise).
static void attention_backward_tiles(const AttentionHead* head, int q_begin, int q_end, int k_begin, int k_end, bool want_dq,
                                     bool want_dkv, const AttentionShape* s, float* scratch) {
    const size_t area = ATTENTION_TILE * (size_t)s->width, C = (size_t)s->C, range = (size_t)(k_end - k_begin) * area;
    const AttentionTiles a = attention_tiles(scratch, s, k_end - k_begin);
    for (int other = k_begin; other < k_end; other++) {
        const floatX* base = head->qkv + (size_t)other * ATTENTION_TILE * 3 * C;
        size_t at = (size_t)(other - k_begin) * area;
        attention_load_tile(a.k + at, base + C, 3 * C, attention_tile_rows(s, other), s, 1.0f);
        attention_load_tile(a.v + at, base + 2 * C, 3 * C, attention_tile_rows(s, other), s, 1.0f);
    }
    memset(a.dk, 0, (want_dkv ? range : 0) * sizeof(float));
    memset(a.dv, 0, (want_dkv ? range : 0) * sizeof(float));
    for (int tile = q_begin; tile < q_end; tile++) {
        int rows = attention_tile_rows(s, tile);
        attention_load_queries(&a, head, tile, rows, s);
        memset(a.dq, 0, area * sizeof(float));
        for (int other = k_begin; other < k_end && other <= tile; other++) {
            attention_backward_pair(&a, (size_t)(other - k_begin) * area, attention_tile_rows(s, other), rows, other == tile, want_dq,
                                    want_dkv, s);
        }
        if (want_dq) { attention_store_tile(head->dqkv + (size_t)tile * ATTENTION_TILE * 3 * C, a.dq, rows, s->scale, s); }
    }
    for (int other = k_begin; other < k_end && want_dkv; other++) {
        floatX* to = head->dqkv + (size_t)other * ATTENTION_TILE * 3 * C;
        size_t at = (size_t)(other - k_begin) * area;
        attention_store_tile(to + C, a.dk + at, attention_tile_rows(s, other), 1.0f, s);
        attention_store_tile(to + 2 * C, a.dv + at, attention_tile_rows(s, other), 1.0f, s);
    }
}

// split: each query tile (dq) and each key tile (dk, dv) is a task of its own, with 7 products for 5; otherwise each head is one.
// Both add in the same order, so the choice does not show in the result.
static void attention_backward_tasks(floatX* dqkv, const floatX* dout, const floatX* out, const floatX* qkv, const float* lse, int B,
                                     int T, int C, int NH, bool split) {
    const AttentionShape s = attention_shape(T, C, NH);
    const size_t heads = (size_t)B * (size_t)NH, count = split ? heads * 2 * (size_t)s.tiles : heads;
#pragma omp parallel if (count > 1)
    {
        float* scratch = (float*)team_arena(attention_backward_floats(&s, s.tiles) * sizeof(float));
#pragma omp for schedule(dynamic)
        for (size_t task = 0; task < count; task++) {
            size_t index = task % heads, row = index / (size_t)NH * (size_t)T * (size_t)C, at = index % (size_t)NH * (size_t)s.HS;
            AttentionHead head = {dqkv + 3 * row + at, dout + row + at, out + row + at, qkv + 3 * row + at, lse + index * (size_t)T};
            int tile = (int)(task / heads / 2); // the longest first
            if (!split) {
                attention_backward_tiles(&head, 0, s.tiles, 0, s.tiles, true, true, &s, scratch);
            } else if (task / heads % 2 == 0) {
                attention_backward_tiles(&head, tile, s.tiles, tile, tile + 1, false, true, &s, scratch);
            } else {
                tile = s.tiles - 1 - tile;
                attention_backward_tiles(&head, tile, tile + 1, 0, tile + 1, true, false, &s, scratch);
            }
        }
    }
}

// dqkv (B,T,3C) is overwritten; dout, out (B,T,C); qkv (B,T,3C); lse (B,NH,T) of the forward pass. work is not used.
void attention_backward(floatX* dqkv, void* work, const floatX* dout, const floatX* out, const floatX* qkv, const float* lse, int B,
                        int T, int C, int NH) {
    (void)work;
    size_t heads = (size_t)B * (size_t)NH, threads = 1;
#ifdef _OPENMP
    threads = (size_t)omp_get_max_threads();
#endif
    // cut by tiles costs 5/3 of the time (measured) and fills all threads; by heads the last round may leave many of them idle
    bool split = T > ATTENTION_TILE && ceil_div(heads, threads) * threads * 3 > heads * 5;
    attention_backward_tasks(dqkv, dout, out, qkv, lse, B, T, C, NH, split);
}
