// plan.cuh - the plan command: what a run with these options would hold, send and take on any number of ranks, from the options alone.
// Memory is the table that the run itself lays out (trainer_layout), bytes are those that its ledger will show (comm/traffic.h), time is
// a walk through the step (plan_schedule.h); tensor and pipeline parallelism stand beside as an analysis (plan_splits.h).
// Included by train_gpt.cu after the trainer.
#pragma once
#include "../comm/traffic.h"
#include "plan_schedule.h"
#include "plan_splits.h"

#define PLAN_STAGES 4
#define PLAN_CELLS ((int)TRAFFIC_PURPOSES * (int)LINK_CLASSES) // of a ledger
#define PLAN_RANKS_MAX (1 << 16) // beyond, the tables alone would take minutes
#define PLAN_LAYERS_MAX 2048           // the walk through a step takes time by their square

#define PLAN_LINKS ((size_t)1 << 15)    // ranks x layers up to which the links of all ranks are followed one by one
#if ON_GPU && !defined(CUDA_ON_CPU)
#define PLAN_WINDOW 0.0                 // NCCL: one exchange after the other
#else
#define PLAN_WINDOW (24.0 * COMM_PIECE) // of 64 pieces under way, those that help the next exchange: measured (doc/communication.md)
#endif

typedef enum {
    PLAN_WEIGHTS, PLAN_GRADIENTS, PLAN_STATE, PLAN_MASTERS, PLAN_ACTIVATIONS, PLAN_COMMUNICATION, PLAN_OTHER, PLAN_MEMORY,
} PlanMemory;

static const char* const plan_memory_names[PLAN_MEMORY] = {
    "weights", "gradients", "optimizer state", "masters", "activations", "communication", "other",
};

// What a ZeRO stage comes to.
typedef struct {
    int fullest;                                   // the rank that needs most memory
    size_t memory[PLAN_MEMORY], total;             // its bytes
    double mean[TRAFFIC_PURPOSES][LINK_CLASSES];   // bytes that ranks send in a step
    Ledger most;                                   // of the rank that sends most
    int busiest;
    StepTime time;
    double rate_needed;                            // bytes a second for 90 % utilisation; negative: none is enough
} PlanStage;

typedef struct {
    const Options* options;
    ModelHeader model;
    ParamTable table;
    int ranks, ranks_per_node;
    int* owner;
    bool* by_ranges;              // (1 + layers) of owners_groups_by_ranges
    size_t* loads;
    int T;
    size_t sequences, own;        // of a step; of the rank that has most
    uint64_t micro_steps;
    double step_flops, head_flops; // of all ranks together
    double flops;                 // of a rank a second, as they are reached
    double peak;                  // of a rank
    bool peak_given, link_assumed, link_measured;
    double rate[LINK_CLASSES], latency; // bytes a second, seconds
    PlanStage stages[PLAN_STAGES];
} Plan;

// ---------------------------------------------------------------------------------------------------------------------------------
// What is planned

static bool plan_model(Plan* p, Error* error) {
    const Options* o = p->options;
    char file[PATH_MAX];
    Error notice;
    int version;
    if (model_spec_is_new(o->model)) { return model_spec_parse(o->model, o->vocab_size, &p->model, error); }
    return state_find_model(o->model, file, &notice, error) && model_file_read_header(file, &p->model, &version, error);
}

static bool plan_batch(Plan* p, Error* error) {
    const Options* o = p->options;
    p->T = o->seq_len ? o->seq_len : p->model.max_seq_len;
    if (p->T > p->model.max_seq_len) {
        return fail(error, "--seq-len %d is beyond the model's context of %d tokens; give at most --seq-len %d", p->T, p->model.max_seq_len,
                    p->model.max_seq_len);
    }
    int64_t tokens = o->total_batch ? o->total_batch : (int64_t)o->batch * p->T;
    if (tokens % p->T) { return fail(error, "--total-batch %" PRId64 " is not a multiple of the sequence length %d", tokens, p->T); }
    p->sequences = (size_t)(tokens / p->T);
    p->own = ceil_div(p->sequences, (size_t)p->ranks);
    p->micro_steps = ceil_div(p->own, min_size((size_t)o->batch, p->own));
    return true;
}

