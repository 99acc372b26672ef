// gelu.cuh - y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's form (Hendrycks and Gimpel 2016, arXiv 1606.08415).
#pragma once
#include "vector.cuh"

#define GELU_CHUNK 4096
#define GELU_SCALE 0.7978845608028654f // sqrt(2/pi)
#define GELU_CUBE 0.044715f

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x))); }

DEVICE float gelu_derivative(float x) {
    float t = tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
}

DEVICE void gelu_forward_chunk(Team t, size_t chunk, floatX* out, const floatX* inp, size_t n) {
    size_t first = chunk * GELU_CHUNK;
    int count = (int)min_size(GELU_CHUNK, n - first);
    const floatX* x = inp + first;
    floatX* y = out + first;
    TEAM_VEC_FOR(i, count) {
        floatV v = load_vec(x + i, count - i);
        VEC_FOR(k) { vec_set(&v, k, gelu(vec_get(v, k))); }
        store_vec(y + i, v, count - i);
    }
}

// out, inp: n values; out may be inp
void gelu_forward(floatX* out, const floatX* inp, size_t n) { LAUNCH(ceil_div(n, GELU_CHUNK), BLOCK_TEAM, gelu_forward_chunk, out, inp, n); }

// pre (N, OC) += bias (OC); out (N, OC) = gelu(pre)
DEVICE void bias_gelu_forward_row(Team t, size_t row, floatX* out, floatX* pre, const floatX* bias, int OC) {
    floatX *x = pre + row * (size_t)OC, *y = out + row * (size_t)OC;
    TEAM_VEC_FOR(i, OC) {
        floatV v = load_vec(x + i, OC - i), b = load_vec(bias + i, OC - i), g = v;
        VEC_FOR(k) {
            vec_set(&v, k, vec_get(v, k) + vec_get(b, k));
            vec_set(&g, k, gelu(vec_get(v, k)));
        }
        store_vec(x + i, v, OC - i);
        store_vec(y + i, g, OC - i);
    }
}

void bias_gelu_forward(floatX* out, floatX* pre, const floatX* bias, size_t N, int OC) {
    LAUNCH(N, BLOCK_TEAM, bias_gelu_forward_row, out, pre, bias, OC);
}

DEVICE void gelu_backward_chunk(Team t, size_t chunk, floatX* d, const floatX* pre, size_t n) {
    size_t first = chunk * GELU_CHUNK;
    int count = (int)min_size(GELU_CHUNK, n - first);
    const floatX* x = pre + first;
    floatX* g = d + first;
    TEAM_VEC_FOR(i, count) {
        floatV v = load_vec(x + i, count - i), u = load_vec(g + i, count - i);
        VEC_FOR(k) { vec_set(&u, k, vec_get(u, k) * gelu_derivative(vec_get(v, k))); }
        store_vec(g + i, u, count - i);
    }
}

// d (n): gradient of the output on entry, of the input on return; pre: the input of the forward pass
void gelu_backward(floatX* d, const floatX* pre, size_t n) { LAUNCH(ceil_div(n, GELU_CHUNK), BLOCK_TEAM, gelu_backward_chunk, d, pre, n); }
