// bench.cu - where the time of a training step goes, on the CPU: the whole step, then every op alone at the step's own shapes, its
// share of the step, the speed it reaches and the share of the measured peak (multiply-add peak, or memory bandwidth).
//     build/bench [model batch seq_len [steps [optimizer]]]       default: the three shapes of doc/results.md, with AdamW
// The floor is the step's matrix products alone plus the optimizer's memory traffic at the measured bandwidth.
#define TESTING
#include "../train_gpt.cu"
#include <sys/resource.h>

typedef struct {
    double seconds, flops, bytes; // of one call; bytes 0: not bound by memory
} BenchTime;

// The best of several calls: other programs only ever add time.
#define BENCH_TIME(result, call)                                             \
    do {                                                                     \
        double best_ = 1e30, begin_ = seconds_now();                         \
        for (int k_ = 0; k_ < 4 || (k_ < 12 && seconds_now() - begin_ < 0.5); k_++) {  \
            double start_ = seconds_now();                                   \
            call;                                                            \
            best_ = fmin(best_, seconds_now() - start_);                     \
        }                                                                    \
        (result) = best_;                                                    \
    } while (0)

static struct {
    double step, flops, bandwidth, accounted, gemm;
} bench;

static void bench_row(const char* name, double count, double seconds, double flops, double bytes) {
    bench.accounted += count * seconds;
    printf("%-34s %5.0f x %9.3f ms %6.1f %%", name, count, 1e3 * seconds, 100.0 * count * seconds / bench.step);
    if (flops > 0) { printf("  %7.1f GFLOP/s  %5.1f %% of peak", 1e-9 * flops / seconds, 100.0 * flops / seconds / bench.flops); }
    if (bytes > 0) { printf("  %7.1f GB/s  %5.1f %% of bandwidth", 1e-9 * bytes / seconds, 100.0 * bytes / seconds / bench.bandwidth); }
    printf("\n");
}

// Four arrays read and three of them written where they stand, with next to no arithmetic: the traffic of AdamW, and its fair peer, since
// what a machine moves depends on the mix (with three reads to a write some 15 % less here). A write in place takes no read of its own:
// the bytes of these seven streams are all that cross.
static double bench_bandwidth(void) {
    size_t n = (size_t)1 << 25, pitch = n + 16 * 1031; // not a power of two apart: their lines would fall on each other in the cache
    float *x[4], *block = (float*)need(device_alloc(4 * pitch * sizeof(float)));
    double seconds;
    for (int k = 0; k < 4; k++) { x[k] = block + (size_t)k * pitch; }
    const float* a = x[0];
    float *b = x[1], *c = x[2], *d = x[3];
    for (int warm = 0; warm < 2; warm++) {
        BENCH_TIME(seconds, DO_PRAGMA(omp parallel for simd schedule(static)) for (size_t i = 0; i < n; i++) {
            b[i] = 0.5f * b[i] + a[i];
            c[i] = 0.5f * c[i] + a[i];
            d[i] = 0.5f * d[i] + a[i];
        });
    }
    device_free(block, 4 * pitch * sizeof(float));
    return 28.0 * (double)n / seconds;
}

// Forward, gradient of the input and gradient of the weight of one linear layer.
static void bench_linear(const char* name, double count, floatX* out, floatX* inp, floatX* weight, floatX* dweight, size_t N,
                         int C, int OC) {
    double forward, input, weights, flops = 2.0 * (double)N * C * OC;
    char text[64];
    BENCH_TIME(forward, matmul_forward(out, inp, weight, NULL, N, C, OC));
    BENCH_TIME(input, matmul_backward_input(inp, out, weight, N, C, OC, false));
    BENCH_TIME(weights, matmul_backward_weight(dweight, out, inp, N, C, OC, false));
    bench.gemm += count * (forward + input + weights);
    snprintf(text, sizeof(text), "%s forward", name);
    bench_row(text, count, forward, flops, 0);
    snprintf(text, sizeof(text), "%s backward, input", name);
    bench_row(text, count, input, flops, 0);
    snprintf(text, sizeof(text), "%s backward, weight", name);
    bench_row(text, count, weights, flops, 0);
}

