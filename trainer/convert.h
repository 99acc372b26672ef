// convert.h - the convert command: model files between llm.c's .bin (fp32 or bf16) and safetensors with the tensor names of the
// transformers library's GPT-2, where linear weights are stored (in, out), transposed to ours, and wte without padding.
// The whole model passes through host memory in fp32. Included by train_gpt.cu after the parameter table.
#pragma once

enum { CONVERT_AUTO, CONVERT_FP32, CONVERT_BF16, CONVERT_SAFETENSORS }; // the words of --format

typedef struct {
    int tensor;
    const char* name; // inside "h.LAYER." for tensors of the blocks
    bool transposed;
} ConvertRow;

static const ConvertRow convert_table[GPT_TENSORS] = {
    {WTE, "wte.weight", false},          {WPE, "wpe.weight", false},           {LN1W, "ln_1.weight", false},
    {LN1B, "ln_1.bias", false},          {QKVW, "attn.c_attn.weight", true},   {QKVB, "attn.c_attn.bias", false},
    {ATTPROJW, "attn.c_proj.weight", true}, {ATTPROJB, "attn.c_proj.bias", false}, {LN2W, "ln_2.weight", false},
    {LN2B, "ln_2.bias", false},          {FCW, "mlp.c_fc.weight", true},       {FCB, "mlp.c_fc.bias", false},
    {FCPROJW, "mlp.c_proj.weight", true}, {FCPROJB, "mlp.c_proj.bias", false}, {LNFW, "ln_f.weight", false},
    {LNFB, "ln_f.bias", false},
};

static void convert_name(char* name, size_t size, const char* prefix, int row, size_t layer) {
    if (row >= LN1W && row <= FCPROJB) {
        snprintf(name, size, "%sh.%zu.%s", prefix, layer, convert_table[row].name);
    } else {
        snprintf(name, size, "%s%s", prefix, convert_table[row].name);
    }
}

// out (cols, rows) = in (rows, cols) transposed
static void convert_transpose(float* out, const float* in, size_t rows, size_t cols) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) { out[c * rows + r] = in[r * cols + c]; }
    }
}

static bool convert_write_safetensors(const char* path, const ParamTable* table, const ModelHeader* model, const float* params, Error* error) {
    SafeWriter w;
    char name[96];
    safe_writer_init(&w);
    for (int i = 0; i < GPT_TENSORS; i++) {
        const TensorSpec* s = &table->tensors[i];
        bool swap = convert_table[i].transposed, vector = s->role == ROLE_VECTOR;
        const uint64_t shape[2] = {vector ? s->cols : swap ? s->cols : s->real_rows, swap ? s->real_rows : s->cols};
        for (size_t layer = 0; layer < s->layers; layer++) {
            convert_name(name, sizeof(name), "", i, layer);
            safe_writer_tensor(&w, name, SAFE_F32, vector ? 1 : 2, shape);
        }
    }
    safe_writer_text(&w, "format", "pt");
    safe_writer_number(&w, "n_head", (uint64_t)model->heads);
    if (!safe_writer_create(&w, path, error)) { return false; }
    int index = 0;
    bool good = true;
    for (int i = 0; good && i < GPT_TENSORS; i++) {
        const TensorSpec* s = &table->tensors[i];
        size_t count = s->real_rows * s->cols;
        float* turned = (float*)need(malloc(count * sizeof(float)));
        for (size_t layer = 0; good && layer < s->layers; layer++, index++) {
            const float* from = params + s->offset + layer * s->rows * s->cols;
            if (convert_table[i].transposed) { convert_transpose(turned, from, s->real_rows, s->cols); }
            good = safe_writer_put(&w, index, 0, convert_table[i].transposed ? turned : from, count * sizeof(float), error);
        }
        free(turned);
    }
    return good && safe_writer_commit(&w, error);
}

// Any of the types that weights come in, as fp32.
static bool convert_read_tensor(const SafeReader* r, const char* name, uint64_t count, float* out, Error* error) {
    const SafeTensor* t = safe_find(r, name);
    if (!t || t->type != SAFE_BF16) { return safe_read(r, name, SAFE_F32, count, out, error); }
    uint16_t* half = (uint16_t*)need(malloc(count * sizeof(uint16_t)));
    bool good = safe_read(r, name, SAFE_BF16, count, half, error);
    for (uint64_t i = 0; good && i < count; i++) { out[i] = bf16_to_float(half[i]); }
    free(half);
    return good;
}

