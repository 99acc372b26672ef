// peak.cuh - the floating-point peak that MFU is measured against: measured on the CPU by a loop of independent multiply-adds in
// registers, promised on the GPU (dense tensor-core figures of NVIDIA's data sheets).
#pragma once
#include "device.cuh"

#if ON_GPU && !defined(CUDA_ON_CPU)
typedef struct {
    const char* name;    // part of the device's name
    double bf16, tf32;   // TFLOP/s
} PeakRow;

static const PeakRow peak_table[] = {
    {"V100", 125.0, 15.7},        {"T4", 65.0, 8.1},         {"A100", 312.0, 156.0},      {"A10", 125.0, 62.5},         {"A40", 149.7, 74.8},
    {"L40S", 362.0, 183.0},       {"L40", 181.0, 90.5},      {"L4", 121.0, 60.0},         {"H100 PCIe", 756.0, 378.0},  {"H100", 989.4, 494.7},
    {"H200", 989.4, 494.7},       {"H20", 148.0, 74.0},      {"GH200", 989.4, 494.7},     {"B200", 2250.0, 1125.0},     {"RTX 3090", 71.0, 35.5},
    {"RTX 4090", 165.2, 82.6},    {"RTX 5090", 209.5, 104.8}, {"RTX A6000", 154.8, 77.4},
};

// FLOP/s of `device_name`, or a negative number when it is not in the table.
double peak_flops(const char* device_name, bool bf16, bool tf32) {
    for (size_t i = 0; i < COUNT_OF(peak_table); i++) {
        if (strstr(device_name, peak_table[i].name)) {
            return 1e12 * (bf16 ? peak_table[i].bf16 : tf32 ? peak_table[i].tf32 : peak_table[i].tf32 / 8.0);
        }
    }
    return -1.0;
}
#else

#define PEAK_LANES 16
#define PEAK_CHAINS 10 // independent sums: enough to fill the pipeline

typedef float PeakVector __attribute__((vector_size(PEAK_LANES * sizeof(float))));

// The best FLOP/s of this thread within `seconds`: pieces of some 50 microseconds, of which an undisturbed one is soon found.
static double peak_thread(double seconds) {
    const long rounds = 20000;
    PeakVector sum[PEAK_CHAINS], factor, term;
    double best = 0.0, begin = seconds_now();
    for (int j = 0; j < PEAK_LANES; j++) {
        factor[j] = 0.999f;
        term[j] = 1e-3f;
    }
    for (int i = 0; i < PEAK_CHAINS; i++) { sum[i] = term * (float)(i + 1); }
    for (double start = begin; start - begin < seconds;) {
        for (long k = 0; k < rounds; k++) {
            for (int i = 0; i < PEAK_CHAINS; i++) { sum[i] = sum[i] * factor + term; }
        }
        double now = seconds_now();
        best = fmax(best, 2.0 * PEAK_LANES * PEAK_CHAINS * (double)rounds / (now - start));
        start = now;
    }
    float sink = 0.0f;
    for (int i = 0; i < PEAK_CHAINS; i++) { sink += sum[i][i]; }
    return sink > 0.0f ? best : 0.0; // the sums are used, or the loop would vanish
}

// FLOP/s of all threads together.
double peak_flops_measure(double seconds) {
    double total = 0.0;
    DO_PRAGMA(omp parallel reduction(+ : total)) { total += peak_thread(seconds); }
    return total;
}
#endif
