// A column of 16 outputs in fixed point for the rows of a tile, with the rows' outliers.
#ifndef MULTIRATE_FIXED_PRODUCT_H
#define MULTIRATE_FIXED_PRODUCT_H
#include "simd.h"
#if LANES == 16
#include "fixed_avx512.h"
#elif LANES == 8
#include "fixed_avx2.h"
#else
#include "fixed_plain.h"
#define fixed_tile plain_tile
#endif

typedef int16_t Line __attribute__((vector_size(64))); // 16 outputs, 2 inputs each

// A line of 16 outputs' weights.
static Line line_of(const char *weight, int format, int line) {
    Line out;
    if (format == WEIGHTS_INT12)
        fixed_line_12(weight, line, (int16_t *)&out);
    else
        memcpy(&out, weight + (long)line * 64, 64);
    return out;
}

// Σ w · outlier of 16 outputs, in their weights' units.
static f16 outlier_products(const Outliers *outliers, const char *weight, int format) {
    f16 sum = splat(0.0f);
    for (int i = 0; i < outliers->count; i++) {
        int at = outliers->at[i];
        i16 pairs = (i16)line_of(weight, format, at / 2);
        i16 each = at % 2 ? pairs >> 16 : (pairs << 16) >> 16;
        sum = fma16(__builtin_convertvector(each, f16), splat(outliers->value[i]), sum);
    }
    return sum;
}

static void fixed_product(const Column *column, const int16_t *rows, int count, int pairs,
                          const float *scales, const Outliers *outliers, const Ahead *ahead,
                          float *to) {
    __builtin_prefetch(column->scale); // read behind the tile
    fixed_tile(column->weight, column->format, rows, count, pairs, ahead, to, GROUP_FLOATS);
    f16 unit = load(column->scale);
    for (int r = 0; r < count; r++, to += GROUP_FLOATS) {
        f16 sum = load(to) * (unit * splat(scales[r]));
        if (outliers[r].count)
            sum = fma16(unit, outlier_products(outliers + r, column->weight, column->format), sum);
        store(to, sum);
    }
}
#endif
