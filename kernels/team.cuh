// team.cuh - one source, two targets. An op body is a plain function
//     DEVICE void op_row(Team t, size_t row, args...)
// that a *team* runs: the group of threads that shares one row, tile or chunk. LAUNCH(count, team_size, op_row, args...) runs it
// for row = 0..count-1. On the CPU a team is one thread (rank 0, size 1, known to the compiler), TEAM_FOR is a unit-stride loop
// that gets vectorised, and OpenMP spreads the teams over cores. On the GPU a team is a warp (32 threads, several share a block)
// or a block of 64, 128 or 256. This is the only file with threadIdx, shuffles and __shared__.
//
// Rules for bodies: control flow is uniform in the team up to every team_* call; the scratch memory t.scratch (size asked for by
// LAUNCH_SCRATCH, 16-byte aligned, undefined at the start) is shared by the team and needs team_sync between a write and
// another thread's read; sums are fp32; no body depends on the number of teams or threads. Arguments of LAUNCH must be free of
// side effects. Never launch from inside a parallel region.
#pragma once
#include "base.h"

#define WARP_TEAM 32
#define BLOCK_TEAM 256

typedef struct {
    int rank, size;
    char* scratch;
} Team;

#if defined(__CUDACC__) || defined(CUDA_ON_CPU)
#define ON_GPU 1
#ifdef CUDA_ON_CPU
#include "../dev/cuda_on_cpu.h"
// Every team operation tells the emulation where in the source it was called.
#define TEAM_CALLER , const char* file = __builtin_FILE(), int line = __builtin_LINE()
#define TEAM_CALL cuda_on_cpu_site(file, line, __func__)
#define TEAM_MAX_BLOCKS cuda_on_cpu_max_blocks
#else
#include <cuda_runtime.h>
#define TEAM_CALLER
#define TEAM_CALL
#define TEAM_MAX_BLOCKS ((size_t)1 << 20)
#endif

#define DEVICE static __device__ __forceinline__

// The one stream of the program; work is ordered, nothing waits for the host.
static cudaStream_t device_stream = 0;

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
static inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
    if (status == cudaSuccess) { return; }
    fprintf(stderr, "error: %s:%d: %s: %s\n", file, line, call, cudaGetErrorString(status));
    exit(1);
}

#define TEAM_FOR(i, n) for (int i = t.rank, n_##i = (n); i < n_##i; i += t.size)
#define TEAM_SUM_FOR(i, n, ...) TEAM_FOR(i, n)
#define TEAM_MAX_FOR(i, n, ...) TEAM_FOR(i, n)

// Shared memory of a block: for each team TEAM_PARTIALS floats that team_sum and team_max use, then the team's scratch.
#define TEAM_PARTIALS 32
#define TEAM_RESERVED (TEAM_PARTIALS * sizeof(float))

DEVICE float* team_partials(Team t) { return (float*)(t.scratch - TEAM_RESERVED); }

// A team of 32 is a warp and shares its block with others: it may never wait at the block's barrier.
DEVICE void team_barrier(Team t) {
    if (t.size <= 32) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

DEVICE void team_sync(Team t TEAM_CALLER) {
    TEAM_CALL;
    team_barrier(t);
}

DEVICE float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) { x += __shfl_xor_sync(0xffffffffu, x, offset); }
    return x;
}

DEVICE float warp_max(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) { x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset)); }
    return x;
}

// The value of the team's warp number `lane`, to be combined by one more warp operation; `none` beyond the last.
DEVICE float team_gather(Team t, float warp_value, float none) {
    float* partials = team_partials(t);
    int lane = t.rank & 31;
    team_barrier(t); // the last call's readers are done
    if (lane == 0) { partials[t.rank >> 5] = warp_value; }
    team_barrier(t);
    return lane < t.size / 32 ? partials[lane] : none;
}

// Every thread of the team gets the sum, added in an order that depends on the team's size alone.
DEVICE float team_sum(Team t, float x TEAM_CALLER) {
    TEAM_CALL;
    x = warp_sum(x);
    return t.size <= 32 ? x : warp_sum(team_gather(t, x, 0.0f));
}

// Every thread of the team gets the maximum. A NaN is passed over, as fmaxf does.
DEVICE float team_max(Team t, float x TEAM_CALLER) {
    TEAM_CALL;
    x = warp_max(x);
    return t.size <= 32 ? x : warp_max(team_gather(t, x, -INFINITY));
}

DEVICE char* team_shared_memory(void) {
#ifdef CUDA_ON_CPU
    return cuda_on_cpu_shared();
#else
    extern __shared__ __align__(16) char team_shared[];
    return team_shared;
#endif
}

DEVICE void team_end_of_body(Team t TEAM_CALLER) {
    TEAM_CALL;
    team_barrier(t);
}

// The emulation fills a team's scratch with NaN before each body; on the GPU it holds whatever was there.
DEVICE void team_fresh_scratch(Team t, size_t scratch_bytes) {
#ifdef CUDA_ON_CPU
    size_t after = round_up(scratch_bytes, 16) - scratch_bytes;
    if (t.rank == 0) { cuda_on_cpu_fresh_scratch(t.scratch, scratch_bytes, t.size == 32 ? TEAM_RESERVED : 0, after); }
    team_sync(t);
#else
    (void)t;
    (void)scratch_bytes;
#endif
}

