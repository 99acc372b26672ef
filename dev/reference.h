// reference.h - the oracle: GPT-2 forward and backward, AdamW, clipping and learning-rate schedules, written once more in double
// precision, as plainly as the mathematics allows and without a line or a formula form from kernels/. Far too slow to train with.
// The model (Radford et al. 2019): pre-norm blocks, layernorm eps 1e-5, tanh GELU, causal attention scaled by 1/sqrt(HS), head tied
// to wte, loss = mean cross entropy over all tokens. Parameters are one block of 16 tensors in the order of model files, each over
// all layers; linear weights are (out, in). Backward functions ADD to every gradient they are given.
#pragma once
#include "../kernels/base.h"

static double* reference_zeros(size_t count) { return (double*)need(calloc(max_size(count, 1), sizeof(double))); }

// ---- random numbers for tests: splitmix64 (Steele et al. 2014) and Box-Muller ----

typedef struct {
    uint64_t state;
} ReferenceRandom;

static uint64_t reference_random(ReferenceRandom* r) {
    uint64_t z = (r->state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// in (0, 1)
static double reference_uniform(ReferenceRandom* r) { return ((double)(reference_random(r) >> 12) + 0.5) / 4503599627370496.0; }

static double reference_normal(ReferenceRandom* r) {
    double radius = sqrt(-2.0 * log(reference_uniform(r)));
    return radius * cos(6.283185307179586 * reference_uniform(r));
}

// ---- single operations ----

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC, may be NULL)
static void reference_matmul(double* out, const double* inp, const double* weight, const double* bias, size_t N, size_t C, size_t OC) {
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            double sum = bias ? bias[o] : 0.0;
            for (size_t c = 0; c < C; c++) { sum += inp[n * C + c] * weight[o * C + c]; }
            out[n * OC + o] = sum;
        }
    }
}

// dinp, dweight, dbias may each be NULL
static void reference_matmul_backward(double* dinp, double* dweight, double* dbias, const double* dout, const double* inp,
                                      const double* weight, size_t N, size_t C, size_t OC) {
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            double d = dout[n * OC + o];
            for (size_t c = 0; c < C && dinp; c++) { dinp[n * C + c] += d * weight[o * C + c]; }
            for (size_t c = 0; c < C && dweight; c++) { dweight[o * C + c] += d * inp[n * C + c]; }
            if (dbias) { dbias[o] += d; }
        }
    }
}

static void reference_moments(double* mean, double* deviation, const double* x, size_t C) {
    double sum = 0.0, square = 0.0;
    for (size_t c = 0; c < C; c++) { sum += x[c]; }
    *mean = sum / (double)C;
    for (size_t c = 0; c < C; c++) { square += (x[c] - *mean) * (x[c] - *mean); }
    *deviation = sqrt(square / (double)C + 1e-5);
}

// out, inp: (N, C); weight, bias: (C)
static void reference_layernorm(double* out, const double* inp, const double* weight, const double* bias, size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        double mean, deviation;
        reference_moments(&mean, &deviation, inp + n * C, C);
        for (size_t c = 0; c < C; c++) { out[n * C + c] = weight[c] * ((inp[n * C + c] - mean) / deviation) + bias[c]; }
    }
}

// By the full Jacobian of z = (x - mean) / deviation: dz_j / dx_i = ([i = j] - 1/C - z_i z_j / C) / deviation.
static void reference_layernorm_backward(double* dinp, double* dweight, double* dbias, const double* dout, const double* inp,
                                         const double* weight, size_t N, size_t C) {
    double* z = reference_zeros(C);
    for (size_t n = 0; n < N; n++) {
        double mean, deviation;
        reference_moments(&mean, &deviation, inp + n * C, C);
        for (size_t c = 0; c < C; c++) {
            z[c] = (inp[n * C + c] - mean) / deviation;
            dweight[c] += dout[n * C + c] * z[c];
            dbias[c] += dout[n * C + c];
        }
        for (size_t i = 0; i < C; i++) {
            double sum = 0.0;
            for (size_t j = 0; j < C; j++) {
                double jacobian = ((i == j ? 1.0 : 0.0) - (1.0 + z[i] * z[j]) / (double)C) / deviation;
                sum += dout[n * C + j] * weight[j] * jacobian;
            }
            dinp[n * C + i] += sum;
        }
    }
    free(z);
}

