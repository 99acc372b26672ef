// test_model.h - the whole model: loss, logits and every gradient against PyTorch's fixture and against the double-precision
// reference; recomputation, micro-batches, pieces of the head and larger buffers must not change the result; two runs are the same
// to the bit; NaN shows; ten training steps follow PyTorch's. Tolerances are in model_fixture.h. Included after train_gpt.cu.
#pragma once
#include "model_fixture.h"
#include "test_ops.h"

// ---- forward and backward ----

// fp32 files of double-precision results: what differs is their last bit, 2^-24.
static void model_reference_against_pytorch(void) {
    for (size_t k = 0; k < COUNT_OF(model_fixture_names); k++) {
        ModelFixture f;
        if (!model_fixture_open(&f, model_fixture_names[k])) { return; }
        size_t logits = (size_t)f.state.batch * (size_t)f.state.seq_len * f.shape.V;
        double *grads = reference_zeros(f.elements), *want = model_widen(f.state.gradients, f.elements);
        double* want_logits = model_widen(f.state.logits, logits);
        double exact = sizeof(floatX) == 4 ? 2e-7 : 5e-2; // in bf16 the weights themselves are not the fixture's
        ReferenceRun run = reference_run_new(f.shape, (size_t)f.state.batch, (size_t)f.state.seq_len);
        double loss = reference_forward(&run, f.weights, f.state.inputs, f.state.targets);
        reference_backward(&run, f.weights, grads, f.state.inputs, f.state.targets);
        CHECK(fabs(loss - (double)f.state.loss) <= exact * loss, "loss %.9f, PyTorch %.9f", loss, (double)f.state.loss);
        ops_compare("reference logits", run.logits, want_logits, logits, exact);
        model_compare_gradients("reference", &f, grads, want, exact);
        reference_run_free(&run);
        free(grads);
        free(want);
        free(want_logits);
        model_fixture_close(&f);
    }
}

// The reference's own training curve, with its AdamW and clipping, is PyTorch's.
static void model_reference_curve(void) {
    const ReferenceAdamW settings = {1e-3, 0.9, 0.95, 1e-8, 0.1};
    for (size_t k = 0; k < COUNT_OF(model_fixture_names); k++) {
        ModelFixture f;
        if (!model_fixture_open(&f, model_fixture_names[k])) { return; }
        double *g = reference_zeros(f.elements), *m = reference_zeros(f.elements), *v = reference_zeros(f.elements);
        ReferenceRun run = reference_run_new(f.shape, (size_t)f.state.batch, (size_t)f.state.seq_len);
        double exact = sizeof(floatX) == 4 ? 1e-6 : 2e-2;
        for (size_t step = 0; step < MODEL_CURVE_STEPS; step++) {
            double loss = reference_forward(&run, f.weights, f.state.inputs, f.state.targets);
            memset(g, 0, f.elements * sizeof(double));
            reference_backward(&run, f.weights, g, f.state.inputs, f.state.targets);
            double norm = reference_clip(g, f.elements, 3.0);
            CHECK(fabs(loss - f.losses[step]) <= exact * loss, "step %zu: loss %.9f, PyTorch %.9f", step, loss, f.losses[step]);
            CHECK(fabs(norm - f.norms[step]) <= 10.0 * exact * norm, "step %zu: norm %.9f, PyTorch %.9f", step, norm, f.norms[step]);
            reference_adamw_model(f.shape, f.weights, m, v, g, settings, step + 1);
        }
        reference_run_free(&run);
        free(g);
        free(m);
        free(v);
        model_fixture_close(&f);
    }
}

