// mpi_pieces.h - an exchange as a list of pieces: the messages that the MPI backend sends. A piece goes from or to one owner, holds at
// most `limit` bytes, and is either one run of a large segment (sent from where it lies) or several small segments packed together:
// a bias alone would cost the latency of a message. Pieces of one group (an owner; in all-to-all a source and an owner) keep their
// order, and groups take turns, so that all links are busy at once. The list depends on owners, counts and the limit alone, so every
// rank walks the same one; in all-to-all a rank leaves out the pieces of which it is neither source nor owner.
#pragma once
#include "../kernels/base.h"

typedef struct {
    int owner, source;  // ranks of the communicator
    size_t first, runs; // the segments order[first] to order[first + runs - 1]
    size_t offset;      // elements of the segment before this piece, where runs == 1
    size_t count;       // elements
} CommPiece;

// Grow-only, so that the lists of a training loop are allocated once.
typedef struct {
    CommPiece* pieces; // group after group
    size_t* walk;      // indices of pieces, in the order in which they are exchanged
    size_t* order;     // indices of segments: by group, in each the large before the small
    size_t* starts;    // scratch: (2 * groups + 1) starts of buckets in `order`, then (groups + 1) starts of groups in `pieces`
    size_t count, piece_room, walk_room, order_room, start_room;
} CommPieces;

static void* comm_grow(void* memory, size_t* room, size_t wanted, size_t size) {
    if (wanted <= *room) { return memory; }
    *room = max_size(wanted, max_size(16, 2 * *room));
    return need(realloc(memory, *room * size));
}

// In all-to-all the groups of one rank are ordered by the distance from source to owner, then by source: an order that is part of one
// order of all pairs, and in which at any time each rank sends to one other and receives from one other.
static size_t comm_pieces_group(const CommExchange* x, const CommSegment* s, int rank, int size) {
    if (x->kind != COMM_ALL_TO_ALL) { return (size_t)s->owner; }
    if (s->owner != rank && s->source != rank) { return SIZE_MAX; }
    int distance = (s->owner - s->source + size) % size, sender = (rank - distance + size) % size;
    return 2 * (size_t)distance + (s->source != (sender < rank ? sender : rank));
}

// The buckets of `order`: 2 * group for segments that are sent where they lie, 2 * group + 1 for those that are packed.
static size_t comm_pieces_bucket(const CommExchange* x, const CommSegment* s, int rank, int size, size_t limit) {
    assert(s->owner >= 0 && s->owner < size && (x->kind != COMM_ALL_TO_ALL || (s->source >= 0 && s->source < size)));
    size_t group = s->count ? comm_pieces_group(x, s, rank, size) : SIZE_MAX;
    return group == SIZE_MAX ? SIZE_MAX : 2 * group + (s->count <= limit / 4);
}

// Counting sort of the segments.
static void comm_pieces_sort(CommPieces* list, const CommExchange* x, int rank, int size, size_t groups, size_t limit) {
    size_t buckets = 2 * groups;
    list->starts = (size_t*)comm_grow(list->starts, &list->start_room, buckets + 1 + groups + 1, sizeof(size_t));
    list->order = (size_t*)comm_grow(list->order, &list->order_room, max_size(1, x->count), sizeof(size_t));
    memset(list->starts, 0, (buckets + 1) * sizeof(size_t));
    for (size_t i = 0; i < x->count; i++) {
        size_t bucket = comm_pieces_bucket(x, &x->segments[i], rank, size, limit);
        if (bucket != SIZE_MAX) { list->starts[bucket + 1]++; }
    }
    for (size_t b = 0; b < buckets; b++) { list->starts[b + 1] += list->starts[b]; }
    for (size_t i = 0; i < x->count; i++) { // leaves in starts[b] the end of bucket b
        size_t bucket = comm_pieces_bucket(x, &x->segments[i], rank, size, limit);
        if (bucket != SIZE_MAX) { list->order[list->starts[bucket]++] = i; }
    }
}

static void comm_pieces_push(CommPieces* list, const CommSegment* s, size_t first, size_t runs, size_t offset, size_t count) {
    list->pieces = (CommPiece*)comm_grow(list->pieces, &list->piece_room, list->count + 1, sizeof(CommPiece));
    CommPiece piece = {s->owner, s->source, first, runs, offset, count};
    list->pieces[list->count++] = piece;
}

// Cuts a large segment into equal pieces (no short last message).
static void comm_pieces_cut(CommPieces* list, const CommSegment* s, size_t at, size_t limit) {
    size_t width = ceil_div(s->count, ceil_div(s->count, limit));
    for (size_t offset = 0; offset < s->count; offset += width) {
        comm_pieces_push(list, s, at, 1, offset, min_size(width, s->count - offset));
    }
}

// Packs the small segments order[first..end) into as few pieces as their order allows.
static void comm_pieces_pack(CommPieces* list, const CommSegment* segments, size_t first, size_t end, size_t limit) {
    while (first < end) {
        size_t runs = 0, count = 0;
        while (first + runs < end && count + segments[list->order[first + runs]].count <= limit) {
            count += segments[list->order[first + runs]].count;
            runs++;
        }
        comm_pieces_push(list, &segments[list->order[first]], first, runs, 0, count);
        first += runs;
    }
}

// Takes one piece of each group in turn. next[g]: the first piece of group g, next[g + 1] the end of it.
static void comm_pieces_interleave(CommPieces* list, size_t groups, const size_t* next) {
    size_t most = 0, walked = 0;
    list->walk = (size_t*)comm_grow(list->walk, &list->walk_room, max_size(1, list->count), sizeof(size_t));
    for (size_t g = 0; g < groups; g++) { most = max_size(most, next[g + 1] - next[g]); }
    for (size_t turn = 0; turn < most; turn++) {
        for (size_t g = 0; g < groups; g++) {
            if (turn < next[g + 1] - next[g]) { list->walk[walked++] = next[g] + turn; }
        }
    }
}

// limit: elements of a piece at most, at least 1. rank and size are of the communicator.
static void comm_pieces_make(CommPieces* list, const CommExchange* x, int rank, int size, size_t limit) {
    size_t groups = (size_t)size * (x->kind == COMM_ALL_TO_ALL ? 2 : 1);
    comm_pieces_sort(list, x, rank, size, groups, limit);
    size_t *ends = list->starts, *next = list->starts + 2 * groups + 1, at = 0;
    list->count = 0;
    for (size_t g = 0; g < groups; g++) {
        next[g] = list->count;
        for (; at < ends[2 * g]; at++) { comm_pieces_cut(list, &x->segments[list->order[at]], at, limit); }
        comm_pieces_pack(list, x->segments, at, ends[2 * g + 1], limit);
        at = ends[2 * g + 1];
    }
    next[groups] = list->count;
    comm_pieces_interleave(list, groups, next);
}

static void comm_pieces_free(CommPieces* list) {
    free(list->pieces);
    free(list->walk);
    free(list->order);
    free(list->starts);
    memset(list, 0, sizeof(*list));
}
