// state.cuh - a run's state in and out of a checkpoint folder: model_%08d.bin (weights, llm.c's format), state.safetensors (optimizer
// slots "adamw.m.qkvw", fp32 masters "master.qkvw", windows of the outlier detectors, and as metadata step and data position),
// config.txt (all options). Tensors are whole and unpadded: nothing depends on how the run was cut up.
// Included by train_gpt.cu after the trainer.
#pragma once

#define STATE_FORMAT "train_gpt 1"
#define STATE_PIECE ((size_t)4 << 20) // floats moved at a time

// One array of the packed layout (optimizer slot or masters) under "prefix.tensor".
typedef struct {
    char prefix[24];
    float* packed;
} StateArray;

static int state_arrays(const Trainer* t, StateArray* arrays) {
    int count = 0;
    for (int i = 0; i < adamw_info.slots; i++) {
        snprintf(arrays[count].prefix, sizeof(arrays[count].prefix), "%s.%s", adamw_info.name, adamw_info.slot_names[i]);
        arrays[count++].packed = t->slots[i];
    }
    if (t->master) {
        strcpy(arrays[count].prefix, "master");
        arrays[count++].packed = t->master;
    }
    return count;
}

// Where a tensor begins in the packed layout; tensors follow each other there in table order, without padding.
static size_t packed_elements(const TensorSpec* s) { return s->layers * s->real_rows * s->cols; }

static void state_declare(SafeWriter* w, const Trainer* t, const StateArray* arrays, int count) {
    for (int a = 0; a < count; a++) {
        for (int i = 0; i < t->gpt.table.tensor_count; i++) {
            const TensorSpec* s = &t->gpt.table.tensors[i];
            char name[128];
            snprintf(name, sizeof(name), "%s.%s", arrays[a].prefix, s->name);
            const uint64_t shape[3] = {s->layers, s->real_rows, s->cols};
            safe_writer_tensor(w, name, SAFE_F32, 3, shape);
        }
    }
    const uint64_t window = OUTLIER_WINDOW;
    safe_writer_tensor(w, "outlier.loss", SAFE_F64, 1, &window);
    safe_writer_tensor(w, "outlier.norm", SAFE_F64, 1, &window);
    safe_writer_text(w, "format", STATE_FORMAT);
    safe_writer_text(w, "optimizer", adamw_info.name);
    safe_writer_text(w, "weights", FLOATX_NAME);
    safe_writer_number(w, "step", (uint64_t)t->step);
    safe_writer_number(w, "sequence", t->sequence);
    safe_writer_number(w, "sequence_length", (uint64_t)t->T);
    safe_writer_number(w, "skipped", (uint64_t)t->skipped);
    safe_writer_number(w, "outlier_values", (uint64_t)t->loss_outlier.seen);
}

static bool state_write_tensors(const Trainer* t, const char* path, FileWriter* record, Error* error) {
    StateArray arrays[OPTIMIZER_MAX_SLOTS + 1];
    int count = state_arrays(t, arrays), index = 0;
    SafeWriter w;
    safe_writer_init(&w);
    state_declare(&w, t, arrays, count);
    if (!safe_writer_create(&w, path, error)) { return false; }
    float* piece = (float*)host_alloc(STATE_PIECE * sizeof(float));
    bool good = true;
    for (int a = 0; good && a < count; a++) {
        const float* from = arrays[a].packed;
        for (int i = 0; good && i < t->gpt.table.tensor_count; i++, index++) {
            size_t elements = packed_elements(&t->gpt.table.tensors[i]);
            for (size_t at = 0; good && at < elements; at += STATE_PIECE) {
                size_t n = min_size(STATE_PIECE, elements - at);
                device_download(piece, from + at, n * sizeof(float));
                good = safe_writer_put(&w, index, at * sizeof(float), piece, n * sizeof(float), error);
            }
            from += elements;
        }
    }
    host_free(piece);
    good = good && safe_writer_put(&w, index, 0, t->loss_outlier.values, sizeof(t->loss_outlier.values), error) &&
           safe_writer_put(&w, index + 1, 0, t->norm_outlier.values, sizeof(t->norm_outlier.values), error) && safe_writer_commit(&w, error);
    if (good) { *record = w.file; }
    return good;
}

static bool state_write_model(const Trainer* t, const char* path, FileWriter* record, Error* error) {
    ModelWriter w;
    if (!model_writer_create(&w, path, &t->gpt.config, MODEL_FLOATX, error)) { return false; }
    floatX* piece = (floatX*)host_alloc(STATE_PIECE * sizeof(floatX));
    bool good = true;
    for (size_t at = 0; good && at < t->gpt.table.elements; at += STATE_PIECE) {
        size_t n = min_size(STATE_PIECE, t->gpt.table.elements - at);
        device_download(piece, t->gpt.params + at, n * sizeof(floatX));
        good = model_writer_add(&w, piece, MODEL_FLOATX, n, error);
    }
    host_free(piece);
    good = good && model_writer_commit(&w, error);
    if (good) { *record = w.file; }
    return good;
}

