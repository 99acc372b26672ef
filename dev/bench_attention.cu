// bench_attention.cu - speed of attention at the shapes of small and of real training runs: best of several runs, in GFLOP/s.
// Causal work counts as half: forward 2 B NH T^2 HS operations, backward 5/2 of that.
#include "../kernels/attention.cuh"
#include "../kernels/device.cuh"

typedef struct {
    int B, T, NH, HS;
} BenchShape;

static const BenchShape bench_shapes[] = {
    {4, 64, 12, 64}, {8, 256, 6, 64}, {2, 1024, 12, 64}, {1, 2048, 12, 64}, {2, 1024, 8, 80}, {2, 1024, 6, 128},
};

// floatX values around zero with a spread of one or so
static void bench_fill(floatX* device, size_t n) {
    floatX* host = (floatX*)need(malloc(n * sizeof(floatX)));
    uint32_t random = 1;
    for (size_t i = 0; i < n; i++) {
        random = random * 1664525u + 1013904223u;
        float value = (float)(random >> 8) / 8388608.0f - 1.0f;
#ifdef FLOATX_BF16
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        host[i].bits = (uint16_t)(bits >> 16);
#else
        host[i].value = value;
#endif
    }
    device_upload(device, host, n * sizeof(floatX));
    device_sync();
    free(host);
}

static void bench_run(BenchShape s) {
    const int C = s.NH * s.HS;
    const size_t n = (size_t)s.B * (size_t)s.T * (size_t)C, lse_bytes = (size_t)s.B * (size_t)s.NH * (size_t)s.T * sizeof(float);
    const size_t x = n * sizeof(floatX), work_bytes = attention_work_bytes(s.B, s.T, C, s.NH);
    floatX *qkv = (floatX*)need(device_alloc(3 * x)), *dqkv = (floatX*)need(device_alloc(3 * x)), *out = (floatX*)need(device_alloc(x));
    floatX* dout = (floatX*)need(device_alloc(x));
    float* lse = (float*)need(device_alloc(lse_bytes));
    void* work = need(device_alloc(work_bytes));
    bench_fill(qkv, 3 * n);
    bench_fill(dout, n);
    const double operations = 2.0 * s.B * s.NH * s.HS * (double)s.T * s.T;
    const int repeat = (int)(2e9 / operations) + 1;
    double forward = 1e30, backward = 1e30;
    for (int round = 0; round < 7; round++) {
        double start = seconds_now();
        for (int i = 0; i < repeat; i++) { attention_forward(out, lse, qkv, s.B, s.T, C, s.NH); }
        device_sync();
        double middle = seconds_now();
        for (int i = 0; i < repeat; i++) { attention_backward(dqkv, work, dout, out, qkv, lse, s.B, s.T, C, s.NH); }
        device_sync();
        forward = fmin(forward, (middle - start) / repeat);
        backward = fmin(backward, (seconds_now() - middle) / repeat);
    }
    printf("| %2d x %4d, %2d heads of %3d | forward %8.3f ms %8.1f GFLOP/s | backward %8.3f ms %8.1f GFLOP/s |\n", s.B, s.T, s.NH, s.HS,
           forward * 1e3, operations / forward * 1e-9, backward * 1e3, 2.5 * operations / backward * 1e-9);
    device_free(qkv, 3 * x);
    device_free(dqkv, 3 * x);
    device_free(out, x);
    device_free(dout, x);
    device_free(lse, lse_bytes);
    device_free(work, work_bytes);
}

int main(void) {
    for (size_t i = 0; i < COUNT_OF(bench_shapes); i++) { bench_run(bench_shapes[i]); }
    return 0;
}
