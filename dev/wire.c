// wire.c - a switch in user space for scripts/lab.sh: gives the links between network namespaces a rate, a delay and a loss where the
// kernel has no such queue of its own. Every host has a TUN device in its namespace; the relay holds all of their other ends. A packet
//   leaves the sender's link, which takes its bytes at the link's rate, one packet after the other,
//   travels for half the delay of either end, and is lost on the way with half the loss of either end,
//   then passes the receiver's link at that link's rate; one whose wait there would be too long is dropped, as a switch drops it.
// A sender whose link has more than HURRY waiting is not read from: its packets stay in its own kernel, which slows the program down
// as a slow network card would.
//
// usage: wire TABLE DEVICE      TABLE holds a line for each host:  namespace address bits/s delay-in-us loss     (0 bits/s: no limit)
// SIGHUP reads the table again (same hosts; rates, delays and losses may differ); SIGTERM and SIGINT end it with one line a host.
// "wire: ready" goes to the standard output once all devices are held.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define HOSTS_MAX 64
#define FRAME_BYTES 38            // of Ethernet around a packet: header, checksum, preamble, gap
#define PACKET_MAX 65535          // of IPv4; a device's MTU is smaller
#define BURST 64                  // packets read from one sender before the next has its turn
#define HURRY 2000000             // ns that a sender's link may be behind
#define QUEUE 200000000           // ns that a packet may wait for the receiver's link
#define MEMORY ((size_t)512 << 20) // bytes of packets under way at most

typedef struct {
    char name[64];
    uint32_t address; // network order
    double rate;      // bytes a ns, 0: no limit
    uint64_t delay;   // ns
    double loss;      // probability
} Host;

typedef struct {
    Host host;
    int fd;
    uint64_t up, down; // ns at which the link out of and into the host is free again
    uint64_t sent, received, lost, dropped; // packets
} Port;

// A packet on its way: first until it arrives at the receiver's link, then until it has passed it.
typedef struct {
    uint64_t due, order; // equal times: first in, first out
    Port* to;
    bool passing;
    size_t length;
    unsigned char bytes[];
} Packet;

static struct {
    Port ports[HOSTS_MAX];
    size_t count;
    Packet** heap; // the earliest on top
    size_t heap_count, heap_room, memory;
    uint64_t order;
} wire;

static volatile sig_atomic_t wire_end, wire_reload;

static void on_signal(int number) {
    if (number == SIGHUP) {
        wire_reload = 1;
    } else {
        wire_end = 1;
    }
}

