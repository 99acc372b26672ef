// selfcheck.cuh - proves on the user's own machine, in seconds: two equal runs give equal bits; a run that stops, saves and goes on in
// a new trainer gives the bits of one that does not stop; decoding with and without a cache gives the same text; one batch can be
// learned by heart. Included by train_gpt.cu.
#pragma once

#define SELFCHECK_STEPS 12
#define SELFCHECK_VOCAB 257

// Shards of a made-up language: each token is one of four followers of the last.
static bool selfcheck_data(const char* folder, uint64_t seed, Error* error) {
    char path[PATH_MAX];
    uint16_t tokens[20001];
    int32_t header[256] = {20240520, 1, (int32_t)COUNT_OF(tokens)};
    FileWriter file;
    uint32_t last = 0;
    for (size_t i = 0; i < COUNT_OF(tokens); i++) {
        last = (last * 5 + 1 + 60 * (philox_at(seed, RANDOM_SAMPLING, 0, 1, i).x[0] & 3)) % SELFCHECK_VOCAB;
        tokens[i] = (uint16_t)last;
    }
    snprintf(path, sizeof(path), "%s/data.bin", folder);
    return file_create(&file, path, error) && file_write(&file, header, sizeof(header), error) && file_write(&file, tokens, sizeof(tokens), error) &&
           file_commit(&file, error);
}

static bool selfcheck_options(Options* o, const char* folder, const Options* user, Error* error) {
    char data[PATH_MAX], out[PATH_MAX], seed[32];
    snprintf(data, sizeof(data), "%s/data.bin", folder);
    snprintf(out, sizeof(out), "%s/out", folder);
    snprintf(seed, sizeof(seed), "%" PRId64, user->seed);
    const char* arguments[] = {"train_gpt", "train", "--train-data", data, "--val-data", "", "--output", out, "--seed", seed, "--steps", "24",
                               "--model", "layers=2,heads=2,channels=48,context=32", "--vocab-size", "257", "--batch", "3", "--total-batch", "224",
                               "--lr", "3e-3", "--warmup", "2", "--skip-norm-z", "6"};
    return options_parse(o, (int)COUNT_OF(arguments), (char**)(uintptr_t)arguments, error);
}

// A new trainer; folder "": random weights, else the state saved there.
static bool selfcheck_start(Trainer* t, const Options* o, bool resume, Error* error) {
    ModelHeader model;
    Error notice;
    char folder[PATH_MAX];
    uint64_t step;
    memset(t, 0, sizeof(*t));
    if (!model_spec_parse(o->model, o->vocab_size, &model, error) || !trainer_create(t, o, &model, error)) { return false; }
    if (resume) {
        return checkpoint_find_latest(o->output, folder, &step, &notice, error) &&
               (folder[0] || fail(error, "no checkpoint was found: %s", notice.text)) && state_load(t, folder, step, &notice, error);
    }
    gpt_init(&t->gpt, (uint64_t)o->seed);
    trainer_reset_masters(t);
    return true;
}

static bool selfcheck_steps(Trainer* t, int count, double* losses, Error* error) {
    StepResult result;
    for (int i = 0; i < count; i++) {
        if (!trainer_step(t, &result, error)) { return false; }
        losses[i] = result.loss;
    }
    return true;
}

static uint32_t selfcheck_digest_bytes(uint32_t crc, const void* data, size_t bytes) {
    char* copy = (char*)need(malloc(max_size(bytes, 1)));
    device_download(copy, data, bytes);
    crc = crc32c(crc, copy, bytes);
    free(copy);
    return crc;
}

// CRC-32C over weights, masters, optimizer state and what it left among the gradients, on one rank, which holds all.
static uint32_t selfcheck_digest(const Trainer* t) {
    const ParamTable* table = &t->gpt.table;
    uint32_t crc = selfcheck_digest_bytes(0, t->gpt.params, table->elements * sizeof(floatX));
    for (size_t u = 0; u < table->unit_count; u++) {
        UnitState s = optimizer_unit_state(&t->optimizer, &table->tensors[table->units[u].tensor], &table->units[u]);
        for (int i = 0; i < s.count; i++) {
            crc = selfcheck_digest_bytes(crc, t->state + t->state_at[u] + s.arrays[i].at, s.arrays[i].count * array_type_bytes(s.arrays[i].type));
        }
    }
    if (t->master) { crc = selfcheck_digest_bytes(crc, t->master, t->zero.held * sizeof(float)); }
    if (t->master_low) { crc = selfcheck_digest_bytes(crc, t->master_low, t->zero.held * sizeof(uint16_t)); }
    return t->zero.carry ? selfcheck_digest_bytes(crc, t->gpt.grads, table->elements * sizeof(floatX)) : crc;
}

