// test_data_helpers.h - what the tests of the data path share: random texts, small files, the fixture's encoder, and damage for readers.
#pragma once
#include "../dataloader/tokenize.h"
#include "../kernels/philox.h"
#include "test.h"

static uint32_t data_random_count = 0;

// A random number below n, from a stream that data_seed restarts.
static uint32_t data_random(uint32_t n) { return philox_at(7, RANDOM_SAMPLING, 0, 0, data_random_count++).x[0] % n; }
static void data_seed(uint32_t seed) { data_random_count = seed << 22; }

// A file beside this one.
static const char* data_fixture(const char* name) {
    static char path[PATH_MAX];
    const char* slash = strrchr(__FILE__, '/');
    snprintf(path, sizeof(path), "%.*sfixtures/%s", slash ? (int)(slash + 1 - __FILE__) : 0, __FILE__, name);
    return path;
}

static const char* data_path(const char* name) {
    static char paths[8][PATH_MAX];
    static int next = 0;
    char* path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", test_folder(), name);
    return path;
}

// A file without a checksum beside it.
static void data_store(const char* path, const void* data, size_t bytes) {
    char sidecar[PATH_MAX];
    Error error;
    FILE* file = fopen(path, "wb");
    CHECK(file && fwrite(data, 1, bytes, file) == bytes, "writing %s", path);
    if (file) { fclose(file); }
    if (sidecar_name(sidecar, path, &error)) { unlink(sidecar); }
}

static void data_load(ByteBuffer* data, const char* path) {
    FileReader file;
    Error error;
    bool good = file_open(&file, path, &error);
    CHECK_OK(good, error);
    if (!good) { return; }
    data->count = 0;
    bytes_reserve(data, (size_t)file.size + 1);
    CHECK_OK(file_read(&file, data->data, (size_t)file.size, 0, &error), error);
    data->count = (size_t)file.size;
    file_close(&file);
}

// The encoder of the fixture's small vocabulary.
typedef struct {
    Tokenizer tokenizer;
    Encoder encoder;
    EncodeWork work;
} DataCoder;

static bool data_coder_open(DataCoder* coder) {
    Error error;
    bool good = tokenizer_open(&coder->tokenizer, data_fixture("bpe_tokenizer.bin"), &error) &&
                encoder_open(&coder->encoder, &coder->tokenizer, &error);
    CHECK_OK(good, error);
    encode_work_new(&coder->work);
    return good;
}

static void data_coder_close(DataCoder* coder) {
    encode_work_free(&coder->work);
    encoder_close(&coder->encoder);
    tokenizer_free(&coder->tokenizer);
}

// Random text of all sorts: words, digits, spaces of all kinds, contractions, any characters; with `broken` also stray bytes.
static void data_random_text(ByteBuffer* text, size_t bytes, bool broken) {
    static const char* const parts[] = {"the ", " and", "'s", "'ll", "'re", "'ve", "'t", "'S", "'", "  ", " ", "\n", "\n\n", "\t", "\r\n",
                                        "a",    "42",   ".",  "...", "\xC2\xA0", "\xE3\x80\x80", "\xE1\xA0\x8E", "\xC2\x85", "\xE2\x80\xA8",
                                        "\xC3\xA9", "\xE4\xB8\xAD", "\xD9\xA3", "\xC2\xBD", "\xF0\x9F\x98\x80", "\xCC\x81"};
    text->count = 0;
    while (text->count < bytes) {
        uint8_t any[4];
        uint32_t kind = data_random(10), code = data_random(data_random(2) ? 0x3000 : UNICODE_COUNT);
        if (kind < 5) {
            const char* part = parts[data_random(COUNT_OF(parts))];
            for (uint32_t n = data_random(8) ? 1 : data_random(20); n > 0; n--) { bytes_append(text, part, strlen(part)); }
        } else if (kind < 7) {
            for (uint32_t n = data_random(12); n > 0; n--) {
                any[0] = (uint8_t)('a' + data_random(6));
                bytes_append(text, any, 1);
            }
        } else if (kind < 9 || !broken) {
            bytes_append(text, any, code >= 0xD800 && code < 0xE000 ? 0 : utf8_encode(code, any));
        } else {
            any[0] = (uint8_t)(128 + data_random(128));
            bytes_append(text, any, 1);
        }
    }
}

typedef bool (*DataReader)(const char* path, Error* error);

static void data_must_fail(DataReader read, const char* path, const char* how, size_t number) {
    Error error = {""};
    bool good = read(path, &error);
    CHECK(!good, "%s (%zu) was read as if it were good", how, number);
    CHECK(good || (strstr(error.text, path) && !strchr(error.text, '\n')), "%s (%zu): the message must name the file on one line: %s", how,
          number, error.text);
}

// Feeds a reader damaged copies of the good file at `good`: shorter, longer, foreign, empty, with bits flipped. With a checksum file
// beside it, every flip must be found; without one, `flips_found` says whether it must be.
static void data_damage(DataReader read, const char* good, bool flips_found) {
    static const char* const foreign[] = {"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n", "\177ELF\002\001\001", "\n", " ",
                                          "{}"};
    ByteBuffer data = {NULL, 0, 0};
    char path[PATH_MAX], sidecar[PATH_MAX], copy[PATH_MAX];
    Error error;
    snprintf(path, sizeof(path), "%s/damaged", test_folder());
    data_load(&data, good);
    data_store(path, data.data, data.count);
    CHECK_OK(read(path, &error), error);
    for (size_t keep = 0; keep < data.count;
         keep += keep < 40 || (keep > 1000 && keep < 1060) || keep + 20 > data.count ? 1 : 1 + data.count / 53) {
        data_store(path, data.data, keep);
        data_must_fail(read, path, "a cut-off file", keep);
    }
    bytes_append(&data, "\0\0\0\0", 4);
    for (size_t more = 1; more <= 4; more++) {
        data_store(path, data.data, data.count - 4 + more);
        data_must_fail(read, path, "a longer file", more);
    }
    data.count -= 4;
    for (size_t i = 0; i < COUNT_OF(foreign); i++) {
        uint8_t padded[4096] = {0};
        memcpy(padded, foreign[i], strlen(foreign[i]));
        data_store(path, padded, strlen(foreign[i]));
        data_must_fail(read, path, "a foreign file", i);
        data_store(path, padded, sizeof(padded));
        data_must_fail(read, path, "a foreign file with zeros", i);
    }
    CHECK(sidecar_name(sidecar, good, &error) && sidecar_name(copy, path, &error), "%s", error.text);
    for (size_t i = 0; i < 120; i++) { // half of them in the header
        size_t bit = data_random((uint32_t)(8 * (i % 2 ? data.count : min_size(data.count, 20))));
        data.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        data_store(path, data.data, data.count);
        Error ignored;
        if (flips_found) {
            data_must_fail(read, path, "a flipped bit", bit);
        } else {
            read(path, &ignored); // must only not crash
        }
        if (access(sidecar, F_OK) == 0) {
            ByteBuffer line = {NULL, 0, 0};
            data_load(&line, sidecar);
            data_store(copy, line.data, line.count);
            data_must_fail(read, path, "a flipped bit under a checksum", bit);
            bytes_free(&line);
        }
        data.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    unlink(copy);
    bytes_free(&data);
}
