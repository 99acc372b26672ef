// test_team.h - teams: sums, maxima, syncs and scratch at every team size; that arguments arrive with the body's own types; vector
// access. On the emulated GPU all of it at several team sizes and orders of threads.
// Values are small integers, whose sums are exact in any order, unless a tolerance is given.
#pragma once
#include "../kernels/device.cuh"
#include "../kernels/vector.cuh"
#include "test_emulation.h"

// A value that differs from row to row and place to place: -8..8
HOST_DEVICE float team_test_value(size_t row, int i) { return (float)((int)((row * 31 + (size_t)i * 7) % 17) - 8); }

// out (rows, 4): the sum and maximum of n values, how far the team's threads disagree about them, and wrong reads of the scratch.
// Scratch: n + 1 floats.
DEVICE void team_test_row(Team t, size_t row, float* out, int n) {
    float* scratch = (float*)t.scratch;
    float sum = 0.0f, most = -INFINITY, wrong = 0.0f;
    TEAM_FOR(i, n) { scratch[i] = team_test_value(row, i); }
    TEAM_SUM_FOR(i, n, sum) { sum += team_test_value(row, i); }
    TEAM_MAX_FOR(i, n, most) { most = fmaxf(most, team_test_value(row, i)); }
    sum = team_sum(t, sum);
    most = team_max(t, most);
    float disagree = team_max(t, sum) + team_max(t, -sum) + (n > 0 ? team_max(t, most) + team_max(t, -most) : 0.0f);
    team_sync(t);
    TEAM_SUM_FOR(i, n, wrong) { wrong += scratch[n - 1 - i] == team_test_value(row, n - 1 - i) ? 0.0f : 1.0f; }
    wrong = team_sum(t, wrong);
    if (t.rank == 0) {
        out[row * 4] = sum;
        out[row * 4 + 1] = most;
        out[row * 4 + 2] = disagree;
        out[row * 4 + 3] = wrong;
    }
}

static void team_test_launch(int team_size, size_t rows, float* out, int n) {
    size_t scratch = (size_t)(n + 1) * sizeof(float);
    if (team_size == 32) { LAUNCH_SCRATCH(rows, 32, scratch, team_test_row, out, n); }
    if (team_size == 64) { LAUNCH_SCRATCH(rows, 64, scratch, team_test_row, out, n); }
    if (team_size == 128) { LAUNCH_SCRATCH(rows, 128, scratch, team_test_row, out, n); }
    if (team_size == 256) { LAUNCH_SCRATCH(rows, 256, scratch, team_test_row, out, n); }
}

static void team_test_sizes_once(void) {
    const int sizes[] = {32, 64, 128, 256}, counts[] = {0, 1, 3, 33, 1000};
    const size_t rows[] = {0, 1, 20};
    float host[21 * 4];
    float* out = (float*)need(device_alloc(sizeof(host)));
    for (size_t k = 0; k < COUNT_OF(sizes) * COUNT_OF(counts) * COUNT_OF(rows); k++) {
        int size = sizes[k % 4], n = counts[k / 4 % COUNT_OF(counts)];
        size_t R = rows[k / 4 / COUNT_OF(counts)];
        for (size_t i = 0; i < COUNT_OF(host); i++) { host[i] = -99.0f; }
        device_upload(out, host, sizeof(host));
        team_test_launch(size, R, out, n);
        device_download(host, out, sizeof(host));
        for (size_t row = 0; row < R; row++) {
            float sum = 0.0f, most = -INFINITY;
            for (int i = 0; i < n; i++) {
                sum += team_test_value(row, i);
                most = fmaxf(most, team_test_value(row, i));
            }
            const float* found = host + row * 4;
            CHECK(found[0] == sum && found[1] == most && found[2] == 0.0f && found[3] == 0.0f,
                  "team of %d, row %zu of %zu, %d values: sum %g, expected %g; max %g, expected %g; disagreement %g, wrong reads %g", size, row,
                  R, n, found[0], sum, found[1], most, found[2], found[3]);
        }
        CHECK(host[R * 4] == -99.0f, "team of %d: a row past the last of %zu was run", size, R);
    }
    device_free(out, sizeof(host));
}

