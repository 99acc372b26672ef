// test_options.h - the command line: every row of the option table through parsing, bounds, help and the saved configuration; llm.c's
// command lines.
#pragma once
#include "test.h"

// ---- helpers

// Parses a command line written as one text; words in single quotes may hold blanks.
static bool options_parse_line(Options* options, const char* line, Error* error) {
    static char words[16384];
    char* argv[512];
    int argc = 0;
    char* at = words;
    snprintf(words, sizeof(words), "train_gpt %s", line);
    while (*at && argc < (int)COUNT_OF(argv)) {
        at += strspn(at, " ");
        if (!*at) { break; }
        bool quoted = *at == '\'';
        at += quoted;
        argv[argc++] = at;
        at += strcspn(at, quoted ? "'" : " ");
        if (*at) { *at++ = 0; }
    }
    error->text[0] = 0;
    return options_parse(options, argc, argv, error);
}

static void run_test_path(char* path, size_t size, const char* name) { snprintf(path, size, "%s/%s", test_folder(), name); }

static bool run_test_write(const char* path, const char* text, size_t bytes) {
    FILE* file = fopen(path, "w");
    bool good = file && fwrite(text, 1, bytes, file) == bytes;
    return file && fclose(file) == 0 && good;
}

// The file as text, in a static place.
static const char* run_test_read(const char* path) {
    static char text[1 << 18];
    FILE* file = fopen(path, "r");
    size_t got = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
    if (file) { fclose(file); }
    text[got] = 0;
    return text;
}

static int text_occurrences(const char* text, const char* part) {
    int count = 0;
    for (const char* at = strstr(text, part); at; at = strstr(at + 1, part)) { count++; }
    return count;
}

static Options test_options, test_options_back;

// ---- the table

static void test_option_table(void) {
    static const size_t sizes[] = {sizeof(int),      sizeof(int64_t), sizeof(double), sizeof(bool),
                                   OPTION_TEXT_SIZE, sizeof(int),     sizeof(double), sizeof(OptionList)};
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        CHECK(row->size == sizes[row->type], "--%s: the field has %zu bytes, its type %zu", row->name, row->size, sizes[row->type]);
        CHECK(row->help[0] && row->form[0] && row->commands && row->group[0], "--%s is incomplete", row->name);
        for (size_t k = 0; k < i; k++) {
            const OptionRow* other = &option_table[k];
            bool together = (row->commands & other->commands) != 0;
            CHECK(!together || strcmp(row->name, other->name) != 0, "--%s stands twice", row->name);
            CHECK(!together || !row->letter || !other->letter || strcmp(row->letter, other->letter) != 0, "-%s stands twice", row->letter);
        }
        for (size_t k = 0; k < COUNT_OF(foreign_options); k++) {
            CHECK(!row->letter || strcmp(row->letter, foreign_options[k].letter) != 0, "-%s is both offered and not", row->letter);
        }
    }
}

static void test_option_help(void) {
    for (int command = 0; command < COMMAND_COUNT; command++) {
        char *text = NULL, name[64];
        size_t bytes = 0;
        FILE* out = open_memstream(&text, &bytes);
        options_help(out, (Command)command, true);
        fclose(out);
        for (size_t i = 0; i < OPTION_ROWS; i++) {
            snprintf(name, sizeof(name), " --%s ", option_table[i].name);
            bool serves = option_find((Command)command, option_table[i].name, false) != NULL;
            CHECK(serves == (strstr(text, name) != NULL), "%s in the help of %s", name, command_table[command].name);
            CHECK(!option_serves(&option_table[i], (Command)command) || strstr(text, option_table[i].standard), "the default of %s", name);
        }
        for (char* line = text; *line; line += strcspn(line, "\n") + 1) {
            CHECK(strcspn(line, "\n") <= 120, "a line of %zu columns", strcspn(line, "\n"));
        }
        free(text);
    }
    Error error;
    CHECK(options_parse_line(&test_options, "generate --help", &error) && test_options.action == OPTIONS_HELP, "action");
    CHECK(test_options.command == COMMAND_GENERATE && test_options.command_named, "the command of generate --help");
    CHECK(options_parse_line(&test_options, "--bad --help", &error) && test_options.action == OPTIONS_HELP, "--help wins over mistakes");
    CHECK(options_parse_line(&test_options, "--version", &error) && test_options.action == OPTIONS_VERSION, "action");
}

