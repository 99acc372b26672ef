// pretokenize.h - cuts text into pre-tokens ("words") as GPT-2's pattern does (Radford et al. 2019):
//     '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// The pattern needs no more of a character than its class: letter, number, white space or other. The classes come once from
// PCRE2's Unicode tables; the scan itself is a plain loop, several times as fast as the pattern (the tests compare the two).
// White space is the 25 characters of Unicode's White_Space property, listed: PCRE2's \s has U+180E besides. Bytes that are not
// UTF-8 are pre-tokens of one byte each, and the text ends before them as far as the white-space rules are concerned.
#pragma once
#include "utf8.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define UNICODE_COUNT 0x110000u

enum { CHAR_OTHER, CHAR_LETTER, CHAR_NUMBER, CHAR_SPACE, CHAR_INVALID }; // CHAR_INVALID: no character, or the end of the text

// Marks the runs of letters and numbers in `text` (all characters in order) that PCRE2 finds.
static bool char_classes_fill(uint8_t* classes, const ByteBuffer* text, Error* error) {
    int code_error;
    size_t offset;
    pcre2_code* code = pcre2_compile((PCRE2_SPTR) "\\p{L}+|(\\p{N}+)", PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code_error, &offset, NULL);
    if (!code) { return fail(error, "PCRE2 lacks Unicode properties (error %d): install a PCRE2 built with Unicode", code_error); }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // without it the same result, slower
    pcre2_match_data* match = pcre2_match_data_create_from_pattern(code, NULL);
    const size_t* span = pcre2_get_ovector_pointer(match);
    int found = 0;
    for (size_t at = 0; (found = pcre2_match(code, text->data, text->count, at, PCRE2_NO_UTF_CHECK, match, NULL)) > 0; at = span[1]) {
        uint32_t c = 0;
        for (size_t i = span[0]; i < span[1];) {
            i += utf8_decode(text->data + i, text->data + span[1], &c);
            classes[c] = found == 2 ? CHAR_NUMBER : CHAR_LETTER;
        }
    }
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return found == PCRE2_ERROR_NOMATCH || fail(error, "PCRE2 failed on its own tables (error %d)", found);
}

// The class of every code point: UNICODE_COUNT bytes, to be freed; NULL on failure.
uint8_t* char_classes_new(Error* error) {
    static const uint32_t spaces[][2] = {{9, 13},          {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},    {0x1680, 0x1680},
                                         {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
    uint8_t* classes = (uint8_t*)need(calloc(UNICODE_COUNT, 1));
    ByteBuffer text = {NULL, 0, 0};
    bytes_reserve(&text, 4 * (size_t)UNICODE_COUNT);
    for (uint32_t c = 0; c < UNICODE_COUNT; c++) {
        bool surrogate = c >= 0xD800 && c < 0xE000;
        text.count += surrogate ? 0 : utf8_encode(c, text.data + text.count);
    }
    bool good = char_classes_fill(classes, &text, error);
    bytes_free(&text);
    for (size_t i = 0; i < COUNT_OF(spaces); i++) {
        for (uint32_t c = spaces[i][0]; c <= spaces[i][1]; c++) { classes[c] = CHAR_SPACE; }
    }
    if (good) { return classes; }
    free(classes);
    return NULL;
}

// The class of the character at p and its length; at the end CHAR_INVALID.
static inline int char_class_at(const uint8_t* classes, const uint8_t* p, const uint8_t* end, size_t* bytes) {
    uint32_t code;
    *bytes = 1;
    if (p == end) { return CHAR_INVALID; }
    if (*p < 0x80) { return classes[*p]; }
    size_t n = utf8_decode(p, end, &code);
    if (n == 0) { return CHAR_INVALID; }
    *bytes = n;
    return classes[code];
}

// The length of a contraction ('s 'd 'm 't 'll 've 're) at p, where an apostrophe stands; 0 if there is none.
static inline size_t contraction_length(const uint8_t* p, const uint8_t* end) {
    size_t left = (size_t)(end - p);
    if (left >= 2 && (p[1] == 's' || p[1] == 'd' || p[1] == 'm' || p[1] == 't')) { return 2; }
    bool two = left >= 3 && ((p[1] == 'l' && p[2] == 'l') || ((p[1] == 'v' || p[1] == 'r') && p[2] == 'e'));
    return two ? 3 : 0;
}

// The end of the pre-token that starts at p (p < end). It depends on nothing before p.
static inline const uint8_t* pretoken_end(const uint8_t* classes, const uint8_t* p, const uint8_t* end) {
    const uint8_t *start = p, *last;
    size_t bytes, after;
    int kind = char_class_at(classes, p, end, &bytes);
    if (kind == CHAR_INVALID) { return p + 1; }
    if (*p == '\'') {
        size_t contraction = contraction_length(p, end);
        if (contraction) { return p + contraction; }
    } else if (*p == ' ') { // one space belongs to the word after it
        int next = char_class_at(classes, p + 1, end, &after);
        if (next != CHAR_SPACE && next != CHAR_INVALID) {
            p++;
            kind = next;
            bytes = after;
        }
    }
    int next;
    do { // the run of this class
        last = p;
        p += bytes;
        next = char_class_at(classes, p, end, &bytes);
    } while (next == kind);
    // white space before a word leaves its last character to the word, or alone
    return kind == CHAR_SPACE && next != CHAR_INVALID && last > start ? last : p;
}

// True where text may be cut in two before p without changing any pre-token: at white space after ASCII that is not white.
static inline bool text_splits_at(const uint8_t* text, const uint8_t* p) {
    return p > text && (*p == ' ' || *p == '\n') && p[-1] > ' ' && p[-1] < 0x7F;
}
