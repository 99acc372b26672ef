// run_stop.h - reasons to end a run early, asked for after each step: SIGINT, SIGTERM or SIGUSR1, or a file STOP in the output folder.
// The run then finishes its step, writes a checkpoint and ends. A second SIGINT or SIGTERM ends at once.
//
// The signals are blocked in every thread but one that waits for them: a handler would run on the stack of whatever thread it meets, and
// oneDNN's matrix products use the stack pointer for data (seen: the handler's frame written into the heap).
#pragma once
#include "../kernels/base.h"
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static struct {
    int signal;    // the first that came since run_stop_begin
    bool listens;  // between run_stop_begin and run_stop_end; else signals do what the system does with them
    pid_t process; // whose watching thread it is: a forked child has none
    sigset_t signals;
} run_stop_state;

static void* run_stop_watch_thread(void* unused) {
    int number = 0;
    (void)unused;
    for (;;) {
        if (sigwait(&run_stop_state.signals, &number) != 0) { continue; }
        if (!__atomic_load_n(&run_stop_state.listens, __ATOMIC_SEQ_CST)) {
            pthread_sigmask(SIG_UNBLOCK, &run_stop_state.signals, NULL);
            raise(number); // ends the process
        }
        if (__atomic_load_n(&run_stop_state.signal, __ATOMIC_SEQ_CST) != 0 && number != SIGUSR1) {
            static const char text[] = "\nstopped at once, without a checkpoint\n";
            ssize_t put = write(STDERR_FILENO, text, sizeof(text) - 1);
            (void)put;
            _exit(128 + number);
        }
        __atomic_store_n(&run_stop_state.signal, number, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

// To be called before any other thread is made: threads inherit what is blocked.
void run_stop_watch(void) {
    pthread_t thread;
    if (run_stop_state.process == getpid()) { return; }
    sigemptyset(&run_stop_state.signals);
    sigaddset(&run_stop_state.signals, SIGINT);
    sigaddset(&run_stop_state.signals, SIGTERM);
    sigaddset(&run_stop_state.signals, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &run_stop_state.signals, NULL);
    if (pthread_create(&thread, NULL, run_stop_watch_thread, NULL) == 0) {
        pthread_detach(thread);
        run_stop_state.process = getpid();
    } else {
        pthread_sigmask(SIG_UNBLOCK, &run_stop_state.signals, NULL); // then signals simply end the run
    }
}

// From now on the three signals are wishes.
void run_stop_begin(void) {
    run_stop_watch();
    __atomic_store_n(&run_stop_state.signal, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&run_stop_state.listens, true, __ATOMIC_SEQ_CST);
}

// Gives the signals back to the system's own handling.
void run_stop_end(void) {
    __atomic_store_n(&run_stop_state.listens, false, __ATOMIC_SEQ_CST);
    __atomic_store_n(&run_stop_state.signal, 0, __ATOMIC_SEQ_CST);
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
    int number = __atomic_load_n(&run_stop_state.signal, __ATOMIC_SEQ_CST);
    unsigned wishes = number == SIGINT ? WISH_STOP_INT : number == SIGTERM ? WISH_STOP_TERM : number == SIGUSR1 ? WISH_STOP_USR1 : 0;
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
