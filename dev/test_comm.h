// test_comm.h - the communicator. comm_tests run on one rank, comm_rank_tests on all ranks of a job together. Inputs are whole numbers
// so small that their sums are exact in fp32 and bf16 in any order; a result is then right or wrong, without a tolerance. What must not
// be written (the places of other owners, the space between segments) is checked as well.
#pragma once
#include "../comm/comm.cuh"
#include "test.h"

#define COMM_UNTOUCHED (-77.0f)
#define COMM_TEST_SEGMENTS 16

static const size_t comm_counts[] = {0, 1, 2, 3, 255, 4097, 100003};

// What to do, and how segments are laid out.
typedef struct {
    CommKind kind;
    CommType type;
    bool add, in_place;
    int pattern; // of owners
    uint32_t seed;
    bool small; // without the largest segments
} CommCase;

// The buffers of a case on this rank: `from` and `to` are device memory of `total` elements, `before` and `after` what `to` holds.
typedef struct {
    CommCase what;
    CommSegment segments[COMM_TEST_SEGMENTS];
    size_t offsets[COMM_TEST_SEGMENTS], count, total, bytes;
    char *from, *to, *host;
    CommExchange exchange;
    CommTicket ticket;
} CommRun;

static const char* const comm_kind_names[] = {"reduce-scatter", "all-gather", "all-reduce", "all-to-all"};

static uint32_t comm_hash(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    h = (h ^ (h >> 15)) * 0x2c1b3c6du;
    return h ^ (h >> 13);
}

// -8 to 8: the sum over 8 ranks has at most 7 bits.
static float comm_value(const CommCase* c, int rank, size_t i) {
    return (float)((int)(comm_hash((uint32_t)i, (uint32_t)rank, c->seed) % 17) - 8);
}
static float comm_before(const CommCase* c, size_t i) { return c->add ? (float)((int)(i % 9) - 4) : COMM_UNTOUCHED; }

static void comm_put(CommType type, char* at, size_t i, float value) {
    switch (type) {
    case COMM_F32: ((float*)at)[i] = value; break;
    case COMM_BF16: ((uint16_t*)at)[i] = float_to_bf16(value); break;
    default: at[i] = (char)(int)value;
    }
}

static float comm_get(CommType type, const char* at, size_t i) {
    if (type == COMM_F32) { return ((const float*)at)[i]; }
    return type == COMM_BF16 ? bf16_to_float(((const uint16_t*)at)[i]) : (float)(signed char)at[i];
}

// Patterns: owners in turn; the last rank owns all; the last rank owns nothing; the first owns nearly all.
static int comm_pattern_owner(int pattern, int i, int size) {
    switch (pattern) {
    case 0: return i % size;
    case 1: return size - 1;
    case 2: return (i * 5 + 1) % (size > 1 ? size - 1 : 1);
    default: return i == 1 ? size - 1 : 0;
    }
}

// Only what a rank needs is given: other places are NULL, as a program would leave them.
static void comm_run_segments(CommRun* run, const Comm* c) {
    const CommCase* what = &run->what;
    size_t unit = comm_type_bytes(what->type);
    run->count = what->kind == COMM_ALL_TO_ALL ? COMM_TEST_SEGMENTS : COUNT_OF(comm_counts) + 3;
    run->total = 0;
    for (size_t i = 0; i < run->count; i++) {
        CommSegment* s = &run->segments[i];
        s->owner = comm_pattern_owner(what->pattern, (int)i, c->size);
        s->source = what->kind == COMM_ALL_TO_ALL ? (int)((i * 3 + i / 4 + what->seed) % (size_t)c->size) : s->owner;
        s->count = comm_counts[(i + what->seed) % (COUNT_OF(comm_counts) - what->small)];
        run->offsets[i] = run->total;
        run->total += s->count + 1; // one element between segments
        bool gives = what->kind == COMM_ALL_GATHER ? s->owner == c->rank : what->kind == COMM_ALL_TO_ALL ? s->source == c->rank : true;
        bool gets = what->kind == COMM_ALL_GATHER || what->kind == COMM_ALL_REDUCE || s->owner == c->rank;
        s->to = gets ? run->to + run->offsets[i] * unit : NULL;
        s->from = !gives ? NULL : what->in_place ? run->to + run->offsets[i] * unit : run->from + run->offsets[i] * unit;
    }
    CommExchange x = {what->kind, what->type, what->add, TRAFFIC_GRADIENT, run->segments, run->count, 0};
    run->exchange = x;
}