// The options, below comment lines that say what wrote them.
static bool state_write_config(const Trainer* t, const char* path, Error* error) {
    char head[1024];
    snprintf(head, sizeof(head), "# train_gpt %s, step %" PRId64 "\n# compiler: %s\n# build: %s\n# device: %s\n# matrix products: %s\n",
             provenance_git(), t->step,
             provenance_compiler(), provenance_flags(), machine_device(), gemm_description());
    return options_save(t->options, head, path, error);
}

// Bytes of one checkpoint of this run.
uint64_t state_bytes(const Trainer* t) {
    StateArray arrays[OPTIMIZER_MAX_SLOTS + 1];
    uint64_t count = (uint64_t)state_arrays(t, arrays);
    return checkpoint_bytes(model_file_bytes(&t->gpt.config, MODEL_FLOATX), count * t->gpt.table.packed * sizeof(float), count * GPT_TENSORS);
}

// Saves the state after t->step updates as out/step_%08d; earlier checkpoints are untouched if it fails.
bool state_save(const Trainer* t, const char* out, Error* error) {
    CheckpointWriter writer;
    FileWriter model, tensors;
    char path[PATH_MAX], name[64];
    error->text[0] = 0;
    snprintf(name, sizeof(name), "model_%08" PRId64 ".bin", t->step);
    bool good = checkpoint_begin(&writer, out, (uint64_t)t->step, error);
    if (good) {
        checkpoint_path(&writer, name, path);
        good = state_write_model(t, path, &model, error);
    }
    if (good) {
        checkpoint_record(&writer, &model);
        checkpoint_path(&writer, "state.safetensors", path);
        good = state_write_tensors(t, path, &tensors, error);
    }
    if (good) {
        checkpoint_record(&writer, &tensors);
        checkpoint_path(&writer, "config.txt", path);
        good = state_write_config(t, path, error);
    }
    if (!good) {
        checkpoint_abandon(&writer, error);
        return false;
    }
    if (!checkpoint_commit(&writer, error)) { return false; }
    Error reason; // what is saved is saved, even if an old one cannot be removed
    if (!checkpoint_prune(out, t->options->keep, (uint64_t)t->options->major_every, (uint64_t)t->step, &reason)) {
        fprintf(stderr, "notice: %s\n", reason.text);
    }
    return true;
}

// ---- reading ----

// Weights from a model file of either version into the device; shape must be that of the model.
bool state_load_model(Gpt* g, const char* path, Error* notice, Error* error) {
    ModelReader r;
    notice->text[0] = 0;
    if (!model_reader_open(&r, path, error)) { return false; }
    bool good = memcmp(&r.header, &g->config, sizeof(g->config)) == 0 || fail(error, "%s holds a model of another shape", path);
    floatX* piece = (floatX*)host_alloc(STATE_PIECE * sizeof(floatX));
    for (size_t at = 0; good && at < g->table.elements; at += STATE_PIECE) {
        size_t n = min_size(STATE_PIECE, g->table.elements - at);
        good = model_reader_read(&r, at, n, piece, MODEL_FLOATX, error);
        if (good) {
            device_upload(g->params + at, piece, n * sizeof(floatX));
            device_sync();
        }
    }
    if (good) { model_reader_notice(&r, notice); }
    host_free(piece);
    model_reader_close(&r);
    return good;
}

// The tensor "prefix.NAME", whole and unpadded, to be freed by the caller; NULL on failure.
static float* state_read_tensor(const SafeReader* r, const char* prefix, const TensorSpec* s, Error* error) {
    char name[128];
    snprintf(name, sizeof(name), "%s.%s", prefix, s->name);
    float* values = (float*)need(malloc(packed_elements(s) * sizeof(float)));
    if (safe_read(r, name, SAFE_F32, packed_elements(s), values, error)) { return values; }
    free(values);
    return NULL;
}

static bool state_read_array(const Trainer* t, const SafeReader* r, const StateArray* array, Error* error) {
    float* to = array->packed;
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        const TensorSpec* s = &t->gpt.table.tensors[i];
        float* values = state_read_tensor(r, array->prefix, s, error);
        if (!values) { return false; }
        device_upload(to, values, packed_elements(s) * sizeof(float));
        device_sync();
        free(values);
        to += packed_elements(s);
    }
    return true;
}