// GELU's tanh form (Hendrycks and Gimpel 2016) as x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
static double reference_gelu_gate(double x) {
    return 1.0 / (1.0 + exp(-2.0 * sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static double reference_gelu(double x) { return x * reference_gelu_gate(x); }

static double reference_gelu_slope(double x) {
    double gate = reference_gelu_gate(x);
    double du = sqrt(2.0 / 3.14159265358979323846) * (1.0 + 3.0 * 0.044715 * x * x);
    return gate + x * gate * (1.0 - gate) * 2.0 * du;
}

// out (N, C): row n holds position n mod T
static void reference_embedding(double* out, const int* tokens, const double* wte, const double* wpe, size_t N, size_t T, size_t C) {
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) { out[n * C + c] = wte[(size_t)tokens[n] * C + c] + wpe[(n % T) * C + c]; }
    }
}

static void reference_embedding_backward(double* dwte, double* dwpe, const double* dout, const int* tokens, size_t N, size_t T, size_t C) {
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) {
            dwte[(size_t)tokens[n] * C + c] += dout[n * C + c];
            dwpe[(n % T) * C + c] += dout[n * C + c];
        }
    }
}

// Returns -log softmax(logits)[target] of one row of V logits; dlogits (V, may be NULL) is SET to scale (softmax - onehot).
static double reference_cross_entropy(double* dlogits, const double* logits, int target, size_t V, double scale) {
    double top = -INFINITY, sum = 0.0;
    for (size_t v = 0; v < V; v++) { top = fmax(top, logits[v]); }
    for (size_t v = 0; v < V; v++) { sum += exp(logits[v] - top); }
    for (size_t v = 0; v < V && dlogits; v++) {
        dlogits[v] = scale * (exp(logits[v] - top) / sum - (v == (size_t)target ? 1.0 : 0.0));
    }
    return log(sum) + top - logits[target];
}

// out (B, T, C), prob (B, NH, T, T) from qkv (B, T, 3C): query, key, value, each NH heads of HS = C / NH (Vaswani et al. 2017)
static void reference_attention(double* out, double* prob, const double* qkv, size_t B, size_t T, size_t C, size_t NH) {
    size_t HS = C / NH;
    for (size_t row = 0; row < B * NH * T; row++) {
        size_t b = row / (NH * T), h = row / T % NH, t = row % T;
        double *p = prob + row * T, *o = out + (b * T + t) * C + h * HS;
        const double* q = qkv + (b * T + t) * 3 * C + h * HS;
        double top = -INFINITY, sum = 0.0;
        for (size_t s = 0; s <= t; s++) {
            const double* k = qkv + (b * T + s) * 3 * C + C + h * HS;
            p[s] = 0.0;
            for (size_t i = 0; i < HS; i++) { p[s] += q[i] * k[i] / sqrt((double)HS); }
            top = fmax(top, p[s]);
        }
        for (size_t s = 0; s <= t; s++) { sum += p[s] = exp(p[s] - top); }
        for (size_t s = 0; s < T; s++) { p[s] = s <= t ? p[s] / sum : 0.0; }
        for (size_t i = 0; i < HS; i++) {
            o[i] = 0.0;
            for (size_t s = 0; s <= t; s++) { o[i] += p[s] * qkv[(b * T + s) * 3 * C + 2 * C + h * HS + i]; }
        }
    }
}

static void reference_attention_backward(double* dqkv, const double* dout, const double* prob, const double* qkv, size_t B, size_t T,
                                         size_t C, size_t NH) {
    size_t HS = C / NH;
    double* dprob = reference_zeros(T);
    for (size_t row = 0; row < B * NH * T; row++) {
        size_t b = row / (NH * T), h = row / T % NH, t = row % T;
        const double *p = prob + row * T, *d = dout + (b * T + t) * C + h * HS;
        double mean = 0.0; // of dprob under the probabilities
        for (size_t s = 0; s <= t; s++) {
            size_t v = (b * T + s) * 3 * C + 2 * C + h * HS;
            dprob[s] = 0.0;
            for (size_t i = 0; i < HS; i++) {
                dprob[s] += d[i] * qkv[v + i];
                dqkv[v + i] += p[s] * d[i];
            }
            mean += p[s] * dprob[s];
        }
        for (size_t s = 0; s <= t; s++) {
            size_t q = (b * T + t) * 3 * C + h * HS, k = (b * T + s) * 3 * C + C + h * HS;
            double dscore = p[s] * (dprob[s] - mean) / sqrt((double)HS);
            for (size_t i = 0; i < HS; i++) {
                dqkv[q + i] += dscore * qkv[k + i];
                dqkv[k + i] += dscore * qkv[q + i];
            }
        }
    }
    free(dprob);
}

// ---- the model ----

typedef struct {
    size_t L, NH, C, V, Vp, maxT;
} ReferenceConfig;

