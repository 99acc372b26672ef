// test_update.h - rows on every optimizer inside the trainer: equal bits, resume, micro-batches, steps that are left out, bytes of state,
// and the numbers of a step (batch warm-up, square-root rule, half-lives). The formulas have rows of their own (test_optimizers.h,
// test_muon.h, test_soap.h, test_kappa.h); the same on several ranks is in test_ranks_update.h.
#pragma once
#include "test_trainer.h"

// One way to run an optimizer, as its user types it.
typedef struct {
    const char* options[9]; // after --optimizer
    bool exact;             // fp32 state: neither ranks nor micro-batches change more than the order of sums
} UpdateCase;

static const UpdateCase update_cases[] = {
    {{"adamw"}, true},
    {{"adam", "--weight-decay", "0.01"}, true},
    {{"sgd"}, true},
    {{"sgd", "--nesterov", "on", "--lr-vector", "0.5"}, true},
    {{"adagrad"}, true},
    {{"adafactor"}, true},
    {{"lars", "--lr-embedding", "2"}, true},
    {{"lamb"}, true},
    {{"lion"}, false}, // a sign turns with the last bit
    {{"ademamix"}, true},
    {{"muon"}, true},
    {{"normuon"}, true},
    {{"soap", "--soap-every", "2"}, false}, // bases of near-equal eigenvalues turn with the last bit
    {{"kappa", "--kappa-bits", "32", "--kappa-embedding", "fp32"}, true},
    {{"kappa"}, false},
    {{"kappa", "--kappa-bytes", "0.9", "--kappa-every", "3", "--kappa-residual", "off"}, false},
    {{"kappa", "--kappa-bytes", "0.5", "--kappa-every", "2"}, false},
    {{"kappa", "--kappa-bits", "2", "--kappa-embedding", "8bit", "--kappa-rounding", "stochastic"}, false},
    {{"kappa", "--kappa-bits", "6", "--kappa-equilibrate", "off"}, false},
    {{"adamw", "--state-format", "bf16"}, false},
    {{"adamw", "--state-format", "8bit", "--master-format", "split"}, false},
    {{"adamw", "--state-format", "4bit"}, false},
    {{"muon", "--state-format", "8bit"}, false},
    {{"ademamix", "--state-format", "8bit"}, false},
    {{"adamw", "--trust-high", "2", "--update-clip", "1", "--cautious-decay", "on", "--beta2-half-life", "1K"}, true},
    {{"adamw", "--batch-warmup", "4", "--base-batch", "4K"}, true},
};

#ifdef __SANITIZE_ADDRESS__
#define UPDATE_EVERY 3 // several times slower: each row takes a third of the cases, not all the same ones
#else
#define UPDATE_EVERY 1
#endif

static void update_name(const UpdateCase* c, char* text, size_t size) {
    text[0] = 0;
    for (size_t i = 0, at = 0; i < COUNT_OF(c->options) && c->options[i]; i++) {
        at += (size_t)snprintf(text + at, size - at, "%s%s", i ? " " : "", c->options[i]);
    }
}

// The options of a case after others; OPTIONS of test_trainer.h with a list.
static void update_options(Options* o, const UpdateCase* c, const char** extra, size_t count) {
    const char* all[48] = {"--optimizer"};
    size_t n = 1;
    for (size_t i = 0; i < COUNT_OF(c->options) && c->options[i]; i++) { all[n++] = c->options[i]; }
    for (size_t i = 0; i < count; i++) { all[n++] = extra[i]; }
    trainer_test_options(o, all, n);
    Error error;
    CHECK_OK(options_check(o, &error), error);
}

#define UPDATE_OPTIONS(o, c, ...)                     \
    const char* extra_[] = {__VA_ARGS__};             \
    update_options((o), (c), extra_, COUNT_OF(extra_))

