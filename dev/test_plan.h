// test_plan.h - the plan: bytes against closed forms and against a slow count that walks every element of every exchange, the schedule
// against cases that can be worked out by hand, memory against the run's own table, and the command as a whole. That the ledger of real
// runs shows the same bytes is in test_ranks.h.
#pragma once
#include "test.h"

// ---------------------------------------------------------------------------------------------------------------------------------
// Bytes

// L layers, each of `each` equal tensors, and `outer` of the same size outside.
static void plan_test_equal_table(ParamTable* table, size_t layers, size_t each, size_t outer, size_t count) {
    memset(table, 0, sizeof(*table));
    for (size_t i = 0; i < each + outer; i++) {
        bool in_layers = i < each;
        TensorSpec s = {"equal", in_layers ? layers : 1, 1, count, 1, ROLE_VECTOR, INIT_ZERO, false, in_layers, 1, 0};
        table->tensors[table->tensor_count++] = s;
    }
    params_layout(table, count);
}

static void plan_test_gpt_table(ParamTable* table, int layers, int channels, int vocab, int context) {
    ModelHeader model;
    memset(&model, 0, sizeof(model));
    model.layers = layers;
    model.heads = 1;
    model.channels = channels;
    model.vocab_size = vocab;
    model.padded_vocab = (int)round_up((size_t)vocab, 128);
    model.max_seq_len = context;
    memset(table, 0, sizeof(*table));
    gpt_params_table(table, &model);
}

static TrafficModel plan_test_traffic(const ParamTable* table, const int* owner, int ranks, int rank, int stage, uint64_t micro_steps, int per) {
    static bool ranges[512];
    TrafficModel m = {table, owner, ranks, rank, stage, micro_steps, per, sizeof(floatX), 24, 128 << 10, ranges};
    owners_groups_by_ranges(table, owner, ranks, ranges);
    return m;
}

// With as many equal units a group as ranks every rank sends what the formulas say, to the byte
static void test_plan_equal_units(void) {
    for (int ranks = 1; ranks <= 9; ranks++) {
        ParamTable table;
        int owner[128];
        size_t loads[16];
        plan_test_equal_table(&table, 5, (size_t)ranks, (size_t)ranks, (size_t)(32 * ranks));
        owners_assign(&table, ranks, owner, loads);
        double bytes = (double)(table.packed * sizeof(floatX));
        for (int i = 0; i < 4 * 3 * ranks; i++) {
            int stage = i % 4, micro_steps = 1 + i / 4 % 3, rank = i / 12;
            TrafficModel m = plan_test_traffic(&table, owner, ranks, rank, stage, (uint64_t)micro_steps, 0);
            Ledger step;
            traffic_step(&m, &step);
            double sent = (double)(ledger_sent(&step, TRAFFIC_GRADIENT) + ledger_sent(&step, TRAFFIC_WEIGHTS));
            double kept = stage == 3 ? (double)(2 * (2 * micro_steps - 1)) / 6.0 : 0.0; // layers (of 6 groups) that are still there
            double outer = stage == 3 ? (double)(2 * micro_steps - 1) / 6.0 : 0.0;      // the outer group is fetched once
            double want = ranks == 1 ? 0.0 : traffic_zero_formula(stage, ranks, micro_steps, bytes) - (kept + outer) * bytes * (ranks - 1) / ranks;
            CHECK(fabs(sent - want) < 0.5, "ZeRO %d, rank %d of %d, %d micro-steps: %.0f bytes, expected %.1f", stage, rank, ranks,
                micro_steps, sent, want);
        }
        params_free(&table);
    }
}

// The rank whose range an element of a group of `total` is in, counted from the back: the last whose range begins at or before the
// element's block of 32.
static int plan_test_range(size_t total, size_t at, int ranks) {
    int rank = ranks - 1;
    while (rank > 0 && total / (size_t)ranks * (size_t)rank / 32 * 32 > at / 32 * 32) { rank--; }
    return rank;
}

