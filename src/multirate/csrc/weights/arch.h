// What an architecture does for quantised weights: a file in arch/ for each, all of them compiled,
// and one chosen at run time. Results are the same bits in all of them:
//
//   sum    the integers q · x of a block's inputs, exactly, with the format's start
//   total  = fma((float)sum, unit · scale of x, total), and then
//          = fma(least, scale · Σ x, total) where the format has least weights
//
// block by block, from a total of 0; unit and least are exact in fp32.
#ifndef MULTIRATE_ARCH_H
#define MULTIRATE_ARCH_H
#include "byte_rows.h"

#define MOST_BYTE_LANES 16

// What a pass over weights fetches meanwhile: at its step k, the line at k · stride bytes behind
// `here` while k < own, and behind `next` from then on.
typedef struct {
    const char *here, *next;
    long own, stride;
} Ahead;

// How far ahead weights are fetched, in lines of 64 bytes, for a tile of so many rows. The
// processor's own prefetching falls behind several rows' products, and on Intel's with registers of
// 512 bits and on AMD's Zen 5 even behind one row's; on the AMD processors before, it keeps up with
// few rows better alone. All measured (lab/notes/weight-formats.md).
long lines_ahead(int lanes, int format);

// 16 outputs for the rows of a tile: to [lanes][16], `stride` floats apart.
typedef void (*ByteProduct)(const Column *column, const ByteRows *x, long blocks,
                            const Ahead *ahead, float *to, long stride);

typedef struct {
    const char *name;
    int lanes; // rows of a tile at most
    QuantiseInputs quantise;
    ByteProduct product[WEIGHT_FORMATS]; // NULL: not of quantised weights
} Arch;

// NULL where the compiler or the processor lacks it.
const Arch *generic_arch(void);
const Arch *avx2_arch(void);
const Arch *avx_vnni_arch(void);
const Arch *avx512_arch(void);

// The one in use: the best that this processor has, unless a test chose another one.
const Arch *arch(void);
#endif
