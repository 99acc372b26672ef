// state.cuh - a run's state in and out of a checkpoint folder: model_%08d.bin (weights, llm.c's format), state.safetensors (the optimizer's
// arrays "adamw.m.qkvw", what it left in the gradient buffer "kappa.residual.qkvw", fp32 masters "master.qkvw", windows of the outlier
// detectors, and as metadata step and data position), config.txt (all options). Tensors are whole and unpadded, a tensor's units in their
// order: nothing depends on how the run was cut up.
// Every rank writes the units that it owns (state_save.cuh) and reads those that it keeps, at their places in the same files.
// Included by train_gpt.cu after the trainer.
#pragma once

#define STATE_FORMAT "train_gpt 1"
#define STATE_PIECE ((size_t)1 << 20) // values moved at a time

// ---------------------------------------------------------------------------------------------------------------------------------
// What this rank moves

enum { STATE_OWNED, STATE_HELD, STATE_WEIGHTS }; // units to save; those with optimizer state here; those with weights here

// Units of one tensor that follow each other, hence lie side by side in the files and in this rank's memory.
typedef struct {
    size_t unit, next; // the first, and the one after the last
    int tensor;
    size_t first;      // element of the tensor, counted over all layers without padding
    size_t count;
} StateSlice;

static bool state_moves(const Trainer* t, int which, size_t u) {
    if (which == STATE_OWNED) { return zero_owns(&t->zero, u); }
    return (which == STATE_WEIGHTS && t->zero.stage < 3) || zero_holds(&t->zero, u);
}

// The slice after *s, which starts as zeros; false at the end.
static bool state_slice_next(const Trainer* t, int which, StateSlice* s) {
    const ParamTable* table = &t->gpt.table;
    size_t u = s->next;
    while (u < table->unit_count && !state_moves(t, which, u)) { u++; }
    if (u == table->unit_count) { return false; }
    const Unit* first = &table->units[u];
    s->unit = u;
    s->tensor = first->tensor;
    s->first = ((size_t)first->layer * table->tensors[s->tensor].real_rows + first->row) * first->cols;
    s->count = 0;
    for (; u < table->unit_count && state_moves(t, which, u); u++) {
        const Unit* unit = &table->units[u];
        if (unit->tensor != s->tensor || unit->offset != first->offset + s->count) { break; }
        s->count += unit->count;
    }
    s->next = u;
    return true;
}

enum { STATE_ARRAY, STATE_RESIDUAL, STATE_MASTER };

// One tensor of state.safetensors: an array of the optimizer's, or a value an element, of all units of a tensor of the model.
typedef struct {
    char name[64];
    SafeType type;
    int tensor, kind;
    int array;       // STATE_ARRAY: which of the unit's
    uint64_t count;  // elements
} StateTensor;

#define STATE_TENSORS_MAX (GPT_TENSORS * (OPTIMIZER_MAX_ARRAYS + 2))

static bool state_has_masters(const Trainer* t) {
#ifdef FLOATX_BF16
    return t->options->master_weights;
#else
    (void)t;
    return false;
#endif
}

static size_t state_elements(const TensorSpec* s) { return s->layers * s->real_rows * s->cols; }

// Elements of the tensor that a unit has.
static size_t state_unit_count(const Trainer* t, const StateTensor* s, size_t u) {
    const Unit* unit = &t->gpt.table.units[u];
    if (s->kind != STATE_ARRAY) { return unit->count; }
    return optimizer_unit_state(&t->optimizer, &t->gpt.table.tensors[unit->tensor], unit).arrays[s->array].count;
}

static void state_add_tensor(StateTensor* list, int* count, const char* prefix, const TensorSpec* spec, StateTensor s) {
    snprintf(s.name, sizeof(s.name), "%s.%s", prefix, spec->name);
    list[(*count)++] = s;
}

static const char* state_optimizer_name(const Trainer* t) {
    static char name[32];
    choice_word(OPTIMIZER_WORDS, t->options->optimizer, name, sizeof(name));
    return name;
}

