// test_ranks.h - rows that all ranks of a job run together, on training as a whole: one curve whatever the number of ranks and the ZeRO
// stage, equal bits from run to run, traffic as predicted, replicas, and failures of one rank that all report alike. The reference is
// one rank alone, computed by each process for itself.
#pragma once
#include "test.h"
#include "test_trainer.h"

#define RANKS_STEPS (EMULATED ? 2 : 20)
// fp32: the order of sums over ranks and micro-batches; bf16: gradients are rounded once by each rank, weights after each update
#define RANKS_TOLERANCE (sizeof(floatX) == 4 ? 1e-5 : 2e-2)

typedef struct {
    const char *name, *model, *total_batch, *batch, *recompute;
} RanksCase;

static const RanksCase ranks_cases[] = {
    {"11 sequences", "layers=3,heads=2,channels=48,context=32", "352", "2", "1"},       // shares of 11, 6/5, 4/4/3 ... in micro-batches of 2
    {"5 sequences, one layer", "layers=1,heads=3,channels=24,context=32", "160", "4", "3"}, // 8 ranks: three have none
    {"2 layers, shorter sequences", "layers=2,heads=2,channels=32,context=32", "416", "3", "2"},
};

typedef struct {
    double losses[RANKS_STEPS], norms[RANKS_STEPS], val; // of each step
    uint32_t weights; // CRC-32C of this rank's replica, or of what it owns
    Ledger traffic;
} RanksRun;

static void ranks_options(Options* o, const RanksCase* c, int stage) {
    char zero[4];
    snprintf(zero, sizeof(zero), "%d", stage);
    OPTIONS(o, "--batch", c->batch, "--total-batch", c->total_batch, "--recompute", c->recompute, "--zero", zero, "--lr", "3e-3", "--warmup", "2",
            "--steps", "20", "--clip", "1");
    strcpy(o->model, c->model);
    strcpy(o->val_data, o->train_data);
}

// A trainer on the ranks of `comm`, with random weights. The caller frees it.
static bool ranks_start(Trainer* t, const Comm* comm, const Options* o) {
    ModelHeader model;
    Error error;
    memset(t, 0, sizeof(*t));
    t->comm = comm;
    bool good = model_spec_parse(o->model, 257, &model, &error) && trainer_create(t, o, &model, &error);
    CHECK_OK(good, error);
    if (!good) { return false; }
    gpt_init(&t->gpt, (uint64_t)o->seed);
    trainer_reset_masters(t);
    return true;
}

static uint32_t ranks_weights_crc(Trainer* t) {
    uint32_t crc = 0;
    zero_weights_wait_all(&t->zero);
    for (size_t u = 0; u < t->gpt.table.unit_count; u++) {
        size_t n = t->gpt.table.units[u].count;
        const floatX* from = gpt_unit_weights(&t->gpt, u);
        if (!from) { continue; }
        floatX* copy = (floatX*)need(malloc(n * sizeof(floatX)));
        device_download(copy, from, n * sizeof(floatX));
        crc = crc32c(crc, copy, n * sizeof(floatX));
        free(copy);
    }
    return crc;
}

static void ranks_run(const Comm* comm, const RanksCase* c, int stage, RanksRun* run) {
    static Options o;
    static Trainer t;
    Error error;
    Ledger before, after;
    memset(run, 0, sizeof(*run));
    ranks_options(&o, c, stage);
    if (ranks_start(&t, comm, &o)) {
        comm_ledger(comm, &before);
        for (int i = 0; i < RANKS_STEPS; i++) {
            StepResult r;
            bool good = trainer_step(&t, &r, &error);
            CHECK_OK(good, error);
            if (!good) { break; }
            run->losses[i] = r.loss;
            run->norms[i] = r.norm;
        }
        run->weights = ranks_weights_crc(&t);
        comm_ledger(comm, &after);
        run->traffic = ledger_since(&after, &before);
        EvalSpace space = {t.host_batch, t.device_batch, t.results};
        CHECK_OK(eval_loss(&t.gpt, comm, &t.val, space, 13, &run->val, &error), error);
    }
    trainer_free(&t);
}

static void ranks_compare(const RanksRun* run, const RanksRun* want, const char* what, int ranks, int stage) {
    for (int i = 0; i < RANKS_STEPS; i++) {
        CHECK(fabs(run->losses[i] - want->losses[i]) <= RANKS_TOLERANCE * want->losses[i],
              "%s, %d ranks, ZeRO %d, step %d: loss %.7f, one rank's %.7f", what, ranks, stage, i, run->losses[i], want->losses[i]);
        CHECK(fabs(run->norms[i] - want->norms[i]) <= 10 * RANKS_TOLERANCE * want->norms[i],
              "%s, %d ranks, ZeRO %d, step %d: norm %.7f, one rank's %.7f", what, ranks, stage, i, run->norms[i], want->norms[i]);
    }
    CHECK(fabs(run->val - want->val) <= RANKS_TOLERANCE * want->val, "%s, %d ranks, ZeRO %d: val loss %.7f, one rank's %.7f", what, ranks, stage,
          run->val, want->val);
}

