// hellaswag.h - multiple-choice evaluation sets in the style of HellaSwag (Zellers et al. 2019): a context and four endings, one of
// them right. The file, magic 20240522: 256 int32 header {magic, 1, examples, longest example in bytes}, then per example uint16
//     65535, bytes of the example (these words included), index, label, 4, n, n context tokens, and four times: n, n tokens.
// Endings are encoded with a space before them. The writer reads JSONL with the fields ctx, endings (4 strings) and label.
#pragma once
#include "bpe_encode.h"
#include "json.h"
#include "sidecar.h"

#define HELLASWAG_MAGIC 20240522
#define HELLASWAG_ENDINGS 4
#define HELLASWAG_START 65535
#define HELLASWAG_MAX_FILE ((uint64_t)1 << 32)

typedef struct {
    int label; // index of the right ending
    int context_count, ending_count[HELLASWAG_ENDINGS];
    const uint16_t* context;                    // (context_count)
    const uint16_t* ending[HELLASWAG_ENDINGS]; // each (ending_count)
} HellaSwagExample;

typedef struct {
    HellaSwagExample* examples;
    size_t count;
    int longest;     // tokens of the longest context and ending together
    uint16_t* words; // the file behind its header
} HellaSwag;

// CRC-32C over all that the examples say.
uint32_t hellaswag_checksum(const HellaSwag* set) {
    uint32_t crc = 0;
    for (size_t i = 0; i < set->count; i++) {
        const HellaSwagExample* e = &set->examples[i];
        crc = crc32c(crc, &e->label, sizeof(e->label));
        crc = crc32c(crc, e->context, (size_t)e->context_count * sizeof(uint16_t));
        for (int k = 0; k < HELLASWAG_ENDINGS; k++) { crc = crc32c(crc, e->ending[k], (size_t)e->ending_count[k] * sizeof(uint16_t)); }
    }
    return crc;
}

void hellaswag_close(HellaSwag* set) {
    free(set->examples);
    free(set->words);
    memset(set, 0, sizeof(*set));
}

// Takes a count and that many tokens at *at; NULL if they do not fit before `end` or a token is not in the vocabulary.
static const uint16_t* hellaswag_tokens(const HellaSwag* set, size_t* at, size_t end, uint64_t vocab_size, int* count) {
    if (*at >= end || set->words[*at] > end - *at - 1) { return NULL; }
    const uint16_t* tokens = set->words + *at + 1;
    *count = set->words[*at];
    for (int i = 0; i < *count; i++) {
        if (tokens[i] >= vocab_size) { return NULL; }
    }
    *at += 1 + (size_t)*count;
    return tokens;
}

// Example `index` at word `at` of `total`; returns the word behind it, 0 if it is not one.
static size_t hellaswag_parse(HellaSwag* set, size_t index, size_t at, size_t total, uint64_t vocab_size) {
    const uint16_t* w = set->words + at;
    HellaSwagExample* example = &set->examples[index];
    if (total - at < 6 || w[0] != HELLASWAG_START || w[1] % 2 || w[2] != index) { return 0; }
    if (w[3] >= HELLASWAG_ENDINGS || w[4] != HELLASWAG_ENDINGS) { return 0; }
    size_t end = at + w[1] / 2u;
    if (end > total) { return 0; }
    example->label = w[3];
    at += 5;
    example->context = hellaswag_tokens(set, &at, end, vocab_size, &example->context_count);
    if (!example->context || example->context_count == 0) { return 0; }
    for (int i = 0; i < HELLASWAG_ENDINGS; i++) {
        example->ending[i] = hellaswag_tokens(set, &at, end, vocab_size, &example->ending_count[i]);
        if (!example->ending[i] || example->ending_count[i] == 0) { return 0; }
        int both = example->context_count + example->ending_count[i];
        set->longest = both > set->longest ? both : set->longest;
    }
    return at == end ? end : 0;
}

static bool hellaswag_read(HellaSwag* set, const FileReader* file, uint64_t vocab_size, Error* error) {
    int32_t header[4];
    const char* path = file->path;
    if (file->size < 1024 || file->size > HELLASWAG_MAX_FILE || file->size % 2) {
        return fail(error, "%s has %" PRIu64 " bytes: not an evaluation set; copy it or make it again", path, file->size);
    }
    if (!file_read(file, header, sizeof(header), 0, error)) { return false; }
    if (header[0] != HELLASWAG_MAGIC || header[1] != 1) {
        return fail(error, "%s is not an evaluation set: it starts with %" PRId32 " %" PRId32 ", expected %d 1", path, header[0], header[1],
                    HELLASWAG_MAGIC);
    }
    size_t total = (size_t)(file->size - 1024) / 2;
    if (header[2] < 1 || header[2] > 65535 || (size_t)header[2] > total / 15) { // an example has at least 15 words
        return fail(error, "%s: header says %" PRId32 " examples, the file has %" PRIu64 " bytes: copy it or make it again", path,
                    header[2], file->size);
    }
    if (!sidecar_check(file, true, error)) { return false; }
    set->count = (size_t)header[2];
    set->examples = (HellaSwagExample*)need(calloc(set->count, sizeof(HellaSwagExample)));
    set->words = (uint16_t*)need(malloc(2 * total));
    if (!file_read(file, set->words, 2 * total, 1024, error)) { return false; }
    size_t at = 0;
    for (size_t i = 0; i < set->count; i++) {
        at = hellaswag_parse(set, i, at, total, vocab_size);
        if (at == 0) {
            return fail(error, "%s: example %zu of %zu is broken, or its tokens are not of a vocabulary of %" PRIu64, path, i, set->count,
                        vocab_size);
        }
    }
    return at == total || fail(error, "%s: %zu bytes follow the last example: not the file that was written", path, 2 * (total - at));
}

