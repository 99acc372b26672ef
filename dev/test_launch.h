// test_launch.h - how a job was started (comm/launch.h), by every launcher, in every kind of build, and with every malformed value that
// a line is promised for; and the meeting place of ranks without MPI (comm/rendezvous.h), its ranks as processes of this machine.
#pragma once
#include "../comm/launch.h"
#include "../comm/rendezvous.h"
#include "test.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

static const LaunchBuild launch_test_cpu = {true, false}, launch_test_plain = {false, false};
static const LaunchBuild launch_test_gpu = {false, true}, launch_test_gpu_mpi = {true, true};

// With these variables and no others: "NAME=VALUE NAME=VALUE".
static bool launch_test_find(const char* variables, LaunchBuild build, Launch* launch, Error* error) {
    char text[1024], *list[32], **saved = environ, *rest = NULL;
    int count = 0;
    snprintf(text, sizeof(text), "%s", variables);
    for (char* v = strtok_r(text, " ", &rest); v && count < 31; v = strtok_r(NULL, " ", &rest)) { list[count++] = v; }
    list[count] = NULL;
    environ = list;
    bool good = launch_find_as(launch, build, error);
    environ = saved;
    return good;
}

typedef struct {
    const char* variables;
    LaunchBuild build;
    LaunchKind kind;
    int size, rank, local_rank, local_size;
    const char *by, *master; // master NULL: none
    int port;
} LaunchCase;

#define LAUNCH_TEST_OPEN_MPI                                                                                                               \
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3"
#define LAUNCH_TEST_TORCHRUN "WORLD_SIZE=8 RANK=5 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node7"
#define LAUNCH_TEST_SLURM                                                                                                                  \
    "SLURM_JOB_ID=1234567 SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_LOCALID=2 SLURM_NODEID=1 SLURM_STEP_NUM_TASKS=7 "                           \
    "SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_STEP_NODELIST=gpu[003-004]"