static void model_check_logits(const ModelFixture* f) {
    Gpt g;
    size_t N = (size_t)f->state.batch * (size_t)f->state.seq_len, Vp = f->shape.Vp, V = f->shape.V;
    if (!model_open(&g, f, f->state.batch, f->state.seq_len, RECOMPUTE_NONE, 0)) { return; }
    int* block;
    size_t bytes;
    MicroBatch batch = model_batch(f, 0, f->state.batch, &block, &bytes);
    gpt_forward(&g, batch.tokens, batch.B, batch.T);
    gpt_logits(&g, g.logits, 0, N);
    floatX* host = (floatX*)need(malloc(N * Vp * sizeof(floatX)));
    device_download(host, g.logits, N * Vp * sizeof(floatX));
    double *got = reference_zeros(N * V), *want = model_widen(f->state.logits, N * V);
    for (size_t i = 0; i < N * V; i++) { got[i] = model_value(host + i / V * Vp + i % V); }
    ops_compare("model: logits", got, want, N * V, MODEL_TOLERANCE);
    device_free(block, bytes);
    gpt_free(&g);
    free(host);
    free(got);
    free(want);
}

static void model_against_pytorch(void) {
    for (size_t k = 0; k < COUNT_OF(model_fixture_names); k++) {
        ModelFixture f;
        if (!model_fixture_open(&f, model_fixture_names[k])) { return; }
        model_check_logits(&f);
        const ModelWay plain = {0, 0, RECOMPUTE_NONE, 0, 0};
        ModelResult result = model_run(&f, plain);
        double* want = model_widen(f.state.gradients, f.elements);
        CHECK(fabs(result.loss - (double)f.state.loss) <= MODEL_LOSS_TOLERANCE * result.loss, "loss %.7f, PyTorch %.7f", result.loss,
              (double)f.state.loss);
        // bf16: the fixture's weights are fp32, ours are rounded
        model_compare_gradients(model_fixture_names[k], &f, result.grads, want, sizeof(floatX) == 4 ? MODEL_TOLERANCE : 6e-2);
        free(want);
        free(result.grads);
        model_fixture_close(&f);
    }
}

// Shapes that the fixtures do not have, against the double reference on the very weights the model has.
static void model_against_reference(void) {
    const struct {
        ModelHeader header;
        int B, T;
    } cases[] = {
        {{1, 5, 1, 1, 8, 128}, 1, 1},    {{63, 257, 1, 2, 48, 384}, 1, 63}, {{8, 257, 2, 1, 24, 384}, 3, 1},
        {{70, 257, 1, 2, 160, 384}, 2, 65}, {{16, 1000, 2, 2, 192, 1024}, 4, 3}, {{9, 128, 1, 5, 20, 128}, 2, 9},
    };
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        ModelFixture f;
        model_fixture_random(&f, cases[k].header, cases[k].B, cases[k].T, 100 + k);
        double* want = reference_zeros(f.elements);
        ReferenceRun run = reference_run_new(f.shape, (size_t)cases[k].B, (size_t)cases[k].T);
        double want_loss = reference_forward(&run, f.weights, f.state.inputs, f.state.targets);
        reference_backward(&run, f.weights, want, f.state.inputs, f.state.targets);
        const ModelWay plain = {0, 0, RECOMPUTE_NONE, 0, 0};
        ModelResult result = model_run(&f, plain);
        char label[64];
        const ModelHeader* h = &f.header;
        snprintf(label, sizeof(label), "L %d NH %d C %d B %d T %d", h->layers, h->heads, h->channels, cases[k].B, cases[k].T);
        CHECK(fabs(result.loss - want_loss) <= MODEL_LOSS_TOLERANCE * want_loss, "%s: loss %.7f, reference %.7f", label, result.loss,
              want_loss);
        model_compare_gradients(label, &f, result.grads, want, MODEL_TOLERANCE);
        reference_run_free(&run);
        free(want);
        free(result.grads);
        model_fixture_close(&f);
    }
}

// Ways that must agree with the plain one: `tolerance` 0 = the same bits.
static void model_same(const char* name, const char* what, ModelWay way, double tolerance) {
    ModelFixture f;
    if (!model_fixture_open(&f, name)) { return; }
    const ModelWay plain = {0, 0, RECOMPUTE_NONE, 0, 0};
    ModelResult want = model_run(&f, plain), got = model_run(&f, way);
    CHECK(fabs(got.loss - want.loss) <= tolerance * want.loss, "%s: loss %.9f, expected %.9f", what, got.loss, want.loss);
    model_compare_gradients(what, &f, got.grads, want.grads, tolerance);
    free(want.grads);
    free(got.grads);
    model_fixture_close(&f);
}

