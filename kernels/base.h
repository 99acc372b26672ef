// base.h - what every file may lean on: the C library, errors as values, the few macros that make one source pass through
// gcc C, g++ and nvcc. Knows nobody.
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && !defined(__cplusplus) && defined(__OPTIMIZE__) && defined(__x86_64__)
// glibc's vector forms of these (libmvec, glibc >= 2.35); without them gcc calls the scalar function in every vectorised loop.
// The attribute is what -ffast-math would add; NaN checks keep working.
__attribute__((simd("notinbranch"))) float expf(float);
__attribute__((simd("notinbranch"))) float tanhf(float);
__attribute__((simd("notinbranch"))) float logf(float);
#endif

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define DO_PRAGMA(...) _Pragma(#__VA_ARGS__)

// Small functions that host code and op bodies share.
#ifdef __CUDACC__
#define HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define HOST_DEVICE static inline __attribute__((always_inline))
#endif

HOST_DEVICE size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
HOST_DEVICE size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
HOST_DEVICE size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
HOST_DEVICE size_t round_up(size_t a, size_t multiple) { return ceil_div(a, multiple) * multiple; }

#define WORK_ALIGN 64

// The next array of a work space, at byte *at, which moves on; NULL without one: then the layout only counts.
static inline void* work_take(char* work, size_t* at, size_t bytes) {
    void* place = work ? work + *at : NULL;
    *at += round_up(bytes, WORK_ALIGN);
    return place;
}

// Modules report failure as `return fail(error, ...)`: false, with one line for the user that says what was expected, what was
// found and what to do next. Only the program prints and exits.
typedef struct {
    char text[1024];
} Error;

__attribute__((format(printf, 2, 3))) static inline bool fail(Error* error, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error->text, sizeof(error->text), format, args);
    va_end(args);
    return false;
}

// Seconds on a clock that never steps back.
static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// A short allocation that cannot sensibly be survived when it fails (lists, names); large memory comes from device.cuh.
static inline void* need(void* memory) {
    if (!memory) {
        fprintf(stderr, "error: out of memory\n");
        exit(1);
    }
    return memory;
}
