// test_nccl.h - exchanges over NCCL. The plans of all ranks are played in one process, on whatever device the build has: groups match,
// staging does not run over, and the results are the sums in the order of ranks, bit for bit. So one GPU, or none, tests all but NCCL
// itself. With a GPU, NCCL then runs as a job of one rank, which also sends to itself.
#pragma once
#include "../comm/comm.cuh"
#include "../comm/nccl_plan.h"
#include "test.h"

#define NCCL_TEST_RANKS 9
#define NCCL_TEST_SEGMENTS 2500

// One exchange of `ranks` ranks. Each has two blocks of device memory, `from` and `to`, with the segments one after the other, or one
// block for both.
typedef struct {
    CommExchange exchange;
    int ranks;
    bool in_place;
    size_t count, elements, element; // segments; elements and bytes of an element
    size_t* offsets;                 // (count)
    CommSegment* segments[NCCL_TEST_RANKS];
    char *from[NCCL_TEST_RANKS], *to[NCCL_TEST_RANKS], *staging[NCCL_TEST_RANKS];
    float *given, *before; // (ranks, elements): what `from` and `to` hold at the start
    size_t staging_bytes;
    NcclPlan plans[NCCL_TEST_RANKS];
    size_t groups;
} NcclTest;

static uint32_t nccl_test_random(uint32_t* state) { // xorshift, Marsaglia 2003
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static int nccl_test_below(uint32_t* state, int n) { return (int)(nccl_test_random(state) % (uint32_t)n); }

static void nccl_test_write(const NcclTest* t, char* device, const float* values) {
    char* host = (char*)need(malloc(max_size(1, t->elements * t->element)));
    for (size_t i = 0; i < t->elements; i++) {
        if (t->element == 4) { memcpy(host + 4 * i, values + i, 4); }
        if (t->element == 2) {
            uint16_t half = float_to_bf16(values[i]);
            memcpy(host + 2 * i, &half, 2);
        }
        if (t->element == 1) { host[i] = (char)values[i]; }
    }
    device_upload(device, host, t->elements * t->element);
    device_sync();
    free(host);
}

static void nccl_test_read(const NcclTest* t, const char* device, float* values) {
    char* host = (char*)need(malloc(max_size(1, t->elements * t->element)));
    device_download(host, device, t->elements * t->element);
    for (size_t i = 0; i < t->elements; i++) {
        uint16_t half = 0;
        memcpy(&half, host + 2 * (t->element == 2 ? i : 0), t->elements > 1 || t->element > 1 ? 2 : 0);
        if (t->element == 4) { memcpy(values + i, host + 4 * i, 4); }
        if (t->element == 2) { values[i] = bits_float((uint32_t)half << 16); }
        if (t->element == 1) { values[i] = host[i]; }
    }
    free(host);
}

// fp32 values that round in sums, so that their order shows; whole numbers for the other types.
static float nccl_test_value(const NcclTest* t, uint32_t* state) {
    float whole = (float)(nccl_test_below(state, 200) - 100);
    return t->element == 4 ? whole * 1.234567f + (float)nccl_test_below(state, 1000) * 1e-4f : whole;
}

static void nccl_test_open(NcclTest* t, CommKind kind, CommType type, int ranks, size_t segments, int most, bool in_place, bool add,
                           uint32_t* state) {
    memset(t, 0, sizeof(*t));
    t->ranks = ranks;
    t->in_place = in_place;
    t->count = segments;
    t->element = comm_type_bytes(type);
    t->offsets = (size_t*)need(malloc(max_size(1, segments) * sizeof(size_t)));
    CommExchange x = {kind, type, add, TRAFFIC_GRADIENT, NULL, segments, 0};
    t->exchange = x;
    CommSegment* list = (CommSegment*)need(calloc(max_size(1, segments), sizeof(CommSegment)));
    int favourite = nccl_test_below(state, 3) == 0 ? nccl_test_below(state, ranks) : -1; // sometimes one rank owns all
    for (size_t i = 0; i < segments; i++) {
        t->offsets[i] = t->elements;
        list[i].owner = favourite >= 0 ? favourite : nccl_test_below(state, ranks);
        list[i].source = nccl_test_below(state, ranks);
        list[i].count = (size_t)nccl_test_below(state, most);
        t->elements += list[i].count;
    }
    size_t slot = (size_t)(1 + nccl_test_below(state, most < 64 ? 64 : 2 * most));
    t->staging_bytes = slot * t->element * (size_t)ranks + (size_t)nccl_test_below(state, 7);
    t->given = (float*)need(malloc(max_size(1, t->elements * (size_t)ranks) * sizeof(float)));
    t->before = (float*)need(malloc(max_size(1, t->elements * (size_t)ranks) * sizeof(float)));
    for (size_t i = 0; i < t->elements * (size_t)ranks; i++) {
        t->given[i] = nccl_test_value(t, state);
        t->before[i] = in_place ? t->given[i] : nccl_test_value(t, state);
    }
    for (int r = 0; r < ranks; r++) {
        t->from[r] = (char*)need(device_alloc(t->elements * t->element));
        t->to[r] = in_place ? t->from[r] : (char*)need(device_alloc(t->elements * t->element));
        t->staging[r] = (char*)need(device_alloc(t->staging_bytes));
        nccl_test_write(t, t->to[r], t->before + (size_t)r * t->elements);
        nccl_test_write(t, t->from[r], t->given + (size_t)r * t->elements);
        t->segments[r] = (CommSegment*)need(malloc(max_size(1, segments) * sizeof(CommSegment)));
        for (size_t i = 0; i < segments; i++) {
            t->segments[r][i] = list[i];
            t->segments[r][i].from = t->from[r] + t->offsets[i] * t->element;
            t->segments[r][i].to = t->to[r] + t->offsets[i] * t->element;
        }
        nccl_plan_open(&t->plans[r], ranks);
    }
    free(list);
}

static void nccl_test_close(NcclTest* t) {
    for (int r = 0; r < t->ranks; r++) {
        if (!t->in_place) { device_free(t->to[r], t->elements * t->element); }
        device_free(t->from[r], t->elements * t->element);
        device_free(t->staging[r], t->staging_bytes);
        free(t->segments[r]);
        nccl_plan_close(&t->plans[r]);
    }
    free(t->offsets);
    free(t->given);
    free(t->before);
}

// Memory that a group sends must not be written by it: its messages have no order.
static void nccl_test_check_group(const NcclTest* t, const NcclPlan* plan) {
    size_t most = max_size(NCCL_GROUP_OPS, (size_t)t->ranks);
    CHECK(plan->op_count <= most, "a group of %zu operations, expected at most %zu", plan->op_count, most);
    CHECK(plan->local_count <= most, "%zu sums in a group, expected at most %zu", plan->local_count, most);
    for (size_t i = 0; i < plan->op_count; i++) {
        const NcclOp* op = &plan->ops[i];
        if (op->peer == plan->rank || op->peer < 0 || op->peer >= t->ranks || op->bytes == 0) {
            CHECK(false, "rank %d: %zu bytes with rank %d", plan->rank, op->bytes, op->peer);
        }
        if (plan->reducing && !op->send &&
            (op->memory < t->staging[plan->rank] || op->memory + op->bytes > t->staging[plan->rank] + t->staging_bytes)) {
            CHECK(false, "rank %d: a part outside the staging memory", plan->rank);
        }
        for (size_t k = 0; k < plan->op_count && plan->op_count < 200; k++) {
            const NcclOp* other = &plan->ops[k];
            bool overlap = k != i && op->memory < other->memory + other->bytes && other->memory < op->memory + op->bytes;
            if (overlap && !(op->send && other->send)) {
                CHECK(false, "rank %d: messages %zu and %zu of a group share memory", plan->rank, i, k);
            }
        }
    }
}

// Sends of `a` to `b`, in order, must be what `b` receives from `a`, in order.
static void nccl_test_carry(NcclTest* t, int a, int b) {
    const NcclPlan *from = &t->plans[a], *to = &t->plans[b];
    size_t k = 0;
    for (size_t i = 0; i < from->op_count; i++) {
        const NcclOp* out = &from->ops[i];
        if (!out->send || out->peer != b) { continue; }
        while (k < to->op_count && (to->ops[k].send || to->ops[k].peer != a)) { k++; }
        bool meets = k < to->op_count && to->ops[k].bytes == out->bytes;
        if (!meets) { CHECK(false, "rank %d sends %zu bytes that rank %d does not expect", a, out->bytes, b); }
        if (meets) { comm_self_copy(to->ops[k].memory, out->memory, out->bytes); }
        k++;
    }
    while (k < to->op_count && (to->ops[k].send || to->ops[k].peer != a)) { k++; }
    if (k < to->op_count) { CHECK(false, "rank %d expects a message that rank %d does not send", b, a); }
}

static void nccl_test_play(NcclTest* t) {
    CommExchange exchanges[NCCL_TEST_RANKS];
    for (int r = 0; r < t->ranks; r++) {
        exchanges[r] = t->exchange;
        exchanges[r].segments = t->segments[r];
        nccl_plan_start(&t->plans[r], &exchanges[r], r, t->ranks, t->staging[r], t->staging_bytes);
    }
    for (bool more = true; more;) {
        more = nccl_plan_next(&t->plans[0]);
        for (int r = 1; r < t->ranks; r++) {
            CHECK(nccl_plan_next(&t->plans[r]) == more, "rank %d has another number of groups than rank 0", r);
        }
        if (!more) { break; }
        t->groups++;
        for (int r = 0; r < t->ranks; r++) { nccl_test_check_group(t, &t->plans[r]); }
        for (int a = 0; a < t->ranks * t->ranks; a++) { nccl_test_carry(t, a / t->ranks, a % t->ranks); }
        for (int r = 0; r < t->ranks; r++) {
            for (size_t i = 0; i < t->plans[r].local_count; i++) { nccl_plan_run_local(&t->plans[r], &t->plans[r].locals[i]); }
        }
    }
}

static float nccl_test_rounded(const NcclTest* t, float x) { return t->element == 2 ? bits_float((uint32_t)float_to_bf16(x) << 16) : x; }

// What `to` of rank r must hold at element i of segment s afterwards.
static float nccl_test_expected(const NcclTest* t, int r, const CommSegment* s, size_t i) {
    const CommExchange* x = &t->exchange;
    float before = t->before[(size_t)r * t->elements + i], sum = x->kind == COMM_REDUCE_SCATTER && x->add ? before : 0.0f;
    for (int k = 0; k < t->ranks; k++) { sum += t->given[(size_t)k * t->elements + i]; }
    switch (x->kind) {
    case COMM_REDUCE_SCATTER: return r == s->owner ? nccl_test_rounded(t, sum) : before;
    case COMM_ALL_REDUCE: return nccl_test_rounded(t, sum);
    case COMM_ALL_GATHER: return t->given[(size_t)s->owner * t->elements + i];
    default: return r == s->owner ? t->given[(size_t)s->source * t->elements + i] : before;
    }
}

static void nccl_test_check(const NcclTest* t) {
    float* found = (float*)need(malloc(max_size(1, t->elements) * sizeof(float)));
    for (int r = 0; r < t->ranks; r++) {
        size_t wrong = 0;
        nccl_test_read(t, t->to[r], found);
        for (size_t s = 0; s < t->count; s++) {
            const CommSegment* segment = &t->segments[r][s];
            for (size_t i = t->offsets[s]; i < t->offsets[s] + segment->count; i++) {
                wrong += found[i] != nccl_test_expected(t, r, segment, i);
            }
        }
        CHECK(wrong == 0, "kind %d, %d ranks: %zu of %zu elements of rank %d are wrong", (int)t->exchange.kind, t->ranks, wrong,
              t->elements, r);
    }
    free(found);
}

static void nccl_test_plans(CommKind kind) {
    uint32_t state = 1 + (uint32_t)kind;
    size_t groups = 0;
    for (int k = 0; k < 60; k++) {
        NcclTest t;
        int ranks = 1 + nccl_test_below(&state, NCCL_TEST_RANKS);
        bool sums = kind == COMM_REDUCE_SCATTER || kind == COMM_ALL_REDUCE;
        CommType type = k % 3 == 0 ? COMM_BF16 : k % 3 == 1 || sums ? COMM_F32 : COMM_BYTE;
        // in place, an all-to-all would send what it receives into, and an added sum would count itself twice
        bool in_place = k % 2 == 0 && kind != COMM_ALL_TO_ALL, add = kind == COMM_REDUCE_SCATTER && !in_place && k % 4 == 1;
        nccl_test_open(&t, kind, type, ranks, (size_t)nccl_test_below(&state, 14), k % 5 == 0 ? 3000 : 80, in_place, add, &state);
        nccl_test_play(&t);
        nccl_test_check(&t);
        groups += t.groups;
        nccl_test_close(&t);
    }
    CHECK(groups >= 40, "%zu groups in all: too few to show anything", groups);
}

static void nccl_test_reduce_scatter(void) { nccl_test_plans(COMM_REDUCE_SCATTER); }
static void nccl_test_all_gather(void) { nccl_test_plans(COMM_ALL_GATHER); }
static void nccl_test_all_reduce(void) { nccl_test_plans(COMM_ALL_REDUCE); }
static void nccl_test_all_to_all(void) { nccl_test_plans(COMM_ALL_TO_ALL); }

static void nccl_test_many_segments(void) {
    const CommKind kinds[] = {COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_ALL_REDUCE, COMM_ALL_TO_ALL};
    uint32_t state = 99;
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        NcclTest t;
        nccl_test_open(&t, kinds[k], COMM_F32, k % 2 ? 5 : 2, NCCL_TEST_SEGMENTS, 4, false, false, &state);
        nccl_test_play(&t);
        nccl_test_check(&t);
        CHECK(t.groups > 2, "%zu group(s) for %d segments", t.groups, NCCL_TEST_SEGMENTS);
        nccl_test_close(&t);
    }
}

