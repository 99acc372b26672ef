// test_trainer.h - rows on training as a whole: equal bits, resume, skipping, schedules, sampling, model descriptions.
#pragma once
#include "test.h"

#ifdef CUDA_ON_CPU
#define EMULATED 1 // about a thousand times slower: the long rows are left to the other builds
#else
#define EMULATED 0
#endif

static void trainer_test_options(Options* o, const char** extra, size_t count) {
    static char data[PATH_MAX], out[PATH_MAX];
    const char* arguments[64] = {"train_gpt", "train", "--train-data", data, "--val-data", "", "--output", out, "--model",
                                 "layers=2,heads=2,channels=48,context=32", "--vocab-size", "257"};
    size_t n = 12;
    Error error;
    snprintf(data, sizeof(data), "%s/data.bin", test_folder());
    snprintf(out, sizeof(out), "%s/trainer_out", test_folder());
    CHECK_OK(selfcheck_data(test_folder(), 42, &error), error);
    for (size_t i = 0; i < count; i++) { arguments[n++] = extra[i]; }
    CHECK_OK(options_parse(o, (int)n, (char**)(uintptr_t)arguments, &error), error);
}

#define OPTIONS(o, ...)                                                   \
    const char* extra_[] = {__VA_ARGS__};                                 \
    trainer_test_options((o), extra_, COUNT_OF(extra_))

#if !EMULATED
// 2n steps at once, twice, and n + save + load + n; also the cached and the plain text, and learning one batch by heart
static void test_trainer_selfcheck(void) {
    static Options o;
    Error error;
    OPTIONS(&o, "--steps", "24", "--batch", "3", "--total-batch", "224", "--lr", "3e-3", "--warmup", "2", "--skip-norm-z", "6");
    CHECK_OK(selfcheck_resume(&o, &error), error);
    CHECK_OK(selfcheck_decode(&o, &error), error);
    CHECK_OK(selfcheck_overfit(&o, &error), error);
}
#endif

// Micro-batches of 1, 3 and 7 sequences make the same step of 7 sequences, with every recompute level
static void test_trainer_micro_batches(void) {
    static Options o;
    static Trainer t;
    Error error;
    double losses[6][4];
    const char *batches[6] = {"7", "1", "3", "7", "7", "2"}, *levels[6] = {"0", "1", "1", "2", "3", "3"};
    for (int run = 0; run < (EMULATED ? 2 : 6); run++) {
        OPTIONS(&o, "--steps", "4", "--batch", batches[run], "--total-batch", "224", "--recompute", levels[run], "--lr", "1e-3", "--warmup", "0");
        CHECK_OK(selfcheck_start(&t, &o, false, &error), error);
        CHECK_OK(selfcheck_steps(&t, 4, losses[run], &error), error);
        trainer_free(&t);
        for (int i = 0; i < 4; i++) {
            double tolerance = sizeof(floatX) == 4 ? 2e-6 : 4e-3; // fp32: order of sums; bf16: gradients rounded once per micro-batch
            CHECK(fabs(losses[run][i] - losses[0][i]) <= tolerance * losses[0][i], "step %d, batch %s, recompute %s: expected %.7f, found %.7f", i,
                  batches[run], levels[run], losses[0][i], losses[run][i]);
        }
    }
}

// A spike after the window is full skips the update: weights stay, the step counts
static void test_trainer_skips_outliers(void) {
    static Options o;
    static Trainer t;
    Error error;
    StepResult result;
    OPTIONS(&o, "--steps", "10", "--batch", "2", "--skip-loss-z", "3", "--lr", "1e-3");
    CHECK_OK(selfcheck_start(&t, &o, false, &error), error);
    for (int i = 0; i < OUTLIER_WINDOW; i++) { outlier_add(&t.loss_outlier, 1.0 + 1e-3 * (i % 7)); }
    uint32_t before = selfcheck_digest(&t);
    CHECK_OK(trainer_step(&t, &result, &error), error);
    CHECK(result.skipped && t.skipped == 1 && t.step == 1, "expected a skipped update, z %f", result.loss_z);
    CHECK(selfcheck_digest(&t) == before, "a skipped update changed the weights or the optimizer");
    trainer_free(&t);
}

