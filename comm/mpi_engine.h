// mpi_engine.h - the communication thread's work: exchanges, piece by piece, over MPI_Isend and MPI_Irecv.
//
// Each rank walks the pieces of its exchanges in order and starts them while there is room: a window of flights (pieces under way), a
// ring of staging memory, a number of requests. A flight is given at its start all the room it will ever need, and gives it back
// when it and all flights before it are finished. Sums: every other rank gives its part to the owner, the owner stages the parts and
// adds them up in the order of ranks. Results: the owner sends, the others receive in place.
//
// Why this cannot deadlock. All exchanges of the job have one order, with which the order of each rank agrees; so do their pieces. Of
// the pieces that some rank has not finished take the first, p. A rank that has not yet started p holds no room but that of pieces
// before p, which are finished and give it back: so it starts p as soon as its program has asked for the exchange, and a program waits
// for nothing but exchanges before it; nor does an exchange that sends on the results of another (`after`). Once all its ranks have
// started p, its messages have their receivers and arrive: they wait for no later piece. In an all-reduce the second half of p waits
// for the first half of p and for pieces before p alone.
// Messages of two ranks with equal tags meet in the order in which they were posted. Contributions and gathers are posted in walk
// order at the start of flights; results of all-reduces, which have a tag of their own, in walk order per owner (comm_flights_advance).
// A result may be received into the memory of the contribution, so it is posted only after that has been sent.
#pragma once
#include "mpi_pieces.h"
#include <mpi.h>
#include <pthread.h>

#define COMM_WINDOW 64                          // flights at most
#define COMM_REQUESTS 256                       // requests of flights at most, more where two pieces need more

enum { COMM_TAG_GIVE = 1, COMM_TAG_GATHER, COMM_TAG_RESULT, COMM_TAG_PING };

// An exchange in the queue.
typedef struct CommJob {
    struct CommJob* next;
    CommExchange exchange;
    int rank, size, first, stride; // of its communicator
    uint64_t ticket, number;       // number: among the exchanges of its communicator, from 0
    size_t limit;                  // elements of a piece
    CommPieces list;
    bool cut;                      // the list has been made
    size_t walked, landed;         // pieces started, and finished
} CommJob;

typedef enum { FLIGHT_GIVE, FLIGHT_COLLECT, FLIGHT_LAST, FLIGHT_UNPACK, FLIGHT_DONE } FlightStage;

typedef struct {
    CommJob* job;
    const CommPiece* piece;
    FlightStage stage;
    int pending;      // requests not yet completed
    int room;         // of requests
    char* staging;    // NULL without
    size_t bytes;     // of staging
} CommFlight;

// A question whether a rank is there, and the answer, which says how far it is with the exchanges of the asker's communicator.
typedef struct {
    int kind, from; // of COMM_PING and COMM_PONG; rank of the job
    int first, stride, size;
    uint64_t started; // exchanges of that communicator that the answering rank has come to
    double busy;      // seconds since its computing thread was last here
} CommPing;

enum { COMM_PING, COMM_PONG };

typedef struct {
    MPI_Request request[2]; // of the last ping and pong to this rank
    CommPing out[2];
    CommPing answer;        // its last
    double answered;        // when that came
} CommPeer;

// A communicator's exchanges are numbered, so that ranks can compare how far they are.
typedef struct {
    int first, stride, size;
    uint64_t started;
} CommCount;

#define COMM_HOST_SIZE 64
typedef enum { ENGINE_NONE, ENGINE_STARTING, ENGINE_RUNNING, ENGINE_ENDED } EngineState;

static struct {
    // Shared by the computing and the communication thread, under `lock`.
    pthread_mutex_t lock;
    pthread_cond_t wake, done; // for the communication thread: new work; for the others: something is finished
    EngineState state;
    bool closing, failing;
    CommJob *first, *last, *spare; // queue of new jobs; used ones to be taken again
    uint64_t started, finished;    // tickets
    CommCount* counts;
    size_t count_count, count_room;
    Ledger ledger;
    double busy_since, away_since; // when jobs began to be under way; when the computing thread left its last call
    bool away;

