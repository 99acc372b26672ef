// fuzz_readers.c - feeds broken files to every reader of readers.h. Whatever the bytes, a reader must come back, free what it took
// and, where it refuses, say why in one line.
//     without libFuzzer: cc -x c -std=gnu11 -D_GNU_SOURCE -g -O1 -fsanitize=address,undefined dev/fuzz_readers.c -lpcre2-8 -lm -ldl
//         a.out [ROUNDS [SEED [READER]]]   changes good files at random, the same way for the same seed
//         a.out seeds FOLDER               writes good files for libFuzzer to start from
//         a.out file FILE                  reads one file that libFuzzer or a run of this program left
//     with libFuzzer: clang, the same and -DLIBFUZZER -fsanitize=fuzzer; the first byte chooses the reader, the rest is the file
// The file being read is kept, in the same form, as fuzz_last.bin until the program has ended well.
#include "readers.h"
#include <sys/mman.h>

// Writes the bytes to a file in memory and reads it; the path names it.
static void fuzz_one(const ReaderRow* row, const uint8_t* data, size_t bytes) {
    static int fd = -1;
    static char path[64];
    Error error;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    }
    if (fd < 0 || ftruncate(fd, 0) != 0 || (bytes > 0 && pwrite(fd, data, bytes, 0) != (ssize_t)bytes)) {
        fprintf(stderr, "error: no file in memory: %s\n", strerror(errno));
        exit(1);
    }
    memset(&error, 0, sizeof(error));
    bool good = row->read(path, &error);
    if (!good && (!error.text[0] || strchr(error.text, '\n'))) {
        fprintf(stderr, "error: %s refused a file without a line that says why: \"%s\"\n", row->name, error.text);
        abort();
    }
}

#ifdef LIBFUZZER
#ifdef __cplusplus
extern "C"
#endif
    int
    LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    if (bytes > 0) { fuzz_one(&reader_rows[data[0] % COUNT_OF(reader_rows)], data + 1, bytes - 1); }
    return 0;
}
#else

#define FUZZ_MAX ((size_t)1 << 16)
#define FUZZ_VARIANTS 6

typedef struct {
    uint8_t data[1 + FUZZ_MAX]; // the first byte is the reader's number
    size_t bytes;               // of the file, without that byte
} FuzzFile;

static uint64_t fuzz_state;
static FuzzFile fuzz_current;

static uint64_t fuzz_random(uint64_t below) {
    fuzz_state ^= fuzz_state << 13; // xorshift (Marsaglia 2003)
    fuzz_state ^= fuzz_state >> 7;
    fuzz_state ^= fuzz_state << 17;
    return below ? (fuzz_state >> 11) % below : 0;
}

// The input outlives whatever its reader does to the program.
static void fuzz_keep(int fd) {
    if (ftruncate(fd, 0) != 0 || pwrite(fd, fuzz_current.data, 1 + fuzz_current.bytes, 0) < 0) {
        fprintf(stderr, "error: cannot write fuzz_last.bin: %s\n", strerror(errno));
        exit(1);
    }
}

// One change of the kind that breaks readers.
static void fuzz_mutate(FuzzFile* file) {
    static const uint64_t numbers[] = {
        0,          1,          2,          127,        128,           255,           256,           32767,
        65535,      65536,      0x7fffffff, 0x80000000, 0xffffffff,    0x100000000,   INT64_MAX,     (uint64_t)1 << 63,
        UINT64_MAX, 0xfffffff0, 1024,       50257,      0x40000000000, 0x20000000001, UINT64_MAX / 4};
    static const char* words[] = {"{",
                                  "}",
                                  "[",
                                  "]",
                                  ":",
                                  ",",
                                  "\"",
                                  "\\",
                                  "\\u0000",
                                  "\\ud800",
                                  "null",
                                  "-1",
                                  "1e9",
                                  "0",
                                  "4",
                                  "18446744073709551615",
                                  "{\"",
                                  "\":{\"dtype\":\"F32\",\"shape\":[",
                                  "],\"data_offsets\":[",
                                  "\"__metadata__\":{",
                                  "\xff",
                                  "\xf0\x9f",
                                  "\n",
                                  " ",
                                  "\r\n",
                                  "=="};
    uint8_t* d = file->data + 1;
    size_t n = file->bytes, at = (size_t)fuzz_random(n + 1), near_start = (size_t)fuzz_random(min_size(n, 64) + 1);
    if (fuzz_random(2)) { at = near_start; }
    switch (fuzz_random(9)) {
    case 0: file->bytes = at; break; // cut
    case 1:                          // grow
        file->bytes = min_size(FUZZ_MAX, n + 1 + (size_t)fuzz_random(fuzz_random(8) ? 16 : 4096));
        memset(d + n, (int)fuzz_random(256), file->bytes - n);
        break;
    case 2:
        if (at < n) { d[at] ^= (uint8_t)(1u << fuzz_random(8)); }
        break;
    case 3:
        if (at < n) { d[at] = (uint8_t)fuzz_random(256); }
        break;
    case 4:
    case 5: { // a number of 2, 4 or 8 bytes, mostly where one stands
        size_t width = (size_t)2 << fuzz_random(3), place = at / width * width;
        uint64_t value = numbers[fuzz_random(COUNT_OF(numbers))] + fuzz_random(3) - 1;
        if (place + width <= n) { memcpy(d + place, &value, width); }
        break;
    }
    case 6: { // a piece of the file over or into another place
        size_t length = (size_t)fuzz_random(min_size(n - at, 64) + 1), to = (size_t)fuzz_random(n + 1);
        bool insert = fuzz_random(2) && n + length <= FUZZ_MAX;
        uint8_t piece[64];
        memcpy(piece, d + at, length);
        if (insert) { memmove(d + to + length, d + to, n - to); }
        if (insert) { file->bytes = n + length; }
        memcpy(d + to, piece, insert ? length : min_size(length, n - to));
        break;
    }
    case 7: { // a piece removed
        size_t length = (size_t)fuzz_random(min_size(n - at, 64) + 1);
        memmove(d + at, d + at + length, n - at - length);
        file->bytes = n - length;
        break;
    }
    default: { // a word of the text formats
        const char* word = words[fuzz_random(COUNT_OF(words))];
        size_t length = strlen(word);
        if (n + length > FUZZ_MAX) { break; }
        memmove(d + at + length, d + at, n - at);
        memcpy(d + at, word, length);
        file->bytes = n + length;
    }
    }
}