// Elements of a group that lie in another rank's range than their owner's, if it goes by ranges: one by one.
static size_t plan_test_moved(const TrafficModel* m, size_t g) {
    size_t total = 0, at = 0, moved = 0;
    for (size_t pass = 0; m->by_ranges[g] && pass < 2; pass++) {
        for (size_t u = 0; u < m->table->unit_count; u++) {
            if (owners_group(m->table, &m->table->units[u]) != g) { continue; }
            size_t count = m->table->units[u].count;
            total += pass == 0 ? count : 0;
            for (size_t i = 0; pass == 1 && i < count; i++) { moved += plan_test_range(total, at++, m->ranks) != m->owner[u]; }
        }
    }
    return moved;
}

// Sums over ranks: a unit of n bytes makes (P - 1) n of every reduction or gather, however units and nodes are cut
static void test_plan_sums(void) {
    ParamTable table;
    int* owner;
    size_t loads[16], groups_by_ranges = 0;
    plan_test_gpt_table(&table, 3, 24, 257, 32);
    owner = (int*)need(malloc(table.unit_count * sizeof(int)));
    uint64_t bytes = table.packed * sizeof(floatX), outer = 0;
    for (size_t u = 0; u < table.unit_count; u++) {
        outer += table.tensors[table.units[u].tensor].in_layers ? 0 : table.units[u].count * sizeof(floatX);
    }
    uint64_t layer = (bytes - outer) / 3;
    for (int i = 0; i < 9 * 4 * 3 * 4; i++) {
        int ranks = 1 + i / 48, stage = i / 12 % 4, per = i % 4;
        uint64_t M = 1 + (uint64_t)(i / 4 % 3), P = (uint64_t)ranks - 1, gradient = 0, weights = 0, norm = 0, inside = 0;
        owners_assign(&table, ranks, owner, loads);
        for (int r = 0; r < ranks; r++) {
            TrafficModel m = plan_test_traffic(&table, owner, ranks, r, stage, M, per);
            Ledger step;
            traffic_step(&m, &step);
            gradient += ledger_sent(&step, TRAFFIC_GRADIENT);
            weights += ledger_sent(&step, TRAFFIC_WEIGHTS);
            norm += ledger_sent(&step, TRAFFIC_NORM);
            inside += traffic_link_bytes(&step, LINK_INSIDE);
            CHECK(memcmp(step.raw, step.sent, sizeof(step.raw)) == 0, "raw and sent differ at rank %d of %d", r, ranks);
        }
        uint64_t layers = 3 + M * 1 + (M - 1) * 1; // passes over layers at stage 3, of which two stay
        uint64_t want_gradient = P * bytes * (stage == 0 ? 2 : stage == 1 ? 1 : M);
        uint64_t want_weights = P * (stage == 0 ? 0 : stage < 3 ? bytes : outer + layers * layer);
        TrafficModel m = plan_test_traffic(&table, owner, ranks, 0, stage, M, per);
        for (size_t g = 0; g < 4 && stage > 0; g++) { // by ranges what is not its owner's moves once more
            size_t moved = plan_test_moved(&m, g) * sizeof(floatX);
            want_gradient += moved * traffic_reductions(&m);
            want_weights += moved * traffic_gathers(&m, 3, g);
            groups_by_ranges += m.by_ranges[g];
        }
        CHECK(gradient == want_gradient, "ZeRO %d, %d ranks: gradients %zu, expected %zu", stage, ranks, (size_t)gradient, (size_t)want_gradient);
        CHECK(weights == want_weights, "ZeRO %d, %d ranks: weights %zu, expected %zu", stage, ranks, (size_t)weights, (size_t)want_weights);
        CHECK(norm == P * (P + 1) * (24 + (stage ? 4 * table.unit_count : 0)), "ZeRO %d, %d ranks: norms %zu", stage, ranks, (size_t)norm);
        CHECK(per != 1 || inside == 0, "one rank a node: %zu bytes inside", (size_t)inside);
        CHECK(per != 0 || inside == gradient + weights + norm, "one node: %zu bytes inside of %zu", (size_t)inside,
            (size_t)(gradient + weights + norm));
    }
    CHECK(groups_by_ranges > 0, "no group went by ranges: nothing was shown about them");
    free(owner);
    params_free(&table);
}

