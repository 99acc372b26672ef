// test_ranks_update.h - rows that all ranks of a job run together: every optimizer at every ZeRO stage follows the curve of one rank, and
// its checkpoints go on at another number of ranks and another stage.
#pragma once
#include "test_ranks.h"
#include "test_update.h"

#define UPDATE_RANK_STEPS 8

static double update_rank_tolerance(const UpdateCase* c) { return sizeof(floatX) == 2 ? 2e-2 : c->exact ? 2e-5 : 1e-3; }

static void update_rank_options(Options* o, const UpdateCase* c, int stage, const char* out) {
    char zero[4];
    snprintf(zero, sizeof(zero), "%d", stage);
    UPDATE_OPTIONS(o, c, "--batch", "2", "--total-batch", "352", "--zero", zero, "--warmup", "2", "--steps", "8");
    strcpy(o->model, "layers=3,heads=2,channels=48,context=32");
    snprintf(o->output, sizeof(o->output), "%s", out);
}

static bool update_rank_steps(Trainer* t, int steps, double* losses, size_t* calls, const char* name) {
    Error error;
    size_t before = newton_schulz_calls;
    for (int i = 0; i < steps; i++) {
        StepResult r;
        bool good = trainer_step(t, &r, &error);
        CHECK(good, "%s: %s", name, error.text);
        if (!good) { return false; }
        losses[i] = r.loss;
    }
    if (calls) { *calls = newton_schulz_calls - before; }
    return true;
}

static void update_rank_compare(const UpdateCase* c, const char* name, const double* got, const double* want, int steps, int ranks, int stage) {
    for (int i = 0; i < steps; i++) {
        CHECK(fabs(got[i] - want[i]) <= update_rank_tolerance(c) * want[i], "%s, %d ranks, ZeRO %d, step %d: loss %.7f, one rank's %.7f", name, ranks,
              stage, i, got[i], want[i]);
    }
}

// Newton-Schulz of all ranks together: once a matrix from stage 1 on, once a matrix and rank at stage 0.
static void update_rank_calls(const Comm* comm, const char* name, int stage, size_t calls, size_t alone) {
    size_t* all = (size_t*)need(malloc((size_t)comm->size * sizeof(size_t)));
    size_t sum = 0;
    comm_gather_host(comm, &calls, sizeof(calls), all, TRAFFIC_CONTROL);
    for (int r = 0; r < comm->size; r++) { sum += all[r]; }
    free(all);
    CHECK(sum == alone * (stage == 0 ? (size_t)comm->size : 1), "%s, %d ranks, ZeRO %d: %zu matrices orthogonalised, %zu by one rank", name,
          comm->size, stage, sum, alone);
}

static void test_ranks_update_matrix(void) {
    static Options o;
    static Trainer t;
    double want[UPDATE_RANK_STEPS], got[UPDATE_RANK_STEPS];
    for (size_t i = 0; i < COUNT_OF(update_cases); i++) {
        const UpdateCase* c = &update_cases[i];
        char name[160];
        size_t alone = 0, calls = 0;
        int steps = EMULATED ? 2 : UPDATE_RANK_STEPS;
        if ((EMULATED && i % 5 != 0) || (i + 1) % UPDATE_EVERY != 0) { continue; }
        update_name(c, name, sizeof(name));
        update_rank_options(&o, c, 0, "");
        if (!ranks_start(&t, comm_alone(), &o) || !update_rank_steps(&t, steps, want, &alone, name)) { return; }
        trainer_free(&t);
        for (int stage = 0; stage <= 3; stage++) {
            int counts[] = {2, 3, 5, 8};
            int ranks = counts[((size_t)stage + i) % 4]; // all pairs of stage and count, over the optimizers
            Comm part;
            ranks = ranks > TEST_WORLD->size ? TEST_WORLD->size : ranks;
            bool member = comm_first(&part, TEST_WORLD, ranks);
            if (member) {
                update_rank_options(&o, c, stage, "");
                if (ranks_start(&t, &part, &o) && update_rank_steps(&t, steps, got, &calls, name)) {
                    update_rank_compare(c, name, got, want, steps, ranks, stage);
                    update_rank_calls(&part, name, stage, calls, alone);
                }
                trainer_free(&t);
            }
            comm_barrier(TEST_WORLD);
        }
    }
}

