// test_text.h - tests of text input, of the command tokenize and of evaluation sets; the rows are listed in test_data.h.
#pragma once
#include "../dataloader/hellaswag.h"
#include "../dataloader/loader.h"
#include "test_data_helpers.h"

// ---------------------------------------------------------------------------------------------------------------------------------
// Text input.

// Reads a text file and joins its documents with '|' between, '#' before those for validation; cut-up documents come together again.
static void data_documents(ByteBuffer* out, const char* name, const TextConfig* config, Error* error) {
    TextReader reader;
    const char* paths[1] = {data_path(name)};
    TextConfig with_path = *config;
    with_path.paths = paths;
    with_path.path_count = 1;
    out->count = 0;
    error->text[0] = 0;
    text_open(&reader, &with_path);
    while (text_next(&reader, error) && reader.piece_count > 0) {
        for (size_t i = 0; i < reader.piece_count; i++) {
            const TextPiece* piece = &reader.pieces[i];
            if (piece->starts) { bytes_append(out, piece->validation ? "#" : "|", 1); }
            bytes_append(out, reader.text.data + piece->begin, piece->bytes);
        }
    }
    text_close(&reader);
    bytes_append(out, "", 1); // a C string
}

static void data_text_documents(void) {
    static const struct {
        const char *separator, *text, *expected;
    } cases[] = {
        {NULL, "one two\n\nthree\n", "|one two\n\nthree\n"},
        {NULL, "", ""},
        {NULL, "\n", "|\n"},
        {"blank", "one two\n\nthree\nfour\n\n\n\nfive", "|one two|three\nfour|five"},
        {"blank", "\n\none\r\n\r\ntwo\r\n", "|one|two"},
        {"blank", "\n\n\n", ""},
        {"---", "one\n--- \n---\ntwo ---\n---\n---\nthree\n---", "|one\n--- |two ---|three"},
        {"---", "---\none", "|one"},
        {END_OF_TEXT, "a <|endoftext|> b\n<|endoftext|>\n\n  c\n", "|a <|endoftext|> b|  c"},
        {"a b", "x\na b\ny\na b", "|x|y"},
    };
    Error error;
    ByteBuffer out = {NULL, 0, 0};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        data_store(data_path("text.txt"), cases[c].text, strlen(cases[c].text));
        for (size_t block = 1; block < 70; block += 1 + block / 8) { // borders of blocks anywhere
            TextConfig config = {NULL, 0, TEXT_AUTO, cases[c].separator, NULL, 0.0, block};
            data_documents(&out, "text.txt", &config, &error);
            CHECK(error.text[0] == 0 && strcmp((char*)out.data, cases[c].expected) == 0, "case %zu, blocks of %zu: \"%s\" %s", c, block,
                  (char*)out.data, error.text);
        }
    }
    bytes_free(&out);
}

