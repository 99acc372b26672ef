// cuda_on_cpu.h - CUDA on the CPU, for tests alone: the GPU branch of team.cuh compiled by g++ or clang++ with -DCUDA_ON_CPU, so that
// a forgotten sync, a barrier that not all threads reach and an access out of bounds show without a GPU. Never a way to run.
//
// Every CUDA thread is a fiber with a stack of its own (and a guard page under it). A block's fibers share one OS thread: one runs
// until it waits at a warp operation or a block barrier, then the next that is ready goes on: the lowest, the highest or a random
// one, as cuda_on_cpu_order says. Blocks are spread over OpenMP threads.
//
// What is checked: all threads named by a barrier arrive, and from the same line of the source; no thread leaves while others wait
// for it. A violation prints one line and aborts. Fresh memory of every kind holds NaN (all bits set), values read from lanes that
// take no part are NaN, and under -fsanitize=address the gaps between the scratch of two teams are poisoned.
// What is not: an asynchronous copy is done at once, and a shuffle orders memory too, which a GPU does not promise.
#pragma once
#ifndef __cplusplus
#error "CUDA on the CPU is C++, like the CUDA it stands for: compile with g++ -x c++ -std=c++20 -DCUDA_ON_CPU"
#endif
#include "../kernels/base.h"
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_CPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ASAN 1
#endif
#endif
#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define CUDA_ON_CPU_STACK ((size_t)256 << 10) // ASan puts red zones around every local variable
#else
#define CUDA_ON_CPU_ASAN 0
#define CUDA_ON_CPU_STACK ((size_t)64 << 10)
#endif

#define __global__ static
#define __device__
#define __forceinline__ inline __attribute__((always_inline))

// ---------------------------------------------------------------------------------------------------------------------------
// Settings for tests

enum CudaOrder { CUDA_ORDER_FORWARD, CUDA_ORDER_REVERSE, CUDA_ORDER_RANDOM, CUDA_ORDERS };
static const char* const cuda_order_names[CUDA_ORDERS] = {"forward", "reverse", "random"};

static CudaOrder cuda_order_from_environment(void) {
    const char* wanted = getenv("CUDA_ON_CPU_ORDER");
    if (!wanted) { return CUDA_ORDER_FORWARD; }
    for (int i = 0; i < CUDA_ORDERS; i++) {
        if (!strcmp(wanted, cuda_order_names[i])) { return (CudaOrder)i; }
    }
    fprintf(stderr, "error: CUDA_ON_CPU_ORDER is \"%s\"; it may be forward, reverse or random\n", wanted);
    exit(1);
}

static CudaOrder cuda_on_cpu_order = cuda_order_from_environment(); // which ready thread runs next
static unsigned cuda_on_cpu_seed = 1;                               // of the random order; every block draws its own sequence from it
static int cuda_on_cpu_team_size = 0;                               // 32, 64, 128, 256: instead of what LAUNCH asks for; 0: as asked
static size_t cuda_on_cpu_max_blocks = 8;                           // launches cap their grid here, so that teams stride over their rows

// ---------------------------------------------------------------------------------------------------------------------------
// Fibers

enum { WARP_LANES = 32, BLOCK_MAX_THREADS = 1024, BLOCK_MAX_WARPS = BLOCK_MAX_THREADS / WARP_LANES };

enum FiberState { FIBER_READY, FIBER_AT_WARP, FIBER_AT_BLOCK, FIBER_DONE };

// The call in the source that a thread waits in.
struct CudaSite {
    const char *file, *operation;
    int line;
};

struct CudaIndex {
    unsigned x;
};

struct Fiber {
    void* stack_pointer; // while it does not run
    char* stack;         // lowest usable byte
    void* fake_stack;    // ASan's
    CudaIndex index;
    FiberState state;
    CudaSite site;
    uint32_t mask;           // lanes that take part in the warp operation it waits in
    int source;              // the lane it reads
    uint64_t given, received; // its value in that operation, and what it read
};

