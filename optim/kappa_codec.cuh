// kappa_codec.cuh - how Kappa keeps a momentum in 8, 6, 4 or 2 bits an element.
//   equilibration  x = m / (rho_i gamma_j): rho the RMS of row i, gamma that of column j over that of the matrix. What is left has about
//                  one size everywhere, so that no row drowns in the step of another. Both are bf16 before they divide: decoding is exact.
//   codes          linear and symmetric, -L..L with L = 2^(bits-1) - 1, to nearest or stochastically, in blocks of 128 along the matrix,
//                  each with a bf16 scale: the step. From 4 bits on the block's greatest value is L steps. With 2 bits {-1, 0, 1} a step
//                  is KAPPA_TERNARY mean |x|: the least square error for a normal x is at 1.53 (1.224 sigma); with the greatest value
//                  for a step nearly all codes would be 0.
//   packing        block of 128 = 32 lanes of 4 codes (elements l, l + 32, l + 64, l + 96). A lane's 4 codes are one word of 4 bits bits,
//                  the first lowest; its bits / 2 bytes stand 32 bytes apart. No bit is lost at any width (6 bits: 4 codes in 3 bytes),
//                  8 bits are plain signed bytes, and loops over lanes have unit stride.
#pragma once
#include "optimizer.h"

#define KAPPA_BLOCK 128
#define KAPPA_LANES 32
#define KAPPA_TERNARY 1.53f

static inline size_t kappa_blocks(size_t count) { return ceil_div(count, KAPPA_BLOCK); }
HOST_DEVICE size_t kappa_block_bytes(int bits) { return (size_t)bits * (KAPPA_BLOCK / 8); }
HOST_DEVICE float kappa_levels(int bits) { return (float)((1 << (bits - 1)) - 1); }

// A lane's codes with `bits` (a constant where this is called), as signed numbers.
DEVICE int32_t kappa_code(uint32_t word, int bits, int k) { return (int32_t)(word << (32 - bits * (k + 1))) >> (32 - bits); }

DEVICE uint32_t kappa_code_bits(int32_t code, int bits, int k) { return ((uint32_t)code & ((1u << bits) - 1u)) << (bits * k); }

DEVICE uint32_t kappa_lane_load(const uint8_t* codes, int lane, int bits) {
    uint32_t word = codes[lane];
    if (bits > 2) { word |= (uint32_t)codes[KAPPA_LANES + lane] << 8; }
    if (bits > 4) { word |= (uint32_t)codes[2 * KAPPA_LANES + lane] << 16; }
    if (bits > 6) { word |= (uint32_t)codes[3 * KAPPA_LANES + lane] << 24; }
    return word;
}

DEVICE void kappa_lane_store(uint8_t* codes, int lane, int bits, uint32_t word) {
    codes[lane] = (uint8_t)word;
    if (bits > 2) { codes[KAPPA_LANES + lane] = (uint8_t)(word >> 8); }
    if (bits > 4) { codes[2 * KAPPA_LANES + lane] = (uint8_t)(word >> 16); }
    if (bits > 6) { codes[3 * KAPPA_LANES + lane] = (uint8_t)(word >> 24); }
}

DEVICE void kappa_decode_width(Team t, float* out, const uint8_t* codes, float scale, int bits) {
    TEAM_FOR(l, KAPPA_LANES) {
        uint32_t word = kappa_lane_load(codes, l, bits);
        out[l] = (float)kappa_code(word, bits, 0) * scale;
        out[KAPPA_LANES + l] = (float)kappa_code(word, bits, 1) * scale;
        out[2 * KAPPA_LANES + l] = (float)kappa_code(word, bits, 2) * scale;
        out[3 * KAPPA_LANES + l] = (float)kappa_code(word, bits, 3) * scale;
    }
}

// out (KAPPA_BLOCK): a block's values, without the factors of rows and columns
DEVICE void kappa_decode(Team t, float* out, const uint8_t* codes, float scale, int bits) {
    switch (bits) {
    case 2: kappa_decode_width(t, out, codes, scale, 2); break;
    case 4: kappa_decode_width(t, out, codes, scale, 4); break;
    case 6: kappa_decode_width(t, out, codes, scale, 6); break;
    default: kappa_decode_width(t, out, codes, scale, 8); break;
    }
}

DEVICE float kappa_round(float x, float levels) {
    x = x > levels ? levels : x;
    x = x < -levels ? -levels : x;
    return rintf(x);
}

