// comm.cuh - the communicator: reduce-scatter, all-gather, all-reduce and all-to-all with per-rank counts over device memory,
// broadcast, barrier, and small gathers of host memory. Three backends behind one interface: self (one rank, comm_self.cuh), MPI (CPU,
// comm_mpi.h) and NCCL (GPU, comm_nccl.cuh).
//
// An exchange is a list of segments, the same list (owners and counts) on every rank, started by comm_start and finished by
// comm_wait. Exchanges of a rank are carried out in the order in which they were started; all ranks start the same ones in the same
// order. Several may be on their way at once. Sums are taken in fp32, in the order of ranks, whatever the number of ranks or nodes:
// equal on all of them and from run to run. Counts are 64-bit; what goes out by MPI is cut into pieces of at most COMM_PIECE bytes, by NCCL
// into rounds that fit its staging memory.
//
// There is no error to return: a lost or stalled rank ends the job with one line that names it.
#pragma once
#include "../kernels/device.cuh"
#include "../kernels/floatx.cuh"
#include "launch.h"
#include "ledger.h"

#define COMM_PIECE ((size_t)128 << 10) // bytes of a message at most: smooth on slow links, where a large one blocks the small

typedef enum { COMM_SELF, COMM_MPI, COMM_NCCL } CommBackend;
typedef enum { COMM_BYTE, COMM_F32, COMM_BF16 } CommType; // of elements; sums need F32 or BF16
typedef enum { COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_ALL_REDUCE, COMM_ALL_TO_ALL } CommKind;

#ifdef FLOATX_BF16
#define COMM_FLOATX COMM_BF16
#else
#define COMM_FLOATX COMM_F32
#endif

typedef uint64_t CommTicket; // of an exchange; 0 is none, and done

// The meaning of a segment in each kind of exchange:
//   reduce-scatter  on its owner: to (+)= sum over ranks of their `from`
//   all-gather      on all ranks: to = the owner's `from` (where they are the same place, nothing is copied)
//   all-reduce      on all ranks: to = sum over ranks of `from`; the owner adds it up. from and to may be the same place
//   all-to-all      on the owner: to = the `from` of rank `source`
typedef struct {
    int owner, source;
    const void* from; // unused where this rank gives nothing
    void* to;         // unused where this rank gets nothing
    size_t count;     // elements; 0 is fine
} CommSegment;

typedef struct {
    CommKind kind;
    CommType type;
    bool add; // reduce-scatter: the sum is added to what `to` holds
    TrafficPurpose purpose;
    const CommSegment* segments; // must stay as they are until the exchange is finished
    size_t count;
    CommTicket after; // begins when this earlier exchange is finished on this rank, whose results it sends on; 0: at once
} CommExchange;

// Some or all ranks of the job: rank r here is rank first + r * stride of the job.
typedef struct {
    CommBackend backend;
    int rank, size;
    int first, stride;
    int local_rank, local_size; // among the ranks of this communicator on the same node
    int node, nodes;            // number of this rank's node, and how many there are
    Ledger* ledger;             // of this process
} Comm;

// A rank by itself.
const Comm* comm_alone(void) {
    static Ledger ledger;
    static Comm alone;
    alone.size = alone.stride = alone.nodes = alone.local_size = 1;
    alone.ledger = &ledger;
    return &alone;
}

size_t comm_type_bytes(CommType type) { return type == COMM_BYTE ? 1 : type == COMM_F32 ? 4 : 2; }

// ---------------------------------------------------------------------------------------------------------------------------------
// Sums: one formula for all backends.

#define COMM_SUM_CHUNK 8192

DEVICE float comm_load(CommType type, const void* from, size_t i) {
    return type == COMM_F32 ? ((const float*)from)[i] : bits_float((uint32_t)((const uint16_t*)from)[i] << 16);
}

// to[i] = (add ? to[i] : 0) + parts[0][i] + ... + parts[count - 1][i], added in this order in fp32 and rounded once.
// parts[r] = r == mine ? own : others + r * stride bytes; `to` may be `own`.
DEVICE void comm_sum_chunk(Team t, size_t chunk, CommType type, void* to, bool add, const void* own, const char* others, size_t stride,
                           int mine, int count, size_t n) {
    size_t first = chunk * COMM_SUM_CHUNK;
    int width = (int)min_size(COMM_SUM_CHUNK, n - first);
    if (type == COMM_F32) {
        float* out = (float*)to + first;
        TEAM_FOR(i, width) {
            float sum = add ? out[i] : 0.0f;
            for (int r = 0; r < count; r++) {
                const char* part = r == mine ? (const char*)own : others + (size_t)r * stride;
                sum += ((const float*)part)[first + (size_t)i];
            }
            out[i] = sum;
        }
    } else {
        uint16_t* out = (uint16_t*)to + first;
        TEAM_FOR(i, width) {
            float sum = add ? bits_float((uint32_t)out[i] << 16) : 0.0f;
            for (int r = 0; r < count; r++) { sum += comm_load(type, r == mine ? (const char*)own : others + (size_t)r * stride, first + (size_t)i); }
            out[i] = float_to_bf16(sum);
        }
    }
}

