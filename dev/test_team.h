// test_team.h - teams: sums, maxima, scans, syncs and scratch at every team size; that arguments arrive with the body's own types; and,
// on the emulated GPU (cuda_on_cpu.h), that each kind of planted bug is caught with a message that names the place.
// Also what other test files use: emulation_each(run) repeats a row for every team size and order of threads.
// Values are small integers, whose sums are exact in any order, unless a tolerance is given.
#pragma once
#include "../kernels/device.cuh"
#include "../kernels/layernorm.cuh"
#include "../kernels/vector.cuh"
#include "test.h"

#ifdef CUDA_ON_CPU
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static inline void emulation_each_order(void (*run)(void)) {
    CudaOrder before = cuda_on_cpu_order;
    for (int order = 0; order < CUDA_ORDERS; order++) {
        int failures = test_state.failures_in_row;
        cuda_on_cpu_order = (CudaOrder)order;
        run();
        if (test_state.failures_in_row > failures) {
            printf("    with threads in %s order, team size %d (0: as asked)\n", cuda_order_names[order], cuda_on_cpu_team_size);
        }
    }
    cuda_on_cpu_order = before;
}

static inline void emulation_each(void (*run)(void)) {
    const int sizes[] = {32, 128, 256};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        cuda_on_cpu_team_size = sizes[i];
        emulation_each_order(run);
    }
    cuda_on_cpu_team_size = 0;
}
#else
static inline void emulation_each_order(void (*run)(void)) { run(); }
static inline void emulation_each(void (*run)(void)) { run(); }
#endif

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
    const size_t rows[] = {0, 1, 3, 50};
    float host[51 * 4];
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
// Layernorm at awkward shapes, against the formula in double precision. Tolerances: values are of order 1, C terms are added in
// fp32 (1e-7 sqrt(C)) and results rounded once to floatX; weight gradients are sums over N rows, rounded once more.
#ifdef FLOATX_BF16
#define TEAM_TEST_TOLERANCE 2e-2
#else
#define TEAM_TEST_TOLERANCE 2e-5
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

static void team_test_layernorm_shape(size_t N, int C) {
    size_t width = (size_t)C, n = N * width;
    TeamTestTensor x = team_test_tensor(n, 1, 2.0), branch = team_test_tensor(n, 2, 1.0), branch_bias = team_test_tensor(width, 3, 1.0);
    TeamTestTensor w = team_test_tensor(width, 4, 1.5), b = team_test_tensor(width, 5, 1.0), dy = team_test_tensor(n, 6, 1.0);
    TeamTestTensor y = team_test_tensor(n, 0, 0.0), dx = team_test_tensor(n, 7, 1.0), dw = team_test_tensor(width, 8, 1.0);
    TeamTestTensor db = team_test_tensor(width, 9, 1.0), y2 = team_test_tensor(n, 0, 0.0), sum = team_test_tensor(n, 0, 0.0);
    size_t work = (2 * N + layernorm_backward_partials(N, C)) * sizeof(float);
    float* mean = (float*)need(device_alloc(work));
    float *rstd = mean + N, *partial = rstd + N;
    layernorm_forward(y.device, mean, rstd, x.device, w.device, b.device, N, C);
    layernorm_backward(dx.device, dw.device, db.device, partial, dy.device, x.device, w.device, mean, rstd, N, C);
    residual_layernorm_forward(sum.device, y2.device, mean, rstd, x.device, branch.device, branch_bias.device, w.device, b.device, N, C);

    double *e_y = team_test_zeros(n), *e_dx = team_test_zeros(n), *e_dw = team_test_zeros(width), *e_db = team_test_zeros(width);
    double *e_sum = team_test_zeros(n), *e_y2 = team_test_zeros(n);
    for (size_t row = 0; row < N; row++) {
        const double *in = x.value + row * width, *d = dy.value + row * width;
        double total[2] = {0, 0}, square[2] = {0, 0}, g_mean = 0, gx_mean = 0, *added = e_sum + row * width;
        for (size_t i = 0; i < width; i++) {
            // the norm is taken of the stored sum, so the reference rounds it too
            added[i] = team_test_widen(team_test_round(in[i] + branch.value[row * width + i] + branch_bias.value[i]));
            total[0] += in[i] / C;
            total[1] += added[i] / C;
        }
        for (size_t i = 0; i < width; i++) {
            square[0] += (in[i] - total[0]) * (in[i] - total[0]) / C;
            square[1] += (added[i] - total[1]) * (added[i] - total[1]) / C;
        }
        double s = 1.0 / sqrt(square[0] + 1e-5), s2 = 1.0 / sqrt(square[1] + 1e-5);
        for (size_t i = 0; i < width; i++) {
            double xhat = (in[i] - total[0]) * s;
            e_y[row * width + i] = xhat * w.value[i] + b.value[i];
            e_y2[row * width + i] = (added[i] - total[1]) * s2 * w.value[i] + b.value[i];
            e_dw[i] += d[i] * xhat;
            e_db[i] += d[i];
            g_mean += d[i] * w.value[i] / C;
            gx_mean += d[i] * w.value[i] * xhat / C;
        }
        for (size_t i = 0; i < width; i++) {
            e_dx[row * width + i] = (d[i] * w.value[i] - g_mean - (in[i] - total[0]) * s * gx_mean) * s;
        }
    }
    team_test_compare("normed", &y, e_y);
    team_test_compare("dinp", &dx, e_dx);
    team_test_compare("dweight", &dw, e_dw);
    team_test_compare("dbias", &db, e_db);
    team_test_compare("residual", &sum, e_sum);
    team_test_compare("normed of the residual", &y2, e_y2);
    device_free(mean, work);
    TeamTestTensor* rest[] = {&x, &branch, &branch_bias, &w, &b, &dy};
    for (size_t i = 0; i < COUNT_OF(rest); i++) { team_test_tensor_free(rest[i]); }
}

