// test_tokenizer.h - tests of pre-tokens, encoding and training; the rows are listed in test_data.h. Oracles: PCRE2 running GPT-2's
// pattern itself, a naive form of the merging rule, and ids that tiktoken gave (dev/fixtures, by make_tokenizer_fixture.py).
#pragma once
#include "test_data_helpers.h"

// ---------------------------------------------------------------------------------------------------------------------------------
// Pre-tokens.

// The scan against the pattern: every pre-token of `text` (valid UTF-8) must end where PCRE2 ends its match.
static void data_compare_with_pattern(const uint8_t* classes, const ByteBuffer* text) {
#define WHITE "\\t\\n\\x0b\\f\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
    static const char pattern[] =
        "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^" WHITE "\\p{L}\\p{N}]+|[" WHITE "]+(?![^" WHITE "])|[" WHITE "]+";
    int code_error;
    size_t offset, wrong = 0, words = 0;
    pcre2_code* code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code_error, &offset, NULL);
    CHECK(code, "pattern error %d at %zu", code_error, offset);
    if (!code) { return; }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    pcre2_match_data* match = pcre2_match_data_create_from_pattern(code, NULL);
    const size_t* span = pcre2_get_ovector_pointer(match);
    for (size_t at = 0; at < text->count && wrong < 3; at = span[1], words++) {
        uint32_t options = PCRE2_ANCHORED | (at ? PCRE2_NO_UTF_CHECK : 0);
        int found = pcre2_match(code, text->data, text->count, at, options, match, NULL);
        size_t end = (size_t)(pretoken_end(classes, text->data + at, text->data + text->count) - text->data);
        wrong += found <= 0 || end != span[1];
        CHECK(found > 0 && end == span[1], "word %zu at byte %zu: the pattern (%d) ends at %zu, the scan at %zu", words, at, found, span[1],
              end);
        if (found <= 0) { break; }
    }
    pcre2_match_data_free(match);
    pcre2_code_free(code);
#undef WHITE
}

static void data_pretokens_equal_pattern(void) {
    Error error;
    ByteBuffer text = {NULL, 0, 0};
    uint8_t* classes = char_classes_new(&error);
    CHECK_OK(classes != NULL, error);
    if (!classes) { return; }
    for (uint32_t seed = 1; seed <= 4; seed++) {
        data_seed(seed);
        data_random_text(&text, 50000, false);
        data_compare_with_pattern(classes, &text);
    }
    text.count = 0; // every character, alone and doubled, between letters and spaces
    for (uint32_t c = 0; c < UNICODE_COUNT; c += c < 0x3100 ? 1 : 1 + data_random(40)) {
        uint8_t out[4];
        size_t bytes = c >= 0xD800 && c < 0xE000 ? 0 : utf8_encode(c, out);
        bytes_append(&text, out, bytes);
        bytes_append(&text, c % 3 ? " " : "x", 1);
        bytes_append(&text, out, bytes);
        bytes_append(&text, out, bytes);
    }
    data_compare_with_pattern(classes, &text);
    bytes_free(&text);
    free(classes);
}

// Bytes that are not UTF-8 stand alone, and white space before them is as at the end of the text.
static void data_pretokens_of_broken_text(void) {
    static const struct {
        const char* text;
        size_t first; // length of the first pre-token
    } cases[] = {{"\xFF"
                  "ab",
                  1},
                 {"\xC3", 1},
                 {"\xC0\x80", 1},
                 {"\xE4\xB8", 1},
                 {"\xED\xA0\x80", 1},
                 {"\xF4\x90\x80\x80", 1},
                 {"ab\xFF"
                  "cd",
                  2},
                 {"  \xFF", 2},
                 {" \xFF", 1},
                 {"   x", 2},
                 {"  ", 2},
                 {" 'll", 2},
                 {"'ll x", 3},
                 {"'LL", 1},
                 {"\xC3\xA9"
                  "a1",
                  3},
                 {" \xC3\xA9", 3},
                 {"\xE1\xA0\x8E ", 3},
                 {"\xC2\xA0"
                  "x",
                  2},
                 {"\xC2\xA0\xC2\xA0x", 2},
                 {"\n x", 1},
                 {"!?'s", 3},
                 {"12ab", 2},
                 {"\xF8\x88\x80\x80\x80", 1},
                 {"\xC1\xBF", 1},
                 {"\xE0\x9F\xBF", 1},
                 {"\xE0\xA0\x80x", 4},
                 {"\xF0\x8F\xBF\xBF", 1},
                 {"\xED\xBF\xBF", 1},
                 {"\xF4\x8F\xBF\xBF!", 5}};
    Error error;
    uint8_t* classes = char_classes_new(&error);
    if (!classes) { return; }
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const uint8_t *p = (const uint8_t*)cases[i].text, *end = p + strlen(cases[i].text);
        size_t found = (size_t)(pretoken_end(classes, p, end) - p);
        CHECK(found == cases[i].first, "case %zu: expected %zu bytes, found %zu", i, cases[i].first, found);
    }
    free(classes);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Encoding.

