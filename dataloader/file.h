// file.h - reading and writing files without surprises. Readers go by position (pread: a file that shrinks under us is an error,
// not a crash) and know the size; writers write to a temporary name, sync, and rename, so that a file is there whole or not at all.
// CRC-32C (Castagnoli) guards our own files.
#pragma once
#include "../kernels/base.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    int fd;
    uint64_t size;
    char path[PATH_MAX];
} FileReader;

// A pipe is refused, not waited for (O_NONBLOCK means nothing to a regular file).
bool file_open(FileReader* file, const char* path, Error* error) {
    struct stat status;
    snprintf(file->path, sizeof(file->path), "%s", path);
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0) { return fail(error, "cannot open %s: %s", path, strerror(errno)); }
    if (fstat(file->fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        close(file->fd);
        file->fd = -1;
        return fail(error, "%s is not a regular file", path);
    }
    file->size = (uint64_t)status.st_size;
    return true;
}

void file_close(FileReader* file) {
    if (file->fd >= 0) { close(file->fd); }
    file->fd = -1;
}

// Exactly `bytes` bytes from `offset`, or an error that names the file.
bool file_read(const FileReader* file, void* data, size_t bytes, uint64_t offset, Error* error) {
    char* at = (char*)data;
    size_t left = bytes;
    while (left > 0) {
        ssize_t got = pread(file->fd, at, min_size(left, (size_t)1 << 30), (off_t)offset);
        if (got < 0 && errno == EINTR) { continue; }
        if (got < 0) { return fail(error, "reading %s: %s", file->path, strerror(errno)); }
        if (got == 0) {
            return fail(error, "%s ends too early: %zu bytes are missing at offset %" PRIu64, file->path, left, offset);
        }
        at += got;
        left -= (size_t)got;
        offset += (uint64_t)got;
    }
    return true;
}

// CRC-32C, reflected, polynomial 0x1EDC6F41 (RFC 3720 appendix B.4); start with crc = 0, feed pieces in order. x86-64 has an
// instruction for it; elsewhere a table.
#ifdef __SSE4_2__
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
    const uint8_t* p = (const uint8_t*)data;
    uint64_t c = ~crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        unsigned long long word; // the instruction's own type
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; bytes > 0; bytes--, p++) { c = __builtin_ia32_crc32qi((uint32_t)c, *p); }
    return ~(uint32_t)c;
}
#else
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
    static uint32_t table[256];
    if (!table[1]) { // filled on the main thread before any other can ask
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) { c = c & 1 ? (c >> 1) ^ 0x82F63B78u : c >> 1; }
            table[i] = c;
        }
    }
    const uint8_t* p = (const uint8_t*)data;
    crc = ~crc;
    for (; bytes > 0; bytes--, p++) { crc = table[(crc ^ *p) & 255] ^ (crc >> 8); }
    return ~crc;
}
#endif

typedef struct {
    int fd;
    uint64_t size;
    uint32_t crc;
    char path[PATH_MAX], temporary[PATH_MAX + 32];
} FileWriter;

bool file_create(FileWriter* file, const char* path, Error* error) {
    file->size = 0;
    file->crc = 0;
    snprintf(file->path, sizeof(file->path), "%s", path);
    snprintf(file->temporary, sizeof(file->temporary), "%s.tmp.%ld", path, (long)getpid());
    file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file->fd < 0) { return fail(error, "cannot create %s: %s", file->temporary, strerror(errno)); }
    return true;
}

// Drops the temporary file; what stood under the final name is untouched.
void file_abandon(FileWriter* file) {
    if (file->fd < 0) { return; }
    close(file->fd);
    unlink(file->temporary);
    file->fd = -1;
}

// On failure the file is abandoned.
bool file_write(FileWriter* file, const void* data, size_t bytes, Error* error) {
    const char* at = (const char*)data;
    size_t left = bytes;
    file->crc = crc32c(file->crc, data, bytes);
    file->size += bytes;
    while (left > 0) {
        ssize_t put = write(file->fd, at, min_size(left, (size_t)1 << 30));
        if (put < 0 && errno == EINTR) { continue; }
        if (put < 0) {
            int reason = errno;
            file_abandon(file);
            return fail(error, "writing %s: %s", file->path, strerror(reason));
        }
        at += put;
        left -= (size_t)put;
    }
    return true;
}

// Makes the directory entry itself durable.
bool directory_sync(const char* path, Error* error) {
    char folder[PATH_MAX];
    snprintf(folder, sizeof(folder), "%s", path);
    char* slash = strrchr(folder, '/');
    if (slash) {
        slash[slash == folder] = 0;
    } else {
        strcpy(folder, ".");
    }
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) { return fail(error, "cannot open folder %s: %s", folder, strerror(errno)); }
    bool good = fsync(fd) == 0 || errno == EINVAL; // some file systems cannot sync a folder
    close(fd);
    return good || fail(error, "cannot sync folder %s: %s", folder, strerror(errno));
}

// Sync, rename to the final name, sync the folder.
bool file_commit(FileWriter* file, Error* error) {
    if (fsync(file->fd) != 0 && errno != EINVAL && errno != EROFS) {
        int reason = errno;
        file_abandon(file);
        return fail(error, "writing %s: %s", file->path, strerror(reason));
    }
    close(file->fd);
    file->fd = -1;
    if (rename(file->temporary, file->path) != 0) {
        int reason = errno;
        unlink(file->temporary);
        return fail(error, "cannot rename %s to %s: %s", file->temporary, file->path, strerror(reason));
    }
    return directory_sync(file->path, error);
}
