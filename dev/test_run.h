// test_run.h - the run's paperwork: logs and their cut on resume; the folder's lock, stop signals, progress.
#pragma once
#include "../trainer/progress.h"
#include "../trainer/run_lock.h"
#include "../trainer/run_stop.h"
#include "test_options.h"
#include <sys/resource.h>
#include <sys/wait.h>

// A JSON value (RFC 8259) from p on; returns what follows it, NULL when it is malformed.
static const char* json_test_skip(const char* p) {
    if (!p) { return NULL; }
    if (*p == '{' || *p == '[') {
        char close = *p == '{' ? '}' : ']';
        if (p[1] == close) { return p + 2; }
        do {
            p++;
            if (close == '}') {
                if (*p != '"' || !(p = json_test_skip(p)) || *p != ':') { return NULL; }
                p++;
            }
            p = json_test_skip(p);
        } while (p && *p == ',');
        return p && *p == close ? p + 1 : NULL;
    }
    if (*p == '"') {
        for (p++; *p != '"'; p++) {
            if ((unsigned char)*p < 32) { return NULL; }
            if (*p != '\\') { continue; }
            p++;
            if (!*p || !strchr("\"\\/bfnrtu", *p)) { return NULL; }
            if (*p == 'u' && strspn(p + 1, "0123456789abcdefABCDEF") < 4) { return NULL; }
        }
        return p + 1;
    }
    static const char* const words[] = {"null", "true", "false"};
    for (size_t i = 0; i < COUNT_OF(words); i++) {
        if (strncmp(p, words[i], strlen(words[i])) == 0) { return p + strlen(words[i]); }
    }
    char* end = NULL;
    strtod(p, &end);
    return end > p && (*p == '-' || isdigit((unsigned char)*p)) ? end : NULL;
}

// ---- logs

static StepRecord test_step_record(int64_t step) {
    StepRecord r;
    memset(&r, 0, sizeof(r));
    r.step = step;
    r.steps = 100;
    r.loss = 4.123456f - 0.01f * (float)step;
    r.loss_z = NAN;
    r.norm = 1.2345f;
    r.norm_z = 0.12f;
    r.lr = 3e-4;
    r.milliseconds = 123.45;
    r.mfu = 0.456;
    r.tokens_per_second = 12345;
    r.eta = 723;
    r.tokens = (step + 1) * 64;
    return r;
}

// Updates from first to before last, with a validation loss at even steps and a checkpoint at fours, in the order of a run.
static void test_log_steps(Log* log, int64_t first, int64_t last) {
    Error error;
    for (int64_t step = first; step <= last; step++) {
        StepRecord r = test_step_record(step);
        if (step % 2 == 0) { CHECK_OK(log_val(log, step, 5.5f, &error), error); }
        if (step % 4 == 0) { CHECK_OK(log_eval(log, step, 1, 4, &error), error); }
        if (step % 4 == 0 && step > 0) { CHECK_OK(log_checkpoint(log, step, "a/b", 0.25, &error), error); }
        if (step < last) { CHECK_OK(log_train(log, &r, &error), error); }
    }
}

static void check_log_events(const char* folder, int64_t steps) {
    char path[300], part[64];
    snprintf(path, sizeof(path), "%s/main.log", folder);
    const char* text = run_test_read(path);
    for (int64_t step = 0; step <= steps; step++) {
        snprintf(part, sizeof(part), "\ns:%" PRId64 " trl:", step);
        CHECK(text_occurrences(text, part) == (step < steps), "%s stands %d times", part + 1, text_occurrences(text, part));
        snprintf(part, sizeof(part), "\ns:%" PRId64 " tel:", step);
        CHECK(text_occurrences(text, part) == (step % 2 == 0), "%s stands %d times", part + 1, text_occurrences(text, part));
    }
    snprintf(path, sizeof(path), "%s/main.jsonl", folder);
    text = run_test_read(path);
    for (int64_t step = 0; step <= steps; step++) {
        for (int event = LOG_TRAIN; event <= LOG_CHECKPOINT; event++) {
            snprintf(part, sizeof(part), "{\"step\":%" PRId64 ",\"event\":\"%s\"", step, log_event_names[event]);
            int expected = event == LOG_TRAIN        ? step < steps
                           : event == LOG_VAL        ? step % 2 == 0
                           : event == LOG_EVAL       ? step % 4 == 0
                           : event == LOG_CHECKPOINT ? step % 4 == 0 && step > 0
                                                     : 0;
            CHECK(text_occurrences(text, part) == expected, "%s stands %d times, expected %d", part, text_occurrences(text, part),
                  expected);
        }
    }
}

