// rendezvous.h - how ranks without MPI find each other: rank 0 listens at master:port, the others come with a greeting and a few bytes,
// and when all are there each gets what every rank brought. It serves a few times at the start of a job, until NCCL has its own links.
//
// Nothing is handed out before all ranks are there, so that either all go on or all fail, with a line that says why. Whoever else
// connects (a port scanner, a rank of another job) is turned away and does no harm. Every wait has an end.
// Numbers travel in the byte order of the machine; one of the other order is taken for a stranger.
#pragma once
#include "launch.h"
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define RENDEZVOUS_VERSION 1
#define RENDEZVOUS_STRANGERS 64                // connections without a greeting that are kept at once
#define RENDEZVOUS_PATIENCE 5.0                // seconds in which a greeting, or one answer, must get through
#define RENDEZVOUS_NAME_PATIENCE 15.0          // seconds in which a name that is not known may still become known
#define RENDEZVOUS_MAX_BYTES ((size_t)1 << 20) // of a rank

static const char rendezvous_magic[8] = {'t', 'r', 'a', 'i', 'n', 'g', 'p', 't'};

typedef struct {
    char magic[8];
    uint32_t version, size, rank, bytes;
} RendezvousGreeting;

typedef enum { RENDEZVOUS_GOOD, RENDEZVOUS_OTHER_SIZE, RENDEZVOUS_OTHER_VERSION, RENDEZVOUS_TAKEN, RENDEZVOUS_MISSING } RendezvousStatus;

// Then, if good, size * bytes bytes.
typedef struct {
    char magic[8];
    uint32_t status, detail; // detail: rank 0's job size or version, or the rank that is missing
} RendezvousAnswer;

typedef struct {
    int fd;        // -1: free
    int rank;      // -1: has not greeted yet
    bool complete; // all its bytes are here
    size_t got;    // of the greeting and the bytes after it
    double since;
    RendezvousGreeting greeting;
} RendezvousGuest;

typedef struct {
    const Launch* launch;
    char* all; // (size, bytes)
    size_t bytes;
    int listeners[8], listener_count;
    RendezvousGuest* guests;
    int guest_count;
    struct pollfd* polls;
    int complete; // ranks that are here, with rank 0
    int twice;    // a rank that came a second time, -1: none
} RendezvousHost;

static void rendezvous_close(int* fd) {
    if (*fd >= 0) { close(*fd); }
    *fd = -1;
}

static int rendezvous_milliseconds(double until) {
    double left = (until - seconds_now()) * 1e3;
    return left <= 0 ? 0 : left > 1e6 ? 1000000 : (int)left + 1;
}

// Sends or receives all of it before `until`; false when that cannot be done. *moved: how much was.
static bool rendezvous_move(int fd, bool out, void* data, size_t bytes, double until, size_t* moved) {
    for (*moved = 0; *moved < bytes;) {
        struct pollfd p = {fd, (short)(out ? POLLOUT : POLLIN), 0};
        if (poll(&p, 1, rendezvous_milliseconds(until)) <= 0 && seconds_now() >= until) { return false; }
        char* at = (char*)data + *moved;
        ssize_t n = out ? send(fd, at, bytes - *moved, MSG_NOSIGNAL) : recv(fd, at, bytes - *moved, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) { return false; }
        if (n > 0) { *moved += (size_t)n; }
        if (n < 0 && seconds_now() >= until) { return false; }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Rank 0

// On all interfaces, except where the meeting place is this machine's own loopback.
static bool rendezvous_listen(RendezvousHost* h, Error* error) {
    const Launch* l = h->launch;
    bool inside = strcmp(l->master, "localhost") == 0 || strncmp(l->master, "127.", 4) == 0 || strcmp(l->master, "::1") == 0;
    struct addrinfo hints, *list = NULL;
    char port[16];
    int problem = EADDRNOTAVAIL;
    memset(&hints, 0, sizeof(hints));
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    snprintf(port, sizeof(port), "%d", l->port);
    int status = getaddrinfo(inside ? l->master : NULL, port, &hints, &list);
    if (status != 0) { return fail(error, "rank 0 cannot listen at %s:%d: %s", l->master, l->port, gai_strerror(status)); }
    for (struct addrinfo* a = list; a && h->listener_count < (int)COUNT_OF(h->listeners); a = a->ai_next) {
        int on = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0) { continue; }                                  // a family that this machine lacks
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)); // the last job's closed connections do not count
        if (a->ai_family == AF_INET6) { setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on)); }
        if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 1024) == 0) {
            h->listeners[h->listener_count++] = fd;
        } else {
            problem = errno == EADDRINUSE || problem != EADDRINUSE ? errno : problem;
            close(fd);
        }
    }
    freeaddrinfo(list);
    if (problem == EADDRINUSE) {
        return fail(error,
                    "port %d of rank 0's machine is in use, perhaps by another job: choose another (MASTER_PORT, or --master HOST:PORT)",
                    l->port);
    }
    return h->listener_count > 0 || fail(error, "rank 0 cannot listen at port %d: %s", l->port, strerror(problem));
}

