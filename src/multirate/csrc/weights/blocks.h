// The blocks of quantised weights as GGUF files have them, and one reader for all of them.
//
// A row of a tensor is a run of blocks. Every format comes down to the same thing, which is what
// the rest of the kernel knows of it: 32 inputs share a scale (of Q6_K 16 do), and a weight is
//
//   scale · (q − zero) + least        q: unsigned, of 4, 5, 6 or 8 bits
//
// with either a zero (Q4_0, Q5_0, Q6_K, Q8_0) or a least weight (Q4_1, Q5_1, Q4_K, Q5_K).
//
//   Q8_0                     scale, 32 signed bytes
//   Q4_0, Q4_1, Q5_0, Q5_1   scale, [least,] [4 bytes of fifth bits,] 16 bytes of lower bits: input
//   i
//                            in the lower half of byte i, input 16 + i in the upper
//   Q4_K, Q5_K               scale, least, 12 bytes of six-bit factors, [32 of fifth bits,] 128
//   Q6_K                     128 bytes of lower bits, 64 of upper ones, 16 signed factors, scale
#ifndef MULTIRATE_BLOCKS_H
#define MULTIRATE_BLOCKS_H
#include "format.h"

// 32 inputs of an output. scale: of all of them or of a K-quant's whole block, in which case
// `factor` (of Q6_K one for each 16 inputs) multiplies it; so with least and least_factor, where
// the least weight is −least · least_factor.
typedef struct {
    uint8_t q[BLOCK];
    fp16 scale, least;
    int16_t factor[2], least_factor;
} Unit;

// The 32 inputs from 32 · block on of a row.
void read_unit(const Format *f, const void *row, long block, Unit *to);

// ---- quantise.c: floats, and blocks made of them ----

// An output of a layer as it is in the model; zeros behind the last one: to [inputs].
void read_unpacked(const Unpacked *from, int output, float *to);

void put_half(fp16 half, uint8_t *to);

// Blocks of a row w [inputs], in WEIGHTS_Q8_0, Q4_0 or Q4_1, bit for bit as the package gguf makes
// them.
void quantise_row(int format, const float *w, int inputs, void *blocks);
#endif