static void test_log_resume(void) {
    char folder[200], path[300];
    Error error;
    Log log;
    LogNote note = {"gemm", "own \"loops\""};
    run_test_path(folder, sizeof(folder), "log");
    CHECK_OK(folder_make(folder, &error) && options_parse_line(&test_options, "-b 4", &error), error);
    snprintf(test_options.output, sizeof(test_options.output), "%s", folder);
    CHECK_OK(log_open(&log, &test_options, -1, &note, 1, &error), error);
    test_log_steps(&log, 0, 11);
    log_close(&log);
    snprintf(path, sizeof(path), "%s/main.log", folder);
    FILE* torn = fopen(path, "a");
    fprintf(torn, "s:11 tr"); // what a crash leaves
    fclose(torn);
    for (int64_t from = 8; from >= 4; from -= 4) { // from 8, then again from an older checkpoint
        CHECK_OK(log_open(&log, &test_options, from, &note, 1, &error), error);
        test_log_steps(&log, from, 12);
        log_close(&log);
        check_log_events(folder, 12);
    }
    const char* text = run_test_read(path);
    CHECK(strstr(text, "\ns:0 trl:4.1235 lr:0.000300 norm:1.23 "), "llm.c's line");
    CHECK(strstr(text, "\ns:0 eval:0.2500\n") && strstr(text, "\ns:0 tel:5.5000\n"), "llm.c's lines");
    CHECK(strstr(text, "\n# batch = 4\n") && strstr(text, "\n# gemm = own \"loops\"\n") && strstr(text, "\n# git = "), "the header");
    CHECK(text_occurrences(text, "# train_gpt resumes at step 4\n") == 1 && !strstr(text, "resumes at step 8"),
          "headers after the cut go too");
    CHECK_OK(log_open(&log, &test_options, -1, &note, 1, &error), error); // a new run keeps the old log
    log_close(&log);
    CHECK(!strstr(run_test_read(path), "trl:"), "a new log");
    snprintf(path, sizeof(path), "%s/main.log.old", folder);
    CHECK(strstr(run_test_read(path), "s:11 trl:"), "the old log");
    test_options.output[0] = 0;
    CHECK_OK(log_open(&log, &test_options, -1, NULL, 0, &error) && log_val(&log, 0, 1, &error) && log_sample(&log, 0, "x", 1, &error),
             error);
    log_close(&log);
    strcpy(test_options.output, "/nonexistent");
    CHECK_FAILS(log_open(&log, &test_options, -1, NULL, 0, &error), error, "/nonexistent/main.log");
    CHECK_FAILS(log_open(&log, &test_options, 5, NULL, 0, &error), error, "/nonexistent/main.log");
}

