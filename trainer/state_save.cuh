// state_save.cuh - the writing half of state.cuh, by which it is included. Every rank writes the units that it owns, at their places in the
// same two files; rank 0 makes the hidden folder, writes headers and padding, seals and names the folder once all have said that their
// part is on the disk. The files are those that one rank would write, to the byte.
#pragma once

typedef struct {
    CheckpointWriter folder;
    ModelWriter model;
    SafeWriter tensors; // each array's tensors in table order, then the two windows
} StateWriter;

// How the other ranks find what rank 0 made.
typedef struct {
    char folder[64]; // the hidden one, inside --output
    int64_t process;
    bool made;
} StateAddress;

// A value an element has the shape of its tensor; anything else is a row.
static void state_declare_tensor(SafeWriter* w, const Trainer* t, const StateTensor* s) {
    const TensorSpec* spec = &t->gpt.table.tensors[s->tensor];
    const uint64_t shape[3] = {spec->layers, spec->real_rows, spec->cols};
    if (s->count == state_elements(spec) && s->type != SAFE_U8) {
        safe_writer_tensor(w, s->name, s->type, 3, shape);
    } else {
        safe_writer_tensor(w, s->name, s->type, 1, &s->count);
    }
}

static void state_declare_kappa(SafeWriter* w, const Trainer* t) {
    const Kappa* k = &t->optimizer.kappa;
    char name[64];
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        if (t->gpt.table.tensors[i].role != ROLE_MATRIX) { continue; }
        snprintf(name, sizeof(name), "kappa.width.%s", t->gpt.table.tensors[i].name);
        safe_writer_number(w, name, (uint64_t)k->width[i]);
    }
    safe_writer_number(w, "kappa.spikes", (uint64_t)k->spikes);
    safe_writer_number(w, "residuals_lost", (uint64_t)t->residuals_lost);
}

static void state_declare(SafeWriter* w, const Trainer* t) {
    static StateTensor list[STATE_TENSORS_MAX];
    char format[32];
    int count = state_tensors(t, list);
    bool kappa = t->optimizer.config.kind == OPTIMIZER_KAPPA;
    const uint64_t units = t->gpt.table.unit_count;
    safe_writer_init(w);
    for (int i = 0; i < count; i++) { state_declare_tensor(w, t, &list[i]); }
    if (kappa) {
        safe_writer_tensor(w, "kappa.rms", SAFE_F64, 1, &units);
        state_declare_kappa(w, t);
    }
    const uint64_t window = OUTLIER_WINDOW;
    safe_writer_tensor(w, "outlier.loss", SAFE_F64, 1, &window);
    safe_writer_tensor(w, "outlier.norm", SAFE_F64, 1, &window);
    safe_writer_text(w, "format", STATE_FORMAT);
    choice_word(STATE_FORMAT_WORDS, t->options->state_format, format, sizeof(format));
    safe_writer_text(w, "optimizer", state_optimizer_name(t));
    safe_writer_text(w, "state_format", format);
    safe_writer_text(w, "weights", FLOATX_NAME);
    safe_writer_number(w, "step", (uint64_t)t->step);
    safe_writer_number(w, "sequence", t->sequence);
    safe_writer_number(w, "sequence_length", (uint64_t)t->T);
    safe_writer_number(w, "skipped", (uint64_t)t->skipped);
    safe_writer_number(w, "outlier_values", (uint64_t)t->loss_outlier.seen);
}

static void state_model_path(const Trainer* t, const StateWriter* w, char* path) {
    char name[64];
    snprintf(name, sizeof(name), "model_%08" PRId64 ".bin", t->step);
    checkpoint_path(&w->folder, name, path);
}

// Rank 0: the hidden folder and its files.
static bool state_create(const Trainer* t, StateWriter* w, const char* out, Error* error) {
    char path[PATH_MAX];
    if (!checkpoint_begin(&w->folder, out, (uint64_t)t->step, error)) { return false; }
    state_model_path(t, w, path);
    if (!model_writer_create(&w->model, path, &t->gpt.config, MODEL_FLOATX, error)) { return false; }
    checkpoint_path(&w->folder, "state.safetensors", path);
    return safe_writer_create(&w->tensors, path, error);
}

