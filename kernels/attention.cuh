// attention.cuh - causal self-attention: out = softmax(scale Q K^T, keys up to the query) V for each head, scale = 1/sqrt(HS).
// Tiled with an online softmax (Dao et al. 2022, arXiv 2205.14135): only the log of the softmax's sum (lse) is kept for the
// backward pass, which makes the weights again as P = exp(scale Q K^T - lse); memory is O(T). Gradients:
//     dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q,   delta = rowsum(dO * O)
// Here is the team form, which runs on every target and serves the GPU where no library does: fp32 arithmetic, each output value
// has one writer, so results are the same in every run. The CPU has its own form in attention_cpu.h. Head size 1 to 256.
#pragma once
#include "floatx.cuh"
#if !ON_GPU
#include "attention_cpu.h"
#endif

#define ATTENTION_TEAM 128
#define ATTENTION_OTHER 32 // rows of the tile that passes by: keys for a tile of queries, queries for a tile of keys
#define ATTENTION_DECODE 256 // keys at a time

// Rows that a team owns, so that its tiles fit the scratch.
static inline int attention_own_rows(int HS, bool backward) {
    int rows = HS <= 64 ? 64 : HS <= 128 ? 32 : 16;
    return backward ? rows / 2 : rows;
}

// Rows in scratch are an odd number of floats apart, or threads that read down a column would share a memory bank.
DEVICE int attention_stride(int HS) { return HS | 1; }

// tile (rows, stride) = factor * x[row * x_stride + 0..HS), zero from row `valid` on
DEVICE void attention_team_load(Team t, float* tile, const floatX* x, size_t x_stride, int valid, int rows, int HS, float factor) {
    int stride = attention_stride(HS), r = t.rank / HS, d = t.rank % HS, r_step = t.size / HS, d_step = t.size % HS;
    for (int i = t.rank; i < rows * HS; i += t.size) {
        tile[r * stride + d] = r < valid ? factor * load(x + (size_t)r * x_stride + d) : 0.0f;
        r += r_step;
        d += d_step;
        if (d >= HS) {
            d -= HS;
            r++;
        }
    }
}

// x[row * x_stride + 0..HS) = factor * row_factor[row] * tile; row_factor may be NULL
DEVICE void attention_team_store(Team t, floatX* x, size_t x_stride, const float* tile, int valid, int HS, float factor,
                                 const float* row_factor) {
    int stride = attention_stride(HS), r = t.rank / HS, d = t.rank % HS, r_step = t.size / HS, d_step = t.size % HS;
    for (int i = t.rank; i < valid * HS; i += t.size) {
        store(x + (size_t)r * x_stride + d, factor * (row_factor ? row_factor[r] : 1.0f) * tile[r * stride + d]);
        r += r_step;
        d += d_step;
        if (d >= HS) {
            d -= HS;
            r++;
        }
    }
}

// c[i * c_row + j] = row_factor[i] * c[i * c_row + j] + sum over k < depth of a[i * a_row + k] * b[j * b_column + k * b_k]
// for i < rows (a multiple of 4), j < columns. row_factor NULL: c = the sum alone. A thread takes 4 x 4 values, spread so that
// neighbouring threads read neighbouring addresses.
DEVICE void attention_team_product(Team t, float* c, int c_row, const float* a, int a_row, const float* b, int b_column, int b_k, int rows,
                                   int columns, int depth, const float* row_factor) {
    int row_step = rows / 4, column_step = (columns + 3) / 4;
    TEAM_FOR(item, row_step * column_step) {
        int i = item / column_step, j = item % column_step;
        float sum[4][4] = {{0.0f}};
        const float *pa[4], *pb[4];
        for (int r = 0; r < 4; r++) {
            int column = j + r * column_step;
            pa[r] = a + (i + r * row_step) * a_row;
            pb[r] = b + (column < columns ? column : columns - 1) * b_column;
        }
        for (int k = 0; k < depth; k++) {
            float x[4], y[4];
            for (int r = 0; r < 4; r++) {
                x[r] = pa[r][k];
                y[r] = pb[r][k * b_k];
            }
            for (int r = 0; r < 4; r++) {
                for (int s = 0; s < 4; s++) { sum[r][s] += x[r] * y[s]; }
            }
        }
        for (int r = 0; r < 4; r++) {
            float* row = c + (i + r * row_step) * c_row;
            float factor = row_factor ? row_factor[i + r * row_step] : 0.0f;
            for (int s = 0; s < 4; s++) {
                int column = j + s * column_step;
                if (column < columns) { row[column] = row_factor ? factor * row[column] + sum[r][s] : sum[r][s]; }
            }
        }
    }
}

