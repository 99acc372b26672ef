// test_codec.h - the formats of optimizer state (optim/codec.cuh): every code of every map, nearest codes by trying all of them, zero
// and ragged blocks, the rounding to bf16. (AdamW on each format: test_codec_adamw.h.)
// A nearest code may be missed by what fp32 does to the value before it is compared: two roundings, CODEC_TIE of the value.
#pragma once
#include "../optim/elementwise.cuh"
#include "op_tensor.h"
#include "reference_codec.h"
#include "test_codec_adamw.h"
#include "test_emulation.h"

#define CODEC_TIE 2.4e-7
#define CODEC_ULPS 5e-7 // of a decoded value, where the processor has no fused multiply-add; 1.2e-7 where it has
#define CODEC_GUARD 64 // bytes
#define CODEC_GUARD_BYTE 0xa5

// A slot on the device with guards around its codes and scales.
typedef struct {
    StateSlot slot;
    size_t n, code_bytes, scale_bytes;
    char *codes, *scales; // with the guards
} CodecState;

static size_t codec_block(StateFormat f) { return f == STATE_INT8 ? 256 : 128; }

static char* codec_guarded(size_t bytes) {
    char *device = (char*)need(device_alloc(bytes + 2 * CODEC_GUARD)), *host = (char*)need(malloc(bytes + 2 * CODEC_GUARD));
    memset(host, CODEC_GUARD_BYTE, bytes + 2 * CODEC_GUARD);
    memset(host + CODEC_GUARD, 0, bytes); // as a run's memory starts
    device_upload(device, host, bytes + 2 * CODEC_GUARD);
    device_sync();
    free(host);
    return device;
}

static CodecState codec_state(StateFormat format, bool is_signed, size_t n) {
    CodecState s;
    UnitState layout;
    memset(&s, 0, sizeof(s));
    memset(&layout, 0, sizeof(layout));
    codec_declare(&layout, format, "m", "m.scale", n);
    s.n = n;
    s.code_bytes = layout.arrays[0].count * array_type_bytes(layout.arrays[0].type);
    s.scale_bytes = layout.count > 1 ? layout.arrays[1].count * array_type_bytes(layout.arrays[1].type) : 0;
    s.codes = codec_guarded(s.code_bytes);
    s.scales = codec_guarded(s.scale_bytes);
    s.slot.codes = s.codes + CODEC_GUARD;
    s.slot.scales = s.scale_bytes ? (float*)(void*)(s.scales + CODEC_GUARD) : NULL;
    s.slot.format = format;
    s.slot.is_signed = is_signed;
    return s;
}

// What lies between the guards, to be freed; the guards are checked.
static char* codec_look(const char* device, size_t bytes, const char* label) {
    char *host = (char*)need(malloc(bytes + 2 * CODEC_GUARD)), *inside = (char*)need(malloc(max_size(bytes, 1)));
    size_t broken = 0;
    device_download(host, device, bytes + 2 * CODEC_GUARD);
    for (size_t i = 0; i < CODEC_GUARD; i++) {
        broken += (uint8_t)host[i] != CODEC_GUARD_BYTE;
        broken += (uint8_t)host[CODEC_GUARD + bytes + i] != CODEC_GUARD_BYTE;
    }
    CHECK(broken == 0, "%s: %zu bytes outside the array were overwritten", label, broken);
    memcpy(inside, host + CODEC_GUARD, bytes);
    free(host);
    return inside;
}

static void codec_state_free(CodecState* s) {
    device_free(s->codes, s->code_bytes + 2 * CODEC_GUARD);
    device_free(s->scales, s->scale_bytes + 2 * CODEC_GUARD);
}

DEVICE void codec_test_open(Team t, size_t chunk, float* out, StateSlot slot, size_t count) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, count - first);
    const float* x = codec_open(t, slot, first, n, (float*)(void*)t.scratch);
    TEAM_FOR(i, n) { out[first + (size_t)i] = x[i]; }
}

DEVICE void codec_test_close(Team t, size_t chunk, StateSlot slot, const float* in, size_t count, uint32_t tensor, size_t element,
                             const StepScalars* s) {
    size_t first = chunk * OPTIMIZER_CHUNK;
    int n = (int)min_size(OPTIMIZER_CHUNK, count - first);
    float* x = codec_open(t, slot, first, n, (float*)(void*)t.scratch);
    TEAM_FOR(i, n) { x[i] = in[first + (size_t)i]; }
    codec_close(t, slot, first, n, x, s, tensor, element + first);
}