// ---- the slow count: who gives each element to whom

typedef struct {
    const ParamTable* table;
    const int* owner;
    int ranks, stage, per;
    bool by_ranges[8];
    uint64_t sent[10][TRAFFIC_PURPOSES][LINK_CLASSES];
} PlanCount;

static void plan_count_message(PlanCount* c, int from, int to, TrafficPurpose purpose, uint64_t bytes) {
    bool inside = c->per == 0 || from / c->per == to / c->per;
    if (from != to) { c->sent[from][purpose][inside ? LINK_INSIDE : LINK_BETWEEN] += bytes; }
}

// Element after element of a group; layer -1: the tensors outside the layers.
static void plan_count_group(PlanCount* c, int layer, bool gather) {
    size_t total = 0, at = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t u = 0; u < c->table->unit_count; u++) {
            const Unit* unit = &c->table->units[u];
            bool member = c->table->tensors[unit->tensor].in_layers ? layer == unit->layer : layer == -1;
            if (!member) { continue; }
            if (pass == 0) {
                total += unit->count;
                continue;
            }
            for (size_t i = 0; i < unit->count; i++, at++) {
                bool ranges = c->stage == 0 || c->by_ranges[1 + layer];
                int owner = ranges ? plan_test_range(total, at, c->ranks) : c->owner[u];
                if (c->stage > 0 && !gather) { plan_count_message(c, owner, c->owner[u], TRAFFIC_GRADIENT, sizeof(floatX)); }
                if (c->stage > 0 && gather) { plan_count_message(c, c->owner[u], owner, TRAFFIC_WEIGHTS, sizeof(floatX)); }
                for (int r = 0; r < c->ranks; r++) {
                    if (!gather) { plan_count_message(c, r, owner, TRAFFIC_GRADIENT, sizeof(floatX)); }
                    if (!gather && c->stage == 0) { plan_count_message(c, owner, r, TRAFFIC_GRADIENT, sizeof(floatX)); }
                    if (gather) { plan_count_message(c, owner, r, TRAFFIC_WEIGHTS, sizeof(floatX)); }
                }
            }
        }
    }
}

// Stage 3: the layer's slot holds it, or it is fetched into it.
static void plan_count_use(PlanCount* c, int* slots, int slot_count, int layer) {
    if (c->stage < 3 || slots[layer % slot_count] == layer) { return; }
    slots[layer % slot_count] = layer;
    plan_count_group(c, layer, true);
}

static void plan_count_step(PlanCount* c, int layers, int micro_steps) {
    int slots[2] = {-1, -1}, slot_count = layers < 2 ? layers : 2;
    if (c->stage > 0) { plan_count_group(c, -1, true); }
    for (int l = 0; c->stage > 0 && c->stage < 3 && l < layers; l++) { plan_count_group(c, l, true); }
    for (int i = 0; i < micro_steps; i++) {
        bool sums = c->stage >= 2 || i == micro_steps - 1;
        for (int l = 0; l < layers; l++) { plan_count_use(c, slots, slot_count, l); }
        for (int l = layers - 1; l >= 0; l--) {
            plan_count_use(c, slots, slot_count, l);
            if (sums) { plan_count_group(c, l, false); }
        }
        if (sums) { plan_count_group(c, -1, false); }
    }
    for (int i = 0; i < c->ranks * c->ranks; i++) {
        plan_count_message(c, i / c->ranks, i % c->ranks, TRAFFIC_NORM, 24 + (c->stage ? sizeof(float) * c->table->unit_count : 0));
    }
}