// The connection of a guest ends; if it was a rank that had greeted, that rank may come again.
static void rendezvous_dismiss(RendezvousHost* h, RendezvousGuest* g) {
    if (g->complete) { h->complete--; }
    rendezvous_close(&g->fd);
    g->rank = -1;
    g->complete = false;
}

static void rendezvous_answer(RendezvousHost* h, RendezvousGuest* g, RendezvousStatus status, int detail) {
    RendezvousAnswer answer;
    size_t moved;
    double until = seconds_now() + RENDEZVOUS_PATIENCE;
    memcpy(answer.magic, rendezvous_magic, sizeof(answer.magic));
    answer.status = (uint32_t)status;
    answer.detail = (uint32_t)detail;
    if (rendezvous_move(g->fd, true, &answer, sizeof(answer), until, &moved) && status == RENDEZVOUS_GOOD) {
        rendezvous_move(g->fd, true, h->all, (size_t)h->launch->size * h->bytes, until, &moved);
    }
}

static bool rendezvous_accept(RendezvousHost* h, int listener, Error* error) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE) {
            return fail(error, "rank 0 cannot take %d connections: raise ulimit -n", h->launch->size);
        }
        return true; // it has gone already
    }
    RendezvousGuest *place = NULL, *oldest = NULL;
    for (int i = 0; i < h->guest_count && !place; i++) {
        RendezvousGuest* g = &h->guests[i];
        if (g->fd < 0) { place = g; }
        if (g->rank < 0 && (!oldest || g->since < oldest->since)) { oldest = g; }
    }
    if (!place) {
        rendezvous_dismiss(h, oldest); // there are more places than ranks, so one is a stranger's
        place = oldest;
    }
    memset(place, 0, sizeof(*place));
    place->fd = fd;
    place->rank = -1;
    place->since = seconds_now();
    return true;
}

// A whole greeting is here: false turns the guest away.
static bool rendezvous_greeted(RendezvousHost* h, RendezvousGuest* g) {
    const RendezvousGreeting* hello = &g->greeting;
    uint32_t size = (uint32_t)h->launch->size;
    if (hello->version != RENDEZVOUS_VERSION || hello->bytes != h->bytes) {
        rendezvous_answer(h, g, RENDEZVOUS_OTHER_VERSION, RENDEZVOUS_VERSION);
        return false;
    }
    if (hello->size != size || hello->rank >= size) {
        rendezvous_answer(h, g, RENDEZVOUS_OTHER_SIZE, h->launch->size);
        return false;
    }
    bool taken = hello->rank == 0;
    for (int i = 0; i < h->guest_count; i++) { taken |= h->guests[i].fd >= 0 && h->guests[i].rank == (int)hello->rank; }
    if (taken) {
        h->twice = (int)hello->rank;
        rendezvous_answer(h, g, RENDEZVOUS_TAKEN, (int)hello->rank);
        return false;
    }
    g->rank = (int)hello->rank;
    return true;
}

