// bench_newton_schulz.cu - speed of Newton-Schulz at the shapes of GPT-2 and of small models: the best of several runs, against the plain
// form (three full products a step, by the same library). "of library" compares GFLOP/s: operations that we carry out over our time, with
// operations of the plain form over its time.
#include "../optim/newton_schulz.cuh"

static const size_t bench_shapes[][2] = {{768, 768}, {768, 3072}, {3072, 768}, {256, 256}, {256, 1024}, {1024, 256}};

// Multiplications and additions of a symmetric product.
static double bench_symmetric(size_t m, size_t k) {
    double computed = 0.0;
#if ON_GPU
    for (size_t row = 0; row < m; row += SYMMETRIC_STRIP) {
        computed += (double)min_size(SYMMETRIC_STRIP, m - row) * (double)min_size(m, row + SYMMETRIC_STRIP);
    }
#else
    size_t tile = symmetric_tile(m);
    for (size_t row = 0; row < m; row += tile) { computed += (double)min_size(tile, m - row) * (double)min_size(m, row + tile); }
#endif
    return 2.0 * computed * (double)k;
}

static double bench_operations(size_t rows, size_t cols) {
    size_t s = min_size(rows, cols), longer = max_size(rows, cols);
    double last = 2.0 * (double)longer * (double)s * (double)s;
    if (newton_schulz_by_gram(rows, cols)) { return bench_symmetric(s, longer) + 17.0 * bench_symmetric(s, s) + last; }
    return NEWTON_SCHULZ_STEPS * (bench_symmetric(s, longer) + bench_symmetric(s, s) + last);
}

static void bench_run(size_t rows, size_t cols) {
    size_t n = rows * cols, s = min_size(rows, cols), longer = max_size(rows, cols), bytes = newton_schulz_work_bytes(rows, cols);
    float *in = (float*)need(device_alloc(n * sizeof(float))), *out = (float*)need(device_alloc(n * sizeof(float)));
    float* host = (float*)need(malloc(n * sizeof(float)));
    char* work = (char*)need(device_alloc(bytes));
    floatX *x = (floatX*)need(device_alloc(n * sizeof(floatX))), *y = (floatX*)need(device_alloc(n * sizeof(floatX)));
    floatX *g = (floatX*)need(device_alloc(s * s * sizeof(floatX))), *p = (floatX*)need(device_alloc(s * s * sizeof(floatX)));
    uint32_t random = 1;
    for (size_t i = 0; i < n; i++) {
        random = random * 1664525u + 1013904223u;
        host[i] = (float)(random >> 8) / 8388608.0f - 1.0f;
    }
    device_upload(in, host, n * sizeof(float));
    device_sync();
    const double plain_operations = NEWTON_SCHULZ_STEPS * (4.0 * (double)longer + 2.0 * (double)s) * (double)s * (double)s;
    const double operations = bench_operations(rows, cols);
    double best = 1e30, plain = 1e30, begin = seconds_now();
    for (int round = 0; round < 5 || (round < 200 && seconds_now() - begin < 4.0); round++) {
        double start = seconds_now();
        newton_schulz(out, in, rows, cols, work);
        device_sync();
        double middle = seconds_now();
        for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
            matmul_backward_weight(g, x, x, longer, (int)s, (int)s, false);
            matmul_backward_input(p, g, g, s, (int)s, (int)s, false);
            matmul_backward_input(y, x, p, longer, (int)s, (int)s, false);
        }
        device_sync();
        plain = fmin(plain, seconds_now() - middle);
        best = fmin(best, middle - start);
    }
    double library = plain_operations / plain, here = operations / best;
    printf("| %4zu x %4zu | plain %8.3f ms %7.1f GFLOP/s | ", rows, cols, 1e3 * plain, 1e-9 * library);
    printf("here %8.3f ms %7.1f GFLOP/s, ", 1e3 * best, 1e-9 * here);
    printf("%3.0f %% of library | %.2f times as fast |\n", 100.0 * here / library, plain / best);
    fflush(stdout);
    device_free(in, n * sizeof(float));
    device_free(out, n * sizeof(float));
    device_free(work, bytes);
    device_free(x, n * sizeof(floatX));
    device_free(y, n * sizeof(floatX));
    device_free(g, s * s * sizeof(floatX));
    device_free(p, s * s * sizeof(floatX));
    free(host);
}

int main(void) {
    Error error;
#if ON_GPU && !defined(CUDA_ON_CPU)
    bool good = gemm_gpu_open(true, 0, &error);
#elif defined(_OPENMP)
    bool good = gemm_open(GEMM_AUTO, omp_get_max_threads(), &error);
#else
    bool good = gemm_open(GEMM_AUTO, 1, &error);
#endif
    if (!good) {
        fprintf(stderr, "error: %s\n", error.text);
        return 1;
    }
    printf("%s, %s\n", gemm_description(), FLOATX_NAME);
    for (size_t i = 0; i < COUNT_OF(bench_shapes); i++) { bench_run(bench_shapes[i][0], bench_shapes[i][1]); }
    return 0;
}