// All tensors, in the order of the file; list: (STATE_TENSORS_MAX).
static int state_tensors(const Trainer* t, StateTensor* list) {
    static const SafeType types[] = {SAFE_F32, SAFE_BF16, SAFE_U8}; // of ArrayType
    const ParamTable* table = &t->gpt.table;
    char prefix[48];
    int count = 0;
    for (int i = 0; i < table->tensor_count; i++) {
        UnitState first;
        memset(&first, 0, sizeof(first));
        for (size_t u = table->unit_count; u-- > 0;) {
            if (table->units[u].tensor == i) { first = optimizer_unit_state(&t->optimizer, &table->tensors[i], &table->units[u]); }
        }
        for (int a = 0; a < first.count; a++) {
            StateTensor s = {"", types[first.arrays[a].type], i, STATE_ARRAY, a, 0};
            for (size_t u = 0; u < table->unit_count; u++) { s.count += table->units[u].tensor == i ? state_unit_count(t, &s, u) : 0; }
            snprintf(prefix, sizeof(prefix), "%s.%s", state_optimizer_name(t), first.arrays[a].name);
            state_add_tensor(list, &count, prefix, &table->tensors[i], s);
        }
        if (t->residual[i]) {
            StateTensor s = {"", SAFE_F32, i, STATE_RESIDUAL, 0, state_elements(&table->tensors[i])};
            state_add_tensor(list, &count, "kappa.residual", &table->tensors[i], s);
        }
    }
    for (int i = 0; state_has_masters(t) && i < table->tensor_count; i++) {
        StateTensor s = {"", SAFE_F32, i, STATE_MASTER, 0, state_elements(&table->tensors[i])};
        state_add_tensor(list, &count, "master", &table->tensors[i], s);
    }
    return count;
}

// Where a held unit's part of the tensor is kept as the file has it: not split masters, nor a residual in bf16.
static char* state_unit_place(const Trainer* t, const StateTensor* s, size_t u) {
    if (s->kind == STATE_RESIDUAL) { return (char*)zero_unit_gradient(&t->zero, u); }
    if (s->kind == STATE_MASTER) { return (char*)(t->master + t->zero.place[u]); }
    const Unit* unit = &t->gpt.table.units[u];
    return t->state + t->state_at[u] + optimizer_unit_state(&t->optimizer, &t->gpt.table.tensors[unit->tensor], unit).arrays[s->array].at;
}

#include "state_save.cuh"

// ---------------------------------------------------------------------------------------------------------------------------------
// Reading

static bool state_same_shape(const ModelReader* r, const Gpt* g, Error* error) {
    return memcmp(&r->header, &g->config, sizeof(g->config)) == 0 || fail(error, "%s holds a model of another shape", r->file.path);
}

// Elements first..first+count-1 of the file to `to` on the device; NULL: only looked at.
static bool state_read_elements(ModelReader* r, size_t first, size_t count, floatX* to, floatX* piece, Error* error) {
    for (size_t at = 0; at < count; at += STATE_PIECE) {
        size_t n = min_size(STATE_PIECE, count - at);
        if (!model_reader_read(r, first + at, n, piece, MODEL_FLOATX, error)) { return false; }
        if (!to) { continue; }
        device_upload(to + at, piece, n * sizeof(floatX));
        device_sync();
    }
    return true;
}

// Weights from a model file of either version into a model that has all of them; shape must be that of the model.
bool state_load_model(Gpt* g, const char* path, Error* notice, Error* error) {
    ModelReader r;
    notice->text[0] = 0;
    if (!model_reader_open(&r, path, error)) { return false; }
    floatX* piece = (floatX*)host_alloc(STATE_PIECE * sizeof(floatX));
    bool good = state_same_shape(&r, g, error) && state_read_elements(&r, 0, g->table.elements, g->params, piece, error);
    if (good) { model_reader_notice(&r, notice); }
    host_free(piece);
    model_reader_close(&r);
    return good;
}

