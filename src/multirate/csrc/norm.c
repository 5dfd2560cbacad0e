#include "norm.h"

float inverse_rms(const float *x, int d, float eps) {
    fv sum = all(0.0f);
    for (int i = 0; i < d; i += LANES) {
        fv v = load_v(x + i);
        sum += v * v;
    }
    float total = sum_v(sum);
    return 1.0f / sqrtf(total / d + eps);
}

// Epsilon lies inside the root.
void rms_norm(const float *x, const float *weight, int d, float eps, float *out) {
    f16 scale = splat(inverse_rms(x, d, eps));
    for (int i = 0; i < d; i += 16)
        store(out + i, load(x + i) * scale * load(weight + i));
}

void add_normed(const float *y, const float *weight, int d, float eps, float factor, float *x) {
    f16 scale = splat(weight ? factor * inverse_rms(y, d, eps) : factor);
    for (int i = 0; i < d; i += 16) {
        f16 scaled = load(y + i) * scale;
        store(x + i, load(x + i) + (weight ? scaled * load(weight + i) : scaled));
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

// The same in place, for any d.
void mr_rms_norm(float *x, const float *weight, int d, float eps) {
    float total = 0.0f;
    for (int i = 0; i < d; i++)
        total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / d + eps);
    for (int i = 0; i < d; i++)
        x[i] *= scale * weight[i];
}

// transformers' Llama convention: the halves of a head are rotated against each other.
void mr_rotate(float *x, const float *cos, const float *sin, int d) {
    int i = 0, h = d / 2;
    for (; i + 16 <= h; i += 16) {
        f16 a = load(x + i), b = load(x + i + h), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + i + h, b * c + a * s);
    }
    for (; i < h; i++) {
        float a = x[i], b = x[i + h];
        x[i] = a * cos[i] - b * sin[i];
        x[i + h] = b * cos[i] + a * sin[i];
    }
}