#if !EMULATED
// 2n steps at once twice, and n + save + load + n, for every optimizer and format.
static void test_update_resume(void) {
    static Options o;
    Error error;
    for (size_t i = 0; i < COUNT_OF(update_cases); i++) {
        char name[160];
        update_name(&update_cases[i], name, sizeof(name));
        if (i % UPDATE_EVERY != 0) { continue; }
        UPDATE_OPTIONS(&o, &update_cases[i], "--steps", "24", "--batch", "3", "--total-batch", "128", "--warmup", "2");
        CHECK(selfcheck_resume(&o, &error), "%s: %s", name, error.text);
    }
}

// One batch is learned: the loss falls by a fifth at the optimizer's own defaults, a little adapted to a tiny model.
static void test_update_learns(void) {
    static Options o;
    static Trainer t;
    Error error;
    double losses[40];
    for (size_t i = 0; i < COUNT_OF(update_cases); i++) {
        char name[160];
        update_name(&update_cases[i], name, sizeof(name));
        if ((i + 1) % UPDATE_EVERY != 0) { continue; }
        UPDATE_OPTIONS(&o, &update_cases[i], "--steps", "40", "--batch", "8", "--total-batch", "256", "--warmup", "2", "--schedule", "constant");
        if (strcmp(update_cases[i].options[0], "adamw") == 0 || strcmp(update_cases[i].options[0], "ademamix") == 0) { o.lr = 3e-3; }
        if (strcmp(update_cases[i].options[0], "lars") == 0) { o.lr = 30; }
        if (strcmp(update_cases[i].options[0], "lamb") == 0) { o.lr = 2e-2; }
        if (strcmp(update_cases[i].options[0], "lion") == 0) { o.lr = 1e-3; }
        o.overfit = true;
        CHECK(selfcheck_start(&t, &o, false, &error) && selfcheck_steps(&t, 40, losses, &error), "%s: %s", name, error.text);
        CHECK(losses[39] < 0.85 * losses[0], "%s: loss %f at first, %f after 40 steps", name, losses[0], losses[39]);
        trainer_free(&t);
    }
}

// Micro-batches of 1, 3 and 7 make the same steps of 7 sequences.
static void test_update_micro_batches(void) {
    static Options o;
    static Trainer t;
    Error error;
    const char* batches[] = {"7", "3", "1"};
    double losses[3][6];
    for (size_t i = 0; i < COUNT_OF(update_cases); i++) {
        char name[160];
        update_name(&update_cases[i], name, sizeof(name));
        for (int b = 0; b < 3 && (i + 2) % UPDATE_EVERY == 0; b++) {
            UPDATE_OPTIONS(&o, &update_cases[i], "--steps", "6", "--batch", batches[b], "--total-batch", "224", "--warmup", "0");
            CHECK(selfcheck_start(&t, &o, false, &error) && selfcheck_steps(&t, 6, losses[b], &error), "%s: %s", name, error.text);
            trainer_free(&t);
            for (int s = 0; s < 6; s++) { // rounded states flip a code with the last bit; bf16 gradients are rounded once per micro-batch
                double tolerance = sizeof(floatX) == 2 ? 1e-2 : update_cases[i].exact ? 2e-5 : 1e-3;
                CHECK(fabs(losses[b][s] - losses[0][s]) <= tolerance * losses[0][s], "%s: step %d, batch %s: loss %.7f, of 7 at once %.7f", name, s,
                      batches[b], losses[b][s], losses[0][s]);
            }
        }
    }
}

#endif

// Two weights so large that gradients overflow, though they and their squares are finite, on the ranks that keep them; good: what stood there.
static void update_swap(Trainer* t, floatX* values) {
    const int tensors[] = {LNFW, WTE};
    zero_weights_wait_all(&t->zero);
    for (int i = 0; i < 2; i++) {
        size_t u = 0;
        while (t->gpt.table.units[u].tensor != tensors[i]) { u++; }
        floatX *at = gpt_unit_weights(&t->gpt, u), before;
        if (!at) { continue; }
        device_download(&before, at, sizeof(before));
        device_upload(at, values + i, sizeof(before));
        device_sync();
        values[i] = before;
    }
    for (int g = 0; g < t->zero.groups; g++) { zero_weights_changed(&t->zero, g); } // copies of them are old
}