// Cut at every place where text may be cut: the parts must have the words of the whole.
static void data_cuts_change_nothing(void) {
    DataCoder coder;
    ByteBuffer text = {NULL, 0, 0};
    if (!data_coder_open(&coder)) { return; }
    const uint8_t* classes = coder.encoder.classes;
    for (uint32_t seed = 1; seed <= 10; seed++) {
        size_t cuts = 0, wrong = 0;
        data_seed(seed);
        data_random_text(&text, 20000, true);
        const uint8_t *word = text.data, *end = word + text.count;
        for (const uint8_t *cut = word + 1; cut <= end; cut++) {
            if (cut < end && !text_splits_at(text.data, cut)) { continue; }
            for (; word < cut; word = pretoken_end(classes, word, end)) {
                wrong += pretoken_end(classes, word, end) != pretoken_end(classes, word, cut);
            }
            wrong += word != cut;
            cuts++;
        }
        CHECK(cuts > 200 && wrong == 0, "seed %u: %zu of %zu cuts change a word", seed, wrong, cuts);
    }
    bytes_free(&text);
    data_coder_close(&coder);
}

static void data_check_round_trip(DataCoder* coder, const uint8_t* text, size_t bytes) {
    TokenBuffer tokens = {NULL, 0, 0};
    ByteBuffer back = {NULL, 0, 0};
    Error error;
    encode_text(&coder->encoder, &coder->work, text, bytes, &tokens);
    CHECK_OK(tokenizer_decode(&coder->tokenizer, (const int32_t*)tokens.ids, tokens.count, &back, &error), error);
    CHECK(back.count == bytes && (bytes == 0 || memcmp(back.data, text, bytes) == 0), "%zu bytes came back as %zu", bytes, back.count);
    tokens_free(&tokens);
    bytes_free(&back);
}

static void data_round_trips(void) {
    DataCoder coder;
    if (!data_coder_open(&coder)) { return; }
    uint8_t all[65536 * 2];
    for (size_t i = 0; i < 65536; i++) { // every pair of byte values
        all[2 * i] = (uint8_t)(i >> 8);
        all[2 * i + 1] = (uint8_t)i;
    }
    data_check_round_trip(&coder, all, sizeof(all));
    for (size_t i = 0; i < 256; i++) { data_check_round_trip(&coder, all + 2 * i + 1, 1); }
    data_check_round_trip(&coder, all, 0);
    ByteBuffer text = {NULL, 0, 0};
    for (uint32_t seed = 1; seed <= 20; seed++) {
        data_seed(seed);
        data_random_text(&text, 5000, true);
        data_check_round_trip(&coder, text.data, text.count);
    }
    bytes_free(&text);
    data_coder_close(&coder);
}

static void data_encode_equals_fixture(void) {
    DataCoder coder;
    Shard shard;
    Error error;
    ByteBuffer text = {NULL, 0, 0};
    TokenBuffer tokens = {NULL, 0, 0};
    if (!data_coder_open(&coder)) { return; }
    data_load(&text, data_fixture("bpe_text.bin"));
    bool good = shard_open(&shard, data_fixture("bpe_tokens.bin"), &error);
    CHECK_OK(good, error);
    if (good) {
        int32_t* expected = (int32_t*)need(malloc((size_t)shard.tokens * 4));
        CHECK_OK(shard_read(&shard, 0, (size_t)shard.tokens, expected, coder.tokenizer.vocab_size, &error), error);
        for (int again = 0; again < 2; again++) { // the second time from the cache
            tokens.count = 0;
            encode_text(&coder.encoder, &coder.work, text.data, text.count, &tokens);
            CHECK(tokens.count == shard.tokens, "expected %zu tokens, found %zu", (size_t)shard.tokens, tokens.count);
            for (size_t i = 0; i < min_size(tokens.count, (size_t)shard.tokens); i++) {
                CHECK(tokens.ids[i] == (uint32_t)expected[i], "token %zu: expected %d, found %u", i, expected[i], tokens.ids[i]);
            }
        }
        free(expected);
        shard_close(&shard);
    }
    bytes_free(&text);
    tokens_free(&tokens);
    data_coder_close(&coder);
}

