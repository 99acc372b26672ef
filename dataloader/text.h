// text.h - text files in, batches of document pieces out. Two formats: plain text, where a file is one document or is divided at
// separator lines, and JSONL, where every line is an object with the document in one string field.
// Files are read in blocks, so their size does not matter; a document that spans blocks comes in pieces, cut where no word is
// (text_splits_at), so that pieces encode to the same ids as the whole.
// Validation documents are spread evenly: of documents 0, 1, 2 ... those where rounding i * fraction steps up. Plain files that are
// not divided give their tail instead.
#pragma once
#include "file.h"
#include "json.h"
#include "pretokenize.h"

#define TEXT_BLOCK ((size_t)1 << 24)
#define TEXT_MAX_PIECE ((size_t)1 << 28) // a line, or text with no place to cut, beyond this is refused

typedef enum { TEXT_AUTO, TEXT_PLAIN, TEXT_JSONL } TextFormat; // TEXT_AUTO: JSONL for names in .jsonl, .ndjson or .json

typedef struct {
    const char* const* paths;
    size_t path_count;
    TextFormat format;
    const char* separator; // plain: the line that ends a document, or "blank" for blank lines; NULL or empty: a file is a document
    const char* field;     // of the JSON object
    double val_fraction;   // in [0, 1)
    size_t block;          // bytes read at a time
} TextConfig;

typedef struct {
    size_t begin, bytes; // in the batch's text
    bool starts;         // the first piece of a document
    bool validation;
} TextPiece;

typedef struct {
    TextConfig config;
    ByteBuffer text; // the batch: pieces lie in it in order
    TextPiece* pieces;
    size_t piece_count, piece_capacity; // piece_count = 0 after text_next: all has been read
    uint64_t documents, bytes_read;
    // where reading stands
    size_t next_path;
    FileReader file;
    bool open, jsonl, starts, validation;
    uint64_t offset, given, line; // bytes read from the file, bytes of it taken into batches, lines taken
    ByteBuffer raw;               // read but not yet taken
} TextReader;

void text_open(TextReader* reader, const TextConfig* config) {
    memset(reader, 0, sizeof(*reader));
    reader->config = *config;
    if (reader->config.block == 0) { reader->config.block = TEXT_BLOCK; }
    if (!reader->config.separator) { reader->config.separator = ""; }
    if (!reader->config.field) { reader->config.field = "text"; }
    reader->file.fd = -1;
}

void text_close(TextReader* reader) {
    file_close(&reader->file);
    bytes_free(&reader->text);
    bytes_free(&reader->raw);
    free(reader->pieces);
    memset(reader, 0, sizeof(*reader));
    reader->file.fd = -1;
}

static bool text_is_jsonl(TextFormat format, const char* path) {
    const char* dot = strrchr(path, '.');
    if (format != TEXT_AUTO) { return format == TEXT_JSONL; }
    return dot && (strcmp(dot, ".jsonl") == 0 || strcmp(dot, ".ndjson") == 0 || strcmp(dot, ".json") == 0);
}

static bool text_open_next(TextReader* reader, Error* error) {
    const char* path = reader->config.paths[reader->next_path];
    if (!file_open(&reader->file, path, error)) { return false; }
    reader->next_path++;
    reader->open = reader->starts = true;
    reader->jsonl = text_is_jsonl(reader->config.format, path);
    reader->validation = false;
    reader->offset = reader->given = reader->line = 0;
    reader->raw.count = 0;
    return true;
}

// Adds the last `bytes` bytes of the batch's text as a piece.
static void text_add_piece(TextReader* reader, size_t bytes) {
    if (reader->piece_count == reader->piece_capacity) {
        reader->piece_capacity = max_size(256, 2 * reader->piece_capacity);
        reader->pieces = (TextPiece*)need(realloc(reader->pieces, reader->piece_capacity * sizeof(TextPiece)));
    }
    if (reader->starts && (reader->jsonl || reader->config.separator[0])) {
        double f = reader->config.val_fraction, before = (double)reader->documents * f;
        reader->validation = floor(before + f + 0.5) > floor(before + 0.5);
    }
    reader->documents += reader->starts;
    TextPiece piece = {reader->text.count - bytes, bytes, reader->starts, reader->validation};
    reader->pieces[reader->piece_count++] = piece;
    reader->starts = false;
}

static void text_add(TextReader* reader, const uint8_t* text, size_t bytes) {
    if (bytes == 0) { return; }
    bytes_append(&reader->text, text, bytes);
    text_add_piece(reader, bytes);
}

// An undivided file: the tail from val_fraction on, moved to the next place to cut, is validation text and starts anew.
static void text_take_undivided(TextReader* reader, const uint8_t* text, size_t bytes) {
    double f = reader->config.val_fraction;
    uint64_t target = (uint64_t)((1.0 - f) * (double)reader->file.size);
    if (f > 0.0 && !reader->validation && reader->given + bytes > target) {
        size_t cut = reader->given < target ? (size_t)(target - reader->given) : 0;
        while (cut > 0 && cut < bytes && !text_splits_at(text, text + cut)) { cut++; }
        if (cut < bytes) { // else the next block starts with the tail
            text_add(reader, text, cut);
            text += cut;
            bytes -= cut;
            reader->starts = reader->validation = true;
            reader->documents -= cut > 0 || reader->given > 0; // the tail is the same document
        }
    }
    text_add(reader, text, bytes);
}