// The same arithmetic again; only fused multiply-adds may differ between a fused and a lone layernorm.
static void model_recompute(void) {
    const char* what[] = {"recompute gelu", "recompute layernorm", "recompute block"};
    for (int level = RECOMPUTE_GELU; level <= RECOMPUTE_BLOCK; level++) {
        const ModelWay way = {0, 0, level, 0, 0};
        if (!OPS_SMALL) { model_same("tiny", what[level - 1], way, MODEL_SAME_TOLERANCE); }
        model_same("odd", what[level - 1], way, MODEL_SAME_TOLERANCE);
    }
}

static void model_two_runs(void) {
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        ModelFixture f;
        if (!model_fixture_open(&f, OPS_SMALL ? "odd" : "tiny")) { return; }
        const ModelWay way = {0, 0, level, 1, 0};
        ModelResult a = model_run(&f, way), b = model_run(&f, way);
        CHECK(a.loss == b.loss && memcmp(a.grads, b.grads, f.elements * sizeof(double)) == 0, "level %d: two runs differ", level);
        free(a.grads);
        free(b.grads);
        model_fixture_close(&f);
    }
}

// Sums over micro-batches round once more each; pieces of the head and spare room change nothing but the order of addition.
static void model_micro_batches(void) {
    const ModelWay one = {0, 0, RECOMPUTE_NONE, 1, 0}, two = {2, 0, RECOMPUTE_GELU, 2, 0}, room = {5, 4, RECOMPUTE_LAYERNORM, 0, 0};
    model_same("tiny", "micro-batch 1 of 2", one, MODEL_SAME_TOLERANCE);
    model_same("odd", "micro-batch 1 of 3", one, MODEL_SAME_TOLERANCE);
    model_same("odd", "micro-batches 2 and 1 of 3", two, MODEL_SAME_TOLERANCE);
    model_same("odd", "buffers for more", room, MODEL_SAME_TOLERANCE);
    const size_t pieces[] = {1, 5, 73};
    for (size_t i = 0; i < COUNT_OF(pieces); i++) {
        const ModelWay way = {0, 0, RECOMPUTE_NONE, 0, pieces[i]};
        model_same(OPS_SMALL ? "odd" : "tiny", "head in pieces", way, MODEL_SAME_TOLERANCE);
    }
}

// What stands in the padding rows of wte has no say, and their gradient is zero.
static void model_padding(void) {
    ModelFixture f;
    if (!model_fixture_open(&f, "tiny")) { return; }
    const ModelWay plain = {0, 0, RECOMPUTE_NONE, 0, 0};
    ModelResult want = model_run(&f, plain);
    size_t from = f.shape.V * f.shape.C, to = f.shape.Vp * f.shape.C, not_zero = 0;
    for (size_t i = from; i < to; i++) { f.params[i] = f.params[i % from]; }
    ModelResult got = model_run(&f, plain);
    for (size_t i = from; i < to; i++) { not_zero += got.grads[i] != 0.0 || want.grads[i] != 0.0; }
    CHECK(not_zero == 0, "%zu values of the padding have a gradient", not_zero);
    CHECK(fabs(got.loss - want.loss) <= 1e-6 * want.loss, "loss %.9f, with other padding %.9f", want.loss, got.loss);
    model_compare_gradients("other padding", &f, got.grads, want.grads, MODEL_SAME_TOLERANCE);
    free(want.grads);
    free(got.grads);
    model_fixture_close(&f);
}

static double model_device_norm(Gpt* g) {
    size_t units = g->table.unit_count;
    float *host = (float*)need(malloc(units * sizeof(float))), *device = (float*)need(device_alloc(units * sizeof(float)));
    double square = 0.0;
    gpt_unit_square_sums(g, device);
    device_download(host, device, units * sizeof(float));
    for (size_t u = 0; u < units; u++) { square += host[u]; }
    device_free(device, units * sizeof(float));
    free(host);
    return sqrt(square);
}

