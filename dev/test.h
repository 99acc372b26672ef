// test.h - the test harness: rows of a name and a function, CHECK inside, a filter on the command line, and a last line
// "N passed, N failed". A row fails when any of its checks fails; all failing checks are printed (the first few of each row).
// Rank rows are run by all ranks of a job together (mpirun -np 8 ./test_gpt ranks [text]): a row fails when it fails on any.
#pragma once
#include "../comm/comm.cuh"
#include <ftw.h>
#include <unistd.h>

typedef struct {
    const char* name; // "area: what is shown"
    void (*run)(void);
} TestRow;

static struct {
    int failures_in_row, checks_in_row, passed, failed;
    const Comm* world; // of rank rows, else NULL
} test_state;

#define TEST_WORLD (test_state.world ? test_state.world : comm_alone())

static inline void test_print_place(const char* file, int line, const char* condition) {
    if (test_state.world) { printf("    rank %d:", test_state.world->rank); }
    printf("    %s:%d: %s: ", file, line, condition);
}

// CHECK(condition, "format", ...): the message says what was compared, expected and found.
#define CHECK(condition, ...)                                                 \
    do {                                                                      \
        test_state.checks_in_row++;                                           \
        if (!(condition) && test_state.failures_in_row++ < 5) {               \
            test_print_place(__FILE__, __LINE__, #condition);                 \
            fprintf(stdout, __VA_ARGS__);                                     \
            fprintf(stdout, "\n");                                            \
        }                                                                     \
    } while (0)

// A call that returns false with an Error must not fail here.
#define CHECK_OK(call, error) CHECK(call, "%s", (error).text)

// A call that must fail, with a message that holds `part`.
#define CHECK_FAILS(call, error, part)                                                                       \
    do {                                                                                                     \
        (error).text[0] = 0;                                                                                 \
        bool went_well_ = (call);                                                                            \
        CHECK(!went_well_, "expected a refusal");                                                            \
        CHECK(went_well_ || strstr((error).text, (part)), "expected a message with \"%s\", found \"%s\"", part, (error).text); \
    } while (0)

// A row that checks nothing is a failure: it cannot show anything.
static inline void test_run_rows(const TestRow* rows, size_t count, const char* filter) {
    for (size_t i = 0; i < count; i++) {
        if (filter && !strstr(rows[i].name, filter)) { continue; }
        test_state.failures_in_row = test_state.checks_in_row = 0;
        double start = seconds_now();
        rows[i].run();
        bool good = test_state.failures_in_row == 0 && test_state.checks_in_row > 0;
        printf("%s  %-60s %6d checks %7.2f s\n", good ? "ok  " : "FAIL", rows[i].name, test_state.checks_in_row, seconds_now() - start);
        fflush(stdout);
        good ? test_state.passed++ : test_state.failed++;
    }
}

// The same with what all ranks found; rank 0 tells. A row begins on all ranks at once.
static inline void test_run_rank_rows(const TestRow* rows, size_t count, const char* filter) {
    const Comm* world = test_state.world;
    int (*all)[2] = (int(*)[2])need(malloc((size_t)world->size * sizeof(*all)));
    for (size_t i = 0; i < count; i++) {
        if (filter && !strstr(rows[i].name, filter)) { continue; }
        test_state.failures_in_row = test_state.checks_in_row = 0;
        comm_barrier(world);
        double start = seconds_now();
        rows[i].run();
        fflush(stdout);
        int mine[2] = {test_state.failures_in_row, test_state.checks_in_row}, failures = 0, checks = 0;
        comm_gather_host(world, mine, sizeof(mine), all, TRAFFIC_CONTROL);
        for (int r = 0; r < world->size; r++) {
            failures += all[r][0];
            checks += all[r][1];
        }
        bool good = failures == 0 && checks > 0;
        good ? test_state.passed++ : test_state.failed++;
        if (world->rank > 0) { continue; }
        printf("%s  %-60s %6d checks %7.2f s\n", good ? "ok  " : "FAIL", rows[i].name, checks, seconds_now() - start);
        fflush(stdout);
    }
    free(all);
}

static inline int test_summary(void) {
    if (TEST_WORLD->rank == 0) { printf("%d passed, %d failed\n", test_state.passed, test_state.failed); }
    return test_state.failed == 0 && test_state.passed > 0 ? 0 : 1;
}

static char test_folder_name[128];

static inline int test_remove_one(const char* path, const struct stat* status, int type, struct FTW* walk) {
    (void)status, (void)type, (void)walk;
    return remove(path);
}

static inline void test_folder_remove(void) {
    if (test_folder_name[0]) { nftw(test_folder_name, test_remove_one, 16, FTW_DEPTH | FTW_PHYS); }
}

// The folder for files that tests write; made on first use, removed by the main program at the end (children only forget it).
static inline const char* test_folder(void) {
    char* folder = test_folder_name;
    if (!folder[0]) {
        const char* place = getenv("TMPDIR");
        snprintf(folder, sizeof(test_folder_name), "%s/test_gpt_XXXXXX", place && place[0] && strlen(place) < 100 ? place : "/tmp");
        if (!mkdtemp(folder)) {
            printf("cannot make a folder for tests: %s\n", strerror(errno));
            exit(1);
        }
    }
    return folder;
}