#define CODEC_SCRATCH (OPTIMIZER_CHUNK * sizeof(float))

static void codec_put_at(CodecState* s, const float* values, uint32_t step, uint32_t tensor, size_t element) {
    StepScalars scalars;
    memset(&scalars, 0, sizeof(scalars));
    scalars.step = step;
    scalars.seed = 42;
    StepScalars* device = (StepScalars*)need(device_alloc(sizeof(scalars)));
    float* in = (float*)need(device_alloc(s->n * sizeof(float)));
    device_upload(device, &scalars, sizeof(scalars));
    device_upload(in, values, s->n * sizeof(float));
    size_t chunks = ceil_div(s->n, OPTIMIZER_CHUNK);
    LAUNCH_SCRATCH(chunks, BLOCK_TEAM, CODEC_SCRATCH, codec_test_close, s->slot, in, s->n, tensor, element, device);
    device_sync();
    device_free(in, s->n * sizeof(float));
    device_free(device, sizeof(scalars));
}

static void codec_put(CodecState* s, const float* values) { codec_put_at(s, values, 0, 3, 0); }

// to be freed
static float* codec_get(const CodecState* s) {
    float *out = (float*)need(device_alloc(s->n * sizeof(float))), *host = (float*)need(malloc(s->n * sizeof(float)));
    LAUNCH_SCRATCH(ceil_div(s->n, OPTIMIZER_CHUNK), BLOCK_TEAM, CODEC_SCRATCH, codec_test_open, out, s->slot, s->n);
    device_download(host, out, s->n * sizeof(float));
    device_free(out, s->n * sizeof(float));
    return host;
}

static int codec_code_at(const uint8_t* codes, StateFormat f, size_t i) {
    return f == STATE_INT8 ? codes[i] : i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
}

static StateFormat codec_map_format(int kind) { return kind == MAP_SIGNED8 || kind == MAP_UNSIGNED8 ? STATE_INT8 : STATE_INT4; }
static bool codec_map_signed(int kind) { return kind == MAP_SIGNED8 || kind == MAP_SIGNED4; }
static CodecState codec_map_state(int kind, size_t n) { return codec_state(codec_map_format(kind), codec_map_signed(kind), n); }

// ---- the maps ----

static void codec_map_facts(int kind, const ReferenceMap* m) {
    int zeros = 0, unsorted = 0;
    for (int i = 0; i < m->count; i++) {
        zeros += m->values[i] == 0.0;
        unsorted += i > 0 && !(m->values[i] > m->values[i - 1]);
    }
    CHECK(m->count == (codec_map_format(kind) == STATE_INT8 ? 256 : 16), "%s: %d codes", reference_map_names[kind], m->count);
    CHECK(unsorted == 0 && zeros == (kind == MAP_UNSIGNED4 ? 0 : 1) && m->values[m->count - 1] == 1.0, "%s: %d unsorted, %d zeros",
          reference_map_names[kind], unsorted, zeros);
    const double least[MAPS] = {-0.99296875, 0.0, -0.8875, 0.0625}, above_zero[MAPS] = {5.5e-7, 3.25e-7, 0.0055, 0.0625};
    double smallest = 1.0;
    for (int i = 0; i < m->count; i++) { smallest = m->values[i] > 0.0 && m->values[i] < smallest ? m->values[i] : smallest; }
    CHECK(fabs(m->values[0] - least[kind]) < 1e-12 && fabs(smallest - above_zero[kind]) < 1e-12, "%s: from %g, smallest %g",
          reference_map_names[kind], m->values[0], smallest);
}

