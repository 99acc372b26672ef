// test_files.h - tests of the model file and the debug state: bytes on disk against bytes written out by hand or by another
// implementation, reading back; and damaged files for every reader of readers.h.
#pragma once
#include "readers.h"
#include "test.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

// A path in the folder of tests; every name has its own memory.
static const char* files_path(const char* name) {
    static char paths[64][256];
    static size_t count = 0;
    size_t folder = strlen(test_folder()) + 1;
    for (size_t i = 0; i < count; i++) {
        if (strcmp(paths[i] + folder, name) == 0) { return paths[i]; }
    }
    assert(count < COUNT_OF(paths));
    snprintf(paths[count], sizeof(paths[0]), "%s/%s", test_folder(), name);
    return paths[count++];
}

// A whole small file, on the heap.
static uint8_t* files_slurp(const char* path, size_t* bytes) {
    FILE* file = fopen(path, "rb");
    uint8_t* data = (uint8_t*)need(malloc((size_t)1 << 20));
    *bytes = file ? fread(data, 1, (size_t)1 << 20, file) : 0;
    if (file) { fclose(file); }
    return data;
}

// The whole file that we write for one small table, written out by hand; the checksums are those of a bitwise CRC.
static uint32_t files_slow_crc(const uint8_t* data, size_t bytes) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes * 8; i++) {
        bool bit = ((crc ^ (data[i / 8] >> (i % 8))) & 1) != 0;
        crc = (crc >> 1) ^ (bit ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static void files_dump(const char* path, const void* data, size_t bytes) {
    unlink(path); // a file cut to zero and written again would be flushed to disk at once by ext4
    FILE* file = fopen(path, "wb");
    CHECK(file && fwrite(data, 1, bytes, file) == bytes, "writing %s", path);
    if (file) { fclose(file); }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Model file.

// Little-endian bytes of the header of reader_model, and, at places counted by hand, values of the body.
static void files_model_bytes(void) {
    static const uint8_t header[32] = {0xc6, 0xd7, 0x34, 0x01, 3, 0, 0, 0, 4, 0, 0, 0, 5,   0, 0, 0,
                                       2,    0,    0,    0,    2, 0, 0, 0, 4, 0, 0, 0, 128, 0, 0, 0};
    static const struct {
        size_t element;
        uint8_t fp32[4], bf16[2];
    } body[] = {
        {0, {0x00, 0x00, 0x70, 0xc2}, {0x70, 0xc2}},    // wte: -60
        {20, {0x00, 0x00, 0x00, 0x00}, {0x00, 0x00}},   // first padding row
        {511, {0x00, 0x00, 0x00, 0x00}, {0x00, 0x00}},  // end of padding
        {512, {0x00, 0x00, 0x80, 0x40}, {0x80, 0x40}},  // wpe starts at 128 * 4: 4
        {528, {0x00, 0x00, 0xc0, 0x40}, {0xc0, 0x40}},  // ln1w, after 4 * 4: 6
        {996, {0x00, 0x00, 0x81, 0x42}, {0x81, 0x42}},  // 64.5
        {1001, {0x00, 0x40, 0x82, 0x42}, {0x82, 0x42}}, // 65.125: down to 65
        {1007, {0x00, 0xc0, 0x83, 0x42}, {0x84, 0x42}}, // 65.875: up to 66
        {1018, {0x00, 0x80, 0x86, 0x42}, {0x86, 0x42}}, // 67.25: a tie, to the even 67
        {1022, {0x00, 0x80, 0x87, 0x42}, {0x88, 0x42}}, // 67.75: a tie, to the even 68
    };
    for (int variant = 0; variant < 2; variant++) {
        Error error;
        size_t bytes = 0, unit = variant ? 2 : 4;
        CHECK_OK(reader_model_seed(files_path("model.bin"), variant, &error), error);
        uint8_t* data = files_slurp(files_path("model.bin"), &bytes);
        CHECK(bytes == 1024 + 1024 * unit, "%zu bytes", bytes);
        for (size_t i = 0; i < 1024; i++) {
            uint8_t expected = i == 4 ? (variant ? 5 : 3) : i < 32 ? header[i] : 0;
            CHECK(data[i] == expected, "header byte %zu: expected %d, found %d", i, expected, data[i]);
        }
        for (size_t i = 0; i < COUNT_OF(body); i++) {
            const uint8_t *at = data + 1024 + body[i].element * unit, *expected = variant ? body[i].bf16 : body[i].fp32;
            CHECK(memcmp(at, expected, unit) == 0, "element %zu of variant %d: found %02x %02x", body[i].element, variant, at[0], at[1]);
        }
        free(data);
    }
}

// Each file version into each type, whole and in odd pieces, and written again: the same bytes.
static void files_model_round_trip(void) {
    float values[READER_MODEL_ELEMENTS], wide[READER_MODEL_ELEMENTS], part[READER_MODEL_ELEMENTS];
    uint16_t half[READER_MODEL_ELEMENTS];
    Error error, notice;
    reader_model_values(values);
    for (int variant = 0; variant < 2; variant++) {
        const char* path = files_path("model.bin");
        CHECK_OK(reader_model_seed(path, variant, &error), error);
        CHECK_OK(model_file_read(path, &reader_model, wide, MODEL_FP32, &notice, &error), error);
        CHECK(notice.text[0] == 0, "unexpected notice: %s", notice.text);
        CHECK_OK(model_file_read(path, &reader_model, half, MODEL_BF16, NULL, &error), error);
        for (int i = 0; i < READER_MODEL_ELEMENTS; i++) {
            float expected = variant ? bf16_to_float(float_to_bf16(values[i])) : values[i];
            CHECK(wide[i] == expected, "element %d: expected %g, found %g", i, (double)expected, (double)wide[i]);
            CHECK(half[i] == float_to_bf16(values[i]), "element %d as bf16: %04x", i, half[i]);
        }
        ModelReader reader;
        CHECK_OK(model_reader_open(&reader, path, &error), error);
        for (size_t at = 0; at < READER_MODEL_ELEMENTS; at += 37) {
            CHECK_OK(model_reader_read(&reader, at, min_size(37, READER_MODEL_ELEMENTS - at), part + at, MODEL_FP32, &error), error);
        }
        CHECK(memcmp(part, wide, sizeof(part)) == 0, "pieces differ from the whole");
        CHECK_FAILS(model_reader_read(&reader, 1000, 25, part, MODEL_FP32, &error), error, "were asked for");
        model_reader_close(&reader);
        FileWriter record;
        size_t bytes = 0, again_bytes = 0;
        const char* copy = files_path("copy.bin");
        CHECK_OK(model_file_write(copy, &reader_model, variant ? MODEL_BF16 : MODEL_FP32, variant ? (const void*)half : wide,
                                  variant ? MODEL_BF16 : MODEL_FP32, &record, &error),
                 error);
        uint8_t *data = files_slurp(path, &bytes), *again = files_slurp(copy, &again_bytes);
        CHECK(bytes == again_bytes && memcmp(data, again, bytes) == 0, "written again, %zu bytes became %zu or others", bytes, again_bytes);
        CHECK(record.size == bytes && record.crc == crc32c(0, data, bytes), "size or checksum of the record");
        free(data);
        free(again);
    }
}

static void files_model_bf16_special(void) {
    static const struct {
        uint32_t wide;
        uint16_t half;
    } cases[] = {{0x3f800000, 0x3f80}, {0x80000000, 0x8000}, {0x7f800000, 0x7f80}, {0xff800000, 0xff80},
                 {0x7f7fffff, 0x7f80}, {0x00000001, 0x0000}, {0x00008001, 0x0001}, {0x3f808000, 0x3f80},
                 {0x3f818000, 0x3f82}, {0x7f800001, 0x7fc0}, {0xffffffff, 0xffff}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        float x;
        memcpy(&x, &cases[i].wide, 4);
        CHECK(float_to_bf16(x) == cases[i].half, "%08x: expected %04x, found %04x", cases[i].wide, cases[i].half, float_to_bf16(x));
    }
}

static void files_model_notices(void) {
    float values[READER_MODEL_ELEMENTS];
    Error error, notice;
    const char* path = files_path("model.bin");
    reader_model_values(values);
    values[25] = 1.0f;
    values[400] = -0.0f;
    CHECK_OK(model_file_write(path, &reader_model, MODEL_FP32, values, MODEL_FP32, NULL, &error), error);
    CHECK_OK(model_file_read(path, &reader_model, values, MODEL_FP32, &notice, &error), error);
    CHECK(strstr(notice.text, "found 2 other values"), "notice: %s", notice.text);
    CHECK(values[25] == 0.0f && !signbit(values[400]), "padding was not zeroed");
    values[600] = NAN;
    values[601] = INFINITY;
    CHECK_OK(model_file_write(path, &reader_model, MODEL_FP32, values, MODEL_FP32, NULL, &error), error);
    CHECK_OK(model_file_read(path, &reader_model, values, MODEL_FP32, &notice, &error), error);
    CHECK(strstr(notice.text, "2 weights are infinite or NaN"), "notice: %s", notice.text);
}

// Each line changes one header field of a good file; the message must name what is wrong.
static void files_model_refused(void) {
    static const struct {
        int field;
        int32_t value;
        const char* part;
    } cases[] = {
        {0, 0, "it holds zeros"}, // with the rest of the header cleared, see below
        {0, 20240327, "this is a debug state"},
        {0, 20240520, "this is a token shard"},
        {0, 20240328, "this is a tokenizer"},
        {0, 20240527, "optimizer state"},
        {0, (int32_t)0xc6d73401, "the other byte order"},
        {0, 0x4d54483c, "web page"},
        {0, 0x464c457f, "it is a program"},
        {1, 1, "expected model file version 3 (fp32) or 5 (bf16), found 1"},
        {1, 5, "is too long: expected 3072 bytes"},
        {2, 0, "expected sizes above zero"},
        {2, 5, "is cut off: expected 5136 bytes"},
        {2, 3, "is too long: expected 5104 bytes"},
        {3, -5, "expected sizes above zero"},
        {3, 129, "expected a padded vocabulary that is a multiple of 128 and at least 129, found 128"},
        {4, INT32_MAX, "is cut off"},
        {5, 3, "expected heads to divide channels"},
        {5, 0, "expected sizes above zero"},
        {6, INT32_MAX - 1, "parameters; the header is damaged"},
        {6, INT32_MIN, "expected sizes above zero"},
        {7, 127, "multiple of 128"},
        {7, INT32_MAX, "multiple of 128"},
        {7, 0x7fffff80, "is cut off"},
    };
    Error error;
    size_t bytes = 0;
    ModelHeader header, other = reader_model;
    int version = 0;
    float values[READER_MODEL_ELEMENTS];
    const char* path = files_path("model.bin");
    CHECK_OK(reader_model_seed(path, 0, &error), error);
    CHECK_OK(model_file_read_header(path, &header, &version, &error), error);
    CHECK(version == 3 && memcmp(&header, &reader_model, sizeof(header)) == 0, "header of a good file");
    uint8_t* data = files_slurp(path, &bytes);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        uint8_t* copy = (uint8_t*)need(malloc(bytes));
        memcpy(copy, data, bytes);
        if (i == 0) { memset(copy, 0, 1024); }
        memcpy(copy + cases[i].field * 4, &cases[i].value, 4);
        files_dump(files_path("bad.bin"), copy, bytes);
        CHECK_FAILS(model_file_read_header(files_path("bad.bin"), &header, &version, &error), error, cases[i].part);
        free(copy);
    }
    files_dump(files_path("bad.bin"), data, 0);
    CHECK_FAILS(model_file_read_header(files_path("bad.bin"), &header, &version, &error), error, "is empty");
    files_dump(files_path("bad.bin"), data, 1000);
    CHECK_FAILS(model_file_read_header(files_path("bad.bin"), &header, &version, &error), error,
                "expected a header of 1024 bytes, found 1000");
    CHECK_FAILS(model_file_read_header(files_path("none.bin"), &header, &version, &error), error, "cannot open");
    CHECK_FAILS(model_file_read_header(test_folder(), &header, &version, &error), error, "not a regular file");
    other.layers = 3;
    CHECK_FAILS(model_file_read(path, &other, values, MODEL_FP32, NULL, &error), error, "holds another model: expected layers 3");
    CHECK_FAILS(model_file_write(files_path("bad.bin"), &reader_model, 4, values, MODEL_FP32, NULL, &error), error,
                "no model file version 4");
    ModelWriter writer;
    CHECK_OK(model_writer_create(&writer, files_path("short.bin"), &reader_model, MODEL_FP32, &error), error);
    CHECK_OK(model_writer_put(&writer, 1, values, MODEL_FP32, 1023, &error), error);
    CHECK_FAILS(model_writer_commit(&writer, &error), error, "1023 parameters were given for a model of 1024");
    CHECK(access(files_path("short.bin"), F_OK) != 0, "an unfinished file is there");
    CHECK_OK(model_writer_create(&writer, files_path("short.bin"), &reader_model, MODEL_FP32, &error), error);
    CHECK_FAILS(model_writer_put(&writer, 1000, values, MODEL_FP32, 25, &error), error, "has 1024 parameters; 25 from 1000 were given");
    free(data);
}

// A GPT of 7.46 billion parameters: 29,856,465,920 bytes, as a file of holes. Its last values lie beyond 2^32 bytes and elements.
static void files_model_large(void) {
    int32_t h[256] = {20240326, 3, 2048, 50257, 36, 32, 4096, 50304};
    ModelHeader header = reader_model;
    ModelReader reader;
    Error error;
    int version = 0;
    float last[8] = {1, 1, 1, 1, 1, 1, 1, 1}, value = 3.5f;
    const char* path = files_path("large.bin");
    files_dump(path, h, sizeof(h));
    int fd = open(path, O_WRONLY);
    bool made = fd >= 0 && ftruncate(fd, 29856465920) == 0 && pwrite(fd, &value, 4, 29856465920 - 4) == 4;
    close(fd);
    if (made) { // not on file systems without room for holes
        CHECK_OK(model_file_read_header(path, &header, &version, &error), error);
        CHECK(model_header_elements(&header) == 7464116224, "found %" PRIu64 " parameters", model_header_elements(&header));
        CHECK_OK(model_reader_open(&reader, path, &error), error);
        CHECK_OK(model_reader_read(&reader, 7464116216, 8, last, MODEL_FP32, &error), error);
        CHECK(last[0] == 0.0f && last[7] == 3.5f, "last values %g, %g", (double)last[0], (double)last[7]);
        uint16_t half = 0;
        CHECK_OK(model_reader_read(&reader, 7464116223, 1, &half, MODEL_BF16, &error), error);
        CHECK(half == 0x4060, "last value, converted: %04x", half);
        model_reader_close(&reader);
    }
    ModelHeader large = {2048, 50257, 36, 32, 4096, 50304};
    CHECK(model_file_bytes(&large, MODEL_BF16) == 1024 + 2 * 7464116224, "%" PRIu64 " bytes", model_file_bytes(&large, MODEL_BF16));
    ModelHeader small = {1024, 50257, 12, 12, 768, 50304};
    CHECK(model_file_bytes(&small, MODEL_FP32) == 497904640 && model_file_bytes(&small, MODEL_BF16) == 248952832, "GPT-2 124M");
    unlink(path);
}

static void files_debug_state(void) {
    static const uint8_t header[16] = {0xc7, 0xd7, 0x34, 0x01, 2, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0};
    Error error;
    DebugState state;
    size_t bytes = 0;
    float values[READER_MODEL_ELEMENTS];
    const char* path = files_path("debug.bin");
    reader_model_values(values);
    CHECK_OK(reader_debug_seed(path, 1, &error), error);
    uint8_t* data = files_slurp(path, &bytes);
    // inputs and targets of 2 x 3, logits 2 x 3 x 5, the loss, 1024 gradients
    CHECK(bytes == 1024 + 24 + 24 + 120 + 4 + 4096, "%zu bytes", bytes);
    CHECK(memcmp(data, header, 16) == 0 && data[16] == 0 && data[1023] == 0, "header");
    CHECK(data[1024 + 4] == 1 && data[1024 + 24 + 16] == 4, "tokens");
    CHECK(memcmp(data + 1024 + 48, values, 120) == 0 && memcmp(data + 1024 + 172, values, 4096) == 0, "logits, gradients");
    CHECK(data[1024 + 168 + 2] == 0xa0 && data[1024 + 168 + 3] == 0x3f, "loss 1.25");
    CHECK_OK(debug_state_read(path, &reader_model, &state, &error), error);
    CHECK(state.batch == 2 && state.seq_len == 3 && state.loss == 1.25f && state.targets && state.targets[4] == 4, "read back");
    CHECK(state.gradients && memcmp(state.gradients, values, sizeof(values)) == 0, "gradients read back");
    debug_state_free(&state);
    data[1024 + 4] = 5;
    files_dump(path, data, bytes);
    CHECK_FAILS(debug_state_read(path, &reader_model, &state, &error), error, "expected tokens below 5, found 5");
    data[12] = 5;
    files_dump(path, data, bytes);
    CHECK_FAILS(debug_state_read(path, &reader_model, &state, &error), error, "1 to 4 positions");
    data[12] = 4;
    files_dump(path, data, bytes);
    CHECK_FAILS(debug_state_read(path, &reader_model, &state, &error), error, "is it of the same model?");
    memset(data + 8, 0x7f, 4);
    files_dump(path, data, bytes);
    CHECK_FAILS(debug_state_read(path, &reader_model, &state, &error), error, "is it of the same model?");
    free(data);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Every reader against damaged files: no crash and no hang; an error wherever size, counts or checksums can tell.

static void files_expect(const ReaderRow* row, const uint8_t* data, size_t bytes, bool must_fail, const char* what, size_t at) {
    static int fd = -1;
    char path[64];
    Error error;
    if (fd < 0) { fd = memfd_create("damaged", MFD_CLOEXEC); } // in memory: thousands are written
    CHECK(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, bytes, 0) == (ssize_t)bytes, "no file in memory");
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    error.text[0] = 0;
    bool good = row->read(path, &error);
    CHECK(!(good && must_fail), "%s: %s %zu was accepted", row->name, what, at);
    CHECK(good || error.text[0], "%s: %s %zu: no message", row->name, what, at);
}

static void files_readers_damaged(void) {
    static const char html[] = "<!DOCTYPE html>\n<html><head><title>404</title></head><body>Not found</body></html>\n";
    static uint8_t zeros[8192];
    uint64_t random = 1;
    for (size_t r = 0; r < COUNT_OF(reader_rows); r++) {
        const ReaderRow* row = &reader_rows[r];
        for (int variant = 0; variant < 2; variant++) {
            Error error;
            size_t bytes = 0, self_bytes = 0;
            CHECK_OK(row->write_seed(files_path("seed"), variant, &error), error);
            CHECK_OK(row->read(files_path("seed"), &error), error);
            uint8_t *data = files_slurp(files_path("seed"), &bytes), *self = files_slurp("/proc/self/exe", &self_bytes);
            size_t step = bytes / 100 + 1;
            data[bytes] = 'x';
            for (size_t n = 0; n < bytes; n += n < 64 ? 7 : step) { files_expect(row, data, n, row->finds >= READER_CUT, "cut to", n); }
            files_expect(row, data, bytes - 1, row->finds >= READER_CUT, "cut to", bytes - 1);
            files_expect(row, data, bytes + 1, row->finds >= READER_CUT, "grown to", bytes + 1); // files_slurp's block is larger
            files_expect(row, (const uint8_t*)html, sizeof(html) - 1, row->finds >= READER_FOREIGN, "HTML", 0);
            files_expect(row, self, min_size(self_bytes, 65536), row->finds >= READER_FOREIGN, "a program", 0);
            files_expect(row, zeros, sizeof(zeros), row->finds >= READER_FOREIGN, "zeros", 0);
            for (size_t i = 0; i < bytes; i += i < 64 ? 1 : step) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                uint8_t flip = (uint8_t)(1u << (random >> 61));
                data[i] ^= flip;
                files_expect(row, data, bytes, row->finds >= READER_CHANGED, "flipped byte", i);
                data[i] ^= flip;
            }
            free(data);
            free(self);
        }
    }
}

static const TestRow files_tests[] = {
    {"files: the model file's bytes are those of the format", files_model_bytes},
    {"files: a model of either version comes back in either type", files_model_round_trip},
    {"files: bf16 of special values", files_model_bf16_special},
    {"files: padding rows and values that are no numbers are reported", files_model_notices},
    {"files: a damaged or foreign model file is refused by name", files_model_refused},
    {"files: sizes beyond 32 bits (7.46 billion parameters)", files_model_large},
    {"files: debug state, bytes and back", files_debug_state},
    {"files: every reader against damaged files", files_readers_damaged},
};
