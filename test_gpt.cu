// test_gpt.cu - every test of the program, in one table of rows. `./test_gpt` runs all, `./test_gpt text` those whose name holds the
// text. Rows live in dev/test_*.h, beside references and fixtures; the same rows run on the CPU, on the GPU and on the emulated GPU.
// `mpirun -np P ./test_gpt ranks [text]` runs the rows that all ranks of a job run together.
// The last line is "N passed, N failed"; the exit code is 1 if any failed, of every rank.
#define TESTING
#include "train_gpt.cu"

#include "dev/test.h"
#include "dev/test_team.h"
#include "dev/test_ops.h"
#include "dev/test_attention.h"
#include "dev/test_model.h"
#include "dev/test_trainer.h"
#include "dev/test_optimizers.h"
#include "dev/test_codec.h"
#include "dev/test_muon.h"
#include "dev/test_soap.h"
#include "dev/test_kappa.h"
#include "dev/test_update.h"
#include "dev/test_plan.h"
#include "dev/test_comm.h"
#include "dev/test_nccl.h"
#include "dev/test_ranks.h"
#ifdef CUDA_ON_CPU
#include "dev/test_emulation.h"
#endif
#if !ON_GPU // files, text and options are the same in every build
#include "dev/test_checkpoint.h"
#include "dev/test_checkpoint_ranks.h"
#include "dev/test_data.h"
#include "dev/test_launch.h"
#include "dev/test_run.h"
#include "dev/test_safetensors.h"
#include "dev/test_tokenizer.h"
#endif
#include "dev/test_ranks_update.h"

typedef struct {
    const TestRow* rows;
    size_t count;
} TestGroup;

#define GROUP(rows) {rows, COUNT_OF(rows)}

static const TestGroup groups[] = {
    GROUP(team_tests), GROUP(ops_tests), GROUP(attention_tests), GROUP(model_tests), GROUP(trainer_tests), GROUP(comm_tests),
    GROUP(optimizers_tests), GROUP(codec_tests), GROUP(muon_tests), GROUP(soap_tests), GROUP(kappa_tests), GROUP(update_tests),
    GROUP(plan_tests), GROUP(nccl_tests),
#ifdef CUDA_ON_CPU
    GROUP(emulation_tests),
#endif
#if !ON_GPU
    GROUP(options_tests), GROUP(run_tests), GROUP(files_tests), GROUP(safetensors_tests), GROUP(checkpoint_tests),
    GROUP(data_tests), GROUP(launch_tests),
#endif
};

static const TestGroup rank_groups[] = {
    GROUP(comm_rank_tests), GROUP(rank_tests), GROUP(update_rank_tests),
#if !ON_GPU
    GROUP(checkpoint_rank_tests),
#endif
};

#define RANKS_TIMEOUT 300.0 // seconds: a row that hangs must end, a slow build must not

static void test_rows(const TestGroup* from, size_t count, const char* filter) {
    for (size_t i = 0; i < count; i++) {
        if (test_state.world) {
            test_run_rank_rows(from[i].rows, from[i].count, filter);
        } else {
            test_run_rows(from[i].rows, from[i].count, filter);
        }
    }
}

int main(int argc, char** argv) {
    static Options options;
    static Comm world;
    const char* arguments[] = {"test_gpt", "train"};
    bool ranks = argc > 1 && strcmp(argv[1], "ranks") == 0;
    Launch launch;
    Error error;
    machine_limit_spinning(argv);
    run_stop_watch();
    world = *comm_alone();
    bool good = !ranks || (launch_find(&launch, &error) && comm_open(&world, &launch, RANKS_TIMEOUT, &error));
    good = good && options_parse(&options, 2, (char**)(uintptr_t)arguments, &error);
    good = good && comm_agree(&world, machine_open(&options, &world, &error), &error) && comm_start_up(&world, &error);
    if (!good) {
        fprintf(stderr, "error: %s\n", error.text);
        return 1;
    }
    if (world.rank == 0) { machine_print(stdout); }
    if (ranks) {
        test_state.world = &world;
        test_rows(rank_groups, COUNT_OF(rank_groups), argc > 2 ? argv[2] : NULL);
    } else {
        test_rows(groups, COUNT_OF(groups), argc > 1 ? argv[1] : NULL);
    }
    test_folder_remove();
    int code = test_summary();
    comm_close(&world);
    return code;
}
