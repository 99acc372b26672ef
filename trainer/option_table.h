// option_table.h - every option of the program, once. A row gives its name, llm.c's letter, type, place in struct Options, default,
// bounds and help; options.h makes of it parsing, bounds, --help, the printed configuration, the log header, the saved
// configuration and the checkpoint's record. To add an option, add a field and a row.
#pragma once
#include "../kernels/base.h"

#define OPTION_TEXT_SIZE 4096  // bytes of a text value with its final zero
#define OPTION_LIST_SIZE 65536 // bytes of all items of a list together

typedef enum {
    COMMAND_TRAIN,
    COMMAND_TOKENIZE,
    COMMAND_GENERATE,
    COMMAND_EVAL,
    COMMAND_SELFCHECK,
    COMMAND_CONVERT,
    COMMAND_PLAN,
    COMMAND_COUNT,
} Command;

typedef struct {
    const char *name, *help;
} CommandRow;

static const CommandRow command_table[COMMAND_COUNT] = {
    {"train", "train a model (the default command)"},
    {"tokenize", "turn text files into token shards; make a tokenizer if none is given"},
    {"generate", "continue a text with a trained model"},
    {"eval", "measure the loss on held-out tokens, and the HellaSwag score"},
    {"selfcheck", "check this build on this machine in a few seconds"},
    {"convert", "rewrite a model in another file format"},
    {"plan", "memory, traffic and time of a run on many ranks, before anything is allocated"},
};

// Texts one after the other, each with its final zero. Walk it: for (p = option_list_first(l); p; p = option_list_next(l, p)).
typedef struct {
    size_t used, count;
    char text[OPTION_LIST_SIZE];
} OptionList;

enum { OPTION_FROM_DEFAULT, OPTION_FROM_FILE, OPTION_FROM_COMMAND_LINE };
enum { OPTIONS_RUN, OPTIONS_HELP, OPTIONS_VERSION };

#define OPTION_ROWS_MAX 128

// Plain data without pointers: it may be copied. A choice is the index of its word in the row's list.
typedef struct {
    Command command;
    int action; // what to do: OPTIONS_RUN, OPTIONS_HELP, OPTIONS_VERSION
    bool command_named;
    uint8_t source[OPTION_ROWS_MAX]; // of each row's value: OPTION_FROM_*
    bool in_file[OPTION_ROWS_MAX];   // the row stands in the --config file, maybe with its default
    char file_optimizer[32];         // the optimizer of the --config file where the command line has another, or ""
    char program[256];               // argv[0], for the commands that are suggested to the user
    // data
    char train_data[OPTION_TEXT_SIZE], val_data[OPTION_TEXT_SIZE], tokenizer[OPTION_TEXT_SIZE], hellaswag_data[OPTION_TEXT_SIZE];
    bool shuffle, overfit;
    // model
    char model[OPTION_TEXT_SIZE];
    int vocab_size;
    // length and batch
    int64_t steps, total_batch;
    double max_time; // seconds
    int batch, seq_len;
    // optimizer
    int optimizer, schedule, state_format, master_format;
    double lr, final_lr_frac, weight_decay, momentum, beta1, beta2, beta3, alpha, eps, clip, skip_loss_z, skip_norm_z;
    int64_t warmup;
    int skip_not_finite, soap_every;
    bool nesterov, cautious_decay, master_weights;
    double lr_embedding, lr_vector, trust_low, trust_high, trust_base, lars_trust, update_clip;
    int64_t base_batch, beta2_half_life, batch_warmup; // tokens, tokens, steps
    // kappa
    int kappa_bits, kappa_rounding, kappa_embedding;
    double kappa_bytes, kappa_target, kappa_spike;
    int64_t kappa_every;
    bool kappa_residual, kappa_equilibrate;
    // evaluation and samples
    int64_t val_every, sample_every;
    int val_batches, sample_tokens;
    bool hellaswag;
    // output
    char output[OPTION_TEXT_SIZE], config[OPTION_TEXT_SIZE];
    int64_t checkpoint_every, major_every, log_every;
    double checkpoint_minutes;
    int keep, progress;
    bool resume;
    // machine
    int64_t seed;
    int threads, gemm, recompute, gelu_fusion;
    bool tf32;
    // ranks
    int zero, ranks, rank, ranks_per_node, init;
    char master[OPTION_TEXT_SIZE];
    double rank_timeout; // seconds
    int64_t check_replicas;
    // plan
    double link_mbit, link_latency_us, node_mbit, tflops, efficiency;
    // generate
    char prompt[OPTION_TEXT_SIZE];
    int tokens, top_k, samples;
    double temperature, top_p;
    bool kv_cache, stop_at_eot;
    // tokenize
    OptionList input;
    double val_fraction;
    int64_t shard_tokens;
    int format;
    char json_field[OPTION_TEXT_SIZE], document_separator[OPTION_TEXT_SIZE];
    // convert
    char from[OPTION_TEXT_SIZE], to[OPTION_TEXT_SIZE];
    int convert_format;
} Options;

