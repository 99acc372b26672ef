// test_checkpoint_ranks.h - rows on checkpoints of several ranks, run by all of them: what any number of ranks writes at any ZeRO stage is,
// to the byte, what one writes, and is read by any other number at any other stage; where one rank fails, all fail with the same line and
// earlier checkpoints stay.
#pragma once
#include "test_checkpoint.h"
#include "test_trainer.h"

enum { CHECKPOINT_VALUES_WEIGHTS = 9, CHECKPOINT_VALUES_MASTER = 8 }; // beside slots 0 and 1

// The value of element i of a tensor in an array: weights are exact in bf16, the others use all bits.
static float checkpoint_rank_value(int array, int tensor, size_t i) {
    Philox x = philox_at(7, RANDOM_SAMPLING, (uint32_t)array, (uint32_t)tensor, i);
    if (array == CHECKPOINT_VALUES_WEIGHTS) { return (float)((int)(x.x[0] % 255) - 127) / 8.0f; }
    return ((float)(x.x[0] >> 8) - 8388607.0f) * 0x1p-20f;
}

// A folder that all ranks share: rank 0's.
static const char* checkpoint_rank_folder(const Comm* c, const char* name) {
    static char path[512];
    size_t bytes = sizeof(test_folder_name);
    char* all = (char*)need(malloc((size_t)c->size * bytes));
    test_folder();
    comm_gather_host(c, test_folder_name, bytes, all, TRAFFIC_CONTROL);
    snprintf(path, sizeof(path), "%s/%s", all, name);
    free(all);
    return path;
}

static bool checkpoint_rank_trainer(Trainer* t, Options* o, const Comm* c, int stage, bool masters, Error* error) {
    char zero[8];
    ModelHeader model;
    snprintf(zero, sizeof(zero), "%d", stage);
    OPTIONS(o, "--batch", "1", "--total-batch", "256", "--zero", zero, "--steps", "100", "--master-weights", masters ? "on" : "off");
    memset(t, 0, sizeof(*t));
    t->comm = c;
    return model_spec_parse(o->model, o->vocab_size, &model, error) && trainer_create(t, o, &model, error);
}

static size_t checkpoint_rank_first(const Trainer* t, const Unit* u) {
    return ((size_t)u->layer * t->gpt.table.tensors[u->tensor].real_rows + u->row) * u->cols;
}

static void checkpoint_rank_fill_floats(float* to, int array, const Unit* u, size_t first) {
    float* values = (float*)need(malloc(u->count * sizeof(float)));
    for (size_t i = 0; i < u->count; i++) { values[i] = checkpoint_rank_value(array, u->tensor, first + i); }
    device_upload(to, values, u->count * sizeof(float));
    device_sync();
    free(values);
}

// One of AdamW's two moments of a held unit.
static float* checkpoint_rank_slot(const Trainer* t, size_t k, int slot) {
    const Unit* u = &t->gpt.table.units[k];
    UnitState s = optimizer_unit_state(&t->optimizer, &t->gpt.table.tensors[u->tensor], u);
    return (float*)(void*)(t->state + t->state_at[k] + s.arrays[slot].at);
}

// Known values in all that a checkpoint holds, on every rank that keeps them.
static void checkpoint_rank_fill(Trainer* t, int64_t step) {
    for (size_t k = 0; k < t->gpt.table.unit_count; k++) {
        const Unit* u = &t->gpt.table.units[k];
        size_t first = checkpoint_rank_first(t, u);
        if (zero_holds(&t->zero, k)) {
            for (int i = 0; i < 2; i++) { checkpoint_rank_fill_floats(checkpoint_rank_slot(t, k, i), i, u, first); }
            if (t->master) { checkpoint_rank_fill_floats(t->master + t->zero.place[k], CHECKPOINT_VALUES_MASTER, u, first); }
        }
        if (t->zero.stage == 3 && !zero_holds(&t->zero, k)) { continue; }
        floatX* values = (floatX*)need(malloc(u->count * sizeof(floatX)));
        for (size_t i = 0; i < u->count; i++) { store(values + i, checkpoint_rank_value(CHECKPOINT_VALUES_WEIGHTS, u->tensor, first + i)); }
        device_upload(zero_unit_weights(&t->zero, k), values, u->count * sizeof(floatX));
        device_sync();
        free(values);
    }
    t->step = step;
    t->sequence = (uint64_t)step * 8;
    t->skipped = 3;
    t->loss_outlier.seen = t->norm_outlier.seen = 77;
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        t->loss_outlier.values[i] = 1.0 / (1 + i);
        t->norm_outlier.values[i] = -1.0 / (3 + i);
    }
}

