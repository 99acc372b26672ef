// bpe_train.h - learns a byte-level vocabulary from text (Sennrich et al. 2016, algorithm 1): count the distinct words, then join
// again and again the most frequent adjacent pair of tokens. Ids: 0..255 the bytes, then the joined pairs in order, last
// <|endoftext|>. Ties go to the pair with the smaller left id, then the smaller right id, so that the vocabulary depends on the
// text alone, not on threads or on the order of words. A pair whose joined bytes already are a token is joined into that token and
// takes no new id, which is what the encoder does. Pairs seen once, or longer than 255 bytes joined, are left alone.
#pragma once
#include "bpe_encode.h"

#define TRAIN_MAX_WORD 256 // bytes; longer words are counted in pieces

typedef struct {
    uint64_t hash;
    uint64_t count; // occurrences; 0 marks an empty slot
    size_t start;   // in letters
    uint32_t bytes;
} WordCount;

// Distinct words and how often each occurred.
typedef struct {
    WordCount* slots;
    size_t size, used; // size is 0 or a power of two
    ByteBuffer letters;
} WordCounts;

void word_counts_free(WordCounts* counts) {
    free(counts->slots);
    bytes_free(&counts->letters);
    memset(counts, 0, sizeof(*counts));
}

static void word_counts_grow(WordCounts* counts) {
    WordCounts old = *counts;
    counts->size = max_size(4096, 2 * old.size);
    counts->slots = (WordCount*)need(calloc(counts->size, sizeof(WordCount)));
    for (size_t i = 0; i < old.size; i++) {
        size_t at = old.slots[i].hash & (counts->size - 1);
        if (old.slots[i].count == 0) { continue; }
        while (counts->slots[at].count) { at = (at + 1) & (counts->size - 1); }
        counts->slots[at] = old.slots[i];
    }
    free(old.slots);
}

static void word_counts_add(WordCounts* counts, const uint8_t* word, size_t bytes, uint64_t times) {
    if (2 * (counts->used + 1) > counts->size) { word_counts_grow(counts); }
    uint64_t hash = hash_bytes(word, bytes);
    size_t at = hash & (counts->size - 1);
    for (; counts->slots[at].count; at = (at + 1) & (counts->size - 1)) {
        WordCount* w = &counts->slots[at];
        if (w->hash == hash && w->bytes == bytes && memcmp(counts->letters.data + w->start, word, bytes) == 0) {
            w->count += times;
            return;
        }
    }
    counts->slots[at] = (WordCount){hash, times, counts->letters.count, (uint32_t)bytes};
    counts->used++;
    bytes_append(&counts->letters, word, bytes);
}

// Counts the words of a text. Start from zeroed counts.
void word_counts_add_text(WordCounts* counts, const uint8_t* classes, const uint8_t* text, size_t bytes) {
    const uint8_t* end = text + bytes;
    for (const uint8_t *word = text, *stop; word < end; word = stop) {
        stop = pretoken_end(classes, word, end);
        for (; stop - word > TRAIN_MAX_WORD; word += TRAIN_MAX_WORD) { word_counts_add(counts, word, TRAIN_MAX_WORD, 1); }
        word_counts_add(counts, word, (size_t)(stop - word), 1);
    }
}

void word_counts_merge(WordCounts* into, const WordCounts* from) {
    for (size_t i = 0; i < from->size; i++) {
        const WordCount* w = &from->slots[i];
        if (w->count) { word_counts_add(into, from->letters.data + w->start, w->bytes, w->count); }
    }
}

typedef struct {
    uint32_t left, right;
    uint64_t count;  // occurrences of the pair in all words as they are cut now
    uint32_t* words; // where it occurs; may name a word twice, or one that has lost it
    size_t word_count, word_capacity;
    uint32_t stamp; // the merge that last pushed it on the heap
} TrainPair;

typedef struct {
    uint64_t count;
    uint32_t left, right, pair;
} TrainCandidate;

typedef struct {
    Tokenizer* tokenizer;
    TokenMap map;
    uint32_t* symbols; // of all words; word w has symbols start[w] .. start[w] + length[w] - 1
    size_t* start;
    uint32_t* length;
    uint64_t* times;
    size_t words;
    TrainPair* pairs;
    size_t pair_count, pair_capacity;
    uint32_t* slots; // pair index + 1, by open addressing
    size_t slot_mask;
    TrainCandidate* heap; // the best pair first; entries whose count is out of date are put right when they surface
    size_t heap_count, heap_capacity;
    uint32_t stamp;
} BpeTrainer;

static bool train_better(const TrainCandidate* a, const TrainCandidate* b) {
    if (a->count != b->count) { return a->count > b->count; }
    return a->left != b->left ? a->left < b->left : a->right < b->right;
}