typedef enum {
    OPTION_INT,      // int; K, M, G may follow
    OPTION_INT64,    // int64_t; K, M, G may follow
    OPTION_REAL,     // double
    OPTION_SWITCH,   // bool
    OPTION_TEXT,     // char[OPTION_TEXT_SIZE]
    OPTION_CHOICE,   // int
    OPTION_DURATION, // double, seconds; s, m, h, d may follow
    OPTION_LIST,     // OptionList
} OptionType;

typedef struct {
    const char *group, *name;
    const char* letter; // llm.c's letters without the dash, or NULL
    OptionType type;
    size_t offset, size;
    const char* standard; // the default
    const char* llmc;     // llm.c's default where it is another
    double low, high;     // bounds of numbers
    const char* form;     // how --help names the value; of a choice its words: "a|b|c"
    unsigned commands;    // bits of Command
    const char* help;
} OptionRow;

#define OPTION_AT(field) offsetof(Options, field), sizeof(((Options*)0)->field)
#define FOR_TRAIN (1u << COMMAND_TRAIN)
#define FOR_TOKENIZE (1u << COMMAND_TOKENIZE)
#define FOR_GENERATE (1u << COMMAND_GENERATE)
#define FOR_EVAL (1u << COMMAND_EVAL)
#define FOR_SELFCHECK (1u << COMMAND_SELFCHECK)
#define FOR_CONVERT (1u << COMMAND_CONVERT)
#define FOR_PLAN (1u << COMMAND_PLAN)
#define FOR_RUN (FOR_TRAIN | FOR_PLAN) // what shapes a run
#define FOR_ALL ((1u << COMMAND_COUNT) - 1)
#define STEPS_MAX 1e15 // a count of steps, far below what int64_t holds

// Words of choices that optim/optimizer.h has as enums, in their order.
#define OPTIMIZER_WORDS "adamw|adam|sgd|adagrad|adafactor|lars|lamb|lion|ademamix|muon|normuon|soap|kappa"
#define STATE_FORMAT_WORDS "fp32|bf16|8bit|4bit"
#define KAPPA_BITS_WORDS "auto|2|4|6|8|32"
#define KAPPA_EMBEDDING_WORDS "row|8bit|fp32"

