// test_data.h - tests of the data path: tokenizer files, checksum files, shards and the loader; the encoder's are in test_tokenizer.h,
// those of text input and evaluation sets in test_text.h. All rows stand at the end of this file.
#pragma once
#include "../dataloader/loader.h"
#include "test_text.h"
#include "test_tokenizer.h"

// ---------------------------------------------------------------------------------------------------------------------------------
// Tokenizer files.

static bool data_read_tokenizer(const char* path, Error* error) {
    Tokenizer tokenizer;
    bool good = tokenizer_open(&tokenizer, path, error);
    if (good) { tokenizer_free(&tokenizer); }
    return good;
}

static void data_tokenizer_damaged(void) {
    DataCoder coder;
    Error error;
    if (!data_coder_open(&coder)) { return; }
    CHECK_OK(tokenizer_write(&coder.tokenizer, data_path("tokenizer.bin"), &error), error);
    data_seed(21);
    data_damage(data_read_tokenizer, data_path("tokenizer.bin"), false);
    uint32_t header[256] = {TOKENIZER_MAGIC, 2, 0xFFFFFFFFu, 5}; // hostile counts must be refused before memory is asked for
    data_store(data_path("hostile"), header, sizeof(header));
    data_must_fail(data_read_tokenizer, data_path("hostile"), "a huge vocabulary", header[2]);
    data_coder_close(&coder);
}

static bool data_same_tokens(const Tokenizer* a, const Tokenizer* b) {
    return a->vocab_size == b->vocab_size && a->eot == b->eot && a->bytes.count == b->bytes.count &&
           memcmp(a->bytes.data, b->bytes.data, a->bytes.count) == 0 &&
           memcmp(a->start, b->start, (a->vocab_size + 1) * sizeof(size_t)) == 0;
}

// The same vocabulary through llm.c's file, as a rank file, and a small vocab.bpe with the ids known by hand.
static void data_tokenizer_formats(void) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    DataCoder coder;
    Tokenizer other;
    Error error;
    if (!data_coder_open(&coder)) { return; }
    CHECK_OK(tokenizer_write(&coder.tokenizer, data_path("t.bin"), &error), error);
    CHECK_OK(tokenizer_open(&other, data_path("t.bin"), &error), error);
    CHECK(data_same_tokens(&coder.tokenizer, &other), "llm.c's file came back different");
    tokenizer_free(&other);
    ByteBuffer ranks = {NULL, 0, 0};
    for (size_t id = 0; id + 1 < coder.tokenizer.vocab_size; id++) {
        char line[400];
        size_t count, n = 0;
        const uint8_t* t = tokenizer_token(&coder.tokenizer, id, &count);
        for (size_t i = 0; i < count; i += 3) {
            uint32_t bits = (uint32_t)t[i] << 16 | (i + 1 < count ? t[i + 1] : 0u) << 8 | (i + 2 < count ? t[i + 2] : 0u);
            for (int k = 0; k < 4; k++) { line[n++] = i + (size_t)(k ? k - 1 : 0) < count ? digits[bits >> (18 - 6 * k) & 63] : '='; }
        }
        n += (size_t)snprintf(line + n, sizeof(line) - n, " %zu\n", id);
        bytes_append(&ranks, line, n);
    }
    data_store(data_path("ranks"), ranks.data, ranks.count);
    CHECK_OK(tokenizer_open(&other, data_path("ranks"), &error), error);
    CHECK(data_same_tokens(&coder.tokenizer, &other), "the rank file gives %zu tokens", other.vocab_size);
    tokenizer_free(&other);
    data_store(data_path("ranks"), ranks.data, ranks.count / 2 - 3);
    CHECK_FAILS(tokenizer_open(&other, data_path("ranks"), &error), error, "rank");
    const char* merges = "#version: 0.2\n\xC4\xA0 t\nh e\n\xC4\xA0t he\n";
    data_store(data_path("vocab.bpe"), merges, strlen(merges));
    bool good = tokenizer_open(&other, data_path("vocab.bpe"), &error);
    CHECK_OK(good, error);
    if (good) { // GPT-2 has '!' 0, 'a' 64, NUL 188, space 220
        size_t count;
        CHECK(other.vocab_size == 260 && other.eot == 259, "%zu tokens", other.vocab_size);
        CHECK(*tokenizer_token(&other, 0, &count) == '!' && *tokenizer_token(&other, 64, &count) == 'a', "printable bytes come first");
        CHECK(*tokenizer_token(&other, 188, &count) == 0 && *tokenizer_token(&other, 220, &count) == ' ', "then the others");
        CHECK(memcmp(tokenizer_token(&other, 258, &count), " the", 4) == 0 && count == 4, "the last merge is \" the\"");
        tokenizer_free(&other);
    }
    bytes_free(&ranks);
    data_coder_close(&coder);
}