static void test_plan_slow_count(void) {
    static PlanCount count;
    static const int ranks[] = {2, 3, 5, 9};
    for (int layers = 1; layers <= 4; layers++) {
        ParamTable table;
        size_t loads[16];
        plan_test_gpt_table(&table, layers, 5 + layers, 67, 13);
        int* owner = (int*)need(malloc(table.unit_count * sizeof(int)));
        for (int i = 0; i < 4 * 4 * 3 * 3; i++) {
            int P = ranks[i / 36], stage = i / 9 % 4, M = 1 + i / 3 % 3, per = i % 3 == 1 ? 2 : i % 3 == 2 ? 4 : 0;
            owners_assign(&table, P, owner, loads);
            memset(&count, 0, sizeof(count));
            count.table = &table;
            count.owner = owner;
            count.ranks = P;
            count.stage = stage;
            count.per = per;
            owners_groups_by_ranges(&table, owner, P, count.by_ranges);
            plan_count_step(&count, layers, M);
            for (int r = 0; r < P; r++) {
                TrafficModel m = plan_test_traffic(&table, owner, P, r, stage, (uint64_t)M, per);
                Ledger step;
                traffic_step(&m, &step);
                CHECK(memcmp(step.sent, count.sent[r], sizeof(step.sent)) == 0,
                      "%d layers, ZeRO %d, rank %d of %d, %d micro-steps, %d a node: %zu bytes, counted %zu of gradients", layers, stage, r,
                          P, M, per, (size_t)ledger_sent(&step, TRAFFIC_GRADIENT),
                      (size_t)(count.sent[r][TRAFFIC_GRADIENT][LINK_INSIDE] + count.sent[r][TRAFFIC_GRADIENT][LINK_BETWEEN]));
            }
        }
        free(owner);
        params_free(&table);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Time

static bool plan_test_near(double a, double b) { return fabs(a - b) <= 1e-9 * fmax(1.0, fabs(b)); }

// A plan of two ranks on which every exchange of a group takes `exchange` seconds; forward 1 s a layer, backward 2 s, head 1 s.
static StepPlan plan_test_step(const TrafficModel* m, size_t layers, double exchange, double (*busiest)[LINK_CLASSES]) {
    for (size_t g = 0; g <= layers; g++) { busiest[g][LINK_INSIDE] = exchange; }
    StepPlan p = {m, layers, NULL, busiest, 0.0, 1.0, 2.0, 1.0, {1.0, 1.0}, 0.0};
    return p;
}

// Worked out with pencil and paper: L = 2, one micro-step, exchanges of 1 s, of which the norm's takes none
static void test_plan_hand_schedules(void) {
    static const struct {
        int stage;
        uint64_t micro_steps;
        double exchange, step, waited, busy;
    } cases[] = {
        // backward ends at 5 (layer 1), 7 (layer 0); exchanges 5-6, 7-8, 8-9
        {0, 1, 1, 9, 2, 3},
        // exchanges 5-8, 8-11, 11-14
        {0, 1, 3, 14, 7, 9},
        // weights come at 1, 2, 3 of the next step: forward 2-3, 3-4, head -5, backward -7, -9, exchanges 7-8, 9-10, 10-11
        {1, 1, 1, 11, 4, 6},
        // the same up to 9, sums 7-8, 9-10, 10-11; forward -10, -11, head, which needs the outer sum gone, -12, backward -14, -16, sums 14-15,
        // 16-17, 17-18
        {2, 2, 1, 18, 4, 9},
        // both layers stay in the block: outer 0-1, layer 0 1-2, forward 2-3; layer 1 2-3, forward 3-4; head -5; backward as in stage 1
        {3, 1, 1, 11, 4, 6},
    };
    ParamTable table;
    int owner[16];
    size_t loads[2];
    double busiest[3][LINK_CLASSES];
    plan_test_equal_table(&table, 2, 2, 2, 64);
    owners_assign(&table, 2, owner, loads);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        TrafficModel m = plan_test_traffic(&table, owner, 2, 0, cases[i].stage, cases[i].micro_steps, 0);
        memset(busiest, 0, sizeof(busiest));
        StepPlan p = plan_test_step(&m, 2, cases[i].exchange, busiest);
        p.rate[LINK_INSIDE] = 1e15; // the norm's bytes take no time, the groups' are given in seconds
        for (int g = 0; g < 3; g++) { busiest[g][LINK_INSIDE] *= 1e15; }
        StepTime t = plan_step_time(&p);
        CHECK(fabs(t.step - cases[i].step) < 1e-6, "case %zu: step %f, expected %f", i, t.step, cases[i].step);
        CHECK(fabs(t.waited - cases[i].waited) < 1e-6, "case %zu: waited %f, expected %f", i, t.waited, cases[i].waited);
        CHECK(fabs(t.busy - cases[i].busy) < 1e-6, "case %zu: busy %f, expected %f", i, t.busy, cases[i].busy);
    }
    params_free(&table);
}

// No limit of bandwidth: nothing is exposed. No work: a step is its communication. Many micro-steps: as if all were walked
static void test_plan_schedule_bounds(void) {
    ParamTable table;
    int* owner;
    size_t loads[4];
    plan_test_gpt_table(&table, 5, 32, 257, 32);
    owner = (int*)need(malloc(table.unit_count * sizeof(int)));
    owners_assign(&table, 4, owner, loads);
    for (int stage = 0; stage < 4; stage++) {
        for (uint64_t M = 1; M <= 9; M += 4) {
            TrafficModel m = plan_test_traffic(&table, owner, 4, 0, stage, M, 2);
            double* own = plan_owned(&m);
            StepPlan p = {&m, 5, M == 5 ? NULL : own, plan_busiest(&m, own), M == 9 ? 1e3 : 1e6, 1.0, 2.0, 3.0, {INFINITY, INFINITY}, 0.0};
            StepTime t = plan_step_time(&p), work;
            CHECK(t.waited == 0 && plan_test_near(t.step, (double)M * 18.0), "ZeRO %d: without limits a step of %f s, %f waited", stage,
                t.step, t.waited);
            CHECK(plan_hidden(&t) == 0 && plan_utilisation(&t) == 1, "ZeRO %d: hidden %f", stage, plan_hidden(&t));
            p.rate[LINK_INSIDE] = 5e3;
            p.rate[LINK_BETWEEN] = 1e3;
            p.latency = 0.25;
            t = plan_step_time(&p);
            work = plan_walk(&p, M);
            CHECK(plan_test_near(t.step, work.step) && plan_test_near(t.waited, work.waited), "ZeRO %d: %f s, walked %f", stage, t.step, work.step);
            CHECK(plan_test_near(t.compute, (double)M * 18.0), "ZeRO %d: computes %f s", stage, t.compute);
            CHECK(t.step >= t.busy - 1e-9 && t.step >= t.compute, "ZeRO %d: %f s, %f of them communication", stage, t.step, t.busy);
            p.forward = p.backward = p.head = 0.0;
            t = plan_step_time(&p);
            CHECK(plan_test_near(t.step, t.busy) && plan_test_near(t.waited, t.busy), "ZeRO %d: no work, yet %f s for %f", stage, t.step, t.busy);
            free(p.busiest);
            free(own);
        }
    }
    free(owner);
    params_free(&table);
}

// As many exchanges are walked as the traffic model counts; the needed bandwidth is just enough
static void test_plan_schedule_counts(void) {
    for (size_t layers = 1; layers <= 6; layers++) {
        ParamTable table;
        int owner[64];
        size_t loads[3];
        double busiest[7][LINK_CLASSES];
        plan_test_equal_table(&table, layers, 3, 3, 32);
        owners_assign(&table, 3, owner, loads);
        for (int i = 0; i < 4 * 3; i++) {
            TrafficModel m = plan_test_traffic(&table, owner, 3, 0, i / 3, 1 + (uint64_t)i % 3, 0);
            memset(busiest, 0, sizeof(busiest));
            StepPlan p = plan_test_step(&m, layers, 0.0, busiest);
            p.rate[LINK_INSIDE] = INFINITY;
            p.latency = 1.0; // a second for every exchange, two for an all-reduce
            StepTime t = plan_step_time(&p);
            uint64_t want = 1;
            for (size_t g = 0; g <= layers; g++) { want += traffic_gathers(&m, layers, g) + (m.stage == 0 ? 2 : traffic_reductions(&m)); }
            CHECK(plan_test_near(t.busy, (double)want), "%zu layers, ZeRO %d: %f exchanges walked, %zu counted", layers, m.stage, t.busy,
                (size_t)want);
            double *own = plan_owned(&m), (*bytes)[LINK_CLASSES] = plan_busiest(&m, own);
            p.busiest = bytes;
            p.latency = 0.0;
            double rate = plan_rate_needed(&p, 0.9);
            p.rate[LINK_INSIDE] = rate;
            t = plan_step_time(&p);
            CHECK(rate > 0 && plan_utilisation(&t) >= 0.9, "ZeRO %d: %f at the needed rate", m.stage, plan_utilisation(&t));
            p.rate[LINK_INSIDE] = 0.99 * rate;
            t = plan_step_time(&p);
            CHECK(plan_utilisation(&t) < 0.9, "ZeRO %d: %f below the needed rate", m.stage, plan_utilisation(&t));
            p.latency = 1e6;
            CHECK(plan_rate_needed(&p, 0.9) < 0, "ZeRO %d: a rate that undoes latency", m.stage);
            free(bytes);
            free(own);
        }
        params_free(&table);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Splits

static void test_plan_splits(void) {
    // 8 layers of 100 elements, 50 outside; 12 sequences of 4 tokens in micro-batches of 1
    SplitInput in = {12, 4, 8, 6, 2, 4, 5, 850, 100, 4, 12, 1, 2, 8, 10, 20, 100, {1e3, 1e2}, 0};
    SplitRow* rows;
    size_t count = split_list(&in, &rows);
    CHECK(count > 0, "no splits");
    for (size_t i = 0; i < count; i++) {
        const SplitRow* r = &rows[i];
        CHECK(r->tensor * r->pipeline * r->data == 12 && 6 % r->tensor == 0 && r->pipeline <= 8, "%d x %d x %d", r->tensor, r->pipeline, r->data);
        CHECK(i == 0 || rows[i - 1].seconds <= r->seconds, "row %zu is faster than the one before", i);
    }
    free(rows);
    SplitRow ring = {1, 1, 12, -1, 0, 0, 0, 0, 0, 0}, both = {2, 2, 3, -1, 0, 0, 0, 0, 0, 0};
    split_estimate(&in, &ring);
    CHECK(plan_test_near(ring.data_bytes, 2.0 * 11 / 12 * 850 * 2) && ring.tensor_bytes == 0 && ring.pipeline_bytes == 0, "ring: %f bytes",
        ring.data_bytes);
    CHECK(plan_test_near(ring.memory, 850 * (2 + 2 + 8.0 / 12)), "ring: %f bytes of memory", ring.memory);
    // computing takes 4 tokens x (80 + 20) / 100 = 4 s; half of 3117 bytes at 100 bytes a second behind 8/3 and 4/3 s of it
    CHECK(plan_test_near(ring.seconds, 4.0 + ring.data_bytes / 100 - 4.0), "ring: %f s", ring.seconds);
    split_estimate(&in, &both);
    // 4 micro-steps; activations of 4 tokens x 2 channels x 2 bytes = 16; 4 layers a stage: 4 all-reduces of 16 bytes among 2 each
    CHECK(plan_test_near(both.tensor_bytes, 4 * 16 * 4 * 4.0), "tensor: %f bytes", both.tensor_bytes);
    CHECK(plan_test_near(both.pipeline_bytes, 2 * 8 * 4.0), "pipeline: %f bytes", both.pipeline_bytes);
    CHECK(plan_test_near(both.bubble, 1.0 / 5), "bubble %f", both.bubble);
    CHECK(plan_test_near(traffic_bubble(8, 64), 7.0 / 71) && traffic_bubble(1, 3) == 0, "bubble of 8 stages %f", traffic_bubble(8, 64));
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The command

#define PLAN_TEST_WORDS 24

// Parses "plan" and the words, and runs it into `text`, to be freed by the caller.
static bool plan_test_run(char** text, Error* error, const char* const* words, int count) {
    static Options options;
    const char* argv[PLAN_TEST_WORDS + 2] = {"train_gpt", "plan"};
    size_t bytes = 0;
    assert(count <= PLAN_TEST_WORDS);
    for (int i = 0; i < count; i++) { argv[2 + i] = words[i]; }
    FILE* out = open_memstream(text, &bytes);
    need(out);
    bool good = options_parse(&options, count + 2, (char**)(uintptr_t)argv, error) && options_check(&options, error) &&
                plan_run(&options, comm_alone(), out, error);
    fclose(out);
    return good;
}

// 175B on 1024 ranks within a second of processor time, with numbers that hold
static void test_plan_large(void) {
    static const char* const words[] = {"--model", "gpt3:c12288", "--ranks", "1024", "--ranks-per-node", "8", "--total-batch", "3145728",
        "--batch", "1", "--tflops", "312", "--link-mbit", "100000", "--node-mbit", "2400000", "--zero", "3"};
    static const char* const parts[] = {"174604259328 | in", "FLOP a step", "1024 on 128 node(s)", "ZeRO 3 x 1024", "2104.04473",
        "1910.02054", "2205.05198", "runs the rows of ZeRO only", "chosen", "warning: 8 rank(s)", "formula"};
    Error error = {{0}};
    char* text = NULL;
    clock_t start = clock();
    CHECK_OK(plan_test_run(&text, &error, words, (int)COUNT_OF(words)), error);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    CHECK(seconds < 1.0 || EMULATED, "the plan took %.2f s", seconds);
    for (size_t i = 0; i < COUNT_OF(parts); i++) { CHECK(strstr(text, parts[i]), "\"%s\" is missing", parts[i]); }
    CHECK(!strstr(text, " nan") && !strstr(text, " inf") && !strstr(text, "| -"), "a number is none, or below zero");
    CHECK(!strstr(text, "18446744073709551615"), "a number has overflowed");
    free(text);
    ParamTable table;
    size_t loads[2];
    plan_test_equal_table(&table, 96, 8, 2, (size_t)1 << 34);
    int* owner = (int*)need(malloc(table.unit_count * sizeof(int)));
    owners_assign(&table, 2, owner, loads);
    TrafficModel m = plan_test_traffic(&table, owner, 2, 0, 3, UINT64_MAX / 16, 0);
    Ledger step;
    traffic_step(&m, &step);
    CHECK(traffic_bytes(&step) == UINT64_MAX, "what cannot be held must stay at the top: %zu", (size_t)traffic_bytes(&step));
    free(owner);
    params_free(&table);
}

// Every stage's memory is that of the run's own layout, and the rank that needs most is found
static void test_plan_memory(void) {
    static Plan plan;
    static Trainer t;
    static Options o;
    Error error = {{0}};
    const char* argv[] = {"train_gpt", "plan", "--model", "layers=3,heads=2,channels=48,context=32", "--vocab-size", "257", "--total-batch", "352",
                          "--batch", "2", "--tflops", "1", "--sample-every", "0"};
    CHECK_OK(options_parse(&o, (int)COUNT_OF(argv), (char**)(uintptr_t)argv, &error), error);
    for (o.ranks = 1; o.ranks <= 9; o.ranks++) {
        CHECK_OK(plan_open(&plan, &o, comm_alone(), &error), error);
        for (o.zero = 0; o.zero < PLAN_STAGES; o.zero++) {
            const PlanStage* s = &plan.stages[o.zero];
            size_t most = 0, kinds = 0, held = 0, state = 0;
            CHECK_OK(plan_stage_memory(&plan, o.zero, &error), error);
            for (int r = 0; r < o.ranks; r++) {
                memset(&t, 0, sizeof(t));
                CHECK_OK(trainer_layout(&t, &o, &plan.model, o.ranks, r, &error), error);
                most = max_size(most, t.gpt.memory.bytes);
                held = max_size(held, t.zero.held);
                state = max_size(state, t.state_bytes);
                trainer_free(&t);
            }
            for (int k = 0; k < PLAN_MEMORY; k++) { kinds += s->memory[k]; }
            CHECK(kinds == s->total, "ZeRO %d: %zu bytes by kind, %zu in all", o.zero, kinds, s->total);
            CHECK(s->total == most + plan_staging(o.ranks), "ZeRO %d, %d ranks: %zu bytes, the fullest of all ranks has %zu", o.zero,
                o.ranks, s->total, most);
            size_t least = 2 * held * sizeof(float), space = 2 * OPTIMIZER_ALIGN * plan.table.unit_count; // each array begins at its own place
            CHECK(state >= least && state <= least + space, "ZeRO %d: %zu bytes of state for %zu parameters", o.zero, state, held);
            CHECK(s->memory[PLAN_STATE] == round_up(state, DEVICE_ALIGN), "ZeRO %d: %zu bytes of state, expected %zu", o.zero,
                  s->memory[PLAN_STATE], state);
        }
        plan_free(&plan);
    }
}

static void test_plan_refuses(void) {
    static const struct {
        const char *words[8], *part;
    } cases[] = {
        {{"--model", "gpt2:d12", "--seq-len", "2048"}, "beyond the model's context"},
        {{"--model", "gpt2:d12", "--total-batch", "1000", "--seq-len", "1024"}, "not a multiple"},
        {{"--model", "gpt2:d12", "--total-batch", "1000"}, "not a multiple"},
        {{"--model", "gpt2:d13"}, "no such member"},
        {{"--model", "no/such/model.bin"}, "no/such/model.bin"},
        {{"--ranks", "1000000"}, "plan goes up to"},
        {{"--zero", "4"}, "from 0 to 3"},
        {{"--efficiency", "0"}, "--efficiency"},
        {{"--model", "gpt3:c12288", "--batch", "1", "--total-batch", "1024G", "--ranks", "3"}, "micro-steps would send"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Error error = {{0}};
        char* text = NULL;
        int count = 0;
        while (count < 8 && cases[i].words[count]) { count++; }
        CHECK_FAILS(plan_test_run(&text, &error, cases[i].words, count), error, cases[i].part);
        CHECK(!strchr(error.text, '\n') && text && !text[0], "case %zu: more than one line", i);
        free(text);
    }
}

// One rank, fewer sequences than ranks, more ranks than units, one layer: all are plans, with a warning where that helps
static void test_plan_corners(void) {
    static const struct {
        const char *ranks, *model, *batch, *part;
    } cases[] = {
        {"1", "layers=1,heads=1,channels=8,context=8,vocab=300", "8", "one rank alone would take"},
        {"5", "layers=1,heads=1,channels=8,context=8,vocab=300", "24", "2 of the ranks have none"},
        {"300", "layers=2,heads=2,channels=8,context=8,vocab=300", "4000", "of the ranks own nothing"},
        {"7", "layers=2,heads=2,channels=8,context=8,vocab=300", "56", "not faster than one"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char* words[] = {"--ranks", cases[i].ranks, "--model", cases[i].model, "--total-batch", cases[i].batch, "--tflops", "1",
            "--ranks-per-node", "2"};
        Error error = {{0}};
        char* text = NULL;
        CHECK_OK(plan_test_run(&text, &error, words, (int)COUNT_OF(words)), error);
        CHECK(strstr(text, cases[i].part), "case %zu: \"%s\" is missing", i, cases[i].part);
        CHECK(!strstr(text, " nan") && !strstr(text, " inf"), "case %zu: a number is none", i);
        free(text);
    }
}

static const TestRow plan_tests[] = {
    {"plan: equal units send what the formulas say", test_plan_equal_units},
    {"plan: sums over ranks, stages, micro-steps and nodes", test_plan_sums},
    {"plan: bytes as a walk over every element counts them", test_plan_slow_count},
    {"plan: schedules worked out by hand", test_plan_hand_schedules},
    {"plan: schedules at the bounds of work and bandwidth", test_plan_schedule_bounds},
    {"plan: exchanges walked are those counted; needed bandwidth", test_plan_schedule_counts},
    {"plan: tensor and pipeline splits", test_plan_splits},
    {"plan: memory is that of the run's layout", test_plan_memory},
    {"plan: 175B on 1024 ranks in a second, without overflow", test_plan_large},
    {"plan: corners", test_plan_corners},
    {"plan: bad combinations give one line", test_plan_refuses},
};
