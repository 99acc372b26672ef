// zero.cuh - ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): which of optimizer state (stage 1), gradients (2) and weights (3) live
// only with the rank that owns their unit, and the exchanges that this takes. Stage 0 is plain data parallelism: every rank holds
// everything and does the whole update on the summed gradients.
//
// Exchanges go by group: the tensors outside the blocks, and each layer. A group's gradients are summed while the backward pass works on
// the next layer; a group's new weights travel while the forward pass works on earlier ones (stages 1, 2), or are fetched one layer
// ahead of their use and forgotten after it (3). Memory for what is not held: a block of two layers at a time.
//     stage   weights           gradients          state    gradient exchange                     weight exchange
//     0       all               all                all      all-reduce, once a step               -
//     1       all               all, then own      own      reduce-scatter, once a step           all-gather after the update
//     2       all               2 layers + own     own      reduce-scatter, every micro-step      all-gather after the update
//     3       2 layers + own    2 layers + own     own      reduce-scatter, every micro-step      all-gather, per pass over the layers
// Where one layer's matrices have few owners among many ranks, exchanges go by ranges (owners_by_ranges): every rank adds up, or passes on,
// an equal part of the group, and a second exchange moves the parts to their owners, or a first one from there.
// On one rank every stage is stage 0.
#pragma once
#include "agree.h"
#include "owners.h"

#define ZERO_ELSEWHERE SIZE_MAX
#define ZERO_SLOTS 2 // layers on their way

enum { ZERO_OUTER }; // the group of tensors outside the blocks; layer l is group 1 + l

// Segments for all groups: those of group g are segments[first[g]] .. segments[first[g + 1] - 1].
typedef struct {
    CommSegment* segments;
    size_t *first, count;
} ZeroList;

typedef enum {
    ZERO_SUM,    // gradients are summed up, by their owners or by ranges (stage 0: for all)
    ZERO_TAKE,   // by ranges: sums go to their owners
    ZERO_GIVE,   // by ranges: owners' weights go to the ranges
    ZERO_SPREAD, // weights go to all, from their owners or from the ranges
    ZERO_LISTS,
} ZeroListKind;

// A part of a unit, and the rank that adds it up or passes it on.
typedef struct {
    size_t unit, offset, count;
    int rank;
} ZeroCut;

typedef struct {
    const Comm* comm;
    const ParamTable* table;
    int stage, ranks, rank;
    int* owner;               // (unit_count)
    size_t* loads;            // (ranks) elements that each rank owns
    size_t* place;            // (unit_count) first element in this rank's packed arrays, or ZERO_ELSEWHERE
    size_t held;              // elements of the packed arrays: masters, from stage 2 own gradients, in 3 own weights
    bool carry;               // set by the caller: updates leave gradients at zero or at what the next step must add to
    int groups;
    size_t *units, *first;    // units of group g: units[first[g]] .. units[first[g + 1] - 1]
    BlockLayout weights_layout, grads_layout;
    floatX *weights, *grads;  // the blocks: of all layers, or of ZERO_SLOTS
    floatX *own_weights, *own_grads; // (held), NULL below stage 3 and 2
    bool* by_ranges;          // (groups) how the group is exchanged from stage 1 on
    ZeroList lists[ZERO_LISTS];
    int take, spread;         // group whose second exchange is still to be started after its first, -1 = none: the next group's first
    CommTicket take_after, spread_after; // exchange goes before it, so that the links do not wait between the two
    CommTicket *reduce_ticket, *gather_ticket; // (groups), of what is on its way
    bool* there;              // (groups) stage 3: the block holds the group's weights, or they are coming
} Zero;

// What every rank tells the others in each step, and the squares' sums of its units after it (stage >= 1).
typedef struct {
    double loss;       // sum over this rank's tokens
    uint32_t failed;   // this rank cannot go on
    uint32_t wishes;   // to stop or to save (run_stop.h)
} StepReport;

// ---------------------------------------------------------------------------------------------------------------------------------
// Who holds what

static void zero_list_groups(Zero* z) {
    z->units = (size_t*)need(malloc(max_size(1, z->table->unit_count) * sizeof(size_t)));
    z->first = (size_t*)need(calloc((size_t)z->groups + 1, sizeof(size_t)));
    size_t at = 0;
    for (int g = 0; g < z->groups; g++) {
        z->first[g] = at;
        for (size_t u = 0; u < z->table->unit_count; u++) {
            if (owners_group(z->table, &z->table->units[u]) == (size_t)g) { z->units[at++] = u; }
        }
    }
    z->first[z->groups] = at;
}

