// Converts a model's weights to the integers that pack.c lays out, one output, or one block of an
// output's inputs, at a time.
#ifndef MULTIRATE_ROUND_WEIGHTS_H
#define MULTIRATE_ROUND_WEIGHTS_H
#include "tile.h"

// Integers of at most 16 bits, w ≈ unit · q, and no larger than a row of fixed_point.c allows. The
// unit is a power of two, so that bf16 numbers become integers of eight significant bits; weights
// that are not finite have a unit that is none either. Returns the unit.
float round_to_int16(const float *w, int in, int16_t *q);

// The same from −127 to 127, in any unit.
float round_to_int8(const float *w, int in, int16_t *q);

// As w8a8.c has a block of `count` inputs: q from −127 to 127. Returns the unit, a bf16 number.
float round_block_to_bytes(const float *w, int count, int16_t *q);

// As w4a8.c has a block of W8_BLOCK inputs: w ≈ unit · q + least, q from 0 to 15.
typedef struct {
    float unit, least; // as fp16 has them
    float lacking;     // squared norm of what is rounded off
    float size;        // squared norm of the weights
} HalfByteBlock;

// The nearest ones.
HalfByteBlock round_block_to_half_bytes(const float *w, uint8_t *q);

// Of weights that were made so, the unit found again: from the least to the largest of a block are
// 15 steps, or, where it had not all sixteen numbers, fewer.
HalfByteBlock find_half_bytes_again(const float *w, uint8_t *q);

// Weights are taken for numbers of 4 bits where these are so near, relative to the norms: rounding
// them to bf16, as a quantised file's are when they are read, alone is 0.0014.
#define HALF_BYTES_NEAR 0x1p-8f
#endif
