// tokenize.h - the work behind the command `tokenize`: text files to token shards, with a vocabulary made from the text unless one
// is given. Writes PREFIX_tokenizer.bin, PREFIX_train_%06d.bin and PREFIX_val_%06d.bin. Every document has <|endoftext|> before it,
// and each split starts with one. Threads encode jobs of about 256 kB; the result depends on neither their number nor their speed.
#pragma once
#include "bpe_train.h"
#include "shards.h"
#include "text.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#define TOKENIZE_JOB_BYTES ((size_t)1 << 18)
#define TOKENIZE_TRAIN_BYTES ((uint64_t)1 << 28) // the vocabulary is made from this much of the training text

typedef struct {
    const char* const* inputs;
    size_t input_count;
    const char* prefix;        // of the files to write
    const char* tokenizer;     // a tokenizer file; NULL or empty: make one
    size_t vocab_size;         // of the vocabulary to make, <|endoftext|> included
    double val_fraction;       // in [0, 1)
    uint64_t shard_tokens;     // 0: SHARD_TOKENS_DEFAULT
    const char* json_field;    // NULL: "text"
    const char* separator;     // plain text: the line between documents, "blank" for blank lines, NULL or empty for none
    TextFormat format;
    bool progress;             // a line on stderr each second
    int threads;               // 0: as many as OpenMP has
    size_t block;              // bytes read at a time; 0: TEXT_BLOCK
} TokenizeConfig;

// Pieces of one split that are encoded together.
typedef struct {
    size_t first, count; // in Tokenize.pieces
    TokenBuffer out;
} TokenizeJob;

typedef struct {
    const TokenizeConfig* config;
    TextConfig text;
    int threads;
    Tokenizer tokenizer;
    Encoder encoder;
    EncodeWork* work; // one per thread
    TextPiece* pieces;
    size_t piece_count, piece_capacity;
    TokenizeJob* jobs;
    size_t job_count, job_capacity;
    ShardWriter train, val;
    uint64_t total_bytes; // of all input files
    uint64_t text_bytes, documents;
    double start, shown;
} Tokenize;

static int tokenize_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static void tokenize_add_piece(Tokenize* run, const TextPiece* piece) {
    if (run->piece_count == run->piece_capacity) {
        run->piece_capacity = max_size(256, 2 * run->piece_capacity);
        run->pieces = (TextPiece*)need(realloc(run->pieces, run->piece_capacity * sizeof(TextPiece)));
    }
    run->pieces[run->piece_count++] = *piece;
}

// Cuts the batch's pieces down to job size, where no word is.
static void tokenize_cut_pieces(Tokenize* run, const TextReader* reader) {
    run->piece_count = 0;
    for (size_t i = 0; i < reader->piece_count; i++) {
        TextPiece rest = reader->pieces[i];
        const uint8_t* text = reader->text.data + rest.begin;
        for (size_t cut = TOKENIZE_JOB_BYTES; cut < rest.bytes;) {
            if (!text_splits_at(text, text + cut)) {
                cut++;
                continue;
            }
            TextPiece piece = {rest.begin, cut, rest.starts, rest.validation};
            tokenize_add_piece(run, &piece);
            rest.begin += cut;
            rest.bytes -= cut;
            rest.starts = false;
            text += cut;
            cut = TOKENIZE_JOB_BYTES;
        }
        tokenize_add_piece(run, &rest);
    }
}

// Groups pieces of one split into jobs.
static void tokenize_make_jobs(Tokenize* run) {
    size_t bytes = 0;
    run->job_count = 0;
    for (size_t i = 0; i < run->piece_count; i++) {
        bool same_split = i > 0 && run->pieces[i].validation == run->pieces[i - 1].validation;
        if (!same_split || bytes + run->pieces[i].bytes > TOKENIZE_JOB_BYTES) {
            if (run->job_count == run->job_capacity) {
                size_t old = run->job_capacity;
                run->job_capacity = max_size(64, 2 * old);
                run->jobs = (TokenizeJob*)need(realloc(run->jobs, run->job_capacity * sizeof(TokenizeJob)));
                memset(run->jobs + old, 0, (run->job_capacity - old) * sizeof(TokenizeJob));
            }
            run->jobs[run->job_count].first = i;
            run->jobs[run->job_count++].count = 0;
            bytes = 0;
        }
        run->jobs[run->job_count - 1].count++;
        bytes += run->pieces[i].bytes;
    }
}

