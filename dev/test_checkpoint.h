// test_checkpoint.h - tests of checkpoint directories: what a save leaves on disk, which checkpoint is found when some are damaged, what
// is deleted, and that a save or a deletion that is killed before any of its system calls, or that runs out of disk, costs nothing.
#pragma once
#include "test_files.h"
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>

// A whole checkpoint as the trainer writes it; `value` makes its content.
static bool checkpoint_test_save(const char* out, uint64_t step, float value, Error* error) {
    float values[READER_MODEL_ELEMENTS];
    char path[PATH_MAX], name[64];
    uint64_t shape = READER_MODEL_ELEMENTS;
    CheckpointWriter writer;
    FileWriter record, config;
    SafeWriter state;
    reader_model_values(values);
    values[1000] = value;
    if (!checkpoint_begin(&writer, out, step, error)) { return false; }
    checkpoint_path(&writer, "config.txt", path);
    bool good = file_create(&config, path, error) && file_write(&config, "steps = 10\n", 11, error) && file_commit(&config, error);
    snprintf(name, sizeof(name), "model_%08" PRIu64 ".bin", step);
    checkpoint_path(&writer, name, path);
    good = good && model_file_write(path, &reader_model, MODEL_FP32, values, MODEL_FP32, &record, error);
    if (good) { checkpoint_record(&writer, &record); } // config.txt is left for the commit to read
    checkpoint_path(&writer, "state.safetensors", path);
    safe_writer_init(&state);
    safe_writer_number(&state, "step", step);
    int m = safe_writer_tensor(&state, "adamw.m", SAFE_F32, 1, &shape);
    good = good && safe_writer_create(&state, path, error) && safe_writer_put(&state, m, 0, values, sizeof(values), error) &&
           safe_writer_commit(&state, error);
    if (good) {
        checkpoint_record(&writer, &state.part.file);
    } else {
        safe_writer_abandon(&state);
    }
    good = good && checkpoint_commit(&writer, error);
    if (!good) { checkpoint_abandon(&writer, error); }
    return good;
}

// The value that the checkpoint was saved with, or NAN.
static float checkpoint_test_value(const char* folder, uint64_t step) {
    float values[READER_MODEL_ELEMENTS];
    char path[PATH_MAX];
    Error error;
    bool good = checkpoint_name(path, &error, "%s/model_%08" PRIu64 ".bin", folder, step) &&
                model_file_read(path, &reader_model, values, MODEL_FP32, NULL, &error);
    return good ? values[1000] : NAN;
}

static uint64_t checkpoint_test_latest(const char* out, Error* notice) {
    char folder[PATH_MAX];
    uint64_t step = 0;
    Error error;
    CHECK_OK(checkpoint_find_latest(out, folder, &step, notice, &error), error);
    return folder[0] ? step : 0;
}

// Names in a folder: all of them, or only the hidden ones.
static int checkpoint_test_count(const char* out, bool hidden) {
    int count = 0;
    DIR* folder = opendir(out);
    for (struct dirent* entry = folder ? readdir(folder) : NULL; entry; entry = readdir(folder)) {
        bool dots = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
        count += !dots && (!hidden || entry->d_name[0] == '.');
    }
    if (folder) { closedir(folder); }
    return count;
}

static void checkpoint_test_clear(const char* out) {
    Error error;
    DIR* folder = opendir(out);
    for (struct dirent* entry = folder ? readdir(folder) : NULL; entry; entry = readdir(folder)) {
        char path[PATH_MAX];
        bool dots = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
        if (!dots && checkpoint_name(path, &error, "%s/%s", out, entry->d_name)) { checkpoint_remove(path, &error); }
    }
    if (folder) { closedir(folder); }
}