// The rule word for word: join the leftmost of the pairs with the lowest id, until none is a token.
static size_t data_naive_merge(const DataCoder* coder, const uint8_t* word, size_t bytes, uint32_t* ids) {
    size_t cuts[512], n = bytes;
    for (size_t i = 0; i <= bytes; i++) { cuts[i] = i; }
    for (;;) {
        uint32_t best = NO_TOKEN;
        size_t where = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            uint32_t id = token_map_find(&coder->encoder.map, &coder->tokenizer, word + cuts[i], cuts[i + 2] - cuts[i]);
            if (id < best) {
                best = id;
                where = i;
            }
        }
        if (best == NO_TOKEN) { break; }
        memmove(cuts + where + 1, cuts + where + 2, (n - where - 1) * sizeof(size_t));
        n--;
    }
    for (size_t i = 0; i < n; i++) {
        ids[i] = token_map_find(&coder->encoder.map, &coder->tokenizer, word + cuts[i], cuts[i + 1] - cuts[i]);
    }
    return n;
}

static void data_merge_equals_naive(void) {
    DataCoder coder;
    TokenBuffer tokens = {NULL, 0, 0};
    if (!data_coder_open(&coder)) { return; }
    data_seed(3);
    for (int round = 0; round < 3000; round++) {
        uint8_t word[64];
        uint32_t expected[64];
        size_t bytes = 1 + data_random(round % 2 ? 10 : 63);
        for (size_t i = 0; i < bytes; i++) {
            word[i] = round % 3 == 2 ? (uint8_t)data_random(256) : (uint8_t)"etaoinshrdl"[data_random(round % 3 ? 3 : 11)];
        }
        size_t count = data_naive_merge(&coder, word, bytes, expected);
        tokens.count = 0;
        encode_word(&coder.encoder, &coder.work, word, bytes, &tokens);
        bool same = tokens.count == count && memcmp(tokens.ids, expected, count * sizeof(uint32_t)) == 0;
        CHECK(same, "round %d, a word of %zu bytes: expected %zu tokens, found %zu", round, bytes, count, tokens.count);
    }
    tokens_free(&tokens);
    data_coder_close(&coder);
}