static void test_log_json(void) {
    char folder[200], path[300];
    Error error;
    Log log;
    run_test_path(folder, sizeof(folder), "json");
    CHECK_OK(folder_make(folder, &error) && options_parse_line(&test_options, "--train-data 'a\"b\\'", &error), error);
    snprintf(test_options.output, sizeof(test_options.output), "%s", folder);
    CHECK_OK(log_open(&log, &test_options, -1, NULL, 0, &error), error);
    StepRecord r = test_step_record(0);
    r.norm = INFINITY;
    r.lr = 1.0 / 3e7;
    static const char sample[] = "q\" \\ \n\t\x01\0 \xff\xc3 caf\xc3\xa9 \xf0\x9f\x98\x80 \xed\xa0\x80 \xc0\xaf \xf4\x90\x80\x80";
    CHECK_OK(log_train(&log, &r, &error) && log_val(&log, 1, NAN, &error) && log_eval(&log, 1, 0, 0, &error), error);
    CHECK_OK(log_sample(&log, 1, sample, sizeof(sample) - 1, &error) && log_skip(&log, 1, "loss z-score", 9.5f, 2, &error), error);
    log_close(&log);
    snprintf(path, sizeof(path), "%s/main.jsonl", folder);
    const char* text = run_test_read(path);
    int lines = 0;
    for (const char* line = text; *line; line = strchr(line, '\n') + 1, lines++) {
        const char* end = json_test_skip(line);
        CHECK(end && *end == '\n' && *line == '{', "line %d is not a JSON object: %.100s", lines + 1, line);
        if (!end || *end != '\n') { break; }
    }
    CHECK(lines == 6, "found %d lines", lines);
    CHECK(strstr(text, "\"loss_z\":null") && strstr(text, "\"norm\":null") && strstr(text, "\"loss\":null"), "null where no number is");
    CHECK(strstr(text, "\"loss\":4.123456,") && strstr(text, "\"batch\":4,") && strstr(text, "\"shuffle\":true") &&
              strstr(text, "\"max-time\":0,"),
          "values");
    CHECK(
        strstr(
            text,
            "\\u000a\\u0009\\u0001\\u0000 \\ufffd\\ufffd caf\xc3\xa9 \xf0\x9f\x98\x80 \\ufffd\\ufffd\\ufffd \\ufffd\\ufffd "
                  "\\ufffd\\ufffd\\ufffd\\ufffd\""),
        "the sample");
    const char* lr = strstr(text, "\"lr\":3.");
    CHECK(lr && strtod(lr + 5, NULL) == r.lr, "the learning rate comes back exactly");
}

// A full disk is reported by the event that no longer fits; here a limit on the size of files stands for it.
static void test_log_full(void) {
    char folder[200];
    Error error;
    Log log;
    run_test_path(folder, sizeof(folder), "full");
    CHECK_OK(folder_make(folder, &error) && options_parse_line(&test_options, "", &error), error);
    snprintf(test_options.output, sizeof(test_options.output), "%s", folder);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {8192, 8192};
        signal(SIGXFSZ, SIG_IGN);
        bool good = log_open(&log, &test_options, -1, NULL, 0, &error) && setrlimit(RLIMIT_FSIZE, &limit) == 0;
        for (int64_t step = 0; good && step < 1000; step++) { good = log_val(&log, step, 1, &error); }
        _exit(!good && strstr(error.text, "writing the logs in") ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a log that cannot grow must be an error");
}

static void test_log_lines(void) {
    char text[300];
    StepRecord r = test_step_record(0);
    r.loss_z = 0.12f;
    step_line(&r, text, sizeof(text));
    CHECK(
        strcmp(
            text,
            "step    1/100 | loss 4.123456 (+0.12z)| norm 1.2345 (+0.12z)| lr 3.00e-04 | 123.45 ms | 45.6% MFU | 12345 tok/s | ETA 12m03s") ==
            0,
        "found %s", text);
    r.loss_z = NAN;
    r.mfu = -1;
    r.eta = -1;
    step_line(&r, text, sizeof(text));
    CHECK(strstr(text, "(nanz)") && strstr(text, "n/a MFU") && strstr(text, "ETA ?"), "found %s", text);
    Rate rate = {0, 0, 0};
    CHECK(rate_add(&rate, 100, 10) == 10, "the first step shows its own rate");
    double shown = rate_add(&rate, 100, 0.5);
    CHECK(fabs(shown - 200) < 1e-9, "the first step does not count: found %g", shown);
    for (int i = 0; i < 500; i++) { shown = rate_add(&rate, 100, 1); }
    CHECK(fabs(shown - 100) < 1e-6, "found %g", shown);
    static const struct {
        double seconds;
        const char* text;
    } times[] = {{0, "0s"}, {59.4, "59s"}, {723, "12m03s"}, {11040, "3h04m"}, {183600, "2d03h"}, {-1, "?"}, {NAN, "?"}, {INFINITY, "?"}};
    for (size_t i = 0; i < COUNT_OF(times); i++) {
        duration_text(times[i].seconds, text, sizeof(text));
        CHECK(strcmp(text, times[i].text) == 0, "found %s, expected %s", text, times[i].text);
    }
}

// ---- the output folder, signals

static void test_run_lock(void) {
    char folder[200];
    Error error;
    RunLock lock, second;
    run_test_path(folder, sizeof(folder), "lock/deep/er");
    CHECK_OK(folder_make(folder, &error) && folder_make(folder, &error), error);
    int ready[2];
    CHECK(pipe(ready) == 0, "pipe");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        char good = run_lock_take(&lock, folder, &error) ? 1 : 0;
        if (write(ready[1], &good, 1) == 1) { pause(); }
        _exit(0);
    }
    char good = 0;
    CHECK(read(ready[0], &good, 1) == 1 && good, "the child holds the lock");
    char name[60];
    snprintf(name, sizeof(name), "in use by process %ld on ", (long)child);
    CHECK_FAILS(run_lock_take(&second, folder, &error), error, name);
    CHECK(second.fd == -1, "no lock after a refusal");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
    CHECK_OK(run_lock_take(&lock, folder, &error), error);
    CHECK_FAILS(run_lock_take(&second, folder, &error), error, "in use");
    run_lock_release(&lock);
    CHECK_OK(run_lock_take(&second, folder, &error), error);
    run_lock_release(&second);
    CHECK_FAILS(run_lock_take(&lock, "/nonexistent", &error), error, "/nonexistent");
}