static void tokenize_encode_job(const Tokenize* run, TokenizeJob* job, EncodeWork* work, const uint8_t* text) {
    job->out.count = 0;
    for (size_t i = job->first; i < job->first + job->count; i++) {
        const TextPiece* piece = &run->pieces[i];
        if (piece->starts) { tokens_append(&job->out, run->tokenizer.eot); }
        encode_text(&run->encoder, work, text + piece->begin, piece->bytes, &job->out);
    }
}

static void tokenize_show(Tokenize* run, const TextReader* reader, const char* what) {
    double now = seconds_now();
    if (!run->config->progress || now - run->shown < 1.0) { return; }
    run->shown = now;
    fprintf(stderr, "%s: %.0f of %.0f MB, %.1f MB/s\n", what, (double)reader->bytes_read * 1e-6, (double)run->total_bytes * 1e-6,
            (double)reader->bytes_read * 1e-6 / (now - run->start));
}

// Encodes the batch and hands it to the shards.
static bool tokenize_batch(Tokenize* run, const TextReader* reader, Error* error) {
    const uint8_t* text = reader->text.data;
    tokenize_cut_pieces(run, reader);
    tokenize_make_jobs(run);
#pragma omp parallel for schedule(dynamic, 1) num_threads(run->threads)
    for (size_t i = 0; i < run->job_count; i++) { tokenize_encode_job(run, &run->jobs[i], &run->work[tokenize_thread()], text); }
    for (size_t i = 0; i < run->job_count; i++) {
        const TokenizeJob* job = &run->jobs[i];
        ShardWriter* writer = run->pieces[job->first].validation ? &run->val : &run->train;
        if (!shard_writer_append(writer, job->out.ids, job->out.count, error)) { return false; }
    }
    run->text_bytes += reader->text.count;
    return true;
}

static bool tokenize_write_shards(Tokenize* run, Error* error) {
    TextReader reader;
    bool good = true;
    run->start = seconds_now();
    text_open(&reader, &run->text);
    while (good) {
        good = text_next(&reader, error);
        if (!good || reader.piece_count == 0) { break; }
        good = tokenize_batch(run, &reader, error);
        tokenize_show(run, &reader, "encoding");
    }
    run->documents = reader.documents;
    text_close(&reader);
    if (good && run->train.total == 0) {
        good = fail(error, "%s: no text for training in %zu files", run->config->inputs[0], run->config->input_count);
    }
    return good && shard_writer_close(&run->train, error) && shard_writer_close(&run->val, error);
}

// Counts the words of the training text, up to TOKENIZE_TRAIN_BYTES of it.
static bool tokenize_count_words(Tokenize* run, WordCounts* counts, const uint8_t* classes, uint64_t* counted, Error* error) {
    TextReader reader;
    bool good = true;
    text_open(&reader, &run->text);
    while (good && *counted < TOKENIZE_TRAIN_BYTES) {
        good = text_next(&reader, error);
        if (!good || reader.piece_count == 0) { break; }
        const uint8_t* text = reader.text.data;
        tokenize_cut_pieces(run, &reader);
#pragma omp parallel for schedule(dynamic, 1) num_threads(run->threads)
        for (size_t i = 0; i < run->piece_count; i++) {
            const TextPiece* piece = &run->pieces[i];
            if (!piece->validation) { word_counts_add_text(&counts[tokenize_thread()], classes, text + piece->begin, piece->bytes); }
        }
        for (size_t i = 0; i < run->piece_count; i++) { *counted += run->pieces[i].validation ? 0 : run->pieces[i].bytes; }
        tokenize_show(run, &reader, "counting words");
    }
    text_close(&reader);
    return good;
}

static bool tokenize_train(Tokenize* run, Error* error) {
    uint8_t* classes = char_classes_new(error);
    if (!classes) { return false; }
    WordCounts* counts = (WordCounts*)need(calloc((size_t)run->threads, sizeof(WordCounts)));
    uint64_t counted = 0;
    bool good = tokenize_count_words(run, counts, classes, &counted, error);
    for (int i = 1; i < run->threads; i++) {
        word_counts_merge(&counts[0], &counts[i]);
        word_counts_free(&counts[i]);
    }
    good = good && bpe_train(&run->tokenizer, &counts[0], run->config->vocab_size, error);
    if (good) {
        printf("vocabulary  %zu tokens, made from %.1f MB with %zu distinct words in %.2f s\n", run->tokenizer.vocab_size,
               (double)counted * 1e-6, counts[0].used, seconds_now() - run->start);
        if (run->tokenizer.vocab_size < run->config->vocab_size) {
            fprintf(stderr, "notice: the text gives a vocabulary of %zu only, %zu were asked for\n", run->tokenizer.vocab_size,
                    run->config->vocab_size);
        }
    }
    word_counts_free(&counts[0]);
    free(counts);
    free(classes);
    return good;
}