// The shape of the model in a safetensors file. Heads are not in it: our metadata has them, GPT-2's own have 64 channels each.
static bool convert_shape(const SafeReader* r, const char** prefix, ModelHeader* model, Error* error) {
    char name[96];
    uint64_t heads = 0;
    *prefix = safe_find(r, "transformer.wte.weight") ? "transformer." : "";
    snprintf(name, sizeof(name), "%swte.weight", *prefix);
    const SafeTensor* wte = safe_find(r, name);
    snprintf(name, sizeof(name), "%swpe.weight", *prefix);
    const SafeTensor* wpe = safe_find(r, name);
    if (!wte || !wpe || wte->dims != 2 || wpe->dims != 2 || wte->shape[0] > (1 << 24) || wte->shape[1] > (1 << 20) || wpe->shape[0] > (1 << 24)) {
        return fail(error, "%s is not a GPT-2 model: expected matrices wte.weight and wpe.weight", r->file.path);
    }
    int layers = 0;
    for (const SafeTensor* found = wte; found; layers += found != NULL) {
        snprintf(name, sizeof(name), "%sh.%d.ln_1.weight", *prefix, layers);
        found = safe_find(r, name);
    }
    Error none;
    if (!safe_find_number(r, "n_head", &heads, &none)) { heads = wte->shape[1] / 64; }
    ModelHeader m = {(int)wpe->shape[0], (int)wte->shape[0], layers, (int)heads, (int)wte->shape[1], (int)round_up(wte->shape[0], VOCAB_MULTIPLE)};
    *model = m;
    return model_header_check(model, r->file.path, error);
}

static bool convert_read_safetensors(const char* path, ParamTable* table, ModelHeader* model, float** params, Error* error) {
    SafeReader r;
    const char* prefix;
    char name[96];
    if (!safe_open(&r, path, error)) { return false; }
    bool good = convert_shape(&r, &prefix, model, error);
    if (good) {
        gpt_params_table(table, model);
        *params = (float*)need(calloc(table->elements, sizeof(float)));
    }
    for (int i = 0; good && i < GPT_TENSORS; i++) {
        const TensorSpec* s = &table->tensors[i];
        size_t count = s->real_rows * s->cols;
        float* turned = (float*)need(malloc(count * sizeof(float)));
        for (size_t layer = 0; good && layer < s->layers; layer++) {
            float* to = *params + s->offset + layer * s->rows * s->cols;
            convert_name(name, sizeof(name), prefix, i, layer);
            good = convert_read_tensor(&r, name, count, convert_table[i].transposed ? turned : to, error);
            if (good && convert_table[i].transposed) { convert_transpose(to, turned, s->cols, s->real_rows); }
        }
        free(turned);
    }
    safe_close(&r);
    return good;
}

static bool convert_read_model(const char* path, ParamTable* table, ModelHeader* model, float** params, Error* error) {
    char file[PATH_MAX];
    Error notice;
    int version;
    if (!state_find_model(path, file, &notice, error) || !model_file_read_header(file, model, &version, error)) { return false; }
    gpt_params_table(table, model);
    *params = (float*)need(calloc(table->elements, sizeof(float)));
    if (!model_file_read(file, model, *params, MODEL_FP32, &notice, error)) { return false; }
    if (notice.text[0]) { fprintf(stderr, "notice: %s\n", notice.text); }
    return true;
}

static bool ends_with(const char* text, const char* end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

bool command_convert(const Options* o, Error* error) {
    ParamTable table;
    ModelHeader model;
    float* params = NULL;
    memset(&table, 0, sizeof(table));
    bool good = ends_with(o->from, ".safetensors") ? convert_read_safetensors(o->from, &table, &model, &params, error)
                                                   : convert_read_model(o->from, &table, &model, &params, error);
    int format = o->convert_format != CONVERT_AUTO ? o->convert_format : ends_with(o->to, ".safetensors") ? CONVERT_SAFETENSORS : CONVERT_FP32;
    if (good && format == CONVERT_SAFETENSORS) {
        good = convert_write_safetensors(o->to, &table, &model, params, error);
    } else if (good) {
        good = model_file_write(o->to, &model, format == CONVERT_BF16 ? MODEL_BF16 : MODEL_FP32, params, MODEL_FP32, NULL, error);
    }
    if (good) { printf("%s: %zu parameters written to %s\n", o->from, table.packed, o->to); }
    free(params);
    params_free(&table);
    return good;
}
