// test_emulation.h - emulation_each(run) for all test files: repeats a row for several team sizes and every order of threads on the
// emulated GPU (cuda_on_cpu.h), and runs it once elsewhere. And the emulation's own tests: each kind of planted bug must be caught
// with a message that names the place. A bug that ends in abort is run in a child process whose stderr is read.
#pragma once
#include "../kernels/device.cuh"
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

#ifdef CUDA_ON_CPU
// Runs `crash` in a child; it must die, and print a line that holds both parts. The child keeps to one OS thread: OpenMP's others
// do not live on across a fork.
static void emulation_test_expect_death(void (*crash)(void), const char* part, const char* other_part) {
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
DEVICE void emulation_bug_missing_sync_row(Team t, size_t row, float* out, int n) {
    float* scratch = (float*)t.scratch;
    TEAM_FOR(i, n) { scratch[i] = (float)i; }
    TEAM_FOR(i, n) { out[row * (size_t)n + (size_t)i] = scratch[(i + 40) % n]; }
}

static void emulation_test_missing_sync_once(void) {
    enum { ROWS = 9, COUNT = 80 };
    float host[ROWS * COUNT];
    float* out = (float*)need(device_alloc(sizeof(host)));
    LAUNCH_SCRATCH(ROWS, WARP_TEAM, COUNT * sizeof(float), emulation_bug_missing_sync_row, out, COUNT);
    device_download(host, out, sizeof(host));
    for (int row = 0; row < ROWS; row++) {
        int wrong = 0;
        for (int i = 0; i < COUNT; i++) { wrong += !(host[row * COUNT + i] == (float)((i + 40) % COUNT)); }
        CHECK(wrong > 0, "row %d: a missing sync went unseen", row);
    }
    device_free(out, sizeof(host));
}

static void emulation_test_missing_sync(void) { emulation_each(emulation_test_missing_sync_once); }

DEVICE void emulation_bug_divergent_row(Team t, size_t row) {
    (void)row;
    if (t.rank < t.size / 2) {
        team_sync(t);
    } else {
        team_sum(t, 1.0f);
    }
}

DEVICE void emulation_bug_two_sites_row(Team t, size_t row) {
    (void)row;
    if (t.rank % 2 == 0) {
        team_sync(t);
    } else {
        team_sync(t);
    }
}

DEVICE void emulation_bug_sync_in_loop_row(Team t, size_t row, int n) {
    (void)row;
    TEAM_FOR(i, n) { team_sync(t); }
}

DEVICE void emulation_bug_return_row(Team t, size_t row) {
    (void)row;
    if (t.rank == 7) { return; }
    team_max(t, 1.0f);
}

static void emulation_bug_divergent(void) { LAUNCH(3, WARP_TEAM, emulation_bug_divergent_row); }
static void emulation_bug_two_sites(void) { LAUNCH(3, WARP_TEAM, emulation_bug_two_sites_row); }
static void emulation_bug_sync_in_loop(void) { LAUNCH(3, WARP_TEAM, emulation_bug_sync_in_loop_row, 261); }
static void emulation_bug_return(void) { LAUNCH(3, WARP_TEAM, emulation_bug_return_row); }

static void emulation_test_sites_once(void) {
    emulation_test_expect_death(emulation_bug_divergent, "emulation_bug_divergent_row, block ", "team_sum at test_emulation.h:");
    emulation_test_expect_death(emulation_bug_two_sites, "emulation_bug_two_sites_row, block ", "the same team operation");
    emulation_test_expect_death(emulation_bug_sync_in_loop, "emulation_bug_sync_in_loop_row, block ", "team_sync at test_emulation.h:");
    emulation_test_expect_death(emulation_bug_return, "emulation_bug_return_row, block ", "waits in team_end_of_body");
}

static void emulation_test_sites(void) { emulation_each(emulation_test_sites_once); }

static void emulation_bug_leave_block(void) {
    cuda_on_cpu_launch(1, 64, 0, "leave", [] {
        if (threadIdx.x != 5) { __syncthreads(); }
    });
}

static void emulation_bug_leave_warp(void) {
    cuda_on_cpu_launch(1, 32, 0, "leave", [] {
        if (threadIdx.x != 5) { __syncwarp(); }
    });
}

// One half of a warp waits for the block, the other for the warp.
static void emulation_bug_deadlock(void) {
    cuda_on_cpu_launch(1, 64, 0, "deadlock", [] {
        if (threadIdx.x < 16) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    });
}

static void emulation_bug_masks(void) {
    cuda_on_cpu_launch(1, 32, 0, "masks", [] { __syncwarp(threadIdx.x < 16 ? 0x0001ffffu : 0xffffffffu); });
}

static void emulation_bug_nested_launch(void) {
    omp_set_num_threads(2);
#pragma omp parallel num_threads(2)
    LAUNCH(1, WARP_TEAM, emulation_bug_divergent_row);
}

static void emulation_test_leave_once(void) {
    emulation_test_expect_death(emulation_bug_leave_block, "leave, block 0: thread", "thread 5 has left the kernel");
    emulation_test_expect_death(emulation_bug_leave_warp, "leave, block 0: thread", "thread 5 has left the kernel");
    emulation_test_expect_death(emulation_bug_deadlock, "deadlock, block 0: thread", "each waits for the other");
    emulation_test_expect_death(emulation_bug_masks, "masks, block 0: thread", "the same mask");
}

static void emulation_test_leave(void) { emulation_each_order(emulation_test_leave_once); }

// Lanes 0-15 read lane 20, which takes no part: NaN. Lanes 16-31 exchange among themselves.
static void emulation_test_absent_lanes_once(void) {
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

static void emulation_test_absent_lanes(void) { emulation_each_order(emulation_test_absent_lanes_once); }

// Returns a value of the new stack frame, so that the compiler keeps all frames.
static int emulation_bug_recurse(int depth) {
    volatile char frame[2048];
    frame[0] = (char)depth;
    return depth > 100000 ? 0 : emulation_bug_recurse(depth + 1) + frame[0];
}

static void emulation_bug_stack(void) {
    cuda_on_cpu_launch(1, 32, 0, "stack", [] { fprintf(stderr, "%d", emulation_bug_recurse((int)threadIdx.x)); });
}

static void emulation_test_guard_page(void) { emulation_test_expect_death(emulation_bug_stack, "", CUDA_ON_CPU_ASAN ? "stack-overflow" : ""); }

static void emulation_test_nested_launch(void) {
    emulation_test_expect_death(emulation_bug_nested_launch, "emulation_bug_divergent_row", "inside a parallel region");
}

// out: one float a row, one row too few
DEVICE void emulation_bug_past_end_row(Team t, size_t row, float* out) {
    if (t.rank == 0) { out[row] = 1.0f; }
}

// One float past the scratch, which is another team's or nobody's. Scratch: n floats
DEVICE void emulation_bug_past_scratch_row(Team t, size_t row, int n) {
    (void)row;
    float* scratch = (float*)t.scratch;
    TEAM_FOR(i, n + 1) { scratch[i] = 0.0f; }
}

DEVICE void emulation_bug_before_scratch_row(Team t, size_t row) {
    (void)row;
    float* scratch = (float*)t.scratch - 1;
    if (t.rank == 0) { *scratch = 0.0f; }
}

static void emulation_bug_past_end(void) {
    void* out = NULL;
    CUDA_CHECK(cudaMalloc(&out, 7 * sizeof(float)));
    LAUNCH(8, WARP_TEAM, emulation_bug_past_end_row, (float*)out);
}

static void emulation_bug_past_scratch(void) { LAUNCH_SCRATCH(8, WARP_TEAM, 7 * sizeof(float), emulation_bug_past_scratch_row, 7); }
static void emulation_bug_past_aligned_scratch(void) { LAUNCH_SCRATCH(8, WARP_TEAM, 8 * sizeof(float), emulation_bug_past_scratch_row, 8); }
static void emulation_bug_before_scratch(void) { LAUNCH_SCRATCH(8, WARP_TEAM, 8 * sizeof(float), emulation_bug_before_scratch_row); }

// Seen in the build with -fsanitize=address only; elsewhere the row shows that such a build is what is missing.
static void emulation_test_out_of_bounds(void) {
    CHECK(true, "without ASan nothing is tried");
#if CUDA_ON_CPU_ASAN
    emulation_test_expect_death(emulation_bug_past_end, "heap-buffer-overflow", "emulation_bug_past_end_row");
    emulation_test_expect_death(emulation_bug_past_scratch, "AddressSanitizer", "emulation_bug_past_scratch_row");
    emulation_test_expect_death(emulation_bug_past_aligned_scratch, "AddressSanitizer", "emulation_bug_past_scratch_row");
    emulation_test_expect_death(emulation_bug_before_scratch, "AddressSanitizer", "emulation_bug_before_scratch_row");
#else
    (void)emulation_bug_past_end;
    (void)emulation_bug_past_scratch;
    (void)emulation_bug_past_aligned_scratch;
    (void)emulation_bug_before_scratch;
#endif
}

static const TestRow emulation_tests[] = {
    {"emulation: a missing sync gives wrong values", emulation_test_missing_sync},
    {"emulation: a team that meets at different places is reported", emulation_test_sites},
    {"emulation: leaving threads, deadlocks and masks are reported", emulation_test_leave},
    {"emulation: lanes that take no part read as NaN", emulation_test_absent_lanes},
    {"emulation: a stack that runs over hits its guard", emulation_test_guard_page},
    {"emulation: a launch inside a parallel region is refused", emulation_test_nested_launch},
    {"emulation: out of bounds is seen under ASan", emulation_test_out_of_bounds},
};
#endif // CUDA_ON_CPU
