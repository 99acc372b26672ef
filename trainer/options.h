// options.h - parsing of the command line and of files of "name = value" lines into struct Options. Nothing here prints or ends the
// program; a value that was given on the command line is never overridden by a file. Help, printing, saving and the check of
// combinations are in option_report.h.
#pragma once
#include "../dataloader/file.h"
#include "option_value.h"

// ---- defaults, command line

static void options_defaults(Options* options, Command command) {
    memset(options, 0, sizeof(*options));
    options->command = command;
    for (int own = 0; own < 2; own++) { // the command's own rows last: they win where a name has several
        for (size_t i = 0; i < OPTION_ROWS; i++) {
            const OptionRow* row = &option_table[i];
            if (option_serves(row, command) != (own == 1) || row->type == OPTION_LIST) { continue; }
            bool good = option_set(options, row, row->standard);
            assert(good);
            (void)good;
        }
    }
}

// Levenshtein's distance.
static int edit_distance(const char* a, const char* b) {
    int row[64];
    size_t columns = min_size(strlen(b), COUNT_OF(row) - 1);
    for (size_t j = 0; j <= columns; j++) { row[j] = (int)j; }
    for (size_t i = 0; a[i]; i++) {
        int diagonal = row[0];
        row[0] = (int)i + 1;
        for (size_t j = 1; j <= columns; j++) {
            int change = diagonal + (a[i] != b[j - 1]), drop = row[j] + 1, add = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = change < drop ? (change < add ? change : add) : (drop < add ? drop : add);
        }
    }
    return row[columns];
}

// " Did you mean --batch?", or where to look.
static void option_hint(Command command, const char* name, char* hint, size_t size) {
    const OptionRow* best = NULL;
    int best_distance = 1 + (int)min_size(strlen(name), 12) / 3;
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        int distance = option_serves(row, command) && strlen(name) < 64 ? edit_distance(name, row->name) : INT_MAX;
        if (distance < best_distance) {
            best_distance = distance;
            best = row;
        }
    }
    if (best) {
        snprintf(hint, size, "did you mean --%s?", best->name);
        return;
    }
    for (int other = 0; other < COMMAND_COUNT; other++) {
        if (other != (int)command && option_find((Command)other, name, false)) {
            snprintf(hint, size, "--%.40s is an option of the command %s", name, command_table[other].name);
            return;
        }
    }
    snprintf(hint, size, "./train_gpt %s --help lists all", command_table[command].name);
}

static bool option_unknown(Command command, const char* argument, const char* name, bool letter, Error* error) {
    char hint[160];
    char first[2] = {name[0], 0};
    if (letter && option_find(command, name, false)) {
        snprintf(hint, sizeof(hint), "long names take two dashes: --%.40s", name);
    } else if (letter && isdigit((unsigned char)name[0])) {
        snprintf(hint, sizeof(hint), "a value stands after its option");
    } else if (letter && name[1] && isdigit((unsigned char)name[1]) && option_find(command, first, true)) {
        snprintf(hint, sizeof(hint), "write it apart: -%s %.40s", first, name + 1);
    } else if (!letter && option_find(command, name, true)) {
        snprintf(hint, sizeof(hint), "letters take one dash: -%s", name);
    } else {
        option_hint(command, name, hint, sizeof(hint));
    }
    return fail(error, "unknown option %.80s of %s; %s", argument, command_table[command].name, hint);
}

// An argument taken apart: -b 4, -b=4, --batch 4, --batch=4.
typedef struct {
    bool letter;
    char name[80];
    const char* value; // after '=', or NULL
} OptionWord;

static OptionWord option_word(const char* argument) {
    OptionWord word;
    memset(&word, 0, sizeof(word));
    word.letter = argument[1] != '-';
    const char* name = argument + (word.letter ? 1 : 2);
    size_t length = strcspn(name, "=");
    snprintf(word.name, sizeof(word.name), "%.*s", (int)min_size(length, sizeof(word.name) - 1), name);
    word.value = name[length] ? name + length + 1 : NULL;
    return word;
}