// One bit a lane.
struct Warp {
    uint32_t ready, waiting, done;
};

struct CudaLaunch {
    unsigned blocks, threads;
    size_t shared_bytes;
    const char* name; // __PRETTY_FUNCTION__ of the launching function
    void (*call)(const void* kernel);
    const void* kernel;
};

// A block that runs; every OS thread has one and uses it again.
struct Block {
    Fiber fibers[BLOCK_MAX_THREADS];
    Warp warps[BLOCK_MAX_WARPS];
    uint32_t ready_warps; // one bit a warp: has a ready lane
    int waiting, done;    // threads at the block barrier, threads that have left
    Fiber* first_waiting; // at the block barrier
    Fiber* running;       // NULL: the launching thread itself
    const CudaLaunch* launch;
    CudaIndex index, threads, blocks;
    unsigned random;
    char* shared;
    size_t shared_bytes;
    void *stack_pointer, *fake_stack; // of the launching thread
    const void* stack;
    size_t stack_bytes;
};

static thread_local Block* cuda_block = NULL;

#define threadIdx (cuda_block->running->index)
#define blockIdx (cuda_block->index)
#define blockDim (cuda_block->threads)
#define gridDim (cuda_block->blocks)

// Saves the registers that a call must keep on the running stack, stores that stack's pointer at *save and goes on with `load`.
extern "C" void cuda_on_cpu_switch(void** save, void* load);
#if defined(__x86_64__)
enum { FIBER_ENTRY_WORD = 6, FIBER_FRAME_WORDS = 8 };
__asm__(".text\n"
        ".weak cuda_on_cpu_switch\n"
        ".type cuda_on_cpu_switch, @function\n"
        "cuda_on_cpu_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size cuda_on_cpu_switch, .-cuda_on_cpu_switch\n");
#elif defined(__aarch64__)
enum { FIBER_ENTRY_WORD = 11, FIBER_FRAME_WORDS = 20 };
__asm__(".text\n"
        ".weak cuda_on_cpu_switch\n"
        ".type cuda_on_cpu_switch, %function\n"
        "cuda_on_cpu_switch:\n"
        "    sub sp, sp, #160\n"
        "    stp x19, x20, [sp, #0]\n    stp x21, x22, [sp, #16]\n    stp x23, x24, [sp, #32]\n    stp x25, x26, [sp, #48]\n"
        "    stp x27, x28, [sp, #64]\n    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n    stp d12, d13, [sp, #128]\n    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n    str x9, [x0]\n"
        "    mov sp, x1\n"
        "    ldp x19, x20, [sp, #0]\n    ldp x21, x22, [sp, #16]\n    ldp x23, x24, [sp, #32]\n    ldp x25, x26, [sp, #48]\n"
        "    ldp x27, x28, [sp, #64]\n    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n    ldp d12, d13, [sp, #128]\n    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n"
        "    ret\n"
        ".size cuda_on_cpu_switch, .-cuda_on_cpu_switch\n");
#else
#error "CUDA on the CPU has fiber switches for x86-64 and aarch64; add cuda_on_cpu_switch for this processor, or test on one of those"
#endif

// Leaves the running fiber (or the launching thread) for `to`; NULL is the launching thread. Returns when somebody comes back.
static void fiber_resume(Fiber* to) {
    Block* b = cuda_block;
    Fiber* from = b->running;
    b->running = to;
#if CUDA_ON_CPU_ASAN
    void** keep = !from ? &b->fake_stack : from->state == FIBER_DONE ? NULL : &from->fake_stack;
    __sanitizer_start_switch_fiber(keep, to ? to->stack : b->stack, to ? CUDA_ON_CPU_STACK : b->stack_bytes);
#endif
    cuda_on_cpu_switch(from ? &from->stack_pointer : &b->stack_pointer, to ? to->stack_pointer : b->stack_pointer);
#if CUDA_ON_CPU_ASAN
    __sanitizer_finish_switch_fiber(from ? from->fake_stack : b->fake_stack, NULL, NULL);
#endif
}