// The model's FLOPs: of the step as gpt_step_flops has them, and of its head, 6 V C a token.
static void plan_flops(Plan* p) {
    static Gpt g;
    double tokens = (double)p->sequences * p->T;
    memset(&g, 0, sizeof(g));
    g.config = p->model;
    g.table = p->table;
    p->step_flops = gpt_step_flops(&g, tokens, p->T);
    p->head_flops = 6.0 * tokens * p->model.vocab_size * p->model.channels;
}

// FLOP/s of one rank.
static bool plan_peak(Plan* p, Error* error) {
    p->peak_given = p->options->tflops > 0;
    p->peak = p->peak_given ? 1e12 * p->options->tflops : machine_flops();
#if !ON_GPU || defined(CUDA_ON_CPU)
    if (p->peak <= 0) { p->peak = peak_flops_measure(0.05); }
#endif
    if (p->peak <= 0) { return fail(error, "the peak of this device is not known; give it by --tflops X"); }
    p->flops = p->peak * p->options->efficiency;
    return true;
}

// Seconds of an all-gather of `bytes` in all, the fastest of some.
static double plan_time_gather(const Comm* world, char* memory, size_t bytes) {
    CommSegment* segments = (CommSegment*)need(calloc((size_t)world->size, sizeof(CommSegment)));
    double best = INFINITY;
    size_t share = bytes / (size_t)world->size;
    for (int r = 0; r < world->size; r++) {
        CommSegment s = {r, r, memory + (size_t)r * share, memory + (size_t)r * share, share};
        segments[r] = s;
    }
    CommExchange exchange = {COMM_ALL_GATHER, COMM_BYTE, false, TRAFFIC_CONTROL, segments, (size_t)world->size, 0};
    for (int i = 0; i < 4; i++) {
        comm_barrier(world);
        double start = seconds_now();
        comm_run(world, &exchange);
        device_sync();
        best = i ? fmin(best, seconds_now() - start) : best; // the first warms up
    }
    free(segments);
    return best;
}

// The difference of two sizes leaves latency out. Collective.
static bool plan_measure(Plan* p, const Comm* world, Error* error) {
    size_t small = (size_t)1 << 20, large = (size_t)16 << 20;
    char* memory = (char*)device_alloc(large);
    if (!comm_agree(world, memory != NULL || fail(error, "out of memory: %zu MiB are needed to measure the links", large >> 20), error)) {
        device_free(memory, large);
        return false;
    }
    double sent = (double)(large - small) * (world->size - 1) / world->size;
    double slow = plan_time_gather(world, memory, small), fast = plan_time_gather(world, memory, large), latency = INFINITY;
    char* all = (char*)need(malloc((size_t)world->size));
    for (int i = 0; i < 20; i++) {
        double start = seconds_now();
        comm_gather_host(world, "", 1, all, TRAFFIC_CONTROL);
        latency = fmin(latency, seconds_now() - start);
    }
    free(all);
    device_free(memory, large);
    p->rate[LINK_INSIDE] = p->rate[LINK_BETWEEN] = sent / fmax(fast - slow, 1e-6);
    p->latency = latency;
    p->link_measured = true;
    return true;
}

static bool plan_links(Plan* p, const Comm* world, Error* error) {
    const Options* o = p->options;
    double bits = o->link_mbit > 0 ? 1e6 * o->link_mbit : 1e10;
    p->link_assumed = o->link_mbit <= 0 && world->size == 1;
    p->rate[LINK_BETWEEN] = p->rate[LINK_INSIDE] = bits / 8.0;
    p->latency = 1e-6 * o->link_latency_us;
    if (o->link_mbit <= 0 && world->size > 1 && !plan_measure(p, world, error)) { return false; }
    if (o->node_mbit > 0) { p->rate[LINK_INSIDE] = 1e6 * o->node_mbit / 8.0; }
    return true;
}

static void plan_free(Plan* p) {
    params_free(&p->table);
    free(p->owner);
    free(p->by_ranges);
    free(p->loads);
}

