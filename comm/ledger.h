// ledger.h - every byte that a rank hands to the network, by purpose and by link class. `raw` is what the values would take as they
// are, `sent` what was handed over (they differ once messages are compressed). Counted where messages are given to MPI or NCCL, by the
// thread that gives them; protocol headers below that are not in it. Comparing two states of the ledger gives the bytes of a step.
#pragma once
#include "../kernels/base.h"

typedef enum {
    TRAFFIC_GRADIENT, // gradients on their way to be summed, and sums on their way back
    TRAFFIC_WEIGHTS,  // weights from their owners
    TRAFFIC_NORM,     // norms, losses and flags of a step
    TRAFFIC_LOADER,   // what ranks tell each other about their data
    TRAFFIC_CONTROL,  // start-up, agreement, evaluation, checkpoints
    TRAFFIC_PURPOSES,
} TrafficPurpose;

static const char* const traffic_names[TRAFFIC_PURPOSES] = {"gradient", "weights", "norm", "loader", "control"};

typedef enum { LINK_INSIDE, LINK_BETWEEN, LINK_CLASSES } LinkClass; // of a node, between nodes

static const char* const link_names[LINK_CLASSES] = {"inside", "between"};

typedef struct {
    uint64_t raw[TRAFFIC_PURPOSES][LINK_CLASSES], sent[TRAFFIC_PURPOSES][LINK_CLASSES];
    uint64_t messages[TRAFFIC_PURPOSES][LINK_CLASSES];
    double busy;   // seconds in which at least one exchange was going on
    double waited; // seconds for which the computing thread stood still for one
} Ledger;

static inline void ledger_add(Ledger* ledger, TrafficPurpose purpose, LinkClass link, uint64_t raw, uint64_t sent) {
    ledger->raw[purpose][link] += raw;
    ledger->sent[purpose][link] += sent;
    ledger->messages[purpose][link]++;
}

static inline uint64_t ledger_sent(const Ledger* ledger, TrafficPurpose purpose) {
    return ledger->sent[purpose][LINK_INSIDE] + ledger->sent[purpose][LINK_BETWEEN];
}

static inline uint64_t ledger_class(const Ledger* ledger, LinkClass link) {
    uint64_t sum = 0;
    for (int p = 0; p < TRAFFIC_PURPOSES; p++) { sum += ledger->sent[p][link]; }
    return sum;
}

static inline uint64_t ledger_all(const Ledger* ledger) { return ledger_class(ledger, LINK_INSIDE) + ledger_class(ledger, LINK_BETWEEN); }

// What was added since `before`.
static inline Ledger ledger_since(const Ledger* now, const Ledger* before) {
    Ledger d = *now;
    for (int p = 0; p < TRAFFIC_PURPOSES; p++) {
        for (int l = 0; l < LINK_CLASSES; l++) {
            d.raw[p][l] -= before->raw[p][l];
            d.sent[p][l] -= before->sent[p][l];
            d.messages[p][l] -= before->messages[p][l];
        }
    }
    d.busy -= before->busy;
    d.waited -= before->waited;
    return d;
}

// The share of communication time that was hidden behind computation; 0 when there was none.
static inline double ledger_hidden(const Ledger* ledger) {
    double share = ledger->busy > 0 ? 1.0 - ledger->waited / ledger->busy : 0.0;
    return share > 0 ? share : 0.0;
}
