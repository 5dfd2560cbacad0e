// The innermost product in 16-bit fixed point: 16 outputs of a group × the rows of a tile. A build
// has one of its two forms: fixed_tile_avx512.c or fixed_tile_avx2.c.
#ifndef MULTIRATE_FIXED_TILE_H
#define MULTIRATE_FIXED_TILE_H
#include "tile.h"
#include "weights/arch.h"
#if INTEGER_PRODUCTS
#include <immintrin.h>

#ifdef __AVX512F__
#define FIXED_LANES 24 // rows of a tile at most, in registers with their weights
#else
#define FIXED_LANES 6
#endif

// At its step k, where it was told by an `Ahead *fetched`.
#define FETCH(k)                                                                                   \
    _mm_prefetch(((k) < fetched->own ? fetched->here : fetched->next) + (k) * fetched->stride,     \
                 _MM_HINT_T1);

// How many rows a tile of `rows` has with those that only fill it up.
int fixed_lanes(int rows);

// `count` rows [in] of a tile, in the order in which fixed_tile reads them: to [fixed_lanes · in].
void fixed_arrange(const int16_t *const *rows, int count, int in, int16_t *to);

// to[n][0 … 15] = w · row n of 16 outputs, exactly; rows are as fixed_arrange leaves them. weight:
// [pairs][16][2] of int16, or what fixed_point.c draws of 12 bits: `format`. `to` has room
// for fixed_lanes(count) rows, `stride` floats apart.
void fixed_tile(const void *weight, int format, const int16_t *rows, int count, int pairs,
                const Ahead *ahead, float *to, int stride);

#if INT12_PRODUCTS
// Line `line` of WEIGHTS_INT12, as of WEIGHTS_INT16: to [32].
void fixed_line_12(const void *weights, long line, int16_t *to);
#endif
#endif
#endif