static void update_spoil(Trainer* t, floatX* good) {
    for (int i = 0; i < 2; i++) { store(good + i, 1e18f); }
    update_swap(t, good);
}

static void update_mend(Trainer* t, const floatX* good) {
    floatX values[2];
    memcpy(values, good, sizeof(values));
    update_swap(t, values);
}

// Gradients that overflow: steps are left out, nothing changes, and training goes on when they
// are mended; the third in a row ends the run.
static void test_update_not_finite(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    for (size_t i = 0; i < COUNT_OF(update_cases); i++) {
        char name[160];
        update_name(&update_cases[i], name, sizeof(name));
        if (EMULATED && i % 8 != 0) { continue; }
        UPDATE_OPTIONS(&o, &update_cases[i], "--steps", "10", "--batch", "2", "--warmup", "0");
        o.master_weights = false; // the weights alone are spoilt and mended below
        CHECK_OK(selfcheck_start(&t, &o, false, &error) && trainer_step(&t, &r, &error), error);
        floatX good[2];
        update_spoil(&t, good);
        update_mend(&t, good);
        if (t.zero.carry) { trainer_forget_residual(&t); } // the residual is lost with the step: not compared
        uint32_t before = selfcheck_digest(&t);
        update_spoil(&t, good);
        for (int k = 0; k < 2; k++) {
            CHECK_OK(trainer_step(&t, &r, &error), error);
            CHECK(r.skipped && strcmp(r.skipped, "not finite") == 0 && t.skipped == k + 1, "%s: loss %g, norm %g: not left out", name, r.loss,
                  r.norm);
        }
        update_mend(&t, good);
        CHECK(selfcheck_digest(&t) == before, "%s: a step that was left out changed weights or state", name);
        CHECK_OK(trainer_step(&t, &r, &error), error);
        CHECK(!r.skipped && isfinite(r.loss) && t.not_finite == 0, "%s: loss %f after the weights were mended", name, r.loss);
        update_spoil(&t, good);
        CHECK_OK(trainer_step(&t, &r, &error) && trainer_step(&t, &r, &error), error);
        CHECK_FAILS(trainer_step(&t, &r, &error), error, "not finite");
        trainer_free(&t);
    }
}

// A step that is left out is not among those of Adam's moments: the first update, whenever it comes, has the size of the learning rate.
static void test_update_first(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    const UpdateCase cases[] = {{{"adamw", "--weight-decay", "0"}, true}, {{"adamw", "--weight-decay", "0", "--beta2-half-life", "500"}, true}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        floatX good[2];
        UPDATE_OPTIONS(&o, &cases[i], "--steps", "10", "--batch", "2", "--warmup", "0", "--schedule", "constant", "--master-weights", "off");
        CHECK_OK(selfcheck_start(&t, &o, false, &error), error);
        update_spoil(&t, good);
        CHECK_OK(trainer_step(&t, &r, &error) && trainer_step(&t, &r, &error), error);
        update_mend(&t, good);
        size_t u = 0;
        while (t.gpt.table.tensors[t.gpt.table.units[u].tensor].role != ROLE_MATRIX) { u++; }
        OptimizerUnit unit = trainer_unit(&t, &t.optimizer, u, t.state_at[u]);
        floatX before[8], after[8];
        device_download(before, unit.params, sizeof(before));
        CHECK_OK(trainer_step(&t, &r, &error), error);
        device_download(after, unit.params, sizeof(after));
        for (int k = 0; k < 8; k++) {
            double moved = fabs((double)load(after + k) - (double)load(before + k)) / r.lr;
            CHECK(fabs(moved - 1.0) < (sizeof(floatX) == 2 ? 0.5 : 1e-2), "after two steps left out a weight moved by %.4f lr", moved);
        }
        trainer_free(&t);
    }
}

