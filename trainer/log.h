// log.h - the record of a run. main.log has llm.c's lines (s:<step> tel:<val loss>, s:<step> eval:<HellaSwag>, s:<step> trl:<loss>
// lr:<lr> norm:<norm>, then fields of our own) below a header of "# name = value" lines; main.jsonl has one JSON object an event.
// Steps count from 0: step s is the update that makes s + 1 of them; a validation loss or a checkpoint at s is taken after s updates.
// Both files are flushed at every event. When a run resumes from the checkpoint at step k, what an earlier run wrote of update k and
// later is cut off, and what it measured at k is not logged a second time.
#pragma once
#include "../dataloader/utf8.h"
#include "../comm/ledger.h"
#include "option_report.h"
#include "provenance.h"
#include "run_lock.h"

typedef enum { LOG_TRAIN, LOG_VAL, LOG_EVAL, LOG_SAMPLE, LOG_CHECKPOINT, LOG_SKIP, LOG_KAPPA, LOG_CONFIG, LOG_EVENTS } LogEvent;

static const char* const log_event_names[LOG_EVENTS] = {"train", "val", "eval", "sample", "checkpoint", "skip", "kappa", "config"};
static const char* const log_line_names[LOG_EVENTS] = {"trl", "tel", "eval", "", "", "", "", ""}; // in main.log

typedef struct {
    FILE *text, *json; // NULL: no output folder, nothing is logged
    char folder[OPTION_TEXT_SIZE];
    double start;
    int64_t resume_step;           // -1: a new run
    unsigned text_kept, json_kept; // bits of LogEvent: seen at resume_step already
} Log;

// A name and a value for the header, such as a library's version.
typedef struct {
    const char *name, *value;
} LogNote;

// All that is said about one update.
typedef struct {
    int64_t step, steps;  // step from 0
    float loss, loss_z;   // z: standard deviations from the mean of the last 128, NaN before
    float norm, norm_z;   // of the gradients, before clipping
    double lr;
    double milliseconds;
    double mfu;               // share of the device's peak, below 0 when that is unknown
    double tokens_per_second; // smoothed: rate_add
    double eta;               // seconds to go, below 0 when unknown
    int64_t tokens;           // seen since the beginning
    int ranks;
    Ledger traffic;           // of rank 0; new weights count in the step that needs them
} StepRecord;

// ---- speed

// Tokens a second as a moving average (0.95), corrected for its start at zero; the first step, which warms up, does not count.
typedef struct {
    double average, weight;
    int64_t count;
} Rate;

// Takes one step's tokens and time, returns the rate to show.
double rate_add(Rate* rate, double tokens, double seconds) {
    double now = seconds > 0 ? tokens / seconds : 0;
    if (rate->count++ == 0) { return now; }
    rate->average = 0.95 * rate->average + 0.05 * now;
    rate->weight = 0.95 * rate->weight + 0.05;
    return rate->average / rate->weight;
}

// 45s, 12m03s, 3h04m, 2d03h; "?" below zero.
void duration_text(double seconds, char* text, size_t size) {
    if (!(seconds >= 0) || seconds > 1e10) {
        snprintf(text, size, "?");
        return;
    }
    int64_t s = (int64_t)(seconds + 0.5);
    if (s < 60) {
        snprintf(text, size, "%" PRId64 "s", s);
    } else if (s < 3600) {
        snprintf(text, size, "%" PRId64 "m%02" PRId64 "s", s / 60, s % 60);
    } else if (s < 86400) {
        snprintf(text, size, "%" PRId64 "h%02" PRId64 "m", s / 3600, s / 60 % 60);
    } else {
        snprintf(text, size, "%" PRId64 "d%02" PRId64 "h", s / 86400, s / 3600 % 24);
    }
}

static void z_text(float z, char* text, size_t size) {
    if (isnan(z)) {
        snprintf(text, size, "nanz");
    } else {
        snprintf(text, size, "%+.2fz", (double)z);
    }
}