static void test_folder_and_space(void) {
    char path[300], text[32];
    Error error;
    uint64_t bytes = 0;
    run_test_path(path, sizeof(path), "plain");
    CHECK(run_test_write(path, "x", 1), "cannot write");
    CHECK_FAILS(folder_make(path, &error), error, "a file of that name");
    strcat(path, "/below");
    CHECK_FAILS(folder_make(path, &error), error, "cannot make the folder");
    CHECK_FAILS(folder_make("", &error), error, "name");
    CHECK_OK(folder_make("/tmp/", &error) && folder_make(".", &error) && folder_make("/", &error), error);
    CHECK_OK(disk_space_free(test_folder(), &bytes, &error), error);
    CHECK_OK(disk_space_check(test_folder(), 1, "one byte", &error), error);
    CHECK_FAILS(disk_space_check(test_folder(), UINT64_MAX, "3 checkpoints", &error), error, "are needed for 3 checkpoints");
    CHECK_FAILS(disk_space_check("/nonexistent", 1, "x", &error), error, "/nonexistent");
    static const struct {
        uint64_t bytes;
        const char* text;
    } sizes[] = {{0, "0 bytes"}, {1023, "1023 bytes"}, {1536, "1.5 KiB"}, {1048575, "1.0 MiB"}, {UINT64_MAX, "16.0 EiB"}};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        bytes_text(sizes[i].bytes, text, sizeof(text));
        CHECK(strcmp(text, sizes[i].text) == 0, "found %s, expected %s", text, sizes[i].text);
    }
}

// A signal to this process, taken by the thread that watches.
static void test_signal(int number) {
    kill(getpid(), number);
    for (int i = 0; i < 1000 && !run_stop_wishes(""); i++) { usleep(1000); }
}

