// debug_state.h - llm.c's debug state (magic 20240327, version 2): one batch with the logits, loss and gradients that another
// implementation found for it; the fixture of the model's tests.
//     h[0] magic   h[1] 2   h[2] batch B   h[3] sequence length T   rest of the 256 int32 zero; then without gaps
//     int32 inputs (B,T)   int32 targets (B,T)   fp32 logits (B,T,V), without padding   fp32 loss
//     fp32 gradients of the 16 tensors of the model file, in its order, wte padded to Vp rows
// The file names no model: vocabulary and parameter count come from the model file beside it, and the size must agree.
#pragma once
#include "model_file.h"

#define DEBUG_STATE_MAGIC 20240327
#define DEBUG_STATE_VERSION 2

typedef struct {
    int batch, seq_len;
    int32_t *inputs, *targets; // (B, T)
    float* logits;             // (B, T, V)
    float loss;
    float* gradients; // model_header_elements values
} DebugState;

void debug_state_free(DebugState* state) {
    free(state->inputs);
    free(state->targets);
    free(state->logits);
    free(state->gradients);
    memset(state, 0, sizeof(*state));
}

// Bytes of the file, or 0 where they do not fit 62 bits.
static uint64_t debug_state_bytes(const ModelHeader* model, int batch, int seq_len) {
    double logits = (double)batch * seq_len * ((double)model->vocab_size + 2);
    if (logits > 0x1p59) { return 0; }
    uint64_t tokens = (uint64_t)batch * (uint64_t)seq_len;
    return MODEL_FILE_HEADER_BYTES + 4 * (tokens * 2 + tokens * (uint64_t)model->vocab_size + 1 + model_header_elements(model));
}

static bool debug_state_check_header(const FileReader* file, const ModelHeader* model, DebugState* state, Error* error) {
    int32_t h[MODEL_FILE_HEADER_BYTES / 4] = {0};
    size_t present = (size_t)(file->size < sizeof(h) ? file->size : sizeof(h));
    if (!file_read(file, h, present, 0, error)) { return false; }
    if (present < 4 || h[0] != DEBUG_STATE_MAGIC) {
        return fail(error, "%s is not a debug state: expected magic %d, found %" PRId32 "; %s", file->path, DEBUG_STATE_MAGIC, h[0],
                    model_file_hint((const uint8_t*)h, present));
    }
    if (present < sizeof(h)) {
        return fail(error, "%s is cut off: expected a header of %zu bytes, found %zu; fetch or write it again", file->path, sizeof(h),
                    present);
    }
    if (h[1] != DEBUG_STATE_VERSION || h[2] < 1 || h[3] < 1 || h[3] > model->max_seq_len) {
        return fail(error,
                    "%s: expected version %d, a batch above zero and 1 to %d positions, found version %" PRId32 ", %" PRId32 " x %" PRId32,
                    file->path, DEBUG_STATE_VERSION, model->max_seq_len, h[1], h[2], h[3]);
    }
    uint64_t expected = debug_state_bytes(model, h[2], h[3]);
    if (expected == 0 || file->size != expected) {
        return fail(error,
                    "%s: expected %" PRIu64 " bytes for %" PRId32 " x %" PRId32 " tokens and this model, found %" PRIu64
                    "; is it of the same model?",
                    file->path, expected, h[2], h[3], file->size);
    }
    state->batch = h[2];
    state->seq_len = h[3];
    return true;
}

static bool debug_state_read_body(const FileReader* file, const ModelHeader* model, DebugState* state, Error* error) {
    size_t tokens = (size_t)state->batch * (size_t)state->seq_len, logits = tokens * (size_t)model->vocab_size;
    size_t parameters = (size_t)model_header_elements(model);
    state->inputs = (int32_t*)malloc(tokens * 4);
    state->targets = (int32_t*)malloc(tokens * 4);
    state->logits = (float*)malloc(logits * 4);
    state->gradients = (float*)malloc(parameters * 4);
    if (!state->inputs || !state->targets || !state->logits || !state->gradients) {
        return fail(error, "%s: out of memory: %" PRIu64 " bytes are needed", file->path, file->size);
    }
    uint64_t at = MODEL_FILE_HEADER_BYTES, after_tokens = at + 8 * (uint64_t)tokens, after_logits = after_tokens + 4 * (uint64_t)logits;
    if (!file_read(file, state->inputs, tokens * 4, at, error) || !file_read(file, state->targets, tokens * 4, at + 4 * tokens, error) ||
        !file_read(file, state->logits, logits * 4, after_tokens, error) || !file_read(file, &state->loss, 4, after_logits, error) ||
        !file_read(file, state->gradients, parameters * 4, after_logits + 4, error)) {
        return false;
    }
    for (size_t i = 0; i < tokens; i++) {
        int32_t input = state->inputs[i], target = state->targets[i];
        if (input < 0 || input >= model->vocab_size || target < 0 || target >= model->vocab_size) {
            return fail(error, "%s: expected tokens below %d, found %" PRId32 " and %" PRId32 " at position %zu; is it of the same model?",
                        file->path, model->vocab_size, input, target, i);
        }
    }
    return true;
}

// model: a header that passed model_header_check. Free with debug_state_free; on failure nothing is left to free.
bool debug_state_read(const char* path, const ModelHeader* model, DebugState* state, Error* error) {
    FileReader file;
    memset(state, 0, sizeof(*state));
    if (!file_open(&file, path, error)) { return false; }
    bool good = debug_state_check_header(&file, model, state, error) && debug_state_read_body(&file, model, state, error);
    file_close(&file);
    if (!good) { debug_state_free(state); }
    return good;
}

bool debug_state_write(const char* path, const ModelHeader* model, const DebugState* state, Error* error) {
    int32_t h[MODEL_FILE_HEADER_BYTES / 4] = {DEBUG_STATE_MAGIC, DEBUG_STATE_VERSION, state->batch, state->seq_len};
    size_t tokens = (size_t)state->batch * (size_t)state->seq_len;
    FileWriter file;
    return model_header_check(model, path, error) && file_create(&file, path, error) && file_write(&file, h, sizeof(h), error) &&
           file_write(&file, state->inputs, tokens * 4, error) && file_write(&file, state->targets, tokens * 4, error) &&
           file_write(&file, state->logits, tokens * (size_t)model->vocab_size * 4, error) && file_write(&file, &state->loss, 4, error) &&
           file_write(&file, state->gradients, (size_t)model_header_elements(model) * 4, error) && file_commit(&file, error);
}
