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
#include "optim/adamw.cuh"
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
        // name, layers, rows, cols, real rows, role, init, decay
        {"wte", 1, Vp, C, V, ROLE_EMBEDDING, INIT_NORMAL, true, 0},
        {"wpe", 1, T, C, T, ROLE_EMBEDDING, INIT_NORMAL, false, 0},
        {"ln1w", L, 1, C, 1, ROLE_VECTOR, INIT_ONE, false, 0},
        {"ln1b", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, 0},
        {"qkvw", L, 3 * C, C, 3 * C, ROLE_MATRIX, INIT_NORMAL, true, 0},
        {"qkvb", L, 1, 3 * C, 1, ROLE_VECTOR, INIT_ZERO, false, 0},
        {"attprojw", L, C, C, C, ROLE_MATRIX, INIT_NORMAL_RESIDUAL, true, 0},
        {"attprojb", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, 0},
        {"ln2w", L, 1, C, 1, ROLE_VECTOR, INIT_ONE, false, 0},
        {"ln2b", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, 0},
        {"fcw", L, 4 * C, C, 4 * C, ROLE_MATRIX, INIT_NORMAL, true, 0},
        {"fcb", L, 1, 4 * C, 1, ROLE_VECTOR, INIT_ZERO, false, 0},
        {"fcprojw", L, C, 4 * C, C, ROLE_MATRIX, INIT_NORMAL_RESIDUAL, true, 0},
        {"fcprojb", L, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, 0},
        {"lnfw", 1, 1, C, 1, ROLE_VECTOR, INIT_ONE, false, 0},
        {"lnfb", 1, 1, C, 1, ROLE_VECTOR, INIT_ZERO, false, 0},
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

