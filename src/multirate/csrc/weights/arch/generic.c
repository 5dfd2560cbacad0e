// The scalar reference for every format, on any processor.
#include "../arch.h"

#include <math.h>
#include <string.h>

// Σ q · x of lines [from, to) for one row and output.
static int sum_of(const uint8_t (*lines)[LINE_BYTES], const int32_t *words, int from, int to,
                  int lanes, int n, int o) {
    int sum = 0;
    for (int k = from; k < to; k++) {
        int8_t x[4];
        memcpy(x, words + k * lanes + n, sizeof x);
        for (int i = 0; i < 4; i++)
            sum += lines[k][4 * o + i] * x[i];
    }
    return sum;
}

static void product(const Column *column, const ByteRows *x, long blocks, const Ahead *ahead,
                    float *to, long stride) {
    (void)ahead;
    const Format *f = format_of(column->format);
    int lanes = x->lanes;
    for (int n = 0; n < lanes; n++)
        memset(to + n * stride, 0, COLUMN * sizeof *to);
    for (long b = 0; b < blocks; b++) {
        uint8_t lines[8][LINE_BYTES];
        Units units[COLUMN];
        const uint8_t *packed = (const uint8_t *)column->weight + b * column_bytes(f, BLOCK);
        for (int k = 0; k < 8; k++)
            for (int i = 0; i < LINE_BYTES; i++)
                lines[k][i] = byte_of_line(f, packed, k, i);
        for (int o = 0; o < COLUMN; o++)
            units[o] = units_of(f, column->scale, b, o);
        const int32_t *words = x->words + b * 8 * lanes, *start = x->start[f->start];
        for (int n = 0; n < lanes; n++) {
            float scale = x->scales[b * lanes + n], *total = to + n * stride;
            for (int o = 0; o < COLUMN; o++) {
                if (f->start == START_HALVES) {
                    for (int h = 0; h < 2; h++) {
                        int sum = start[(2 * b + h) * lanes + n] +
                                  sum_of(lines, words, 4 * h, 4 * h + 4, lanes, n, o);
                        total[o] = fmaf((float)sum, units[o].unit[h] * scale, total[o]);
                    }
                    continue;
                }
                int sum = sum_of(lines, words, 0, 8, lanes, n, o);
                if (!has_least(f))
                    sum += start[b * lanes + n];
                total[o] = fmaf((float)sum, units[o].unit[0] * scale, total[o]);
                if (has_least(f))
                    total[o] = fmaf(units[o].least,
                                    ((const float *)x->start[SCALED_SUM])[b * lanes + n], total[o]);
            }
        }
    }
}

#define ENTRY(NAME, ...) [WEIGHTS_##NAME] = product,
const Bytes generic_bytes = {MOST_BYTE_LANES, quantise_inputs, {QUANTISED_FORMATS(ENTRY)}};