// A step whose gradient overflows is left out on all ranks alike, and what comes after is what one rank does: good, left out twice, good twice.
static bool update_rank_overflow(Trainer* t, double* losses, const char* name) {
    StepResult r;
    Error error;
    floatX good[2];
    uint32_t before = 0;
    for (int i = 0; i < 5; i++) {
        bool spoilt = i == 1 || i == 2;
        if (i == 1) {
            before = ranks_weights_crc(t);
            update_spoil(t, good);
        }
        if (i == 3) {
            update_mend(t, good);
            CHECK(ranks_weights_crc(t) == before, "%s: weights changed by steps that were left out", name);
        }
        bool done = trainer_step(t, &r, &error);
        CHECK(done, "%s: %s", name, error.text);
        if (!done) { return false; }
        CHECK((r.skipped != NULL) == spoilt, "%s, step %d: loss %g, norm %g: %s", name, i, r.loss, r.norm, r.skipped ? r.skipped : "not left out");
        losses[i] = spoilt ? 0.0 : r.loss;
    }
    return true;
}

static void test_ranks_update_overflow(void) {
    static Options o;
    static Trainer t;
    static const UpdateCase cases[] = {{{"adamw"}, true}, {{"kappa", "--kappa-bits", "4"}, false}, {{"soap"}, false}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        if (EMULATED && i != 1) { continue; } // minutes
        double want[5], got[5];
        const char* name = cases[i].options[0];
        update_rank_options(&o, &cases[i], 0, "");
        if (!ranks_start(&t, comm_alone(), &o) || !update_rank_overflow(&t, want, name)) { return; }
        int64_t lost = t.residuals_lost;
        CHECK(lost == (i == 1), "%s: %" PRId64 " residuals lost", name, lost);
        trainer_free(&t);
        for (int stage = 0; stage <= 3; stage++) {
            Comm part;
            int ranks = TEST_WORLD->size < 2 + stage ? TEST_WORLD->size : 2 + stage;
            if (EMULATED && stage != 2) { continue; }
            if (comm_first(&part, TEST_WORLD, ranks)) {
                update_rank_options(&o, &cases[i], stage, "");
                if (ranks_start(&t, &part, &o) && update_rank_overflow(&t, got, name)) {
                    update_rank_compare(&cases[i], name, got, want, 5, ranks, stage);
                    CHECK(t.skipped == 2 && t.residuals_lost == lost, "%s, ZeRO %d: %" PRId64 " left out, %" PRId64 " residuals lost", name, stage,
                          t.skipped, t.residuals_lost);
                }
                trainer_free(&t);
            }
            comm_barrier(TEST_WORLD);
        }
    }
}

#if !ON_GPU
// Half of the steps at one number of ranks and stage, the rest at another, from the checkpoint between.
static void test_ranks_update_resume(void) {
    static Options o;
    static Trainer t;
    double want[UPDATE_RANK_STEPS], got[UPDATE_RANK_STEPS];
    Error error, notice;
    int half = UPDATE_RANK_STEPS / 2;
    for (size_t i = 0; i < COUNT_OF(update_cases); i++) {
        const UpdateCase* c = &update_cases[i];
        char name[160], folder[PATH_MAX], out[32];
        if ((i + 2) % UPDATE_EVERY != 0) { continue; }
        int counts[2] = {1 + (int)(i % 3), 2 + (int)((i + 1) % 4)}, stages[2] = {(int)(i % 4), (int)((i + 2) % 4)};
        update_name(c, name, sizeof(name));
        snprintf(out, sizeof(out), "update_%zu", i);
        const char* output = checkpoint_rank_folder(TEST_WORLD, out);
        update_rank_options(&o, c, 0, output);
        if (!ranks_start(&t, comm_alone(), &o) || !update_rank_steps(&t, UPDATE_RANK_STEPS, want, NULL, name)) { return; }
        trainer_free(&t);
        for (int run = 0; run < 2; run++) {
            int ranks = counts[run] > TEST_WORLD->size ? TEST_WORLD->size : counts[run];
            Comm part;
            if (comm_first(&part, TEST_WORLD, ranks)) {
                update_rank_options(&o, c, stages[run], output);
                bool good = ranks_start(&t, &part, &o) && checkpoint_folder(folder, output, (uint64_t)half, &error);
                if (good && run == 1) { good = state_load(&t, folder, (uint64_t)half, &notice, &error); }
                CHECK(good, "%s: %s", name, error.text);
                good = good && update_rank_steps(&t, half, got, NULL, name);
                if (good && run == 0) { CHECK(state_save(&t, output, &error), "%s: %s", name, error.text); }
                update_rank_compare(c, name, got, want + half * run, good ? half : 0, ranks, stages[run]);
                trainer_free(&t);
            }
            comm_barrier(TEST_WORLD);
        }
    }
}
#endif

static const TestRow update_rank_tests[] = {
    {"ranks: every optimizer at every stage follows one rank's curve", test_ranks_update_matrix},
    {"ranks: a gradient that overflows is left out alike", test_ranks_update_overflow},
#if !ON_GPU
    {"ranks: every optimizer goes on at another number of ranks and stage", test_ranks_update_resume},
#endif
};