static void fuzz_make_seed(FuzzFile* file, size_t row, int variant) {
    char path[] = "/tmp/fuzz_readers_XXXXXX";
    Error error;
    FileReader reader;
    int fd = mkstemp(path);
    if (fd >= 0) { close(fd); }
    file->data[0] = (uint8_t)row;
    bool good = reader_rows[row].write_seed(path, variant, &error) && file_open(&reader, path, &error);
    if (good) {
        file->bytes = (size_t)reader.size;
        good = (file->bytes <= FUZZ_MAX || fail(&error, "%s: a seed of %zu bytes is too large", path, file->bytes)) &&
               file_read(&reader, file->data + 1, file->bytes, 0, &error);
        file_close(&reader);
    }
    unlink(path);
    if (!good || !reader_rows[row].read) {
        fprintf(stderr, "error: no good file for \"%s\": %s\n", reader_rows[row].name, error.text);
        exit(1);
    }
}

static int fuzz_file(const char* path) {
    Error error;
    FileReader reader;
    if (!file_open(&reader, path, &error) || reader.size < 1 || reader.size > sizeof(fuzz_current.data) ||
        !file_read(&reader, fuzz_current.data, (size_t)reader.size, 0, &error)) {
        fprintf(stderr, "error: cannot read %s, or its size is not 1 to %zu bytes\n", path, sizeof(fuzz_current.data));
        return 1;
    }
    fuzz_one(&reader_rows[fuzz_current.data[0] % COUNT_OF(reader_rows)], fuzz_current.data + 1, (size_t)reader.size - 1);
    file_close(&reader);
    return 0;
}

static int fuzz_write_seeds(const char* folder) {
    for (size_t row = 0; row < COUNT_OF(reader_rows); row++) {
        for (int variant = 0; variant < FUZZ_VARIANTS; variant++) {
            char path[PATH_MAX];
            Error error;
            FileWriter file;
            fuzz_make_seed(&fuzz_current, row, variant);
            snprintf(path, sizeof(path), "%s/seed_%zu_%d", folder, row, variant);
            if (!file_create(&file, path, &error) || !file_write(&file, fuzz_current.data, 1 + fuzz_current.bytes, &error) ||
                !file_commit(&file, &error)) {
                fprintf(stderr, "error: %s\n", error.text);
                return 1;
            }
        }
    }
    return 0;
}

int main(int argc, char** argv) {
    if (argc == 3 && strcmp(argv[1], "file") == 0) { return fuzz_file(argv[2]); }
    if (argc == 3 && strcmp(argv[1], "seeds") == 0) { return fuzz_write_seeds(argv[2]); }
    uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : 20000, seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    static FuzzFile good;
    int kept = open("fuzz_last.bin", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    for (size_t row = 0; row < COUNT_OF(reader_rows); row++) {
        if (argc > 3 && !strstr(reader_rows[row].name, argv[3])) { continue; }
        double start = seconds_now();
        fuzz_state = (seed + 1) * 0x9e3779b97f4a7c15u + row;
        for (uint64_t round = 0; round < rounds; round++) {
            if (round % (rounds / FUZZ_VARIANTS + 1) == 0) {
                fuzz_make_seed(&good, row, (int)(round / (rounds / FUZZ_VARIANTS + 1)));
                fuzz_one(&reader_rows[row], good.data + 1, good.bytes);
            }
            memcpy(fuzz_current.data, good.data, 1 + good.bytes);
            fuzz_current.bytes = good.bytes;
            for (uint64_t changes = 1 + fuzz_random(fuzz_random(2) ? 2 : 8); changes > 0; changes--) { fuzz_mutate(&fuzz_current); }
            fuzz_keep(kept);
            alarm(20); // a reader that hangs ends the program
            fuzz_one(&reader_rows[row], fuzz_current.data + 1, fuzz_current.bytes);
            alarm(0);
        }
        printf("%-20s %" PRIu64 " broken files, %.1f s\n", reader_rows[row].name, rounds, seconds_now() - start);
        fflush(stdout);
    }
    unlink("fuzz_last.bin");
    return 0;
}
#endif