// One name may stand in several rows for different commands, with its own default and help. Rows of a group stand together.
static const OptionRow option_table[] = {
    {"Data", "train-data", "i", OPTION_TEXT, OPTION_AT(train_data), "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", NULL, 0, 0,
     "FILES", FOR_TRAIN, "token shards to train on: a file, or a pattern in quotes such as \"data/train_*.bin\""},
    {"Data", "val-data", "j", OPTION_TEXT, OPTION_AT(val_data), "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", NULL, 0, 0, "FILES",
     FOR_TRAIN, "token shards for the validation loss"},
    {"Data", "val-data", "j", OPTION_TEXT, OPTION_AT(val_data), "", NULL, 0, 0, "FILES", FOR_EVAL,
     "token shards for the loss; empty: none"},
    {"Data", "input", NULL, OPTION_LIST, OPTION_AT(input), "", NULL, 0, 0, "FILE", FOR_TOKENIZE,
     "text file to read; may be repeated, and --input may be left out before the names"},
    {"Data", "format", NULL, OPTION_CHOICE, OPTION_AT(format), "auto", NULL, 0, 0, "auto|text|jsonl", FOR_TOKENIZE,
     "what the input files hold; auto goes by the name (.jsonl)"},
    {"Data", "json-field", NULL, OPTION_TEXT, OPTION_AT(json_field), "text", NULL, 0, 0, "NAME", FOR_TOKENIZE,
     "jsonl: the field that holds a document's text"},
    {"Data", "document-separator", NULL, OPTION_TEXT, OPTION_AT(document_separator), "", NULL, 0, 0, "LINE", FOR_TOKENIZE,
     "text: a line that ends a document, or \"blank\" for blank lines; empty: a file is a document"},
    {"Data", "tokenizer", NULL, OPTION_TEXT, OPTION_AT(tokenizer), "", NULL, 0, 0, "FILE", FOR_TRAIN | FOR_GENERATE,
     "tokenizer that turns samples into text; empty: look beside the model and the data"},
    {"Data", "tokenizer", NULL, OPTION_TEXT, OPTION_AT(tokenizer), "", NULL, 0, 0, "FILE", FOR_TOKENIZE,
     "use this tokenizer instead of making one"},
    {"Data", "vocab-size", NULL, OPTION_INT, OPTION_AT(vocab_size), "4096", NULL, 257, 1 << 24, "N", FOR_TOKENIZE,
     "tokens of the tokenizer to make: 256 bytes, merges, and one that ends a text"},
    {"Data", "val-fraction", NULL, OPTION_REAL, OPTION_AT(val_fraction), "0.1", NULL, 0, 0.9, "X", FOR_TOKENIZE,
     "share of the text that goes to the validation shard"},
    {"Data", "shard-tokens", NULL, OPTION_INT64, OPTION_AT(shard_tokens), "100M", NULL, 1024, 2147483647, "N", FOR_TOKENIZE,
     "most tokens in one shard"},
    {"Data", "output", "o", OPTION_TEXT, OPTION_AT(output), "", NULL, 0, 0, "PREFIX", FOR_TOKENIZE,
     "beginning of the names to write, such as data/book"},
    {"Data", "hellaswag-data", NULL, OPTION_TEXT, OPTION_AT(hellaswag_data), "dev/data/hellaswag/hellaswag_val.bin", NULL, 0, 0, "FILE",
     FOR_TRAIN, "HellaSwag examples, as llm.c writes them"},
    {"Data", "hellaswag-data", NULL, OPTION_TEXT, OPTION_AT(hellaswag_data), "", NULL, 0, 0, "FILE", FOR_EVAL,
     "HellaSwag examples, as llm.c writes them; empty: none"},
    {"Data", "shuffle", NULL, OPTION_SWITCH, OPTION_AT(shuffle), "on", NULL, 0, 0, "on|off", FOR_TRAIN,
     "a new random order of the sequences in each epoch"},
    {"Data", "overfit", "a", OPTION_SWITCH, OPTION_AT(overfit), "off", NULL, 0, 0, "on|off", FOR_TRAIN,
     "train on one batch again and again, to see that learning works"},

    {"Model", "model", "e", OPTION_TEXT, OPTION_AT(model), "d12", "gpt2_124M_bf16.bin", 0, 0, "MODEL", FOR_RUN,
     "d12, gpt2:d12, gpt3:c768, layers=4,heads=4,channels=128,context=256[,vocab=N], a .bin file or a checkpoint"},
    {"Model", "model", "e", OPTION_TEXT, OPTION_AT(model), "", NULL, 0, 0, "MODEL", FOR_GENERATE | FOR_EVAL,
     "the trained model: a .bin file, a checkpoint, or the output folder of a run"},
    {"Model", "vocab-size", NULL, OPTION_INT, OPTION_AT(vocab_size), "0", NULL, 0, 1 << 24, "N", FOR_RUN,
     "number of tokens of a new model; 0 = as in the tokenizer, else 50257"},

    {"Length and batch", "steps", "x", OPTION_INT64, OPTION_AT(steps), "-1", NULL, -1, STEPS_MAX, "N", FOR_TRAIN,
     "optimizer steps; -1 = one epoch"},
    {"Length and batch", "max-time", NULL, OPTION_DURATION, OPTION_AT(max_time), "0", NULL, 0, 1e9, "TIME", FOR_TRAIN,
     "stop and save after this time (90s, 10m, 2h); 0 = no limit"},
    {"Length and batch", "batch", "b", OPTION_INT, OPTION_AT(batch), "4", NULL, 1, 65536, "N", FOR_RUN | FOR_EVAL,
     "sequences that go through the model at once"},
    {"Length and batch", "seq-len", "t", OPTION_INT, OPTION_AT(seq_len), "0", "1024", 0, 1 << 20, "N", FOR_RUN | FOR_EVAL,
     "tokens in a sequence; 0 = the model's context"},
    {"Length and batch", "total-batch", "d", OPTION_INT64, OPTION_AT(total_batch), "0", NULL, 0, 1099511627776, "N", FOR_RUN,
     "tokens in an optimizer step, a multiple of seq-len; 0 = batch x seq-len"},

    {"Optimizer", "optimizer", NULL, OPTION_CHOICE, OPTION_AT(optimizer), "adamw", NULL, 0, 0, OPTIMIZER_WORDS, FOR_RUN,
     "how gradients become updates; doc/optimizers.md has the formulas. Each has defaults of its own for the options below"},
    {"Optimizer", "lr", "l", OPTION_REAL, OPTION_AT(lr), "6e-4", "3e-4", 0, 100, "X", FOR_TRAIN, "highest learning rate"},
    {"Optimizer", "schedule", "k", OPTION_CHOICE, OPTION_AT(schedule), "cosine", NULL, 0, 0, "cosine|linear|constant|wsd", FOR_TRAIN,
     "course of the learning rate after the warm-up"},
    {"Optimizer", "warmup", "u", OPTION_INT64, OPTION_AT(warmup), "-1", "0", -1, STEPS_MAX, "N", FOR_TRAIN,
     "steps in which the learning rate rises; -1 = a twentieth of all steps, at most 700"},
    {"Optimizer", "final-lr-frac", "q", OPTION_REAL, OPTION_AT(final_lr_frac), "0.1", "1", 0, 1, "X", FOR_TRAIN,
     "learning rate at the end, as a share of the highest"},
    {"Optimizer", "lr-embedding", NULL, OPTION_REAL, OPTION_AT(lr_embedding), "1", NULL, 0, 1e4, "X", FOR_TRAIN,
     "factor on the learning rate of embeddings"},
    {"Optimizer", "lr-vector", NULL, OPTION_REAL, OPTION_AT(lr_vector), "1", NULL, 0, 1e4, "X", FOR_TRAIN,
     "factor on the learning rate of biases and layernorm gains"},
    {"Optimizer", "weight-decay", "c", OPTION_REAL, OPTION_AT(weight_decay), "0.1", "0", 0, 100, "X", FOR_TRAIN,
     "decay of matrices and token embeddings"},
    {"Optimizer", "cautious-decay", NULL, OPTION_SWITCH, OPTION_AT(cautious_decay), "off", NULL, 0, 0, "on|off", FOR_TRAIN,
     "weights decay only where their update has the same sign as the decay"},
    {"Optimizer", "momentum", NULL, OPTION_REAL, OPTION_AT(momentum), "0.95", NULL, 0, 0.999999, "X", FOR_TRAIN,
     "sgd, lars, muon, normuon, kappa: memory of the sum or mean of gradients"},
    {"Optimizer", "nesterov", NULL, OPTION_SWITCH, OPTION_AT(nesterov), "on", NULL, 0, 0, "on|off", FOR_TRAIN,
     "sgd, muon, normuon, kappa: look ahead by one step of the momentum"},
    {"Optimizer", "beta1", NULL, OPTION_REAL, OPTION_AT(beta1), "0.9", NULL, 0, 0.999999, "X", FOR_TRAIN,
     "memory of the mean of gradients"},
    {"Optimizer", "beta2", NULL, OPTION_REAL, OPTION_AT(beta2), "0.95", NULL, 0, 0.9999999, "X", FOR_TRAIN,
     "memory of the mean of squared gradients; lion: of its momentum"},
    {"Optimizer", "beta2-half-life", NULL, OPTION_INT64, OPTION_AT(beta2_half_life), "0", NULL, 0, 1099511627776, "N", FOR_TRAIN,
     "tokens after which a squared gradient counts half, whatever the batch: sets beta2; 0 = use --beta2"},
    {"Optimizer", "beta3", NULL, OPTION_REAL, OPTION_AT(beta3), "0.999", NULL, 0, 0.9999999, "X", FOR_TRAIN,
     "ademamix: memory of the slow mean, reached at the end of the run"},
    {"Optimizer", "alpha", NULL, OPTION_REAL, OPTION_AT(alpha), "8", NULL, 0, 1e4, "X", FOR_TRAIN,
     "ademamix: weight of the slow mean, reached at the end of the run"},
    {"Optimizer", "eps", NULL, OPTION_REAL, OPTION_AT(eps), "1e-8", NULL, 1e-30, 1, "X", FOR_TRAIN,
     "added to the root of the squared gradients"},
    {"Optimizer", "soap-every", NULL, OPTION_INT, OPTION_AT(soap_every), "10", NULL, 1, 1 << 20, "N", FOR_TRAIN,
     "soap: steps between new eigenbases"},
    {"Optimizer", "state-format", NULL, OPTION_CHOICE, OPTION_AT(state_format), "fp32", NULL, 0, 0, STATE_FORMAT_WORDS, FOR_RUN,
     "how elementwise optimizers keep their state; 8bit and 4bit in blocks with a scale each"},
    {"Optimizer", "clip", NULL, OPTION_REAL, OPTION_AT(clip), "1", NULL, 0, 1e9, "X", FOR_TRAIN,
     "gradients are scaled down to this norm (kappa: those of embeddings and vectors); 0 = never"},
    {"Optimizer", "update-clip", NULL, OPTION_REAL, OPTION_AT(update_clip), "0", NULL, 0, 1e9, "X", FOR_RUN,
     "an update of a tensor with a greater RMS (before the learning rate) is scaled down to it; 0 = never, adafactor: 1"},
    {"Optimizer", "trust-low", NULL, OPTION_REAL, OPTION_AT(trust_low), "0.5", NULL, 0, 1e6, "X", FOR_RUN,
     "least trust ratio of a tensor: |weights| / (|update| x trust-base)"},
    {"Optimizer", "trust-high", NULL, OPTION_REAL, OPTION_AT(trust_high), "0", NULL, 0, 1e6, "X", FOR_RUN,
     "greatest trust ratio, by which the update is multiplied; 0 = no trust ratio"},
    {"Optimizer", "trust-base", NULL, OPTION_REAL, OPTION_AT(trust_base), "0.1", NULL, 1e-9, 1e9, "X", FOR_RUN,
     "|weights| / |update| at which the trust ratio is 1"},
    {"Optimizer", "lars-trust", NULL, OPTION_REAL, OPTION_AT(lars_trust), "0.001", NULL, 0, 1e3, "X", FOR_TRAIN,
     "lars: trust coefficient"},
    {"Optimizer", "base-batch", NULL, OPTION_INT64, OPTION_AT(base_batch), "0", NULL, 0, 1099511627776, "N", FOR_TRAIN,
     "tokens of the batch that --lr is meant for: another batch multiplies it by the root of their ratio; 0 = --lr as it is"},
    {"Optimizer", "batch-warmup", NULL, OPTION_INT64, OPTION_AT(batch_warmup), "0", NULL, 0, STEPS_MAX, "N", FOR_TRAIN,
     "steps in which the batch rises from a quarter of --total-batch to all of it; 0 = none"},
    {"Optimizer", "skip-not-finite", NULL, OPTION_INT, OPTION_AT(skip_not_finite), "2", NULL, 0, 1 << 30, "N", FOR_TRAIN,
     "so many updates in a row are left out because loss or gradient is not finite; one more ends the run"},
    {"Optimizer", "skip-loss-z", "sl", OPTION_REAL, OPTION_AT(skip_loss_z), "0", NULL, 0, 1e9, "X", FOR_TRAIN,
     "skip an update whose loss is this many deviations above the last 128; 0 = never"},
    {"Optimizer", "skip-norm-z", "sg", OPTION_REAL, OPTION_AT(skip_norm_z), "0", NULL, 0, 1e9, "X", FOR_TRAIN,
     "the same for the norm of the gradients; 0 = never"},
    {"Optimizer", "master-weights", "w", OPTION_SWITCH, OPTION_AT(master_weights), "on", NULL, 0, 0, "on|off", FOR_RUN,
     "keep fp32 weights beside those of a bf16 build"},
    {"Optimizer", "master-format", NULL, OPTION_CHOICE, OPTION_AT(master_format), "fp32", NULL, 0, 0, "fp32|split", FOR_RUN,
     "split: only the lower 16 bits are kept beside the bf16 weights: the same fp32 numbers in 4 bytes instead of 6"},

    {"Kappa", "kappa-bits", NULL, OPTION_CHOICE, OPTION_AT(kappa_bits), "auto", NULL, 0, 0, KAPPA_BITS_WORDS, FOR_RUN,
     "bits of the matrices' momentum; auto = chosen for each tensor within --kappa-bytes as the run goes"},
    {"Kappa", "kappa-bytes", NULL, OPTION_REAL, OPTION_AT(kappa_bytes), "0.53", NULL, 0.01, 8, "X", FOR_RUN,
     "bytes a parameter for the matrices' momentum, in which widths compete"},
    {"Kappa", "kappa-target", NULL, OPTION_REAL, OPTION_AT(kappa_target), "2", NULL, 0.01, 1e3, "X", FOR_TRAIN,
     "kappa = (1 - momentum) RMS(g - m) / rounding step that a width must reach where its rounding is not fed back"},
    {"Kappa", "kappa-every", NULL, OPTION_INT64, OPTION_AT(kappa_every), "200", NULL, 1, STEPS_MAX, "N", FOR_TRAIN,
     "steps between measurements of kappa and choices of widths"},
    {"Kappa", "kappa-residual", NULL, OPTION_SWITCH, OPTION_AT(kappa_residual), "on", NULL, 0, 0, "on|off", FOR_TRAIN,
     "at 4 bits and below, what rounding loses stays in the gradient buffer for the next step"},
    {"Kappa", "kappa-equilibrate", NULL, OPTION_SWITCH, OPTION_AT(kappa_equilibrate), "on", NULL, 0, 0, "on|off", FOR_RUN,
     "scale rows and columns of the momentum before it is rounded"},
    {"Kappa", "kappa-rounding", NULL, OPTION_CHOICE, OPTION_AT(kappa_rounding), "nearest", NULL, 0, 0, "nearest|stochastic", FOR_TRAIN,
     "rounding of the matrices' momentum"},
    {"Kappa", "kappa-embedding", NULL, OPTION_CHOICE, OPTION_AT(kappa_embedding), "row", NULL, 0, 0, KAPPA_EMBEDDING_WORDS, FOR_RUN,
     "second moment of embeddings: one number a row, or one an element in 8bit or fp32"},
    {"Kappa", "kappa-spike", NULL, OPTION_REAL, OPTION_AT(kappa_spike), "5", NULL, 0, 1e9, "X", FOR_TRAIN,
     "a matrix's gradient of more than so many times its usual RMS is scaled down to that; 0 = never"},

    {"Evaluation", "val-every", "v", OPTION_INT64, OPTION_AT(val_every), "100", "20", 0, STEPS_MAX, "N", FOR_TRAIN,
     "steps between validation losses; 0 = never"},
    {"Evaluation", "val-batches", "m", OPTION_INT, OPTION_AT(val_batches), "20", NULL, -1, INT_MAX, "N", FOR_TRAIN,
     "batches in a validation loss; -1 = all"},
    {"Evaluation", "val-batches", "m", OPTION_INT, OPTION_AT(val_batches), "-1", NULL, -1, INT_MAX, "N", FOR_EVAL,
     "batches in the validation loss; -1 = all"},
    {"Evaluation", "sample-every", "s", OPTION_INT64, OPTION_AT(sample_every), "100", "20", 0, STEPS_MAX, "N", FOR_RUN,
     "steps between sampled texts; 0 = never"},
    {"Evaluation", "sample-tokens", "g", OPTION_INT, OPTION_AT(sample_tokens), "64", NULL, 1, 1 << 20, "N", FOR_TRAIN,
     "tokens in a sampled text"},
    {"Evaluation", "hellaswag", "h", OPTION_SWITCH, OPTION_AT(hellaswag), "off", NULL, 0, 0, "on|off", FOR_TRAIN,
     "HellaSwag score at every validation loss"},

    {"Text", "prompt", "p", OPTION_TEXT, OPTION_AT(prompt), "", NULL, 0, 0, "TEXT", FOR_GENERATE,
     "the text to continue; empty: start a new text"},
    {"Text", "tokens", "g", OPTION_INT, OPTION_AT(tokens), "256", NULL, 1, 1 << 24, "N", FOR_GENERATE, "tokens to add"},
    {"Text", "temperature", NULL, OPTION_REAL, OPTION_AT(temperature), "1", NULL, 0, 1000, "X", FOR_GENERATE,
     "below 1 likely tokens become likelier; 0 = always the likeliest"},
    {"Text", "top-k", NULL, OPTION_INT, OPTION_AT(top_k), "0", NULL, 0, 1 << 24, "N", FOR_GENERATE,
     "draw from the k likeliest tokens; 0 = from all"},
    {"Text", "top-p", NULL, OPTION_REAL, OPTION_AT(top_p), "1", NULL, 0, 1, "X", FOR_GENERATE,
     "draw from the likeliest tokens that make up this probability; 1 = from all"},
    {"Text", "samples", NULL, OPTION_INT, OPTION_AT(samples), "1", NULL, 1, 1 << 20, "N", FOR_GENERATE, "number of texts"},
    {"Text", "kv-cache", NULL, OPTION_SWITCH, OPTION_AT(kv_cache), "on", NULL, 0, 0, "on|off", FOR_GENERATE,
     "keep keys and values of earlier tokens instead of computing them again"},
    {"Text", "stop-at-eot", NULL, OPTION_SWITCH, OPTION_AT(stop_at_eot), "on", NULL, 0, 0, "on|off", FOR_GENERATE,
     "end a text where the model ends it"},

    {"Conversion", "from", NULL, OPTION_TEXT, OPTION_AT(from), "", NULL, 0, 0, "PATH", FOR_CONVERT,
     "the model to read: a .bin file, a .safetensors file or a checkpoint"},
    {"Conversion", "to", NULL, OPTION_TEXT, OPTION_AT(to), "", NULL, 0, 0, "PATH", FOR_CONVERT, "the file to write"},
    {"Conversion", "format", NULL, OPTION_CHOICE, OPTION_AT(convert_format), "auto", NULL, 0, 0, "auto|fp32|bf16|safetensors",
     FOR_CONVERT, "llm.c's .bin with fp32 or bf16 weights, or safetensors; auto goes by the name"},

    {"Output", "output", "o", OPTION_TEXT, OPTION_AT(output), "", NULL, 0, 0, "FOLDER", FOR_TRAIN,
     "folder for logs and checkpoints, made if need be; empty: write nothing"},
    {"Output", "checkpoint-every", "n", OPTION_INT64, OPTION_AT(checkpoint_every), "0", NULL, 0, STEPS_MAX, "N", FOR_TRAIN,
     "steps between checkpoints; 0 = go by time, and at the end"},
    {"Output", "checkpoint-minutes", NULL, OPTION_REAL, OPTION_AT(checkpoint_minutes), "30", "0", 0, 1e7, "X", FOR_TRAIN,
     "minutes between checkpoints; 0 = go by steps, and at the end"},
    {"Output", "keep", "nk", OPTION_INT, OPTION_AT(keep), "3", "0", 0, INT_MAX, "N", FOR_TRAIN, "newest checkpoints to keep; 0 = all"},
    {"Output", "major-every", "nm", OPTION_INT64, OPTION_AT(major_every), "0", NULL, 0, STEPS_MAX, "N", FOR_TRAIN,
     "checkpoints of every so many steps are never deleted; 0 = none"},
    {"Output", "resume", "y", OPTION_SWITCH, OPTION_AT(resume), "off", NULL, 0, 0, "on|off", FOR_TRAIN,
     "go on from the newest checkpoint in the output folder"},
    {"Output", "log-every", NULL, OPTION_INT64, OPTION_AT(log_every), "1", NULL, 0, STEPS_MAX, "N", FOR_TRAIN,
     "steps between printed lines; 0 = none (files hold every step)"},
    {"Output", "progress", NULL, OPTION_CHOICE, OPTION_AT(progress), "auto", NULL, 0, 0, "auto|on|off", FOR_TRAIN | FOR_TOKENIZE,
     "progress bar; auto = on a terminal"},

    {"Ranks", "zero", "z", OPTION_INT, OPTION_AT(zero), "1", "0", 0, 3, "N", FOR_RUN,
     "ZeRO: what lives with its owner only: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights"},
    {"Ranks", "ranks", "pn", OPTION_INT, OPTION_AT(ranks), "0", "1", 0, 1 << 20, "N", FOR_RUN,
     "processes of the run; 0 = as mpirun, srun or torchrun's variables say"},
    {"Ranks", "rank", "pr", OPTION_INT, OPTION_AT(rank), "-1", "0", -1, 1 << 20, "N", FOR_TRAIN,
     "number of this process, where nothing else says so; -1 = as started"},
    {"Ranks", "ranks-per-node", "pg", OPTION_INT, OPTION_AT(ranks_per_node), "0", "8", 0, 4096, "N", FOR_RUN,
     "processes on a machine, where nothing else says so; 0 = as started (plan: all on one)"},
    {"Ranks", "init", "pi", OPTION_CHOICE, OPTION_AT(init), "auto", "mpi", 0, 0, "auto|mpi|tcp", FOR_TRAIN,
     "how processes find each other; tcp (GPU build): at --master"},
    {"Ranks", "master", "ps", OPTION_TEXT, OPTION_AT(master), "", NULL, 0, 0, "HOST[:PORT]", FOR_TRAIN,
     "tcp: where rank 0 listens; empty: MASTER_ADDR and MASTER_PORT"},
    {"Ranks", "rank-timeout", NULL, OPTION_DURATION, OPTION_AT(rank_timeout), "10m", NULL, 0, 1e7, "TIME", FOR_TRAIN | FOR_PLAN,
     "a rank that the others wait for so long ends the run; 0 = wait for ever"},
    {"Ranks", "check-replicas", NULL, OPTION_INT64, OPTION_AT(check_replicas), "100", NULL, 0, STEPS_MAX, "N", FOR_TRAIN,
     "steps between comparisons of all ranks' weights; 0 = never"},

    {"Plan", "link-mbit", NULL, OPTION_REAL, OPTION_AT(link_mbit), "0", NULL, 0, 1e9, "X", FOR_PLAN,
     "bandwidth of a rank's link to other nodes in Mbit/s; 0 = measure under mpirun, else 10000"},
    {"Plan", "link-latency-us", NULL, OPTION_REAL, OPTION_AT(link_latency_us), "50", NULL, 0, 1e8, "X", FOR_PLAN,
     "microseconds until a small message arrives"},
    {"Plan", "node-mbit", NULL, OPTION_REAL, OPTION_AT(node_mbit), "0", NULL, 0, 1e9, "X", FOR_PLAN,
     "bandwidth of a rank inside its node in Mbit/s; 0 = as between nodes"},
    {"Plan", "tflops", NULL, OPTION_REAL, OPTION_AT(tflops), "0", NULL, 0, 1e9, "X", FOR_PLAN,
     "peak of one rank in TFLOP/s; 0 = measure this machine"},
    {"Plan", "efficiency", NULL, OPTION_REAL, OPTION_AT(efficiency), "0.5", NULL, 0.001, 1, "X", FOR_PLAN,
     "share of the peak that computing reaches"},

    {"Machine", "seed", NULL, OPTION_INT64, OPTION_AT(seed), "42", NULL, 0, 9.2e18, "N", FOR_TRAIN | FOR_GENERATE | FOR_SELFCHECK,
     "of all random numbers: the same seed gives the same result"},
    {"Machine", "threads", NULL, OPTION_INT, OPTION_AT(threads), "0", NULL, 0, 4096, "N", FOR_ALL,
     "CPU threads of a rank; 0 = this machine's cores / its ranks"},
    {"Machine", "gemm", NULL, OPTION_CHOICE, OPTION_AT(gemm), "auto", NULL, 0, 0, "auto|onednn|openblas|own",
     FOR_RUN | FOR_GENERATE | FOR_EVAL | FOR_SELFCHECK, "CPU library for matrix products; auto = the first that is there"},
    {"Machine", "recompute", "r", OPTION_INT, OPTION_AT(recompute), "1", NULL, 0, 3, "N", FOR_RUN,
     "compute again instead of storing: 0 nothing, 1 GELU, 2 also layernorm, 3 whole blocks"},
    {"Machine", "tf32", "f", OPTION_SWITCH, OPTION_AT(tf32), "on", NULL, 0, 0, "on|off", FOR_TRAIN | FOR_GENERATE | FOR_EVAL,
     "fp32 build on a GPU: matrix products in TF32"},
    {"Machine", "gelu-fusion", "ge", OPTION_INT, OPTION_AT(gelu_fusion), "0", NULL, 0, 2, "N", FOR_TRAIN,
     "GPU: GELU inside the matrix product: 0 no, 1 forward, 2 also backward"},
    {"Machine", "config", NULL, OPTION_TEXT, OPTION_AT(config), "", NULL, 0, 0, "FILE", FOR_ALL,
     "read options from a file of lines \"name = value\"; those on the command line win"},
};