// Another rank: the same files.
static bool state_join(const Trainer* t, StateWriter* w, const char* out, const StateAddress* at, Error* error) {
    char path[PATH_MAX];
    if (!checkpoint_join(&w->folder, out, (uint64_t)t->step, at->folder, error)) { return false; }
    state_model_path(t, w, path);
    if (!model_writer_join(&w->model, path, &t->gpt.config, MODEL_FLOATX, (long)at->process, error)) { return false; }
    checkpoint_path(&w->folder, "state.safetensors", path);
    return safe_writer_join(&w->tensors, path, (long)at->process, error);
}

static bool state_open(const Trainer* t, StateWriter* w, const char* out, Error* error) {
    const Comm* c = t->comm;
    StateAddress mine;
    memset(&mine, 0, sizeof(mine));
    file_part_init(&w->model.part);
    state_declare(&w->tensors, t);
    bool good = c->rank > 0 || state_create(t, w, out, error);
    if (c->rank == 0 && good) {
        snprintf(mine.folder, sizeof(mine.folder), "%s", strrchr(w->folder.folder, '/') + 1);
        mine.process = (int64_t)getpid();
        mine.made = true;
    }
    StateAddress* all = (StateAddress*)need(malloc((size_t)c->size * sizeof(mine)));
    comm_gather_host(c, &mine, sizeof(mine), all, TRAFFIC_CONTROL);
    if (c->rank > 0) {
        checkpoint_writer_init(&w->folder, (uint64_t)t->step);
        good = !all[0].made || state_join(t, w, out, &all[0], error); // where rank 0 failed, it says so
    }
    free(all);
    return comm_agree(c, good, error);
}

static bool state_write_weights(const Trainer* t, StateWriter* w, floatX* piece, Error* error) {
    const ParamTable* table = &t->gpt.table;
    StateSlice s = {0, 0, 0, 0, 0};
    while (state_slice_next(t, STATE_OWNED, &s)) {
        const floatX* from = zero_unit_weights(&t->zero, s.unit);
        for (size_t at = 0; at < s.count; at += STATE_PIECE) {
            size_t n = min_size(STATE_PIECE, s.count - at);
            device_download(piece, from + at, n * sizeof(floatX));
            if (!model_writer_put(&w->model, table->units[s.unit].offset + at, piece, MODEL_FLOATX, n, error)) { return false; }
        }
    }
    return true;
}

// Rows of padding, which belong to no unit.
static bool state_write_padding(const Trainer* t, StateWriter* w, floatX* piece, Error* error) {
    memset(piece, 0, STATE_PIECE * sizeof(floatX));
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        const TensorSpec* s = &t->gpt.table.tensors[i];
        size_t count = (s->rows - s->real_rows) * s->cols;
        for (size_t layer = 0; count > 0 && layer < s->layers; layer++) {
            size_t first = s->offset + (layer * s->rows + s->real_rows) * s->cols;
            for (size_t at = 0; at < count; at += STATE_PIECE) {
                if (!model_writer_put(&w->model, first + at, piece, MODEL_FLOATX, min_size(STATE_PIECE, count - at), error)) { return false; }
            }
        }
    }
    return true;
}

// Elements at..at+n-1 of an owned unit's part; split masters are put together.
static void state_fetch(const Trainer* t, const StateTensor* s, size_t u, size_t at, size_t n, char* piece, char* other) {
    size_t size = safe_types[s->type].bytes;
    bool narrow = s->kind == STATE_RESIDUAL && sizeof(floatX) == 2;
    if (!narrow && (s->kind != STATE_MASTER || !t->master_low)) {
        device_download(piece, state_unit_place(t, s, u) + at * size, n * size);
        return;
    }
#ifdef FLOATX_BF16
    if (narrow) {
        floatX* values = (floatX*)(void*)other;
        device_download(values, zero_unit_gradient(&t->zero, u) + at, n * sizeof(floatX));
        for (size_t i = 0; i < n; i++) { ((float*)(void*)piece)[i] = load(values + i); }
        return;
    }
    uint16_t *low = (uint16_t*)(void*)other, *high = low + STATE_PIECE;
    device_download(low, t->master_low + t->zero.place[u] + at, n * sizeof(uint16_t));
    device_download(high, zero_unit_weights(&t->zero, u) + at, n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) { ((float*)(void*)piece)[i] = weight_split_load(high[i], low[i]); }
#else
    (void)other;
#endif
}