// Decodes every code beside every other (4 bits: all 256 bytes), under several scales; encoding gives the same bytes and scales back.
static void codec_every_code(void) {
    const float scales[] = {1.0f, 0.37f, 3e-30f, 5e20f};
    enum { N = 512 };
    for (int kind = 0; kind < MAPS; kind++) {
        ReferenceMap map = reference_map((ReferenceMapKind)kind);
        StateFormat format = codec_map_format(kind);
        CodecState s = codec_map_state(kind, N), again = codec_map_state(kind, N);
        codec_map_facts(kind, &map);
        for (size_t k = 0; k < COUNT_OF(scales); k++) {
            uint8_t codes[N];
            float block_scales[N / 128];
            for (int i = 0; i < N; i++) { codes[i] = (uint8_t)i; }
            for (size_t i = 0; i < COUNT_OF(block_scales); i++) { block_scales[i] = scales[k]; }
            device_upload(s.slot.codes, codes, s.code_bytes);
            device_upload(s.slot.scales, block_scales, s.scale_bytes);
            device_sync();
            float* x = codec_get(&s);
            for (size_t i = 0; i < N; i++) {
                double want = (double)scales[k] * map.values[codec_code_at(codes, format, i)];
                CHECK(fabs(x[i] - want) <= CODEC_ULPS * fabs(want), "%s: code %d is %.9g, expected %.9g", reference_map_names[kind],
                      codec_code_at(codes, format, i), (double)x[i], want);
            }
            codec_put(&again, x);
            uint8_t* same = (uint8_t*)codec_look(again.codes, again.code_bytes, "codes");
            float* same_scales = (float*)(void*)codec_look(again.scales, again.scale_bytes, "scales");
            CHECK(memcmp(same, codes, s.code_bytes) == 0, "%s: a code changes when decoded and encoded", reference_map_names[kind]);
            for (size_t i = 0; i < s.scale_bytes / sizeof(float); i++) {
                CHECK(same_scales[i] == scales[k], "%s: scale %.9g becomes %.9g", reference_map_names[kind], (double)scales[k],
                      (double)same_scales[i]);
            }
            free(x);
            free(same);
            free(same_scales);
        }
        codec_state_free(&s);
        codec_state_free(&again);
    }
}

// ---- nearest codes ----

// Encodes the values and compares each with what all codes would give; returns the codes, to be freed.
static uint8_t* codec_check_nearest(int kind, const float* x, size_t n, const char* label) {
    ReferenceMap map = reference_map((ReferenceMapKind)kind);
    StateFormat format = codec_map_format(kind);
    size_t block = codec_block(format);
    CodecState s = codec_map_state(kind, n);
    codec_put(&s, x);
    float* back = codec_get(&s);
    uint8_t* codes = (uint8_t*)codec_look(s.codes, s.code_bytes, label);
    float* scales = (float*)(void*)codec_look(s.scales, s.scale_bytes, label);
    for (size_t i = 0; i < n; i++) {
        double most = 0.0, code = map.values[codec_code_at(codes, format, i)];
        for (size_t k = i / block * block; k < min_size(n, (i / block + 1) * block); k++) { most = fmax(most, fabs((double)x[k])); }
        double distance = fabs(x[i] - most * code), least = most > 0.0 ? fabs(x[i] - most * reference_nearest(&map, x[i] / most)) : 0.0;
        bool lifted = kind == MAP_UNSIGNED8 && x[i] > 0.0f && x[i] < 1.625e-7 * most; // never to 0
        if (lifted) { least = fabs(x[i] - most * map.values[1]); }
        CHECK(scales[i / block] == (float)most, "%s, %s: the scale is %.9g, expected %.9g", label, reference_map_names[kind],
              (double)scales[i / block], most);
        CHECK(distance <= least + CODEC_TIE * fabs((double)x[i]), "%s, %s: %.9g of %.9g becomes %.9g, off by %.9g; the nearest by %.9g",
              label, reference_map_names[kind], (double)x[i], most, code, distance, least);
        CHECK(fabs(back[i] - most * code) <= CODEC_ULPS * fabs(most * code) + 1e-45, "%s, %s: code for %.9g comes back as %.9g", label,
              reference_map_names[kind], most * code, (double)back[i]);
        CHECK((double)back[i] * x[i] >= 0.0, "%s: %g becomes %g", label, (double)x[i], (double)back[i]);
    }
    free(back);
    free(scales);
    codec_state_free(&s);
    return codes;
}