// ---- round trips

// Saves, loads into fresh options, and compares each field of the command's rows.
static void check_option_round_trip(const Options* options, const char* what) {
    size_t bytes = 0;
    char* text = options_text(options, &bytes);
    Error error;
    options_defaults(&test_options_back, options->command);
    CHECK_OK(options_load_text(&test_options_back, text, bytes, "saved", &error), error);
    options_defaults_by_choice(&test_options_back);
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        if (!option_serves(row, options->command) || strcmp(row->name, "config") == 0 || strcmp(row->name, "rank") == 0) { continue; }
        const void *a = option_place_of(options, row), *b = option_place_of(&test_options_back, row);
        bool text_like = row->type == OPTION_TEXT;
        CHECK(text_like ? strcmp((const char*)a, (const char*)b) == 0 : memcmp(a, b, row->size) == 0, "--%s differs after %s", row->name,
              what);
        if (option_given(&test_options_back, row->name)) {
            CHECK(option_given(options, row->name), "--%s counts as set after %s", row->name, what);
        }
    }
    free(text);
}

static void test_option_defaults(void) {
    Error error;
    for (int command = 0; command < COMMAND_COUNT; command++) {
        CHECK_OK(options_parse_line(&test_options, command_table[command].name, &error), error);
        check_option_round_trip(&test_options, "defaults");
    }
    CHECK_OK(options_parse_line(&test_options, "", &error), error);
    CHECK_OK(options_check(&test_options, &error), error);
    CHECK(test_options.command == COMMAND_TRAIN && test_options.batch == 4 && test_options.lr == 6e-4, "values of defaults");
}

// Values that a row takes: its bounds, awkward numbers, each word, awkward texts.
static int option_samples(const OptionRow* row, char samples[][80]) {
    static const char* const texts[] = {"x", " a b ", "#=\"\\", "line\nline\ttab", "caf\xc3\xa9 \xff", "\"", "a = b", "\x7f\x01"};
    int count = 0;
    switch (row->type) {
    case OPTION_INT:
    case OPTION_INT64:
        snprintf(samples[count++], 80, "%.0f", row->low);
        snprintf(samples[count++], 80, "%.0f", row->high);
        snprintf(samples[count++], 80, "%.0f", floor((row->low + row->high) / 3));
        return count;
    case OPTION_REAL:
    case OPTION_DURATION:
        snprintf(samples[count++], 80, "%.17g", row->low);
        snprintf(samples[count++], 80, "%.17g", row->high);
        snprintf(samples[count++], 80, "%.17g", row->low + (row->high - row->low) / 3);
        snprintf(samples[count++], 80, "%.17g", row->low + (row->high - row->low) * 1e-7 / 7);
        return count;
    case OPTION_SWITCH:
        strcpy(samples[count++], "on");
        strcpy(samples[count++], "off");
        return count;
    case OPTION_CHOICE:
        for (int i = 0; i <= text_occurrences(row->form, "|"); i++) { choice_word(row->form, i, samples[count++], 80); }
        return count;
    case OPTION_TEXT:
    case OPTION_LIST:
        for (size_t i = 0; i < COUNT_OF(texts); i++) { strcpy(samples[count++], texts[i]); }
        return count;
    }
    return count;
}