// A weight that is not finite is named, whatever it is
static void test_trainer_names_bad_tensor(void) {
    static Options o;
    static Trainer t;
    const int tensors[] = {WTE, QKVW, FCB, LNFW};
    Error error;
    StepResult result;
    for (size_t i = 0; i < COUNT_OF(tensors); i++) {
        OPTIONS(&o, "--steps", "10", "--batch", "2");
        CHECK_OK(selfcheck_start(&t, &o, false, &error), error);
        const TensorSpec* s = &t.gpt.table.tensors[tensors[i]];
        floatX bad;
        store(&bad, NAN);
        device_upload(tensor_at(t.gpt.params, &t.gpt.table, tensors[i], s->layers > 1), &bad, sizeof(bad));
        char expected[64];
        snprintf(expected, sizeof(expected), s->layers > 1 ? "weights of %s, layer 1" : "weights of %s", s->name);
        CHECK_FAILS(trainer_step(&t, &result, &error), error, expected);
        trainer_free(&t);
    }
}

static void test_trainer_refuses(void) {
    static Options o;
    static Trainer t;
    Error error;
    struct {
        const char *name, *value, *part;
    } rows[] = {{"--seq-len", "33", "context of 32"},
                {"--total-batch", "100", "not a multiple"},
                {"--train-data", "/nonexistent/x.bin", "/nonexistent/x.bin"},
                {"--total-batch", "1M", "fewer than one batch"}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        if (strcmp(rows[i].name, "--train-data") == 0) {
            OPTIONS(&o, "--batch", "2");
            strcpy(o.train_data, rows[i].value);
        } else {
            OPTIONS(&o, "--batch", "2", rows[i].name, rows[i].value);
        }
        CHECK_FAILS(selfcheck_start(&t, &o, false, &error), error, rows[i].part);
        trainer_free(&t);
    }
}

// Schedules at the points that define them (warm-up 10 of 110 steps, peak 1, last 0.1)
static void test_schedules(void) {
    struct {
        Schedule schedule;
        int64_t step;
        double expected;
    } rows[] = {{SCHEDULE_COSINE, 0, 0.1},    {SCHEDULE_COSINE, 9, 1.0},   {SCHEDULE_COSINE, 10, 1.0},   {SCHEDULE_COSINE, 60, 0.55},
                {SCHEDULE_COSINE, 110, 0.1},  {SCHEDULE_COSINE, 500, 0.1}, {SCHEDULE_LINEAR, 60, 0.55},  {SCHEDULE_LINEAR, 110, 0.1},
                {SCHEDULE_CONSTANT, 60, 1.0}, {SCHEDULE_CONSTANT, 110, 1.0}, {SCHEDULE_WSD, 88, 1.0},    {SCHEDULE_WSD, 110, 0.1},
                {SCHEDULE_WSD, 99, 0.1 + 0.9 * (1.0 - sqrt(0.5))}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        double lr = schedule_lr(rows[i].schedule, 1.0, rows[i].step, 10, 110, 0.1);
        CHECK(fabs(lr - rows[i].expected) < 1e-12, "schedule %d, step %" PRId64 ": expected %.12f, found %.12f", (int)rows[i].schedule, rows[i].step,
              rows[i].expected, lr);
    }
    CHECK(schedule_lr(SCHEDULE_COSINE, 1.0, 0, 0, 0, 0.5) == 0.5, "no steps at all must not divide by zero");
}

// Top-k, top-p and temperature keep what they should; frequencies follow the softmax (20,000 draws: deviation below 0.011 at 4 sigma)
static void test_sampling(void) {
    float logits[5] = {1.0f, 3.0f, 2.0f, -1.0f, 3.0f};
    Candidate work[5];
    Sampling greedy = {0.0, 0, 1.0, 1}, two = {1.0, 2, 1.0, 1}, nucleus = {1.0, 0, 0.5, 1}, all = {1.0, 0, 1.0, 1};
    double counts[5] = {0}, total = 0.0;
    for (int i = 0; i < 5; i++) { total += exp(logits[i]); }
    CHECK(sample_token(logits, work, 5, &greedy, 0, 0) == 1, "temperature 0 takes the first of the largest");
    for (uint64_t i = 0; i < 20000; i++) {
        int a = sample_token(logits, work, 5, &two, 0, i), b = sample_token(logits, work, 5, &nucleus, 0, i);
        CHECK((a == 1 || a == 4) && (b == 1 || b == 4), "top-k 2 gave %d, top-p 0.5 gave %d", a, b);
        counts[sample_token(logits, work, 5, &all, 0, i)] += 1.0 / 20000.0;
    }
    for (int i = 0; i < 5; i++) {
        CHECK(fabs(counts[i] - exp(logits[i]) / total) < 0.015, "token %d: expected %f, found %f", i, exp(logits[i]) / total, counts[i]);
    }
}