static void team_test_sizes(void) { emulation_each_order(team_test_sizes_once); }

// Each team marks all of its scratch, lets time pass, and counts marks that are not its own. Scratch: n ints.
DEVICE void team_test_own_scratch_row(Team t, size_t row, float* wrong, int n) {
    int* mark = (int*)t.scratch;
    TEAM_FOR(i, n) { mark[i] = (int)row; }
    team_sync(t);
    float others = 0.0f;
    for (int round = 0; round < 3; round++) {
        TEAM_SUM_FOR(i, n, others) { others += mark[n - 1 - i] == (int)row ? 0.0f : 1.0f; }
        others = team_sum(t, others);
    }
    if (t.rank == 0) { wrong[row] = others; }
}

static void team_test_own_scratch_once(void) {
    enum { ROWS = 100 };
    float host[ROWS];
    float* wrong = (float*)need(device_alloc(sizeof(host)));
    const int counts[] = {1, 5, 300, 2100}; // a team of 32 shares its block up to 8 KiB of scratch
    for (size_t k = 0; k < COUNT_OF(counts); k++) {
        LAUNCH_SCRATCH(ROWS, WARP_TEAM, (size_t)counts[k] * sizeof(int), team_test_own_scratch_row, wrong, counts[k]);
        device_download(host, wrong, sizeof(host));
        for (int row = 0; row < ROWS; row++) { CHECK(host[row] == 0.0f, "row %d, %d values: %g marks of others", row, counts[k], host[row]); }
    }
    device_free(wrong, sizeof(host));
}

static void team_test_own_scratch(void) { emulation_each(team_test_own_scratch_once); }

// out[row] = 1 when every argument arrived as written
DEVICE void team_test_types_row(Team t, size_t row, float* out, const float* null, int zero, float half, double third, size_t seven,
                                bool yes, uint8_t small) {
    bool good = !null && zero == 0 && half == 0.5f && third == 1.0 / 3.0 && seven == (size_t)7 && yes && small == 200;
    if (t.rank == 0) { out[row] = good ? 1.0f : 0.0f; }
}

DEVICE void team_test_nothing_row(Team t, size_t row) {
    (void)t;
    (void)row;
}

static void team_test_types(void) {
    float host[3] = {0};
    float* out = (float*)need(device_alloc(sizeof(host)));
    LAUNCH(3, 64, team_test_types_row, out, NULL, 0, 0.5, 1.0 / 3.0, 7, 1, 200);
    LAUNCH(5, 32, team_test_nothing_row);
    device_download(host, out, sizeof(host));
    CHECK(host[0] == 1.0f && host[1] == 1.0f && host[2] == 1.0f, "NULL, 0 and double arguments: %g %g %g", host[0], host[1], host[2]);
    device_free(out, sizeof(host));
}

// out[row] = the sum of n values that do round
DEVICE void team_test_rounding_row(Team t, size_t row, float* out, int n) {
    float sum = 0.0f;
    TEAM_SUM_FOR(i, n, sum) { sum += 1.0f / (float)(1 + i + (int)row); }
    sum = team_sum(t, sum);
    if (t.rank == 0) { out[row] = sum; }
}

static float team_test_first_sums[20];
static bool team_test_have_sums;

static void team_test_deterministic_once(void) {
    float host[20];
    float* out = (float*)need(device_alloc(sizeof(host)));
    LAUNCH(20, 256, team_test_rounding_row, out, 3001);
    device_download(host, out, sizeof(host));
    if (!team_test_have_sums) { memcpy(team_test_first_sums, host, sizeof(host)); }
    team_test_have_sums = true;
    for (int row = 0; row < 20; row++) {
        CHECK(host[row] == team_test_first_sums[row], "row %d: %.9g, before %.9g", row, host[row], team_test_first_sums[row]);
        double exact = 0.0;
        for (int i = 0; i < 3001; i++) { exact += 1.0 / (1 + i + row); }
        CHECK(fabs(host[row] - exact) < 1e-5 * exact, "row %d: %.9g, expected %.9g", row, host[row], exact); // 3001 terms in fp32
    }
    device_free(out, sizeof(host));
}

