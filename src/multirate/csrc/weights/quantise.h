// Turns floats into the blocks of GGUF files.
#ifndef MULTIRATE_QUANTISE_H
#define MULTIRATE_QUANTISE_H
#include "format.h"

// An output of a layer as it is in the model; zeros behind the last one: to [inputs].
void read_unpacked(const Unpacked *from, int output, float *to);

void put_half(fp16 half, uint8_t *to);

// Blocks of a row w [inputs], in WEIGHTS_Q8_0, Q4_0 or Q4_1, bit for bit as the package gguf makes
// them.
void quantise_row(int format, const float *w, int inputs, void *blocks);
#endif