static void bench_gemms(Trainer* t, int B, int T) {
    Gpt* g = &t->gpt;
    size_t N = (size_t)B * (size_t)T;
    int C = g->config.channels, L = g->config.layers, Vp = g->config.padded_vocab;
    BlockActs a = block_acts(g, 0);
    BlockTensors w = gpt_block_weights(g, 0), d = gpt_block_gradients(g, 0);
    bench_linear("qkv", L, a.qkv, a.ln1, w.qkvw, d.qkvw, N, C, 3 * C);
    bench_linear("attention projection", L, g->branch, a.att, w.attprojw, d.attprojw, N, C, C);
    bench_linear("MLP up", L, a.pre, a.ln2, w.fcw, d.fcw, N, C, 4 * C);
    bench_linear("MLP down", L, g->branch, a.gelu, w.fcprojw, d.fcprojw, N, 4 * C, C);
    size_t rows = min_size(g->head_rows, N);
    bench_linear("head", (double)N / (double)rows, g->logits, g->lnf, g->params, g->grads, rows, C, Vp);
}

static void bench_others(Trainer* t, int B, int T) {
    Gpt* g = &t->gpt;
    size_t N = (size_t)B * (size_t)T;
    int C = g->config.channels, L = g->config.layers, NH = g->config.heads, V = g->config.vocab_size, Vp = g->config.padded_vocab;
    double s, wide = (double)N * C * sizeof(floatX), attention = 2.0 * B * (double)T * T * C; // causal: half of T x T, two products
    size_t rows = min_size(g->head_rows, N);
    BlockActs a = block_acts(g, 0);
    BlockTensors w = gpt_block_weights(g, 0), d = gpt_block_gradients(g, 0);
    BENCH_TIME(s, attention_forward(a.att, a.lse, a.qkv, B, T, C, NH));
    bench_row("attention forward", L, s, attention, 0);
    BENCH_TIME(s, attention_backward(g->dwide, g->attention_work, g->branch, a.att, a.qkv, a.lse, B, T, C, NH));
    bench_row("attention backward", L, s, 2.5 * attention, 0);
    BENCH_TIME(s, LAUNCH(N, BLOCK_TEAM, bias_add_row, a.qkv, w.qkvb, 3 * C));
    bench_row("qkv bias", L, s, 0, 6 * wide);
    BENCH_TIME(s, residual_layernorm_forward(a.mid, a.ln2, a.ln2_mean, a.ln2_rstd, a.input, g->branch, w.attprojb, w.ln2w, w.ln2b, N, C));
    bench_row("residual + layernorm forward", 2 * L, s, 0, 4 * wide);
    BENCH_TIME(s, layernorm_backward(g->dresidual, d.ln2w, d.ln2b, g->partial, g->branch, a.mid, w.ln2w, a.ln2_mean, a.ln2_rstd, N, C));
    bench_row("layernorm backward", 2 * L + 1, s, 0, 4 * wide);
    BENCH_TIME(s, bias_gelu_forward(a.gelu, a.pre, w.fcb, N, 4 * C));
    bench_row("bias + GELU forward", L, s, 0, 12 * wide);
    BENCH_TIME(s, gelu_forward(a.gelu, a.pre, N * 4 * (size_t)C));
    bench_row("GELU recompute", g->recompute ? L : 0, s, 0, 8 * wide);
    BENCH_TIME(s, gelu_backward(g->dwide, a.pre, N * 4 * (size_t)C));
    bench_row("GELU backward", L, s, 0, 12 * wide);
    BENCH_TIME(s, bias_backward(d.fcb, g->partial, g->dwide, N, 4 * C));
    bench_row("bias backward (C)", 9.0 / 4.0 * L, s, 0, 4 * wide);
    MicroBatch batch = trainer_micro_batch(t, 0);
    BENCH_TIME(s, classifier(g->losses, g->logits, batch.targets, rows, V, Vp, 1.0f, true));
    bench_row("classifier", (double)N / (double)rows, s, 0, 2.0 * (double)rows * Vp * sizeof(floatX));
    BENCH_TIME(s, embedding_forward(g->residual, batch.tokens, g->params, g->params + g->table.tensors[WPE].offset, N, T, C));
    bench_row("embedding forward", 1, s, 0, 0);
    BENCH_TIME(s, embedding_backward(g->grads, g->grads + g->table.tensors[WPE].offset, g->dresidual, batch.tokens, batch.positions, batch.starts,
                                     batch.groups, N, T, C));
    bench_row("embedding backward", 1, s, 0, 0);
    BENCH_TIME(s, gpt_unit_square_sums(g, t->results + t->micro_steps));
    bench_row("gradient norm", 1, s, 0, (double)g->table.packed * sizeof(floatX));
}

