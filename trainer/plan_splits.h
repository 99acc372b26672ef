// plan_splits.h - what tensor and pipeline parallelism, and their products with data parallelism, would send and cost: t ranks share each
// layer, p stages hold the layers one after the other, n = ranks / (t p) copies work on different sequences. An analysis by the closed
// forms of comm/traffic.h: train_gpt does not run these splits.
// Placement: the t ranks of a layer are neighbours, then the n copies, then the stages, so that the heaviest traffic stays in a node.
// Sources: Narayanan et al. 2021, arXiv 2104.04473 (t, p, bubble); Korthikanti et al. 2022, arXiv 2205.05198 (sequence parallelism: the
// same bytes, activations / t); Rajbhandari et al. 2020, arXiv 1910.02054 (optimizer state over the n copies).
#pragma once
#include "../comm/traffic.h"

typedef struct {
    int ranks, ranks_per_node; // 0: all on one node
    int layers, heads;
    double channels, context, vocab; // of the model
    double parameters, layer_parameters;
    double tokens;                // in a sequence
    size_t sequences, batch;      // of a step; of a micro-batch at most
    double element, state;        // bytes of a weight; of an element's optimizer state and master
    double layer_flops, head_flops; // of a token, forward and backward
    double flops;                 // a second, as they are reached
    double rate[LINK_CLASSES];    // bytes a second
    double latency;               // seconds
} SplitInput;

typedef struct {
    int tensor, pipeline, data;
    int stage;                              // of ZeRO where train_gpt runs it, -1 for an analysis
    double tensor_bytes, pipeline_bytes, data_bytes; // that a rank sends in a step
    double bubble;                          // share of the step
    double memory;                          // bytes of weights, gradients and optimizer state of the largest rank
    double seconds;                         // of a step
} SplitRow;

static LinkClass split_link(const SplitInput* in, int span) {
    return in->ranks_per_node == 0 || span <= in->ranks_per_node ? LINK_INSIDE : LINK_BETWEEN;
}

// Seconds that gradients and weights of n copies take beyond what the last backward and the first forward pass hide.
static double split_data_seconds(const SplitInput* in, const SplitRow* row, double micro) {
    if (row->data == 1) { return 0.0; }
    double half = 0.5 * row->data_bytes / in->rate[split_link(in, row->tensor * row->data)] + (row->data - 1) * in->latency;
    return fmax(0.0, half - micro * 2.0 / 3.0) + fmax(0.0, half - micro / 3.0);
}

// Fills bytes, memory and time of tensor x pipeline x data.
void split_estimate(const SplitInput* in, SplitRow* row) {
    double t = row->tensor, p = row->pipeline, n = row->data, layers = (double)ceil_div((size_t)in->layers, (size_t)row->pipeline);
    size_t own = ceil_div(in->sequences, (size_t)row->data), rows = min_size(in->batch, own);
    double micro_steps = (double)ceil_div(own, rows), tokens = (double)own / micro_steps * in->tokens;
    double act = in->element * tokens * in->channels, ends = in->vocab * in->channels / t + in->context * in->channels;
    // the first and the last stage both hold the token embedding, tied as it is; the split of layers leaves vectors out of account
    double elements = p > 1 ? layers * in->layer_parameters / t + ends : in->parameters / t;
    double micro = tokens * (layers * in->layer_flops + in->head_flops) / (t * in->flops);
    row->tensor_bytes = traffic_tensor_formula(t, act, layers, micro_steps);
    row->pipeline_bytes = p > 1 ? traffic_pipeline_formula(act / t, micro_steps) : 0.0;
    row->data_bytes = traffic_all_reduce_formula(n, in->element * elements);
    row->bubble = traffic_bubble(p, micro_steps);
    row->memory = elements * (2.0 * in->element + in->state / n);
    LinkClass tensor_link = split_link(in, row->tensor), stage_link = split_link(in, in->ranks);
    double shared = t > 1 ? row->tensor_bytes / in->rate[tensor_link] + 8.0 * (t - 1.0) * layers * micro_steps * in->latency : 0.0;
    double hop = p > 1 ? act / t / in->rate[stage_link] + in->latency : 0.0, per_micro = micro + shared / micro_steps;
    double tied = p > 1 ? in->element * in->vocab * in->channels / t / in->rate[stage_link] : 0.0;
    row->seconds = (micro_steps + p - 1.0) * fmax(per_micro, 2.0 * hop) + 2.0 * (p - 1.0) * hop + tied + split_data_seconds(in, row, micro);
}

static int split_order(const void* x, const void* y) {
    const SplitRow *a = (const SplitRow*)x, *b = (const SplitRow*)y;
    if (a->seconds != b->seconds) { return a->seconds < b->seconds ? -1 : 1; }
    return a->tensor != b->tensor ? a->tensor - b->tensor : a->pipeline - b->pipeline;
}

// All splits of in->ranks, the fastest first; returns their number. To be freed by the caller.
size_t split_list(const SplitInput* in, SplitRow** list) {
    SplitRow* rows = NULL;
    size_t count = 0;
    for (int t = 1; t <= in->heads && t <= in->ranks; t++) {
        if (in->heads % t || in->ranks % t) { continue; }
        for (int p = 1; p <= in->layers && p <= in->ranks / t; p++) {
            int n = in->ranks / t / p;
            if (in->ranks / t % p || (size_t)n > in->sequences) { continue; }
            SplitRow row = {t, p, n, -1, 0, 0, 0, 0, 0, 0};
            split_estimate(in, &row);
            rows = (SplitRow*)need(realloc(rows, (count + 1) * sizeof(SplitRow)));
            rows[count++] = row;
        }
    }
    if (count) { qsort(rows, count, sizeof(SplitRow), split_order); }
    *list = rows;
    return count;
}