// Reads what there is; false when the guest has gone or is turned away.
static bool rendezvous_read(RendezvousHost* h, RendezvousGuest* g) {
    const size_t head = sizeof(g->greeting);
    while (true) {
        char extra;
        size_t left = g->got < head ? head - g->got : head + h->bytes - g->got;
        char* to = g->got < head ? (char*)&g->greeting + g->got
                   : g->complete ? &extra
                                 : h->all + (size_t)g->rank * h->bytes + (g->got - head);
        ssize_t n = recv(g->fd, to, g->complete ? 1 : left, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) { return true; }
        if (n <= 0 || g->complete) { return false; } // a rank that has said all keeps silent until it is answered
        g->got += (size_t)n;
        if (memcmp(&g->greeting, rendezvous_magic, min_size(g->got, sizeof(rendezvous_magic))) != 0) { return false; }
        if (g->got == head && !rendezvous_greeted(h, g)) { return false; }
        if (g->got == head + h->bytes) {
            g->complete = true;
            h->complete++;
        }
    }
}

// One turn of waiting for guests.
static bool rendezvous_attend(RendezvousHost* h, double until, Error* error) {
    int count = 0;
    for (int i = 0; i < h->listener_count; i++) {
        struct pollfd p = {h->listeners[i], POLLIN, 0};
        h->polls[count++] = p;
    }
    for (int i = 0; i < h->guest_count; i++) {
        struct pollfd p = {h->guests[i].fd, POLLIN, 0}; // -1 is passed over
        h->polls[count++] = p;
    }
    int wait = rendezvous_milliseconds(until);
    poll(h->polls, (nfds_t)count, wait < 500 ? wait : 500);
    double now = seconds_now();
    for (int i = 0; i < h->guest_count; i++) {
        RendezvousGuest* g = &h->guests[i];
        if (g->fd < 0) { continue; }
        bool stays = !h->polls[h->listener_count + i].revents || rendezvous_read(h, g);
        if (!stays || (!g->complete && now - g->since > RENDEZVOUS_PATIENCE)) { rendezvous_dismiss(h, g); }
    }
    for (int i = 0; i < h->listener_count; i++) {
        if (h->polls[i].revents && !rendezvous_accept(h, h->listeners[i], error)) { return false; }
    }
    return true;
}

static bool rendezvous_missing(RendezvousHost* h, int* missing, double timeout, Error* error) {
    const Launch* l = h->launch;
    char twice[64] = "";
    char* here = (char*)need(calloc((size_t)l->size, 1));
    for (int i = 0; i < h->guest_count; i++) {
        if (h->guests[i].complete) { here[h->guests[i].rank] = 1; }
    }
    for (*missing = 1; *missing < l->size - 1 && here[*missing]; ++*missing) {}
    free(here);
    if (h->twice >= 0) { snprintf(twice, sizeof(twice), "; rank %d came twice", h->twice); }
    return fail(error, "rank %d did not come to %s:%d within %g s (%d of %d ranks are here%s): does it run, and can it reach this machine?",
                *missing, l->master, l->port, timeout, h->complete, l->size, twice);
}

static bool rendezvous_host(RendezvousHost* h, double timeout, Error* error) {
    const Launch* l = h->launch;
    double until = seconds_now() + timeout;
    int missing = 0;
    bool good = rendezvous_listen(h, error);
    while (good && h->complete < l->size && seconds_now() < until) { good = rendezvous_attend(h, until, error); }
    if (good && h->complete < l->size) { good = rendezvous_missing(h, &missing, timeout, error); }
    for (int i = 0; i < h->listener_count; i++) { rendezvous_close(&h->listeners[i]); } // who comes from now on comes for the next one
    for (int i = 0; i < h->guest_count; i++) {
        if (h->guests[i].complete) { rendezvous_answer(h, &h->guests[i], good ? RENDEZVOUS_GOOD : RENDEZVOUS_MISSING, missing); }
        rendezvous_close(&h->guests[i].fd);
    }
    return good;
}

