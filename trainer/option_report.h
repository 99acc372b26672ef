// option_report.h - what the option table says to people and files: --help, the printed configuration, the saved configuration (it
// loads again with --config and comes back the same), and the combinations that cannot be.
#pragma once
#include "options.h"

#define HELP_WIDTH 110 // columns

// ---- help

// `text` from column `column` on, broken at blanks.
static void help_wrap(FILE* out, const char* text, int column) {
    int at = column;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (at > column && at + 1 + length > HELP_WIDTH) {
            fprintf(out, "\n%*s", column, "");
            at = column;
        }
        at += fprintf(out, "%s%.*s", at > column ? " " : "", length, text);
        text += length;
        text += strspn(text, " ");
    }
    fprintf(out, "\n");
}

static bool same_default(const OptionDefault* a, const OptionDefault* b) {
    return strcmp(a->name, b->name) == 0 && strcmp(a->standard, b->standard) == 0;
}

// Adds defaults that go by another option's word: "; sgd, lars: 1e-4".
static size_t help_other_defaults(const OptionRow* row, char* text, size_t at, size_t size) {
    for (size_t i = 0; i < COUNT_OF(option_defaults); i++) {
        const OptionDefault* d = &option_defaults[i];
        if (strcmp(d->name, row->name) != 0) { continue; }
        bool told = false;
        for (size_t k = 0; k < i; k++) { told = told || same_default(&option_defaults[k], d); }
        if (told) { continue; }
        at += (size_t)snprintf(text + at, size - at, "; %s", d->is);
        for (size_t k = i + 1; k < COUNT_OF(option_defaults); k++) {
            if (same_default(&option_defaults[k], d)) { at += (size_t)snprintf(text + at, size - at, ", %s", option_defaults[k].is); }
        }
        at += (size_t)snprintf(text + at, size - at, ": %s", d->standard);
    }
    return at;
}

static void help_row(FILE* out, const OptionRow* row) {
    char left[160], text[800], letter[8] = "";
    if (row->letter) { snprintf(letter, sizeof(letter), "-%s,", row->letter); }
    int column = 38, width = snprintf(left, sizeof(left), "  %-4s --%s %s", letter, row->name, row->form);
    size_t at = min_size((size_t)snprintf(text, sizeof(text), "%s", row->help), sizeof(text) - 1);
    if (row->standard[0]) {
        at += (size_t)snprintf(text + at, sizeof(text) - at, " [%s%s%s", row->standard, row->llmc ? "; llm.c: " : "", row->llmc ? row->llmc : "");
        at = help_other_defaults(row, text, at, sizeof(text));
        snprintf(text + at, sizeof(text) - at, "]");
    }
    fprintf(out, "%s", left);
    if (width > column - 2) {
        fprintf(out, "\n%*s", column, "");
    } else {
        fprintf(out, "%*s", column - width, "");
    }
    help_wrap(out, text, column);
}

// All options of a command under their headings; the program's overview before it unless the command was named.
void options_help(FILE* out, Command command, bool command_named) {
    if (!command_named) {
        fprintf(out, "train_gpt pretrains GPT-2 and GPT-3 models on a CPU or a GPU.\n\n");
        fprintf(out, "usage: ./train_gpt [command] [--option value]...\n\ncommands:\n");
        for (int i = 0; i < COMMAND_COUNT; i++) { fprintf(out, "  %-10s %s\n", command_table[i].name, command_table[i].help); }
        fprintf(out, "\n./train_gpt <command> --help shows the options of a command; those of train:\n");
    } else {
        fprintf(out, "usage: ./train_gpt %s%s [--option value]...\n\n%s\n", command_table[command].name,
                command == COMMAND_TOKENIZE ? " <file>..." : "", command_table[command].help);
    }
    const char* group = "";
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        if (!option_serves(row, command)) { continue; }
        if (strcmp(group, row->group) != 0) { fprintf(out, "\n%s\n", row->group); }
        group = row->group;
        help_row(out, row);
    }
    fprintf(out, "\nDefaults stand in brackets%s.\n", command == COMMAND_TRAIN ? ", llm.c's beside them where they differ" : "");
    fprintf(out, "--threads 4 and --threads=4 are the same; a switch without a value is on.\n");
    fprintf(out, "In whole numbers K = 1024, M = 1024K, G = 1024M (512K = 524288); times are 90s, 10m, 2h, 1d or plain seconds.\n");
    fprintf(out, "--help shows this text, --version what was built.\n");
}

