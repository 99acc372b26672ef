// safetensors_writer.h - the writing half of safetensors.h. Order of calls: safe_writer_init; safe_writer_tensor for each tensor and
// safe_writer_text for metadata; safe_writer_create; safe_writer_put for pieces of tensors, in any order, each byte once;
// safe_writer_commit (or safe_writer_abandon), which writes the header with the checksums.
// Several ranks write one file when all declare the same, one creates it, the others safe_writer_join it, each puts its pieces and
// calls safe_writer_sync; the first then takes the others' sums by safe_writer_add and commits.
#pragma once
#include "safetensors.h"

typedef struct {
    FilePart part;
    SafeTable table; // in the order of the calls
    uint64_t header; // bytes, the size field not counted
    uint64_t data;   // bytes of all tensors
} SafeWriter;

__attribute__((format(printf, 2, 3))) static void safe_append_format(ByteBuffer* buffer, const char* format, ...) {
    char text[128];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    bytes_append(buffer, text, min_size((size_t)length, sizeof(text) - 1));
}

// A JSON text with its quotes. Bytes that are not UTF-8 (file names may hold any) become U+FFFD.
static void safe_append_text(ByteBuffer* buffer, const char* text) {
    const char* end = text + strlen(text);
    bytes_append(buffer, "\"", 1);
    while (text < end) {
        uint32_t code = 0;
        size_t length = utf8_decode((const uint8_t*)text, (const uint8_t*)end, &code);
        if (length == 0) {
            bytes_append(buffer, "\\ufffd", 6);
            text++;
        } else if (code < 0x20) {
            safe_append_format(buffer, "\\u%04x", code);
            text++;
        } else {
            if (*text == '"' || *text == '\\') { bytes_append(buffer, "\\", 1); }
            bytes_append(buffer, text, length);
            text += length;
        }
    }
    bytes_append(buffer, "\"", 1);
}

static char* safe_copy(const char* text) {
    return strcpy((char*)need(malloc(strlen(text) + 1)), text);
}

void safe_writer_init(SafeWriter* writer) {
    memset(writer, 0, sizeof(*writer));
    file_part_init(&writer->part);
}

// Declares a tensor; returns its number for safe_writer_put. Names must differ.
int safe_writer_tensor(SafeWriter* writer, const char* name, SafeType type, int dims, const uint64_t* shape) {
    SafeTensor* t = safe_table_add_tensor(&writer->table);
    assert(dims <= SAFE_MAX_DIMS);
    t->name = safe_copy(name);
    t->type = type;
    t->dims = dims;
    for (int i = 0; i < dims; i++) { t->shape[i] = shape[i]; }
    return (int)writer->table.count - 1;
}

void safe_writer_text(SafeWriter* writer, const char* key, const char* value) {
    SafeText* text = safe_table_add_text(&writer->table);
    text->key = safe_copy(key);
    text->value = safe_copy(value);
}

void safe_writer_number(SafeWriter* writer, const char* key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof(text), "%" PRIu64, value);
    safe_writer_text(writer, key, text);
}

// Large elements come first in the data, so that all are aligned.
static bool safe_writer_place_tensors(SafeWriter* writer, const char* path, Error* error) {
    SafeTable* table = &writer->table;
    writer->data = 0;
    for (uint64_t unit = 8; unit > 0; unit /= 2) {
        for (size_t i = 0; i < table->count; i++) {
            SafeTensor* t = &table->tensors[i];
            uint64_t bytes = 0;
            if (safe_types[t->type].bytes != unit) { continue; }
            if (!safe_tensor_bytes(t->type, t->dims, t->shape, &bytes) || bytes > ((uint64_t)1 << 62) - writer->data) {
                return fail(error, "%s: tensor \"%s\" is too large for a file", path, t->name);
            }
            t->begin = writer->data;
            t->end = writer->data += bytes;
        }
    }
    return true;
}

// The size field and the header, padded with spaces so that the data starts at a multiple of 8.
static ByteBuffer safe_writer_header(const SafeWriter* writer) {
    ByteBuffer b = {NULL, 0, 0};
    const SafeTable* table = &writer->table;
    bytes_append(&b, "\0\0\0\0\0\0\0\0{\"__metadata__\":{", 8 + 17);
    for (size_t i = 0; i < table->text_count; i++) {
        if (i > 0) { bytes_append(&b, ",", 1); }
        safe_append_text(&b, table->texts[i].key);
        bytes_append(&b, ":", 1);
        safe_append_text(&b, table->texts[i].value);
    }
    for (size_t i = 0; i < table->count; i++) {
        ByteBuffer key = {NULL, 0, 0};
        bytes_append(&key, "crc32c.", 7);
        bytes_append(&key, table->tensors[i].name, strlen(table->tensors[i].name) + 1);
        if (i + table->text_count > 0) { bytes_append(&b, ",", 1); }
        safe_append_text(&b, (const char*)key.data);
        safe_append_format(&b, ":\"%08x\"", (uint32_t)table->tensors[i].sum.crc);
        free(key.data);
    }
    bytes_append(&b, "}", 1);
    for (size_t i = 0; i < table->count; i++) {
        const SafeTensor* t = &table->tensors[i];
        bytes_append(&b, ",", 1);
        safe_append_text(&b, t->name);
        safe_append_format(&b, ":{\"dtype\":\"%s\",\"shape\":[", safe_types[t->type].name);
        for (int k = 0; k < t->dims; k++) { safe_append_format(&b, "%s%" PRIu64, k > 0 ? "," : "", t->shape[k]); }
        safe_append_format(&b, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->begin, t->end);
    }
    bytes_append(&b, "}", 1);
    while (b.count % 8 != 0) { bytes_append(&b, " ", 1); }
    uint64_t header = b.count - 8;
    memcpy(b.data, &header, 8);
    return b;
}