static const ForeignOption* foreign_find(const OptionWord* word) {
    for (size_t i = 0; i < COUNT_OF(foreign_options); i++) {
        if (word->letter && strcmp(foreign_options[i].letter, word->name) == 0) { return &foreign_options[i]; }
    }
    return NULL;
}

static bool foreign_check(const ForeignOption* foreign, const char* value, Error* error) {
    char key[64];
    snprintf(key, sizeof(key), "|%.40s|", value);
    return strstr(foreign->neutral, key) || fail(error, "-%s %.40s: %s", foreign->letter, value, foreign->reason);
}

// Whether an argument is a value rather than the next option: numbers may be negative, "-" alone is a value.
static bool looks_like_value(const char* argument) {
    return argument[0] != '-' || !argument[1] || isdigit((unsigned char)argument[1]) || argument[1] == '.';
}

// The value of the option at argv[*at]: behind '=', or the next argument, which is then taken.
static bool option_argument(const OptionRow* row, const OptionWord* word, int argc, char** argv, int* at, const char** value,
                            Error* error) {
    const char* next = *at + 1 < argc ? argv[*at + 1] : NULL;
    *value = word->value;
    if (*value) { return true; }
    bool on = false;
    if (row && row->type == OPTION_SWITCH && !(next && parse_switch(next, &on))) {
        if (word->letter && strcmp(word->name, "h") == 0) {
            return fail(error, "-h is llm.c's letter of --hellaswag and takes 0 or 1; for help type --help");
        }
        if (next && looks_like_value(next)) { return fail(error, "%s: expected on or off, found \"%.60s\"", argv[*at], next); }
        *value = "on";
        return true;
    }
    if (!next) { return fail(error, "%s: a value is missing after it%s%s", argv[*at], row ? "; it takes " : "", row ? row->form : ""); }
    if (!looks_like_value(next)) {
        return fail(error, "%s: a value is missing, the option %.60s follows; a value that begins with - is written %s=%.60s", argv[*at],
                    next, argv[*at], next);
    }
    *value = next;
    (*at)++;
    return true;
}

// A value from the command line.
static bool option_assign(Options* options, const OptionRow* row, const char* argument, const char* value, Error* error) {
    uint8_t* source = &options->source[row - option_table];
    char expected[320];
    if (*source == OPTION_FROM_COMMAND_LINE && row->type != OPTION_LIST) {
        return fail(error, "--%s is given twice; keep one (values that the command line may override belong in a --config FILE)",
                    row->name);
    }
    *source = OPTION_FROM_COMMAND_LINE;
    if (option_set(options, row, value)) { return true; }
    option_expected(row, expected, sizeof(expected));
    if (row->type == OPTION_LIST) { snprintf(expected, sizeof(expected), "names of at most %d bytes together", OPTION_LIST_SIZE); }
    return fail(error, "%s: expected %s, found \"%.60s\"", argument, expected, value);
}

// One argument, and the next where that is its value.
static bool option_parse(Options* options, int argc, char** argv, int* at, Error* error) {
    const char* argument = argv[*at];
    if (argument[0] != '-' || !argument[1]) {
        const OptionRow* list = option_find(options->command, "input", false);
        if (list && list->type == OPTION_LIST) { return option_assign(options, list, "--input", argument, error); }
        return fail(error, "unexpected argument \"%.80s\"; values stand after their option, as in --batch 4", argument);
    }
    char spelled[96];
    const char* value = NULL;
    OptionWord word = option_word(argument);
    const OptionRow* row = option_find(options->command, word.name, word.letter);
    const ForeignOption* foreign = options->command == COMMAND_TRAIN && !row ? foreign_find(&word) : NULL;
    if (!row && !foreign) { return option_unknown(options->command, argument, word.name, word.letter, error); }
    if (!option_argument(row, &word, argc, argv, at, &value, error)) { return false; }
    if (foreign) { return foreign_check(foreign, value, error); }
    snprintf(spelled, sizeof(spelled), "%s%s", word.letter ? "-" : "--", word.name);
    return option_assign(options, row, spelled, value, error);
}

