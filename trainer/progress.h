// progress.h - how far a run is: a bar with loss, speed and time to go that is redrawn in one line of the terminal, and the curve of
// the losses drawn with characters. All of it goes to stderr or where the caller says; results stay on stdout.
#pragma once
#include "log.h"
#include <sys/ioctl.h>

enum { PROGRESS_AUTO, PROGRESS_ON, PROGRESS_OFF }; // the words of --progress

#define PROGRESS_REDRAW 0.1 // seconds between drawings of the bar
#define PROGRESS_LINES 10.0 // seconds between lines when a bar is asked for and there is no terminal

typedef struct {
    FILE* out;     // NULL: show nothing
    bool terminal; // redraw one line; else print lines
    bool drawn;    // a bar stands in the line of the cursor
    double start, last;
    double first; // how much was done at the start
} Progress;

// mode: PROGRESS_AUTO (a bar on a terminal only), PROGRESS_ON, PROGRESS_OFF. first: what was done before, such as the step of a
// checkpoint, so that the time to go counts only this run's speed.
void progress_begin(Progress* progress, FILE* out, int mode, double first) {
    memset(progress, 0, sizeof(*progress));
    progress->terminal = isatty(fileno(out)) == 1;
    progress->out = mode == PROGRESS_OFF || (mode == PROGRESS_AUTO && !progress->terminal) ? NULL : out;
    progress->start = seconds_now();
    progress->last = progress->start - PROGRESS_REDRAW; // the first call draws a bar, but prints no line
    progress->first = first;
}

// Wipes the bar, so that a line can be printed; the next call draws it again.
void progress_clear(Progress* progress) {
    if (!progress->out || !progress->drawn) { return; }
    fprintf(progress->out, "\r\033[K");
    fflush(progress->out);
    progress->drawn = false;
    progress->last = 0;
}

static int terminal_width(FILE* out) {
    struct winsize size;
    memset(&size, 0, sizeof(size));
    return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col >= 20 ? size.ws_col : 80;
}

// [=====>    ]  50% text | 1m10s, 1m08s to go
static void progress_line(char* line, size_t size, double share, double elapsed, double left, const char* text, int width) {
    char rest[512], time[64], to_go[64];
    duration_text(elapsed, time, sizeof(time));
    duration_text(left, to_go, sizeof(to_go));
    snprintf(rest, sizeof(rest), " %3d%% %s | %s, %s to go", (int)(100 * share), text, time, to_go);
    int room = width - 3 - (int)strlen(rest); // the brackets, and one column so that no terminal wraps
    if (room < 5) {
        snprintf(line, size, "%.*s", width > 1 ? width - 1 : 0, rest + 1);
        return;
    }
    room = room > 40 ? 40 : room;
    int full = (int)(share * room);
    char bar[48];
    for (int i = 0; i < room; i++) { bar[i] = i < full ? '=' : i == full ? '>' : ' '; }
    snprintf(line, size, "[%.*s]%s", room, bar, rest);
}

// done of total, with a text of what is going on; cheap when called often.
void progress_draw(Progress* progress, double done, double total, const char* text) {
    if (!progress->out) { return; }
    double now = seconds_now();
    bool last = done >= total;
    if (!last && now - progress->last < (progress->terminal ? PROGRESS_REDRAW : PROGRESS_LINES)) { return; }
    progress->last = now;
    double share = total > 0 ? done / total : 1, elapsed = now - progress->start;
    share = !(share > 0) ? 0 : share > 1 ? 1 : share;
    double left = done > progress->first ? elapsed * (total - done) / (done - progress->first) : -1;
    char line[640];
    int width = progress->terminal ? terminal_width(progress->out) : 100;
    progress_line(line, sizeof(line), share, elapsed, left < 0 && last ? 0 : left, text, width);
    fprintf(progress->out, progress->terminal ? "\r%s\033[K" : "%s\n", line);
    fflush(progress->out);
    progress->drawn = progress->terminal;
}

// After an update.
void progress_step(Progress* progress, const StepRecord* r) {
    char text[160];
    if (!progress->out) { return; }
    snprintf(text, sizeof(text), "%" PRId64 "/%" PRId64 " | loss %.4f | %.0f tok/s", r->step + 1, r->steps, (double)r->loss,
             r->tokens_per_second);
    progress_draw(progress, (double)(r->step + 1), (double)r->steps, text);
}

// ---- the curve

#define LOSS_POINTS 512

// Losses of any number of steps in little memory: each point is the mean of `stride` of them; when full, pairs become one.
typedef struct {
    float steps[LOSS_POINTS], losses[LOSS_POINTS];
    size_t count;
    int64_t stride, pending;
    double step_sum, loss_sum;
} LossHistory;