static bool state_write_tensor(const Trainer* t, StateWriter* w, const StateTensor* s, int index, char* piece, char* other, Error* error) {
    const ParamTable* table = &t->gpt.table;
    size_t size = safe_types[s->type].bytes, first = 0, n;
    for (size_t u = 0; u < table->unit_count; u++) {
        if (table->units[u].tensor != s->tensor) { continue; }
        size_t count = state_unit_count(t, s, u);
        for (size_t at = 0; zero_owns(&t->zero, u) && at < count; at += n) {
            n = min_size(STATE_PIECE, count - at);
            state_fetch(t, s, u, at, n, piece, other);
            if (!safe_writer_put(&w->tensors, index, (first + at) * size, piece, n * size, error)) { return false; }
        }
        first += count;
    }
    return true;
}

static bool state_write_arrays(const Trainer* t, StateWriter* w, char* piece, Error* error) {
    static StateTensor list[STATE_TENSORS_MAX];
    int count = state_tensors(t, list);
    char* other = (char*)host_alloc(STATE_PIECE * sizeof(float));
    bool good = true;
    for (int i = 0; good && i < count; i++) { good = state_write_tensor(t, w, &list[i], i, piece, other, error); }
    host_free(other);
    return good;
}

// What this rank answers for; on the disk when this returns true.
static bool state_write_part(const Trainer* t, StateWriter* w, Error* error) {
    void* piece = host_alloc(STATE_PIECE * sizeof(float));
    int windows = (int)w->tensors.table.count - 2;
    bool first = t->comm->rank == 0;
    bool good = state_write_weights(t, w, (floatX*)piece, error) && (!first || state_write_padding(t, w, (floatX*)piece, error)) &&
                state_write_arrays(t, w, (char*)piece, error);
    host_free(piece);
    if (good && first) {
        good = safe_writer_put(&w->tensors, windows, 0, t->loss_outlier.values, sizeof(t->loss_outlier.values), error) &&
               safe_writer_put(&w->tensors, windows + 1, 0, t->norm_outlier.values, sizeof(t->norm_outlier.values), error);
    }
    if (good && first && t->optimizer.config.kind == OPTIMIZER_KAPPA) {
        good = safe_writer_put(&w->tensors, windows - 1, 0, t->optimizer.kappa.rms, t->gpt.table.unit_count * sizeof(double), error);
    }
    if (t->comm->size == 1) { return good; } // the commit syncs
    return good && model_writer_sync(&w->model, error) && safe_writer_sync(&w->tensors, error);
}

// Rank 0 learns what the others wrote.
static void state_gather_sums(const Trainer* t, StateWriter* w) {
    const Comm* c = t->comm;
    size_t count = 1 + w->tensors.table.count;
    PartSum *mine = (PartSum*)need(malloc(count * sizeof(PartSum))), *all = (PartSum*)need(malloc((size_t)c->size * count * sizeof(PartSum)));
    mine[0] = w->model.sum;
    for (size_t i = 1; i < count; i++) { mine[i] = w->tensors.table.tensors[i - 1].sum; }
    comm_gather_host(c, mine, count * sizeof(PartSum), all, TRAFFIC_CONTROL);
    for (int r = 1; c->rank == 0 && r < c->size; r++) {
        const PartSum* sums = all + (size_t)r * count;
        model_writer_add(&w->model, sums[0]);
        for (size_t i = 1; i < count; i++) { safe_writer_add(&w->tensors, (int)i - 1, sums[i]); }
    }
    free(mine);
    free(all);
}

