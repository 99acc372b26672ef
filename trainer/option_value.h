// option_value.h - the values of options: from text to the field of struct Options that a row of the table names, and back. Numbers
// are written with as few digits as bring back the same value.
#pragma once
#include "option_table.h"
#include <ctype.h>

#define OPTION_VALUE_SIZE (4 * OPTION_TEXT_SIZE + 8) // a value as text: at worst each byte is written as \xHH

// ---- the list type

const char* option_list_first(const OptionList* list) { return list->count ? list->text : NULL; }

const char* option_list_next(const OptionList* list, const char* item) {
    const char* next = item + strlen(item) + 1;
    return next < list->text + list->used ? next : NULL;
}

// All items as an array, to be freed by the caller; they point into the list.
const char** option_list_array(const OptionList* list) {
    const char** items = (const char**)need(malloc((list->count + 1) * sizeof(char*)));
    size_t count = 0;
    for (const char* item = option_list_first(list); item; item = option_list_next(list, item)) { items[count++] = item; }
    items[count] = NULL;
    return items;
}

// ---- rows

static void* option_place(Options* options, const OptionRow* row) { return (char*)options + row->offset; }
static const void* option_place_of(const Options* options, const OptionRow* row) { return (const char*)options + row->offset; }
static bool option_serves(const OptionRow* row, Command command) { return (row->commands >> command & 1u) != 0; }

// By long name, or with `letter` by llm.c's letters; NULL when the command has no such option.
static const OptionRow* option_find(Command command, const char* name, bool letter) {
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        const char* key = letter ? row->letter : row->name;
        if (key && option_serves(row, command) && strcmp(key, name) == 0) { return row; }
    }
    return NULL;
}

// Whether the user has set it: on the command line, or in a file to something else than the default. A name of the command.
bool option_given(const Options* options, const char* name) {
    const OptionRow* row = option_find(options->command, name, false);
    return row && options->source[row - option_table] != OPTION_FROM_DEFAULT;
}

// The word with the given index in a list "a|b|c".
static void choice_word(const char* words, int index, char* word, size_t size) {
    const char* at = words;
    for (; index > 0 && strchr(at, '|'); index--) { at = strchr(at, '|') + 1; }
    snprintf(word, size, "%.*s", (int)strcspn(at, "|"), at);
}

static int choice_index(const char* words, const char* word) {
    size_t length = strlen(word);
    int index = 0;
    for (const char* at = words; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL, index++) {
        if (length > 0 && strcspn(at, "|") == length && strncmp(at, word, length) == 0) { return index; }
    }
    return -1;
}

// The word that a choice stands at, such as "cosine".
void option_choice(const Options* options, const char* name, char* word, size_t size) {
    const OptionRow* row = option_find(options->command, name, false);
    if (!row || row->type != OPTION_CHOICE) {
        snprintf(word, size, "?");
        return;
    }
    choice_word(row->form, *(const int*)option_place_of(options, row), word, size);
}

// ---- from text to values

// A whole number, K = 1024, M = 1024 K, G = 1024 M; false when it is not one or does not fit.
static bool parse_integer(const char* text, int64_t* value) {
    bool negative = *text == '-';
    text += *text == '-' || *text == '+';
    if (*text < '0' || *text > '9') { return false; }
    int64_t n = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        if (__builtin_mul_overflow(n, (int64_t)10, &n) || __builtin_add_overflow(n, (int64_t)(*text - '0'), &n)) { return false; }
    }
    const char* units = "KkMmGg";
    const char* unit = *text ? strchr(units, *text) : NULL;
    for (int i = unit ? (int)(unit - units) / 2 : -1; i >= 0; i--) {
        if (__builtin_mul_overflow(n, (int64_t)1024, &n)) { return false; }
    }
    if (unit) { text++; }
    *value = negative ? -n : n;
    return *text == 0;
}

// A decimal number and nothing after it but one of `units`, returned in *unit (0: none). No nan, inf, hexadecimal or blanks.
static bool parse_real(const char* text, const char* units, double* value, char* unit) {
    size_t length = strspn(text, "+-.0123456789eE");
    char digits[64];
    if (length == 0 || length >= sizeof(digits)) { return false; }
    memcpy(digits, text, length);
    digits[length] = 0;
    char* end = digits;
    *value = strtod(digits, &end);
    *unit = text[length];
    bool tail = *unit == 0 || (strchr(units, *unit) && text[length + 1] == 0);
    return end != digits && *end == 0 && isfinite(*value) && tail;
}

static bool parse_switch(const char* text, bool* value) {
    static const char* const words[] = {"off", "on", "0", "1", "false", "true", "no", "yes"};
    for (size_t i = 0; i < COUNT_OF(words); i++) {
        if (strcmp(text, words[i]) == 0) {
            *value = i % 2 == 1;
            return true;
        }
    }
    return false;
}

// What a value must look like, for error messages.
static void option_expected(const OptionRow* row, char* text, size_t size) {
    switch (row->type) {
    case OPTION_INT:
    case OPTION_INT64:
        if (row->high < STEPS_MAX) {
            snprintf(text, size, "a whole number from %.0f to %.0f (K = 1024, M = 1024K, G = 1024M)", row->low, row->high);
        } else {
            snprintf(text, size, "a whole number of at least %.0f (K = 1024, M = 1024K, G = 1024M)", row->low);
        }
        break;
    case OPTION_REAL: snprintf(text, size, "a number from %g to %g", row->low, row->high); break;
    case OPTION_DURATION: snprintf(text, size, "a time such as 90s, 10m, 2h or 1d, at most %.0fs", row->high); break;
    case OPTION_CHOICE: snprintf(text, size, "one of %s", row->form); break;
    case OPTION_SWITCH: snprintf(text, size, "on or off"); break;
    case OPTION_TEXT:
    case OPTION_LIST: snprintf(text, size, "at most %d bytes", OPTION_TEXT_SIZE - 1); break;
    }
}