static void launch_test_launchers(void) {
    const LaunchBuild cpu = launch_test_cpu, plain = launch_test_plain, gpu = launch_test_gpu, both = launch_test_gpu_mpi;
    const LaunchCase cases[] = {
        {"", cpu, LAUNCH_ALONE, 1, 0, 0, 1, "", NULL, 29500},
        {"", plain, LAUNCH_ALONE, 1, 0, 0, 1, "", NULL, 29500},
        {LAUNCH_TEST_OPEN_MPI, cpu, LAUNCH_BY_MPI, 4, 3, 1, 2, "mpirun (Open MPI)", NULL, 29500},
        {LAUNCH_TEST_OPEN_MPI " " LAUNCH_TEST_TORCHRUN, cpu, LAUNCH_BY_MPI, 4, 3, 1, 2, "mpirun (Open MPI)", NULL, 29500},
        {LAUNCH_TEST_OPEN_MPI " " LAUNCH_TEST_TORCHRUN, both, LAUNCH_BY_MPI, 4, 3, 1, 2, "mpirun (Open MPI)", NULL, 29500},
        {LAUNCH_TEST_OPEN_MPI " " LAUNCH_TEST_TORCHRUN, gpu, LAUNCH_BY_TCP, 8, 5, 1, 4, "torchrun", "node7", 29500},
        {LAUNCH_TEST_OPEN_MPI " MASTER_ADDR=10.0.0.1 MASTER_PORT=77", gpu, LAUNCH_BY_TCP, 4, 3, 1, 2, "mpirun (Open MPI)", "10.0.0.1", 77},
        {"OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0", plain, LAUNCH_ALONE, 1, 0, 0, 1, "mpirun (Open MPI)", NULL, 29500},
        {"PMI_SIZE=3 PMI_RANK=2 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=3", cpu, LAUNCH_BY_MPI, 3, 2, 2, 3, "mpirun (PMI)", NULL, 29500},
        {"PMI_SIZE=3 PMI_RANK=2", both, LAUNCH_BY_MPI, 3, 2, -1, -1, "mpirun (PMI)", NULL, 29500},
        {"PMI_SIZE=7 PMI_RANK=6 " LAUNCH_TEST_SLURM, cpu, LAUNCH_BY_MPI, 7, 6, -1, -1, "srun (PMI)", NULL, 29500},
        {"PMIX_RANK=6 " LAUNCH_TEST_SLURM, cpu, LAUNCH_BY_MPI, 7, 6, 2, 3, "srun (PMIx)", NULL, 29500},
        {"PMIX_RANK=6 " LAUNCH_TEST_SLURM, gpu, LAUNCH_BY_TCP, 7, 6, 2, 3, "srun", "gpu003", 24567},
        {"PMI_SIZE=7 PMI_RANK=6 " LAUNCH_TEST_SLURM, gpu, LAUNCH_BY_TCP, 7, 6, 2, 3, "srun", "gpu003", 24567},
        {LAUNCH_TEST_SLURM, both, LAUNCH_BY_TCP, 7, 6, 2, 3, "srun", "gpu003", 24567},
        {LAUNCH_TEST_SLURM " MASTER_ADDR=fe80::1 MASTER_PORT=1234", gpu, LAUNCH_BY_TCP, 7, 6, 2, 3, "srun", "fe80::1", 1234},
        {LAUNCH_TEST_OPEN_MPI " " LAUNCH_TEST_SLURM, cpu, LAUNCH_BY_MPI, 4, 3, 1, 2, "mpirun (Open MPI)", NULL, 29500},
        {LAUNCH_TEST_OPEN_MPI " MASTER_ADDR=m " LAUNCH_TEST_SLURM, gpu, LAUNCH_BY_TCP, 4, 3, 1, 2, "mpirun (Open MPI)", "m", 29500},
        {"SLURM_STEP_ID=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=9 SLURM_JOB_NODELIST=a,b", gpu, LAUNCH_BY_TCP, 2, 1, -1, -1, "srun",
         "a", 20071},
        {"SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_JOB_ID=9", cpu, LAUNCH_ALONE, 1, 0, 0, 1, "", NULL, 29500}, // a batch script
        {"SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8", gpu, LAUNCH_ALONE, 1, 0, 0, 1, "", NULL, 29500}, // an interactive shell
        {LAUNCH_TEST_TORCHRUN, gpu, LAUNCH_BY_TCP, 8, 5, 1, 4, "torchrun", "node7", 29500},
        {LAUNCH_TEST_TORCHRUN " MASTER_PORT=65535", both, LAUNCH_BY_TCP, 8, 5, 1, 4, "torchrun", "node7", 65535},
        {"WORLD_SIZE=2 RANK=0 MASTER_ADDR=[::1]:90", gpu, LAUNCH_BY_TCP, 2, 0, -1, -1, "torchrun", "::1", 90},
        {"WORLD_SIZE=1 RANK=0", cpu, LAUNCH_ALONE, 1, 0, 0, 1, "torchrun", NULL, 29500},
        {"WORLD_SIZE= RANK= MASTER_ADDR=x MASTER_PORT=y", gpu, LAUNCH_ALONE, 1, 0, 0, 1, "", NULL, 29500},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const LaunchCase* c = &cases[i];
        Launch l;
        Error error = {{0}};
        CHECK_OK(launch_test_find(c->variables, c->build, &l, &error), error);
        CHECK(l.kind == c->kind && l.size == c->size && l.rank == c->rank, "\"%s\": kind %d, rank %d of %d", c->variables, (int)l.kind,
              l.rank, l.size);
        CHECK(l.local_rank == c->local_rank && l.local_size == c->local_size, "\"%s\": local rank %d of %d", c->variables, l.local_rank,
              l.local_size);
        CHECK(strcmp(l.by, c->by) == 0, "\"%s\": started by \"%s\"", c->variables, l.by);
        CHECK(strcmp(l.master, c->master ? c->master : "") == 0 && l.port == c->port, "\"%s\": %s:%d", c->variables, l.master, l.port);
    }
}

