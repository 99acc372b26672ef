// nccl_plan.h - an exchange as groups of sends and receives between pairs of ranks, with local sums and copies after each group. NCCL
// carries out a group as one, and two ranks whose groups do not match wait for each other for ever. So groups are derived from what all
// ranks know alike: owners, counts, and the size of the staging memory. No CUDA here: the tests play all ranks on the CPU.
//
// A sum needs the parts of all ranks side by side on the owner, in staging memory of a fixed size: one slot per rank, of `window`
// elements. In round i each owner sums up elements [i, i + 1) * window of its segments taken together, so that all owners, and all
// links, are busy in every round however the list is sorted. Other exchanges need no staging and have one round.
// A group ends at the end of a round, or earlier where a rank would have more than NCCL_GROUP_OPS operations in it (NCCL takes 2048).
// Needs the types of comm.cuh, which includes it where there is NCCL.
#pragma once
#include "../kernels/device.cuh"

#define NCCL_GROUP_OPS 1024

typedef struct {
    bool send;
    int peer; // rank of the communicator
    char* memory;
    size_t bytes;
} NcclOp;

// What this rank does itself once the group's messages are there: to (+)= sum over slots, or to = own (sum false).
typedef struct {
    bool sum;
    char *to, *others; // others: first slot's place; slots are plan.stride bytes apart
    const char* own;
    size_t count; // elements
} NcclLocal;

typedef struct {
    const CommExchange* exchange;
    int rank, size;
    char* staging;
    size_t element, window, stride; // bytes of an element; elements and bytes of a slot
    bool reducing;                  // the sums come first; then, in an all-reduce, the gather of what was summed up
    size_t round, rounds, segment;  // where the next group begins
    size_t* before;                 // (size) elements of each owner in the segments before `segment`
    int* in_group;                  // (size) pieces of each owner in this group
    NcclOp* ops;                    // (nccl_plan_ops(size))
    NcclLocal* locals;              // (nccl_plan_ops(size))
    size_t op_count, local_count;
} NcclPlan;

static size_t nccl_plan_ops(int size) { return max_size(NCCL_GROUP_OPS, (size_t)size); }

// Lists for communicators of up to `size` ranks.
void nccl_plan_open(NcclPlan* plan, int size) {
    memset(plan, 0, sizeof(*plan));
    plan->before = (size_t*)need(malloc((size_t)size * sizeof(size_t)));
    plan->in_group = (int*)need(malloc((size_t)size * sizeof(int)));
    plan->ops = (NcclOp*)need(malloc(nccl_plan_ops(size) * sizeof(NcclOp)));
    plan->locals = (NcclLocal*)need(malloc(nccl_plan_ops(size) * sizeof(NcclLocal)));
}

void nccl_plan_close(NcclPlan* plan) {
    free(plan->before);
    free(plan->in_group);
    free(plan->ops);
    free(plan->locals);
    memset(plan, 0, sizeof(*plan));
}

static void nccl_plan_phase(NcclPlan* plan, bool reducing) {
    const CommExchange* x = plan->exchange;
    size_t most = 0;
    memset(plan->before, 0, (size_t)plan->size * sizeof(size_t));
    for (size_t i = 0; i < x->count; i++) {
        plan->before[x->segments[i].owner] += x->segments[i].count;
        most = max_size(most, plan->before[x->segments[i].owner]);
    }
    memset(plan->before, 0, (size_t)plan->size * sizeof(size_t));
    plan->reducing = reducing;
    plan->rounds = reducing ? ceil_div(most, plan->window) : most > 0;
    plan->round = plan->segment = 0;
}

// The groups of an exchange as `rank` of `size` has them; staging: device memory, at least one element for each rank.
void nccl_plan_start(NcclPlan* plan, const CommExchange* x, int rank, int size, void* staging, size_t staging_bytes) {
    plan->exchange = x;
    plan->rank = rank;
    plan->size = size;
    plan->staging = (char*)staging;
    plan->element = comm_type_bytes(x->type);
    plan->window = staging_bytes / (size_t)size / plan->element;
    if (plan->window > 64) { plan->window -= plan->window % 64; } // slots begin on lines of the cache
    plan->stride = plan->window * plan->element;
    nccl_plan_phase(plan, x->kind == COMM_REDUCE_SCATTER || x->kind == COMM_ALL_REDUCE);
}

static void nccl_plan_op(NcclPlan* plan, bool send, int peer, const void* memory, size_t offset, size_t count) {
    NcclOp op = {send, peer, (char*)(uintptr_t)memory + offset * plan->element, count * plan->element};
    plan->ops[plan->op_count++] = op;
}

