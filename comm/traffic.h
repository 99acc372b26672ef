// traffic.h - how many bytes a training step hands to the network, from the parameter table and the owners alone: what the ledger must
// show afterwards, without running anything. Nothing here calls the exchanges; they are counted by what each rank owns.
// Below it, the closed forms for schemes that share the work in other ways, for comparison:
//   data parallel, ZeRO   Rajbhandari et al. 2020, arXiv 1910.02054
//   tensor, pipeline      Narayanan et al. 2021, arXiv 2104.04473
//   sequence parallel     Korthikanti et al. 2022, arXiv 2205.05198: the same bytes as tensor parallel
#pragma once
#include "owners.h"
#include "ledger.h"

#define TRAFFIC_SLOTS 2 // layers of weights that a rank holds at stage 3

typedef struct {
    const ParamTable* table;
    const int* owner;      // (unit_count), from owners_assign
    int ranks, rank;
    int stage;             // of ZeRO, 0 to 3
    uint64_t micro_steps;  // of the step: the most that any rank has
    int ranks_per_node;    // ranks 0 .. n - 1 share a node, and so on; 0 = all on one
    size_t element;        // bytes of a weight or a gradient on the wire
    size_t report;         // bytes that every rank tells every other in a step, beside the norms of units
    size_t piece;          // bytes of a message at most; 0 = no bound
    const bool* by_ranges; // (1 + layers) from owners_groups_by_ranges; unused at stage 0, where every group goes by ranges
} TrafficModel;

// ---------------------------------------------------------------------------------------------------------------------------------
// Counting

