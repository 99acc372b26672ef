// test_safetensors.h - tests of safetensors: bytes on disk against those of another implementation, several writers of one file, a full
// disk, hostile and damaged files.
#pragma once
#include "test_files.h"

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

static const TestRow safetensors_tests[] = {
    {"files: safetensors of the Python package are read", files_safetensors_python},
    {"files: safetensors are written as laid down", files_safetensors_bytes},
    {"files: three writers of one file make that of one", files_written_by_several},
    {"files: a file that another writer made", files_joined},
    {"files: a disk that fills up in the middle of a piece", files_disk_full},
    {"files: hostile safetensors headers are refused", files_safetensors_hostile},
    {"files: a damaged tensor is found by its checksum", files_safetensors_damaged},
};
