// codec.cuh - the formats in which elementwise optimizers keep a state value per element.
//     fp32   the number itself
//     bf16   rounded stochastically
//     8bit   codes of the dynamic map (Dettmers et al. 2022, arXiv 2110.02861), blocks of 256 with one fp32 scale each
//     4bit   codes of 4 bits, blocks of 128: a signed dynamic map; for second moments (k+1)/16, which has no zero (Li et al. 2023,
//            arXiv 2309.01507): a moment rounded to 0 would be divided by
// A block's scale is its greatest magnitude; a block of zeros has scale 0 and comes back as zeros from every map.
// Codes count the values of their map in ascending order. A value gets the nearest one; a tie goes to the greater magnitude.
//   First moments: the nearest code of a value never has the other sign, because 0 lies between; what is below half of the smallest
//   code becomes 0, which shortens a step and does no harm. (Moved away from 0 instead, it would be felt where v is 0.)
//   Second moments: a value that is not 0 never becomes 0, but at least the smallest code: rounded to 0 it would be divided by.
// Maps are computed, not looked up: see dynamic_value and dynamic_index. The lanes of a warp share a block (on the CPU: one thread).
#pragma once
#include "optimizer.h"
#include <float.h>

#define CODEC_BLOCK8 256
#define CODEC_BLOCK4 128

// One value per element of a unit.
typedef struct {
    char* codes;
    float* scales;     // one a block, NULL for fp32 and bf16
    StateFormat format;
    bool is_signed;
    int number;        // of the slot within the unit: keys the random rounding
} StateSlot;

static inline bool codec_is_scaled(StateFormat format) { return format == STATE_INT8 || format == STATE_INT4; }

// The slot whose codes are array `at` of the unit's state, and whose scales, if it has any, are the next one.
static inline StateSlot codec_slot(const OptimizerUnit* u, int at, StateFormat format, bool is_signed, int number) {
    StateSlot slot = {u->state[at], codec_is_scaled(format) ? (float*)(void*)u->state[at + 1] : NULL, format, is_signed, number};
    return slot;
}