// The weights that this rank keeps. Rank 0 looks at the padding where no rank keeps it.
static bool state_read_weights(Trainer* t, const char* path, ModelReader* r, Error* error) {
    const ParamTable* table = &t->gpt.table;
    StateSlice s = {0, 0, 0, 0, 0};
    if (!model_reader_open(r, path, error)) { return false; }
    floatX* piece = (floatX*)host_alloc(STATE_PIECE * sizeof(floatX));
    bool good = state_same_shape(r, &t->gpt, error);
    if (good && t->zero.stage < 3) {
        good = state_read_elements(r, 0, table->elements, t->gpt.params, piece, error);
    } else {
        while (good && state_slice_next(t, STATE_WEIGHTS, &s)) {
            good = state_read_elements(r, table->units[s.unit].offset, s.count, zero_unit_weights(&t->zero, s.unit), piece, error);
        }
        const TensorSpec* wte = &table->tensors[WTE];
        size_t real = wte->real_rows * wte->cols;
        if (good && t->comm->rank == 0) { good = state_read_elements(r, wte->offset + real, wte->rows * wte->cols - real, NULL, piece, error); }
        for (int g = 0; g < t->zero.groups; g++) { t->zero.there[g] = false; }
    }
    host_free(piece);
    model_reader_close(r);
    return good;
}

// What all ranks found in the file together. Collective.
static void state_notice(const Trainer* t, ModelReader* r, Error* notice) {
    const Comm* c = t->comm;
    if (t->zero.stage == 3) { // else each has read all of it
        uint64_t mine[2] = {r->padding_fixed, r->not_finite}, *all = (uint64_t*)need(malloc((size_t)c->size * sizeof(mine)));
        comm_gather_host(c, mine, sizeof(mine), all, TRAFFIC_CONTROL);
        r->padding_fixed = r->not_finite = 0;
        for (int i = 0; i < c->size; i++) {
            r->padding_fixed += all[2 * i];
            r->not_finite += all[2 * i + 1];
        }
        free(all);
    }
    model_reader_notice(r, notice);
}

// Weights of a model file into a trainer of its shape; masters are not touched. Collective.
bool state_load_weights(Trainer* t, const char* path, Error* notice, Error* error) {
    ModelReader r;
    error->text[0] = notice->text[0] = 0;
    zero_weights_wait_all(&t->zero);
    if (!comm_agree(t->comm, state_read_weights(t, path, &r, error), error)) { return false; }
    state_notice(t, &r, notice);
    return true;
}

// fp32 masters into lower halves; the upper ones are the weights.
static void state_split_masters(const Trainer* t, size_t u, size_t at, size_t n, const float* values, uint16_t* low, floatX* high) {
#ifdef FLOATX_BF16
    for (size_t i = 0; i < n; i++) { weight_split(values[i], &high[i].bits, low + i); }
    device_upload(t->master_low + t->zero.place[u] + at, low, n * sizeof(uint16_t));
    device_upload(zero_unit_weights(&t->zero, u) + at, high, n * sizeof(floatX));
    device_sync();
#else
    (void)t, (void)u, (void)at, (void)n, (void)values, (void)low, (void)high;
#endif
}

// The parts of one tensor that this rank keeps. A residual belongs to its unit's owner alone.
static bool state_read_tensor(const Trainer* t, const SafeReader* r, const StateTensor* s, char* piece, Error* error) {
    const ParamTable* table = &t->gpt.table;
    size_t size = safe_types[s->type].bytes, first = 0, n;
    bool split = s->kind == STATE_MASTER && t->master_low, residual = s->kind == STATE_RESIDUAL;
    uint16_t* low = (uint16_t*)host_alloc(split ? STATE_PIECE * sizeof(uint16_t) : 1);
    floatX* high = (floatX*)host_alloc(split || residual ? STATE_PIECE * sizeof(floatX) : 1);
    bool good = true;
    for (size_t u = 0; good && u < table->unit_count; u++) {
        if (table->units[u].tensor != s->tensor) { continue; }
        size_t count = state_unit_count(t, s, u);
        bool mine = zero_holds(&t->zero, u) && (s->kind != STATE_RESIDUAL || zero_owns(&t->zero, u));
        for (size_t at = 0; good && mine && at < count; at += n) {
            n = min_size(STATE_PIECE, count - at);
            good = safe_read_part(r, s->name, s->type, s->count, first + at, n, piece, error);
            if (good && split) { state_split_masters(t, u, at, n, (const float*)(void*)piece, low, high); }
            for (size_t i = 0; good && residual && i < n; i++) { store(high + i, ((const float*)(const void*)piece)[i]); }
            if (good && residual) { device_upload(zero_unit_gradient(&t->zero, u) + at, high, n * sizeof(floatX)); }
            if (good && !split && !residual) { device_upload(state_unit_place(t, s, u) + at * size, piece, n * size); }
            device_sync();
        }
        first += count;
    }
    host_free(low);
    host_free(high);
    return good;
}