    // Set at the start, then only read.
    pthread_t thread;
    int rank, size;
    double timeout; // seconds, 0 for never
    char (*hosts)[COMM_HOST_SIZE];
    int* nodes; // of each rank
    int local_rank, local_size, node_count, sharers;

    // Of the communication thread.
    CommJob *jobs, *walking, *jobs_last; // under way, oldest first; the one whose pieces are being started
    CommFlight flights[COMM_WINDOW];     // a ring
    size_t flight_first, flight_count;
    char* staging;
    size_t staging_size, staging_at, staging_low, staging_users;
    MPI_Request* requests; // dense
    MPI_Status* statuses;
    int *request_of, *request_done;
    int request_count, request_room, request_limit; // room: given to flights
    uint64_t *held, hold; // held[r] == hold: a result of rank r must wait for an earlier one
    CommPeer* peers;
    MPI_Request ping_request;
    CommPing ping;
    bool away_seen;               // `away` as it was a moment ago
    double moved, looked, pinged; // when anything moved; when the thread last looked around; when it last asked
} comm_engine;

static size_t comm_mpi_piece_limit = COMM_PIECE; // bytes; tests lower it between exchanges, on all ranks

static int comm_world_rank(const CommJob* job, int rank) { return job->first + rank * job->stride; }

// ---------------------------------------------------------------------------------------------------------------------------------
// Staging memory: a ring that is given back in the order in which it was taken.

static char* comm_staging_take(size_t bytes) {
    size_t at = comm_engine.staging_at, low = comm_engine.staging_low, place;
    if (comm_engine.staging_users == 0) { at = low = 0; }
    if (at >= low && comm_engine.staging_size - at >= bytes) {
        place = at;
    } else if (at >= low ? bytes < low : bytes < low - at) { // never full: full would look empty
        place = at >= low ? 0 : at;
    } else {
        return NULL;
    }
    comm_engine.staging_low = low;
    comm_engine.staging_at = place + bytes;
    comm_engine.staging_users++;
    return comm_engine.staging + place;
}