// However the list is sorted, all owners sum up in the same round.
static void nccl_test_balance(void) {
    enum { RANKS = 4, EACH = 1000, WINDOW = 256 };
    float memory[1] = {0};
    CommSegment segments[RANKS];
    for (int r = 0; r < RANKS; r++) {
        CommSegment s = {r, 0, memory, memory, EACH};
        segments[r] = s;
    }
    CommExchange x = {COMM_REDUCE_SCATTER, COMM_F32, false, TRAFFIC_GRADIENT, segments, RANKS, 0};
    NcclPlan plan;
    size_t groups = 0, received = 0;
    nccl_plan_open(&plan, RANKS);
    for (nccl_plan_start(&plan, &x, 1, RANKS, memory, WINDOW * sizeof(float) * RANKS); nccl_plan_next(&plan); groups++) {
        size_t sends = 0;
        for (size_t i = 0; i < plan.op_count; i++) {
            sends += plan.ops[i].send;
            received += plan.ops[i].send ? 0 : plan.ops[i].bytes;
        }
        CHECK(sends == RANKS - 1 && plan.op_count == 2 * (RANKS - 1), "group %zu: %zu sends of %zu operations", groups, sends,
              plan.op_count);
    }
    CHECK(groups == 4, "%zu groups, expected 1000 / 256 rounded up", groups);
    CHECK(received == EACH * sizeof(float) * (RANKS - 1), "%zu bytes received", received);
    nccl_plan_close(&plan);
}