// Sizes of header and data; checksums have a fixed width.
static bool safe_writer_place(SafeWriter* writer, const char* path, Error* error) {
    if (!safe_writer_place_tensors(writer, path, error)) { return false; }
    ByteBuffer header = safe_writer_header(writer);
    writer->header = header.count - 8;
    free(header.data);
    return writer->header <= SAFE_MAX_HEADER ||
           fail(error, "%s: names and texts of %" PRIu64 " bytes are too long for a header", path, writer->header);
}

void safe_writer_abandon(SafeWriter* writer) {
    file_part_abandon(&writer->part);
    safe_table_free(&writer->table);
}

// On failure, here and below, the file is abandoned.
bool safe_writer_create(SafeWriter* writer, const char* path, Error* error) {
    bool good = safe_writer_place(writer, path, error) &&
                file_part_create(&writer->part, path, 8 + writer->header + writer->data, error);
    if (!good) { safe_writer_abandon(writer); }
    return good;
}

// The file that process `maker` created at `path`.
bool safe_writer_join(SafeWriter* writer, const char* path, long maker, Error* error) {
    bool good = safe_writer_place(writer, path, error) &&
                file_part_join(&writer->part, path, 8 + writer->header + writer->data, maker, error);
    if (!good) { safe_writer_abandon(writer); }
    return good;
}

// `bytes` bytes at byte `first` of tensor number `index`.
bool safe_writer_put(SafeWriter* writer, int index, uint64_t first, const void* data, size_t bytes, Error* error) {
    assert((size_t)index < writer->table.count);
    SafeTensor* t = &writer->table.tensors[index];
    uint64_t size = t->end - t->begin;
    bool good = first <= size && bytes <= size - first;
    if (!good) {
        fail(error, "%s: tensor \"%s\" has %" PRIu64 " bytes; %zu at %" PRIu64 " were given", writer->part.file.path, t->name, size, bytes,
             first);
    }
    good = good && file_part_write(&writer->part, data, bytes, 8 + writer->header + t->begin + first, error);
    if (!good) {
        safe_writer_abandon(writer);
        return false;
    }
    t->sum.crc ^= crc32c_share(crc32c(0, data, bytes), size - first - bytes);
    t->sum.written += bytes;
    return true;
}

bool safe_writer_sync(SafeWriter* writer, Error* error) {
    if (file_part_sync(&writer->part, error)) { return true; }
    safe_writer_abandon(writer);
    return false;
}

// What another rank put into tensor number `index`: its table.tensors[index].sum.
void safe_writer_add(SafeWriter* writer, int index, PartSum sum) {
    PartSum* all = &writer->table.tensors[index].sum;
    all->written += sum.written;
    all->crc ^= sum.crc;
}

// Afterwards writer->part.file.size and .crc describe the file (checkpoint_record takes them).
bool safe_writer_commit(SafeWriter* writer, Error* error) {
    SafeTable* table = &writer->table;
    FileWriter* file = &writer->part.file;
    bool good = true;
    for (size_t i = 0; good && i < table->count; i++) {
        const SafeTensor* t = &table->tensors[i];
        good = t->sum.written == t->end - t->begin || fail(error, "%s: tensor \"%s\" got %" PRIu64 " of its %" PRIu64 " bytes", file->path,
                                                           t->name, t->sum.written, t->end - t->begin);
    }
    ByteBuffer header = safe_writer_header(writer);
    good = good && file_part_write(&writer->part, header.data, header.count, 0, error);
    file->size = header.count + writer->data;
    file->crc = crc32c_share(crc32c(0, header.data, header.count), writer->data);
    for (size_t i = 0; i < table->count; i++) {
        file->crc ^= crc32c_share((uint32_t)table->tensors[i].sum.crc, writer->data - table->tensors[i].end);
    }
    free(header.data);
    good = good && file_commit(file, error);
    if (!good) { file_part_abandon(&writer->part); }
    safe_table_free(table);
    return good;
}