static void model_norm(void) {
    ModelFixture f;
    Gpt g;
    if (!model_fixture_open(&f, "tiny") || !model_open(&g, &f, f.state.batch, f.state.seq_len, RECOMPUTE_NONE, 0)) { return; }
    model_step(&g, &f, f.state.batch);
    double *grads = model_gradients(&g), want = reference_norm(grads, f.elements), got = model_device_norm(&g);
    CHECK(fabs(got - want) <= 1e-5 * want, "norm %.9f of gradients whose norm is %.9f", got, want);
    CHECK(fabs(got - f.norms[0]) <= MODEL_LOSS_TOLERANCE * got, "norm %.9f, PyTorch %.9f", got, f.norms[0]);
    free(grads);
    gpt_free(&g);
    model_fixture_close(&f);
}

// One bad weight anywhere makes the loss or at least the norm non-finite; nothing crashes.
static void model_non_finite(void) {
    ModelFixture f;
    Gpt g;
    if (!model_fixture_open(&f, "odd") || !model_open(&g, &f, f.state.batch, f.state.seq_len, RECOMPUTE_NONE, 0)) { return; }
    const int tensors[] = {REF_WTE, REF_LN1W, REF_QKVW, REF_ATTPROJB, REF_FCW, REF_LNFB};
    for (size_t k = 0; k < COUNT_OF(tensors); k++) {
        floatX bad;
        memset(&bad, 0xff, sizeof(bad)); // a NaN in either format
        size_t at = reference_at(f.shape, tensors[k], tensors[k] == REF_WTE || tensors[k] == REF_LNFB ? 0 : 1);
        device_upload(g.params + at, &bad, sizeof(bad));
        device_sync();
        double loss = model_step(&g, &f, f.state.batch), norm = model_device_norm(&g);
        const char* name = reference_tensor(f.shape, tensors[k]).name;
        CHECK(!isfinite(loss) && !isfinite(norm), "a NaN in %s gives loss %g, norm %g", name, loss, norm);
        device_upload(g.params + at, f.params + at, sizeof(bad));
        device_sync();
    }
    double loss = model_step(&g, &f, f.state.batch);
    CHECK(isfinite(loss) && isfinite(model_device_norm(&g)), "the loss does not recover: %g", loss);
    gpt_free(&g);
    model_fixture_close(&f);
}

// ---- training steps ----

// The fixture's tokens as a shard; with `overfit` every step reads them from the start.
static bool model_write_shard(const ModelFixture* f, char* path, size_t size, Error* error) {
    size_t N = (size_t)f->state.batch * (size_t)f->state.seq_len;
    uint16_t* tokens = (uint16_t*)need(malloc((N + 1) * sizeof(uint16_t)));
    for (size_t n = 0; n < N; n++) { tokens[n] = (uint16_t)f->state.inputs[n]; }
    tokens[N] = (uint16_t)f->state.targets[N - 1];
    snprintf(path, size, "%s/model_fixture.bin", test_folder());
    bool good = shard_write(path, tokens, N + 1, sizeof(uint16_t), error);
    free(tokens);
    return good;
}

// A trainer on the fixture's weights and tokens, with the settings of its training curve.
static bool model_trainer_open(Trainer* t, Options* o, const ModelFixture* f, int micro, int recompute, bool masters) {
    Error error = {{0}};
    memset(t, 0, sizeof(*t));
    options_defaults(o, COMMAND_TRAIN);
    bool good = model_write_shard(f, o->train_data, sizeof(o->train_data), &error);
    o->val_every = o->sample_every = 0;
    o->overfit = true;
    o->steps = MODEL_CURVE_STEPS;
    o->batch = micro;
    o->seq_len = f->state.seq_len;
    o->total_batch = (int64_t)f->state.batch * f->state.seq_len;
    o->recompute = recompute;
    o->schedule = SCHEDULE_CONSTANT;
    o->warmup = 0;
    o->lr = 1e-3;
    o->beta1 = 0.9;
    o->beta2 = 0.95;
    o->eps = 1e-8;
    o->weight_decay = 0.1;
    o->clip = 3.0;
    o->master_weights = masters;
    good = good && trainer_create(t, o, &f->header, &error);
    CHECK_OK(good, error);
    if (!good) { return false; }
    device_upload(t->gpt.params, f->params, f->elements * sizeof(floatX));
    device_sync();
    trainer_reset_masters(t);
    return true;
}

