// floatx.cuh - floatX, the storage type of weights, activations and gradients: fp32 (CPU default) or bf16 (GPU default,
// -DFLOATX_BF16). A struct in every build, so that arithmetic without load() and store() does not compile.
// bf16 is the upper half of an fp32; store() rounds to nearest even, store_stochastic() rounds up with the probability that
// makes it right on average (needed where many small updates are added to a bf16 value).
#pragma once
#include "team.cuh"

#ifdef FLOATX_BF16
typedef struct {
    uint16_t bits;
} floatX;
#define FLOATX_NAME "bf16"
#else
typedef struct {
    float value;
} floatX;
#define FLOATX_NAME "fp32"
#endif

HOST_DEVICE uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

HOST_DEVICE float bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

HOST_DEVICE float bf16_to_float(uint16_t bits) { return bits_float((uint32_t)bits << 16); }

// Round to nearest even; a NaN stays a NaN.
HOST_DEVICE uint16_t float_to_bf16(float x) {
    uint32_t u = float_bits(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

// random: 16 uniform bits. Infinities and NaN are passed through.
HOST_DEVICE uint16_t float_to_bf16_stochastic(float x, uint32_t random) {
    uint32_t u = float_bits(x);
    if ((u & 0x7f800000u) == 0x7f800000u) { return float_to_bf16(x); }
    return (uint16_t)((u + (random & 0xffffu)) >> 16);
}

#ifdef FLOATX_BF16
HOST_DEVICE float load(const floatX* p) { return bf16_to_float(p->bits); }
HOST_DEVICE void store(floatX* p, float x) { p->bits = float_to_bf16(x); }
HOST_DEVICE void store_stochastic(floatX* p, float x, uint32_t random) { p->bits = float_to_bf16_stochastic(x, random); }
#else
HOST_DEVICE float load(const floatX* p) { return p->value; }
HOST_DEVICE void store(floatX* p, float x) { p->value = x; }
HOST_DEVICE void store_stochastic(floatX* p, float x, uint32_t random) {
    (void)random;
    p->value = x;
}
#endif
