#include "../norm.h"

static void add_squares(Sum *sum, const float *x) { // of 16
    for (int j = 0; j < 16 / LANES; j++) {
        fv v = load_v(x + j * LANES);
        sum->of[j] = fma_v(v, v, sum->of[j]);
    }
}

float inverse_rms(const float *x, int d, float eps) {
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
void rms_norm(const float *x, const float *weight, int d, float eps, float *out) {
    float scale = inverse_rms(x, d, eps);
    int i = 0;
    for (; i + 16 <= d; i += 16)
        store(out + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < d; i++)
        out[i] = x[i] * scale * weight[i];
}

void mr_rms_norm(float *x, const float *weight, int d, float eps) {
    rms_norm(x, weight, d, eps, x);
}

void add_normed(const float *y, const float *weight, int d, float eps, float factor, float *x) {
    fv scale = all(weight ? factor * inverse_rms(y, d, eps) : factor);
    for (int i = 0; i < d; i += LANES) {
        fv v = load_v(y + i), before = load_v(x + i);
        store_v(x + i,
                weight ? fma_v(v * scale, load_v(weight + i), before) : fma_v(v, scale, before));
    }
}

void read_row(const float *x, const float *weight, int d, float eps, float *out) {
    if (weight) {
        rms_norm(x, weight, d, eps, out);
        return;
    }
    for (int i = 0; i < d; i += 16)
        store(out + i, load(x + i));
}

// transformers' Llama convention: the halves of a head are rotated against each other.
void mr_rotate(float *x, const float *cos, const float *sin, int d) {
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
