// comm_self.cuh - the communicator of one rank: a sum over ranks is the one contribution, a gather is a copy, and where an exchange
// reads and writes the same place there is nothing to do. Work is queued on the device like any op; nothing waits.
#pragma once
#include "../kernels/device.cuh"

static void comm_self_copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0 || to == from) { return; }
#if ON_GPU
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device_stream));
#else
    memcpy(to, from, bytes);
#endif
}

void comm_self_run(const CommExchange* x) {
    for (size_t i = 0; i < x->count; i++) {
        const CommSegment* s = &x->segments[i];
        if (x->kind == COMM_REDUCE_SCATTER && x->add) {
            size_t n = s->count;
            LAUNCH(ceil_div(n, COMM_SUM_CHUNK), BLOCK_TEAM, comm_sum_chunk, x->type, s->to, true, s->from, (const char*)NULL, 0, 0, 1, n);
        } else {
            comm_self_copy(s->to, s->from, s->count * comm_type_bytes(x->type));
        }
    }
}
