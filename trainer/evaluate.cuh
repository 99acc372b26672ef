// evaluate.cuh - the mean loss on held-out tokens, in file order, forward pass only. Included by train_gpt.cu after the model.
#pragma once

// Work space of evaluation: host and device arrays of 2 rows ints (host: T + 1 more), one float on the device.
typedef struct {
    int *host, *device;
    float* result;
} EvalSpace;

// Tokens and targets of `count` sequences from `first` on, to the device.
static bool eval_load(const Gpt* g, const Loader* data, EvalSpace space, uint64_t first, size_t count, Error* error) {
    size_t T = (size_t)data->T, N = count * T;
    int32_t* sequence = space.host + 2 * g->rows;
    for (size_t s = 0; s < count; s++) {
        if (!loader_sequence(data, first + s, sequence, error)) { return false; }
        memcpy(space.host + s * T, sequence, T * sizeof(int));
        memcpy(space.host + N + s * T, sequence + 1, T * sizeof(int));
    }
    device_upload(space.device, space.host, 2 * N * sizeof(int));
    return true;
}

// Mean loss over the first `limit` sequences of the data, or what there is. Ranks take micro-batches in turn; where weights come from
// several ranks, one without a micro-batch takes part with none. Collective.
bool eval_loss(Gpt* g, const Comm* comm, const Loader* data, EvalSpace space, uint64_t limit, double* loss, Error* error) {
    size_t T = (size_t)data->T, batch = g->rows / T;
    uint64_t sequences = limit < data->sequences ? limit : data->sequences, stride = (uint64_t)batch * (uint64_t)comm->size;
    double sum = 0.0, *sums = (double*)need(malloc((size_t)comm->size * sizeof(double)));
    bool good = sequences > 0 || fail(error, "no sequence of %zu tokens to evaluate on", T);
    for (uint64_t round = 0; round < sequences; round += stride) {
        uint64_t first = round + (uint64_t)comm->rank * batch;
        size_t count = first < sequences ? min_size(batch, (size_t)(sequences - first)) : 0;
        good = good && eval_load(g, data, space, first, count, error);
        count = good ? count : 0;
        gpt_forward(g, space.device, (int)count, (int)T);
        gpt_head(g, space.result, space.device + count * T, count * T, 0.0f, false, false);
        float batch_sum;
        comm_sync(comm);
        device_download(&batch_sum, space.result, sizeof(batch_sum)); // also: the host array is free again
        sum += batch_sum;
    }
    comm_gather_host(comm, &sum, sizeof(sum), sums, TRAFFIC_CONTROL);
    *loss = 0.0;
    for (int r = 0; r < comm->size; r++) { *loss += sums[r] / ((double)sequences * (double)T); }
    free(sums);
    return comm_agree(comm, good, error);
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
        if (g->zero && g->zero->comm) { comm_sync(g->zero->comm); }
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

// Examples are spread over ranks; at ZeRO 3 every rank goes through all of them, since each pass needs all ranks. Collective.
bool hellaswag_score(Gpt* g, const Comm* comm, const char* path, EvalSpace space, HellaSwagScore* score, Error* error) {
    HellaSwag set;
    bool together = g->zero && g->zero->stage == 3, good = hellaswag_open(&set, path, (uint64_t)g->config.vocab_size, error);
    score->correct = score->total = 0;
    if (!comm_agree(comm, good, error)) {
        if (good) { hellaswag_close(&set); }
        return false;
    }
    char text[80];
    snprintf(text, sizeof(text), "%zu examples with checksum %08x", set.count, hellaswag_checksum(&set));
    if (!comm_same(comm, "the HellaSwag data", text, TRAFFIC_LOADER, error)) {
        hellaswag_close(&set);
        return false;
    }
    float* losses = (float*)need(malloc(g->rows * sizeof(float)));
    for (size_t i = together ? 0 : (size_t)comm->rank; good && i < set.count; i += together ? 1 : (size_t)comm->size) {
        bool correct = false;
        good = hellaswag_example(g, &set.examples[i], space, losses, &correct, error);
        score->correct += correct;
        score->total++;
    }
    free(losses);
    hellaswag_close(&set);
    if (!comm_agree(comm, good, error)) { return false; }
    HellaSwagScore* all = (HellaSwagScore*)need(malloc((size_t)comm->size * sizeof(*score)));
    comm_gather_host(comm, score, sizeof(*score), all, TRAFFIC_CONTROL);
    for (int r = 0; !together && r < comm->size; r++) {
        score->correct += r == comm->rank ? 0 : all[r].correct;
        score->total += r == comm->rank ? 0 : all[r].total;
    }
    free(all);
    return score->total > 0 || fail(error, "%s holds no examples", path);
}