static void train_push(BpeTrainer* trainer, uint32_t pair) {
    const TrainPair* p = &trainer->pairs[pair];
    if (trainer->heap_count == trainer->heap_capacity) {
        trainer->heap_capacity = max_size(4096, 2 * trainer->heap_capacity);
        trainer->heap = (TrainCandidate*)need(realloc(trainer->heap, trainer->heap_capacity * sizeof(TrainCandidate)));
    }
    TrainCandidate entry = {p->count, p->left, p->right, pair};
    size_t at = trainer->heap_count++;
    for (; at > 0 && train_better(&entry, &trainer->heap[(at - 1) / 2]); at = (at - 1) / 2) {
        trainer->heap[at] = trainer->heap[(at - 1) / 2];
    }
    trainer->heap[at] = entry;
}

static TrainCandidate train_pop(BpeTrainer* trainer) {
    TrainCandidate top = trainer->heap[0], entry = trainer->heap[--trainer->heap_count];
    size_t at = 0, n = trainer->heap_count;
    for (size_t child = 1; child < n; child = 2 * at + 1) {
        child += child + 1 < n && train_better(&trainer->heap[child + 1], &trainer->heap[child]);
        if (!train_better(&trainer->heap[child], &entry)) { break; }
        trainer->heap[at] = trainer->heap[child];
        at = child;
    }
    trainer->heap[at] = entry;
    return top;
}

static void train_grow_slots(BpeTrainer* trainer) {
    trainer->slot_mask = max_size(8191, 2 * trainer->slot_mask + 1);
    free(trainer->slots);
    trainer->slots = (uint32_t*)need(calloc(trainer->slot_mask + 1, sizeof(uint32_t)));
    for (size_t i = 0; i < trainer->pair_count; i++) {
        size_t at = hash_mix(trainer->pairs[i].left, trainer->pairs[i].right) & trainer->slot_mask;
        while (trainer->slots[at]) { at = (at + 1) & trainer->slot_mask; }
        trainer->slots[at] = (uint32_t)i + 1;
    }
}

// The index of a pair, made on first sight.
static uint32_t train_pair(BpeTrainer* trainer, uint32_t left, uint32_t right) {
    if (2 * (trainer->pair_count + 1) > trainer->slot_mask) { train_grow_slots(trainer); }
    size_t at = hash_mix(left, right) & trainer->slot_mask;
    for (; trainer->slots[at]; at = (at + 1) & trainer->slot_mask) {
        const TrainPair* p = &trainer->pairs[trainer->slots[at] - 1];
        if (p->left == left && p->right == right) { return trainer->slots[at] - 1; }
    }
    if (trainer->pair_count == trainer->pair_capacity) {
        trainer->pair_capacity = max_size(4096, 2 * trainer->pair_capacity);
        trainer->pairs = (TrainPair*)need(realloc(trainer->pairs, trainer->pair_capacity * sizeof(TrainPair)));
    }
    TrainPair fresh = {left, right, 0, NULL, 0, 0, 0};
    trainer->pairs[trainer->pair_count++] = fresh;
    trainer->slots[at] = (uint32_t)trainer->pair_count;
    return (uint32_t)trainer->pair_count - 1;
}

static void train_pair_add_word(TrainPair* pair, uint32_t word) {
    if (pair->word_count > 0 && pair->words[pair->word_count - 1] == word) { return; }
    if (pair->word_count == pair->word_capacity) {
        pair->word_capacity = max_size(4, 2 * pair->word_capacity);
        pair->words = (uint32_t*)need(realloc(pair->words, pair->word_capacity * sizeof(uint32_t)));
    }
    pair->words[pair->word_count++] = word;
}

// Adds the pairs of a word (or takes them away). Pairs with `token` in them are new here: they learn of the word, and are listed
// in `touched` once per merge, because only their counts can have grown.
static void train_count_word(BpeTrainer* trainer, uint32_t word, bool add, uint32_t token, TokenBuffer* touched) {
    const uint32_t* s = trainer->symbols + trainer->start[word];
    for (uint32_t i = 0; i + 1 < trainer->length[word]; i++) {
        uint32_t index = train_pair(trainer, s[i], s[i + 1]);
        TrainPair* pair = &trainer->pairs[index];
        pair->count += add ? trainer->times[word] : 0 - trainer->times[word];
        if (!add || (token != NO_TOKEN && s[i] != token && s[i + 1] != token)) { continue; }
        train_pair_add_word(pair, word);
        if (pair->stamp != trainer->stamp) {
            pair->stamp = trainer->stamp;
            tokens_append(touched, index);
        }
    }
}

static void train_push_touched(BpeTrainer* trainer, TokenBuffer* touched) {
    for (size_t i = 0; i < touched->count; i++) { train_push(trainer, touched->ids[i]); }
    touched->count = 0;
}

