// sample.h - choosing the next token from logits: temperature, the k most likely (Fan et al. 2018, arXiv 1805.04833), the smallest set
// with probability p (Holtzman et al. 2019, arXiv 1904.09751). The random number is a pure function of (seed, sample, position).
#pragma once
#include "../kernels/philox.h"

typedef struct {
    double temperature; // 0 takes the most likely token
    int top_k;          // 0 = all
    double top_p;       // 1 = all
    uint64_t seed;
} Sampling;

typedef struct {
    float logit;
    int token;
} Candidate;

// The larger logit first; of equal ones the smaller token.
static int candidate_order(const void* a, const void* b) {
    const Candidate *x = (const Candidate*)a, *y = (const Candidate*)b;
    if (x->logit != y->logit) { return x->logit > y->logit ? -1 : 1; }
    return (x->token > y->token) - (x->token < y->token);
}

// Sorted candidates in, the number that stays out.
static size_t candidates_keep(const Candidate* candidates, size_t count, const Sampling* s) {
    size_t keep = s->top_k > 0 ? min_size(count, (size_t)s->top_k) : count;
    if (s->top_p >= 1.0) { return keep; }
    double total = 0.0, sum = 0.0;
    for (size_t i = 0; i < keep; i++) { total += exp((candidates[i].logit - candidates[0].logit) / s->temperature); }
    for (size_t i = 0; i < keep; i++) {
        sum += exp((candidates[i].logit - candidates[0].logit) / s->temperature);
        if (sum >= s->top_p * total) { return i + 1; }
    }
    return keep;
}

// logits: V values on the host; candidates: V entries of work space. The token at `position` of sample number `sample`.
int sample_token(const float* logits, Candidate* candidates, int V, const Sampling* s, uint32_t sample, uint64_t position) {
    int best = 0;
    for (int i = 0; i < V; i++) {
        candidates[i].logit = logits[i];
        candidates[i].token = i;
        if (logits[i] > logits[best]) { best = i; }
    }
    if (s->temperature <= 0.0) { return best; }
    size_t keep = (size_t)V;
    if (s->top_k > 0 || s->top_p < 1.0) {
        qsort(candidates, (size_t)V, sizeof(Candidate), candidate_order);
        keep = candidates_keep(candidates, (size_t)V, s);
    }
    double total = 0.0, sum = 0.0;
    for (size_t i = 0; i < keep; i++) { total += exp((candidates[i].logit - logits[best]) / s->temperature); }
    double coin = (double)philox_uniform(philox_at(s->seed, RANDOM_SAMPLING, sample, 0, position).x[0]) * total;
    for (size_t i = 0; i < keep; i++) {
        sum += exp((candidates[i].logit - logits[best]) / s->temperature);
        if (coin < sum) { return candidates[i].token; }
    }
    return candidates[keep - 1].token;
}
