// sidecar.h - NAME.crc32c beside each data file that we write: one line "crc32c XXXXXXXX bytes N". A file whose sidecar is
// missing is taken as it is (it comes from elsewhere); with one, the size is always checked and the contents on demand.
#pragma once
#include "file.h"

typedef struct {
    bool present;
    uint32_t crc;
    uint64_t size;
} Sidecar;

static bool sidecar_name(char name[PATH_MAX], const char* path, Error* error) {
    return snprintf(name, PATH_MAX, "%s.crc32c", path) < PATH_MAX || fail(error, "the path is too long: %.200s...", path);
}

static int sidecar_format(char* line, size_t bytes, uint32_t crc, uint64_t size) {
    return snprintf(line, bytes, "crc32c %08" PRIx32 " bytes %" PRIu64 "\n", crc, size);
}

// Reads what the sidecar of `path` says; present = false where there is none.
bool sidecar_read(Sidecar* sidecar, const char* path, Error* error) {
    char name[PATH_MAX], line[128] = {0}, again[128];
    FileReader file;
    memset(sidecar, 0, sizeof(*sidecar));
    if (!sidecar_name(name, path, error)) { return false; }
    if (access(name, F_OK) != 0) { return true; }
    if (!file_open(&file, name, error)) { return false; }
    bool good = file.size < sizeof(line) && file_read(&file, line, (size_t)file.size, 0, error);
    file_close(&file);
    good = good && sscanf(line, "crc32c %8" SCNx32 " bytes %" SCNu64, &sidecar->crc, &sidecar->size) == 2;
    if (good) { // what was read must print as it stands
        sidecar_format(again, sizeof(again), sidecar->crc, sidecar->size);
        good = strcmp(line, again) == 0;
    }
    if (!good) {
        return fail(error, "%s is not a line \"crc32c XXXXXXXX bytes N\": make the data again, or delete this file to go without", name);
    }
    sidecar->present = true;
    return true;
}

// Compares an open file with its sidecar: the size always, the contents if asked.
bool sidecar_check(const FileReader* file, bool contents, Error* error) {
    Sidecar sidecar;
    if (!sidecar_read(&sidecar, file->path, error)) { return false; }
    if (!sidecar.present) { return true; }
    if (sidecar.size != file->size) {
        return fail(error, "%s: its checksum file says %" PRIu64 " bytes, the file has %" PRIu64 ": copy it or make it again", file->path,
                    sidecar.size, file->size);
    }
    if (!contents) { return true; }
    const size_t block = (size_t)1 << 20;
    uint8_t* data = (uint8_t*)need(malloc(block));
    uint32_t crc = 0;
    bool good = true;
    for (uint64_t at = 0; good && at < file->size; at += block) {
        size_t bytes = file->size - at < block ? (size_t)(file->size - at) : block;
        good = file_read(file, data, bytes, at, error);
        crc = good ? crc32c(crc, data, bytes) : 0;
    }
    free(data);
    if (!good) { return false; }
    if (crc != sidecar.crc) {
        return fail(error, "%s is damaged: CRC-32C is %08" PRIx32 ", its checksum file says %08" PRIx32 ": copy it or make it again",
                    file->path, crc, sidecar.crc);
    }
    return true;
}

// file_commit, then the sidecar. A sidecar of an older file under this name goes first: it must never stand beside a newer file.
bool file_commit_checked(FileWriter* file, Error* error) {
    char name[PATH_MAX], line[128];
    FileWriter sidecar;
    if (!sidecar_name(name, file->path, error)) {
        file_abandon(file);
        return false;
    }
    if (unlink(name) != 0 && errno != ENOENT) {
        int reason = errno;
        file_abandon(file);
        return fail(error, "cannot replace %s: %s", name, strerror(reason));
    }
    int bytes = sidecar_format(line, sizeof(line), file->crc, file->size);
    return file_commit(file, error) && file_create(&sidecar, name, error) && file_write(&sidecar, line, (size_t)bytes, error) &&
           file_commit(&sidecar, error);
}
