// readers.h - every reader of files in one table, with a way to make a good file for it: for tests that damage files and for the
// fuzz target (fuzz_readers.c). A new reader needs a row here and nothing else.
#pragma once
#include "../dataloader/hellaswag.h"
#include "../dataloader/shards.h"
#include "../dataloader/text.h"
#include "../dataloader/tokenizer.h"
#include "../trainer/checkpoint.h"
#include "../trainer/debug_state.h"
#include "../trainer/log.h"
#include "../trainer/model_file.h"
#include "../trainer/options.h"
#include "../trainer/safetensors_writer.h"

typedef struct {
    const char* name;
    bool (*write_seed)(const char* path, int variant, Error* error); // any variant is good
    bool (*read)(const char* path, Error* error);                    // all of the file, with everything freed again
    int finds;                                                       // what this reader is sure to refuse: READER_ANYTHING below
} ReaderRow;

enum {
    READER_ANYTHING, // it takes any bytes, or most
    READER_FOREIGN,  // refuses other kinds of files
    READER_CUT,      // also one that is cut short or followed by more
    READER_CHANGED   // also one with any changed byte
};

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
        uint64_t count = (t->end - t->begin) / safe_types[t->type].bytes;
        good = safe_find(&reader, t->name) == t && safe_verify(&reader, t, error) &&
               safe_read(&reader, t->name, t->type, count, data, error) &&
               safe_read_part(&reader, t->name, t->type, count, count / 2, (size_t)(count - count / 2), data, error);
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

// Text of some lines as a good file.
static bool reader_write_text(const char* path, const char* text, Error* error) {
    FileWriter file;
    return file_create(&file, path, error) && file_write(&file, text, strlen(text), error) && file_commit(&file, error);
}

// What the writers of data sets lay beside a file is of no use here.
static bool reader_drop_sidecar(bool good, const char* path, Error* error) {
    char name[PATH_MAX];
    if (good && sidecar_name(name, path, error)) { unlink(name); }
    return good;
}

static bool reader_shard_seed(const char* path, int variant, Error* error) {
    uint16_t narrow[40];
    uint32_t wide[40];
    for (uint32_t i = 0; i < 40; i++) { narrow[i] = (uint16_t)(wide[i] = i * 1237 % 50257); }
    return reader_drop_sidecar(shard_write(path, variant % 2 ? (const void*)wide : narrow, 40, variant % 2 ? 4 : 2, error), path, error);
}

static bool reader_shard_read(const char* path, Error* error) {
    Shard shard;
    int32_t tokens[16];
    if (!shard_open(&shard, path, error)) { return false; }
    bool good = shard_verify(&shard, error);
    for (uint64_t at = 0; good && at < shard.tokens; at += COUNT_OF(tokens)) {
        good = shard_read(&shard, at, (size_t)(shard.tokens - at < COUNT_OF(tokens) ? shard.tokens - at : COUNT_OF(tokens)), tokens, 50257,
                          error);
    }
    shard_close(&shard);
    return good;
}

static void reader_byte_tokenizer(Tokenizer* tokenizer) {
    memset(tokenizer, 0, sizeof(*tokenizer));
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        tokenizer_append(tokenizer, &byte, 1);
    }
    tokenizer_append(tokenizer, (const uint8_t*)" th", 3);
    tokenizer->eot = 257;
    tokenizer_append(tokenizer, (const uint8_t*)END_OF_TEXT, strlen(END_OF_TEXT));
}

static bool reader_tokenizer_seed(const char* path, int variant, Error* error) {
    (void)variant;
    Tokenizer tokenizer;
    reader_byte_tokenizer(&tokenizer);
    bool good = tokenizer_write(&tokenizer, path, error);
    tokenizer_free(&tokenizer);
    return reader_drop_sidecar(good, path, error);
}

// Ranks of tiktoken, merges of GPT-2: lines, so that a file cut between two of them is good.
static bool reader_ranks_seed(const char* path, int variant, Error* error) {
    char lines[8192] = "#version: 0.2\n\xc4\xa0 t\n\xc4\xa0t h\ni n\nin g\n";
    if (variant % 2 == 0) {
        size_t at = 0;
        for (unsigned b = 0; b < 256; b++) { // two characters for 8 bits and four zero ones, and two of filling
            static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
            at += (size_t)snprintf(lines + at, sizeof(lines) - at, "%c%c== %u\n", digits[b >> 2], digits[(b & 3) << 4], b);
        }
        snprintf(lines + at, sizeof(lines) - at, "IHQ= 256\n");
    }
    return reader_write_text(path, lines, error);
}

