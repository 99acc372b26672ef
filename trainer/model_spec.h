// model_spec.h - from "gpt2:d12", "gpt3:c768" or "layers=4,heads=4,channels=128,context=256" to the shape of a model.
// The GPT-2 family goes by depth, the GPT-3 family by channels (Brown et al. 2020, table 2.1), as llm.c has them.
#pragma once
#include "model_file.h"

#define GPT2_CONTEXT 1024
#define GPT3_CONTEXT 2048
#define GPT2_VOCAB 50257
#define VOCAB_MULTIPLE 128 // the head's columns are padded to this for the matrix product

typedef struct {
    int key, layers, channels, heads;
} FamilyRow;

static const FamilyRow gpt2_family[] = { // key: depth
    {6, 6, 384, 6},     {12, 12, 768, 12},  {24, 24, 1024, 16}, {36, 36, 1280, 20},
    {48, 48, 1600, 25}, {60, 60, 1920, 30}, {72, 72, 2880, 30}, {84, 84, 3456, 36},
};

static const FamilyRow gpt3_family[] = { // key: channels
    {384, 6, 384, 6},      {768, 12, 768, 12},    {1024, 24, 1024, 16},  {1536, 24, 1536, 16},   {2048, 24, 2048, 16},
    {2560, 32, 2560, 32},  {4096, 32, 4096, 32},  {5120, 40, 5120, 40},  {12288, 96, 12288, 96},
};

static bool family_find(const FamilyRow* rows, size_t count, const char* text, const char* whole, int context, ModelHeader* model, Error* error) {
    char known[256] = "";
    char* end;
    long key = strtol(text, &end, 10);
    for (size_t i = 0; i < count; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof(known) - used, "%s%c%d", i ? ", " : "", context == GPT2_CONTEXT ? 'd' : 'c', rows[i].key);
        if (*text && !*end && rows[i].key == key) {
            model->layers = rows[i].layers;
            model->channels = rows[i].channels;
            model->heads = rows[i].heads;
            model->max_seq_len = context;
            return true;
        }
    }
    return fail(error, "--model %s: no such member of the family; there are %s", whole, known);
}

static bool spec_number(const char* name, const char* value, int* out, Error* error) {
    char* end;
    errno = 0;
    long n = strtol(value, &end, 10);
    if (!*value || *end || errno || n < 1 || n > (1 << 24)) {
        return fail(error, "--model: %s=%s: expected a whole number from 1 to 16777216", name, value);
    }
    *out = (int)n;
    return true;
}

static bool spec_pairs(const char* spec, ModelHeader* model, Error* error) {
    char text[512];
    if (strlen(spec) >= sizeof(text)) { return fail(error, "--model: the description is longer than %zu characters", sizeof(text) - 1); }
    strcpy(text, spec);
    struct {
        const char* name;
        int* value;
    } fields[] = {{"layers", &model->layers},
                  {"heads", &model->heads},
                  {"channels", &model->channels},
                  {"context", &model->max_seq_len},
                  {"vocab", &model->vocab_size}};
    char* rest = text;
    for (char* pair = strsep(&rest, ","); pair; pair = strsep(&rest, ",")) {
        char* value = strchr(pair, '=');
        if (!value) { return fail(error, "--model %s: expected name=number pairs such as layers=4,heads=4,channels=128,context=256", spec); }
        *value++ = 0;
        size_t i = 0;
        while (i < COUNT_OF(fields) && strcmp(fields[i].name, pair) != 0) { i++; }
        if (i == COUNT_OF(fields)) {
            return fail(error, "--model: unknown part %s=%s; there are layers, heads, channels, context and vocab", pair, value);
        }
        if (!spec_number(pair, value, fields[i].value, error)) { return false; }
    }
    for (size_t i = 0; i < 4; i++) {
        if (*fields[i].value == 0) {
            return fail(error, "--model %s: %s is missing; expected layers=4,heads=4,channels=128,context=256", spec, fields[i].name);
        }
    }
    return true;
}

// Whether --model describes a new model, rather than names a file or folder.
bool model_spec_is_new(const char* spec) {
    bool depth = spec[0] == 'd' && spec[1] && strspn(spec + 1, "0123456789") == strlen(spec + 1); // d12
    return strchr(spec, '=') || strncmp(spec, "gpt2:", 5) == 0 || strncmp(spec, "gpt3:", 5) == 0 || depth;
}

// vocab_size: of the tokenizer or the option; a vocab=N in the description wins over 0 only.
bool model_spec_parse(const char* spec, int vocab_size, ModelHeader* model, Error* error) {
    memset(model, 0, sizeof(*model));
    bool good = strchr(spec, '=')                 ? spec_pairs(spec, model, error)
                : strncmp(spec, "gpt3:c", 6) == 0 ? family_find(gpt3_family, COUNT_OF(gpt3_family), spec + 6, spec, GPT3_CONTEXT, model, error)
                : strncmp(spec, "gpt2:d", 6) == 0 ? family_find(gpt2_family, COUNT_OF(gpt2_family), spec + 6, spec, GPT2_CONTEXT, model, error)
                : spec[0] == 'd'                  ? family_find(gpt2_family, COUNT_OF(gpt2_family), spec + 1, spec, GPT2_CONTEXT, model, error)
                : fail(error, "--model %s: expected gpt2:d12, gpt3:c768 or layers=4,heads=4,channels=128,context=256", spec);
    if (!good) { return false; }
    if (model->vocab_size && vocab_size && model->vocab_size != vocab_size) {
        return fail(error, "--model says vocab=%d, but the vocabulary has %d tokens; leave one of them out", model->vocab_size, vocab_size);
    }
    if (!model->vocab_size) { model->vocab_size = vocab_size ? vocab_size : GPT2_VOCAB; }
    model->padded_vocab = (int)round_up((size_t)model->vocab_size, VOCAB_MULTIPLE);
    if (model->channels % model->heads) {
        return fail(error, "--model %s: %d channels do not divide into %d heads", spec, model->channels, model->heads);
    }
    int head = model->channels / model->heads;
    if (head > 256) { return fail(error, "--model %s: heads of %d channels; at most 256 are supported", spec, head); }
    return true;
}