// llm.c's version 1: 50257 tokens, the end of a text is 50256 though the header does not say so.
static void data_tokenizer_version_1(void) {
    Tokenizer tokenizer;
    Error error;
    uint32_t header[256] = {TOKENIZER_MAGIC, 1, 50257};
    ByteBuffer data = {NULL, 0, 0};
    bytes_append(&data, header, sizeof(header));
    for (uint32_t id = 0; id < 50257; id++) {
        const uint8_t token[4] = {3, (uint8_t)id, (uint8_t)(id >> 8), 'x'};
        bytes_append(&data, token, 4);
    }
    data_store(data_path("v1.bin"), data.data, data.count);
    bool good = tokenizer_open(&tokenizer, data_path("v1.bin"), &error);
    CHECK_OK(good, error);
    if (good) {
        Encoder encoder;
        int32_t ids[3] = {50256, 50257, -1};
        ByteBuffer text = {NULL, 0, 0};
        CHECK(tokenizer.eot == 50256, "%u", tokenizer.eot);
        CHECK_FAILS(encoder_open(&encoder, &tokenizer, &error), error, "byte 0x00");
        CHECK_OK(tokenizer_decode(&tokenizer, ids, 1, &text, &error), error);
        CHECK_FAILS(tokenizer_decode(&tokenizer, ids + 1, 1, &text, &error), error, "50257");
        CHECK_FAILS(tokenizer_decode(&tokenizer, ids + 2, 1, &text, &error), error, "-1");
        bytes_free(&text);
        tokenizer_free(&tokenizer);
    }
    bytes_free(&data);
}

// A file and its checksum line, and what is said when the two do not belong together.
static void data_sidecar(void) {
    static const char* const wrong[] = {"crc32c e3069283 bytes 8\n", "crc32c e3069284 bytes 9\n", "crc32c e3069283 bytes 9", "",
                                        "crc32c e3069283 bytes -9\n", "crc32c E3069283 bytes 9\n", "e3069283\n"};
    ByteBuffer line = {NULL, 0, 0};
    FileWriter writer;
    FileReader file;
    Error error;
    CHECK_OK(file_create(&writer, data_path("c"), &error) && file_write(&writer, "123456789", 9, &error), error);
    CHECK_OK(file_commit_checked(&writer, &error), error);
    data_load(&line, data_path("c.crc32c")); // the check value of CRC-32C, from its catalogue entry
    CHECK(line.count == 24 && memcmp(line.data, "crc32c e3069283 bytes 9\n", 24) == 0, "%.*s", (int)line.count, (char*)line.data);
    CHECK_OK(file_open(&file, data_path("c"), &error), error);
    CHECK_OK(sidecar_check(&file, true, &error), error);
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        data_store(data_path("c.crc32c"), wrong[i], strlen(wrong[i]));
        CHECK_FAILS(sidecar_check(&file, true, &error), error, "/c");
        bool size_alone = sidecar_check(&file, false, &error);
        CHECK(size_alone == (i == 1), "line %zu without a look at the contents: %d", i, size_alone);
    }
    unlink(data_path("c.crc32c"));
    CHECK_OK(sidecar_check(&file, true, &error), error);
    file_close(&file);
    bytes_free(&line);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Shards.

static bool data_read_shard(const char* path, Error* error) {
    Shard shard;
    if (!shard_open(&shard, path, error)) { return false; }
    int32_t* tokens = (int32_t*)need(malloc((size_t)shard.tokens * 4 + 4));
    bool good = shard_verify(&shard, error) && shard_read(&shard, 0, (size_t)shard.tokens, tokens, 200000, error);
    free(tokens);
    shard_close(&shard);
    return good;
}