static void data_text_jsonl(void) {
    static const char good[] =
        "\xEF\xBB\xBF{\"id\": [1, {\"text\": \"no\"}], \"text\": \"a \\\"b\\\\\\/\\n\\u00e9\\ud83d\\ude00\", \"n\": -1.5e3}\r\n\n"
        "  {\"text\":\"\\ud83dx\\u0041\"}  \n{\"text\": \"\"}\n{\"text\":\"tab\tand \xFF\",\"text\":\"second\"}";
    static const struct {
        const char *line, *message;
    } bad[] = {
        {"{\"text\": \"open", ":2: malformed JSON"},
        {"{\"text\": \"x\"", ":2: malformed JSON"},
        {"{\"text\": \"x\"} y", ":2: malformed JSON"},
        {"{\"text\": \"\\x\"}", ":2: malformed JSON"},
        {"{\"text\": \"\\u12g4\"}", ":2: malformed"},
        {"[\"text\"]", ":2: malformed JSON"},
        {"{\"text\" \"x\"}", ":2: malformed JSON"},
        {"{\"text\": 5}", ":2: no string field"},
        {"{\"body\": \"x\"}", ":2: no string field \"text\""},
        {"{\"a\": [[[\"text\": \"x\"}", ":2: malformed"},
        {"{\"text\": }", ":2: malformed JSON"},
        {"{,}", ":2: malformed JSON"},
        {"{\"text\": \"x\",}", ":2: malformed JSON"},
        {"nonsense", ":2: malformed JSON"},
        {"{\"text\": \"\\", ":2: malformed JSON"},
        {"{\"text\": \"\\u", ":2: malformed JSON"},
        {"{\"text\"", ":2: malformed JSON"},
        {"{", ":2: malformed JSON"},
    };
    Error error;
    ByteBuffer out = {NULL, 0, 0};
    data_store(data_path("t.jsonl"), good, sizeof(good) - 1);
    for (size_t block = 1; block < 300; block += 7) {
        TextConfig config = {NULL, 0, TEXT_AUTO, NULL, NULL, 0.0, block};
        data_documents(&out, "t.jsonl", &config, &error);
        CHECK(error.text[0] == 0 && strcmp((char*)out.data, "|a \"b\\/\n\xC3\xA9\xF0\x9F\x98\x80|\xEF\xBF\xBDxA|tab\tand \xFF") == 0,
              "blocks of %zu: \"%s\" %s", block, (char*)out.data, error.text);
    }
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        char text[256];
        TextConfig config = {NULL, 0, TEXT_JSONL, NULL, NULL, 0.0, 0};
        int bytes = snprintf(text, sizeof(text), "{\"text\": \"x\"}\n%s\n{\"text\": \"y\"}\n", bad[i].line);
        data_store(data_path("bad.txt"), text, (size_t)bytes);
        data_documents(&out, "bad.txt", &config, &error);
        CHECK(strstr(error.text, bad[i].message), "line %zu: expected \"%s\", found \"%s\"", i, bad[i].message, error.text);
    }
    char* deep = (char*)need(malloc(1000000)); // a million brackets must not overflow a stack
    memset(deep, '[', 1000000);
    memcpy(deep, "{\"a\":", 5);
    TextConfig config = {NULL, 0, TEXT_JSONL, NULL, NULL, 0.0, 0};
    data_store(data_path("deep.txt"), deep, 1000000);
    data_documents(&out, "deep.txt", &config, &error);
    CHECK(strstr(error.text, "malformed JSON"), "%s", error.text);
    free(deep);
    bytes_free(&out);
}

static void data_text_validation(void) {
    Error error;
    ByteBuffer text = {NULL, 0, 0}, out = {NULL, 0, 0};
    for (int i = 0; i < 200; i++) {
        char line[64];
        bytes_append(&text, line, (size_t)snprintf(line, sizeof(line), "{\"text\": \"document %d \"}\n", i));
    }
    data_store(data_path("v.jsonl"), text.data, text.count);
    static const double fractions[] = {0.0, 0.005, 0.1, 0.5, 0.33};
    for (size_t f = 0; f < COUNT_OF(fractions); f++) {
        TextConfig config = {NULL, 0, TEXT_AUTO, NULL, NULL, fractions[f], 100};
        data_documents(&out, "v.jsonl", &config, &error);
        size_t validation = 0, expected = (size_t)(200 * fractions[f] + 0.5);
        for (size_t i = 0; i < out.count; i++) { validation += out.data[i] == '#'; }
        CHECK(validation == expected, "%g of 200 documents: expected %zu, found %zu", fractions[f], expected, validation);
    }
    text.count = 0;
    for (int i = 0; i < 200; i++) { bytes_append(&text, "word ", 5); } // an undivided file gives its tail
    data_store(data_path("v.txt"), text.data, text.count);
    for (size_t block = 1; block < 2000; block = block * 2 + 1) {
        TextConfig config = {NULL, 0, TEXT_AUTO, NULL, NULL, 0.25, block};
        data_documents(&out, "v.txt", &config, &error);
        const char* tail = strchr((char*)out.data, '#');
        CHECK(tail && tail - (char*)out.data == 755 && out.count == 1003 && out.data[0] == '|', "blocks of %zu: the tail starts at %td",
              block, tail ? tail - (char*)out.data : -1);
    }
    bytes_free(&text);
    bytes_free(&out);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The command tokenize.

static TokenizeConfig data_tokenize_config(const char* const* inputs, size_t count, const char* prefix) {
    TokenizeConfig config;
    memset(&config, 0, sizeof(config));
    config.inputs = inputs;
    config.input_count = count;
    config.prefix = prefix;
    config.vocab_size = 400;
    return config;
}

// Runs with its report sent to nowhere.
static bool data_tokenize_quietly(const TokenizeConfig* config, Error* error) {
    fflush(stdout);
    int out = dup(1), err = dup(2), nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 1);
    dup2(nowhere, 2);
    bool good = tokenize_run(config, error);
    fflush(stdout);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    close(nowhere);
    return good;
}

