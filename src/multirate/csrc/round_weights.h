// Converts a model's weights to the integers that pack.c lays out, one output at a time.
#ifndef MULTIRATE_ROUND_WEIGHTS_H
#define MULTIRATE_ROUND_WEIGHTS_H
#include "tile.h"

// Integers of at most 16 bits, w ≈ unit · q, and no larger than a row of fixed_point.c allows. The
// unit is a power of two, so that bf16 numbers become integers of eight significant bits; weights
// that are not finite have a unit that is none either. Returns the unit.
float round_to_int16(const float *w, int in, int16_t *q);
#endif