static void data_shard_bytes(void) {
    static const uint8_t narrow[] = {0x88, 0xD8, 0x34, 0x01, 1, 0, 0, 0, 3, 0, 0, 0},
                         wide[] = {0xA1, 0xD9, 0x34, 0x01, 7, 0, 0, 0, 2, 0, 0, 0};
    const uint16_t a[3] = {1, 50256, 65535};
    const uint32_t b[2] = {70000, 128255};
    Error error;
    ByteBuffer data = {NULL, 0, 0};
    Shard shard;
    int32_t tokens[3];
    CHECK_OK(shard_write(data_path("a.bin"), a, 3, 2, &error), error);
    data_load(&data, data_path("a.bin"));
    CHECK(data.count == 1030 && memcmp(data.data, narrow, sizeof(narrow)) == 0 && memcmp(data.data + 1024, a, 6) == 0, "%zu bytes",
          data.count);
    CHECK_OK(shard_write(data_path("b.bin"), b, 2, 4, &error), error);
    data_load(&data, data_path("b.bin"));
    CHECK(data.count == 1032 && memcmp(data.data, wide, sizeof(wide)) == 0 && memcmp(data.data + 1024, b, 8) == 0, "%zu bytes", data.count);
    CHECK_OK(shard_open(&shard, data_path("b.bin"), &error), error);
    CHECK_OK(shard_read(&shard, 0, 2, tokens, 128256, &error), error);
    CHECK(tokens[0] == 70000 && tokens[1] == 128255, "%d %d", tokens[0], tokens[1]);
    CHECK_FAILS(shard_read(&shard, 0, 2, tokens, 128255, &error), error, "token 1 is 128255");
    CHECK_FAILS(shard_read(&shard, 1, 2, tokens, 128256, &error), error, "2 tokens");
    CHECK_FAILS(shard_read(&shard, UINT64_MAX, 2, tokens, 128256, &error), error, "2 tokens");
    shard_close(&shard);
    CHECK_FAILS(shard_write(data_path("c.bin"), a, (uint64_t)1 << 31, 2, &error), error, "2^31");
    bytes_free(&data);
    data_seed(22);
    data_damage(data_read_shard, data_path("a.bin"), false);
    data_damage(data_read_shard, data_path("b.bin"), false);
}

// The writer cuts at shard_tokens, and takes away what a longer run left.
static void data_shard_writer(void) {
    ShardWriter writer;
    Error error;
    uint32_t ids[1000];
    for (uint32_t i = 0; i < 1000; i++) { ids[i] = i; }
    for (int run = 0; run < 2; run++) {
        uint64_t at = 0, total = run ? 250 : 1000;
        CHECK_OK(shard_writer_open(&writer, data_path("w"), "train", 1000, 300, &error), error);
        for (size_t n = 1; at < total; n = n * 2 + 1) {
            n = min_size(n, (size_t)(total - at));
            CHECK_OK(shard_writer_append(&writer, ids + at, n, &error), error);
            at += n;
        }
        CHECK_OK(shard_writer_close(&writer, &error), error);
        CHECK(writer.total == total && writer.shards == (total + 299) / 300, "%u shards", writer.shards);
    }
    Shard shard;
    int32_t tokens[250];
    CHECK_OK(shard_open(&shard, data_path("w_train_000000.bin"), &error), error);
    CHECK(shard.tokens == 250 && shard_read(&shard, 0, 250, tokens, 1000, &error) && tokens[249] == 249, "%zu", (size_t)shard.tokens);
    shard_close(&shard);
    for (int i = 1; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof(name), "w_train_%06d.bin", i);
        CHECK(access(data_path(name), F_OK) != 0, "%s of the longer run is still there", name);
        snprintf(name, sizeof(name), "w_train_%06d.bin.crc32c", i);
        CHECK(access(data_path(name), F_OK) != 0, "%s of the longer run is still there", name);
    }
    CHECK_FAILS(shard_writer_open(&writer, data_path("w"), "train", 1000, 0, &error), error, "shards of 0");
    CHECK_FAILS(shard_writer_open(&writer, data_path("w"), "train", 1000, (uint64_t)1 << 31, &error), error, "2^31");
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The loader.