static void test_option_round_trips(void) {
    char samples[16][80], name[64], value[200], program[] = "train_gpt";
    Error error;
    for (int command = 0; command < COMMAND_COUNT; command++) {
        for (size_t i = 0; i < OPTION_ROWS; i++) {
            const OptionRow* row = &option_table[i];
            if (!option_serves(row, (Command)command) || strcmp(row->name, "config") == 0 || strcmp(row->name, "rank") == 0) { continue; }
            for (int k = option_samples(row, samples) - 1; k >= 0; k--) {
                char word[32];
                snprintf(word, sizeof(word), "%s", command_table[command].name);
                snprintf(name, sizeof(name), "--%s", row->name);
                snprintf(value, sizeof(value), "%s=%s", name, samples[k]);
                char* argv[] = {program, word, value};
                CHECK_OK(options_parse(&test_options, 3, argv, &error), error);
                check_option_round_trip(&test_options, value);
            }
        }
    }
}

static void test_option_mistakes(void) {
    static const char* const wrong[] = {"abc",
                                        "",
                                        "1x",
                                        "1 ",
                                        " 1",
                                        "nan",
                                        "inf",
                                        "-inf",
                                        "0x10",
                                        "1e400",
                                        "1e",
                                        "--5",
                                        "5.5.5",
                                        "99999999999999999999999",
                                        "-99999999999999999999",
                                        "9G9",
                                        "K"};
    char program[] = "train_gpt", word[32], value[160];
    Error error;
    int rows = 0;
    for (int command = 0; command < COMMAND_COUNT; command++) {
        for (size_t i = 0; i < OPTION_ROWS; i++) {
            const OptionRow* row = &option_table[i];
            bool number = row->type == OPTION_INT || row->type == OPTION_INT64 || row->type == OPTION_REAL || row->type == OPTION_DURATION;
            if (!option_serves(row, (Command)command) || row->type == OPTION_TEXT || row->type == OPTION_LIST) { continue; }
            rows++;
            for (size_t k = 0; k < COUNT_OF(wrong) + 2; k++) {
                snprintf(word, sizeof(word), "%s", command_table[command].name);
                snprintf(value, sizeof(value), "--%s=%s", row->name, k < COUNT_OF(wrong) ? wrong[k] : "");
                if (k >= COUNT_OF(wrong)) {
                    if (!number) { continue; }
                    double bound = k == COUNT_OF(wrong) ? row->low - 1 : row->high < 9e18 ? row->high + 1 : 9.21e18;
                    snprintf(value, sizeof(value), "--%s=%.0f", row->name, bound);
                }
                char* argv[] = {program, word, value};
                snprintf(word, sizeof(word), "%s", command_table[command].name);
                CHECK_FAILS(options_parse(&test_options, 3, argv, &error), error, row->name);
                CHECK(!strchr(error.text, '\n') && strstr(error.text, "expected"), "one line that says what was expected: %s", error.text);
            }
        }
    }
    CHECK(rows > 60, "%d rows were tried", rows);
    CHECK_FAILS(options_parse_line(&test_options, "--lr 1e-3x", &error), error, "--lr: expected a number from 0 to 100, found \"1e-3x\"");
    CHECK_FAILS(options_parse_line(&test_options, "-v -1", &error), error, "-v: expected a whole number of at least 0");
    CHECK_OK(options_parse_line(&test_options, "--val-every 0 --sample-every 0", &error), error);
    CHECK_OK(options_check(&test_options, &error), error);
}

