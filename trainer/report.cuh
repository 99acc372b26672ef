// report.cuh - what a run shows and writes: the lines before, during and after its steps. Included by train_gpt.cu.
#pragma once

// What a run shows and writes, beside the trainer.
typedef struct {
    Log log;
    RunLock lock;
    Progress progress;
    LossHistory history;
    Rate rate;
    double start;            // seconds
    size_t resident;         // bytes of memory in use at start-up
    int64_t saved_step;      // -1: nothing saved yet by this run
    double val_loss;         // the last one
    double step_seconds;     // of all steps of this run but the first, which warms up
    int64_t step_count;
} Run;

static bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

static bool run_report_skip(Trainer* t, Run* r, const StepResult* result, Error* error) {
    bool by_loss = strncmp(result->skipped, "loss", 4) == 0, by_norm = strncmp(result->skipped, "norm", 4) == 0;
    double value = by_loss ? result->loss_z : by_norm ? result->norm_z : (double)NAN;
    progress_clear(&r->progress);
    if (isnan(value)) {
        printf("skipping update: loss %f, gradient norm %f\n", result->loss, result->norm);
    } else {
        printf("skipping update due to %s of %f\n", result->skipped, value);
    }
    return log_skip(&r->log, t->step - 1, result->skipped, (float)value, t->residuals_lost, error);
}

// The widths of kappa's momentum, and what they were chosen by.
static bool run_report_kappa(Trainer* t, Run* r, Error* error) {
    const Kappa* k = &t->optimizer.kappa;
    progress_clear(&r->progress);
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        const TensorSpec* s = &t->gpt.table.tensors[i];
        if (s->role != ROLE_MATRIX) { continue; }
        if (k->bits[i] == 0) { continue; } // no gradient yet
        char next[32] = "";
        if (k->width[i] != k->bits[i]) { snprintf(next, sizeof(next), "; from now on %d bits", k->width[i]); }
        printf("kappa: %-9s %2d bits, kappa %.3f, rounding variance %.4f predicted, %.4f measured%s\n", s->name, k->bits[i], k->kappa[i],
               k->predicted[i], k->measured[i], next);
        KappaRecord record = {s->name, k->bits[i], k->width[i], k->kappa[i], k->predicted[i], k->measured[i], k->spikes};
        if (!log_kappa(&r->log, t->step - 1, &record, error)) { return false; }
    }
    return true;
}

static bool run_report_step(Trainer* t, Run* r, const StepResult* result, double seconds, Error* error) {
    char line[320];
    double tokens = result->tokens, flops = machine_flops() * t->comm->size;
    StepRecord record = {t->step - 1, t->steps, (float)result->loss, (float)result->loss_z, (float)result->norm, (float)result->norm_z,
                         result->lr, 1e3 * seconds, flops > 0 ? gpt_step_flops(&t->gpt, tokens, t->T) / (seconds * flops) : -1.0,
                         rate_add(&r->rate, tokens, seconds), -1.0, (int64_t)t->sequence * t->T, t->comm->size, result->traffic};
    if (r->step_count++ > 0) { r->step_seconds += seconds; }
    record.eta = (double)(t->steps - t->step) * (double)t->sequences * t->T / fmax(record.tokens_per_second, 1e-9);
    loss_history_add(&r->history, t->step, (float)result->loss);
    if (due(t->step, t->options->log_every) || (t->options->log_every > 0 && t->step == t->steps)) {
        progress_clear(&r->progress);
        step_line(&record, line, sizeof(line));
        printf("%s\n", line);
    }
    if (result->skipped && !run_report_skip(t, r, result, error)) { return false; }
    if (result->measured && !run_report_kappa(t, r, error)) { return false; }
    progress_step(&r->progress, &record);
    fflush(stdout);
    return log_train(&r->log, &record, error);
}

