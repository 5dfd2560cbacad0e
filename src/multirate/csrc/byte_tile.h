// What the tiles of w8a8.c and w4a8.c share.
#ifndef MULTIRATE_BYTE_TILE_H
#define MULTIRATE_BYTE_TILE_H
#include "gemm.h"
#if BYTE_PRODUCTS
#include <immintrin.h>

// sum[16] += four unsigned bytes of each of 16 outputs · four signed ones of a row.
#define DOT(sum, w, word)                                                                          \
    asm("vpdpbusd %[x]%{1to16%}, %[v], %[a]" : [a] "+v"(sum) : [v] "v"(w), [x] "m"(word));

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