static BlockTensors block_tensors(floatX* block, const ParamTable* table, int layer) {
    BlockTensors t = {
        tensor_at(block, table, LN1W, layer),     tensor_at(block, table, LN1B, layer),     tensor_at(block, table, QKVW, layer),
        tensor_at(block, table, QKVB, layer),     tensor_at(block, table, ATTPROJW, layer), tensor_at(block, table, ATTPROJB, layer),
        tensor_at(block, table, LN2W, layer),     tensor_at(block, table, LN2B, layer),     tensor_at(block, table, FCW, layer),
        tensor_at(block, table, FCB, layer),      tensor_at(block, table, FCPROJW, layer),  tensor_at(block, table, FCPROJB, layer),
    };
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
    floatX *params, *grads;             // table.elements
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

// Floats that the largest reduction needs: weight gradients of layernorm, bias gradients, the gradient norm.
static size_t gpt_partials(const Gpt* g) {
    size_t norm = 0;
    for (size_t u = 0; u < g->table.unit_count; u++) { norm += square_sum_partials(g->table.units[u].count); }
    size_t C = (size_t)g->config.channels;
    return max_size(norm, max_size(layernorm_backward_partials(g->rows, (int)C), bias_backward_partials(g->rows, (int)(4 * C))));
}

// Lays out a model for micro-batches of up to B sequences of T tokens and asks for its memory in g->memory; the caller may add rows
// of its own before gpt_allocate. head_rows: rows of logits held at a time, 0 = as many as HEAD_BYTES hold.
void gpt_plan(Gpt* g, const ModelHeader* config, int B, int T, int recompute, bool training, size_t head_rows) {
    memset(g, 0, sizeof(*g));
    g->config = *config;
    g->rows = (size_t)B * (size_t)T;
    g->recompute = recompute;
    g->training = training;
    size_t row_bytes = (size_t)config->padded_vocab * sizeof(floatX), C = (size_t)config->channels;
    g->head_rows = min_size(g->rows, head_rows ? head_rows : max_size(1, HEAD_BYTES / row_bytes));
    g->head_rows = ceil_div(g->rows, ceil_div(g->rows, g->head_rows)); // equal pieces
    gpt_params_table(&g->table, config);
    memory_add(&g->memory, "parameters", g->table.elements * sizeof(floatX), (void**)&g->params);
    if (training) { memory_add(&g->memory, "gradients", g->table.elements * sizeof(floatX), (void**)&g->grads); }
    gpt_memory_forward(g);
    if (training) {
        memory_add(&g->memory, "gradient of the residual", g->rows * C * sizeof(floatX), (void**)&g->dresidual);
        memory_add(&g->memory, "gradient inside blocks", g->rows * 4 * C * sizeof(floatX), (void**)&g->dwide);
        memory_add(&g->memory, "attention work space", attention_work_bytes(B, T, config->channels, config->heads), &g->attention_work);
        memory_add(&g->memory, "partial sums", gpt_partials(g) * sizeof(float), (void**)&g->partial);
    }
}

bool gpt_allocate(Gpt* g, Error* error) { return memory_allocate(&g->memory, error); }

void gpt_free(Gpt* g) {
    memory_free(&g->memory);
    params_free(&g->table);
}

// Starting weights as GPT-2's: normal with deviation 0.02, projections into the residual stream by 1/sqrt(2L) smaller, biases 0,
// layernorm gains 1. Padding rows stay zero.
void gpt_init(Gpt* g, uint64_t seed) {
    float residual = 0.02f / sqrtf(2.0f * (float)g->config.layers);
    for (int i = 0; i < GPT_TENSORS; i++) {
        const TensorSpec* s = &g->table.tensors[i];
        size_t count = s->role == ROLE_EMBEDDING ? s->real_rows * s->cols : s->layers * s->rows * s->cols;
        floatX* at = g->params + s->offset;
        if (s->init == INIT_ONE) { fill(at, count, 1.0f); }
        if (s->init == INIT_NORMAL) { init_normal(at, count, 0.02f, seed, (uint32_t)i); }
        if (s->init == INIT_NORMAL_RESIDUAL) { init_normal(at, count, residual, seed, (uint32_t)i); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Forward

// From ln1 of the layer to the input of its last projection.
static void block_forward(Gpt* g, int layer, int B, int T) {
    size_t N = (size_t)B * (size_t)T;
    int C = g->config.channels;
    BlockActs a = block_acts(g, layer);
    BlockTensors w = block_tensors(g->params, &g->table, layer);
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
    floatX *wte = g->params + g->table.tensors[WTE].offset, *wpe = g->params + g->table.tensors[WPE].offset;
    embedding_forward(g->residual, tokens, wte, wpe, N, T, C);
    BlockActs a = block_acts(g, 0);
    BlockTensors w = block_tensors(g->params, &g->table, 0);
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.input, w.ln1w, w.ln1b, N, C);
    for (int l = 0; l < L; l++) {
        block_forward(g, l, B, T);
        matmul_forward(g->branch, a.gelu, w.fcprojw, NULL, N, 4 * C, C);
        floatX *mid = a.mid, *bias = w.fcprojb, *next = g->residual + (size_t)(l + 1) * g->rows * (size_t)C;
        if (l + 1 < L) { // the sum that ends a block and the norm that begins the next are one visit
            a = block_acts(g, l + 1);
            w = block_tensors(g->params, &g->table, l + 1);
            residual_layernorm_forward(next, a.ln1, a.ln1_mean, a.ln1_rstd, mid, g->branch, bias, w.ln1w, w.ln1b, N, C);
        } else {
            residual_layernorm_forward(next, g->lnf, g->lnf_mean, g->lnf_rstd, mid, g->branch, bias, tensor_at(g->params, &g->table, LNFW, 0),
                                       tensor_at(g->params, &g->table, LNFB, 0), N, C);
        }
    }
}

// logits (rows, Vp) = lnf[first ..] wte^T
void gpt_logits(Gpt* g, floatX* logits, size_t first, size_t rows) {
    int C = g->config.channels;
    matmul_forward(logits, g->lnf + first * (size_t)C, g->params + g->table.tensors[WTE].offset, NULL, rows, C, g->config.padded_vocab);
}

// The head, some rows of logits at a time: losses of all N rows, and with backward their gradients into branch (dlnf) and wte.
// loss_sum: one float on the device. scale: 1 / tokens of the step. accumulate: wte's gradient holds earlier micro-batches.
void gpt_head(Gpt* g, float* loss_sum, const int* targets, size_t N, float scale, bool backward, bool accumulate) {
    int C = g->config.channels, V = g->config.vocab_size, Vp = g->config.padded_vocab;
    floatX *wte = g->params + g->table.tensors[WTE].offset, *dwte = backward ? g->grads + g->table.tensors[WTE].offset : NULL;
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
    BlockTensors w = block_tensors(g->params, &g->table, layer);
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
    BlockTensors w = block_tensors(g->params, &g->table, layer), d = block_tensors(g->grads, &g->table, layer);
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
    int B, T;
} MicroBatch;

// Gradients that are added to rather than written start the step at zero: vectors and wpe. The matrices' first product overwrites.
static void gpt_zero_added_grads(Gpt* g) {
    for (int i = 0; i < GPT_TENSORS; i++) {
        const TensorSpec* s = &g->table.tensors[i];
        if (s->role == ROLE_VECTOR || i == WPE) { device_zero(g->grads + s->offset, s->layers * s->rows * s->cols * sizeof(floatX)); }
    }
}

// Forward and backward of a micro-batch; gradients of sum(loss) * scale are written (first) or added.
void gpt_forward_backward(Gpt* g, float* loss_sum, const MicroBatch* batch, float scale, bool first) {
    size_t N = (size_t)batch->B * (size_t)batch->T;
    int C = g->config.channels;
    if (first) { gpt_zero_added_grads(g); }
    gpt_forward(g, batch->tokens, batch->B, batch->T);
    gpt_head(g, loss_sum, batch->targets, N, scale, true, !first);
    device_zero(g->dresidual, N * (size_t)C * sizeof(floatX));
    layernorm_backward(g->dresidual, tensor_at(g->grads, &g->table, LNFW, 0), tensor_at(g->grads, &g->table, LNFB, 0), g->partial, g->branch,
                       g->residual + (size_t)g->config.layers * g->rows * (size_t)C, tensor_at(g->params, &g->table, LNFW, 0), g->lnf_mean,
                       g->lnf_rstd, N, C);
    for (int l = g->config.layers - 1; l >= 0; l--) { block_backward(g, l, batch->B, batch->T, !first); }
    embedding_backward(g->grads + g->table.tensors[WTE].offset, g->grads + g->table.tensors[WPE].offset, g->dresidual, batch->tokens,
                       batch->positions, batch->starts, batch->groups, N, batch->T, C);
}

// out: one float on the device, the sum of squares of all gradients. Padding rows belong to no unit and are not in it.
void gpt_grad_square_sum(Gpt* g, float* out) {
    size_t at = 0;
    for (size_t u = 0; u < g->table.unit_count; u++) {
        const Unit* unit = &g->table.units[u];
        square_sum(g->partial + at, g->grads + unit->offset, unit->count);
        at += square_sum_partials(unit->count);
    }
    sum_floats(out, g->partial, (int)at);
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
    Gpt gpt;
    Decoder decoder;
    bool samples;             // has a decoder and a tokenizer
    Tokenizer tokenizer;
    Loader train, val;
    bool has_val;
    int T;
    size_t sequences;         // in a step
    size_t micro_steps;
    // the step's batch: tokens, targets and positions (sequences T each), starts (sequences T + micro_steps)
    int *host_batch, *device_batch;
    int* groups;              // (micro_steps)
    int* counts;              // work space of token_order
    // optimizer
    float *slots[OPTIMIZER_MAX_SLOTS], *master; // (table.packed)
    StepScalars *scalars, *host_scalars;        // on the device; pinned
    float *results, *host_results;              // (micro_steps + 1): sums of losses, then the gradients' sum of squares
    Outlier loss_outlier, norm_outlier;
    int64_t step, steps;      // updates done and planned
    uint64_t sequence;        // the next sequence of the training data
    int64_t skipped;
} Trainer;

typedef struct {
    double loss, norm, lr;
    double loss_z, norm_z; // NaN until the window is full
    bool skipped;
} StepResult;

static bool trainer_plan_memory(Trainer* t, Error* error) {
    MemoryTable* m = &t->gpt.memory;
    size_t N = t->sequences * (size_t)t->T, packed = t->gpt.table.packed;
    for (int i = 0; i < adamw_info.slots; i++) { memory_add(m, i ? "optimizer: v" : "optimizer: m", packed * sizeof(float), (void**)&t->slots[i]); }
#ifdef FLOATX_BF16
    if (t->options->master_weights) { memory_add(m, "fp32 master weights", packed * sizeof(float), (void**)&t->master); }
#endif
    size_t batch_bytes = (4 * N + t->micro_steps) * sizeof(int);
    memory_add(m, "batch, losses, scalars", batch_bytes, (void**)&t->device_batch);
    memory_add(m, "batch, losses, scalars", sizeof(StepScalars), (void**)&t->scalars);
    memory_add(m, "batch, losses, scalars", (t->micro_steps + 1) * sizeof(float), (void**)&t->results);
#if !ON_GPU
    if (batch_bytes + m->bytes > device_memory_free()) { // the host's copy of the batch is not in the table
        return fail(error, "out of memory: %zu MiB are needed, %zu MiB are free; try a smaller --total-batch or --batch",
                    (batch_bytes + m->bytes) >> 20, device_memory_free() >> 20);
    }
#endif
    (void)error;
    t->host_batch = (int*)host_alloc(batch_bytes);
    t->host_scalars = (StepScalars*)host_alloc(sizeof(StepScalars));
    t->host_results = (float*)host_alloc((t->micro_steps + 1) * sizeof(float));
    t->groups = (int*)need(calloc(t->micro_steps, sizeof(int)));
    t->counts = (int*)need(calloc((size_t)t->gpt.config.vocab_size + 1, sizeof(int)));
    return true;
}

void trainer_free(Trainer* t) {
    decoder_free(&t->decoder);
    gpt_free(&t->gpt);
    tokenizer_free(&t->tokenizer);
    loader_close(&t->train);
    loader_close(&t->val);
    host_free(t->host_batch);
    host_free(t->host_scalars);
    host_free(t->host_results);
    free(t->groups);
    free(t->counts);
    memset(t, 0, sizeof(*t));
}

static void trainer_reset_masters(Trainer* t) {
    for (size_t u = 0; t->master && u < t->gpt.table.unit_count; u++) {
        const Unit* unit = &t->gpt.table.units[u];
        widen_to_float(t->master + unit->packed, t->gpt.params + unit->offset, unit->count);
    }
}

// Sizes, memory and data of a run on `model`; weights are still zero. On failure the caller still calls trainer_free.
bool trainer_create(Trainer* t, const Options* o, const ModelHeader* model, Error* error) {
    t->options = o;
    t->T = o->seq_len ? o->seq_len : model->max_seq_len;
    if (t->T > model->max_seq_len) {
        return fail(error, "--seq-len %d is beyond the model's context of %d tokens; give at most --seq-len %d", t->T, model->max_seq_len,
                    model->max_seq_len);
    }
    int64_t tokens = o->total_batch ? o->total_batch : (int64_t)o->batch * t->T;
    if (tokens % t->T) { return fail(error, "--total-batch %" PRId64 " is not a multiple of the sequence length %d", tokens, t->T); }
    t->sequences = (size_t)(tokens / t->T);
    size_t batch = min_size((size_t)o->batch, t->sequences);
    t->micro_steps = ceil_div(t->sequences, batch);
    bool shuffle = o->shuffle && !o->overfit;
    if (!loader_open(&t->train, o->train_data, t->T, (uint64_t)o->seed, shuffle, (uint64_t)model->vocab_size, error)) { return false; }
    t->has_val = o->val_every > 0 && o->val_data[0];
    if (t->has_val && !option_given(o, "val-data") && access(o->val_data, R_OK) != 0) {
        fprintf(stderr, "notice: no validation: --val-data is not given, and %s is not there\n", o->val_data);
        t->has_val = false;
    }
    if (t->has_val && !loader_open(&t->val, o->val_data, t->T, 0, false, (uint64_t)model->vocab_size, error)) { return false; }
    t->steps = o->steps >= 0 ? o->steps : (int64_t)(t->train.sequences / t->sequences);
    if (t->steps == 0 && o->steps < 0) {
        return fail(error, "%s holds %" PRIu64 " sequences of %d tokens, fewer than one batch of %zu; give --steps, or a smaller batch",
                    o->train_data, (uint64_t)t->train.sequences, t->T, t->sequences);
    }
    gpt_plan(&t->gpt, model, (int)batch, t->T, o->recompute, true, 0);
    t->samples = o->sample_every > 0 && t->tokenizer.vocab_size > 0;
    if (t->samples) { decoder_plan(&t->decoder, &t->gpt, true); }
    return trainer_plan_memory(t, error) && gpt_allocate(&t->gpt, error);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// A training step

// Reads the step's sequences, sorts each micro-batch's positions by token, and sends all of it to the device at once.
static bool trainer_load_batch(Trainer* t, Error* error) {
    size_t T = (size_t)t->T, N = t->sequences * T, batch = t->gpt.rows / T;
    int *tokens = t->host_batch, *targets = tokens + N, *positions = targets + N, *starts = positions + N;
    int32_t* sequence = (int32_t*)starts; // room for T + 1 values before the order is made
    for (size_t s = 0; s < t->sequences; s++) {
        uint64_t index = t->options->overfit ? s : t->sequence + s;
        if (!loader_sequence(&t->train, index, sequence, error)) { return false; }
        memcpy(tokens + s * T, sequence, T * sizeof(int));
        memcpy(targets + s * T, sequence + 1, T * sizeof(int));
    }
    for (size_t i = 0; i < t->micro_steps; i++) {
        size_t first = i * batch * T, rows = min_size(batch * T, N - first);
        TokenOrder order = {positions + first, starts + first + i, 0};
        token_order(&order, t->counts, tokens + first, rows, t->gpt.config.vocab_size);
        t->groups[i] = order.groups;
    }
    device_upload(t->device_batch, t->host_batch, (4 * N + t->micro_steps) * sizeof(int));
    return true;
}

static MicroBatch trainer_micro_batch(const Trainer* t, size_t i) {
    size_t T = (size_t)t->T, N = t->sequences * T, first = i * t->gpt.rows, rows = min_size(t->gpt.rows, N - first);
    const int* tokens = t->device_batch;
    MicroBatch batch = {tokens + first, tokens + N + first, tokens + 2 * N + first, tokens + 3 * N + first + i, t->groups[i], (int)(rows / T), t->T};
    return batch;
}

// Names the first tensor that is not finite: weights in table order, then what each layer hands on, then gradients.
bool trainer_blame(Trainer* t, char* text, size_t size) {
    Gpt* g = &t->gpt;
    floatX* blocks[] = {g->params, g->grads};
    const char* kinds[] = {"weights of", "gradient of"};
    for (int kind = 0; kind < 2; kind++) {
        for (size_t u = 0; u < g->table.unit_count; u++) {
            const Unit* unit = &g->table.units[u];
            const TensorSpec* spec = &g->table.tensors[unit->tensor];
            float sum;
            square_sum(g->partial, blocks[kind] + unit->offset, unit->count);
            sum_floats(t->results, g->partial, (int)square_sum_partials(unit->count));
            device_download(&sum, t->results, sizeof(sum));
            if (isfinite(sum)) { continue; }
            int used = snprintf(text, size, "%s %s", kinds[kind], spec->name);
            if (spec->layers > 1) { snprintf(text + used, size - (size_t)used, ", layer %d", unit->layer); }
            return true;
        }
        for (int l = 0; kind == 0 && l <= g->config.layers; l++) {
            float sum;
            square_sum(g->partial, g->residual + (size_t)l * g->rows * (size_t)g->config.channels, g->rows * (size_t)g->config.channels);
            sum_floats(t->results, g->partial, (int)square_sum_partials(g->rows * (size_t)g->config.channels));
            device_download(&sum, t->results, sizeof(sum));
            if (isfinite(sum)) { continue; }
            snprintf(text, size, l ? "output of layer %d" : "embedding output", l - 1);
            return true;
        }
    }
    return false;
}

static void trainer_update(Trainer* t, double lr, double grad_scale) {
    const Options* o = t->options;
    StepScalars s = {(float)lr, (float)grad_scale, (float)o->beta1, (float)o->beta2, (float)o->eps, (float)o->weight_decay,
                     (float)(1.0 - pow(o->beta1, (double)(t->step + 1))), (float)(1.0 - pow(o->beta2, (double)(t->step + 1))), (uint32_t)t->step,
                     (uint64_t)o->seed};
    *t->host_scalars = s;
    device_upload(t->scalars, t->host_scalars, sizeof(s));
    for (size_t u = 0; u < t->gpt.table.unit_count; u++) {
        const Unit* unit = &t->gpt.table.units[u];
        const TensorSpec* spec = &t->gpt.table.tensors[unit->tensor];
        OptimizerUnit place = {t->gpt.params + unit->offset, t->gpt.grads + unit->offset, t->master ? t->master + unit->packed : NULL,
                               {t->slots[0] + unit->packed, t->slots[1] + unit->packed}, unit->count, spec->decay, (uint32_t)unit->tensor,
                               unit->offset - spec->offset};
        adamw_update(&place, t->scalars);
    }
}

// Batch, forward and backward over micro-batches, clipping, update. The one wait for the device is for loss and norm.
bool trainer_step(Trainer* t, StepResult* result, Error* error) {
    const Options* o = t->options;
    if (!trainer_load_batch(t, error)) { return false; }
    double tokens = (double)t->sequences * t->T, loss = 0.0;
    for (size_t i = 0; i < t->micro_steps; i++) {
        MicroBatch batch = trainer_micro_batch(t, i);
        gpt_forward_backward(&t->gpt, t->results + i, &batch, (float)(1.0 / tokens), i == 0);
    }
    gpt_grad_square_sum(&t->gpt, t->results + t->micro_steps);
    device_download(t->host_results, t->results, (t->micro_steps + 1) * sizeof(float));
    for (size_t i = 0; i < t->micro_steps; i++) { loss += t->host_results[i]; }
    result->loss = loss / tokens;
    result->norm = sqrt((double)t->host_results[t->micro_steps]);
    result->lr = schedule_lr((Schedule)o->schedule, o->lr, t->step, options_warmup(o, t->steps), t->steps, o->final_lr_frac);
    if (!isfinite(result->loss) || !isfinite(result->norm)) {
        char blame[128] = "the loss alone";
        trainer_blame(t, blame, sizeof(blame));
        return fail(error,
                    "step %" PRId64 ": loss %f, gradient norm %f: not finite; the first bad tensor is: %s; try a lower --lr or a longer --warmup",
                    t->step + 1, result->loss, result->norm, blame);
    }
    result->loss_z = outlier_add(&t->loss_outlier, result->loss);
    result->norm_z = outlier_add(&t->norm_outlier, result->norm);
    result->skipped = (o->skip_loss_z > 0 && result->loss_z > o->skip_loss_z) || (o->skip_norm_z > 0 && result->norm_z > o->skip_norm_z);
    if (result->skipped) {
        t->skipped++;
    } else {
        trainer_update(t, result->lr, o->clip > 0 && result->norm > o->clip ? o->clip / result->norm : 1.0);
    }
    t->step++;
    t->sequence += t->sequences;
    return true;
}

#include "trainer/state.cuh"

// ---------------------------------------------------------------------------------------------------------------------------------
// The training loop

// What a run shows and writes, beside the trainer.
typedef struct {
    Log log;
    RunLock lock;
    Progress progress;
    LossHistory history;
    Rate rate;
    double start, saved_at;  // seconds
    int64_t saved_step;      // -1: nothing saved yet by this run
    double val_loss;         // the last one
    double step_seconds;     // of all steps of this run but the first, which warms up
    int64_t step_count;
} Run;

static bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

static bool run_validate(Trainer* t, Run* r, Error* error) {
    EvalSpace space = {t->host_batch, t->device_batch, t->results};
    if (!eval_loss(&t->gpt, &t->val, space, t->options->val_batches, &r->val_loss, error)) { return false; }
    progress_clear(&r->progress);
    printf("val loss %f\n", r->val_loss);
    if (!log_val(&r->log, t->step, (float)r->val_loss, error)) { return false; }
    if (!t->options->hellaswag) { return true; }
    HellaSwagScore score;
    if (!hellaswag_score(&t->gpt, t->options->hellaswag_data, space, &score, error)) { return false; }
    printf("HellaSwag: %" PRId64 "/%" PRId64 " = %f\n", score.correct, score.total, (double)score.correct / (double)score.total);
    return log_eval(&r->log, t->step, score.correct, score.total, error);
}

static bool run_sample(Trainer* t, Run* r, Error* error) {
    Sampling sampling = {1.0, 0, 1.0, (uint64_t)t->options->seed};
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

static bool run_save(Trainer* t, Run* r, Error* error) {
    char folder[PATH_MAX];
    double start = seconds_now();
    if (r->saved_step == t->step) { return true; }
    if (!state_save(t, t->options->output, error) || !checkpoint_folder(folder, t->options->output, (uint64_t)t->step, error)) { return false; }
    r->saved_at = seconds_now();
    r->saved_step = t->step;
    progress_clear(&r->progress);
    printf("Writing checkpoint at step %" PRId64 ": %s, %.2f s\n", t->step, folder, r->saved_at - start);
    return log_checkpoint(&r->log, t->step, folder, r->saved_at - start, error);
}

static bool run_report_step(Trainer* t, Run* r, const StepResult* result, double seconds, Error* error) {
    char line[256];
    double tokens = (double)t->sequences * t->T, flops = machine_flops();
    StepRecord record = {t->step - 1, t->steps, (float)result->loss, (float)result->loss_z, (float)result->norm, (float)result->norm_z,
                         result->lr, 1e3 * seconds, flops > 0 ? gpt_step_flops(&t->gpt, tokens, t->T) / (seconds * flops) : -1.0,
                         rate_add(&r->rate, tokens, seconds), -1.0, (int64_t)((double)t->step * tokens)};
    if (r->step_count++ > 0) { r->step_seconds += seconds; }
    record.eta = (double)(t->steps - t->step) * tokens / fmax(record.tokens_per_second, 1e-9);
    loss_history_add(&r->history, t->step, (float)result->loss);
    if (due(t->step, t->options->log_every) || (t->options->log_every > 0 && t->step == t->steps)) {
        progress_clear(&r->progress);
        step_line(&record, line, sizeof(line));
        printf("%s\n", line);
    }
    if (result->skipped) {
        bool by_loss = t->options->skip_loss_z > 0 && result->loss_z > t->options->skip_loss_z;
        progress_clear(&r->progress);
        printf("skipping update due to %s z-score of %f\n", by_loss ? "loss" : "norm", by_loss ? result->loss_z : result->norm_z);
        if (!log_skip(&r->log, t->step - 1, by_loss ? "loss" : "norm", (float)(by_loss ? result->loss_z : result->norm_z), error)) { return false; }
    }
    progress_step(&r->progress, &record);
    fflush(stdout);
    return log_train(&r->log, &record, error);
}

// Why the run ends before its last step, or NULL.
static const char* run_ends_early(const Trainer* t, const Run* r) {
    const char* reason = run_stop_reason(t->options->output);
    bool late = t->options->max_time > 0 && seconds_now() - r->start >= t->options->max_time;
    return reason ? reason : late ? "--max-time" : NULL;
}

// Trains from t->step to t->steps, or until something asks it to stop; *stopped says what.
static bool run_loop(Trainer* t, Run* r, const char** stopped, Error* error) {
    const Options* o = t->options;
    *stopped = NULL;
    for (;;) {
        bool last = t->step >= t->steps || (*stopped = run_ends_early(t, r)) != NULL;
        if (t->has_val && (last || due(t->step, o->val_every)) && !run_validate(t, r, error)) { return false; }
        if (t->samples && t->step > 0 && (last || due(t->step, o->sample_every)) && !run_sample(t, r, error)) { return false; }
        bool late = o->checkpoint_minutes > 0 && seconds_now() - r->saved_at >= 60.0 * o->checkpoint_minutes;
        bool save = last || late || due(t->step, o->checkpoint_every);
        if (o->output[0] && save && (last || t->step > 0) && !run_save(t, r, error)) { return false; }
        if (last) { return true; }
        double start = seconds_now();
        StepResult result = {0.0, 0.0, 0.0, 0.0, 0.0, false};
        if (!trainer_step(t, &result, error)) { return false; }
        if (!run_report_step(t, r, &result, seconds_now() - start, error)) { return false; }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The train command

// The shape of the model that --model or, when resuming, the checkpoint asks for; file: where weights come from, "" = random ones.
static bool train_find_model(const Options* o, const Tokenizer* tokenizer, char* folder, uint64_t* step, char* file, ModelHeader* model,
                             Error* error) {
    Error notice;
    int version, vocab = o->vocab_size ? o->vocab_size : (int)tokenizer->vocab_size;
    folder[0] = file[0] = 0;
    if (o->resume) {
        if (!checkpoint_find_latest(o->output, folder, step, &notice, error)) { return false; }
        if (notice.text[0]) { fprintf(stderr, "notice: %s\n", notice.text); }
        if (!folder[0]) { fprintf(stderr, "notice: %s holds no checkpoint yet: starting a new run\n", o->output); }
    }
    if (folder[0]) {
        snprintf(file, PATH_MAX + 64, "%s/model_%08" PRIu64 ".bin", folder, *step);
    } else if (model_spec_is_new(o->model)) {
        return model_spec_parse(o->model, vocab, model, error);
    } else if (!state_find_model(o->model, file, &notice, error)) {
        return false;
    }
    if (!model_file_read_header(file, model, &version, error)) { return false; }
    ModelHeader asked;
    if (folder[0] && option_given(o, "model") && model_spec_is_new(o->model)) {
        if (!model_spec_parse(o->model, vocab, &asked, error)) { return false; }
        if (memcmp(&asked, model, sizeof(asked)) != 0) {
            return fail(error, "%s holds a model of another shape than --model %s; leave --model out to resume it, or give another --output",
                        folder, o->model);
        }
    }
    if (vocab && vocab > model->vocab_size) { return fail(error, "%s has %d tokens, the vocabulary %d", file, model->vocab_size, vocab); }
    return true;
}

static bool train_load(Trainer* t, const char* folder, uint64_t step, const char* file, Error* error) {
    Error notice = {{0}};
    if (folder[0]) {
        if (!state_load(t, folder, step, &notice, error)) { return false; }
        printf("resuming from %s: step %" PRId64 "\n", folder, t->step);
    } else if (file[0]) {
        if (!state_load_model(&t->gpt, file, &notice, error)) { return false; }
        trainer_reset_masters(t);
        printf("weights from %s\n", file);
    } else {
        gpt_init(&t->gpt, (uint64_t)t->options->seed);
        trainer_reset_masters(t);
    }
    if (notice.text[0]) { fprintf(stderr, "notice: %s\n", notice.text); }
    return true;
}

static void train_print(const Trainer* t) {
    const ModelHeader* m = &t->gpt.config;
    machine_print(stdout);
    options_print(t->options, stdout);
    printf("model: %d layers, %d heads, %d channels, context %d, vocabulary %d (padded %d): %zu parameters\n", m->layers, m->heads, m->channels,
           m->max_seq_len, m->vocab_size, m->padded_vocab, t->gpt.table.packed);
    printf("data: %" PRIu64 " tokens in %zu file(s), %" PRIu64 " sequences of %d; a step takes %zu in %zu micro-batch(es); %" PRId64 " steps\n",
           t->train.tokens, t->train.shard_count, t->train.sequences, t->T, t->sequences, t->micro_steps, t->steps);
    memory_print(&t->gpt.memory, stdout);
    fflush(stdout);
}

// A new run among the checkpoints of another would lose its own: those with the highest steps are kept, and resumed.
static bool train_refuse_mixture(const Options* o, Error* error) {
    CheckpointList list;
    if (!checkpoint_scan(o->output, &list, error)) { return false; }
    size_t count = list.count;
    uint64_t newest = count ? list.steps[0] : 0;
    checkpoint_list_free(&list);
    return count == 0 || fail(error, "%s holds checkpoints of an earlier run, up to step %" PRIu64 "%s, or give another --output", o->output, newest,
                              o->resume ? ", and none is whole: remove them" : ": go on with it by --resume on");
}

// Makes and locks the output folder, before anything is read from it: another run may be saving there.
static bool train_lock_output(const Options* o, Run* r, Error* error) {
    return !o->output[0] || (folder_make(o->output, error) && run_lock_take(&r->lock, o->output, error));
}

// How many of the checkpoints that will be kept are there already.
static int train_checkpoints_kept(const char* output, int keep) {
    CheckpointList list;
    Error ignored;
    if (!checkpoint_list(output, &list, &ignored)) { return 0; }
    int count = list.count < (size_t)keep ? (int)list.count : keep;
    checkpoint_list_free(&list);
    return count;
}

// A resumed run must go on with the vocabulary it began with, or its model's words change their meaning.
static bool train_same_tokenizer(const Trainer* t, Error* error) {
    char path[OPTION_TEXT_SIZE + 16];
    Tokenizer before;
    snprintf(path, sizeof(path), "%s/tokenizer.bin", t->options->output);
    if (!t->tokenizer.vocab_size || access(path, R_OK) != 0) { return true; }
    memset(&before, 0, sizeof(before));
    if (!tokenizer_open(&before, path, error)) { return false; }
    bool same = before.vocab_size == t->tokenizer.vocab_size && before.bytes.count == t->tokenizer.bytes.count &&
                memcmp(before.bytes.data, t->tokenizer.bytes.data, before.bytes.count) == 0;
    tokenizer_free(&before);
    return same || fail(error, "%s is another tokenizer than that of the data; resume with the data of the first run, or give another --output",
                        path);
}

// Sees that the disk is large enough, keeps the tokenizer in the output folder, and opens the logs.
static bool train_open_output(Trainer* t, Run* r, bool resumed, Error* error) {
    const Options* o = t->options;
    if (o->output[0]) {
        char path[OPTION_TEXT_SIZE + 16], purpose[96];
        uint64_t one = state_bytes(t);
        int keep = o->keep > 0 ? o->keep : 1;
        if (!resumed && !train_refuse_mixture(o, error)) { return false; }
        int missing = keep - train_checkpoints_kept(o->output, keep);
        snprintf(purpose, sizeof(purpose), "%d more checkpoint(s) and one being written", missing);
        if (!disk_space_check(o->output, one * (uint64_t)(missing + 1), purpose, error)) { return false; }
        if (resumed && !train_same_tokenizer(t, error)) { return false; }
        snprintf(path, sizeof(path), "%s/tokenizer.bin", o->output);
        if (t->tokenizer.vocab_size && !tokenizer_write(&t->tokenizer, path, error)) { return false; }
        run_stop_file_remove(o->output);
    }
    LogNote notes[] = {{"device", machine_device()}, {"gemm", gemm_description()}};
    return log_open(&r->log, o, resumed ? t->step : -1, notes, COUNT_OF(notes), error);
}

static void train_finish(Trainer* t, Run* r, const char* stopped) {
    char config[PATH_MAX + 16], command[4 * OPTION_TEXT_SIZE + 512], folder[PATH_MAX];
    Error error;
    progress_clear(&r->progress);
    if (r->history.count > 1) {
        loss_curve_print(stdout, r->history.steps, r->history.losses, r->history.count, 72, 14, terminal_is_utf8());
    }
    double average = r->step_count > 1 ? 1e3 * r->step_seconds / (double)(r->step_count - 1) : 0.0;
    printf("step %" PRId64 " reached, %" PRId64 " of them in %.1f s now; total average iteration time: %f ms\n", t->step, r->step_count,
           seconds_now() - r->start, average);
    if (t->skipped) { printf("%" PRId64 " update(s) were skipped\n", t->skipped); }
    if (stopped && t->options->output[0] && checkpoint_folder(folder, t->options->output, (uint64_t)t->step, &error)) {
        snprintf(config, sizeof(config), "%s/config.txt", folder);
        options_resume_command(t->options, config, command, sizeof(command));
        printf("stopped by %s; to go on:\n%s\n", stopped, command);
    } else if (stopped) {
        printf("stopped by %s\n", stopped);
    }
}

bool command_train(const Options* o, Error* error) {
    static Trainer trainer; // its embedded tables are too large for the stack
    static Run run;
    Trainer* t = &trainer;
    Run* r = &run;
    ModelHeader model;
    char folder[PATH_MAX], file[PATH_MAX + 64];
    uint64_t step = 0;
    const char* stopped = NULL;
    memset(t, 0, sizeof(*t));
    memset(r, 0, sizeof(*r));
    r->lock.fd = -1;
    r->saved_step = -1;
    r->start = r->saved_at = seconds_now();
    t->options = o;
    bool good = train_lock_output(o, r, error) && tokenizer_find(&t->tokenizer, o->tokenizer, o->train_data, error) &&
                train_find_model(o, &t->tokenizer, folder, &step, file, &model, error) && trainer_create(t, o, &model, error);
    if (good) { train_print(t); }
    good = good && train_load(t, folder, step, file, error) && train_open_output(t, r, folder[0] != 0, error);
    if (good) {
        r->saved_step = folder[0] ? t->step : -1;
        run_stop_begin();
        progress_begin(&r->progress, stderr, o->progress, (double)t->step);
        good = run_loop(t, r, &stopped, error);
        progress_clear(&r->progress);
        if (good) { train_finish(t, r, stopped); }
        if (good && stopped) { run_stop_file_remove(o->output); }
        run_stop_end();
    }
    log_close(&r->log);
    run_lock_release(&r->lock);
    trainer_free(t);
    return good;
}

#include "trainer/commands.cuh"
#include "trainer/convert.h"
#include "trainer/selfcheck.cuh"

// ---------------------------------------------------------------------------------------------------------------------------------
// main

#ifndef TESTING
static bool run_command(const Options* o, Error* error) {
    switch (o->command) {
    case COMMAND_TOKENIZE: return command_tokenize(o, error);
    case COMMAND_GENERATE: return command_generate(o, error);
    case COMMAND_EVAL: return command_eval(o, error);
    case COMMAND_SELFCHECK: return command_selfcheck(o, error);
    case COMMAND_CONVERT: return command_convert(o, error);
    default: return command_train(o, error);
    }
}

int main(int argc, char** argv) {
    static Options options;
    Error error;
    machine_open_descriptors();
    machine_limit_spinning(argv);
    signal(SIGXFSZ, SIG_IGN); // a limit on file sizes is a failed write like a full disk, not a silent death
    bool good = options_parse(&options, argc, argv, &error);
    if (good && options.action == OPTIONS_HELP) {
        options_help(stdout, options.command, options.command_named);
    } else if (good && options.action == OPTIONS_VERSION) {
        printf("train_gpt %s, %s, %s\n", provenance_git(), provenance_compiler(), provenance_flags());
    } else if (good && options_check(&options, &error) && machine_open(&options, &error)) {
        good = run_command(&options, &error);
    } else {
        good = false;
    }
    if (good && (fflush(stdout) != 0 || ferror(stdout))) { good = fail(&error, "cannot write to standard output: %s", strerror(errno)); }
    if (!good) { fprintf(stderr, "error: %s\n", error.text); }
    return good ? 0 : 1;
}
#endif