void loss_history_add(LossHistory* h, int64_t step, float loss) {
    if (!isfinite(loss)) { return; }
    if (h->stride == 0) { h->stride = 1; }
    h->step_sum += (double)step;
    h->loss_sum += (double)loss;
    if (++h->pending < h->stride) { return; }
    h->steps[h->count] = (float)(h->step_sum / (double)h->pending);
    h->losses[h->count++] = (float)(h->loss_sum / (double)h->pending);
    h->step_sum = h->loss_sum = 0;
    h->pending = 0;
    if (h->count < LOSS_POINTS) { return; }
    for (size_t i = 0; i < LOSS_POINTS / 2; i++) {
        h->steps[i] = 0.5f * (h->steps[2 * i] + h->steps[2 * i + 1]);
        h->losses[i] = 0.5f * (h->losses[2 * i] + h->losses[2 * i + 1]);
    }
    h->count = LOSS_POINTS / 2;
    h->stride *= 2;
}

#define CURVE_WIDTH 160 // most characters across
#define CURVE_HEIGHT 48 // and down

// Whether the user's terminal shows UTF-8, as the environment says.
bool terminal_is_utf8(void) {
    const char* names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        const char* value = getenv(names[i]);
        if (value && value[0]) { return strstr(value, "UTF-8") || strstr(value, "utf8") || strstr(value, "utf-8"); }
    }
    return false;
}

// Means of the losses in each of `columns` equal ranges of steps; gaps are bridged by straight lines. Returns the number of points.
static size_t curve_columns(double* column, int columns, const float* steps, const float* losses, size_t count, double* first,
                            double* last) {
    double weight[2 * CURVE_WIDTH] = {0};
    size_t points = 0;
    *first = INFINITY;
    *last = -INFINITY;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(steps[i]) || !isfinite(losses[i])) { continue; }
        *first = steps[i] < *first ? (double)steps[i] : *first;
        *last = steps[i] > *last ? (double)steps[i] : *last;
        points++;
    }
    for (int x = 0; x < columns; x++) { column[x] = 0; }
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(steps[i]) || !isfinite(losses[i])) { continue; }
        int x = *last > *first ? (int)(((double)steps[i] - *first) / (*last - *first) * (columns - 1) + 0.5) : 0;
        column[x] += (double)losses[i];
        weight[x] += 1;
    }
    int before = -1;
    for (int x = 0; x < columns; x++) {
        if (weight[x] == 0) { continue; }
        column[x] /= weight[x];
        for (int k = before + 1; before >= 0 && k < x; k++) {
            column[k] = column[before] + (column[x] - column[before]) * (k - before) / (x - before);
        }
        before = x;
    }
    for (int x = before + 1; before >= 0 && x < columns; x++) { column[x] = NAN; } // a single step: nothing beside it
    return points;
}

// One character cell: a braille pattern of 2 x 4 dots (U+2800 and its bits), or an asterisk.
static void curve_cell(FILE* out, unsigned dots, bool unicode) {
    if (unicode && dots) {
        unsigned code = 0x2800 + dots;
        fprintf(out, "%c%c%c", (int)(0xE0 | code >> 12), (int)(0x80 | (code >> 6 & 63)), (int)(0x80 | (code & 63)));
    } else {
        fputc(dots ? '*' : ' ', out);
    }
}

// Draws losses over steps, width x height characters and an axis; points that are not finite are left out.
void loss_curve_print(FILE* out, const float* steps, const float* losses, size_t count, int width, int height, bool unicode) {
    static const unsigned char braille[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    unsigned char cells[CURVE_HEIGHT][CURVE_WIDTH] = {{0}};
    double column[2 * CURVE_WIDTH], first, last, low = INFINITY, high = -INFINITY;
    width = width < 2 ? 2 : width > CURVE_WIDTH ? CURVE_WIDTH : width;
    height = height < 2 ? 2 : height > CURVE_HEIGHT ? CURVE_HEIGHT : height;
    int across = unicode ? 2 : 1, down = unicode ? 4 : 1, columns = width * across, rows = height * down;
    if (curve_columns(column, columns, steps, losses, count, &first, &last) == 0) { return; }
    for (int x = 0; x < columns; x++) {
        low = column[x] < low ? column[x] : low;
        high = column[x] > high ? column[x] : high;
    }
    double scale = high > low ? (rows - 1) / (high - low) : 0;
    for (int x = 0, before = -1; x < columns && !isnan(column[x]); x++) {
        int y = (int)((high - column[x]) * scale + 0.5);
        int from = before < 0 ? y : before < y ? before + 1 : before > y ? before - 1 : y; // joined to the column before
        for (int k = from < y ? from : y; k <= (from < y ? y : from); k++) {
            cells[k / down][x / across] |= unicode ? braille[k % 4][x % 2] : 1;
        }
        before = y;
    }
    for (int k = 0; k < height; k++) {
        if (k == 0 || k == height - 1) {
            fprintf(out, "%9.4f |", k == 0 ? high : low);
        } else {
            fprintf(out, "%9s |", k == 1 ? "loss" : "");
        }
        for (int x = 0; x < width; x++) { curve_cell(out, cells[k][x], unicode); }
        fprintf(out, "\n");
    }
    fprintf(out, "%9s +", "step");
    for (int x = 0; x < width; x++) { fputc('-', out); }
    char end[32];
    int gap = width - snprintf(end, sizeof(end), "%.0f", last);
    fprintf(out, "\n%11s%-*.0f%s\n", "", gap, first, end);
}
