// launch.h - how this process was started: alone, by mpirun or srun, or torchrun-style by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
// and MASTER_PORT. Only reads the environment; nothing is opened. The CPU program's ranks talk over MPI alone; the GPU program's use
// NCCL and find each other by MPI or at a meeting place (LAUNCH_BY_TCP, rendezvous.h).
//
// Several processes that each take themselves for the whole job would write over each other's files. So whatever says that there are
// several is either followed or refused, never passed over.
#pragma once
#include "../kernels/base.h"

#define LAUNCH_PORT 29500          // of the meeting place, where nothing else is said
#define LAUNCH_MAX_RANKS (1 << 20) // more is a mistake

typedef enum { LAUNCH_ALONE, LAUNCH_BY_MPI, LAUNCH_BY_TCP } LaunchKind; // TCP: the ranks find each other at master:port

typedef struct {
    LaunchKind kind;
    int size, rank;             // as the environment says; MPI's own count rules once it is open
    int local_rank, local_size; // on this node, -1 when unknown
    char master[256];
    int port;
    const char* by; // "mpirun (Open MPI)", "srun", "torchrun", for messages
} Launch;

// What the program was built with; a value, so that tests try all kinds.
typedef struct {
    bool mpi, gpu;
} LaunchBuild;

static inline LaunchBuild launch_build(void) {
    LaunchBuild build = {false, false};
#ifdef USE_MPI
    build.mpi = true;
#endif
#if defined(__CUDACC__) && !defined(CUDA_ON_CPU)
    build.gpu = true;
#endif
    return build;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Reading variables

static const char* launch_text(const char* name) {
    const char* text = name ? getenv(name) : NULL;
    return text && text[0] ? text : NULL;
}

// A whole number from 0 to `most` and nothing else.
static bool launch_parse(const char* text, long long most, long long* value) {
    char* end = NULL;
    errno = 0;
    *value = text[0] >= '0' && text[0] <= '9' ? strtoll(text, &end, 10) : -1;
    return end && *end == 0 && errno == 0 && *value >= 0 && *value <= most;
}

// *value: the number in an environment variable, -1 where it is not set.
static bool launch_number(const char* name, int most, int* value, Error* error) {
    const char* text = launch_text(name);
    long long number = -1;
    *value = -1;
    if (text && !launch_parse(text, most, &number)) {
        return fail(error, "the environment variable %s is \"%.40s\"; expected a whole number from 0 to %d: correct it or unset it", name,
                    text, most);
    }
    *value = (int)number;
    return true;
}

// The first host of Slurm's short form: that of "node[003-005,7],x1" is node003. False where the list is malformed.
static bool launch_first_host(const char* list, char* host, size_t capacity) {
    size_t length = 0, opened = 0;
    bool inside = false, taking = true; // within brackets; and there still in the first number
    for (const char* p = list; *p && (inside || *p != ','); p++) {
        if (*p == '[') {
            if (inside) { return false; }
            inside = true;
            opened = length;
        } else if (*p == ']') {
            if (!inside || length == opened) { return false; }
            inside = false;
            taking = true;
        } else if (inside && (*p == '-' || *p == ',')) {
            taking = false;
        } else if (inside && (*p < '0' || *p > '9')) {
            return false;
        } else if (taking) {
            if (length + 1 >= capacity || (unsigned char)*p <= ' ') { return false; }
            host[length++] = *p;
        }
    }
    host[length] = 0;
    return length > 0 && !inside;
}

// Tasks on a node, from Slurm's short form: "4(x2),3" is 4, 4, 3. -1 where it is not said.
static int launch_tasks_on_node(const char* list, int node) {
    while (list && *list && node >= 0) {
        int tasks = 0, times = 1, used = 0;
        if (sscanf(list, "%9d%n", &tasks, &used) != 1 || tasks <= 0) { return -1; }
        list += used;
        used = 0;
        if (*list == '(' && (sscanf(list, "(x%9d)%n", &times, &used) != 1 || used == 0)) { return -1; }
        list += used;
        if (node < times) { return tasks; }
        node -= times;
        if (*list && *list++ != ',') { return -1; }
    }
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Launchers

typedef enum { LAUNCHER_OPEN_MPI, LAUNCHER_PMI, LAUNCHER_PMIX, LAUNCHER_TORCHRUN, LAUNCHER_SLURM, LAUNCHERS } LauncherKind;

typedef struct {
    bool mpi;
    const char *size, *rank, *local_rank, *local_size; // names of variables
    const char* by;
} Launcher;

static const Launcher launchers[LAUNCHERS] = {
    {true, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun (Open MPI)"},
    {true, "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpirun (PMI)"},
    {true, "SLURM_STEP_NUM_TASKS", "PMIX_RANK", "SLURM_LOCALID", NULL, "srun (PMIx)"},
    {false, "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun"},
    {false, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", NULL, "srun"},
};

// Whether srun started this process. A batch script and an interactive shell have many of the variables, too, but no step or one of
// the reserved numbers near 2^32.
static bool launch_in_slurm_step(void) {
    const char* step = launch_text("SLURM_STEP_ID");
    long long number = 0;
    return step && launch_text("SLURM_PROCID") && launch_parse(step, 0xfffffff0LL, &number);
}

static bool launch_same(const char* name, const char* other) {
    const char *a = launch_text(name), *b = launch_text(other);
    return a && b && strcmp(a, b) == 0;
}

static bool launcher_present(LauncherKind kind, LaunchBuild build) {
    const Launcher* l = &launchers[kind];
    if (kind == LAUNCHER_SLURM) { return launch_in_slurm_step(); }
    // srun sets PMI's variables for programs with MPI, and by default; to one without they mean nothing
    bool by_srun = launch_in_slurm_step() && launch_same(l->rank, "SLURM_PROCID");
    if (!build.mpi && by_srun && (kind == LAUNCHER_PMI || kind == LAUNCHER_PMIX)) { return false; }
    return launch_text(l->rank) || (kind != LAUNCHER_PMIX && launch_text(l->size));
}

// NULL: nobody, this process is alone. mpirun inside a Slurm job inherits the variables of the step that started its daemons, hence
// Slurm's come last.
static const Launcher* launch_launcher(LaunchBuild build) {
    static const LauncherKind with_mpi[] = {LAUNCHER_OPEN_MPI, LAUNCHER_PMI, LAUNCHER_PMIX, LAUNCHER_TORCHRUN, LAUNCHER_SLURM};
    static const LauncherKind without[] = {LAUNCHER_TORCHRUN, LAUNCHER_OPEN_MPI, LAUNCHER_PMI, LAUNCHER_PMIX, LAUNCHER_SLURM};
    for (int i = 0; i < LAUNCHERS; i++) {
        LauncherKind kind = build.mpi ? with_mpi[i] : without[i];
        if (launcher_present(kind, build)) { return &launchers[kind]; }
    }
    return NULL;
}

// Fills size, rank, local_rank and local_size.
static bool launch_numbers(Launch* launch, const Launcher* l, Error* error) {
    int size = -1, rank = -1, node = -1;
    const char* size_name = l->size;
    if (!launch_number(l->rank, LAUNCH_MAX_RANKS, &rank, error)) { return false; }
    launch->rank = rank > 0 ? rank : 0;
    if (l->local_size == NULL && !launch_text(size_name)) { size_name = "SLURM_NTASKS"; }
    if (!launch_number(size_name, LAUNCH_MAX_RANKS, &size, error)) { return false; }
    if (size < 0 || rank < 0) {
        return fail(error, "the environment variable %s is set and %s is not (%s sets both): set or unset both",
                    size < 0 ? l->rank : size_name, size < 0 ? size_name : l->rank, l->by);
    }
    if (rank >= size) {
        return fail(error, "the environment says %s=%d and %s=%d; ranks are counted from 0, so expected a rank below %d", l->rank, rank,
                    size_name, size, size);
    }
    launch->size = size;
    if (!launch_number(l->local_rank, LAUNCH_MAX_RANKS, &launch->local_rank, error)) { return false; }
    if (l->local_size) {
        if (!launch_number(l->local_size, LAUNCH_MAX_RANKS, &launch->local_size, error)) { return false; }
    } else {
        if (!launch_number("SLURM_NODEID", LAUNCH_MAX_RANKS, &node, error)) { return false; }
        launch->local_size = launch_tasks_on_node(launch_text("SLURM_STEP_TASKS_PER_NODE"), node);
    }
    if (launch->local_size == 0 || launch->local_size > size || (launch->local_size > 0 && launch->local_rank >= launch->local_size)) {
        return fail(error,
                    "the environment says %s=%d with %d ranks on this node and %d in all; expected a smaller number: unset or correct it",
                    l->local_rank, launch->local_rank, launch->local_size, size);
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The meeting place

// HOST, HOST:PORT, an IPv6 address, or [IPv6 ADDRESS]:PORT. Without a port, launch->port stays.
static bool launch_set_master(Launch* launch, const char* name, const char* text, Error* error) {
    const char *host = text, *colon = strrchr(text, ':');
    size_t length = strlen(text);
    if (text[0] == '[') {
        const char* end = strchr(text, ']');
        if (!end || (end[1] != 0 && end[1] != ':')) {
            return fail(error, "%s is \"%.100s\"; expected HOST, HOST:PORT or [ADDRESS]:PORT", name, text);
        }
        host++;
        length = (size_t)(end - host);
        colon = end[1] ? end + 1 : NULL;
    } else if (colon && strchr(text, ':') != colon) {
        colon = NULL; // several: an IPv6 address
    } else if (colon) {
        length = (size_t)(colon - text);
    }
    long long port = launch->port;
    if (length == 0 || length >= sizeof(launch->master) || strcspn(text, " \t\r\n/") != strlen(text) ||
        (colon && (!launch_parse(colon + 1, 65535, &port) || port == 0))) {
        return fail(error, "%s is \"%.100s\"; expected a host name or address, perhaps with a port from 1 to 65535: HOST:PORT", name, text);
    }
    memcpy(launch->master, host, length);
    launch->master[length] = 0;
    launch->port = (int)port;
    return true;
}

// Jobs that share a first node should not share a port: Slurm's is made from the numbers of job and step, below the ports that
// systems give out by themselves (from 32768).
static int launch_slurm_port(void) {
    long long job = 0, step = 0;
    const char *job_text = launch_text("SLURM_JOB_ID"), *step_text = launch_text("SLURM_STEP_ID");
    if (job_text && !launch_parse(job_text, LLONG_MAX, &job)) { job = 0; }
    if (step_text && !launch_parse(step_text, LLONG_MAX, &step)) { step = 0; }
    return 20000 + (int)((job % 10000 + step % 10000 * 31) % 10000);
}

static bool launch_find_master(Launch* launch, const Launcher* l, Error* error) {
    const char* master = launch_text("MASTER_ADDR");
    bool slurm = l == &launchers[LAUNCHER_SLURM];
    int port = -1;
    if (!launch_number("MASTER_PORT", 65535, &port, error)) { return false; }
    if (port == 0) { return fail(error, "the environment variable MASTER_PORT is 0; expected a port from 1 to 65535"); }
    launch->port = port > 0 ? port : slurm ? launch_slurm_port() : LAUNCH_PORT;
    if (master) {
        launch->port = port;
        bool good = launch_set_master(launch, "the environment variable MASTER_ADDR", master, error);
        if (launch->port < 0) { launch->port = slurm ? launch_slurm_port() : LAUNCH_PORT; }
        return good;
    }
    if (!slurm) {
        return fail(error, "%s says %d ranks, and MASTER_ADDR is not set; expected the host name or address of rank 0's machine", l->by,
                    launch->size);
    }
    const char* list = launch_text("SLURM_STEP_NODELIST");
    list = list ? list : launch_text("SLURM_JOB_NODELIST");
    if (!list || !launch_first_host(list, launch->master, sizeof(launch->master))) {
        return fail(error, "cannot find the first node in SLURM_STEP_NODELIST \"%.100s\": set MASTER_ADDR to the host of rank 0",
                    list ? list : "");
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The interface

// Ranks that MPI does not start: only the GPU program can have them.
static bool launch_check_without_mpi(const Launch* launch, LaunchBuild build, Error* error) {
    if (build.gpu) { return true; }
    if (!build.mpi) {
        return fail(
            error,
            "this program was built without MPI, yet %s started %d processes: install Open MPI, run make clean and make, or start one",
            launch->by, launch->size);
    }
    return fail(
        error,
        "%s started %d processes, but not as ranks of MPI, over which the CPU program talks: use mpirun -np %d (or srun --mpi=pmix), or unset "
        "WORLD_SIZE",
        launch->by, launch->size, launch->size);
}

static bool launch_find_as(Launch* launch, LaunchBuild build, Error* error) {
    memset(launch, 0, sizeof(*launch));
    launch->size = 1;
    launch->port = LAUNCH_PORT;
    launch->by = "";
    const Launcher* l = launch_launcher(build);
    if (l) {
        launch->local_rank = launch->local_size = -1;
        launch->by = l == &launchers[LAUNCHER_PMI] && launch_in_slurm_step() ? "srun (PMI)" : l->by;
        if (!launch_numbers(launch, l, error)) { return false; }
    }
    if (launch->size == 1) {
        launch->local_rank = 0;
        launch->local_size = 1;
        return true;
    }
    launch->kind = l->mpi && build.mpi ? LAUNCH_BY_MPI : LAUNCH_BY_TCP;
    if (launch->kind == LAUNCH_BY_MPI) { return true; }
    if (!launch_check_without_mpi(launch, build, error)) { return false; }
    if (l->mpi && !launch_text("MASTER_ADDR")) {
        return fail(error,
                    "this program was built without MPI, yet %s started %d processes: install Open MPI and build again, or set MASTER_ADDR "
                    "to the host of rank 0",
                    launch->by, launch->size);
    }
    return launch_find_master(launch, l, error);
}

// From the environment. Where it fails, launch->rank is still what could be found out, so that one rank of the job reports it.
bool launch_find(Launch* launch, Error* error) { return launch_find_as(launch, launch_build(), error); }

// One number of the command line beside the launcher's.
static bool launch_agrees(const char* option, int given, int found, const char* by, Error* error) {
    if (given == found) { return true; }
    return fail(error, "%s is %d, but %s says %d: leave the option out", option, given, by, found);
}

static bool launch_override_as(Launch* launch, LaunchBuild build, int ranks, int rank, int ranks_per_node, const char* server,
                               Error* error) {
    bool launched = launch->by[0] != 0;
    if (launched) {
        if (ranks > 0 && !launch_agrees("--ranks (-pn)", ranks, launch->size, launch->by, error)) { return false; }
        if (rank >= 0 && !launch_agrees("--rank (-pr)", rank, launch->rank, launch->by, error)) { return false; }
    } else {
        int size = ranks > 0 ? ranks : 1;
        if (rank >= size) {
            return fail(error, "--rank (-pr) is %d with --ranks (-pn) %d; ranks are counted from 0: expected less", rank, size);
        }
        if (size > 1 && rank < 0) {
            return fail(error, "--ranks (-pn) is %d: expected --rank (-pr), the number of this process, too", size);
        }
        launch->rank = rank > 0 ? rank : 0;
        if (size > LAUNCH_MAX_RANKS) { return fail(error, "--ranks (-pn) is %d; expected at most %d", size, LAUNCH_MAX_RANKS); }
        launch->size = size;
    }
    if (launch->size == 1) { return true; }
    if (!launched) {
        launch->by = "--ranks";
        launch->local_rank = launch->local_size = -1;
        launch->kind = LAUNCH_BY_TCP;
        if (!launch_check_without_mpi(launch, build, error)) { return false; }
        if (!server[0]) {
            return fail(error, "--ranks (-pn) is %d: expected --master (-ps) HOST[:PORT], the machine of rank 0, too", launch->size);
        }
    }
    if (server[0] && launch->kind == LAUNCH_BY_MPI && !build.gpu) {
        return fail(error, "--master (-ps) is given, but ranks started by %s find each other by MPI: leave it out", launch->by);
    }
    if (server[0]) {
        launch->kind = LAUNCH_BY_TCP;
        if (!launch_set_master(launch, "--master (-ps)", server, error)) { return false; }
    }
    if (ranks_per_node > 0 && launch->local_size < 0) { // ranks fill one node after the other; the last may have fewer
        int first = launch->rank - launch->rank % ranks_per_node, left = launch->size - first;
        launch->local_rank = launch->local_rank >= 0 ? launch->local_rank : launch->rank - first;
        launch->local_size = left < ranks_per_node ? left : ranks_per_node;
    }
    if (ranks_per_node > 0 && launch->local_size > ranks_per_node) {
        return launch_agrees("--ranks-per-node (-pg)", ranks_per_node, launch->local_size, launch->by, error);
    }
    return true;
}

// What the command line says about ranks; 0, -1, 0 and "" are what it says when the options are not given. Beside a launcher it must
// agree with it; without one it sets up a job that meets at server (HOST or HOST:PORT).
bool launch_override(Launch* launch, int ranks, int rank, int ranks_per_node, const char* server, Error* error) {
    return launch_override_as(launch, launch_build(), ranks, rank, ranks_per_node, server, error);
}
