// test_comm_mpi.h - what is the MPI backend's own: how exchanges are cut into messages, staging memory, the ledger to the byte.
// Included by test_comm.h where the program has MPI.
#pragma once

// ---------------------------------------------------------------------------------------------------------------------------------
// One rank

// Pieces cover each segment once, in its order, none is larger than the limit, and owners take turns.
static void comm_check_pieces(const CommExchange* x, int rank, int size, size_t limit) {
    CommPieces list;
    memset(&list, 0, sizeof(list));
    size_t* covered = (size_t*)need(calloc(max_size(1, x->count), sizeof(size_t)));
    comm_pieces_make(&list, x, rank, size, limit);
    for (size_t i = 0; i < list.count; i++) {
        const CommPiece* p = &list.pieces[list.walk[i]];
        size_t count = 0;
        CHECK(p->runs > 0 && p->count > 0 && p->count <= limit, "piece %zu: %zu runs, %zu of %zu elements", i, p->runs, p->count, limit);
        for (size_t run = 0; run < p->runs; run++) {
            size_t k = list.order[p->first + run], width = p->runs == 1 ? p->count : x->segments[k].count;
            CHECK(x->segments[k].owner == p->owner && covered[k] == p->offset, "piece %zu of segment %zu begins at %zu, expected %zu", i, k,
                  p->offset, covered[k]);
            covered[k] += width;
            count += width;
        }
        CHECK(count == p->count, "piece %zu has %zu elements, its runs %zu", i, p->count, count);
    }
    for (size_t k = 0; k < x->count; k++) {
        const CommSegment* s = &x->segments[k];
        bool mine = x->kind != COMM_ALL_TO_ALL || s->owner == rank || s->source == rank;
        CHECK(covered[k] == (mine ? s->count : 0), "segment %zu: %zu of %zu elements are covered", k, covered[k], s->count);
    }
    free(covered);
    comm_pieces_free(&list);
}

static void test_comm_pieces(void) {
    static CommRun run;
    const size_t limits[] = {1, 61, 255, 1024, 32768};
    for (int size = 1; size <= 8; size++) {
        Comm c = *comm_alone();
        c.size = size;
        for (int i = 0; i < 40; i++) {
            c.rank = i % size;
            CommCase what = {(CommKind)(i % 4), COMM_F32, false, false, i % 3, (uint32_t)(i / 4), false};
            memset(&run, 0, sizeof(run));
            run.what = what;
            comm_run_segments(&run, &c);
            if (i % 5 > 0) { comm_check_pieces(&run.exchange, c.rank, size, limits[i % 5]); }
        }
    }
    CommSegment small[6] = {{0, 0, NULL, NULL, 1}, {1, 1, NULL, NULL, 5}, {1, 1, NULL, NULL, 90},
                            {1, 1, NULL, NULL, 5}, {0, 0, NULL, NULL, 9}, {0, 0, NULL, NULL, 0}};
    CommExchange x = {COMM_ALL_GATHER, COMM_F32, false, TRAFFIC_WEIGHTS, small, 6, 0};
    CommPieces list;
    memset(&list, 0, sizeof(list));
    comm_check_pieces(&x, 0, 3, 40);
    comm_pieces_make(&list, &x, 0, 3, 40); // rank 0: 1 + 9; rank 1: 90 as 3 x 30, then 5 + 5
    CHECK(list.count == 5, "%zu pieces, expected 5", list.count);
    const int owners[] = {0, 1, 1, 1, 1};
    const size_t counts[] = {10, 30, 30, 30, 10};
    for (size_t i = 0; i < 5 && i < list.count; i++) {
        const CommPiece* p = &list.pieces[list.walk[i]];
        CHECK(p->owner == owners[i] && p->count == counts[i], "piece %zu is of rank %d, %zu elements", i, p->owner, p->count);
    }
    comm_pieces_free(&list);
}