static size_t checkpoint_rank_wrong_floats(const float* from, int array, const Unit* u, size_t first) {
    float* values = (float*)need(malloc(u->count * sizeof(float)));
    size_t wrong = 0;
    device_download(values, from, u->count * sizeof(float));
    for (size_t i = 0; i < u->count; i++) { wrong += values[i] != checkpoint_rank_value(array, u->tensor, first + i); }
    free(values);
    return wrong;
}

// weights, masters: whose values these must hold, weights rounded where they are those of masters
static void checkpoint_rank_check(const Trainer* t, int64_t step, int weights, int masters) {
    size_t wrong[3] = {0, 0, 0}, kept = 0;
    for (size_t k = 0; k < t->gpt.table.unit_count; k++) {
        const Unit* u = &t->gpt.table.units[k];
        size_t first = checkpoint_rank_first(t, u);
        if (zero_holds(&t->zero, k)) {
            for (int i = 0; i < 2; i++) { wrong[0] += checkpoint_rank_wrong_floats(checkpoint_rank_slot(t, k, i), i, u, first); }
            if (t->master) { wrong[1] += checkpoint_rank_wrong_floats(t->master + t->zero.place[k], masters, u, first); }
        }
        if (t->zero.stage == 3 && !zero_holds(&t->zero, k)) { continue; }
        kept += u->count;
        floatX *values = (floatX*)need(malloc(u->count * sizeof(floatX))), expected;
        device_download(values, zero_unit_weights(&t->zero, k), u->count * sizeof(floatX));
        for (size_t i = 0; i < u->count; i++) {
            store(&expected, checkpoint_rank_value(weights, u->tensor, first + i));
            wrong[2] += load(values + i) != load(&expected);
        }
        free(values);
    }
    CHECK(kept == (t->zero.stage == 3 ? t->zero.held : t->gpt.table.packed), "%zu weights are kept", kept);
    CHECK(wrong[0] == 0 && wrong[1] == 0 && wrong[2] == 0, "stage %d, %d ranks: %zu values of slots, %zu of masters, %zu weights differ",
          t->zero.stage, t->zero.ranks, wrong[0], wrong[1], wrong[2]);
    CHECK(t->step == step && t->sequence == (uint64_t)step * 8 && t->skipped == 3 && t->loss_outlier.seen == 77 && t->norm_outlier.seen == 77 &&
              t->loss_outlier.values[5] == 1.0 / 6 && t->norm_outlier.values[5] == -1.0 / 8, "step %" PRId64 ", or another scalar", t->step);
}

// Saves known values as n ranks at this stage; all ranks of the world wait for it.
static void checkpoint_rank_save(const Comm* world, int n, int stage, bool masters, const char* out, int64_t step) {
    static Trainer t;
    static Options o;
    Comm part;
    Error error;
    if (comm_first(&part, world, n)) {
        CHECK_OK(checkpoint_rank_trainer(&t, &o, &part, stage, masters, &error), error);
        checkpoint_rank_fill(&t, step);
        CHECK_OK(state_save(&t, out, &error), error);
        trainer_free(&t);
    }
    comm_barrier(world);
}

static void checkpoint_rank_load(const Comm* world, int n, int stage, bool masters, const char* out, int64_t step, int weights, int master_values) {
    static Trainer t;
    static Options o;
    Comm part;
    Error error, notice;
    char folder[PATH_MAX];
    if (comm_first(&part, world, n)) {
        CHECK_OK(checkpoint_folder(folder, out, (uint64_t)step, &error), error);
        CHECK_OK(checkpoint_rank_trainer(&t, &o, &part, stage, masters, &error), error);
        CHECK_OK(state_load(&t, folder, (uint64_t)step, &notice, &error), error);
        CHECK(notice.text[0] == 0, "notice: %s", notice.text);
        checkpoint_rank_check(&t, step, weights, master_values);
        trainer_free(&t);
    }
    comm_barrier(world);
}

static bool checkpoint_rank_same_file(const char* a, const char* b, int64_t step, const char* name) {
    char path[PATH_MAX];
    size_t bytes[2];
    snprintf(path, sizeof(path), "%s/step_%08" PRId64 "/%s", a, step, name);
    uint8_t* one = files_slurp(path, &bytes[0]);
    snprintf(path, sizeof(path), "%s/step_%08" PRId64 "/%s", b, step, name);
    uint8_t* two = files_slurp(path, &bytes[1]);
    bool same = bytes[0] > 100000 && bytes[0] == bytes[1] && memcmp(one, two, bytes[0]) == 0;
    free(one);
    free(two);
    return same;
}