static int fiber_thread(const Fiber* fiber) { return (int)fiber->index.x; }

// ---------------------------------------------------------------------------------------------------------------------------
// Reports: one line, then abort

// The body's name in "... [with ... void (* body)(...) = NAME; ...]" (g++) or "... [body = &NAME, ...]" (clang).
static void cuda_kernel_name(char* name, size_t capacity, const char* pretty) {
    const char* start = strstr(pretty, "body)(");
    start = start ? strstr(start, ") = ") : NULL;
    start = start ? start + 4 : strstr(pretty, "body = ");
    if (start && start[0] == 'b') { start += strlen("body = "); }
    start = start ? start + (start[0] == '&') : pretty;
    snprintf(name, capacity, "%.*s", (int)strcspn(start, ";,]> "), start);
}

static void fiber_describe(char* text, size_t capacity, const Fiber* fiber) {
    const char* slash = fiber->site.file ? strrchr(fiber->site.file, '/') : NULL;
    const char* file = slash ? slash + 1 : fiber->site.file;
    int thread = fiber_thread(fiber);
    if (fiber->state == FIBER_DONE) {
        snprintf(text, capacity, "thread %d has left the kernel", thread);
    } else if (!file) {
        snprintf(text, capacity, "thread %d waits at a barrier of no team operation", thread);
    } else {
        snprintf(text, capacity, "thread %d waits in %s at %s:%d", thread, fiber->site.operation, file, fiber->site.line);
    }
}

__attribute__((noreturn)) static void cuda_on_cpu_report(const Fiber* one, const Fiber* other, const char* rule) {
    char kernel[128], first[256], second[256];
    cuda_kernel_name(kernel, sizeof(kernel), cuda_block->launch->name);
    fiber_describe(first, sizeof(first), one);
    fiber_describe(second, sizeof(second), other);
    fprintf(stderr, "error: CUDA on the CPU: %s, block %u: %s, %s: %s\n", kernel, cuda_block->index.x, first, second, rule);
    abort();
}

static bool site_same(const CudaSite* a, const CudaSite* b) {
    return a->line == b->line && (a->operation == b->operation || !strcmp(a->operation, b->operation)) &&
           (a->file == b->file || !strcmp(a->file, b->file));
}

static void fiber_check_same_site(const Fiber* one, const Fiber* other) {
    if (!site_same(&one->site, &other->site)) {
        cuda_on_cpu_report(one, other, "all threads of a team must call the same team operation");
    }
}

// Nobody can go on. Shows one waiting thread and the first that waits for something else.
__attribute__((noreturn)) static void block_deadlock(Block* b) {
    const Fiber *one = NULL, *other = NULL;
    for (unsigned i = 0; i < b->threads.x; i++) {
        const Fiber* f = &b->fibers[i];
        if (f->state == FIBER_DONE) { continue; }
        if (!one) {
            one = other = f;
        } else if (other == one && (f->state != one->state || f->mask != one->mask || !site_same(&f->site, &one->site))) {
            other = f;
        }
    }
    cuda_on_cpu_report(one, other, "each waits for the other, for ever");
}

// ---------------------------------------------------------------------------------------------------------------------------
// Scheduling and barriers

static unsigned block_random(Block* b) {
    b->random = b->random * 1664525u + 1013904223u;
    return b->random >> 27;
}

// The index of a set bit, by the chosen order.
static int block_choose(Block* b, uint32_t bits) {
    if (cuda_on_cpu_order == CUDA_ORDER_FORWARD) { return __builtin_ctz(bits); }
    if (cuda_on_cpu_order == CUDA_ORDER_REVERSE) { return 31 - __builtin_clz(bits); }
    unsigned turn = block_random(b);
    uint32_t turned = bits >> turn | bits << (-turn & 31u);
    return (int)(((unsigned)__builtin_ctz(turned) + turn) & 31u);
}