// A run that keeps no masters goes on from those of a bf16 run: they are what its weights were rounded from.
static bool state_read_masters_as_weights(const Trainer* t, const SafeReader* r, float* piece, Error* error) {
    StateSlice s = {0, 0, 0, 0, 0};
    floatX* rounded = (floatX*)host_alloc(STATE_PIECE * sizeof(floatX));
    bool good = true;
    while (good && state_slice_next(t, STATE_WEIGHTS, &s)) {
        const TensorSpec* spec = &t->gpt.table.tensors[s.tensor];
        floatX* to = zero_unit_weights(&t->zero, s.unit);
        char name[128];
        snprintf(name, sizeof(name), "master.%s", spec->name);
        for (size_t at = 0; good && at < s.count; at += STATE_PIECE) {
            size_t n = min_size(STATE_PIECE, s.count - at);
            good = safe_read_part(r, name, SAFE_F32, state_elements(spec), s.first + at, n, piece, error);
            for (size_t k = 0; good && k < n; k++) { store(rounded + k, piece[k]); }
            if (good) { device_upload(to + at, rounded, n * sizeof(floatX)); }
            device_sync();
        }
    }
    host_free(rounded);
    return good;
}

static bool state_read_scalars(Trainer* t, const SafeReader* r, Error* error) {
    uint64_t step, sequence, length, skipped, seen;
    const char *format = safe_find_text(r, "format"), *optimizer = safe_find_text(r, "optimizer");
    if (!format || strcmp(format, STATE_FORMAT) != 0) {
        return fail(error, "%s: expected format \"%s\", found \"%s\"", r->file.path, STATE_FORMAT, format ? format : "");
    }
    if (!optimizer || strcmp(optimizer, state_optimizer_name(t)) != 0) {
        return fail(error, "%s was written by optimizer %s; this run uses %s", r->file.path, optimizer ? optimizer : "unknown",
                    state_optimizer_name(t));
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

// Kappa's own: the widths, within which all else is read, the usual size of gradients, counts.
static bool state_read_kappa(Trainer* t, const SafeReader* r, Error* error) {
    Kappa* k = &t->optimizer.kappa;
    uint64_t value;
    char name[64];
    if (t->optimizer.config.kind != OPTIMIZER_KAPPA) { return true; }
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        if (t->gpt.table.tensors[i].role != ROLE_MATRIX) { continue; }
        snprintf(name, sizeof(name), "kappa.width.%s", t->gpt.table.tensors[i].name);
        if (!safe_find_number(r, name, &value, error)) { return false; }
        if (value != 2 && value != 4 && value != 6 && value != 8 && value != 32) {
            return fail(error, "%s: %s is %" PRIu64 ", which is no width", r->file.path, name, value);
        }
        int bits = t->optimizer.config.kappa_bits;
        if (bits ? value != (uint64_t)bits : value > 8) {
            return fail(error, "%s was written with %" PRIu64 " bits for %s; go on with it by --kappa-bits %" PRIu64, r->file.path, value,
                        t->gpt.table.tensors[i].name, value);
        }
        k->width[i] = (int)value;
    }
    size_t bytes = trainer_place_state(t, &t->optimizer, t->state_at);
    if (bytes > t->state_bytes) {
        return fail(error, "%s: the widths of its momentum do not fit in --kappa-bytes %g; give what it was written with (its config.txt says)",
                    r->file.path, t->options->kappa_bytes);
    }
    if (!safe_find_number(r, "kappa.spikes", &value, error)) { return false; }
    k->spikes = (int64_t)value;
    if (!safe_find_number(r, "residuals_lost", &value, error)) { return false; }
    t->residuals_lost = (int64_t)value;
    return safe_read(r, "kappa.rms", SAFE_F64, t->gpt.table.unit_count, k->rms, error);
}

// A format of state is not turned into another: what one rounds away the other would not get back.
static bool state_check_format(const Trainer* t, const SafeReader* r, Error* error) {
    char own[32];
    const char* format = safe_find_text(r, "state_format");
    choice_word(STATE_FORMAT_WORDS, t->options->state_format, own, sizeof(own));
    return strcmp(format ? format : "fp32", own) == 0 ||
           fail(error, "%s was written with --state-format %s; this run has %s", r->file.path, format ? format : "fp32", own);
}

// Of which tensors the file has residuals that this run goes on with; where it has no use for them they are lost.
static void state_find_residuals(Trainer* t, const SafeReader* r) {
    bool lost = false;
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        char name[128];
        snprintf(name, sizeof(name), "kappa.residual.%s", t->gpt.table.tensors[i].name);
        bool there = t->zero.carry && safe_find(r, name) != NULL;
        t->residual[i] = there && t->optimizer.config.kappa_residual;
        lost = lost || (there && !t->residual[i]);
    }
    t->residuals_lost += lost;
}

