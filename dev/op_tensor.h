// op_tensor.h - what the op rows stand on: tensors on the device with guards around them and a base off its alignment, and the
// comparison with double-precision values. Works alike on the CPU, the GPU and the emulated GPU.
// Tolerances: inputs are rounded to floatX before the reference sees them, so what remains is fp32 summation (about 1e-7 sqrt(n))
// and one rounding of the result: 2^-24 in fp32, 2^-9 in bf16 - twice where a result is rounded, read again and added to.
// Found over all rows: 7e-7 in fp32, 3.2e-3 in bf16.
#pragma once
#include "../kernels/device.cuh"
#include "../kernels/floatx.cuh"
#include "reference.h"
#include "test.h"

#ifdef FLOATX_BF16
#define OPS_TOLERANCE 4e-3
#else
#define OPS_TOLERANCE 2e-6
#endif

#ifdef CUDA_ON_CPU
#define OPS_SMALL 1 // leave out the large shapes
#else
#define OPS_SMALL 0
#endif

// Library matrix products add in their own order and (GPU, fp32) may round their inputs to TF32's 11 bits.
#if ON_GPU && !defined(CUDA_ON_CPU) && !defined(FLOATX_BF16)
#define OPS_GEMM_TOLERANCE 1e-3
#else
#define OPS_GEMM_TOLERANCE OPS_TOLERANCE
#endif

#define OPS_GUARD 8
#define OPS_GUARD_VALUE (-776.0f) // exact in bf16 too

// n values on the device with guards around them, and what they were when uploaded (after rounding to floatX).
typedef struct {
    floatX* x;      // NULL in a tensor of floats
    float* f;       // NULL in a tensor of floatX
    double* was;
    size_t n, before, bytes; // before: guard elements in front
    char* block;
} OpsTensor;

static ReferenceRandom ops_random; // each row starts it anew: its values do not depend on which rows run

// values: NULL = all zero. shift moves the base by that many elements off its alignment.
static OpsTensor ops_upload(const double* values, size_t n, size_t shift, bool floats) {
    size_t size = floats ? sizeof(float) : sizeof(floatX), before = OPS_GUARD + shift, total = before + n + OPS_GUARD;
    OpsTensor tensor = {NULL, NULL, reference_zeros(n), n, before, total * size, (char*)need(device_alloc(total * size))};
    char* host = (char*)need(malloc(total * size));
    for (size_t i = 0; i < total; i++) {
        bool inside = i >= before && i < before + n;
        float value = !inside ? OPS_GUARD_VALUE : values ? (float)values[i - before] : 0.0f;
        if (floats) {
            memcpy(host + i * size, &value, size);
        } else {
#ifdef FLOATX_BF16
            uint32_t u;
            memcpy(&u, &value, sizeof(u));
            uint16_t bits = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
            if (value != value) { bits = 0x7fc0; }
            memcpy(host + i * size, &bits, size);
            u = (uint32_t)bits << 16;
            memcpy(&value, &u, sizeof(u));
#else
            memcpy(host + i * size, &value, size);
#endif
        }
        if (inside) { tensor.was[i - before] = value; }
    }
    device_upload(tensor.block, host, total * size);
    device_sync();
    free(host);
    tensor.x = floats ? NULL : (floatX*)(void*)tensor.block + before;
    tensor.f = floats ? (float*)(void*)tensor.block + before : NULL;
    return tensor;
}

// n floatX from a normal distribution around `mean`
static OpsTensor ops_normal(size_t n, double scale, double mean, size_t shift) {
    double* values = reference_zeros(n);
    for (size_t i = 0; i < n; i++) { values[i] = mean + scale * reference_normal(&ops_random); }
    OpsTensor tensor = ops_upload(values, n, shift, false);
    free(values);
    return tensor;
}

static OpsTensor ops_floats(size_t n) { return ops_upload(NULL, n, 0, true); }

static void ops_free(OpsTensor* tensor) {
    device_free(tensor->block, tensor->bytes);
    free(tensor->was);
}

static int* ops_ints(const int* values, size_t n) {
    int* device = (int*)need(device_alloc(n * sizeof(int)));
    device_upload(device, values, n * sizeof(int));
    device_sync();
    return device;
}

// The present values, to be freed; the guards are checked.
static double* ops_download(const OpsTensor* tensor, const char* label) {
    size_t size = tensor->f ? sizeof(float) : sizeof(floatX), total = tensor->bytes / size;
    char* host = (char*)need(malloc(tensor->bytes));
    double* values = reference_zeros(tensor->n);
    size_t broken = 0;
    device_download(host, tensor->block, tensor->bytes);
    for (size_t i = 0; i < total; i++) {
        uint32_t u = 0;
        memcpy((char*)&u + (sizeof(u) - size), host + i * size, size); // bf16 is the upper half (little-endian)
        float value;
        memcpy(&value, &u, sizeof(value));
        if (i >= tensor->before && i < tensor->before + tensor->n) {
            values[i - tensor->before] = value;
        } else {
            broken += value != OPS_GUARD_VALUE;
        }
    }
    CHECK(broken == 0, "%s: %zu values outside the tensor were overwritten", label, broken);
    free(host);
    return values;
}

// Norm of the difference against the norm of the wanted values, and no single value far off.
static void ops_compare(const char* label, const double* got, const double* want, size_t n, double tolerance) {
    double difference = 0.0, norm = 0.0, worst = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double rms = sqrt(norm / (double)max_size(n, 1)), relative = norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
    for (size_t i = 0; i < n; i++) { worst = fmax(worst, fabs(got[i] - want[i]) / (fabs(want[i]) + rms + 1e-30)); }
    CHECK(relative <= tolerance, "%s: relative error %.3g over %zu values, tolerance %.3g", label, relative, n, tolerance);
    CHECK(worst <= 8.0 * tolerance, "%s: one of %zu values is off by %.3g, tolerance %.3g", label, n, worst, 8.0 * tolerance);
#ifdef OPS_VERBOSE
    printf("      %-44s relative %.2e  worst %.2e  tolerance %.1e\n", label, relative, worst, tolerance);
#endif
}

static void ops_check(const char* label, const OpsTensor* tensor, const double* want, double tolerance) {
    double* got = ops_download(tensor, label);
    ops_compare(label, got, want, tensor->n, tolerance);
    free(got);
}