// Sum over kappa's matrices of what each keeps of its residual's mean square.
static double update_kappa_error(const Trainer* t) {
    double sum = 0.0;
    for (size_t u = 0; u < t->gpt.table.unit_count; u++) {
        if (t->gpt.table.tensors[t->gpt.table.units[u].tensor].role != ROLE_MATRIX) { continue; }
        OptimizerUnit unit = trainer_unit(t, &t->optimizer, u, t->state_at[u]);
        float error;
        device_download(&error, kappa_momentum(&unit, 4).error, sizeof(error));
        sum += error;
    }
    return sum;
}

// Widths that change leave the residual where it is, and what re-encoding lost beside it: it is saved whatever the new width, goes on bit
// for bit, and is counted when it is lost.
static void test_update_residual_other_width(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    static const UpdateCase run = {{"kappa", "--kappa-bytes", "0.9", "--kappa-every", "100"}, false};
    UPDATE_OPTIONS(&o, &run, "--steps", "10", "--batch", "2", "--warmup", "0", "--master-weights", "off");
    snprintf(o.output, sizeof(o.output), "%s/repacked", test_folder());
    CHECK_OK(folder_make(o.output, &error), error);
    uint32_t digest[2];
    for (int resumed = 0; resumed < 2; resumed++) {
        CHECK_OK(selfcheck_start(&t, &o, resumed == 1, &error), error);
        if (!resumed) {
            CHECK_OK(trainer_step(&t, &r, &error), error);
            Kappa next = t.optimizer.kappa;
            for (int i = 0; i < t.gpt.table.tensor_count; i++) {
                CHECK(next.width[i] == 0 || next.width[i] == 4, "tensor %d begins with %d bits, expected 4", i, next.width[i]);
                next.width[i] = next.width[i] == 4 && i % 4 == 0 ? 6 : next.width[i];
            }
            trainer_repack(&t, &next);
            t.optimizer.kappa = next;
            CHECK_OK(state_save(&t, o.output, &error), error);
        }
        CHECK_OK(trainer_step(&t, &r, &error) && trainer_step(&t, &r, &error), error);
        digest[resumed] = selfcheck_digest(&t);
        CHECK(t.residuals_lost == 0, "%" PRId64 " residuals lost", t.residuals_lost);
        trainer_free(&t);
    }
    CHECK(digest[0] == digest[1], "a run resumed after widths changed differs in its bits");
    floatX good[2];
    CHECK_OK(selfcheck_start(&t, &o, true, &error), error);
    update_spoil(&t, good);
    CHECK_OK(trainer_step(&t, &r, &error), error);
    CHECK(t.skipped == 1 && t.residuals_lost == 1 && !trainer_has_residual(&t), "%" PRId64 " residuals lost", t.residuals_lost);
    update_mend(&t, good);
    CHECK_OK(state_save(&t, o.output, &error), error);
    trainer_free(&t);
    CHECK_OK(selfcheck_start(&t, &o, true, &error), error);
    update_spoil(&t, good);
    CHECK_OK(trainer_step(&t, &r, &error), error);
    CHECK(t.skipped == 2 && t.residuals_lost == 1, "nothing was there to lose, but %" PRId64 " are counted", t.residuals_lost);
    trainer_free(&t);
}

