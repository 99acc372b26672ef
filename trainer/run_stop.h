// run_stop.h - reasons to end a run early, asked for after each step: SIGINT, SIGTERM or SIGUSR1, or a file STOP in the output folder.
// The run then finishes its step, writes a checkpoint and ends. A second SIGINT or SIGTERM ends at once.
#pragma once
#include "../kernels/base.h"
#include <signal.h>
#include <unistd.h>

static volatile sig_atomic_t run_stop_signal;

static void run_stop_handler(int number) {
    if (run_stop_signal != 0 && number != SIGUSR1) {
        static const char text[] = "\nstopped at once, without a checkpoint\n";
        ssize_t put = write(STDERR_FILENO, text, sizeof(text) - 1);
        (void)put;
        _exit(128 + number);
    }
    run_stop_signal = number;
}

// Takes over the three signals. System calls that they interrupt go on.
void run_stop_begin(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGUSR1};
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = run_stop_handler;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    run_stop_signal = 0;
    for (size_t i = 0; i < COUNT_OF(numbers); i++) { sigaction(numbers[i], &action, NULL); }
}

// Gives the signals back to the system's own handling.
void run_stop_end(void) {
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
    run_stop_signal = 0;
}

static void run_stop_path(const char* folder, char* path, size_t size) { snprintf(path, size, "%s/STOP", folder); }

// Removes a STOP file: one left over before a run begins, or the one that has been obeyed, so that a resumed run does not stop again.
void run_stop_file_remove(const char* folder) {
    char path[PATH_MAX + 8];
    run_stop_path(folder, path, sizeof(path));
    if (folder[0]) { unlink(path); }
}

// What a run may be asked for; bits, since ranks add theirs.
enum { WISH_STOP_INT = 1, WISH_STOP_TERM = 2, WISH_STOP_USR1 = 4, WISH_STOP_FILE = 8, WISH_STOP_TIME = 16, WISH_STOP = 31, WISH_SAVE = 32 };

// What signals and the file STOP ask for. folder: the output folder, empty when there is none.
unsigned run_stop_wishes(const char* folder) {
    char path[PATH_MAX + 8];
    unsigned wishes = 0;
    if (run_stop_signal != 0) { wishes = run_stop_signal == SIGINT ? WISH_STOP_INT : run_stop_signal == SIGTERM ? WISH_STOP_TERM : WISH_STOP_USR1; }
    run_stop_path(folder, path, sizeof(path));
    return wishes | (folder[0] && access(path, F_OK) == 0 ? WISH_STOP_FILE : 0);
}

// Why the run should end, or NULL.
const char* run_stop_reason(unsigned wishes) {
    static const char* const names[] = {"SIGINT", "SIGTERM", "SIGUSR1", "the file STOP", "--max-time"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        if (wishes >> i & 1u) { return names[i]; }
    }
    return NULL;
}
