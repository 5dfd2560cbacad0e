// Rows in fixed point (fixed_point.c).
#ifndef MULTIRATE_FIXED_ROWS_H
#define MULTIRATE_FIXED_ROWS_H
#include "simd.h"

#define ROW_NORM 32000.0f // ‖x‖ in units of the row's scale; rounding.h keeps ‖w‖ ≤ 65000

// To the nearest, ties to even; v is at most ROW_NORM, or no number where the row's scale is none.
INLINE void store_rounded(int16_t *to, fv v) {
#if LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)v)));
#elif LANES == 8
    __m256i words = _mm256_cvtps_epi32((__m256)v);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi32(_mm256_castsi256_si128(words),
                                                    _mm256_extracti128_si256(words, 1)));
#else
    const fv big = all(0x1.8p23f); // beside which fractions have no room
    typedef int16_t halves __attribute__((vector_size(2 * LANES)));
    halves words = __builtin_convertvector((iv)(v + big) - (iv)big, halves);
    memcpy(to, &words, sizeof words);
#endif
}

// v² where |v| is at most ROW_NORM / 4, else 0.
INLINE fv square_of_small(fv v) {
    fv size = (fv)((iv)v & 0x7fffffff);
    return (fv)((iv)(v * v) & (size <= all(ROW_NORM / 4)));
}

// Both sums over a row have two Sums, whose additions overlap: 32 lanes.
INLINE float both(Sum a, Sum b) {
    for (int j = 0; j < 16 / LANES; j++)
        a.of[j] += b.of[j];
    return total_of(a);
}

// q = round(x · unit); returns Σ q² over elements that hold at most 1/16 of ROW_NORM².
static float quantise(const float *x, float unit, int in, int16_t *q) {
    Sum small[2] = {no_sum(), no_sum()};
    int i = 0;
    for (; i + 32 <= in; i += 32)
        for (int j = 0; j < 32 / LANES; j++) {
            fv v = load_v(x + i + j * LANES) * all(unit);
            small[j * LANES / 16].of[j % (16 / LANES)] += square_of_small(v);
            store_rounded(q + i + j * LANES, v);
        }
    float rest = both(small[0], small[1]);
    for (; i < in; i++) {
        float v = x[i] * unit;
        if (fabsf(v) <= ROW_NORM / 4)
            rest += v * v;
        q[i] = (int16_t)lrintf(v);
    }
    return rest;
}

static float norm_of(const float *x, int in) {
    Sum sum[2] = {no_sum(), no_sum()};
    int i = 0;
    for (; i + 32 <= in; i += 32)
        for (int j = 0; j < 32 / LANES; j++) {
            fv v = load_v(x + i + j * LANES), *to = &sum[j * LANES / 16].of[j % (16 / LANES)];
            *to = fma_v(v, v, *to);
        }
    float total = both(sum[0], sum[1]);
    for (; i < in; i++)
        total += x[i] * x[i];
    return sqrtf(total);
}

// Takes the few elements that hold most of a row's norm out of it: those above a quarter of it.
static void take_outliers(float *row, float unit, int in, Outliers *out) {
    for (int i = 0; i < in && out->count < MOST_OUTLIERS; i++) {
        float v = row[i];
        if (fabsf(v * unit) > ROW_NORM / 4) {
            out->at[out->count] = i;
            out->value[out->count++] = v;
            row[i] = 0.0f;
        }
    }
}

static float quantise_row(const float *row, int in, float *rest, int16_t *q, Outliers *out) {
    out->count = 0;
    for (;;) {
        float norm = norm_of(row, in);
        int usable = norm > 1e-30f && norm < 1e30f; // zero, or about to overflow in any precision
        float unit = usable ? ROW_NORM / norm : 0.0f;
        float small = quantise(row, unit, in, q);
        if (!usable)
            return norm * 0.0f; // an infinity or NaN stays visible
        if (small > 0.25f * ROW_NORM * ROW_NORM || out->count == MOST_OUTLIERS)
            return 1.0f / unit;
        if (row != rest)
            memcpy(rest, row, (size_t)in * sizeof *rest);
        take_outliers(rest, unit, in, out);
        row = rest;
    }
}
#endif