static bool rendezvous_first(const Launch* launch, const void* mine, size_t bytes, void* all, double timeout, Error* error) {
    RendezvousHost h;
    struct rlimit files;
    memset(&h, 0, sizeof(h));
    h.launch = launch;
    h.all = (char*)all;
    h.bytes = bytes;
    h.complete = 1;
    h.twice = -1;
    h.guest_count = launch->size + RENDEZVOUS_STRANGERS;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max && (size_t)files.rlim_cur < (size_t)h.guest_count + 256) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    h.guests = (RendezvousGuest*)need(calloc((size_t)h.guest_count, sizeof(RendezvousGuest)));
    h.polls = (struct pollfd*)need(calloc((size_t)h.guest_count + COUNT_OF(h.listeners), sizeof(struct pollfd)));
    for (int i = 0; i < h.guest_count; i++) { h.guests[i].fd = h.guests[i].rank = -1; }
    memcpy(h.all, mine, bytes);
    bool good = rendezvous_host(&h, timeout, error);
    free(h.guests);
    free(h.polls);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The other ranks

typedef enum { RENDEZVOUS_DONE, RENDEZVOUS_AGAIN, RENDEZVOUS_REFUSED } RendezvousResult;

// A connection to one of the addresses of the meeting place; -1 with errno where there is none.
static int rendezvous_connect(const struct addrinfo* list, double until) {
    int problem = ECONNREFUSED;
    for (const struct addrinfo* a = list; a; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0) { continue; }
        problem = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
        if (problem == EINPROGRESS) {
            double patience = seconds_now() + RENDEZVOUS_PATIENCE;
            struct pollfd p = {fd, POLLOUT, 0};
            socklen_t length = sizeof(problem);
            if (poll(&p, 1, rendezvous_milliseconds(patience < until ? patience : until)) <= 0) {
                problem = ETIMEDOUT;
            } else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &length) != 0) {
                problem = errno;
            }
        }
        if (problem == 0) { return fd; }
        close(fd);
    }
    errno = problem;
    return -1;
}

static RendezvousResult rendezvous_refused(const Launch* l, const RendezvousAnswer* answer, Error* error) {
    if (memcmp(answer->magic, rendezvous_magic, sizeof(answer->magic)) != 0) {
        fail(error, "what answers at %s:%d is another program: choose another port (MASTER_PORT, or --master HOST:PORT)", l->master,
             l->port);
    } else if (answer->status == RENDEZVOUS_OTHER_SIZE) {
        fail(error, "rank %d belongs to a job of %d ranks, but at %s:%d one of %u ranks meets: is it another job's port?", l->rank, l->size,
             l->master, l->port, answer->detail);
    } else if (answer->status == RENDEZVOUS_OTHER_VERSION) {
        fail(error, "rank %d and rank 0 at %s:%d are different versions of the program: give all ranks the same", l->rank, l->master,
             l->port);
    } else if (answer->status == RENDEZVOUS_TAKEN) {
        fail(error, "another process has come to %s:%d as rank %d already: each process needs a RANK of its own, and each job a port",
             l->master, l->port, l->rank);
    } else {
        fail(error, "rank %u did not come to %s:%d", answer->detail, l->master, l->port);
    }
    return RENDEZVOUS_REFUSED;
}