static void test_model_descriptions(void) {
    ModelHeader m;
    Error error;
    CHECK_OK(model_spec_parse("d12", 0, &m, &error), error);
    CHECK(m.layers == 12 && m.channels == 768 && m.heads == 12 && m.max_seq_len == 1024 && m.vocab_size == 50257 && m.padded_vocab == 50304, "d12");
    CHECK_OK(model_spec_parse("gpt3:c2560", 1000, &m, &error), error);
    CHECK(m.layers == 32 && m.heads == 32 && m.max_seq_len == 2048 && m.padded_vocab == 1024, "gpt3:c2560");
    CHECK_OK(model_spec_parse("layers=4,heads=4,channels=20,context=7", 300, &m, &error), error);
    CHECK(m.layers == 4 && m.channels == 20 && m.max_seq_len == 7, "explicit sizes");
    struct {
        const char *spec, *part;
    } bad[] = {{"gpt2:d13", "d12"}, {"gpt3:c", "c768"}, {"layers=4", "heads is missing"}, {"layers=4,heads=3,channels=20,context=7", "divide"},
               {"layers=x,heads=3,channels=21,context=7", "whole number"}, {"layers=0,heads=3,channels=21,context=7", "whole number"},
               {"width=3", "unknown part"}, {"layers=1,heads=1,channels=512,context=8", "at most 256"}, {"", "expected"}};
    for (size_t i = 0; i < COUNT_OF(bad); i++) { CHECK_FAILS(model_spec_parse(bad[i].spec, 300, &m, &error), error, bad[i].part); }
}

// A micro-batch of many sequences: the position gradient is one rounding of an fp32 sum, also where bf16 could not count that far
static void test_position_gradient_of_many_sequences(void) {
    enum { B = 1024, T = 2, C = 24 };
    size_t N = (size_t)B * T;
    floatX *dout = (floatX*)device_alloc(N * C * sizeof(floatX)), *dwpe = (floatX*)device_alloc(T * C * sizeof(floatX)), host[T * C];
    fill(dout, N * C, 1.0f);
    LAUNCH_SCRATCH(T, WARP_TEAM, C * sizeof(float), position_backward_row, dwpe, dout, N, T, C);
    device_download(host, dwpe, sizeof(host));
    for (int i = 0; i < T * C; i++) { CHECK(load(host + i) == (float)B, "expected %d, found %f", B, (double)load(host + i)); }
    device_free(dout, N * C * sizeof(floatX));
    device_free(dwpe, T * C * sizeof(floatX));
}

// The tokenizer beside data or a model is found whatever else the path holds
static void test_find_tokenizer(void) {
    char path[PATH_MAX], folder[256];
    Tokenizer made, found;
    Error error;
    memset(&made, 0, sizeof(made));
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        tokenizer_append(&made, &byte, 1);
    }
    made.eot = 256;
    tokenizer_append(&made, (const uint8_t*)END_OF_TEXT, strlen(END_OF_TEXT));
    snprintf(folder, sizeof(folder), "%s/my_train_x/run", test_folder());
    CHECK_OK(folder_make(folder, &error), error);
    snprintf(path, sizeof(path), "%s/../book_tokenizer.bin", folder);
    CHECK_OK(tokenizer_write(&made, path, &error), error);
    snprintf(path, sizeof(path), "%s/tokenizer.bin", folder);
    CHECK_OK(tokenizer_write(&made, path, &error), error);
    const char* near[] = {"../book_train_*.bin", "../book_train_000000.bin", "", "step_00000001", "step_00000001/model_00000001.bin"};
    for (size_t i = 0; i < COUNT_OF(near); i++) {
        snprintf(path, sizeof(path), "%s%s%s", folder, near[i][0] ? "/" : "", near[i]);
        CHECK_OK(tokenizer_find(&found, "", path, &error), error);
        CHECK(found.vocab_size == 257, "near %s: expected 257 tokens, found %zu", path, found.vocab_size);
        tokenizer_free(&found);
    }
    tokenizer_free(&made);
}

static const TestRow trainer_tests[] = {
#if !EMULATED
    {"trainer: equal runs, resume, decoding, learning by heart", test_trainer_selfcheck},
#endif
    {"trainer: micro-batch sizes and recompute levels agree", test_trainer_micro_batches},
    {"trainer: an outlier is skipped and changes nothing", test_trainer_skips_outliers},
    {"trainer: the first tensor that is not finite is named", test_trainer_names_bad_tensor},
    {"trainer: impossible runs are refused in one line", test_trainer_refuses},
    {"trainer: position gradient of many sequences", test_position_gradient_of_many_sequences},
    {"trainer: the tokenizer beside data or model is found", test_find_tokenizer},
    {"trainer: learning-rate schedules", test_schedules},
    {"trainer: sampling", test_sampling},
    {"trainer: model descriptions", test_model_descriptions},
};