static void test_run_stop(void) {
    char path[300];
    static const int numbers[] = {SIGINT, SIGTERM, SIGUSR1};
    static const char* const names[] = {"SIGINT", "SIGTERM", "SIGUSR1"};
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        run_stop_begin();
        CHECK(run_stop_reason(run_stop_wishes(test_folder())) == NULL, "no reason yet");
        test_signal(numbers[i]);
        const char* reason = run_stop_reason(run_stop_wishes(""));
        CHECK(reason && strcmp(reason, names[i]) == 0, "found %s", reason ? reason : "none");
        run_stop_end();
    }
    run_test_path(path, sizeof(path), "STOP");
    CHECK(run_test_write(path, "", 0) && run_stop_wishes(test_folder()) == WISH_STOP_FILE && !run_stop_wishes(""), "the file STOP");
    run_stop_file_remove(test_folder());
    CHECK(!run_stop_wishes(test_folder()), "an obeyed STOP is gone");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) { // the second SIGINT ends the process at once
        if (!freopen("/dev/null", "w", stderr)) { _exit(1); }
        run_stop_begin();
        test_signal(SIGINT);
        kill(getpid(), SIGINT);
        sleep(5);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 130, "exit status %d", WEXITSTATUS(status));
}

// ---- progress

static void test_run_progress(void) {
    char *text = NULL, path[200];
    size_t bytes = 0;
    Progress progress;
    run_test_path(path, sizeof(path), "progress");
    FILE* out = fopen(path, "w");
    progress_begin(&progress, out, PROGRESS_AUTO, 0); // no terminal: silent
    progress_draw(&progress, 1, 1, "x");
    progress_begin(&progress, out, PROGRESS_ON, 0);
    for (int i = 0; i < 1000; i++) {
        StepRecord r = test_step_record(i);
        r.steps = 1000;
        progress_step(&progress, &r);
    }
    progress_clear(&progress);
    fclose(out);
    const char* printed = run_test_read(path);
    CHECK(text_occurrences(printed, "\n") == 1 && strstr(printed, "100% 1000/1000 | loss ") && strstr(printed, "0s to go"), "found %s",
          printed);
    char line[300];
    progress_line(line, sizeof(line), 0.5, 10, 10, "5/10", 60);
    CHECK(strlen(line) <= 59 && strstr(line, ">") && strstr(line, " 50% 5/10 | 10s, 10s to go"), "found %s", line);
    progress_line(line, sizeof(line), 0.5, 10, 10, "5/10", 20);
    CHECK(strlen(line) == 19, "cut to the terminal: %s", line);

    static LossHistory history;
    memset(&history, 0, sizeof(history));
    for (int i = 0; i < 100000; i++) { loss_history_add(&history, i, i == 77 ? NAN : 2.0f + 6.0f * expf(-(float)i / 20000.0f)); }
    CHECK(history.count >= LOSS_POINTS / 2 && history.count < LOSS_POINTS && history.losses[0] > 7.9f, "%zu points", history.count);
    for (int unicode = 0; unicode < 2; unicode++) {
        out = open_memstream(&text, &bytes);
        loss_curve_print(out, history.steps, history.losses, history.count, 60, 10, unicode == 1);
        fclose(out);
        CHECK(text_occurrences(text, "\n") == 12 && strstr(text, "loss |") && strstr(text, unicode ? "\xe2\xa1" : "*"), "found %s", text);
        free(text);
    }
    float steps[3] = {1, 2, 3}, losses[3] = {NAN, NAN, INFINITY};
    out = open_memstream(&text, &bytes);
    loss_curve_print(out, steps, losses, 3, 60, 10, true);
    loss_curve_print(out, steps, losses, 0, 60, 10, true);
    CHECK(fflush(out) == 0 && bytes == 0, "nothing to draw");
    losses[1] = 2;
    loss_curve_print(out, steps, losses, 3, -5, 100000, true); // one point, silly sizes
    CHECK(fflush(out) == 0 && bytes > 0, "one point");
    fclose(out);
    free(text);
}

static const TestRow run_tests[] = {
    {"log: resuming cuts what comes after, nothing stands twice", test_log_resume},
    {"log: JSON lines parse, text is escaped, NaN is null", test_log_json},
    {"log: a full disk is an error", test_log_full},
    {"log: step line, speed, times", test_log_lines},
    {"run: a folder is held by one run, a killed run lets go", test_run_lock},
    {"run: folders are made, too small a disk is refused", test_folder_and_space},
    {"run: signals and the file STOP", test_run_stop},
    {"progress: bar, loss curve", test_run_progress},
};