// Token ids at or above vocab_size are refused.
bool hellaswag_open(HellaSwag* set, const char* path, uint64_t vocab_size, Error* error) {
    FileReader file;
    memset(set, 0, sizeof(*set));
    if (!file_open(&file, path, error)) { return false; }
    bool good = hellaswag_read(set, &file, vocab_size, error);
    file_close(&file);
    if (!good) { hellaswag_close(set); }
    return good;
}

// The state of the writer: one example is encoded at a time.
typedef struct {
    const Encoder* encoder;
    EncodeWork work;
    ByteBuffer text, words; // words: the examples so far
    TokenBuffer tokens;
    size_t count, longest;
} HellaSwagWriter;

static void hellaswag_add_word(HellaSwagWriter* writer, size_t value) {
    uint16_t word = (uint16_t)value;
    bytes_append(&writer->words, &word, 2);
}

// Encodes a JSON string, with a space before it if asked, and adds its count and tokens; false if it is no string, or empty.
static bool hellaswag_add_string(HellaSwagWriter* writer, Json* json, bool space) {
    writer->text.count = writer->tokens.count = 0;
    if (space) { bytes_append(&writer->text, " ", 1); }
    if (!json_string(json, &writer->text)) { return false; }
    encode_text(writer->encoder, &writer->work, writer->text.data, writer->text.count, &writer->tokens);
    if (writer->tokens.count == 0 || writer->tokens.count > 65535) { return false; }
    hellaswag_add_word(writer, writer->tokens.count);
    for (size_t i = 0; i < writer->tokens.count; i++) { hellaswag_add_word(writer, writer->tokens.ids[i]); }
    return true;
}

// label: 0 to 3, as a number or (as in the published file) also as a string; -1 otherwise
static int hellaswag_label(Json value) {
    json_space(&value);
    value.at += value.at < value.end && *value.at == '"';
    if (value.at == value.end || *value.at < '0' || *value.at >= '0' + HELLASWAG_ENDINGS) { return -1; }
    bool longer = value.at + 1 < value.end && value.at[1] >= '0' && value.at[1] <= '9';
    return longer ? -1 : *value.at - '0';
}

static bool hellaswag_add_line(HellaSwagWriter* writer, const uint8_t* line, size_t bytes) {
    Json json = {line, line + bytes}, context, endings, label;
    if (json_find(json, "ctx", &context) != 1 || json_find(json, "endings", &endings) != 1 || json_find(json, "label", &label) != 1) {
        return false;
    }
    size_t start = writer->words.count;
    int right = hellaswag_label(label);
    const size_t head[5] = {HELLASWAG_START, 0, writer->count, (size_t)right, HELLASWAG_ENDINGS};
    for (int i = 0; i < 5; i++) { hellaswag_add_word(writer, head[i]); }
    if (right < 0 || !hellaswag_add_string(writer, &context, false)) { return false; }
    for (int i = 0; i < HELLASWAG_ENDINGS; i++) {
        if (!json_take(&endings, i == 0 ? '[' : ',') || !hellaswag_add_string(writer, &endings, true)) { return false; }
    }
    size_t length = writer->words.count - start;
    if (!json_take(&endings, ']') || length > 65535 || writer->count == 65535) { return false; }
    uint16_t word = (uint16_t)length;
    memcpy(writer->words.data + start + 2, &word, 2);
    writer->longest = max_size(writer->longest, length);
    writer->count++;
    return true;
}

static bool hellaswag_add_file(HellaSwagWriter* writer, const FileReader* file, Error* error) {
    if (file->size > HELLASWAG_MAX_FILE) {
        return fail(error, "%s has %" PRIu64 " bytes: too large for an evaluation set", file->path, file->size);
    }
    size_t bytes = (size_t)file->size, line_number = 0;
    uint8_t* text = (uint8_t*)need(malloc(bytes + 1));
    bool good = file_read(file, text, bytes, 0, error);
    for (size_t at = 0; good && at < bytes;) {
        const uint8_t* stop = (const uint8_t*)memchr(text + at, '\n', bytes - at);
        size_t length = stop ? (size_t)(stop - text) - at : bytes - at;
        line_number++;
        if (length > 0 && !hellaswag_add_line(writer, text + at, length)) {
            good =
                fail(error, "%s:%zu: expected {\"ctx\": string, \"endings\": four strings, \"label\": 0 to 3} of less than 64 kB in tokens",
                     file->path, line_number);
        }
        at += length + 1;
    }
    free(text);
    if (good && writer->count == 0) { return fail(error, "%s has no examples", file->path); }
    return good;
}

// Makes an evaluation set of a JSONL file.
bool hellaswag_write(const char* path, const char* jsonl, const Encoder* encoder, Error* error) {
    FileReader file;
    FileWriter out;
    HellaSwagWriter writer;
    if (encoder->tokenizer->vocab_size > 65535) { return fail(error, "%s: the format holds ids below 65535 only", path); }
    if (!file_open(&file, jsonl, error)) { return false; }
    memset(&writer, 0, sizeof(writer));
    writer.encoder = encoder;
    encode_work_new(&writer.work);
    bool good = hellaswag_add_file(&writer, &file, error);
    int32_t header[256] = {HELLASWAG_MAGIC, 1, (int32_t)writer.count, (int32_t)writer.longest};
    good = good && file_create(&out, path, error) && file_write(&out, header, sizeof(header), error) &&
           file_write(&out, writer.words.data, writer.words.count, error) && file_commit_checked(&out, error);
    file_close(&file);
    encode_work_free(&writer.work);
    bytes_free(&writer.text);
    bytes_free(&writer.words);
    tokens_free(&writer.tokens);
    return good;
}