static void test_option_spellings(void) {
    Error error;
    Options* o = &test_options;
    CHECK_OK(options_parse_line(o, "-b=8 --total-batch=512K -x -1 -y 1 --shuffle off --max-time 90m --lr .5e-3 --overfit", &error), error);
    CHECK(o->batch == 8 && o->total_batch == 524288 && o->steps == -1 && o->resume && !o->shuffle && o->overfit, "values");
    CHECK(o->max_time == 5400.0 && o->lr == 0.0005, "found %g %g", o->max_time, o->lr);
    CHECK_OK(options_parse_line(o, "-d 1M -sl 7.0 -ge 1 -k wsd --resume --keep 2", &error), error);
    CHECK(o->total_batch == 1048576 && o->skip_loss_z == 7.0 && o->gelu_fusion == 1 && o->schedule == 3 && o->resume && o->keep == 2,
          "values");
    char word[32];
    option_choice(o, "schedule", word, sizeof(word));
    CHECK(strcmp(word, "wsd") == 0, "found %s", word);
    CHECK_OK(options_parse_line(o, "tokenize a.txt --output p b.txt --input c.txt", &error), error);
    const char* item = option_list_first(&o->input);
    CHECK(o->input.count == 3 && strcmp(item, "a.txt") == 0 && strcmp(option_list_next(&o->input, item), "b.txt") == 0, "positional files");
    const char** items = option_list_array(&o->input);
    CHECK(strcmp(items[2], "c.txt") == 0 && !items[3], "the list as an array");
    free(items);
    CHECK_OK(options_parse_line(o, "generate -e m.bin --prompt=-x- --top-k 2K", &error), error);
    CHECK(strcmp(o->prompt, "-x-") == 0 && o->top_k == 2048, "values");
    CHECK_OK(options_check(o, &error), error);
}

static void test_option_hints(void) {
    static const char* const rows[][2] = {
        {"--bach 4", "did you mean --batch?"}, {"--valevery 4", "--val-every"},      {"-b4", "-b 4"},
        {"-batch 4", "--batch"},               {"--b 4", "-b"},                      {"--no-resume", "--resume"},
        {"-b", "missing"},                     {"--output --resume", "missing"},     {"-b 1 --batch 2", "twice"},
        {"-h", "--help"},                      {"--resume maybe", "on or off"},      {"words", "unknown command"},
        {"train words", "unexpected"},         {"--top-k 3", "generate"},            {"--zzzzzzzz 1", "--help"},
        {"-z 4", "0 to 3"},                    {"-pi fs", "auto|mpi|tcp"},               {"-lg 20", "-lg -1"},
        {"-k sinus", "cosine|linear"},         {"tokenize -b 4", "unknown option -b"}, {"generate -z 1", "unknown option -z"},
        {"-", "unexpected"},                   {"--", "unknown"},                    {"--=4", "unknown"},
        {"--config", "missing"},               {"--config /nonexistent/file", "cannot open"}, {"--max-time 1w", "90s"},
    };
    Error error;
    for (size_t i = 0; i < COUNT_OF(rows); i++) { CHECK_FAILS(options_parse_line(&test_options, rows[i][0], &error), error, rows[i][1]); }
}

static void test_option_combinations(void) {
    static const char* const rows[][2] = {
        {"-d 1000 -t 64", "960 and 1024"},
        {"-d 10 -t 64", "64 and 64"},
        {"-u 10 -x 5", "--warmup 10"},
        {"--keep 2 --checkpoint-minutes 0", "--keep 2"},
        {"-nm 10", "--checkpoint-every"},
        {"-o x -n 3 -nm 10", "multiple"},
        {"-y 1", "--output"},
        {"-n 5", "--output"},
        {"-m 0", "--val-batches"},
        {"--train-data=", "--train-data"},
        {"--model=", "--model"},
        {"tokenize -o x", "no text"},
        {"tokenize a", "--output"},
        {"tokenize a -o b --tokenizer t --vocab-size 300", "exclude"},
        {"tokenize a -o b --format text --json-field t", "jsonl"},
        {"generate", "--model"},
        {"eval", "--model"},
        {"eval -e m", "nothing to measure"},
        {"convert --from a", "--to"},
        {"convert --from a --to a", "same"},
    };
    static const char* const good[] = {"",          "-o x -n 5 -nm 10 -y 1", "tokenize a -o b", "eval -e m -j v", "convert --from a --to b",
                                       "selfcheck", "generate -e m",         "-u 5 -x 5"};
    Error error;
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        CHECK_OK(options_parse_line(&test_options, rows[i][0], &error), error);
        CHECK_FAILS(options_check(&test_options, &error), error, rows[i][1]);
    }
    for (size_t i = 0; i < COUNT_OF(good); i++) {
        CHECK_OK(options_parse_line(&test_options, good[i], &error) && options_check(&test_options, &error), error);
    }
    CHECK_OK(options_parse_line(&test_options, "", &error), error);
    CHECK(options_warmup(&test_options, 100) == 5 && options_warmup(&test_options, 1000000) == 700, "the default warm-up");
}