// What stands in DONE is what is in the files, and no other file is there.
static void checkpoint_saves(void) {
    const char* out = files_path("checkpoints/deep");
    char folder[PATH_MAX], path[PATH_MAX], expected[1024];
    size_t sizes[3], done_bytes = 0;
    uint32_t crcs[3];
    const char* names[3] = {"config.txt", "model_00000010.bin", "state.safetensors"};
    Error error, notice;
    CHECK(checkpoint_test_latest(out, &notice) == 0 && notice.text[0] == 0, "a folder that is not there holds a checkpoint");
    CHECK_OK(checkpoint_test_save(out, 10, 1.0f, &error), error);
    CHECK_OK(checkpoint_test_save(out, 123456789, 2.0f, &error), error);
    CHECK(checkpoint_test_latest(out, &notice) == 123456789 && notice.text[0] == 0, "latest; notice %s", notice.text);
    CHECK(checkpoint_test_count(out, false) == 2, "%d names", checkpoint_test_count(out, false));
    CHECK_OK(checkpoint_folder(folder, out, 10, &error), error);
    CHECK(strcmp(folder + strlen(out), "/step_00000010") == 0 && checkpoint_test_count(folder, false) == 4, "folder %s", folder);
    CHECK_OK(checkpoint_verify(folder, &error), error);
    CHECK(checkpoint_test_value(folder, 10) == 1.0f, "the model differs");
    for (int i = 0; i < 3; i++) {
        CHECK_OK(checkpoint_name(path, &error, "%s/%s", folder, names[i]), error);
        uint8_t* data = files_slurp(path, &sizes[i]);
        crcs[i] = files_slow_crc(data, sizes[i]);
        free(data);
    }
    CHECK(sizes[0] == 11 && sizes[1] == 5120, "sizes %zu %zu", sizes[0], sizes[1]);
    CHECK_OK(checkpoint_name(path, &error, "%s/DONE", folder), error);
    char* done = (char*)files_slurp(path, &done_bytes);
    done[done_bytes] = 0;
    CHECK(strncmp(done, "train_gpt checkpoint 1\nstep 10\nfile ", 36) == 0, "DONE starts with %.40s", done);
    for (int i = 0; i < 3; i++) {
        snprintf(expected, sizeof(expected), "file %s %zu %08x\n", names[i], sizes[i], crcs[i]);
        CHECK(strstr(done, expected), "expected %s in %s", expected, done);
    }
    snprintf(expected, sizeof(expected), "done %08x\n", files_slow_crc((uint8_t*)done, done_bytes - 14));
    CHECK(strcmp(done + done_bytes - 14, expected) == 0, "expected %s in %s", expected, done);
    free(done);
    CHECK_OK(checkpoint_test_save(out, 10, 3.0f, &error), error); // the same step once more
    CHECK(checkpoint_test_value(folder, 10) == 3.0f, "the old checkpoint of this step is still there");
    CHECK(checkpoint_test_count(out, false) == 2, "%d names", checkpoint_test_count(out, false));
    checkpoint_test_clear(out);
}

// Each kind of damage to the newest checkpoint: the one before is found, and the notice says why.
static void checkpoint_finds_older(void) {
    static const struct {
        const char *file, *part;
        int damage; // 0 removed, 1 cut short, 2 a byte flipped, 3 emptied, 4 the folder renamed
    } cases[] = {
        {"DONE", "it has no file DONE", 0},
        {"DONE", "DONE is damaged", 1},
        {"DONE", "DONE is damaged", 2},
        {"DONE", "DONE is damaged", 3},
        {"model_00000030.bin", "cannot open", 0},
        {"model_00000030.bin", "expected 5120 bytes, found 5119", 1},
        {"model_00000030.bin", "is damaged: expected checksum", 2},
        {"state.safetensors", "is damaged: expected checksum", 2},
        {"config.txt", "expected 11 bytes, found 0", 3},
        {"config.txt", "holds step 30; it was renamed", 4},
    };
    const char* out = files_path("finds");
    Error error, notice;
    CHECK_OK(checkpoint_test_save(out, 10, 1.0f, &error), error);
    CHECK_OK(checkpoint_test_save(out, 20, 2.0f, &error), error);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char path[PATH_MAX], folder[PATH_MAX], renamed[PATH_MAX];
        size_t bytes = 0;
        CHECK_OK(checkpoint_test_save(out, 30, 3.0f, &error), error);
        CHECK(checkpoint_test_latest(out, &notice) == 30, "a good one is not found: %s", notice.text);
        checkpoint_folder(folder, out, 30, &error);
        checkpoint_folder(renamed, out, 40, &error);
        CHECK_OK(checkpoint_name(path, &error, "%s/%s", folder, cases[i].file), error);
        uint8_t* data = files_slurp(path, &bytes);
        data[bytes / 2] ^= 1;
        if (cases[i].damage == 0) { unlink(path); }
        if (cases[i].damage == 1) { CHECK(truncate(path, (off_t)bytes - 1) == 0, "truncate"); }
        if (cases[i].damage == 2) { files_dump(path, data, bytes); }
        if (cases[i].damage == 3) { CHECK(truncate(path, 0) == 0, "truncate"); }
        if (cases[i].damage == 4) { CHECK(rename(folder, renamed) == 0, "rename"); }
        free(data);
        CHECK(checkpoint_test_latest(out, &notice) == 20, "damaged %s, way %d: not the one before", cases[i].file, cases[i].damage);
        CHECK(strstr(notice.text, " is passed over: ") && strstr(notice.text, cases[i].part), "notice: %s", notice.text);
        CHECK(cases[i].damage == 4 || !checkpoint_verify(folder, &error), "verified in spite of damage");
        checkpoint_remove(folder, &error);
        checkpoint_remove(renamed, &error);
    }
    mkdir(files_path("finds/step_00000050"), 0777);
    mkdir(files_path("finds/step_0000060"), 0777);
    mkdir(files_path("finds/step_000000070"), 0777);
    files_dump(files_path("finds/step_00000080"), "x", 1);
    CHECK(checkpoint_test_latest(out, &notice) == 20, "an empty folder was taken");
    CHECK(strstr(notice.text, "step_00000050") && strstr(notice.text, "step_00000080") && !strstr(notice.text, "70"), "notice: %s",
          notice.text);
    checkpoint_test_clear(out);
}

