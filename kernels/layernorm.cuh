// layernorm.cuh - y = (x - mean) * rstd * weight + bias over the last dimension (Ba et al. 2016, arXiv 1607.06450), fused with
// the residual addition before it and, on the CPU, with the bias of the matmul whose output is added.
// mean and rstd are kept for the backward pass; the normalised output can be made again from them (recompute).
#pragma once
#include "floatx.cuh"
#include "reduce.cuh"

#define LAYERNORM_EPS 1e-5f
#define LAYERNORM_CHUNK 32 // rows whose weight gradients are summed by one team

// normed, inp: (N, C); mean, rstd: (N); weight, bias: (C)
DEVICE void layernorm_forward_row(Team t, size_t row, floatX* normed, float* mean, float* rstd, const floatX* inp,
                                  const floatX* weight, const floatX* bias, int C) {
    const floatX* x = inp + row * (size_t)C;
    floatX* y = normed + row * (size_t)C;
    float sum = 0.0f, square = 0.0f;
    TEAM_VEC_SUM_FOR(i, C, sum) {
        floatV v = load_vec(x + i, C - i);
        VEC_FOR(k) { sum += vec_get(v, k); }
    }
    float m = team_sum(t, sum) / (float)C;
    TEAM_VEC_SUM_FOR(i, C, square) {
        floatV v = load_vec(x + i, C - i);
        VEC_FOR(k) {
            float d = i + k < C ? vec_get(v, k) - m : 0.0f;
            square += d * d;
        }
    }
    float s = 1.0f / sqrtf(team_sum(t, square) / (float)C + LAYERNORM_EPS);
    TEAM_VEC_FOR(i, C) {
        floatV v = load_vec(x + i, C - i), w = load_vec(weight + i, C - i), b = load_vec(bias + i, C - i);
        VEC_FOR(k) { vec_set(&v, k, (vec_get(v, k) - m) * s * vec_get(w, k) + vec_get(b, k)); }
        store_vec(y + i, v, C - i);
    }
    if (t.rank == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

void layernorm_forward(floatX* normed, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias,
                       size_t N, int C) {
    LAUNCH(N, WARP_TEAM, layernorm_forward_row, normed, mean, rstd, inp, weight, bias, C);
}

// residual = skip + branch + branch_bias; normed = layernorm(residual). residual may be skip.
// residual, normed, skip, branch: (N, C); mean, rstd: (N); branch_bias, weight, bias: (C)
DEVICE void residual_layernorm_forward_row(Team t, size_t row, floatX* residual, floatX* normed, float* mean, float* rstd,
                                           const floatX* skip, const floatX* branch, const floatX* branch_bias,
                                           const floatX* weight, const floatX* bias, int C) {
    const floatX *a = skip + row * (size_t)C, *b = branch + row * (size_t)C;
    floatX* x = residual + row * (size_t)C;
    TEAM_VEC_FOR(i, C) {
        floatV v = load_vec(a + i, C - i), w = load_vec(b + i, C - i), c = load_vec(branch_bias + i, C - i);
        VEC_FOR(k) { vec_set(&v, k, vec_get(v, k) + (vec_get(w, k) + vec_get(c, k))); }
        store_vec(x + i, v, C - i);
    }
    // each thread reads back only what it wrote itself: no sync is needed
    layernorm_forward_row(t, row, normed, mean, rstd, residual, weight, bias, C);
}

void residual_layernorm_forward(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* skip,
                                const floatX* branch, const floatX* branch_bias, const floatX* weight, const floatX* bias,
                                size_t N, int C) {
    LAUNCH(N, WARP_TEAM, residual_layernorm_forward_row, residual, normed, mean, rstd, skip, branch, branch_bias, weight, bias, C);
}

// One team takes LAYERNORM_CHUNK rows: dinp (N, C) += the gradient through the norm, and its rows' share of dweight and dbias goes
// to partial (chunks, 2C): first C dweight, then C dbias. Scratch: 2C floats.
DEVICE void layernorm_backward_chunk(Team t, size_t chunk, floatX* dinp, float* partial, const floatX* dnormed, const floatX* inp,
                                     const floatX* weight, const float* mean, const float* rstd, size_t N, int C) {
    float* dweight = (float*)t.scratch;
    float* dbias = dweight + C;
    TEAM_FOR(i, C) { dweight[i] = 0.0f; dbias[i] = 0.0f; }
    size_t end = min_size(N, (chunk + 1) * LAYERNORM_CHUNK);
    for (size_t row = chunk * LAYERNORM_CHUNK; row < end; row++) {
        const floatX *dy = dnormed + row * (size_t)C, *x = inp + row * (size_t)C;
        floatX* dx = dinp + row * (size_t)C;
        float m = mean[row], s = rstd[row], g_sum = 0.0f, gx_sum = 0.0f;
        TEAM_SUM_FOR(i, C, g_sum, gx_sum) {
            float g = load(dy + i) * load(weight + i);
            g_sum += g;
            gx_sum += g * ((load(x + i) - m) * s);
        }
        float g_mean = team_sum(t, g_sum) / (float)C, gx_mean = team_sum(t, gx_sum) / (float)C;
        TEAM_FOR(i, C) {
            float xhat = (load(x + i) - m) * s, d = load(dy + i);
            store(dx + i, load(dx + i) + (d * load(weight + i) - g_mean - xhat * gx_mean) * s);
            dweight[i] += d * xhat;
            dbias[i] += d;
        }
    }
    float* out = partial + chunk * (size_t)(2 * C);
    TEAM_FOR(i, C) { out[i] = dweight[i]; out[C + i] = dbias[i]; }
}

size_t layernorm_backward_partials(size_t N, int C) { return ceil_div(N, LAYERNORM_CHUNK) * (size_t)(2 * C); }

// dinp += d layernorm; dweight, dbias += . partial: layernorm_backward_partials(N, C) floats of work space.
void layernorm_backward(floatX* dinp, floatX* dweight, floatX* dbias, float* partial, const floatX* dnormed, const floatX* inp,
                        const floatX* weight, const float* mean, const float* rstd, size_t N, int C) {
    size_t chunks = ceil_div(N, LAYERNORM_CHUNK);
    LAUNCH_SCRATCH(chunks, BLOCK_TEAM, (size_t)(2 * C) * sizeof(float), layernorm_backward_chunk, dinp, partial, dnormed, inp, weight,
                   mean, rstd, N, C);
    sum_rows(dweight, partial, chunks, (size_t)(2 * C), 0, C);
    sum_rows(dbias, partial, chunks, (size_t)(2 * C), (size_t)C, C);
}
