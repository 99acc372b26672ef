// test_attention.h - attention in both forms (the target's own, and the team form that runs everywhere) against the double-precision
// reference, finite differences, decoding one token at a time, and what must not matter: later tokens, the number of threads,
// the way the backward pass is cut into tasks, the size of a team.
// Shapes sit around the tiles: one token, one less and one more than a tile, more than a group of tiles, head sizes that are no
// multiple of a vector, bases that are not aligned.
#pragma once
#include "../kernels/attention.cuh"
#include "reference.h"
#include "test.h"
#include "test_ops.h"

// fp32: scores carry about 1e-7 sqrt(HS) |score|, the same relative error comes out in the weights. bf16: out is rounded to 2^-9
// and enters the gradient of every score through delta, beside the rounding of the gradients themselves.
#ifdef FLOATX_BF16
#define ATTENTION_TOLERANCE 8e-3
#else
#define ATTENTION_TOLERANCE 4e-6
#endif
#define ATTENTION_LSE_TOLERANCE 4e-6 // fp32 in every build, made from inputs that the reference sees as rounded

typedef struct {
    int B, T, NH, HS;
    size_t shift; // elements that the bases are off their alignment
} AttentionCase;

typedef struct {
    OpsTensor qkv, out, lse, dout, dqkv;
    void* work;
    size_t work_bytes;
} AttentionRun;

static AttentionRun attention_run_new(AttentionCase c, double scale, uint64_t seed) {
    const size_t n = (size_t)c.B * (size_t)c.T * (size_t)(c.NH * c.HS), scores = (size_t)c.B * (size_t)c.NH * (size_t)c.T;
    const size_t own = attention_work_bytes(c.B, c.T, c.NH * c.HS, c.NH), bytes = max_size(own, attention_team_work_bytes(c.B, c.T, c.NH));
    ops_random.state = seed;
    AttentionRun run = {ops_normal(3 * n, scale, 0.0, c.shift), ops_upload(NULL, n, c.shift, false), ops_floats(scores),
                        ops_normal(n, 1.0, 0.0, c.shift), ops_upload(NULL, 3 * n, c.shift, false), need(device_alloc(bytes)), bytes};
    return run;
}

static void attention_run_free(AttentionRun* run) {
    ops_free(&run->qkv);
    ops_free(&run->out);
    ops_free(&run->lse);
    ops_free(&run->dout);
    ops_free(&run->dqkv);
    device_free(run->work, run->work_bytes);
}

static void attention_run(AttentionRun* run, AttentionCase c, bool team) {
    const int C = c.NH * c.HS;
    (team ? attention_forward_team : attention_forward)(run->out.x, run->lse.f, run->qkv.x, c.B, c.T, C, c.NH);
    (team ? attention_backward_team : attention_backward)(run->dqkv.x, run->work, run->dout.x, run->out.x, run->qkv.x, run->lse.f, c.B,
                                                          c.T, C, c.NH);
}

// lse (B,NH,T) in double precision
static void attention_reference_lse(double* lse, const double* qkv, AttentionCase c) {
    const size_t T = (size_t)c.T, NH = (size_t)c.NH, HS = (size_t)c.HS, C = NH * HS;
    for (size_t row = 0; row < (size_t)c.B * NH * T; row++) {
        size_t b = row / (NH * T), h = row / T % NH, t = row % T;
        double top = -INFINITY, sum = 0.0;
        for (size_t s = 0; s <= t; s++) {
            double score = 0.0;
            for (size_t i = 0; i < HS; i++) {
                score += qkv[(b * T + t) * 3 * C + h * HS + i] * qkv[(b * T + s) * 3 * C + C + h * HS + i] / sqrt((double)HS);
            }
            sum = score > top ? sum * exp(top - score) + 1.0 : sum + exp(score - top);
            top = fmax(top, score);
        }
        lse[row] = top + log(sum);
    }
}

