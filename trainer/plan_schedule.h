// plan_schedule.h - how long a step takes: one rank's computing thread walks through forward and backward layer by layer, starts the
// exchanges of comm/zero.cuh where the trainer starts them, and waits where it waits; the links of all ranks carry them in the order of
// their start. What the thread waits for is exposed, the rest of the traffic is hidden.
// Each rank has a link inside its node and one to other nodes, both full duplex: an exchange takes a rank as long as the busiest
// direction of its busiest link. That the owner of a large unit must serve all others shows here, not in formulas of average bytes.
// Exchanges overlap as far as the communicator's window of pieces under way reaches: small ones do, large ones hardly.
#pragma once
#include "../comm/traffic.h"

typedef struct {
    const TrafficModel* traffic; // its rank does not matter
    size_t layers;
    const double* own;           // (2, 1 + layers, ranks) from plan_owned; NULL: one exchange after the other
    double (*busiest)[LINK_CLASSES]; // (1 + layers): bytes of a group's exchange on the busiest link of each class, plan_busiest
    double window;               // bytes of exchanges that may be under way
    double forward, backward;    // seconds of a layer in a micro-step
    double head;                 // seconds of embedding and head, forward and backward together
    double rate[LINK_CLASSES];   // bytes a second of a rank's link; INFINITY: no limit
    double latency;              // seconds from one rank to another
} StepPlan;

typedef struct {
    double step, compute;  // seconds
    double busy;           // while an exchange was going on
    double waited;         // while the computing thread stood still for one
} StepTime;

// ---------------------------------------------------------------------------------------------------------------------------------
// Links

// Ranks of the node of `rank`.
static int plan_node_size(const TrafficModel* m, int rank) {
    int per = m->ranks_per_node, first = per > 0 ? rank / per * per : 0;
    return per > 0 && first + per < m->ranks ? per : m->ranks - first;
}

static bool plan_by_ranges(const TrafficModel* m, size_t g) { return m->stage == 0 || m->by_ranges[g]; }

// Bytes of each group that a rank adds up or passes on, (1 + layers, ranks); after them the bytes that it owns where that is something
// else, which move between both. To be freed by the caller.
double* plan_owned(const TrafficModel* m) {
    size_t groups = 1 + owners_layers(m->table), P = (size_t)m->ranks;
    double *own = (double*)need(calloc(2 * groups * P, sizeof(double))), *moved = own + groups * P;
    size_t* elements = (size_t*)need(calloc(groups, sizeof(size_t)));
    for (size_t u = 0; u < m->table->unit_count; u++) {
        size_t g = owners_group(m->table, &m->table->units[u]), count = m->table->units[u].count;
        elements[g] += count;
        if (m->stage > 0) { (plan_by_ranges(m, g) ? moved : own)[g * P + (size_t)m->owner[u]] += (double)(count * m->element); }
    }
    for (size_t i = 0; i < groups * P; i++) {
        size_t n = elements[i / P];
        if (!plan_by_ranges(m, i / P)) { continue; }
        own[i] = (double)((owners_range(n, m->ranks, (int)(i % P) + 1) - owners_range(n, m->ranks, (int)(i % P))) * m->element);
    }
    free(elements);
    return own;
}

// What a rank sends in an exchange and what it receives, by link. A reduction takes to others what they own and brings from each of them
// what is mine; a gather the reverse; a sum that all get does both in both directions. own, near, total: of this rank, of its node, of all;
// moved: what the rank owns of a group that goes by ranges, all but its own share of which it gets, or gives, besides.
static void plan_rank_bytes(const TrafficModel* m, int rank, bool gather, double own, double near, double total, double moved,
                            double out[LINK_CLASSES], double in[LINK_CLASSES], bool ranges) {
    double peers = plan_node_size(m, rank) - 1;
    double others[LINK_CLASSES] = {near - own, total - near}, mine[LINK_CLASSES] = {peers * own, (m->ranks - 1 - peers) * own};
    for (int l = 0; l < LINK_CLASSES; l++) {
        out[l] = m->stage == 0 ? others[l] + mine[l] : gather ? mine[l] : others[l];
        in[l] = m->stage == 0 ? others[l] + mine[l] : gather ? others[l] : mine[l];
        if (m->stage == 0 || !ranges) { continue; }
        double share = (l == LINK_INSIDE ? peers : m->ranks - 1 - peers) / m->ranks;
        out[l] += share * (gather ? moved : own);
        in[l] += share * (gather ? own : moved);
    }
}