// All shards of a split as text, '|' for each end of text.
static void data_decode_shards(ByteBuffer* text, const char* prefix, const char* split) {
    char name[128];
    Tokenizer tokenizer;
    Error error;
    Loader loader;
    snprintf(name, sizeof(name), "%s_tokenizer.bin", prefix);
    text->count = 0;
    bool good = tokenizer_open(&tokenizer, data_path(name), &error);
    CHECK_OK(good, error);
    if (!good) { return; }
    snprintf(name, sizeof(name), "%s_%s_*.bin", prefix, split);
    good = loader_open(&loader, data_path(name), 1, 0, false, tokenizer.vocab_size, &error);
    CHECK_OK(good, error);
    for (uint64_t i = 0; good && i <= loader.sequences; i++) {
        int32_t pair[2];
        good = loader_sequence(&loader, i < loader.sequences ? i : i - 1, pair, &error);
        int32_t token = pair[i == loader.sequences];
        CHECK_OK(good, error);
        if (token == (int32_t)tokenizer.eot) {
            bytes_append(text, "|", 1);
        } else {
            CHECK_OK(tokenizer_decode(&tokenizer, &token, 1, text, &error), error);
        }
    }
    bytes_append(text, "", 1);
    loader_close(&loader);
    tokenizer_free(&tokenizer);
}

static void data_tokenize_whole(void) {
    Error error;
    ByteBuffer text = {NULL, 0, 0}, first = {NULL, 0, 0}, again = {NULL, 0, 0};
    const char* lines =
        "{\"text\":\"one fish two fish\"}\n{\"text\":\"red fish\"}\n{\"text\":\"blue fish, old fish\"}\n{\"text\":\"new fish\"}\n";
    data_store(data_path("in.jsonl"), lines, strlen(lines));
    const char* inputs[2] = {data_path("in.jsonl"), data_path("in.jsonl")};
    TokenizeConfig config = data_tokenize_config(inputs, 2, data_path("tk"));
    config.val_fraction = 0.25;
    config.shard_tokens = 7;
    CHECK_OK(data_tokenize_quietly(&config, &error), error);
    data_decode_shards(&text, "tk", "train");
    CHECK(strcmp((char*)text.data, "|one fish two fish|blue fish, old fish|new fish|one fish two fish|blue fish, old fish|new fish") == 0,
          "%s", (char*)text.data);
    data_decode_shards(&text, "tk", "val");
    CHECK(strcmp((char*)text.data, "|red fish|red fish") == 0, "%s", (char*)text.data);

    // a larger text: the same bytes whatever the threads and the blocks
    const char* large[1] = {data_fixture("bpe_text.bin")};
    for (int run = 0; run < 3; run++) {
        TokenizeConfig more = data_tokenize_config(large, 1, data_path("tl"));
        more.format = TEXT_PLAIN;
        more.val_fraction = 0.1;
        more.threads = 1 + run;
        more.block = run == 2 ? 1000 : 0;
        CHECK_OK(data_tokenize_quietly(&more, &error), error);
        data_load(run ? &again : &first, data_path("tl_train_000000.bin"));
        CHECK(run == 0 || (first.count == again.count && memcmp(first.data, again.data, first.count) == 0), "run %d gives other tokens",
              run);
        data_load(run ? &again : &text, data_path("tl_tokenizer.bin"));
        CHECK(run == 0 || (text.count == again.count && memcmp(text.data, again.data, text.count) == 0), "run %d gives another vocabulary",
              run);
    }
    bytes_free(&text);
    bytes_free(&first);
    bytes_free(&again);
}

