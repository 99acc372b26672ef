// update.cuh - from summed gradients to new weights: the optimizer's configuration, the place of every unit's state, the numbers of a
// step (learning rate, betas, factors of clipping), the update itself, and what becomes of gradients where one is left out.
// Included by train_gpt.cu inside the trainer.
#pragma once

// ---------------------------------------------------------------------------------------------------------------------------------
// Configuration and memory

static OptimizerConfig trainer_optimizer_config(const Options* o) {
    static const int kappa_bits[] = {0, 2, 4, 6, 8, 32}; // of KAPPA_BITS_WORDS
    OptimizerConfig c;
    memset(&c, 0, sizeof(c));
    c.kind = (OptimizerKind)o->optimizer;
    c.format = (StateFormat)o->state_format;
    c.lr_embedding = (float)o->lr_embedding;
    c.lr_vector = (float)o->lr_vector;
    c.nesterov = o->nesterov;
    c.cautious_decay = o->cautious_decay;
    c.trust_low = (float)o->trust_low;
    c.trust_high = (float)o->trust_high;
    c.trust_base = (float)o->trust_base;
    c.update_clip = (float)o->update_clip;
    c.trust = (float)o->lars_trust;
    c.soap_every = o->soap_every;
    c.kappa_bytes = o->kappa_bytes;
    c.kappa_target = o->kappa_target;
    c.kappa_every = (int)(o->kappa_every < INT_MAX ? o->kappa_every : INT_MAX);
    c.kappa_bits = kappa_bits[o->kappa_bits];
    c.kappa_residual = o->kappa_residual;
    c.kappa_equilibrate = o->kappa_equilibrate;
    c.kappa_stochastic = o->kappa_rounding == 1;
    c.kappa_embedding = o->kappa_embedding;
    c.kappa_spike = o->kappa_spike;
    return c;
}

// Fills `at` (unit_count) with the place of each held unit's state; returns the bytes of all.
static size_t trainer_place_state(const Trainer* t, const Optimizer* optimizer, size_t* at) {
    const ParamTable* table = &t->gpt.table;
    size_t bytes = 0;
    for (size_t u = 0; u < table->unit_count; u++) {
        const Unit* unit = &table->units[u];
        at[u] = zero_holds(&t->zero, u) ? bytes : ZERO_ELSEWHERE;
        if (zero_holds(&t->zero, u)) { bytes += optimizer_unit_state(optimizer, &table->tensors[unit->tensor], unit).bytes; }
    }
    return bytes;
}

// Most bytes that state takes here. Kappa's momentum changes its widths inside them.
static size_t trainer_state_bound(const Trainer* t) {
    const ParamTable* table = &t->gpt.table;
    const OptimizerConfig* c = &t->optimizer.config;
    if (c->kind != OPTIMIZER_KAPPA) { return trainer_place_state(t, &t->optimizer, t->state_at); }
    bool* held = (bool*)need(calloc(max_size(1, table->unit_count), sizeof(bool)));
    size_t bytes = 0;
    for (size_t u = 0; u < table->unit_count; u++) {
        const TensorSpec* spec = &table->tensors[table->units[u].tensor];
        held[u] = zero_holds(&t->zero, u);
        bool other = held[u] && optimizer_for(c, spec->role) != OPTIMIZER_KAPPA;
        if (other) { bytes += optimizer_unit_state(&t->optimizer, spec, &table->units[u]).bytes; }
    }
    bytes += kappa_state_bound(c, table, held);
    free(held);
    return bytes;
}

// What the optimizer keeps on this rank; allocates nothing of size.
static bool trainer_plan_optimizer(Trainer* t, Error* error) {
    const ParamTable* table = &t->gpt.table;
    Optimizer* z = &t->optimizer;
    z->config = trainer_optimizer_config(t->options);
    t->zero.carry = optimizer_carries(&z->config);
    t->state_at = (size_t*)need(calloc(max_size(1, table->unit_count), sizeof(size_t)));
    if (z->config.kind == OPTIMIZER_KAPPA && !kappa_plan(&z->kappa, &z->config, table, t->options->momentum, error)) { return false; }
    t->state_bytes = trainer_state_bound(t);
    trainer_place_state(t, z, t->state_at);
    for (size_t u = 0; u < table->unit_count; u++) {
        const Unit* unit = &table->units[u];
        if (zero_holds(&t->zero, u)) { t->work_bytes = max_size(t->work_bytes, optimizer_work_bytes(z, &table->tensors[unit->tensor], unit)); }
    }
    return true;
}