// Fills owners, places and layouts; no memory of the device yet. stage is 0 on one rank. Frees with zero_free.
void zero_plan(Zero* z, const ParamTable* table, int layers, int stage, int ranks, int rank) {
    memset(z, 0, sizeof(*z));
    z->table = table;
    z->stage = ranks > 1 ? stage : 0;
    z->ranks = ranks;
    z->rank = rank;
    z->groups = 1 + layers;
    z->take = z->spread = -1;
    z->owner = (int*)need(malloc(max_size(1, table->unit_count) * sizeof(int)));
    z->place = (size_t*)need(malloc(max_size(1, table->unit_count) * sizeof(size_t)));
    z->loads = (size_t*)need(malloc((size_t)ranks * sizeof(size_t)));
    owners_assign(table, ranks, z->owner, z->loads);
    for (size_t u = 0; u < table->unit_count; u++) {
        bool holds = z->stage == 0 || z->owner[u] == rank;
        z->place[u] = holds ? z->held : ZERO_ELSEWHERE;
        z->held += holds ? table->units[u].count : 0;
    }
    zero_list_groups(z);
    size_t all = (size_t)layers, few = min_size(ZERO_SLOTS, all);
    z->weights_layout = block_layout(table, z->stage == 3 ? few : all);
    z->grads_layout = block_layout(table, z->stage >= 2 ? few : all);
}

void zero_free(Zero* z) {
    free(z->owner);
    free(z->place);
    free(z->loads);
    free(z->units);
    free(z->first);
    for (int i = 0; i < ZERO_LISTS; i++) {
        free(z->lists[i].segments);
        free(z->lists[i].first);
    }
    free(z->by_ranges);
    free(z->reduce_ticket);
    free(z->gather_ticket);
    free(z->there);
    memset(z, 0, sizeof(*z));
}

// Whether this rank keeps the unit's optimizer state, and updates it.
bool zero_holds(const Zero* z, size_t u) { return z->place[u] != ZERO_ELSEWHERE; }

// Whether this rank answers for the unit where one must: in checkpoints and in sums over units.
bool zero_owns(const Zero* z, size_t u) { return z->owner[u] == z->rank; }

// The unit's weights and summed gradient, on a rank that holds it.
floatX* zero_unit_weights(const Zero* z, size_t u) {
    return z->stage == 3 ? z->own_weights + z->place[u] : z->weights + block_unit_at(&z->weights_layout, z->table, &z->table->units[u]);
}

