// decode.cuh - logits of the next token: with a cache of keys and values one token costs one row through the model; without it, the
// whole window. Both give the same text. When the context is full, its older half is forgotten and the rest read again.
// Included by train_gpt.cu after the model.
#pragma once
#include "sample.h"

typedef struct {
    Gpt* gpt;           // gives the weights and the forward pass of prompts
    bool cached;
    int position;       // tokens in the window
    int32_t* window;    // (maxT) on the host
    int* tokens;        // (maxT) on the device
    floatX *k_cache, *v_cache; // (L, maxT, C)
    floatX *x, *normed, *qkv, *att, *branch, *pre, *gelu; // one row
    float *mean, *rstd; // one value
    floatX* logits;     // (Vp)
    floatX* host_row;   // (Vp) on the host
    float* host_logits; // (V)
    Candidate* candidates; // (V)
} Decoder;

// Asks for memory in g->memory: call between gpt_plan and gpt_allocate.
void decoder_plan(Decoder* d, Gpt* g, bool cached) {
    memset(d, 0, sizeof(*d));
    d->gpt = g;
    d->cached = cached;
    size_t C = (size_t)g->config.channels, T = (size_t)g->config.max_seq_len, L = (size_t)g->config.layers, X = sizeof(floatX);
    size_t V = (size_t)g->config.vocab_size, Vp = (size_t)g->config.padded_vocab;
    MemoryTable* m = &g->memory;
    if (cached) {
        memory_add(m, "decoding", L * T * C * X, (void**)&d->k_cache);
        memory_add(m, "decoding", L * T * C * X, (void**)&d->v_cache);
        struct {
            floatX** place;
            size_t width;
        } rows[] = {{&d->x, C}, {&d->normed, C}, {&d->qkv, 3 * C}, {&d->att, C}, {&d->branch, C}, {&d->pre, 4 * C}, {&d->gelu, 4 * C}};
        for (size_t i = 0; i < COUNT_OF(rows); i++) { memory_add(m, "decoding", rows[i].width * X, (void**)rows[i].place); }
        memory_add(m, "decoding", sizeof(float), (void**)&d->mean);
        memory_add(m, "decoding", sizeof(float), (void**)&d->rstd);
    }
    memory_add(m, "decoding", Vp * X, (void**)&d->logits);
    memory_add(m, "decoding", T * sizeof(int), (void**)&d->tokens);
    d->window = (int32_t*)need(calloc(T, sizeof(int32_t)));
    d->host_row = (floatX*)need(calloc(Vp, X));
    d->host_logits = (float*)need(calloc(V, sizeof(float)));
    d->candidates = (Candidate*)need(calloc(V, sizeof(Candidate)));
}

void decoder_free(Decoder* d) {
    free(d->window);
    free(d->host_row);
    free(d->host_logits);
    free(d->candidates);
    memset(d, 0, sizeof(*d));
}

void decoder_reset(Decoder* d) { d->position = 0; }

// One token at `position` through the model, beside the cache; fills logits.
static void decoder_row(Decoder* d, int position) {
    Gpt* g = d->gpt;
    int C = g->config.channels, L = g->config.layers;
    floatX *wte = g->params + g->table.tensors[WTE].offset, *wpe = g->params + g->table.tensors[WPE].offset;
    embedding_forward(d->x, d->tokens + position, wte, wpe + (size_t)position * (size_t)C, 1, 1, C);
    BlockTensors w = gpt_block_weights(g, 0);
    layernorm_forward(d->normed, d->mean, d->rstd, d->x, w.ln1w, w.ln1b, 1, C);
    for (int l = 0; l < L; l++) {
        size_t cache = (size_t)l * (size_t)g->config.max_seq_len * (size_t)C;
        matmul_forward(d->qkv, d->normed, w.qkvw, w.qkvb, 1, C, 3 * C);
        attention_decode(d->att, d->qkv, d->k_cache + cache, d->v_cache + cache, position, C, g->config.heads);
        matmul_forward(d->branch, d->att, w.attprojw, NULL, 1, C, C);
        residual_layernorm_forward(d->x, d->normed, d->mean, d->rstd, d->x, d->branch, w.attprojb, w.ln2w, w.ln2b, 1, C);
        matmul_gelu_forward(d->gelu, d->pre, d->normed, w.fcw, w.fcb, 1, C, 4 * C);
        matmul_forward(d->branch, d->gelu, w.fcprojw, NULL, 1, 4 * C, C);
        floatX *bias = w.fcprojb, *gain = tensor_at(g->params, &g->table, LNFW, 0), *shift = tensor_at(g->params, &g->table, LNFB, 0);
        if (l + 1 < L) {
            w = gpt_block_weights(g, l + 1);
            gain = w.ln1w;
            shift = w.ln1b;
        }
        residual_layernorm_forward(d->x, d->normed, d->mean, d->rstd, d->x, d->branch, bias, gain, shift, 1, C);
    }
    matmul_forward(d->logits, d->normed, wte, NULL, 1, C, g->config.padded_vocab);
}

// The whole window as one sequence; fills the caches and the logits after its last token.
static void decoder_window(Decoder* d) {
    Gpt* g = d->gpt;
    g->k_cache = d->k_cache;
    g->v_cache = d->v_cache;
    gpt_forward(g, d->tokens, 1, d->position);
    gpt_logits(g, d->logits, (size_t)d->position - 1, 1);
    g->k_cache = g->v_cache = NULL;
}

// Appends tokens (at least one) and returns the logits (V, on the host) of the token that follows, or NULL if the prompt has to be
// read as a whole but is longer than the model's micro-batch.
const float* decoder_feed(Decoder* d, const int32_t* tokens, size_t count) {
    Gpt* g = d->gpt;
    int maxT = g->config.max_seq_len;
    bool whole = !d->cached || count > 1;
    for (size_t i = 0; i < count; i++) {
        if (d->position == maxT) {
            int keep = maxT > 1 ? maxT / 2 : 0;
            memmove(d->window, d->window + (maxT - keep), (size_t)keep * sizeof(int32_t));
            d->position = keep;
            whole = true;
        }
        d->window[d->position++] = tokens[i];
    }
    if (whole && (size_t)d->position > g->rows) { return NULL; }
    device_upload(d->tokens, d->window, (size_t)d->position * sizeof(int));
    device_sync(); // the window may change before the copy is done
    if (whole) {
        decoder_window(d);
    } else {
        decoder_row(d, d->position - 1);
    }
    device_download(d->host_row, d->logits, (size_t)g->config.vocab_size * sizeof(floatX));
    for (int i = 0; i < g->config.vocab_size; i++) { d->host_logits[i] = load(d->host_row + i); }
    return d->host_logits;
}

// Continues the prompt (at least one token) by up to `count` tokens; stops after `stop` (if not negative). Returns how many were made.
// show (may be NULL) is called with each token as it comes.
size_t decoder_generate(Decoder* d, int32_t* out, size_t count, const int32_t* prompt, size_t prompt_count, const Sampling* sampling, uint32_t sample,
                        int stop, void (*show)(void* context, int32_t token), void* context) {
    size_t made = 0;
    decoder_reset(d);
    const float* logits = decoder_feed(d, prompt, prompt_count);
    while (made < count && logits) {
        out[made] = sample_token(logits, d->candidates, d->gpt->config.vocab_size, sampling, sample, prompt_count + made);
        if (show) { show(context, out[made]); }
        if (out[made++] == stop) { break; }
        logits = made < count ? decoder_feed(d, out + made - 1, 1) : NULL;
    }
    return made;
}