static void team_test_deterministic(void) {
    team_test_have_sums = false;
    for (int i = 0; i < 3; i++) { emulation_each_order(team_test_deterministic_once); }
}

#define TEAM_TEST_MANY (((size_t)1 << 31) + 1000)

DEVICE void team_test_many_row(Team t, size_t row, float* out) {
    if (t.rank == 0 && row >= TEAM_TEST_MANY - 4) { out[row - (TEAM_TEST_MANY - 4)] += 1.0f; }
}

// More rows than an int counts: run where that takes a second at most, otherwise only the grid is checked.
static void team_test_many(void) {
#if ON_GPU
    CHECK(team_blocks(1, 4, 100) == 1 && team_blocks(4, 4, 100) == 1 && team_blocks(5, 4, 100) == 2, "rounding up to whole blocks");
    CHECK(team_blocks((size_t)1 << 40, 4, 1 << 20) == 1 << 20 && team_blocks(SIZE_MAX, 1, 8) == 8, "the cap of the grid");
    CHECK(team_blocks(TEAM_TEST_MANY, 1, TEAM_TEST_MANY) == TEAM_TEST_MANY, "more than 2^31 blocks");
#endif
#if defined(__CUDACC__) || (!defined(CUDA_ON_CPU) && defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__))
    float host[4] = {0};
    float* out = (float*)need(device_alloc(sizeof(host)));
    LAUNCH(TEAM_TEST_MANY, WARP_TEAM, team_test_many_row, out);
    device_download(host, out, sizeof(host));
    for (int i = 0; i < 4; i++) { CHECK(host[i] == 1.0f, "row 2^31 + %d was run %g times", 996 + i, host[i]); }
    device_free(out, sizeof(host));
#else
    CHECK(TEAM_TEST_MANY > INT32_MAX, "a count that no int holds");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------------
// Vector access: every alignment of the base and every ragged end, with guards on both sides
// Tolerance: one addition and one rounding to floatX.
#ifdef FLOATX_BF16
#define TEAM_TEST_TOLERANCE 4e-3
#else
#define TEAM_TEST_TOLERANCE 2e-7
#endif

// A tensor on the device with the values that it has after rounding to floatX.
typedef struct {
    floatX* device;
    double* value;
    size_t n;
} TeamTestTensor;

#ifdef FLOATX_BF16
static floatX team_test_round(double value) {
    float single = (float)value;
    uint32_t u;
    memcpy(&u, &single, sizeof(u));
    floatX x;
    x.bits = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    return x;
}

static double team_test_widen(floatX x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float single;
    memcpy(&single, &u, sizeof(single));
    return single;
}
#else
static floatX team_test_round(double value) {
    floatX x;
    x.value = (float)value;
    return x;
}

static double team_test_widen(floatX x) { return x.value; }
#endif

// scale 0: all zero
static TeamTestTensor team_test_tensor(size_t n, unsigned seed, double scale) {
    TeamTestTensor tensor = {(floatX*)need(device_alloc(n * sizeof(floatX))), (double*)need(malloc(n * sizeof(double))), n};
    floatX* host = (floatX*)need(malloc(n * sizeof(floatX)));
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        host[i] = team_test_round(scale * ((double)(seed >> 8) / 8388608.0 - 1.0));
        tensor.value[i] = team_test_widen(host[i]);
    }
    device_upload(tensor.device, host, n * sizeof(floatX));
    device_sync();
    free(host);
    return tensor;
}