static void launch_test_refusals(void) {
    typedef struct {
        const char* variables;
        LaunchBuild build;
        int rank; // that the caller learns all the same
        const char* part;
    } Case;
    const LaunchBuild cpu = launch_test_cpu, plain = launch_test_plain, gpu = launch_test_gpu;
    const Case cases[] = {
        {LAUNCH_TEST_OPEN_MPI, plain, 3, "was built without MPI, yet mpirun (Open MPI) started 4 processes"},
        {LAUNCH_TEST_OPEN_MPI, gpu, 3, "set MASTER_ADDR"},
        {LAUNCH_TEST_TORCHRUN, cpu, 5, "use mpirun -np 8"},
        {LAUNCH_TEST_TORCHRUN, plain, 5, "was built without MPI, yet torchrun started 8"},
        {LAUNCH_TEST_SLURM, cpu, 6, "srun --mpi=pmix"},
        {LAUNCH_TEST_SLURM, plain, 6, "was built without MPI, yet srun started 7"},
        {"WORLD_SIZE=4", cpu, 0, "WORLD_SIZE is set and RANK is not"},
        {"RANK=2", cpu, 2, "RANK is set and WORLD_SIZE is not"},
        {"OMPI_COMM_WORLD_RANK=1", cpu, 1, "OMPI_COMM_WORLD_SIZE is not"},
        {"PMIX_RANK=1", cpu, 1, "PMIX_RANK is set and SLURM_NTASKS is not"},
        {"WORLD_SIZE=4 RANK=4 MASTER_ADDR=x", gpu, 4, "RANK=4 and WORLD_SIZE=4"},
        {"WORLD_SIZE=0 RANK=0", gpu, 0, "WORLD_SIZE=0"},
        {"WORLD_SIZE=4 RANK=abc MASTER_ADDR=x", gpu, 0, "RANK is \"abc\""},
        {"WORLD_SIZE=4x RANK=1 MASTER_ADDR=x", gpu, 1, "WORLD_SIZE is \"4x\""},
        {"WORLD_SIZE=-4 RANK=1 MASTER_ADDR=x", gpu, 1, "WORLD_SIZE is \"-4\""},
        {"WORLD_SIZE=99999999999999999999 RANK=1 MASTER_ADDR=x", gpu, 1, "expected a whole number from 0 to 1048576"},
        {"WORLD_SIZE=4294967298 RANK=1 MASTER_ADDR=x", gpu, 1, "WORLD_SIZE is \"4294967298\""},
        {"WORLD_SIZE=4 RANK=1", gpu, 1, "MASTER_ADDR is not set"},
        {"WORLD_SIZE=4 RANK=1 MASTER_ADDR=x MASTER_PORT=0", gpu, 1, "MASTER_PORT is 0"},
        {"WORLD_SIZE=4 RANK=1 MASTER_ADDR=x MASTER_PORT=70000", gpu, 1, "MASTER_PORT is \"70000\""},
        {"WORLD_SIZE=4 RANK=1 MASTER_ADDR=x:0", gpu, 1, "MASTER_ADDR is \"x:0\""},
        {"WORLD_SIZE=4 RANK=1 MASTER_ADDR=[::1", gpu, 1, "MASTER_ADDR is \"[::1\""},
        {"WORLD_SIZE=4 RANK=1 MASTER_ADDR=:80", gpu, 1, "MASTER_ADDR is \":80\""},
        {"WORLD_SIZE=4 RANK=1 MASTER_ADDR=x LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", gpu, 1, "LOCAL_RANK=2 with 2 ranks"},
        {"WORLD_SIZE=4 RANK=1 MASTER_ADDR=x LOCAL_RANK=2 LOCAL_WORLD_SIZE=5", gpu, 1, "5 ranks on this node and 4 in all"},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", gpu, 1, "cannot find the first node"},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n[", gpu, 1,
         "cannot find the first node in SLURM_STEP_NODELIST \"n[\""},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Launch l;
        Error error;
        CHECK_FAILS(launch_test_find(cases[i].variables, cases[i].build, &l, &error), error, cases[i].part);
        CHECK(l.rank == cases[i].rank, "\"%s\": rank %d, expected %d", cases[i].variables, l.rank, cases[i].rank);
        CHECK(!strchr(error.text, '\n'), "one line: %s", error.text);
    }
}

