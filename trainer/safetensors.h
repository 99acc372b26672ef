// safetensors.h - named tensors in one file (the format of github.com/huggingface/safetensors): a little-endian u64 header size, a
// JSON header {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {text: text}}, then the
// data, which the tensors cover without gap or overlap.
// The writer is told all tensors first; then any piece of any tensor may be written in any order. The metadata holds a CRC-32C of
// each tensor's data as "crc32c.NAME", which the reader verifies; files without them are read too. The reader trusts nothing: one
// strict parser for exactly this grammar, sizes checked before memory is asked for.
#pragma once
#include "../dataloader/file.h"
#include "../dataloader/utf8.h"
#include "file_part.h"

#define SAFE_MAX_DIMS 8
#define SAFE_MAX_HEADER ((uint64_t)16 << 20)
#define SAFE_PIECE ((size_t)1 << 20)

// clang-format off
typedef enum {
    SAFE_BOOL, SAFE_U8, SAFE_I8, SAFE_F8_E4M3, SAFE_F8_E5M2, SAFE_U16, SAFE_I16, SAFE_F16, SAFE_BF16,
    SAFE_U32, SAFE_I32, SAFE_F32, SAFE_U64, SAFE_I64, SAFE_F64, SAFE_TYPES
} SafeType;
static const struct {
    const char* name;
    uint64_t bytes;
} safe_types[SAFE_TYPES] = {
    {"BOOL", 1}, {"U8", 1}, {"I8", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2}, {"BF16", 2},
    {"U32", 4}, {"I32", 4}, {"F32", 4}, {"U64", 8}, {"I64", 8}, {"F64", 8},
};
// clang-format on

typedef struct {
    char* name;
    SafeType type;
    int dims;
    uint64_t shape[SAFE_MAX_DIMS];
    uint64_t begin, end; // bytes, counted from the start of the data
    uint32_t crc;        // of the data
    bool has_crc;
    PartSum sum; // bytes so far, their share in the checksum (writer)
} SafeTensor;

typedef struct {
    char *key, *value;
} SafeText;

typedef struct {
    SafeTensor* tensors;
    size_t count, capacity;
    SafeText* texts;
    size_t text_count, text_capacity;
} SafeTable;

static void safe_table_free(SafeTable* table) {
    for (size_t i = 0; i < table->count; i++) { free(table->tensors[i].name); }
    for (size_t i = 0; i < table->text_count; i++) {
        free(table->texts[i].key);
        free(table->texts[i].value);
    }
    free(table->tensors);
    free(table->texts);
    memset(table, 0, sizeof(*table));
}

static SafeTensor* safe_table_add_tensor(SafeTable* table) {
    if (table->count == table->capacity) {
        table->capacity = table->capacity * 2 + 16;
        table->tensors = (SafeTensor*)need(realloc(table->tensors, table->capacity * sizeof(SafeTensor)));
    }
    SafeTensor* tensor = &table->tensors[table->count++];
    memset(tensor, 0, sizeof(*tensor));
    return tensor;
}

static SafeText* safe_table_add_text(SafeTable* table) {
    if (table->text_count == table->text_capacity) {
        table->text_capacity = table->text_capacity * 2 + 16;
        table->texts = (SafeText*)need(realloc(table->texts, table->text_capacity * sizeof(SafeText)));
    }
    SafeText* text = &table->texts[table->text_count++];
    memset(text, 0, sizeof(*text));
    return text;
}

// Bytes of a tensor of this type and shape; false where they exceed 2^62.
static bool safe_tensor_bytes(SafeType type, int dims, const uint64_t* shape, uint64_t* bytes) {
    bool empty = false, fits = true;
    *bytes = safe_types[type].bytes;
    for (int i = 0; i < dims; i++) {
        empty = empty || shape[i] == 0;
        fits = fits && !__builtin_mul_overflow(*bytes, shape[i], bytes) && *bytes <= (uint64_t)1 << 62;
    }
    if (empty) { *bytes = 0; }
    return fits || empty;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The header's parser.

typedef struct {
    const char *start, *at, *end;
    const char* path;
    Error* error;
} SafeParser;

static bool safe_bad(SafeParser* p, const char* what) {
    return fail(p->error, "%s: damaged safetensors header at byte %td: %s; is it the right file, whole?", p->path, p->at - p->start + 8,
                what);
}

static void safe_skip_space(SafeParser* p) {
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r')) { p->at++; }
}

static bool safe_next_is(SafeParser* p, char c) {
    safe_skip_space(p);
    return p->at < p->end && *p->at == c;
}

static bool safe_take(SafeParser* p, char c) {
    char what[] = "expected ' '";
    what[10] = c;
    if (!safe_next_is(p, c)) { return safe_bad(p, what); }
    p->at++;
    return true;
}

// After an element of a list or object: a comma (*more = true) or the closing sign.
static bool safe_take_more(SafeParser* p, char close, bool* more) {
    *more = safe_next_is(p, ',');
    if (*more) {
        p->at++;
        return true;
    }
    return safe_take(p, close);
}

static bool safe_take_hex4(SafeParser* p, uint32_t* value) {
    *value = 0;
    if (p->end - p->at < 4) { return safe_bad(p, "the text ends inside an escape"); }
    for (int i = 0; i < 4; i++) {
        char c = *p->at++;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) { return safe_bad(p, "expected four hexadecimal digits after \\u"); }
        *value = *value * 16 + (uint32_t)digit;
    }
    return true;
}