// ---- files of options

// A value from a file. One that is the default does not count as set: a saved configuration holds all options.
static bool option_assign_line(Options* options, const OptionRow* row, const char* where, const char* value, Error* error) {
    char before[OPTION_TEXT_SIZE], after[OPTION_TEXT_SIZE], expected[320];
    option_value(options, row, before, sizeof(before));
    if (!option_set(options, row, value)) {
        option_expected(row, expected, sizeof(expected));
        return fail(error, "%s: %s: expected %s, found \"%.60s\"", where, row->name, expected, value);
    }
    option_value(options, row, after, sizeof(after));
    if (strcmp(before, after) != 0) { options->source[row - option_table] = OPTION_FROM_FILE; }
    return true;
}

// One line "name = value"; `where` is "file:line". seen: rows that this file has set already.
static bool options_load_line(Options* options, char* line, const char* where, bool* seen, Error* error) {
    char* name = line + strspn(line, " \t");
    size_t end = strlen(name);
    while (end > 0 && strchr(" \t\r", name[end - 1])) { name[--end] = 0; }
    if (!*name || *name == '#') { return true; }
    char* equals = strchr(name, '=');
    if (!equals) { return fail(error, "%s: expected \"name = value\", found \"%.60s\"", where, name); }
    char* value = equals + 1 + strspn(equals + 1, " \t");
    *equals = 0;
    for (end = strlen(name); end > 0 && strchr(" \t", name[end - 1]);) { name[--end] = 0; }
    const OptionRow* row = option_find(options->command, name, false);
    char hint[200];
    if (!row || row->offset == offsetof(Options, config)) {
        option_hint(options->command, name, hint, sizeof(hint));
        return fail(error, "%s: unknown option \"%.60s\" of %s; %s", where, name, command_table[options->command].name,
                    row ? "it stands on the command line only" : hint);
    }
    size_t index = (size_t)(row - option_table);
    if (seen[index] && row->type != OPTION_LIST) { return fail(error, "%s: %s is given twice", where, name); }
    seen[index] = true;
    if (!unquote_text(value)) {
        return fail(error, "%s: %s: a value in quotes must end in a quote; \\\", \\\\ and \\x0a are its escapes", where, name);
    }
    options->in_file[index] = true;
    if (options->source[index] == OPTION_FROM_COMMAND_LINE) {
        bool optimizer = row->offset == offsetof(Options, optimizer) && choice_index(row->form, value) != options->optimizer;
        if (optimizer) { snprintf(options->file_optimizer, sizeof(options->file_optimizer), "%.31s", value); }
        return true;
    }
    return option_assign_line(options, row, where, value, error);
}

// Lines "name = value"; blank lines and lines that begin with # are passed over. file_name is for messages.
bool options_load_text(Options* options, const char* text, size_t bytes, const char* file_name, Error* error) {
    char line[OPTION_VALUE_SIZE + 256]; // the longest name and value
    bool seen[OPTION_ROWS] = {false};
    char where[300];
    size_t number = 1;
    for (size_t at = 0; at < bytes; number++) {
        const char* newline = (const char*)memchr(text + at, '\n', bytes - at);
        size_t length = (newline ? (size_t)(newline - text) : bytes) - at;
        snprintf(where, sizeof(where), "%.240s:%zu", file_name, number);
        if (length >= sizeof(line)) { return fail(error, "%s: the line is longer than %zu bytes", where, sizeof(line) - 1); }
        if (memchr(text + at, 0, length)) { return fail(error, "%s: expected text, found a zero byte", where); }
        memcpy(line, text + at, length);
        line[length] = 0;
        if (!options_load_line(options, line, where, seen, error)) { return false; }
        at += length + 1;
    }
    return true;
}