#include "comm_self.cuh"
#include "comm_mpi.h"
#include "comm_nccl.cuh"

// ---------------------------------------------------------------------------------------------------------------------------------
// The interface

// The whole job, or one rank if nothing started several. Fails with one line (then the caller reports it and ends).
// timeout: seconds after which a rank that does not answer ends the job.
bool comm_open(Comm* world, const Launch* launch, double timeout, Error* error) {
    *world = *comm_alone();
    if (launch->size <= 1) { return true; }
#if ON_GPU && !defined(CUDA_ON_CPU)
    world->backend = COMM_NCCL;
    return comm_nccl_open(world, launch, timeout, error);
#else
    world->backend = COMM_MPI;
    return comm_mpi_open(world, launch, timeout, error);
#endif
}

// Once every rank has its device: NCCL's own start-up, which takes memory on it. Collective.
bool comm_start_up(const Comm* world, Error* error) {
    return world->backend != COMM_NCCL || comm_nccl_start_up(error);
}

// Before the host waits for a device that may itself wait for other ranks: a rank that is lost must end the wait.
void comm_sync(const Comm* c) {
    if (c->backend == COMM_NCCL) { comm_nccl_sync(); }
}

// Collective, the last thing that a rank does.
void comm_close(Comm* world) {
    if (world->backend == COMM_MPI) { comm_mpi_close(); }
    if (world->backend == COMM_NCCL) { comm_nccl_close(); }
    memset(world, 0, sizeof(*world));
}

CommTicket comm_start(const Comm* c, const CommExchange* exchange) {
    switch (c->backend) {
    case COMM_MPI: return comm_mpi_start(c, exchange);
    case COMM_NCCL: return comm_nccl_start(c, exchange);
    default: comm_self_run(exchange); return 0;
    }
}

// Until the exchange is finished on this rank. On the GPU it is the compute stream that waits.
void comm_wait(const Comm* c, CommTicket ticket) {
    if (ticket == 0 || c->backend == COMM_SELF) { return; }
    if (c->backend == COMM_MPI) { comm_mpi_wait(ticket); }
    if (c->backend == COMM_NCCL) { comm_nccl_wait(ticket); }
}

void comm_run(const Comm* c, const CommExchange* exchange) { comm_wait(c, comm_start(c, exchange)); }

// A copy of the ledger as it stands; exchanges that are still on their way are in it by what has been handed over.
void comm_ledger(const Comm* c, Ledger* copy) {
    if (c->backend == COMM_MPI) {
        comm_mpi_ledger(copy); // the communication thread writes it
    } else {
        if (c->backend == COMM_NCCL) { comm_nccl_collect(); }
        *copy = *c->ledger;
    }
}

// all (size * bytes, host memory): what every rank gave, in the order of ranks. Blocks.
void comm_gather_host(const Comm* c, const void* mine, size_t bytes, void* all, TrafficPurpose purpose) {
    switch (c->backend) {
    case COMM_MPI: comm_mpi_gather_host(c, mine, bytes, all, purpose); break;
    case COMM_NCCL: comm_nccl_gather_host(c, mine, bytes, all, purpose); break;
    default: memcpy(all, mine, bytes);
    }
}

void comm_barrier(const Comm* c) {
    if (c->size == 1) { return; }
    char* all = (char*)need(malloc((size_t)c->size));
    comm_gather_host(c, "", 1, all, TRAFFIC_CONTROL);
    free(all);
}

// data (bytes, device memory): rank `root`'s, on all ranks.
void comm_broadcast(const Comm* c, void* data, size_t bytes, int root, TrafficPurpose purpose) {
    CommSegment segment = {root, root, data, data, bytes};
    CommExchange exchange = {COMM_ALL_GATHER, COMM_BYTE, false, purpose, &segment, 1, 0};
    comm_run(c, &exchange);
}

// The ranks [0, count) of c; false on the others, which must not use it. What it says of nodes remains that of c.
bool comm_first(Comm* part, const Comm* c, int count) {
    *part = *c;
    part->size = count;
    if (count == 1) { part->backend = COMM_SELF; }
    return c->rank < count;
}