floatX* zero_unit_gradient(const Zero* z, size_t u) {
    return z->stage >= 2 ? z->own_grads + z->place[u] : z->grads + block_unit_at(&z->grads_layout, z->table, &z->table->units[u]);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The segments of each group's exchanges; they stay the same for the whole run

static size_t zero_group_elements(const Zero* z, int g) {
    size_t total = 0;
    for (size_t i = z->first[g]; i < z->first[g + 1]; i++) { total += z->table->units[z->units[i]].count; }
    return total;
}

// By ranges the group's units, laid end to end, are cut into one equal range a rank. cuts: room for as many as the group has units, and one
// more a rank.
static size_t zero_cut_group(const Zero* z, int g, ZeroCut* cuts) {
    size_t total = zero_group_elements(z, g), at = 0, count = 0;
    int r = 0;
    for (size_t i = z->first[g]; i < z->first[g + 1]; i++) {
        size_t u = z->units[i], size = z->table->units[u].count;
        for (size_t done = 0; done < size;) {
            while (z->by_ranges[g] && owners_range(total, z->ranks, r + 1) <= at) { r++; }
            size_t n = z->by_ranges[g] ? min_size(size - done, owners_range(total, z->ranks, r + 1) - at) : size;
            ZeroCut cut = {u, done, n, z->by_ranges[g] ? r : z->owner[u]};
            cuts[count++] = cut;
            done += n;
            at += n;
        }
    }
    return count;
}

static void zero_list_add(Zero* z, ZeroListKind kind, int owner, int source, const floatX* from, floatX* to, size_t count) {
    ZeroList* list = &z->lists[kind];
    CommSegment s = {owner, source, from, to, count};
    list->segments[list->count++] = s;
}

// The segments of one part of a unit. A rank that does not hold the unit has no place of its own for it.
static void zero_add_cut(Zero* z, int g, const ZeroCut* c) {
    const Unit* u = &z->table->units[c->unit];
    bool ranges = z->by_ranges[g], holds = zero_holds(z, c->unit);
    int r = c->rank, owner = z->owner[c->unit];
    floatX* grads = z->grads + block_unit_at(&z->grads_layout, z->table, u) + c->offset;
    floatX* weights = z->weights + block_unit_at(&z->weights_layout, z->table, u) + c->offset;
    floatX* own_grads = holds ? zero_unit_gradient(z, c->unit) + c->offset : NULL;
    floatX* own_weights = holds ? zero_unit_weights(z, c->unit) + c->offset : NULL;
    zero_list_add(z, ZERO_SUM, r, r, grads, ranges ? grads : own_grads, c->count);
    if (z->stage == 0) { return; }
    if (ranges) {
        zero_list_add(z, ZERO_TAKE, owner, r, grads, own_grads, c->count);
        zero_list_add(z, ZERO_GIVE, r, owner, own_weights, weights, c->count);
    }
    zero_list_add(z, ZERO_SPREAD, r, r, ranges ? weights : own_weights, weights, c->count);
}

// Once the device's memory is there: weights, grads and, at stages 2 and 3, own_grads and own_weights are set by the caller.
void zero_connect(Zero* z, const Comm* comm) {
    size_t groups = (size_t)z->groups, room = z->table->unit_count + groups * (size_t)z->ranks;
    z->comm = comm;
    z->reduce_ticket = (CommTicket*)need(calloc(groups, sizeof(CommTicket)));
    z->gather_ticket = (CommTicket*)need(calloc(groups, sizeof(CommTicket)));
    z->there = (bool*)need(calloc(groups, sizeof(bool)));
    z->by_ranges = (bool*)need(calloc(groups, sizeof(bool)));
    ZeroCut* cuts = (ZeroCut*)need(malloc(room * sizeof(ZeroCut)));
    for (int i = 0; i < ZERO_LISTS; i++) {
        z->lists[i].segments = (CommSegment*)need(malloc(room * sizeof(CommSegment)));
        z->lists[i].first = (size_t*)need(calloc(groups + 1, sizeof(size_t)));
    }
    owners_groups_by_ranges(z->table, z->owner, z->ranks, z->by_ranges);
    for (int g = 0; g < z->groups; g++) {
        z->by_ranges[g] = z->stage == 0 || z->by_ranges[g]; // stage 0 has no owners
        size_t count = zero_cut_group(z, g, cuts);
        for (size_t i = 0; i < count; i++) { zero_add_cut(z, g, &cuts[i]); }
        for (int i = 0; i < ZERO_LISTS; i++) { z->lists[i].first[g + 1] = z->lists[i].count; }
    }
    free(cuts);
}

static CommTicket zero_start(Zero* z, CommKind kind, ZeroListKind list, int g, bool add, CommTicket after) {
    const ZeroList* l = &z->lists[list];
    TrafficPurpose purpose = list == ZERO_SUM || list == ZERO_TAKE ? TRAFFIC_GRADIENT : TRAFFIC_WEIGHTS;
    CommExchange e = {kind, COMM_FLOATX, add, purpose, l->segments + l->first[g], l->first[g + 1] - l->first[g], after};
    return comm_start(z->comm, &e);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Weights. z may be NULL: a model outside training.

static void zero_flush_spread(Zero* z) {
    if (z->spread >= 0) { z->gather_ticket[z->spread] = zero_start(z, COMM_ALL_GATHER, ZERO_SPREAD, z->spread, false, z->spread_after); }
    z->spread = -1;
}

// more: the next group follows at once.
static void zero_start_gather(Zero* z, int g, bool more) {
    CommTicket given = z->by_ranges[g] ? zero_start(z, COMM_ALL_TO_ALL, ZERO_GIVE, g, false, 0) : 0;
    zero_flush_spread(z);
    z->spread = g;
    z->spread_after = given;
    if (!more || !given) { zero_flush_spread(z); }
}

// Stage 3: sees that the group is on its way. Its place must be free: whatever the block held there was used for the last time.
void zero_weights_prefetch(Zero* z, int g) {
    if (!z || z->stage < 3 || g < 0 || g >= z->groups || z->there[g]) { return; }
    for (int other = 1; g != ZERO_OUTER && other < z->groups; other++) {
        if ((other - g) % (int)z->weights_layout.slots == 0) { z->there[other] = false; }
    }
    zero_start_gather(z, g, false);
    z->there[g] = true;
}

// Before the group's weights are used.
void zero_weights_wait(Zero* z, int g) {
    if (!z || z->stage == 0) { return; }
    zero_weights_prefetch(z, g);
    comm_wait(z->comm, z->gather_ticket[g]);
    z->gather_ticket[g] = 0;
}

void zero_weights_wait_all(Zero* z) {
    for (int g = 0; z && g < z->groups; g++) {
        comm_wait(z->comm, z->gather_ticket[g]);
        z->gather_ticket[g] = 0;
    }
}

// After the owners have changed the group's weights.
void zero_weights_changed(Zero* z, int g) {
    if (z->stage == 1 || z->stage == 2) { zero_start_gather(z, g, g + 1 < z->groups); }
    z->there[g] = false;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Gradients

static void zero_flush_take(Zero* z) {
    if (z->take >= 0) { z->reduce_ticket[z->take] = zero_start(z, COMM_ALL_TO_ALL, ZERO_TAKE, z->take, false, z->take_after); }
    z->take = -1;
}

static void zero_grads_wait(Zero* z, int g) {
    if (z->take == g) { zero_flush_take(z); }
    comm_wait(z->comm, z->reduce_ticket[g]);
    z->reduce_ticket[g] = 0;
}

// Before the group's gradients are written in a micro-step; whether they start at zero there.
bool zero_grads_begin(Zero* z, int g, bool first) {
    if (!z || z->stage < 2) { return first && !(z && z->carry); }
    for (int other = 0; other < z->groups; other++) { // what still leaves from the same memory
        bool same = other == g || (g != ZERO_OUTER && other != ZERO_OUTER && (other - g) % (int)z->grads_layout.slots == 0);
        if (same) { zero_grads_wait(z, other); }
    }
    return true;
}

// Sums that arrive later cannot be added to earlier micro-steps': the owner puts those into its own contribution beforehand.
static void zero_carry_on(Zero* z, int g) {
    for (size_t i = z->first[g]; i < z->first[g + 1]; i++) {
        size_t u = z->units[i], n = z->table->units[u].count;
        if (!zero_holds(z, u)) { continue; }
        floatX* to = z->grads + block_unit_at(&z->grads_layout, z->table, &z->table->units[u]);
        LAUNCH(ceil_div(n, COMM_SUM_CHUNK), BLOCK_TEAM, comm_sum_chunk, COMM_FLOATX, to, true, zero_unit_gradient(z, u), (const char*)NULL, 0,
               0, 1, n);
    }
}

// The group's gradients of a micro-step are complete: their sum over ranks begins.
void zero_grads_ready(Zero* z, int g, bool first, bool last) {
    if (!z || z->ranks == 1 || (z->stage < 2 && !last)) { return; }
    bool more = z->stage >= 2 && (!first || z->carry), moves = z->stage > 0 && z->by_ranges[g];
    if (more && moves) { zero_carry_on(z, g); }
    CommTicket sums = zero_start(z, z->stage == 0 ? COMM_ALL_REDUCE : COMM_REDUCE_SCATTER, ZERO_SUM, g, more && !moves, 0);
    zero_flush_take(z);
    z->reduce_ticket[g] = sums;
    if (moves) {
        z->take = g;
        z->take_after = sums;
    }
}

void zero_grads_wait_all(Zero* z) {
    for (int g = 0; g < z->groups; g++) { zero_grads_wait(z, g); }
}

// With carry, after the step: gradients of units that this rank does not hold start at zero again (from stage 2 on they always do).
void zero_grads_clear_others(Zero* z) {
    for (size_t u = 0; z->stage == 1 && u < z->table->unit_count; u++) {
        const Unit* unit = &z->table->units[u];
        if (!zero_holds(z, u)) { device_zero(z->grads + block_unit_at(&z->grads_layout, z->table, unit), unit->count * sizeof(floatX)); }
    }
}

// With carry, where a step is left out: nothing of its gradients, nor of what was carried into them, may reach the next.
void zero_grads_clear_all(Zero* z) {
    device_zero(z->grads, z->grads_layout.elements * sizeof(floatX));
    if (z->own_grads) { device_zero(z->own_grads, z->held * sizeof(floatX)); }
}
