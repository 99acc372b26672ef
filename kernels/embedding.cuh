// embedding.cuh - token plus position embedding. The backward pass adds the gradients of equal tokens in position order, without
// atomics: the host sorts positions by token when it uploads the batch (TokenOrder), one team takes one distinct token.
#pragma once
#include "vector.cuh"

// out (N, C) = wte[tokens[n]] + wpe[n % T]
DEVICE void embedding_forward_row(Team t, size_t n, floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int T, int C) {
    const floatX *a = wte + (size_t)tokens[n] * (size_t)C, *b = wpe + (n % (size_t)T) * (size_t)C;
    floatX* y = out + n * (size_t)C;
    TEAM_VEC_FOR(i, C) {
        floatV v = load_vec(a + i, C - i), w = load_vec(b + i, C - i);
        VEC_FOR(k) { vec_set(&v, k, vec_get(v, k) + vec_get(w, k)); }
        store_vec(y + i, v, C - i);
    }
}

void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, size_t N, int T, int C) {
    LAUNCH(N, WARP_TEAM, embedding_forward_row, out, tokens, wte, wpe, T, C);
}

// Positions grouped by token: group g is positions[starts[g]] .. positions[starts[g + 1] - 1], ascending, all of one token.
typedef struct {
    int* positions; // N
    int* starts;    // N + 1 at most
    int groups;
} TokenOrder;

// Fills order (host arrays) from N tokens below V by a counting sort; counts: V + 1 ints of work space.
void token_order(TokenOrder* order, int* counts, const int* tokens, size_t N, int V) {
    memset(counts, 0, ((size_t)V + 1) * sizeof(int));
    for (size_t n = 0; n < N; n++) { counts[tokens[n] + 1]++; }
    order->groups = 0;
    for (int v = 0; v < V; v++) {
        if (counts[v + 1] > 0) { order->starts[order->groups++] = counts[v]; }
        counts[v + 1] += counts[v];
    }
    order->starts[order->groups] = (int)N;
    for (size_t n = 0; n < N; n++) { order->positions[counts[tokens[n]]++] = (int)n; }
}

#define EMBEDDING_TILE 256 // columns per team: a frequent token must not be one team's work alone

// dwte[token] += sum of dout over the group's positions; task = group * tiles + tile. Scratch: EMBEDDING_TILE floats.
DEVICE void embedding_backward_group(Team t, size_t task, floatX* dwte, const floatX* dout, const int* tokens, const int* positions,
                                     const int* starts, int tiles, int C) {
    size_t group = task / (size_t)tiles;
    int begin = (int)(task % (size_t)tiles) * EMBEDDING_TILE;
    int width = C - begin < EMBEDDING_TILE ? C - begin : EMBEDDING_TILE;
    float* sum = (float*)t.scratch;
    floatX* out = dwte + (size_t)tokens[positions[starts[group]]] * (size_t)C + begin;
    TEAM_FOR(i, width) { sum[i] = load(out + i); }
    for (int k = starts[group]; k < starts[group + 1]; k++) {
        const floatX* d = dout + (size_t)positions[k] * (size_t)C + begin;
        TEAM_FOR(i, width) { sum[i] += load(d + i); }
    }
    TEAM_FOR(i, width) { store(out + i, sum[i]); }
}

// dwpe[p] += sum over the batch of dout; one team a position p < T. Scratch: C floats.
DEVICE void position_backward_row(Team t, size_t p, floatX* dwpe, const floatX* dout, size_t N, int T, int C) {
    floatX* out = dwpe + p * (size_t)C;
    float* sum = (float*)t.scratch;
    TEAM_FOR(i, C) { sum[i] = load(out + i); }
    for (size_t n = p; n < N; n += (size_t)T) {
        const floatX* d = dout + n * (size_t)C;
        TEAM_FOR(i, C) { sum[i] += load(d + i); }
    }
    TEAM_FOR(i, C) { store(out + i, sum[i]); }
}

// dwte (V, C), dwpe (maxT, C) += ; tokens, positions, starts on the device, groups from token_order
void embedding_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, const int* positions, const int* starts, int groups,
                        size_t N, int T, int C) {
    int tiles = (int)ceil_div((size_t)C, EMBEDDING_TILE);
    LAUNCH_SCRATCH((size_t)groups * (size_t)tiles, WARP_TEAM, EMBEDDING_TILE * sizeof(float), embedding_backward_group, dwte, dout, tokens,
                   positions, starts, tiles, C);
    LAUNCH_SCRATCH(min_size((size_t)T, N), WARP_TEAM, (size_t)C * sizeof(float), position_backward_row, dwpe, dout, N, T, C);
}