// Runs one form and compares out, lse and (gradient_tolerance > 0) dqkv.
static void attention_check(AttentionCase c, double scale, double tolerance, double gradient_tolerance, bool team) {
    const size_t T = (size_t)c.T, B = (size_t)c.B, NH = (size_t)c.NH, C = NH * (size_t)c.HS, n = B * T * C;
    AttentionRun run = attention_run_new(c, scale, 7 + T + C);
    double *out = reference_zeros(n), *prob = reference_zeros(B * NH * T * T), *dqkv = reference_zeros(3 * n);
    double* lse = reference_zeros(B * NH * T);
    reference_attention(out, prob, run.qkv.was, B, T, C, NH);
    reference_attention_backward(dqkv, run.dout.was, prob, run.qkv.was, B, T, C, NH);
    attention_reference_lse(lse, run.qkv.was, c);
    attention_run(&run, c, team);
    char label[96];
    snprintf(label, sizeof(label), "%s B=%d T=%d NH=%d HS=%d", team ? "team form" : "own form", c.B, c.T, c.NH, c.HS);
    double *got_out = ops_download(&run.out, label), *got_lse = ops_download(&run.lse, label), *got_dqkv = ops_download(&run.dqkv, label);
    ops_compare(label, got_out, out, n, tolerance);
    if (gradient_tolerance > 0.0) { ops_compare(label, got_dqkv, dqkv, 3 * n, gradient_tolerance); }
    for (size_t i = 0; i < B * NH * T; i++) {
        CHECK(fabs(got_lse[i] - lse[i]) <= ATTENTION_LSE_TOLERANCE * (1.0 + fabs(lse[i])), "%s: lse %zu is %.8g, expected %.8g", label, i,
              got_lse[i], lse[i]);
    }
    free(out);
    free(prob);
    free(dqkv);
    free(lse);
    free(got_out);
    free(got_lse);
    free(got_dqkv);
    attention_run_free(&run);
}

static const AttentionCase attention_cases[] = {
    {1, 1, 1, 64, 0}, {2, 3, 3, 5, 1}, {1, 20, 2, 1, 0}, {2, 33, 1, 24, 3}, {1, 63, 1, 24, 0}, {1, 65, 1, 16, 0},
    {2, 63, 3, 64, 0}, {1, 64, 3, 64, 0},  {1, 130, 3, 80, 3}, {2, 130, 1, 96, 1},
    {1, 257, 1, 64, 0}, {1, 600, 1, 5, 1}, {1, 70, 1, 128, 0}, {1, 67, 2, 256, 1}, {3, 2, 3, 200, 0},
};

static void test_attention_reference(void) {
    for (size_t i = 0; i < COUNT_OF(attention_cases); i++) {
        attention_check(attention_cases[i], 1.0, ATTENTION_TOLERANCE, ATTENTION_TOLERANCE, false);
        attention_check(attention_cases[i], 1.0, ATTENTION_TOLERANCE, ATTENTION_TOLERANCE, true);
    }
}

// Scores of several hundred: a softmax without its maximum would overflow, and most weights vanish. The error of a weight is that of
// its score, 1e-7 of some 1e3. In bf16 the gradients are not compared: with weights near one they are differences of nearly equal
// numbers, of which out's rounding leaves nothing.
static void test_attention_large(void) {
    const AttentionCase c = {1, OPS_SMALL ? 40 : 130, 2, 16, 0};
    for (int team = 0; team < 2; team++) {
#ifdef FLOATX_BF16
        attention_check(c, 16.0, ATTENTION_TOLERANCE, 0.0, team);
#else
        attention_check(c, 16.0, 2e-4, 2e-4, team);
#endif
        AttentionRun run = attention_run_new(c, 1e15, 3); // scores near 1e31, squares of gradients near the end of fp32
        attention_run(&run, c, team);
        double *out = ops_download(&run.out, "huge scores"), *dqkv = ops_download(&run.dqkv, "huge scores");
        size_t broken = 0;
        for (size_t i = 0; i < run.out.n; i++) { broken += !(fabs(out[i]) < 1e16); }
        for (size_t i = 0; i < run.dqkv.n; i++) { broken += !isfinite(dqkv[i]); }
        CHECK(broken == 0, "%zu values are not finite, or larger than any v", broken);
        free(out);
        free(dqkv);
        attention_run_free(&run);
    }
}