// The character after a backslash, as UTF-8, at *out (at most 4 bytes, never more than its escape took).
static bool safe_take_escape(SafeParser* p, char** out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (p->at == p->end) { return safe_bad(p, "the text ends inside an escape"); }
    char c = *p->at++;
    const char* simple = c ? strchr(from, c) : NULL;
    if (simple) {
        *(*out)++ = to[simple - from];
        return true;
    }
    uint32_t code = 0, low = 0;
    if (c != 'u') { return safe_bad(p, "unknown escape"); }
    if (!safe_take_hex4(p, &code)) { return false; }
    if (code >= 0xd800 && code < 0xdc00) { // first half of a pair that stands for one character beyond 16 bits
        if (p->end - p->at < 6 || p->at[0] != '\\' || p->at[1] != 'u') { return safe_bad(p, "half of a surrogate pair"); }
        p->at += 2;
        if (!safe_take_hex4(p, &low)) { return false; }
        if (low < 0xdc00 || low > 0xdfff) { return safe_bad(p, "half of a surrogate pair"); }
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code == 0 || (code >= 0xdc00 && code < 0xe000)) {
        return safe_bad(p, "a NUL or half of a surrogate pair");
    }
    *out += utf8_encode(code, (uint8_t*)*out);
    return true;
}

// A text, unescaped, on the heap: never longer than its form in the file.
static bool safe_take_text(SafeParser* p, char** text) {
    if (!safe_take(p, '"')) { return false; }
    const char* close = p->at;
    while (close < p->end && *close != '"') { close += *close == '\\' && p->end - close > 1 ? 2 : 1; }
    if (close >= p->end) { return safe_bad(p, "a text does not end"); }
    char* out = *text = (char*)need(malloc((size_t)(close - p->at) + 1));
    while (p->at < close) {
        if (*p->at == '\\') {
            p->at++;
            if (!safe_take_escape(p, &out)) { return false; }
            continue;
        }
        uint32_t code = 0;
        size_t length = utf8_decode((const uint8_t*)p->at, (const uint8_t*)close, &code);
        if (length == 0 || code < 0x20) { return safe_bad(p, "a text that is not UTF-8 or holds a control character"); }
        memcpy(out, p->at, length);
        out += length;
        p->at += length;
    }
    *out = 0;
    return safe_take(p, '"');
}

static bool safe_take_number(SafeParser* p, uint64_t* value) {
    safe_skip_space(p);
    const char* first = p->at;
    *value = 0;
    for (; p->at < p->end && *p->at >= '0' && *p->at <= '9'; p->at++) {
        if (__builtin_mul_overflow(*value, (uint64_t)10, value) || __builtin_add_overflow(*value, (uint64_t)(*p->at - '0'), value)) {
            return safe_bad(p, "a number beyond 64 bits");
        }
    }
    if (p->at == first) { return safe_bad(p, "expected a whole number"); }
    if (*first == '0' && p->at - first > 1) { return safe_bad(p, "a number with leading zeros"); }
    return true;
}

static bool safe_take_list(SafeParser* p, uint64_t* values, int max, int* count) {
    *count = 0;
    if (!safe_take(p, '[')) { return false; }
    if (safe_next_is(p, ']')) {
        p->at++;
        return true;
    }
    for (bool more = true; more;) {
        if (*count == max) { return safe_bad(p, "a list with too many numbers"); }
        if (!safe_take_number(p, &values[(*count)++]) || !safe_take_more(p, ']', &more)) { return false; }
    }
    return true;
}