bool options_load(Options* options, const char* path, Error* error) {
    FileReader file;
    if (!file_open(&file, path, error)) { return false; }
    if (file.size > 4 << 20) {
        file_close(&file);
        return fail(error, "%s: expected a file of options, found %" PRIu64 " bytes", path, file.size);
    }
    size_t bytes = (size_t)file.size;
    char* text = (char*)need(malloc(bytes + 1));
    bool good = file_read(&file, text, bytes, 0, error) && options_load_text(options, text, bytes, path, error);
    free(text);
    file_close(&file);
    return good;
}

// What stands in the file only because it is a default of the file's optimizer means nothing to another one.
static void options_drop_defaults_of(Options* options, const char* word) {
    char before[OPTION_VALUE_SIZE], after[OPTION_VALUE_SIZE];
    for (size_t i = 0; i < COUNT_OF(option_defaults); i++) {
        const OptionDefault* d = &option_defaults[i];
        const OptionRow* row = option_find(options->command, d->name, false);
        if (strcmp(d->is, word) != 0 || !row || options->source[row - option_table] != OPTION_FROM_FILE) { continue; }
        option_value(options, row, before, sizeof(before));
        option_set(options, row, d->standard);
        option_value(options, row, after, sizeof(after));
        bool same = strcmp(before, after) == 0;
        option_set(options, row, same ? row->standard : before);
        if (same) { options->source[row - option_table] = OPTION_FROM_DEFAULT; }
        options->in_file[row - option_table] = !same;
    }
}

// Defaults that go by a choice, where neither the command line nor the file says otherwise. What a saved configuration says does not count
// as set where it is such a default.
static void options_defaults_by_choice(Options* options) {
    char word[64], before[OPTION_VALUE_SIZE], after[OPTION_VALUE_SIZE];
    if (options->file_optimizer[0]) { options_drop_defaults_of(options, options->file_optimizer); }
    for (size_t i = 0; i < COUNT_OF(option_defaults); i++) {
        const OptionDefault* d = &option_defaults[i];
        const OptionRow *choice = option_find(options->command, d->when, false), *row = option_find(options->command, d->name, false);
        if (!choice || !row || options->source[row - option_table] == OPTION_FROM_COMMAND_LINE) { continue; }
        option_value(options, choice, word, sizeof(word));
        if (strcmp(word, d->is) != 0) { continue; }
        option_value(options, row, before, sizeof(before));
        bool good = option_set(options, row, d->standard);
        option_value(options, row, after, sizeof(after));
        // with another optimizer than the file's, a plain default in the file says nothing
        bool said = options->source[row - option_table] == OPTION_FROM_FILE || (options->in_file[row - option_table] && !options->file_optimizer[0]);
        if (said && strcmp(before, after) != 0) { good = option_set(options, row, before); }
        if (strcmp(before, after) == 0) { options->source[row - option_table] = OPTION_FROM_DEFAULT; }
        assert(good);
        (void)good;
    }
}

// The command line, then the file that --config names. For --help and --version only action and command are of use. The program
// calls options_check next.
bool options_parse(Options* options, int argc, char** argv, Error* error) {
    Command command = COMMAND_TRAIN;
    bool named = argc > 1 && argv[1][0] != '-';
    if (named) {
        int best = 0;
        while (best < COMMAND_COUNT && strcmp(argv[1], command_table[best].name) != 0) { best++; }
        if (best == COMMAND_COUNT) {
            return fail(error, "unknown command \"%.40s\"; there are train, tokenize, generate, eval, selfcheck and convert", argv[1]);
        }
        command = (Command)best;
    }
    options_defaults(options, command);
    options->command_named = named;
    snprintf(options->program, sizeof(options->program), "%s",
             argc > 0 && strlen(argv[0]) < sizeof(options->program) ? argv[0] : "./train_gpt");
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "--version") == 0) {
            options->action = strcmp(argv[i], "--help") == 0 ? OPTIONS_HELP : OPTIONS_VERSION;
            return true;
        }
    }
    for (int i = named ? 2 : 1; i < argc; i++) {
        if (!option_parse(options, argc, argv, &i, error)) { return false; }
    }
    if (options->config[0] && !options_load(options, options->config, error)) { return false; }
    options_defaults_by_choice(options);
    return true;
}