static bool reader_tokenizer_read(const char* path, Error* error) {
    Tokenizer tokenizer;
    ByteBuffer text = {NULL, 0, 0};
    if (!tokenizer_open(&tokenizer, path, error)) { return false; }
    bool good = true;
    for (size_t id = 0; good && id < tokenizer.vocab_size; id++) {
        int32_t token = (int32_t)id;
        good = tokenizer_decode(&tokenizer, &token, 1, &text, error);
    }
    Encoder encoder;
    Error reason; // many broken vocabularies cannot encode; that is for encoder_open to say. It is slow: one in 32 is tried
    bool tried = good && crc32c(0, text.data, text.count) % 32 == 0;
    if (tried && encoder_open(&encoder, &tokenizer, &reason)) {
        EncodeWork work;
        TokenBuffer tokens = {NULL, 0, 0};
        encode_work_new(&work);
        encode_text(&encoder, &work, text.data, min_size(text.count, 2000), &tokens);
        encode_work_free(&work);
        tokens_free(&tokens);
        encoder_close(&encoder);
    }
    bytes_free(&text);
    tokenizer_free(&tokenizer);
    return good;
}

static bool reader_hellaswag_seed(const char* path, int variant, Error* error) {
    uint16_t words[80];
    int32_t header[256] = {HELLASWAG_MAGIC, 1, 2, 44};
    size_t count = 0;
    for (uint16_t example = 0; example < 2; example++) {
        uint16_t endings = (uint16_t)(1 + (variant + example) % 3), longest = (uint16_t)(2 * (6 + 2 + 4 * (endings + 1)));
        uint16_t start[8] = {HELLASWAG_START, longest, example, 3, HELLASWAG_ENDINGS, 2, 11, 12};
        for (size_t i = 0; i < 8; i++) { words[count++] = start[i]; }
        for (int ending = 0; ending < HELLASWAG_ENDINGS; ending++) {
            words[count++] = endings;
            for (uint16_t i = 0; i < endings; i++) { words[count++] = (uint16_t)(100 + i); }
        }
    }
    FileWriter file;
    return file_create(&file, path, error) && file_write(&file, header, sizeof(header), error) &&
           file_write(&file, words, 2 * count, error) && file_commit(&file, error);
}

static bool reader_hellaswag_read(const char* path, Error* error) {
    HellaSwag set;
    if (!hellaswag_open(&set, path, 50257, error)) { return false; }
    uint64_t sum = 0;
    for (size_t i = 0; i < set.count; i++) {
        const HellaSwagExample* e = &set.examples[i];
        for (int k = 0; k < e->context_count; k++) { sum += e->context[k]; }
        for (int ending = 0; ending < HELLASWAG_ENDINGS; ending++) {
            for (int k = 0; k < e->ending_count[ending]; k++) { sum += e->ending[ending][k]; }
        }
    }
    hellaswag_close(&set);
    return sum < UINT64_MAX || fail(error, "no sum");
}

static bool reader_jsonl_seed(const char* path, int variant, Error* error) {
    static const char* const texts[2] = {
        "{\"ind\": 4, \"ctx\": \"A man\", \"label\": \"2\", \"endings\": [\"sits.\", \"runs\\n\", \"\\u00e4ts \\ud83d\\ude00\", \"x\"], "
        "\"text\": \"\"}\n"
        "{\"label\":0,\"endings\":[\"a\",\"b\",\"c\",\"d\"],\"ctx\":\"\xc3\xa4\",\"more\":[[{\"a\":[1,2.5e-3,null,true]}],{}],\"text\":"
        "\"yes\"}\n",
        "\n{\"text\": \"the text\", \"ctx\": \"t\", \"endings\": [\"1\", \"2\", \"3\", \"4\"], \"label\": 3}",
    };
    return reader_write_text(path, texts[variant % 2], error);
}