// The body is a template argument: it is inlined, and its name shows in profilers. So is the team size, which makes strides and
// the choice of barrier constants; 0 stands for "as asked at run time" (the emulation).
template <auto body, int fixed_size, class... Args>
__global__ void team_kernel(size_t count, int team_size, size_t scratch_bytes, Args... args) {
    const int size = fixed_size ? fixed_size : team_size;
    const int teams = (int)blockDim.x / size, team = (int)threadIdx.x / size;
    const size_t share = TEAM_RESERVED + round_up(scratch_bytes, 16);
    Team t = {(int)threadIdx.x % size, size, team_shared_memory() + (size_t)team * share + TEAM_RESERVED};
    const size_t stride = (size_t)gridDim.x * (size_t)teams;
    // teams of one block may take different numbers of rounds: only teams that fill their block use its barrier
    for (size_t i = (size_t)blockIdx.x * (size_t)teams + (size_t)team; i < count; i += stride) {
        team_fresh_scratch(t, scratch_bytes);
        body(t, i, args...);
        team_end_of_body(t); // the next round may overwrite the scratch
    }
}

// The grid of a launch; its teams stride over the rows that are left.
static inline unsigned team_blocks(size_t count, size_t teams_a_block, size_t most) {
    return (unsigned)min_size(count / teams_a_block + (count % teams_a_block != 0), most);
}

// Takes the parameter types from the body's own signature, so that NULL, 0 and double arguments convert as in a plain call.
template <auto body> struct TeamLaunch;
template <class... Args, void (*body)(Team, size_t, Args...)> struct TeamLaunch<body> {
    template <int asked_size> static void run(size_t count, size_t scratch_bytes, Args... args) {
        if (count == 0) { return; }
        int team_size = asked_size;
#ifdef CUDA_ON_CPU
        if (cuda_on_cpu_team_size) { team_size = cuda_on_cpu_team_size; }
#endif
        int teams = team_size == 32 && scratch_bytes <= 8192 ? 4 : 1; // warps share a block for occupancy
        unsigned blocks = team_blocks(count, (size_t)teams, TEAM_MAX_BLOCKS), threads = (unsigned)(team_size * teams);
        size_t shared = (TEAM_RESERVED + round_up(scratch_bytes, 16)) * (size_t)teams;
#ifdef CUDA_ON_CPU
        cuda_on_cpu_launch(blocks, threads, shared, __PRETTY_FUNCTION__,
                           [=] { team_kernel<body, 0, Args...>(count, team_size, scratch_bytes, args...); });
#else
        auto kernel = team_kernel<body, asked_size, Args...>;
        if (shared > 48 * 1024) { CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared)); }
        kernel<<<blocks, threads, shared, device_stream>>>(count, team_size, scratch_bytes, args...);
        CUDA_CHECK(cudaGetLastError());
#endif
    }
};

#define LAUNCH_SCRATCH(count, team_size, scratch_bytes, body, ...)                                                           \
    do {                                                                                                                     \
        static_assert((team_size) == 32 || (team_size) == 64 || (team_size) == 128 || (team_size) == 256, "team size");      \
        TeamLaunch<body>::run<(team_size)>((count), (scratch_bytes), ##__VA_ARGS__);                                         \
    } while (0)

#else // CPU

#define ON_GPU 0
#define DEVICE static inline __attribute__((always_inline))

#ifdef __clang__
#define TEAM_FOR(i, n) _Pragma("clang loop vectorize(assume_safety)") for (int i = t.rank, n_##i = (n); i < n_##i; i++)
#else
#define TEAM_FOR(i, n) _Pragma("GCC ivdep") for (int i = t.rank, n_##i = (n); i < n_##i; i++)
#endif
// Without -ffast-math the compiler may not reorder a sum or a maximum: these say that it may.
#define TEAM_SUM_FOR(i, n, ...) DO_PRAGMA(omp simd reduction(+ : __VA_ARGS__)) for (int i = 0; i < (n); i++)
#define TEAM_MAX_FOR(i, n, ...) DO_PRAGMA(omp simd reduction(max : __VA_ARGS__)) for (int i = 0; i < (n); i++)

DEVICE void team_sync(Team t) { (void)t; }
DEVICE float team_sum(Team t, float x) {
    (void)t;
    return x;
}
DEVICE float team_max(Team t, float x) {
    (void)t;
    return x;
}

// This thread's scratch: grown on first use, kept for the life of the thread.
static inline char* team_arena(size_t bytes) {
    static __thread char* arena = NULL;
    static __thread size_t capacity = 0;
    if (bytes > capacity) {
        free(arena);
        capacity = round_up(bytes, 4096);
        arena = (char*)need(aligned_alloc(4096, capacity));
    }
    return arena;
}

#define LAUNCH_SCRATCH(count, team_size, scratch_bytes, body, ...)                                                           \
    do {                                                                                                                     \
        static_assert((team_size) == 32 || (team_size) == 64 || (team_size) == 128 || (team_size) == 256, "team size");      \
        const size_t count_ = (count), scratch_bytes_ = (scratch_bytes);                                                     \
        DO_PRAGMA(omp parallel if (count_ > 1)) {                                                                            \
            const Team team_ = {0, 1, team_arena(scratch_bytes_)};                                                           \
            DO_PRAGMA(omp for schedule(static)) for (size_t i_ = 0; i_ < count_; i_++) { body(team_, i_, ##__VA_ARGS__); }   \
        }                                                                                                                    \
    } while (0)
#endif

#define LAUNCH(count, team_size, body, ...) LAUNCH_SCRATCH(count, team_size, 0, body, ##__VA_ARGS__)