// The arrays of one slot; vectors are kept in fp32 (elementwise_format).
static inline void codec_declare(UnitState* s, StateFormat format, const char* name, const char* scale_name, size_t count) {
    switch (format) {
    case STATE_BF16: state_add(s, name, ARRAY_BF16, count); break;
    case STATE_INT8:
        state_add(s, name, ARRAY_U8, count);
        state_add(s, scale_name, ARRAY_F32, ceil_div(count, CODEC_BLOCK8));
        break;
    case STATE_INT4:
        state_add(s, name, ARRAY_U8, ceil_div(count, 2));
        state_add(s, scale_name, ARRAY_F32, ceil_div(count, CODEC_BLOCK4));
        break;
    default: state_add(s, name, ARRAY_F32, count);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The dynamic maps. Below 1 lie `decades` decades; the lowest is cut into `first` equal cells, each further one into twice as many as
// the one before, and codes stand for the midpoints of cells. Index 0 is the value 0, the last index is 1.
//     8 bits signed:   decades 7, first 1: indices 0..128 up, 0..127 down (the map has no -1; its least value is -0.99297)
//     8 bits unsigned: decades 7, first 2: indices 0..255
//     4 bits signed:   decades 3, first 1: indices 0..8 up, 0..7 down
// Decade i runs from 10^(i - decades) to ten times that and has first 2^i cells. All loops below have constant bounds and constants
// that the compiler works out.

// As a function of the index the value is a chain of straight lines, each steeper than the last: the greatest of them all, held within
// 0 and 1. In units of 10^-decades line i is 9 5^i p - 8 10^i, p = (index - 1/2) / first + 1. All of these are exact in fp32, so that
// with a fused multiply-add a value is right to one unit in the last place, without one to four.
DEVICE float dynamic_value(float index, int decades, int first) {
    float place = (index - 0.5f) / (float)first + 1.0f, slope = 9.0f, offset = 8.0f, value = 0.0f;
    for (int i = 0; i < decades; i++) {
        float line = slope * place - offset;
        value = line > value ? line : value;
        slope *= 5.0f;
        offset *= 10.0f;
    }
    value *= 8.0f / offset;
    return value < 1.0f ? value : 1.0f;
}

// The index nearest to y >= 0, without that of 1. In decade i, y u with u = 10^(decades - i) first 2^i is an integer at every border
// between two cells: first 2^i + 9 j. Borders are the midpoints of two codes, except between decades: there it is 10 first 2^i + 9, in
// units of the lower one. Only y u is rounded, so that a border is met within one unit in the last place of y.
// The lowest decade of a signed map has one cell, and its u is such that y u reaches 1 half-way to its code.
DEVICE int dynamic_index(float y, int decades, int first) {
    float unit = (float)first;
    for (int i = 0; i < decades; i++) { unit *= 10.0f; }
    float u = first == 1 ? unit / 2.75f : unit;
    int c = first, cells = first;
    for (int i = 1; i < decades; i++) {
        bool above = y >= (float)(10 * c + 9) / unit;
        unit /= 5.0f;
        c *= 2;
        u = above ? unit : u;
        cells = above ? c : cells;
    }
    float most = (float)(10 * c), place = y * u;
    place = place < most ? place : most; // also a NaN
    int index = ((int)place + 8 * cells) * 7282 >> 16; // a ninth, exact below 2^15 / 9
    return (index < 2 * cells ? index : 2 * cells - 1) - (first - 1);
}

// From here on the last index, 1, lies next to 1 - 0.45 / cells of the highest decade.
DEVICE float dynamic_last(int decades, int first) { return 1.0f - 0.225f / (float)(first << (decades - 1)); }

// x: in units of the block's scale
DEVICE int codec_signed_code(float x, int decades) {
    int zero = (1 << decades) - 1, index = dynamic_index(fabsf(x), decades, 1), code = zero + (x < 0.0f ? -index : index);
    return x >= dynamic_last(decades, 1) ? 2 * zero + 1 : code;
}

DEVICE float codec_signed_value(int code, int decades) {
    float index = (float)code - (float)((1 << decades) - 1);
    return copysignf(dynamic_value(fabsf(index), decades, 1), index);
}

DEVICE int codec_unsigned8_code(float x) {
    int index = dynamic_index(x > 0.0f ? x : 0.0f, 7, 2), least = x > 0.0f ? 1 : 0;
    index = index > least ? index : least;
    return x >= dynamic_last(7, 2) ? 255 : index;
}

DEVICE int codec_unsigned4_code(float x) {
    float place = x * 16.0f - 0.5f;
    return place > 0.0f ? place < 15.0f ? (int)place : 15 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Blocks. A warp takes a block; on the CPU its only thread does.

#if ON_GPU
#define CODEC_LANES 32
#define LANE_FOR(i, n) for (int i = t.rank & 31, n_##i = (n); i < n_##i; i += 32)
#define LANE_MAX_FOR(i, n, ...) LANE_FOR(i, n)
DEVICE float codec_lanes_max(float x) { return warp_max(x); }
#else
#define CODEC_LANES 1
#define LANE_FOR(i, n) TEAM_FOR(i, n)
#define LANE_MAX_FOR(i, n, ...) TEAM_MAX_FOR(i, n, __VA_ARGS__)
DEVICE float codec_lanes_max(float x) { return x; }
#endif

// The scale of the n values of a block; never so small that its reciprocal overflows. (Magnitudes compare like their bits, and a greatest
// integer is what every compiler vectorises.)
DEVICE float codec_block_scale(Team t, const float* x, int n) {
    uint32_t bits = 0;
    LANE_MAX_FOR(i, n, bits) {
        uint32_t size = float_bits(x[i]) & 0x7fffffffu;
        bits = size > bits ? size : bits;
    }
    (void)t;
    float most = codec_lanes_max(bits_float(bits));
    return most > 0.0f && most < FLT_MIN ? FLT_MIN : most;
}

DEVICE void codec_encode8(Team t, uint8_t* codes, const float* x, int n, float inverse, bool is_signed) {
    if (is_signed) {
        LANE_FOR(i, n) { codes[i] = (uint8_t)codec_signed_code(x[i] * inverse, 7); }
    } else {
        LANE_FOR(i, n) { codes[i] = (uint8_t)codec_unsigned8_code(x[i] * inverse); }
    }
}

DEVICE void codec_decode8(Team t, float* x, const uint8_t* codes, int n, float scale, bool is_signed) {
    if (is_signed) {
        LANE_FOR(i, n) { x[i] = scale * codec_signed_value(codes[i], 7); }
    } else {
        LANE_FOR(i, n) { x[i] = scale * dynamic_value((float)codes[i], 7, 2); }
    }
}

DEVICE int codec_code4(float x, bool is_signed) { return is_signed ? codec_signed_code(x, 3) : codec_unsigned4_code(x); }

DEVICE float codec_value4(int code, bool is_signed) { return is_signed ? codec_signed_value(code, 3) : (float)(code + 1) * 0.0625f; }

// Element 2 p is the lower half of byte p. The upper half of a last odd one is 0.
DEVICE void codec_encode4_as(Team t, uint8_t* codes, const float* x, int n, float inverse, bool is_signed) {
    LANE_FOR(p, n / 2) {
        codes[p] = (uint8_t)(codec_code4(x[2 * p] * inverse, is_signed) | codec_code4(x[2 * p + 1] * inverse, is_signed) << 4);
    }
    if (n % 2 && t.rank % CODEC_LANES == 0) { codes[n / 2] = (uint8_t)codec_code4(x[n - 1] * inverse, is_signed); }
}

DEVICE void codec_decode4_as(Team t, float* x, const uint8_t* codes, int n, float scale, bool is_signed) {
    LANE_FOR(p, n / 2) {
        x[2 * p] = scale * codec_value4(codes[p] & 15, is_signed);
        x[2 * p + 1] = scale * codec_value4(codes[p] >> 4, is_signed);
    }
    if (n % 2 && t.rank % CODEC_LANES == 0) { x[n - 1] = scale * codec_value4(codes[n / 2] & 15, is_signed); }
}

DEVICE void codec_encode4(Team t, uint8_t* codes, const float* x, int n, float inverse, bool is_signed) {
    if (is_signed) {
        codec_encode4_as(t, codes, x, n, inverse, true);
    } else {
        codec_encode4_as(t, codes, x, n, inverse, false);
    }
}

DEVICE void codec_decode4(Team t, float* x, const uint8_t* codes, int n, float scale, bool is_signed) {
    if (is_signed) {
        codec_decode4_as(t, x, codes, n, scale, true);
    } else {
        codec_decode4_as(t, x, codes, n, scale, false);
    }
}

// bf16: elements 4 q .. 4 q + 3 of the tensor take the four words drawn for q, wherever a unit begins and however it is cut.
DEVICE void codec_round(Team t, uint16_t* bits, const float* x, int n, uint64_t seed, uint32_t step, uint32_t stream, size_t element) {
    int groups = element % 4 == 0 ? n / 4 : 0;
    size_t group = element / 4;
    TEAM_FOR(q, groups) {
        Philox random = philox_at(seed, RANDOM_STATE_ROUNDING, step, stream, group + (size_t)q);
        bits[4 * q] = float_to_bf16_stochastic(x[4 * q], random.x[0]);
        bits[4 * q + 1] = float_to_bf16_stochastic(x[4 * q + 1], random.x[1]);
        bits[4 * q + 2] = float_to_bf16_stochastic(x[4 * q + 2], random.x[2]);
        bits[4 * q + 3] = float_to_bf16_stochastic(x[4 * q + 3], random.x[3]);
    }
    int done = 4 * groups;
    TEAM_FOR(i, n - done) {
        size_t e = element + (size_t)(done + i);
        Philox random = philox_at(seed, RANDOM_STATE_ROUNDING, step, stream, e / 4);
        uint32_t low = e & 1 ? random.x[1] : random.x[0], high = e & 1 ? random.x[3] : random.x[2];
        bits[done + i] = float_to_bf16_stochastic(x[done + i], e & 2 ? high : low);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------

// Values first..first+n-1 as fp32: where they stand, or decoded into scratch (n). first is a multiple of OPTIMIZER_CHUNK.
DEVICE float* codec_open(Team t, StateSlot slot, size_t first, int n, float* scratch) {
    if (slot.format == STATE_FP32) { return (float*)(void*)slot.codes + first; }
    if (slot.format == STATE_BF16) {
        const uint16_t* bits = (const uint16_t*)(const void*)slot.codes + first;
        TEAM_FOR(i, n) { scratch[i] = bf16_to_float(bits[i]); }
        return scratch;
    }
    bool wide = slot.format == STATE_INT8;
    int block = wide ? CODEC_BLOCK8 : CODEC_BLOCK4, stride = t.size / CODEC_LANES * block;
    const uint8_t* codes = (const uint8_t*)slot.codes + (wide ? first : first / 2);
    const float* scales = slot.scales + first / (size_t)block;
    for (int at = t.rank / CODEC_LANES * block; at < n; at += stride) {
        int here = n - at < block ? n - at : block;
        float scale = scales[at / block];
        if (wide) {
            codec_decode8(t, scratch + at, codes + at, here, scale, slot.is_signed);
        } else {
            codec_decode4(t, scratch + at, codes + at / 2, here, scale, slot.is_signed);
        }
    }
    team_sync(t);
    return scratch;
}

// Puts them back. element: of the tensor, that of values[0].
DEVICE void codec_close(Team t, StateSlot slot, size_t first, int n, const float* values, const StepScalars* s, uint32_t tensor,
                        size_t element) {
    if (slot.format == STATE_FP32) { return; }
    team_sync(t);
    if (slot.format == STATE_BF16) {
        codec_round(t, (uint16_t*)(void*)slot.codes + first, values, n, s->seed, s->step, tensor | (uint32_t)slot.number << 8, element);
        return;
    }
    bool wide = slot.format == STATE_INT8;
    int block = wide ? CODEC_BLOCK8 : CODEC_BLOCK4, stride = t.size / CODEC_LANES * block;
    uint8_t* codes = (uint8_t*)slot.codes + (wide ? first : first / 2);
    float* scales = slot.scales + first / (size_t)block;
    for (int at = t.rank / CODEC_LANES * block; at < n; at += stride) {
        int here = n - at < block ? n - at : block;
        float scale = codec_block_scale(t, values + at, here), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        if (t.rank % CODEC_LANES == 0) { scales[at / block] = scale; }
        if (wide) {
            codec_encode8(t, codes + at, values + at, here, inverse, slot.is_signed);
        } else {
            codec_encode4(t, codes + at / 2, values + at, here, inverse, slot.is_signed);
        }
    }
}