static void launch_test_node_lists(void) {
    const char* const good[][2] = {
        {"node[003-005,7],x1", "node003"}, {"x1", "x1"},     {"n1,n[2-3]", "n1"}, {"n[7,9-11]", "n7"},          {"a[1-2]b[3-4]c", "a1b3c"},
        {"rack-1-n[08-09]", "rack-1-n08"}, {"n[12]", "n12"}, {"[1-3]n", "1n"},    {"10.0.0.[7-8]", "10.0.0.7"},
    };
    const char* const bad[] = {"", ",x", "n[", "n[]", "n[-3]", "n[1", "n]1", "n[1[2]]", "n[a-b]", "a b", "n[1-2", "[", "]"};
    char host[16];
    for (size_t i = 0; i < COUNT_OF(good); i++) {
        host[0] = 0;
        CHECK(launch_first_host(good[i][0], host, sizeof(host)) && strcmp(host, good[i][1]) == 0, "%s: %s, expected %s", good[i][0], host,
              good[i][1]);
    }
    for (size_t i = 0; i < COUNT_OF(bad); i++) { CHECK(!launch_first_host(bad[i], host, sizeof(host)), "\"%s\" gave %s", bad[i], host); }
    CHECK(launch_first_host("a23456789012345", host, sizeof(host)), "15 characters fit");
    CHECK(!launch_first_host("a234567890123456", host, sizeof(host)), "16 characters and the end do not fit");

    const char* tasks = "4(x2),3,1(x10)";
    const int expected[] = {4, 4, 3, 1};
    for (int i = 0; i < 4; i++) { CHECK(launch_tasks_on_node(tasks, i) == expected[i], "node %d: %d", i, launch_tasks_on_node(tasks, i)); }
    CHECK(launch_tasks_on_node(tasks, 12) == 1 && launch_tasks_on_node(tasks, 13) == -1, "the last node");
    const char* const malformed[] = {"", "x", "4(x2", "4(y2)", "0", "-3", "4;5"};
    for (size_t i = 0; i < COUNT_OF(malformed); i++) { CHECK(launch_tasks_on_node(malformed[i], 1) == -1, "\"%s\"", malformed[i]); }
    CHECK(launch_tasks_on_node(NULL, 0) == -1 && launch_tasks_on_node(tasks, -1) == -1, "nothing is said");
}