static void team_test_tensor_free(TeamTestTensor* tensor) {
    device_free(tensor->device, tensor->n * sizeof(floatX));
    free(tensor->value);
}

// Reads the tensor back, compares it with `expected` (added to what it was) and frees both.
static void team_test_compare(const char* name, TeamTestTensor* tensor, double* expected) {
    floatX* host = (floatX*)need(malloc(tensor->n * sizeof(floatX)));
    device_download(host, tensor->device, tensor->n * sizeof(floatX));
    double worst = 0.0;
    size_t place = 0;
    for (size_t i = 0; i < tensor->n; i++) {
        double wanted = tensor->value[i] + expected[i], off = fabs(team_test_widen(host[i]) - wanted) / (1.0 + fabs(wanted));
        if (!(off <= worst)) { // also for NaN
            worst = off;
            place = i;
        }
    }
    CHECK(worst <= TEAM_TEST_TOLERANCE, "%s[%zu]: found %g, expected %g", name, place, team_test_widen(host[place]),
          tensor->value[place] + expected[place]);
    free(host);
    free(expected);
    team_test_tensor_free(tensor);
}

static double* team_test_zeros(size_t n) { return (double*)need(calloc(n, sizeof(double))); }

// y = x + (place in the row); y may be x
DEVICE void team_test_vec_row(Team t, size_t row, floatX* out, const floatX* inp, int n, int stride) {
    const floatX* x = inp + row * (size_t)stride;
    floatX* y = out + row * (size_t)stride;
    TEAM_VEC_FOR(i, n) {
        floatV v = load_vec(x + i, n - i);
        VEC_FOR(k) { vec_set(&v, k, vec_get(v, k) + (float)(i + k)); }
        store_vec(y + i, v, n - i);
    }
}

static void team_test_vec_shape(int n, int stride, int shift) {
    enum { ROWS = 3, GUARD = 8 };
    size_t total = (size_t)(GUARD + shift + ROWS * stride + GUARD);
    TeamTestTensor x = team_test_tensor(total, 1, 1.0), y = team_test_tensor(total, 2, 1.0);
    double *e_x = team_test_zeros(total), *e_y = team_test_zeros(total);
    for (size_t k = 0; k < (size_t)(ROWS * stride); k++) {
        size_t place = (size_t)(GUARD + shift) + k, i = k % (size_t)stride;
        if (i >= (size_t)n) { continue; } // between rows
        e_y[place] = x.value[place] + (double)i - y.value[place];
        e_x[place] = (double)i;
    }
    LAUNCH(ROWS, WARP_TEAM, team_test_vec_row, y.device + GUARD + shift, x.device + GUARD + shift, n, stride);
    LAUNCH(ROWS, WARP_TEAM, team_test_vec_row, x.device + GUARD + shift, x.device + GUARD + shift, n, stride); // in place
    team_test_compare("vectors", &y, e_y);
    team_test_compare("vectors in place", &x, e_x);
}

static void team_test_vec_once(void) {
    const int counts[] = {0, 1, 3, 7, 8, 9, 70};
    for (size_t k = 0; k < COUNT_OF(counts); k++) {
        for (int shift = 0; shift <= 8; shift += 4) { // 0, 4, 8: whole vectors of fp32, 0, 8: of bf16
            team_test_vec_shape(counts[k], counts[k] + 1, shift + 1);
            team_test_vec_shape(counts[k], (int)round_up((size_t)counts[k] + 1, 8), shift);
        }
    }
}

static void team_test_vec(void) { emulation_each(team_test_vec_once); }


static const TestRow team_tests[] = {
    {"team: sum, max, sync at sizes 32 to 256, counts 0 to 1000", team_test_sizes},
    {"team: each team has its own scratch", team_test_own_scratch},
    {"team: arguments take the body's types", team_test_types},
    {"team: sums depend on the team's size alone", team_test_deterministic},
    {"team: more than 2^31 rows", team_test_many},
    {"team: vectors at every alignment and ragged end", team_test_vec},
};