static bool reader_questions_read(const char* path, Error* error) {
    static Tokenizer tokenizer;
    static Encoder encoder;
    static EncodeWork work; // both are slow to make
    HellaSwagWriter writer;
    FileReader file;
    if (tokenizer.vocab_size == 0) {
        reader_byte_tokenizer(&tokenizer);
        encode_work_new(&work);
        if (!encoder_open(&encoder, &tokenizer, error)) { return false; }
    }
    if (!file_open(&file, path, error)) { return false; }
    memset(&writer, 0, sizeof(writer));
    writer.encoder = &encoder;
    writer.work = work;
    bool good = hellaswag_add_file(&writer, &file, error);
    work = writer.work;
    bytes_free(&writer.text);
    bytes_free(&writer.words);
    tokens_free(&writer.tokens);
    file_close(&file);
    return good;
}

static bool reader_text_read_as(const char* path, TextFormat format, const char* separator, Error* error) {
    const char* paths[1] = {path};
    TextConfig config;
    TextReader reader;
    memset(&config, 0, sizeof(config));
    config.paths = paths;
    config.path_count = 1;
    config.format = format;
    config.separator = separator;
    config.val_fraction = 0.3;
    config.block = 61; // many blocks
    text_open(&reader, &config);
    bool good = text_next(&reader, error);
    while (good && reader.piece_count > 0) { good = text_next(&reader, error); }
    text_close(&reader);
    return good;
}

static bool reader_json_text_read(const char* path, Error* error) {
    return reader_text_read_as(path, TEXT_JSONL, NULL, error);
}

static bool reader_text_seed(const char* path, int variant, Error* error) {
    return reader_write_text(
        path, variant % 2 ? "one\n\n\ntwo, three\n\n" : "It's  a   text\r\nof \xc3\xa4 few\xe2\x80\x83words.\n\nAnd\xff more", error);
}

static bool reader_text_read(const char* path, Error* error) {
    return reader_text_read_as(path, TEXT_PLAIN, NULL, error) && reader_text_read_as(path, TEXT_PLAIN, "blank", error) &&
           reader_text_read_as(path, TEXT_PLAIN, "one", error);
}

static bool reader_options_seed(const char* path, int variant, Error* error) {
    static Options options;
    (void)variant;
    options_defaults(&options, COMMAND_TRAIN);
    return options_save(&options, "", path, error);
}

static bool reader_options_read(const char* path, Error* error) {
    static Options options;
    options_defaults(&options, COMMAND_TRAIN);
    return options_load(&options, path, error);
}

static bool reader_log_seed(const char* path, int variant, Error* error) {
    return reader_write_text(
        path,
        variant % 2 ? "{\"step\":0,\"event\":\"train\",\"loss\":10.9}\n{\"step\":1,\"event\":\"val\"}\n{\"step\":7,\"event\":\"train\"}\n"
                    : "# steps = 10\ns:0 tel:10.9\ns:0 trl:10.8 lr:0.001 norm:2.1\ns:1 eval:0.25\ns:9 trl:5.0\n",
        error);
}

// Cuts the file; what is left must be cut no further by the same step.
static bool reader_log_read(const char* path, Error* error) {
    unsigned kept = 0, again = 0;
    bool good = log_cut(path, true, 5, &kept, error) && log_cut(path, false, 5, &kept, error) && log_cut(path, true, 1, &kept, error);
    kept = 0;
    return good && log_cut(path, false, 1, &kept, error) && log_cut(path, false, 1, &again, error) &&
           (kept == again || fail(error, "%s: cutting twice finds other lines", path));
}

static const ReaderRow reader_rows[] = {
    {"model file", reader_model_seed, reader_model_read, READER_CUT},
    {"debug state", reader_debug_seed, reader_debug_read, READER_CUT},
    {"safetensors", reader_safetensors_seed, reader_safetensors_read, READER_CUT},
    {"checkpoint mark", reader_done_seed, reader_done_read, READER_CHANGED},
    {"token shard", reader_shard_seed, reader_shard_read, READER_CUT},
    {"tokenizer", reader_tokenizer_seed, reader_tokenizer_read, READER_CUT},
    {"tokenizer as text", reader_ranks_seed, reader_tokenizer_read, READER_FOREIGN},
    {"HellaSwag", reader_hellaswag_seed, reader_hellaswag_read, READER_CUT},
    {"HellaSwag's JSONL", reader_jsonl_seed, reader_questions_read, READER_FOREIGN},
    {"JSONL", reader_jsonl_seed, reader_json_text_read, READER_FOREIGN},
    {"text", reader_text_seed, reader_text_read, READER_ANYTHING},
    {"options", reader_options_seed, reader_options_read, READER_FOREIGN},
    {"log", reader_log_seed, reader_log_read, READER_ANYTHING},
};
