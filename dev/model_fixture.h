// model_fixture.h - what the model rows stand on: PyTorch's fixtures (dev/fixtures, made by dev/make_fixture.py) or random ones, the
// model run on them in several ways, and gradients compared tensor by tensor.
// Tolerances, norm of the difference against the norm per tensor: fp32 activations carry about 1e-7 through some 20 operations, so
// 5e-6 leaves room for another order of addition (found: 9e-7); bf16 rounds each activation and gradient by 2^-9 = 2e-3, which adds
// up to 1-2 %. The gradient of the K part of qkvb is zero in exact arithmetic (softmax does not see a shift common to all scores of
// a query): it is bounded by a share of the gradient of the Q and V parts.
#pragma once
#include "../kernels/embedding.cuh"
#include "../trainer/debug_state.h"
#include "op_tensor.h"

#ifdef FLOATX_BF16
#define MODEL_TOLERANCE 3e-2
#define MODEL_LOSS_TOLERANCE 1e-2
#define MODEL_SAME_TOLERANCE 1e-2 // between two ways to the same result
#elif ON_GPU && !defined(CUDA_ON_CPU)
#define MODEL_TOLERANCE 5e-3 // TF32 has 11 bits
#define MODEL_LOSS_TOLERANCE 1e-3
#define MODEL_SAME_TOLERANCE 1e-3
#define MODEL_MOVEMENT_TOLERANCE 5e-2 // AdamW divides small gradients by their own size
#else
#define MODEL_TOLERANCE 5e-6
#define MODEL_LOSS_TOLERANCE 2e-6
#define MODEL_SAME_TOLERANCE 2e-6
#define MODEL_MOVEMENT_TOLERANCE 1e-4
#endif

#define MODEL_CURVE_STEPS 10

typedef struct {
    ModelHeader header;
    ReferenceConfig shape;
    DebugState state;
    size_t elements;
    floatX* params;  // on the host, rounded to floatX
    double* weights; // the same values
    double losses[MODEL_CURVE_STEPS], norms[MODEL_CURVE_STEPS]; // of the training curve
} ModelFixture;

// Beside this file, wherever the tests are started from.
static const char* model_fixture_path(const char* name, const char* what) {
    static char path[PATH_MAX];
    const char* slash = strrchr(__FILE__, '/');
    snprintf(path, sizeof(path), "%.*sfixtures/%s_%s", slash ? (int)(slash + 1 - __FILE__) : 0, __FILE__, name, what);
    return path;
}

static double model_value(const floatX* x) {
    uint32_t u = 0;
    memcpy((char*)&u + (sizeof(u) - sizeof(*x)), x, sizeof(*x)); // bf16 is the upper half
    float value;
    memcpy(&value, &u, sizeof(value));
    return value;
}

static double* model_values(const floatX* x, size_t count) {
    double* values = reference_zeros(count);
    for (size_t i = 0; i < count; i++) { values[i] = model_value(x + i); }
    return values;
}

static bool model_fixture_open(ModelFixture* f, const char* name) {
    Error error = {{0}};
    int version = 0;
    memset(f, 0, sizeof(*f));
    bool good = model_file_read_header(model_fixture_path(name, "model.bin"), &f->header, &version, &error);
    if (good) {
        f->elements = (size_t)model_header_elements(&f->header);
        f->params = (floatX*)need(calloc(f->elements, sizeof(floatX)));
        good = model_file_read(model_fixture_path(name, "model.bin"), &f->header, f->params, MODEL_FLOATX, NULL, &error) &&
               debug_state_read(model_fixture_path(name, "debug_state.bin"), &f->header, &f->state, &error);
    }
    CHECK_OK(good, error);
    if (!good) { return false; }
    const ModelHeader* h = &f->header;
    ReferenceConfig shape = {(size_t)h->layers, (size_t)h->heads, (size_t)h->channels, (size_t)h->vocab_size, (size_t)h->padded_vocab,
                             (size_t)h->max_seq_len};
    f->shape = shape;
    f->weights = model_values(f->params, f->elements);
    FILE* file = fopen(model_fixture_path(name, "losses.txt"), "r");
    int steps = 0;
    for (char line[256]; file && fgets(line, sizeof(line), file);) {
        if (steps < MODEL_CURVE_STEPS && sscanf(line, "%lf %lf", &f->losses[steps], &f->norms[steps]) == 2) { steps++; }
    }
    if (file) { fclose(file); }
    CHECK(steps == MODEL_CURVE_STEPS, "%s: %d steps", model_fixture_path(name, "losses.txt"), steps);
    return steps == MODEL_CURVE_STEPS;
}