// Saves those of steps 10, 20, ... last that are not there.
static void checkpoint_test_fill(const char* out, uint64_t last) {
    for (uint64_t step = 10; step <= last; step += 10) {
        char folder[PATH_MAX];
        Error error;
        CHECK_OK(checkpoint_folder(folder, out, step, &error), error);
        if (!checkpoint_verify(folder, &error)) { CHECK_OK(checkpoint_test_save(out, step, 1.0f, &error), error); }
    }
}

static void checkpoint_keeps(void) {
    static const struct {
        int keep;
        uint64_t major, upto;
        const char* left;
    } cases[] = {
        {0, 0, 60, "60 50 40 30 20 10 "},
        {9, 0, 60, "60 50 40 30 20 10 "},
        {3, 1, 60, "60 50 40 30 20 10 "},
        {1, 20, 60, "60 40 20 "},
        {2, 30, 60, "60 50 30 "},
        {2, 0, 60, "60 50 "},
        {1, 0, 60, "60 "},
        {1, 1000, 60, "60 "},
        {1, 0, 40, "60 50 40 "}, // later ones, passed over by a resumed run, push nothing out
        {2, 0, 45, "60 50 40 30 "},
        {1, 0, 5, "60 50 40 30 20 10 "},
    };
    const char* out = files_path("keeps");
    Error error;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char left[256] = "";
        CheckpointList list;
        checkpoint_test_fill(out, 60);
        files_dump(files_path("keeps/log.txt"), "x", 1);
        CHECK_OK(checkpoint_prune(out, cases[i].keep, cases[i].major, cases[i].upto, &error), error);
        CHECK_OK(checkpoint_list(out, &list, &error), error);
        for (size_t k = 0; k < list.count; k++) { snprintf(left + strlen(left), 32, "%" PRIu64 " ", list.steps[k]); }
        CHECK(strcmp(left, cases[i].left) == 0, "keep %d, major %" PRIu64 ": expected %s, found %s", cases[i].keep, cases[i].major,
              cases[i].left, left);
        CHECK(checkpoint_test_count(out, false) == (int)list.count + 1, "something else was removed or left");
        checkpoint_list_free(&list);
    }
    checkpoint_test_clear(out);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Killed at any instant.

// Runs work(out) in a child that is killed at its stop number n: it stops before and after each system call, so that every second n
// shows all there is. Returns false when the child had ended before. Where tracing is forbidden the child is killed after n * 20
// microseconds instead.
static bool checkpoint_killed_at(bool (*work)(const char*), const char* out, int n) {
    static bool tracing = true;
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (tracing && ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) { _exit(77); }
        if (tracing) { raise(SIGSTOP); }
        _exit(work(out) ? 0 : 1);
    }
    if (!tracing) { usleep((useconds_t)n * 20); }
    for (int stops = 0; tracing && stops <= n; stops++) {
        waitpid(child, &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
            tracing = false;
            return checkpoint_killed_at(work, out, n);
        }
        if (!WIFSTOPPED(status)) { break; }
        if (stops < n) { ptrace(PTRACE_SYSCALL, child, NULL, NULL); }
    }
    if (!tracing || WIFSTOPPED(status)) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    CHECK(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "the work failed by itself at stop %d", n);
    return WIFSIGNALED(status);
}

