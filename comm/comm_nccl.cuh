// comm_nccl.cuh - the communicator's NCCL backend (GPU). Exchanges run on a stream of their own beside the computing one; events order
// the two, so the host waits for neither. Each is a series of groups of sends and receives (nccl_plan.h); sums are ours, in the order of
// ranks, from staging memory, which is why NCCL's own reductions are not used. NCCL cuts and pipelines large messages by itself, so
// they are not cut into pieces of COMM_PIECE here.
//
// A job starts in two steps. comm_nccl_open finds the other ranks, by MPI or at the meeting place (rendezvous.h), without touching a
// GPU: a rank's place among those on its machine says which one it takes. comm_nccl_start_up, when each has taken its own, connects
// them. Between the two, gathers of host memory go by MPI or over the meeting place; they are not in the ledger.
// The communicator is a non-blocking one: a call that waits for a lost rank comes back, and the time-out holds there, too.
#pragma once

#if ON_GPU && !defined(CUDA_ON_CPU)
#include "nccl_wait.cuh"
#include "rendezvous.h"
#ifdef USE_MPI
#include <mpi.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------------------
// Start

#define NCCL_HOST_SIZE 128

// What ranks tell each other first. host: a machine's name and what tells apart two machines of one name.
typedef struct {
    ncclUniqueId id; // rank 0's counts
    char host[NCCL_HOST_SIZE];
} NcclHello;

// all (size * bytes): what each rank brings. Before NCCL is there.
static bool nccl_gather_early(const void* mine, size_t bytes, void* all, Error* error) {
#ifdef USE_MPI
    if (nccl_state.by_mpi) {
        int status = MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
        return status == MPI_SUCCESS || fail(error, "rank %d: MPI_Allgather failed", nccl_state.world.rank);
    }
#endif
    return rendezvous_gather(&nccl_state.launch, mine, bytes, all, nccl_state.timeout, error);
}

static bool nccl_open_mpi(Error* error) {
#ifdef USE_MPI
    Launch* l = &nccl_state.launch;
    int size = 0, opened = 0;
    MPI_Initialized(&opened);
    if (!opened && MPI_Init(NULL, NULL) != MPI_SUCCESS) { return fail(error, "MPI_Init failed"); }
    nccl_state.by_mpi = true;
    nccl_state.opened_mpi = !opened;
    MPI_Comm_rank(MPI_COMM_WORLD, &l->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != l->size) {
        return fail(error,
                    "%s started %d processes, but the MPI library that this program uses sees %d: start it by that library's own mpirun%s",
                    l->by, l->size, size, strncmp(l->by, "srun", 4) == 0 ? ", or by srun --mpi=pmix" : "");
    }
    return true;
#else
    return fail(error, "this program was built without MPI");
#endif
}

// The name of this machine. Containers on one machine may have names of their own and their own GPUs; virtual machines may share a name.
static void nccl_host_name(char* host, size_t size) {
    size_t length;
    memset(host, 0, size);
    gethostname(host, 64);
    host[63] = 0;
    length = strlen(host);
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file && fgets(host + length, (int)(size - length), file)) { host[size - 1] = 0; }
    if (file) { fclose(file); }
}

// From the hosts of all ranks: which node each is on, in the order in which nodes appear, and this rank's place on its own.
static void nccl_find_places(Comm* world, const NcclHello* all) {
    int* nodes = (int*)need(malloc((size_t)world->size * sizeof(int)));
    world->nodes = world->local_rank = world->local_size = 0;
    for (int r = 0; r < world->size; r++) {
        nodes[r] = -1;
        for (int k = r - 1; k >= 0 && nodes[r] < 0; k--) { nodes[r] = strcmp(all[k].host, all[r].host) == 0 ? nodes[k] : -1; }
        if (nodes[r] < 0) { nodes[r] = world->nodes++; }
    }
    world->node = nodes[world->rank];
    for (int r = 0; r < world->size; r++) {
        world->local_size += nodes[r] == world->node;
        world->local_rank += nodes[r] == world->node && r < world->rank;
    }
    nccl_state.nodes = nodes;
}