// Products that cannot be held stay at the largest number, so that an absurd plan reads as absurd.
static uint64_t traffic_times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t traffic_plus(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

int traffic_node(const TrafficModel* m, int rank) { return m->ranks_per_node > 0 ? rank / m->ranks_per_node : 0; }

static LinkClass traffic_link(const TrafficModel* m, int rank) {
    return traffic_node(m, rank) == traffic_node(m, m->rank) ? LINK_INSIDE : LINK_BETWEEN;
}

// The other ranks of this rank's node, and those elsewhere.
static void traffic_peers(const TrafficModel* m, uint64_t peers[LINK_CLASSES]) {
    int per = m->ranks_per_node, first = per > 0 ? traffic_node(m, m->rank) * per : 0;
    int here = per > 0 && first + per < m->ranks ? per : m->ranks - first;
    peers[LINK_INSIDE] = (uint64_t)here - 1;
    peers[LINK_BETWEEN] = (uint64_t)(m->ranks - here);
}

// `bytes` in so many parts to each of `peers` ranks, `times` over.
static void traffic_add(const TrafficModel* m, Ledger* out, TrafficPurpose purpose, LinkClass link, uint64_t bytes, uint64_t peers,
                        uint64_t times, uint64_t parts) {
    if (bytes == 0) { return; }
    uint64_t count = traffic_times(peers, times), sent = traffic_times(bytes, count);
    uint64_t pieces = m->piece ? ceil_div(bytes, parts * m->piece) : 1;
    out->raw[purpose][link] = traffic_plus(out->raw[purpose][link], sent);
    out->sent[purpose][link] = traffic_plus(out->sent[purpose][link], sent);
    out->messages[purpose][link] = traffic_plus(out->messages[purpose][link], traffic_times(pieces * parts, count));
}

// How often the weights of a group are gathered in a step. At stage 3 the block holds the last layers after a forward pass and the first
// ones after a backward pass, which are not fetched again.
uint64_t traffic_gathers(const TrafficModel* m, size_t layers, size_t group) {
    if (m->stage == 0) { return 0; }
    if (m->stage < 3 || group == 0) { return 1; }
    size_t slots = min_size(TRAFFIC_SLOTS, layers), layer = group - 1;
    uint64_t first = 1, backward = layer + slots < layers ? m->micro_steps : 0, later = layer >= slots ? m->micro_steps - 1 : 0;
    return first + backward + later;
}

uint64_t traffic_reductions(const TrafficModel* m) { return m->stage >= 2 ? m->micro_steps : 1; }

// The elements that [from, from + count) has in common with the ranges of ranks first .. end - 1.
static uint64_t traffic_common(const TrafficModel* m, size_t n, int first, int end, size_t from, size_t count) {
    size_t low = max_size(from, owners_range(n, m->ranks, first)), high = min_size(from + count, owners_range(n, m->ranks, end));
    return high > low ? high - low : 0;
}

// This rank's node: ranks *first .. *end - 1.
static void traffic_node_ranks(const TrafficModel* m, const uint64_t peers[LINK_CLASSES], int* first, int* end) {
    *first = m->ranks_per_node > 0 ? m->rank / m->ranks_per_node * m->ranks_per_node : 0;
    *end = *first + 1 + (int)peers[LINK_INSIDE];
}

// A group of n elements by ranges: each rank gives every range to the rank that adds it up, and sends its own range to all, in stage 0
// the sums (purpose gradient), else the weights.
static void traffic_ranges(const TrafficModel* m, size_t n, const uint64_t peers[LINK_CLASSES], uint64_t reductions, uint64_t gathers, Ledger* out) {
    int first, end;
    traffic_node_ranks(m, peers, &first, &end);
    uint64_t own = traffic_common(m, n, m->rank, m->rank + 1, 0, n) * m->element, node = traffic_common(m, n, first, end, 0, n) * m->element;
    uint64_t others[LINK_CLASSES] = {node - own, n * m->element - node};
    TrafficPurpose spread = m->stage == 0 ? TRAFFIC_GRADIENT : TRAFFIC_WEIGHTS;
    for (int link = 0; link < LINK_CLASSES; link++) {
        traffic_add(m, out, TRAFFIC_GRADIENT, (LinkClass)link, others[link], 1, reductions, peers[link]);
        traffic_add(m, out, spread, (LinkClass)link, own, peers[link], gathers, 1);
    }
}

// One unit at element `at` of its group of n, by ranges: its sums go to the owner, the owner's weights to the ranges.
static void traffic_moves(const TrafficModel* m, size_t u, size_t at, size_t n, const uint64_t peers[LINK_CLASSES], uint64_t reductions,
                          uint64_t gathers, Ledger* out) {
    int first, end;
    size_t count = m->table->units[u].count;
    traffic_node_ranks(m, peers, &first, &end);
    uint64_t own = traffic_common(m, n, m->rank, m->rank + 1, at, count) * m->element;
    if (m->owner[u] != m->rank) {
        traffic_add(m, out, TRAFFIC_GRADIENT, traffic_link(m, m->owner[u]), own, 1, reductions, 1);
        return;
    }
    uint64_t near = traffic_common(m, n, first, end, at, count) * m->element;
    traffic_add(m, out, TRAFFIC_WEIGHTS, LINK_INSIDE, near - own, 1, gathers, 1);
    traffic_add(m, out, TRAFFIC_WEIGHTS, LINK_BETWEEN, count * m->element - near, 1, gathers, 1);
}

// One unit between its owner and all.
static void traffic_direct(const TrafficModel* m, size_t u, const uint64_t peers[LINK_CLASSES], uint64_t reductions, uint64_t gathers, Ledger* out) {
    uint64_t bytes = (uint64_t)m->table->units[u].count * m->element;
    if (m->owner[u] != m->rank) {
        traffic_add(m, out, TRAFFIC_GRADIENT, traffic_link(m, m->owner[u]), bytes, 1, reductions, 1);
        return;
    }
    for (int link = 0; link < LINK_CLASSES; link++) { traffic_add(m, out, TRAFFIC_WEIGHTS, (LinkClass)link, bytes, peers[link], gathers, 1); }
}

// What each rank tells each other about a step: the report, and from stage 1 on a float for every unit.
uint64_t traffic_report(const TrafficModel* m) { return m->report + (m->stage > 0 ? m->table->unit_count * sizeof(float) : 0); }

// What this rank hands over in one optimizer step: gradients, weights and the exchange of norms. Messages are an estimate: a segment at a
// time.
void traffic_step(const TrafficModel* m, Ledger* out) {
    uint64_t peers[LINK_CLASSES];
    memset(out, 0, sizeof(*out));
    if (m->ranks == 1) { return; }
    traffic_peers(m, peers);
    size_t layers = owners_layers(m->table), groups = 1 + layers;
    size_t *elements = (size_t*)need(calloc(groups, sizeof(size_t))), *at = (size_t*)need(calloc(groups, sizeof(size_t)));
    for (size_t u = 0; u < m->table->unit_count; u++) { elements[owners_group(m->table, &m->table->units[u])] += m->table->units[u].count; }
    for (size_t u = 0; m->stage > 0 && u < m->table->unit_count; u++) {
        size_t g = owners_group(m->table, &m->table->units[u]);
        uint64_t reductions = traffic_reductions(m), gathers = traffic_gathers(m, layers, g);
        if (m->by_ranges[g]) {
            traffic_moves(m, u, at[g], elements[g], peers, reductions, gathers, out);
        } else {
            traffic_direct(m, u, peers, reductions, gathers, out);
        }
        at[g] += m->table->units[u].count;
    }
    for (size_t g = 0; g < groups; g++) {
        bool ranges = m->stage == 0 || m->by_ranges[g];
        if (ranges) { traffic_ranges(m, elements[g], peers, traffic_reductions(m), m->stage == 0 ? 1 : traffic_gathers(m, layers, g), out); }
    }
    uint64_t norm = traffic_report(m);
    for (int link = 0; link < LINK_CLASSES; link++) { traffic_add(m, out, TRAFFIC_NORM, (LinkClass)link, norm, peers[link], 1, 1); }
    free(elements);
    free(at);
}

uint64_t traffic_link_bytes(const Ledger* ledger, LinkClass link) {
    uint64_t bytes = 0;
    for (int p = 0; p < TRAFFIC_PURPOSES; p++) { bytes = traffic_plus(bytes, ledger->sent[p][link]); }
    return bytes;
}

uint64_t traffic_bytes(const Ledger* ledger) {
    return traffic_plus(traffic_link_bytes(ledger, LINK_INSIDE), traffic_link_bytes(ledger, LINK_BETWEEN));
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Closed forms: bytes that the average rank sends in a step. n ranks, `bytes` of all weights (or gradients), in M micro-steps

// Each of n ranks holds 1/n at the end of the first half and gives it to n - 1 others in the second; a ring sends as much.
double traffic_all_reduce_formula(double n, double bytes) { return 2.0 * (n - 1.0) / n * bytes; }

// Stages 0, 1: 2 (n-1)/n bytes. Stage 2: (M + 1) (n-1)/n. Stage 3: 3 M (n-1)/n, two gathers and a reduction a micro-step.
double traffic_zero_formula(int stage, double n, double micro_steps, double bytes) {
    double passes = stage < 2 ? 2.0 : stage == 2 ? micro_steps + 1.0 : 3.0 * micro_steps;
    return passes * (n - 1.0) / n * bytes;
}

// Layers shared by t ranks: two all-reduces forward and two backward of `act` bytes (a micro-batch's activations of one layer, s b T C).
double traffic_tensor_formula(double t, double act, double layers, double micro_steps) {
    return 4.0 * traffic_all_reduce_formula(t, act) * layers * micro_steps;
}

// A stage inside the pipeline hands `act` bytes on and as many back in each micro-step; the first and the last do one of the two.
double traffic_pipeline_formula(double act, double micro_steps) { return 2.0 * act * micro_steps; }

// The share of a step in which a stage of p stands idle while M micro-batches fill and leave the pipeline.
double traffic_bubble(double p, double micro_steps) { return (p - 1.0) / (micro_steps + p - 1.0); }