enum { REF_WTE, REF_WPE, REF_LN1W, REF_LN1B, REF_QKVW, REF_QKVB, REF_ATTPROJW, REF_ATTPROJB, REF_LN2W, REF_LN2B, REF_FCW, REF_FCB,
       REF_FCPROJW, REF_FCPROJB, REF_LNFW, REF_LNFB, REFERENCE_TENSORS };

typedef struct {
    const char* name;
    size_t layers, rows, cols; // of one instance
    bool decay;                // weight decay: hidden matrices and wte
    size_t offset, count;      // first element in the parameter block; elements over all layers
} ReferenceTensor;

// index = REFERENCE_TENSORS gives the end of the block as its offset.
static ReferenceTensor reference_tensor(ReferenceConfig c, int index) {
    size_t C = c.C, L = c.L;
    const ReferenceTensor table[REFERENCE_TENSORS + 1] = {
        {"wte", 1, c.Vp, C, true, 0, 0},        {"wpe", 1, c.maxT, C, false, 0, 0},     {"ln1w", L, 1, C, false, 0, 0},
        {"ln1b", L, 1, C, false, 0, 0},         {"qkvw", L, 3 * C, C, true, 0, 0},      {"qkvb", L, 1, 3 * C, false, 0, 0},
        {"attprojw", L, C, C, true, 0, 0},      {"attprojb", L, 1, C, false, 0, 0},     {"ln2w", L, 1, C, false, 0, 0},
        {"ln2b", L, 1, C, false, 0, 0},         {"fcw", L, 4 * C, C, true, 0, 0},       {"fcb", L, 1, 4 * C, false, 0, 0},
        {"fcprojw", L, C, 4 * C, true, 0, 0},   {"fcprojb", L, 1, C, false, 0, 0},      {"lnfw", 1, 1, C, false, 0, 0},
        {"lnfb", 1, 1, C, false, 0, 0},         {"end", 0, 0, 0, false, 0, 0},
    };
    ReferenceTensor tensor = table[index];
    tensor.count = tensor.layers * tensor.rows * tensor.cols;
    for (int i = 0; i < index; i++) { tensor.offset += table[i].layers * table[i].rows * table[i].cols; }
    return tensor;
}

static size_t reference_elements(ReferenceConfig c) { return reference_tensor(c, REFERENCE_TENSORS).offset; }

// Element index of the first value of one layer's instance in the parameter block.
static size_t reference_at(ReferenceConfig c, int index, size_t layer) {
    ReferenceTensor tensor = reference_tensor(c, index);
    return tensor.offset + layer * tensor.rows * tensor.cols;
}

typedef struct {
    double *inp, *ln1, *qkv, *prob, *att, *mid, *ln2, *fc, *act; // (N, C) but qkv (N, 3C), prob (B, NH, T, T), fc and act (N, 4C)
} ReferenceLayer;

typedef struct {
    ReferenceConfig config;
    size_t B, T, N;
    ReferenceLayer* layers;
    double *last, *lnf, *logits; // (N, C), (N, C), (N, V) without padding
} ReferenceRun;

static ReferenceRun reference_run_new(ReferenceConfig config, size_t B, size_t T) {
    size_t N = B * T, C = config.C;
    ReferenceRun run = {config, B, T, N, NULL, reference_zeros(N * C), reference_zeros(N * C), reference_zeros(N * config.V)};
    run.layers = (ReferenceLayer*)need(calloc(config.L, sizeof(ReferenceLayer)));
    for (size_t l = 0; l < config.L; l++) {
        ReferenceLayer layer = {reference_zeros(N * C), reference_zeros(N * C), reference_zeros(3 * N * C),
                                reference_zeros(N * T * config.NH), reference_zeros(N * C), reference_zeros(N * C),
                                reference_zeros(N * C), reference_zeros(4 * N * C), reference_zeros(4 * N * C)};
        run.layers[l] = layer;
    }
    return run;
}

static void reference_run_free(ReferenceRun* run) {
    for (size_t l = 0; l < run->config.L; l++) {
        ReferenceLayer a = run->layers[l];
        double* all[] = {a.inp, a.ln1, a.qkv, a.prob, a.att, a.mid, a.ln2, a.fc, a.act};
        for (size_t i = 0; i < COUNT_OF(all); i++) { free(all[i]); }
    }
    free(run->layers);
    free(run->last);
    free(run->lnf);
    free(run->logits);
}

