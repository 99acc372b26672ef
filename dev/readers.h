// readers.h - every reader of files in one table, with a way to make a good file for it: for tests that damage files and for the
// fuzz target (fuzz_readers.c). A new reader needs a row here and nothing else.
#pragma once
#include "../trainer/checkpoint.h"
#include "../trainer/debug_state.h"
#include "../trainer/model_file.h"
#include "../trainer/safetensors_writer.h"

typedef struct {
    const char* name;
    bool (*write_seed)(const char* path, int variant, Error* error); // any variant is good
    bool (*read)(const char* path, Error* error);                   // all of the file, with everything freed again
    bool flips_found; // a changed byte anywhere is an error (the file holds checksums or only counts and indices)
} ReaderRow;

// max_seq_len 4, vocab_size 5, layers 2, heads 2, channels 4, padded_vocab 128: 1024 parameters
static const ModelHeader reader_model = {4, 5, 2, 2, 4, 128};
#define READER_MODEL_ELEMENTS 1024

// Value i is i/8 - 60, so that bf16 holds none beyond 8 bits exactly; padding rows are zero.
static void reader_model_values(float values[READER_MODEL_ELEMENTS]) {
    for (int i = 0; i < READER_MODEL_ELEMENTS; i++) { values[i] = i >= 5 * 4 && i < 128 * 4 ? 0.0f : (float)i / 8.0f - 60.0f; }
}

static bool reader_model_seed(const char* path, int variant, Error* error) {
    float values[READER_MODEL_ELEMENTS];
    reader_model_values(values);
    return model_file_write(path, &reader_model, variant % 2 ? MODEL_BF16 : MODEL_FP32, values, MODEL_FP32, NULL, error);
}

static bool reader_model_read(const char* path, Error* error) {
    ModelReader reader;
    if (!model_reader_open(&reader, path, error)) { return false; }
    size_t elements = (size_t)model_header_elements(&reader.header); // the file is as long as that
    void* values = need(malloc(elements * 4));
    Error notice;
    bool good = model_reader_read(&reader, 0, elements, values, reader.version == MODEL_FP32 ? MODEL_BF16 : MODEL_FP32, error) &&
                model_file_read(path, &reader.header, values, reader.version, &notice, error);
    model_reader_notice(&reader, &notice);
    free(values);
    model_reader_close(&reader);
    return good;
}

static bool reader_debug_seed(const char* path, int variant, Error* error) {
    int32_t tokens[6] = {0, 1, 2, 3, 4, 0};
    float values[READER_MODEL_ELEMENTS];
    DebugState state = {1 + variant % 2, 3, tokens, tokens, values, 1.25f, values};
    reader_model_values(values);
    return debug_state_write(path, &reader_model, &state, error);
}

static bool reader_debug_read(const char* path, Error* error) {
    DebugState state;
    bool good = debug_state_read(path, &reader_model, &state, error);
    debug_state_free(&state);
    return good;
}

static bool reader_safetensors_seed(const char* path, int variant, Error* error) {
    static const uint8_t data[64] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    uint64_t shapes[3][2] = {{2, 3}, {5, 1}, {0, 4}};
    SafeWriter writer;
    safe_writer_init(&writer);
    safe_writer_text(&writer, "options", "--train \"a\\b\" \n\xc3\xa4\xf0\x9f\x98\x80");
    safe_writer_number(&writer, "step", 1000);
    int codes = safe_writer_tensor(&writer, "codes", SAFE_U8, 1, shapes[1]);
    int m = safe_writer_tensor(&writer, "adamw.m.qkvw", variant % 2 ? SAFE_BF16 : SAFE_F32, 2, shapes[0]);
    safe_writer_tensor(&writer, "empty", SAFE_I64, 2, shapes[2]);
    return safe_writer_create(&writer, path, error) && safe_writer_put(&writer, codes, 0, data, 5, error) &&
           safe_writer_put(&writer, m, 0, data, variant % 2 ? 12 : 24, error) && safe_writer_commit(&writer, error);
}

static bool reader_safetensors_read(const char* path, Error* error) {
    SafeReader reader;
    uint64_t step = 0;
    if (!safe_open(&reader, path, error)) { return false; }
    bool good = true;
    for (size_t i = 0; good && i < reader.table.count; i++) {
        const SafeTensor* t = &reader.table.tensors[i];
        void* data = need(malloc((size_t)(t->end - t->begin) + 1)); // the file is longer
        good = safe_find(&reader, t->name) == t && safe_verify(&reader, t, error) &&
               safe_read(&reader, t->name, t->type, (t->end - t->begin) / safe_types[t->type].bytes, data, error);
        free(data);
    }
    good = good && safe_find_number(&reader, "step", &step, error) &&
           (safe_find_text(&reader, "options") || fail(error, "%s: expected \"options\" among the metadata", path));
    safe_close(&reader);
    return good;
}

static bool reader_done_seed(const char* path, int variant, Error* error) {
    CheckpointManifest m;
    char folder[PATH_MAX], made[PATH_MAX];
    memset(&m, 0, sizeof(m));
    m.step = 1000;
    for (m.count = 0; m.count < 1 + variant % 3; m.count++) {
        snprintf(m.files[m.count].name, CHECKPOINT_NAME_MAX, "file_%d.bin", m.count);
        m.files[m.count].size = 100;
        m.files[m.count].crc = 0x89abcdefu;
    }
    snprintf(folder, sizeof(folder), "%s.folder", path);
    mkdir(folder, 0777);
    if (!checkpoint_name(made, error, "%s/%s", folder, CHECKPOINT_DONE) || !checkpoint_write_done(folder, &m, error)) { return false; }
    bool good = rename(made, path) == 0 || fail(error, "cannot rename %s", made);
    rmdir(folder);
    return good;
}

static bool reader_done_read(const char* path, Error* error) {
    FileReader file;
    CheckpointManifest m;
    char text[CHECKPOINT_MAX_DONE];
    memset(&m, 0, sizeof(m));
    if (!file_open(&file, path, error)) { return false; }
    bool good = (file.size < sizeof(text) || fail(error, "%s is too large", path)) && file_read(&file, text, (size_t)file.size, 0, error) &&
                (checkpoint_parse_done(text, (size_t)file.size, &m) || fail(error, "%s is damaged", path));
    file_close(&file);
    return good;
}

static const ReaderRow reader_rows[] = {
    {"model file", reader_model_seed, reader_model_read, false},
    {"debug state", reader_debug_seed, reader_debug_read, false},
    {"safetensors", reader_safetensors_seed, reader_safetensors_read, false},
    {"checkpoint mark", reader_done_seed, reader_done_read, true},
};
