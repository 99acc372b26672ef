// test_files.h - tests of the model file, the debug state and safetensors: bytes on disk against bytes written out by hand or by another
// implementation, reading back, and damaged and hostile files for every reader of readers.h.
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
// safetensors.

// Written by the Python package (safetensors 0.8.0, numpy): weight F32 (2,3), step I64 (), mask U8 (3), empty F16 (0,4), one text.
static const char files_python_header[] = " \001\000\000\000\000\000\000"
                                          "{\"__metadata__\":{\"who\":\"p\303\244th \\\"q\\\" \\\\ "
                                          "\\n\360\237\230\200\"},\"step\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                                          "\"weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},\"empty\":{\"dtype\":"
                                          "\"F16\",\"shape\":[0,4],\"data_offsets\":[32,32]},"
                                          "\"mask\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[32,35]}}      ";
static const uint8_t files_python_data[35] = {0xe8, 3,    0, 0, 0, 0, 0,    0,    0,    0,    0xc0, 0x3f, 0,    0,    0, 0xc0, 0,   0,
                                              0x40, 0x40, 0, 0, 0, 0, 0x6f, 0x12, 0x83, 0x3a, 0,    0xe0, 0x7f, 0x47, 1, 0,    0xff};

static void files_safetensors_python(void) {
    uint8_t bytes[sizeof(files_python_header) - 1 + 35], mask[3] = {9, 9, 9};
    float weight[6] = {0}, slice[2] = {0};
    int64_t step = 0;
    Error error;
    SafeReader reader;
    memcpy(bytes, files_python_header, sizeof(bytes) - 35);
    memcpy(bytes + sizeof(bytes) - 35, files_python_data, 35);
    files_dump(files_path("python.safetensors"), bytes, sizeof(bytes));
    bool good = safe_open(&reader, files_path("python.safetensors"), &error);
    CHECK_OK(good, error);
    if (!good) { return; }
    CHECK(reader.table.count == 4 && reader.table.text_count == 1, "%zu tensors", reader.table.count);
    const char* who = safe_find_text(&reader, "who");
    CHECK(who && strcmp(who, "p\303\244th \"q\" \\ \n\360\237\230\200") == 0, "text: %s", who ? who : "none");
    CHECK_OK(safe_read(&reader, "weight", SAFE_F32, 6, weight, &error), error);
    CHECK(weight[0] == 1.5f && weight[1] == -2.0f && weight[2] == 3.0f && weight[3] == 0.0f && weight[4] == 0.001f && weight[5] == 65504.0f,
          "weight");
    CHECK_OK(safe_read(&reader, "step", SAFE_I64, 1, &step, &error), error);
    CHECK_OK(safe_read(&reader, "mask", SAFE_U8, 3, mask, &error), error);
    CHECK_OK(safe_read(&reader, "empty", SAFE_F16, 0, mask, &error), error);
    CHECK(step == 1000 && mask[0] == 1 && mask[1] == 0 && mask[2] == 255, "step, mask");
    const SafeTensor* t = safe_find(&reader, "weight");
    CHECK(t && t->dims == 2 && t->shape[0] == 2 && t->shape[1] == 3 && !t->has_crc, "shape");
    CHECK_OK(safe_read_slice(&reader, t, 16, 8, slice, &error), error);
    CHECK(slice[0] == 0.001f && slice[1] == 65504.0f, "slice");
    CHECK_FAILS(safe_read_slice(&reader, t, 20, 8, slice, &error), error, "has 24 bytes; 8 from 20 were asked for");
    CHECK_FAILS(safe_read_slice(&reader, t, UINT64_MAX - 3, 8, slice, &error), error, "were asked for");
    CHECK_OK(safe_read_part(&reader, "weight", SAFE_F32, 6, 1, 2, slice, &error), error);
    CHECK(slice[0] == -2.0f && slice[1] == 3.0f, "part");
    CHECK_OK(safe_read_part(&reader, "weight", SAFE_F32, 6, 6, 0, NULL, &error), error);
    CHECK_OK(safe_read_part(&reader, "mask", SAFE_U8, 3, 2, 1, mask, &error), error);
    CHECK(mask[0] == 255, "part of the mask");
    CHECK_FAILS(safe_read_part(&reader, "weight", SAFE_F32, 6, 5, 2, slice, &error), error, "has 6 values; 2 from 5 were asked for");
    CHECK_FAILS(safe_read_part(&reader, "weight", SAFE_F32, 6, 7, 0, slice, &error), error, "0 from 7 were asked for");
    CHECK_FAILS(safe_read_part(&reader, "weight", SAFE_F32, 6, UINT64_MAX, 2, slice, &error), error, "were asked for");
    CHECK_FAILS(safe_read_part(&reader, "weight", SAFE_F32, 6, 1, SIZE_MAX, slice, &error), error, "were asked for");
    CHECK_FAILS(safe_read_part(&reader, "weight", SAFE_F32, 7, 0, 1, slice, &error), error, "as 7 values of F32, found 6 of F32");
    CHECK_FAILS(safe_read_part(&reader, "weight", SAFE_F16, 12, 0, 1, slice, &error), error, "values of F16, found 6 of F32");
    CHECK_FAILS(safe_read_part(&reader, "no", SAFE_F32, 6, 0, 1, slice, &error), error, "expected tensor \"no\", found none");
    CHECK_FAILS(safe_read(&reader, "weigh", SAFE_F32, 6, weight, &error), error, "expected tensor \"weigh\", found none");
    CHECK_FAILS(safe_read(&reader, "weight", SAFE_F32, 5, weight, &error), error, "as 5 values of F32, found 6 of F32");
    CHECK_FAILS(safe_read(&reader, "weight", SAFE_I32, 6, weight, &error), error, "values of I32, found 6 of F32");
    safe_close(&reader);
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

static void files_safetensors_bytes(void) {
    static const uint8_t data[12] = {10, 11, 12, 13, 14, 15, 16, 17, 250, 251, 252, 253};
    char expected[400] = {0};
    uint64_t shape[2] = {1, 2}, four = 4, header = 0;
    Error error;
    SafeWriter writer;
    size_t bytes = 0;
    const char* path = files_path("own.safetensors");
    int length = snprintf(
        expected + 8, sizeof(expected) - 8,
        "{\"__metadata__\":{\"a\\\"\\\\\":\"\\u000a\xc3\xa4\\ufffd\",\"crc32c.u\":\"%08x\",\"crc32c.f\":\"%08x\"},"
        "\"u\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,12]},\"f\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}}",
        files_slow_crc(data + 8, 4), files_slow_crc(data, 8));
    while (length % 8 != 0) { expected[8 + length++] = ' '; }
    header = (uint64_t)length;
    memcpy(expected, &header, 8);
    memcpy(expected + 8 + length, data, 12);
    safe_writer_init(&writer);
    safe_writer_text(&writer, "a\"\\", "\n\xc3\xa4\xff");
    int u = safe_writer_tensor(&writer, "u", SAFE_U8, 1, &four), f = safe_writer_tensor(&writer, "f", SAFE_F32, 2, shape);
    CHECK_OK(safe_writer_create(&writer, path, &error), error);
    CHECK_OK(safe_writer_put(&writer, f, 5, data + 5, 3, &error), error); // pieces in any order
    CHECK_OK(safe_writer_put(&writer, u, 0, data + 8, 4, &error), error);
    CHECK_OK(safe_writer_put(&writer, f, 0, data, 5, &error), error);
    CHECK_OK(safe_writer_commit(&writer, &error), error);
    uint8_t* found = files_slurp(path, &bytes);
    CHECK(bytes == header + 20 && memcmp(found, expected, bytes) == 0, "expected %s, found %s", expected + 8, found + 8);
    CHECK(writer.part.file.size == bytes && writer.part.file.crc == files_slow_crc(found, bytes), "size or checksum of the record");
    free(found);
    safe_writer_init(&writer);
    u = safe_writer_tensor(&writer, "u", SAFE_U8, 1, &four);
    CHECK_OK(safe_writer_create(&writer, files_path("short.safetensors"), &error), error);
    CHECK_OK(safe_writer_put(&writer, u, 0, data, 3, &error), error);
    CHECK_FAILS(safe_writer_commit(&writer, &error), error, "got 3 of its 4 bytes");
    CHECK(access(files_path("short.safetensors"), F_OK) != 0, "an unfinished file is there");
    safe_writer_init(&writer);
    u = safe_writer_tensor(&writer, "u", SAFE_U8, 1, &four);
    CHECK_OK(safe_writer_create(&writer, files_path("long.safetensors"), &error), error);
    CHECK_FAILS(safe_writer_put(&writer, u, 3, data, 2, &error), error, "has 4 bytes; 2 at 3 were given");
}

// One file from three writers, each with its own pieces, is to the byte that of one writer; sizes and checksums add up.
static void files_written_by_several(void) {
    static float values[READER_MODEL_ELEMENTS];
    const uint64_t shape[2] = {READER_MODEL_ELEMENTS, 1}, three = 3;
    const uint8_t codes[3] = {7, 8, 9};
    const char* names[4] = {files_path("one.bin"), files_path("three.bin"), files_path("one.safetensors"), files_path("three.safetensors")};
    static ModelWriter models[4];
    static SafeWriter states[4];
    Error error;
    reader_model_values(values);
    for (int i = 0; i < 4; i++) { // writer 0 alone; 1 with 2 and 3, which join
        const char *model = names[i > 0], *state = names[2 + (i > 0)];
        CHECK_OK(i < 2 ? model_writer_create(&models[i], model, &reader_model, MODEL_BF16, &error)
                       : model_writer_join(&models[i], model, &reader_model, MODEL_BF16, (long)getpid(), &error), error);
        safe_writer_init(&states[i]);
        safe_writer_tensor(&states[i], "codes", SAFE_U8, 1, &three);
        safe_writer_tensor(&states[i], "m", SAFE_F32, 2, shape);
        CHECK_OK(i < 2 ? safe_writer_create(&states[i], state, &error) : safe_writer_join(&states[i], state, (long)getpid(), &error), error);
    }
    CHECK_OK(model_writer_put(&models[0], 0, values, MODEL_FP32, READER_MODEL_ELEMENTS, &error), error);
    CHECK_OK(safe_writer_put(&states[0], 1, 0, values, sizeof(values), &error), error);
    CHECK_OK(safe_writer_put(&states[0], 0, 0, codes, 3, &error), error);
    for (size_t at = 0, i = 0; at < READER_MODEL_ELEMENTS; at += 37, i++) { // 28 pieces, dealt from the last to the first
        size_t first = (READER_MODEL_ELEMENTS - 1 - at) / 37 * 37, n = min_size(37, READER_MODEL_ELEMENTS - first);
        CHECK_OK(model_writer_put(&models[1 + i % 3], first, values + first, MODEL_FP32, n, &error), error);
        CHECK_OK(safe_writer_put(&states[1 + i % 3], 1, first * 4, values + first, n * 4, &error), error);
    }
    CHECK_OK(safe_writer_put(&states[3], 0, 0, codes, 3, &error), error);
    for (int i = 2; i < 4; i++) {
        CHECK_OK(model_writer_sync(&models[i], &error), error);
        CHECK_OK(safe_writer_sync(&states[i], &error), error);
        model_writer_add(&models[1], models[i].sum);
        for (int k = 0; k < 2; k++) { safe_writer_add(&states[1], k, states[i].table.tensors[k].sum); }
        model_writer_abandon(&models[i]);
        safe_writer_abandon(&states[i]);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_OK(model_writer_commit(&models[i], &error), error);
        CHECK_OK(safe_writer_commit(&states[i], &error), error);
    }
    for (int kind = 0; kind < 2; kind++) {
        size_t bytes[2];
        uint8_t *one = files_slurp(names[2 * kind], &bytes[0]), *three_parts = files_slurp(names[2 * kind + 1], &bytes[1]);
        const FileWriter* record = kind ? &states[1].part.file : &models[1].part.file;
        CHECK(bytes[0] > 2000 && bytes[0] == bytes[1] && memcmp(one, three_parts, bytes[0]) == 0, "kind %d: %zu and %zu bytes", kind, bytes[0],
              bytes[1]);
        CHECK(record->size == bytes[1] && record->crc == crc32c(0, three_parts, bytes[1]), "kind %d: size or checksum of the record", kind);
        free(one);
        free(three_parts);
    }
}

// Joining what is not there, or another file; one that joined neither finishes nor removes it.
static void files_joined(void) {
    const char* path = files_path("joined.bin");
    ModelHeader other = reader_model;
    ModelWriter first, second;
    SafeWriter state;
    float value = 1.0f;
    Error error;
    other.layers = 3;
    CHECK_FAILS(model_writer_join(&second, path, &reader_model, MODEL_FP32, (long)getpid(), &error), error, "cannot open");
    CHECK_OK(model_writer_create(&first, path, &reader_model, MODEL_FP32, &error), error);
    CHECK_FAILS(model_writer_join(&second, path, &other, MODEL_FP32, (long)getpid(), &error), error, "do all ranks run the same program");
    safe_writer_init(&state);
    CHECK_FAILS(safe_writer_join(&state, path, (long)getpid(), &error), error, "expected a file of");
    CHECK_OK(model_writer_join(&second, path, &reader_model, MODEL_FP32, (long)getpid(), &error), error);
    CHECK_FAILS(model_writer_put(&second, READER_MODEL_ELEMENTS, &value, MODEL_FP32, 1, &error), error, "were given");
    CHECK(access(first.part.file.temporary, F_OK) == 0, "one that joined removed the file");
    CHECK_FAILS(model_writer_commit(&first, &error), error, "0 parameters were given");
    CHECK(access(first.part.file.temporary, F_OK) != 0 && access(path, F_OK) != 0, "an unfinished file is there");
}

// The disk fills up in the middle of a piece: one line; what joined leaves the file, what made it removes it.
static void files_disk_full(void) {
    static float values[READER_MODEL_ELEMENTS];
    const char* path = files_path("full.bin");
    ModelWriter writers[2];
    struct rlimit before, limit;
    Error error;
    CHECK_OK(model_writer_create(&writers[0], path, &reader_model, MODEL_FP32, &error), error);
    CHECK_OK(model_writer_join(&writers[1], path, &reader_model, MODEL_FP32, (long)getpid(), &error), error);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 3000;
    for (int i = 1; i >= 0; i--) {
        fflush(stdout);
        setrlimit(RLIMIT_FSIZE, &limit);
        error.text[0] = 0;
        bool good = model_writer_put(&writers[i], 0, values, MODEL_FP32, READER_MODEL_ELEMENTS, &error);
        setrlimit(RLIMIT_FSIZE, &before);
        CHECK(!good && strncmp(error.text, "writing ", 8) == 0 && strstr(error.text, strerror(EFBIG)), "message: %s", error.text);
        CHECK((access(writers[0].part.file.temporary, F_OK) == 0) == (i == 1), "writer %d: expected the file %s", i, i ? "left" : "removed");
    }
    signal(SIGXFSZ, handler);
}

// A header text with its size field and `data` bytes of data must be refused with this part in the message ("" for accepted).
static void files_safetensors_hostile(void) {
#define FILES_T "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}"
    static const struct {
        const char *header, *part;
    } cases[] = {
        {FILES_T "}", ""},
        {" \t\r\n" FILES_T " } \n", ""},
        {"{\"a\":{\"data_offsets\":[0,4],\"shape\":[2,2],\"dtype\":\"U8\"},\"__metadata__\":{}}", ""},
        {"{\"\\u00e4\\ud83d\\ude00\\/\\b\":{\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[0,4]}}", ""},
        {"{}", "is too long: expected 0 bytes of data, found 4"},
        {"[]", "expected '{'"},
        {FILES_T, "expected '}'"},
        {FILES_T ",}", "expected '\"'"},
        {FILES_T "}}", "more text after the header's end"},
        {FILES_T ",\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]}}", "stands twice"},
        {FILES_T ",\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[3,4]}}", "overlap or leave a gap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[1,4]}}", "overlap or leave a gap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5]}}", "is cut off: expected 5 bytes of data, found 4"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]}}", "disagree"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,4]}}", "disagree"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,4]}}", "too many numbers"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4]}}", "without dtype, shape or data_offsets"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", "without dtype, shape or data_offsets"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "an unknown or repeated key"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"x\":[]}}", "an unknown or repeated key"},
        {"{\"a\":{\"dtype\":\"U9\",\"shape\":[4],\"data_offsets\":[0,4]}}", "an unknown dtype"},
        {"{\"a\":{\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]}}", "expected '\"'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]}}", "expected a whole number"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4.0],\"data_offsets\":[0,4]}}", "expected ']'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4e0],\"data_offsets\":[0,4]}}", "expected ']'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[04],\"data_offsets\":[0,4]}}", "leading zeros"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551620],\"data_offsets\":[0,4]}}", "beyond 64 bits"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", "disagree"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[922337203685477581,20],\"data_offsets\":[0,4]}}", "disagree"}, // 2^64 + 4
        {"{\"a\":{\"dtype\":\"U64\",\"shape\":[9223372036854775807,2],\"data_offsets\":[0,4]}}", "disagree"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[18446744073709551612,18446744073709551615]}}", "disagree"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,4]}}", "too many numbers"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[[[[4]]]],\"data_offsets\":[0,4]}}", "expected a whole number"},
        {"{\"a\\u0000\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "a NUL"},
        {"{\"a\\ud800\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "half of a surrogate pair"},
        {"{\"a\\udc00\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "half of a surrogate pair"},
        {"{\"a\\ud800\\u0041\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "half of a surrogate pair"},
        {"{\"a\\x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "unknown escape"},
        {"{\"a\\u00g0\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "four hexadecimal digits"},
        {"{\"a\\u00\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "four hexadecimal digits"},
        {"{\"\xc0\x80\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "not UTF-8"},
        {"{\"\xed\xa0\x80\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "not UTF-8"},
        {"{\"a\n\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "control character"},
        {"{\"abc", "a text does not end"},
        {"{\"abc\\", "a text does not end"},
        {"{\"abc\\\"", "a text does not end"},
        {FILES_T ",\"__metadata__\":{\"x\":1}}", "expected '\"'"},
        {FILES_T ",\"__metadata__\":{\"x\":{}}}", "expected '\"'"},
        {FILES_T ",\"__metadata__\":{\"x\":\"1\",\"x\":\"2\"}}", "stands twice"},
        {FILES_T ",\"__metadata__\":{},\"__metadata__\":{}}", "stands twice"},
        {FILES_T ",\"__metadata__\":{\"crc32c.a\":\"9b\"}}", "is no checksum"},
        {FILES_T ",\"__metadata__\":{\"crc32c.b\":\"00000000\"}}", "belongs to no tensor"},
    };
    Error error;
    SafeReader reader;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        uint8_t bytes[512] = {0};
        uint64_t header = strlen(cases[i].header);
        memcpy(bytes, &header, 8);
        memcpy(bytes + 8, cases[i].header, header);
        files_dump(files_path("hostile.safetensors"), bytes, 8 + header + 4);
        bool good = safe_open(&reader, files_path("hostile.safetensors"), &error);
        bool expected = cases[i].part[0] == 0;
        CHECK(good == expected, "case %zu, %s: %s", i, cases[i].header, good ? "accepted" : error.text);
        CHECK(good || strstr(error.text, cases[i].part), "case %zu: expected \"%s\", found \"%s\"", i, cases[i].part, error.text);
        if (good) { safe_close(&reader); }
    }
    static const uint64_t sizes[] = {0, 1, 60, (uint64_t)1 << 31, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        uint8_t bytes[64];
        memset(bytes, ' ', sizeof(bytes));
        memcpy(bytes, &sizes[i], 8);
        files_dump(files_path("hostile.safetensors"), bytes, sizeof(bytes));
        CHECK_FAILS(safe_open(&reader, files_path("hostile.safetensors"), &error), error, "expected a header size of 2 to 56 bytes");
    }
    // 200,000 open braces: refused at the second, whatever the depth
    char* deep = (char*)need(malloc(200008));
    uint64_t header = 200000;
    memset(deep, '{', 200008);
    memcpy(deep, &header, 8);
    files_dump(files_path("hostile.safetensors"), deep, 200008);
    CHECK_FAILS(safe_open(&reader, files_path("hostile.safetensors"), &error), error, "expected '\"'");
    free(deep);
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

// A changed byte of a tensor is found by its checksum.
static void files_safetensors_damaged(void) {
    Error error;
    size_t bytes = 0;
    const char* path = files_path("damaged.safetensors");
    CHECK_OK(reader_safetensors_seed(path, 0, &error), error);
    uint8_t* data = files_slurp(path, &bytes);
    for (size_t i = bytes - 29; i < bytes; i++) { // 24 bytes of F32, 5 of U8
        data[i] ^= 0x10;
        files_dump(path, data, bytes);
        CHECK_FAILS(reader_safetensors_read(path, &error), error, "is damaged: expected checksum");
        data[i] ^= 0x10;
    }
    free(data);
}

static const TestRow files_tests[] = {
    {"files: the model file's bytes are those of the format", files_model_bytes},
    {"files: a model of either version comes back in either type", files_model_round_trip},
    {"files: bf16 of special values", files_model_bf16_special},
    {"files: padding rows and values that are no numbers are reported", files_model_notices},
    {"files: a damaged or foreign model file is refused by name", files_model_refused},
    {"files: sizes beyond 32 bits (7.46 billion parameters)", files_model_large},
    {"files: debug state, bytes and back", files_debug_state},
    {"files: safetensors of the Python package are read", files_safetensors_python},
    {"files: safetensors are written as laid down", files_safetensors_bytes},
    {"files: three writers of one file make that of one", files_written_by_several},
    {"files: a file that another writer made", files_joined},
    {"files: a disk that fills up in the middle of a piece", files_disk_full},
    {"files: hostile safetensors headers are refused", files_safetensors_hostile},
    {"files: a damaged tensor is found by its checksum", files_safetensors_damaged},
    {"files: every reader against damaged files", files_readers_damaged},
};
