// bench_comm.cu - bandwidth of the communicator: mpirun -np P build/bench_comm [largest MiB]. For each collective and size the median
// time of some repetitions on the slowest rank, the algorithm's bandwidth (bytes / time) and the bus's: what a link carries, bytes / time
// times 2(P-1)/P for all-reduce and (P-1)/P for the others, which does not depend on P for a perfect algorithm. Beside ours the MPI
// library's own collective in the same run. Sizes are of the whole vector, as nccl-tests counts them.
#include "../comm/comm.cuh"

#define REPEATS 9

typedef struct {
    Comm world;
    float *from, *to;
    size_t count; // elements of the vector
    CommSegment* segments;
} Bench;

static int bench_order(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return x < y ? -1 : x > y;
}

static void bench_ours(Bench* b, CommKind kind) {
    size_t P = (size_t)b->world.size, count = 0, share = b->count / P;
    for (size_t o = 0; o < P; o++) {
        for (size_t s = 0; s < P; s++) {
            if (kind != COMM_ALL_TO_ALL && s != o) { continue; }
            size_t part = kind == COMM_ALL_TO_ALL ? share / P : share;
            CommSegment segment = {(int)o, (int)s, b->from + o * share, b->to + o * share, part};
            if (kind == COMM_ALL_TO_ALL) {
                segment.from = b->from + o * part;
                segment.to = b->to + s * part;
            }
            b->segments[count++] = segment;
        }
    }
    CommExchange exchange = {kind, COMM_F32, false, TRAFFIC_GRADIENT, b->segments, count, 0};
    comm_run(&b->world, &exchange);
    device_sync();
}

// With the communication thread held at its lock nobody else is in the library.
static void bench_library(Bench* b, CommKind kind) {
#if defined(USE_MPI) && !ON_GPU
    int P = b->world.size, share = (int)(b->count / (size_t)P);
    switch (kind) {
    case COMM_ALL_REDUCE: MPI_Allreduce(b->from, b->to, share * P, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case COMM_REDUCE_SCATTER: MPI_Reduce_scatter_block(b->from, b->to, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case COMM_ALL_GATHER: MPI_Allgather(b->from, share, MPI_FLOAT, b->to, share, MPI_FLOAT, MPI_COMM_WORLD); break;
    case COMM_ALL_TO_ALL: MPI_Alltoall(b->from, share / P, MPI_FLOAT, b->to, share / P, MPI_FLOAT, MPI_COMM_WORLD); break;
    }
#else
    (void)b, (void)kind;
#endif
}

static void bench_hold(bool hold) {
#if defined(USE_MPI) && !ON_GPU
    if (hold) {
        pthread_mutex_lock(&comm_engine.lock);
        usleep(60000); // until the thread, wherever it is, has come back to the lock
        MPI_Barrier(MPI_COMM_WORLD);
    } else {
        pthread_mutex_unlock(&comm_engine.lock);
    }
#else
    (void)hold;
#endif
}

// Seconds of one call: the slowest rank's, the median of the repetitions.
static double bench_time(Bench* b, CommKind kind, bool library) {
    double times[REPEATS], *all = (double*)need(malloc((size_t)b->world.size * sizeof(times)));
    comm_barrier(&b->world);
    if (library) { bench_hold(true); }
    for (int i = -1; i < REPEATS; i++) {
        double start = seconds_now();
        library ? bench_library(b, kind) : bench_ours(b, kind);
        if (i >= 0) { times[i] = seconds_now() - start; }
    }
    if (library) { bench_hold(false); }
    comm_gather_host(&b->world, times, sizeof(times), all, TRAFFIC_CONTROL);
    for (int i = 0; i < REPEATS; i++) {
        for (int r = 0; r < b->world.size; r++) { times[i] = fmax(times[i], all[r * REPEATS + i]); }
    }
    free(all);
    qsort(times, REPEATS, sizeof(double), bench_order);
    return times[REPEATS / 2];
}

static void bench_row(Bench* b, const char* name, CommKind kind, size_t bytes) {
    double P = b->world.size, bus = (kind == COMM_ALL_REDUCE ? 2 : 1) * (P - 1) / P, time[2], gb = (double)bytes * 1e-9;
    b->count = bytes / sizeof(float);
    for (int library = 0; library < 2; library++) { time[library] = bench_time(b, kind, library); }
    if (b->world.rank == 0) {
        printf("%-15s %10zu", name, bytes);
        for (int i = 0; i < 2; i++) { printf(" | %10.1f %7.2f %7.2f", 1e6 * time[i], gb / time[i], gb / time[i] * bus); }
        printf(" | %5.2f\n", time[1] / time[0]);
        fflush(stdout);
    }
}

int main(int argc, char** argv) {
    static Bench b;
    Error error;
    Launch launch;
    size_t most = (argc > 1 ? (size_t)atoi(argv[1]) : 64) << 20;
    if (!launch_find(&launch, &error) || !comm_open(&b.world, &launch, 60, &error)) {
        fprintf(stderr, "error: %s\n", error.text);
        return 1;
    }
    b.from = (float*)device_alloc(most);
    b.to = (float*)device_alloc(most);
    b.segments = (CommSegment*)need(malloc((size_t)b.world.size * (size_t)b.world.size * sizeof(CommSegment)));
    need(b.from);
    need(b.to);
    device_zero(b.from, most); // pages that nobody wrote to would all be one
    device_zero(b.to, most);
    if (b.world.rank == 0) {
        printf("%d ranks on %d node(s)\n", b.world.size, b.world.nodes);
        printf("%-15s %10s | %-26s | %-26s | library's\n", "", "", "ours", "MPI library's");
        printf("%-15s %10s | %10s %7s %7s", "collective", "bytes", "us", "alg", "bus");
        printf(" | %10s %7s %7s | time / ours\n", "us", "alg", "bus GB/s");
    }
    for (size_t bytes = 4096; bytes <= most; bytes *= bytes < (size_t)16 << 20 ? 16 : 4) {
        bench_row(&b, "all-reduce", COMM_ALL_REDUCE, bytes);
        bench_row(&b, "reduce-scatter", COMM_REDUCE_SCATTER, bytes);
        bench_row(&b, "all-gather", COMM_ALL_GATHER, bytes);
        bench_row(&b, "all-to-all", COMM_ALL_TO_ALL, bytes);
    }
    free(b.segments);
    comm_close(&b.world);
    return 0;
}