// The option letters and values of llm.c's published runs, with sharding off.
static void test_option_llmc(void) {
    static const char* const lines[] = {
        "-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin -o log_gpt2_124M -v 250 -s 20000 -g 144 -h 1 "
        "-b 64 -t 1024 -d 524288 -r 0 -z 0 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d12",
        "-i a -j b -o log_gpt3_125M -v 250 -s 20000 -g 144 -h 1 -b 32 -t 2048 -d 524288 -r 0 -z 0 -c 0.1 -l 0.0006 -q 0.1 -u 700 -n 10000 "
        "-nk 5 -nm 50000 -ge 1 -sl 7.0 -sg 7.0 -y 1 -x 572204 -e gpt3:c768",
        "-i a -j b -o l -v 250 -s 300000 -g 384 -h 1 -b 16 -t 1024 -d 1048576 -r 0 -z 0 -c 0.1 -k cosine -l 0.0006 -q 0.1 -u 700 -n 2000 "
        "-x 32000 -ge 1 -y 1 -e d48",
        "-i a -j b -o l -pn 1 -pr 0 -pg 8 -pi mpi -lg -1 -f 0 -w 1 -a 1 -m 5 -y 0 -e d6",
    };
    Error error;
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        CHECK_OK(options_parse_line(&test_options, lines[i], &error) && options_check(&test_options, &error), error);
        check_option_round_trip(&test_options, lines[i]);
    }
    CHECK_OK(options_parse_line(&test_options, lines[1], &error), error);
    const Options* o = &test_options;
    CHECK(o->batch == 32 && o->seq_len == 2048 && o->total_batch == 524288 && o->keep == 5 && o->major_every == 50000, "values");
    CHECK(o->skip_loss_z == 7 && o->skip_norm_z == 7 && o->steps == 572204 && o->resume && o->hellaswag && o->recompute == 0, "values");
    CHECK(strcmp(o->model, "gpt3:c768") == 0 && o->lr == 0.0006 && o->final_lr_frac == 0.1 && o->sample_every == 20000, "values");
}

// ---- files of options