// In all-to-all each rank walks its own part of the list: any two must see their common pieces in one order.
static void test_comm_pieces_pairs(void) {
    static CommSegment segments[400];
    enum { SIZE = 5 };
    CommPieces lists[SIZE];
    CommExchange x = {COMM_ALL_TO_ALL, COMM_F32, false, TRAFFIC_CONTROL, segments, COUNT_OF(segments), 0};
    memset(lists, 0, sizeof(lists));
    for (uint32_t i = 0; i < COUNT_OF(segments); i++) {
        size_t n = comm_counts[comm_hash(i, 3, 3) % 6];
        CommSegment s = {(int)(comm_hash(i, 1, 1) % SIZE), (int)(comm_hash(i, 2, 2) % SIZE), NULL, NULL, n};
        segments[i] = s;
    }
    for (int r = 0; r < SIZE; r++) { comm_pieces_make(&lists[r], &x, r, SIZE, 100); }
    for (int a = 0; a < SIZE; a++) {
        for (int b = 0; b < a; b++) {
            size_t i = 0, k = 0, common = 0;
            for (;; i++, k++, common++) {
                const CommPiece *p = NULL, *q = NULL;
                for (; i < lists[a].count && !p; i++) {
                    const CommPiece* at = &lists[a].pieces[lists[a].walk[i]];
                    if (at->owner == b || at->source == b) { p = at, i--; }
                }
                for (; k < lists[b].count && !q; k++) {
                    const CommPiece* at = &lists[b].pieces[lists[b].walk[k]];
                    if (at->owner == a || at->source == a) { q = at, k--; }
                }
                if (!p && !q) { break; }
                bool same = p && q && p->owner == q->owner && p->source == q->source && p->count == q->count && p->runs == q->runs &&
                            lists[a].order[p->first] == lists[b].order[q->first] && p->offset == q->offset;
                CHECK(same, "ranks %d and %d differ in their common piece %zu", a, b, common);
                if (!same) { break; }
            }
            CHECK(common > 10, "ranks %d and %d have %zu pieces in common", a, b, common);
        }
    }
    for (int r = 0; r < SIZE; r++) { comm_pieces_free(&lists[r]); }
}

// Blocks in use never overlap, and an empty ring has room for the largest.
static void test_comm_staging(void) {
    enum { USED = 64 };
    CommFlight flights[USED];
    size_t first = 0, count = 0, size = 10000, refused = 0;
    if (comm_engine.state != ENGINE_NONE) { return; }
    comm_engine.staging = (char*)need(malloc(size));
    comm_engine.staging_size = size;
    for (uint32_t turn = 0; turn < 20000; turn++) {
        CommFlight f;
        memset(&f, 0, sizeof(f));
        f.bytes = comm_hash(turn, 1, 1) % (turn % 100 == 0 ? size : 2000) + 1;
        f.staging = count < USED ? comm_staging_take(f.bytes) : NULL;
        bool lost = f.staging && (f.staging < comm_engine.staging || f.staging + f.bytes > comm_engine.staging + size);
        for (size_t i = 0; f.staging && i < count; i++) {
            const CommFlight* g = &flights[(first + i) % USED];
            lost = lost || (f.staging < g->staging + g->bytes && g->staging < f.staging + f.bytes);
        }
        if (lost) { CHECK(!lost, "turn %u: a block of %zu bytes overlaps another or the end", turn, f.bytes); }
        CHECK(f.staging || count > 0, "an empty ring of %zu bytes refused %zu", size, f.bytes);
        if (f.staging) { flights[(first + count++) % USED] = f; }
        refused += !f.staging;
        while (count > 0 && (!f.staging || comm_hash(turn, (uint32_t)count, 2) % 3 == 0)) { // at least one goes when one was refused
            comm_staging_give_back(&flights[first]);
            first = (first + 1) % USED;
            count--;
            if (!f.staging && comm_hash(turn, (uint32_t)count, 4) % 2) { break; }
        }
    }
    CHECK(refused > 100, "the ring was full %zu times", refused);
    free(comm_engine.staging);
    memset(&comm_engine, 0, sizeof(comm_engine));
}

#define TEST_COMM_MPI_ROWS                                                     \
    {"comm: an exchange is cut into pieces", test_comm_pieces},                \
    {"comm: two ranks see their pieces in one order", test_comm_pieces_pairs}, \
    {"comm: staging memory is a ring", test_comm_staging},

// ---------------------------------------------------------------------------------------------------------------------------------
// Several ranks

static void test_comm_ranks_small_pieces(void) {
    const size_t limits[] = {1024, 1022}; // of 255 or 256 floats; an odd number of bf16
    Comm part;
    const Comm* world = TEST_WORLD;
    for (size_t k = 0; k < COUNT_OF(limits); k++) {
        comm_mpi_piece_limit = limits[k];
        if (comm_first(&part, world, world->size < 3 ? world->size : 3)) { comm_check_kinds(&part, (int)k, 7 + (uint32_t)k); }
        comm_barrier(world);
        comm_check_kinds(world, 2 - 2 * (int)k, 50 + (uint32_t)k);
        comm_barrier(world);
    }
    comm_mpi_piece_limit = COMM_PIECE;
}

// What this rank hands over in an exchange, by link class, from the segments alone.
static void comm_expected_bytes(const CommRun* run, const Comm* c, const int* nodes, uint64_t* bytes) {
    for (size_t k = 0; k < run->count; k++) {
        const CommSegment* s = &run->segments[k];
        for (int r = 0; r < c->size; r++) {
            bool to_owner = s->owner == r && r != c->rank, from_owner = s->owner == c->rank && r != c->rank, sent[2] = {false, false};
            switch (run->what.kind) {
            case COMM_REDUCE_SCATTER: sent[0] = to_owner; break;
            case COMM_ALL_GATHER: sent[0] = from_owner; break;
            case COMM_ALL_REDUCE: sent[0] = to_owner, sent[1] = from_owner; break;
            case COMM_ALL_TO_ALL: sent[0] = to_owner && s->source == c->rank; break;
            }
            uint64_t once = s->count * comm_type_bytes(run->what.type);
            bytes[nodes[r] == nodes[c->rank] ? LINK_INSIDE : LINK_BETWEEN] += once * ((uint64_t)sent[0] + sent[1]);
        }
    }
}

