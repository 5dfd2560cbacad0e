// The innermost product with bf16 weights: 16 to 64 outputs × up to 6 rows, in registers. Two forms
// of it exist, of which a build has one: tile_wide.c, and tile_avx2.c for 16 registers of 8 lanes.
#ifndef MULTIRATE_TILE_H
#define MULTIRATE_TILE_H
#include "simd.h"

// Whether a build has products of int16 (fixed_point.c): linear layers then have such weights, and
// only attention and experts have those of bf16.
#if !defined(MULTIRATE_WIDE) &&                                                                    \
    (defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)))
#define INTEGER_PRODUCTS 1
#else
#define INTEGER_PRODUCTS 0
#endif

// Whether a build's products of int16 may have weights of 12 bits (fixed_point.c).
#if INTEGER_PRODUCTS && defined(__AVX512F__)
#define INT12_PRODUCTS 1
#else
#define INT12_PRODUCTS 0
#endif

#if INTEGER_PRODUCTS && !defined(__AVX512F__)
#define AVX2_TILE 1
#else
#define AVX2_TILE 0
#endif

// A tile has up to 6 rows; N_r(F) writes F(0) … F(r − 1).
#define TILE_ROWS 6
#define N_1(F) F(0)
#define N_2(F) N_1(F) F(1)
#define N_3(F) N_2(F) F(2)
#define N_4(F) N_3(F) F(3)
#define N_5(F) N_4(F) F(4)
#define N_6(F) N_5(F) F(5)
// Integer tiles have more.
#define N_7(F) N_6(F) F(6)
#define N_8(F) N_7(F) F(7)
#define N_9(F) N_8(F) F(8)
#define N_10(F) N_9(F) F(9)
#define N_11(F) N_10(F) F(10)
#define N_12(F) N_11(F) F(11)

// How many of `left` rows the next tile takes: even parts, 8 rows as 4 + 4.
INLINE int tile_share(int left) {
    int parts = (left + TILE_ROWS - 1) / TILE_ROWS;
    return (left + parts - 1) / parts;
}

// acc[n][m] += Σ_k w[k][m] · rows[n][k], for `rows` rows and 64 outputs. The words of pair k are at
// weight + k · step. ahead: weights that will be read later, of which each step fetches `lines` (1
// or 2) lines; lines 0: the tile fetches its own.
void tile(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
          const char *ahead, int lines, f16 (*acc)[4]);

// The same for keys and values, of `vectors` (1 to 4) vectors of 16 outputs. Each step is fma16, so
// the bits are the same on every processor. ahead: what will be read next.
void tile_fused(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                int vectors, const char *ahead, f16 (*acc)[4]);

#if !AVX2_TILE
// acc[n][m] += K · rows[n] for four consecutive blocks m of 16 keys, of `pairs` pairs each; as
// tile_fused.
void tile_blocks(const uint32_t *k, const float *const *x, int rows, int pairs, f16 (*acc)[4]);
#endif
#endif