static void block_make_ready(Block* b, int thread) {
    b->fibers[thread].state = FIBER_READY;
    b->warps[thread / WARP_LANES].ready |= 1u << thread % WARP_LANES;
    b->ready_warps |= 1u << thread / WARP_LANES;
}

static void block_make_unready(Block* b, int thread) {
    Warp* warp = &b->warps[thread / WARP_LANES];
    warp->ready &= ~(1u << thread % WARP_LANES);
    if (!warp->ready) { b->ready_warps &= ~(1u << thread / WARP_LANES); }
}

// Lets others run until this fiber is ready and chosen (a fiber that is done is never chosen).
static void fiber_yield(void) {
    Block* b = cuda_block;
    Fiber* next = NULL;
    if (b->ready_warps) {
        int warp = block_choose(b, b->ready_warps);
        next = &b->fibers[warp * WARP_LANES + block_choose(b, b->warps[warp].ready)];
    } else if (b->done < (int)b->threads.x) {
        block_deadlock(b);
    }
    if (next != b->running) { fiber_resume(next); }
}

// All of `mask` have arrived: each gets the value of the lane that it asked for.
static void warp_release(Block* b, Warp* warp, Fiber* lanes, uint32_t mask) {
    warp->waiting &= ~mask;
    for (uint32_t left = mask; left; left &= left - 1) {
        Fiber* f = &lanes[__builtin_ctz(left)];
        f->received = f->source >= 0 && f->source < WARP_LANES && (mask >> f->source & 1u) ? lanes[f->source].given : UINT64_MAX;
        block_make_ready(b, fiber_thread(f));
    }
}

// Waits for all lanes of the mask; returns the value given by lane `source`.
static uint64_t warp_exchange(uint32_t mask, uint64_t value, int source) {
    Block* b = cuda_block;
    Fiber* self = b->running;
    int thread = fiber_thread(self), lane = thread % WARP_LANES;
    Warp* warp = &b->warps[thread / WARP_LANES];
    Fiber* lanes = self - lane;
    self->state = FIBER_AT_WARP;
    self->mask = mask;
    self->source = source;
    self->given = value;
    if (!(mask >> lane & 1u)) { cuda_on_cpu_report(self, self, "a warp operation must name its own lane in the mask"); }
    if (mask & warp->done) { cuda_on_cpu_report(self, &lanes[__builtin_ctz(mask & warp->done)], "a thread may not leave while its team waits"); }
    uint32_t earlier = mask & warp->waiting;
    if (earlier) {
        const Fiber* other = &lanes[__builtin_ctz(earlier)];
        fiber_check_same_site(self, other);
        if (other->mask != mask) { cuda_on_cpu_report(self, other, "the lanes of one warp operation must name the same mask"); }
    }
    warp->waiting |= 1u << lane;
    block_make_unready(b, thread);
    if ((warp->waiting & mask) == mask) { warp_release(b, warp, lanes, mask); }
    fiber_yield();
    return self->received;
}

static void __syncthreads(void) {
    Block* b = cuda_block;
    Fiber* self = b->running;
    self->state = FIBER_AT_BLOCK;
    for (int i = 0; b->done > 0; i++) {
        if (b->fibers[i].state == FIBER_DONE) { cuda_on_cpu_report(self, &b->fibers[i], "a thread may not leave while its team waits"); }
    }
    if (b->waiting == 0) { b->first_waiting = self; }
    fiber_check_same_site(self, b->first_waiting);
    block_make_unready(b, fiber_thread(self));
    if (++b->waiting == (int)b->threads.x) {
        b->waiting = 0;
        for (int i = 0; i < (int)b->threads.x; i++) { block_make_ready(b, i); }
    }
    fiber_yield();
}

static inline void __syncwarp(unsigned mask = 0xffffffffu) { warp_exchange(mask, 0, 0); }