// Defaults that go by another option's word: where `when` is `is`, `name` starts as `standard`.
typedef struct {
    const char *when, *is, *name, *standard;
} OptionDefault;

static const OptionDefault option_defaults[] = {
    {"optimizer", "adam", "weight-decay", "0"},
    {"optimizer", "sgd", "lr", "0.1"},
    {"optimizer", "sgd", "momentum", "0.9"},
    {"optimizer", "sgd", "weight-decay", "1e-4"},
    {"optimizer", "sgd", "nesterov", "off"},
    {"optimizer", "adagrad", "lr", "1e-2"},
    {"optimizer", "adagrad", "eps", "1e-10"},
    {"optimizer", "adagrad", "weight-decay", "0"},
    {"optimizer", "adafactor", "lr", "1e-2"},
    {"optimizer", "adafactor", "weight-decay", "0"},
    {"optimizer", "lars", "lr", "1"},
    {"optimizer", "lars", "momentum", "0.9"},
    {"optimizer", "lars", "weight-decay", "1e-4"},
    {"optimizer", "lamb", "lr", "6e-3"},
    {"optimizer", "lamb", "eps", "1e-6"},
    {"optimizer", "lamb", "weight-decay", "0.01"},
    {"optimizer", "lion", "lr", "2e-4"},
    {"optimizer", "lion", "beta2", "0.98"},
    {"optimizer", "lion", "weight-decay", "0.6"},
    {"optimizer", "ademamix", "beta2", "0.999"},
    {"optimizer", "muon", "lr", "2e-3"},
    {"optimizer", "normuon", "lr", "2e-3"},
    {"optimizer", "normuon", "cautious-decay", "on"},
    {"optimizer", "soap", "lr", "3e-3"},
    {"optimizer", "soap", "beta1", "0.95"},
    {"optimizer", "kappa", "lr", "4e-3"},
    {"optimizer", "kappa", "lr-embedding", "2"},
    {"optimizer", "kappa", "momentum", "0.9"},
    {"optimizer", "kappa", "nesterov", "off"},
    {"optimizer", "kappa", "cautious-decay", "on"},
};

#define OPTION_ROWS COUNT_OF(option_table)
static_assert(OPTION_ROWS <= OPTION_ROWS_MAX, "raise OPTION_ROWS_MAX");

// llm.c's letters for what this build does not offer. The neutral values pass without a word, others are refused with the reason.
typedef struct {
    const char* letter;
    const char* neutral; // "|0|1|"
    const char* reason;
} ForeignOption;

static const ForeignOption foreign_options[] = {
    {"pf", "||/tmp|", "processes find each other by MPI or at --master, not by a shared file; leave -pf out"},
    {"lg", "|-1|0|", "GPU clocks and temperatures are not logged by this build; give -lg -1 or leave -lg out"},
};