// One word, and one run of spaces, of 1 MB each: the time must not go with the square of the length.
static void data_long_words(void) {
    DataCoder coder;
    TokenBuffer tokens = {NULL, 0, 0};
    const size_t bytes = 1000000;
    if (!data_coder_open(&coder)) { return; }
    uint8_t* text = (uint8_t*)need(malloc(bytes));
    double start = seconds_now();
    for (int kind = 0; kind < 4; kind++) {
        data_seed(5);
        for (size_t i = 0; i < bytes; i++) {
            text[i] = (uint8_t)(kind == 0 ? 'e' : kind == 1 ? ' ' : kind == 2 ? "etaoin"[data_random(6)] : 0xFF);
        }
        tokens.count = 0;
        encode_text(&coder.encoder, &coder.work, text, bytes, &tokens);
        CHECK(tokens.count > 0 && tokens.count <= bytes, "%zu tokens", tokens.count);
        data_check_round_trip(&coder, text, bytes);
    }
    double seconds = seconds_now() - start;
    CHECK(seconds < 20.0, "%.1f s", seconds); // about 2; the square would be hours
    free(text);
    tokens_free(&tokens);
    data_coder_close(&coder);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Training.

static void data_count(WordCounts* counts, const char* text) {
    Error error;
    uint8_t* classes = char_classes_new(&error);
    memset(counts, 0, sizeof(*counts));
    if (classes) { word_counts_add_text(counts, classes, (const uint8_t*)text, strlen(text)); }
    free(classes);
}

// "ab" and " ab" x3, "bc" x3: by hand. Pairs: (a,b) 6, (b,c) 3, (' ',a) 3 ... -> ab first; then ties at 3: (' ',ab) has the smaller
// left id than (b,c); joined " ab"; then (b,c); then nothing occurs twice but (' ',bc) 2: (x,y) stays apart.
static void data_train_by_hand(void) {
    WordCounts counts;
    Tokenizer tokenizer;
    Error error;
    static const char* const expected[] = {"ab", " ab", "bc", " bc", END_OF_TEXT};
    data_count(&counts, "ab\nab\nab ab ab ab\nbc bc bc\nxy");
    CHECK_OK(bpe_train(&tokenizer, &counts, 300, &error), error);
    CHECK(tokenizer.vocab_size == 256 + COUNT_OF(expected), "expected 261 tokens, found %zu", tokenizer.vocab_size);
    for (size_t i = 0; i < COUNT_OF(expected) && 256 + i < tokenizer.vocab_size; i++) {
        size_t count;
        const uint8_t* token = tokenizer_token(&tokenizer, 256 + i, &count);
        CHECK(count == strlen(expected[i]) && memcmp(token, expected[i], count) == 0, "token %zu: expected \"%s\", found \"%.*s\"", 256 + i,
              expected[i], (int)count, (const char*)token);
    }
    CHECK(tokenizer.eot == tokenizer.vocab_size - 1, "%u", tokenizer.eot);
    tokenizer_free(&tokenizer);
    CHECK_FAILS(bpe_train(&tokenizer, &counts, 256, &error), error, "257");
    CHECK_FAILS(bpe_train(&tokenizer, &counts, SIZE_MAX, &error), error, "257");
    word_counts_free(&counts);
    data_count(&counts, "");
    CHECK_OK(bpe_train(&tokenizer, &counts, 300, &error), error);
    CHECK(tokenizer.vocab_size == 257, "no text: expected the bytes and the end, found %zu", tokenizer.vocab_size);
    tokenizer_free(&tokenizer);
    word_counts_free(&counts);
}

// The text of the fixture gives the vocabulary of the fixture, in whatever order its words come.
static void data_train_equals_fixture(void) {
    DataCoder coder;
    Error error;
    ByteBuffer text = {NULL, 0, 0};
    if (!data_coder_open(&coder)) { return; }
    data_load(&text, data_fixture("bpe_text.bin"));
    for (int parts = 1; parts <= 4; parts++) {
        WordCounts counts[2];
        Tokenizer tokenizer;
        size_t from = 0;
        memset(counts, 0, sizeof(counts));
        for (size_t at = 1; at <= text.count; at++) { // alternate between two tables at each cut
            if (at < text.count && (at - from < text.count / (size_t)parts || !text_splits_at(text.data, text.data + at))) { continue; }
            word_counts_add_text(&counts[at % 2], coder.encoder.classes, text.data + from, at - from);
            from = at;
        }
        word_counts_merge(&counts[1], &counts[0]);
        CHECK_OK(bpe_train(&tokenizer, &counts[1], coder.tokenizer.vocab_size, &error), error);
        bool same = tokenizer.vocab_size == coder.tokenizer.vocab_size && tokenizer.bytes.count == coder.tokenizer.bytes.count &&
                    tokenizer.eot == coder.tokenizer.eot &&
                    memcmp(tokenizer.bytes.data, coder.tokenizer.bytes.data, tokenizer.bytes.count) == 0;
        CHECK(same, "in %d parts: another vocabulary, of %zu tokens", parts, tokenizer.vocab_size);
        for (int i = 0; i < 2; i++) { word_counts_free(&counts[i]); }
        tokenizer_free(&tokenizer);
    }
    bytes_free(&text);
    data_coder_close(&coder);
}

// Hard texts: one letter, long words, all bytes. No token may be longer than 255 bytes or stand twice, and decoding must work.
static void data_train_hard_texts(void) {
    DataCoder coder;
    Error error;
    for (int kind = 0; kind < 4; kind++) {
        WordCounts counts;
        TokenMap map;
        ByteBuffer text = {NULL, 0, 0};
        memset(&counts, 0, sizeof(counts));
        data_seed(11);
        for (size_t i = 0; i < 60000; i++) {
            uint8_t byte = kind == 0   ? 'a'
                           : kind == 1 ? (uint8_t)"ab "[data_random(3)]
                           : kind == 2 ? (uint8_t)"xyz"[i % 3]
                                       : (uint8_t)data_random(256);
            bytes_append(&text, &byte, 1);
        }
        uint8_t* classes = char_classes_new(&error);
        word_counts_add_text(&counts, classes, text.data, text.count);
        CHECK_OK(bpe_train(&coder.tokenizer, &counts, 2000, &error), error);
        token_map_new(&map, 2000);
        for (uint32_t id = 0; id < coder.tokenizer.vocab_size; id++) {
            size_t count;
            const uint8_t* token = tokenizer_token(&coder.tokenizer, id, &count);
            CHECK(count >= 1 && count <= TOKENIZER_MAX_TOKEN, "kind %d: token %u has %zu bytes", kind, id, count);
            CHECK(token_map_find(&map, &coder.tokenizer, token, count) == NO_TOKEN, "kind %d: token %u stands twice", kind, id);
            token_map_add(&map, &coder.tokenizer, id);
        }
        CHECK_OK(encoder_open(&coder.encoder, &coder.tokenizer, &error), error);
        encode_work_new(&coder.work);
        data_check_round_trip(&coder, text.data, text.count);
        data_coder_close(&coder);
        free(map.slots);
        free(classes);
        bytes_free(&text);
        word_counts_free(&counts);
    }
}
