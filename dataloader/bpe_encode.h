// bpe_encode.h - text to token ids by byte-pair encoding (Sennrich et al. 2016; byte-level as in GPT-2). Text is cut into words by
// pretokenize.h; a word that is a token gets its id; else it starts as single bytes, and the adjacent pair whose joined bytes have
// the lowest id is merged, leftmost first, until no pair is a token. Ids equal tiktoken's for the same vocabulary.
//   Encoder:    read-only tables made from a Tokenizer, shared by all threads.
//   EncodeWork: one thread's memory: a cache of words already encoded, and the heap that keeps merging O(n log n) in a word's length.
#pragma once
#include "pretokenize.h"
#include "tokenizer.h"

#define NO_TOKEN UINT32_MAX
#define ENCODE_CACHE_SLOTS ((size_t)1 << 15)
#define ENCODE_CACHE_IDS 11
#define ENCODE_MAX_WORD ((size_t)1 << 26) // a longer word is encoded in pieces of 64 MiB: its memory stays bounded

typedef struct {
    uint32_t* ids;
    size_t count, capacity;
} TokenBuffer;

static inline void tokens_reserve(TokenBuffer* tokens, size_t more) {
    if (more <= tokens->capacity - tokens->count) { return; }
    tokens->capacity = max_size(tokens->count + more, max_size(4096, tokens->capacity + tokens->capacity / 2));
    tokens->ids = (uint32_t*)need(realloc(tokens->ids, tokens->capacity * sizeof(uint32_t)));
}

static inline void tokens_append(TokenBuffer* tokens, uint32_t id) {
    tokens_reserve(tokens, 1);
    tokens->ids[tokens->count++] = id;
}

void tokens_free(TokenBuffer* tokens) {
    free(tokens->ids);
    memset(tokens, 0, sizeof(*tokens));
}

static inline uint64_t hash_mix(uint64_t a, uint64_t b) {
    uint64_t h = (a ^ 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
    h = (h ^ (h >> 32) ^ b) * 0xD6E8FEB86659FD93u;
    return h ^ (h >> 32);
}

static inline uint64_t hash_bytes(const uint8_t* p, size_t count) {
    uint64_t h = count;
    for (; count >= 8; count -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = hash_mix(h, word);
    }
    uint64_t word = 0;
    memcpy(&word, p, count);
    return hash_mix(h, word);
}

// Token bytes -> id, by open addressing; slots hold id + 1, 0 is empty. The bytes themselves stay in the Tokenizer.
typedef struct {
    uint32_t* slots;
    size_t mask;
} TokenMap;

void token_map_new(TokenMap* map, size_t tokens) {
    size_t size = 1024;
    while (size < 2 * tokens) { size *= 2; }
    map->slots = (uint32_t*)need(calloc(size, sizeof(uint32_t)));
    map->mask = size - 1;
}

uint32_t token_map_find(const TokenMap* map, const Tokenizer* tokenizer, const uint8_t* bytes, size_t count) {
    for (size_t at = hash_bytes(bytes, count) & map->mask; map->slots[at]; at = (at + 1) & map->mask) {
        size_t length;
        const uint8_t* token = tokenizer_token(tokenizer, map->slots[at] - 1, &length);
        if (length == count && memcmp(token, bytes, count) == 0) { return map->slots[at] - 1; }
    }
    return NO_TOKEN;
}

// Adds a token of the vocabulary; bytes that are there already keep their lower id.
void token_map_add(TokenMap* map, const Tokenizer* tokenizer, uint32_t id) {
    size_t count;
    const uint8_t* bytes = tokenizer_token(tokenizer, id, &count);
    if (token_map_find(map, tokenizer, bytes, count) != NO_TOKEN) { return; }
    size_t at = hash_bytes(bytes, count) & map->mask;
    while (map->slots[at]) { at = (at + 1) & map->mask; }
    map->slots[at] = id + 1;
}

typedef struct {
    uint64_t pair; // left id << 32 | right id
    uint32_t joined, used;
} MergeSlot;

typedef struct {
    const Tokenizer* tokenizer;
    uint8_t* classes; // of all characters, see pretokenize.h
    TokenMap map;     // without <|endoftext|>, which text never yields
    MergeSlot* merges;
    size_t merge_mask;
    uint32_t byte_id[256];
} Encoder;

static inline uint32_t encoder_join(const Encoder* encoder, uint32_t left, uint32_t right) {
    uint64_t pair = (uint64_t)left << 32 | right;
    size_t at = hash_mix(left, right) & encoder->merge_mask;
    for (; encoder->merges[at].used; at = (at + 1) & encoder->merge_mask) {
        if (encoder->merges[at].pair == pair) { return encoder->merges[at].joined; }
    }
    return NO_TOKEN;
}

// Calls for every way to cut token `id` into two tokens; counts them, and adds them to the merge table where there is one.
static size_t encoder_add_splits(Encoder* encoder, uint32_t id) {
    size_t count, found = 0;
    const uint8_t* bytes = tokenizer_token(encoder->tokenizer, id, &count);
    if (id == encoder->tokenizer->eot || token_map_find(&encoder->map, encoder->tokenizer, bytes, count) != id) { return 0; }
    for (size_t cut = 1; cut < count; cut++) {
        uint32_t left = token_map_find(&encoder->map, encoder->tokenizer, bytes, cut);
        uint32_t right = left == NO_TOKEN ? NO_TOKEN : token_map_find(&encoder->map, encoder->tokenizer, bytes + cut, count - cut);
        if (right == NO_TOKEN) { continue; }
        found++;
        if (!encoder->merges) { continue; }
        size_t at = hash_mix(left, right) & encoder->merge_mask;
        while (encoder->merges[at].used) { at = (at + 1) & encoder->merge_mask; }
        encoder->merges[at] = (MergeSlot){(uint64_t)left << 32 | right, id, 1};
    }
    return found;
}

void encoder_close(Encoder* encoder) {
    free(encoder->classes);
    free(encoder->map.slots);
    free(encoder->merges);
    memset(encoder, 0, sizeof(*encoder));
}

// The tokenizer must outlive the encoder.
bool encoder_open(Encoder* encoder, const Tokenizer* tokenizer, Error* error) {
    memset(encoder, 0, sizeof(*encoder));
    encoder->tokenizer = tokenizer;
    token_map_new(&encoder->map, tokenizer->vocab_size);
    for (uint32_t id = 0; id < tokenizer->vocab_size; id++) {
        if (id != tokenizer->eot) { token_map_add(&encoder->map, tokenizer, id); }
    }
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        encoder->byte_id[b] = token_map_find(&encoder->map, tokenizer, &byte, 1);
        if (encoder->byte_id[b] == NO_TOKEN) {
            encoder_close(encoder);
            return fail(error, "this tokenizer can decode but not encode: byte 0x%02x is no token of it", b);
        }
    }
    size_t splits = 0, size = 1024;
    for (uint32_t id = 0; id < tokenizer->vocab_size; id++) { splits += encoder_add_splits(encoder, id); }
    while (size < 2 * splits) { size *= 2; }
    encoder->merges = (MergeSlot*)need(calloc(size, sizeof(MergeSlot)));
    encoder->merge_mask = size - 1;
    for (uint32_t id = 0; id < tokenizer->vocab_size; id++) { encoder_add_splits(encoder, id); }
    encoder->classes = char_classes_new(error);
    if (encoder->classes) { return true; }
    encoder_close(encoder);
    return false;
}