static void launch_test_override(void) {
    typedef struct {
        const char* variables;
        LaunchBuild build;
        int ranks, rank, per_node;
        const char *server, *part; // part NULL: accepted
    } Case;
    const LaunchBuild cpu = launch_test_cpu, plain = launch_test_plain, gpu = launch_test_gpu, both = launch_test_gpu_mpi;
    const Case cases[] = {
        {"", cpu, 0, -1, 0, "", NULL},
        {"", plain, 1, 0, 8, "", NULL}, // what a script for one process may say
        {"", gpu, 1, 1, 0, "", "expected less"},
        {"", gpu, 0, 3, 0, "", "expected less"},
        {"", gpu, 4, -1, 0, "host", "expected --rank"},
        {"", gpu, 4, 1, 0, "", "expected --master"},
        {"", gpu, 4, 4, 0, "host", "expected less"},
        {"", gpu, 4, 1, 0, "host:99999", "--master (-ps) is \"host:99999\""},
        {"", gpu, 4, 1, 0, "a b", "--master (-ps) is \"a b\""},
        {"", gpu, 1 << 21, 1, 0, "host", "at most 1048576"},
        {"", cpu, 4, 1, 0, "host", "use mpirun -np 4"},
        {"", plain, 4, 1, 0, "host", "built without MPI"},
        {LAUNCH_TEST_OPEN_MPI, cpu, 0, -1, 0, "", NULL},
        {LAUNCH_TEST_OPEN_MPI, cpu, 4, 3, 2, "", NULL},
        {LAUNCH_TEST_OPEN_MPI, cpu, 4, 3, 8, "", NULL}, // fewer on this node than there may be
        {LAUNCH_TEST_OPEN_MPI, cpu, 5, -1, 0, "", "--ranks (-pn) is 5, but mpirun (Open MPI) says 4"},
        {LAUNCH_TEST_OPEN_MPI, cpu, 0, 2, 0, "", "--rank (-pr) is 2, but mpirun (Open MPI) says 3"},
        {LAUNCH_TEST_OPEN_MPI, cpu, 0, -1, 1, "", "--ranks-per-node (-pg) is 1, but mpirun (Open MPI) says 2"},
        {LAUNCH_TEST_OPEN_MPI, cpu, 0, -1, 0, "host", "find each other by MPI"},
        {LAUNCH_TEST_TORCHRUN, gpu, 7, -1, 0, "", "but torchrun says 8"},
        {"WORLD_SIZE=1 RANK=0", both, 2, -1, 0, "host", "but torchrun says 1"},
    };
    Launch l;
    Error error;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const Case* c = &cases[i];
        CHECK_OK(launch_test_find(c->variables, c->build, &l, &error), error);
        error.text[0] = 0;
        bool good = launch_override_as(&l, c->build, c->ranks, c->rank, c->per_node, c->server, &error);
        CHECK(good == !c->part && (good || strstr(error.text, c->part)), "case %zu: expected \"%s\", found \"%s\"", i,
              c->part ? c->part : "", error.text);
    }
    launch_test_find("", gpu, &l, &error);
    CHECK_OK(launch_override_as(&l, gpu, 7, 5, 4, "node1:1234", &error), error);
    CHECK(l.kind == LAUNCH_BY_TCP && l.size == 7 && l.rank == 5 && l.local_rank == 1 && l.local_size == 3, "rank %d, local %d of %d",
          l.rank, l.local_rank, l.local_size);
    CHECK(strcmp(l.master, "node1") == 0 && l.port == 1234, "%s:%d", l.master, l.port);
    launch_test_find(LAUNCH_TEST_OPEN_MPI, both, &l, &error);
    CHECK_OK(launch_override_as(&l, both, 0, -1, 0, "node1", &error), error); // MPI's ranks, but they meet over TCP
    CHECK(l.kind == LAUNCH_BY_TCP && l.size == 4 && l.rank == 3 && l.port == LAUNCH_PORT, "kind %d, port %d", (int)l.kind, l.port);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The meeting place. Each rank is a child process; what it found is in memory shared with the test.

#define RENDEZVOUS_TEST_RANKS 4

typedef struct {
    bool done, good;
    int all[8];
    double seconds;
    Error error;
} RendezvousSeen;

static RendezvousSeen* rendezvous_test_seen(void) {
    static RendezvousSeen* seen = NULL;
    if (!seen) {
        void* memory = mmap(NULL, sizeof(RendezvousSeen) * RENDEZVOUS_TEST_RANKS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                            0);
        seen = memory == MAP_FAILED ? NULL : (RendezvousSeen*)memory;
    }
    return seen;
}

static Launch rendezvous_test_launch(int size, int rank, const char* master, int port) {
    Launch l;
    memset(&l, 0, sizeof(l));
    l.kind = LAUNCH_BY_TCP;
    l.size = size;
    l.rank = rank;
    l.port = port;
    snprintf(l.master, sizeof(l.master), "%s", master);
    return l;
}

// A listening socket on a port of the system's choice.
static int rendezvous_test_listener(int* port) {
    struct sockaddr_in address;
    socklen_t length = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&address, 0, sizeof(address));
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bool good = bind(fd, (struct sockaddr*)&address, sizeof(address)) == 0 && listen(fd, 16) == 0;
    good = good && getsockname(fd, (struct sockaddr*)&address, &length) == 0;
    CHECK(good, "cannot listen on this machine: %s", strerror(errno));
    *port = ntohs(address.sin_port);
    return fd;
}

static int rendezvous_test_port(void) {
    int port = 0;
    close(rendezvous_test_listener(&port));
    return port;
}