// The ledger must agree to the byte, also where the ranks are on three nodes (which the engine is made to believe).
static void test_comm_ranks_ledger(void) {
    static CommRun run;
    const Comm* c = TEST_WORLD;
    if (c->size == 1) {
        CHECK(c->backend == COMM_SELF, "one rank has backend %d", c->backend);
        return;
    }
    size_t bytes = (size_t)c->size * sizeof(int);
    int *nodes = (int*)need(malloc(bytes)), *spread = (int*)need(malloc(bytes));
    memcpy(nodes, comm_engine.nodes, bytes);
    for (int r = 0; r < c->size; r++) { spread[r] = r % 3; }
    for (int i = 0; i < 16; i++) {
        Ledger before, after;
        uint64_t expected[LINK_CLASSES] = {0, 0};
        const int* at = i < 8 ? nodes : spread;
        CommCase what = {(CommKind)(i % 4), i % 8 < 4 ? COMM_F32 : COMM_BF16, false, false, i % 3, (uint32_t)i, false};
        comm_run_begin(&run, c, what);
        run.exchange.purpose = (TrafficPurpose)(i % TRAFFIC_PURPOSES);
        comm_barrier(c); // and nothing is under way: the nodes may be changed
        memcpy(comm_engine.nodes, at, bytes);
        comm_mpi_piece_limit = i % 2 ? 5000 : COMM_PIECE;
        comm_ledger(c, &before);
        comm_run(c, &run.exchange);
        comm_ledger(c, &after);
        after = ledger_since(&after, &before);
        comm_expected_bytes(&run, c, at, expected);
        for (int p = 0; p < TRAFFIC_PURPOSES; p++) {
            for (int l = 0; l < LINK_CLASSES; l++) {
                uint64_t wanted = p == (int)run.exchange.purpose ? expected[l] : 0;
                uint64_t raw = after.raw[p][l], sent = after.sent[p][l], messages = after.messages[p][l];
                CHECK(sent == wanted && raw == wanted, "%s, %s, %s: %" PRIu64 " bytes sent, %" PRIu64 " raw, expected %" PRIu64,
                      comm_kind_names[what.kind], traffic_names[p], link_names[l], sent, raw, wanted);
                CHECK((messages > 0) == (wanted > 0), "%" PRIu64 " messages for %" PRIu64 " bytes", messages, wanted);
            }
        }
        comm_run_check(&run, c);
        comm_run_end(&run);
        comm_barrier(c);
    }
    comm_mpi_piece_limit = COMM_PIECE;
    memcpy(comm_engine.nodes, nodes, bytes);
    free(nodes);
    free(spread);
}

// Time: an exchange that is waited for at once is exposed, one that has a computation beside it is hidden; never more than went by.
static void test_comm_ranks_time(void) {
    const Comm* c = TEST_WORLD;
    size_t n = (size_t)1 << 20;
    float* memory = (float*)need(device_alloc(n * sizeof(float)));
    CommSegment segment = {0, 0, memory, memory, n};
    CommExchange x = {COMM_ALL_REDUCE, COMM_F32, false, TRAFFIC_GRADIENT, &segment, 1, 0};
    for (int hide = 0; hide < 2; hide++) {
        Ledger before, after;
        comm_barrier(c);
        double start = seconds_now();
        comm_ledger(c, &before);
        CommTicket ticket = comm_start(c, &x);
        if (hide) { usleep(400000); }
        comm_wait(c, ticket);
        comm_ledger(c, &after);
        double seconds = seconds_now() - start;
        after = ledger_since(&after, &before);
        CHECK(after.busy >= 0 && after.busy <= seconds, "busy for %g of %g s", after.busy, seconds);
        CHECK(after.waited >= 0 && after.waited <= seconds, "waited for %g of %g s", after.waited, seconds);
        CHECK(c->size == 1 || after.busy > 1e-5, "an all-reduce of 4 MiB took %g s", after.busy);
        CHECK(!hide || after.waited < 0.5 * seconds, "waited for %g of %g s beside a pause of 0.4 s", after.waited, seconds);
        CHECK(hide || after.waited <= after.busy + 0.05, "waited for %g s, busy for %g", after.waited, after.busy);
    }
    device_free(memory, n * sizeof(float));
}

#define TEST_COMM_MPI_RANK_ROWS                                                        \
    {"comm ranks: pieces of 1 KB and of odd length", test_comm_ranks_small_pieces},    \
    {"comm ranks: the ledger agrees to the byte", test_comm_ranks_ledger},             \
    {"comm ranks: hidden and exposed time", test_comm_ranks_time},