// A step that is left out loses the residual once, and what is kept about it; so does going on without residuals. With them again is no error.
static void test_update_residual_lost(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    floatX good[2];
    static const UpdateCase run = {{"kappa", "--kappa-bits", "4"}, false};
    static const UpdateCase without = {{"kappa", "--kappa-bits", "4", "--kappa-residual", "off"}, false};
    {
        UPDATE_OPTIONS(&o, &run, "--steps", "10", "--batch", "2", "--warmup", "0", "--master-weights", "off");
        snprintf(o.output, sizeof(o.output), "%s/residual", test_folder());
        CHECK_OK(folder_make(o.output, &error), error);
        CHECK_OK(selfcheck_start(&t, &o, false, &error) && trainer_step(&t, &r, &error), error);
        CHECK(update_kappa_error(&t) > 0.0, "no residual after a step");
        update_spoil(&t, good);
        CHECK_OK(trainer_step(&t, &r, &error) && trainer_step(&t, &r, &error), error);
        CHECK(t.skipped == 2 && t.residuals_lost == 1, "%" PRId64 " steps were left out, %" PRId64 " residuals lost", t.skipped, t.residuals_lost);
        CHECK(update_kappa_error(&t) == 0.0, "a residual is remembered that is gone");
        update_mend(&t, good);
        CHECK_OK(trainer_step(&t, &r, &error) && state_save(&t, o.output, &error), error);
        CHECK(update_kappa_error(&t) > 0.0, "no residual after the next step");
        trainer_free(&t);
    }
    {
        UPDATE_OPTIONS(&o, &without, "--steps", "10", "--batch", "2", "--master-weights", "off");
        snprintf(o.output, sizeof(o.output), "%s/residual", test_folder());
        CHECK_OK(selfcheck_start(&t, &o, true, &error), error);
        CHECK(t.residuals_lost == 2 && update_kappa_error(&t) == 0.0, "%" PRId64 " residuals lost", t.residuals_lost);
        CHECK_OK(trainer_step(&t, &r, &error) && state_save(&t, o.output, &error), error);
        trainer_free(&t);
    }
    UPDATE_OPTIONS(&o, &run, "--steps", "10", "--batch", "2", "--master-weights", "off");
    snprintf(o.output, sizeof(o.output), "%s/residual", test_folder());
    CHECK_OK(selfcheck_start(&t, &o, true, &error), error);
    CHECK(t.residuals_lost == 2, "%" PRId64 " residuals lost", t.residuals_lost);
    trainer_free(&t);
}

// Momentum in fp32 does not go on in widths that are chosen, nor one width in another.
static void test_update_other_widths(void) {
    static Options o;
    static Trainer t;
    Error error;
    static const UpdateCase cases[] = {{{"kappa", "--kappa-bits", "32"}, true}, {{"kappa"}, false}, {{"kappa", "--kappa-bits", "8"}, false}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        UPDATE_OPTIONS(&o, &cases[i], "--steps", "4", "--batch", "2");
        snprintf(o.output, sizeof(o.output), "%s/widths", test_folder());
        CHECK_OK(folder_make(o.output, &error), error);
        CHECK(selfcheck_start(&t, &o, i > 0, &error) == (i == 0), "case %zu: %s", i, error.text);
        if (i == 0) { CHECK_OK(state_save(&t, o.output, &error), error); }
        CHECK(i == 0 || strstr(error.text, "go on with it by --kappa-bits 32"), "case %zu: %s", i, error.text);
        trainer_free(&t);
    }
}

// Bytes a parameter of gpt2:d12, as the memory table has them.
static void test_update_state_bytes(void) {
    static Options o;
    static Trainer t;
    Error error;
    ModelHeader model;
    static const struct {
        UpdateCase run;
        double least, most; // bytes of state a parameter
    } rows[] = {
        {{{"adamw"}, true}, 7.99, 8.01},
        {{{"adamw", "--state-format", "bf16"}, false}, 3.99, 4.02},
        {{{"adamw", "--state-format", "8bit"}, false}, 2.0, 2.1},
        {{{"adamw", "--state-format", "4bit"}, false}, 1.0, 1.1},
        {{{"sgd"}, true}, 3.99, 4.01},
        {{{"lion", "--state-format", "8bit"}, false}, 1.0, 1.05},
        {{{"adafactor"}, true}, 0.0, 0.05},
        {{{"kappa"}, false}, 0.5, 0.70},
        {{{"kappa", "--kappa-bits", "2"}, false}, 0.3, 0.55},
        {{{"kappa", "--kappa-bits", "8"}, false}, 0.9, 1.1},
    };
    CHECK_OK(model_spec_parse("gpt2:d12", 0, &model, &error), error);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        char name[160];
        update_name(&rows[i].run, name, sizeof(name));
        UPDATE_OPTIONS(&o, &rows[i].run, "--batch", "4");
        memset(&t, 0, sizeof(t));
        CHECK_OK(trainer_layout(&t, &o, &model, 1, 0, &error), error);
        double bytes = (double)t.state_bytes / (double)t.gpt.table.packed;
        printf("    %-32s %.4f bytes of state a parameter\n", name, bytes);
        CHECK(bytes >= rows[i].least && bytes <= rows[i].most, "%s: %f bytes a parameter, expected %g to %g", name, bytes,
              rows[i].least, rows[i].most);
        trainer_free(&t);
    }
}