// Bytes of each node, and their sum.
static double plan_nodes(const TrafficModel* m, const double* own, double* node) {
    double total = 0.0;
    memset(node, 0, (size_t)m->ranks * sizeof(double));
    for (int r = 0; r < m->ranks; r++) {
        node[traffic_node(m, r)] += own[r];
        total += own[r];
    }
    return total;
}

// From plan_owned; to be freed by the caller.
double (*plan_busiest(const TrafficModel* m, const double* own))[LINK_CLASSES] {
    size_t groups = 1 + owners_layers(m->table), P = (size_t)m->ranks;
    double(*busiest)[LINK_CLASSES] = (double(*)[LINK_CLASSES])need(calloc(groups, sizeof(*busiest)));
    double* node = (double*)need(malloc(P * sizeof(double)));
    for (size_t g = 0; P > 1 && g < groups; g++) {
        double total = plan_nodes(m, own + g * P, node), out[LINK_CLASSES], in[LINK_CLASSES];
        for (int r = 0; r < m->ranks; r++) {
            size_t i = g * P + (size_t)r;
            plan_rank_bytes(m, r, true, own[i], node[traffic_node(m, r)], total, own[groups * P + i], out, in, plan_by_ranges(m, g));
            for (int l = 0; l < LINK_CLASSES; l++) { busiest[g][l] = fmax(busiest[g][l], fmax(out[l], in[l])); }
        }
    }
    free(node);
    return busiest;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The trainer's order of things

// An exchange on its way.
typedef struct {
    double begin, end;
    double bytes; // of it and of all before it
} WalkFlight;

typedef struct {
    const StepPlan* plan;
    size_t groups, slots;
    double *reduced, *gathered; // (groups) when the group's last exchange ends
    bool* there;                // (groups) stage 3: the weights are held, or coming
    double *send, *receive;     // (ranks, or 1) when the link is free
    double* node;               // (ranks) scratch
    WalkFlight* flights;
    size_t flight_count, flight_room, flight_first; // first: the oldest that can still hold back a new one
    double now, waited, busy;
} Walk;

// When all but the window of what was started before has gone through; a part of an exchange is taken to go at an even pace.
static double walk_window(Walk* w) {
    if (w->flight_count == 0) { return 0.0; }
    double must = w->flights[w->flight_count - 1].bytes - w->plan->window, before;
    if (must <= 0) { return 0.0; }
    while (w->flights[w->flight_first].bytes < must) { w->flight_first++; }
    const WalkFlight* f = &w->flights[w->flight_first];
    before = w->flight_first ? f[-1].bytes : 0.0;
    return f->bytes > before ? f->begin + (f->end - f->begin) * (must - before) / (f->bytes - before) : f->end;
}

static double walk_seconds(const StepPlan* p, const double bytes[LINK_CLASSES]) {
    return fmax(bytes[LINK_INSIDE] / p->rate[LINK_INSIDE], bytes[LINK_BETWEEN] / p->rate[LINK_BETWEEN]);
}

// Puts the exchange of group g onto all links from `ready` on; returns when the last is through.
static double walk_carry(Walk* w, size_t g, bool gather, double ready, double* total) {
    const StepPlan* p = w->plan;
    const TrafficModel* m = p->traffic;
    double end = ready, out[LINK_CLASSES], in[LINK_CLASSES];
    if (!p->own) {
        *total = p->window; // so that nothing overlaps
        return w->send[0] = fmax(w->send[0], ready) + walk_seconds(p, p->busiest[g]);
    }
    const double *own = p->own + g * (size_t)m->ranks, *moved = own + (1 + p->layers) * (size_t)m->ranks;
    *total = plan_nodes(m, own, w->node);
    for (int r = 0; r < m->ranks; r++) {
        plan_rank_bytes(m, r, gather, own[r], w->node[traffic_node(m, r)], *total, moved[r], out, in, plan_by_ranges(m, g));
        w->send[r] = fmax(w->send[r], ready) + walk_seconds(p, out);
        w->receive[r] = fmax(w->receive[r], ready) + walk_seconds(p, in);
        end = fmax(end, fmax(w->send[r], w->receive[r]));
    }
    return end;
}

// Starts an exchange now; returns when it ends.
static double walk_exchange(Walk* w, size_t g, bool gather) {
    const TrafficModel* m = w->plan->traffic;
    if (m->ranks == 1) { return w->now; }
    double last = w->flight_count ? w->flights[w->flight_count - 1].end : 0.0, before = w->flight_count ? w->flights[w->flight_count - 1].bytes : 0.0;
    double begin = fmax(w->now, walk_window(w)), bytes = 0.0, end = walk_carry(w, g, gather, begin, &bytes);
    end = fmax(end, last) + (plan_by_ranges(m, g) ? 2.0 : 1.0) * w->plan->latency;
    if (w->flight_count == w->flight_room) {
        w->flight_room = max_size(64, 2 * w->flight_room);
        w->flights = (WalkFlight*)need(realloc(w->flights, w->flight_room * sizeof(WalkFlight)));
    }
    WalkFlight f = {begin, end, before + bytes};
    w->flights[w->flight_count++] = f;
    w->busy += fmax(0.0, end - fmax(begin, last));
    return end;
}

static void walk_wait(Walk* w, double until) {
    if (until <= w->now) { return; }
    w->waited += until - w->now;
    w->now = until;
}

static void walk_gather(Walk* w, size_t g) { w->gathered[g] = walk_exchange(w, g, true); }

// All ranks tell each other their norms, when nothing else is under way; every rank of a node sends and receives the same.
static void walk_norm(Walk* w) {
    const TrafficModel* m = w->plan->traffic;
    double one = (double)traffic_report(m), largest = plan_node_size(m, 0) - 1, smallest = plan_node_size(m, m->ranks - 1) - 1;
    double bytes[LINK_CLASSES] = {largest * one, (m->ranks - 1 - smallest) * one}, seconds = walk_seconds(w->plan, bytes) + w->plan->latency;
    if (m->ranks == 1) { return; }
    w->busy += seconds;
    walk_wait(w, w->now + seconds);
}

static void walk_fetch(Walk* w, size_t g) {
    if (w->plan->traffic->stage < 3 || g >= w->groups || w->there[g]) { return; }
    for (size_t other = 1; g > 0 && other < w->groups; other++) { w->there[other] = w->there[other] && other % w->slots != g % w->slots; }
    walk_gather(w, g);
    w->there[g] = true;
}

static void walk_use(Walk* w, size_t g) {
    walk_fetch(w, g);
    walk_wait(w, w->gathered[g]);
}

static void walk_forward(Walk* w) {
    walk_use(w, 0);
    for (size_t g = 1; g < w->groups; g++) {
        walk_use(w, g);
        walk_fetch(w, g + 1);
        w->now += w->plan->forward;
    }
}

// From stage 2 on layers share the memory of gradients; what still leaves from it must be gone.
static void walk_claim(Walk* w, size_t g) {
    if (w->plan->traffic->stage < 2) { return; }
    for (size_t other = 0; other < w->groups; other++) {
        bool same = other == g || (g > 0 && other > 0 && other % w->slots == g % w->slots);
        if (same) { walk_wait(w, w->reduced[other]); }
    }
}

static void walk_ready(Walk* w, size_t g, bool last) {
    int stage = w->plan->traffic->stage;
    if (stage >= 2 || last) { w->reduced[g] = walk_exchange(w, g, false); }
}

static void walk_backward(Walk* w, bool last) {
    walk_claim(w, 0);
    w->now += w->plan->head;
    for (size_t g = w->groups - 1; g > 0; g--) {
        walk_use(w, g);
        if (g > 1) { walk_fetch(w, g - 1); }
        walk_claim(w, g);
        w->now += w->plan->backward;
        walk_ready(w, g, last);
    }
    walk_ready(w, 0, last);
}

static void walk_step(Walk* w, uint64_t micro_steps) {
    int stage = w->plan->traffic->stage;
    for (uint64_t i = 0; i < micro_steps; i++) {
        walk_forward(w);
        walk_backward(w, i + 1 == micro_steps);
    }
    for (size_t g = 0; g < w->groups; g++) { walk_wait(w, w->reduced[g]); }
    walk_norm(w);
    for (size_t g = 0; g < w->groups; g++) {
        w->there[g] = false;
        if (stage == 1 || stage == 2) { walk_gather(w, g); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// A step

// Of the second of two steps: by then its weights come from the step before.
static StepTime plan_walk(const StepPlan* plan, uint64_t micro_steps) {
    Walk w;
    StepTime before, t;
    memset(&w, 0, sizeof(w));
    w.plan = plan;
    w.groups = 1 + plan->layers;
    w.slots = max_size(1, min_size(TRAFFIC_SLOTS, plan->layers));
    w.reduced = (double*)need(calloc(w.groups, sizeof(double)));
    w.gathered = (double*)need(calloc(w.groups, sizeof(double)));
    w.there = (bool*)need(calloc(w.groups, sizeof(bool)));
    w.send = (double*)need(calloc((size_t)plan->traffic->ranks, sizeof(double)));
    w.receive = (double*)need(calloc((size_t)plan->traffic->ranks, sizeof(double)));
    w.node = (double*)need(calloc((size_t)plan->traffic->ranks, sizeof(double)));
    walk_step(&w, micro_steps);
    before.step = w.now;
    before.busy = w.busy;
    before.waited = w.waited;
    walk_step(&w, micro_steps);
    t.step = w.now - before.step;
    t.busy = w.busy - before.busy;
    t.waited = w.waited - before.waited;
    t.compute = t.step - t.waited;
    free(w.reduced);
    free(w.gathered);
    free(w.there);
    free(w.send);
    free(w.receive);
    free(w.node);
    free(w.flights);
    return t;
}

#define PLAN_MICRO_STEPS 4 // walked; further ones are like the last

StepTime plan_step_time(const StepPlan* plan) {
    uint64_t micro_steps = plan->traffic->micro_steps;
    if (micro_steps <= PLAN_MICRO_STEPS) { return plan_walk(plan, micro_steps); }
    StepTime few = plan_walk(plan, PLAN_MICRO_STEPS - 1), t = plan_walk(plan, PLAN_MICRO_STEPS);
    double more = (double)(micro_steps - PLAN_MICRO_STEPS);
    t.step += more * (t.step - few.step);
    t.compute += more * (t.compute - few.compute);
    t.busy += more * (t.busy - few.busy);
    t.waited += more * (t.waited - few.waited);
    return t;
}

// Of communication time; 0 where there is none.
double plan_hidden(const StepTime* t) { return t->busy > 0 ? fmax(0.0, 1.0 - t->waited / t->busy) : 0.0; }

// The share of a step in which the rank computes.
double plan_utilisation(const StepTime* t) { return t->step > 0 ? t->compute / t->step : 1.0; }

// The links whose bandwidth the plan's --link-mbit is: between nodes, or on a single node those inside.
LinkClass plan_main_link(const TrafficModel* m) {
    return m->ranks_per_node > 0 && m->ranks_per_node < m->ranks ? LINK_BETWEEN : LINK_INSIDE;
}

// Bytes a second that the main links need for a utilisation of `aim`; negative when none is enough, since latency or the other links
// alone cost more; 0 when nothing is sent.
double plan_rate_needed(const StepPlan* plan, double aim) {
    StepPlan p = *plan;
    double *rate = &p.rate[plan_main_link(plan->traffic)], low = 1.0, high = 1e18;
    if (plan->traffic->ranks == 1) { return 0.0; }
    *rate = INFINITY;
    StepTime t = plan_step_time(&p);
    if (plan_utilisation(&t) < aim) { return -1.0; }
    while (high > 1.001 * low) {
        *rate = sqrt(low * high);
        t = plan_step_time(&p);
        *(plan_utilisation(&t) < aim ? &low : &high) = *rate;
    }
    return high;
}