// A document of several jobs has one end of text before it, and words that only its tail has make no tokens.
static void data_tokenize_long(void) {
    Error error;
    Tokenizer tokenizer;
    ByteBuffer text = {NULL, 0, 0}, back = {NULL, 0, 0};
    for (int i = 0; i < 80000; i++) { bytes_append(&text, i < 72010 ? "some words " : "qqqq zz qq ", 11); }
    data_store(data_path("long.txt"), text.data, text.count);
    const char* inputs[1] = {data_path("long.txt")};
    TokenizeConfig config = data_tokenize_config(inputs, 1, data_path("lg"));
    config.val_fraction = 0.05;
    config.threads = 2;
    CHECK_OK(data_tokenize_quietly(&config, &error), error);
    for (int split = 0; split < 2; split++) {
        size_t cut = text.count / 20 * 19, from = split ? cut : 0, bytes = split ? text.count - cut : cut;
        while (split == 0 && text.data[bytes] != ' ') { bytes++; }
        while (split == 1 && text.data[from] != ' ') { from++, bytes--; }
        data_decode_shards(&back, "lg", split ? "val" : "train");
        bool same = back.count == bytes + 2 && back.data[0] == '|' && memcmp(back.data + 1, text.data + from, bytes) == 0;
        CHECK(same, "split %d: %zu bytes came back as %zu", split, bytes + 2, back.count);
    }
    config.val_fraction = 0.1;
    CHECK_OK(data_tokenize_quietly(&config, &error), error);
    CHECK_OK(tokenizer_open(&tokenizer, data_path("lg_tokenizer.bin"), &error), error);
    for (size_t id = 256; id + 1 < tokenizer.vocab_size; id++) {
        size_t count;
        const uint8_t* token = tokenizer_token(&tokenizer, id, &count);
        CHECK(!memchr(token, 'q', count) && !memchr(token, 'z', count), "token %zu is of the validation text", id);
    }
    tokenizer_free(&tokenizer);
    bytes_free(&text);
    bytes_free(&back);
}

static void data_tokenize_refusals(void) {
    Error error;
    data_store(data_path("empty.txt"), "", 0);
    data_store(data_path("ok.txt"), "some text", 9);
    const char *empty[1] = {data_path("empty.txt")}, *missing[2] = {data_path("ok.txt"), data_path("missing.txt")};
    TokenizeConfig config = data_tokenize_config(empty, 1, data_path("no"));
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "no text");
    config = data_tokenize_config(missing, 2, data_path("no"));
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "missing.txt");
    CHECK(access(data_path("no_tokenizer.bin"), F_OK) != 0 || access(data_path("no_train_000000.bin"), F_OK) != 0,
          "wrote data all the same");
    config.input_count = 0;
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "no input");
    config = data_tokenize_config(missing, 1, "");
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "prefix");
    config = data_tokenize_config(missing, 1, data_path("folder/that/is/not/x"));
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "cannot create");
    config = data_tokenize_config(missing, 1, data_path("no"));
    config.val_fraction = 1.0;
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "fraction");
    config.val_fraction = (double)NAN;
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "fraction");
    config.val_fraction = 0.0;
    config.vocab_size = 100;
    CHECK_FAILS(data_tokenize_quietly(&config, &error), error, "257");
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Evaluation sets.

static bool data_read_hellaswag(const char* path, Error* error) {
    HellaSwag set;
    bool good = hellaswag_open(&set, path, 700, error);
    if (good) { hellaswag_close(&set); }
    return good;
}