static bool plan_open(Plan* p, const Options* o, const Comm* world, Error* error) {
    memset(p, 0, sizeof(*p));
    p->options = o;
    p->ranks = o->ranks > 0 ? o->ranks : world->size;
    p->ranks_per_node = o->ranks_per_node > 0 ? o->ranks_per_node : world->nodes > 1 ? world->local_size : 0;
    if (p->ranks > PLAN_RANKS_MAX) { return fail(error, "--ranks %d: plan goes up to %d ranks", p->ranks, PLAN_RANKS_MAX); } // alike on all
    bool good = plan_model(p, error) && plan_batch(p, error) && plan_peak(p, error);
    if (good && p->model.layers > PLAN_LAYERS_MAX) { good = fail(error, "%d layers: plan goes up to %d", p->model.layers, PLAN_LAYERS_MAX); }
    if (!comm_agree(world, good, error) || !plan_links(p, world, error)) { return false; }
    gpt_params_table(&p->table, &p->model);
    plan_flops(p);
    double bytes = (double)p->table.packed * sizeof(floatX) * 3.0 * (double)p->micro_steps * p->ranks;
    if (bytes > 1e19) { return fail(error, "a step of %" PRIu64 " micro-steps would send %.0e bytes; give a larger --batch", p->micro_steps, bytes); }
    p->owner = (int*)need(malloc(p->table.unit_count * sizeof(int)));
    p->loads = (size_t*)need(malloc((size_t)p->ranks * sizeof(size_t)));
    owners_assign(&p->table, p->ranks, p->owner, p->loads);
    p->by_ranges = (bool*)need(malloc((1 + (size_t)p->model.layers) * sizeof(bool)));
    owners_groups_by_ranges(&p->table, p->owner, p->ranks, p->by_ranges);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// A stage

static PlanMemory plan_memory_kind(const char* name) {
    static const struct {
        const char* prefix;
        PlanMemory kind;
    } kinds[] = {
        {"parameters", PLAN_WEIGHTS}, {"gradients", PLAN_GRADIENTS}, {"optimizer", PLAN_STATE}, {"fp32 master", PLAN_MASTERS},
        {"lower halves", PLAN_MASTERS}, {"work space of updates", PLAN_OTHER}, {"batch", PLAN_OTHER}, {"decoding", PLAN_OTHER},
    };
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        if (strncmp(name, kinds[i].prefix, strlen(kinds[i].prefix)) == 0) { return kinds[i].kind; }
    }
    return PLAN_ACTIVATIONS;
}

// What the communicator takes beside the run's table: room in which sums are made.
static size_t plan_staging(int ranks) {
    if (ranks == 1) { return 0; }
#if ON_GPU && !defined(CUDA_ON_CPU)
    return NCCL_STAGING;
#else
    return comm_mpi_staging(ranks);
#endif
}

// Lays out `rank` at a stage, and keeps its memory if it is more than that of the ranks before. Rank 0 is taken to make samples.
// rows: where to print the table, or NULL.
static bool plan_layout(Plan* p, int stage, int rank, FILE* rows, Error* error) {
    static Trainer trainer; // its embedded tables are too large for the stack
    static Options options;
    PlanStage* s = &p->stages[stage];
    options = *p->options;
    options.zero = stage;
    memset(&trainer, 0, sizeof(trainer));
    trainer.tokenizer.vocab_size = (size_t)p->model.vocab_size;
    bool good = trainer_layout(&trainer, &options, &p->model, p->ranks, rank, error);
    const MemoryTable* m = &trainer.gpt.memory;
    size_t staging = plan_staging(p->ranks);
    if (good && m->bytes + staging > s->total) {
        s->fullest = rank;
        s->total = m->bytes + staging;
        memset(s->memory, 0, sizeof(s->memory));
        s->memory[PLAN_COMMUNICATION] = staging;
        for (int i = 0; i < m->count; i++) { s->memory[plan_memory_kind(m->rows[i].name)] += round_up(m->rows[i].bytes, DEVICE_ALIGN); }
    }
    if (good && rows) { memory_print(m, rows); }
    trainer.tokenizer.vocab_size = 0;
    trainer_free(&trainer);
    return good;
}

