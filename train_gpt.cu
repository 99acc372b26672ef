// train_gpt.cu - GPT-2 and GPT-3 pretraining: the model (parameter table, forward, backward), a training step, the training loop,
// main. Everything else is included from here, and this is the only file that knows all of it; see README.md for a tour.
// Plain C: gcc compiles it for the CPU (-x c), nvcc for the GPU.
// Dims: B sequences, T tokens each, C channels, NH heads, V vocabulary, Vp padded vocabulary, L layers, N = B T rows.
#include "kernels/attention.cuh"
#include "kernels/classifier.cuh"
#include "kernels/device.cuh"
#include "kernels/embedding.cuh"
#include "kernels/init.cuh"
#include "kernels/kv_cache.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "kernels/params.h"
#include "kernels/peak.cuh"
#include "comm/zero.cuh"
#include "optim/optimizers.cuh"
#include "optim/schedule.h"
#include "dataloader/hellaswag.h"
#include "dataloader/loader.h"
#include "dataloader/tokenize.h"
#include "trainer/checkpoint.h"
#include "trainer/find_tokenizer.h"
#include "trainer/log.h"
#include "trainer/model_spec.h"
#include "trainer/options.h"
#include "trainer/outlier.h"
#include "trainer/progress.h"
#include "trainer/ranks.h"
#include "trainer/replicas.cuh"
#include "trainer/run_lock.h"
#include "trainer/run_stop.h"
#include "trainer/safetensors_writer.h"

// ---------------------------------------------------------------------------------------------------------------------------------
// The parameter table

enum { WTE, WPE, LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB, LNFW, LNFB, GPT_TENSORS };

// GPT's tensors in the order of the model file. Weights are (out, in); decay on matrices and wte only.
static void gpt_params_table(ParamTable* table, const ModelHeader* m) {
    size_t L = (size_t)m->layers, C = (size_t)m->channels, V = (size_t)m->vocab_size, Vp = (size_t)m->padded_vocab, T = (size_t)m->max_seq_len;
    const TensorSpec rows[GPT_TENSORS] = {
        // name, layers, rows, cols, real rows, role, init, decay, in layers, parts
        {"wte", 1, Vp, C, V, ROLE_EMBEDDING, INIT_NORMAL, true, false, 1, 0},
        {"wpe", 1, T, C, T, ROLE_EMBEDDING, INIT_NORMAL, false, false, 1, 0},
        {"ln1w", L, 1, C, 1, ROLE_VECTOR, INIT_ONE, false, true, 1, 0},
        {"ln1b", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, true, 1, 0},
        {"qkvw", L, 3 * C, C, 3 * C, ROLE_MATRIX, INIT_NORMAL, true, true, 3, 0},
        {"qkvb", L, 1, 3 * C, 1, ROLE_VECTOR, INIT_ZERO, false, true, 1, 0},
        {"attprojw", L, C, C, C, ROLE_MATRIX, INIT_NORMAL_RESIDUAL, true, true, 1, 0},
        {"attprojb", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, true, 1, 0},
        {"ln2w", L, 1, C, 1, ROLE_VECTOR, INIT_ONE, false, true, 1, 0},
        {"ln2b", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, true, 1, 0},
        {"fcw", L, 4 * C, C, 4 * C, ROLE_MATRIX, INIT_NORMAL, true, true, 1, 0},
        {"fcb", L, 1, 4 * C, 1, ROLE_VECTOR, INIT_ZERO, false, true, 1, 0},
        {"fcprojw", L, C, 4 * C, C, ROLE_MATRIX, INIT_NORMAL_RESIDUAL, true, true, 1, 0},
        {"fcprojb", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, true, 1, 0},
        {"lnfw", 1, 1, C, 1, ROLE_VECTOR, INIT_ONE, false, false, 1, 0},
        {"lnfb", 1, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, false, 1, 0},
    };
    memcpy(table->tensors, rows, sizeof(rows));
    table->tensor_count = GPT_TENSORS;
    params_layout(table, 4 * C); // embedding blocks as large as the largest matrix
}

// One layer's tensors, in a block of parameters or of gradients.
typedef struct {
    floatX *ln1w, *ln1b;         // (C)
    floatX *qkvw, *qkvb;         // (3C, C), (3C)
    floatX *attprojw, *attprojb; // (C, C), (C)
    floatX *ln2w, *ln2b;         // (C)
    floatX *fcw, *fcb;           // (4C, C), (4C)
    floatX *fcprojw, *fcprojb;   // (C, 4C), (C)
} BlockTensors;

static floatX* tensor_at(floatX* block, const ParamTable* table, int tensor, int layer) {
    const TensorSpec* s = &table->tensors[tensor];
    return block + s->offset + (size_t)layer * s->rows * s->cols;
}

static BlockTensors block_tensors(floatX* block, const BlockLayout* layout, const ParamTable* table, int layer) {
    static const int tensors[] = {LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB};
    floatX* at[COUNT_OF(tensors)];
    for (size_t i = 0; i < COUNT_OF(tensors); i++) { at[i] = block + block_at(layout, table, tensors[i], layer); }
    BlockTensors t = {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], at[10], at[11]};
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The model's memory

// What the backward pass makes again instead of keeping: more levels, less memory.
enum { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_LAYERNORM, RECOMPUTE_BLOCK };

#define HEAD_BYTES ((size_t)256 << 20) // the logits of as many rows as fit are held at a time

typedef struct {
    ModelHeader config;
    ParamTable table;
    size_t rows;         // capacity: B T of a micro-batch
    size_t head_rows;    // rows of logits held at a time
    int recompute;
    bool training;       // has gradients
    MemoryTable memory;
    Zero* zero;                         // in training: who holds what; NULL: this rank holds all
    BlockLayout params_layout, grads_layout;
    floatX *params, *grads;             // of all layers, or of two at a time (zero.cuh)
    floatX* residual;                   // (L + 1, rows, C): input of each block, output of the last
    floatX *ln1, *qkv, *att, *mid, *ln2, *pre, *gelu; // (L or 1, rows, C | 3C | C | C | C | 4C | 4C)
    float *lse;                         // (L or 1, NH, rows)
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd; // (L or 1, rows)
    floatX* lnf;                        // (rows, C)
    float *lnf_mean, *lnf_rstd;         // (rows)
    floatX* branch;                     // (rows, C): output of a branch before it joins the residual; in backward a gradient
    floatX* logits;                     // (head_rows, Vp)
    float* losses;                      // (rows)
    floatX *dresidual, *dwide;          // (rows, C), (rows, 4C)
    void* attention_work;
    float* partial;                     // partial sums of reductions
    floatX *k_cache, *v_cache;          // (L, maxT, C) when decoding: filled by the forward pass of a prompt
} Gpt;

// One layer's activations; what the recompute level does not keep shares the place of layer 0.
typedef struct {
    floatX *input, *ln1, *qkv, *att, *mid, *ln2, *pre, *gelu;
    float *lse, *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd;
} BlockActs;

static size_t layers_kept(const Gpt* g, int level) { return g->training && g->recompute < level ? (size_t)g->config.layers : 1; }

