// plan_schedule.h - how long a step takes: one rank's computing thread walks through forward and backward layer by layer, starts the
// exchanges of comm/zero.cuh where the trainer starts them, and waits where it waits; the ranks' links carry them one after the other, in
// the order of their start. What the thread waits for is exposed, the rest of the traffic is hidden.
// Each rank has a link inside its node and one to other nodes, both full duplex: an exchange takes as long as the busiest direction of
// the busiest link of any rank. That the owner of a large unit must serve all others shows here, not in formulas of average bytes.
#pragma once
#include "../comm/traffic.h"

typedef struct {
    const TrafficModel* traffic; // its rank does not matter
    size_t layers;
    double (*busiest)[LINK_CLASSES]; // (1 + layers): bytes of a group's exchange on the busiest link of each class; plan_busiest
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

// A reduction brings to others what they own and from each of them what is mine; a gather the reverse; a sum that all get does both, in
// both directions. So the busier direction of a rank is the same in a reduction and in a gather.
static void plan_group_busiest(const TrafficModel* m, const double* own, double* node, double total, double busiest[LINK_CLASSES]) {
    memset(node, 0, (size_t)m->ranks * sizeof(double));
    for (int r = 0; r < m->ranks; r++) { node[traffic_node(m, r)] += own[r]; }
    for (int r = 0; r < m->ranks; r++) {
        double near = node[traffic_node(m, r)], peers = plan_node_size(m, r) - 1;
        double others[LINK_CLASSES] = {near - own[r], total - near}, mine[LINK_CLASSES] = {peers * own[r], (m->ranks - 1 - peers) * own[r]};
        for (int l = 0; l < LINK_CLASSES; l++) {
            busiest[l] = fmax(busiest[l], m->stage == 0 ? others[l] + mine[l] : fmax(others[l], mine[l]));
        }
    }
}

// (1 + layers) pairs, to be freed by the caller.
double (*plan_busiest(const TrafficModel* m))[LINK_CLASSES] {
    size_t groups = 1 + traffic_layers(m->table);
    double(*busiest)[LINK_CLASSES] = (double(*)[LINK_CLASSES])need(calloc(groups, sizeof(*busiest)));
    double *own = (double*)need(malloc((size_t)m->ranks * sizeof(double))), *node = (double*)need(malloc((size_t)m->ranks * sizeof(double)));
    for (size_t g = 0; m->ranks > 1 && g < groups; g++) {
        size_t elements = 0;
        memset(own, 0, (size_t)m->ranks * sizeof(double));
        for (size_t u = 0; u < m->table->unit_count; u++) {
            const Unit* unit = &m->table->units[u];
            if (traffic_group(m->table, unit) != g) { continue; }
            elements += unit->count;
            own[m->owner[u]] += (double)(unit->count * m->element);
        }
        for (int r = 0; m->stage == 0 && r < m->ranks; r++) {
            own[r] = (double)((traffic_range(m, elements, r + 1) - traffic_range(m, elements, r)) * m->element);
        }
        plan_group_busiest(m, own, node, (double)(elements * m->element), busiest[g]);
    }
    free(own);
    free(node);
    return busiest;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The trainer's order of things

typedef struct {
    const StepPlan* plan;
    size_t groups, slots;
    double *reduced, *gathered; // (groups) when the group's last exchange ends
    bool* there;                // (groups) stage 3: the weights are held, or coming
    double now, waited, busy;
    double last;                // end of the last exchange
} Walk;

// Starts an exchange now; returns when it ends.
static double walk_exchange(Walk* w, const double bytes[LINK_CLASSES], double hops) {
    const StepPlan* p = w->plan;
    if (p->traffic->ranks == 1) { return w->now; }
    double seconds = fmax(bytes[LINK_INSIDE] / p->rate[LINK_INSIDE], bytes[LINK_BETWEEN] / p->rate[LINK_BETWEEN]) + hops * p->latency;
    w->last = fmax(w->now, w->last) + seconds;
    w->busy += seconds;
    return w->last;
}

static void walk_wait(Walk* w, double until) {
    if (until <= w->now) { return; }
    w->waited += until - w->now;
    w->now = until;
}

static void walk_gather(Walk* w, size_t g) { w->gathered[g] = walk_exchange(w, w->plan->busiest[g], 1.0); }

// All ranks tell each other their norms; every rank of a node sends and receives the same.
static void walk_norm(Walk* w) {
    const TrafficModel* m = w->plan->traffic;
    double one = (double)traffic_report(m), largest = plan_node_size(m, 0) - 1, smallest = plan_node_size(m, m->ranks - 1) - 1;
    double bytes[LINK_CLASSES] = {largest * one, (m->ranks - 1 - smallest) * one};
    walk_wait(w, walk_exchange(w, bytes, 1.0));
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
    if (stage >= 2 || last) { w->reduced[g] = walk_exchange(w, w->plan->busiest[g], stage == 0 ? 2.0 : 1.0); }
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
