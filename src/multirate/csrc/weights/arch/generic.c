// The scalar reference for every format, on any processor.
#include "../arch.h"

#include <math.h>
#include <string.h>

// Line k of a block: 16 outputs × 4 inputs.
static void line_of(const uint8_t *lines, int bits, int k, uint8_t *to) {
    const uint8_t *low = lines + (bits == 8 ? k : k / 2) * LINE_BYTES,
                  *more = lines + 4 * LINE_BYTES;
    for (int i = 0; i < LINE_BYTES; i++) {
        unsigned byte = low[i];
        if (bits < 8)
            byte = k % 2 ? byte >> 4 : byte & 15;
        if (bits == 5)
            byte |= (more[i] >> k & 1u) << 4;
        if (bits == 6)
            byte |= (more[k / 4 * LINE_BYTES + i] >> 2 * (k % 4) & 3u) << 4;
        to[i] = (uint8_t)byte;
    }
}

// What a block's sums are multiplied by: units of the first and last 16 inputs, and least weights.
typedef struct {
    float unit[2][COLUMN], least[COLUMN];
} Units;

static void units_of(const Format *f, const uint8_t *scales, long b, Units *to) {
    const uint8_t *at = scales + scale_bytes(f, f->factors ? b / 8 * SUPER : b * BLOCK);
    size_t halves = COLUMN * sizeof(fp16);
    const uint8_t *bytes = at + halves * (has_least(f) ? 2 : 1) + b % 8 * 2 * COLUMN;
    for (int o = 0; o < COLUMN; o++) {
        fp16 half[2] = {0};
        memcpy(half, at + 2 * o, sizeof *half);
        if (has_least(f))
            memcpy(half + 1, at + halves + 2 * o, sizeof *half);
        float scale = from_fp16(half[0]), least = from_fp16(half[1]);
        to->unit[0][o] = to->unit[1][o] = scale;
        to->least[o] = least;
        if (f->factors && has_least(f)) {
            to->unit[0][o] = to->unit[1][o] = scale * bytes[o];
            to->least[o] = -(least * bytes[COLUMN + o]);
        } else if (f->factors) {
            to->unit[0][o] = scale * ((const int8_t *)bytes)[o];
            to->unit[1][o] = scale * ((const int8_t *)bytes)[COLUMN + o];
        }
    }
}

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
        for (int k = 0; k < 8; k++)
            line_of((const uint8_t *)column->weight + b * column_bytes(f, BLOCK), f->bits, k,
                    lines[k]);
        Units units;
        units_of(f, column->scale, b, &units);
        const int32_t *words = x->words + b * 8 * lanes, *start = x->start[f->start];
        for (int n = 0; n < lanes; n++) {
            float scale = x->scales[b * lanes + n], *total = to + n * stride;
            for (int o = 0; o < COLUMN; o++) {
                if (f->start == START_HALVES) {
                    for (int h = 0; h < 2; h++) {
                        int sum = start[(2 * b + h) * lanes + n] +
                                  sum_of(lines, words, 4 * h, 4 * h + 4, lanes, n, o);
                        total[o] = fmaf((float)sum, units.unit[h][o] * scale, total[o]);
                    }
                    continue;
                }
                int sum = sum_of(lines, words, 0, 8, lanes, n, o);
                if (!has_least(f))
                    sum += start[b * lanes + n];
                total[o] = fmaf((float)sum, units.unit[0][o] * scale, total[o]);
                if (has_least(f))
                    total[o] = fmaf(units.least[o],
                                    ((const float *)x->start[SCALED_SUM])[b * lanes + n], total[o]);
            }
        }
    }
}

const Arch *generic_arch(void) {
    static const Arch found = {
        "generic",
        MOST_BYTE_LANES,
        quantise_inputs,
        {[WEIGHTS_Q8_0] = product,
         [WEIGHTS_Q4_0] = product,
         [WEIGHTS_Q4_1] = product,
         [WEIGHTS_Q5_0] = product,
         [WEIGHTS_Q5_1] = product,
         [WEIGHTS_Q4_K] = product,
         [WEIGHTS_Q5_K] = product,
         [WEIGHTS_Q6_K] = product},
    };
    return &found;
}