static void data_permutation(void) {
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 7, 10, 1000, 4096, 65537};
    for (size_t s = 0; s < COUNT_OF(sizes); s++) {
        uint64_t n = sizes[s], same = 0, fixed = 0;
        uint8_t* seen = (uint8_t*)need(calloc((size_t)n, 1));
        for (uint64_t epoch = 0; epoch < 2; epoch++) {
            for (uint64_t k = 0; k < n; k++) {
                uint64_t place = shuffle_index(42, epoch, k, n);
                if (place < n) { seen[place]++; }
                fixed += place == k;
                same += epoch == 0 && place == shuffle_index(42, 1, k, n);
                same += epoch == 0 && place == shuffle_index(43, 0, k, n);
            }
        }
        for (uint64_t k = 0; k < n; k++) {
            CHECK(seen[k] == 2, "n = %zu: place %zu comes %d times in two epochs", (size_t)n, (size_t)k, seen[k]);
        }
        // a random permutation has one fixed place on average, and shares one with another; 12 is far out for either
        CHECK(n < 1000 || (fixed < 24 && same < 24), "n = %zu: %zu places are fixed, %zu shared", (size_t)n, (size_t)fixed, (size_t)same);
        free(seen);
    }
    int orders[6] = {0}; // all six orders of three come up
    for (uint64_t epoch = 0; epoch < 600; epoch++) {
        uint64_t a = shuffle_index(1, epoch, 0, 3), b = shuffle_index(1, epoch, 1, 3);
        orders[a * 2 + (b > a ? b - 1 : b)]++;
    }
    for (int i = 0; i < 6; i++) { CHECK(orders[i] > 60 && orders[i] < 140, "order %d of three: %d of 600", i, orders[i]); }
    CHECK(shuffle_index(1, 0, 5, (uint64_t)1 << 40) < (uint64_t)1 << 40, "a huge epoch");
}

// Shards x_0 .. of the given sizes, tokens counting up from 0 over all of them; every second one is wide.
static void data_make_shards(const char* name, const size_t* sizes, size_t count) {
    uint32_t next = 0;
    for (size_t s = 0; s < count; s++) {
        uint32_t wide[512];
        uint16_t narrow[512];
        char file[64];
        Error error;
        snprintf(file, sizeof(file), "%s_%zu.bin", name, s);
        for (size_t i = 0; i < sizes[s]; i++) {
            wide[i] = next;
            narrow[i] = (uint16_t)next++;
        }
        CHECK_OK(s % 2 ? shard_write(data_path(file), wide, sizes[s], 4, &error)
                       : shard_write(data_path(file), narrow, sizes[s], 2, &error),
                 error);
    }
}

static void data_loader_straddles(void) {
    static const size_t sizes[] = {10, 1, 0, 37, 2, 300, 51}; // 401 tokens
    static const int lengths[] = {1, 3, 8, 64, 100, 400};
    Error error;
    data_make_shards("x", sizes, COUNT_OF(sizes));
    for (size_t l = 0; l < COUNT_OF(lengths); l++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            Loader loader;
            int T = lengths[l];
            bool good = loader_open(&loader, data_path("x_*"), T, 5, shuffle, 401, &error); // the pattern matches checksum files too
            CHECK_OK(good, error);
            if (!good) { continue; }
            CHECK(loader.sequences == 400 / (uint64_t)T, "%zu sequences of %d", (size_t)loader.sequences, T);
            for (uint64_t epoch = 0; epoch < 3; epoch++) {
                uint8_t seen[400] = {0};
                for (uint64_t k = 0; k < loader.sequences; k++) {
                    int32_t tokens[401];
                    CHECK_OK(loader_sequence(&loader, epoch * loader.sequences + k, tokens, &error), error);
                    bool counts_up = tokens[0] % T == 0;
                    for (int i = 0; i < T; i++) { counts_up = counts_up && tokens[i + 1] == tokens[i] + 1; }
                    CHECK(counts_up, "T = %d, sequence %zu starts with %d and does not count up", T, (size_t)k, tokens[0]);
                    CHECK(shuffle || tokens[0] == (int32_t)k * T, "T = %d: sequence %zu starts with %d", T, (size_t)k, tokens[0]);
                    if (counts_up) { seen[tokens[0] / T]++; }
                }
                for (uint64_t k = 0; k < loader.sequences; k++) {
                    CHECK(seen[k] == 1, "T = %d: sequence %zu came %d times", T, (size_t)k, seen[k]);
                }
            }
            loader_close(&loader);
        }
    }
}