static void reference_layer_forward(const ReferenceRun* run, const double* w, size_t l, double* out) {
    ReferenceConfig c = run->config;
    ReferenceLayer a = run->layers[l];
    size_t N = run->N, C = c.C;
    reference_layernorm(a.ln1, a.inp, w + reference_at(c, REF_LN1W, l), w + reference_at(c, REF_LN1B, l), N, C);
    reference_matmul(a.qkv, a.ln1, w + reference_at(c, REF_QKVW, l), w + reference_at(c, REF_QKVB, l), N, C, 3 * C);
    reference_attention(a.att, a.prob, a.qkv, run->B, run->T, C, c.NH);
    reference_matmul(a.mid, a.att, w + reference_at(c, REF_ATTPROJW, l), w + reference_at(c, REF_ATTPROJB, l), N, C, C);
    for (size_t i = 0; i < N * C; i++) { a.mid[i] += a.inp[i]; }
    reference_layernorm(a.ln2, a.mid, w + reference_at(c, REF_LN2W, l), w + reference_at(c, REF_LN2B, l), N, C);
    reference_matmul(a.fc, a.ln2, w + reference_at(c, REF_FCW, l), w + reference_at(c, REF_FCB, l), N, C, 4 * C);
    for (size_t i = 0; i < 4 * N * C; i++) { a.act[i] = reference_gelu(a.fc[i]); }
    reference_matmul(out, a.act, w + reference_at(c, REF_FCPROJW, l), w + reference_at(c, REF_FCPROJB, l), N, 4 * C, C);
    for (size_t i = 0; i < N * C; i++) { out[i] += a.mid[i]; }
}

// Fills the run's activations and logits; returns the mean loss over the B T tokens. tokens, targets: (B, T)
static double reference_forward(ReferenceRun* run, const double* w, const int* tokens, const int* targets) {
    ReferenceConfig c = run->config;
    reference_embedding(c.L ? run->layers[0].inp : run->last, tokens, w + reference_at(c, REF_WTE, 0), w + reference_at(c, REF_WPE, 0),
                        run->N, run->T, c.C);
    for (size_t l = 0; l < c.L; l++) { reference_layer_forward(run, w, l, l + 1 < c.L ? run->layers[l + 1].inp : run->last); }
    reference_layernorm(run->lnf, run->last, w + reference_at(c, REF_LNFW, 0), w + reference_at(c, REF_LNFB, 0), run->N, c.C);
    reference_matmul(run->logits, run->lnf, w + reference_at(c, REF_WTE, 0), NULL, run->N, c.C, c.V);
    double loss = 0.0;
    for (size_t n = 0; n < run->N; n++) { loss += reference_cross_entropy(NULL, run->logits + n * c.V, targets[n], c.V, 0.0); }
    return loss / (double)run->N;
}

// dout (N, C): gradient at the layer's output on entry, at its input on return
static void reference_layer_backward(const ReferenceRun* run, const double* w, double* g, size_t l, double* dout) {
    ReferenceConfig c = run->config;
    ReferenceLayer a = run->layers[l];
    size_t N = run->N, C = c.C;
    double *dact = reference_zeros(4 * N * C), *dln = reference_zeros(N * C), *datt = reference_zeros(N * C),
           *dqkv = reference_zeros(3 * N * C);
    reference_matmul_backward(dact, g + reference_at(c, REF_FCPROJW, l), g + reference_at(c, REF_FCPROJB, l), dout, a.act,
                              w + reference_at(c, REF_FCPROJW, l), N, 4 * C, C);
    for (size_t i = 0; i < 4 * N * C; i++) { dact[i] *= reference_gelu_slope(a.fc[i]); }
    reference_matmul_backward(dln, g + reference_at(c, REF_FCW, l), g + reference_at(c, REF_FCB, l), dact, a.ln2,
                              w + reference_at(c, REF_FCW, l), N, C, 4 * C);
    reference_layernorm_backward(dout, g + reference_at(c, REF_LN2W, l), g + reference_at(c, REF_LN2B, l), dln, a.mid,
                                 w + reference_at(c, REF_LN2W, l), N, C);
    reference_matmul_backward(datt, g + reference_at(c, REF_ATTPROJW, l), g + reference_at(c, REF_ATTPROJB, l), dout, a.att,
                              w + reference_at(c, REF_ATTPROJW, l), N, C, C);
    reference_attention_backward(dqkv, datt, a.prob, a.qkv, run->B, run->T, C, c.NH);
    memset(dln, 0, N * C * sizeof(double));
    reference_matmul_backward(dln, g + reference_at(c, REF_QKVW, l), g + reference_at(c, REF_QKVB, l), dqkv, a.ln1,
                              w + reference_at(c, REF_QKVW, l), N, C, 3 * C);
    reference_layernorm_backward(dout, g + reference_at(c, REF_LN1W, l), g + reference_at(c, REF_LN1B, l), dln, a.inp,
                                 w + reference_at(c, REF_LN1W, l), N, C);
    free(dact);
    free(dln);
    free(datt);
    free(dqkv);
}