static void nccl_plan_local(NcclPlan* plan, bool sum, const CommSegment* s, const void* own, size_t offset, size_t count, size_t place) {
    size_t at = offset * plan->element;
    if (!sum && own == s->to) { return; }
    NcclLocal local = {sum, (char*)s->to + at, plan->staging + place * plan->element, (const char*)own + at, count};
    plan->locals[plan->local_count++] = local;
}

// One piece of a segment: elements [offset, offset + count), at element `place` of the owner's slots.
static void nccl_plan_piece(NcclPlan* plan, const CommSegment* s, size_t offset, size_t count, size_t place) {
    const CommExchange* x = plan->exchange;
    bool mine = s->owner == plan->rank;
    if (plan->reducing) {
        if (!mine) { nccl_plan_op(plan, true, s->owner, s->from, offset, count); }
        for (int r = 0; mine && r < plan->size; r++) {
            if (r != plan->rank) { nccl_plan_op(plan, false, r, plan->staging + (size_t)r * plan->stride, place, count); }
        }
        if (mine) { nccl_plan_local(plan, true, s, s->from, offset, count, place); }
    } else if (x->kind == COMM_ALL_TO_ALL) {
        if (mine && s->source == plan->rank) {
            nccl_plan_local(plan, false, s, s->from, offset, count, 0);
        } else if (mine) {
            nccl_plan_op(plan, false, s->source, s->to, offset, count);
        } else if (s->source == plan->rank) {
            nccl_plan_op(plan, true, s->owner, s->from, offset, count);
        }
    } else {
        const void* from = x->kind == COMM_ALL_REDUCE ? s->to : s->from; // in an all-reduce the sum lies in the owner's `to`
        if (!mine) { nccl_plan_op(plan, false, s->owner, s->to, offset, count); }
        for (int r = 0; mine && r < plan->size; r++) {
            if (r != plan->rank) { nccl_plan_op(plan, true, r, from, offset, count); }
        }
        if (mine) { nccl_plan_local(plan, false, s, from, offset, count, 0); }
    }
}

// Whether one more piece of this owner fits into the group on every rank: the owner of most pieces has size - 1 operations for each.
static bool nccl_plan_fits(const NcclPlan* plan, int owner, size_t pieces, int most) {
    int would = plan->in_group[owner] + 1 > most ? plan->in_group[owner] + 1 : most;
    size_t others = (size_t)(plan->size > 2 ? plan->size - 2 : 0);
    return pieces == 0 || pieces + 1 + (size_t)would * others <= NCCL_GROUP_OPS;
}

// The next group, in ops and locals; false after the last. A group may be empty on this rank.
bool nccl_plan_next(NcclPlan* plan) {
    const CommExchange* x = plan->exchange;
    size_t pieces = 0;
    int most = 0;
    plan->op_count = plan->local_count = 0;
    memset(plan->in_group, 0, (size_t)plan->size * sizeof(int));
    if (plan->round == plan->rounds && plan->reducing && x->kind == COMM_ALL_REDUCE) { nccl_plan_phase(plan, false); }
    if (plan->round == plan->rounds) { return false; }
    size_t begin = plan->reducing ? plan->round * plan->window : 0, end = plan->reducing ? begin + plan->window : SIZE_MAX;
    for (; plan->segment < x->count; plan->segment++) {
        const CommSegment* s = &x->segments[plan->segment];
        size_t first = plan->before[s->owner], last = first + s->count; // the segment's place among its owner's elements
        size_t from = max_size(first, begin), to = min_size(last, end);
        if (from < to) {
            if (!nccl_plan_fits(plan, s->owner, pieces, most)) { return true; } // it begins the next group
            nccl_plan_piece(plan, s, from - first, to - from, from - begin);
            int count = ++plan->in_group[s->owner];
            most = count > most ? count : most;
            pieces++;
        }
        plan->before[s->owner] = last;
    }
    plan->round++;
    plan->segment = 0;
    memset(plan->before, 0, (size_t)plan->size * sizeof(size_t));
    return true;
}

// Puts the work on device_stream.
void nccl_plan_run_local(const NcclPlan* plan, const NcclLocal* local) {
    const CommExchange* x = plan->exchange;
    size_t n = local->count;
    bool add = x->kind == COMM_REDUCE_SCATTER && x->add;
    if (local->sum) {
        LAUNCH(ceil_div(n, COMM_SUM_CHUNK), BLOCK_TEAM, comm_sum_chunk, x->type, local->to, add, local->own, local->others, plan->stride,
               plan->rank, plan->size, n);
    } else {
        comm_self_copy(local->to, local->own, n * plan->element);
    }
}