static double* model_trainer_params(const Trainer* t) {
    floatX* host = (floatX*)need(malloc(t->gpt.table.elements * sizeof(floatX)));
    device_download(host, t->gpt.params, t->gpt.table.elements * sizeof(floatX));
    double* values = model_values(host, t->gpt.table.elements);
    free(host);
    return values;
}

// bf16 starts from rounded weights and rounds each update, with masters or without: the curve stays near, not equal.
#define MODEL_CURVE_TOLERANCE (sizeof(floatX) == 2 ? 2e-2 : MODEL_LOSS_TOLERANCE * 5.0)

static void model_curve(const char* name, int micro, int recompute, bool masters) {
    static Options options; // large
    ModelFixture f;
    Trainer t;
    Error error = {{0}};
    if (!model_fixture_open(&f, name)) { return; }
    if (model_trainer_open(&t, &options, &f, micro, recompute, masters)) {
        for (int step = 0; step < MODEL_CURVE_STEPS; step++) {
            StepResult r;
            bool good = trainer_step(&t, &r, &error);
            CHECK_OK(good, error);
            if (!good) { break; }
            CHECK(fabs(r.loss - f.losses[step]) <= MODEL_CURVE_TOLERANCE * r.loss, "%s, micro %d, step %d: loss %.7f, PyTorch %.7f", name,
                  micro, step, r.loss, f.losses[step]);
            CHECK(fabs(r.norm - f.norms[step]) <= 5.0 * MODEL_CURVE_TOLERANCE * r.norm, "%s, micro %d, step %d: norm %.7f, PyTorch %.7f",
                  name, micro, step, r.norm, f.norms[step]);
#ifdef OPS_VERBOSE
            printf("      %s micro %d step %d: loss off by relative %.2e norm %.2e\n", name, micro, step,
                   fabs(r.loss / f.losses[step] - 1.0), fabs(r.norm / f.norms[step] - 1.0));
#endif
        }
    }
    trainer_free(&t);
    model_fixture_close(&f);
}

static void model_training_curve(void) {
    if (!OPS_SMALL) {
        model_curve("tiny", 2, RECOMPUTE_NONE, true);
        model_curve("tiny", 1, RECOMPUTE_BLOCK, true);
    }
    model_curve("odd", 3, RECOMPUTE_GELU, true);
    model_curve("odd", 2, RECOMPUTE_LAYERNORM, false);
}

#ifndef FLOATX_BF16 // there the rounding of weights is as large as their movement; adamw's own row looks at it
// After ten steps every tensor has moved as the double-precision AdamW moves it: decay where it belongs, and nowhere else.
static void model_trained_weights(void) {
    static Options options;
    ModelFixture f;
    Trainer t;
    Error error = {{0}};
    const ReferenceAdamW settings = {1e-3, 0.9, 0.95, 1e-8, 0.1};
    if (!model_fixture_open(&f, "tiny") || !model_trainer_open(&t, &options, &f, 2, RECOMPUTE_NONE, true)) { return; }
    double *w = reference_zeros(f.elements), *g = reference_zeros(f.elements);
    double *m = reference_zeros(f.elements), *v = reference_zeros(f.elements);
    memcpy(w, f.weights, f.elements * sizeof(double));
    ReferenceRun run = reference_run_new(f.shape, (size_t)f.state.batch, (size_t)f.state.seq_len);
    for (size_t step = 0; step < MODEL_CURVE_STEPS; step++) {
        StepResult r;
        CHECK_OK(trainer_step(&t, &r, &error), error);
        reference_forward(&run, w, f.state.inputs, f.state.targets);
        memset(g, 0, f.elements * sizeof(double));
        reference_backward(&run, w, g, f.state.inputs, f.state.targets);
        reference_clip(g, f.elements, 3.0);
        reference_adamw_model(f.shape, w, m, v, g, settings, step + 1);
    }
    double* got = model_trainer_params(&t);
    for (size_t i = 0; i < f.elements; i++) {
        got[i] -= f.weights[i];
        w[i] -= f.weights[i];
    }
    for (int k = 0; k < REFERENCE_TENSORS; k++) {
        ReferenceTensor tensor = reference_tensor(f.shape, k);
        double difference = 0.0, norm = 0.0;
        for (size_t i = 0; i < tensor.count; i++) {
            if (k == REF_QKVB && i / f.shape.C % 3 == 1) { continue; } // the K part's gradient is rounding alone
            size_t at = tensor.offset + i;
            difference += (got[at] - w[at]) * (got[at] - w[at]);
            norm += w[at] * w[at];
        }
        CHECK(sqrt(difference) <= MODEL_MOVEMENT_TOLERANCE * sqrt(norm), "%s moved by %.6f, off by %.3g of it", tensor.name, sqrt(norm),
              sqrt(difference / norm));
#ifdef OPS_VERBOSE
        printf("      movement of %-20s relative %.2e\n", tensor.name, sqrt(difference / norm));
#endif
    }
    double* values[] = {w, g, m, v, got};
    for (size_t i = 0; i < COUNT_OF(values); i++) { free(values[i]); }
    reference_run_free(&run);
    trainer_free(&t);
    model_fixture_close(&f);
}
#endif