static void comm_staging_give_back(const CommFlight* f) {
    if (!f->staging) { return; }
    comm_engine.staging_low = (size_t)(f->staging - comm_engine.staging) + f->bytes;
    comm_engine.staging_users--;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Runs of a piece

static size_t comm_piece_bytes(const CommFlight* f) { return f->piece->count * comm_type_bytes(f->job->exchange.type); }
static size_t comm_piece_stride(const CommFlight* f) { return round_up(comm_piece_bytes(f), 64); }

static const CommSegment* comm_run_segment(const CommFlight* f, size_t run) {
    return &f->job->exchange.segments[f->job->list.order[f->piece->first + run]];
}
static size_t comm_run_count(const CommFlight* f, size_t run) {
    return f->piece->runs == 1 ? f->piece->count : comm_run_segment(f, run)->count;
}
static const char* comm_run_from(const CommFlight* f, size_t run) {
    return (const char*)comm_run_segment(f, run)->from + f->piece->offset * comm_type_bytes(f->job->exchange.type);
}
static char* comm_run_to(const CommFlight* f, size_t run) {
    return (char*)comm_run_segment(f, run)->to + f->piece->offset * comm_type_bytes(f->job->exchange.type);
}

// What is to be sent, as one block: of the runs' `to` places, or of their `from` places.
static const char* comm_flight_pack(CommFlight* f, bool to) {
    if (f->piece->runs == 1) { return to ? comm_run_to(f, 0) : comm_run_from(f, 0); }
    size_t at = 0, unit = comm_type_bytes(f->job->exchange.type);
    for (size_t run = 0; run < f->piece->runs; run++) {
        size_t bytes = comm_run_count(f, run) * unit;
        memcpy(f->staging + at, to ? comm_run_to(f, run) : comm_run_from(f, run), bytes);
        at += bytes;
    }
    return f->staging;
}

static void comm_flight_unpack(const CommFlight* f) {
    size_t at = 0, unit = comm_type_bytes(f->job->exchange.type);
    for (size_t run = 0; run < f->piece->runs; run++) {
        size_t bytes = comm_run_count(f, run) * unit;
        memcpy(comm_run_to(f, run), f->staging + at, bytes);
        at += bytes;
    }
}

// The owner's own values, where they are not in their place.
static void comm_flight_copy(const CommFlight* f) {
    size_t unit = comm_type_bytes(f->job->exchange.type);
    for (size_t run = 0; run < f->piece->runs; run++) {
        char* to = comm_run_to(f, run);
        const char* from = comm_run_from(f, run);
        if (to != from) { memcpy(to, from, comm_run_count(f, run) * unit); }
    }
}

// The usual numbers of ranks as constants, so that the compiler unrolls the loop over ranks and vectorises that over elements.
static void comm_sum_parts(size_t chunk, CommType type, void* to, bool add, const void* own, const char* others, size_t stride, int mine,
                           int count, size_t n) {
    const Team alone = {0, 1, NULL}; // no OpenMP: a second pool of threads would take the cores from the computing ones
    switch (count) {
    case 2: comm_sum_chunk(alone, chunk, type, to, add, own, others, stride, mine, 2, n); break;
    case 3: comm_sum_chunk(alone, chunk, type, to, add, own, others, stride, mine, 3, n); break;
    case 4: comm_sum_chunk(alone, chunk, type, to, add, own, others, stride, mine, 4, n); break;
    case 8: comm_sum_chunk(alone, chunk, type, to, add, own, others, stride, mine, 8, n); break;
    default: comm_sum_chunk(alone, chunk, type, to, add, own, others, stride, mine, count, n);
    }
}

static void comm_flight_sum(const CommFlight* f) {
    const CommExchange* x = &f->job->exchange;
    size_t stride = comm_piece_stride(f), at = 0;
    bool add = x->kind == COMM_REDUCE_SCATTER && x->add;
    for (size_t run = 0; run < f->piece->runs; run++) {
        size_t count = comm_run_count(f, run);
        for (size_t chunk = 0; chunk < ceil_div(count, COMM_SUM_CHUNK); chunk++) {
            comm_sum_parts(chunk, x->type, comm_run_to(f, run), add, comm_run_from(f, run), f->staging + at, stride, f->job->rank,
                           f->job->size, count);
        }
        at += count * comm_type_bytes(x->type);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Messages

static MPI_Request* comm_request_new(int of) {
    comm_engine.request_of[comm_engine.request_count] = of;
    return &comm_engine.requests[comm_engine.request_count++];
}

static void comm_flight_send(CommFlight* f, int rank, const char* data, int tag) {
    int to = comm_world_rank(f->job, rank), bytes = (int)comm_piece_bytes(f);
    LinkClass link = comm_engine.nodes[to] == comm_engine.nodes[comm_engine.rank] ? LINK_INSIDE : LINK_BETWEEN;
    pthread_mutex_lock(&comm_engine.lock);
    ledger_add(&comm_engine.ledger, f->job->exchange.purpose, link, (uint64_t)bytes, (uint64_t)bytes);
    pthread_mutex_unlock(&comm_engine.lock);
    MPI_Isend((void*)(uintptr_t)data, bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, comm_request_new((int)(f - comm_engine.flights)));
    f->pending++;
}

static void comm_flight_send_all(CommFlight* f, const char* data, int tag) {
    for (int step = 1; step < f->job->size; step++) { comm_flight_send(f, (f->job->rank + step) % f->job->size, data, tag); }
}

static void comm_flight_receive(CommFlight* f, int rank, char* data, int tag) {
    MPI_Irecv(data, (int)comm_piece_bytes(f), MPI_BYTE, comm_world_rank(f->job, rank), tag, MPI_COMM_WORLD,
              comm_request_new((int)(f - comm_engine.flights)));
    f->pending++;
}

// The staging place of rank r's part is staging + r * stride.
static void comm_flight_collect(CommFlight* f) {
    size_t stride = comm_piece_stride(f);
    for (int r = 0; r < f->job->size; r++) {
        if (r != f->job->rank) { comm_flight_receive(f, r, f->staging + (size_t)r * stride, COMM_TAG_GIVE); }
    }
    f->stage = FLIGHT_COLLECT;
}

// From the owner in place, or to be unpacked.
static void comm_flight_fetch(CommFlight* f, int rank, int tag) {
    bool packed = f->piece->runs > 1;
    comm_flight_receive(f, rank, packed ? f->staging : comm_run_to(f, 0), tag);
    f->stage = packed ? FLIGHT_UNPACK : FLIGHT_LAST;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Flights

static CommFlight* comm_flight(size_t i) { return &comm_engine.flights[(comm_engine.flight_first + i) % COMM_WINDOW]; }

// Room for the whole flight, or false.
static bool comm_flight_room(CommFlight* f) {
    const CommExchange* x = &f->job->exchange;
    bool owner = f->piece->owner == f->job->rank, packed = f->piece->runs > 1;
    bool sums = x->kind == COMM_REDUCE_SCATTER || x->kind == COMM_ALL_REDUCE;
    size_t places = sums && owner ? (size_t)f->job->size : packed ? 1 : 0;
    f->room = owner && x->kind != COMM_ALL_TO_ALL ? f->job->size - 1 : 1;
    f->bytes = places * comm_piece_stride(f);
    f->staging = NULL;
    if (comm_engine.request_room + f->room > comm_engine.request_limit) { return false; }
    if (f->bytes && !(f->staging = comm_staging_take(f->bytes))) { return false; }
    comm_engine.request_room += f->room;
    comm_engine.flight_count++;
    return true;
}

static void comm_flight_begin(CommFlight* f) {
    const CommExchange* x = &f->job->exchange;
    int rank = f->job->rank, owner = f->piece->owner;
    f->pending = 0;
    f->stage = FLIGHT_LAST;
    switch (x->kind) {
    case COMM_REDUCE_SCATTER:
    case COMM_ALL_REDUCE:
        if (owner == rank) {
            comm_flight_collect(f);
        } else {
            comm_flight_send(f, owner, comm_flight_pack(f, false), COMM_TAG_GIVE);
            f->stage = FLIGHT_GIVE;
        }
        break;
    case COMM_ALL_GATHER:
        if (owner == rank) {
            comm_flight_send_all(f, comm_flight_pack(f, false), COMM_TAG_GATHER);
            comm_flight_copy(f);
        } else {
            comm_flight_fetch(f, owner, COMM_TAG_GATHER);
        }
        break;
    case COMM_ALL_TO_ALL:
        if (f->piece->source == owner) {
            comm_flight_copy(f);
        } else if (f->piece->source == rank) {
            comm_flight_send(f, owner, comm_flight_pack(f, false), COMM_TAG_GIVE);
        } else {
            comm_flight_fetch(f, f->piece->source, COMM_TAG_GIVE);
        }
        break;
    }
}

// The next stage, once all requests of the last one have completed.
static void comm_flight_next(CommFlight* f) {
    bool result = f->job->exchange.kind == COMM_ALL_REDUCE;
    switch (f->stage) {
    case FLIGHT_COLLECT:
        comm_flight_sum(f);
        f->stage = result ? FLIGHT_LAST : FLIGHT_DONE;
        if (result) { comm_flight_send_all(f, comm_flight_pack(f, true), COMM_TAG_RESULT); }
        break;
    case FLIGHT_GIVE:
        f->stage = FLIGHT_DONE;
        if (result) { comm_flight_fetch(f, f->piece->owner, COMM_TAG_RESULT); }
        break;
    case FLIGHT_UNPACK:
        comm_flight_unpack(f);
        f->stage = FLIGHT_DONE;
        break;
    default: f->stage = FLIGHT_DONE;
    }
}

static void comm_job_finish(CommJob* job) {
    comm_engine.jobs = job->next;
    pthread_mutex_lock(&comm_engine.lock);
    comm_engine.finished = job->ticket;
    if (comm_engine.finished == comm_engine.started) {
        comm_engine.ledger.busy += seconds_now() - comm_engine.busy_since;
        comm_engine.busy_since = 0;
    }
    job->next = comm_engine.spare;
    comm_engine.spare = job;
    pthread_cond_broadcast(&comm_engine.done);
    pthread_mutex_unlock(&comm_engine.lock);
}

// Jobs finish in the order of the queue.
static void comm_jobs_finish(void) {
    while (comm_engine.jobs && comm_engine.jobs->cut && comm_engine.jobs->landed == comm_engine.jobs->list.count) {
        if (comm_engine.walking == comm_engine.jobs) { comm_engine.walking = comm_engine.jobs->next; }
        comm_job_finish(comm_engine.jobs);
    }
}

// Starts pieces while there is room. True if any was started.
static bool comm_flights_start(void) {
    bool any = false;
    while (comm_engine.walking) {
        CommJob* job = comm_engine.walking;
        if (job->exchange.after > comm_engine.finished) { return any; } // only this thread writes `finished`
        if (!job->cut) {
            comm_pieces_make(&job->list, &job->exchange, job->rank, job->size, job->limit);
            job->cut = any = true;
        }
        for (; job->walked < job->list.count; job->walked++) {
            if (comm_engine.flight_count == COMM_WINDOW) { return any; }
            CommFlight* f = comm_flight(comm_engine.flight_count);
            f->job = job;
            f->piece = &job->list.pieces[job->list.walk[job->walked]];
            if (!comm_flight_room(f)) { return any; }
            comm_flight_begin(f);
            any = true;
        }
        comm_engine.walking = job->next;
    }
    return any;
}

// Moves flights whose requests have completed on, and lets finished ones go. The results of an owner go out, and are awaited, in walk
// order: a flight whose first half is not through holds back those after it.
static void comm_flights_advance(void) {
    comm_engine.hold++;
    for (size_t i = 0; i < comm_engine.flight_count; i++) {
        CommFlight* f = comm_flight(i);
        if (f->job->exchange.kind == COMM_ALL_REDUCE && (f->stage == FLIGHT_GIVE || f->stage == FLIGHT_COLLECT)) {
            uint64_t* held = &comm_engine.held[comm_world_rank(f->job, f->piece->owner)];
            if (f->pending || *held == comm_engine.hold) {
                *held = comm_engine.hold;
                continue;
            }
        }
        while (f->pending == 0 && f->stage != FLIGHT_DONE) { comm_flight_next(f); }
    }
    while (comm_engine.flight_count && comm_flight(0)->stage == FLIGHT_DONE) {
        CommFlight* f = comm_flight(0);
        comm_staging_give_back(f);
        comm_engine.request_room -= f->room;
        f->job->landed++;
        comm_engine.flight_first = (comm_engine.flight_first + 1) % COMM_WINDOW;
        comm_engine.flight_count--;
    }
    comm_jobs_finish();
}

// Looks at the network once. True if a request of a flight has completed.
static bool comm_requests_test(void) {
    int done = 0, kept = 0;
    if (comm_engine.request_count == 0) { return false; }
    MPI_Testsome(comm_engine.request_count, comm_engine.requests, &done, comm_engine.request_done, comm_engine.statuses);
    if (done == MPI_UNDEFINED || done == 0) { return false; }
    for (int i = 0; i < done; i++) { comm_engine.flights[comm_engine.request_of[comm_engine.request_done[i]]].pending--; }
    for (int i = 0; i < comm_engine.request_count; i++) {
        if (comm_engine.requests[i] == MPI_REQUEST_NULL) { continue; }
        comm_engine.requests[kept] = comm_engine.requests[i];
        comm_engine.request_of[kept++] = comm_engine.request_of[i];
    }
    comm_engine.request_count = kept;
    return true;
}