static void rendezvous_test_sleep(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static int rendezvous_test_rounds = 1; // meetings of the same ranks at the same port, one right after the other

// A child that comes as l.rank after `delay` seconds and leaves what it found in seen[slot]. Each brings 100 + its rank.
static pid_t rendezvous_test_rank(int slot, Launch l, double delay, double timeout) {
    RendezvousSeen* seen = rendezvous_test_seen() + slot;
    memset(seen, 0, sizeof(*seen));
    fflush(NULL);
    pid_t child = fork();
    if (child != 0) { return child; }
    alarm(20);
    rendezvous_test_sleep(delay);
    int mine = 100 + l.rank;
    double start = seconds_now();
    seen->good = true;
    for (int i = 0; seen->good && i < rendezvous_test_rounds; i++) {
        memset(seen->all, 0, sizeof(seen->all));
        seen->good = rendezvous_gather(&l, &mine, sizeof(mine), seen->all, timeout, &seen->error);
    }
    seen->seconds = seconds_now() - start;
    seen->done = true;
    _exit(0);
}

static void rendezvous_test_wait(const pid_t* children, int count) {
    for (int i = 0; i < count; i++) {
        int status = 0;
        waitpid(children[i], &status, 0);
        CHECK(rendezvous_test_seen()[i].done && WIFEXITED(status), "process %d did not end by itself", i);
    }
}

static void rendezvous_test_check_good(int count, int size) {
    for (int i = 0; i < count; i++) {
        const RendezvousSeen* seen = &rendezvous_test_seen()[i];
        CHECK(seen->good, "process %d: %s", i, seen->error.text);
        for (int r = 0; seen->good && r < size; r++) { CHECK(seen->all[r] == 100 + r, "process %d has %d of rank %d", i, seen->all[r], r); }
    }
}

static void rendezvous_test_check_fails(int slot, const char* part) {
    const RendezvousSeen* seen = &rendezvous_test_seen()[slot];
    CHECK(!seen->good && strstr(seen->error.text, part), "process %d: expected \"%s\", found \"%s\"", slot, part,
          seen->good ? "success" : seen->error.text);
}

static void rendezvous_test_meeting(void) {
    const double delays[][3] = {{0, 0, 0}, {0.2, 0, 0}, {0, 0.1, 0.2}};
    for (size_t k = 0; k < COUNT_OF(delays); k++) {
        struct addrinfo* found = NULL; // a bare system may have no file of host names
        bool named = getaddrinfo("localhost", NULL, NULL, &found) == 0;
        if (named) { freeaddrinfo(found); }
        const char* master = k == 1 && named ? "localhost" : "127.0.0.1";
        int port = rendezvous_test_port();
        pid_t children[3];
        for (int r = 0; r < 3; r++) { children[r] = rendezvous_test_rank(r, rendezvous_test_launch(3, r, master, port), delays[k][r], 10); }
        rendezvous_test_wait(children, 3);
        rendezvous_test_check_good(3, 3);
    }
    Launch alone = rendezvous_test_launch(1, 0, "", 0);
    int mine = 7, all = 0;
    Error error;
    CHECK_OK(rendezvous_gather(&alone, &mine, sizeof(mine), &all, 1, &error), error);
    CHECK(all == 7, "one rank meets itself: %d", all);
    CHECK_FAILS(rendezvous_gather(&alone, &mine, (size_t)1 << 40, &all, 1, &error), error, "expected 1 to");
}

static void rendezvous_test_again(void) { // nobody gets lost between two meetings
    int port = rendezvous_test_port();
    pid_t children[3];
    rendezvous_test_rounds = 5;
    for (int r = 0; r < 3; r++) { children[r] = rendezvous_test_rank(r, rendezvous_test_launch(3, r, "127.0.0.1", port), 0, 10); }
    rendezvous_test_rounds = 1;
    rendezvous_test_wait(children, 3);
    rendezvous_test_check_good(3, 3);
}

static void rendezvous_test_ipv6(void) {
    struct sockaddr_in6 address;
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), port = rendezvous_test_port();
    memset(&address, 0, sizeof(address));
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    bool here = fd >= 0 && bind(fd, (struct sockaddr*)&address, sizeof(address)) == 0;
    if (fd >= 0) { close(fd); }
    CHECK(true, "without IPv6 on this machine nothing is tried");
    if (!here) { return; }
    pid_t children[2];
    for (int r = 0; r < 2; r++) { children[r] = rendezvous_test_rank(r, rendezvous_test_launch(2, r, "::1", port), 0, 10); }
    rendezvous_test_wait(children, 2);
    rendezvous_test_check_good(2, 2);
}