// Newton-Schulz over every matrix of the model, once.
static void bench_orthogonalise(Trainer* t, float* x, char* work) {
    const ParamTable* table = &t->gpt.table;
    for (size_t u = 0; u < table->unit_count; u++) {
        const Unit* unit = &table->units[u];
        const TensorSpec* s = &table->tensors[unit->tensor];
        size_t rows = unit->rows / (size_t)s->parts;
        for (int p = 0; s->role == ROLE_MATRIX && p < s->parts; p++) { newton_schulz(x, x, rows, unit->cols, work); }
    }
}

// The update as a whole; of optimizers that orthogonalise, Newton-Schulz alone and what is left.
static void bench_optimizer(Trainer* t, const char* name) {
    const ParamTable* table = &t->gpt.table;
    OptimizerKind kind = t->optimizer.config.kind;
    StepResult none;
    double all, orthogonal;
    char text[64];
    memset(&none, 0, sizeof(none));
    BENCH_TIME(all, trainer_update(t, &none));
    printf("optimizer state: %.4f bytes a parameter\n", (double)t->state_bytes / (double)table->packed);
    if (kind != OPTIMIZER_MUON && kind != OPTIMIZER_NORMUON && kind != OPTIMIZER_KAPPA) {
        bench_row(name, 1, all, 0, kind == OPTIMIZER_ADAMW ? 28.0 * (double)table->packed : 0);
        return;
    }
    size_t most = 0, work = 0;
    for (size_t u = 0; u < table->unit_count; u++) {
        if (table->tensors[table->units[u].tensor].role != ROLE_MATRIX) { continue; }
        most = max_size(most, table->units[u].count);
        work = max_size(work, newton_schulz_work_bytes(table->units[u].rows, table->units[u].cols));
    }
    float* x = (float*)need(device_alloc(most * sizeof(float)));
    char* space = (char*)need(device_alloc(work));
    for (size_t i = 0; i < most; i++) { x[i] = (float)(philox_at(1, RANDOM_SAMPLING, 0, 0, i).x[0] >> 8) * 0x1p-23f - 1.0f; }
    BENCH_TIME(orthogonal, bench_orthogonalise(t, x, space));
    bench_row("Newton-Schulz", 1, orthogonal, 0, 0);
    snprintf(text, sizeof(text), "%s, the rest of it", name);
    bench_row(text, 1, all - orthogonal, 0, 0);
    device_free(x, most * sizeof(float));
    device_free(space, work);
}

static bool bench_data(const char* path, int V, Error* error) {
    static uint16_t tokens[262144];
    int32_t header[256] = {20240520, 1, (int32_t)COUNT_OF(tokens)};
    FileWriter file;
    for (size_t i = 0; i < COUNT_OF(tokens); i++) { tokens[i] = (uint16_t)(philox_at(1, RANDOM_SAMPLING, 0, 0, i).x[0] % (uint32_t)V); }
    return file_create(&file, path, error) && file_write(&file, header, sizeof(header), error) && file_write(&file, tokens, sizeof(tokens), error) &&
           file_commit(&file, error);
}

