#include "blocks.h"

#include "../vectors.h"

void read_unpacked(const Unpacked *from, int output, float *to) {
    int in = from->inputs;
    if (output >= from->outputs) {
        memset(to, 0, (size_t)in * sizeof *to);
        return;
    }
    if (from->wide) {
        memcpy(to, (const float *)from->values + (size_t)output * in, (size_t)in * sizeof *to);
        return;
    }
    const bf16 *values = (const bf16 *)from->values + (size_t)output * in;
    for (int i = 0; i < in; i++)
        to[i] = from_bf16(values[i]);
}

void put_half(fp16 half, uint8_t *to) {
    memcpy(to, &half, sizeof half);
}

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

static void to_q8_0(const float *w, uint8_t *to) {
    float most = 0.0f;
    for (int i = 0; i < BLOCK; i++)
        most = fabsf(w[i]) > most || isnan(w[i]) ? fabsf(w[i]) : most;
    float d = most / 127.0f, by = reciprocal(d);
    put_half(to_fp16(d), to);
    for (int i = 0; i < BLOCK; i++) {
        float v = w[i] * by;
        to[2 + i] = (uint8_t)(fabsf(v) <= 128.0f ? (int8_t)roundf(v) : 0);
    }
}

static void to_q4_0(const float *w, uint8_t *to) {
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
    put_half(to_fp16(d), to);
    put_halves(q, to + 2);
}

static void to_q4_1(const float *w, uint8_t *to) {
    float most = w[0], least = w[0];
    for (int i = 1; i < BLOCK; i++) {
        most = w[i] > most || isnan(w[i]) ? w[i] : most;
        least = w[i] < least || isnan(w[i]) ? w[i] : least;
    }
    float d = (most - least) / 15.0f, by = reciprocal(d);
    uint8_t q[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        q[i] = clipped((w[i] - least) * by + 0.5f, 15);
    put_half(to_fp16(d), to);
    put_half(to_fp16(least), to + 2);
    put_halves(q, to + 4);
}

void quantise_row(int format, const float *w, int inputs, void *blocks) {
    uint8_t *to = blocks;
    for (long b = 0; b < inputs / BLOCK; b++, w += BLOCK, to += format_of(format)->bytes) {
        if (format == WEIGHTS_Q8_0)
            to_q8_0(w, to);
        else if (format == WEIGHTS_Q4_0)
            to_q4_0(w, to);
        else
            to_q4_1(w, to);
    }
}
