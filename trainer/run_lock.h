// run_lock.h - the output folder of a run: making it, holding it against a second run, and seeing in time that the disk is too small.
// The lock is flock's on the file LOCK: the kernel lets go of it when the holder ends, however it ends, so none is ever stale. The
// file's text says who holds it and stays there; only the lock counts.
#pragma once
#include "../kernels/base.h"
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

typedef struct {
    int fd; // -1: not held
} RunLock;

// 512 bytes, 1.5 KiB, 20.0 GiB
void bytes_text(uint64_t bytes, char* text, size_t size) {
    static const char* const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes / 1024;
    size_t unit = 0;
    for (; value >= 1023.95 && unit + 1 < COUNT_OF(units); unit++) { value /= 1024; }
    if (bytes < 1024) {
        snprintf(text, size, "%" PRIu64 " bytes", bytes);
    } else {
        snprintf(text, size, "%.1f %s", value, units[unit]);
    }
}

// Makes the folder and those above it; one that is there is fine.
bool folder_make(const char* path, Error* error) {
    char part[PATH_MAX];
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof(part)) { return fail(error, "a folder's name has 1 to %d bytes, found %zu", PATH_MAX - 1, length); }
    for (size_t end = 1; end <= length; end++) {
        if (path[end] != '/' && path[end] != 0) { continue; }
        memcpy(part, path, end);
        part[end] = 0;
        if (mkdir(part, 0777) == 0) { continue; }
        int reason = errno;
        struct stat status;
        if (stat(part, &status) == 0 && S_ISDIR(status.st_mode)) { continue; }
        return fail(error, "cannot make the folder %s: %s", part, reason == EEXIST ? "a file of that name stands there" : strerror(reason));
    }
    return true;
}

// Who holds the lock, as the file says.
static void run_lock_holder(int fd, char* text, size_t size) {
    ssize_t got = pread(fd, text, size - 1, 0);
    text[got > 0 ? got : 0] = 0;
    text[strcspn(text, "\r\n")] = 0;
    for (char* c = text; *c; c++) { *c = (unsigned char)*c < 32 || *c == 127 ? '?' : *c; }
    if (!text[0]) { snprintf(text, size, "another process"); }
}

// Takes the folder for this run, which holds it until run_lock_release or its end. Children that go on after a fork hold it too.
// A file system without locks is let pass: lock->fd is -1 then.
bool run_lock_take(RunLock* lock, const char* folder, Error* error) {
    char path[PATH_MAX + 8], holder[160], host[80] = "", date[40];
    snprintf(path, sizeof(path), "%s/LOCK", folder);
    lock->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock->fd < 0) { return fail(error, "cannot write in the folder %s: %s", folder, strerror(errno)); }
    if (flock(lock->fd, LOCK_EX | LOCK_NB) != 0) {
        bool busy = errno == EWOULDBLOCK;
        if (busy) { run_lock_holder(lock->fd, holder, sizeof(holder)); }
        close(lock->fd);
        lock->fd = -1;
        return !busy || fail(error, "the folder %s is in use by %s; stop that run, or give another --output", folder, holder);
    }
    gethostname(host, sizeof(host) - 1);
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
    int length = snprintf(holder, sizeof(holder), "process %ld on %.60s since %s\n", (long)getpid(), host, date);
    if (ftruncate(lock->fd, 0) != 0 || pwrite(lock->fd, holder, (size_t)length, 0) != length) {
        int reason = errno;
        close(lock->fd);
        lock->fd = -1;
        return fail(error, "cannot write %s: %s", path, strerror(reason));
    }
    return true;
}

// Whether the folder still holds the file that is locked: somebody may have removed or renamed the folder under a run.
bool run_lock_holds(const RunLock* lock, const char* folder) {
    char path[PATH_MAX + 8];
    struct stat held, there;
    snprintf(path, sizeof(path), "%s/LOCK", folder);
    return lock->fd < 0 || (fstat(lock->fd, &held) == 0 && stat(path, &there) == 0 && held.st_ino == there.st_ino && held.st_dev == there.st_dev);
}

void run_lock_release(RunLock* lock) {
    if (lock->fd >= 0) { close(lock->fd); }
    lock->fd = -1;
}

// Bytes that this user can still write in the folder's file system.
bool disk_space_free(const char* folder, uint64_t* bytes, Error* error) {
    struct statvfs status;
    if (statvfs(folder, &status) != 0) { return fail(error, "cannot ask for the free space of %s: %s", folder, strerror(errno)); }
    if (__builtin_mul_overflow((uint64_t)status.f_bavail, (uint64_t)status.f_frsize, bytes)) { *bytes = UINT64_MAX; }
    return true;
}

// Refuses when fewer than `needed` bytes are free. purpose: "2 checkpoints of 474.8 MiB and one being written".
bool disk_space_check(const char* folder, uint64_t needed, const char* purpose, Error* error) {
    uint64_t bytes = 0;
    char need_text[32], free_text[32];
    if (!disk_space_free(folder, &bytes, error)) { return false; }
    if (bytes >= needed) { return true; }
    bytes_text(needed, need_text, sizeof(need_text));
    bytes_text(bytes, free_text, sizeof(free_text));
    return fail(error, "%s: %s are needed for %s, %s are free; free some space, lower --keep or give another --output", folder, need_text,
                purpose, free_text);
}