// ---- the configuration as a table, as lines, as a file

// The table printed at the start of a run; * marks what the user has set.
void options_print(const Options* options, FILE* out) {
    const char* group = "";
    char value[OPTION_VALUE_SIZE];
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        if (!option_serves(row, options->command)) { continue; }
        if (strcmp(group, row->group) != 0) { fprintf(out, "| %-20s |\n", row->group); }
        group = row->group;
        option_value(options, row, value, sizeof(value));
        fprintf(out, "| %c %-18s | %-50.200s |\n", options->source[i] == OPTION_FROM_DEFAULT ? ' ' : '*', row->name, value);
    }
}

// Lines "name = value", each after `prefix`. What they set is all that a run depends on but --config itself.
void options_write(const Options* options, FILE* out, const char* prefix) {
    char value[OPTION_VALUE_SIZE], quoted[OPTION_VALUE_SIZE];
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        if (!option_serves(row, options->command) || row->offset == offsetof(Options, config) || row->offset == offsetof(Options, rank)) {
            continue;
        }
        if (row->type == OPTION_LIST) {
            const OptionList* list = (const OptionList*)option_place_of(options, row);
            for (const char* item = option_list_first(list); item; item = option_list_next(list, item)) {
                quoted_text(item, quoted, sizeof(quoted));
                fprintf(out, "%s%s = %s\n", prefix, row->name, quoted);
            }
            continue;
        }
        option_value(options, row, value, sizeof(value));
        quoted_text(value, quoted, sizeof(quoted));
        fprintf(out, "%s%s = %s\n", prefix, row->name, quoted);
    }
}

// The same lines as one text for a checkpoint's record, to be freed by the caller; options_load_text reads it.
char* options_text(const Options* options, size_t* bytes) {
    char* text = NULL;
    FILE* memory = open_memstream(&text, bytes);
    need(memory);
    fprintf(memory, "# ./train_gpt %s --config FILE repeats this; options beside it win\n", command_table[options->command].name);
    options_write(options, memory, "");
    fclose(memory);
    return (char*)need(text);
}

// head: comment lines to stand first, or "".
bool options_save(const Options* options, const char* head, const char* path, Error* error) {
    size_t bytes = 0;
    char* text = options_text(options, &bytes);
    FileWriter file;
    bool good = file_create(&file, path, error) && file_write(&file, head, strlen(head), error) && file_write(&file, text, bytes, error) &&
                file_commit(&file, error);
    free(text);
    return good;
}

// A word for the shell: as it is, or in single quotes.
static void shell_word(const char* word, char* text, size_t size) {
    if (word[0] && strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=,:+@%") == strlen(word)) {
        snprintf(text, size, "%s", word);
        return;
    }
    size_t at = (size_t)snprintf(text, size, "'");
    for (const char* c = word; *c && at + 6 < size; c++) { at += (size_t)snprintf(text + at, size - at, *c == '\'' ? "'\\''" : "%c", *c); }
    snprintf(text + at, size - at, "'");
}

// The command that goes on with a run whose options are saved at config_path.
void options_resume_command(const Options* options, const char* config_path, char* text, size_t size) {
    char program[300], path[OPTION_TEXT_SIZE * 4];
    shell_word(options->program, program, sizeof(program));
    shell_word(config_path, path, sizeof(path));
    snprintf(text, size, "%s --config %s --resume on", program, path);
}

// ---- combinations

static bool train_check_batch(const Options* o, Error* error) {
    if (o->total_batch == 0 || o->seq_len == 0) { return true; } // known with the model only
    if (o->total_batch % o->seq_len == 0) { return true; }
    int64_t down = o->total_batch / o->seq_len * o->seq_len;
    return fail(error, "--total-batch %" PRId64 " is not a multiple of --seq-len %d; the nearest are %" PRId64 " and %" PRId64,
                o->total_batch, o->seq_len, down ? down : o->seq_len, down + o->seq_len);
}