// Finds the other ranks. Fills the whole of world; touches no GPU. timeout: seconds, 0 for never.
bool comm_nccl_open(Comm* world, const Launch* launch, double timeout, Error* error) {
    NcclHello mine;
    memset(&nccl_state, 0, sizeof(nccl_state));
    nccl_state.launch = *launch;
    nccl_state.timeout = timeout > 0 ? timeout : 1e9;
    nccl_state.world.rank = world->rank = launch->rank;
    if (launch->kind == LAUNCH_BY_MPI && !nccl_open_mpi(error)) { return false; }
    world->backend = COMM_NCCL;
    world->rank = nccl_state.launch.rank;
    world->size = launch->size;
    world->first = 0;
    world->stride = 1;
    nccl_state.world = *world;
    memset(&mine, 0, sizeof(mine));
    nccl_host_name(mine.host, sizeof(mine.host));
    if (world->rank == 0 && !nccl_good(ncclGetUniqueId(&mine.id), "ncclGetUniqueId", error)) { return false; }
    NcclHello* all = (NcclHello*)need(malloc((size_t)world->size * sizeof(NcclHello)));
    bool good = nccl_gather_early(&mine, sizeof(mine), all, error);
    if (good) {
        nccl_find_places(world, all);
        nccl_state.world = *world;
        nccl_state.id = all[0].id;
    }
    free(all);
    return good;
}

// Two ranks with one GPU: NCCL refuses, but not in words that help.
static bool nccl_check_gpus(Error* error) {
    enum { NAME = 32 };
    const Comm* world = &nccl_state.world;
    char mine[NAME] = "";
    int device = 0, first = -1, second = -1;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(mine, NAME, device));
    char* all = (char*)need(malloc((size_t)world->size * NAME));
    bool good = nccl_gather_early(mine, NAME, all, error);
    for (int a = 0; good && first < 0 && a < world->size; a++) {
        for (int b = a + 1; first < 0 && b < world->size; b++) {
            if (nccl_state.nodes[a] == nccl_state.nodes[b] && memcmp(all + (size_t)a * NAME, all + (size_t)b * NAME, NAME) == 0) {
                first = a;
                second = b;
            }
        }
    }
    if (first >= 0) {
        int ranks = 0;
        for (int r = 0; r < world->size; r++) { ranks += nccl_state.nodes[r] == nccl_state.nodes[first]; }
        good = fail(
            error,
            "ranks %d and %d would share the GPU %.31s: a rank needs one of its own, and %d ranks were started on that node; start fewer, "
            "or see CUDA_VISIBLE_DEVICES",
            first, second, all + (size_t)first * NAME, ranks);
    }
    free(all);
    return good;
}

static void nccl_spans_open(NcclSpans* spans, double* seconds) {
    memset(spans, 0, sizeof(*spans));
    spans->seconds = seconds;
    for (int i = 0; i < NCCL_RING; i++) {
        CUDA_CHECK(cudaEventCreate(&spans->begin[i]));
        CUDA_CHECK(cudaEventCreate(&spans->end[i]));
    }
}

static bool nccl_open_memory(Error* error) {
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&nccl_state.stream, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&nccl_state.host, cudaEventDisableTiming));
    for (int i = 0; i < NCCL_RING; i++) { CUDA_CHECK(cudaEventCreateWithFlags(&nccl_state.ready[i], cudaEventDisableTiming)); }
    nccl_spans_open(&nccl_state.busy, &nccl_state.world.ledger->busy);
    nccl_spans_open(&nccl_state.waited, &nccl_state.world.ledger->waited);
    nccl_state.staging = device_alloc(NCCL_STAGING);
    if (!nccl_state.staging) {
        return fail(error, "out of memory: rank %d needs %zu MiB for exchanges", nccl_state.world.rank, NCCL_STAGING >> 20);
    }
    CUDA_CHECK(cudaDeviceSynchronize()); // it was zeroed on another stream
    nccl_state.pinned = (char*)host_alloc(NCCL_PINNED);
    nccl_state.segments = (CommSegment*)need(malloc((size_t)nccl_state.world.size * sizeof(CommSegment)));
    nccl_plan_open(&nccl_state.plan, nccl_state.world.size);
    return true;
}

void comm_nccl_gather_host(const Comm* c, const void* mine, size_t bytes, void* all, TrafficPurpose purpose);

