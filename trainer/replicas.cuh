// replicas.cuh - whether all ranks still hold the same weights. Replicas are kept equal by construction (sums in one order, one rank's
// bits for all); a rank whose memory or arithmetic is faulty shows here, by name, before it spoils a checkpoint.
#pragma once
#include "../comm/zero.cuh"
#include "../dataloader/file.h"

#define REPLICAS_PIECE ((size_t)1 << 20)

// CRC-32C over the weights of all units, in table order.
static uint32_t replicas_hash(const Zero* z) {
    uint32_t crc = 0;
    floatX* piece = (floatX*)host_alloc(REPLICAS_PIECE * sizeof(floatX));
    for (size_t u = 0; u < z->table->unit_count; u++) {
        const floatX* from = z->weights + block_unit_at(&z->weights_layout, z->table, &z->table->units[u]);
        for (size_t at = 0; at < z->table->units[u].count; at += REPLICAS_PIECE) {
            size_t n = min_size(REPLICAS_PIECE, z->table->units[u].count - at);
            device_download(piece, from + at, n * sizeof(floatX));
            crc = crc32c(crc, piece, n * sizeof(floatX));
        }
    }
    host_free(piece);
    return crc;
}

// Collective. At ZeRO 3 there are no replicas, and nothing is compared.
bool replicas_check(Zero* z, int64_t step, Error* error) {
    if (z->ranks == 1 || z->stage == 3) { return true; }
    zero_weights_wait_all(z);
    uint32_t mine = replicas_hash(z), *all = (uint32_t*)need(malloc((size_t)z->ranks * sizeof(uint32_t)));
    comm_gather_host(z->comm, &mine, sizeof(mine), all, TRAFFIC_CONTROL);
    int most = 0, best = 0, odd = -1;
    for (int r = 0; r < z->ranks; r++) { // what most ranks hold is taken for right
        int votes = 0;
        for (int k = 0; k < z->ranks; k++) { votes += all[k] == all[r]; }
        if (votes > best) {
            best = votes;
            most = r;
        }
    }
    for (int r = z->ranks - 1; r >= 0; r--) { odd = all[r] != all[most] ? r : odd; }
    uint32_t theirs = odd < 0 ? 0 : all[odd], right = all[most];
    free(all);
    return odd < 0 || fail(error,
                           "after step %" PRId64 " the weights of rank %d (%08x) differ from those of %d of %d ranks (%08x): its memory or processor "
                           "is not to be trusted; go on from an earlier checkpoint without it",
                           step, odd, theirs, best, z->ranks, right);
}
