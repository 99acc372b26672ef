// file_part.h - one file written in pieces, in any order and by several ranks at once. One rank makes it, under its temporary name and
// with its full size; the others join it by path; each writes its pieces where they belong and syncs. Once all have, the rank that made
// the file commits it (file_commit). Checksums of pieces add up to those of the whole, so nobody reads what was written.
#pragma once
#include "../dataloader/file.h"

typedef struct {
    FileWriter file; // size and crc: of the whole, set by whoever commits it
    bool joined;     // another rank made the file, and commits or drops it
} FilePart;

// What a rank wrote of a tensor or file; the sums of all ranks are those of the whole.
typedef struct {
    uint64_t written; // elements or bytes
    uint64_t crc;     // share in the checksum of the whole, see crc32c_share
} PartSum;

// ---------------------------------------------------------------------------------------------------------------------------------
// CRC of a whole from the CRCs of its parts, in any order: crc(A B) = crc(A) x^(8 |B|) + crc(B) over GF(2), modulo the polynomial.

// Both in the reflected form of crc32c: bit 31 is x^0.
static uint32_t crc32c_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a & 0x80000000u) { product ^= b; }
        b = b & 1 ? (b >> 1) ^ 0x82F63B78u : b >> 1;
    }
    return product;
}

// The share of a part in the CRC of a whole in which `bytes` bytes follow it; the shares of all parts are XORed.
uint32_t crc32c_share(uint32_t crc, uint64_t bytes) {
    uint32_t power = 1u << 23; // x^8
    for (; bytes; bytes >>= 1) {
        if (bytes & 1) { crc = crc32c_multiply(power, crc); }
        power = crc32c_multiply(power, power);
    }
    return crc;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The file

void file_part_init(FilePart* part) {
    memset(part, 0, sizeof(*part));
    part->file.fd = -1;
}

// Drops the file, or leaves it to the rank that made it.
void file_part_abandon(FilePart* part) {
    if (!part->joined) {
        file_abandon(&part->file);
    } else if (part->file.fd >= 0) {
        close(part->file.fd);
        part->file.fd = -1;
    }
}

// The size comes first: a network file system that believes the file to be shorter fills the rest of a page with zeros of its own, over
// what another host wrote there.
bool file_part_create(FilePart* part, const char* path, uint64_t size, Error* error) {
    file_part_init(part);
    if (!file_create(&part->file, path, error)) { return false; }
    if (size <= INT64_MAX && ftruncate(part->file.fd, (off_t)size) == 0) { return true; }
    int reason = size <= INT64_MAX ? errno : EFBIG;
    file_part_abandon(part);
    return fail(error, "writing %s: %s", path, strerror(reason));
}

// The file of file_part_create(path, size) by process `maker`, on this host or another.
bool file_part_join(FilePart* part, const char* path, uint64_t size, long maker, Error* error) {
    FileWriter* file = &part->file;
    struct stat status;
    file_part_init(part);
    part->joined = true;
    snprintf(file->path, sizeof(file->path), "%s", path);
    snprintf(file->temporary, sizeof(file->temporary), "%s.tmp.%ld", path, maker);
    file->fd = open(file->temporary, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0) { return fail(error, "cannot open %s: %s", file->temporary, strerror(errno)); }
    if (fstat(file->fd, &status) == 0 && (uint64_t)status.st_size == size) { return true; }
    file_part_abandon(part);
    return fail(error, "%s: expected a file of %" PRIu64 " bytes; do all ranks run the same program and options?", file->temporary, size);
}

// On failure the part is abandoned.
bool file_part_write(FilePart* part, const void* data, size_t bytes, uint64_t offset, Error* error) {
    const char* at = (const char*)data;
    while (bytes > 0) {
        ssize_t put = pwrite(part->file.fd, at, min_size(bytes, (size_t)1 << 30), (off_t)offset);
        if (put < 0 && errno == EINTR) { continue; }
        if (put < 0) {
            int reason = errno;
            file_part_abandon(part);
            return fail(error, "writing %s: %s", part->file.path, strerror(reason));
        }
        at += put;
        bytes -= (size_t)put;
        offset += (uint64_t)put;
    }
    return true;
}

// What this rank wrote is on the disk. Quotas and remote disks may complain only now.
bool file_part_sync(FilePart* part, Error* error) {
    if (fsync(part->file.fd) == 0 || errno == EINVAL || errno == EROFS) { return true; }
    int reason = errno;
    file_part_abandon(part);
    return fail(error, "writing %s: %s", part->file.path, strerror(reason));
}