// After reference_forward on the same weights: g (the parameter block's shape) += d mean loss / d w.
static void reference_backward(const ReferenceRun* run, const double* w, double* g, const int* tokens, const int* targets) {
    ReferenceConfig c = run->config;
    size_t N = run->N;
    double *dlogits = reference_zeros(N * c.V), *dlnf = reference_zeros(N * c.C), *dout = reference_zeros(N * c.C);
    for (size_t n = 0; n < N; n++) {
        reference_cross_entropy(dlogits + n * c.V, run->logits + n * c.V, targets[n], c.V, 1.0 / (double)N);
    }
    reference_matmul_backward(dlnf, g + reference_at(c, REF_WTE, 0), NULL, dlogits, run->lnf, w + reference_at(c, REF_WTE, 0), N, c.C, c.V);
    reference_layernorm_backward(dout, g + reference_at(c, REF_LNFW, 0), g + reference_at(c, REF_LNFB, 0), dlnf, run->last,
                                 w + reference_at(c, REF_LNFW, 0), N, c.C);
    for (size_t l = c.L; l > 0; l--) { reference_layer_backward(run, w, g, l - 1, dout); }
    reference_embedding_backward(g + reference_at(c, REF_WTE, 0), g + reference_at(c, REF_WPE, 0), dout, tokens, N, run->T, c.C);
    free(dlogits);
    free(dlnf);
    free(dout);
}

// ---- optimisation ----

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
} ReferenceAdamW;

// AdamW (Loshchilov and Hutter 2019), step counted from 1: decay acts on the weight before the step, eps stands outside the root.
static void reference_adamw(double* w, double* m, double* v, const double* g, size_t count, ReferenceAdamW a, size_t step) {
    for (size_t i = 0; i < count; i++) {
        m[i] = a.beta1 * m[i] + (1.0 - a.beta1) * g[i];
        v[i] = a.beta2 * v[i] + (1.0 - a.beta2) * g[i] * g[i];
        double mean = m[i] / (1.0 - pow(a.beta1, (double)step)), square = v[i] / (1.0 - pow(a.beta2, (double)step));
        w[i] = w[i] - a.lr * a.weight_decay * w[i] - a.lr * mean / (sqrt(square) + a.eps);
    }
}

// Every tensor of a model, with decay where the table says so.
static void reference_adamw_model(ReferenceConfig c, double* w, double* m, double* v, const double* g, ReferenceAdamW a, size_t step) {
    for (int i = 0; i < REFERENCE_TENSORS; i++) {
        ReferenceTensor tensor = reference_tensor(c, i);
        ReferenceAdamW own = a;
        if (!tensor.decay) { own.weight_decay = 0.0; }
        size_t at = tensor.offset;
        reference_adamw(w + at, m + at, v + at, g + at, tensor.count, own, step);
    }
}

static double reference_norm(const double* x, size_t count) {
    double sum = 0.0;
    for (size_t i = 0; i < count; i++) { sum += x[i] * x[i]; }
    return sqrt(sum);
}

// Scales x down to `limit` where its norm exceeds it (Pascanu et al. 2013); limit 0 = no clipping. Returns the norm before.
static double reference_clip(double* x, size_t count, double limit) {
    double norm = reference_norm(x, count);
    for (size_t i = 0; i < count && limit > 0.0 && norm > limit; i++) { x[i] *= limit / norm; }
    return norm;
}

// The rate of step 0 .. steps - 1: a linear warm-up over `warmup` steps, then cosine, linear, constant, or wsd (constant, and from
// 80 % of the steps down by 1 - sqrt: Haegele et al. 2024); the decaying ones head for lr * final_fraction at step = steps.
static double reference_learning_rate(const char* schedule, double lr, double final_fraction, size_t warmup, size_t steps, size_t step) {
    if (step < warmup) { return lr * (double)(step + 1) / (double)warmup; }
    double low = lr * final_fraction, done = (double)(step - warmup) / (double)(steps - warmup);
    if (strcmp(schedule, "cosine") == 0) { return low + (lr - low) * (0.5 + 0.5 * cos(3.14159265358979323846 * done)); }
    if (strcmp(schedule, "linear") == 0) { return low * done + lr * (1.0 - done); }
    if (strcmp(schedule, "wsd") == 0) {
        size_t knee = steps * 8 / 10;
        return step < knee ? lr : lr - (lr - low) * sqrt((double)(step - knee) / (double)(steps - knee));
    }
    return lr;
}
