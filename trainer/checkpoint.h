// checkpoint.h - checkpoint directories. OUT/step_00001000/ holds
//     model_00001000.bin   the model (model_file.h)        state.safetensors   optimizer state and what else resuming needs
//     config.txt           the options of the run          DONE                size and CRC-32C of each file, and of itself
// Saving fills a hidden folder OUT/.step_00001000.tmp.PID, syncs every file, writes DONE last and renames the folder: under its final
// name a checkpoint is whole or absent, at whatever instant the machine stops. A folder counts only if DONE is whole and all sizes
// agree; checksums are read before one is resumed. Deleting renames to OUT/.trash.* first. What dead runs left is removed by the next
// save; a PID says which those are, so a run holds OUT by its lock (run_lock.h). One rank calls these functions; others only join the
// hidden folder (checkpoint_join) to write their part of its files.
#pragma once
#include "../dataloader/file.h"
#include "run_lock.h"
#include <dirent.h>
#include <signal.h>

#define CHECKPOINT_DONE "DONE"
#define CHECKPOINT_MAX_FILES 64
#define CHECKPOINT_NAME_MAX 128
#define CHECKPOINT_MAX_DONE 32768

typedef struct {
    char name[CHECKPOINT_NAME_MAX];
    uint64_t size;
    uint32_t crc;
} CheckpointFile;

typedef struct {
    uint64_t step;
    CheckpointFile files[CHECKPOINT_MAX_FILES];
    int count;
} CheckpointManifest;

typedef struct {
    char folder[PATH_MAX]; // where the files are written, hidden
    char final[PATH_MAX];
    bool joined;                 // another rank made the folder, and publishes or removes it
    CheckpointManifest manifest; // of the files whose checksums are known already
} CheckpointWriter;

typedef struct {
    uint64_t* steps; // valid ones, newest first
    size_t count;
} CheckpointList;

// ---------------------------------------------------------------------------------------------------------------------------------
// Names.

// A path from a format, or an error when it is too long.
__attribute__((format(printf, 3, 4))) static bool checkpoint_name(char* path, Error* error, const char* format, ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(path, PATH_MAX, format, args);
    va_end(args);
    return length < PATH_MAX - 256 || fail(error, "the path %.100s... is too long", path);
}

bool checkpoint_folder(char* folder, const char* out, uint64_t step, Error* error) {
    return checkpoint_name(folder, error, "%s/step_%08" PRIu64, out, step);
}

// The step in a name "step_" and at least 8 digits; false for other names.
static bool checkpoint_parse_step(const char* name, uint64_t* step) {
    if (strncmp(name, "step_", 5) != 0) { return false; }
    size_t digits = strspn(name + 5, "0123456789");
    if (digits < 8 || digits > 18 || name[5 + digits] != 0 || (digits > 8 && name[5] == '0')) { return false; }
    *step = strtoull(name + 5, NULL, 10);
    return true;
}

// Member of the checkpoint being written, e.g. "state.safetensors"; path: PATH_MAX.
void checkpoint_path(const CheckpointWriter* writer, const char* member, char* path) {
    Error unused;
    checkpoint_name(path, &unused, "%s/%s", writer->folder, member); // checkpoint_begin left room
}

// ---------------------------------------------------------------------------------------------------------------------------------
// DONE, one line a file: "file NAME SIZE CRC"; the last line holds the checksum of the lines above it.

static bool checkpoint_write_done(const char* folder, const CheckpointManifest* m, Error* error) {
    char path[PATH_MAX], line[CHECKPOINT_NAME_MAX + 64];
    FileWriter file;
    if (!checkpoint_name(path, error, "%s/%s", folder, CHECKPOINT_DONE) || !file_create(&file, path, error)) { return false; }
    int length = snprintf(line, sizeof(line), "train_gpt checkpoint 1\nstep %" PRIu64 "\n", m->step);
    bool good = file_write(&file, line, (size_t)length, error);
    for (int i = 0; good && i < m->count; i++) {
        length = snprintf(line, sizeof(line), "file %s %" PRIu64 " %08x\n", m->files[i].name, m->files[i].size, m->files[i].crc);
        good = file_write(&file, line, (size_t)length, error);
    }
    length = snprintf(line, sizeof(line), "done %08x\n", file.crc);
    return good && file_write(&file, line, (size_t)length, error) && file_commit(&file, error);
}