#ifdef FLOATX_BF16
// Lower halves beside bf16 weights: 4 bytes a parameter instead of 6, and the run is one on fp32 weights, rounded to nearest for use.
static void test_update_split_masters(void) {
    static Options o;
    static Trainer t;
    Error error;
    ModelHeader model;
    OPTIONS(&o, "--batch", "4", "--master-format", "split");
    CHECK_OK(model_spec_parse("gpt2:d12", 0, &model, &error), error);
    memset(&t, 0, sizeof(t));
    CHECK_OK(trainer_layout(&t, &o, &model, 1, 0, &error), error);
    size_t bytes = 0;
    for (int i = 0; i < t.gpt.memory.count; i++) {
        const char* name = t.gpt.memory.rows[i].name;
        bytes += strcmp(name, "parameters") == 0 || strstr(name, "master") ? t.gpt.memory.rows[i].bytes : 0;
    }
    double each = (double)bytes / (double)t.gpt.table.packed;
    CHECK(each <= 4.005, "weights and masters take %f bytes a parameter", each); // rows of padding
    trainer_free(&t);
}
#endif

// The batch during its warm-up, the learning rate that goes with it, and beta2 by half-life.
static void test_update_numbers(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    static const size_t sequences[] = {4, 7, 10, 13, 16, 16};
    OPTIONS(&o, "--steps", "6", "--batch", "16", "--total-batch", "512", "--batch-warmup", "4", "--warmup", "0", "--schedule", "constant", "--lr",
            "1e-3", "--base-batch", "2K", "--beta2-half-life", "1K");
    CHECK_OK(selfcheck_start(&t, &o, false, &error), error);
    uint64_t seen = 0;
    for (size_t i = 0; i < COUNT_OF(sequences); i++) {
        double tokens = 32.0 * (double)sequences[i];
        CHECK_OK(trainer_step(&t, &r, &error), error);
        CHECK(t.sequences_now == sequences[i] && r.tokens == tokens, "step %zu: %zu sequences, expected %zu", i, t.sequences_now, sequences[i]);
        double lr = 1e-3 * sqrt(tokens / 2048.0), beta2 = pow(0.5, tokens / 1024.0), all = 32.0 * (double)(seen + sequences[i]);
        CHECK(fabs(r.lr - lr) < 1e-12, "step %zu: lr %g, expected %g", i, r.lr, lr);
        CHECK(fabs(t.host_scalars->beta2 - beta2) < 1e-6 && fabs(t.host_scalars->correction2 - (1.0 - pow(0.5, all / 1024.0))) < 1e-6,
              "step %zu: beta2 %g, correction %g", i, t.host_scalars->beta2, t.host_scalars->correction2);
        const StepScalars* s = t.host_scalars;
        double late = 1.0 - pow(0.5, (all - 128.0) / 1024.0), n = (double)i + 1.0;
        CHECK(fabs(s->late1 - (1.0 - pow(0.9, n - 1.0))) < 1e-6 && fabs(s->late2 - late) < 1e-6, "step %zu: late %g, %g", i, s->late1, s->late2);
        CHECK(fabs(s->correction1 - (1.0 - pow(0.9, n))) < 1e-6 && fabs(s->decay_rate - (1.0 - pow(n, -0.8))) < 1e-6 && s->updates == i,
              "step %zu: correction %g, decay rate %g, %u updates", i, s->correction1, s->decay_rate, s->updates);
        CHECK(fabs(s->alpha - o.alpha * n / 6.0) < 1e-5, "step %zu: alpha %g", i, s->alpha);
        seen += sequences[i];
        CHECK(t.sequence == seen, "step %zu: %" PRIu64 " sequences seen", i, t.sequence);
    }
    trainer_free(&t);
    CHECK(fabs(trainer_beta3(&o, 0.0) - 0.9) < 1e-12 && fabs(trainer_beta3(&o, 1.0) - 0.999) < 1e-12, "beta3 from %f to %f", trainer_beta3(&o, 0.0),
          trainer_beta3(&o, 1.0));
    double life = log(0.5) / log(trainer_beta3(&o, 0.5)) - 1.0, ends = (log(0.5) / log(0.9) + log(0.5) / log(0.999)) / 2.0 - 1.0;
    CHECK(fabs(life - ends) < 1e-6 * ends, "half-life %f in the middle, expected %f", life, ends);
}