// llm.c's line of a step, counted from 1, with the time to go; no newline.
void step_line(const StepRecord* r, char* text, size_t size) {
    char loss_z[32], norm_z[32], mfu[32] = "n/a", eta[32];
    z_text(r->loss_z, loss_z, sizeof(loss_z));
    z_text(r->norm_z, norm_z, sizeof(norm_z));
    if (r->mfu >= 0) { snprintf(mfu, sizeof(mfu), "%.1f%%", 100.0 * r->mfu); }
    duration_text(r->eta, eta, sizeof(eta));
    int at = snprintf(text, size, "step %4" PRId64 "/%" PRId64 " | loss %7.6f (%s)| norm %6.4f (%s)| lr %.2e", r->step + 1, r->steps,
                      (double)r->loss, loss_z, (double)r->norm, norm_z, r->lr);
    if (at < 0 || (size_t)at >= size) { return; }
    at += snprintf(text + at, size - (size_t)at, " | %.2f ms | %s MFU | %.0f tok/s | ETA %s", r->milliseconds, mfu, r->tokens_per_second, eta);
    if (r->ranks <= 1 || (size_t)at >= size) { return; }
    char sent[32];
    bytes_text(ledger_all(&r->traffic), sent, sizeof(sent));
    snprintf(text + at, size - (size_t)at, " | sent %s in %.0f ms, %.0f%% hidden", sent, 1e3 * r->traffic.busy, 100.0 * ledger_hidden(&r->traffic));
}

// ,"raw":N,"sent":{"gradient":[inside,between],...}: bytes that rank 0 gave to the network, by purpose and class of link.
static void json_traffic(FILE* out, const Ledger* t) {
    uint64_t raw = 0;
    for (int p = 0; p < TRAFFIC_PURPOSES; p++) { raw += t->raw[p][LINK_INSIDE] + t->raw[p][LINK_BETWEEN]; }
    fprintf(out, ",\"raw\":%" PRIu64 ",\"sent\":{", raw);
    for (int p = 0; p < TRAFFIC_PURPOSES; p++) {
        fprintf(out, "%s\"%s\":[%" PRIu64 ",%" PRIu64 "]", p ? "," : "", traffic_names[p], t->sent[p][LINK_INSIDE], t->sent[p][LINK_BETWEEN]);
    }
    fprintf(out, "},\"comm_ms\":%.3f,\"exposed_ms\":%.3f", 1e3 * t->busy, 1e3 * t->waited);
}

// ---- JSON

// In quotes; bytes that are not UTF-8 become U+FFFD.
void json_put_string(FILE* out, const char* text, size_t bytes) {
    const unsigned char* p = (const unsigned char*)text;
    fputc('"', out);
    for (size_t i = 0; i < bytes;) {
        uint32_t code;
        size_t n = utf8_decode(p + i, p + bytes, &code);
        if (n == 0) {
            fputs("\\ufffd", out);
            n = 1;
        } else if (p[i] == '"' || p[i] == '\\') {
            fprintf(out, "\\%c", p[i]);
        } else if (p[i] < 32 || p[i] == 127) {
            fprintf(out, "\\u%04x", (unsigned)p[i]);
        } else {
            fwrite(p + i, 1, n, out);
        }
        i += n;
    }
    fputc('"', out);
}

// ,"name":value with the digits that bring the double back; null for what JSON has no word for.
static void json_field(FILE* out, const char* name, double value) {
    char text[40] = "null";
    if (isfinite(value)) { real_text(value, text, sizeof(text)); }
    fprintf(out, ",\"%s\":%s", name, text);
}

static void json_field_float(FILE* out, const char* name, float value) {
    char text[40] = "null";
    if (isfinite(value)) { snprintf(text, sizeof(text), "%.9g", (double)value); }
    fprintf(out, ",\"%s\":%s", name, text);
}

static void json_field_text(FILE* out, const char* name, const char* value) {
    fprintf(out, ",\"%s\":", name);
    json_put_string(out, value, strlen(value));
}