static bool checkpoint_work_save(const char* out) {
    Error error;
    return checkpoint_test_save(out, 20, 2.0f, &error);
}

static bool checkpoint_work_save_again(const char* out) {
    Error error;
    return checkpoint_test_save(out, 10, 2.0f, &error);
}

static bool checkpoint_work_prune(const char* out) {
    Error error;
    return checkpoint_prune(out, 1, 0, UINT64_MAX, &error);
}

// After every kill: the step before or the new one is found whole, and nothing under a checkpoint's name is half.
static void checkpoint_survives_kill(void) {
    const char* out = files_path("killed");
    Error error, notice;
    int old_found = 0, new_found = 0, n = 0;
    CHECK_OK(checkpoint_test_save(out, 10, 1.0f, &error), error);
    for (n = 0; n < 5000 && checkpoint_killed_at(checkpoint_work_save, out, n); n += 2) {
        uint64_t step = checkpoint_test_latest(out, &notice);
        CHECK(step == 10 || step == 20, "killed at stop %d: found step %" PRIu64, n, step);
        CHECK(notice.text[0] == 0, "killed at stop %d: %s", n, notice.text);
        old_found += step == 10;
        new_found += step == 20;
        if (step == 20) { CHECK_OK(checkpoint_trash(out, 20, &error), error); }
    }
    CHECK(n > 50 && n < 5000 && old_found > 50 && new_found > 0, "%d stops, old found %d times, new %d times", n, old_found, new_found);
    CHECK(checkpoint_test_latest(out, &notice) == 20, "the child that was not killed left no checkpoint");
    CHECK_OK(checkpoint_test_save(out, 30, 1.0f, &error), error);
    CHECK(checkpoint_test_count(out, true) == 0, "%d hidden folders of dead runs are left", checkpoint_test_count(out, true));
    checkpoint_test_clear(out);
}

static void checkpoint_survives_kill_same_step(void) {
    const char* out = files_path("killed");
    char folder[PATH_MAX];
    Error error, notice;
    int n = 0, fresh = 0;
    CHECK_OK(checkpoint_folder(folder, out, 10, &error), error);
    CHECK_OK(checkpoint_test_save(out, 10, 1.0f, &error), error);
    for (n = 0; n < 5000 && checkpoint_killed_at(checkpoint_work_save_again, out, n); n += 2) {
        CHECK(checkpoint_test_latest(out, &notice) == 10 && notice.text[0] == 0, "killed at stop %d: %s", n, notice.text);
        float value = checkpoint_test_value(folder, 10);
        CHECK(value == 1.0f || value == 2.0f, "killed at stop %d: value %g", n, (double)value);
        if (value == 2.0f) {
            fresh++;
            CHECK_OK(checkpoint_test_save(out, 10, 1.0f, &error), error);
        }
    }
    CHECK(n > 50 && n < 5000 && fresh > 0, "%d stops, %d after the exchange", n, fresh);
    checkpoint_test_clear(out);
}

static void checkpoint_survives_kill_pruning(void) {
    const char* out = files_path("killed");
    Error error, notice;
    int n = 0;
    for (n = 0; n < 5000; n += 2) {
        checkpoint_test_fill(out, 20);
        bool killed = checkpoint_killed_at(checkpoint_work_prune, out, n);
        CheckpointList named, valid;
        CHECK(checkpoint_test_latest(out, &notice) == 20, "killed at stop %d: the newest is gone", n);
        CHECK_OK(checkpoint_scan(out, &named, &error), error);
        CHECK_OK(checkpoint_list(out, &valid, &error), error);
        CHECK(named.count == valid.count, "killed at stop %d: %zu folders, %zu valid", n, named.count, valid.count);
        CHECK(killed || valid.count == 1, "%zu left", valid.count);
        checkpoint_list_free(&named);
        checkpoint_list_free(&valid);
        if (!killed) { break; }
    }
    CHECK(n > 20 && n < 5000, "%d stops", n);
    checkpoint_test_clear(out);
}