// Written by all ranks at each stage, and by one: the same bytes; then read by other numbers of ranks at other stages
static void checkpoint_ranks_any_to_any(void) {
    const Comm* world = TEST_WORLD;
    char one[512], many[512], folder[PATH_MAX];
    const char* names[2] = {"model_00000010.bin", "state.safetensors"};
    Error error;
    snprintf(one, sizeof(one), "%s", checkpoint_rank_folder(world, "ranks_one"));
    snprintf(many, sizeof(many), "%s", checkpoint_rank_folder(world, "ranks_many"));
    checkpoint_rank_save(world, 1, 0, true, one, 10);
    for (int stage = 0; stage <= 3; stage++) {
        for (int n = world->size; n > 0; n -= world->size > 4 ? 3 : 1) {
            checkpoint_rank_save(world, n, stage, true, many, 10);
            for (int i = 0; world->rank == 0 && i < 2; i++) {
                CHECK(checkpoint_rank_same_file(one, many, 10, names[i]), "%d ranks, stage %d: %s differs from that of one rank", n, stage, names[i]);
            }
            CHECK_OK(checkpoint_folder(folder, many, 10, &error), error);
            if (world->rank == 0) { CHECK_OK(checkpoint_verify(folder, &error), error); }
        }
        for (int n = 1; n <= world->size; n += world->size > 4 ? 3 : 1) { // what was written last, by the fewest ranks
            checkpoint_rank_load(world, n, (stage + n) % 4, true, many, 10, CHECKPOINT_VALUES_WEIGHTS, CHECKPOINT_VALUES_MASTER);
        }
        checkpoint_rank_save(world, world->size, stage, true, many, 20);
        checkpoint_rank_load(world, 1, 0, true, many, 20, CHECKPOINT_VALUES_WEIGHTS, CHECKPOINT_VALUES_MASTER);
        checkpoint_rank_load(world, world->size > 1 ? world->size - 1 : 1, 3 - stage, true, many, 20, CHECKPOINT_VALUES_WEIGHTS,
                             CHECKPOINT_VALUES_MASTER);
    }
    CHECK(world->rank > 0 || checkpoint_test_count(many, true) == 0, "hidden folders are left");
}

