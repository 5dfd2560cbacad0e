// Rows as quantised weights are multiplied with: int8 in blocks of 32, each with an fp32 scale,
// because single channels of a residual can be hundreds of times larger than others.
#ifndef MULTIRATE_BYTE_ROWS_H
#define MULTIRATE_BYTE_ROWS_H
#include "format.h"

#define MOST_BYTE_LANES 16

// The rows of one tile, input by input. What a format adds for its zero or least weights is there
// only if the linear layer has such a format.
typedef struct {
    const int32_t *words;           // [inputs / 4][lanes] four int8 each
    const float *scales;            // [blocks][lanes]
    const void *start[START_KINDS]; // [blocks][lanes] −zero · Σ q in int32; START_HALVES:
                                    // [blocks][2] [lanes]; SCALED_SUM: scale · Σ q in fp32
    int lanes;
} ByteRows;

// q = round(x / scale) with scale = largest of the block's |x| / 127. Where a block has an infinity
// or NaN its scale is NaN. (Architectures have faster ones with the same result.)
typedef void (*QuantiseInputs)(const float *x, int inputs, int8_t *q, float *scales);
void quantise_inputs(const float *x, int inputs, int8_t *q, float *scales);

// Rows [count][words] to [words][lanes], where lanes beyond the last row repeat it. Writes up to
// SPILLED_WORDS behind them.
#define SPILLED_WORDS 3
void interleave(const int32_t *const *rows, int count, int lanes, long words, int32_t *to);

// Room for a tile's words and what lies beside them, and that from rows q [lanes][inputs] and
// scales [lanes][blocks]; kinds: a bit for each START_… that is needed.
size_t byte_rows_room(int lanes, int inputs, unsigned kinds);
void lay_out_byte_rows(const int8_t *q, const float *scales, int lanes, int inputs, unsigned kinds,
                       void *room, ByteRows *to);
#endif
