// loader.h - training sequences from token shards, as a pure function of (seed, index): nothing needs saving to resume, and any
// number of ranks and micro-batches sees the same sequences. Sequence k is the T + 1 tokens from k * T on in all shards laid end to
// end (the last token of one is the first of the next; sequences may straddle shards). An epoch is every sequence once, in an order
// keyed by (seed, epoch) that is computed without a table: a Feistel network over [0, a) x [0, b) with a b >= n, applied again
// while it lands at n or beyond ("cycle walking": Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
#pragma once
#include "../kernels/philox.h"
#include "shards.h"
#include <glob.h>
#include <sys/resource.h>

#define LOADER_VERIFY_BYTES ((uint64_t)1 << 30) // up to this much data is checked against its checksums at the start
#define SHUFFLE_ROUNDS 8

typedef struct {
    Shard* shards;
    size_t shard_count;
    uint64_t* first;    // (shard_count + 1) tokens before each shard
    uint64_t tokens;    // in all
    uint64_t sequences; // in an epoch: (tokens - 1) / T
    int T;
    uint64_t seed, vocab_size;
    bool shuffle;
} Loader;

static uint64_t shuffle_word(uint64_t seed, uint64_t epoch, uint32_t round, uint64_t half) {
    Philox random = philox_at(seed, RANDOM_SHUFFLE, (uint32_t)epoch, round, half);
    return (uint64_t)random.x[0] << 32 | random.x[1];
}

// The place of k in a permutation of [0, n); k < n <= 2^62.
uint64_t shuffle_index(uint64_t seed, uint64_t epoch, uint64_t k, uint64_t n) {
    uint64_t a = (uint64_t)sqrt((double)n);
    while (a * a < n) { a++; }
    uint64_t b = (n + a - 1) / a;
    do {
        uint64_t high = k / b, low = k % b;
        for (uint32_t round = 0; round < SHUFFLE_ROUNDS; round += 2) {
            high = (high + shuffle_word(seed, epoch, round, low) % a) % a;
            low = (low + shuffle_word(seed, epoch, round + 1, high) % b) % b;
        }
        k = high * b + low;
    } while (k >= n);
    return k;
}

void loader_close(Loader* loader) {
    for (size_t i = 0; i < loader->shard_count; i++) { shard_close(&loader->shards[i]); }
    free(loader->shards);
    free(loader->first);
    memset(loader, 0, sizeof(*loader));
}

static bool loader_is_data(const char* path) {
    const char* dot = strrchr(path, '.');
    return !(dot && strcmp(dot, ".crc32c") == 0) && !strstr(path, ".bin.tmp.");
}

// Opens the files of the pattern in the order of their names.
static bool loader_open_shards(Loader* loader, const char* pattern, Error* error) {
    glob_t found;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) { // all shards stay open; the soft limit is often 1024
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    int status = glob(pattern, access(pattern, F_OK) == 0 ? GLOB_NOCHECK : 0, NULL, &found); // a name may itself hold brackets
    size_t count = status == 0 ? found.gl_pathc : 0;
    bool good = true;
    loader->shards = (Shard*)need(calloc(count + 1, sizeof(Shard)));
    for (size_t i = 0; good && i < count; i++) {
        if (!loader_is_data(found.gl_pathv[i])) { continue; }
        good = shard_open(&loader->shards[loader->shard_count], found.gl_pathv[i], error);
        loader->shard_count += good;
    }
    if (status == 0) { globfree(&found); }
    if (good && loader->shard_count == 0) {
        return fail(error, "no file matches %s; make data with: ./train_gpt tokenize book.txt --output data/book", pattern);
    }
    return good;
}

// Compares all shards with their checksum files.
bool loader_verify(const Loader* loader, Error* error) {
    for (size_t i = 0; i < loader->shard_count; i++) {
        if (!shard_verify(&loader->shards[i], error)) { return false; }
    }
    return true;
}

static bool loader_measure(Loader* loader, const char* pattern, Error* error) {
    uint64_t bytes = 0;
    loader->first = (uint64_t*)need(calloc(loader->shard_count + 1, sizeof(uint64_t)));
    for (size_t i = 0; i < loader->shard_count; i++) {
        loader->first[i + 1] = loader->first[i] + loader->shards[i].tokens;
        bytes += loader->shards[i].file.size;
    }
    loader->tokens = loader->first[loader->shard_count];
    if (loader->tokens < (uint64_t)loader->T + 1) {
        return fail(error, "%s: %" PRIu64 " tokens in %zu files, a sequence needs %d + 1: make more data, or shorten the sequences",
                    pattern, loader->tokens, loader->shard_count, loader->T);
    }
    loader->sequences = (loader->tokens - 1) / (uint64_t)loader->T;
    return bytes > LOADER_VERIFY_BYTES || loader_verify(loader, error);
}

// pattern: a file, or a glob pattern of shards. T: tokens in a sequence. vocab_size: ids at or above it are refused when read.
bool loader_open(Loader* loader, const char* pattern, int T, uint64_t seed, bool shuffle, uint64_t vocab_size, Error* error) {
    memset(loader, 0, sizeof(*loader));
    if (T < 1) { return fail(error, "sequences of %d tokens: expected at least 1", T); }
    loader->T = T;
    loader->seed = seed;
    loader->shuffle = shuffle;
    loader->vocab_size = vocab_size;
    if (loader_open_shards(loader, pattern, error) && loader_measure(loader, pattern, error)) { return true; }
    loader_close(loader);
    return false;
}

static size_t loader_find_shard(const Loader* loader, uint64_t token) {
    size_t low = 0, high = loader->shard_count; // first[low] <= token < first[high]
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (loader->first[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// tokens: (T + 1). index counts sequences over all epochs: epoch = index / sequences. Any thread may call this.
bool loader_sequence(const Loader* loader, uint64_t index, int32_t* tokens, Error* error) {
    uint64_t epoch = index / loader->sequences, k = index % loader->sequences;
    if (loader->shuffle) { k = shuffle_index(loader->seed, epoch, k, loader->sequences); }
    uint64_t at = k * (uint64_t)loader->T;
    size_t left = (size_t)loader->T + 1;
    for (size_t s = loader_find_shard(loader, at); left > 0; s++) {
        uint64_t here = loader->first[s + 1] - at;
        size_t count = here < left ? (size_t)here : left;
        if (!shard_read(&loader->shards[s], at - loader->first[s], count, tokens, loader->vocab_size, error)) { return false; }
        tokens += count;
        at += count;
        left -= count;
    }
    return true;
}