static void train_print(const Trainer* t) {
    const ModelHeader* m = &t->gpt.config;
    machine_print(stdout);
    options_print(t->options, stdout);
    printf("model: %d layers, %d heads, %d channels, context %d, vocabulary %d (padded %d): %zu parameters\n", m->layers, m->heads, m->channels,
           m->max_seq_len, m->vocab_size, m->padded_vocab, t->gpt.table.packed);
    printf("data: %" PRIu64 " tokens in %zu file(s), %" PRIu64 " sequences of %d; a step takes %zu in %zu micro-batch(es); %" PRId64 " steps\n",
           t->train.tokens, t->train.shard_count, t->train.sequences, t->T, t->sequences, t->micro_steps, t->steps);
    if (t->comm->size > 1) {
        double elements, work;
        owners_balance(&t->gpt.table, t->comm->size, t->zero.owner, &elements, &work);
        printf("ranks: %d on %d node(s), ZeRO %d; largest share / mean: parameters %.3f, matrix work %.3f\n", t->comm->size, t->comm->nodes,
               t->zero.stage, elements, work);
        if (t->options->sample_every > 0 && t->zero.stage == 3) {
            fprintf(stderr, "notice: no samples: at ZeRO 3 no rank holds the whole model; use generate on a checkpoint\n");
        }
    }
#ifndef FLOATX_BF16
    if (t->options->master_format != 0) { fprintf(stderr, "notice: --master-format split means nothing here: weights are fp32, without masters\n"); }
#endif
    memory_print(&t->gpt.memory, stdout);
    if (t->zero.held) { printf("optimizer state: %.4f bytes a parameter\n", (double)t->state_bytes / (double)t->zero.held); }
    fflush(stdout);
}

// One line a rank about all that it sent. Collective.
static void train_print_traffic(const Comm* comm) {
    Ledger mine, *all = (Ledger*)need(malloc((size_t)comm->size * sizeof(Ledger)));
    comm_ledger(comm, &mine);
    comm_gather_host(comm, &mine, sizeof(mine), all, TRAFFIC_CONTROL);
    for (int rank = 0; comm->size > 1 && rank < comm->size; rank++) {
        const Ledger* l = &all[rank];
        printf("network, rank %d: %" PRIu64 " bytes sent (", rank, ledger_all(l));
        for (int p = 0; p < TRAFFIC_PURPOSES; p++) { printf("%s%s %" PRIu64, p ? ", " : "", traffic_names[p], ledger_sent(l, (TrafficPurpose)p)); }
        printf("), %" PRIu64 " inside nodes, %" PRIu64 " between; %.2f s of exchanges, %.0f%% hidden\n", ledger_class(l, LINK_INSIDE),
               ledger_class(l, LINK_BETWEEN), l->busy, 100.0 * ledger_hidden(l));
    }
    free(all);
}

static void train_finish(Trainer* t, Run* r, const char* stopped) {
    char config[PATH_MAX + 16], command[4 * OPTION_TEXT_SIZE + 512], folder[PATH_MAX];
    Error error;
    progress_clear(&r->progress);
    if (r->history.count > 1) {
        loss_curve_print(stdout, r->history.steps, r->history.losses, r->history.count, 72, 14, terminal_is_utf8());
    }
    double average = r->step_count > 1 ? 1e3 * r->step_seconds / (double)(r->step_count - 1) : 0.0;
    printf("step %" PRId64 " reached, %" PRId64 " of them in %.1f s now; total average iteration time: %f ms\n", t->step, r->step_count,
           seconds_now() - r->start, average);
    train_print_traffic(t->comm);
#if !ON_GPU
    printf("memory: %.1f MiB resident, %.1f of them since start-up; the table has %.1f\n", (double)memory_resident() / 1048576.0,
           ((double)memory_resident() - (double)r->resident) / 1048576.0, (double)t->gpt.memory.bytes / 1048576.0);
#endif
    if (t->skipped) { printf("%" PRId64 " update(s) were skipped\n", t->skipped); }
    if (t->residuals_lost) { printf("%" PRId64 " of them lost a rounding residual\n", t->residuals_lost); }
    if (t->optimizer.kappa.spikes) { printf("%" PRId64 " spike(s) of a matrix's gradient were scaled down\n", t->optimizer.kappa.spikes); }
    if (stopped && t->options->output[0] && checkpoint_folder(folder, t->options->output, (uint64_t)t->step, &error)) {
        snprintf(config, sizeof(config), "%s/config.txt", folder);
        options_resume_command(t->options, config, command, sizeof(command));
        printf("stopped by %s; to go on:\n%s\n", stopped, command);
    } else if (stopped) {
        printf("stopped by %s\n", stopped);
    }
}