static bool state_read_arrays(Trainer* t, const SafeReader* r, Error* error) {
    static StateTensor list[STATE_TENSORS_MAX];
    if (!state_check_format(t, r, error) || !state_read_kappa(t, r, error)) { return false; }
    state_find_residuals(t, r);
    int count = state_tensors(t, list);
    char* piece = (char*)host_alloc(STATE_PIECE * sizeof(float));
    bool good = true, there = safe_find(r, "master.wte") != NULL;
    if (t->zero.carry) { zero_grads_clear_all(&t->zero); }
    for (int i = 0; good && i < count; i++) {
        if (list[i].kind == STATE_MASTER && !there) { continue; }
        good = state_read_tensor(t, r, &list[i], piece, error);
    }
    if (good && t->zero.carry && !trainer_has_residual(t)) { trainer_forget_residual(t); }
    if (good && !there && state_has_masters(t)) { trainer_reset_masters(t); } // written without masters: start them from the weights
    if (good && there && !state_has_masters(t)) { good = state_read_masters_as_weights(t, r, (float*)(void*)piece, error); }
    host_free(piece);
    return good;
}

static bool state_read_folder(Trainer* t, const char* folder, uint64_t step, ModelReader* model, Error* error) {
    char path[PATH_MAX + 64];
    SafeReader r;
    if (t->comm->size > 1 && !checkpoint_sees(folder, error)) { return false; }
    snprintf(path, sizeof(path), "%s/model_%08" PRIu64 ".bin", folder, step);
    if (!state_read_weights(t, path, model, error)) { return false; }
    snprintf(path, sizeof(path), "%s/state.safetensors", folder);
    if (!safe_open(&r, path, error)) { return false; }
    bool good = state_read_scalars(t, &r, error) && state_read_arrays(t, &r, error);
    safe_close(&r);
    return good;
}

// Everything of a checkpoint into a trainer that was created for its model, whatever number of ranks and ZeRO stage wrote it. folder:
// from checkpoint_find_latest on rank 0, which has compared all checksums. Collective.
bool state_load(Trainer* t, const char* folder, uint64_t step, Error* notice, Error* error) {
    ModelReader model;
    error->text[0] = notice->text[0] = 0;
    zero_weights_wait_all(&t->zero); // nothing may arrive over what is read
    if (!comm_agree(t->comm, state_read_folder(t, folder, step, &model, error), error)) { return false; }
    state_notice(t, &model, notice);
    return true;
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