// Call twice: the first time fills in the sizes only.
static void comm_run_begin(CommRun* run, const Comm* c, CommCase what) {
    memset(run, 0, sizeof(*run));
    run->what = what;
    comm_run_segments(run, c);
    run->bytes = run->total * comm_type_bytes(what.type);
    run->from = (char*)need(device_alloc(run->bytes));
    run->to = (char*)need(device_alloc(run->bytes));
    run->host = (char*)host_alloc(run->bytes);
    comm_run_segments(run, c);
    for (size_t i = 0; i < run->total; i++) { comm_put(what.type, run->host, i, comm_value(&what, c->rank, i)); }
    device_upload(what.in_place ? run->to : run->from, run->host, run->bytes);
    device_sync();
    if (!what.in_place) {
        for (size_t i = 0; i < run->total; i++) { comm_put(what.type, run->host, i, comm_before(&what, i)); }
        device_upload(run->to, run->host, run->bytes);
        device_sync();
    }
}

// What element i of segment s must be on this rank.
static float comm_expected(const CommRun* run, const Comm* c, const CommSegment* s, size_t i) {
    const CommCase* what = &run->what;
    bool owner = s->owner == c->rank;
    float sum = 0.0f;
    switch (what->kind) {
    case COMM_ALL_GATHER: return comm_value(what, s->owner, i);
    case COMM_ALL_TO_ALL: return owner ? comm_value(what, s->source, i) : comm_before(what, i);
    default:
        if (!owner && what->kind == COMM_REDUCE_SCATTER) { return what->in_place ? comm_value(what, c->rank, i) : comm_before(what, i); }
        for (int r = 0; r < c->size; r++) { sum += comm_value(what, r, i); }
        return sum + (what->add ? comm_before(what, i) : 0.0f);
    }
}

static void comm_run_check(CommRun* run, const Comm* c) {
    const CommCase* what = &run->what;
    size_t wrong = 0, first = 0;
    device_download(run->host, run->to, run->bytes);
    for (size_t k = 0; k < run->count; k++) {
        const CommSegment* s = &run->segments[k];
        for (size_t i = run->offsets[k]; i <= run->offsets[k] + s->count; i++) {
            bool between = i == run->offsets[k] + s->count;
            float nobody = what->in_place ? comm_value(what, c->rank, i) : comm_before(what, i);
            float expected = between ? nobody : comm_expected(run, c, s, i);
            if (comm_get(what->type, run->host, i) == expected) { continue; }
            if (wrong++ == 0) { first = i; }
        }
    }
    CHECK(wrong == 0, "%s of type %d, %d ranks, pattern %d%s%s: %zu of %zu elements are wrong, the first is %zu: %g",
          comm_kind_names[what->kind], what->type, c->size, what->pattern, what->add ? ", added" : "", what->in_place ? ", in place" : "",
          wrong, run->total, first, (double)comm_get(what->type, run->host, first));
}

static void comm_run_end(CommRun* run) {
    device_free(run->from, run->bytes);
    device_free(run->to, run->bytes);
    host_free(run->host);
}

static void comm_case_check(const Comm* c, CommCase what) {
    static CommRun run;
    comm_run_begin(&run, c, what);
    comm_run(c, &run.exchange);
    comm_run_check(&run, c);
    comm_run_end(&run);
}