// Just below and just above every midpoint, positive and negative.
static void codec_midpoints(void) {
    for (int kind = 0; kind < MAPS; kind++) {
        ReferenceMap map = reference_map((ReferenceMapKind)kind);
        StateFormat format = codec_map_format(kind);
        size_t block = codec_block(format);
        float x[256];
        for (int side = 0; side < 2; side++) {
            const double scale = 0.0123;
            for (size_t i = 0; i < block; i++) {
                size_t k = min_size(max_size(i, 1), (size_t)map.count - 1); // i = 0 holds the scale
                double middle = (map.values[k - 1] + map.values[k]) / 2.0;
                x[i] = (float)(i == 0 ? scale : scale * (middle + fabs(middle) * (side ? 1e-6 : -1e-6)));
            }
            uint8_t* codes = codec_check_nearest(kind, x, block, "midpoints");
            for (size_t i = 1; i < (size_t)map.count; i++) {
                int got = codec_code_at(codes, format, i), want = (int)i - 1 + side;
                if (kind == MAP_UNSIGNED8 && want == 0) { want = 1; }
                CHECK(got == want, "%s: %.9g beside the middle of codes %zu and %zu becomes %d", reference_map_names[kind], (double)x[i],
                      i - 1, i, got);
            }
            free(codes);
        }
    }
}

// Values over 12 decades, normal ones, one that towers over the rest, and scales from 1e-36 to 1e30.
static void codec_random(void) {
    ops_random.state = 21;
    enum { BLOCKS = OPS_SMALL ? 4 : 40, N = BLOCKS * 256 };
    float* x = (float*)need(malloc(N * sizeof(float)));
    for (int kind = 0; kind < MAPS; kind++) {
        for (int i = 0; i < N; i++) {
            int way = i / 256 % 4;
            double normal = reference_normal(&ops_random), wide = copysign(pow(10.0, -12.0 * reference_uniform(&ops_random)), normal);
            double scale = way == 3 ? pow(10.0, (i / 256) % 67 - 36) : 1e-3;
            double value = scale * (way == 0 ? normal : way == 1 || way == 3 ? wide : i % 256 == 77 ? normal : 1e-4 * normal);
            x[i] = (float)(codec_map_signed(kind) ? value : fabs(value));
        }
        free(codec_check_nearest(kind, x, N, "random"));
    }
    free(x);
}

// A first moment may become 0, never the other sign; a second moment becomes 0 only where it is 0.
static void codec_small_values(void) {
    enum { N = 256 };
    float x[N];
    const float sizes[] = {2.7e-7f, 1e-7f, 1e-12f, 1e-30f, 1e-45f};
    for (int kind = 0; kind < MAPS; kind++) {
        for (int i = 0; i < N; i++) {
            float sign = codec_map_signed(kind) && i % 2 ? -1.0f : 1.0f;
            x[i] = i % 128 == 0 ? 1.0f : i % 7 == 0 ? 0.0f : sign * sizes[(size_t)i % COUNT_OF(sizes)];
        }
        CodecState s = codec_map_state(kind, N);
        codec_put(&s, x);
        float* back = codec_get(&s);
        for (int i = 0; i < N; i++) {
            if (i % 128 == 0) { continue; }
            float want = kind == MAP_UNSIGNED4 ? 0.0625f : kind == MAP_UNSIGNED8 && x[i] > 0.0f ? 3.25e-7f : 0.0f;
            CHECK(fabsf(back[i] - want) <= 2e-7f * want, "%s: %g beside 1 becomes %g, expected %g", reference_map_names[kind], (double)x[i],
                  (double)back[i], (double)want);
        }
        free(back);
        codec_state_free(&s);
    }
}

// A block so small that the reciprocal of its greatest value overflows.
static void codec_tiny_block(void) {
    enum { N = 128 };
    float x[N];
    for (int kind = MAP_SIGNED8; kind <= MAP_UNSIGNED8; kind++) {
        for (int i = 0; i < N; i++) { x[i] = 1e-40f / (float)(1 + i % 8); }
        CodecState s = codec_map_state(kind, N);
        codec_put(&s, x);
        float* back = codec_get(&s);
        for (int i = 0; i < N; i++) {
            CHECK(fabsf(back[i] - x[i]) <= 0.2f * x[i], "%s: %g becomes %g", reference_map_names[kind], (double)x[i], (double)back[i]);
        }
        free(back);
        codec_state_free(&s);
    }
}

// ---- blocks ----

// Fresh memory, zeros, and a block of zeros beside others: exact zeros, also where the map has none.
static void codec_zeros(void) {
    enum { N = 1000 };
    float* x = (float*)need(malloc(N * sizeof(float)));
    for (int kind = 0; kind < MAPS; kind++) {
        CodecState s = codec_map_state(kind, N);
        size_t block = codec_block(s.slot.format);
        for (int round = 0; round < 3; round++) { // fresh; all zero; the second block zero
            for (size_t i = 0; i < N; i++) { x[i] = round < 2 || i / block == 1 ? 0.0f : 0.5f; }
            if (round > 0) { codec_put(&s, x); }
            float* back = codec_get(&s);
            size_t wrong = 0;
            for (size_t i = 0; i < N; i++) { wrong += !(fabsf(back[i] - x[i]) <= 0.0f); }
            CHECK(wrong == 0, "%s, round %d: %zu of %d values differ", reference_map_names[kind], round, wrong, N);
            free(back);
        }
        codec_state_free(&s);
    }
    free(x);
}