static inline size_t attention_forward_scratch(int HS) {
    size_t rows = (size_t)attention_own_rows(HS, false), stride = (size_t)(HS | 1);
    return ((2 * rows + ATTENTION_OTHER) * stride + rows * (ATTENTION_OTHER + 1) + 3 * rows) * sizeof(float);
}

// The scores (rows, ATTENTION_OTHER + 1) of keys from `key` on become weights; high, sum and factor as in an online softmax.
// Queries before the key get none. Leaves the team synchronised.
DEVICE void attention_team_softmax(Team t, float* scores, float* high, float* sum, float* factor, int rows, int query, int key) {
    TEAM_FOR(i, rows) {
        float top = high[i];
        for (int j = 0; j < ATTENTION_OTHER && key + j <= query + i; j++) {
            float x = scores[i * (ATTENTION_OTHER + 1) + j];
            top = x > top ? x : top;
        }
        factor[i] = high[i] == -INFINITY ? 0.0f : expf(high[i] - top);
        high[i] = top;
    }
    team_sync(t);
    TEAM_FOR(e, rows * ATTENTION_OTHER) {
        int i = e / ATTENTION_OTHER, j = e % ATTENTION_OTHER;
        float* x = scores + i * (ATTENTION_OTHER + 1) + j;
        *x = key + j <= query + i ? expf(*x - high[i]) : 0.0f;
    }
    team_sync(t);
    TEAM_FOR(r, rows) {
        float total = 0.0f;
        for (int j = 0; j < ATTENTION_OTHER; j++) { total += scores[r * (ATTENTION_OTHER + 1) + j]; }
        sum[r] = sum[r] * factor[r] + total;
    }
}