// A held unit as its optimizer sees it, its state at byte `at` of the arena in the layout of `optimizer`'s widths.
static OptimizerUnit trainer_unit(const Trainer* t, const Optimizer* optimizer, size_t u, size_t at) {
    const Unit* unit = &t->gpt.table.units[u];
    const TensorSpec* spec = &t->gpt.table.tensors[unit->tensor];
    UnitState layout = optimizer_unit_state(optimizer, spec, unit);
    OptimizerUnit o;
    memset(&o, 0, sizeof(o));
    o.rows = unit->rows;
    o.cols = unit->cols;
    o.count = unit->count;
    o.parts = spec->parts;
    o.role = spec->role;
    o.params = zero_unit_weights(&t->zero, u);
    o.grads = zero_unit_gradient(&t->zero, u);
    o.master = t->master ? t->master + t->zero.place[u] : NULL;
    o.master_low = t->master_low ? t->master_low + t->zero.place[u] : NULL;
    for (int i = 0; i < layout.count; i++) { o.state[i] = t->state + at + layout.arrays[i].at; }
    o.work = t->work;
    o.grad_scale = t->factors + u;
    o.measured = t->measured + u * OPTIMIZER_MEASURED;
    o.lr_scale = spec->role == ROLE_EMBEDDING ? optimizer->config.lr_embedding : spec->role == ROLE_VECTOR ? optimizer->config.lr_vector : 1.0f;
    o.decay = spec->decay;
    o.owner = zero_owns(&t->zero, u);
    o.tensor = (uint32_t)unit->tensor;
    o.first = unit->offset - spec->offset;
    o.updates = (uint32_t)(t->step - t->skipped);
    return o;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// A step's numbers

#define BATCH_WARMUP_START 0.25 // share of the full batch in the first step of --batch-warmup

// Sequences of a step: all, or during the warm-up of the batch a share that rises evenly.
static size_t trainer_batch_at(const Trainer* t, int64_t step) {
    int64_t warmup = t->options->batch_warmup;
    if (step >= warmup) { return t->sequences; }
    double share = BATCH_WARMUP_START + (1.0 - BATCH_WARMUP_START) * (double)step / (double)warmup;
    return max_size(1, (size_t)llround(share * (double)t->sequences));
}

// The square-root rule (Malladi et al. 2022, arXiv 2205.10287): the learning rate goes with the root of the batch.
static double trainer_lr_scale(const Trainer* t) {
    double base = t->options->base_batch > 0 ? (double)t->options->base_batch : (double)t->sequences * t->T;
    return sqrt((double)t->sequences_now * t->T / base);
}

// beta3 of AdEMAMix, by half-lives from beta1 to its value at the end of the run (Pagliardini et al. 2024, section 3).
static double trainer_beta3(const Options* o, double done) {
    if (o->beta1 <= 0.0 || o->beta3 <= o->beta1) { return o->beta3; }
    double from = log(0.5) / log(o->beta1) - 1.0, to = log(0.5) / log(o->beta3) - 1.0;
    return pow(0.5, 1.0 / (1.0 + from + done * (to - from)));
}

static StepScalars trainer_scalars(const Trainer* t, double lr) {
    const Options* o = t->options;
    int64_t updates = t->step - t->skipped; // before this one: a step that was left out is not in any moment
    double n = (double)(updates + 1), steps = (double)(t->step + 1), done = t->steps > 0 ? fmin(1.0, steps / (double)t->steps) : 1.0;
    double life = (double)o->beta2_half_life, tokens = (double)t->sequences_now * t->T;
    double all = ((double)t->sequence * t->T + tokens) * n / steps; // tokens of the updates, as if steps left out were like others
    double late = fmax(0.0, all - (double)trainer_batch_at(t, 0) * t->T);
    StepScalars s;
    memset(&s, 0, sizeof(s));
    s.lr = (float)lr;
    s.beta1 = (float)o->beta1;
    s.beta2 = (float)(life > 0 ? pow(0.5, tokens / life) : o->beta2); // Marek et al. 2025, arXiv 2507.07101
    s.beta3 = (float)trainer_beta3(o, done);
    s.eps = (float)o->eps;
    s.weight_decay = (float)o->weight_decay;
    s.momentum = (float)o->momentum;
    s.correction1 = (float)(1.0 - pow((double)s.beta1, n)); // of the betas that bodies use
    s.correction2 = (float)(1.0 - (life > 0 ? pow(0.5, all / life) : pow((double)s.beta2, n)));
    s.late1 = (float)(1.0 - pow((double)s.beta1, n - 1.0));
    s.late2 = (float)(1.0 - (life > 0 ? pow(0.5, late / life) : pow((double)s.beta2, n - 1.0)));
    s.alpha = (float)(o->alpha * done);
    s.decay_rate = (float)(1.0 - pow(n, -0.8));
    s.step = (uint32_t)t->step;
    s.updates = (uint32_t)updates;
    s.seed = (uint64_t)o->seed;
    return s;
}

// Each unit's factor: clipping by the global norm, or the rule against spikes.
static void trainer_factors(Trainer* t, double norm) {
    const Options* o = t->options;
    const ParamTable* table = &t->gpt.table;
    double clip = o->clip > 0 && norm > o->clip ? o->clip / norm : 1.0;
    for (size_t u = 0; u < table->unit_count; u++) {
        bool clips = optimizer_clips(&t->optimizer.config, table->tensors[table->units[u].tensor].role);
        double rms = sqrt((double)t->squares[u] / (double)table->units[u].count);
        t->host_factors[u] = (float)(clips ? clip : kappa_spike(&t->optimizer.kappa, &t->optimizer.config, u, rms));
    }
    device_upload(t->factors, t->host_factors, table->unit_count * sizeof(float));
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Kappa's widths

// Figures of all units on all ranks, from their owners. Collective.
static void trainer_gather_measured(const Trainer* t, float* all) {
    size_t units = t->gpt.table.unit_count, bytes = units * OPTIMIZER_MEASURED * sizeof(float), ranks = (size_t)t->comm->size;
    device_download(all, t->measured, bytes);
    if (t->zero.stage == 0) { return; }
    float* ours = (float*)need(malloc((ranks + 1) * bytes));
    memcpy(ours + ranks * units * OPTIMIZER_MEASURED, all, bytes);
    comm_gather_host(t->comm, ours + ranks * units * OPTIMIZER_MEASURED, bytes, ours, TRAFFIC_CONTROL);
    for (size_t u = 0; u < units; u++) {
        const float* owner = ours + ((size_t)t->zero.owner[u] * units + u) * OPTIMIZER_MEASURED;
        memcpy(all + u * OPTIMIZER_MEASURED, owner, OPTIMIZER_MEASURED * sizeof(float));
    }
    free(ours);
}

// Re-encodes the momentum where widths change.
static void trainer_repack(Trainer* t, const Kappa* next) {
    const ParamTable* table = &t->gpt.table;
    size_t *to = (size_t*)need(calloc(max_size(1, table->unit_count), sizeof(size_t))), held = 0;
    Optimizer after = t->optimizer;
    after.kappa = *next;
    trainer_place_state(t, &after, to);
    KappaMove* moves = (KappaMove*)need(calloc(max_size(1, table->unit_count), sizeof(KappaMove)));
    for (size_t u = 0; u < table->unit_count; u++) {
        if (!zero_holds(&t->zero, u)) { continue; }
        const Unit* unit = &table->units[u];
        const TensorSpec* spec = &table->tensors[unit->tensor];
        KappaMove move = {trainer_unit(t, &t->optimizer, u, t->state_at[u]), optimizer_unit_state(&t->optimizer, spec, unit),
                          optimizer_unit_state(&after, spec, unit), t->state_at[u], to[u], unit->tensor};
        moves[held++] = move;
    }
    kappa_repack(&t->optimizer.config, &t->optimizer.kappa, next, t->state, moves, held, t->scalars);
    for (int i = 0; i < table->tensor_count; i++) { // whatever the new width: what re-encoding loses is left, too
        t->residual[i] = t->residual[i] || (t->optimizer.config.kappa_residual && t->optimizer.kappa.width[i] != next->width[i]);
    }
    free(moves);
    free(t->state_at);
    t->state_at = to;
}

// Collective.
static void trainer_choose_widths(Trainer* t) {
    size_t units = t->gpt.table.unit_count;
    float* all = (float*)need(malloc(max_size(1, units) * OPTIMIZER_MEASURED * sizeof(float)));
    Kappa next;
    trainer_gather_measured(t, all);
    if (kappa_choose(&next, &t->optimizer.kappa, &t->optimizer.config, &t->gpt.table, all, t->options->momentum)) { trainer_repack(t, &next); }
    t->optimizer.kappa = next;
    free(all);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The update

// Whether the buffer holds the residual of any tensor.
static bool trainer_has_residual(const Trainer* t) {
    bool any = false;
    for (int i = 0; i < t->gpt.table.tensor_count; i++) { any = any || t->residual[i]; }
    return any;
}

// Owners change their weights, group by group; new weights leave as soon as their group is done.
static void trainer_update(Trainer* t, StepResult* result) {
    const OptimizerConfig* c = &t->optimizer.config;
    *t->host_scalars = trainer_scalars(t, result->lr);
    device_upload(t->scalars, t->host_scalars, sizeof(*t->host_scalars));
    t->optimizer.scalars = t->scalars;
    trainer_factors(t, result->norm);
    for (int g = 0; g < t->zero.groups; g++) {
        for (size_t i = t->zero.first[g]; i < t->zero.first[g + 1]; i++) {
            size_t u = t->zero.units[i];
            if (!zero_holds(&t->zero, u)) { continue; }
            OptimizerUnit unit = trainer_unit(t, &t->optimizer, u, t->state_at[u]);
            optimizer_update(&t->optimizer, &unit);
            bool left = optimizer_for(c, unit.role) == OPTIMIZER_KAPPA && unit.role == ROLE_MATRIX; // by the update itself
            if (t->zero.carry && !left) { device_zero(unit.grads, unit.count * sizeof(floatX)); }
        }
        zero_weights_changed(&t->zero, g);
    }
    if (t->zero.carry) { zero_grads_clear_others(&t->zero); }
    for (int i = 0; i < t->gpt.table.tensor_count; i++) {
        t->residual[i] = t->zero.carry && t->gpt.table.tensors[i].role == ROLE_MATRIX && kappa_feeds_back(c, t->optimizer.kappa.width[i]);
    }
    if (c->kind == OPTIMIZER_KAPPA && c->kappa_bits <= 8 && (t->step + 1) % c->kappa_every == 0) {
        trainer_choose_widths(t);
        result->measured = true;
    }
}

// Nothing is left in the gradient buffer.
static void trainer_forget_residual(Trainer* t) {
    zero_grads_clear_all(&t->zero);
    for (size_t u = 0; u < t->gpt.table.unit_count; u++) {
        if (!zero_holds(&t->zero, u) || t->gpt.table.tensors[t->gpt.table.units[u].tensor].role != ROLE_MATRIX) { continue; }
        OptimizerUnit unit = trainer_unit(t, &t->optimizer, u, t->state_at[u]);
        kappa_forget(&unit, t->optimizer.kappa.width[unit.tensor]);
    }
    memset(t->residual, 0, sizeof(t->residual));
}

// The step is left out: weights and state stay as they are; a residual in the gradient buffer is lost with the gradient around it.
static void trainer_skip(Trainer* t) {
    t->skipped++;
    if (!t->zero.carry) { return; }
    t->residuals_lost += trainer_has_residual(t);
    trainer_forget_residual(t);
}