// text: a NUL-terminated line; names without folders, of printable characters.
static bool checkpoint_parse_line(char* line, CheckpointManifest* m) {
    char rest = 0;
    if (m->count == CHECKPOINT_MAX_FILES) { return false; }
    CheckpointFile* f = &m->files[m->count++];
    int fields = sscanf(line, "file %127s %20" SCNu64 " %8" SCNx32 "%c", f->name, &f->size, &f->crc, &rest);
    return fields == 3 && !strchr(f->name, '/') && f->name[0] != '.' && f->size <= INT64_MAX;
}

static bool checkpoint_parse_done(char* text, size_t bytes, CheckpointManifest* m) {
    char *last = text, *line = text, rest = 0, seal[16];
    if (bytes == 0 || text[bytes - 1] != '\n' || memchr(text, 0, bytes)) { return false; }
    for (size_t i = 0; i + 1 < bytes; i++) {
        if (text[i] == '\n') { last = text + i + 1; }
    }
    text[bytes - 1] = 0;
    snprintf(seal, sizeof(seal), "done %08x", crc32c(0, text, (size_t)(last - text)));
    if (strcmp(last, seal) != 0) { return false; }
    for (int number = 0; line < last; number++) {
        char* end = strchr(line, '\n');
        *end = 0;
        bool good = number == 0   ? strcmp(line, "train_gpt checkpoint 1") == 0
                    : number == 1 ? sscanf(line, "step %20" SCNu64 "%c", &m->step, &rest) == 1
                                  : checkpoint_parse_line(line, m);
        if (!good) { return false; }
        line = end + 1;
    }
    return m->count > 0;
}