// A batch is whatever indices it asks for: any order, any grouping, and again after reopening.
static void data_loader_is_pure(void) {
    static const size_t sizes[] = {200, 100};
    Error error;
    Loader a, b;
    data_make_shards("p", sizes, COUNT_OF(sizes));
    bool good =
        loader_open(&a, data_path("p_*.bin"), 7, 9, true, 300, &error) && loader_open(&b, data_path("p_*.bin"), 7, 9, true, 300, &error);
    CHECK_OK(good, error);
    if (!good) { return; }
    size_t differ = 0;
    for (uint64_t i = 0; i < 200; i++) {
        int32_t one[8], two[8], other[8];
        uint64_t index = (i * 77 + 13) % 200; // backwards and forwards, over epochs
        CHECK_OK(loader_sequence(&a, index, one, &error), error);
        b.seed = 10;
        CHECK_OK(loader_sequence(&b, index, other, &error), error);
        b.seed = 9;
        CHECK_OK(loader_sequence(&b, index, two, &error), error);
        CHECK(memcmp(one, two, sizeof(one)) == 0, "sequence %zu depends on what was read before", (size_t)index);
        differ += one[0] != other[0];
    }
    CHECK(differ > 150, "another seed gives another order: only %zu of 200 differ", differ);
    loader_close(&a);
    loader_close(&b);
}

static void data_loader_refusals(void) {
    static const size_t sizes[] = {20, 13};
    Error error;
    Loader loader;
    int32_t tokens[33];
    data_make_shards("r", sizes, COUNT_OF(sizes));
    CHECK_FAILS(loader_open(&loader, data_path("nothing_*.bin"), 8, 0, true, 100, &error), error, "tokenize");
    CHECK_FAILS(loader_open(&loader, data_path("r_*.bin"), 33, 0, true, 100, &error), error,
                "33 tokens in 2 files, a sequence needs 33 + 1");
    CHECK_FAILS(loader_open(&loader, data_path("r_*.bin"), 0, 0, true, 100, &error), error, "at least 1");
    CHECK_FAILS(loader_open(&loader, data_path("r_*.bin"), INT_MAX, 0, true, 100, &error), error, "a sequence needs");
    CHECK_FAILS(loader_open(&loader, test_folder(), 8, 0, true, 100, &error), error, "not a regular file");
    CHECK_OK(loader_open(&loader, data_path("r_0.bin"), 19, 0, true, 100, &error), error); // a plain file, exactly one sequence
    CHECK(loader.sequences == 1 && loader_sequence(&loader, 12345, tokens, &error) && tokens[19] == 19, "%d", tokens[19]);
    loader_close(&loader);
    CHECK(rename(data_path("r_0.bin"), data_path("r[0].bin")) == 0, "%s", strerror(errno)); // a name that looks like a pattern
    CHECK_OK(loader_open(&loader, data_path("r[0].bin"), 19, 0, true, 100, &error), error);
    loader_close(&loader);
    CHECK(rename(data_path("r[0].bin"), data_path("r_0.bin")) == 0, "%s", strerror(errno));
    CHECK_OK(loader_open(&loader, data_path("r_*.bin"), 16, 0, false, 30, &error), error);
    CHECK_OK(loader_sequence(&loader, 0, tokens, &error), error);
    CHECK_FAILS(loader_sequence(&loader, 1, tokens, &error), error, "r_1.bin: token 10 is 30, but the vocabulary has 30");
    CHECK(truncate(data_path("r_0.bin"), 1030) == 0, "truncate"); // cut off under our hands
    CHECK_FAILS(loader_sequence(&loader, 0, tokens, &error), error, "ends too early");
    loader_close(&loader);
    CHECK_FAILS(loader_open(&loader, data_path("r_*.bin"), 8, 0, true, 100, &error), error, "r_0.bin");
    const char* wrong = "crc32c 0123abcd bytes 1024\nx";
    data_make_shards("r", sizes, COUNT_OF(sizes));
    data_store(data_path("r_1.bin.crc32c"), wrong, strlen(wrong));
    CHECK_FAILS(loader_open(&loader, data_path("r_*.bin"), 8, 0, true, 100, &error), error, "r_1.bin.crc32c");
}