// What 20 steps gave to the network is what the traffic model says, to the byte.
static void ranks_compare_traffic(const RanksRun* run, const RanksCase* c, const Comm* comm, int stage) {
    static Options o;
    static Trainer t;
    Error error;
    ModelHeader model;
    Ledger step;
    memset(&t, 0, sizeof(t));
    ranks_options(&o, c, stage);
    CHECK_OK(model_spec_parse(o.model, 257, &model, &error) && trainer_layout(&t, &o, &model, comm->size, comm->rank, &error), error);
    TrafficModel m = {&t.gpt.table,  t.zero.owner,       comm->size, comm->rank, stage, t.micro_steps, 0,
                      sizeof(floatX), sizeof(StepReport), COMM_PIECE,
                      NULL};
    bool ranges[8];
    owners_groups_by_ranges(m.table, m.owner, m.ranks, ranges);
    m.by_ranges = ranges;
    traffic_step(&m, &step);
    for (int p = TRAFFIC_GRADIENT; p <= TRAFFIC_NORM; p++) {
        uint64_t want = RANKS_STEPS * ledger_sent(&step, (TrafficPurpose)p), got = ledger_sent(&run->traffic, (TrafficPurpose)p);
        CHECK(got == want, "%s, rank %d of %d, ZeRO %d, %s: %zu bytes sent, %zu predicted", c->name, comm->rank, comm->size, stage, traffic_names[p],
              (size_t)got, (size_t)want);
    }
    trainer_free(&t);
}

// Ranks 1, 2, 3, 5, 8 (as far as there are) x ZeRO 0 to 3, twice.
static void ranks_matrix(const RanksCase* c) {
    static const int counts[] = {2, 3, 4, 5, 8};
    static RanksRun want, run, again;
    ranks_run(comm_alone(), c, 0, &want);
    for (size_t k = 0; k < COUNT_OF(counts) && counts[k] <= TEST_WORLD->size; k++) {
        Comm part;
        bool member = comm_first(&part, TEST_WORLD, counts[k]);
        if (EMULATED && counts[k] != 3) { continue; }
        for (int stage = 0; member && stage <= 3; stage++) {
            ranks_run(&part, c, stage, &run);
            ranks_compare(&run, &want, c->name, counts[k], stage);
            ranks_compare_traffic(&run, c, &part, stage);
            if (stage != 1 && counts[k] != 3) { continue; }
            ranks_run(&part, c, stage, &again);
            CHECK(memcmp(run.losses, again.losses, sizeof(run.losses)) == 0 && memcmp(run.norms, again.norms, sizeof(run.norms)) == 0 &&
                      run.weights == again.weights && run.val == again.val,
                  "%s, %d ranks, ZeRO %d: two equal runs differ", c->name, counts[k], stage);
        }
        comm_barrier(TEST_WORLD);
    }
}

#if !EMULATED
static void test_ranks_matrix(void) { ranks_matrix(&ranks_cases[0]); }
static void test_ranks_short_sequences(void) { ranks_matrix(&ranks_cases[2]); }
#endif
static void test_ranks_without_rows(void) { ranks_matrix(&ranks_cases[1]); }

// A weight that changes on one rank alone is seen, and the rank named; at ZeRO 3 there is nothing to compare.
static void test_ranks_replicas(void) {
    static Options o;
    static Trainer t;
    Error error;
    char expected[64];
    for (int stage = 0; stage <= 3; stage++) {
        ranks_options(&o, &ranks_cases[0], stage);
        if (ranks_start(&t, TEST_WORLD, &o)) {
            StepResult r;
            CHECK_OK(trainer_step(&t, &r, &error) && replicas_check(&t.zero, t.step, &error), error);
            int odd = TEST_WORLD->size - 1;
            if (stage < 3 && TEST_WORLD->rank == odd) {
                floatX value;
                floatX* at = t.gpt.params + t.gpt.table.units[3].offset;
                device_download(&value, at, sizeof(value));
                store(&value, load(&value) + 1.0f);
                device_upload(at, &value, sizeof(value));
                device_sync();
            }
            snprintf(expected, sizeof(expected), "the weights of rank %d", odd);
            if (stage < 3) {
                CHECK_FAILS(replicas_check(&t.zero, t.step, &error), error, expected);
            } else {
                CHECK_OK(replicas_check(&t.zero, t.step, &error), error);
            }
        }
        trainer_free(&t);
    }
}

// What goes wrong on one rank ends the step on all of them, with one line: a data file cut short, and something told late.
static void test_ranks_fail_together(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    char expected[32];
    int bad = TEST_WORLD->size - 1;
    snprintf(expected, sizeof(expected), "rank %d: ", bad);
    for (int stage = 0; stage <= 3; stage++) {
        for (int way = 0; way < 2; way++) {
            ranks_options(&o, &ranks_cases[0], stage);
            if (ranks_start(&t, TEST_WORLD, &o)) {
                CHECK_OK(trainer_step(&t, &r, &error), error);
                if (TEST_WORLD->rank == bad && way == 0) { CHECK(truncate(o.train_data, 2048) == 0, "cannot cut %s", o.train_data); }
                if (TEST_WORLD->rank == bad && way == 1) { fail(&t.late, "the disk is full"); }
                CHECK_FAILS(trainer_step(&t, &r, &error), error, expected);
            }
            trainer_free(&t);
        }
    }
}