// Joins a pair in every word that has it.
static void train_merge(BpeTrainer* trainer, uint32_t pair, uint32_t token, TokenBuffer* touched) {
    TrainPair merged = trainer->pairs[pair];
    trainer->pairs[pair].words = NULL;
    trainer->pairs[pair].word_count = trainer->pairs[pair].word_capacity = 0;
    trainer->stamp++;
    for (size_t i = 0; i < merged.word_count; i++) {
        uint32_t word = merged.words[i], n = trainer->length[word], kept = 0;
        uint32_t* s = trainer->symbols + trainer->start[word];
        train_count_word(trainer, word, false, NO_TOKEN, touched);
        for (uint32_t k = 0; k < n; kept++) {
            bool here = k + 1 < n && s[k] == merged.left && s[k + 1] == merged.right;
            s[kept] = here ? token : s[k];
            k += here ? 2 : 1;
        }
        trainer->length[word] = kept;
        train_count_word(trainer, word, true, token, touched);
    }
    free(merged.words);
    train_push_touched(trainer, touched);
}

// Lays the distinct words out as symbols and counts their pairs.
static void bpe_train_load(BpeTrainer* trainer, const WordCounts* counts, TokenBuffer* touched) {
    trainer->symbols = (uint32_t*)need(malloc((counts->letters.count + 1) * sizeof(uint32_t)));
    trainer->start = (size_t*)need(malloc((counts->used + 1) * sizeof(size_t)));
    trainer->length = (uint32_t*)need(malloc((counts->used + 1) * sizeof(uint32_t)));
    trainer->times = (uint64_t*)need(malloc((counts->used + 1) * sizeof(uint64_t)));
    for (size_t i = 0; i < counts->letters.count; i++) { trainer->symbols[i] = counts->letters.data[i]; }
    trainer->stamp = 1;
    for (size_t i = 0; i < counts->size; i++) {
        const WordCount* w = &counts->slots[i];
        if (w->count == 0) { continue; }
        uint32_t word = (uint32_t)trainer->words++;
        trainer->start[word] = w->start;
        trainer->length[word] = w->bytes;
        trainer->times[word] = w->count;
        train_count_word(trainer, word, true, NO_TOKEN, touched);
    }
    train_push_touched(trainer, touched);
}

static void bpe_trainer_free(BpeTrainer* trainer) {
    for (size_t i = 0; i < trainer->pair_count; i++) { free(trainer->pairs[i].words); }
    free(trainer->pairs);
    free(trainer->slots);
    free(trainer->heap);
    free(trainer->symbols);
    free(trainer->start);
    free(trainer->length);
    free(trainer->times);
    free(trainer->map.slots);
}

// The best pair left becomes a token (or joins an existing one); false when no pair occurs twice.
static bool train_step(BpeTrainer* trainer, TokenBuffer* touched) {
    Tokenizer* tokenizer = trainer->tokenizer;
    while (trainer->heap_count > 0) {
        TrainCandidate best = train_pop(trainer);
        if (best.count < 2) { return false; }
        if (best.count != trainer->pairs[best.pair].count) { // it shrank since; a grown pair has a newer entry
            if (trainer->pairs[best.pair].count < best.count) { train_push(trainer, best.pair); }
            continue;
        }
        uint8_t joined[TOKENIZER_MAX_TOKEN];
        size_t left = 0, right = 0;
        const uint8_t* left_bytes = tokenizer_token(tokenizer, best.left, &left);
        const uint8_t* right_bytes = tokenizer_token(tokenizer, best.right, &right);
        if (left + right > TOKENIZER_MAX_TOKEN) { continue; }
        memcpy(joined, left_bytes, left);
        memcpy(joined + left, right_bytes, right);
        uint32_t token = token_map_find(&trainer->map, tokenizer, joined, left + right);
        if (token == NO_TOKEN) {
            token = (uint32_t)tokenizer->vocab_size;
            tokenizer_append(tokenizer, joined, left + right);
            token_map_add(&trainer->map, tokenizer, token);
        }
        train_merge(trainer, best.pair, token, touched);
        return true;
    }
    return false;
}

// Makes a vocabulary of vocab_size tokens, <|endoftext|> included; fewer where the text has no further pair that occurs twice.
bool bpe_train(Tokenizer* tokenizer, const WordCounts* counts, size_t vocab_size, Error* error) {
    BpeTrainer trainer;
    TokenBuffer touched = {NULL, 0, 0};
    memset(tokenizer, 0, sizeof(*tokenizer));
    memset(&trainer, 0, sizeof(trainer));
    if (vocab_size < 257 || vocab_size > TOKENIZER_MAX_VOCAB) {
        return fail(error, "a vocabulary of %zu tokens: expected 257 (256 bytes and %s) to %zu", vocab_size, END_OF_TEXT,
                    TOKENIZER_MAX_VOCAB);
    }
    trainer.tokenizer = tokenizer;
    token_map_new(&trainer.map, vocab_size);
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        tokenizer_append(tokenizer, &byte, 1);
        token_map_add(&trainer.map, tokenizer, (uint32_t)b);
    }
    bpe_train_load(&trainer, counts, &touched);
    while (tokenizer->vocab_size < vocab_size - 1 && train_step(&trainer, &touched)) {}
    tokenizer->eot = (uint32_t)tokenizer->vocab_size;
    tokenizer_append(tokenizer, (const uint8_t*)END_OF_TEXT, strlen(END_OF_TEXT));
    bpe_trainer_free(&trainer);
    tokens_free(&touched);
    return true;
}