// A limit on file size stands for a full disk: whichever write it hits, one line, nothing left over, the previous one intact.
static void checkpoint_survives_full_disk(void) {
    static const rlim_t limits[] = {0, 5, 100, 1024, 4000, 5119};
    const char* out = files_path("full_disk");
    Error error, notice;
    struct rlimit before, limit;
    CHECK_OK(checkpoint_test_save(out, 10, 1.0f, &error), error);
    CHECK(checkpoint_test_count(out, false) == 1, "more than one name");
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    for (size_t i = 0; i < COUNT_OF(limits); i++) {
        limit = before;
        limit.rlim_cur = limits[i];
        error.text[0] = 0;
        fflush(stdout);
        setrlimit(RLIMIT_FSIZE, &limit);
        bool good = checkpoint_test_save(out, 20, 2.0f, &error);
        setrlimit(RLIMIT_FSIZE, &before);
        CHECK(!good, "saved beyond a limit of %zu bytes", (size_t)limits[i]);
        CHECK(strncmp(error.text, "cannot save the checkpoint of step 20: writing ", 47) == 0, "message: %s", error.text);
        CHECK(strstr(error.text, "free some space or lower --keep; earlier checkpoints are untouched"), "message: %s", error.text);
        CHECK(!strchr(error.text, '\n'), "more than one line");
        CHECK(checkpoint_test_count(out, false) == 1, "%d names after a limit of %zu", checkpoint_test_count(out, false),
              (size_t)limits[i]);
        CHECK(checkpoint_test_latest(out, &notice) == 10 && notice.text[0] == 0, "the previous one: %s", notice.text);
    }
    signal(SIGXFSZ, handler);
    CHECK_OK(checkpoint_test_save(out, 20, 2.0f, &error), error);
    checkpoint_test_clear(out);
}

static void checkpoint_removes_stale(void) {
    char path[PATH_MAX];
    const char* out = files_path("stale");
    Error error;
    int status = 0;
    mkdir(out, 0777);
    pid_t dead = fork();
    if (dead == 0) { _exit(0); }
    waitpid(dead, &status, 0);
    pid_t zombie = fork();
    if (zombie == 0) { _exit(0); }
    siginfo_t info;
    waitid(P_PID, (id_t)zombie, &info, WEXITED | WNOWAIT); // has ended, and is still listed
    pid_t alive = fork();
    while (alive == 0) { pause(); }
    const struct {
        long pid;
        const char* prefix;
        bool stays;
    } cases[] = {{(long)dead, ".step_00000010.tmp", false},
                 {(long)getpid(), ".step_00000010.tmp", false},
                 {(long)alive, ".trash.step_00000010", false},
                 {(long)alive, ".step_00000010.tmp", true},
                 {(long)zombie, ".step_00000010.tmp", false},
                 {1, ".step_00000010.tmp", false}, // lives, but is another program: the number was used again
                 {(long)dead, ".other", true}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        CHECK_OK(checkpoint_name(path, &error, "%s/%s.%ld", out, cases[i].prefix, cases[i].pid), error);
        CHECK(mkdir(path, 0777) == 0, "mkdir %s", path);
        CHECK_OK(checkpoint_name(path, &error, "%s/%s.%ld/DONE", out, cases[i].prefix, cases[i].pid), error);
        files_dump(path, "x", 1);
    }
    CHECK_OK(checkpoint_test_save(out, 20, 1.0f, &error), error);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        CHECK_OK(checkpoint_name(path, &error, "%s/%s.%ld", out, cases[i].prefix, cases[i].pid), error);
        CHECK((access(path, F_OK) == 0) == cases[i].stays, "%s: expected %s", path, cases[i].stays ? "left" : "removed");
    }
    waitpid(zombie, &status, 0);
    kill(alive, SIGKILL);
    waitpid(alive, &status, 0);
    checkpoint_test_clear(out);
}

static void checkpoint_refuses(void) {
    char path[PATH_MAX];
    CheckpointWriter writer;
    Error error;
    const char* out = files_path("refuses");
    CHECK_FAILS(checkpoint_begin(&writer, "", 1, &error), error, "give one with --output");
    CHECK_FAILS(checkpoint_begin(&writer, "/proc/nowhere", 1, &error), error, "cannot make the folder /proc/nowhere");
    memset(path, 'x', PATH_MAX - 1);
    path[PATH_MAX - 1] = 0;
    CHECK_FAILS(checkpoint_begin(&writer, path, 1, &error), error, "folder");
    files_dump(files_path("plain"), "x", 1);
    CHECK_FAILS(checkpoint_begin(&writer, files_path("plain"), 1, &error), error, "cannot make the folder");
    CHECK_OK(checkpoint_begin(&writer, out, 1, &error), error);
    CHECK_FAILS(checkpoint_commit(&writer, &error), error, "holds no file");
    checkpoint_abandon(&writer, &error);
    CHECK(strstr(error.text, "cannot save the checkpoint of step 1: ") && strstr(error.text, "holds no file"), "message: %s", error.text);
    CHECK(checkpoint_test_count(out, false) == 0, "an empty checkpoint left something");
    CHECK_OK(checkpoint_begin(&writer, out, 1, &error), error);
    checkpoint_path(&writer, "a b", path);
    files_dump(path, "x", 1);
    CHECK_FAILS(checkpoint_commit(&writer, &error), error, "short names without spaces");
    checkpoint_abandon(&writer, NULL);
    // step and file of the same name: a person's own file is not touched
    files_dump(files_path("refuses/step_00000001"), "mine", 4);
    CHECK_FAILS(checkpoint_test_save(out, 1, 1.0f, &error), error, "cannot rename");
    CHECK(access(files_path("refuses/step_00000001"), F_OK) == 0, "the file is gone");
    checkpoint_test_clear(out);
}