// Every size that ends inside a block, a byte or a chunk, under each format and sign; what lies behind the arrays is left alone.
static void codec_ragged_size(size_t n) {
    float* x = (float*)need(malloc(n * sizeof(float)));
    for (int kind = 0; kind < MAPS; kind++) {
        for (size_t i = 0; i < n; i++) { x[i] = (float)(1e-3 * reference_normal(&ops_random)); }
        for (size_t i = 0; i < n && !codec_map_signed(kind); i++) { x[i] = fabsf(x[i]); }
        uint8_t* codes = codec_check_nearest(kind, x, n, "ragged");
        int behind = codec_map_format(kind) == STATE_INT4 && n % 2 ? codes[n / 2] >> 4 : 0;
        CHECK(behind == 0, "the half byte behind %zu values is %d", n, behind);
        free(codes);
    }
    for (int f = STATE_FP32; f <= STATE_BF16; f++) {
        CodecState s = codec_state((StateFormat)f, true, n);
        codec_put_at(&s, x, 1, 2, 3);
        float* back = codec_get(&s);
        size_t far = 0;
        for (size_t i = 0; i < n; i++) { far += !(fabsf(back[i] - x[i]) <= (f == STATE_FP32 ? 0.0f : fabsf(x[i]) / 128.0f)); }
        CHECK(far == 0, "%s: %zu of %zu values come back wrong", f == STATE_FP32 ? "fp32" : "bf16", far, n);
        free(codec_look(s.codes, s.code_bytes, "state"));
        free(back);
        codec_state_free(&s);
    }
    free(x);
}

static void codec_ragged_all(void) {
    ops_random.state = 22;
    const size_t sizes[] = {1, 2, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 5003};
    const size_t small[] = {1, 129, 257, 2049};
    for (size_t i = 0; i < (OPS_SMALL ? COUNT_OF(small) : COUNT_OF(sizes)); i++) { codec_ragged_size(OPS_SMALL ? small[i] : sizes[i]); }
}

static void codec_ragged(void) { emulation_each(codec_ragged_all); }

// The update is skipped when a gradient is not finite; should one come all the same, nothing but its block suffers.
static void codec_not_finite(void) {
    enum { N = 515 };
    float x[N];
    for (int kind = 0; kind < MAPS; kind++) {
        for (int i = 0; i < N; i++) { x[i] = i == 3 ? NAN : i == 200 ? INFINITY : i == 201 ? -INFINITY : 0.25f; }
        CodecState s = codec_map_state(kind, N);
        codec_put(&s, x);
        float* back = codec_get(&s);
        free(codec_look(s.codes, s.code_bytes, "codes"));
        free(codec_look(s.scales, s.scale_bytes, "scales"));
        for (int i = 256; i < N; i++) { CHECK(back[i] == 0.25f, "%s: value %d is %g", reference_map_names[kind], i, (double)back[i]); }
        free(back);
        codec_state_free(&s);
    }
}

static void codec_bytes(void) {
    const size_t n = (size_t)768 * 2304;
    const double most[STATE_FORMATS] = {8.0001, 4.0001, 2.04, 1.07};
    OptimizerConfig c;
    memset(&c, 0, sizeof(c));
    for (int f = 0; f < STATE_FORMATS; f++) {
        UnitState state;
        memset(&state, 0, sizeof(state));
        c.format = (StateFormat)f;
        elementwise_declare(&state, &c, OPTIMIZER_ADAMW, ROLE_MATRIX, n);
        double bytes = (double)state.bytes / (double)n;
        CHECK(bytes <= most[f], "format %d: %.4f bytes a parameter, expected at most %.4f", f, bytes, most[f]);
    }
}

// ---- bf16 ----

