// vector.cuh - floatV: VEC neighbouring values of a floatX row that one thread reads or writes at once. On the GPU that is one access
// of 16 bytes (8 bf16 or 4 fp32), which a body whose time is memory traffic needs; on the CPU VEC is 1 and the compiler forms the
// vectors itself. One form for both:
//     TEAM_VEC_FOR(i, C) {
//         floatV a = load_vec(x + i, C - i), b = load_vec(y + i, C - i);
//         VEC_FOR(k) { vec_set(&a, k, vec_get(a, k) + vec_get(b, k)); }
//         store_vec(x + i, a, C - i);
//     }
// A base that is not aligned to 16 bytes and the ragged end of a row are handled inside, value by value; values past the end read
// as 0 and are not stored. fp32 arrays beside a row (statistics, moments) are read by index i + k where i + k < C.
#pragma once
#include "floatx.cuh"

#if ON_GPU
#define VEC ((int)(16 / sizeof(floatX)))
#define TEAM_VEC_FOR(i, n) for (int i = t.rank * VEC, n_##i = (n); i < n_##i; i += t.size * VEC)
#define TEAM_VEC_SUM_FOR(i, n, ...) TEAM_VEC_FOR(i, n)
#ifdef CUDA_ON_CPU
#define VEC_FOR(k) for (int k = 0; k < VEC; k++)
#else
#define VEC_FOR(k) DO_PRAGMA(unroll) for (int k = 0; k < VEC; k++)
#endif

// As in memory, so that a load need not be waited for before the next.
typedef struct {
    uint32_t word[4];
} floatV;

#ifdef FLOATX_BF16
DEVICE float vec_get(floatV v, int k) { return bits_float(k & 1 ? v.word[k / 2] & 0xffff0000u : v.word[k / 2] << 16); }
DEVICE void vec_set(floatV* v, int k, float x) {
    uint32_t bits = float_to_bf16(x), old = v->word[k / 2];
    v->word[k / 2] = k & 1 ? (old & 0xffffu) | bits << 16 : (old & 0xffff0000u) | bits;
}
#else
DEVICE float vec_get(floatV v, int k) { return bits_float(v.word[k]); }
DEVICE void vec_set(floatV* v, int k, float x) { v->word[k] = float_bits(x); }
#endif

DEVICE bool vec_whole(const floatX* p, int left) { return left >= VEC && ((uintptr_t)p & 15) == 0; }

// left: values from p to the end of the row, at least 1
DEVICE floatV load_vec(const floatX* p, int left) {
    floatV v = {{0, 0, 0, 0}};
    if (vec_whole(p, left)) {
        uint4 bits = *(const uint4*)(const void*)p;
        v.word[0] = bits.x;
        v.word[1] = bits.y;
        v.word[2] = bits.z;
        v.word[3] = bits.w;
    } else {
        VEC_FOR(k) { vec_set(&v, k, k < left ? load(p + k) : 0.0f); }
    }
    return v;
}

DEVICE void store_vec(floatX* p, floatV v, int left) {
    if (vec_whole(p, left)) {
        uint4 bits = {v.word[0], v.word[1], v.word[2], v.word[3]};
        __stwb((uint4*)(void*)p, bits); // a plain assignment may be split in four
    } else {
        VEC_FOR(k) {
            if (k < left) { store(p + k, vec_get(v, k)); }
        }
    }
}

#else // CPU
#define VEC 1
#define TEAM_VEC_FOR(i, n) TEAM_FOR(i, n)
#define TEAM_VEC_SUM_FOR(i, n, ...) TEAM_SUM_FOR(i, n, __VA_ARGS__)
#define VEC_FOR(k) for (int k = 0; k < VEC; k++)

typedef struct {
    float value;
} floatV;

DEVICE float vec_get(floatV v, int k) {
    (void)k;
    return v.value;
}
DEVICE void vec_set(floatV* v, int k, float x) {
    (void)k;
    v->value = x;
}
DEVICE floatV load_vec(const floatX* p, int left) {
    (void)left;
    floatV v = {load(p)};
    return v;
}
DEVICE void store_vec(floatX* p, floatV v, int left) {
    (void)left;
    store(p, v.value);
}
#endif