// Each matrix is orthogonalised once a step, Q, K and V apart.
static void test_update_counts_orthogonal(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    const UpdateCase cases[] = {{{"muon"}, true}, {{"normuon"}, true}, {{"kappa"}, false}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        UPDATE_OPTIONS(&o, &cases[i], "--steps", "4", "--batch", "1", "--total-batch", "96");
        CHECK_OK(selfcheck_start(&t, &o, false, &error), error);
        size_t before = newton_schulz_calls;
        CHECK_OK(trainer_step(&t, &r, &error) && trainer_step(&t, &r, &error), error);
        CHECK(newton_schulz_calls - before == 2 * 2 * 6, "%s: %zu calls in 2 steps of 2 layers of 6 matrices", cases[i].options[0],
              newton_schulz_calls - before);
        trainer_free(&t);
    }
}

// What does not fit together is said in one line.
static void test_update_refuses(void) {
    static Options o;
    Error error;
    static const struct {
        const char *options[6], *part;
    } rows[] = {
        {{"--optimizer", "adamw", "--kappa-bits", "4"}, "--kappa-bits is an option of --optimizer kappa"},
        {{"--optimizer", "kappa", "--soap-every", "4"}, "--soap-every is an option of --optimizer soap"},
        {{"--optimizer", "lion", "--beta3", "0.9"}, "--beta3 is an option of --optimizer ademamix"},
        {{"--trust-low", "3", "--trust-high", "2"}, "--trust-low 3 is above --trust-high 2"},
        {{"--trust-low", "0.1"}, "give --trust-high"},
        {{"--optimizer", "lamb", "--update-clip", "1"}, "lamb has a trust ratio of its own"},
        {{"--optimizer", "kappa", "--state-format", "8bit"}, "kappa has formats of its own"},
        {{"--beta2-half-life", "1M", "--beta2", "0.9"}, "leave --beta2 out"},
        {{"--optimizer", "adafactor", "--trust-high", "2"}, "leave --trust-high out"},
        {{"--optimizer", "sgd", "--cautious-decay", "on"}, "leave --cautious-decay out"},
        {{"--momentum", "0.5"}, "--momentum is an option of --optimizer sgd|lars|"},
        {{"--steps", "10", "--warmup", "0", "--batch-warmup", "11"}, "--batch-warmup 11 is longer than --steps 10"},
        {{"--optimizer", "sgd", "--beta2-half-life", "1M"}, "--beta2-half-life is an option of"},
        {{"--optimizer", "kappa", "--kappa-bits", "4", "--kappa-bytes", "0.6"}, "--kappa-bytes is for widths that are chosen"},
        {{"--master-weights", "off", "--master-format", "split"}, "leave --master-weights on"},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        size_t n = 0;
        while (n < COUNT_OF(rows[i].options) && rows[i].options[n]) { n++; }
        const char* all[6];
        for (size_t k = 0; k < n; k++) { all[k] = rows[i].options[k]; }
        trainer_test_options(&o, all, n);
        CHECK_FAILS(options_check(&o, &error), error, rows[i].part);
    }
    // a saved configuration with another optimizer: what was its default is not taken over, what its user gave is
    UpdateCase saved = {{"adagrad", "--weight-decay", "0.02"}, false};
    {
        UPDATE_OPTIONS(&o, &saved, "--batch", "2");
    }
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/saved.txt", test_folder());
    CHECK_OK(options_save(&o, "", path, &error), error);
    const char* other[] = {"train_gpt", "train", "--config", path, "--optimizer", "kappa"};
    CHECK_OK(options_parse(&o, (int)COUNT_OF(other), (char**)(uintptr_t)other, &error) && options_check(&o, &error), error);
    CHECK(o.lr == 4e-3 && o.eps == 1e-8 && o.weight_decay == 0.02 && o.cautious_decay, "lr %g, eps %g, decay %g", o.lr, o.eps, o.weight_decay);
    UpdateCase small = {{"kappa", "--kappa-bytes", "0.1"}, false};
    static Trainer t;
    {
        UPDATE_OPTIONS(&o, &small, "--batch", "2");
    }
    CHECK_FAILS(selfcheck_start(&t, &o, false, &error), error, "--kappa-bytes");
    trainer_free(&t);
    UpdateCase endless = {{"adamw", "--beta2-half-life", "1G"}, false};
    {
        UPDATE_OPTIONS(&o, &endless, "--batch", "2");
    }
    CHECK_FAILS(selfcheck_start(&t, &o, false, &error), error, "is more than 100000 steps of 64 tokens");
    trainer_free(&t);
}