// Ten steps, twice, in one process: trainers can be built and destroyed, and the weights are the same to the bit.
static void model_training_repeats(void) {
    static Options options;
    double* first = NULL;
    for (int round = 0; round < 2; round++) {
        ModelFixture f;
        Trainer t;
        Error error = {{0}};
        if (!model_fixture_open(&f, "odd") || !model_trainer_open(&t, &options, &f, 2, RECOMPUTE_GELU, true)) { return; }
        for (int step = 0; step < MODEL_CURVE_STEPS; step++) {
            StepResult r;
            CHECK_OK(trainer_step(&t, &r, &error), error);
        }
        double* got = model_trainer_params(&t);
        CHECK(!first || memcmp(first, got, f.elements * sizeof(double)) == 0, "the second training differs");
        free(first);
        first = got;
        trainer_free(&t);
        model_fixture_close(&f);
    }
    free(first);
}

// A bad weight ends the step with a message that names it, before it is written anywhere else.
static void model_step_refuses_nan(void) {
    static Options options;
    ModelFixture f;
    Trainer t;
    Error error = {{0}};
    StepResult r;
    if (!model_fixture_open(&f, "tiny") || !model_trainer_open(&t, &options, &f, 2, RECOMPUTE_NONE, true)) { return; }
    floatX bad;
    memset(&bad, 0xff, sizeof(bad));
    size_t at = reference_at(f.shape, REF_FCW, 1) + 7;
    device_upload(t.gpt.params + at, &bad, sizeof(bad));
    device_sync();
    CHECK_FAILS(trainer_step(&t, &r, &error), error, "weights of fcw, layer 1");
    double *after = model_trainer_params(&t), changed = 0.0;
    for (size_t i = 0; i < f.elements; i++) { changed += i != at && after[i] != f.weights[i]; }
    CHECK(changed == 0.0, "%g weights were changed by the failed step", changed);
    free(after);
    trainer_free(&t);
    model_fixture_close(&f);
}

static const TestRow model_tests[] = {
    {"reference: equals PyTorch on both fixtures", model_reference_against_pytorch},
    {"reference: ten AdamW steps equal PyTorch's", model_reference_curve},
    {"model: loss, logits, gradients equal PyTorch's", model_against_pytorch},
    {"model: loss and gradients equal the reference's", model_against_reference},
    {"model: recompute levels give the same gradients", model_recompute},
    {"model: micro-batches, head pieces, spare room", model_micro_batches},
    {"model: two runs are the same to the bit", model_two_runs},
    {"model: padding of the vocabulary has no say", model_padding},
    {"model: gradient norm", model_norm},
    {"model: a NaN weight shows in loss and norm", model_non_finite},
    {"trainer: ten AdamW steps equal PyTorch's", model_training_curve},
#ifndef FLOATX_BF16
    {"trainer: trained weights equal the reference's", model_trained_weights},
#endif
    {"trainer: training twice is the same to the bit", model_training_repeats},
    {"trainer: a NaN weight ends the step by name", model_step_refuses_nan},
};
