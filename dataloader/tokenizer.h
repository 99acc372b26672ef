// tokenizer.h - a byte-level vocabulary: the bytes of every token, and the id of <|endoftext|>. Token ids are merge ranks, so the
// vocabulary alone says how to encode (bpe_encode.h). Reads llm.c's tokenizer file (magic 20240328, versions 1 and 2), tiktoken's
// rank files (base64 of the bytes, a space, the rank) and GPT-2's vocab.bpe; writes llm.c's version 2:
//     256 uint32 header {20240328, 2, vocabulary size, id of <|endoftext|>, 0 ...}, then per token one length byte and its bytes.
#pragma once
#include "sidecar.h"
#include "utf8.h"

#define TOKENIZER_MAGIC 20240328u
#define TOKENIZER_MAX_VOCAB ((size_t)1 << 24)
#define TOKENIZER_MAX_FILE ((uint64_t)1 << 28)
#define TOKENIZER_MAX_TOKEN 255 // bytes; the file keeps a length in one byte
#define END_OF_TEXT "<|endoftext|>"

typedef struct {
    size_t vocab_size; // ids are 0 .. vocab_size - 1
    uint32_t eot;      // id of <|endoftext|>
    ByteBuffer bytes;  // the tokens back to back
    size_t* start;     // (vocab_size + 1) where each begins in bytes
    size_t capacity;   // of start
} Tokenizer;

void tokenizer_free(Tokenizer* tokenizer) {
    bytes_free(&tokenizer->bytes);
    free(tokenizer->start);
    memset(tokenizer, 0, sizeof(*tokenizer));
}

// Appends a token, which gets the next id. Start from a zeroed Tokenizer.
void tokenizer_append(Tokenizer* tokenizer, const uint8_t* bytes, size_t count) {
    if (tokenizer->vocab_size + 2 > tokenizer->capacity) {
        tokenizer->capacity = max_size(1024, 2 * tokenizer->capacity);
        tokenizer->start = (size_t*)need(realloc(tokenizer->start, tokenizer->capacity * sizeof(size_t)));
    }
    tokenizer->start[tokenizer->vocab_size++] = tokenizer->bytes.count;
    bytes_append(&tokenizer->bytes, bytes, count);
    tokenizer->start[tokenizer->vocab_size] = tokenizer->bytes.count;
}

// The bytes of a token; id < vocab_size. They may hold NUL and need not be whole characters.
static inline const uint8_t* tokenizer_token(const Tokenizer* tokenizer, size_t id, size_t* count) {
    *count = tokenizer->start[id + 1] - tokenizer->start[id];
    return tokenizer->bytes.data + tokenizer->start[id];
}

// Appends the text of `count` tokens to `text`.
bool tokenizer_decode(const Tokenizer* tokenizer, const int32_t* tokens, size_t count, ByteBuffer* text, Error* error) {
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        if (tokens[i] < 0 || (size_t)tokens[i] >= tokenizer->vocab_size) {
            return fail(error, "token %zu is %d, but the vocabulary has ids 0 to %zu", i, tokens[i], tokenizer->vocab_size - 1);
        }
        const uint8_t* token = tokenizer_token(tokenizer, (size_t)tokens[i], &bytes);
        bytes_append(text, token, bytes);
    }
    return true;
}

// llm.c's file, versions 1 (GPT-2's vocabulary only, no field for <|endoftext|>) and 2.
static bool tokenizer_parse_bin(Tokenizer* tokenizer, const char* path, const uint8_t* data, size_t bytes, Error* error) {
    uint32_t header[4];
    if (bytes < 1024) { return fail(error, "%s: a tokenizer file has a header of 1024 bytes, this one ends at %zu", path, bytes); }
    memcpy(header, data, sizeof(header));
    size_t vocab = header[2], at = 1024;
    tokenizer->eot = header[1] == 1 ? 50256 : header[3];
    if (header[1] != 1 && header[1] != 2) { return fail(error, "%s: tokenizer version %u, known are 1 and 2", path, header[1]); }
    if (header[1] == 1 && vocab != 50257) { return fail(error, "%s: version 1 must hold 50257 tokens, header says %zu", path, vocab); }
    if (vocab == 0 || vocab > TOKENIZER_MAX_VOCAB || 2 * vocab > bytes - at) { // a token takes at least two bytes
        return fail(error, "%s: header says %zu tokens, more than %zu bytes can hold: copy or make it again", path, vocab, bytes);
    }
    if (tokenizer->eot >= vocab) { return fail(error, "%s: %s is id %u of %zu tokens", path, END_OF_TEXT, tokenizer->eot, vocab); }
    for (size_t id = 0; id < vocab; id++) {
        size_t length = at < bytes ? data[at] : 0;
        if (at >= bytes || length > bytes - at - 1) { return fail(error, "%s ends inside token %zu of %zu", path, id, vocab); }
        if (length == 0) { return fail(error, "%s: token %zu has no bytes", path, id); }
        tokenizer_append(tokenizer, data + at + 1, length);
        at += 1 + length;
    }
    return at == bytes || fail(error, "%s: %zu bytes follow the last token: not the file that was written", path, bytes - at);
}