template <class T> static inline T warp_read(unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles carry up to 8 bytes");
    uint64_t given = 0;
    memcpy(&given, &value, sizeof(value));
    uint64_t received = warp_exchange(mask, given, source);
    memcpy(&value, &received, sizeof(value));
    return value;
}

static inline int warp_lane(void) { return fiber_thread(cuda_block->running) % WARP_LANES; }

template <class T> static inline T __shfl_sync(unsigned mask, T value, int source) { return warp_read(mask, value, source & 31); }
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits) { return warp_read(mask, value, warp_lane() ^ bits); }
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
    int lane = warp_lane();
    return warp_read(mask, value, lane >= (int)distance ? lane - (int)distance : lane);
}

// 16 bytes, accessed at once; the sanitizer checks the alignment that a GPU insists on.
struct __attribute__((aligned(16), may_alias)) uint4 {
    unsigned x, y, z, w;
};

static inline void __stwb(uint4* to, uint4 value) { *to = value; }

// ---------------------------------------------------------------------------------------------------------------------------
// Launches

static inline char* cuda_on_cpu_shared(void) { return cuda_block->shared; }

static inline void cuda_on_cpu_site(const char* file, int line, const char* operation) {
    Fiber* self = cuda_block->running;
    self->site.file = file;
    self->site.line = line;
    self->site.operation = operation;
}

// Called by one thread of a team before each body: the scratch is NaN, and what lies around it is out of bounds.
static inline void cuda_on_cpu_fresh_scratch(char* scratch, size_t bytes, size_t bytes_before, size_t bytes_after) {
    memset(scratch, 0xff, bytes);
#if CUDA_ON_CPU_ASAN
    __asan_poison_memory_region(scratch - bytes_before, bytes_before);
    __asan_poison_memory_region(scratch + bytes, bytes_after);
#else
    (void)bytes_before;
    (void)bytes_after;
#endif
}

// The first function on every fiber's stack.
static void fiber_main(void) {
    Block* b = cuda_block;
#if CUDA_ON_CPU_ASAN
    // the first fiber of a block learns where the launching thread's stack is
    __sanitizer_finish_switch_fiber(NULL, b->stack ? NULL : &b->stack, b->stack ? NULL : &b->stack_bytes);
#endif
    b->launch->call(b->launch->kernel);
    Fiber* self = b->running;
    int thread = fiber_thread(self), lane = thread % WARP_LANES;
    Warp* warp = &b->warps[thread / WARP_LANES];
    block_make_unready(b, thread);
    self->state = FIBER_DONE;
    warp->done |= 1u << lane;
    b->done++;
    for (int i = 0; i < (int)b->threads.x && (b->waiting || warp->waiting); i++) {
        const Fiber* other = &b->fibers[i];
        bool same_warp = i / WARP_LANES == thread / WARP_LANES;
        if (other->state == FIBER_AT_BLOCK || (other->state == FIBER_AT_WARP && same_warp && (other->mask >> lane & 1u))) {
            cuda_on_cpu_report(other, self, "a thread may not leave while its team waits");
        }
    }
    fiber_yield(); // never comes back
    abort();
}

