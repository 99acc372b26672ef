// evaluate.cuh - the mean loss on held-out tokens, in file order, forward pass only. Included by train_gpt.cu after the model.
#pragma once

// Work space of evaluation: host and device arrays of 2 rows ints (host: T + 1 more), one float on the device.
typedef struct {
    int *host, *device;
    float* result;
} EvalSpace;

// Loss over the first `batches` micro-batches of the data (-1 = all of it), or what there is; a last short one counts as it is.
bool eval_loss(Gpt* g, const Loader* data, EvalSpace space, int64_t batches, double* loss, Error* error) {
    size_t T = (size_t)data->T, batch = g->rows / T;
    uint64_t sequences = data->sequences;
    if (batches >= 0 && (uint64_t)batches < ceil_div(sequences, batch)) { sequences = (uint64_t)batches * batch; }
    double sum = 0.0;
    for (uint64_t first = 0; first < sequences; first += batch) {
        size_t count = min_size(batch, (size_t)(sequences - first)), N = count * T;
        int32_t* sequence = space.host + 2 * g->rows;
        for (size_t s = 0; s < count; s++) {
            if (!loader_sequence(data, first + s, sequence, error)) { return false; }
            memcpy(space.host + s * T, sequence, T * sizeof(int));
            memcpy(space.host + N + s * T, sequence + 1, T * sizeof(int));
        }
        device_upload(space.device, space.host, 2 * N * sizeof(int));
        gpt_forward(g, space.device, (int)count, (int)T);
        gpt_head(g, space.result, space.device + N, N, 0.0f, false, false);
        float batch_sum;
        device_download(&batch_sum, space.result, sizeof(batch_sum)); // also: the host array is free again
        sum += batch_sum;
    }
    *loss = sum / ((double)sequences * (double)T);
    return sequences > 0 || fail(error, "no sequence of %zu tokens to evaluate on", T);
}

// ---- HellaSwag: which of four endings does the model find likeliest, by mean loss over the ending's tokens ("acc_norm") ----

typedef struct {
    int64_t correct, total;
} HellaSwagScore;

// Lays `count` endings of an example, from `first` on, out as rows of T tokens; only the endings' tokens have targets.
static void hellaswag_rows(const HellaSwagExample* e, int first, int count, int T, int* tokens, int* targets) {
    for (int r = 0; r < count; r++) {
        const uint16_t* ending = e->ending[first + r];
        int n = e->ending_count[first + r], context = e->context_count;
        for (int t = 0; t < T; t++) {
            int next = t + 1 - context; // the place in the ending that follows token t
            tokens[r * T + t] = t < context ? e->context[t] : t - context < n ? ending[t - context] : 0;
            targets[r * T + t] = next >= 0 && next < n ? ending[next] : -1;
        }
    }
}

static bool hellaswag_example(Gpt* g, const HellaSwagExample* e, EvalSpace space, float* losses, bool* correct, Error* error) {
    int longest = 0, best = 0;
    double scores[HELLASWAG_ENDINGS];
    for (int i = 0; i < HELLASWAG_ENDINGS; i++) { longest = e->ending_count[i] > longest ? e->ending_count[i] : longest; }
    int T = e->context_count + longest, fit = T > 0 ? (int)(g->rows / (size_t)T) : 0;
    if (T > g->config.max_seq_len || fit < 1) {
        return fail(error, "a HellaSwag example has %d tokens; the model's context is %d and a micro-batch %zu: give a larger --batch", T,
                    g->config.max_seq_len, g->rows);
    }
    for (int first = 0; first < HELLASWAG_ENDINGS; first += fit) {
        int count = HELLASWAG_ENDINGS - first < fit ? HELLASWAG_ENDINGS - first : fit;
        size_t N = (size_t)count * (size_t)T;
        hellaswag_rows(e, first, count, T, space.host, space.host + N);
        device_upload(space.device, space.host, 2 * N * sizeof(int));
        gpt_forward(g, space.device, count, T);
        gpt_head(g, space.result, space.device + N, N, 0.0f, false, false);
        device_download(losses, g->losses, N * sizeof(float));
        for (int r = 0; r < count; r++) {
            double sum = 0.0;
            for (int t = 0; t < T; t++) { sum += losses[r * T + t]; }
            scores[first + r] = sum / e->ending_count[first + r];
            best = scores[first + r] < scores[best] ? first + r : best;
        }
    }
    *correct = best == e->label;
    return true;
}

bool hellaswag_score(Gpt* g, const char* path, EvalSpace space, HellaSwagScore* score, Error* error) {
    HellaSwag set;
    if (!hellaswag_open(&set, path, (uint64_t)g->config.vocab_size, error)) { return false; }
    float* losses = (float*)need(malloc(g->rows * sizeof(float)));
    score->correct = score->total = 0;
    bool good = true;
    for (size_t i = 0; good && i < set.count; i++) {
        bool correct = false;
        good = hellaswag_example(g, &set.examples[i], space, losses, &correct, error);
        score->correct += correct;
        score->total++;
    }
    free(losses);
    hellaswag_close(&set);
    return good && (score->total > 0 || fail(error, "%s holds no examples", path));
}