// The mean over many elements and steps is the value itself; each lies on one of its two neighbours.
static void codec_bf16_mean(void) {
    const int N = 4096, STEPS = OPS_SMALL ? 1 : 8;
    const float values[] = {1.0f + 1.0f / 512.0f, 1.0f + 0.3f / 128.0f, -3.1415927f, 1.2345678e-9f, -0.75f};
    float* x = (float*)need(malloc((size_t)N * sizeof(float)));
    for (size_t k = 0; k < COUNT_OF(values); k++) {
        CodecState s = codec_state(STATE_BF16, true, (size_t)N);
        double sum = 0.0, size = fabs((double)values[k]), step = pow(2.0, floor(log2(size)) - 7.0);
        size_t far = 0;
        for (int i = 0; i < N; i++) { x[i] = values[k]; }
        for (int t = 0; t < STEPS; t++) {
            codec_put_at(&s, x, (uint32_t)t, 3, 8 * k);
            float* back = codec_get(&s);
            for (int i = 0; i < N; i++) {
                sum += back[i];
                far += !(fabs((double)back[i] - x[i]) < step);
            }
            free(back);
        }
        double mean = sum / (N * STEPS), deviation = 0.5 * step / sqrt((double)(N * STEPS));
        CHECK(far == 0, "%zu of the values that %.9g becomes are not next to it", far, (double)values[k]);
        CHECK(fabs(mean - values[k]) <= 4.5 * deviation, "%.9g becomes %.9g on average, %.1f deviations off", (double)values[k], mean,
              (mean - values[k]) / deviation);
        codec_state_free(&s);
    }
    free(x);
}

// Rounding depends on element, step, tensor and slot, not on where a unit begins.
static void codec_bf16_cut(void) {
    const size_t N = 4501;
    ops_random.state = 23;
    float* x = (float*)need(malloc(N * sizeof(float)));
    for (size_t i = 0; i < N; i++) { x[i] = (float)reference_normal(&ops_random); }
    CodecState whole = codec_state(STATE_BF16, true, N);
    codec_put_at(&whole, x, 5, 3, 17);
    uint16_t* bits = (uint16_t*)(void*)codec_look(whole.codes, whole.code_bytes, "whole");
    const size_t cuts[] = {0, 1, 3, 100, 2147, 2148, 4500};
    for (size_t k = 0; k < COUNT_OF(cuts); k++) {
        size_t from = cuts[k], to = k + 1 < COUNT_OF(cuts) ? cuts[k + 1] : N;
        CodecState part = codec_state(STATE_BF16, true, to - from);
        codec_put_at(&part, x + from, 5, 3, 17 + from);
        uint16_t* own = (uint16_t*)(void*)codec_look(part.codes, part.code_bytes, "part");
        bool same = memcmp(own, bits + from, (to - from) * sizeof(uint16_t)) == 0;
        CHECK(same, "elements %zu to %zu are rounded in another way alone", from, to);
        free(own);
        codec_state_free(&part);
    }
    for (int other = 0; other < 4; other++) { // another step, tensor, slot, element: about half of the roundings change
        whole.slot.number = other == 2;
        codec_put_at(&whole, x, other == 0 ? 6 : 5, other == 1 ? 4 : 3, other == 3 ? 18 : 17);
        uint16_t* changed = (uint16_t*)(void*)codec_look(whole.codes, whole.code_bytes, "whole");
        size_t count = 0;
        for (size_t i = 0; i < N; i++) { count += changed[i] != bits[i]; }
        CHECK(count > N / 4 && count < N / 2, "key %d: %zu of %zu roundings change", other, count, N);
        free(changed);
    }
    free(bits);
    free(x);
    codec_state_free(&whole);
}

static const TestRow codec_tests[] = {
    {"codec: every code is its value and comes back as itself", codec_every_code},
    {"codec: values beside every midpoint", codec_midpoints},
    {"codec: random values get the nearest code", codec_random},
    {"codec: the smallest values, their signs and zero", codec_small_values},
    {"codec: a block of denormal numbers", codec_tiny_block},
    {"codec: blocks of zeros stay zeros", codec_zeros},
    {"codec: ragged blocks, odd sizes, bytes behind the arrays", codec_ragged},
    {"codec: values that are not finite stay in their block", codec_not_finite},
    {"codec: bytes a parameter", codec_bytes},
    {"codec: rounding to bf16 is right on average", codec_bf16_mean},
    {"codec: rounding to bf16 does not depend on the cut", codec_bf16_cut},
    {"codec: AdamW on each format, exact and rounded reference", codec_adamw},
};