// 2n steps at once twice, and n + save + load + n.
static bool selfcheck_resume(const Options* o, Error* error) {
    static Trainer t;
    double losses[3][2 * SELFCHECK_STEPS];
    uint32_t digests[3];
    bool good = true;
    for (int run = 0; good && run < 3; run++) {
        bool stops = run == 2;
        good = selfcheck_start(&t, o, false, error) && selfcheck_steps(&t, stops ? SELFCHECK_STEPS : 2 * SELFCHECK_STEPS, losses[run], error);
        if (good && stops) {
            good = state_save(&t, o->output, error);
            trainer_free(&t);
            good = good && selfcheck_start(&t, o, true, error) && selfcheck_steps(&t, SELFCHECK_STEPS, losses[run] + SELFCHECK_STEPS, error);
        }
        digests[run] = good ? selfcheck_digest(&t) : 0;
        trainer_free(&t);
    }
    if (!good) { return false; }
    if (memcmp(losses[0], losses[1], sizeof(losses[0])) != 0 || digests[0] != digests[1]) {
        return fail(error, "selfcheck: two equal runs differ: loss %.9f and %.9f after %d steps", losses[0][2 * SELFCHECK_STEPS - 1],
                    losses[1][2 * SELFCHECK_STEPS - 1], 2 * SELFCHECK_STEPS);
    }
    printf("ok  two equal runs give equal bits (%d steps, digest %08x)\n", 2 * SELFCHECK_STEPS, digests[0]);
    if (memcmp(losses[0], losses[2], sizeof(losses[0])) != 0 || digests[0] != digests[2]) {
        return fail(error, "selfcheck: a resumed run differs from one that was not stopped: loss %.9f and %.9f", losses[2][2 * SELFCHECK_STEPS - 1],
                    losses[0][2 * SELFCHECK_STEPS - 1]);
    }
    printf("ok  %d steps equal %d, save, load, %d, bit for bit\n", 2 * SELFCHECK_STEPS, SELFCHECK_STEPS, SELFCHECK_STEPS);
    return true;
}

// One sample of a random model with a cache and one without.
static bool selfcheck_decode(const Options* o, Error* error) {
    int32_t texts[2][48], prompt[3] = {1, 2, 3};
    ModelHeader model;
    Sampling sampling = {1.0, 40, 0.95, (uint64_t)o->seed};
    bool good = model_spec_parse(o->model, o->vocab_size, &model, error);
    for (int cached = 0; good && cached < 2; cached++) {
        static Gpt gpt;
        Decoder decoder;
        gpt_plan(&gpt, &model, 1, model.max_seq_len, RECOMPUTE_BLOCK, false, 1);
        decoder_plan(&decoder, &gpt, cached);
        good = gpt_allocate(&gpt, error);
        if (good) {
            gpt_init(&gpt, (uint64_t)o->seed);
            decoder_generate(&decoder, texts[cached], COUNT_OF(texts[cached]), prompt, 3, &sampling, 0, -1, NULL, NULL);
        }
        decoder_free(&decoder);
        gpt_free(&gpt);
    }
    if (!good) { return false; }
    for (size_t i = 0; i < COUNT_OF(texts[0]); i++) {
        if (texts[0][i] != texts[1][i]) {
#if defined(FLOATX_BF16) && ON_GPU && !defined(CUDA_ON_CPU) // products of other shapes add up in another order: a rounding may tip the draw
            if (i > 0) {
                printf("ok  decoding with a cache gives %zu tokens of decoding without, then rounding parts them\n", i);
                return true;
            }
#endif
            return fail(error, "selfcheck: with a cache token %zu is %d, without it is %d", i, texts[1][i], texts[0][i]);
        }
    }
    printf("ok  decoding with a cache gives the text of decoding without (%zu tokens, past the end of the context)\n", COUNT_OF(texts[0]));
    return true;
}

static bool selfcheck_overfit(Options* o, Error* error) {
    static Trainer t;
    double losses[60];
    o->overfit = true;
    o->steps = 60;
    bool good = selfcheck_start(&t, o, false, error) && selfcheck_steps(&t, 60, losses, error);
    trainer_free(&t);
    if (!good) { return false; }
    if (!(losses[59] < 0.5 * losses[0])) {
        return fail(error, "selfcheck: one batch is not learned: loss %f at first, %f after 60 steps", losses[0], losses[59]);
    }
    printf("ok  one batch is learned: loss %.4f, after 60 steps %.4f\n", losses[0], losses[59]);
    return true;
}

bool command_selfcheck(const Options* user, Error* error) {
    static Options o;
    Error ignored;
    char folder[] = "/tmp/train_gpt_selfcheck_XXXXXX", path[128];
    if (!mkdtemp(folder)) { return fail(error, "cannot make a folder in /tmp: %s", strerror(errno)); }
    machine_print(stdout);
    bool good = selfcheck_data(folder, (uint64_t)user->seed, error) && selfcheck_options(&o, folder, user, error) && selfcheck_resume(&o, error) &&
                selfcheck_decode(&o, error) && selfcheck_overfit(&o, error);
    snprintf(path, sizeof(path), "%s/out/step_%08d", folder, SELFCHECK_STEPS);
    checkpoint_remove(path, &ignored); // removes a folder of files: from the inside out
    snprintf(path, sizeof(path), "%s/out", folder);
    checkpoint_remove(path, &ignored);
    checkpoint_remove(folder, &ignored);
    if (good) { printf("selfcheck passed\n"); }
    return good;
}