typedef struct { // one cache line
    uint64_t key[2];
    uint8_t bytes, count; // bytes = 0: empty
    uint32_t ids[ENCODE_CACHE_IDS];
} CachedWord;

// The state of a word while it is merged: part i starts at byte i; dead parts and those without a merge have joined[i] = NO_TOKEN.
typedef struct {
    CachedWord* cache;
    uint32_t *id, *joined, *next, *previous;
    uint64_t* heap; // joined id << 32 | position: the lowest id first, then the leftmost
    size_t heap_count, capacity;
} EncodeWork;

void encode_work_new(EncodeWork* work) {
    memset(work, 0, sizeof(*work));
    work->cache = (CachedWord*)need(aligned_alloc(64, ENCODE_CACHE_SLOTS * sizeof(CachedWord)));
    memset(work->cache, 0, ENCODE_CACHE_SLOTS * sizeof(CachedWord));
}

void encode_work_free(EncodeWork* work) {
    free(work->cache);
    free(work->id);
    free(work->heap);
    memset(work, 0, sizeof(*work));
}

static void encode_work_reserve(EncodeWork* work, size_t bytes) {
    if (bytes <= work->capacity) { return; }
    work->capacity = max_size(256, bytes);
    free(work->id);
    free(work->heap);
    work->id = (uint32_t*)need(malloc(4 * work->capacity * sizeof(uint32_t)));
    work->joined = work->id + work->capacity;
    work->next = work->joined + work->capacity;
    work->previous = work->next + work->capacity;
    work->heap = (uint64_t*)need(malloc(3 * work->capacity * sizeof(uint64_t))); // a word of n bytes pushes at most 3n pairs
}

static void heap_push(EncodeWork* work, uint64_t value) {
    size_t at = work->heap_count++;
    for (; at > 0 && work->heap[(at - 1) / 2] > value; at = (at - 1) / 2) { work->heap[at] = work->heap[(at - 1) / 2]; }
    work->heap[at] = value;
}