// The options, below comment lines that say what wrote them.
static bool state_write_config(const Trainer* t, const char* path, Error* error) {
    char head[1024];
    snprintf(head, sizeof(head), "# train_gpt %s, step %" PRId64 "\n# compiler: %s\n# build: %s\n# device: %s\n# matrix products: %s\n",
             provenance_git(), t->step,
             provenance_compiler(), provenance_flags(), machine_device(), gemm_description());
    return options_save(t->options, head, path, error);
}

// Rank 0: headers, options, seal and name.
static bool state_commit(const Trainer* t, StateWriter* w, Error* error) {
    char path[PATH_MAX];
    if (!model_writer_commit(&w->model, error) || !safe_writer_commit(&w->tensors, error)) { return false; }
    checkpoint_record(&w->folder, &w->model.part.file);
    checkpoint_record(&w->folder, &w->tensors.part.file);
    checkpoint_path(&w->folder, "config.txt", path);
    return state_write_config(t, path, error) && checkpoint_commit(&w->folder, error);
}

// Bytes of one checkpoint of this run.
uint64_t state_bytes(const Trainer* t) {
    static StateTensor list[STATE_TENSORS_MAX];
    int count = state_tensors(t, list);
    uint64_t bytes = t->gpt.table.unit_count * sizeof(double);
    for (int i = 0; i < count; i++) { bytes += list[i].count * safe_types[list[i].type].bytes; }
    return checkpoint_bytes(model_file_bytes(&t->gpt.config, MODEL_FLOATX), bytes, (uint64_t)count);
}

// Fills what state_open opened, where `good`, and names it; else removes it.
static bool state_finish(const Trainer* t, StateWriter* w, bool good, Error* error) {
    const Comm* c = t->comm;
    good = good && comm_agree(c, state_write_part(t, w, error), error);
    if (good) {
        state_gather_sums(t, w);
        good = comm_agree(c, c->rank > 0 || state_commit(t, w, error), error);
    }
    model_writer_abandon(&w->model); // these close files that another rank commits; what is committed is not touched
    safe_writer_abandon(&w->tensors);
    if (!good) { checkpoint_abandon(&w->folder, error); }
    return good;
}

// Saves the state after t->step updates as out/step_%08d; if it fails anywhere, earlier checkpoints are untouched and every rank gets the
// same line. Collective.
bool state_save(const Trainer* t, const char* out, Error* error) {
    StateWriter w;
    Error reason; // what is saved is saved, even if an old one cannot be removed
    error->text[0] = 0;
    comm_sync(t->comm); // downloads below wait for the device alone
    if (!state_finish(t, &w, state_open(t, &w, out, error), error)) { return false; }
    if (t->comm->rank == 0 && !checkpoint_prune(out, t->options->keep, (uint64_t)t->options->major_every, (uint64_t)t->step, &reason)) {
        fprintf(stderr, "notice: %s\n", reason.text);
    }
    return true;
}

// Whether all ranks see the folder of checkpoints, which rank 0 has made: to be asked before hours of training, not after. Collective.
bool state_output_shared(const Comm* c, const char* out, Error* error) {
    char path[PATH_MAX];
    int64_t process = (int64_t)getpid(), *all = (int64_t*)need(malloc((size_t)c->size * sizeof(int64_t)));
    error->text[0] = 0;
    comm_gather_host(c, &process, sizeof(process), all, TRAFFIC_CONTROL);
    bool good = checkpoint_name(path, error, "%s/.step_shared.tmp.%" PRId64, out, all[0]); // what a dead run leaves of it, a save removes
    free(all);
    if (good && c->rank == 0) { good = mkdir(path, 0777) == 0 || errno == EEXIST || fail(error, "cannot make folder %s: %s", path, strerror(errno)); }
    good = comm_agree(c, good, error);
    if (good) { good = comm_agree(c, c->rank == 0 || checkpoint_sees(path, error), error); }
    if (c->rank == 0) { rmdir(path); }
    return good;
}