// "options":{...}: switches as true or false, numbers as numbers, times in seconds.
static void json_options(FILE* out, const Options* options) {
    char value[OPTION_TEXT_SIZE];
    const char* comma = "";
    fprintf(out, ",\"options\":{");
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        if (!option_serves(row, options->command) || row->type == OPTION_LIST) { continue; }
        option_value(options, row, value, sizeof(value));
        fprintf(out, "%s\"%s\":", comma, row->name);
        comma = ",";
        if (row->type == OPTION_TEXT || row->type == OPTION_CHOICE) {
            json_put_string(out, value, strlen(value));
        } else if (row->type == OPTION_SWITCH) {
            fputs(strcmp(value, "on") == 0 ? "true" : "false", out);
        } else {
            fprintf(out, "%.*s", (int)strcspn(value, "s"), value);
        }
    }
    fputc('}', out);
}

// ---- cutting at the step a run resumes from

// What a line of either file is about; false for comments and lines of others.
static bool log_line_event(const char* line, bool json, int64_t* step, LogEvent* event) {
    char name[16];
    int end = 0;
    if (json ? sscanf(line, "{\"step\":%" SCNd64 ",\"event\":\"%15[a-z]\"", step, name) != 2
             : sscanf(line, "s:%" SCNd64 " %15[a-z]:%n", step, name, &end) != 2 || end == 0) {
        return false;
    }
    for (int i = 0; i < LOG_EVENTS; i++) {
        if (strcmp(name, json ? log_event_names[i] : log_line_names[i]) == 0) {
            *event = (LogEvent)i;
            return true;
        }
    }
    return false;
}

// Cuts the file before its first line about update `step` or later, and a last line without an end. *kept: what it holds of `step`.
// Steps only grow along a file, so this is one truncation, which happens whole or not at all.
static bool log_cut(const char* path, bool json, int64_t step, unsigned* kept, Error* error) {
    FILE* file = fopen(path, "r+e");
    if (!file && errno == ENOENT) { return true; }
    if (!file) { return fail(error, "cannot open %s: %s", path, strerror(errno)); }
    struct stat status;
    if (fstat(fileno(file), &status) != 0 || !S_ISREG(status.st_mode)) {
        fclose(file);
        return fail(error, "%s is not a regular file", path);
    }
    char* line = NULL;
    size_t room = 0;
    off_t good = 0;
    for (ssize_t length; (length = getline(&line, &room, file)) > 0 && line[length - 1] == '\n'; good += length) {
        int64_t at = 0;
        LogEvent event = LOG_TRAIN;
        if (!log_line_event(line, json, &at, &event)) { continue; }
        if (at > step || (at == step && (event == LOG_TRAIN || event == LOG_SKIP || event == LOG_KAPPA))) { break; }
        if (at == step) { *kept |= 1u << event; }
    }
    free(line);
    bool done = !ferror(file) && ftruncate(fileno(file), good) == 0 && (fsync(fileno(file)) == 0 || errno == EINVAL);
    int reason = errno;
    fclose(file);
    return done || fail(error, "cannot cut %s at step %" PRId64 ": %s", path, step, strerror(reason));
}

// ---- opening and closing

static void log_path(const Log* log, const char* name, char* path, size_t size) { snprintf(path, size, "%s/%s", log->folder, name); }

// A new run moves an older log aside (one generation is kept); a resumed run cuts it.
static bool log_prepare(Log* log, const char* name, bool json, FILE** file, unsigned* kept, Error* error) {
    char path[PATH_MAX + 32], old[PATH_MAX + 48];
    log_path(log, name, path, sizeof(path));
    snprintf(old, sizeof(old), "%s.old", path);
    if (log->resume_step < 0) {
        if (rename(path, old) != 0 && errno != ENOENT) { return fail(error, "cannot rename %s to %s: %s", path, old, strerror(errno)); }
    } else if (!log_cut(path, json, log->resume_step, kept, error)) {
        return false;
    }
    *file = fopen(path, "ae");
    return *file || fail(error, "cannot open %s: %s", path, strerror(errno));
}