static bool checkpoint_read_done(const char* folder, CheckpointManifest* m, Error* error) {
    char path[PATH_MAX], text[CHECKPOINT_MAX_DONE];
    FileReader file;
    memset(m, 0, sizeof(*m));
    if (!checkpoint_name(path, error, "%s/%s", folder, CHECKPOINT_DONE)) { return false; }
    if (access(path, F_OK) != 0) { return fail(error, "%s is incomplete: it has no file DONE; take an older checkpoint", folder); }
    if (!file_open(&file, path, error)) { return false; }
    bool good = file.size < sizeof(text) || fail(error, "%s is too large to be the mark of a checkpoint", path);
    good = good && file_read(&file, text, (size_t)file.size, 0, error);
    if (good && !checkpoint_parse_done(text, (size_t)file.size, m)) { good = fail(error, "%s is damaged; take an older checkpoint", path); }
    file_close(&file);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Validity.

static bool checkpoint_file_crc(const FileReader* file, uint32_t* crc, Error* error) {
    size_t piece_bytes = (size_t)1 << 20;
    char* piece = (char*)need(malloc(piece_bytes));
    bool good = true;
    *crc = 0;
    for (uint64_t at = 0; good && at < file->size; at += piece_bytes) {
        size_t bytes = file->size - at < piece_bytes ? (size_t)(file->size - at) : piece_bytes;
        good = file_read(file, piece, bytes, at, error);
        *crc = good ? crc32c(*crc, piece, bytes) : *crc;
    }
    free(piece);
    return good;
}

// DONE is whole and every file has its size; with `read`, its checksum too.
static bool checkpoint_check(const char* folder, bool read, CheckpointManifest* m, Error* error) {
    if (!checkpoint_read_done(folder, m, error)) { return false; }
    for (int i = 0; i < m->count; i++) {
        const CheckpointFile* f = &m->files[i];
        char path[PATH_MAX];
        FileReader file;
        uint32_t crc = 0;
        if (!checkpoint_name(path, error, "%s/%s", folder, f->name) || !file_open(&file, path, error)) { return false; }
        bool good = file.size == f->size ||
                    fail(error, "%s: expected %" PRIu64 " bytes, found %" PRIu64 "; take an older checkpoint", path, f->size, file.size);
        if (good && read) {
            good = checkpoint_file_crc(&file, &crc, error) &&
                   (crc == f->crc ||
                    fail(error, "%s is damaged: expected checksum %08x, found %08x; take an older checkpoint", path, f->crc, crc));
        }
        file_close(&file);
        if (!good) { return false; }
    }
    return true;
}

// Reads every file of a checkpoint and compares sizes and checksums.
bool checkpoint_verify(const char* folder, Error* error) {
    CheckpointManifest m;
    return checkpoint_check(folder, true, &m, error);
}

static int checkpoint_compare_steps(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return x > y ? -1 : x < y;
}

// Steps of all folders that are named as checkpoints, newest first, valid or not. No folder OUT: an empty list.
static bool checkpoint_scan(const char* out, CheckpointList* list, Error* error) {
    size_t capacity = 0;
    list->steps = NULL;
    list->count = 0;
    DIR* folder = opendir(out);
    if (!folder) { return errno == ENOENT || fail(error, "cannot read folder %s: %s", out, strerror(errno)); }
    for (struct dirent* entry = readdir(folder); entry; entry = readdir(folder)) {
        uint64_t step = 0;
        if (!checkpoint_parse_step(entry->d_name, &step)) { continue; }
        if (list->count == capacity) {
            capacity = capacity * 2 + 16;
            list->steps = (uint64_t*)need(realloc(list->steps, capacity * sizeof(uint64_t)));
        }
        list->steps[list->count++] = step;
    }
    closedir(folder);
    if (list->count > 1) { qsort(list->steps, list->count, sizeof(uint64_t), checkpoint_compare_steps); }
    return true;
}

void checkpoint_list_free(CheckpointList* list) {
    free(list->steps);
    list->steps = NULL;
    list->count = 0;
}

// The valid checkpoints (DONE and sizes; no checksums), newest first.
bool checkpoint_list(const char* out, CheckpointList* list, Error* error) {
    CheckpointManifest m;
    char folder[PATH_MAX];
    size_t kept = 0;
    if (!checkpoint_scan(out, list, error)) { return false; }
    for (size_t i = 0; i < list->count; i++) {
        Error reason;
        if (checkpoint_folder(folder, out, list->steps[i], &reason) && checkpoint_check(folder, false, &m, &reason) &&
            m.step == list->steps[i]) {
            list->steps[kept++] = list->steps[i];
        }
    }
    list->count = kept;
    return true;
}

// The newest checkpoint whose checksums all agree. folder (PATH_MAX) is "" when there is none; notice says which newer ones were
// passed over and why, "" when none was.
bool checkpoint_find_latest(const char* out, char* folder, uint64_t* step, Error* notice, Error* error) {
    CheckpointList list;
    CheckpointManifest m;
    folder[0] = notice->text[0] = 0;
    *step = 0;
    if (!checkpoint_scan(out, &list, error)) { return false; }
    for (size_t i = 0; i < list.count; i++) {
        Error reason;
        bool good = checkpoint_folder(folder, out, list.steps[i], &reason) && checkpoint_check(folder, true, &m, &reason);
        if (good && m.step != list.steps[i]) { good = fail(&reason, "%s holds step %" PRIu64 "; it was renamed", folder, m.step); }
        if (good) {
            *step = list.steps[i];
            break;
        }
        folder[0] = 0;
        Error before = *notice;
        fail(notice, "%s%sstep_%08" PRIu64 " is passed over: %s", before.text, before.text[0] ? ". " : "", list.steps[i], reason.text);
    }
    checkpoint_list_free(&list);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Removing.

// A folder of files, DONE first; never follows a link. Another process may be removing it too.
static bool checkpoint_remove(const char* path, Error* error) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR* folder = fd >= 0 ? fdopendir(fd) : NULL;
    if (!folder) {
        int reason = errno;
        if (fd >= 0) { close(fd); }
        if (reason == ENOENT || unlink(path) == 0) { return true; } // a link or a plain file
        return fail(error, "cannot remove %s: %s", path, strerror(reason));
    }
    unlinkat(fd, CHECKPOINT_DONE, 0);
    for (struct dirent* entry = readdir(folder); entry; entry = readdir(folder)) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) { unlinkat(fd, entry->d_name, 0); }
    }
    closedir(folder);
    return rmdir(path) == 0 || errno == ENOENT || fail(error, "cannot remove %s: %s; remove it by hand", path, strerror(errno));
}