DEVICE float kappa_round_up_or_down(float x, float levels, uint32_t random) {
    x = floorf(x + philox_uniform(random));
    x = x > levels ? levels : x;
    return x < -levels ? -levels : x;
}

// What rounding is keyed by.
typedef struct {
    bool stochastic;
    uint64_t seed, element; // element: of the tensor, at which the block starts
    uint32_t step, tensor;
} KappaRounding;

DEVICE void kappa_encode_width(Team t, uint8_t* codes, float* values, const float* x, float scale, KappaRounding r, int bits) {
    float inverse = scale > 0.0f ? 1.0f / scale : 0.0f, levels = kappa_levels(bits);
    if (r.stochastic) {
        TEAM_FOR(l, KAPPA_LANES) {
            Philox random = philox_at(r.seed, RANDOM_STATE_ROUNDING, r.step, r.tensor, r.element + (uint64_t)l);
            float a = kappa_round_up_or_down(x[l] * inverse, levels, random.x[0]);
            float b = kappa_round_up_or_down(x[KAPPA_LANES + l] * inverse, levels, random.x[1]);
            float c = kappa_round_up_or_down(x[2 * KAPPA_LANES + l] * inverse, levels, random.x[2]);
            float d = kappa_round_up_or_down(x[3 * KAPPA_LANES + l] * inverse, levels, random.x[3]);
            values[l] = a * scale;
            values[KAPPA_LANES + l] = b * scale;
            values[2 * KAPPA_LANES + l] = c * scale;
            values[3 * KAPPA_LANES + l] = d * scale;
            kappa_lane_store(codes, l, bits, kappa_code_bits((int32_t)a, bits, 0) | kappa_code_bits((int32_t)b, bits, 1) |
                                                 kappa_code_bits((int32_t)c, bits, 2) | kappa_code_bits((int32_t)d, bits, 3));
        }
        return;
    }
    TEAM_FOR(l, KAPPA_LANES) {
        float a = kappa_round(x[l] * inverse, levels), b = kappa_round(x[KAPPA_LANES + l] * inverse, levels);
        float c = kappa_round(x[2 * KAPPA_LANES + l] * inverse, levels), d = kappa_round(x[3 * KAPPA_LANES + l] * inverse, levels);
        values[l] = a * scale;
        values[KAPPA_LANES + l] = b * scale;
        values[2 * KAPPA_LANES + l] = c * scale;
        values[3 * KAPPA_LANES + l] = d * scale;
        kappa_lane_store(codes, l, bits, kappa_code_bits((int32_t)a, bits, 0) | kappa_code_bits((int32_t)b, bits, 1) |
                                             kappa_code_bits((int32_t)c, bits, 2) | kappa_code_bits((int32_t)d, bits, 3));
    }
}

// x, values (KAPPA_BLOCK): what is rounded, and what it became. The codes are written by all of the team.
DEVICE void kappa_encode(Team t, uint8_t* codes, float* values, const float* x, float scale, KappaRounding r, int bits) {
    switch (bits) {
    case 2: kappa_encode_width(t, codes, values, x, scale, r, 2); break;
    case 4: kappa_encode_width(t, codes, values, x, scale, r, 4); break;
    case 6: kappa_encode_width(t, codes, values, x, scale, r, 6); break;
    default: kappa_encode_width(t, codes, values, x, scale, r, 8); break;
    }
}

// A block's size: greatest value and mean of |x| over its n elements (x is 0 from n to KAPPA_BLOCK).
typedef struct {
    float greatest, mean;
} KappaSize;

DEVICE KappaSize kappa_size(Team t, const float* x, int n) {
    float greatest = 0.0f, sum = 0.0f;
    TEAM_MAX_FOR(i, KAPPA_BLOCK, greatest) {
        float a = fabsf(x[i]);
        greatest = a > greatest ? a : greatest;
    }
    TEAM_SUM_FOR(i, KAPPA_BLOCK, sum) { sum += fabsf(x[i]); }
    KappaSize size = {team_max(t, greatest), team_sum(t, sum) / (float)n};
    return size;
}

// The step between codes before it is rounded to bf16.
DEVICE float kappa_step(KappaSize size, int bits) { return bits == 2 ? KAPPA_TERNARY * size.mean : size.greatest / kappa_levels(bits); }

// As stored: zero where the step is none or beyond numbers, so that decoding never makes a NaN.
DEVICE uint16_t kappa_scale_bits(float x) { return x > 1e-30f && x < 1e30f ? float_to_bf16(x) : (uint16_t)0; }