static bool tokenize_check_inputs(Tokenize* run, Error* error) {
    const TokenizeConfig* config = run->config;
    if (config->input_count == 0) { return fail(error, "no input files; give one or more text files"); }
    if (!config->prefix || !config->prefix[0]) { return fail(error, "no output prefix; give the beginning of the names to write"); }
    if (!(config->val_fraction >= 0.0 && config->val_fraction < 1.0)) {
        return fail(error, "a validation fraction of %g: expected at least 0 and less than 1", config->val_fraction);
    }
    for (size_t i = 0; i < config->input_count; i++) { // all of them, before hours of work
        FileReader file;
        if (!file_open(&file, config->inputs[i], error)) { return false; }
        run->total_bytes += file.size;
        file_close(&file);
    }
    return true;
}

static bool tokenize_work(Tokenize* run, Error* error) {
    const TokenizeConfig* config = run->config;
    uint64_t shard_tokens = config->shard_tokens ? config->shard_tokens : SHARD_TOKENS_DEFAULT;
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s_tokenizer.bin", config->prefix) >= PATH_MAX) {
        return fail(error, "the output prefix is too long: %.200s...", config->prefix);
    }
    bool given = config->tokenizer && config->tokenizer[0];
    if (!(given ? tokenizer_open(&run->tokenizer, config->tokenizer, error) : tokenize_train(run, error))) { return false; }
    size_t vocab_size = run->tokenizer.vocab_size;
    return encoder_open(&run->encoder, &run->tokenizer, error) && tokenizer_write(&run->tokenizer, path, error) &&
           shard_writer_open(&run->train, config->prefix, "train", vocab_size, shard_tokens, error) &&
           shard_writer_open(&run->val, config->prefix, "val", vocab_size, shard_tokens, error) && tokenize_write_shards(run, error);
}

static void tokenize_report(const Tokenize* run) {
    double seconds = seconds_now() - run->start;
    uint64_t tokens = run->train.total + run->val.total;
    printf("text        %" PRIu64 " bytes in %" PRIu64 " documents\n", run->text_bytes, run->documents);
    printf("training    %" PRIu64 " tokens in %" PRIu32 " shards %s_*.bin\n", run->train.total, run->train.shards, run->train.stem);
    printf("validation  %" PRIu64 " tokens in %" PRIu32 " shards %s_*.bin\n", run->val.total, run->val.shards, run->val.stem);
    printf("encoding    %.3f bytes a token, %.1f MB/s with %d threads\n", (double)run->text_bytes / (double)tokens,
           (double)run->text_bytes * 1e-6 / seconds, run->threads);
    if (run->val.total == 0 && run->config->val_fraction > 0.0) {
        fprintf(stderr, "notice: no validation tokens: %g of %" PRIu64 " documents is none\n", run->config->val_fraction, run->documents);
    }
}

bool tokenize_run(const TokenizeConfig* config, Error* error) {
    Tokenize run;
    memset(&run, 0, sizeof(run));
    run.config = config;
    TextConfig text = {config->inputs,     config->input_count,  config->format, config->separator,
                       config->json_field, config->val_fraction, config->block};
    run.text = text;
    run.start = run.shown = seconds_now();
    run.threads = config->threads > 0 ? config->threads : 1;
#ifdef _OPENMP
    if (config->threads <= 0) { run.threads = omp_get_max_threads(); }
#else
    run.threads = 1;
#endif
    run.work = (EncodeWork*)need(calloc((size_t)run.threads, sizeof(EncodeWork)));
    for (int i = 0; i < run.threads; i++) { encode_work_new(&run.work[i]); }
    bool good = tokenize_check_inputs(&run, error) && tokenize_work(&run, error);
    if (good) { tokenize_report(&run); }
    for (int i = 0; i < run.threads; i++) { encode_work_free(&run.work[i]); }
    for (size_t i = 0; i < run.job_capacity; i++) { tokens_free(&run.jobs[i].out); }
    free(run.work);
    free(run.jobs);
    free(run.pieces);
    shard_writer_free(&run.train);
    shard_writer_free(&run.val);
    encoder_close(&run.encoder);
    tokenizer_free(&run.tokenizer);
    return good;
}