// Connects the ranks, each on the GPU that is its current one by now, and sees that messages pass between all of them: the first ones
// also make NCCL's connections. Collective, once, not later than the first exchange.
bool comm_nccl_start_up(Error* error) {
    const Comm* world = &nccl_state.world;
    if (nccl_state.connected) { return true; }
    if (!nccl_check_gpus(error) || !nccl_open_memory(error)) { return false; }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t status = ncclCommInitRankConfig(&nccl_state.comm, world->size, nccl_state.id, world->rank, &config);
    if (!nccl_good(status, "ncclCommInitRank", error) || !nccl_settle("ncclCommInitRank", error)) { return false; }
    nccl_state.connected = true;
    int32_t mine = world->rank, *all = (int32_t*)need(malloc((size_t)world->size * sizeof(int32_t)));
    comm_nccl_gather_host(world, &mine, sizeof(mine), all, TRAFFIC_CONTROL);
    bool good = true;
    for (int r = 0; good && r < world->size; r++) {
        good = all[r] == r ||
               fail(error, "rank %d: NCCL brought %d where rank %d sent its number: the links are broken", world->rank, all[r], r);
    }
    free(all);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Exchanges

static LinkClass nccl_link(const Comm* c, int peer) {
    return nccl_state.nodes[c->first + peer * c->stride] == nccl_state.nodes[nccl_state.world.rank] ? LINK_INSIDE : LINK_BETWEEN;
}

static void nccl_run_group(const Comm* c, TrafficPurpose purpose) {
    const NcclPlan* plan = &nccl_state.plan;
    Error error;
    if (plan->op_count == 0) { return; }
    nccl_check(ncclGroupStart(), "ncclGroupStart");
    for (size_t i = 0; i < plan->op_count; i++) {
        const NcclOp* op = &plan->ops[i];
        int peer = c->first + op->peer * c->stride;
        if (op->send) {
            nccl_check(ncclSend(op->memory, op->bytes, ncclInt8, peer, nccl_state.comm, nccl_state.stream), "ncclSend");
            ledger_add(c->ledger, purpose, nccl_link(c, op->peer), op->bytes, op->bytes);
        } else {
            nccl_check(ncclRecv(op->memory, op->bytes, ncclInt8, peer, nccl_state.comm, nccl_state.stream), "ncclRecv");
        }
    }
    nccl_check(ncclGroupEnd(), "ncclGroupEnd");
    if (!nccl_settle("starting an exchange", &error)) { comm_nccl_fail(error.text); } // only then is it in the stream
}

// On nccl_state.stream.
static void nccl_run(const Comm* c, const CommExchange* x) {
    NcclPlan* plan = &nccl_state.plan;
    cudaStream_t computing = device_stream;
    nccl_plan_start(plan, x, c->rank, c->size, nccl_state.staging, NCCL_STAGING);
    while (nccl_plan_next(plan)) {
        nccl_run_group(c, x->purpose);
        device_stream = nccl_state.stream; // where LAUNCH puts its work
        for (size_t i = 0; i < plan->local_count; i++) { nccl_plan_run_local(plan, &plan->locals[i]); }
        device_stream = computing;
    }
}

// The next exchange's place in the ring. after: the stream whose work until now it must come after.
static int nccl_begin(cudaStream_t after, const CommExchange* x) {
    NcclSpans* busy = &nccl_state.busy;
    int slot = (int)(busy->next % NCCL_RING);
    comm_nccl_collect();
    if (busy->next - busy->collected == NCCL_RING) { nccl_wait_host(busy->end[slot]); }
    nccl_state.kinds[slot] = *x;
    CUDA_CHECK(cudaEventRecord(nccl_state.ready[slot], after));
    CUDA_CHECK(cudaStreamWaitEvent(nccl_state.stream, nccl_state.ready[slot], 0));
    CUDA_CHECK(cudaEventRecord(busy->begin[slot], nccl_state.stream));
    return slot;
}

static void nccl_end(int slot) {
    CUDA_CHECK(cudaEventRecord(nccl_state.busy.end[slot], nccl_state.stream));
    nccl_state.busy.next++;
}

CommTicket comm_nccl_start(const Comm* c, const CommExchange* x) {
    Error error;
    if (!comm_nccl_start_up(&error)) { comm_nccl_fail(error.text); }
    int slot = nccl_begin(device_stream, x);
    nccl_run(c, x);
    nccl_end(slot);
    return nccl_state.busy.next;
}

// The computing stream waits; the host goes on.
void comm_nccl_wait(CommTicket ticket) {
    NcclSpans *busy = &nccl_state.busy, *waited = &nccl_state.waited;
    uint64_t number = ticket - 1;
    if (number < busy->collected) { return; }
    int slot = (int)(waited->next % NCCL_RING);
    if (waited->next - waited->collected == NCCL_RING) { nccl_wait_host(waited->end[slot]); }
    CUDA_CHECK(cudaEventRecord(waited->begin[slot], device_stream));
    CUDA_CHECK(cudaStreamWaitEvent(device_stream, busy->end[number % NCCL_RING], 0));
    CUDA_CHECK(cudaEventRecord(waited->end[slot], device_stream));
    waited->next++;
}

// all (size * bytes, host memory). Blocks; passes through pinned memory and the staging memory piece by piece. Not inlined, since gcc
// then warns of what other backends' callers would do here.
__attribute__((noinline)) void comm_nccl_gather_host(const Comm* c, const void* mine, size_t bytes, void* all, TrafficPurpose purpose) {
    size_t piece = NCCL_PINNED / (size_t)c->size;
    Error error;
    if (!nccl_state.connected) {
        bool good = c->size == nccl_state.world.size || fail(&error, "a part of the ranks cannot gather before all are connected");
        if (!good || !nccl_gather_early(mine, bytes, all, &error)) { comm_nccl_fail(error.text); }
        return;
    }
    for (size_t offset = 0; offset < bytes; offset += piece) {
        size_t n = min_size(piece, bytes - offset);
        char *staging = (char*)nccl_state.staging, *own = staging + (size_t)c->rank * n;
        for (int r = 0; r < c->size; r++) {
            CommSegment segment = {r, r, own, staging + (size_t)r * n, n};
            nccl_state.segments[r] = segment;
        }
        CommExchange x = {COMM_ALL_GATHER, COMM_BYTE, false, purpose, nccl_state.segments, (size_t)c->size, 0};
        int slot = nccl_begin(nccl_state.stream, &x); // does not depend on what is being computed
        memcpy(nccl_state.pinned, (const char*)mine + offset, n);
        CUDA_CHECK(cudaMemcpyAsync(own, nccl_state.pinned, n, cudaMemcpyHostToDevice, nccl_state.stream));
        nccl_run(c, &x);
        CUDA_CHECK(cudaMemcpyAsync(nccl_state.pinned, staging, n * (size_t)c->size, cudaMemcpyDeviceToHost, nccl_state.stream));
        nccl_end(slot);
        nccl_wait_host(nccl_state.busy.end[slot]);
        for (int r = 0; r < c->size; r++) { memcpy((char*)all + (size_t)r * bytes + offset, nccl_state.pinned + (size_t)r * n, n); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// End

static void nccl_spans_close(NcclSpans* spans) {
    for (int i = 0; i < NCCL_RING; i++) {
        CUDA_CHECK(cudaEventDestroy(spans->begin[i]));
        CUDA_CHECK(cudaEventDestroy(spans->end[i]));
    }
}

static void nccl_disconnect(void) {
    Error error;
    comm_nccl_sync();
    nccl_check(ncclCommFinalize(nccl_state.comm), "ncclCommFinalize");
    if (!nccl_settle("ncclCommFinalize", &error)) { comm_nccl_fail(error.text); }
    nccl_check(ncclCommDestroy(nccl_state.comm), "ncclCommDestroy");
    nccl_state.comm = NULL;
    nccl_plan_close(&nccl_state.plan);
    nccl_spans_close(&nccl_state.busy);
    nccl_spans_close(&nccl_state.waited);
    for (int i = 0; i < NCCL_RING; i++) { CUDA_CHECK(cudaEventDestroy(nccl_state.ready[i])); }
    CUDA_CHECK(cudaEventDestroy(nccl_state.host));
    CUDA_CHECK(cudaStreamDestroy(nccl_state.stream));
    device_free(nccl_state.staging, NCCL_STAGING);
    host_free(nccl_state.pinned);
    free(nccl_state.segments);
}

// Collective: no rank ends while another still needs it.
void comm_nccl_close(void) {
    if (!nccl_state.nodes) { return; } // it was never open
    char* all = (char*)need(malloc((size_t)nccl_state.world.size));
    comm_nccl_gather_host(&nccl_state.world, "", 1, all, TRAFFIC_CONTROL);
    free(all);
    if (nccl_state.connected) { nccl_disconnect(); }
#ifdef USE_MPI
    if (nccl_state.opened_mpi) { MPI_Finalize(); }
#endif
    free(nccl_state.nodes);
    memset(&nccl_state, 0, sizeof(nccl_state));
}

#else // the CPU program, and the GPU's branch on the CPU: no communicator has this backend

bool comm_nccl_start_up(Error* error) {
    (void)error;
    return true;
}
void comm_nccl_close(void) {}
void comm_nccl_collect(void) {}
void comm_nccl_sync(void) {}
CommTicket comm_nccl_start(const Comm* c, const CommExchange* x) {
    (void)c, (void)x;
    return 0;
}
void comm_nccl_wait(CommTicket ticket) { (void)ticket; }
void comm_nccl_gather_host(const Comm* c, const void* mine, size_t bytes, void* all, TrafficPurpose purpose) {
    (void)c, (void)purpose;
    memcpy(all, mine, bytes);
}
#endif
