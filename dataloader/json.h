// json.h - as much JSON (RFC 8259) as a line of a data set needs: walk the members of an object, decode strings, skip the rest.
// Tolerant where data sets are sloppy (raw control characters and broken UTF-8 in strings pass as they are, a lone surrogate
// becomes U+FFFD), strict about structure. Nothing recurses: depth cannot overflow the stack.
#pragma once
#include "utf8.h"
#include <ctype.h>

typedef struct {
    const uint8_t *at, *end;
} Json;

static inline void json_space(Json* json) {
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\t' || *json->at == '\r' || *json->at == '\n')) { json->at++; }
}

// Steps over c, with white space before it; false (and no step) if something else stands there.
static inline bool json_take(Json* json, uint8_t c) {
    json_space(json);
    bool here = json->at < json->end && *json->at == c;
    json->at += here;
    return here;
}

// Four hexadecimal digits, or -1.
static int32_t json_hex4(Json* json) {
    int32_t value = 0;
    if (json->end - json->at < 4) { return -1; }
    for (int i = 0; i < 4; i++) {
        uint8_t c = *json->at++, low = c | 32;
        int digit = c >= '0' && c <= '9' ? c - '0' : low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
        if (digit < 0) { return -1; }
        value = value << 4 | digit;
    }
    return value;
}

// The rest of an escape after the backslash, as UTF-8 in out; returns its length, 0 if it is none.
static size_t json_escape(Json* json, uint8_t out[4]) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (json->at == json->end) { return 0; }
    uint8_t c = *json->at++;
    const char* name = c ? strchr(names, c) : NULL;
    if (name) {
        out[0] = (uint8_t)values[name - names];
        return 1;
    }
    int32_t code = c == 'u' ? json_hex4(json) : -1;
    if (code < 0) { return 0; }
    if (code >= 0xD800 && code < 0xDC00 && json->end - json->at >= 6 && json->at[0] == '\\' && json->at[1] == 'u') {
        Json ahead = {json->at + 2, json->end};
        int32_t low = json_hex4(&ahead);
        if (low >= 0xDC00 && low < 0xE000) {
            json->at = ahead.at;
            return utf8_encode(0x10000u + ((uint32_t)(code - 0xD800) << 10) + (uint32_t)(low - 0xDC00), out);
        }
    }
    return utf8_encode(code >= 0xD800 && code < 0xE000 ? 0xFFFD : (uint32_t)code, out);
}

// A string, appended decoded to out (NULL: only stepped over).
bool json_string(Json* json, ByteBuffer* out) {
    if (!json_take(json, '"')) { return false; }
    for (;;) {
        const uint8_t* run = json->at;
        while (json->at < json->end && *json->at != '"' && *json->at != '\\') { json->at++; }
        if (out) { bytes_append(out, run, (size_t)(json->at - run)); }
        if (json->at == json->end) { return false; }
        if (*json->at++ == '"') { return true; }
        uint8_t escaped[4];
        size_t bytes = json_escape(json, escaped);
        if (bytes == 0) { return false; }
        if (out) { bytes_append(out, escaped, bytes); }
    }
}

// Steps over any value. Inside arrays and objects only strings and the balance of brackets are looked at.
bool json_skip(Json* json) {
    size_t depth = 0;
    do {
        json_space(json);
        if (json->at == json->end) { return false; }
        uint8_t c = *json->at;
        if (c == '"') {
            if (!json_string(json, NULL)) { return false; }
        } else if (c == '[' || c == '{') {
            depth++;
            json->at++;
        } else if (depth > 0 && (c == ']' || c == '}')) {
            depth--;
            json->at++;
        } else if (depth > 0 && (c == ',' || c == ':')) {
            json->at++;
        } else {
            const uint8_t* start = json->at; // a number, true, false or null
            while (json->at < json->end && (isalnum(*json->at) || *json->at == '-' || *json->at == '+' || *json->at == '.')) { json->at++; }
            if (json->at == start) { return false; }
        }
    } while (depth > 0);
    return true;
}

// Looks for the value of `key` in an object, checking the object to its end. Returns 1 and the first such value, 0 where there is
// none, -1 where this is no object with nothing behind it; value->at is then where reading stopped.
int json_find(Json object, const char* key, Json* value) {
    ByteBuffer name = {NULL, 0, 0};
    const uint8_t* found = NULL;
    bool good = json_take(&object, '{'), more = good && !json_take(&object, '}');
    while (more) {
        name.count = 0;
        good = json_string(&object, &name) && json_take(&object, ':');
        if (good && !found && name.count == strlen(key) && memcmp(name.data, key, name.count) == 0) { found = object.at; }
        good = good && json_skip(&object);
        more = good && json_take(&object, ',');
        good = good && (more || json_take(&object, '}'));
    }
    bytes_free(&name);
    json_space(&object);
    *value = object;
    if (!good || object.at != object.end) { return -1; }
    if (found) { value->at = found; }
    return found != NULL;
}