// A bad value may not disappear: the step must see it.
static void test_attention_nan(void) {
    const AttentionCase c = {1, 40, 1, 8, 0};
    const size_t C = 8, bad = 17; // token
    for (int team = 0; team < 2; team++) {
        AttentionRun run = attention_run_new(c, 1.0, 5);
        run.qkv.was[bad * 3 * C + 2] = NAN;
        OpsTensor qkv = ops_upload(run.qkv.was, run.qkv.n, 0, false);
        ops_free(&run.qkv);
        run.qkv = qkv;
        attention_run(&run, c, team);
        double *out = ops_download(&run.out, "NaN"), *dqkv = ops_download(&run.dqkv, "NaN");
        for (size_t i = 0; i < C; i++) { CHECK(isnan(out[bad * C + i]), "out of the token with a NaN is %g", out[bad * C + i]); }
        for (size_t i = 0; i < C; i++) { CHECK(isnan(dqkv[bad * 3 * C + i]), "dq of the token with a NaN is %g", dqkv[bad * 3 * C + i]); }
        for (size_t t = 0; t < bad; t++) { CHECK(isfinite(out[t * C]), "out of token %zu, before the NaN, is %g", t, out[t * C]); }
        free(out);
        free(dqkv);
        attention_run_free(&run);
    }
}

// Other values from token `cut` on leave the outputs before it bit for bit as they were.
static void test_attention_causal(void) {
    const AttentionCase c = {1, OPS_SMALL ? 40 : 200, 1, 20, 0};
    const size_t C = 20, cuts[] = {1, 18, 39};
    for (int team = 0; team < 2; team++) {
        for (size_t i = 0; i < COUNT_OF(cuts); i++) {
            AttentionRun run = attention_run_new(c, 1.0, 11);
            attention_run(&run, c, team);
            double* before = ops_download(&run.out, "causal");
            for (size_t j = cuts[i] * 3 * C; j < run.qkv.n; j++) { run.qkv.was[j] = 50.0 - run.qkv.was[j]; }
            OpsTensor qkv = ops_upload(run.qkv.was, run.qkv.n, 0, false);
            ops_free(&run.qkv);
            run.qkv = qkv;
            attention_run(&run, c, team);
            double* after = ops_download(&run.out, "causal");
            CHECK(!memcmp(before, after, cuts[i] * C * sizeof(double)), "outputs before token %zu depend on it", cuts[i]);
            CHECK(memcmp(before + cuts[i] * C, after + cuts[i] * C, C * sizeof(double)), "the output of token %zu does not depend on it",
                  cuts[i]);
            free(before);
            free(after);
            attention_run_free(&run);
        }
    }
}

#ifndef FLOATX_BF16
// sum of out * dout for the present run->qkv.was
static double attention_objective(AttentionRun* run, AttentionCase c, bool team) {
    OpsTensor qkv = ops_upload(run->qkv.was, run->qkv.n, 0, false);
    (team ? attention_forward_team : attention_forward)(run->out.x, run->lse.f, qkv.x, c.B, c.T, c.NH * c.HS, c.NH);
    double *out = ops_download(&run->out, "objective"), sum = 0.0;
    for (size_t i = 0; i < run->out.n; i++) { sum += out[i] * run->dout.was[i]; }
    free(out);
    ops_free(&qkv);
    return sum;
}

// Central differences with step 2^-6: truncation is about step^2 = 2e-4 of the third derivative, rounding 1e-6 / step.
static void test_attention_differences(void) {
    const AttentionCase c = {1, 6, 2, 3, 0};
    const double step = 0.015625;
    for (int team = 0; team < 2; team++) {
        AttentionRun run = attention_run_new(c, 1.0, 13);
        attention_run(&run, c, team);
        double* dqkv = ops_download(&run.dqkv, "differences");
        for (size_t i = 0; i < run.qkv.n; i++) {
            double x = run.qkv.was[i], up, down;
            run.qkv.was[i] = x + step;
            up = attention_objective(&run, c, team);
            run.qkv.was[i] = x - step;
            down = attention_objective(&run, c, team);
            run.qkv.was[i] = x;
            CHECK(fabs((up - down) / (2.0 * step) - dqkv[i]) < 1e-3, "gradient %zu: differences %.6f, attention_backward %.6f", i,
                  (up - down) / (2.0 * step), dqkv[i]);
        }
        free(dqkv);
        attention_run_free(&run);
    }
}
#endif