static void team_test_layernorm_once(void) {
    team_test_layernorm_shape(1, 5);
    team_test_layernorm_shape(35, 48); // more than LAYERNORM_CHUNK rows
    team_test_layernorm_shape(3, 300);
}

static void team_test_layernorm(void) { emulation_each(team_test_layernorm_once); }

// ---------------------------------------------------------------------------------------------------------------------------
// Vector access: every alignment of the base and every ragged end, with guards on both sides

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
    const int counts[] = {0, 1, 3, 7, 8, 9, 300};
    for (size_t k = 0; k < COUNT_OF(counts); k++) {
        for (int shift = 0; shift <= 8; shift += shift == 1 ? 3 : 1) { // 0, 1, 4, 5, .. 8
            team_test_vec_shape(counts[k], counts[k] + 1, shift);
            team_test_vec_shape(counts[k], (int)round_up((size_t)counts[k] + 1, 8), shift);
        }
    }
}

static void team_test_vec(void) { emulation_each(team_test_vec_once); }

#ifdef CUDA_ON_CPU
// ---------------------------------------------------------------------------------------------------------------------------
// Planted bugs

// Runs `crash` in a child; it must die, and print a line that holds both parts. The child keeps to one OS thread: OpenMP's others
// do not live on across a fork.
static void team_test_expect_death(void (*crash)(void), const char* part, const char* other_part) {
    int ends[2];
    if (pipe(ends) != 0) {
        CHECK(false, "no pipe: %s", strerror(errno));
        return;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        dup2(ends[1], STDERR_FILENO);
        omp_set_num_threads(1);
        alarm(20);
        crash();
        _exit(0);
    }
    close(ends[1]);
    char text[16384];
    size_t length = 0;
    ssize_t got;
    while ((got = read(ends[0], text + length, sizeof(text) - 1 - length)) > 0) { length += (size_t)got; }
    text[length] = 0;
    close(ends[0]);
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "no child: %s", strerror(errno));
    CHECK(status != 0 && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM), "the bug was not caught (status %d)", status);
    CHECK(strstr(text, part), "expected \"%s\" in the message, found: %.600s", part, text);
    CHECK(strstr(text, other_part), "expected \"%s\" in the message, found: %.600s", other_part, text);
}

// A barrier is missing between the write and the read of another thread's value. out[row * n + i]; scratch: n floats
DEVICE void team_bug_missing_sync_row(Team t, size_t row, float* out, int n) {
    float* scratch = (float*)t.scratch;
    TEAM_FOR(i, n) { scratch[i] = (float)i; }
    TEAM_FOR(i, n) { out[row * (size_t)n + (size_t)i] = scratch[(i + 40) % n]; }
}

static void team_test_missing_sync_once(void) {
    enum { ROWS = 9, COUNT = 80 };
    float host[ROWS * COUNT];
    float* out = (float*)need(device_alloc(sizeof(host)));
    LAUNCH_SCRATCH(ROWS, WARP_TEAM, COUNT * sizeof(float), team_bug_missing_sync_row, out, COUNT);
    device_download(host, out, sizeof(host));
    for (int row = 0; row < ROWS; row++) {
        int wrong = 0;
        for (int i = 0; i < COUNT; i++) { wrong += !(host[row * COUNT + i] == (float)((i + 40) % COUNT)); }
        CHECK(wrong > 0, "row %d: a missing sync went unseen", row);
    }
    device_free(out, sizeof(host));
}