// First out of the way under a hidden name, so that a crash in between leaves no half checkpoint.
static bool checkpoint_trash(const char* out, uint64_t step, Error* error) {
    char folder[PATH_MAX], trash[PATH_MAX];
    if (!checkpoint_folder(folder, out, step, error) ||
        !checkpoint_name(trash, error, "%s/.trash.step_%08" PRIu64 ".%ld", out, step, (long)getpid()) || !checkpoint_remove(trash, error)) {
        return false;
    }
    if (rename(folder, trash) != 0) { return fail(error, "cannot rename %s to %s: %s", folder, trash, strerror(errno)); }
    return directory_sync(folder, error) && checkpoint_remove(trash, error);
}

// Of /proc/PID/stat "1234 (train_gpt) R ...": text gets "(train_gpt", text + 36 the state; false when it cannot be read.
static bool checkpoint_process_text(const char* path, char* text) {
    long pid;
    FILE* file = fopen(path, "r");
    bool good = file && fscanf(file, "%ld %30[^)]%2[)] %1s", &pid, text, text + 32, text + 36) == 4;
    if (file) { fclose(file); }
    return good;
}

// Whether process `pid` runs this program: numbers are used again, soon where few are to be had, and the dead stay listed until
// their parent asks for them (state Z).
static bool checkpoint_process_lives(long pid) {
    char path[64], theirs[40], ours[40];
    if (kill((pid_t)pid, 0) != 0 && errno == ESRCH) { return false; }
    snprintf(path, sizeof(path), "/proc/%ld/stat", pid);
    if (!checkpoint_process_text(path, theirs) || !checkpoint_process_text("/proc/self/stat", ours)) { return true; }
    return strcmp(theirs, ours) == 0 && theirs[36] != 'Z' && theirs[36] != 'X';
}

// Is this the name of what a dead run, or this one, left while saving or deleting: a folder, or the copy of the tokenizer?
static bool checkpoint_is_stale(const char* name) {
    if (strncmp(name, ".trash.step_", 12) == 0) { return true; }
    const char* mark = strstr(name, ".tmp.");
    bool ours = strncmp(name, ".step_", 6) == 0 || strncmp(name, "tokenizer.bin.", 14) == 0;
    if (!ours || !mark) { return false; }
    long pid = strtol(mark + 5, NULL, 10);
    return pid > 0 && pid <= INT_MAX && (pid == (long)getpid() || !checkpoint_process_lives(pid));
}

static bool checkpoint_remove_stale(const char* out, Error* error) {
    DIR* folder = opendir(out);
    bool good = folder || fail(error, "cannot read folder %s: %s", out, strerror(errno));
    for (struct dirent* entry = good ? readdir(folder) : NULL; good && entry; entry = readdir(folder)) {
        char path[PATH_MAX];
        if (!checkpoint_is_stale(entry->d_name)) { continue; }
        good = checkpoint_name(path, error, "%s/%s", out, entry->d_name) && checkpoint_remove(path, error);
    }
    if (folder) { closedir(folder); }
    return good;
}