static int base64_value(uint8_t c) {
    if (c >= 'A' && c <= 'Z') { return c - 'A'; }
    if (c >= 'a' && c <= 'z') { return c - 'a' + 26; }
    if (c >= '0' && c <= '9') { return c - '0' + 52; }
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// Decodes `count` characters of base64; returns the number of bytes, 0 if it is not base64 of 1 to TOKENIZER_MAX_TOKEN bytes.
static size_t base64_decode(uint8_t* out, const uint8_t* text, size_t count) {
    size_t bytes = 0, pad = 0;
    if (count == 0 || count % 4 || count > (TOKENIZER_MAX_TOKEN + 2) / 3 * 4) { return 0; }
    while (pad < 2 && text[count - 1 - pad] == '=') { pad++; }
    uint32_t bits = 0;
    for (size_t i = 0; i < count; i++) {
        int value = i >= count - pad ? 0 : base64_value(text[i]);
        if (value < 0) { return 0; }
        bits = bits << 6 | (uint32_t)value;
        if (i % 4 == 3) {
            out[bytes++] = (uint8_t)(bits >> 16);
            out[bytes++] = (uint8_t)(bits >> 8);
            out[bytes++] = (uint8_t)bits;
        }
    }
    return bytes - pad;
}

// Lines "base64 rank" with ranks 0, 1, 2 ...; <|endoftext|> becomes the next id, as in GPT-2.
static bool tokenizer_parse_ranks(Tokenizer* tokenizer, const char* path, const uint8_t* data, size_t bytes, Error* error) {
    for (size_t at = 0; at < bytes;) {
        const uint8_t *line = data + at, *stop = (const uint8_t*)memchr(line, '\n', bytes - at);
        size_t length = stop ? (size_t)(stop - line) : bytes - at, rank = 0;
        at += length + 1;
        if (length > 0 && line[length - 1] == '\r') { length--; }
        uint8_t token[TOKENIZER_MAX_TOKEN + 3];
        const uint8_t* space = (const uint8_t*)memchr(line, ' ', length);
        size_t count = space ? base64_decode(token, line, (size_t)(space - line)) : 0;
        size_t digit = space ? (size_t)(space - line) + 1 : length;
        bool good = count > 0 && digit < length && length - digit < 9;
        for (; good && digit < length; digit++) {
            good = line[digit] >= '0' && line[digit] <= '9';
            rank = 10 * rank + (size_t)(line[digit] - '0');
        }
        if (!good || rank != tokenizer->vocab_size) {
            return fail(error, "%s:%zu: expected base64 of a token, a space and rank %zu; is this a tokenizer file?", path,
                        tokenizer->vocab_size + 1, tokenizer->vocab_size);
        }
        tokenizer_append(tokenizer, token, count);
    }
    tokenizer->eot = (uint32_t)tokenizer->vocab_size;
    tokenizer_append(tokenizer, (const uint8_t*)END_OF_TEXT, strlen(END_OF_TEXT));
    return true;
}

// GPT-2's printable stand-ins for bytes: bytes that print stand for themselves and have the first ids, the others follow in order
// as U+0100, U+0101 ... Fills the byte of each stand-in (code points below 324; 0 where none) and appends the 256 tokens.
static void tokenizer_append_gpt2_bytes(Tokenizer* tokenizer, uint8_t byte_of[324]) {
    memset(byte_of, 0, 324);
    for (int pass = 0, code = 256; pass < 2; pass++) {
        for (int b = 0; b < 256; b++) {
            bool prints = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
            if (prints != (pass == 0)) { continue; }
            uint8_t byte = (uint8_t)b;
            byte_of[prints ? b : code++] = byte;
            tokenizer_append(tokenizer, &byte, 1);
        }
    }
}

// vocab.bpe: a "#version" line, then one merge a line, two tokens in stand-ins with a space between. Merge i is id 256 + i.
static bool tokenizer_parse_merges(Tokenizer* tokenizer, const char* path, const uint8_t* data, size_t bytes, Error* error) {
    uint8_t byte_of[324];
    tokenizer_append_gpt2_bytes(tokenizer, byte_of);
    const uint8_t *p = (const uint8_t*)memchr(data, '\n', bytes), *end = data + bytes;
    for (p = p ? p + 1 : end; p < end;) {
        uint8_t token[TOKENIZER_MAX_TOKEN];
        size_t count = 0, spaces = 0, n = 1;
        uint32_t c = 0;
        for (; p < end && *p != '\n'; p += n) {
            n = utf8_decode(p, end, &c);
            spaces += c == ' ';
            if (n == 0 || (c != ' ' && (c >= 324 || (byte_of[c] == 0 && c != 256))) || count == TOKENIZER_MAX_TOKEN) {
                return fail(error, "%s:%zu: not a merge of two tokens", path, tokenizer->vocab_size - 254);
            }
            if (c != ' ') { token[count++] = byte_of[c]; }
        }
        p += p < end;
        if (count == 0 && spaces == 0 && p == end) { break; }
        if (spaces != 1 || count < 2) { return fail(error, "%s:%zu: not a merge of two tokens", path, tokenizer->vocab_size - 254); }
        tokenizer_append(tokenizer, token, count);
    }
    tokenizer->eot = (uint32_t)tokenizer->vocab_size;
    tokenizer_append(tokenizer, (const uint8_t*)END_OF_TEXT, strlen(END_OF_TEXT));
    return true;
}

// Tells the three formats apart by their first bytes.
static bool tokenizer_parse(Tokenizer* tokenizer, const char* path, const uint8_t* data, size_t bytes, Error* error) {
    uint32_t magic = 0;
    memcpy(&magic, data, min_size(bytes, 4));
    if (bytes == 0) { return fail(error, "%s is empty, expected a tokenizer file", path); }
    if (magic == TOKENIZER_MAGIC) { return tokenizer_parse_bin(tokenizer, path, data, bytes, error); }
    if (bytes > 8 && memcmp(data, "#version", 8) == 0) { return tokenizer_parse_merges(tokenizer, path, data, bytes, error); }
    return tokenizer_parse_ranks(tokenizer, path, data, bytes, error);
}

bool tokenizer_open(Tokenizer* tokenizer, const char* path, Error* error) {
    FileReader file;
    memset(tokenizer, 0, sizeof(*tokenizer));
    if (!file_open(&file, path, error)) { return false; }
    bool good = file.size <= TOKENIZER_MAX_FILE || fail(error, "%s has %" PRIu64 " bytes: too large for a tokenizer", path, file.size);
    uint8_t* data = good ? (uint8_t*)need(malloc((size_t)file.size + 1)) : NULL;
    good = good && file_read(&file, data, (size_t)file.size, 0, error) && sidecar_check(&file, true, error) &&
           tokenizer_parse(tokenizer, path, data, (size_t)file.size, error);
    free(data);
    file_close(&file);
    if (!good) { tokenizer_free(tokenizer); }
    return good;
}

// Version 2 with a checksum file beside it.
bool tokenizer_write(const Tokenizer* tokenizer, const char* path, Error* error) {
    uint32_t header[256] = {TOKENIZER_MAGIC, 2, (uint32_t)tokenizer->vocab_size, tokenizer->eot};
    FileWriter file;
    ByteBuffer body = {NULL, 0, 0};
    bytes_append(&body, header, sizeof(header));
    for (size_t id = 0; id < tokenizer->vocab_size; id++) {
        size_t count;
        const uint8_t* token = tokenizer_token(tokenizer, id, &count);
        uint8_t length = (uint8_t)count;
        bytes_append(&body, &length, 1);
        bytes_append(&body, token, count);
    }
    bool good = file_create(&file, path, error) && file_write(&file, body.data, body.count, error) && file_commit_checked(&file, error);
    bytes_free(&body);
    return good;
}
