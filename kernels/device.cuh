// device.cuh - memory and copies on the device that ops run on: the GPU, or on the CPU plain memory. Long-lived memory comes from
// one named table (MemoryTable), allocated as one block before the first step and printed; nothing is allocated in the loop.
#pragma once
#include "team.cuh"
#ifndef CUDA_ON_CPU
#include <sys/mman.h>
#endif

#define DEVICE_ALIGN 256

// NULL when memory is short. The block starts at zero.
void* device_alloc(size_t bytes) {
    bytes = round_up(max_size(bytes, 1), 4096);
#if ON_GPU
    void* memory = NULL;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        cudaGetLastError(); // forget the error: the caller reports it
        return NULL;
    }
    CUDA_CHECK(cudaMemset(memory, 0, bytes));
    return memory;
#else
    // fresh pages are zero, and huge pages keep the TLB out of the way of the big tensors
    void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) { return NULL; }
    if (bytes >= (size_t)4 << 20) { madvise(memory, bytes, MADV_HUGEPAGE); }
    return memory;
#endif
}

// Bytes that can still be had, SIZE_MAX when nobody says: of the GPU, or of memory and swap within the container's limit.
size_t device_memory_free(void) {
#if ON_GPU && !defined(CUDA_ON_CPU)
    size_t available = 0, total = 0, kept = (size_t)512 << 20; // for kernels, libraries and their local memory, which are loaded later
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) { return SIZE_MAX; }
    return available > kept ? available - kept : 0;
#else
    size_t available = 0, swap = 0, limit = SIZE_MAX, used = 0;
    char line[128];
    FILE* file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof(line), file)) {
        sscanf(line, "MemAvailable: %zu", &available);
        sscanf(line, "SwapFree: %zu", &swap);
    }
    if (file) { fclose(file); }
    FILE *max = fopen("/sys/fs/cgroup/memory.max", "r"), *current = fopen("/sys/fs/cgroup/memory.current", "r");
    if (max && current && fscanf(max, "%zu", &limit) == 1 && fscanf(current, "%zu", &used) == 1) { limit = limit > used ? limit - used : 0; }
    if (max) { fclose(max); }
    if (current) { fclose(current); }
    return available ? min_size((available + swap) << 10, limit) : limit;
#endif
}

// Bytes of main memory that this process has in use now, 0 when nobody says.
size_t memory_resident(void) {
    size_t kib = 0;
    char line[128];
    FILE* file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof(line), file) && sscanf(line, "VmRSS: %zu", &kib) != 1) {}
    if (file) { fclose(file); }
    return kib << 10;
}

void device_free(void* memory, size_t bytes) {
    if (!memory) { return; }
#if ON_GPU
    (void)bytes;
    CUDA_CHECK(cudaFree(memory));
#else
    munmap(memory, round_up(max_size(bytes, 1), 4096));
#endif
}

void device_zero(void* memory, size_t bytes) {
    if (bytes == 0) { return; }
#if ON_GPU
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, device_stream));
#else
    memset(memory, 0, bytes);
#endif
}

// Host to device; `host` must stay untouched until the device has caught up (use pinned memory: host_alloc).
void device_upload(void* device, const void* host, size_t bytes) {
    if (bytes == 0) { return; }
#if ON_GPU
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, device_stream));
#else
    memcpy(device, host, bytes);
#endif
}

// Device to host, complete on return.
void device_download(void* host, const void* device, size_t bytes) {
    if (bytes == 0) { return; }
#if ON_GPU
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, device_stream));
    CUDA_CHECK(cudaStreamSynchronize(device_stream));
#else
    memcpy(host, device, bytes);
#endif
}

void device_sync(void) {
#if ON_GPU
    CUDA_CHECK(cudaStreamSynchronize(device_stream));
#endif
}

// Host memory that the GPU can read at full speed, without a hidden copy.
void* host_alloc(size_t bytes) {
#if ON_GPU
    void* memory = NULL;
    CUDA_CHECK(cudaMallocHost(&memory, max_size(bytes, 1)));
    return memory;
#else
    return need(aligned_alloc(64, round_up(max_size(bytes, 1), 64)));
#endif
}

void host_free(void* memory) {
#if ON_GPU
    if (memory) { CUDA_CHECK(cudaFreeHost(memory)); }
#else
    free(memory);
#endif
}

// The memory of a run, by name. Add rows, then allocate all of them as one block.
#define MEMORY_ROWS 64

typedef struct {
    const char* name;
    size_t bytes;
    void** place;
} MemoryRow;

typedef struct {
    MemoryRow rows[MEMORY_ROWS];
    int count;
    char* block;
    size_t bytes;
} MemoryTable;

// *place is set by memory_allocate; rows of 0 bytes get NULL.
void memory_add(MemoryTable* table, const char* name, size_t bytes, void** place) {
    assert(table->count < MEMORY_ROWS);
    MemoryRow row = {name, bytes, place};
    table->rows[table->count++] = row;
    table->bytes += round_up(bytes, DEVICE_ALIGN);
}

bool memory_allocate(MemoryTable* table, Error* error) {
    size_t available = device_memory_free();
    table->block = table->bytes <= available ? (char*)device_alloc(table->bytes) : NULL;
    if (!table->block) {
        return fail(error, "out of memory: %zu MiB are needed, %zu MiB are free; try a smaller --batch, a shorter --seq-len or a higher --recompute",
                    table->bytes >> 20, available >> 20);
    }
    size_t offset = 0;
    for (int i = 0; i < table->count; i++) {
        *table->rows[i].place = table->rows[i].bytes ? table->block + offset : NULL;
        offset += round_up(table->rows[i].bytes, DEVICE_ALIGN);
    }
    return true;
}

void memory_free(MemoryTable* table) {
    device_free(table->block, table->bytes);
    memset(table, 0, sizeof(*table));
}

// Rows of one name that follow each other are shown as one.
void memory_print(const MemoryTable* table, FILE* out) {
    size_t bytes = 0;
    for (int i = 0; i < table->count; i++) {
        bytes += table->rows[i].bytes;
        if (i + 1 < table->count && strcmp(table->rows[i].name, table->rows[i + 1].name) == 0) { continue; }
        if (bytes) { fprintf(out, "| %-32s | %10.1f MiB |\n", table->rows[i].name, (double)bytes / 1048576.0); }
        bytes = 0;
    }
    fprintf(out, "| %-32s | %10.1f MiB |\n", "total", (double)table->bytes / 1048576.0);
}