static void model_fixture_close(ModelFixture* f) {
    debug_state_free(&f->state);
    free(f->params);
    free(f->weights);
}

// A fixture without a file: random weights, tokens and targets, and no opinion of PyTorch's.
static void model_fixture_random(ModelFixture* f, ModelHeader header, int B, int T, uint64_t seed) {
    memset(f, 0, sizeof(*f));
    f->header = header;
    ReferenceConfig shape = {(size_t)header.layers, (size_t)header.heads, (size_t)header.channels, (size_t)header.vocab_size,
                             (size_t)header.padded_vocab, (size_t)header.max_seq_len};
    f->shape = shape;
    f->elements = reference_elements(shape);
    f->params = (floatX*)need(calloc(f->elements, sizeof(floatX)));
    ReferenceRandom random = {seed};
    for (int k = 0; k < REFERENCE_TENSORS; k++) {
        ReferenceTensor t = reference_tensor(shape, k);
        bool gain = t.name[0] == 'l' && t.name[3] == 'w'; // ln1w, ln2w, lnfw
        double scale = t.rows > 1 && k != REF_WTE && k != REF_WPE ? 1.0 / sqrt((double)t.cols) : 0.3;
        for (size_t i = 0; i < t.count; i++) {
            float value = (float)((gain ? 1.0 : 0.0) + scale * reference_normal(&random));
            if (k == REF_WTE && i / t.cols >= shape.V) { value = 0.0f; }
            uint32_t u;
            memcpy(&u, &value, sizeof(u));
            if (sizeof(floatX) == 2) { u += 0x8000u; } // any rounding will do
            memcpy(f->params + t.offset + i, (char*)&u + (sizeof(u) - sizeof(floatX)), sizeof(floatX));
        }
    }
    f->weights = model_values(f->params, f->elements);
    size_t N = (size_t)B * (size_t)T;
    f->state.batch = B;
    f->state.seq_len = T;
    f->state.inputs = (int32_t*)need(calloc(N, sizeof(int32_t)));
    f->state.targets = (int32_t*)need(calloc(N, sizeof(int32_t)));
    for (size_t n = 0; n < N; n++) {
        f->state.inputs[n] = (int32_t)(reference_random(&random) % shape.V);
        f->state.targets[n] = (int32_t)(reference_random(&random) % shape.V);
    }
}

// ---- running the model ----

// Uploads sequences first .. first + count - 1 of the fixture; the device arrays lie in `block`, freed by the caller.
static MicroBatch model_batch(const ModelFixture* f, int first, int count, int** block, size_t* bytes) {
    size_t T = (size_t)f->state.seq_len, N = (size_t)count * T, at = (size_t)first * T;
    int* host = (int*)need(calloc(4 * N + 1, sizeof(int)));
    int* counts = (int*)need(calloc((size_t)f->header.vocab_size + 1, sizeof(int)));
    memcpy(host, f->state.inputs + at, N * sizeof(int));
    memcpy(host + N, f->state.targets + at, N * sizeof(int));
    TokenOrder order = {host + 2 * N, host + 3 * N, 0};
    token_order(&order, counts, host, N, f->header.vocab_size);
    *bytes = (4 * N + 1) * sizeof(int);
    *block = (int*)need(device_alloc(*bytes));
    device_upload(*block, host, *bytes);
    device_sync();
    MicroBatch batch = {*block, *block + N, *block + 2 * N, *block + 3 * N, order.groups, count, f->state.seq_len};
    free(host);
    free(counts);
    return batch;
}

// B, T: what the buffers are made for; head_rows: 0 = the program's choice
static bool model_open(Gpt* g, const ModelFixture* f, int B, int T, int recompute, size_t head_rows) {
    Error error = {{0}};
    gpt_plan(g, &f->header, B, T, recompute, true, head_rows);
    bool good = gpt_allocate(g, &error);
    CHECK_OK(good, error);
    if (good) {
        device_upload(g->params, f->params, f->elements * sizeof(floatX));
        device_sync();
    }
    return good;
}

