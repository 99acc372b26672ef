// test_gpt.cu - every test of the program, in one table of rows. `./test_gpt` runs all, `./test_gpt text` those whose name holds the
// text. Rows live in dev/test_*.h, beside references and fixtures; the same rows run on the CPU, on the GPU and on the emulated GPU.
// The last line is "N passed, N failed"; the exit code is 1 if any failed.
#define TESTING
#include "train_gpt.cu"

#include "dev/test.h"
#include "dev/test_team.h"
#include "dev/test_ops.h"
#include "dev/test_attention.h"
#include "dev/test_model.h"
#include "dev/test_trainer.h"
#ifdef CUDA_ON_CPU
#include "dev/test_emulation.h"
#endif
#if !ON_GPU // files, text and options are the same in every build
#include "dev/test_checkpoint.h"
#include "dev/test_data.h"
#include "dev/test_files.h"
#include "dev/test_options.h"
#include "dev/test_tokenizer.h"
#endif

typedef struct {
    const TestRow* rows;
    size_t count;
} TestGroup;

#define GROUP(rows) {rows, COUNT_OF(rows)}

static const TestGroup groups[] = {
    GROUP(team_tests), GROUP(ops_tests), GROUP(attention_tests), GROUP(model_tests), GROUP(trainer_tests),
#ifdef CUDA_ON_CPU
    GROUP(emulation_tests),
#endif
#if !ON_GPU
    GROUP(options_tests), GROUP(files_tests), GROUP(checkpoint_tests), GROUP(data_tests),
#endif
};

int main(int argc, char** argv) {
    static Options options;
    const char* arguments[] = {"test_gpt", "train"};
    Error error;
    machine_limit_spinning(argv);
    if (!options_parse(&options, 2, (char**)(uintptr_t)arguments, &error) || !machine_open(&options, comm_alone(), &error)) {
        fprintf(stderr, "error: %s\n", error.text);
        return 1;
    }
    machine_print(stdout);
    for (size_t i = 0; i < COUNT_OF(groups); i++) { test_run_rows(groups[i].rows, groups[i].count, argc > 1 ? argv[1] : NULL); }
    test_folder_remove();
    return test_summary();
}
