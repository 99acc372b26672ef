// philox.h - counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
// A value is a pure function of (seed, purpose, step, tensor, element): the same on every rank, thread and device, and nothing
// needs to be saved to resume.
#pragma once
#include "base.h"

typedef enum { RANDOM_INIT = 1, RANDOM_WEIGHT_ROUNDING, RANDOM_SHUFFLE, RANDOM_SAMPLING, RANDOM_STATE_ROUNDING } RandomPurpose;

typedef struct {
    uint32_t x[4];
} Philox;

HOST_DEVICE Philox philox4x32(uint64_t key, Philox counter) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t x0 = counter.x[0], x1 = counter.x[1], x2 = counter.x[2], x3 = counter.x[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * x0, p1 = (uint64_t)0xCD9E8D57u * x2;
        x0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0;
        x1 = (uint32_t)p1;
        x2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
        x3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox out = {{x0, x1, x2, x3}};
    return out;
}

// Four random words for the element group `index` (elements 4 index .. 4 index + 3, or whatever the caller counts).
// step: up to 2^32; tensor: a small number or a layer-tensor id below 2^24.
HOST_DEVICE Philox philox_at(uint64_t seed, RandomPurpose purpose, uint32_t step, uint32_t tensor, uint64_t index) {
    Philox counter = {{(uint32_t)index, (uint32_t)(index >> 32), step, tensor | (uint32_t)purpose << 24}};
    return philox4x32(seed, counter);
}

// Uniform in [0, 1) with 24 bits.
HOST_DEVICE float philox_uniform(uint32_t word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }

// Two independent standard normals from two words (Box and Muller 1958); the first argument is moved away from 0.
HOST_DEVICE void philox_normal_pair(uint32_t a, uint32_t b, float* out) {
    float radius = sqrtf(-2.0f * logf(((float)(a >> 8) + 0.5f) * (1.0f / 16777216.0f)));
    float angle = 6.28318530717958648f * philox_uniform(b);
    out[0] = radius * cosf(angle);
    out[1] = radius * sinf(angle);
}