static void team_test_missing_sync(void) { emulation_each(team_test_missing_sync_once); }

DEVICE void team_bug_divergent_row(Team t, size_t row) {
    (void)row;
    if (t.rank < t.size / 2) {
        team_sync(t);
    } else {
        team_sum(t, 1.0f);
    }
}

DEVICE void team_bug_two_sites_row(Team t, size_t row) {
    (void)row;
    if (t.rank % 2 == 0) {
        team_sync(t);
    } else {
        team_sync(t);
    }
}

DEVICE void team_bug_sync_in_loop_row(Team t, size_t row, int n) {
    (void)row;
    TEAM_FOR(i, n) { team_sync(t); }
}

DEVICE void team_bug_return_row(Team t, size_t row) {
    (void)row;
    if (t.rank == 7) { return; }
    team_max(t, 1.0f);
}

static void team_bug_divergent(void) { LAUNCH(3, WARP_TEAM, team_bug_divergent_row); }
static void team_bug_two_sites(void) { LAUNCH(3, WARP_TEAM, team_bug_two_sites_row); }
static void team_bug_sync_in_loop(void) { LAUNCH(3, WARP_TEAM, team_bug_sync_in_loop_row, 261); }
static void team_bug_return(void) { LAUNCH(3, WARP_TEAM, team_bug_return_row); }

static void team_test_sites_once(void) {
    team_test_expect_death(team_bug_divergent, "team_bug_divergent_row, block ", "team_sum at test_team.h:");
    team_test_expect_death(team_bug_two_sites, "team_bug_two_sites_row, block ", "the same team operation");
    team_test_expect_death(team_bug_sync_in_loop, "team_bug_sync_in_loop_row, block ", "team_sync at test_team.h:");
    team_test_expect_death(team_bug_return, "team_bug_return_row, block ", "waits in team_end_of_body");
}

static void team_test_sites(void) { emulation_each(team_test_sites_once); }

static void team_bug_leave_block(void) {
    cuda_on_cpu_launch(1, 64, 0, "leave", [] {
        if (threadIdx.x != 5) { __syncthreads(); }
    });
}

static void team_bug_leave_warp(void) {
    cuda_on_cpu_launch(1, 32, 0, "leave", [] {
        if (threadIdx.x != 5) { __syncwarp(); }
    });
}

// One half of a warp waits for the block, the other for the warp.
static void team_bug_deadlock(void) {
    cuda_on_cpu_launch(1, 64, 0, "deadlock", [] {
        if (threadIdx.x < 16) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    });
}

static void team_bug_masks(void) {
    cuda_on_cpu_launch(1, 32, 0, "masks", [] { __syncwarp(threadIdx.x < 16 ? 0x0001ffffu : 0xffffffffu); });
}

static void team_bug_nested_launch(void) {
    omp_set_num_threads(2);
#pragma omp parallel num_threads(2)
    LAUNCH(1, WARP_TEAM, team_test_nothing_row);
}

static void team_test_leave_once(void) {
    team_test_expect_death(team_bug_leave_block, "leave, block 0: thread", "thread 5 has left the kernel");
    team_test_expect_death(team_bug_leave_warp, "leave, block 0: thread", "thread 5 has left the kernel");
    team_test_expect_death(team_bug_deadlock, "deadlock, block 0: thread", "each waits for the other");
    team_test_expect_death(team_bug_masks, "masks, block 0: thread", "the same mask");
}

static void team_test_leave(void) { emulation_each_order(team_test_leave_once); }

// Lanes 0-15 read lane 20, which takes no part: NaN. Lanes 16-31 exchange among themselves.
static void team_test_absent_lanes_once(void) {
    float host[32], *found = host;
    cuda_on_cpu_launch(1, 32, 0, "absent", [=] {
        int lane = (int)threadIdx.x;
        if (lane < 16) {
            found[lane] = __shfl_sync(0x0000ffffu, (float)lane, 20);
        } else {
            found[lane] = __shfl_xor_sync(0xffff0000u, (float)lane, 1);
        }
    });
    for (int lane = 0; lane < 32; lane++) {
        CHECK(lane < 16 ? isnan(host[lane]) : host[lane] == (float)(lane ^ 1), "lane %d read %g", lane, host[lane]);
    }
}