// A run that keeps no masters goes on from those of a bf16 run: they are what its weights were rounded from.
static bool state_read_masters_as_weights(const Trainer* t, const SafeReader* r, Error* error) {
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        const TensorSpec* s = &t->gpt.table.tensors[i];
        size_t elements = packed_elements(s);
        float* values = state_read_tensor(r, "master", s, error);
        if (!values) { return false; }
        floatX* weights = (floatX*)need(malloc(elements * sizeof(floatX)));
        for (size_t k = 0; k < elements; k++) { store(weights + k, values[k]); }
        device_upload(t->gpt.params + s->offset, weights, elements * sizeof(floatX));
        device_sync();
        free(values);
        free(weights);
    }
    return true;
}

static bool state_read_scalars(Trainer* t, const SafeReader* r, Error* error) {
    uint64_t step, sequence, length, skipped, seen;
    const char *format = safe_find_text(r, "format"), *optimizer = safe_find_text(r, "optimizer");
    if (!format || strcmp(format, STATE_FORMAT) != 0) {
        return fail(error, "%s: expected format \"%s\", found \"%s\"", r->file.path, STATE_FORMAT, format ? format : "");
    }
    if (!optimizer || strcmp(optimizer, adamw_info.name) != 0) {
        return fail(error, "%s was written by optimizer %s; this run uses %s", r->file.path, optimizer ? optimizer : "unknown", adamw_info.name);
    }
    if (!safe_find_number(r, "step", &step, error) || !safe_find_number(r, "sequence", &sequence, error) ||
        !safe_find_number(r, "sequence_length", &length, error) || !safe_find_number(r, "skipped", &skipped, error) ||
        !safe_find_number(r, "outlier_values", &seen, error)) {
        return false;
    }
    if (length != (uint64_t)t->T) {
        return fail(error, "%s was written with --seq-len %" PRIu64 ", this run has %d: the position in the data would have no meaning",
                    r->file.path, length, t->T);
    }
    t->step = (int64_t)step;
    t->sequence = sequence;
    t->skipped = (int64_t)skipped;
    t->loss_outlier.seen = t->norm_outlier.seen = (int64_t)seen;
    return safe_read(r, "outlier.loss", SAFE_F64, OUTLIER_WINDOW, t->loss_outlier.values, error) &&
           safe_read(r, "outlier.norm", SAFE_F64, OUTLIER_WINDOW, t->norm_outlier.values, error);
}

// Everything of a checkpoint folder into a trainer that was created for its model.
bool state_load(Trainer* t, const char* folder, uint64_t step, Error* notice, Error* error) {
    char path[PATH_MAX + 64];
    StateArray arrays[OPTIMIZER_MAX_SLOTS + 1];
    int count = state_arrays(t, arrays);
    SafeReader r;
    snprintf(path, sizeof(path), "%s/model_%08" PRIu64 ".bin", folder, step);
    if (!state_load_model(&t->gpt, path, notice, error)) { return false; }
    snprintf(path, sizeof(path), "%s/state.safetensors", folder);
    if (!safe_open(&r, path, error)) { return false; }
    bool good = state_read_scalars(t, &r, error);
    for (int a = 0; good && a < count; a++) {
        if (arrays[a].packed == t->master && !safe_find(&r, "master.wte")) { // written without masters: start them from the weights
            trainer_reset_masters(t);
        } else {
            good = state_read_array(t, &r, &arrays[a], error);
        }
    }
    if (good && !t->master && safe_find(&r, "master.wte")) { good = state_read_masters_as_weights(t, &r, error); }
    safe_close(&r);
    return good;
}

// The model file behind --model or --from: the file itself, a checkpoint folder's, or the newest checkpoint's of an output folder.
bool state_find_model(const char* path, char* file, Error* notice, Error* error) {
    struct stat status;
    char folder[PATH_MAX];
    uint64_t step;
    notice->text[0] = 0;
    if (stat(path, &status) != 0) {
        return fail(error, "%s: %s; expected a model file, a checkpoint or the output folder of a run", path, strerror(errno));
    }
    if (!S_ISDIR(status.st_mode)) {
        snprintf(file, PATH_MAX, "%s", path);
        return true;
    }
    snprintf(folder, sizeof(folder), "%s", path);
    for (size_t n = strlen(folder); n > 1 && folder[n - 1] == '/'; n--) { folder[n - 1] = 0; }
    const char* name = strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder;
    if (checkpoint_parse_step(name, &step)) {
        if (!checkpoint_verify(folder, error)) { return false; }
    } else {
        if (!checkpoint_find_latest(path, folder, &step, notice, error)) { return false; }
        if (!folder[0]) { return fail(error, "%s holds no whole checkpoint%s%s", path, notice->text[0] ? ": " : "", notice->text); }
    }
    return (size_t)snprintf(file, PATH_MAX, "%s/model_%08" PRIu64 ".bin", folder, step) < PATH_MAX || fail(error, "%s: the path is too long", path);
}