static void test_option_config(void) {
    char path[200], line[300];
    Error error;
    const char* text = "# a comment\r\n\r\n  batch = 8 \r\nlr=0.001\noutput = \"two\\x0alines\"\nresume = on";
    run_test_path(path, sizeof(path), "run.cfg");
    CHECK(run_test_write(path, text, strlen(text)), "cannot write");
    snprintf(line, sizeof(line), "--lr 0.5 --config %s -n 7", path);
    CHECK_OK(options_parse_line(&test_options, line, &error), error);
    CHECK(test_options.batch == 8 && test_options.lr == 0.5 && test_options.resume && test_options.checkpoint_every == 7, "precedence");
    CHECK(strcmp(test_options.output, "two\nlines") == 0, "found \"%s\"", test_options.output);
    snprintf(line, sizeof(line), "--config %s --resume off", path);
    CHECK(options_parse_line(&test_options, line, &error) && !test_options.resume && test_options.lr == 0.001, "%s", error.text);

    CHECK_OK(options_save(&test_options, "", path, &error), error);
    snprintf(line, sizeof(line), "--config %s", path);
    CHECK(options_parse_line(&test_options_back, line, &error) && test_options_back.batch == 8 && !test_options_back.resume, "%s",
          error.text);
    options_resume_command(&test_options, "a b/run.cfg", line, sizeof(line));
    CHECK(strcmp(line, "train_gpt --config 'a b/run.cfg' --resume on") == 0, "found %s", line);

    static const char* const wrong[][2] = {
        {"batch = 4\nbach = 5\n", "x:2: unknown option \"bach\" of train; did you mean --batch?"},
        {"batch 4", "x:1: expected \"name = value\""},
        {"\n\nbatch = four", "x:3: batch: expected a whole number"},
        {"batch = 4\nbatch = 5", "x:2: batch is given twice"},
        {"output = \"abc", "x:1: output: a value in quotes"},
        {"output = \"abc\" d", "quotes"},
        {"output = \"\\q\"", "quotes"},
        {"output = \"\\x00\"", "quotes"},
        {"config = other", "command line only"},
        {"prompt = hello", "generate"},
        {"= 4", "unknown option"},
        {"batch =", "found \"\""},
        {"-b = 4", "unknown option"},
    };
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        options_defaults(&test_options, COMMAND_TRAIN);
        CHECK_FAILS(options_load_text(&test_options, wrong[i][0], strlen(wrong[i][0]), "x", &error), error, wrong[i][1]);
    }
    CHECK_FAILS(options_load_text(&test_options, "ba\0tch = 4", 10, "x", &error), error, "zero byte");
    char* big = (char*)need(calloc(1 << 16, 1));
    memset(big, 'a', (1 << 16) - 1);
    CHECK_FAILS(options_load_text(&test_options, big, 1 << 16, "x", &error), error, "longer than");
    free(big);
    CHECK_FAILS(options_load(&test_options, test_folder(), &error), error, "not a regular file");
}

// Random words and files neither crash nor leave an empty message.
static void test_option_fuzz(void) {
    static const char* const parts[] = {"-",  "--",     "b",      "batch",      "=",        " ",          "4",        "-1",       "K",
                                        "lr", "resume", "on",     "0.5",        "e",        "9999999999", "tokenize", "generate", "'",
                                        "i",  "\xff",   "config", "train-data", "max-time", "h",          "."};
    uint32_t state = 12345;
    char line[400];
    Error error;
    int refused = 0;
    for (int i = 0; i < 6000; i++) {
        size_t at = 0;
        line[0] = 0;
        for (int k = 0; k < 3 + (int)(state >> 16) % 12 && at < 300; k++) {
            state = state * 1664525u + 1013904223u;
            at += (size_t)snprintf(line + at, sizeof(line) - at, "%s", parts[(state >> 16) % COUNT_OF(parts)]);
        }
        bool good = options_parse_line(&test_options, line, &error);
        CHECK(good || (error.text[0] && !strchr(error.text, '\n')), "an empty message for %s", line);
        for (char* c = line; *c; c++) { *c = *c == ' ' ? '\n' : *c; }
        options_defaults(&test_options, COMMAND_TRAIN);
        refused += !options_load_text(&test_options, line, at, "x", &error);
    }
    CHECK(refused > 1000, "%d refused", refused);
}

static const TestRow options_tests[] = {
    {"options: rows are complete and unambiguous", test_option_table},
    {"options: --help shows every option of its command", test_option_help},
    {"options: defaults survive saving and loading", test_option_defaults},
    {"options: all kinds of values survive saving and loading", test_option_round_trips},
    {"options: malformed and out-of-range values are refused", test_option_mistakes},
    {"options: spellings, units, switches, lists", test_option_spellings},
    {"options: mistakes get a hint", test_option_hints},
    {"options: impossible combinations are refused", test_option_combinations},
    {"options: command lines of llm.c's runs are taken", test_option_llmc},
    {"options: files of options, precedence, errors by line", test_option_config},
    {"options: random command lines and files do no harm", test_option_fuzz},
};