// Adds part of a divided file; its documents lose the newlines at both ends, and empty ones are none.
static void text_add_trimmed(TextReader* reader, const uint8_t* text, const uint8_t* end, bool ends) {
    while (reader->starts && text < end && (*text == '\n' || *text == '\r')) { text++; }
    while (ends && end > text && (end[-1] == '\n' || end[-1] == '\r')) { end--; }
    text_add(reader, text, (size_t)(end - text));
    reader->starts |= ends;
}

// A file that is divided at lines which hold the separator and nothing else. Blocks end where a line does, before its newline.
static void text_take_divided(TextReader* reader, const uint8_t* text, size_t bytes, bool last) {
    const char* separator = strcmp(reader->config.separator, "blank") == 0 ? "" : reader->config.separator;
    size_t length = strlen(separator);
    const uint8_t *end = text + bytes, *line = text, *next;
    line += reader->given > 0 && bytes > 0; // the newline of the line that ended the last block
    for (; line < end; line = next) {
        const uint8_t* stop = (const uint8_t*)memchr(line, '\n', (size_t)(end - line));
        stop = stop ? stop : end;
        next = stop + (stop < end);
        size_t count = (size_t)(stop - line) - (stop > line && stop[-1] == '\r');
        if (count == length && memcmp(line, separator, length) == 0) {
            text_add_trimmed(reader, text, line, true);
            text = next;
        }
    }
    text_add_trimmed(reader, text, end, last);
}

static bool text_take_line(TextReader* reader, const uint8_t* line, size_t bytes, Error* error) {
    Json json = {line, line + bytes}, value;
    json_space(&json);
    if (json.at == json.end) { return true; }
    int found = json_find(json, reader->config.field, &value);
    if (found < 0) {
        return fail(error, "%s:%" PRIu64 ": malformed JSON at column %zu; expected one object a line", reader->file.path, reader->line,
                    (size_t)(value.at - line) + 1);
    }
    size_t before = reader->text.count;
    if (found == 0 || !json_string(&value, &reader->text)) {
        return fail(error, "%s:%" PRIu64 ": no string field \"%s\"; name the field that holds the text", reader->file.path, reader->line,
                    reader->config.field);
    }
    reader->starts = true;
    if (reader->text.count > before) { text_add_piece(reader, reader->text.count - before); }
    return true;
}

static bool text_take_lines(TextReader* reader, const uint8_t* text, size_t bytes, Error* error) {
    const uint8_t* end = text + bytes;
    if (reader->given == 0 && bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { text += 3; } // a byte order mark
    while (text < end) {
        const uint8_t* stop = (const uint8_t*)memchr(text, '\n', (size_t)(end - text));
        stop = stop ? stop : end;
        reader->line++;
        if (!text_take_line(reader, text, (size_t)(stop - text), error)) { return false; }
        text = stop + 1;
    }
    return true;
}

// How much of raw can be taken before more is read: up to behind the last newline (JSONL), or to the last place to cut (plain; before
// a newline if documents end at lines). Only what is new, from `known` on, needs a look.
static size_t text_ready(const TextReader* reader, size_t known) {
    const uint8_t* raw = reader->raw.data;
    for (size_t at = reader->raw.count; at > known; at--) {
        if (reader->jsonl && raw[at - 1] == '\n') { return at; }
        if (!reader->jsonl && text_splits_at(raw, raw + at - 1) && (!reader->config.separator[0] || raw[at - 1] == '\n')) { return at - 1; }
    }
    return 0;
}

// One block of the open file; takes what is complete.
static bool text_read_block(TextReader* reader, Error* error) {
    size_t known = reader->raw.count;
    uint64_t left = reader->file.size - reader->offset;
    size_t bytes = left < reader->config.block ? (size_t)left : reader->config.block;
    bytes_reserve(&reader->raw, bytes + 1);
    if (!file_read(&reader->file, reader->raw.data + known, bytes, reader->offset, error)) { return false; }
    reader->raw.count += bytes;
    reader->offset += bytes;
    bool last = reader->offset == reader->file.size;
    size_t ready = last ? reader->raw.count : text_ready(reader, known);
    if (ready == 0 && reader->raw.count > TEXT_MAX_PIECE) {
        return fail(error, "%s:%" PRIu64 ": %zu bytes without %s: is this text?", reader->file.path, reader->line + 1, reader->raw.count,
                    reader->jsonl ? "the end of a line" : "white space");
    }
    if (reader->jsonl) {
        if (!text_take_lines(reader, reader->raw.data, ready, error)) { return false; }
    } else if (!reader->config.separator[0]) {
        text_take_undivided(reader, reader->raw.data, ready);
    } else {
        text_take_divided(reader, reader->raw.data, ready, last);
    }
    reader->given += ready;
    reader->bytes_read += ready;
    reader->raw.count -= ready;
    memmove(reader->raw.data, reader->raw.data + ready, reader->raw.count);
    if (last) {
        file_close(&reader->file);
        reader->open = false;
    }
    return true;
}

// The next batch: about one block of text, in reader->text and reader->pieces; no pieces at the end of all files.
bool text_next(TextReader* reader, Error* error) {
    reader->text.count = reader->piece_count = 0;
    while (reader->text.count < reader->config.block) {
        if (!reader->open) {
            if (reader->next_path == reader->config.path_count) { return true; }
            if (!text_open_next(reader, error)) { return false; }
        }
        if (!text_read_block(reader, error)) { return false; }
    }
    return true;
}