// NaN everywhere: the first micro-batch has to overwrite it.
static void model_spoil(floatX* x, size_t count) {
    char* host = (char*)need(malloc(count * sizeof(floatX)));
    memset(host, 0xff, count * sizeof(floatX));
    device_upload(x, host, count * sizeof(floatX));
    device_sync();
    free(host);
}

static double* model_gradients(const Gpt* g) {
    floatX* host = (floatX*)need(malloc(g->table.elements * sizeof(floatX)));
    device_download(host, g->grads, g->table.elements * sizeof(floatX));
    double* values = model_values(host, g->table.elements);
    free(host);
    return values;
}

// Forward and backward of the whole batch in micro-batches of at most `micro` sequences; returns the mean loss.
static double model_step(Gpt* g, const ModelFixture* f, int micro) {
    int B = f->state.batch;
    double total = 0.0, tokens = (double)B * f->state.seq_len;
    float* device = (float*)need(device_alloc(sizeof(float)));
    for (int first = 0; first < B; first += micro) {
        int* block;
        size_t bytes;
        float sum = NAN;
        MicroBatch batch = model_batch(f, first, micro < B - first ? micro : B - first, &block, &bytes);
        gpt_forward_backward(g, device, &batch, (float)(1.0 / tokens), first == 0, true);
        device_download(&sum, device, sizeof(sum));
        total += sum;
        device_free(block, bytes);
    }
    device_free(device, sizeof(float));
    return total / tokens;
}

typedef struct {
    int B, T, recompute, micro; // B, T: capacity; 0 = the batch's own
    size_t head_rows;
} ModelWay;

typedef struct {
    double loss; // mean over all tokens
    double* grads;
} ModelResult;

static ModelResult model_run(const ModelFixture* f, ModelWay way) {
    Gpt g;
    ModelResult result = {NAN, NULL};
    int B = way.B ? way.B : f->state.batch, T = way.T ? way.T : f->state.seq_len;
    if (!model_open(&g, f, B, T, way.recompute, way.head_rows)) { return result; }
    model_spoil(g.grads, g.table.elements);
    result.loss = model_step(&g, f, way.micro ? way.micro : f->state.batch);
    result.grads = model_gradients(&g);
    gpt_free(&g);
    return result;
}

// ---- comparing ----

// Every tensor by its own norm; the K part of qkvb by the norm of the rest of qkvb.
static void model_compare_gradients(const char* what, const ModelFixture* f, const double* got, const double* want, double tolerance) {
    for (int k = 0; k < REFERENCE_TENSORS; k++) {
        ReferenceTensor t = reference_tensor(f->shape, k);
        char label[96];
        snprintf(label, sizeof(label), "%s: gradient of %s", what, t.name);
        if (k != REF_QKVB) {
            double difference = 0.0, norm = reference_norm(want + t.offset, t.count);
            for (size_t i = t.offset; i < t.offset + t.count; i++) { difference += (got[i] - want[i]) * (got[i] - want[i]); }
            CHECK(sqrt(difference) <= tolerance * norm, "%s: relative error %.3g, tolerance %.3g", label, sqrt(difference) / norm,
                  tolerance);
#ifdef OPS_VERBOSE
            printf("      %-44s relative %.2e  tolerance %.1e\n", label, sqrt(difference) / norm, tolerance);
#endif
            continue;
        }
        double difference = 0.0, key = 0.0, norm = reference_norm(want + t.offset, t.count);
        for (size_t i = 0; i < t.count; i++) {
            bool in_key = i / f->shape.C % 3 == 1;
            double d = got[t.offset + i] - want[t.offset + i];
            if (in_key) {
                key += d * d;
            } else {
                difference += d * d;
            }
        }
        CHECK(sqrt(difference) <= tolerance * norm, "%s: relative error %.3g, tolerance %.3g", label, sqrt(difference) / norm, tolerance);
        CHECK(sqrt(key) <= tolerance * norm, "%s, K part: %.3g of the rest, tolerance %.3g", label, sqrt(key) / norm, tolerance);
    }
}

static double* model_widen(const float* x, size_t count) {
    double* values = reference_zeros(count);
    for (size_t i = 0; i < count; i++) { values[i] = x[i]; }
    return values;
}

static const char* const model_fixture_names[] = {"tiny", "odd"};
