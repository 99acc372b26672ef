// machine.cuh - the device and its libraries at the start of a run: threads, SIMD path, matrix library, and what is promised of them.
#pragma once
#include "../comm/comm.cuh"
#include "../kernels/matmul.cuh"
#include "../kernels/peak.cuh"
#include "options.h"
#include "provenance.h"

static struct {
    char device[384];
    double flops; // peak of the device, below 0 when unknown
    int threads;
} machine_state;

const char* machine_device(void) { return machine_state.device; }
double machine_flops(void) { return machine_state.flops; }

// A program started with one of the standard descriptors closed would give its number to the next file, and print into it.
void machine_open_descriptors(void) {
    int fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= 2) { fd = open("/dev/null", O_RDWR); }
    if (fd > 2) { close(fd); }
}

// OpenMP's threads by default wait for each other at full speed for milliseconds. Beside other programs (or other ranks) that takes
// the very core the late thread needs: measured 2 to 3 times slower steps. A wait of some 50 microseconds covers a step's gaps. The
// runtime reads its environment before main, hence the second start; a user's own setting is left alone.
void machine_limit_spinning(char** argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY") || getenv("KMP_BLOCKTIME")) { return; }
    setenv("GOMP_SPINCOUNT", "10000", 1);
    setenv("KMP_BLOCKTIME", "1", 1); // milliseconds, for LLVM's runtime
    execv("/proc/self/exe", argv);   // where it fails, the program goes on as it is
}

#if ON_GPU && !defined(CUDA_ON_CPU)
bool machine_open(const Options* o, const Comm* world, Error* error) {
    if (o->command == COMMAND_TOKENIZE || o->command == COMMAND_CONVERT) { return true; }
    int count = 0, driver = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    bool plan = o->command == COMMAND_PLAN; // goes without a GPU, too
    if (plan && (status != cudaSuccess || count == 0)) { return true; }
    if (status != cudaSuccess || count == 0) {
        cudaDriverGetVersion(&driver);
        return fail(error, "no GPU: %s; on a machine without one use ./train_gpt, the CPU program",
                    driver == 0 ? "no NVIDIA driver is installed" : cudaGetErrorString(status));
    }
    cudaDeviceProp properties;
    CUDA_CHECK(cudaSetDevice(world->local_rank % count));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, world->local_rank % count));
    CUDA_CHECK(cudaStreamCreate(&device_stream));
    snprintf(machine_state.device, sizeof(machine_state.device), "%s, sm_%d%d, %zu MiB", properties.name, properties.major, properties.minor,
             properties.totalGlobalMem >> 20);
#ifdef FLOATX_BF16
    machine_state.flops = peak_flops(properties.name, true, o->tf32);
#else
    machine_state.flops = peak_flops(properties.name, false, o->tf32);
#endif
    return plan || gemm_gpu_open(o->tf32, o->gelu_fusion, error);
}
#else

// What the compiler was told to use; the program cannot run on less.
static const char* machine_simd(void) {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__SSE2__)
    return "SSE2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "scalar";
#endif
}

static bool machine_check_simd(Error* error) {
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("avx512f")) {
        return fail(error, "this program was built for AVX-512, which this CPU lacks: run make clean and make here");
    }
#elif defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2")) {
        return fail(error, "this program was built for AVX2, which this CPU lacks: run make clean and make here");
    }
#endif
    (void)error;
    return true;
}

// Threads of this rank where none are asked for: the cores it may use, shared with those ranks that may use the same ones.
static int machine_default_threads(const Comm* world) {
#ifdef _OPENMP
    bool asked = getenv("OMP_NUM_THREADS") != NULL; // of each rank
    int sharers = world->backend == COMM_MPI && !asked ? comm_mpi_local_sharers() : 1;
    return (int)max_size(1, (size_t)omp_get_max_threads() / (size_t)sharers);
#else
    (void)world;
    return 1;
#endif
}

bool machine_open(const Options* o, const Comm* world, Error* error) {
    if (!machine_check_simd(error)) { return false; }
    machine_state.threads = machine_default_threads(world);
#ifdef _OPENMP
    omp_set_num_threads(o->threads > 0 ? o->threads : machine_state.threads);
    machine_state.threads = omp_get_max_threads();
#endif
    snprintf(machine_state.device, sizeof(machine_state.device), "CPU, %s, %d thread(s)%s", machine_simd(), machine_state.threads,
#ifdef _OPENMP
             ""
#else
             " (built without OpenMP)"
#endif
    );
    machine_state.flops = -1.0;
    if (o->command == COMMAND_TOKENIZE || o->command == COMMAND_CONVERT || o->command == COMMAND_PLAN) { return true; }
    if (o->command == COMMAND_TRAIN) { machine_state.flops = peak_flops_measure(0.05); }
    return gemm_open((GemmLibrary)o->gemm, machine_state.threads, error);
}
#endif

void machine_print(FILE* out) {
    fprintf(out, "train_gpt %s, %s, %s weights\n", provenance_git(), provenance_compiler(), FLOATX_NAME);
    fprintf(out, "device: %s; matrix products: %s", machine_state.device, gemm_description());
    if (machine_state.flops > 0) { fprintf(out, "; peak %.1f TFLOP/s", machine_state.flops * 1e-12); }
    fprintf(out, "\n");
}
