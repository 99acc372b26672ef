// agree.h - what ranks tell each other about success. No rank exits alone: a step that may fail on one rank ends in comm_agree, after
// which all ranks go on or all return the same line.
#pragma once
#include "comm.cuh"

// Whether all ranks are good; where one is not, every rank gets the line of the lowest such rank. Collective.
bool comm_agree(const Comm* c, bool good, Error* error) {
    if (c->size == 1) { return good; }
    uint8_t mine = good, *all = (uint8_t*)need(malloc((size_t)c->size));
    comm_gather_host(c, &mine, 1, all, TRAFFIC_CONTROL);
    int bad = -1;
    for (int r = c->size - 1; r >= 0; r--) { bad = all[r] ? bad : r; }
    free(all);
    if (bad < 0) { return true; }
    Error* texts = (Error*)need(malloc((size_t)c->size * sizeof(Error)));
    comm_gather_host(c, error, sizeof(Error), texts, TRAFFIC_CONTROL);
    if (bad == 0) { // also what only rank 0 does: there is no one else to blame
        *error = texts[bad];
    } else {
        fail(error, "rank %d: %.1000s", bad, texts[bad].text);
    }
    free(texts);
    return false;
}

// data (host memory): rank 0's, on all ranks. Collective; for small things.
void comm_share(const Comm* c, void* data, size_t bytes) {
    if (c->size == 1) { return; }
    char* all = (char*)need(malloc((size_t)c->size * bytes));
    comm_gather_host(c, data, bytes, all, TRAFFIC_CONTROL);
    memcpy(data, all, bytes);
    free(all);
}

#define COMM_SAME_BYTES 480

// Refuses ranks that differ in something that must be the same on all, such as a library. what: "the matrix library". Collective.
bool comm_same(const Comm* c, const char* what, const char* value, TrafficPurpose purpose, Error* error) {
    if (c->size == 1) { return true; }
    char mine[COMM_SAME_BYTES];
    memset(mine, 0, sizeof(mine));
    snprintf(mine, sizeof(mine), "%s", value);
    char* all = (char*)need(malloc((size_t)c->size * sizeof(mine)));
    comm_gather_host(c, mine, sizeof(mine), all, purpose);
    int other = 0;
    for (int r = c->size - 1; r > 0; r--) { other = memcmp(all, all + (size_t)r * sizeof(mine), sizeof(mine)) != 0 ? r : other; }
    const char* theirs = all + (size_t)other * sizeof(mine);
    bool good = other == 0 || fail(error, "%s differ between ranks: rank 0 has %s, rank %d has %s; give all ranks the same", what, all, other,
                                   theirs);
    free(all);
    return good;
}