static int bench_compare(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static bool bench_steps(Trainer* t, int steps, Error* error) {
    double* times = (double*)need(calloc((size_t)steps, sizeof(double)));
    StepResult result;
    bool good = true;
    for (int i = -2; good && i < steps; i++) {
        double start = seconds_now();
        good = trainer_step(t, &result, error);
        if (i >= 0) { times[i] = seconds_now() - start; }
    }
    if (good) {
        struct rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        qsort(times, (size_t)steps, sizeof(double), bench_compare);
        bench.step = times[steps / 2];
        printf("step: median %.1f ms, minimum %.1f ms of %d; %.0f tok/s; peak memory %.0f MiB\n", 1e3 * bench.step, 1e3 * times[0], steps,
               (double)t->sequences * t->T / bench.step, (double)usage.ru_maxrss / 1024.0);
    }
    free(times);
    return good;
}

// One shape; detail also times every op alone.
static bool bench_shape(const char* model, const char* batch, const char* length, int steps, const char* optimizer, bool detail,
                        Error* error) {
    static Options o;
    static Trainer t;
    ModelHeader header;
    char path[] = "/tmp/train_gpt_bench_XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0) { return fail(error, "cannot make a file in /tmp: %s", strerror(errno)); }
    close(fd);
    const char* arguments[] = {"bench", "train", "--train-data", path, "--val-every", "0", "--sample-every", "0", "--model", model, "--batch", batch,
                               "--seq-len", length, "--steps", "100000", "--warmup", "0", "--lr", "1e-4", "--weight-decay", "0",
                               "--optimizer", optimizer};
    bool good = options_parse(&o, (int)COUNT_OF(arguments), (char**)(uintptr_t)arguments, error) && machine_open(&o, comm_alone(), error) &&
                model_spec_parse(o.model, o.vocab_size, &header, error) && bench_data(path, header.vocab_size, error) &&
                trainer_create(&t, &o, &header, error);
    if (good) {
        gpt_init(&t.gpt, 42);
        bench.flops = fmax(machine_flops(), peak_flops_measure(0.3));
        bench.accounted = bench.gemm = 0.0;
        printf("\n%s, B = %s, T = %s: %zu parameters, %s, %s\n", model, batch, length, t.gpt.table.packed, machine_device(), gemm_description());
        good = bench_steps(&t, steps, error);
    }
    if (good && detail) {
        bench.bandwidth = bench_bandwidth();
        printf("peak %.1f GFLOP/s, bandwidth %.1f GB/s\n", 1e-9 * bench.flops, 1e-9 * bench.bandwidth);
        bench_gemms(&t, o.batch, o.seq_len);
        bench_others(&t, o.batch, o.seq_len);
        bench_optimizer(&t, optimizer);
        double floor = bench.gemm + 28.0 * (double)t.gpt.table.packed / bench.bandwidth;
        printf("ops together %.1f %% of the step; floor (products + optimizer traffic) %.1f ms; step = %.3f x floor\n",
               100.0 * bench.accounted / bench.step, 1e3 * floor, bench.step / floor);
    }
    trainer_free(&t);
    unlink(path);
    return good;
}

int main(int argc, char** argv) {
    static const char* shapes[][3] = {{"gpt2:d12", "4", "64"},
                                      {"layers=6,heads=6,channels=384,context=1024,vocab=50304", "8", "256"},
                                      {"gpt2:d12", "2", "1024"}};
    Error error;
    bool good = true;
    machine_limit_spinning(argv);
    if (argc >= 4) {
        good = bench_shape(argv[1], argv[2], argv[3], argc > 4 ? atoi(argv[4]) : 12, argc > 5 ? argv[5] : "adamw", argc < 7, &error);
    } else {
        for (size_t i = 0; good && i < COUNT_OF(shapes); i++) {
            good = bench_shape(shapes[i][0], shapes[i][1], shapes[i][2], 12, "adamw", true, &error);
        }
    }
    if (!good) { fprintf(stderr, "error: %s\n", error.text); }
    return good ? 0 : 1;
}
