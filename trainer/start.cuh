// start.cuh - where a run begins: a new model, a model file or a checkpoint; and its output folder. Included by train_gpt.cu.
#pragma once

// The shape of the model that --model or, when resuming, the checkpoint asks for; file: where weights come from, "" = random ones.
static bool train_find_model(const Options* o, const Tokenizer* tokenizer, char* folder, uint64_t* step, char* file, ModelHeader* model,
                             Error* error) {
    Error notice;
    int version, vocab = o->vocab_size ? o->vocab_size : (int)tokenizer->vocab_size;
    folder[0] = file[0] = 0;
    if (o->resume) {
        if (!checkpoint_find_latest(o->output, folder, step, &notice, error)) { return false; }
        if (notice.text[0]) { fprintf(stderr, "notice: %s\n", notice.text); }
        if (!folder[0]) { fprintf(stderr, "notice: %s holds no checkpoint yet: starting a new run\n", o->output); }
    }
    if (folder[0]) {
        snprintf(file, PATH_MAX + 64, "%s/model_%08" PRIu64 ".bin", folder, *step);
    } else if (model_spec_is_new(o->model)) {
        return model_spec_parse(o->model, vocab, model, error);
    } else if (!state_find_model(o->model, file, &notice, error)) {
        return false;
    }
    if (!model_file_read_header(file, model, &version, error)) { return false; }
    ModelHeader asked;
    if (folder[0] && option_given(o, "model") && model_spec_is_new(o->model)) {
        if (!model_spec_parse(o->model, vocab, &asked, error)) { return false; }
        if (memcmp(&asked, model, sizeof(asked)) != 0) {
            return fail(error, "%s holds a model of another shape than --model %s; leave --model out to resume it, or give another --output",
                        folder, o->model);
        }
    }
    if (vocab && vocab > model->vocab_size) { return fail(error, "%s has %d tokens, the vocabulary %d", file, model->vocab_size, vocab); }
    return true;
}

// Makes and locks the output folder, before anything is read from it: another run may be saving there.
static bool train_lock_output(const Options* o, Run* r, Error* error) {
    return !o->output[0] || (folder_make(o->output, error) && run_lock_take(&r->lock, o->output, error));
}

// Where a run begins: found by rank 0, told to all.
typedef struct {
    char folder[PATH_MAX], file[PATH_MAX + 64]; // a checkpoint to go on from, a model file to start from; "" = none
    uint64_t step;
    ModelHeader model;
} TrainStart;

static bool train_find_start(Trainer* t, Run* r, TrainStart* start, Error* error) {
    const Options* o = t->options;
    bool good = true;
    memset(start, 0, sizeof(*start));
    if (t->comm->rank == 0) { good = train_lock_output(o, r, error) && tokenizer_find(&t->tokenizer, o->tokenizer, o->train_data, error); }
    if (good && t->comm->rank == 0) { good = train_find_model(o, &t->tokenizer, start->folder, &start->step, start->file, &start->model, error); }
    if (!comm_agree(t->comm, good, error)) { return false; }
    comm_share(t->comm, start, sizeof(*start));
    return !o->output[0] || state_output_shared(t->comm, o->output, error);
}

static bool train_load(Trainer* t, const TrainStart* start, Error* error) {
    Error notice = {{0}};
    bool talks = t->comm->rank == 0;
    if (start->folder[0]) {
        if (!state_load(t, start->folder, start->step, &notice, error)) { return false; }
        printf("resuming from %s: step %" PRId64 "\n", start->folder, t->step);
    } else if (start->file[0]) {
        if (!state_load_weights(t, start->file, &notice, error)) { return false; }
        trainer_reset_masters(t);
        printf("weights from %s\n", start->file);
    } else {
        gpt_init(&t->gpt, (uint64_t)t->options->seed);
        trainer_reset_masters(t);
    }
    if (notice.text[0] && talks) { fprintf(stderr, "notice: %s\n", notice.text); }
    return true;
}

// A new run among the checkpoints of another would lose its own: those with the highest steps are kept, and resumed.
static bool train_refuse_mixture(const Options* o, Error* error) {
    CheckpointList list;
    if (!checkpoint_scan(o->output, &list, error)) { return false; }
    size_t count = list.count;
    uint64_t newest = count ? list.steps[0] : 0;
    checkpoint_list_free(&list);
    return count == 0 || fail(error, "%s holds checkpoints of an earlier run, up to step %" PRIu64 "%s, or give another --output", o->output, newest,
                              o->resume ? ", and none is whole: remove them" : ": go on with it by --resume on");
}

// How many of the checkpoints that will be kept are there already.
static int train_checkpoints_kept(const char* output, int keep) {
    CheckpointList list;
    Error ignored;
    if (!checkpoint_list(output, &list, &ignored)) { return 0; }
    int count = list.count < (size_t)keep ? (int)list.count : keep;
    checkpoint_list_free(&list);
    return count;
}

// A resumed run must go on with the vocabulary it began with, or its model's words change their meaning.
static bool train_same_tokenizer(const Trainer* t, Error* error) {
    char path[OPTION_TEXT_SIZE + 16];
    Tokenizer before;
    snprintf(path, sizeof(path), "%s/tokenizer.bin", t->options->output);
    if (!t->tokenizer.vocab_size || access(path, R_OK) != 0) { return true; }
    memset(&before, 0, sizeof(before));
    if (!tokenizer_open(&before, path, error)) { return false; }
    bool same = before.vocab_size == t->tokenizer.vocab_size && before.bytes.count == t->tokenizer.bytes.count &&
                memcmp(before.bytes.data, t->tokenizer.bytes.data, before.bytes.count) == 0;
    tokenizer_free(&before);
    return same || fail(error, "%s is another tokenizer than that of the data; resume with the data of the first run, or give another --output",
                        path);
}

// Sees that the disk is large enough, keeps the tokenizer in the output folder, and opens the logs.
static bool train_open_output(Trainer* t, Run* r, bool resumed, Error* error) {
    const Options* o = t->options;
    if (o->output[0]) {
        char path[OPTION_TEXT_SIZE + 16], purpose[96];
        uint64_t one = state_bytes(t);
        int keep = o->keep > 0 ? o->keep : 1;
        if (!resumed && !train_refuse_mixture(o, error)) { return false; }
        int missing = keep - train_checkpoints_kept(o->output, keep);
        snprintf(purpose, sizeof(purpose), "%d more checkpoint(s) and one being written", missing);
        if (!disk_space_check(o->output, one * (uint64_t)(missing + 1), purpose, error)) { return false; }
        if (resumed && !train_same_tokenizer(t, error)) { return false; }
        snprintf(path, sizeof(path), "%s/tokenizer.bin", o->output);
        if (t->tokenizer.vocab_size && !tokenizer_write(&t->tokenizer, path, error)) { return false; }
        run_stop_file_remove(o->output);
    }
    LogNote notes[] = {{"device", machine_device()}, {"gemm", gemm_description()}};
    return log_open(&r->log, o, resumed ? t->step : -1, notes, COUNT_OF(notes), error);
}