static BlockActs block_acts(const Gpt* g, int layer) {
    size_t N = g->rows, C = (size_t)g->config.channels, NH = (size_t)g->config.heads, l = (size_t)layer;
    size_t any = layers_kept(g, RECOMPUTE_BLOCK) > 1 ? l : 0, norm = layers_kept(g, RECOMPUTE_LAYERNORM) > 1 ? l : 0;
    size_t act = layers_kept(g, RECOMPUTE_GELU) > 1 ? l : 0;
    BlockActs a = {
        g->residual + l * N * C, g->ln1 + norm * N * C, g->qkv + any * N * 3 * C, g->att + any * N * C, g->mid + any * N * C,
        g->ln2 + norm * N * C,   g->pre + any * N * 4 * C, g->gelu + act * N * 4 * C, g->lse + any * N * NH, g->ln1_mean + any * N,
        g->ln1_rstd + any * N,   g->ln2_mean + any * N,  g->ln2_rstd + any * N,
    };
    return a;
}

static void gpt_memory_forward(Gpt* g) {
    size_t N = g->rows, C = (size_t)g->config.channels, NH = (size_t)g->config.heads, X = sizeof(floatX), F = sizeof(float);
    size_t any = layers_kept(g, RECOMPUTE_BLOCK), norm = layers_kept(g, RECOMPUTE_LAYERNORM), act = layers_kept(g, RECOMPUTE_GELU);
    MemoryTable* m = &g->memory;
    memory_add(m, "residual stream", ((size_t)g->config.layers + 1) * N * C * X, (void**)&g->residual);
    memory_add(m, "layernorm outputs", norm * N * C * X, (void**)&g->ln1);
    memory_add(m, "layernorm outputs", norm * N * C * X, (void**)&g->ln2);
    memory_add(m, "queries, keys, values", any * N * 3 * C * X, (void**)&g->qkv);
    memory_add(m, "attention outputs", any * N * C * X, (void**)&g->att);
    memory_add(m, "residual inside blocks", any * N * C * X, (void**)&g->mid);
    memory_add(m, "MLP before GELU", any * N * 4 * C * X, (void**)&g->pre);
    memory_add(m, "MLP after GELU", act * N * 4 * C * X, (void**)&g->gelu);
    memory_add(m, "attention log-sums", any * N * NH * F, (void**)&g->lse);
    memory_add(m, "layernorm statistics", any * N * F, (void**)&g->ln1_mean);
    memory_add(m, "layernorm statistics", any * N * F, (void**)&g->ln1_rstd);
    memory_add(m, "layernorm statistics", any * N * F, (void**)&g->ln2_mean);
    memory_add(m, "layernorm statistics", any * N * F, (void**)&g->ln2_rstd);
    memory_add(m, "final layernorm", N * C * X, (void**)&g->lnf);
    memory_add(m, "final layernorm", N * F, (void**)&g->lnf_mean);
    memory_add(m, "final layernorm", N * F, (void**)&g->lnf_rstd);
    memory_add(m, "branch", N * C * X, (void**)&g->branch);
    memory_add(m, "logits", g->head_rows * (size_t)g->config.padded_vocab * X, (void**)&g->logits);
    memory_add(m, "losses", N * F, (void**)&g->losses);
}

// A tensor's instance among weights and gradients.
static floatX* gpt_weight(const Gpt* g, int tensor, int layer) { return g->params + block_at(&g->params_layout, &g->table, tensor, layer); }
static floatX* gpt_gradient(const Gpt* g, int tensor, int layer) { return g->grads + block_at(&g->grads_layout, &g->table, tensor, layer); }
static BlockTensors gpt_block_weights(const Gpt* g, int layer) { return block_tensors(g->params, &g->params_layout, &g->table, layer); }
static BlockTensors gpt_block_gradients(const Gpt* g, int layer) { return block_tensors(g->grads, &g->grads_layout, &g->table, layer); }

// Floats that the largest reduction needs: weight gradients of layernorm, bias gradients, the sum of squares of a unit or a layer's output.
static size_t gpt_partials(const Gpt* g) {
    size_t norm = square_sum_partials(g->rows * (size_t)g->config.channels);
    for (size_t u = 0; u < g->table.unit_count; u++) { norm = max_size(norm, square_sum_partials(g->table.units[u].count)); }
    size_t C = (size_t)g->config.channels;
    return max_size(norm, max_size(layernorm_backward_partials(g->rows, (int)C), bias_backward_partials(g->rows, (int)(4 * C))));
}

// The shape of a model; its memory is asked for by gpt_plan_memory, which may be told who holds what.
static void gpt_plan_shape(Gpt* g, const ModelHeader* config) {
    memset(g, 0, sizeof(*g));
    g->config = *config;
    gpt_params_table(&g->table, config);
    g->params_layout = g->grads_layout = block_layout(&g->table, (size_t)config->layers);
}

static void gpt_plan_memory(Gpt* g, Zero* zero, int B, int T, int recompute, bool training, size_t head_rows) {
    const ModelHeader* config = &g->config;
    g->zero = zero;
    if (zero) {
        g->params_layout = zero->weights_layout;
        g->grads_layout = zero->grads_layout;
    }
    g->rows = (size_t)B * (size_t)T;
    g->recompute = recompute;
    g->training = training;
    size_t row_bytes = (size_t)config->padded_vocab * sizeof(floatX), C = (size_t)config->channels;
    g->head_rows = min_size(g->rows, head_rows ? head_rows : max_size(1, HEAD_BYTES / row_bytes));
    g->head_rows = ceil_div(g->rows, ceil_div(g->rows, g->head_rows)); // equal pieces
    memory_add(&g->memory, "parameters", g->params_layout.elements * sizeof(floatX), (void**)&g->params);
    if (zero && zero->stage == 3) { memory_add(&g->memory, "parameters owned", zero->held * sizeof(floatX), (void**)&zero->own_weights); }
    if (training) { memory_add(&g->memory, "gradients", g->grads_layout.elements * sizeof(floatX), (void**)&g->grads); }
    if (zero && zero->stage >= 2) { memory_add(&g->memory, "gradients owned", zero->held * sizeof(floatX), (void**)&zero->own_grads); }
    gpt_memory_forward(g);
    if (training) {
        memory_add(&g->memory, "gradient of the residual", g->rows * C * sizeof(floatX), (void**)&g->dresidual);
        memory_add(&g->memory, "gradient inside blocks", g->rows * 4 * C * sizeof(floatX), (void**)&g->dwide);
        memory_add(&g->memory, "attention work space", attention_work_bytes(B, T, config->channels, config->heads), &g->attention_work);
        memory_add(&g->memory, "partial sums", gpt_partials(g) * sizeof(float), (void**)&g->partial);
    }
}

// Lays out a model for micro-batches of up to B sequences of T tokens and asks for its memory in g->memory; the caller may add rows
// of its own before gpt_allocate. head_rows: rows of logits held at a time, 0 = as many as HEAD_BYTES hold.
void gpt_plan(Gpt* g, const ModelHeader* config, int B, int T, int recompute, bool training, size_t head_rows) {
    gpt_plan_shape(g, config);
    gpt_plan_memory(g, NULL, B, T, recompute, training, head_rows);
}

bool gpt_allocate(Gpt* g, Error* error) { return memory_allocate(&g->memory, error); }

void gpt_free(Gpt* g) {
    memory_free(&g->memory);
    params_free(&g->table);
}

// Where this rank keeps a unit's weights; NULL if it does not.
static floatX* gpt_unit_weights(const Gpt* g, size_t u) {
    if (!g->zero || g->zero->stage < 3) { return g->params + g->table.units[u].offset; }
    return zero_holds(g->zero, u) ? zero_unit_weights(g->zero, u) : NULL;
}