// Token by token, past a block of keys of the decoder, the same outputs as all at once.
static void test_attention_decode(void) {
    const AttentionCase cases[] = {{1, 9, 3, 5, 1}, {1, OPS_SMALL ? 20 : 300, 2, 24, 0}};
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        const AttentionCase c = cases[k];
        const size_t C = (size_t)(c.NH * c.HS), n = (size_t)c.T * C;
        AttentionRun run = attention_run_new(c, 1.0, 17);
        OpsTensor k_cache = ops_upload(NULL, n, c.shift, false), v_cache = ops_upload(NULL, n, c.shift, false);
        OpsTensor out = ops_upload(NULL, n, c.shift, false);
        attention_run(&run, c, false);
        for (int t = 0; t < c.T; t++) {
            attention_decode(out.x + (size_t)t * C, run.qkv.x + (size_t)t * 3 * C, k_cache.x, v_cache.x, t, (int)C, c.NH);
        }
        double *want = ops_download(&run.out, "decode"), *got = ops_download(&out, "decode"), *cached = ops_download(&v_cache, "cache");
        free(ops_download(&k_cache, "cache"));
        ops_compare("decode", got, want, n, ATTENTION_TOLERANCE);
        CHECK(cached[n - 1] == run.qkv.was[3 * n - 1], "the last cached v is %g, expected %g", cached[n - 1], run.qkv.was[3 * n - 1]);
        free(want);
        free(got);
        free(cached);
        ops_free(&k_cache);
        ops_free(&v_cache);
        ops_free(&out);
        attention_run_free(&run);
    }
}

#if !ON_GPU
// FNV-1a (Fowler, Noll, Vo) over a tensor's bytes
static uint64_t attention_hash(const OpsTensor* tensor, uint64_t hash) {
    for (size_t i = 0; i < tensor->bytes; i++) { hash = (hash ^ (unsigned char)tensor->block[i]) * 0x100000001b3ull; }
    return hash;
}

static void test_attention_threads(void) {
    const AttentionCase cases[] = {{1, 300, 3, 24, 0}, {2, 130, 2, 64, 0}};
#ifdef _OPENMP
    const int saved = omp_get_max_threads();
#endif
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        const AttentionCase c = cases[k];
        AttentionRun run = attention_run_new(c, 1.0, 19);
        uint64_t first = 0;
        for (int threads = 1; threads <= 4; threads++) {
            for (int split = 0; split < 2; split++) {
#ifdef _OPENMP
                omp_set_num_threads(threads);
#endif
                attention_run(&run, c, false);
                attention_backward_tasks(run.dqkv.x, run.dout.x, run.out.x, run.qkv.x, run.lse.f, c.B, c.T, c.NH * c.HS, c.NH, split);
                uint64_t hash = attention_hash(&run.dqkv, attention_hash(&run.lse, attention_hash(&run.out, 0xcbf29ce484222325ull)));
                if (!first) { first = hash; }
                CHECK(hash == first, "%d threads, backward cut %s: other bits than with 1", threads, split ? "by tiles" : "by heads");
            }
        }
        attention_run_free(&run);
    }
#ifdef _OPENMP
    omp_set_num_threads(saved);
#endif
}
#endif

#ifdef CUDA_ON_CPU
static void test_attention_teams(void) {
    const AttentionCase c = {1, 37, 1, 10, 0};
    const int saved_size = cuda_on_cpu_team_size;
    const CudaOrder saved_order = cuda_on_cpu_order;
    for (int size = 32; size <= 256; size *= 2) {
        for (int order = 0; order < CUDA_ORDERS; order++) {
            cuda_on_cpu_team_size = size;
            cuda_on_cpu_order = (CudaOrder)order;
            attention_check(c, 1.0, ATTENTION_TOLERANCE, ATTENTION_TOLERANCE, true);
        }
    }
    cuda_on_cpu_team_size = saved_size;
    cuda_on_cpu_order = saved_order;
}
#endif

static const TestRow attention_tests[] = {
    {"attention: out, lse and gradients agree with the reference", test_attention_reference},
    {"attention: large scores neither overflow nor give NaN", test_attention_large},
    {"attention: a NaN in q reaches its output, and no earlier one", test_attention_nan},
    {"attention: no output depends on later tokens", test_attention_causal},
#ifndef FLOATX_BF16
    {"attention: gradients agree with finite differences", test_attention_differences},
#endif
    {"attention: decoding token by token gives the same outputs", test_attention_decode},
#if !ON_GPU
    {"attention: threads and the cut of backward do not change a bit", test_attention_threads},
#endif
#ifdef CUDA_ON_CPU
    {"attention: any team size and thread order", test_attention_teams},
#endif
};