static bool safe_take_type(SafeParser* p, SafeType* type) {
    char* text = NULL;
    bool good = safe_take_text(p, &text);
    int found = -1;
    for (int i = 0; good && i < SAFE_TYPES; i++) { found = strcmp(text, safe_types[i].name) == 0 ? i : found; }
    if (good && found < 0) { good = safe_bad(p, "an unknown dtype"); }
    if (good) { *type = (SafeType)found; }
    free(text);
    return good;
}

// {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, each once, in any order
static bool safe_take_tensor(SafeParser* p, SafeTensor* tensor) {
    unsigned seen = 0;
    uint64_t offsets[2] = {0, 0}, bytes = 0;
    int count = 2;
    if (!safe_take(p, '{')) { return false; }
    for (bool more = true; more;) {
        char* key = NULL;
        bool good = safe_take_text(p, &key);
        unsigned which = !good                              ? 0
                         : strcmp(key, "dtype") == 0        ? 1
                         : strcmp(key, "shape") == 0        ? 2
                         : strcmp(key, "data_offsets") == 0 ? 4
                                                            : 8;
        free(key);
        if (!good) { return false; }
        if (which == 8 || (seen & which)) { return safe_bad(p, "an unknown or repeated key; expected dtype, shape and data_offsets"); }
        seen |= which;
        if (!safe_take(p, ':')) { return false; }
        good = which == 1   ? safe_take_type(p, &tensor->type)
               : which == 2 ? safe_take_list(p, tensor->shape, SAFE_MAX_DIMS, &tensor->dims)
                            : safe_take_list(p, offsets, 2, &count);
        if (!good || !safe_take_more(p, '}', &more)) { return false; }
    }
    if (seen != 7 || count != 2) { return safe_bad(p, "a tensor without dtype, shape or data_offsets"); }
    tensor->begin = offsets[0];
    tensor->end = offsets[1];
    if (!safe_tensor_bytes(tensor->type, tensor->dims, tensor->shape, &bytes) || offsets[1] < offsets[0] ||
        offsets[1] - offsets[0] != bytes) {
        return safe_bad(p, "shape, dtype and data_offsets of a tensor disagree");
    }
    return true;
}

static bool safe_take_metadata(SafeParser* p, SafeTable* table) {
    if (!safe_take(p, '{')) { return false; }
    if (safe_next_is(p, '}')) {
        p->at++;
        return true;
    }
    for (bool more = true; more;) {
        SafeText* text = safe_table_add_text(table);
        if (!safe_take_text(p, &text->key) || !safe_take(p, ':') || !safe_take_text(p, &text->value) || !safe_take_more(p, '}', &more)) {
            return false;
        }
    }
    return true;
}

