#include "quantise.h"

#include <math.h>

static float reciprocal(float d) {
    return d == 0.0f ? 0.0f : 1.0f / d;
}

// Towards zero, and within [0, most]; what is not a number is 0.
static uint8_t clipped(float v, int most) {
    return v >= 0.0f ? (uint8_t)(v < (float)most ? v : (float)most) : 0;
}

static void put_halves(const uint8_t *q, uint8_t *to) {
    for (int i = 0; i < BLOCK / 2; i++)
        to[i] = (uint8_t)(q[i] | q[i + BLOCK / 2] << 4);
}

static void to_q8_0(const float *w, BlockQ8_0 *to) {
    float most = 0.0f;
    for (int i = 0; i < BLOCK; i++)
        most = fabsf(w[i]) > most || isnan(w[i]) ? fabsf(w[i]) : most;
    float d = most / 127.0f, by = reciprocal(d);
    to->d = to_fp16(d);
    for (int i = 0; i < BLOCK; i++) {
        float v = w[i] * by;
        to->q[i] = fabsf(v) <= 128.0f ? (int8_t)roundf(v) : 0;
    }
}

static void to_q4_0(const float *w, BlockQ4_0 *to) {
    float most = 0.0f, size = -1.0f;
    for (int i = 0; i < BLOCK; i++)
        if (fabsf(w[i]) > size || isnan(w[i])) {
            most = w[i];
            size = fabsf(w[i]);
        }
    float d = most / -8.0f, by = reciprocal(d);
    uint8_t q[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        q[i] = clipped(w[i] * by + 8.5f, 15);
    to->d = to_fp16(d);
    put_halves(q, to->q);
}

static void to_q4_1(const float *w, BlockQ4_1 *to) {
    float most = w[0], least = w[0];
    for (int i = 1; i < BLOCK; i++) {
        most = w[i] > most || isnan(w[i]) ? w[i] : most;
        least = w[i] < least || isnan(w[i]) ? w[i] : least;
    }
    float d = (most - least) / 15.0f, by = reciprocal(d);
    uint8_t q[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        q[i] = clipped((w[i] - least) * by + 0.5f, 15);
    to->d = to_fp16(d);
    to->m = to_fp16(least);
    put_halves(q, to->q);
}

void quantise_row(int format, const float *w, int inputs, void *blocks) {
    for (long b = 0; b < inputs / BLOCK; b++, w += BLOCK) {
        if (format == WEIGHTS_Q8_0)
            to_q8_0(w, (BlockQ8_0 *)blocks + b);
        else if (format == WEIGHTS_Q4_0)
            to_q4_0(w, (BlockQ4_0 *)blocks + b);
        else
            to_q4_1(w, (BlockQ4_1 *)blocks + b);
    }
}
