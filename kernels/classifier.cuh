// classifier.cuh - softmax cross entropy: the loss and its gradient in one visit of a row of logits; probabilities are never stored.
// loss = logsumexp(logits) - logits[target]; dlogits = (softmax(logits) - onehot(target)) * scale.
#pragma once
#include "floatx.cuh"

// A target below 0 takes no part: loss 0, gradient 0. Columns V..Vp-1 are padding: no probability, gradient 0.
DEVICE void classifier_row(Team t, size_t row, float* losses, floatX* logits, const int* targets, int V, int Vp, float scale, bool backward) {
    floatX* x = logits + row * (size_t)Vp;
    int target = targets[row];
    float top = -INFINITY, sum = 0.0f;
    TEAM_MAX_FOR(i, V, top) {
        float v = load(x + i);
        top = v > top ? v : top;
    }
    top = team_max(t, top);
    TEAM_SUM_FOR(i, V, sum) { sum += expf(load(x + i) - top); }
    sum = team_sum(t, sum);
    if (t.rank == 0) { losses[row] = target < 0 ? 0.0f : logf(sum) + top - load(x + target); }
    if (!backward) { return; }
    team_sync(t); // the loss has read the target's logit
    float weight = target < 0 ? 0.0f : scale / sum;
    TEAM_FOR(i, V) { store(x + i, expf(load(x + i) - top) * weight); }
    team_sync(t);
    if (t.rank == 0 && target >= 0) {
        // subtract before rounding: the target's probability is near 1 late in training
        float p = expf(-losses[row]);
        store(x + target, (p - 1.0f) * scale);
    }
    for (int i = V + t.rank; i < Vp; i += t.size) { store(x + i, 0.0f); }
}

// losses: (N) = cross entropy; logits: (N, Vp), overwritten by dlogits when backward; targets: (N)
// scale: 1 / (tokens of the whole step), so that gradients only ever add up
void classifier(float* losses, floatX* logits, const int* targets, size_t N, int V, int Vp, float scale, bool backward) {
    LAUNCH(N, BLOCK_TEAM, classifier_row, losses, logits, targets, V, Vp, scale, backward);
}