static bool log_flush(Log* log, Error* error) {
    if (fflush(log->text) == 0 && fflush(log->json) == 0 && !ferror(log->text) && !ferror(log->json)) { return true; }
    int reason = errno;
    clearerr(log->text);
    clearerr(log->json);
    return fail(error, "writing the logs in %s: %s", log->folder, strerror(reason));
}

static void log_header(Log* log, const Options* options, const LogNote* notes, size_t note_count) {
    char date[40];
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
    int64_t step = log->resume_step < 0 ? 0 : log->resume_step;
    LogNote built[] = {{"started", date}, {"git", provenance_git()}, {"compiler", provenance_compiler()}, {"flags", provenance_flags()}};
    fprintf(log->text, "# train_gpt %s at step %" PRId64 "\n", log->resume_step < 0 ? "begins" : "resumes", step);
    fprintf(log->json, "{\"step\":%" PRId64 ",\"event\":\"config\",\"resumed\":%s", step, log->resume_step < 0 ? "false" : "true");
    for (size_t i = 0; i < COUNT_OF(built) + note_count; i++) {
        const LogNote* note = i < COUNT_OF(built) ? &built[i] : &notes[i - COUNT_OF(built)];
        fprintf(log->text, "# %s = %s\n", note->name, note->value);
        json_field_text(log->json, note->name, note->value);
    }
    options_write(options, log->text, "# ");
    json_options(log->json, options);
    fprintf(log->json, "}\n");
}

void log_close(Log* log) {
    if (log->text) { fclose(log->text); }
    if (log->json) { fclose(log->json); }
    log->text = log->json = NULL;
}

// Opens both files in options->output, which exists; with no output folder nothing is logged. resume_step: -1 for a new run, else the
// step of the checkpoint that the run goes on from. notes: more lines for the header, such as library versions.
bool log_open(Log* log, const Options* options, int64_t resume_step, const LogNote* notes, size_t note_count, Error* error) {
    memset(log, 0, sizeof(*log));
    log->start = seconds_now();
    log->resume_step = resume_step;
    if (!options->output[0]) { return true; }
    snprintf(log->folder, sizeof(log->folder), "%s", options->output);
    if (!log_prepare(log, "main.log", false, &log->text, &log->text_kept, error) ||
        !log_prepare(log, "main.jsonl", true, &log->json, &log->json_kept, error)) {
        log_close(log);
        return false;
    }
    log_header(log, options, notes, note_count);
    return log_flush(log, error);
}

// ---- events

// Begins the JSON object of an event; false when the earlier run has logged it (or there is no log), then nothing is to be written.
static bool json_begin(Log* log, LogEvent event, int64_t step) {
    if (!log->json || (step == log->resume_step && (log->json_kept >> event & 1u))) { return false; }
    fprintf(log->json, "{\"step\":%" PRId64 ",\"event\":\"%s\"", step, log_event_names[event]);
    json_field_float(log->json, "elapsed", (float)(seconds_now() - log->start));
    return true;
}

static bool log_end(Log* log, Error* error) { return !log->json || log_flush(log, error); }

static bool log_wants_line(const Log* log, LogEvent event, int64_t step) {
    return log->text && !(step == log->resume_step && (log->text_kept >> event & 1u));
}

bool log_train(Log* log, const StepRecord* r, Error* error) {
    if (log_wants_line(log, LOG_TRAIN, r->step)) {
        fprintf(log->text, "s:%" PRId64 " trl:%.4f lr:%.6f norm:%.2f exact_lr:%.9g ms:%.2f tps:%.0f tokens:%" PRId64, r->step,
                (double)r->loss, r->lr, (double)r->norm, r->lr, r->milliseconds, r->tokens_per_second, r->tokens);
        if (r->ranks > 1) { fprintf(log->text, " sent:%" PRIu64 " hidden:%.3f", ledger_all(&r->traffic), ledger_hidden(&r->traffic)); }
        fprintf(log->text, "\n");
    }
    if (json_begin(log, LOG_TRAIN, r->step)) {
        json_field_float(log->json, "loss", r->loss);
        json_field_float(log->json, "norm", r->norm);
        json_field(log->json, "lr", r->lr);
        json_field_float(log->json, "loss_z", r->loss_z);
        json_field_float(log->json, "norm_z", r->norm_z);
        json_field_float(log->json, "ms", (float)r->milliseconds);
        json_field_float(log->json, "tokens_per_second", (float)r->tokens_per_second);
        json_field_float(log->json, "mfu", r->mfu >= 0 ? (float)r->mfu : NAN);
        fprintf(log->json, ",\"tokens\":%" PRId64, r->tokens);
        if (r->ranks > 1) { json_traffic(log->json, &r->traffic); }
        fprintf(log->json, "}\n");
    }
    return log_end(log, error);
}

