// Code shared by the tiles of w8a8.c and w4a8.c.
#ifndef MULTIRATE_BYTE_TILE_H
#define MULTIRATE_BYTE_TILE_H
#include "gemm.h"
#if BYTE_PRODUCTS
#include <immintrin.h>

// sum[16] += four unsigned bytes of each of 16 outputs · four signed ones of a row.
#define DOT(sum, w, word)                                                                          \
    asm("vpdpbusd %[x]%{1to16%}, %[v], %[a]" : [a] "+v"(sum) : [v] "v"(w), [x] "m"(word));

// What passes over weights are made of; N_r(F) writes F(0) … F(r − 1). Names that they use: weight,
// units, x, beside, lines, fetched, to, stride as in BytePass, lanes, k.
#define LINE(k) _mm512_load_si512(weight + (k) * 64)
#define TOTAL(n) __m512 total##n = _mm512_setzero_ps();
#define JOIN(n) a##n = _mm512_add_epi32(_mm512_add_epi32(a##n, b##n), _mm512_add_epi32(c##n, d##n));
#define BESIDE(n) ((const float *)beside)[n]
#define ADD_SUM(n)                                                                                 \
    total##n = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a##n),                                           \
                               _mm512_mul_ps(_mm512_set1_ps(BESIDE(lanes + n)), unit), total##n);
#define KEEP(n) _mm512_storeu_ps(to + (long)n * stride, total##n);

// 16 outputs for ROWS rows; BLOCK(ROWS) goes on from line k to the end of a block, and adds its
// sums to the totals.
#define BYTE_PASS(ROWS, BLOCK)                                                                     \
    static void pass_##ROWS(const char *weight, const bf16 *units, const int32_t *x,               \
                            const int32_t *beside, long lines, const Ahead *fetched, float *to,    \
                            long stride) {                                                         \
        const long lanes = ROWS;                                                                   \
        N_##ROWS(TOTAL) for (long k = 0; k < lines;                                                \
                             beside += 2 * lanes){BLOCK(ROWS)} N_##ROWS(KEEP)                      \
    }
// Passes for 1, 2, … 12 rows, and a table of them. FEW: of up to 4 rows, with several sums for
// each, as one would wait for its own last step.
#define BYTE_PASSES(FEW, MANY)                                                                     \
    BYTE_PASS(1, FEW)                                                                              \
    BYTE_PASS(2, FEW)                                                                              \
    BYTE_PASS(3, FEW)                                                                              \
    BYTE_PASS(4, FEW)                                                                              \
    BYTE_PASS(5, MANY)                                                                             \
    BYTE_PASS(6, MANY)                                                                             \
    BYTE_PASS(7, MANY)                                                                             \
    BYTE_PASS(8, MANY)                                                                             \
    BYTE_PASS(9, MANY)                                                                             \
    BYTE_PASS(10, MANY)                                                                            \
    BYTE_PASS(11, MANY)                                                                            \
    BYTE_PASS(12, MANY)                                                                            \
    static const BytePass passes[BYTE_LANES + 1] = {                                               \
        NULL,   pass_1, pass_2, pass_3,  pass_4,  pass_5,  pass_6,                                 \
        pass_7, pass_8, pass_9, pass_10, pass_11, pass_12,                                         \
    };

// 16 outputs of `lines` lines for the rows of a tile: weights, their scales, the rows' words and
// what lies beside these (byte_rows.c); to: [lanes][16], `stride` floats apart.
typedef void (*BytePass)(const char *, const bf16 *, const int32_t *, const int32_t *, long,
                         const Ahead *, float *, long);

// byte_rows.c: columns [first_of, last_of) of one group for a tile of rows, acc[.][m] the group's
// m-th; lines and scales of 16 outputs: `lines` in all, `units_of` for each block.
void byte_product(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                  const uint32_t *after, f16 (*acc)[4], long lines, long units_of,
                  const BytePass *passes);
#endif
#endif
