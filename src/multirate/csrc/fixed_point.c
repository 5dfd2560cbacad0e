// Linear layers in fixed point: 16-bit rows and weights, where the two bytes of a weight do twice
// the arithmetic of fp32.
//
// Weights have one scale per output, rows one per row, chosen so that no sum can leave int32
// (Cauchy-Schwarz: |w·x| ≤ ‖w‖ ‖x‖ < 2³¹). The sums are exact, so a row's bits do not depend on the
// shape of the tile. Rounding error of 16-bit weights relative to the norms: 1.4e-4 at 256 inputs,
// 4e-4 at 2048; rounding rows to bf16, as the other path does, costs 1.1e-3.
//
// Packed int16 weights (WEIGHTS_INT16): [outputs / 64][4][inputs / 2][16][2].
// oAiB is the weight of output A and input B, in units of Linear.scale[A]:
//
//   group 0, outputs 0 … 15, a line of 64 bytes (16 outputs, 2 inputs each) after the other:
//     | o0i0 o0i1 o1i0 o1i1 … o15i0 o15i1 |
//     | o0i2 o0i3 o1i2 o1i3 … o15i2 o15i3 |
//     …
//   group 0, outputs 16 … 31; 32 … 47; 48 … 63
//   group 1
//   …
//
// Weights of WEIGHTS_INT12 are the same integers where each has at most eight significant bits, as
// those of bf16 numbers have in units of a power of two: a byte, times 2^s, and a sign. A quarter
// less is read. [outputs / 64][4][inputs / 8][3][32][2] of uint8, eight inputs of 16 outputs in
// three lines. pN is the byte of the N-th of an int16 line's 32 weights, cN its code, s + 8 · sign,
// in four bits; a letter for each of four int16 lines:
//
//     | p0a p0b p1a p1b … p31a p31b |
//     | p0c p0d p1c p1d … p31c p31d |
//     | c0a+c0b c0c+c0d … c31a+c31b c31c+c31d |   the first in the lower half
#include "operand.h"

// The thread's own fixed-point copy of the rows: a few percent of the product, and no barrier. A
// row whose norm sits in a few outliers (more than 3/4 of it squared) would leave too few steps for
// the others: these are multiplied in fp32, each with one line of every 16 outputs' weights.
void prepare_fixed(Operand *out, ThreadScratch *mine, const float *const *x, int rows, int in) {
    const Vectors *v = vectors();
    size_t all_rows = (size_t)rows * in;
    // rows, and tiles of them, each filled up by at most 3
    int16_t *copy = mine->fixed =
        grown(mine->fixed, (2 * all_rows + (size_t)(rows + 1) * 3 * in + 8) * sizeof *copy);
    float *rest = mine->rest = grown(mine->rest, (size_t)in * sizeof *rest);
    Outliers *outliers = mine->outliers = grown(mine->outliers, (size_t)rows * sizeof *outliers);
    out->outliers = outliers;
    int16_t *to = copy + all_rows;
    for (int t = 0; t < out->tiles; t++) {
        const int32_t *of_tile[PRODUCT_ROWS];
        int first = out->begin[t], taken = out->begin[t + 1] - first;
        for (int i = 0; i < taken; i++) {
            int n = first + i;
            int16_t *q = copy + (size_t)n * in;
            out->scale[n] = v->quantise_row(x[n], in, rest, q, outliers + n);
            of_tile[i] = (const int32_t *)q;
        }
        interleave(of_tile, taken, v->fixed_lanes(taken), in / 2, (int32_t *)to);
        out->arranged[t] = to;
        to += (size_t)v->fixed_lanes(taken) * in;
    }
}