// Ranks differ in what they own and in whether they have a sequence more: those that own most of either kind are looked at.
static bool plan_stage_memory(Plan* p, int stage, Error* error) {
    int fuller = (int)(p->sequences % (size_t)p->ranks), most = 0, most_fuller = 0;
    for (int r = 1; r < p->ranks; r++) {
        most = p->loads[r] > p->loads[most] ? r : most;
        most_fuller = r < fuller && p->loads[r] > p->loads[most_fuller] ? r : most_fuller;
    }
    return plan_layout(p, stage, 0, NULL, error) && plan_layout(p, stage, most_fuller, NULL, error) && plan_layout(p, stage, most, NULL, error);
}

static TrafficModel plan_traffic(const Plan* p, int stage, int rank) {
    TrafficModel m = {&p->table, p->owner, p->ranks, rank, p->ranks > 1 ? stage : 0, p->micro_steps, p->ranks_per_node, sizeof(floatX),
                      sizeof(StepReport), COMM_PIECE, p->by_ranges};
    return m;
}

static void plan_stage_traffic(Plan* p, int stage) {
    PlanStage* s = &p->stages[stage];
    for (int r = 0; r < p->ranks; r++) {
        TrafficModel m = plan_traffic(p, stage, r);
        Ledger step;
        traffic_step(&m, &step);
        for (int i = 0; i < PLAN_CELLS; i++) {
            s->mean[i / LINK_CLASSES][i % LINK_CLASSES] += (double)step.sent[i / LINK_CLASSES][i % LINK_CLASSES] / p->ranks;
        }
        if (r == 0 || traffic_bytes(&step) > traffic_bytes(&s->most)) {
            s->most = step;
            s->busiest = r;
        }
    }
}

// A third of a layer's work is its forward pass; --recompute 3 does that once more in the backward pass.
static void plan_stage_time(Plan* p, int stage) {
    PlanStage* s = &p->stages[stage];
    TrafficModel m = plan_traffic(p, stage, 0);
    double share = (double)p->own / (double)p->sequences / (double)p->micro_steps / p->flops; // of all work, in a rank's micro-step
    double layer = share * (p->step_flops - p->head_flops) / p->model.layers;
    double *own = plan_owned(&m), back = layer * (p->options->recompute >= RECOMPUTE_BLOCK ? 1.0 : 2.0 / 3.0);
    StepPlan plan = {&m, (size_t)p->model.layers, own, plan_busiest(&m, own), PLAN_WINDOW, layer / 3.0, back, share * p->head_flops,
                     {p->rate[LINK_INSIDE], p->rate[LINK_BETWEEN]}, p->latency};
    if ((size_t)p->ranks * (size_t)p->model.layers > PLAN_LINKS || PLAN_WINDOW <= 0) { plan.own = NULL; } // then they hardly overlap
    s->time = plan_step_time(&plan);
    s->rate_needed = plan_rate_needed(&plan, 0.9);
    free(plan.busiest);
    free(own);
}

// One rank with the whole batch.
static double plan_alone_seconds(const Plan* p) {
    double again = p->options->recompute >= RECOMPUTE_BLOCK ? (p->step_flops - p->head_flops) / 3.0 : 0.0;
    return (p->step_flops + again) / p->flops;
}

#include "plan_print.cuh"

// ---------------------------------------------------------------------------------------------------------------------------------
// The command

// Collective: all ranks of `world` measure, rank 0 prints.
bool plan_run(const Options* o, const Comm* world, FILE* out, Error* error) {
    static Plan plan;
    Plan* p = &plan;
    bool good = plan_open(p, o, world, error);
    for (int s = 0; good && world->rank == 0 && s < PLAN_STAGES; s++) {
        good = plan_stage_memory(p, s, error);
        if (!good) { break; }
        plan_stage_traffic(p, s);
        plan_stage_time(p, s);
    }
    if (good && world->rank == 0) {
        plan_print_model(p, out);
        plan_print_ranks(p, out);
        plan_print_memory(p, out);
        fprintf(out, "\nrank 0 at ZeRO %d, as the run prints it\n", o->zero);
        good = plan_layout(p, o->zero, 0, out, error);
        plan_print_traffic(p, out);
        plan_print_time(p, out);
        plan_print_splits(p, out);
        plan_print_warnings(p, out);
    }
    plan_free(p);
    return comm_agree(world, good, error);
}

bool command_plan(const Options* o, const Comm* world, Error* error) { return plan_run(o, world, stdout, error); }