static uint64_t heap_pop(EncodeWork* work) {
    uint64_t top = work->heap[0], value = work->heap[--work->heap_count];
    size_t at = 0, n = work->heap_count;
    for (size_t child = 1; child < n; child = 2 * at + 1) {
        child += child + 1 < n && work->heap[child + 1] < work->heap[child];
        if (work->heap[child] >= value) { break; }
        work->heap[at] = work->heap[child];
        at = child;
    }
    work->heap[at] = value;
    return top;
}

// Notes the merge of part i with the one after it, if the two make a token.
static void encode_note_pair(const Encoder* encoder, EncodeWork* work, size_t i, size_t bytes) {
    size_t next = work->next[i];
    work->joined[i] = next < bytes ? encoder_join(encoder, work->id[i], work->id[next]) : NO_TOKEN;
    if (work->joined[i] != NO_TOKEN) { heap_push(work, (uint64_t)work->joined[i] << 32 | i); }
}

// Merges one word into out.
static void encode_merge(const Encoder* encoder, EncodeWork* work, const uint8_t* word, size_t bytes, TokenBuffer* out) {
    encode_work_reserve(work, bytes);
    work->heap_count = 0;
    for (size_t i = 0; i < bytes; i++) {
        work->id[i] = encoder->byte_id[word[i]];
        work->next[i] = (uint32_t)i + 1;
        work->previous[i] = (uint32_t)i - 1; // of the first one: never read
    }
    for (size_t i = 0; i < bytes; i++) { encode_note_pair(encoder, work, i, bytes); }
    while (work->heap_count > 0) {
        uint64_t top = heap_pop(work);
        size_t i = (uint32_t)top, next = work->next[i];
        if (work->joined[i] != top >> 32) { continue; } // merged otherwise meanwhile
        work->id[i] = work->joined[i];
        work->joined[next] = NO_TOKEN;
        work->next[i] = work->next[next];
        if (work->next[i] < bytes) { work->previous[work->next[i]] = (uint32_t)i; }
        encode_note_pair(encoder, work, i, bytes);
        if (i > 0) { encode_note_pair(encoder, work, work->previous[i], bytes); }
    }
    for (size_t i = 0; i < bytes; i = work->next[i]) { tokens_append(out, work->id[i]); }
}

static void encode_word(const Encoder* encoder, EncodeWork* work, const uint8_t* word, size_t bytes, TokenBuffer* out) {
    uint32_t id = token_map_find(&encoder->map, encoder->tokenizer, word, bytes);
    if (id != NO_TOKEN) {
        tokens_append(out, id);
        return;
    }
    for (; bytes > ENCODE_MAX_WORD; bytes -= ENCODE_MAX_WORD, word += ENCODE_MAX_WORD) {
        encode_merge(encoder, work, word, ENCODE_MAX_WORD, out);
    }
    encode_merge(encoder, work, word, bytes, out);
}

// A word of at most 16 bytes as two integers, zeros after its end; `end` is where the text ends.
static inline void cache_key(uint64_t key[2], const uint8_t* word, size_t bytes, const uint8_t* end) {
    if (end - word >= 16) {
        memcpy(key, word, 16);
        key[0] = bytes < 8 ? key[0] & ((1ull << (8 * bytes)) - 1) : key[0];
        key[1] = bytes <= 8 ? 0 : bytes < 16 ? key[1] & ((1ull << (8 * (bytes - 8))) - 1) : key[1];
    } else {
        key[0] = key[1] = 0;
        memcpy(key, word, bytes);
    }
}

// Appends the ids of a text. Bytes that are not UTF-8 are encoded too; decoding gives back every byte.
void encode_text(const Encoder* encoder, EncodeWork* work, const uint8_t* text, size_t bytes, TokenBuffer* out) {
    const uint8_t* end = text + bytes;
    for (const uint8_t *word = text, *stop; word < end; word = stop) {
        stop = pretoken_end(encoder->classes, word, end);
        size_t length = (size_t)(stop - word);
        if (length > 16) {
            encode_word(encoder, work, word, length, out);
            continue;
        }
        uint64_t key[2];
        cache_key(key, word, length, end);
        CachedWord* cached = work->cache + (hash_mix(key[0] ^ (uint64_t)length << 56, key[1]) & (ENCODE_CACHE_SLOTS - 1));
        if (cached->bytes == length && cached->key[0] == key[0] && cached->key[1] == key[1]) {
            tokens_reserve(out, ENCODE_CACHE_IDS);
            for (size_t i = 0; i < cached->count; i++) { out->ids[out->count + i] = cached->ids[i]; }
            out->count += cached->count;
            continue;
        }
        size_t first = out->count;
        encode_word(encoder, work, word, length, out);
        if (out->count - first <= ENCODE_CACHE_IDS) {
            memcpy(cached->key, key, sizeof(key));
            cached->bytes = (uint8_t)length;
            cached->count = (uint8_t)(out->count - first);
            memcpy(cached->ids, out->ids + first, cached->count * sizeof(uint32_t));
        }
    }
}