__attribute__((format(printf, 1, 2))) static bool complain(const char* format, ...) {
    va_list list;
    fputs("wire: ", stderr);
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    return false;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

// xorshift64* (Vigna 2016), in [0, 1): a loss pattern need not be strong, but it should be the same in every run.
static double random_share(void) {
    static uint64_t state = 0x9E3779B97F4A7C15u;
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (double)((state * 0x2545F4914F6CDD1Du) >> 11) * 0x1p-53;
}

// ---- the table

static bool number_in(const char* text, double low, double high, double* value) {
    char* end;
    errno = 0;
    *value = strtod(text, &end);
    return end != text && *end == 0 && errno == 0 && *value >= low && *value <= high; // false for NaN too
}

static bool host_parse(const char* path, int number, char* line, Host* host) {
    char *word[6], *rest = NULL;
    size_t words = 0;
    double rate, delay;
    for (char* w = strtok_r(line, " \t\n", &rest); w && words < 6; w = strtok_r(NULL, " \t\n", &rest)) { word[words++] = w; }
    if (words != 5) { return complain("%s:%d: expected: namespace address bits/s delay-in-us loss", path, number); }
    if (strlen(word[0]) >= sizeof(host->name) || strchr(word[0], '/')) { return complain("%s:%d: %s is no namespace", path, number, word[0]); }
    if (inet_pton(AF_INET, word[1], &host->address) != 1) { return complain("%s:%d: %s is no IPv4 address", path, number, word[1]); }
    if (!number_in(word[2], 0, 1e12, &rate)) { return complain("%s:%d: rate %s: expected 0 to 1e12 bits/s", path, number, word[2]); }
    if (!number_in(word[3], 0, 1e7, &delay)) { return complain("%s:%d: delay %s: expected 0 to 1e7 us", path, number, word[3]); }
    if (!number_in(word[4], 0, 1, &host->loss)) { return complain("%s:%d: loss %s: expected 0 to 1", path, number, word[4]); }
    if (rate > 0 && rate < 1000) { return complain("%s:%d: rate %s: expected 0 or at least 1000 bits/s", path, number, word[2]); }
    strcpy(host->name, word[0]);
    host->rate = rate / 8e9;
    host->delay = (uint64_t)(delay * 1e3);
    return true;
}

// hosts: (HOSTS_MAX). False with one line where the file is not as it should be.
static bool table_read(const char* path, Host* hosts, size_t* count) {
    char line[512];
    int number = 0;
    bool good = true;
    FILE* file = fopen(path, "re");
    if (!file) { return complain("%s: %s", path, strerror(errno)); }
    *count = 0;
    while (good && fgets(line, sizeof(line), file)) {
        number++;
        if (!strchr(line, '\n') && !feof(file)) { good = complain("%s:%d: the line is too long", path, number); }
        if (good && *count == HOSTS_MAX) { good = complain("%s: more than %d hosts", path, HOSTS_MAX); }
        good = good && host_parse(path, number, line, &hosts[*count]);
        for (size_t i = 0; good && i < *count; i++) {
            if (hosts[i].address == hosts[*count].address) { good = complain("%s:%d: the address of %s again", path, number, hosts[i].name); }
        }
        *count += good;
    }
    if (good && ferror(file)) { good = complain("%s: %s", path, strerror(errno)); }
    if (good && *count < 2) { good = complain("%s: expected at least 2 hosts", path); }
    fclose(file);
    return good;
}

// While it runs: the hosts are the same ones, else the old table stays.
static void table_reload(const char* path) {
    Host hosts[HOSTS_MAX];
    size_t count;
    if (!table_read(path, hosts, &count)) { return; }
    bool same = count == wire.count;
    for (size_t i = 0; same && i < count; i++) {
        same = strcmp(hosts[i].name, wire.ports[i].host.name) == 0 && hosts[i].address == wire.ports[i].host.address;
    }
    if (!same) {
        complain("%s: other hosts than before; nothing is changed", path);
        return;
    }
    for (size_t i = 0; i < count; i++) { wire.ports[i].host = hosts[i]; }
}

// ---- packets under way

static bool packet_before(const Packet* a, const Packet* b) { return a->due != b->due ? a->due < b->due : a->order < b->order; }

static bool heap_push(Packet* packet) {
    if (wire.heap_count == wire.heap_room) {
        size_t room = wire.heap_room ? 2 * wire.heap_room : 1024;
        Packet** heap = realloc(wire.heap, room * sizeof(Packet*));
        if (!heap) { return false; }
        wire.heap = heap;
        wire.heap_room = room;
    }
    size_t at = wire.heap_count++;
    packet->order = wire.order++;
    while (at > 0 && packet_before(packet, wire.heap[(at - 1) / 2])) {
        wire.heap[at] = wire.heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    wire.heap[at] = packet;
    return true;
}

static Packet* heap_pop(void) {
    Packet *top = wire.heap[0], *last = wire.heap[--wire.heap_count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= wire.heap_count) { break; }
        if (child + 1 < wire.heap_count && packet_before(wire.heap[child + 1], wire.heap[child])) { child++; }
        if (!packet_before(wire.heap[child], last)) { break; }
        wire.heap[at] = wire.heap[child];
        at = child;
    }
    if (wire.heap_count > 0) { wire.heap[at] = last; }
    return top;
}

static void packet_free(Packet* packet) {
    wire.memory -= packet->length;
    free(packet);
}

static uint64_t link_time(const Port* port, size_t length) {
    return port->host.rate > 0 ? (uint64_t)((double)(length + FRAME_BYTES) / port->host.rate) : 0;
}

// What has become due by `now`: arrives at the receiver's link, or leaves it.
static void deliver(uint64_t now) {
    while (wire.heap_count > 0 && wire.heap[0]->due <= now) {
        Packet* packet = heap_pop();
        Port* to = packet->to;
        if (!packet->passing) {
            uint64_t start = later(packet->due, to->down);
            if (start - packet->due > QUEUE) {
                to->dropped++;
                packet_free(packet);
                continue;
            }
            packet->passing = true;
            packet->due = to->down = start + link_time(to, packet->length);
            if (!heap_push(packet)) { packet_free(packet); }
            continue;
        }
        if (write(to->fd, packet->bytes, packet->length) == (ssize_t)packet->length) {
            to->received++;
        } else {
            to->dropped++;
        }
        packet_free(packet);
    }
}

static Port* port_of(const unsigned char* bytes, size_t length) {
    uint32_t address;
    if (length < 20 || bytes[0] >> 4 != 4) { return NULL; } // IPv4 alone
    memcpy(&address, bytes + 16, 4);
    for (size_t i = 0; i < wire.count; i++) {
        if (wire.ports[i].host.address == address) { return &wire.ports[i]; }
    }
    return NULL;
}

// Takes over what a host sends, until its link is busy. False when its device is gone.
static bool collect(Port* from, uint64_t now) {
    static unsigned char bytes[PACKET_MAX];
    for (int i = 0; i < BURST && from->up <= now + HURRY; i++) {
        ssize_t length = read(from->fd, bytes, sizeof(bytes));
        if (length <= 0) { return length < 0 && (errno == EAGAIN || errno == EINTR || errno == EIO); } // EIO: the device is down
        Port* to = port_of(bytes, (size_t)length);
        if (!to || to == from) { continue; } // broadcasts and strangers
        from->sent++;
        from->up = later(from->up, now) + link_time(from, (size_t)length);
        if (random_share() < (from->host.loss + to->host.loss) / 2) {
            to->lost++;
            continue;
        }
        Packet* packet = wire.memory + (size_t)length <= MEMORY ? malloc(sizeof(Packet) + (size_t)length) : NULL;
        if (!packet) {
            to->dropped++;
            continue;
        }
        wire.memory += (size_t)length;
        packet->due = from->up + (from->host.delay + to->host.delay) / 2;
        packet->to = to;
        packet->passing = false;
        packet->length = (size_t)length;
        memcpy(packet->bytes, bytes, (size_t)length);
        if (!heap_push(packet)) { packet_free(packet); }
    }
    return true;
}

// ---- devices and the loop

// Takes hold of the device in the port's namespace; the process comes back to `home`.
static bool port_open(Port* port, const char* device, int home) {
    char path[128];
    struct ifreq request;
    memset(&request, 0, sizeof(request));
    snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", device);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    snprintf(path, sizeof(path), "/run/netns/%s", port->host.name);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0) { return complain("%s: %s", path, strerror(errno)); }
    bool good = setns(space, CLONE_NEWNET) == 0 || complain("entering %s: %s", path, strerror(errno));
    close(space);
    if (!good) { return false; }
    port->fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    good = port->fd >= 0 || complain("/dev/net/tun: %s", strerror(errno));
    good = good && (ioctl(port->fd, TUNSETIFF, &request) == 0 || complain("%s of %s: %s", device, port->host.name, strerror(errno)));
    return (setns(home, CLONE_NEWNET) == 0 || complain("leaving %s: %s", path, strerror(errno))) && good;
}

static bool wire_open(const char* path, const char* device) {
    Host hosts[HOSTS_MAX];
    if (!table_read(path, hosts, &wire.count)) { return false; }
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    bool good = home >= 0 || complain("/proc/self/ns/net: %s", strerror(errno));
    for (size_t i = 0; i < wire.count; i++) {
        wire.ports[i].host = hosts[i];
        wire.ports[i].fd = -1;
    }
    for (size_t i = 0; good && i < wire.count; i++) { good = port_open(&wire.ports[i], device, home); }
    if (home >= 0) { close(home); }
    return good;
}

static void wire_close(void) {
    while (wire.heap_count > 0) { packet_free(heap_pop()); }
    free(wire.heap);
    for (size_t i = 0; i < wire.count; i++) {
        if (wire.ports[i].fd >= 0) { close(wire.ports[i].fd); }
    }
}

// Sleeps until something is due, can be read, or a signal comes; then reads.
static bool wire_turn(const sigset_t* signals) {
    struct pollfd polls[HOSTS_MAX];
    uint64_t now = now_ns(), next = now + 1000000000u;
    if (wire.heap_count > 0 && wire.heap[0]->due < next) { next = wire.heap[0]->due; }
    for (size_t i = 0; i < wire.count; i++) {
        Port* port = &wire.ports[i];
        bool busy = port->up > now + HURRY;
        if (busy && port->up - HURRY < next) { next = port->up - HURRY; }
        polls[i].fd = port->fd;
        polls[i].events = busy ? 0 : POLLIN;
        polls[i].revents = 0;
    }
    uint64_t wait = next > now ? next - now : 0;
    struct timespec time = {(time_t)(wait / 1000000000u), (long)(wait % 1000000000u)};
    int ready = ppoll(polls, wire.count, &time, signals);
    if (ready < 0) { return errno == EINTR || complain("ppoll: %s", strerror(errno)); }
    now = now_ns();
    for (size_t i = 0; ready > 0 && i < wire.count; i++) {
        if (polls[i].revents & POLLNVAL) { return complain("the device of %s is gone", wire.ports[i].host.name); }
        if ((polls[i].revents & (POLLIN | POLLERR | POLLHUP)) && !collect(&wire.ports[i], now)) {
            return complain("reading from %s: %s", wire.ports[i].host.name, strerror(errno));
        }
    }
    deliver(now_ns());
    return true;
}

int main(int count, char** words) {
    if (count != 3 || strlen(words[2]) >= IFNAMSIZ || !words[2][0]) {
        complain("usage: wire TABLE DEVICE");
        return 2;
    }
    sigset_t block, signals;
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = on_signal;
    sigemptyset(&action.sa_mask);
    sigemptyset(&block);
    const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    for (int i = 0; i < 3; i++) {
        sigaction(numbers[i], &action, NULL);
        sigaddset(&block, numbers[i]);
    }
    sigprocmask(SIG_BLOCK, &block, &signals); // they come while it waits, never in between
    for (int i = 0; i < 3; i++) { sigdelset(&signals, numbers[i]); }
    // The hosts' programs use all cores; a relay that waits for its turn would delay packets by milliseconds. Refused: then it waits.
    struct sched_param first = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &first) != 0) { setpriority(PRIO_PROCESS, 0, -20); }
    prctl(PR_SET_TIMERSLACK, 1000UL); // the usual 50 us would show at high rates
    bool good = wire_open(words[1], words[2]);
    if (good) {
        puts("wire: ready");
        fflush(stdout);
    }
    while (good && !wire_end) {
        good = wire_turn(&signals);
        if (wire_reload) {
            wire_reload = 0;
            table_reload(words[1]);
        }
    }
    for (size_t i = 0; good && i < wire.count; i++) {
        const Port* p = &wire.ports[i];
        printf("wire: %s: %llu packets sent, %llu received; on the way to it %llu lost, %llu dropped\n", p->host.name, (unsigned long long)p->sent,
               (unsigned long long)p->received, (unsigned long long)p->lost, (unsigned long long)p->dropped);
    }
    wire_close();
    return good ? 0 : 1;
}