// A weight that is not finite on its owner is named on all ranks, though most of them cannot see it.
static void test_ranks_bad_tensor(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    for (int stage = 0; stage <= 3; stage++) {
        ranks_options(&o, &ranks_cases[0], stage);
        if (ranks_start(&t, TEST_WORLD, &o)) {
            CHECK_OK(trainer_step(&t, &r, &error), error);
            zero_weights_wait_all(&t.zero);
            floatX bad;
            store(&bad, NAN);
            for (size_t u = 0; u < t.gpt.table.unit_count; u++) {
                const Unit* unit = &t.gpt.table.units[u];
                floatX* at = gpt_unit_weights(&t.gpt, u);
                if (unit->tensor == FCW && unit->layer == 1 && at) { device_upload(at, &bad, sizeof(bad)); }
            }
            device_sync();
            CHECK_FAILS(trainer_step(&t, &r, &error), error, "weights of fcw, layer 1");
        }
        trainer_free(&t);
    }
}

// An outlier is skipped on all ranks alike, and a signal to one rank is every rank's wish.
static void test_ranks_decide_together(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    for (int stage = 0; stage <= 3; stage++) {
        ranks_options(&o, &ranks_cases[0], stage);
        o.skip_loss_z = 3;
        if (ranks_start(&t, TEST_WORLD, &o)) {
            for (int i = 0; i < OUTLIER_WINDOW; i++) { outlier_add(&t.loss_outlier, 1.0 + 1e-3 * (i % 7)); }
            uint32_t before = ranks_weights_crc(&t);
            run_stop_begin();
            if (TEST_WORLD->rank == TEST_WORLD->size - 1) {
                kill(getpid(), SIGUSR1);
                for (int i = 0; i < 1000 && !run_stop_wishes(""); i++) { usleep(1000); }
            }
            CHECK_OK(trainer_step(&t, &r, &error), error);
            run_stop_end();
            CHECK(r.skipped && t.skipped == 1 && ranks_weights_crc(&t) == before, "ZeRO %d: the outlier of z %f was not skipped", stage, r.loss_z);
            CHECK(r.wishes == WISH_STOP_USR1, "ZeRO %d: wishes %u", stage, r.wishes);
            CHECK_OK(trainer_step(&t, &r, &error), error);
            CHECK(r.wishes == 0, "ZeRO %d: wishes %u after the signal", stage, r.wishes);
        }
        trainer_free(&t);
    }
}

// Differences between ranks at the start are named by what differs and who has it.
static void test_ranks_must_be_alike(void) {
    static Options o;
    Error error = {{0}};
    char value[32];
    int odd = TEST_WORLD->size - 1;
    snprintf(value, sizeof(value), "library %d", TEST_WORLD->rank == odd);
    CHECK_FAILS(comm_same(TEST_WORLD, "the matrix libraries", value, TRAFFIC_CONTROL, &error), error, "rank 0 has library 0");
    CHECK_OK(comm_same(TEST_WORLD, "the matrix libraries", "one", TRAFFIC_CONTROL, &error), error);
    ranks_options(&o, &ranks_cases[0], 1);
    strcpy(o.train_data, "x");
    strcpy(o.val_data, "x");
    strcpy(o.output, "x");
    CHECK_OK(ranks_check(&o, TEST_WORLD, &error), error);
    if (TEST_WORLD->rank == odd) { o.lr = 2e-3; }
    CHECK_FAILS(ranks_check(&o, TEST_WORLD, &error), error, "--lr");
    bool good = comm_agree(TEST_WORLD, TEST_WORLD->rank != odd || fail(&error, "out of luck"), &error);
    CHECK(!good && strstr(error.text, "out of luck") && strstr(error.text, "rank"), "found %s", error.text);
    good = comm_agree(TEST_WORLD, fail(&error, "no rank can"), &error);
    CHECK(!good && strcmp(error.text, "no rank can") == 0, "found %s", error.text);
}

static const TestRow rank_tests[] = {
#if !EMULATED
    {"ranks: one curve and predicted bytes for all counts and stages", test_ranks_matrix},
    {"ranks: two layers, uneven micro-batches", test_ranks_short_sequences},
#endif
    {"ranks: some without rows, one layer", test_ranks_without_rows},
    {"ranks: a replica that differs is named", test_ranks_replicas},
    {"ranks: one rank's failure is everyone's line", test_ranks_fail_together},
    {"ranks: a bad tensor is named by its owner", test_ranks_bad_tensor},
    {"ranks: outliers and signals are decided together", test_ranks_decide_together},
    {"ranks: options, libraries and data must be alike", test_ranks_must_be_alike},
};
