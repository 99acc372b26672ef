// nccl_wait.cuh - the state of the NCCL backend (comm_nccl.cuh), and its waiting, all of which has an end: the host's for the GPU, for
// NCCL's own calls, and for what a lost rank will never send. It looks instead of blocking, and gives up with one line.
#pragma once
#include "launch.h"
#include "nccl_plan.h"
#include <nccl.h>
#include <unistd.h>

#define NCCL_STAGING ((size_t)64 << 20) // device memory for sums
#define NCCL_PINNED ((size_t)4 << 20)   // host memory that gathers of host memory pass through
#define NCCL_RING 256                   // exchanges under way at most

// Spans of time on a stream, each between two events. `next` is the number of the next one; those below `collected` are in *seconds.
typedef struct {
    cudaEvent_t begin[NCCL_RING], end[NCCL_RING];
    uint64_t next, collected;
    double* seconds;
} NcclSpans;

static struct {
    Launch launch;
    double timeout; // seconds
    bool by_mpi, opened_mpi, connected;
    Comm world;
    int* nodes; // of each rank of the job
    ncclUniqueId id;
    ncclComm_t comm;
    cudaStream_t stream;
    cudaEvent_t ready[NCCL_RING];  // what the exchange reads has been computed
    cudaEvent_t host;              // what the host waits for
    CommExchange kinds[NCCL_RING]; // for messages
    NcclSpans busy, waited;        // exchange number i is span i of busy; its ticket is i + 1
    NcclPlan plan;
    void* staging;
    char* pinned;
    CommSegment* segments; // (ranks), of a gather
} nccl_state;

// Prints one line and ends this process; under a launcher that ends the job. Rank 0 speaks first, and usually nobody after it.
__attribute__((noreturn)) void comm_nccl_fail(const char* text) {
    if (nccl_state.world.rank > 0) { sleep(2); }
    fprintf(stderr, "error: %s\n", text);
    fflush(NULL);
    alarm(20); // giving up may wait for a GPU that waits for others
    if (nccl_state.comm) { ncclCommAbort(nccl_state.comm); }
    exit(1);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Waiting with an end

// Looks often at first, then rarely.
static void nccl_pause(int turn) {
    struct timespec t = {0, turn < 10000 ? 20000 : 1000000};
    if (turn >= 200) { nanosleep(&t, NULL); }
}

static bool nccl_good(ncclResult_t status, const char* what, Error* error) {
    if (status == ncclSuccess || status == ncclInProgress) { return true; }
    const char* detail = ncclGetLastError(nccl_state.comm);
    return fail(error, "rank %d: NCCL: %s: %s%s%s%.200s", nccl_state.world.rank, what, ncclGetErrorString(status),
                status == ncclRemoteError ? "; another rank was lost" : "", detail && detail[0] ? ": " : "", detail ? detail : "");
}

// Until NCCL has done what it was last asked for. That is quick unless another rank is not there.
static bool nccl_settle(const char* what, Error* error) {
    double begun = seconds_now();
    for (int turn = 0;; turn++) {
        ncclResult_t state = ncclSuccess;
        if (!nccl_good(ncclCommGetAsyncError(nccl_state.comm, &state), what, error) || !nccl_good(state, what, error)) { return false; }
        if (state != ncclInProgress) { return true; }
        if (seconds_now() - begun > nccl_state.timeout) {
            return fail(error, "rank %d waited %g s for the other ranks in NCCL (%s): one of them is stuck or lost", nccl_state.world.rank,
                        nccl_state.timeout, what);
        }
        nccl_pause(turn);
    }
}

static void nccl_check(ncclResult_t status, const char* what) {
    Error error;
    if (!nccl_good(status, what, &error)) { comm_nccl_fail(error.text); }
}

static bool nccl_event_done(cudaEvent_t event) {
    cudaError_t status = cudaEventQuery(event);
    if (status == cudaSuccess) { return true; }
    if (status != cudaErrorNotReady) { CUDA_CHECK(status); }
    cudaGetLastError(); // "not ready" would be taken for the error of the next launch
    return false;
}

// Adds up the spans that are over.
static void nccl_spans_collect(NcclSpans* spans) {
    for (; spans->collected < spans->next; spans->collected++) {
        int slot = (int)(spans->collected % NCCL_RING);
        float milliseconds = 0.0f;
        if (!nccl_event_done(spans->end[slot])) { return; }
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, spans->begin[slot], spans->end[slot]));
        *spans->seconds += (double)milliseconds * 1e-3;
    }
}

// The ledger's times, as far as they are known.
void comm_nccl_collect(void) {
    nccl_spans_collect(&nccl_state.busy);
    nccl_spans_collect(&nccl_state.waited);
}

static void nccl_stalled(uint64_t number) {
    static const char* const kinds[] = {"reduce-scatter", "all-gather", "all-reduce", "all-to-all"};
    const CommExchange* x = &nccl_state.kinds[number % NCCL_RING];
    Error error;
    fail(&error, "rank %d waited %g s for the other ranks in exchange %llu (%s, %s): one of them is stuck or lost", nccl_state.world.rank,
         nccl_state.timeout, (unsigned long long)number, kinds[x->kind], traffic_names[x->purpose]);
    comm_nccl_fail(error.text);
}

// The host waits. Computing may take as long as it likes; the time-out is for the oldest exchange that has all it needs from this rank
// and does not end.
static void nccl_wait_host(cudaEvent_t event) {
    uint64_t watched = UINT64_MAX;
    double since = 0;
    for (int turn = 0; !nccl_event_done(event); turn++) {
        nccl_pause(turn);
        if (turn % 64) { continue; }
        Error error;
        ncclResult_t state = ncclSuccess;
        nccl_check(ncclCommGetAsyncError(nccl_state.comm, &state), "an exchange");
        if (!nccl_good(state, "an exchange", &error)) { comm_nccl_fail(error.text); }
        comm_nccl_collect();
        uint64_t oldest = nccl_state.busy.collected;
        if (oldest == nccl_state.busy.next || !nccl_event_done(nccl_state.ready[oldest % NCCL_RING])) {
            watched = UINT64_MAX;
        } else if (oldest != watched) {
            watched = oldest;
            since = seconds_now();
        } else if (seconds_now() - since > nccl_state.timeout) {
            nccl_stalled(oldest);
        }
    }
    comm_nccl_collect();
}

// Until the computing stream is done, for the host that reads its results: like device_sync, but a lost rank ends it.
void comm_nccl_sync(void) {
    if (!nccl_state.connected) { return; }
    CUDA_CHECK(cudaEventRecord(nccl_state.host, device_stream));
    nccl_wait_host(nccl_state.host);
}