#if ON_GPU && !defined(CUDA_ON_CPU)

static bool nccl_test_one_rank(Comm* world) {
    Launch l;
    Error error;
    memset(&l, 0, sizeof(l));
    l.kind = LAUNCH_BY_TCP;
    l.size = 1;
    l.by = "";
    *world = *comm_alone();
    bool good = comm_nccl_open(world, &l, 60, &error) && comm_nccl_start_up(&error);
    CHECK_OK(good, error);
    return good;
}

// Every kind, with the sum kernel on the communication stream, beside work on the computing stream that it depends on and that
// depends on it; more exchanges than fit into the ring.
static void nccl_test_exchanges(void) {
    enum { N = 100003 };
    Comm world;
    if (!nccl_test_one_rank(&world)) { return; }
    float* host = (float*)need(malloc(N * sizeof(float)));
    float *from = (float*)need(device_alloc(N * sizeof(float))), *to = (float*)need(device_alloc(N * sizeof(float)));
    for (int i = 0; i < N; i++) { host[i] = (float)(i % 1000); }
    device_upload(from, host, N * sizeof(float));
    CommSegment segment = {0, 0, from, to, N};
    const CommKind kinds[] = {COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_ALL_REDUCE, COMM_ALL_TO_ALL};
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        CommExchange x = {kinds[k], COMM_F32, false, TRAFFIC_GRADIENT, &segment, 1, 0};
        device_zero(to, N * sizeof(float));
        comm_wait(&world, comm_start(&world, &x));
        float* found = (float*)need(malloc(N * sizeof(float)));
        comm_nccl_sync();
        device_download(found, to, N * sizeof(float));
        CHECK(memcmp(found, host, N * sizeof(float)) == 0, "kind %d", (int)kinds[k]);
        free(found);
    }
    CommExchange add = {COMM_REDUCE_SCATTER, COMM_F32, true, TRAFFIC_GRADIENT, &segment, 1, 0};
    device_zero(to, N * sizeof(float));
    CommTicket last = 0;
    for (int i = 0; i < 3 * NCCL_RING; i++) { last = comm_start(&world, &add); }
    comm_wait(&world, last);
    float sum = 0.0f;
    device_download(&sum, to + 999, sizeof(sum));
    CHECK(sum == 999.0f * 3 * NCCL_RING, "%d added sums of 999 gave %g", 3 * NCCL_RING, (double)sum);
    comm_nccl_collect();
    CHECK(world.ledger->busy > 0, "no time was measured");
    free(host);
    device_free(from, N * sizeof(float));
    device_free(to, N * sizeof(float));
    comm_nccl_close();
}