// A stack that starts in fiber_main. Its top moves with the thread number, or all would compete for the same cache lines.
static void fiber_start(Fiber* fiber, int thread) {
    const size_t guard = 4096 * 16; // a multiple of every page size in use
    if (!fiber->stack) {
        char* memory = (char*)mmap(NULL, guard + CUDA_ON_CPU_STACK, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        need(memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0 ? NULL : memory);
        fiber->stack = memory + guard;
    }
#if CUDA_ON_CPU_ASAN
    // the last run never returned from its outermost frames: their red zones are still marked
    __asan_unpoison_memory_region(fiber->stack + CUDA_ON_CPU_STACK - 16384, 16384);
#endif
    void** frame = (void**)(fiber->stack + CUDA_ON_CPU_STACK - 64 - thread * 320 % 4096) - FIBER_FRAME_WORDS;
    memset(frame, 0, FIBER_FRAME_WORDS * sizeof(void*));
    void (*entry)(void) = fiber_main;
    memcpy(&frame[FIBER_ENTRY_WORD], &entry, sizeof(entry));
    fiber->stack_pointer = frame;
    fiber->index.x = (unsigned)thread;
    fiber->fake_stack = NULL;
    fiber->site = {NULL, NULL, 0};
}

static void block_run(const CudaLaunch* launch, unsigned index) {
    if (!cuda_block) { cuda_block = (Block*)need(calloc(1, sizeof(Block))); }
    Block* b = cuda_block;
    if (b->shared_bytes != launch->shared_bytes) {
        free(b->shared);
        b->shared = (char*)need(malloc(max_size(launch->shared_bytes, 1)));
        b->shared_bytes = launch->shared_bytes;
    }
#if CUDA_ON_CPU_ASAN
    if (b->shared) { __asan_unpoison_memory_region(b->shared, b->shared_bytes); }
#endif
    if (b->shared_bytes) { memset(b->shared, 0xff, b->shared_bytes); }
    b->launch = launch;
    b->index.x = index;
    b->threads.x = launch->threads;
    b->blocks.x = launch->blocks;
    b->random = (index + 1) * 2654435761u ^ cuda_on_cpu_seed * 40503u;
    b->waiting = b->done = 0;
    b->ready_warps = 0;
    b->running = NULL;
    b->stack = NULL;
    memset(b->warps, 0, sizeof(b->warps));
    for (int i = 0; i < (int)launch->threads; i++) {
        fiber_start(&b->fibers[i], i);
        block_make_ready(b, i);
    }
    fiber_yield(); // comes back when all are done
}

static void cuda_launch_run(const CudaLaunch* launch) {
    if (omp_in_parallel()) {
        fprintf(stderr, "error: CUDA on the CPU: a launch inside a parallel region: %s\n", launch->name);
        abort();
    }
    if (launch->threads % WARP_LANES != 0 || launch->threads == 0 || launch->threads > BLOCK_MAX_THREADS) {
        fprintf(stderr, "error: CUDA on the CPU: a block of %u threads; expected whole warps, at most %d threads: %s\n", launch->threads,
                BLOCK_MAX_THREADS, launch->name);
        abort();
    }
#pragma omp parallel for schedule(dynamic) if (launch->blocks > 1)
    for (unsigned i = 0; i < launch->blocks; i++) {
        block_run(launch, cuda_on_cpu_order == CUDA_ORDER_REVERSE ? launch->blocks - 1 - i : i);
    }
}

// Runs kernel() in every thread of every block; returns when all are done.
template <class Kernel> void cuda_on_cpu_launch(unsigned blocks, unsigned threads, size_t shared_bytes, const char* name, Kernel kernel) {
    CudaLaunch launch = {blocks, threads, shared_bytes, name, [](const void* k) { (*(const Kernel*)k)(); }, &kernel};
    cuda_launch_run(&launch);
}

// ---------------------------------------------------------------------------------------------------------------------------
// The runtime calls that the program makes. Work is done before a call returns. Device memory is malloc's, so ASan guards its ends.

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
typedef struct CUstream_st* cudaStream_t;

static inline const char* cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "out of memory"; }
static inline cudaError_t cudaGetLastError(void) { return cudaSuccess; }

// More than the machine has is refused, not promised.
static inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
    size_t most = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    *memory = bytes > most ? NULL : malloc(max_size(bytes, 1));
    if (!*memory) { return cudaErrorMemoryAllocation; }
    memset(*memory, 0xff, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void* memory) {
    free(memory);
    return cudaSuccess;
}

static inline cudaError_t cudaMallocHost(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
static inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

static inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    memmove(to, from, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    memset(memory, value, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) { return cudaMemset(memory, value, bytes); }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