// Masters that only one of the two runs keeps, and weights from a file alone, with a stray value in a padding row
static void checkpoint_ranks_weights(void) {
    static Trainer t;
    static Options o;
    const Comm* world = TEST_WORLD;
    char out[512], path[PATH_MAX];
    Error error, notice;
    snprintf(out, sizeof(out), "%s", checkpoint_rank_folder(world, "ranks_weights"));
    bool bf16 = sizeof(floatX) == 2;
    checkpoint_rank_save(world, world->size, 3, true, out, 10);
    checkpoint_rank_save(world, world->size, 1, false, out, 20);
    for (int stage = 0; stage <= 3; stage++) {
        checkpoint_rank_load(world, world->size, stage, false, out, 10, bf16 ? CHECKPOINT_VALUES_MASTER : CHECKPOINT_VALUES_WEIGHTS, 0);
        checkpoint_rank_load(world, world->size, stage, true, out, 20, CHECKPOINT_VALUES_WEIGHTS, CHECKPOINT_VALUES_WEIGHTS);
    }
    snprintf(path, sizeof(path), "%s/step_00000020/model_00000020.bin", out);
    floatX stray;
    store(&stray, 1.0f);
    if (world->rank == 0) {
        int fd = open(path, O_WRONLY);
        CHECK(fd >= 0 && pwrite(fd, &stray, sizeof(stray), 1024 + 300 * 48 * (off_t)sizeof(stray)) == (ssize_t)sizeof(stray), "pwrite");
        close(fd);
    }
    comm_barrier(world);
    for (int stage = 0; stage <= 3; stage++) {
        CHECK_OK(checkpoint_rank_trainer(&t, &o, world, stage, true, &error), error);
        checkpoint_rank_fill(&t, 5);
        device_zero(t.zero.stage == 3 ? t.zero.own_weights : t.gpt.params,
                    (t.zero.stage == 3 ? t.zero.held : t.gpt.table.elements) * sizeof(floatX));
        CHECK_OK(state_load_weights(&t, path, &notice, &error), error);
        CHECK(strstr(notice.text, "found 1 other value"), "stage %d: notice: %s", stage, notice.text);
        checkpoint_rank_check(&t, 5, CHECKPOINT_VALUES_WEIGHTS, CHECKPOINT_VALUES_MASTER);
        trainer_free(&t);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Failures of one rank

// Every rank has the same line, and it holds `part`; the checkpoint of step 10 is the only thing in the folder.
static void checkpoint_rank_refused(const Comm* c, bool good, const Error* error, const char* part, const char* out) {
    Error* all = (Error*)need(malloc((size_t)c->size * sizeof(Error)));
    CHECK(!good, "expected a refusal: %s", part);
    comm_gather_host(c, error, sizeof(Error), all, TRAFFIC_CONTROL);
    CHECK(strcmp(all[0].text, error->text) == 0, "rank 0 has \"%s\", this one \"%s\"", all[0].text, error->text);
    CHECK(strstr(error->text, part) && !strchr(error->text, '\n'), "expected \"%s\" in \"%s\"", part, error->text);
    free(all);
    if (c->rank == 0 && out) {
        Error notice;
        CHECK(checkpoint_test_latest(out, &notice) == 10 && notice.text[0] == 0, "the earlier one: %s", notice.text);
        CHECK(checkpoint_test_count(out, false) == 1, "%d names are there", checkpoint_test_count(out, false));
    }
    comm_barrier(c);
}

// A limit on the size of files stands for a full disk, on one rank or another
static void checkpoint_ranks_full_disk(void) {
    static Trainer t;
    static Options o;
    const Comm* world = TEST_WORLD;
    char out[512];
    Error error;
    struct rlimit before, limit;
    snprintf(out, sizeof(out), "%s", checkpoint_rank_folder(world, "ranks_full"));
    checkpoint_rank_save(world, world->size, 1, true, out, 10);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    for (int stage = 0; stage <= 3; stage += 3) {
        CHECK_OK(checkpoint_rank_trainer(&t, &o, world, stage, true, &error), error);
        checkpoint_rank_fill(&t, 20);
        for (int r = 0; r < world->size; r++) {
            limit = before;
            limit.rlim_cur = world->rank == r ? 2000 : before.rlim_cur;
            fflush(stdout);
            setrlimit(RLIMIT_FSIZE, &limit);
            bool good = state_save(&t, out, &error);
            setrlimit(RLIMIT_FSIZE, &before);
            checkpoint_rank_refused(world, good, &error, "cannot save the checkpoint of step 20: ", out);
            char part[64];
            snprintf(part, sizeof(part), r > 0 ? "rank %d: writing " : "writing ", r);
            CHECK(strstr(error.text, part) && strstr(error.text, "free some space or lower --keep; earlier checkpoints are untouched"),
                  "message: %s", error.text);
        }
        trainer_free(&t);
    }
    signal(SIGXFSZ, handler);
    checkpoint_rank_save(world, world->size, 2, true, out, 20);
}

// The hidden folder goes while ranks write; a rank sees another disk; a file goes before it is read
static void checkpoint_ranks_folders(void) {
    static Trainer t;
    static Options o;
    static StateWriter w;
    const Comm* world = TEST_WORLD;
    int last = world->size - 1;
    char out[512], elsewhere[512], folder[PATH_MAX];
    Error error, notice, ignored;
    snprintf(out, sizeof(out), "%s", checkpoint_rank_folder(world, "ranks_folders"));
    snprintf(elsewhere, sizeof(elsewhere), "%s", checkpoint_rank_folder(world, "ranks_elsewhere"));
    checkpoint_rank_save(world, world->size, 1, true, out, 10);
    CHECK_OK(checkpoint_rank_trainer(&t, &o, world, 2, true, &error), error);
    checkpoint_rank_fill(&t, 20);
    bool good = state_open(&t, &w, out, &error);
    CHECK_OK(good, error);
    if (world->rank == 0) { CHECK_OK(checkpoint_remove(w.folder.folder, &ignored), ignored); }
    comm_barrier(world);
    good = state_finish(&t, &w, good, &error);
    checkpoint_rank_refused(world, good, &error, "cannot rename ", out);
    if (last > 0) {
        const char* seen = world->rank == last ? elsewhere : out;
        good = state_save(&t, seen, &error);
        checkpoint_rank_refused(world, good, &error, "--output must lie on a file system that all ranks share", out);
        good = state_output_shared(world, seen, &error);
        checkpoint_rank_refused(world, good, &error, " does not see ", out);
        CHECK_OK(checkpoint_folder(folder, seen, 10, &ignored), ignored);
        good = state_load(&t, folder, 10, &notice, &error);
        checkpoint_rank_refused(world, good, &error, " does not see ", out);
    }
    CHECK_OK(state_output_shared(world, out, &error), error);
    CHECK_OK(checkpoint_folder(folder, out, 10, &ignored), ignored);
    good = state_load(&t, folder, 11, &notice, &error);
    checkpoint_rank_refused(world, good, &error, "cannot open", out);
    CHECK_OK(state_load(&t, folder, 10, &notice, &error), error);
    checkpoint_rank_check(&t, 10, CHECKPOINT_VALUES_WEIGHTS, CHECKPOINT_VALUES_MASTER);
    trainer_free(&t);
}

static const TestRow checkpoint_rank_tests[] = {
    {"checkpoint ranks: any number writes and reads the same files", checkpoint_ranks_any_to_any},
    {"checkpoint ranks: masters or weights alone", checkpoint_ranks_weights},
    {"checkpoint ranks: a full disk on one costs nothing", checkpoint_ranks_full_disk},
    {"checkpoint ranks: folders that go, or are not shared", checkpoint_ranks_folders},
};