// Keeps the newest `keep` checkpoints (0: all) and every one whose step is a multiple of major_every (0: none); removes the other
// valid ones, oldest first. Damaged ones are left for a person to judge. Folders of later steps than `upto`, the one just saved, are
// neither counted nor removed: a run that resumes passes over a later one only if its contents are damaged, and their size may agree.
bool checkpoint_prune(const char* out, int keep, uint64_t major_every, uint64_t upto, Error* error) {
    CheckpointList list;
    if (keep <= 0) { return true; }
    if (!checkpoint_list(out, &list, error)) { return false; }
    bool good = true;
    size_t later = 0;
    while (later < list.count && list.steps[later] > upto) { later++; }
    for (size_t i = list.count; good && i-- > (size_t)keep + later;) {
        bool major = major_every > 0 && list.steps[i] % major_every == 0;
        if (!major) { good = checkpoint_trash(out, list.steps[i], error); }
    }
    checkpoint_list_free(&list);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Saving.

static void checkpoint_writer_init(CheckpointWriter* writer, uint64_t step) {
    memset(&writer->manifest, 0, sizeof(writer->manifest));
    writer->manifest.step = step;
    writer->folder[0] = writer->final[0] = 0;
    writer->joined = false;
}

// Makes the hidden folder (and OUT), after removing what dead runs left there.
bool checkpoint_begin(CheckpointWriter* writer, const char* out, uint64_t step, Error* error) {
    checkpoint_writer_init(writer, step);
    if (!out[0]) { return fail(error, "a checkpoint needs a folder; give one with --output"); }
    if (!folder_make(out, error) || !checkpoint_remove_stale(out, error) || !checkpoint_folder(writer->final, out, step, error)) {
        return false;
    }
    char folder[PATH_MAX];
    if (!checkpoint_name(folder, error, "%s/.step_%08" PRIu64 ".tmp.%ld", out, step, (long)getpid())) { return false; }
    if (mkdir(folder, 0777) != 0) { return fail(error, "cannot make folder %s: %s", folder, strerror(errno)); }
    strcpy(writer->folder, folder);
    return true;
}

// Whether this host has the folder that another rank made or found.
bool checkpoint_sees(const char* folder, Error* error) {
    struct stat status;
    char host[HOST_NAME_MAX + 1] = "unknown";
    if (stat(folder, &status) == 0 && S_ISDIR(status.st_mode)) { return true; }
    gethostname(host, sizeof(host) - 1);
    return fail(error, "host %s does not see %s: --output must lie on a file system that all ranks share", host, folder);
}

// The hidden folder OUT/name that another rank began.
bool checkpoint_join(CheckpointWriter* writer, const char* out, uint64_t step, const char* name, Error* error) {
    checkpoint_writer_init(writer, step);
    writer->joined = true;
    return checkpoint_name(writer->folder, error, "%s/%s", out, name) && checkpoint_sees(writer->folder, error);
}

// Spares checkpoint_commit the reading of a file that was written, and committed, through `file`.
void checkpoint_record(CheckpointWriter* writer, const FileWriter* file) {
    CheckpointManifest* m = &writer->manifest;
    const char* slash = strrchr(file->path, '/');
    const char* name = slash ? slash + 1 : file->path;
    if (m->count == CHECKPOINT_MAX_FILES || strlen(name) >= CHECKPOINT_NAME_MAX) { return; } // the commit says so
    CheckpointFile* f = &m->files[m->count++];
    memcpy(f->name, name, strlen(name) + 1);
    f->size = file->size;
    f->crc = file->crc;
}

// Removes what was written, on the rank that began. error (may be NULL) holds the reason and becomes the line for the user.
void checkpoint_abandon(CheckpointWriter* writer, Error* error) {
    Error second, reason;
    if (writer->folder[0] && !writer->joined) { checkpoint_remove(writer->folder, &second); }
    writer->folder[0] = 0;
    if (!error || !error->text[0]) { return; }
    reason = *error;
    bool full = strstr(reason.text, strerror(ENOSPC)) || strstr(reason.text, strerror(EDQUOT)) || strstr(reason.text, strerror(EFBIG));
    fail(error, "cannot save the checkpoint of step %" PRIu64 ": %s; %searlier checkpoints are untouched", writer->manifest.step,
         reason.text, full ? "free some space or lower --keep; " : "");
}

// One file of the folder: synced, and in the manifest with its checksum.
static bool checkpoint_seal_file(const char* folder, const char* name, const CheckpointManifest* known, CheckpointManifest* m,
                                 Error* error) {
    char path[PATH_MAX];
    FileReader file;
    if (m->count == CHECKPOINT_MAX_FILES || strlen(name) >= CHECKPOINT_NAME_MAX || strpbrk(name, " \t\n\r\v\f")) {
        return fail(error, "%s/%s: a checkpoint holds at most %d files with short names without spaces", folder, name,
                    CHECKPOINT_MAX_FILES);
    }
    if (!checkpoint_name(path, error, "%s/%s", folder, name) || !file_open(&file, path, error)) { return false; }
    CheckpointFile* f = &m->files[m->count++];
    strcpy(f->name, name);
    f->size = file.size;
    const CheckpointFile* recorded = NULL;
    for (int i = 0; i < known->count; i++) { recorded = strcmp(known->files[i].name, name) == 0 ? &known->files[i] : recorded; }
    bool good = true;
    if (!recorded) {
        good = checkpoint_file_crc(&file, &f->crc, error);
    } else {
        f->crc = recorded->crc;
        good = recorded->size == file.size ||
               fail(error, "%s: %" PRIu64 " bytes were written, %" PRIu64 " are there", path, recorded->size, file.size);
    }
    good = good && (fsync(file.fd) == 0 || errno == EINVAL || errno == EROFS || fail(error, "writing %s: %s", path, strerror(errno)));
    file_close(&file);
    return good;
}

static bool checkpoint_seal(const CheckpointWriter* writer, Error* error) {
    CheckpointManifest m;
    memset(&m, 0, sizeof(m));
    m.step = writer->manifest.step;
    DIR* folder = opendir(writer->folder);
    bool good = folder || fail(error, "cannot read folder %s: %s", writer->folder, strerror(errno));
    for (struct dirent* entry = good ? readdir(folder) : NULL; good && entry; entry = readdir(folder)) {
        if (entry->d_name[0] == '.') { continue; }
        good = checkpoint_seal_file(writer->folder, entry->d_name, &writer->manifest, &m, error);
    }
    if (folder) { closedir(folder); }
    if (good && m.count == 0) { good = fail(error, "%s holds no file", writer->folder); }
    return good && checkpoint_write_done(writer->folder, &m, error); // syncs the folder as well
}

// The sealed folder under its final name. A checkpoint of this step that exists already changes places with it in one go and is
// removed then; on the few file systems that cannot exchange, the old one steps aside first, and a crash just between the two
// renames loses this step (not the earlier ones).
static bool checkpoint_publish(const CheckpointWriter* writer, Error* error) {
    const char *from = writer->folder, *to = writer->final;
    char aside[PATH_MAX + 16];
    Error unused;
    if (rename(from, to) == 0) { return directory_sync(to, error); }
    if (errno != ENOTEMPTY && errno != EEXIST) { return fail(error, "cannot rename %s to %s: %s", from, to, strerror(errno)); }
    snprintf(aside, sizeof(aside), "%s.old", from);
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) == 0) {
        snprintf(aside, sizeof(aside), "%s", from);
    } else if (rename(to, aside) != 0 || rename(from, to) != 0) {
        return fail(error, "cannot rename %s to %s: %s", from, to, strerror(errno));
    }
    if (!directory_sync(to, error)) { return false; }
    checkpoint_remove(aside, &unused); // where this fails, the next save tries again
    return true;
}

// Seals the folder and gives it its final name. On failure the caller abandons it.
bool checkpoint_commit(const CheckpointWriter* writer, Error* error) {
    return checkpoint_seal(writer, error) && checkpoint_publish(writer, error);
}

// Bytes that a checkpoint takes, for disk_space_check: the model file, `state_bytes` of state in `tensors` tensors, and some for
// headers, texts and blocks.
uint64_t checkpoint_bytes(uint64_t model_bytes, uint64_t state_bytes, uint64_t tensors) {
    return model_bytes + state_bytes + tensors * 320 + 131072;
}