static void data_hellaswag(void) {
    static const char jsonl[] =
        "{\"ind\": 4, \"ctx\": \"A man is\", \"endings\": [\"one\", \"two words\", \"3\", \"f\\u00e9\"], \"label\": 2}\n"
        "{\"label\": \"0\", \"endings\": [\"a\", \"b\", \"c\", \"d\"], \"ctx\": \"x\"}\n";
    static const char* const bad[] = {"{\"ctx\": \"x\", \"endings\": [\"a\", \"b\", \"c\"], \"label\": 0}",
                                      "{\"ctx\": \"x\", \"endings\": [\"a\", \"b\", \"c\", \"d\"], \"label\": 4}",
                                      "{\"ctx\": \"\", \"endings\": [\"a\", \"b\", \"c\", \"d\"], \"label\": 1}",
                                      "{\"ctx\": \"x\", \"label\": 1}",
                                      "{\"ctx\": \"x\", \"endings\": [\"a\", \"b\", \"c\", \"d\", \"e\"], \"label\": 1}",
                                      "x",
                                      "{}"};
    DataCoder coder;
    HellaSwag set;
    Error error;
    if (!data_coder_open(&coder)) { return; }
    data_store(data_path("h.jsonl"), jsonl, sizeof(jsonl) - 1);
    CHECK_OK(hellaswag_write(data_path("h.bin"), data_path("h.jsonl"), &coder.encoder, &error), error);
    bool good = hellaswag_open(&set, data_path("h.bin"), 700, &error);
    CHECK_OK(good, error);
    if (good) {
        static const char* const expected[] = {"A man is", " one", " two words", " 3", " f\xC3\xA9"};
        CHECK(set.count == 2 && set.examples[0].label == 2 && set.examples[1].label == 0, "%zu examples", set.count);
        for (int i = 0; i < 5; i++) {
            const HellaSwagExample* e = &set.examples[0];
            const uint16_t* tokens = i == 0 ? e->context : e->ending[i - 1];
            ByteBuffer text = {NULL, 0, 0};
            for (int k = 0; k < (i == 0 ? e->context_count : e->ending_count[i - 1]); k++) {
                int32_t token = tokens[k];
                CHECK_OK(tokenizer_decode(&coder.tokenizer, &token, 1, &text, &error), error);
            }
            CHECK(text.count == strlen(expected[i]) && memcmp(text.data, expected[i], text.count) == 0, "part %d: \"%.*s\"", i,
                  (int)text.count, (char*)text.data);
            bytes_free(&text);
        }
        hellaswag_close(&set);
    }
    CHECK_FAILS(hellaswag_open(&set, data_path("h.bin"), 40, &error), error, "vocabulary of 40");
    data_seed(23);
    data_damage(data_read_hellaswag, data_path("h.bin"), false);
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        data_store(data_path("hbad.jsonl"), bad[i], strlen(bad[i]));
        CHECK_FAILS(hellaswag_write(data_path("hbad.bin"), data_path("hbad.jsonl"), &coder.encoder, &error), error, "hbad.jsonl:1:");
    }
    data_coder_close(&coder);
}

// One example word for word, and each word of it that can be wrong, made wrong by one.
static void data_hellaswag_words(void) {
    static const uint16_t words[15] = {65535, 30, 0, 2, 4, 1, 10, 1, 11, 1, 12, 1, 13, 1, 14};
    static const struct {
        int word, value;
    } wrong[] = {{0, 65534}, {1, 28}, {1, 29}, {1, 32}, {1, 0},  {1, 65534}, {2, 1},     {3, 4},
                 {4, 3},     {5, 0},  {5, 2},  {7, 0},  {13, 2}, {13, 0},    {13, 65535}};
    int32_t file[256 + 8] = {HELLASWAG_MAGIC, 1, 1, 30};
    const size_t bytes = 1024 + sizeof(words);
    HellaSwag set;
    Error error;
    memcpy(file + 256, words, sizeof(words));
    data_store(data_path("hw.bin"), file, bytes);
    bool good = hellaswag_open(&set, data_path("hw.bin"), 15, &error);
    CHECK_OK(good, error);
    if (good) {
        const HellaSwagExample* e = set.examples;
        CHECK(e->label == 2 && e->context_count == 1 && e->context[0] == 10 && e->ending_count[3] == 1 && e->ending[3][0] == 14,
              "wrong parts");
        CHECK(set.longest == 2, "longest is %d", set.longest);
        hellaswag_close(&set);
    }
    CHECK_FAILS(hellaswag_open(&set, data_path("hw.bin"), 14, &error), error, "vocabulary of 14");
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        uint16_t value = (uint16_t)wrong[i].value;
        memcpy(file + 256, words, sizeof(words));
        memcpy((uint8_t*)file + 1024 + 2 * wrong[i].word, &value, 2);
        data_store(data_path("hw.bin"), file, bytes);
        data_must_fail(data_read_hellaswag, data_path("hw.bin"), "a wrong word", (size_t)wrong[i].word);
        memset((uint8_t*)file + bytes, 0, 2); // one word more, which a wrong length may claim
        data_store(data_path("hw.bin"), file, bytes + 2);
        data_must_fail(data_read_hellaswag, data_path("hw.bin"), "a wrong word before another", (size_t)wrong[i].word);
    }
}