// Starting weights as GPT-2's: normal with deviation 0.02, projections into the residual stream by 1/sqrt(2L) smaller, biases 0,
// layernorm gains 1. Padding rows stay zero.
void gpt_init(Gpt* g, uint64_t seed) {
    float residual = 0.02f / sqrtf(2.0f * (float)g->config.layers);
    for (size_t i = 0; i < g->table.unit_count; i++) {
        const Unit* u = &g->table.units[i];
        const TensorSpec* s = &g->table.tensors[u->tensor];
        floatX* at = gpt_unit_weights(g, i);
        if (!at) { continue; }
        if (s->init == INIT_ONE) { fill(at, u->count, 1.0f); }
        if (s->init == INIT_NORMAL) { init_normal(at, u->offset - s->offset, u->count, 0.02f, seed, (uint32_t)u->tensor); }
        if (s->init == INIT_NORMAL_RESIDUAL) { init_normal(at, u->offset - s->offset, u->count, residual, seed, (uint32_t)u->tensor); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Forward

// From ln1 of the layer to the input of its last projection.
static void block_forward(Gpt* g, int layer, int B, int T) {
    size_t N = (size_t)B * (size_t)T;
    int C = g->config.channels;
    BlockActs a = block_acts(g, layer);
    BlockTensors w = gpt_block_weights(g, layer);
    matmul_forward(a.qkv, a.ln1, w.qkvw, w.qkvb, N, C, 3 * C);
    if (g->k_cache) {
        size_t first = (size_t)layer * (size_t)g->config.max_seq_len * (size_t)C;
        kv_cache_fill(g->k_cache + first, g->v_cache + first, a.qkv, T, C);
    }
    attention_forward(a.att, a.lse, a.qkv, B, T, C, g->config.heads);
    matmul_forward(g->branch, a.att, w.attprojw, NULL, N, C, C);
    residual_layernorm_forward(a.mid, a.ln2, a.ln2_mean, a.ln2_rstd, a.input, g->branch, w.attprojb, w.ln2w, w.ln2b, N, C);
    matmul_gelu_forward(a.gelu, a.pre, a.ln2, w.fcw, w.fcb, N, C, 4 * C);
}

// tokens: (B, T) on the device. Fills the residual stream and lnf, the input of the head.
void gpt_forward(Gpt* g, const int* tokens, int B, int T) {
    size_t N = (size_t)B * (size_t)T;
    int C = g->config.channels, L = g->config.layers;
    zero_weights_wait(g->zero, ZERO_OUTER);
    zero_weights_wait(g->zero, 1);
    zero_weights_prefetch(g->zero, 2);
    embedding_forward(g->residual, tokens, gpt_weight(g, WTE, 0), gpt_weight(g, WPE, 0), N, T, C);
    BlockActs a = block_acts(g, 0);
    BlockTensors w = gpt_block_weights(g, 0);
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.input, w.ln1w, w.ln1b, N, C);
    for (int l = 0; l < L; l++) {
        block_forward(g, l, B, T);
        matmul_forward(g->branch, a.gelu, w.fcprojw, NULL, N, 4 * C, C);
        floatX *mid = a.mid, *bias = w.fcprojb, *next = g->residual + (size_t)(l + 1) * g->rows * (size_t)C;
        if (l + 1 < L) { // the sum that ends a block and the norm that begins the next are one visit
            a = block_acts(g, l + 1);
            w = gpt_block_weights(g, l + 1);
            zero_weights_wait(g->zero, 1 + l + 1);
            residual_layernorm_forward(next, a.ln1, a.ln1_mean, a.ln1_rstd, mid, g->branch, bias, w.ln1w, w.ln1b, N, C);
            zero_weights_prefetch(g->zero, 1 + l + 2); // in the place of layer l, which is done
        } else {
            residual_layernorm_forward(next, g->lnf, g->lnf_mean, g->lnf_rstd, mid, g->branch, bias, gpt_weight(g, LNFW, 0),
                                       gpt_weight(g, LNFB, 0), N, C);
        }
    }
}

// logits (rows, Vp) = lnf[first ..] wte^T
void gpt_logits(Gpt* g, floatX* logits, size_t first, size_t rows) {
    int C = g->config.channels;
    matmul_forward(logits, g->lnf + first * (size_t)C, gpt_weight(g, WTE, 0), NULL, rows, C, g->config.padded_vocab);
}

// The head, some rows of logits at a time: losses of all N rows, and with backward their gradients into branch (dlnf) and wte.
// loss_sum: one float on the device. scale: 1 / tokens of the step. accumulate: wte's gradient holds earlier micro-batches.
void gpt_head(Gpt* g, float* loss_sum, const int* targets, size_t N, float scale, bool backward, bool accumulate) {
    int C = g->config.channels, V = g->config.vocab_size, Vp = g->config.padded_vocab;
    floatX *wte = gpt_weight(g, WTE, 0), *dwte = backward ? gpt_gradient(g, WTE, 0) : NULL;
    if (backward && N == 0 && !accumulate) { device_zero(dwte, (size_t)Vp * (size_t)C * sizeof(floatX)); }
    for (size_t first = 0; first < N; first += g->head_rows) {
        size_t rows = min_size(g->head_rows, N - first);
        gpt_logits(g, g->logits, first, rows);
        classifier(g->losses + first, g->logits, targets + first, rows, V, Vp, scale, backward);
        if (backward) {
            matmul_backward_input(g->branch + first * (size_t)C, g->logits, wte, rows, C, Vp, false);
            matmul_backward_weight(dwte, g->logits, g->lnf + first * (size_t)C, rows, C, Vp, accumulate || first > 0);
        }
    }
    sum_floats(loss_sum, g->losses, (int)N);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Backward

// Makes again what the recompute level did not keep. The last layer's are still there after forward, but telling saves little.
static void block_recompute(Gpt* g, int layer, int B, int T) {
    size_t N = (size_t)B * (size_t)T;
    int C = g->config.channels;
    BlockActs a = block_acts(g, layer);
    BlockTensors w = gpt_block_weights(g, layer);
    if (g->recompute >= RECOMPUTE_LAYERNORM) { layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.input, w.ln1w, w.ln1b, N, C); }
    if (g->recompute >= RECOMPUTE_BLOCK) {
        block_forward(g, layer, B, T);
        return;
    }
    if (g->recompute >= RECOMPUTE_LAYERNORM) { layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.mid, w.ln2w, w.ln2b, N, C); }
    if (g->recompute >= RECOMPUTE_GELU) { gelu_forward(a.gelu, a.pre, N * 4 * (size_t)C); }
}

// out = inp weight^T + bias: gradients of weight, bias and, if dinp is not NULL, of inp.
static void linear_backward(Gpt* g, floatX* dinp, floatX* dweight, floatX* dbias, const floatX* dout, const floatX* inp, const floatX* weight,
                            size_t N, int C, int OC, bool accumulate) {
    bias_backward(dbias, g->partial, dout, N, OC);
    matmul_backward_weight(dweight, dout, inp, N, C, OC, accumulate);
    if (dinp) { matmul_backward_input(dinp, dout, weight, N, C, OC, false); }
}

// dresidual: gradient of the block's output on entry, of its input on return.
static void block_backward(Gpt* g, int layer, int B, int T, bool accumulate) {
    size_t N = (size_t)B * (size_t)T;
    int C = g->config.channels;
    block_recompute(g, layer, B, T);
    BlockActs a = block_acts(g, layer);
    BlockTensors w = gpt_block_weights(g, layer), d = gpt_block_gradients(g, layer);
    floatX *dres = g->dresidual, *dnarrow = g->branch, *dwide = g->dwide;
    linear_backward(g, NULL, d.fcprojw, d.fcprojb, dres, a.gelu, w.fcprojw, N, 4 * C, C, accumulate);
    matmul_gelu_backward_input(dwide, dres, w.fcprojw, a.pre, N, 4 * C, C);
    linear_backward(g, dnarrow, d.fcw, d.fcb, dwide, a.ln2, w.fcw, N, C, 4 * C, accumulate);
    layernorm_backward(dres, d.ln2w, d.ln2b, g->partial, dnarrow, a.mid, w.ln2w, a.ln2_mean, a.ln2_rstd, N, C);
    linear_backward(g, dnarrow, d.attprojw, d.attprojb, dres, a.att, w.attprojw, N, C, C, accumulate);
    attention_backward(dwide, g->attention_work, dnarrow, a.att, a.qkv, a.lse, B, T, C, g->config.heads);
    linear_backward(g, dnarrow, d.qkvw, d.qkvb, dwide, a.ln1, w.qkvw, N, C, 3 * C, accumulate);
    layernorm_backward(dres, d.ln1w, d.ln1b, g->partial, dnarrow, a.input, w.ln1w, a.ln1_mean, a.ln1_rstd, N, C);
}

// One micro-batch as the device sees it; all arrays are on the device.
typedef struct {
    const int *tokens, *targets;    // (B, T)
    const int *positions, *starts;  // TokenOrder of the tokens
    int groups;
    int B, T;                       // B may be 0: a rank without rows takes part in the exchanges
} MicroBatch;

// Gradients that are added to rather than written start at zero: vectors and wpe. The matrices' first product overwrites.
static void gpt_zero_added_grads(Gpt* g, int layer) {
    for (int i = 0; i < GPT_TENSORS; i++) {
        const TensorSpec* s = &g->table.tensors[i];
        bool added = s->role == ROLE_VECTOR || i == WPE, here = s->in_layers == (layer >= 0);
        if (added && here) { device_zero(gpt_gradient(g, i, layer > 0 ? layer : 0), s->rows * s->cols * sizeof(floatX)); }
    }
}

// Forward and backward of a micro-batch; gradients of sum(loss) * scale are written (first) or added. As a layer's gradients of the
// step are complete, their sum over ranks begins.
void gpt_forward_backward(Gpt* g, float* loss_sum, const MicroBatch* batch, float scale, bool first, bool last) {
    size_t N = (size_t)batch->B * (size_t)batch->T;
    int C = g->config.channels, L = g->config.layers;
    gpt_forward(g, batch->tokens, batch->B, batch->T);
    bool fresh = zero_grads_begin(g->zero, ZERO_OUTER, first);
    if (fresh) { gpt_zero_added_grads(g, -1); }
    gpt_head(g, loss_sum, batch->targets, N, scale, true, !fresh);
    device_zero(g->dresidual, N * (size_t)C * sizeof(floatX));
    layernorm_backward(g->dresidual, gpt_gradient(g, LNFW, 0), gpt_gradient(g, LNFB, 0), g->partial, g->branch,
                       g->residual + (size_t)L * g->rows * (size_t)C, gpt_weight(g, LNFW, 0), g->lnf_mean, g->lnf_rstd, N, C);
    for (int l = L - 1; l >= 0; l--) {
        zero_weights_wait(g->zero, 1 + l);
        zero_weights_prefetch(g->zero, l > 0 ? l : -1);
        bool fresh_layer = zero_grads_begin(g->zero, 1 + l, first);
        if (fresh_layer) { gpt_zero_added_grads(g, l); }
        block_backward(g, l, batch->B, batch->T, !fresh_layer);
        zero_grads_ready(g->zero, 1 + l, first, last);
    }
    embedding_backward(gpt_gradient(g, WTE, 0), gpt_gradient(g, WPE, 0), g->dresidual, batch->tokens, batch->positions, batch->starts, batch->groups,
                       N, batch->T, C);
    zero_grads_ready(g->zero, ZERO_OUTER, first, last);
}

// out (unit_count, on the device): the sum of squares of each unit's gradient, where this rank holds it. Padding rows belong to no unit
// and are in none. Added up unit by unit, the norm does not depend on who holds what.
void gpt_unit_square_sums(Gpt* g, float* out) {
    for (size_t u = 0; u < g->table.unit_count; u++) {
        const Unit* unit = &g->table.units[u];
        if (g->zero && !zero_holds(g->zero, u)) { continue; }
        square_sum(g->partial, g->zero ? zero_unit_gradient(g->zero, u) : g->grads + unit->offset, unit->count);
        sum_floats(out + u, g->partial, (int)square_sum_partials(unit->count));
    }
}

#include "trainer/decode.cuh"
#include "trainer/evaluate.cuh"
#include "trainer/machine.cuh"

// FLOPs of a step over `tokens` tokens in sequences of T: 6 N + 6 L C T per token (Chowdhery et al. 2022, appendix B: 12 L C T, of
// which causal attention needs half).
double gpt_step_flops(const Gpt* g, double tokens, int T) {
    return tokens * (6.0 * (double)g->table.packed + 6.0 * (double)g->config.layers * (double)g->config.channels * (double)T);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The trainer: everything a run holds. It can be built and destroyed many times in one process.

typedef struct {
    const Options* options;
    const Comm* comm;         // set by the caller, or this rank alone
    Gpt gpt;
    Zero zero;
    Decoder decoder;
    bool samples;             // has a decoder and a tokenizer
    Tokenizer tokenizer;
    Loader train, val;
    bool has_val;
    int T;
    size_t sequences;         // in a step, of all ranks: the most, and (during --batch-warmup) now
    size_t sequences_now;
    size_t own_first, own;    // this rank's share of those
    size_t micro_steps;       // of the largest share: the most, and now
    size_t micro_steps_now;
    // the step's batch: tokens, targets and positions (own T each), starts (own T + micro_steps)
    int *host_batch, *device_batch;
    int* groups;              // (micro_steps)
    int* counts;              // work space of token_order
    // optimizer
    Optimizer optimizer;
    char *state, *work;       // of the held units, at state_at; scratch of one update
    size_t *state_at;         // (unit_count) byte of `state` at which the unit's begins, or ZERO_ELSEWHERE
    size_t state_bytes, work_bytes;
    float* master;            // (zero.held) fp32 weights
    uint16_t* master_low;     // (zero.held) or their lower halves
    StepScalars *scalars, *host_scalars;        // on the device; pinned
    float *factors, *host_factors;              // (unit_count): of each unit's gradient
    float* measured;                            // (unit_count, OPTIMIZER_MEASURED): figures of the last update
    float* squares;                             // (unit_count): sums of squares of the step's gradients, alike on all ranks
    int64_t not_finite;       // steps in a row that were left out because loss or gradient was not finite
    bool residual[PARAMS_MAX_TENSORS]; // the gradient buffer holds what rounding a tensor's momentum left (kappa.cuh)
    int64_t residuals_lost;   // steps left out that lost one
    float *results, *host_results;              // (micro_steps + unit_count): sums of losses, then of the gradients' squares by unit
    char* reports;                              // (ranks + 1) of report_bytes each: a StepReport, from stage 1 a sum for each unit
    size_t report_bytes;
    Outlier loss_outlier, norm_outlier;
    int64_t step, steps;      // updates done and planned
    uint64_t sequence;        // the next sequence of the training data
    int64_t skipped;
    double end_time, save_time; // by this rank's clock: when to stop, when to save; 0 = never
    Error late;               // of this rank alone, to be told at the next exchange
    Ledger ledger;            // as it was after the last step
} Trainer;

typedef struct {
    double loss, norm, lr;
    double loss_z, norm_z; // NaN until the window is full
    const char* skipped;   // why the update was left out, or NULL
    bool measured;         // kappa was measured, and widths chosen
    double tokens;
    unsigned wishes;       // of all ranks: to stop or to save
    Ledger traffic;        // of this rank since the last step
} StepResult;

static void trainer_plan_memory(Trainer* t) {
    MemoryTable* m = &t->gpt.memory;
    size_t N = ceil_div(t->sequences, (size_t)t->zero.ranks) * (size_t)t->T, units = t->gpt.table.unit_count;
    memory_add(m, "optimizer: state", t->state_bytes, (void**)&t->state);
    memory_add(m, "work space of updates", t->work_bytes, (void**)&t->work);
#ifdef FLOATX_BF16
    bool split = t->options->master_format == 1;
    if (t->options->master_weights && !split) { memory_add(m, "fp32 master weights", t->zero.held * sizeof(float), (void**)&t->master); }
    if (t->options->master_weights && split) { memory_add(m, "lower halves of master weights", t->zero.held * 2, (void**)&t->master_low); }
#endif
    memory_add(m, "batch, losses, scalars", (4 * N + t->micro_steps) * sizeof(int), (void**)&t->device_batch);
    memory_add(m, "batch, losses, scalars", sizeof(StepScalars), (void**)&t->scalars);
    memory_add(m, "batch, losses, scalars", (t->micro_steps + units) * sizeof(float), (void**)&t->results);
    memory_add(m, "batch, losses, scalars", units * sizeof(float), (void**)&t->factors);
    memory_add(m, "batch, losses, scalars", units * OPTIMIZER_MEASURED * sizeof(float), (void**)&t->measured);
}

void trainer_free(Trainer* t) {
    if (t->zero.reduce_ticket) { // nothing may be on its way into memory that goes
        zero_grads_wait_all(&t->zero);
        zero_weights_wait_all(&t->zero);
    }
    decoder_free(&t->decoder);
    kappa_free(&t->optimizer.kappa);
    zero_free(&t->zero);
    gpt_free(&t->gpt);
    tokenizer_free(&t->tokenizer);
    loader_close(&t->train);
    loader_close(&t->val);
    host_free(t->host_batch);
    host_free(t->host_scalars);
    host_free(t->host_results);
    host_free(t->host_factors);
    free(t->state_at);
    free(t->squares);
    free(t->groups);
    free(t->counts);
    free(t->reports);
    memset(t, 0, sizeof(*t));
}

static void trainer_reset_masters(Trainer* t) {
    for (size_t u = 0; t->master && u < t->gpt.table.unit_count; u++) {
        if (!zero_holds(&t->zero, u)) { continue; }
        widen_to_float(t->master + t->zero.place[u], zero_unit_weights(&t->zero, u), t->gpt.table.units[u].count);
    }
    if (t->master_low) { device_zero(t->master_low, t->zero.held * sizeof(uint16_t)); }
}

// Cuts a step of so many sequences into the ranks' shares and their micro-batches. Shares are contiguous, the larger ones first.
static void trainer_share(Trainer* t, size_t sequences, int ranks, int rank) {
    size_t share = sequences / (size_t)ranks, rest = sequences % (size_t)ranks, r = (size_t)rank, largest = share + (rest > 0);
    t->sequences_now = sequences;
    t->own_first = r * share + min_size(r, rest);
    t->own = share + (r < rest);
    t->micro_steps_now = ceil_div(largest, min_size((size_t)t->options->batch, largest));
}

#define HALF_LIFE_STEPS 1e5 // most of --beta2-half-life

// Sequences and micro-batches of a full step, of all and of this rank.
static bool trainer_cut_step(Trainer* t, const Options* o, const ModelHeader* model, int ranks, int rank, Error* error) {
    t->T = o->seq_len ? o->seq_len : model->max_seq_len;
    if (t->T > model->max_seq_len) {
        return fail(error, "--seq-len %d is beyond the model's context of %d tokens; give at most --seq-len %d", t->T, model->max_seq_len,
                    model->max_seq_len);
    }
    int64_t tokens = o->total_batch ? o->total_batch : (int64_t)o->batch * t->T;
    if (tokens % t->T) { return fail(error, "--total-batch %" PRId64 " is not a multiple of the sequence length %d", tokens, t->T); }
    t->sequences = (size_t)(tokens / t->T);
    trainer_share(t, t->sequences, ranks, rank);
    t->micro_steps = t->micro_steps_now;
    if ((double)o->beta2_half_life > HALF_LIFE_STEPS * (double)tokens) { // beyond, 1 - beta2 has few digits in fp32, then none
        return fail(error, "--beta2-half-life %" PRId64 " is more than %g steps of %" PRId64 " tokens; give at most %" PRId64, o->beta2_half_life,
                    HALF_LIFE_STEPS, tokens, (int64_t)HALF_LIFE_STEPS * tokens);
    }
    return true;
}

#include "trainer/update.cuh"

// Sizes, owners and the table of memory of one rank's run on `model`; allocates nothing of size. Freed by trainer_free.
bool trainer_layout(Trainer* t, const Options* o, const ModelHeader* model, int ranks, int rank, Error* error) {
    t->options = o;
    if (!trainer_cut_step(t, o, model, ranks, rank, error)) { return false; }
    size_t batch = min_size((size_t)o->batch, ceil_div(t->sequences, (size_t)ranks));
    gpt_plan_shape(&t->gpt, model);
    zero_plan(&t->zero, &t->gpt.table, model->layers, o->zero, ranks, rank);
    gpt_plan_memory(&t->gpt, &t->zero, (int)batch, t->T, o->recompute, true, 0);
    if (!trainer_plan_optimizer(t, error)) { return false; }
    t->samples = o->sample_every > 0 && t->tokenizer.vocab_size > 0 && rank == 0 && t->zero.stage < 3;
    if (t->samples) { decoder_plan(&t->decoder, &t->gpt, true); }
    trainer_plan_memory(t);
    return true;
}

// The host's side of a step, which is not in the table of device memory.
static bool trainer_allocate_host(Trainer* t, Error* error) {
    size_t ranks = (size_t)t->zero.ranks, units = t->gpt.table.unit_count;
    size_t batch_bytes = (4 * ceil_div(t->sequences, ranks) * (size_t)t->T + t->micro_steps) * sizeof(int);
#if !ON_GPU
    if (batch_bytes + t->gpt.memory.bytes > device_memory_free()) {
        return fail(error, "out of memory: %zu MiB are needed, %zu MiB are free; try a smaller --total-batch or --batch",
                    (batch_bytes + t->gpt.memory.bytes) >> 20, device_memory_free() >> 20);
    }
#endif
    (void)error;
    t->host_batch = (int*)host_alloc(batch_bytes);
    t->host_scalars = (StepScalars*)host_alloc(sizeof(StepScalars));
    t->host_results = (float*)host_alloc((t->micro_steps + units) * sizeof(float));
    t->host_factors = (float*)host_alloc(units * sizeof(float));
    t->squares = (float*)need(calloc(max_size(1, units), sizeof(float)));
    t->groups = (int*)need(calloc(t->micro_steps, sizeof(int)));
    t->counts = (int*)need(calloc((size_t)t->gpt.config.vocab_size + 1, sizeof(int)));
    t->report_bytes = sizeof(StepReport) + (t->zero.stage > 0 ? units * sizeof(float) : 0);
    t->reports = (char*)need(calloc(ranks + 1, t->report_bytes));
    return true;
}

// Steps that see the training data once.
static int64_t trainer_epoch_steps(const Trainer* t) {
    uint64_t left = t->train.sequences;
    int64_t steps = 0;
    for (; steps < t->options->batch_warmup && left >= trainer_batch_at(t, steps); steps++) { left -= trainer_batch_at(t, steps); }
    return steps < t->options->batch_warmup ? steps : steps + (int64_t)(left / t->sequences);
}

static bool trainer_open_data(Trainer* t, Error* error) {
    const Options* o = t->options;
    uint64_t vocab = (uint64_t)t->gpt.config.vocab_size;
    if (!loader_open(&t->train, o->train_data, t->T, (uint64_t)o->seed, o->shuffle && !o->overfit, vocab, error)) { return false; }
    if (t->has_val && !loader_open(&t->val, o->val_data, t->T, 0, false, vocab, error)) { return false; }
    t->steps = o->steps >= 0 ? o->steps : trainer_epoch_steps(t);
    if (t->steps == 0 && o->steps < 0) {
        return fail(error, "%s holds %" PRIu64 " sequences of %d tokens, fewer than one batch of %zu; give --steps, or a smaller batch",
                    o->train_data, (uint64_t)t->train.sequences, t->T, t->sequences);
    }
    return true;
}

// Sizes, memory and data of a run on `model`; weights are still zero. Collective where t->comm has several ranks. On failure the caller
// still calls trainer_free.
bool trainer_create(Trainer* t, const Options* o, const ModelHeader* model, Error* error) {
    t->comm = t->comm ? t->comm : comm_alone();
    t->has_val = o->val_every > 0 && o->val_data[0];
    if (t->has_val && !option_given(o, "val-data") && access(o->val_data, R_OK) != 0) {
        if (t->comm->rank == 0) { fprintf(stderr, "notice: no validation: --val-data is not given, and %s is not there\n", o->val_data); }
        t->has_val = false;
    }
    comm_share(t->comm, &t->has_val, sizeof(t->has_val)); // as rank 0 finds it
    bool good = trainer_layout(t, o, model, t->comm->size, t->comm->rank, error) && trainer_open_data(t, error) &&
                trainer_allocate_host(t, error) && gpt_allocate(&t->gpt, error);
    if (!comm_agree(t->comm, good, error)) { return false; }
    t->zero.weights = t->gpt.params;
    t->zero.grads = t->gpt.grads;
    zero_connect(&t->zero, t->comm);
    comm_ledger(t->comm, &t->ledger);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// A training step

// Reads this rank's sequences, sorts each micro-batch's positions by token, and sends all of it to the device at once.
static bool trainer_load_batch(Trainer* t, Error* error) {
    size_t T = (size_t)t->T, N = t->own * T, rows = t->gpt.rows;
    int *tokens = t->host_batch, *targets = tokens + N, *positions = targets + N, *starts = positions + N;
    int32_t* sequence = (int32_t*)starts; // room for T + 1 values before the order is made
    for (size_t s = 0; s < t->own; s++) {
        uint64_t index = t->own_first + s + (t->options->overfit ? 0 : t->sequence);
        if (!loader_sequence(&t->train, index, sequence, error)) { return false; }
        memcpy(tokens + s * T, sequence, T * sizeof(int));
        memcpy(targets + s * T, sequence + 1, T * sizeof(int));
    }
    for (size_t i = 0; i < t->micro_steps; i++) {
        size_t first = min_size(i * rows, N);
        TokenOrder order = {positions + first, starts + first + i, 0};
        token_order(&order, t->counts, tokens + first, min_size(rows, N - first), t->gpt.config.vocab_size);
        t->groups[i] = order.groups;
    }
    device_upload(t->device_batch, t->host_batch, (4 * N + t->micro_steps) * sizeof(int));
    return true;
}

static MicroBatch trainer_micro_batch(const Trainer* t, size_t i) {
    size_t T = (size_t)t->T, N = t->own * T, first = min_size(i * t->gpt.rows, N), rows = min_size(t->gpt.rows, N - first);
    const int* tokens = t->device_batch;
    MicroBatch batch = {tokens + first, tokens + N + first, tokens + 2 * N + first, tokens + 3 * N + first + i, t->groups[i], (int)(rows / T), t->T};
    return batch;
}

// Whether n values are all finite, by the sum of their squares.
static bool trainer_is_finite(Trainer* t, const floatX* x, size_t n) {
    float sum;
    square_sum(t->gpt.partial, x, n);
    sum_floats(t->results, t->gpt.partial, (int)square_sum_partials(n));
    device_download(&sum, t->results, sizeof(sum));
    return isfinite(sum);
}

// Names the first tensor that is not finite: weights in table order, then what each layer hands on, then gradients; of what this rank
// holds.
bool trainer_blame(Trainer* t, char* text, size_t size) {
    Gpt* g = &t->gpt;
    const char* kinds[] = {"weights of", "gradient of"};
    for (int kind = 0; kind < 2; kind++) {
        for (size_t u = 0; u < g->table.unit_count; u++) {
            const Unit* unit = &g->table.units[u];
            const TensorSpec* spec = &g->table.tensors[unit->tensor];
            if (!zero_holds(&t->zero, u)) { continue; }
            if (trainer_is_finite(t, kind ? zero_unit_gradient(&t->zero, u) : zero_unit_weights(&t->zero, u), unit->count)) { continue; }
            int used = snprintf(text, size, "%s %s", kinds[kind], spec->name);
            if (spec->layers > 1) { snprintf(text + used, size - (size_t)used, ", layer %d", unit->layer); }
            return true;
        }
        size_t width = g->rows * (size_t)g->config.channels;
        for (int l = 0; kind == 0 && l <= g->config.layers; l++) {
            if (trainer_is_finite(t, g->residual + (size_t)l * width, width)) { continue; }
            snprintf(text, size, l ? "output of layer %d" : "embedding output", l - 1);
            return true;
        }
    }
    return false;
}

// A loss or norm that is not finite: the update is left out, a few times in a row; but where a weight is bad no later step can mend it.
// Else the line that names the first bad tensor. Collective: the first rank that can name one does.
static bool trainer_survives(Trainer* t, const StepResult* r, Error* error) {
    Error blame, *all = (Error*)need(calloc((size_t)t->comm->size, sizeof(Error)));
    memset(&blame, 0, sizeof(blame));
    trainer_blame(t, blame.text, sizeof(blame.text));
    comm_gather_host(t->comm, &blame, sizeof(blame), all, TRAFFIC_CONTROL);
    for (int i = t->comm->size - 1; i >= 0; i--) { // bad weights come before what they spoil
        bool better = strncmp(all[i].text, "weights", 7) == 0 || strncmp(blame.text, "weights", 7) != 0;
        blame = all[i].text[0] && better ? all[i] : blame;
    }
    free(all);
    if (t->not_finite <= t->options->skip_not_finite && strncmp(blame.text, "weights", 7) != 0) { return true; }
    return fail(error,
                "step %" PRId64 ": loss %f, gradient norm %f: not finite; the first bad tensor is: %.100s; try a lower --lr or a longer --warmup",
                t->step + 1, r->loss, r->norm, blame.text[0] ? blame.text : "the loss alone");
}

// What this rank wants of the run: rank 0 watches the clock and the file STOP, every rank its signals.
unsigned trainer_wishes(const Trainer* t) {
    double now = seconds_now();
    bool first = t->comm->rank == 0;
    return run_stop_wishes(first ? t->options->output : "") | (first && t->end_time > 0 && now >= t->end_time ? WISH_STOP_TIME : 0) |
           (first && t->save_time > 0 && now >= t->save_time ? WISH_SAVE : 0);
}

// The step's one meeting of all ranks: losses, squares' sums by unit, wishes, and whether all can go on. Sums are taken in the order of
// ranks and of units, so that all ranks get the same.
static bool trainer_meet(Trainer* t, bool good, StepResult* result, Error* error) {
    const ParamTable* table = &t->gpt.table;
    int ranks = t->comm->size;
    float* sums = t->host_results + t->micro_steps;
    char* mine = t->reports + (size_t)ranks * t->report_bytes;
    StepReport report = {0.0, !good, trainer_wishes(t)};
    comm_sync(t->comm);
    device_download(t->host_results, t->results, (t->micro_steps + table->unit_count) * sizeof(float));
    for (size_t i = 0; i < t->micro_steps; i++) { report.loss += t->host_results[i]; }
    memcpy(mine, &report, sizeof(report));
    memcpy(mine + sizeof(report), sums, t->report_bytes - sizeof(report));
    comm_gather_host(t->comm, mine, t->report_bytes, t->reports, TRAFFIC_NORM);
    double loss = 0.0, square = 0.0;
    bool failed = false, finite = true;
    for (int r = 0; r < ranks; r++) {
        memcpy(&report, t->reports + (size_t)r * t->report_bytes, sizeof(report));
        loss += report.loss;
        failed = failed || report.failed;
        result->wishes |= report.wishes;
    }
    for (size_t u = 0; u < table->unit_count; u++) {
        const char* owner = t->reports + (size_t)t->zero.owner[u] * t->report_bytes + sizeof(report);
        t->squares[u] = t->zero.stage > 0 ? ((const float*)owner)[u] : sums[u];
        finite = finite && isfinite(t->squares[u]);
        square += optimizer_clips(&t->optimizer.config, table->tensors[table->units[u].tensor].role) ? t->squares[u] : 0.0;
    }
    result->loss = loss / result->tokens;
    result->norm = finite ? sqrt(square) : (double)NAN;
    return failed ? comm_agree(t->comm, good, error) : good;
}

// Why this step's update is to be left out, or NULL; alike on all ranks.
static const char* trainer_skip_reason(Trainer* t, StepResult* r) {
    const Options* o = t->options;
    bool finite = isfinite(r->loss) && isfinite(r->norm);
    t->not_finite = finite ? 0 : t->not_finite + 1;
    r->loss_z = r->norm_z = NAN;
    if (!finite) { return "not finite"; }
    r->loss_z = outlier_add(&t->loss_outlier, r->loss);
    r->norm_z = outlier_add(&t->norm_outlier, r->norm);
    if (o->skip_loss_z > 0 && r->loss_z > o->skip_loss_z) { return "loss z-score"; }
    return o->skip_norm_z > 0 && r->norm_z > o->skip_norm_z ? "norm z-score" : NULL;
}

// Batch, forward and backward over micro-batches, clipping, update. The one wait for the device is for loss and norm. Collective.
bool trainer_step(Trainer* t, StepResult* result, Error* error) {
    const Options* o = t->options;
    Ledger now;
    memset(result, 0, sizeof(*result));
    trainer_share(t, trainer_batch_at(t, t->step), t->comm->size, t->comm->rank);
    bool good = !t->late.text[0] && trainer_load_batch(t, error);
    if (t->late.text[0]) { *error = t->late; }
    double tokens = result->tokens = (double)t->sequences_now * t->T;
    size_t own_steps = max_size(1, ceil_div(t->own * (size_t)t->T, t->gpt.rows)), steps = t->zero.stage >= 2 ? t->micro_steps_now : own_steps;
    device_zero(t->results, t->micro_steps * sizeof(float));
    for (size_t i = 0; i < steps && (good || t->comm->size > 1); i++) { // a rank that cannot go on still meets the others
        MicroBatch batch = trainer_micro_batch(t, i);
        if (!good) { batch.B = batch.groups = 0; }
        gpt_forward_backward(&t->gpt, t->results + i, &batch, (float)(1.0 / tokens), i == 0, i + 1 == steps);
    }
    zero_grads_wait_all(&t->zero);
    gpt_unit_square_sums(&t->gpt, t->results + t->micro_steps);
    if (!trainer_meet(t, good, result, error)) { return false; }
    comm_ledger(t->comm, &now);
    result->traffic = ledger_since(&now, &t->ledger);
    t->ledger = now;
    result->lr = schedule_lr((Schedule)o->schedule, o->lr, t->step, options_warmup(o, t->steps), t->steps, o->final_lr_frac) *
                 trainer_lr_scale(t);
    result->skipped = trainer_skip_reason(t, result);
    if (t->not_finite > 0 && !trainer_survives(t, result, error)) { return false; }
    if (result->skipped) {
        trainer_skip(t);
    } else {
        trainer_update(t, result);
    }
    t->step++;
    t->sequence += t->sequences_now;
    return true;
}

#include "trainer/state.cuh"
#include "trainer/report.cuh"
#include "trainer/start.cuh"

// ---------------------------------------------------------------------------------------------------------------------------------
// The training loop

// When rank 0's clock asks for the next checkpoint.
static void run_set_save_time(Trainer* t) {
    t->save_time = t->options->checkpoint_minutes > 0 ? seconds_now() + 60.0 * t->options->checkpoint_minutes : 0.0;
}

// Where something went wrong on this rank alone (a full disk under the log): with others, they are told at the next exchange.
static bool run_late(Trainer* t, bool good, const Error* error) {
    if (!good && t->comm->size > 1 && !t->late.text[0]) { t->late = *error; }
    return good || t->comm->size > 1;
}

static bool run_validate(Trainer* t, Run* r, Error* error) {
    EvalSpace space = {t->host_batch, t->device_batch, t->results};
    uint64_t limit = t->options->val_batches < 0 ? UINT64_MAX : (uint64_t)t->options->val_batches * min_size((size_t)t->options->batch, t->sequences);
    if (!eval_loss(&t->gpt, t->comm, &t->val, space, limit, &r->val_loss, error)) { return false; }
    progress_clear(&r->progress);
    printf("val loss %f\n", r->val_loss);
    if (!run_late(t, log_val(&r->log, t->step, (float)r->val_loss, error), error)) { return false; }
    if (!t->options->hellaswag) { return true; }
    HellaSwagScore score;
    if (!hellaswag_score(&t->gpt, t->comm, t->options->hellaswag_data, space, &score, error)) { return false; }
    printf("HellaSwag: %" PRId64 "/%" PRId64 " = %f\n", score.correct, score.total, (double)score.correct / (double)score.total);
    return run_late(t, log_eval(&r->log, t->step, score.correct, score.total, error), error);
}

static bool run_sample(Trainer* t, Run* r, Error* error) {
    Sampling sampling = {1.0, 0, 1.0, (uint64_t)t->options->seed};
    zero_weights_wait_all(&t->zero);
    size_t count = (size_t)t->options->sample_tokens;
    int32_t prompt = (int32_t)t->tokenizer.eot, *tokens = (int32_t*)need(calloc(count, sizeof(int32_t)));
    size_t made = decoder_generate(&t->decoder, tokens, count, &prompt, 1, &sampling, (uint32_t)t->step, -1, NULL, NULL);
    ByteBuffer text;
    memset(&text, 0, sizeof(text));
    bool good = tokenizer_decode(&t->tokenizer, tokens, made, &text, error);
    free(tokens);
    if (good) {
        progress_clear(&r->progress);
        if (made < count) { fprintf(stderr, "notice: the sample ends early: a micro-batch holds fewer tokens than half the context\n"); }
        printf("generating:\n---\n");
        fwrite(text.data, 1, text.count, stdout);
        printf("\n---\n");
        good = log_sample(&r->log, t->step, (const char*)text.data, text.count, error);
    }
    bytes_free(&text);
    return good;
}

// A folder that was removed under the run is made and held again; nothing that it held comes back.
static bool run_hold_folder(Trainer* t, Run* r, Error* error) {
    const char* output = t->options->output;
    if (t->comm->rank > 0 || run_lock_holds(&r->lock, output)) { return true; }
    progress_clear(&r->progress);
    fprintf(stderr, "notice: %s is not the folder that this run began with: was it removed? It is made again, without the logs so far\n", output);
    run_lock_release(&r->lock);
    return folder_make(output, error) && run_lock_take(&r->lock, output, error);
}

// Collective: a checkpoint of replicas that agree.
static bool run_save(Trainer* t, Run* r, Error* error) {
    char folder[PATH_MAX];
    double start = seconds_now();
    if (r->saved_step == t->step) { return true; }
    if (!comm_agree(t->comm, run_hold_folder(t, r, error), error)) { return false; }
    if (t->options->check_replicas > 0 && !replicas_check(&t->zero, t->step, error)) { return false; }
    if (!state_save(t, t->options->output, error) || !checkpoint_folder(folder, t->options->output, (uint64_t)t->step, error)) { return false; }
    r->saved_step = t->step;
    run_set_save_time(t);
    progress_clear(&r->progress);
    double seconds = seconds_now() - start;
    printf("Writing checkpoint at step %" PRId64 ": %s, %.2f s\n", t->step, folder, seconds);
    return run_late(t, log_checkpoint(&r->log, t->step, folder, seconds, error), error);
}

// Trains from t->step to t->steps, or until something asks it to stop; *stopped says what. Collective.
static bool run_loop(Trainer* t, Run* r, const char** stopped, Error* error) {
    const Options* o = t->options;
    unsigned wishes = 0;
    for (;;) {
        if (t->comm->size == 1) { wishes = trainer_wishes(t); } // else what all ranks said in the last step
        *stopped = t->step < t->steps ? run_stop_reason(wishes) : NULL;
        bool last = t->step >= t->steps || *stopped;
        if (t->has_val && (last || due(t->step, o->val_every)) && !run_validate(t, r, error)) { return false; }
        if (t->samples && t->step > 0 && (last || due(t->step, o->sample_every)) && !run_late(t, run_sample(t, r, error), error)) { return false; }
        bool save = last || (wishes & WISH_SAVE) || due(t->step, o->checkpoint_every);
        if (o->output[0] && save && (last || t->step > 0) && !run_save(t, r, error)) { return false; }
        if (last) { return true; }
        if (due(t->step, o->check_replicas) && !replicas_check(&t->zero, t->step, error)) { return false; }
        double start = seconds_now();
        StepResult result;
        if (!trainer_step(t, &result, error)) { return false; }
        wishes = result.wishes;
        if (!run_late(t, run_report_step(t, r, &result, seconds_now() - start, error), error)) { return false; }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The train command

bool command_train(const Options* o, const Comm* world, Error* error) {
    static Trainer trainer; // its embedded tables are too large for the stack
    static Run run;
    static TrainStart start;
    Trainer* t = &trainer;
    Run* r = &run;
    const char* stopped = NULL;
    memset(t, 0, sizeof(*t));
    memset(r, 0, sizeof(*r));
    r->lock.fd = -1;
    r->saved_step = -1;
    r->start = seconds_now();
    r->resident = memory_resident();
    t->options = o;
    t->comm = world;
    bool talks = world->rank == 0;
    bool good = ranks_check(o, world, error) && train_find_start(t, r, &start, error) && trainer_create(t, o, &start.model, error) &&
                ranks_check_data(world, "the training data", &t->train, error) &&
                (!t->has_val || ranks_check_data(world, "the validation data", &t->val, error));
    if (good && talks) { train_print(t); }
    good = good && train_load(t, &start, error) && comm_agree(world, !talks || train_open_output(t, r, start.folder[0] != 0, error), error);
    if (good) {
        r->saved_step = start.folder[0] ? t->step : -1;
        t->end_time = o->max_time > 0 ? r->start + o->max_time : 0.0;
        run_set_save_time(t);
        run_stop_begin();
        progress_begin(&r->progress, stderr, talks ? o->progress : PROGRESS_OFF, (double)t->step);
        good = run_loop(t, r, &stopped, error);
        progress_clear(&r->progress);
        if (good && t->late.text[0]) { *error = t->late; }
        good = comm_agree(world, good && !t->late.text[0], error);
        if (good) { train_finish(t, r, stopped); }
        if (good && stopped && talks) { run_stop_file_remove(o->output); }
        run_stop_end();
    }
    log_close(&r->log);
    run_lock_release(&r->lock);
    trainer_free(t);
    return good;
}

#include "trainer/commands.cuh"
#include "trainer/convert.h"
#include "trainer/plan.cuh"
#include "trainer/selfcheck.cuh"

// ---------------------------------------------------------------------------------------------------------------------------------
// main

#ifndef TESTING
static bool run_command(const Options* o, const Comm* world, Error* error) {
    switch (o->command) {
    case COMMAND_TOKENIZE: return command_tokenize(o, error);
    case COMMAND_GENERATE: return command_generate(o, error);
    case COMMAND_EVAL: return command_eval(o, error);
    case COMMAND_SELFCHECK: return command_selfcheck(o, error);
    case COMMAND_CONVERT: return command_convert(o, error);
    case COMMAND_PLAN: return command_plan(o, world, error);
    default: return command_train(o, world, error);
    }
}

int main(int argc, char** argv) {
    static Options options;
    Comm world = *comm_alone();
    Error error = {{0}};
    machine_open_descriptors();
    machine_limit_spinning(argv);
    signal(SIGXFSZ, SIG_IGN); // a limit on file sizes is a failed write like a full disk, not a silent death
    bool parsed = options_parse(&options, argc, argv, &error) && (options.action != OPTIONS_RUN || options_check(&options, &error));
    if (parsed && options.command == COMMAND_TRAIN) { run_stop_watch(); } // before other threads
    bool good = ranks_open(&options, parsed, &world, &error);
    if (good && options.action == OPTIONS_HELP) {
        options_help(stdout, options.command, options.command_named);
    } else if (good && options.action == OPTIONS_VERSION) {
        printf("train_gpt %s, %s, %s\n", provenance_git(), provenance_compiler(), provenance_flags());
    } else if (good) {
        good = comm_agree(&world, machine_open(&options, &world, &error), &error) && comm_start_up(&world, &error);
        good = good && run_command(&options, &world, &error);
    }
    if (good && (fflush(stdout) != 0 || ferror(stdout))) { good = fail(&error, "cannot write to standard output: %s", strerror(errno)); }
    if (!good && world.rank == 0) { fprintf(stderr, "error: %s\n", error.text); }
    comm_close(&world);
    return good ? 0 : 1;
}
#endif