// Every kind, type and form that has a meaning.
static void comm_check_kinds(const Comm* c, int pattern, uint32_t seed) {
    for (int kind = COMM_REDUCE_SCATTER; kind <= COMM_ALL_TO_ALL; kind++) {
        bool sums = kind == COMM_REDUCE_SCATTER || kind == COMM_ALL_REDUCE;
        for (int type = sums ? COMM_F32 : COMM_BYTE; type <= COMM_BF16; type++) {
            for (int form = 0; form < 3; form++) { // plain, in place, added
                if ((form == 1 && kind == COMM_ALL_TO_ALL) || (form == 2 && kind != COMM_REDUCE_SCATTER)) { continue; }
                CommCase what = {(CommKind)kind, (CommType)type, form == 2, form == 1, pattern, seed++, false};
                comm_case_check(c, what);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// One rank

static void test_comm_self(void) {
    for (int pattern = 0; pattern < 4; pattern++) { comm_check_kinds(comm_alone(), pattern, (uint32_t)pattern); }
}

static void test_comm_self_small(void) {
    const Comm* c = comm_alone();
    char all[8] = "";
    Ledger ledger;
    comm_gather_host(c, "abc", 4, all, TRAFFIC_CONTROL);
    CHECK(strcmp(all, "abc") == 0, "gathered \"%s\"", all);
    comm_barrier(c);
    comm_ledger(c, &ledger);
    CHECK(ledger_sent(&ledger, TRAFFIC_CONTROL) == 0, "one rank sent bytes");
    CHECK(ledger_hidden(&ledger) == 0.0, "%g of nothing was hidden", ledger_hidden(&ledger));
}

#if !defined(USE_MPI) && !ON_GPU
static void test_comm_without_mpi(void) {
    Comm world = *comm_alone();
    Error error;
    Launch launch;
    memset(&launch, 0, sizeof(launch));
    launch.size = 3;
    launch.by = "mpirun (Open MPI)";
    CHECK_FAILS(comm_mpi_open(&world, &launch, 1.0, &error), error, "started 3 ranks, but this program was built without MPI");
}
#endif

#if defined(USE_MPI) && (!ON_GPU || defined(CUDA_ON_CPU))
#include "test_comm_mpi.h"
#endif

static const TestRow comm_tests[] = {
    {"comm: one rank copies and adds", test_comm_self},
    {"comm: one rank, small things", test_comm_self_small},
#if !defined(USE_MPI) && !ON_GPU
    {"comm: several ranks without MPI are refused", test_comm_without_mpi},
#endif
#ifdef TEST_COMM_MPI_ROWS
    TEST_COMM_MPI_ROWS
#endif
};

// ---------------------------------------------------------------------------------------------------------------------------------
// Several ranks

static const int comm_sizes[] = {1, 2, 3, 4, 5, 7, 8};

// The first ranks of the job as a communicator of so many; the others wait at the end of the row.
#define FOR_COMM_SIZES(part)                                                                                        \
    for (size_t size_i = 0; size_i < COUNT_OF(comm_sizes) && comm_sizes[size_i] <= TEST_WORLD->size; size_i++)      \
        if (comm_first(&part, TEST_WORLD, comm_sizes[size_i]))

static void test_comm_ranks_kinds(void) {
    Comm part;
    FOR_COMM_SIZES(part) { comm_check_kinds(&part, (int)(size_i % 4), (uint32_t)size_i); }
    for (int pattern = 0; pattern < 4; pattern++) { comm_check_kinds(TEST_WORLD, pattern, 100 + (uint32_t)pattern); }
}

// Values of very different size, so that each order of adding gives other bits.
static float comm_rough_value(int rank, size_t i) {
    uint32_t h = comm_hash((uint32_t)i, (uint32_t)rank, 77);
    return bits_float((h & 0x807fffffu) | (uint32_t)(120 + (h >> 8) % 14) << 23);
}

static void comm_check_order(const Comm* c, CommType type, CommKind kind, bool in_place) {
    size_t n = 20011, unit = comm_type_bytes(type), bytes = n * unit, wrong = 0, other = 0;
    char *from = (char*)need(device_alloc(bytes)), *to = in_place ? from : (char*)need(device_alloc(bytes));
    char* host = (char*)host_alloc(3 * bytes);
    CommSegment segments[3] = {{c->size - 1, 0, from, to, 7000}, {0, 0, from + 7000 * unit, to + 7000 * unit, 13000},
                               {c->size / 2, 0, from + 20000 * unit, to + 20000 * unit, 11}};
    CommExchange x = {kind, type, false, TRAFFIC_GRADIENT, segments, 3, 0};
    for (int turn = 0; turn < 2; turn++) {
        for (size_t i = 0; i < n; i++) { comm_put(type, host, i, comm_rough_value(c->rank, i)); }
        device_upload(from, host, bytes);
        device_sync();
        comm_run(c, &x);
        device_download(host + (size_t)(1 + turn) * bytes, to, bytes);
    }
    for (size_t k = 0; k < 3; k++) {
        if (kind == COMM_REDUCE_SCATTER && segments[k].owner != c->rank) { continue; }
        size_t first = (size_t)((char*)segments[k].to - to) / unit;
        for (size_t i = first; i < first + segments[k].count; i++) {
            float sum = 0.0f, rounded;
            for (int r = 0; r < c->size; r++) {
                float part = comm_rough_value(r, i);
                sum += type == COMM_BF16 ? bf16_to_float(float_to_bf16(part)) : part;
            }
            rounded = type == COMM_BF16 ? bf16_to_float(float_to_bf16(sum)) : sum;
            wrong += float_bits(comm_get(type, host + bytes, i)) != float_bits(rounded);
        }
    }
    if (kind == COMM_ALL_REDUCE) { other = memcmp(host + bytes, host + 2 * bytes, bytes) != 0; }
    CHECK(wrong == 0, "%d ranks, type %d: %zu of %zu sums are not those of a loop in rank order", c->size, type, wrong, n);
    CHECK(other == 0, "%d ranks, type %d: a second run gave other bits", c->size, type);
    device_free(from, bytes);
    if (!in_place) { device_free(to, bytes); }
    host_free(host);
}

static void test_comm_ranks_order(void) {
    Comm part;
    FOR_COMM_SIZES(part) {
        for (int type = COMM_F32; type <= COMM_BF16; type++) {
            for (int in_place = 0; in_place < 2; in_place++) { comm_check_order(&part, (CommType)type, COMM_ALL_REDUCE, in_place); }
            comm_check_order(&part, (CommType)type, COMM_REDUCE_SCATTER, false);
        }
    }
}

// Many exchanges of all kinds under way before the first wait, which then come in another order.
static void test_comm_ranks_many(void) {
    enum { MANY = 300 };
    static CommRun runs[MANY];
    for (int i = 0; i < MANY; i++) {
        bool sums = i % 4 == COMM_REDUCE_SCATTER || i % 4 == COMM_ALL_REDUCE;
        CommType type = sums || i % 8 < 4 ? COMM_F32 : COMM_BYTE;
        CommCase what = {(CommKind)(i % 4), type, i % 4 == COMM_REDUCE_SCATTER, false, i % 3, (uint32_t)i, i % 16 > 0};
        comm_run_begin(&runs[i], TEST_WORLD, what);
    }
    for (int i = 0; i < MANY; i++) { runs[i].ticket = comm_start(TEST_WORLD, &runs[i].exchange); }
    for (int i = 0; i < MANY; i++) {
        CommRun* run = &runs[(i * 137 + 250) % MANY];
        comm_wait(TEST_WORLD, run->ticket);
        comm_run_check(run, TEST_WORLD);
        comm_run_end(run);
    }
}

// Short exchanges at odd moments: what one rank has finished another has not begun.
static void test_comm_ranks_sleeps(void) {
    enum { TURNS = 1000, OPEN = 8 };
    const Comm* c = TEST_WORLD;
    size_t n = 33, bytes = n * sizeof(float);
    float *host = (float*)host_alloc(bytes), *memory = (float*)need(device_alloc(OPEN * bytes));
    CommSegment segments[OPEN][2];
    CommTicket tickets[OPEN] = {0};
    int wrong = 0;
    for (int turn = 0; turn < TURNS + OPEN; turn++) {
        int slot = turn % OPEN;
        float* at = memory + (size_t)slot * n;
        comm_wait(c, tickets[slot]);
        device_download(host, at, bytes);
        for (size_t i = 0; i < n && turn >= OPEN; i++) {
            wrong += host[i] != (float)(c->size * (turn - OPEN) + c->size * (c->size - 1) / 2 + (int)i * c->size);
        }
        if (turn >= TURNS) { continue; }
        for (size_t i = 0; i < n; i++) { host[i] = (float)(turn + c->rank + (int)i); }
        device_upload(at, host, bytes);
        device_sync();
        CommSegment first = {turn % c->size, 0, at, at, 20}, second = {turn / 7 % c->size, 0, at + 20, at + 20, n - 20};
        segments[slot][0] = first;
        segments[slot][1] = second;
        CommExchange x = {COMM_ALL_REDUCE, COMM_F32, false, TRAFFIC_NORM, segments[slot], 2, 0};
        tickets[slot] = comm_start(c, &x);
        uint32_t random = comm_hash((uint32_t)turn, (uint32_t)c->rank, 5);
        if (random % 4 == 0) { usleep(random / 4 % 500); }
    }
    CHECK(wrong == 0, "%d elements of %d exchanges are wrong", wrong, TURNS);
    host_free(host);
    device_free(memory, OPEN * bytes);
}

// Two groups of ranks with exchanges of their own, between exchanges of all.
static void test_comm_ranks_groups(void) {
    enum { TURNS = 20 };
    static CommRun all[TURNS], some[TURNS];
    const Comm* world = TEST_WORLD;
    if (world->size < 2) {
        CHECK(world->size == 1, "%d ranks", world->size);
        return;
    }
    Comm half = *world;
    half.first = world->rank % 2;
    half.stride = 2;
    half.rank = world->rank / 2;
    half.size = (world->size - half.first + 1) / 2;
    for (int i = 0; i < TURNS; i++) {
        CommCase what = {(CommKind)(i % 4), COMM_F32, false, false, i % 4, (uint32_t)i, i % 4 > 0};
        comm_run_begin(&all[i], world, what);
        what.kind = (CommKind)((i + i / 4) % 4);
        comm_run_begin(&some[i], &half, what);
        all[i].ticket = comm_start(world, &all[i].exchange);
        some[i].ticket = comm_start(&half, &some[i].exchange);
    }
    for (int i = 0; i < TURNS; i++) {
        comm_wait(&half, some[i].ticket);
        comm_run_check(&some[i], &half);
        comm_wait(world, all[i].ticket);
        comm_run_check(&all[i], world);
        comm_run_end(&some[i]);
        comm_run_end(&all[i]);
    }
}

static void test_comm_ranks_host(void) {
    const size_t sizes[] = {0, 1, 7, 1000, 300001};
    Comm part;
    FOR_COMM_SIZES(part) {
        for (size_t k = 0; k < COUNT_OF(sizes); k++) {
            size_t bytes = sizes[k], wrong = 0;
            char *mine = (char*)need(malloc(bytes + 1)), *all = (char*)need(malloc(bytes * (size_t)part.size + 1));
            for (size_t i = 0; i < bytes; i++) { mine[i] = (char)comm_hash((uint32_t)i, (uint32_t)part.rank, 3); }
            all[bytes * (size_t)part.size] = 'x';
            comm_gather_host(&part, mine, bytes, all, TRAFFIC_CONTROL);
            for (size_t i = 0; i < bytes * (size_t)part.size; i++) {
                wrong += all[i] != (char)comm_hash((uint32_t)(i % bytes), (uint32_t)(i / bytes), 3);
            }
            CHECK(wrong == 0 && all[bytes * (size_t)part.size] == 'x', "%d ranks, %zu bytes: %zu are wrong", part.size, bytes, wrong);
            free(mine);
            free(all);
        }
        for (int root = 0; root < part.size; root++) {
            char host[100], *memory = (char*)need(device_alloc(sizeof(host)));
            memset(host, part.rank, sizeof(host));
            device_upload(memory, host, sizeof(host));
            device_sync();
            comm_broadcast(&part, memory, sizeof(host) - 1, root, TRAFFIC_CONTROL);
            device_download(host, memory, sizeof(host));
            CHECK(host[0] == root && host[98] == root && host[99] == part.rank, "from rank %d came %d and %d", root, host[0], host[98]);
            device_free(memory, sizeof(host));
        }
    }
}

static void test_comm_ranks_places(void) {
    const Comm* c = TEST_WORLD;
    int mine[5] = {c->rank, c->local_rank, c->local_size, c->node, c->nodes}, *all = (int*)need(malloc((size_t)c->size * sizeof(mine)));
    comm_gather_host(c, mine, sizeof(mine), all, TRAFFIC_CONTROL);
    for (int r = 0; r < c->size; r++) {
        const int* p = all + 5 * r;
        int before = 0, same = 0;
        for (int k = 0; k < c->size; k++) {
            same += all[5 * k + 3] == p[3];
            before += k < r && all[5 * k + 3] == p[3];
        }
        CHECK(p[0] == r && p[1] == before && p[2] == same, "rank %d: %d, %d of %d", r, p[0], p[1], p[2]);
        CHECK(p[3] >= 0 && p[3] < p[4] && p[4] == c->nodes, "rank %d is on node %d of %d", r, p[3], p[4]);
    }
    free(all);
    int sharers = comm_mpi_local_sharers();
    CHECK(sharers >= 1 && sharers <= c->local_size, "%d ranks share this one's cores, %d are on its node", sharers, c->local_size);
}

static const TestRow comm_rank_tests[] = {
    {"comm ranks: each knows its place", test_comm_ranks_places},
    {"comm ranks: every kind, type and layout", test_comm_ranks_kinds},
    {"comm ranks: sums are in the order of ranks, to the bit", test_comm_ranks_order},
    {"comm ranks: 300 exchanges before the first wait", test_comm_ranks_many},
    {"comm ranks: 1000 short exchanges at odd moments", test_comm_ranks_sleeps},
    {"comm ranks: groups beside all", test_comm_ranks_groups},
    {"comm ranks: host memory and broadcasts", test_comm_ranks_host},
#ifdef TEST_COMM_MPI_ROWS
    TEST_COMM_MPI_RANK_ROWS
#endif
};