static bool safe_take_header(SafeParser* p, SafeTable* table) {
    if (!safe_take(p, '{')) { return false; }
    bool more = !safe_next_is(p, '}'), metadata = false;
    if (!more) { p->at++; }
    while (more) {
        char* name = NULL;
        bool good = safe_take_text(p, &name) && safe_take(p, ':');
        if (good && strcmp(name, "__metadata__") == 0) {
            good = (!metadata || safe_bad(p, "__metadata__ stands twice")) && safe_take_metadata(p, table);
            metadata = true;
            free(name);
        } else if (good) {
            SafeTensor* tensor = safe_table_add_tensor(table);
            tensor->name = name;
            good = safe_take_tensor(p, tensor);
        } else {
            free(name);
        }
        if (!good || !safe_take_more(p, '}', &more)) { return false; }
    }
    safe_skip_space(p);
    return p->at == p->end || safe_bad(p, "more text after the header's end");
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Reader.

typedef struct {
    FileReader file;
    SafeTable table; // sorted by name, texts by key
    uint64_t data;   // offset of the data in the file
} SafeReader;

static int safe_compare_place(const void* a, const void* b) {
    const SafeTensor *x = (const SafeTensor*)a, *y = (const SafeTensor*)b;
    if (x->begin != y->begin) { return x->begin < y->begin ? -1 : 1; }
    return x->end < y->end ? -1 : x->end > y->end;
}

static int safe_compare_name(const void* a, const void* b) {
    return strcmp(((const SafeTensor*)a)->name, ((const SafeTensor*)b)->name);
}
static int safe_compare_key(const void* a, const void* b) {
    return strcmp(((const SafeText*)a)->key, ((const SafeText*)b)->key);
}

// NULL when there is none of this name.
const SafeTensor* safe_find(const SafeReader* reader, const char* name) {
    for (size_t low = 0, high = reader->table.count; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, reader->table.tensors[middle].name);
        if (order == 0) { return &reader->table.tensors[middle]; }
        if (order < 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return NULL;
}

// Value of a metadata text; NULL when there is none of this key.
const char* safe_find_text(const SafeReader* reader, const char* key) {
    for (size_t low = 0, high = reader->table.text_count; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(key, reader->table.texts[middle].key);
        if (order == 0) { return reader->table.texts[middle].value; }
        if (order < 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return NULL;
}

// A whole number among the metadata, e.g. the step.
bool safe_find_number(const SafeReader* reader, const char* key, uint64_t* value, Error* error) {
    const char* text = safe_find_text(reader, key);
    SafeParser p = {text, text, text ? text + strlen(text) : NULL, reader->file.path, error};
    if (!text) { return fail(error, "%s: expected \"%s\" among the metadata, found none", reader->file.path, key); }
    return (safe_take_number(&p, value) && p.at == p.end) ||
           fail(error, "%s: expected a whole number as \"%s\", found \"%.40s\"", reader->file.path, key, text);
}

// Tensors cover the data exactly, nothing stands twice; checksums go from the metadata to their tensors.
static bool safe_check_table(SafeReader* reader, uint64_t data_bytes, Error* error) {
    SafeTable* table = &reader->table;
    const char* path = reader->file.path;
    uint64_t at = 0;
    if (table->count > 1) { qsort(table->tensors, table->count, sizeof(SafeTensor), safe_compare_place); }
    for (size_t i = 0; i < table->count; i++) {
        const SafeTensor* t = &table->tensors[i];
        if (t->begin != at) {
            return fail(error,
                        "%s: expected tensor \"%.100s\" at data offset %" PRIu64 ", found %" PRIu64 ": tensors overlap or leave a gap",
                        path, t->name, at, t->begin);
        }
        at = t->end;
    }
    if (at != data_bytes) {
        return fail(error, "%s is %s: expected %" PRIu64 " bytes of data, found %" PRIu64 "; fetch or write it again", path,
                    data_bytes < at ? "cut off" : "too long", at, data_bytes);
    }
    if (table->count > 1) { qsort(table->tensors, table->count, sizeof(SafeTensor), safe_compare_name); }
    for (size_t i = 1; i < table->count; i++) {
        if (safe_compare_name(&table->tensors[i - 1], &table->tensors[i]) == 0) {
            return fail(error, "%s: tensor \"%.100s\" stands twice", path, table->tensors[i].name);
        }
    }
    if (table->text_count > 1) { qsort(table->texts, table->text_count, sizeof(SafeText), safe_compare_key); }
    for (size_t i = 0; i < table->text_count; i++) {
        const SafeText* text = &table->texts[i];
        if (i > 0 && safe_compare_key(text - 1, text) == 0) { return fail(error, "%s: metadata \"%.100s\" stands twice", path, text->key); }
        if (strncmp(text->key, "crc32c.", 7) != 0) { continue; }
        SafeTensor* t = (SafeTensor*)safe_find(reader, text->key + 7);
        if (!t || strlen(text->value) != 8 || strspn(text->value, "0123456789abcdef") != 8) {
            return fail(error, "%s: metadata \"%.100s\" belongs to no tensor or is no checksum", path, text->key);
        }
        t->crc = (uint32_t)strtoul(text->value, NULL, 16);
        t->has_crc = true;
    }
    return true;
}

static bool safe_read_header(SafeReader* reader, Error* error) {
    uint64_t size = reader->file.size, header = 0;
    const char* path = reader->file.path;
    if (size < 10) { return fail(error, "%s is not a safetensors file: expected at least 10 bytes, found %" PRIu64, path, size); }
    if (!file_read(&reader->file, &header, 8, 0, error)) { return false; }
    if (header < 2 || header > SAFE_MAX_HEADER || header > size - 8) {
        return fail(error, "%s is not a safetensors file, or cut off: expected a header size of 2 to %" PRIu64 " bytes, found %" PRIu64,
                    path, size - 8 < SAFE_MAX_HEADER ? size - 8 : SAFE_MAX_HEADER, header);
    }
    char* text = (char*)need(malloc((size_t)header));
    SafeParser p = {text, text, text + header, path, error};
    bool good = file_read(&reader->file, text, (size_t)header, 8, error) && safe_take_header(&p, &reader->table) &&
                safe_check_table(reader, size - 8 - header, error);
    free(text);
    reader->data = 8 + header;
    return good;
}

void safe_close(SafeReader* reader) {
    file_close(&reader->file);
    safe_table_free(&reader->table);
}

// On failure nothing is left to close.
bool safe_open(SafeReader* reader, const char* path, Error* error) {
    memset(reader, 0, sizeof(*reader));
    if (!file_open(&reader->file, path, error)) { return false; }
    if (safe_read_header(reader, error)) { return true; }
    safe_close(reader);
    return false;
}

// `bytes` bytes from byte `first` of the tensor; no checksum (see safe_verify).
bool safe_read_slice(const SafeReader* reader, const SafeTensor* tensor, uint64_t first, size_t bytes, void* out, Error* error) {
    uint64_t size = tensor->end - tensor->begin;
    if (first > size || bytes > size - first) {
        return fail(error, "%s: tensor \"%s\" has %" PRIu64 " bytes; %zu from %" PRIu64 " were asked for", reader->file.path, tensor->name,
                    size, bytes, first);
    }
    return file_read(&reader->file, out, bytes, reader->data + tensor->begin + first, error);
}

static bool safe_check_crc(const SafeReader* reader, const SafeTensor* tensor, uint32_t crc, Error* error) {
    return !tensor->has_crc || tensor->crc == crc ||
           fail(error, "%s: tensor \"%s\" is damaged: expected checksum %08x, found %08x; take an older checkpoint", reader->file.path,
                tensor->name, tensor->crc, crc);
}

// Reads the tensor in pieces for its checksum alone.
bool safe_verify(const SafeReader* reader, const SafeTensor* tensor, Error* error) {
    char* piece = (char*)need(malloc(SAFE_PIECE));
    uint64_t size = tensor->end - tensor->begin;
    uint32_t crc = 0;
    bool good = true;
    for (uint64_t at = 0; good && at < size; at += SAFE_PIECE) {
        size_t bytes = size - at < SAFE_PIECE ? (size_t)(size - at) : SAFE_PIECE;
        good = safe_read_slice(reader, tensor, at, bytes, piece, error);
        crc = good ? crc32c(crc, piece, bytes) : crc;
    }
    free(piece);
    return good && safe_check_crc(reader, tensor, crc, error);
}

// The tensor of this name, which must be of this type and have `count` elements in all; NULL, with the error set, if not.
static const SafeTensor* safe_expect(const SafeReader* reader, const char* name, SafeType type, uint64_t count, Error* error) {
    const SafeTensor* t = safe_find(reader, name);
    if (!t) {
        fail(error, "%s: expected tensor \"%s\", found none of this name; was it written with other options?", reader->file.path, name);
        return NULL;
    }
    uint64_t found = (t->end - t->begin) / safe_types[t->type].bytes;
    if (t->type != type || found != count) {
        fail(error,
             "%s: expected tensor \"%s\" as %" PRIu64 " values of %s, found %" PRIu64 " of %s; was it written with other options?",
             reader->file.path, name, count, safe_types[type].name, found, safe_types[t->type].name);
        return NULL;
    }
    return t;
}

// The tensor of this name, type and number of elements, whole and with its checksum verified.
bool safe_read(const SafeReader* reader, const char* name, SafeType type, uint64_t count, void* out, Error* error) {
    const SafeTensor* t = safe_expect(reader, name, type, count, error);
    if (!t) { return false; }
    size_t bytes = (size_t)(t->end - t->begin);
    return safe_read_slice(reader, t, 0, bytes, out, error) && safe_check_crc(reader, t, crc32c(0, out, bytes), error);
}

// Elements first..first+count-1 of the tensor of this name and type with `total` elements; no checksum (see safe_verify).
bool safe_read_part(const SafeReader* reader, const char* name, SafeType type, uint64_t total, uint64_t first, size_t count, void* out,
                    Error* error) {
    const SafeTensor* t = safe_expect(reader, name, type, total, error);
    uint64_t unit = safe_types[type].bytes;
    if (!t) { return false; }
    if (first > total || count > total - first) {
        return fail(error, "%s: tensor \"%s\" has %" PRIu64 " values; %zu from %" PRIu64 " were asked for", reader->file.path, name, total,
                    count, first);
    }
    return safe_read_slice(reader, t, first * unit, (size_t)(count * unit), out, error);
}
