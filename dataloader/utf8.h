// utf8.h - UTF-8 one character at a time, strict (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
// Also the growable byte buffer that text passes through.
#pragma once
#include "../kernels/base.h"

typedef struct {
    uint8_t* data;
    size_t count, capacity;
} ByteBuffer;

// Room for `more` further bytes.
static inline void bytes_reserve(ByteBuffer* buffer, size_t more) {
    if (more <= buffer->capacity - buffer->count) { return; }
    buffer->capacity = max_size(buffer->count + more, buffer->capacity + buffer->capacity / 2);
    buffer->data = (uint8_t*)need(realloc(buffer->data, buffer->capacity));
}

static inline void bytes_append(ByteBuffer* buffer, const void* data, size_t count) {
    if (count == 0) { return; }
    bytes_reserve(buffer, count);
    memcpy(buffer->data + buffer->count, data, count);
    buffer->count += count;
}

static inline void bytes_free(ByteBuffer* buffer) {
    free(buffer->data);
    memset(buffer, 0, sizeof(*buffer));
}

// The length in bytes of the character at p (p < end) and its code point, or 0 where no valid character starts.
static inline size_t utf8_decode(const uint8_t* p, const uint8_t* end, uint32_t* code) {
    uint32_t lead = p[0];
    if (lead < 0x80) {
        *code = lead;
        return 1;
    }
    size_t bytes = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (bytes == 0 || (size_t)(end - p) < bytes) { return 0; }
    uint32_t c = lead & (0xFFu >> (bytes + 1));
    for (size_t i = 1; i < bytes; i++) {
        if ((p[i] & 0xC0) != 0x80) { return 0; }
        c = c << 6 | (p[i] & 0x3Fu);
    }
    bool wrong = (bytes == 3 && (c < 0x800 || (c >= 0xD800 && c < 0xE000))) || (bytes == 4 && (c < 0x10000 || c > 0x10FFFF));
    *code = c;
    return wrong ? 0 : bytes;
}

// Writes the 1 to 4 bytes of a code point (not a surrogate) and returns their number.
static inline size_t utf8_encode(uint32_t code, uint8_t* p) {
    if (code < 0x80) {
        p[0] = (uint8_t)code;
        return 1;
    }
    size_t bytes = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = bytes - 1; i > 0; i--) {
        p[i] = (uint8_t)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    p[0] = (uint8_t)((0xF00u >> bytes) | code);
    return bytes;
}