bool log_val(Log* log, int64_t step, float loss, Error* error) {
    if (log_wants_line(log, LOG_VAL, step)) { fprintf(log->text, "s:%" PRId64 " tel:%.4f\n", step, (double)loss); }
    if (json_begin(log, LOG_VAL, step)) {
        json_field_float(log->json, "loss", loss);
        fprintf(log->json, "}\n");
    }
    return log_end(log, error);
}

// The HellaSwag score.
bool log_eval(Log* log, int64_t step, int64_t correct, int64_t total, Error* error) {
    double share = total > 0 ? (double)correct / (double)total : NAN;
    if (log_wants_line(log, LOG_EVAL, step)) { fprintf(log->text, "s:%" PRId64 " eval:%.4f\n", step, share); }
    if (json_begin(log, LOG_EVAL, step)) {
        json_field(log->json, "accuracy", share);
        fprintf(log->json, ",\"correct\":%" PRId64 ",\"total\":%" PRId64 "}\n", correct, total);
    }
    return log_end(log, error);
}

bool log_sample(Log* log, int64_t step, const char* text, size_t bytes, Error* error) {
    if (json_begin(log, LOG_SAMPLE, step)) {
        fprintf(log->json, ",\"text\":");
        json_put_string(log->json, text, bytes);
        fprintf(log->json, "}\n");
    }
    return log_end(log, error);
}

bool log_checkpoint(Log* log, int64_t step, const char* path, double seconds, Error* error) {
    if (json_begin(log, LOG_CHECKPOINT, step)) {
        json_field_text(log->json, "path", path);
        json_field(log->json, "seconds", seconds);
        fprintf(log->json, "}\n");
    }
    if (log->text && (fsync(fileno(log->text)) != 0 || fsync(fileno(log->json)) != 0)) {
        errno = 0; // some file systems cannot; the events are flushed in any case
    }
    return log_end(log, error);
}

// An update that was left out, and why: "loss z-score", "norm z-score", "not finite".
bool log_skip(Log* log, int64_t step, const char* reason, float value, int64_t residuals_lost, Error* error) {
    if (json_begin(log, LOG_SKIP, step)) {
        json_field_text(log->json, "reason", reason);
        json_field_float(log->json, "value", value);
        json_field(log->json, "residuals_lost", (double)residuals_lost);
        fprintf(log->json, "}\n");
    }
    return log_end(log, error);
}

// What kappa.h measured of a tensor, and the width that it chose.
typedef struct {
    const char* tensor;
    int bits, next_bits; // while it was measured, and from the next step on
    double kappa, predicted, measured;
    int64_t spikes;      // of all matrices, so far
} KappaRecord;

bool log_kappa(Log* log, int64_t step, const KappaRecord* r, Error* error) {
    if (json_begin(log, LOG_KAPPA, step)) {
        json_field_text(log->json, "tensor", r->tensor);
        json_field(log->json, "bits", r->bits);
        json_field(log->json, "next_bits", r->next_bits);
        json_field(log->json, "kappa", r->kappa);
        json_field(log->json, "variance_predicted", r->predicted);
        json_field(log->json, "variance_measured", r->measured);
        json_field(log->json, "spikes", (double)r->spikes);
        fprintf(log->json, "}\n");
    }
    return log_end(log, error);
}
