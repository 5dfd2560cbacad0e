// RMSNorm, rotary position embedding, sums over rows, and what becomes of a product's sums.
#ifndef MULTIRATE_ROWS_H
#define MULTIRATE_ROWS_H
#include "simd.h"

static void add_squares(Sum *sum, const float *x) { // of 16
    for (int j = 0; j < 16 / LANES; j++) {
        fv v = load_v(x + j * LANES);
        sum->of[j] = fma_v(v, v, sum->of[j]);
    }
}

static float inverse_rms(const float *x, int d, float eps) {
    Sum sum = no_sum();
    int i = 0;
    for (; i + 16 <= d; i += 16)
        add_squares(&sum, x + i);
    if (i < d) {
        float last[16] = {0};
        memcpy(last, x + i, (size_t)(d - i) * sizeof *x);
        add_squares(&sum, last);
    }
    return 1.0f / sqrtf(total_of(sum) / d + eps);
}

// Epsilon lies inside the root.
static void read_row(const float *x, const float *weight, int d, float eps, float *out) {
    if (!weight) {
        memmove(out, x, (size_t)d * sizeof *x);
        return;
    }
    float scale = inverse_rms(x, d, eps);
    int i = 0;
    for (; i + 16 <= d; i += 16)
        store(out + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < d; i++)
        out[i] = x[i] * scale * weight[i];
}

static void add_normed(const float *y, const float *weight, int d, float eps, float factor,
                       float *x) {
    fv scale = all(weight ? factor * inverse_rms(y, d, eps) : factor);
    for (int i = 0; i < d; i += LANES) {
        fv v = load_v(y + i), before = load_v(x + i);
        store_v(x + i,
                weight ? fma_v(v * scale, load_v(weight + i), before) : fma_v(v, scale, before));
    }
}

// transformers' Llama convention: the halves of a head are rotated against each other.
static void rotate(float *x, const float *cos, const float *sin, int d) {
    int i = 0, h = d / 2;
    for (; i + LANES <= h; i += LANES) {
        fv a = load_v(x + i), b = load_v(x + i + h), c = load_v(cos + i), s = load_v(sin + i);
        store_v(x + i, fma_v(a, c, -(b * s)));
        store_v(x + i + h, fma_v(b, c, a * s));
    }
    for (; i < h; i++) {
        float a = x[i], b = x[i + h];
        x[i] = fmaf(a, cos[i], -(b * sin[i]));
        x[i + h] = fmaf(b, cos[i], a * sin[i]);
    }
}

static float dot(const float *a, const float *b, int d) {
    Sum sum = no_sum();
    for (int i = 0; i < d; i += 16)
        for (int j = 0; j < 16 / LANES; j++)
            sum.of[j] = fma_v(load_v(a + i + j * LANES), load_v(b + i + j * LANES), sum.of[j]);
    return total_of(sum);
}

static float dot_bf16(const float *x, const float *norm, const bf16 *w, int d) {
    Sum sum = no_sum();
    for (int i = 0; i < d; i += 16)
        for (int j = 0; j < 16 / LANES; j++) {
            int at = i + j * LANES;
            fv v = load_v(x + at);
            sum.of[j] = fma_v(norm ? v * load_v(norm + at) : v, load_bf16_v(w + at), sum.of[j]);
        }
    return total_of(sum);
}

static void add_bf16(float factor, const bf16 *w, int d, float *y) {
    for (int i = 0; i < d; i += LANES)
        store_v(y + i, fma_v(all(factor), load_bf16_v(w + i), load_v(y + i)));
}

static void combine(const float *parts, const float *weights, int k, int d, float *x) {
    for (int i = 0; i < d; i += LANES) {
        fv sum = all(0.0f);
        for (int j = 0; j < k; j++)
            sum = fma_v(all(weights[j]), load_v(parts + (size_t)j * d + i), sum);
        store_v(x + i, load_v(x + i) + sum);
    }
}

static float sigmoid(float x) {
    return sigmoid_vector(all(x))[0];
}

static void silu(const float *x, int count, float *to) {
    for (int i = 0; i < count; i += LANES)
        store_v(to + i, silu_vector(load_v(x + i)));
}

static void exp_below(const float *x, int count, float top, float *to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        store_v(to + i, exp_vector(load_v(x + i) - all(top)));
    for (; i < count; i++)
        to[i] = exp_of(x[i] - top);
}

INLINE fv gate_vector(int mode, fv gate) {
    return mode == GELU_GATE ? gelu_vector(gate) : silu_vector(gate);
}

static void gates(int mode, const float *y, int groups, float *to) {
    for (int g = 0; g < groups; g++, y += GROUP_FLOATS, to += GROUP_FLOATS / 2)
        for (int i = 0; i < 32; i += LANES)
            store_v(to + i, gate_vector(mode, load_v(y + i)) * load_v(y + 32 + i));
}

static void put_sums(float (*sums)[GROUP_FLOATS], int rows, const float *bias, const int *target,
                     int first, int mode, Output out, int group, int from, int end) {
    for (int r = 0; r < rows; r++) {
        size_t row = target ? target[first + r] : first + r;
        float *sum = sums[r];
        if (bias)
            for (int i = from * 16; i < end * 16; i += 16)
                store(sum + i, load(sum + i) + load(bias + group * GROUP_FLOATS + i));
        if (is_gate(mode)) {
            gates(mode, sum, 1, out.activation + row * out.stride + group * GROUP_FLOATS / 2);
            continue;
        }
        float *y = out.y + row * out.stride + group * GROUP_FLOATS;
        for (int i = from * 16; i < end * 16; i += 16)
            store(y + i, mode == ADD ? load(y + i) + load(sum + i) : load(sum + i));
    }
}
#endif