// One team takes `rows` queries of one head; tasks run over heads fastest, the last (longest) tile first.
DEVICE void attention_forward_team_tile(Team t, size_t task, floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH,
                                        int rows) {
    const int HS = C / NH, stride = attention_stride(HS);
    const size_t heads = (size_t)B * (size_t)NH, index = task % heads, h = index % (size_t)NH;
    const int query = (int)(ceil_div((size_t)T, (size_t)rows) - 1 - task / heads) * rows, valid = T - query < rows ? T - query : rows;
    const size_t token = index / (size_t)NH * (size_t)T, at = h * (size_t)HS;
    const floatX* head = qkv + token * 3 * (size_t)C + at;
    float *q = (float*)t.scratch, *other = q + rows * stride, *sums = other + ATTENTION_OTHER * stride, *scores = sums + rows * stride;
    float *high = scores + rows * (ATTENTION_OTHER + 1), *sum = high + rows, *factor = sum + rows;
    attention_team_load(t, q, head + (size_t)query * 3 * (size_t)C, 3 * (size_t)C, valid, rows, HS, 1.0f / sqrtf((float)HS));
    TEAM_FOR(i, rows * stride) { sums[i] = 0.0f; }
    TEAM_FOR(r, rows) {
        high[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    for (int key = 0; key < query + valid; key += ATTENTION_OTHER) {
        const floatX* base = head + (size_t)key * 3 * (size_t)C;
        attention_team_load(t, other, base + C, 3 * (size_t)C, T - key, ATTENTION_OTHER, HS, 1.0f);
        team_sync(t);
        attention_team_product(t, scores, ATTENTION_OTHER + 1, q, stride, other, stride, 1, rows, ATTENTION_OTHER, HS, NULL);
        team_sync(t);
        attention_team_load(t, other, base + 2 * C, 3 * (size_t)C, T - key, ATTENTION_OTHER, HS, 1.0f);
        attention_team_softmax(t, scores, high, sum, factor, rows, query, key);
        attention_team_product(t, sums, stride, scores, ATTENTION_OTHER + 1, other, 1, stride, rows, HS, ATTENTION_OTHER, factor);
        team_sync(t);
    }
    TEAM_FOR(v, valid) {
        lse[index * (size_t)T + (size_t)(query + v)] = high[v] + logf(sum[v]);
        factor[v] = 1.0f / sum[v];
    }
    team_sync(t);
    attention_team_store(t, out + (token + (size_t)query) * (size_t)C + at, (size_t)C, sums, valid, HS, 1.0f, factor);
}

// out (B,T,C); lse (B,NH,T): log of the sum of exp of the scaled scores; qkv (B,T,3C): q, k, v, head h at h * HS of each
void attention_forward_team(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH) {
    int rows = attention_own_rows(C / NH, false);
    LAUNCH_SCRATCH((size_t)B * (size_t)NH * ceil_div((size_t)T, (size_t)rows), ATTENTION_TEAM, attention_forward_scratch(C / NH),
                   attention_forward_team_tile, out, lse, qkv, B, T, C, NH, rows);
}

// delta (B,NH,T) = sum over a head's values of dout * out; one team per token and head
DEVICE void attention_delta_row(Team t, size_t row, float* delta, const floatX* dout, const floatX* out, int T, int C, int NH) {
    const int HS = C / NH;
    const size_t token = row / (size_t)NH, h = row % (size_t)NH, at = token * (size_t)C + h * (size_t)HS;
    float sum = 0.0f;
    TEAM_SUM_FOR(d, HS, sum) { sum += load(dout + at + d) * load(out + at + d); }
    sum = team_sum(t, sum);
    if (t.rank == 0) { delta[(token / (size_t)T * (size_t)NH + h) * (size_t)T + token % (size_t)T] = sum; }
}

static inline size_t attention_backward_scratch(int HS) {
    size_t rows = (size_t)attention_own_rows(HS, true), stride = (size_t)(HS | 1);
    return ((4 * rows + 2 * ATTENTION_OTHER) * stride + 2 * rows * (ATTENTION_OTHER + 1) + rows) * sizeof(float);
}

// weights = P and dweights = dS in place, (own rows, ATTENTION_OTHER + 1). own, other: first token of each side; the queries are the
// own side or (keys) the other.
DEVICE void attention_team_weights_backward(Team t, float* weights, float* dweights, const float* lse, const float* delta, bool keys,
                                            int own, int other, int rows, int T) {
    TEAM_FOR(e, rows * ATTENTION_OTHER) {
        int i = e / ATTENTION_OTHER, j = e % ATTENTION_OTHER, at = i * (ATTENTION_OTHER + 1) + j;
        int query = keys ? other + j : own + i, key = keys ? own + i : other + j;
        bool attends = key <= query && query < T;
        float p = attends ? expf(weights[at] - lse[attends ? query : 0]) : 0.0f;
        weights[at] = p;
        dweights[at] = attends ? p * (dweights[at] - delta[query]) : 0.0f;
    }
}

// One team owns `rows` queries of one head and writes their dq, or (keys) as many keys and writes their dk and dv. With x, y = q, dout
// or k, v of the own side and likewise of the other, both make S = x x'^T and dP = y y'^T, and add dS x' (and P y' for keys).
DEVICE void attention_backward_team_tile(Team t, size_t task, floatX* dqkv, const floatX* dout, const floatX* qkv, const float* lse,
                                         const float* delta, bool keys, int B, int T, int C, int NH, int rows) {
    const int HS = C / NH, stride = attention_stride(HS), area = rows * stride, tile = (int)(task / ((size_t)B * (size_t)NH));
    const size_t index = task % ((size_t)B * (size_t)NH), width = (size_t)C, token = index / (size_t)NH * (size_t)T;
    const size_t at = index % (size_t)NH * (size_t)HS;
    // the longest first: the first keys, the last queries
    const int own = (keys ? tile : (int)ceil_div((size_t)T, (size_t)rows) - 1 - tile) * rows, valid = T - own < rows ? T - own : rows;
    const int begin = keys ? own / ATTENTION_OTHER * ATTENTION_OTHER : 0, end = keys ? T : own + valid;
    const float scale = 1.0f / sqrtf((float)HS);
    const floatX *q = qkv + token * 3 * width + at, *k = q + width, *v = k + width, *g = dout + token * width + at;
    float *x = (float*)t.scratch, *y = x + area, *dx = y + area, *dy = dx + area, *x_other = dy + area;
    float *y_other = x_other + ATTENTION_OTHER * stride, *weights = y_other + ATTENTION_OTHER * stride;
    float *dweights = weights + rows * (ATTENTION_OTHER + 1), *ones = dweights + rows * (ATTENTION_OTHER + 1);
    attention_team_load(t, x, (keys ? k : q) + (size_t)own * 3 * width, 3 * width, valid, rows, HS, keys ? 1.0f : scale);
    const size_t y_stride = keys ? 3 * width : width, y_other_stride = 4 * width - y_stride;
    attention_team_load(t, y, (keys ? v : g) + (size_t)own * y_stride, y_stride, valid, rows, HS, 1.0f);
    TEAM_FOR(i, 2 * area) { dx[i] = 0.0f; } // and dy
    TEAM_FOR(r, rows) { ones[r] = 1.0f; }
    for (int other = begin; other < end; other += ATTENTION_OTHER) {
        attention_team_load(t, x_other, (keys ? q : k) + (size_t)other * 3 * width, 3 * width, T - other, ATTENTION_OTHER, HS,
                            keys ? scale : 1.0f);
        const floatX* y_from = (keys ? g : v) + (size_t)other * y_other_stride;
        attention_team_load(t, y_other, y_from, y_other_stride, T - other, ATTENTION_OTHER, HS, 1.0f);
        team_sync(t);
        attention_team_product(t, weights, ATTENTION_OTHER + 1, x, stride, x_other, stride, 1, rows, ATTENTION_OTHER, HS, NULL);
        attention_team_product(t, dweights, ATTENTION_OTHER + 1, y, stride, y_other, stride, 1, rows, ATTENTION_OTHER, HS, NULL);
        team_sync(t);
        attention_team_weights_backward(t, weights, dweights, lse + index * (size_t)T, delta + index * (size_t)T, keys, own, other, rows,
                                        T);
        team_sync(t);
        attention_team_product(t, dx, stride, dweights, ATTENTION_OTHER + 1, x_other, 1, stride, rows, HS, ATTENTION_OTHER, ones);
        if (keys) {
            attention_team_product(t, dy, stride, weights, ATTENTION_OTHER + 1, y_other, 1, stride, rows, HS, ATTENTION_OTHER, ones);
        }
        team_sync(t);
    }
    floatX* to = dqkv + (token + (size_t)own) * 3 * width + at;
    attention_team_store(t, keys ? to + width : to, 3 * width, dx, valid, HS, keys ? 1.0f : scale, NULL);
    if (keys) { attention_team_store(t, to + 2 * width, 3 * width, dy, valid, HS, 1.0f, NULL); }
}

static inline size_t attention_team_work_bytes(int B, int T, int NH) { return (size_t)B * (size_t)T * (size_t)NH * sizeof(float); }

// dqkv (B,T,3C) is overwritten; dout, out (B,T,C); qkv (B,T,3C); lse (B,NH,T) of the forward pass; work: attention_team_work_bytes
void attention_backward_team(floatX* dqkv, void* work, const floatX* dout, const floatX* out, const floatX* qkv, const float* lse, int B,
                             int T, int C, int NH) {
    float* delta = (float*)work;
    const int rows = attention_own_rows(C / NH, true);
    const size_t count = (size_t)B * (size_t)NH * ceil_div((size_t)T, (size_t)rows), scratch = attention_backward_scratch(C / NH);
    LAUNCH((size_t)B * (size_t)T * (size_t)NH, WARP_TEAM, attention_delta_row, delta, dout, out, T, C, NH);
    LAUNCH_SCRATCH(count, ATTENTION_TEAM, scratch, attention_backward_team_tile, dqkv, dout, qkv, lse, delta, true, B, T, C, NH, rows);
    LAUNCH_SCRATCH(count, ATTENTION_TEAM, scratch, attention_backward_team_tile, dqkv, dout, qkv, lse, delta, false, B, T, C, NH, rows);
}

// By one thread.
DEVICE float attention_dot(const float* a, const floatX* b, int n) {
    const Team t = {0, 1, NULL};
    (void)t;
    float sum = 0.0f;
    TEAM_SUM_FOR(i, n, sum) { sum += a[i] * load(b + i); }
    return sum;
}

// One head of one new token: stores its k and v, then attends to all positions up to it.
DEVICE void attention_decode_head(Team t, size_t h, floatX* out, const floatX* qkv, floatX* k_cache, floatX* v_cache, int position,
                                  int C, int NH) {
    const int HS = C / NH;
    const size_t at = h * (size_t)HS;
    const float scale = 1.0f / sqrtf((float)HS);
    float *q = (float*)t.scratch, *sums = q + HS, *weights = sums + HS;
    TEAM_FOR(d, HS) {
        q[d] = scale * load(qkv + at + d);
        sums[d] = 0.0f;
        store(k_cache + (size_t)position * (size_t)C + at + d, load(qkv + C + at + d));
        store(v_cache + (size_t)position * (size_t)C + at + d, load(qkv + 2 * C + at + d));
    }
    team_sync(t);
    float high = -INFINITY, sum = 0.0f;
    for (int first = 0; first <= position; first += ATTENTION_DECODE) {
        const int n = position + 1 - first < ATTENTION_DECODE ? position + 1 - first : ATTENTION_DECODE;
        const floatX *k = k_cache + (size_t)first * (size_t)C + at, *v = v_cache + (size_t)first * (size_t)C + at;
        float top = high, total = 0.0f;
        TEAM_FOR(i, n) { weights[i] = attention_dot(q, k + (size_t)i * (size_t)C, HS); }
        TEAM_MAX_FOR(i, n, top) { top = weights[i] > top ? weights[i] : top; }
        top = team_max(t, top);
        TEAM_SUM_FOR(i, n, total) {
            weights[i] = expf(weights[i] - top);
            total += weights[i];
        }
        const float factor = first == 0 ? 0.0f : expf(high - top);
        sum = sum * factor + team_sum(t, total);
        high = top;
        team_sync(t);
        TEAM_FOR(d, HS) { sums[d] *= factor; }
        for (int j = 0; j < n; j++) {
            TEAM_FOR(d, HS) { sums[d] += weights[j] * load(v + (size_t)j * (size_t)C + d); }
        }
        team_sync(t);
    }
    TEAM_FOR(d, HS) { store(out + at + d, sums[d] / sum); }
}

// out (C); qkv (3C) of the token at `position`; k_cache, v_cache (maxT, C): its k and v are written there
void attention_decode(floatX* out, const floatX* qkv, floatX* k_cache, floatX* v_cache, int position, int C, int NH) {
    LAUNCH_SCRATCH((size_t)NH, ATTENTION_TEAM, (size_t)(2 * (C / NH) + ATTENTION_DECODE) * sizeof(float), attention_decode_head, out, qkv,
                   k_cache, v_cache, position, C, NH);
}

// Work space of attention_backward, on the device.
size_t attention_work_bytes(int B, int T, int C, int NH) {
    (void)C;
    return ON_GPU ? attention_team_work_bytes(B, T, NH) : 0;
}

#if ON_GPU
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH) {
    attention_forward_team(out, lse, qkv, B, T, C, NH);
}

void attention_backward(floatX* dqkv, void* work, const floatX* dout, const floatX* out, const floatX* qkv, const float* lse, int B,
                        int T, int C, int NH) {
    attention_backward_team(dqkv, work, dout, out, qkv, lse, B, T, C, NH);
}
#endif
