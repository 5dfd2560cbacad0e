// Fixed-point products on AVX2: 16 registers of 8 lanes. 16 outputs for up to 6 rows, whose sums
// take 12 of them. A tile's rows lie one after the other, [rows][in].
#ifndef MULTIRATE_FIXED_AVX2_H
#define MULTIRATE_FIXED_AVX2_H
#include "fixed_plain.h"

// In assembly because compilers hoist the products and then spill the sums: 6 rows need all 16
// registers.
#ifdef __AVXVNNI__
#define DOT_ADD "vpdpwssd %[w], %[x], %[a]\n\tvpdpwssd %[v], %[x], %[b]"
#else
#define DOT_ADD                                                                                    \
    "vpmaddwd %[w], %[x], %[t]\n\tvpaddd %[t], %[a], %[a]\n\tvpmaddwd %[v], %[x], %[t]\n\tvpaddd " \
    "%[t], %[b], %[b]"
#endif
#define ZERO(n) __m256i a##n = _mm256_setzero_si256(), b##n = a##n;
#define ROW(n) const int *row##n = (const int *)rows + (size_t)n * pairs;
#define DOT(n)                                                                                     \
    {                                                                                              \
        __m256i t, x = _mm256_set1_epi32(row##n[k]);                                               \
        asm(DOT_ADD                                                                                \
            : [a] "+x"(a##n), [b] "+x"(b##n), [t] "=&x"(t)                                         \
            : [w] "x"(w), [v] "x"(v), [x] "x"(x));                                                 \
    }
#define KEEP(n)                                                                                    \
    _mm256_storeu_ps(to + (long)n * stride, _mm256_cvtepi32_ps(a##n));                             \
    _mm256_storeu_ps(to + (long)n * stride + 8, _mm256_cvtepi32_ps(b##n));

#define HALF(k, half)                                                                              \
    _mm256_load_si256((const __m256i *)((const char *)weight + (k) * 64 + (half) * 32))
#define PASS(NAME, ROWS, WEIGHTS)                                                                  \
    static void NAME##_##ROWS(const void *weight, const int16_t *rows, long pairs,                 \
                              const Ahead *fetched, float *to, long stride) {                      \
        N_##ROWS(ROW) N_##ROWS(ZERO) for (long k = 0; k < pairs; k++) {                            \
            FETCH_TO(k, 3)                                                                         \
            __m256i w = WEIGHTS(k, 0), v = WEIGHTS(k, 1);                                          \
            N_##ROWS(DOT)                                                                          \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
#define PASSES(NAME, WEIGHTS)                                                                      \
    PASS(NAME, 1, WEIGHTS)                                                                         \
    PASS(NAME, 2, WEIGHTS)                                                                         \
    PASS(NAME, 3, WEIGHTS)                                                                         \
    PASS(NAME, 4, WEIGHTS)                                                                         \
    PASS(NAME, 5, WEIGHTS)                                                                         \
    PASS(NAME, 6, WEIGHTS)
PASSES(sixteen_bits, HALF)

typedef void (*Pass)(const void *, const int16_t *, long, const Ahead *, float *, long);
#define OF_ROWS(NAME) {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6}
static const Pass passes[FIXED_ROWS + 1] = OF_ROWS(sixteen_bits);

static void fixed_tile(const void *weight, int format, const int16_t *rows, int count, int pairs,
                       const Ahead *ahead, float *to, int stride) {
    if (format == WEIGHTS_INT12)
        plain_tile(weight, format, rows, count, pairs, ahead, to, stride);
    else
        passes[count](weight, rows, pairs, ahead, to, stride);
}
#endif
