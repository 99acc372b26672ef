// mpi_stall.h - a rank that stands still must not leave the others waiting for ever, and the message must name it. Communication
// threads live beside the computing ones, so they can tell a rank that is stopped or unreachable (nobody answers) from one that is
// alive but has not come to the exchange that the others wait for. While nothing moves, a rank asks all others every quarter of the
// time-out; when the time is up it prints one line and ends the job. Who comes back in time has changed nothing.
#pragma once
#include "mpi_engine.h"
#include <signal.h>
#include <unistd.h>

#define COMM_LOOK 0.01 // seconds between two looks for questions of other ranks

static void comm_give_up(int signal_number) {
    (void)signal_number;
    _exit(1);
}

// MPI may not come back from ending a job whose network is down: then the process ends by itself, and mpirun ends the rest.
static void comm_abort(void) {
    signal(SIGALRM, comm_give_up);
    alarm(5);
    fflush(NULL);
    MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

static void comm_ping_listen(void) {
    MPI_Irecv(&comm_engine.ping, (int)sizeof(CommPing), MPI_BYTE, MPI_ANY_SOURCE, COMM_TAG_PING, MPI_COMM_WORLD, &comm_engine.ping_request);
}

// Left out while the last one of the kind to that rank has not gone out.
static void comm_ping_send(int to, const CommPing* ping) {
    CommPeer* peer = &comm_engine.peers[to];
    int gone = 0;
    MPI_Test(&peer->request[ping->kind], &gone, MPI_STATUS_IGNORE);
    if (!gone) { return; }
    peer->out[ping->kind] = *ping;
    peer->out[ping->kind].from = comm_engine.rank;
    MPI_Isend(&peer->out[ping->kind], (int)sizeof(CommPing), MPI_BYTE, to, COMM_TAG_PING, MPI_COMM_WORLD, &peer->request[ping->kind]);
}

static CommCount* comm_count(int first, int stride, int size) { // under the lock
    for (size_t i = 0; i < comm_engine.count_count; i++) {
        CommCount* c = &comm_engine.counts[i];
        if (c->first == first && c->stride == stride && c->size == size) { return c; }
    }
    comm_engine.counts = (CommCount*)comm_grow(comm_engine.counts, &comm_engine.count_room, comm_engine.count_count + 1, sizeof(CommCount));
    CommCount fresh = {first, stride, size, 0};
    comm_engine.counts[comm_engine.count_count] = fresh;
    return &comm_engine.counts[comm_engine.count_count++];
}

static void comm_pings_answer(double now) {
    int here = 0;
    for (;;) {
        MPI_Test(&comm_engine.ping_request, &here, MPI_STATUS_IGNORE);
        if (!here) { return; }
        CommPing ping = comm_engine.ping;
        comm_ping_listen();
        if (ping.kind == COMM_PONG) {
            comm_engine.peers[ping.from].answer = ping;
            comm_engine.peers[ping.from].answered = now;
            continue;
        }
        pthread_mutex_lock(&comm_engine.lock);
        ping.kind = COMM_PONG;
        ping.started = comm_count(ping.first, ping.stride, ping.size)->started;
        ping.busy = comm_engine.away ? now - comm_engine.away_since : 0.0;
        pthread_mutex_unlock(&comm_engine.lock);
        comm_ping_send(ping.from, &ping);
    }
}

static bool comm_is_member(const CommJob* job, int rank) {
    int at = rank - job->first;
    return at >= 0 && at % job->stride == 0 && at / job->stride < job->size;
}

// Adds "rank 2 on host h3" to a list of such; after the fourth only counts.
static void comm_name_rank(char* text, size_t room, int* named, int rank) {
    size_t at = strlen(text);
    ++*named;
    if (*named <= 4) {
        snprintf(text + at, room - at, "%srank %d on host %s", *named > 1 ? ", " : "", rank, comm_engine.hosts[rank]);
    } else if (*named == 5) {
        snprintf(text + at, room - at, " and others");
    }
}

// Ranks from which a message is awaited, or to which one has not gone out.
static bool comm_stall_waits_for(const CommJob* job, int rank) {
    for (size_t i = 0; i < comm_engine.flight_count; i++) {
        const CommFlight* f = comm_flight(i);
        int owner = comm_world_rank(f->job, f->piece->owner);
        if (f->job == job && f->pending && (owner == rank || owner == comm_engine.rank)) { return comm_is_member(job, rank); }
    }
    return false;
}

// silent: the ranks from which no answer came of late are marked.
static void comm_stall_describe(char* text, size_t room, const CommJob* job, const bool* silent, double seconds) {
    char names[1024] = "", what[96];
    int named = 0;
    double busy = 0.0, now = seconds_now();
    snprintf(what, sizeof(what), "exchange %" PRIu64 " (%s)", job->number, traffic_names[job->exchange.purpose]);
    for (int r = 0; r < comm_engine.size; r++) {
        if (silent[r]) { comm_name_rank(names, sizeof(names), &named, r); }
    }
    if (named) {
        snprintf(text, room, "%s %s not answered for %.0f s: %s", names, named > 1 ? "have" : "has", seconds,
                 named > 1 ? "they are stopped or their machines or links are down" : "it is stopped or its machine or link is down");
        return;
    }
    for (int r = 0; r < comm_engine.size; r++) {
        const CommPeer* peer = &comm_engine.peers[r];
        if (r == comm_engine.rank || !comm_is_member(job, r) || peer->answer.started > job->number) { continue; }
        comm_name_rank(names, sizeof(names), &named, r);
        busy = fmax(busy, peer->answer.busy + now - peer->answered);
    }
    if (named) {
        snprintf(text, room, "%s %s not come to %s for %.0f s (busy with something else for %.0f s)", names,
                 named > 1 ? "are alive but have" : "is alive but has", what, seconds, busy);
        return;
    }
    for (int r = 0; r < comm_engine.size; r++) {
        if (r != comm_engine.rank && comm_stall_waits_for(job, r)) { comm_name_rank(names, sizeof(names), &named, r); }
    }
    snprintf(text, room, "%s has not moved for %.0f s though all ranks answer; rank %d on host %s waits for %s", what, seconds,
             comm_engine.rank, comm_engine.hosts[comm_engine.rank], named ? names : "room");
}

static void comm_stall_end(const CommJob* job, const bool* silent, double seconds) {
    char text[2048];
    comm_stall_describe(text, sizeof(text), job, silent, seconds);
    fprintf(stderr, "error: %s; the job ends, go on from the last checkpoint with --resume on\n", text);
    comm_abort();
}

static void comm_stall_ask(const CommJob* job, double now) {
    CommPing ping = {COMM_PING, comm_engine.rank, job->first, job->stride, job->size, 0, 0.0};
    for (int r = 0; r < comm_engine.size; r++) {
        if (r != comm_engine.rank) { comm_ping_send(r, &ping); }
    }
    comm_engine.pinged = now;
}

// The lowest rank that is alive speaks at once, others only if that one is not waiting itself: later, one after the other.
static void comm_stall_watch(double now) {
    const CommJob* job = comm_engine.jobs;
    double timeout = comm_engine.timeout, interval = timeout < 4.0 ? 1.0 : timeout / 4, quiet = now - comm_engine.moved;
    if (timeout <= 0.0 || !job || quiet < interval) { return; }
    if (now - comm_engine.pinged >= interval) { comm_stall_ask(job, now); }
    if (quiet < timeout || quiet < 1.5 * interval) { return; }
    bool* silent = (bool*)need(calloc((size_t)comm_engine.size, sizeof(bool)));
    int living_before = 0;
    for (int r = 0; r < comm_engine.size; r++) {
        silent[r] = r != comm_engine.rank && comm_engine.peers[r].answered < now - 2 * interval;
        living_before += r < comm_engine.rank && !silent[r];
    }
    double late = living_before == 0 ? 0.0 : 2.0 + 0.25 * (living_before < 32 ? living_before : 32);
    if (quiet >= timeout + late) { comm_stall_end(job, silent, quiet); }
    free(silent);
}

// Answers others and looks for a stall; cheap enough to be called all the time.
static void comm_stall_look(double now) {
    double gap = now - comm_engine.looked;
    if (comm_engine.size == 1 || gap < COMM_LOOK) { return; }
    if (gap > 1.0) { // this process itself was stopped, or its machine slept: nobody else is to blame
        comm_engine.moved += gap;
        comm_engine.pinged += gap;
    }
    comm_engine.looked = now;
    comm_pings_answer(now);
    comm_stall_watch(now);
}
