// Fixed-point products in plain C, of which compilers make vectors. A tile's rows lie one after the
// other, [rows][in].
#ifndef MULTIRATE_FIXED_PLAIN_H
#define MULTIRATE_FIXED_PLAIN_H
#include "fixed_rows.h"

#define FIXED_ROWS 6
#define SHORT_WEIGHTS 0

static int fixed_lanes(int rows) {
    return rows;
}

static void fixed_arrange(const int16_t *const *rows, int count, int in, int16_t *to) {
    for (int n = 0; n < count; n++)
        memcpy(to + (size_t)n * in, rows[n], (size_t)in * sizeof *to);
}

static void fixed_line_12(const void *weights, long line, int16_t *to) {
    const uint8_t *lines = (const uint8_t *)weights + line / 4 * 192,
                  *bytes = lines + line % 4 / 2 * 64, *codes = lines + 128;
    int at = line % 2, shift = 4 * (int)(line % 2), half = (int)(line % 4) / 2;
    for (int i = 0; i < 32; i++) {
        int code = codes[2 * i + half] >> shift & 15, size = bytes[2 * i + at] << (code & 7);
        to[i] = (int16_t)(code & 8 ? -size : size);
    }
}

static void plain_tile(const void *weight, int format, const int16_t *rows, int count, int pairs,
                       const Ahead *fetched, float *to, int stride) {
    int32_t sums[FIXED_ROWS][16] = {{0}};
    int16_t short_line[32];
    for (long k = 0; k < pairs; k++) {
        const int16_t *line = (const int16_t *)weight + k * 32;
        FETCH(k)
        if (format == WEIGHTS_INT12)
            fixed_line_12(weight, k, short_line), line = short_line;
        for (int n = 0; n < count; n++) {
            const int16_t *x = rows + ((size_t)n * pairs + k) * 2;
            for (int o = 0; o < 16; o++)
                sums[n][o] += line[2 * o] * x[0] + line[2 * o + 1] * x[1];
        }
    }
    for (int n = 0; n < count; n++)
        for (int o = 0; o < 16; o++)
            to[(long)n * stride + o] = (float)sums[n][o];
}
#endif