static bool option_list_add(OptionList* list, const char* text) {
    size_t bytes = strlen(text) + 1;
    if (bytes == 1 || bytes > OPTION_TEXT_SIZE || bytes > OPTION_LIST_SIZE - list->used) { return false; }
    memcpy(list->text + list->used, text, bytes);
    list->used += bytes;
    list->count++;
    return true;
}

// False when the text is no value for this row.
static bool option_set(Options* options, const OptionRow* row, const char* text) {
    void* place = option_place(options, row);
    int64_t whole = 0;
    double real = 0;
    char unit = 0;
    bool on = false;
    switch (row->type) {
    case OPTION_INT:
    case OPTION_INT64:
        if (!parse_integer(text, &whole) || (double)whole < row->low || (double)whole > row->high) { return false; }
        if (row->type == OPTION_INT) {
            *(int*)place = (int)whole;
        } else {
            *(int64_t*)place = whole;
        }
        return true;
    case OPTION_REAL:
    case OPTION_DURATION:
        if (!parse_real(text, row->type == OPTION_REAL ? "" : "smhd", &real, &unit)) { return false; }
        real *= unit == 'm' ? 60.0 : unit == 'h' ? 3600.0 : unit == 'd' ? 86400.0 : 1.0;
        if (real < row->low || real > row->high) { return false; }
        *(double*)place = real;
        return true;
    case OPTION_SWITCH:
        if (!parse_switch(text, &on)) { return false; }
        *(bool*)place = on;
        return true;
    case OPTION_CHOICE:
        if (choice_index(row->form, text) < 0) { return false; }
        *(int*)place = choice_index(row->form, text);
        return true;
    case OPTION_TEXT:
        if (strlen(text) >= OPTION_TEXT_SIZE) { return false; }
        strcpy((char*)place, text);
        return true;
    case OPTION_LIST: return option_list_add((OptionList*)place, text);
    }
    return false;
}

// ---- from values to text

// The shortest decimal number that reads back as the same double; an exponent only where plain digits would be long.
static void real_text(double value, char* text, size_t size) {
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, size, "%.*g", digits, value);
        bool plain = !strchr(text, 'e') || fabs(value) >= 1e6 || fabs(value) < 1e-4;
        if (plain && strtod(text, NULL) == value) { return; }
    }
}

// Text that a line of a file can hold: as it is, or in double quotes with \ before what would not come back.
static void quoted_text(const char* value, char* text, size_t size) {
    size_t length = strlen(value);
    bool plain = length == 0 || (value[0] != ' ' && value[length - 1] != ' ' && value[0] != '"');
    for (size_t i = 0; i < length; i++) { plain = plain && (unsigned char)value[i] >= 32 && value[i] != 127; }
    if (plain) {
        snprintf(text, size, "%s", value);
        return;
    }
    size_t at = (size_t)snprintf(text, size, "\"");
    for (size_t i = 0; i < length && at + 8 < size; i++) {
        unsigned char c = (unsigned char)value[i];
        if (c == '"' || c == '\\') {
            at += (size_t)snprintf(text + at, size - at, "\\%c", c);
        } else if (c < 32 || c == 127) {
            at += (size_t)snprintf(text + at, size - at, "\\x%02x", c);
        } else {
            text[at++] = (char)c;
        }
    }
    snprintf(text + at, size - at, "\"");
}

// In place; false when the quotes do not end, or something follows them.
static bool unquote_text(char* text) {
    if (text[0] != '"') { return true; }
    const char* from = text + 1;
    char* to = text;
    for (; *from && *from != '"'; from++) {
        unsigned int code = 0;
        if (*from != '\\') {
            *to++ = *from;
        } else if (from[1] == 'x' && isxdigit((unsigned char)from[2]) && isxdigit((unsigned char)from[3]) &&
                   sscanf(from + 2, "%2x", &code) == 1 && code != 0) {
            *to++ = (char)code;
            from += 3;
        } else if (from[1] == '"' || from[1] == '\\') {
            *to++ = *++from;
        } else {
            return false;
        }
    }
    bool good = from[0] == '"' && from[1] == 0;
    *to = 0;
    return good;
}

// The value as the command line takes it (text not quoted). Lists: see option_list_first.
static void option_value(const Options* options, const OptionRow* row, char* text, size_t size) {
    const void* place = option_place_of(options, row);
    switch (row->type) {
    case OPTION_INT: snprintf(text, size, "%d", *(const int*)place); break;
    case OPTION_INT64: snprintf(text, size, "%" PRId64, *(const int64_t*)place); break;
    case OPTION_REAL: real_text(*(const double*)place, text, size); break;
    case OPTION_DURATION:
        real_text(*(const double*)place, text, size - 1);
        strcat(text, "s");
        break;
    case OPTION_SWITCH: snprintf(text, size, "%s", *(const bool*)place ? "on" : "off"); break;
    case OPTION_CHOICE: choice_word(row->form, *(const int*)place, text, size); break;
    case OPTION_TEXT: snprintf(text, size, "%s", (const char*)place); break;
    case OPTION_LIST: snprintf(text, size, "%zu files", ((const OptionList*)place)->count); break;
    }
}
