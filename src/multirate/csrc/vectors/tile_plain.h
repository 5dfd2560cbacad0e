// The innermost product where no instruction multiplies and adds with one rounding, which is so
// slow that nothing else matters: one sum after the other.
#ifndef MULTIRATE_TILE_PLAIN_H
#define MULTIRATE_TILE_PLAIN_H
#include "simd.h"

static void tile(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                 int vectors, const char *ahead, int lines, f16 (*acc)[4]) {
    (void)ahead;
    (void)lines;
    for (int n = 0; n < rows; n++)
        for (int m = 0; m < vectors; m++)
            for (long k = 0; k < pairs; k++) {
                u16 words = load_pairs(weight + k * step + m * 16);
                f16 sum = fma16((f16)(words & 0xffff0000u), splat(x[n][2 * k + 1]), acc[n][m]);
                acc[n][m] = fma16((f16)(words << 16), splat(x[n][2 * k]), sum);
            }
}
#endif