static void team_test_absent_lanes(void) { emulation_each_order(team_test_absent_lanes_once); }

// Returns a value of the new stack frame, so that the compiler keeps all frames.
static int team_bug_recurse(int depth) {
    volatile char frame[2048];
    frame[0] = (char)depth;
    return depth > 100000 ? 0 : team_bug_recurse(depth + 1) + frame[0];
}

static void team_bug_stack(void) {
    cuda_on_cpu_launch(1, 32, 0, "stack", [] { fprintf(stderr, "%d", team_bug_recurse((int)threadIdx.x)); });
}

static void team_test_guard_page(void) { team_test_expect_death(team_bug_stack, "", CUDA_ON_CPU_ASAN ? "stack-overflow" : ""); }

static void team_test_nested_launch(void) { team_test_expect_death(team_bug_nested_launch, "team_test_nothing_row", "inside a parallel region"); }

// out: one float a row, one row too few
DEVICE void team_bug_past_end_row(Team t, size_t row, float* out) {
    if (t.rank == 0) { out[row] = 1.0f; }
}

// One float past the scratch, which is another team's or nobody's. Scratch: n floats
DEVICE void team_bug_past_scratch_row(Team t, size_t row, int n) {
    (void)row;
    float* scratch = (float*)t.scratch;
    TEAM_FOR(i, n + 1) { scratch[i] = 0.0f; }
}

DEVICE void team_bug_before_scratch_row(Team t, size_t row) {
    (void)row;
    float* scratch = (float*)t.scratch - 1;
    if (t.rank == 0) { *scratch = 0.0f; }
}

static void team_bug_past_end(void) {
    void* out = NULL;
    CUDA_CHECK(cudaMalloc(&out, 7 * sizeof(float)));
    LAUNCH(8, WARP_TEAM, team_bug_past_end_row, (float*)out);
}

static void team_bug_past_scratch(void) { LAUNCH_SCRATCH(8, WARP_TEAM, 7 * sizeof(float), team_bug_past_scratch_row, 7); }
static void team_bug_past_aligned_scratch(void) { LAUNCH_SCRATCH(8, WARP_TEAM, 8 * sizeof(float), team_bug_past_scratch_row, 8); }
static void team_bug_before_scratch(void) { LAUNCH_SCRATCH(8, WARP_TEAM, 8 * sizeof(float), team_bug_before_scratch_row); }

// Seen in the build with -fsanitize=address only; elsewhere the row shows that such a build is what is missing.
static void team_test_out_of_bounds(void) {
    CHECK(true, "without ASan nothing is tried");
#if CUDA_ON_CPU_ASAN
    team_test_expect_death(team_bug_past_end, "heap-buffer-overflow", "team_bug_past_end_row");
    team_test_expect_death(team_bug_past_scratch, "AddressSanitizer", "team_bug_past_scratch_row");
    team_test_expect_death(team_bug_past_aligned_scratch, "AddressSanitizer", "team_bug_past_scratch_row");
    team_test_expect_death(team_bug_before_scratch, "AddressSanitizer", "team_bug_before_scratch_row");
#else
    (void)team_bug_past_end;
    (void)team_bug_past_scratch;
    (void)team_bug_past_aligned_scratch;
    (void)team_bug_before_scratch;
#endif
}
#endif // CUDA_ON_CPU

static const TestRow team_tests[] = {
    {"team: sum, max, sync at sizes 32 to 256, counts 0 to 1000", team_test_sizes},
    {"team: each team has its own scratch", team_test_own_scratch},
    {"team: arguments take the body's types", team_test_types},
    {"team: sums depend on the team's size alone", team_test_deterministic},
    {"team: more than 2^31 rows", team_test_many},
    {"team: vectors at every alignment and ragged end", team_test_vec},
    {"team: layernorm against double precision", team_test_layernorm},
#ifdef CUDA_ON_CPU
    {"emulation: a missing sync gives wrong values", team_test_missing_sync},
    {"emulation: a team that meets at different places is reported", team_test_sites},
    {"emulation: leaving threads, deadlocks and masks are reported", team_test_leave},
    {"emulation: lanes that take no part read as NaN", team_test_absent_lanes},
    {"emulation: a stack that runs over hits its guard", team_test_guard_page},
    {"emulation: a launch inside a parallel region is refused", team_test_nested_launch},
    {"emulation: out of bounds is seen under ASan", team_test_out_of_bounds},
#endif
};
