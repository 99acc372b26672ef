// find_tokenizer.h - the tokenizer that belongs to data or to a model, when none is named: PREFIX_tokenizer.bin for shards
// PREFIX_train_*.bin, else tokenizer.bin or gpt2_tokenizer.bin in the folder of the data or model, in it, or one or two above it
// (checkpoints lie inside a run's output folder).
#pragma once
#include "../dataloader/tokenizer.h"

// Opens folder/name if it is there.
static bool tokenizer_try(Tokenizer* tokenizer, const char* folder, const char* name, Error* error) {
    char path[PATH_MAX];
    if (tokenizer->vocab_size || (size_t)snprintf(path, sizeof(path), "%s%s", folder, name) >= sizeof(path)) { return true; }
    return access(path, R_OK) != 0 || tokenizer_open(tokenizer, path, error);
}

// named: the option, "" to look around near `near`. Finding none is no error: vocab_size stays 0.
bool tokenizer_find(Tokenizer* tokenizer, const char* named, const char* near, Error* error) {
    char folder[PATH_MAX];
    memset(tokenizer, 0, sizeof(*tokenizer));
    if (named[0]) { return tokenizer_open(tokenizer, named, error); }
    if ((size_t)snprintf(folder, sizeof(folder), "%s", near) >= sizeof(folder)) { return true; }
    const char *name = strrchr(near, '/') ? strrchr(near, '/') + 1 : near, *split = NULL;
    for (const char* at = strstr(name, "_train"); at; at = strstr(at + 1, "_train")) { split = at; } // the last one in the file's name
    if (split) {
        folder[split - near] = 0;
        if (!tokenizer_try(tokenizer, folder, "_tokenizer.bin", error)) { return false; }
        snprintf(folder, sizeof(folder), "%s", near);
    }
    for (int up = 0; up < 3; up++) {
        if (!tokenizer_try(tokenizer, folder, "/tokenizer.bin", error)) { return false; }
        if (!tokenizer_try(tokenizer, folder, "/gpt2_tokenizer.bin", error)) { return false; }
        char* slash = strrchr(folder, '/');
        if (!slash && strcmp(folder, ".") == 0) { return true; }
        if (slash) {
            *slash = 0;
        } else {
            strcpy(folder, ".");
        }
    }
    return true;
}