// Another rank finds the folder by its name, or says that its host does not see it; it never removes it.
static void checkpoint_joined(void) {
    const char *out = files_path("joins"), *name;
    CheckpointWriter first, second;
    Error error;
    CHECK_OK(checkpoint_begin(&first, out, 7, &error), error);
    name = strrchr(first.folder, '/') + 1;
    CHECK_OK(checkpoint_join(&second, out, 7, name, &error), error);
    CHECK(strcmp(first.folder, second.folder) == 0 && second.manifest.step == 7, "joined %s", second.folder);
    CHECK_OK(checkpoint_sees(out, &error), error);
    snprintf(error.text, sizeof(error.text), "why");
    checkpoint_abandon(&second, &error);
    CHECK(strcmp(error.text, "cannot save the checkpoint of step 7: why; earlier checkpoints are untouched") == 0, "message: %s", error.text);
    CHECK(access(first.folder, F_OK) == 0, "one that joined removed the folder");
    checkpoint_abandon(&first, NULL);
    CHECK(access(out, F_OK) == 0 && checkpoint_test_count(out, false) == 0, "the folder is left");
    CHECK_FAILS(checkpoint_join(&second, out, 7, ".step_00000007.tmp.1", &error), error, "--output must lie on a file system that all ranks share");
    CHECK(strncmp(error.text, "host ", 5) == 0 && strstr(error.text, " does not see "), "message: %s", error.text);
    files_dump(files_path("joins/.plain"), "x", 1);
    CHECK_FAILS(checkpoint_join(&second, out, 7, ".plain", &error), error, "does not see");
    checkpoint_test_clear(out);
}

static void checkpoint_forecast(void) {
    const char* out = files_path("space");
    uint64_t taken = 0;
    char path[PATH_MAX];
    Error error;
    struct stat status;
    const char* names[4] = {"config.txt", "model_00000010.bin", "state.safetensors", "DONE"};
    CHECK_OK(checkpoint_test_save(out, 10, 1.0f, &error), error);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(checkpoint_name(path, &error, "%s/step_00000010/%s", out, names[i]), error);
        taken += stat(path, &status) == 0 ? (uint64_t)status.st_size : 0;
    }
    uint64_t forecast = checkpoint_bytes(model_file_bytes(&reader_model, MODEL_FP32), READER_MODEL_ELEMENTS * 4, 1);
    CHECK(taken > 9000 && taken <= forecast && forecast < taken + 200000, "forecast %" PRIu64 ", taken %" PRIu64, forecast, taken);
    checkpoint_test_clear(out);
}

static const TestRow checkpoint_tests[] = {
    {"checkpoint: what a save leaves on disk", checkpoint_saves},
    {"checkpoint: a damaged one is passed over, with the reason", checkpoint_finds_older},
    {"checkpoint: the newest n and the major ones are kept", checkpoint_keeps},
    {"checkpoint: a save killed at any system call costs nothing", checkpoint_survives_kill},
    {"checkpoint: nor one of a step that is there already", checkpoint_survives_kill_same_step},
    {"checkpoint: deleting killed at any system call leaves no half", checkpoint_survives_kill_pruning},
    {"checkpoint: a full disk costs nothing", checkpoint_survives_full_disk},
    {"checkpoint: what dead runs left is removed", checkpoint_removes_stale},
    {"checkpoint: impossible folders are refused", checkpoint_refuses},
    {"checkpoint: another rank joins the folder", checkpoint_joined},
    {"checkpoint: the forecast of space covers what is taken", checkpoint_forecast},
};