// A connection to rank 0, as soon as it listens.
static int rendezvous_test_visit(int port, const void* says, size_t bytes) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof(address));
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
    for (int i = 0; i < 200; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (struct sockaddr*)&address, sizeof(address)) == 0) {
            if (bytes > 0) { CHECK(send(fd, says, bytes, MSG_NOSIGNAL) == (ssize_t)bytes, "cannot send: %s", strerror(errno)); }
            return fd;
        }
        close(fd);
        rendezvous_test_sleep(0.01);
    }
    CHECK(false, "rank 0 does not listen");
    return -1;
}

static void rendezvous_test_strangers(void) {
    enum { SILENT = 90 }; // more than are kept
    int port = rendezvous_test_port(), fds[SILENT + 4];
    RendezvousGreeting hello = {{0}, RENDEZVOUS_VERSION, 3, 1, sizeof(int)};
    memcpy(hello.magic, rendezvous_magic, sizeof(hello.magic));
    char garbage[4096];
    memset(garbage, 'G', sizeof(garbage));
    pid_t children[3];
    children[0] = rendezvous_test_rank(0, rendezvous_test_launch(3, 0, "127.0.0.1", port), 0, 10);
    fds[0] = rendezvous_test_visit(port, garbage, sizeof(garbage));
    fds[1] = rendezvous_test_visit(port, &hello, 11);            // half a greeting
    fds[2] = rendezvous_test_visit(port, &hello, sizeof(hello)); // as rank 1, but it leaves before it has brought anything
    for (int i = 0; i < SILENT; i++) { fds[4 + i] = rendezvous_test_visit(port, NULL, 0); }
    hello.rank = 77;
    fds[3] = rendezvous_test_visit(port, &hello, sizeof(hello)); // no such rank
    rendezvous_test_sleep(0.1);
    close(fds[2]);
    children[1] = rendezvous_test_rank(1, rendezvous_test_launch(3, 1, "127.0.0.1", port), 0.1, 10);
    children[2] = rendezvous_test_rank(2, rendezvous_test_launch(3, 2, "127.0.0.1", port), 0.2, 10);
    rendezvous_test_wait(children, 3);
    rendezvous_test_check_good(3, 3);
    for (int i = 0; i < SILENT + 4; i++) {
        if (i != 2 && fds[i] >= 0) { close(fds[i]); }
    }
}

static void rendezvous_test_wrong_ranks(void) {
    int port = rendezvous_test_port();
    pid_t children[4];
    children[0] = rendezvous_test_rank(0, rendezvous_test_launch(2, 0, "127.0.0.1", port), 0, 10);
    children[1] = rendezvous_test_rank(1, rendezvous_test_launch(2, 1, "127.0.0.1", port), 0.3, 10);
    children[2] = rendezvous_test_rank(2, rendezvous_test_launch(4, 2, "127.0.0.1", port), 0, 10);
    children[3] = rendezvous_test_rank(3, rendezvous_test_launch(4, 1, "127.0.0.1", port), 0, 10);
    rendezvous_test_wait(children, 4);
    rendezvous_test_check_good(2, 2);
    rendezvous_test_check_fails(2, "belongs to a job of 4 ranks, but at 127.0.0.1");
    rendezvous_test_check_fails(3, "one of 2 ranks meets");

    port = rendezvous_test_port(); // rank 1 twice: the second is turned away, the job goes on
    children[0] = rendezvous_test_rank(0, rendezvous_test_launch(3, 0, "127.0.0.1", port), 0, 10);
    children[1] = rendezvous_test_rank(1, rendezvous_test_launch(3, 1, "127.0.0.1", port), 0, 10);
    children[2] = rendezvous_test_rank(2, rendezvous_test_launch(3, 2, "127.0.0.1", port), 0.5, 10);
    children[3] = rendezvous_test_rank(3, rendezvous_test_launch(3, 1, "127.0.0.1", port), 0.25, 10);
    rendezvous_test_wait(children, 4);
    rendezvous_test_check_good(3, 3);
    rendezvous_test_check_fails(3, "as rank 1 already");
}