// One visit over an open connection. Once greeted, rank 0 answers when its own time is up at the latest, and knows who is missing: it
// gets a little longer.
static RendezvousResult rendezvous_visit(const Launch* l, int fd, const void* mine, size_t bytes, void* all, double until, Error* error) {
    RendezvousGreeting hello;
    RendezvousAnswer answer;
    size_t moved;
    memcpy(hello.magic, rendezvous_magic, sizeof(hello.magic));
    hello.version = RENDEZVOUS_VERSION;
    hello.size = (uint32_t)l->size;
    hello.rank = (uint32_t)l->rank;
    hello.bytes = (uint32_t)bytes;
    bool sent = rendezvous_move(fd, true, &hello, sizeof(hello), until, &moved) &&
                rendezvous_move(fd, true, (void*)(uintptr_t)mine, bytes, until, &moved);
    bool answered = rendezvous_move(fd, false, &answer, sizeof(answer), until + RENDEZVOUS_PATIENCE, &moved);
    if (!answered && moved >= sizeof(answer.magic)) { return rendezvous_refused(l, &answer, error); }
    if (!answered) { // gone without a word: an old job's rank 0, or one that was stopped
        fail(error, "rank %d was at %s:%d, but rank 0 did not answer%s", l->rank, l->master, l->port,
             seconds_now() < until ? "" : " in time");
        return RENDEZVOUS_AGAIN;
    }
    if (!sent || memcmp(answer.magic, rendezvous_magic, sizeof(answer.magic)) != 0 || answer.status != RENDEZVOUS_GOOD) {
        return rendezvous_refused(l, &answer, error);
    }
    if (!rendezvous_move(fd, false, all, (size_t)l->size * bytes, seconds_now() + 2 * RENDEZVOUS_PATIENCE, &moved)) {
        fail(error, "rank %d lost its connection to rank 0 at %s:%d", l->rank, l->master, l->port);
        return RENDEZVOUS_REFUSED;
    }
    return RENDEZVOUS_DONE;
}

static RendezvousResult rendezvous_try(const Launch* l, const void* mine, size_t bytes, void* all, double begun, double timeout,
                                       Error* error) {
    struct addrinfo hints, *list = NULL;
    double until = begun + timeout;
    char port[16];
    memset(&hints, 0, sizeof(hints));
    hints.ai_socktype = SOCK_STREAM;
    snprintf(port, sizeof(port), "%d", l->port);
    int status = getaddrinfo(l->master, port, &hints, &list); // bounded by the resolver's own limits
    if (status != 0) {
        fail(error, "rank %d cannot find the host \"%s\" of rank 0: %s; give its name or address (MASTER_ADDR, or --master)", l->rank,
             l->master, gai_strerror(status));
        bool known_soon = status == EAI_AGAIN || seconds_now() < begun + RENDEZVOUS_NAME_PATIENCE;
        return known_soon ? RENDEZVOUS_AGAIN : RENDEZVOUS_REFUSED;
    }
    int fd = rendezvous_connect(list, until);
    int problem = errno;
    freeaddrinfo(list);
    if (fd < 0) {
        fail(error, "rank %d could not reach rank 0 at %s:%d within %g s: %s; does rank 0 run there?", l->rank, l->master, l->port, timeout,
             strerror(problem));
        return RENDEZVOUS_AGAIN;
    }
    RendezvousResult result = rendezvous_visit(l, fd, mine, bytes, all, until, error);
    close(fd);
    return result;
}

// all (size * bytes): what every rank brought, in the order of ranks. Collective. timeout: seconds that ranks have to come.
bool rendezvous_gather(const Launch* launch, const void* mine, size_t bytes, void* all, double timeout, Error* error) {
    if (bytes == 0 || bytes > RENDEZVOUS_MAX_BYTES) {
        return fail(error, "a rendezvous of %zu bytes; expected 1 to %zu", bytes, RENDEZVOUS_MAX_BYTES);
    }
    if (launch->size == 1) {
        memcpy(all, mine, bytes);
        return true;
    }
    if (launch->rank == 0) { return rendezvous_first(launch, mine, bytes, all, timeout, error); }
    double begun = seconds_now();
    struct timespec pause = {0, 50000000};
    while (true) {
        RendezvousResult result = rendezvous_try(launch, mine, bytes, all, begun, timeout, error);
        if (result != RENDEZVOUS_AGAIN) { return result == RENDEZVOUS_DONE; }
        if (seconds_now() - begun >= timeout) { return false; }
        nanosleep(&pause, NULL);
    }
}
