// kv_cache.cuh - keys and values of a prompt, copied from the fused (T, 3C) tensor into the caches that decoding reads.
#pragma once
#include "floatx.cuh"

// k_cache, v_cache: (maxT, C); row t gets the keys and values of qkv (T, 3C)
DEVICE void kv_cache_fill_row(Team t, size_t row, floatX* k_cache, floatX* v_cache, const floatX* qkv, int C) {
    const floatX* x = qkv + row * 3 * (size_t)C;
    floatX *k = k_cache + row * (size_t)C, *v = v_cache + row * (size_t)C;
    TEAM_FOR(i, C) {
        store(k + i, load(x + C + i));
        store(v + i, load(x + 2 * C + i));
    }
}

void kv_cache_fill(floatX* k_cache, floatX* v_cache, const floatX* qkv, int T, int C) {
    LAUNCH((size_t)T, WARP_TEAM, kv_cache_fill_row, k_cache, v_cache, qkv, C);
}
