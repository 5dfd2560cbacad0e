// The innermost product with bf16 weights: 16 to 64 outputs × up to 6 rows, in registers. Two forms
// of it exist, of which a build has one: tile_wide.c, and tile_avx2.c for 16 registers of 8 lanes.
#ifndef MULTIRATE_TILE_H
#define MULTIRATE_TILE_H
#include "vectors/simd.h"
#include "weights/arch/rows_of_tile.h"

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

// A tile has up to 6 rows; integer tiles have more.
#define TILE_ROWS 6

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