// A message to itself: NCCL's own path, its groups, and the ledger.
static void nccl_test_to_itself(void) {
    enum { N = 3 << 20 };
    Comm world;
    if (!nccl_test_one_rank(&world)) { return; }
    memset(world.ledger, 0, sizeof(*world.ledger));
    char *host = (char*)need(malloc(N)), *found = (char*)need(malloc(N)), *from = (char*)need(device_alloc(N)),
         *to = (char*)need(device_alloc(N));
    for (int i = 0; i < N; i++) { host[i] = (char)(i * 7); }
    device_upload(from, host, N);
    CommExchange x = {COMM_ALL_TO_ALL, COMM_BYTE, false, TRAFFIC_WEIGHTS, NULL, 0, 0};
    int slot = nccl_begin(device_stream, &x);
    NcclOp send = {true, 0, from, N}, receive = {false, 0, to, N};
    nccl_state.plan.ops[0] = send;
    nccl_state.plan.ops[1] = receive;
    nccl_state.plan.op_count = 2;
    nccl_run_group(&world, x.purpose);
    nccl_end(slot);
    comm_nccl_wait(nccl_state.busy.next);
    device_download(found, to, N);
    CHECK(memcmp(found, host, N) == 0, "a message to itself arrived changed");
    CHECK(ledger_sent(world.ledger, TRAFFIC_WEIGHTS) == N, "%llu bytes in the ledger",
          (unsigned long long)ledger_sent(world.ledger, TRAFFIC_WEIGHTS));
    char all[5] = "";
    comm_gather_host(&world, "rank", 5, all, TRAFFIC_CONTROL);
    CHECK(strcmp(all, "rank") == 0, "gathered \"%.5s\"", all);
    char* large = (char*)need(malloc(2 * NCCL_PINNED + 77));
    char* gathered = (char*)need(calloc(2 * NCCL_PINNED + 77, 1));
    for (size_t i = 0; i < 2 * NCCL_PINNED + 77; i++) { large[i] = (char)(i * 13); }
    comm_gather_host(&world, large, 2 * NCCL_PINNED + 77, gathered, TRAFFIC_CONTROL);
    CHECK(memcmp(gathered, large, 2 * NCCL_PINNED + 77) == 0, "a large gather in several pieces");
    free(large);
    free(gathered);
    free(host);
    free(found);
    device_free(from, N);
    device_free(to, N);
    comm_nccl_close();
}
#endif

static const TestRow nccl_tests[] = {
    {"nccl: plans of reduce-scatters, all ranks played", nccl_test_reduce_scatter},
    {"nccl: plans of all-gathers", nccl_test_all_gather},
    {"nccl: plans of all-reduces", nccl_test_all_reduce},
    {"nccl: plans of all-to-alls", nccl_test_all_to_all},
    {"nccl: thousands of segments", nccl_test_many_segments},
    {"nccl: all owners sum up at once", nccl_test_balance},
#if ON_GPU && !defined(CUDA_ON_CPU)
    {"nccl: a job of one rank, every exchange", nccl_test_exchanges},
    {"nccl: messages to itself, gathers of host memory", nccl_test_to_itself},
#endif
};
