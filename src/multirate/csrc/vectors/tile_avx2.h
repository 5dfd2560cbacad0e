// The innermost product on AVX2 with FMA: 16 registers of 8 lanes.
//
// Weights become fp32 in registers (a mask, a shift). Rows are fp32 in memory, so one broadcast
// brings an input into a register. Outputs are summed as in tile_wide.c: k by k, the odd input of a
// pair first.
#ifndef MULTIRATE_TILE_AVX2_H
#define MULTIRATE_TILE_AVX2_H
#include "../weights/arch/rows_of_tile.h"
#include "simd.h"

#define LOAD(n, m)                                                                                 \
    __m256 a##n##m = _mm256_loadu_ps((float *)&acc[n][m]),                                         \
           b##n##m = _mm256_loadu_ps((float *)&acc[n][m] + 8);
#define FMA(n, m)                                                                                  \
    a##n##m = _mm256_fmadd_ps(w##m, x, a##n##m);                                                   \
    b##n##m = _mm256_fmadd_ps(v##m, x, b##n##m);
#define KEEP_SUM(n, m)                                                                             \
    _mm256_storeu_ps((float *)&acc[n][m], a##n##m);                                                \
    _mm256_storeu_ps((float *)&acc[n][m] + 8, b##n##m);
#define WORDS(m, half) ((const float *)(weight + m * 16 + half * 8))
#define MASKED(m, half) _mm256_and_ps(_mm256_loadu_ps(WORDS(m, half)), high)
#define SHIFTED(m, half)                                                                           \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)WORDS(m, half)), 16))
#define ODD(m) __m256 w##m = MASKED(m, 0), v##m = MASKED(m, 1);
#define EVEN(m) __m256 w##m = SHIFTED(m, 0), v##m = SHIFTED(m, 1);

#define M_1(F, n) F(n, 0)
#define M_2(F, n) M_1(F, n) F(n, 1)
#define M_4(F, n) M_2(F, n) F(n, 2) F(n, 3)
#define W_1(F) F(0)
#define W_2(F) W_1(F) F(1)
#define W_4(F) W_2(F) F(2) F(3)
#define FLOATS(n) const float *row##n = rows[n];

// VECTORS × 16 outputs for ROWS rows in 2 · VECTORS · ROWS accumulators: at most 12 of the 16
// registers, and where possible the 8 that hide a multiplication's latency. `ahead` is a stream of
// lines to bring closer meanwhile.
#define TILE_PASS(ROWS, VECTORS)                                                                   \
    static void pass_##ROWS##_##VECTORS(const uint32_t *weight, int step,                          \
                                        const float *const *rows, int pairs, const char *ahead,    \
                                        f16(*acc)[4]) {                                            \
        const __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u));              \
        N_##ROWS(FLOATS)                                                                           \
            N_##ROWS(LOADS_##VECTORS) for (long k = 0; k < pairs; k++, weight += step) {           \
            for (int line = 0; line < VECTORS; line++, ahead += 64)                                \
                _mm_prefetch(ahead, _MM_HINT_T1);                                                  \
            {                                                                                      \
                W_##VECTORS(ODD) N_##ROWS(ODDS_##VECTORS)                                          \
            }                                                                                      \
            {                                                                                      \
                W_##VECTORS(EVEN) N_##ROWS(EVENS_##VECTORS)                                        \
            }                                                                                      \
        }                                                                                          \
        N_##ROWS(KEEPS_##VECTORS)                                                                  \
    }
#define LOADS_1(n) M_1(LOAD, n)
#define LOADS_2(n) M_2(LOAD, n)
#define LOADS_4(n) M_4(LOAD, n)
#define ODDS_1(n)                                                                                  \
    {                                                                                              \
        __m256 x = _mm256_broadcast_ss(row##n + 2 * k + 1);                                        \
        M_1(FMA, n)                                                                                \
    }
#define ODDS_2(n)                                                                                  \
    {                                                                                              \
        __m256 x = _mm256_broadcast_ss(row##n + 2 * k + 1);                                        \
        M_2(FMA, n)                                                                                \
    }
#define ODDS_4(n)                                                                                  \
    {                                                                                              \
        __m256 x = _mm256_broadcast_ss(row##n + 2 * k + 1);                                        \
        M_4(FMA, n)                                                                                \
    }
#define EVENS_1(n)                                                                                 \
    {                                                                                              \
        __m256 x = _mm256_broadcast_ss(row##n + 2 * k);                                            \
        M_1(FMA, n)                                                                                \
    }
#define EVENS_2(n)                                                                                 \
    {                                                                                              \
        __m256 x = _mm256_broadcast_ss(row##n + 2 * k);                                            \
        M_2(FMA, n)                                                                                \
    }
#define EVENS_4(n)                                                                                 \
    {                                                                                              \
        __m256 x = _mm256_broadcast_ss(row##n + 2 * k);                                            \
        M_4(FMA, n)                                                                                \
    }
#define KEEPS_1(n) M_1(KEEP_SUM, n)
#define KEEPS_2(n) M_2(KEEP_SUM, n)
#define KEEPS_4(n) M_4(KEEP_SUM, n)
TILE_PASS(1, 4)
TILE_PASS(1, 1)
TILE_PASS(2, 2)
TILE_PASS(2, 1)
TILE_PASS(3, 1)
TILE_PASS(4, 1)
TILE_PASS(5, 1)
TILE_PASS(6, 1)

typedef void (*TilePass)(const uint32_t *, int, const float *const *, int, const char *,
                         f16 (*)[4]);
static const struct {
    TilePass widest, single;
    int vectors;
} tile_passes[TILE_ROWS + 1] = {
    {NULL, NULL, 0},         {pass_1_4, pass_1_1, 4}, {pass_2_2, pass_2_1, 2},
    {pass_3_1, pass_3_1, 1}, {pass_4_1, pass_4_1, 1}, {pass_5_1, pass_5_1, 1},
    {pass_6_1, pass_6_1, 1},
};

static void tile(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                 int vectors, const char *ahead, int lines, f16 (*acc)[4]) {
    (void)lines;
    int wide = tile_passes[rows].vectors;
    for (int m = 0; m < vectors;) {
        int whole = m + wide <= vectors, take = whole ? wide : 1;
        // acc + 0 rows, shifted by m vectors: a pass addresses its vectors from 0
        (whole ? tile_passes[rows].widest : tile_passes[rows].single)(
            weight + m * 16, step, x, pairs, ahead, (f16(*)[4]) & acc[0][m]);
        ahead += (size_t)take * pairs * 64;
        m += take;
    }
}
#endif
