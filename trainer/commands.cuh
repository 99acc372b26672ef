// commands.cuh - the commands beside training: tokenize, generate, eval.
// Included by train_gpt.cu after the trainer.
#pragma once

bool command_tokenize(const Options* o, Error* error) {
    char folder[OPTION_TEXT_SIZE];
    snprintf(folder, sizeof(folder), "%s", o->output);
    char* slash = strrchr(folder, '/');
    if (slash && slash != folder) {
        *slash = 0;
        if (!folder_make(folder, error)) { return false; }
    }
    const char** inputs = option_list_array(&o->input);
    TokenizeConfig config;
    memset(&config, 0, sizeof(config));
    config.inputs = inputs;
    config.input_count = o->input.count;
    config.prefix = o->output;
    config.tokenizer = o->tokenizer;
    config.vocab_size = (size_t)o->vocab_size;
    config.val_fraction = o->val_fraction;
    config.shard_tokens = (uint64_t)o->shard_tokens;
    config.json_field = o->json_field;
    config.separator = o->document_separator;
    config.format = (TextFormat)o->format;
    config.progress = o->progress == PROGRESS_ON || (o->progress == PROGRESS_AUTO && isatty(STDERR_FILENO));
    config.threads = o->threads;
    bool good = tokenize_run(&config, error);
    free(inputs);
    return good;
}

// A model for evaluation: micro-batches of B sequences of T (0 = the context), head_rows as in gpt_plan; decoder may be NULL.
static bool command_open_model(Gpt* g, Decoder* decoder, const Options* o, int B, int T, size_t head_rows, bool cached, EvalSpace* space,
                               Error* error) {
    char file[PATH_MAX];
    ModelHeader model;
    Error notice;
    int version;
    memset(g, 0, sizeof(*g));
    if (!state_find_model(o->model, file, &notice, error)) { return false; }
    if (notice.text[0]) { fprintf(stderr, "notice: %s\n", notice.text); }
    if (!model_file_read_header(file, &model, &version, error)) { return false; }
    T = T ? T : model.max_seq_len;
    if (T > model.max_seq_len) { return fail(error, "--seq-len %d is beyond the model's context of %d tokens", T, model.max_seq_len); }
    gpt_plan(g, &model, B, T, RECOMPUTE_BLOCK, false, head_rows);
    if (decoder) { decoder_plan(decoder, g, cached); }
    if (space) {
        memory_add(&g->memory, "tokens and targets", 2 * g->rows * sizeof(int), (void**)&space->device);
        memory_add(&g->memory, "loss", sizeof(float), (void**)&space->result);
        space->host = (int*)host_alloc((2 * g->rows + (size_t)T + 1) * sizeof(int));
    }
    if (!gpt_allocate(g, error) || !state_load_model(g, file, &notice, error)) { return false; }
    if (notice.text[0]) { fprintf(stderr, "notice: %s\n", notice.text); }
    return true;
}

typedef struct {
    const Tokenizer* tokenizer;
} TokenPrinter;

static void token_print(void* context, int32_t token) {
    const Tokenizer* tokenizer = ((const TokenPrinter*)context)->tokenizer;
    if ((size_t)token >= tokenizer->vocab_size || (uint32_t)token == tokenizer->eot) { return; }
    fwrite(tokenizer->bytes.data + tokenizer->start[token], 1, tokenizer->start[token + 1] - tokenizer->start[token], stdout);
    fflush(stdout);
}

// <|endoftext|>, which begins every document in training, and the prompt.
static bool generate_prompt(const Options* o, const Tokenizer* tokenizer, TokenBuffer* prompt, Error* error) {
    Encoder encoder;
    EncodeWork work;
    tokens_append(prompt, tokenizer->eot);
    if (!o->prompt[0]) { return true; }
    if (!encoder_open(&encoder, tokenizer, error)) { return false; }
    encode_work_new(&work);
    encode_text(&encoder, &work, (const uint8_t*)o->prompt, strlen(o->prompt), prompt);
    encode_work_free(&work);
    encoder_close(&encoder);
    return true;
}

bool command_generate(const Options* o, Error* error) {
    static Gpt gpt;
    Decoder decoder;
    Tokenizer tokenizer;
    TokenBuffer prompt;
    memset(&decoder, 0, sizeof(decoder));
    memset(&tokenizer, 0, sizeof(tokenizer));
    memset(&prompt, 0, sizeof(prompt));
    Sampling sampling = {o->temperature, o->top_k, o->top_p, (uint64_t)o->seed};
    bool good = command_open_model(&gpt, &decoder, o, 1, 0, 1, o->kv_cache, NULL, error) && tokenizer_find(&tokenizer, o->tokenizer, o->model, error);
    if (good && !tokenizer.vocab_size) { good = fail(error, "no tokenizer.bin beside %s; give --tokenizer FILE", o->model); }
    if (good && tokenizer.vocab_size > (size_t)gpt.config.vocab_size) {
        good = fail(error, "the tokenizer has %zu tokens, the model %d: they do not belong together", tokenizer.vocab_size, gpt.config.vocab_size);
    }
    good = good && generate_prompt(o, &tokenizer, &prompt, error);
    int32_t* out = (int32_t*)need(calloc((size_t)o->tokens, sizeof(int32_t)));
    for (int i = 0; good && i < o->samples; i++) {
        TokenPrinter printer = {&tokenizer};
        if (o->samples > 1) { printf("%s--- sample %d\n", i ? "\n" : "", i + 1); }
        fputs(o->prompt, stdout);
        size_t made = decoder_generate(&decoder, out, (size_t)o->tokens, (const int32_t*)prompt.ids, prompt.count, &sampling, (uint32_t)i,
                                       o->stop_at_eot ? (int)tokenizer.eot : -1, token_print, &printer);
        printf("\n");
        if (made == 0) { good = fail(error, "the prompt of %zu tokens does not fit", prompt.count); }
    }
    free(out);
    tokens_free(&prompt);
    tokenizer_free(&tokenizer);
    decoder_free(&decoder);
    gpt_free(&gpt);
    return good;
}

bool command_eval(const Options* o, Error* error) {
    static Gpt gpt;
    EvalSpace space = {NULL, NULL, NULL};
    Loader data;
    double loss = 0.0;
    memset(&data, 0, sizeof(data));
    bool good = command_open_model(&gpt, NULL, o, o->batch, o->seq_len, 0, false, &space, error);
    int T = o->seq_len ? o->seq_len : gpt.config.max_seq_len;
    uint64_t limit = o->val_batches < 0 ? UINT64_MAX : (uint64_t)o->val_batches * (uint64_t)o->batch;
    if (good && (option_given(o, "val-data") || !o->hellaswag_data[0])) {
        good = loader_open(&data, o->val_data, T, 0, false, (uint64_t)gpt.config.vocab_size, error) &&
               eval_loss(&gpt, comm_alone(), &data, space, limit, &loss, error);
        if (good) { printf("val loss %f (perplexity %f)\n", loss, exp(loss)); }
    }
    if (good && o->hellaswag_data[0]) {
        HellaSwagScore score;
        good = hellaswag_score(&gpt, comm_alone(), o->hellaswag_data, space, &score, error);
        if (good) { printf("HellaSwag: %" PRId64 "/%" PRId64 " = %f\n", score.correct, score.total, (double)score.correct / (double)score.total); }
    }
    loader_close(&data);
    host_free(space.host);
    gpt_free(&gpt);
    return good;
}
