// init.cuh - random starting weights: normal with a given deviation, a pure function of (seed, tensor, element).
#pragma once
#include "floatx.cuh"
#include "philox.h"

#define INIT_CHUNK 4096

// out[i] = normal(0, deviation) for the tensor's elements from .. from + n - 1; four elements share a draw, wherever a chunk begins
DEVICE void init_normal_chunk(Team t, size_t chunk, floatX* out, size_t from, size_t n, float deviation, uint64_t seed, uint32_t tensor) {
    size_t first = from + chunk * INIT_CHUNK, end = min_size(first + INIT_CHUNK, from + n);
    int groups = (int)(ceil_div(end, 4) - first / 4);
    for (int g = t.rank; g < groups; g += t.size) {
        size_t group = first / 4 + (size_t)g;
        Philox r = philox_at(seed, RANDOM_INIT, 0, tensor, group);
        float values[4];
        philox_normal_pair(r.x[0], r.x[1], values);
        philox_normal_pair(r.x[2], r.x[3], values + 2);
        for (size_t k = 0; k < 4; k++) {
            size_t element = 4 * group + k;
            if (element >= first && element < end) { store(out + (element - from), values[k] * deviation); }
        }
    }
}

void init_normal(floatX* out, size_t from, size_t n, float deviation, uint64_t seed, uint32_t tensor) {
    LAUNCH(ceil_div(n, INIT_CHUNK), BLOCK_TEAM, init_normal_chunk, out, from, n, deviation, seed, tensor);
}

// out[i] = value
DEVICE void fill_chunk(Team t, size_t chunk, floatX* out, size_t n, float value) {
    size_t first = chunk * INIT_CHUNK;
    int count = (int)min_size(INIT_CHUNK, n - first);
    floatX* p = out + first;
    TEAM_FOR(i, count) { store(p + i, value); }
}

void fill(floatX* out, size_t n, float value) { LAUNCH(ceil_div(n, INIT_CHUNK), BLOCK_TEAM, fill_chunk, out, n, value); }

// out[i] = the value of in[i], for fp32 masters
DEVICE void widen_chunk(Team t, size_t chunk, float* out, const floatX* in, size_t n) {
    size_t first = chunk * INIT_CHUNK;
    int count = (int)min_size(INIT_CHUNK, n - first);
    TEAM_FOR(i, count) { out[first + (size_t)i] = load(in + first + i); }
}

void widen_to_float(float* out, const floatX* in, size_t n) { LAUNCH(ceil_div(n, INIT_CHUNK), BLOCK_TEAM, widen_chunk, out, in, n); }