static bool train_check_output(const Options* o, Error* error) {
    bool by_steps = o->checkpoint_every > 0, by_time = o->checkpoint_minutes > 0;
    if (!o->output[0] && (o->resume || by_steps)) {
        return fail(error, "--%s needs a folder: give --output FOLDER", o->resume ? "resume" : "checkpoint-every");
    }
    if (option_given(o, "keep") && o->keep > 0 && !by_steps && !by_time) {
        return fail(error, "--keep %d without checkpoints; give --checkpoint-every N or --checkpoint-minutes X", o->keep);
    }
    if (o->major_every > 0 && !by_steps) {
        return fail(error, "--major-every %" PRId64 " without checkpoints at given steps; give --checkpoint-every N", o->major_every);
    }
    if (o->major_every > 0 && o->major_every % o->checkpoint_every != 0) {
        return fail(error, "--major-every %" PRId64 " is not a multiple of --checkpoint-every %" PRId64 ", so some would never be written",
                    o->major_every, o->checkpoint_every);
    }
    return true;
}

// Whether a list "a|b" holds the optimizer in force.
static bool optimizer_among(const Options* o, const char* words) {
    char name[32];
    choice_word(OPTIMIZER_WORDS, o->optimizer, name, sizeof(name));
    return choice_index(words, name) >= 0;
}

// Options that only some optimizers read, by the beginning of their names. What a file says for another optimizer is passed over.
static bool train_check_belongs(const Options* o, Error* error) {
    static const char with_moments[] = "adamw|adam|lamb|lion|ademamix|muon|normuon|soap|kappa";
    static const struct {
        const char *prefix, *optimizers;
    } rows[] = {{"kappa-", "kappa"}, {"soap-", "soap"}, {"lars-", "lars"}, {"beta3", "ademamix"}, {"alpha", "ademamix"},
                {"momentum", "sgd|lars|muon|normuon|kappa"}, {"nesterov", "sgd|muon|normuon|kappa"}, {"beta1", with_moments}, {"beta2", with_moments},
                {"eps", "adamw|adam|adagrad|lamb|ademamix|muon|normuon|soap|kappa"}};
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const char* name = option_table[i].name;
        for (size_t k = 0; k < COUNT_OF(rows) && o->source[i] == OPTION_FROM_COMMAND_LINE; k++) {
            if (strncmp(name, rows[k].prefix, strlen(rows[k].prefix)) != 0 || optimizer_among(o, rows[k].optimizers)) { continue; }
            return fail(error, "--%s is an option of --optimizer %s; leave it out", name, rows[k].optimizers);
        }
    }
    return true;
}

static bool train_check_optimizer(const Options* o, Error* error) {
    char name[32];
    choice_word(OPTIMIZER_WORDS, o->optimizer, name, sizeof(name));
    if (!train_check_belongs(o, error)) { return false; }
    if (o->trust_high > 0 && o->trust_low > o->trust_high) {
        return fail(error, "--trust-low %g is above --trust-high %g", o->trust_low, o->trust_high);
    }
    if (o->trust_high == 0 && (option_given(o, "trust-low") || option_given(o, "trust-base"))) {
        return fail(error, "--trust-low and --trust-base mean nothing without a trust ratio; give --trust-high X");
    }
    if (optimizer_among(o, "lars|lamb") && (o->trust_high > 0 || o->update_clip > 0)) {
        return fail(error, "%s has a trust ratio of its own; leave --trust-high and --update-clip out", name);
    }
    if (optimizer_among(o, "adafactor") && o->trust_high > 0) {
        return fail(error, "adafactor's step is relative to its weights already; leave --trust-high out");
    }
    if (optimizer_among(o, "adam|sgd|adagrad|lars|lamb") && o->cautious_decay) {
        return fail(error, "decay is part of %s's gradient or direction; leave --cautious-decay out", name);
    }
    if (optimizer_among(o, "adafactor|kappa") && o->state_format != 0) {
        return fail(error, "%s has formats of its own for its state; leave --state-format out", name);
    }
    if (o->kappa_bits != 0 && o->source[option_find(COMMAND_TRAIN, "kappa-bytes", false) - option_table] == OPTION_FROM_COMMAND_LINE) {
        return fail(error, "--kappa-bytes is for widths that are chosen; leave it or --kappa-bits out");
    }
    if (!o->master_weights && o->master_format != 0) {
        return fail(error, "--master-format split without master weights; leave --master-weights on");
    }
    if (o->beta2_half_life > 0 && option_given(o, "beta2")) { return fail(error, "--beta2-half-life sets beta2; leave --beta2 out"); }
    return true;
}

