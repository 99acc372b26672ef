// plan_print.cuh - the plan as text: tables with exact counts, and the same in units that can be read. Included by plan.cuh.
#pragma once

// ---------------------------------------------------------------------------------------------------------------------------------
// Numbers as text

// "12.3 GiB"; texts of a call stay valid for the next seven calls.
static const char* plan_text_slot(char** slot) {
    static char slots[8][40];
    static int next;
    *slot = slots[next++ % 8];
    return *slot;
}

static const char* plan_bytes(double bytes) {
    static const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    char* text;
    size_t unit = 0;
    for (; bytes >= 1024.0 && unit + 1 < COUNT_OF(units); unit++) { bytes /= 1024.0; }
    plan_text_slot(&text);
    snprintf(text, 40, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

static const char* plan_seconds(double seconds) {
    char* text;
    plan_text_slot(&text);
    if (seconds < 1.0) {
        snprintf(text, 40, seconds < 1e-3 ? "%.1f us" : "%.1f ms", seconds * (seconds < 1e-3 ? 1e6 : 1e3));
    } else if (seconds < 7200.0) {
        snprintf(text, 40, "%.2f s", seconds);
    } else {
        snprintf(text, 40, seconds < 2e5 ? "%.1f h" : "%.0f d", seconds / (seconds < 2e5 ? 3600.0 : 86400.0));
    }
    return text;
}

// Bandwidth of a link, from bytes a second.
static const char* plan_rate(double rate) {
    char* text;
    double bits = 8.0 * rate;
    plan_text_slot(&text);
    snprintf(text, 40, bits >= 1e9 ? "%.1f Gbit/s" : bits >= 1e5 ? "%.1f Mbit/s" : "%.4f Mbit/s", bits / (bits >= 1e9 ? 1e9 : 1e6));
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Printing

static void plan_print_model(const Plan* p, FILE* out) {
    static const char* const roles[] = {"embeddings", "matrices", "vectors"};
    const ModelHeader* m = &p->model;
    double count[3] = {0, 0, 0}, tokens = (double)p->sequences * p->T;
    for (size_t u = 0; u < p->table.unit_count; u++) { count[p->table.tensors[p->table.units[u].tensor].role] += (double)p->table.units[u].count; }
    fprintf(out, "model: %d layers, %d heads, %d channels, context %d, vocabulary %d; %s weights on the wire\n", m->layers, m->heads, m->channels,
            m->max_seq_len, m->vocab_size, FLOATX_NAME);
    for (int i = 0; i < 3; i++) { fprintf(out, "| %-22s | %15.0f | %5.1f %% |\n", roles[i], count[i], 100.0 * count[i] / (double)p->table.packed); }
    fprintf(out, "| %-22s | %15zu | in %zu units\n", "parameters", p->table.packed, p->table.unit_count);
    fprintf(out, "| %-22s | %15.4g | forward and backward\n", "FLOP a token", p->step_flops / tokens);
    fprintf(out, "| %-22s | %15.4g | %zu sequences of %d\n", "FLOP a step", p->step_flops, p->sequences, p->T);
}

static void plan_print_ranks(const Plan* p, FILE* out) {
    double elements, work;
    int per = p->ranks_per_node > 0 && p->ranks_per_node < p->ranks ? p->ranks_per_node : p->ranks;
    owners_balance(&p->table, p->ranks, p->owner, &elements, &work);
    fprintf(out, "ranks: %d on %d node(s) of up to %d; a rank has up to %zu sequence(s) in %" PRIu64 " micro-step(s)\n", p->ranks,
            (p->ranks + per - 1) / per, per, p->own, p->micro_steps);
    fprintf(out, "owners: the largest share is %.3f times the mean of elements, %.3f times that of matrix work\n", elements, work);
    fprintf(out, "speed of a rank: %.3f TFLOP/s (%s) x efficiency %.2f\n", p->peak * 1e-12, p->peak_given ? "given" : "peak of this machine",
            p->options->efficiency);
    fprintf(out, "links: %s between nodes, %s inside, %.0f us (%s)\n", plan_rate(p->rate[LINK_BETWEEN]), plan_rate(p->rate[LINK_INSIDE]),
            1e6 * p->latency, p->link_measured ? "measured" : p->link_assumed ? "assumed; give --link-mbit" : "given");
}

static void plan_print_memory(const Plan* p, FILE* out) {
    fprintf(out, "\nmemory of the fullest rank\n| %-16s |", "ZeRO");
    for (int s = 0; s < PLAN_STAGES; s++) { fprintf(out, " %15d |", s); }
    for (int kind = 0; kind < PLAN_MEMORY; kind++) {
        fprintf(out, "\n| %-16s |", plan_memory_names[kind]);
        for (int s = 0; s < PLAN_STAGES; s++) { fprintf(out, " %15s |", plan_bytes((double)p->stages[s].memory[kind])); }
    }
    fprintf(out, "\n| %-16s |", "total");
    for (int s = 0; s < PLAN_STAGES; s++) { fprintf(out, " %15s |", plan_bytes((double)p->stages[s].total)); }
    fprintf(out, "\n| %-16s |", "total, bytes");
    for (int s = 0; s < PLAN_STAGES; s++) { fprintf(out, " %15zu |", p->stages[s].total); }
    fprintf(out, "\n| %-16s |", "number of rank");
    for (int s = 0; s < PLAN_STAGES; s++) { fprintf(out, " %15d |", p->stages[s].fullest); }
    fprintf(out, "\n");
}

static void plan_print_traffic(const Plan* p, FILE* out) {
    if (p->ranks == 1) {
        fprintf(out, "\none rank sends nothing, and holds everything at every stage\n");
        return;
    }
    fprintf(out, "\nbytes that a rank sends in a step: mean, and the rank that sends most\n| %-4s | %-24s | %20s | %20s | %-10s |\n",
        "ZeRO", "what", "mean", "most", "mean");
    for (int stage = 0; stage < PLAN_STAGES; stage++) {
        const PlanStage* s = &p->stages[stage];
        double mean = 0.0;
        for (int i = 0; i < PLAN_CELLS; i++) {
            int purpose = i / LINK_CLASSES, link = i % LINK_CLASSES;
            char what[40];
            if (s->mean[purpose][link] <= 0) { continue; }
            snprintf(what, sizeof(what), "%s, %s", traffic_names[purpose], link == LINK_INSIDE ? "inside nodes" : "between nodes");
            fprintf(out, "| %-4d | %-24s | %20.0f | %20" PRIu64 " | %-10s |\n", stage, what, s->mean[purpose][link], s->most.sent[purpose][link],
                    plan_bytes(s->mean[purpose][link]));
            mean += s->mean[purpose][link];
        }
        double formula = traffic_zero_formula(stage, p->ranks, (double)p->micro_steps, (double)p->table.packed * sizeof(floatX));
        fprintf(out, "| %-4d | %-24s | %20.0f | %20" PRIu64 " | %-10s | rank %d; formula %.0f\n", stage, "all", mean, traffic_bytes(&s->most),
                plan_bytes(mean), s->busiest, formula);
    }
    fprintf(out, "formulas of gradients and weights, n ranks, s N bytes of weights, M micro-steps (Rajbhandari et al. 2020, arXiv 1910.02054):\n"
                 "ZeRO 0, 1: 2 (n-1)/n s N; 2: (M+1) (n-1)/n s N; 3: 3M (n-1)/n s N, of which kept layers save a part\n");
}

static void plan_print_time(const Plan* p, FILE* out) {
    double alone = plan_alone_seconds(p), tokens = (double)p->sequences * p->T;
    fprintf(out, "\ntime of a step; one rank alone would take %s\n", plan_seconds(alone));
    fprintf(out, "| %-4s | %10s | %13s | %6s | %10s | %10s | %11s | %8s | %-16s |\n", "ZeRO", "compute", "communication", "hidden",
        "exposed", "step", "tokens/s", "speed-up", "90 % busy needs");
    for (int stage = 0; stage < PLAN_STAGES; stage++) {
        const PlanStage* s = &p->stages[stage];
        const StepTime* t = &s->time;
        const char* needed = s->rate_needed < 0 ? "no rate helps" : s->rate_needed > 0 ? plan_rate(s->rate_needed) : "-";
        fprintf(out, "| %-4d | %10s | %13s | %4.0f %% | %10s | %10s | %11.0f | %8.2f | %-16s |%s\n", stage, plan_seconds(t->compute),
            plan_seconds(t->busy), 100.0 * plan_hidden(t), plan_seconds(t->waited), plan_seconds(t->step), tokens / t->step, alone / t->step, needed,
                stage == p->options->zero ? " chosen" : "");
    }
    fprintf(out, "a step = computing + what it waits for; the update itself, data and evaluation are not in it\n");
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Other splits

#define PLAN_SPLITS 12 // rows shown, the ZeRO stages among them

static SplitInput plan_split_input(const Plan* p) {
    const ModelHeader* m = &p->model;
    double tokens = (double)p->sequences * p->T, again = p->options->recompute >= RECOMPUTE_BLOCK ? 4.0 / 3.0 : 1.0;
    SplitInput in;
    memset(&in, 0, sizeof(in));
    in.ranks = p->ranks;
    in.ranks_per_node = p->ranks_per_node;
    in.layers = m->layers;
    in.heads = m->heads;
    in.channels = m->channels;
    in.context = m->max_seq_len;
    in.vocab = m->vocab_size;
    in.parameters = (double)p->table.packed;
    for (int i = 0; i < p->table.tensor_count; i++) {
        const TensorSpec* s = &p->table.tensors[i];
        in.layer_parameters += s->in_layers ? (double)(s->rows * s->cols) : 0.0;
    }
    in.tokens = p->T;
    in.sequences = p->sequences;
    in.batch = (size_t)p->options->batch;
    in.element = sizeof(floatX);
    in.state = (double)(p->stages[0].memory[PLAN_STATE] + p->stages[0].memory[PLAN_MASTERS]) / in.parameters; // every rank's at stage 0
    in.layer_flops = again * (p->step_flops - p->head_flops) / tokens / m->layers;
    in.head_flops = p->head_flops / tokens;
    in.flops = p->flops;
    memcpy(in.rate, p->rate, sizeof(in.rate));
    in.latency = p->latency;
    return in;
}

static SplitRow plan_stage_row(const Plan* p, int stage) {
    const PlanStage* s = &p->stages[stage];
    SplitRow row = {1, 1, p->ranks, stage, 0, 0, 0, 0, 0, s->time.step};
    for (int i = 0; i < PLAN_CELLS; i++) { row.data_bytes += s->mean[i / LINK_CLASSES][i % LINK_CLASSES]; }
    for (int kind = PLAN_WEIGHTS; kind <= PLAN_MASTERS; kind++) { row.memory += (double)s->memory[kind]; }
    return row;
}

static void plan_print_splits(const Plan* p, FILE* out) {
    SplitInput in = plan_split_input(p);
    SplitRow *list, rows[PLAN_SPLITS];
    size_t all = split_list(&in, &list), count = 0;
    double alone = plan_alone_seconds(p);
    if (p->ranks > 1) {
        for (int s = 0; s < PLAN_STAGES; s++) { rows[count++] = plan_stage_row(p, s); }
    }
    for (size_t i = 0; i < all && count < PLAN_SPLITS; i++) { rows[count++] = list[i]; }
    qsort(rows, count, sizeof(SplitRow), split_order);
    fprintf(out, "\nsplits of %d rank(s), the fastest first: t ranks share each layer, p stages hold the layers, n copies; %zu of %zu\n",
        p->ranks, count, all + (p->ranks > 1 ? PLAN_STAGES : 0));
    fprintf(out, "| %-15s | %10s | %10s | %10s | %6s | %17s | %10s | %8s |\n", "t x p x n", "tensor", "pipeline", "data", "bubble",
        "weights to state", "step", "speed-up");
    for (size_t i = 0; i < count; i++) {
        const SplitRow* r = &rows[i];
        char name[40];
        snprintf(name, sizeof(name), "%d x %d x %d", r->tensor, r->pipeline, r->data);
        if (r->stage >= 0) { snprintf(name, sizeof(name), "ZeRO %d x %d", r->stage, r->data); }
        fprintf(out, "| %-15s | %10s | %10s | %10s | %4.1f %% | %17s | %10s | %8.2f |\n", name, plan_bytes(r->tensor_bytes),
            plan_bytes(r->pipeline_bytes), plan_bytes(r->data_bytes), 100.0 * r->bubble, plan_bytes(r->memory),
            plan_seconds(r->seconds), alone / r->seconds);
    }
    fprintf(out, "bytes that a rank sends in a step. train_gpt runs the rows of ZeRO only; t x p x n are formulas: Narayanan et al. 2021,\n"
                 "arXiv 2104.04473; sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) sends the same and keeps 1/t of activations;\n"
                 "data copies by ring all-reduce, optimizer state spread over them (arXiv 1910.02054)\n");
    free(list);
}

static void plan_print_warnings(const Plan* p, FILE* out) {
    const PlanStage* s = &p->stages[p->options->zero];
    size_t here = 1, available = device_memory_free();
#if !ON_GPU || defined(CUDA_ON_CPU)
    here = (size_t)(p->ranks_per_node > 0 && p->ranks_per_node < p->ranks ? p->ranks_per_node : p->ranks);
#endif
    if (available != SIZE_MAX && (double)s->total * (double)here > (double)available) {
        fprintf(out, "warning: %zu rank(s) of %s do not fit into the %s that are free on this machine\n", here, plan_bytes((double)s->total),
                plan_bytes((double)available));
    }
    if (p->sequences < (size_t)p->ranks) {
        fprintf(out, "warning: a step has %zu sequences, so %zu of the ranks have none; give a larger --total-batch\n", p->sequences,
                (size_t)p->ranks - p->sequences);
    }
    if (p->table.unit_count < (size_t)p->ranks) {
        fprintf(out, "warning: the model has %zu units, so %zu of the ranks own nothing and others serve them all\n", p->table.unit_count,
                (size_t)p->ranks - p->table.unit_count);
    }
    double alone = plan_alone_seconds(p);
    if (p->ranks > 1 && s->time.step >= alone) {
        fprintf(out, "warning: over these links %d ranks are not faster than one; a larger --total-batch or faster links are needed\n", p->ranks);
    }
}
