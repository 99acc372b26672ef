// ranks.h - the beginning of a job of several ranks: how it was started, opening the communicator, and seeing before anything is
// computed that all ranks run the same program with the same options, library and data. Only rank 0 speaks: the others' standard output
// leads nowhere.
#pragma once
#include "../comm/agree.h"
#include "../dataloader/loader.h"
#include "../kernels/matmul.cuh"
#include "option_report.h"
#include "provenance.h"

// Opens the communicator, also where this rank's options are wrong (parsed is false, error says why): the others must hear of it.
bool ranks_open(const Options* o, bool parsed, Comm* world, Error* error) {
    Launch launch;
    Error reason = {{0}};
    bool train = parsed && o->command == COMMAND_TRAIN, found = launch_find(&launch, &reason);
    if (found && train) { found = launch_override(&launch, o->ranks, o->rank, o->ranks_per_node, o->master, &reason); }
    if (found && train && launch.size > 1 && o->init != 0) {
        bool mpi = launch.kind == LAUNCH_BY_MPI;
        found = mpi == (o->init == 1) || fail(&reason, "--init %s, but this job was started by %s; leave --init out", mpi ? "tcp" : "mpi", launch.by);
    }
    if (!found || !comm_open(world, &launch, parsed ? o->rank_timeout : 600.0, &reason)) {
        world->rank = launch.rank > 0 ? launch.rank : 0; // who speaks: rank 0, or rank 1 if that is what is missing
        if (launch.rank == 1) {
            sleep(2);
            world->rank = 0;
        }
        if (parsed) { *error = reason; }
        return false;
    }
    bool silent = world->rank == 0 || freopen("/dev/null", "w", stdout);
    if (parsed && !silent) { parsed = fail(error, "cannot open /dev/null: %s", strerror(errno)); }
    if (!comm_agree(world, parsed, error)) { return false; }
    if (world->size > 1 && o->action == OPTIONS_RUN && o->command != COMMAND_TRAIN && o->command != COMMAND_PLAN) {
        return fail(error, "%s runs as one process, %d were started; start it without %s", command_table[o->command].name, world->size, launch.by);
    }
    return true;
}

// The options one by one: slow, and only to name the one that differs.
static bool ranks_check_options(const Options* o, const Comm* world, Error* error) {
    char value[OPTION_VALUE_SIZE], what[80];
    size_t bytes;
    char* text = options_text(o, &bytes);
    snprintf(value, sizeof(value), "%08x", crc32c(0, text, bytes));
    free(text);
    Error ignored;
    if (comm_same(world, "options", value, TRAFFIC_CONTROL, &ignored)) { return true; }
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &option_table[i];
        if (!option_serves(row, o->command) || row->type == OPTION_LIST || row->offset == offsetof(Options, rank)) { continue; }
        option_value(o, row, value, sizeof(value));
        snprintf(what, sizeof(what), "the values of --%s", row->name);
        if (!comm_same(world, what, value, TRAFFIC_CONTROL, error)) { return false; }
    }
    return fail(error, "the ranks' options differ; give all of them the same");
}

// Collective: all ranks are one program with one set of options and one matrix library.
bool ranks_check(const Options* o, const Comm* world, Error* error) {
    char build[512];
    if (world->size == 1) { return true; }
    snprintf(build, sizeof(build), "%s, %s, %s, %s weights", provenance_git(), provenance_flags(), provenance_compiler(), FLOATX_NAME);
    return comm_same(world, "the programs", build, TRAFFIC_CONTROL, error) &&
           comm_same(world, "the commands", command_table[o->command].name, TRAFFIC_CONTROL, error) &&
           ranks_check_options(o, world, error) &&
           comm_same(world, "the matrix libraries", gemm_description(), TRAFFIC_CONTROL, error);
}

#define RANKS_DATA_TOKENS ((uint64_t)1 << 26) // compared at most, spread over all of them

// Collective: all ranks read the same tokens, as far as sizes and some tens of millions of tokens show. what: "the training data".
bool ranks_check_data(const Comm* world, const char* what, const Loader* data, Error* error) {
    if (world->size == 1) { return true; }
    char text[160];
    uint32_t crc = 0;
    bool good = true;
    int32_t* tokens = (int32_t*)need(malloc(((size_t)data->T + 1) * sizeof(int32_t)));
    for (size_t i = 0; i < data->shard_count; i++) { crc = crc32c(crc, &data->shards[i].tokens, sizeof(data->shards[i].tokens)); }
    uint64_t most = RANKS_DATA_TOKENS / (uint64_t)data->T + 1, probes = data->sequences < most ? data->sequences : most;
    for (uint64_t i = 0; good && i < probes; i++) {
        good = loader_sequence(data, (uint64_t)((double)data->sequences / (double)probes * (double)i), tokens, error);
        crc = good ? crc32c(crc, tokens, ((size_t)data->T + 1) * sizeof(int32_t)) : 0;
    }
    free(tokens);
    if (!comm_agree(world, good, error)) { return false; }
    snprintf(text, sizeof(text), "%" PRIu64 " tokens in %zu file(s) with checksum %08x", data->tokens, data->shard_count, crc);
    return comm_same(world, what, text, TRAFFIC_LOADER, error);
}
