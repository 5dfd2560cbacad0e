// Turns floats into the blocks of GGUF files.
#ifndef MULTIRATE_QUANTISE_H
#define MULTIRATE_QUANTISE_H
#include "format.h"

// Blocks of a row w [inputs], in WEIGHTS_Q8_0, Q4_0 or Q4_1, bit for bit as the package gguf makes
// them.
void quantise_row(int format, const float *w, int inputs, void *blocks);
#endif