static bool train_check(const Options* o, Error* error) {
    if (!train_check_batch(o, error) || !train_check_output(o, error) || !train_check_optimizer(o, error)) { return false; }
    if (o->steps >= 0 && (o->warmup > o->steps || o->batch_warmup > o->steps)) {
        bool first = o->warmup > o->steps;
        return fail(error, "--%s %" PRId64 " is longer than --steps %" PRId64 "; give a shorter one, or leave it out",
                    first ? "warmup" : "batch-warmup", first ? o->warmup : o->batch_warmup, o->steps);
    }
    if (!o->train_data[0]) { return fail(error, "--train-data is empty; give token shards (./train_gpt tokenize makes them)"); }
    if (!o->model[0]) { return fail(error, "--model is empty; give a size such as d12, a .bin file or a checkpoint"); }
    if (o->val_batches == 0) {
        return fail(error, "--val-batches 0 measures nothing; give -1 for all, or --val-every 0 for no validation");
    }
    if (o->hellaswag && !o->hellaswag_data[0]) { return fail(error, "--hellaswag on needs --hellaswag-data FILE"); }
    return true;
}

static bool tokenize_check(const Options* o, Error* error) {
    if (o->input.count == 0) { return fail(error, "no text to read; give its files: ./train_gpt tokenize book.txt --output data/book"); }
    if (!o->output[0]) { return fail(error, "--output is missing: give the beginning of the names to write, as in --output data/book"); }
    if (o->tokenizer[0] && option_given(o, "vocab-size")) {
        return fail(error, "--tokenizer and --vocab-size exclude each other: a tokenizer that exists has its own size");
    }
    if (option_given(o, "json-field") && choice_index("auto|text|jsonl", "text") == o->format) {
        return fail(error, "--json-field belongs to --format jsonl, --format is text");
    }
    return true;
}

static bool eval_check(const Options* o, Error* error) {
    if (!o->model[0]) { return fail(error, "--model is missing: give a .bin file, a checkpoint, or the output folder of a run"); }
    if (!o->val_data[0] && !o->hellaswag_data[0]) {
        return fail(error, "nothing to measure; give --val-data FILES or --hellaswag-data FILE");
    }
    return o->val_batches != 0 || fail(error, "--val-batches 0 measures nothing; give -1 for all");
}

static bool convert_check(const Options* o, Error* error) {
    if (!o->from[0] || !o->to[0]) {
        return fail(error, "--%s is missing; e.g. ./train_gpt convert --from model.bin --to model.safetensors",
                    o->from[0] ? "to" : "from");
    }
    return strcmp(o->from, o->to) != 0 || fail(error, "--from and --to are the same file %.200s", o->from);
}

// Whether the options go together, as far as they can be judged without opening a file.
bool options_check(const Options* options, Error* error) {
    switch (options->command) {
    case COMMAND_TRAIN: return train_check(options, error);
    case COMMAND_TOKENIZE: return tokenize_check(options, error);
    case COMMAND_GENERATE:
        return options->model[0] || fail(error, "--model is missing: give a .bin file, a checkpoint, or the output folder of a run");
    case COMMAND_EVAL: return eval_check(options, error);
    case COMMAND_CONVERT: return convert_check(options, error);
    case COMMAND_PLAN: return train_check_optimizer(options, error);
    case COMMAND_SELFCHECK:
    case COMMAND_COUNT: break;
    }
    return true;
}

// The length of the warm-up once the number of steps is known: --warmup, or a twentieth of them, at most 700.
int64_t options_warmup(const Options* options, int64_t steps) {
    if (options->warmup >= 0) { return options->warmup; }
    return steps / 20 < 700 ? steps / 20 : 700;
}
