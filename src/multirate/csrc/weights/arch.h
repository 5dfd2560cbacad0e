// The instruction sets that the kernel has code for, one of which is chosen at run time: a table of
// vectors (vectors.h) and one of products with quantised weights for each. Results are the same
// bits in all of them. Of quantised weights:
//
//   sum    the integers q · x of a block's inputs, exactly, with the format's start
//   total  = fma((float)sum, unit · scale of x, total), and then
//          = fma(least, scale · Σ x, total) where the format has least weights
//
// block by block, from a total of 0; unit and least are exact in fp32.
#ifndef MULTIRATE_ARCH_H
#define MULTIRATE_ARCH_H
#include "../vectors.h"
#include "byte_rows.h"

// How far ahead weights are fetched, in lines of 64 bytes, for a tile of so many rows. The
// processor's own prefetching falls behind several rows' products, and on Intel's with registers of
// 512 bits and on AMD's Zen 5 even behind one row's; on the AMD processors before, it keeps up with
// few rows better alone. Measured on Xeons, Zen 4 and Zen 5 (lab/notes/weight-formats.md).
long lines_ahead(int lanes, int format);

// 16 outputs for the rows of a tile: to [lanes][16], `stride` floats apart.
typedef void (*ByteProduct)(const Column *column, const ByteRows *x, long blocks,
                            const Ahead *ahead, float *to, long stride);

// Products of bytes: a file in arch/ for each instruction set that has faster ones.
typedef struct {
    int lanes; // rows of a tile at most
    QuantiseInputs quantise;
    ByteProduct product[WEIGHT_FORMATS]; // NULL: not of quantised weights
} Bytes;

extern const Bytes generic_bytes, avx2_bytes, avx_vnni_bytes, avx512_vnni_bytes, neon_bytes;

typedef struct {
    const char *name;
    int (*here)(void); // whether this processor has it
    const Vectors *vectors;
    const Bytes *bytes;
} Arch;

// The one in use: the best that this processor has, unless another one was chosen.
const Arch *arch(void);
#endif