static void rendezvous_test_missing(void) {
    int port = rendezvous_test_port();
    pid_t children[3];
    children[0] = rendezvous_test_rank(0, rendezvous_test_launch(4, 0, "127.0.0.1", port), 0, 0.4);
    children[1] = rendezvous_test_rank(1, rendezvous_test_launch(4, 1, "127.0.0.1", port), 0, 0.4);
    children[2] = rendezvous_test_rank(2, rendezvous_test_launch(4, 3, "127.0.0.1", port), 0, 0.4);
    rendezvous_test_wait(children, 3);
    rendezvous_test_check_fails(0, "rank 2 did not come to 127.0.0.1:");
    rendezvous_test_check_fails(0, "within 0.4 s (3 of 4 ranks are here)");
    rendezvous_test_check_fails(1, "rank 2 did not come to 127.0.0.1:");
    rendezvous_test_check_fails(2, "rank 2 did not come to 127.0.0.1:");
    for (int i = 0; i < 3; i++) {
        CHECK(rendezvous_test_seen()[i].seconds < 1.5, "process %d took %.2f s", i, rendezvous_test_seen()[i].seconds);
    }
}

static void rendezvous_test_no_place(void) {
    int port = 0, listener = rendezvous_test_listener(&port);
    pid_t children[3];
    children[0] = rendezvous_test_rank(0, rendezvous_test_launch(2, 0, "127.0.0.1", port), 0, 5);
    children[1] = rendezvous_test_rank(1, rendezvous_test_launch(2, 1, "127.0.0.1", rendezvous_test_port()), 0, 0.3);
    children[2] = rendezvous_test_rank(2, rendezvous_test_launch(2, 1, "no-such-host.invalid", port), 0, 0.3);
    rendezvous_test_wait(children, 3);
    rendezvous_test_check_fails(0, "is in use");
    rendezvous_test_check_fails(1, "could not reach rank 0 at 127.0.0.1");
    rendezvous_test_check_fails(1, "Connection refused");
    rendezvous_test_check_fails(2, "cannot find the host \"no-such-host.invalid\"");
    CHECK(rendezvous_test_seen()[0].seconds < 1, "a port in use is known at once");

    children[0] = rendezvous_test_rank(0, rendezvous_test_launch(2, 1, "127.0.0.1", port), 0, 5); // another program answers
    int fd = accept(listener, NULL, NULL);
    const char answer[] = "SSH-2.0-something that is no rank\r\n";
    CHECK(send(fd, answer, sizeof(answer), MSG_NOSIGNAL) == sizeof(answer), "cannot send: %s", strerror(errno));
    rendezvous_test_wait(children, 1);
    rendezvous_test_check_fails(0, "another program");
    close(fd);
    close(listener);
}

static const TestRow launch_tests[] = {
    {"launch: every launcher in every kind of build", launch_test_launchers},
    {"launch: what is malformed or does not fit gets one line", launch_test_refusals},
    {"launch: Slurm's lists of nodes and tasks", launch_test_node_lists},
    {"launch: the command line agrees with the launcher", launch_test_override},
    {"rendezvous: ranks that come in any order", rendezvous_test_meeting},
    {"rendezvous: several meetings at one port", rendezvous_test_again},
    {"rendezvous: over IPv6", rendezvous_test_ipv6},
    {"rendezvous: strangers do no harm", rendezvous_test_strangers},
    {"rendezvous: ranks of another job, and a rank that comes twice", rendezvous_test_wrong_ranks},
    {"rendezvous: a rank that does not come is named to all", rendezvous_test_missing},
    {"rendezvous: a port in use, nobody there, no such host, another program", rendezvous_test_no_place},
};