// A matrix's gradient far above its usual size is scaled down to it, by its own factor alone.
static void test_update_spike(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult r;
    const UpdateCase run = {{"kappa", "--kappa-spike", "8"}, false};
    UPDATE_OPTIONS(&o, &run, "--steps", "10", "--batch", "2", "--clip", "0");
    CHECK_OK(selfcheck_start(&t, &o, false, &error) && trainer_step(&t, &r, &error) && trainer_step(&t, &r, &error), error);
    CHECK(t.optimizer.kappa.spikes == 0, "%" PRId64 " spikes in two usual steps", t.optimizer.kappa.spikes);
    size_t u = 0;
    while (t.gpt.table.tensors[t.gpt.table.units[u].tensor].role != ROLE_MATRIX) { u++; }
    double usual = t.optimizer.kappa.rms[u] *= 1e-3;
    CHECK_OK(trainer_step(&t, &r, &error), error);
    double rms = sqrt((double)t.squares[u] / (double)t.gpt.table.units[u].count), want = 8.0 * usual / rms;
    CHECK(t.optimizer.kappa.spikes == 1 && fabs(t.host_factors[u] / want - 1.0) < 1e-5, "%" PRId64 " spikes, factor %g, expected %g",
          t.optimizer.kappa.spikes, t.host_factors[u], want);
    for (size_t i = 0; i < t.gpt.table.unit_count; i++) { CHECK(i == u || t.host_factors[i] == 1.0f, "unit %zu: factor %g", i, t.host_factors[i]); }
    trainer_free(&t);
}

static const TestRow update_tests[] = {
#if !EMULATED
    {"update: every optimizer resumes bit for bit", test_update_resume},
    {"update: every optimizer learns", test_update_learns},
    {"update: micro-batches do not change an optimizer's steps", test_update_micro_batches},
#endif
    {"update: steps that are not finite are left out and change nothing", test_update_not_finite},
    {"update: the first update after steps left out is of full size", test_update_first},
    {"update: a residual is lost once, and so is what is kept of it", test_update_residual_lost},
    {"update: a residual beside widths that change", test_update_residual_other_width},
    {"update: a spike is scaled down by the unit's factor", test_update_spike},
    {"update: widths that do not go on in others", test_update_other_widths},
    {"update: bytes of state a parameter", test_update_state_bytes},
#ifdef FLOATX_BF16
    {"update: split masters", test_update_split_masters},
#endif
    {"update: batch warm-up, square-root rule, half-lives", test_update_numbers},
    {"update: each matrix is orthogonalised once a step", test_update_counts_orthogonal},
    {"update: options that do not go together", test_update_refuses},
};