// More than 2^31 bytes: a sparse file of 1.2 billion zero tokens with a mark near its end.
static void data_loader_large(void) {
    const uint64_t count = 1200000000;
    int32_t header[256] = {SHARD_MAGIC_16, 1, (int32_t)count}, tokens[1025];
    const uint16_t mark = 777;
    Error error;
    Loader loader;
    data_store(data_path("large.bin"), header, sizeof(header));
    int fd = open(data_path("large.bin"), O_WRONLY);
    bool made = fd >= 0 && pwrite(fd, &mark, 2, (off_t)(1024 + 2 * (count - 1))) == 2;
    if (fd >= 0) { close(fd); }
    CHECK(made, "a sparse file: %s", strerror(errno));
    bool good = loader_open(&loader, data_path("large.bin"), 1024, 0, false, 1000, &error);
    CHECK_OK(good, error);
    if (good) {
        CHECK(loader.sequences == (count - 1) / 1024, "%zu", (size_t)loader.sequences);
        CHECK_OK(loader_sequence(&loader, loader.sequences - 1, tokens, &error), error);
        Shard* shard = &loader.shards[0];
        CHECK_OK(shard_read(shard, count - 2, 2, tokens, 1000, &error), error);
        CHECK(tokens[0] == 0 && tokens[1] == 777, "%d %d", tokens[0], tokens[1]);
        loader_close(&loader);
    }
    unlink(data_path("large.bin"));
}

// ---------------------------------------------------------------------------------------------------------------------------------
// All rows.

static const TestRow data_tests[] = {
    {"pretokenize: equals GPT-2's pattern run by PCRE2", data_pretokens_equal_pattern},
    {"pretokenize: broken UTF-8 and known cases", data_pretokens_of_broken_text},
    {"pretokenize: text cut where it may be has the same words", data_cuts_change_nothing},
    {"bpe: ids equal tiktoken's on the fixture", data_encode_equals_fixture},
    {"bpe: merging equals the rule word for word", data_merge_equals_naive},
    {"bpe: every byte survives the round trip", data_round_trips},
    {"bpe: words of 1 MB do not hang", data_long_words},
    {"bpe: training equals the example by hand", data_train_by_hand},
    {"bpe: training gives the fixture's vocabulary, in any order", data_train_equals_fixture},
    {"bpe: training on hard texts", data_train_hard_texts},
    {"tokenizer: llm.c's file, rank file and vocab.bpe", data_tokenizer_formats},
    {"tokenizer: llm.c's version 1", data_tokenizer_version_1},
    {"tokenizer: damaged files", data_tokenizer_damaged},
    {"sidecar: a file and its checksum line", data_sidecar},
    {"shards: bytes on disk, damaged files", data_shard_bytes},
    {"shards: cut at the size asked for, old ones removed", data_shard_writer},
    {"loader: every place once an epoch, in another order", data_permutation},
    {"loader: sequences straddle unequal shards", data_loader_straddles},
    {"loader: a pure function of seed and index", data_loader_is_pure},
    {"loader: refusals", data_loader_refusals},
    {"loader: a shard of more than 2^31 bytes", data_loader_large},
    {"text: documents of plain files, blocks of any size", data_text_documents},
    {"text: JSONL, good and malformed", data_text_jsonl},
    {"text: the share for validation", data_text_validation},
    {"tokenize: a whole run, and the same with other threads", data_tokenize_whole},
    {"tokenize: long documents, nothing learnt from validation text", data_tokenize_long},
    {"tokenize: refusals", data_tokenize_refusals},
    {"hellaswag: write, read, damaged files", data_hellaswag},
    {"hellaswag: one example word for word", data_hellaswag_words},
};
