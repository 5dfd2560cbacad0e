// Converts a model's weights to the integers that pack.c lays out, one output at a time.
#ifndef MULTIRATE_ROUNDING_H
#define MULTIRATE_ROUNDING_H
#include "simd.h"

// Largest norm of an output's integers: with fixed_rows.h's ROW_NORM no sum leaves int32.
#define WEIGHT_NORM 65000.0f

typedef int32_t i8 __attribute__((vector_size(32)));
typedef double f8d __attribute__((vector_size(64))); // 8 fp64 lanes

// What decides an output's unit. The norm is not finite where any weight is not.
typedef struct {
    double norm;
    float largest;
} Extent;

static Extent extent_of(const float *w, int in) {
    f8d sum = {0};
    f8 largest = {0};
    int i = 0;
    for (; i + 8 <= in; i += 8) {
        f8 v;
        memcpy(&v, w + i, sizeof v);
        f8d wide = __builtin_convertvector(v, f8d);
        sum += wide * wide;
        v = (f8)((i8)v & 0x7fffffff);
        i8 larger = v > largest;
        largest = (f8)(((i8)v & larger) | ((i8)largest & ~larger));
    }
    Extent found = {0.0, 0.0f};
    for (int lane = 0; lane < 8; lane++) {
        found.norm += sum[lane];
        found.largest = fmaxf(found.largest, largest[lane]);
    }
    for (; i < in; i++) {
        found.norm += (double)w[i] * w[i];
        found.largest = fmaxf(found.largest, fabsf(w[i]));
    }
    found.norm = sqrt(found.norm);
    return found;
}

static void round_all(const float *w, float steps, int in, int16_t *q) {
    for (int i = 0; i < in; i++)
        q[i] = (int16_t)(int)rintf(w[i] * steps);
}

// How many integers a weight of 1 is, so that they keep to WEIGHT_NORM and to `most`; 0: they are
// not finite.
static float steps_for(const float *w, int in, float most) {
    Extent extent = extent_of(w, in);
    if (!isfinite(extent.norm))
        return 0.0f;
    if (extent.largest == 0.0f)
        return 1.0f;
    float by_norm = WEIGHT_NORM / fmaxf((float)extent.norm, 1e-30f),
          by_largest = most / fmaxf(extent.largest, 1e-30f);
    return fminf(by_norm, by_largest);
}

static float not_finite(int16_t *q, int in) {
    memset(q, 0, (size_t)in * sizeof *q);
    return NAN;
}

static float round_to_int16(const float *w, int in, int16_t *q) {
    float steps = steps_for(w, in, INT16_MAX);
    if (steps == 0.0f)
        return not_finite(q, in);
    int exponent;
    frexpf(steps, &exponent);
    steps = ldexpf(1.0f, exponent - 1);
    round_all(w, steps, in, q);
    return 1.0f / steps;
}

// Without branches: a compiler makes vectors of it.
static int split_in_twelve(const int16_t *q, int in, uint8_t *bytes, uint8_t *codes) {
    uint16_t lost = 0;
    for (int i = 0; i < in; i++) {
        uint16_t sign = (uint16_t)(q[i] < 0 ? 0xffff : 0), size = (uint16_t)((q[i] ^ sign) - sign),
                 shift = 0;
        for (int step = 0; step < 7; step++) {
            uint16_t large = size > 255;
            lost |= size & large;
            size = (uint16_t)(size >> large);
            shift = (uint16_t)(shift + large);
        }
        bytes[i] = (uint8_t)size;
        codes[i] = (uint8_t)(shift | (sign & 8));
    }
    return !lost;
}
#endif
