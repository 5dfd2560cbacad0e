// A column of 16 outputs in fixed point for the rows of a tile, with the rows' outliers.
//
// A line of weights (16 outputs, a pair of inputs) meets the tile's rows, whose sums all stay in
// registers: 24 rows of them where registers have 512 bits, which read the weights only once. Rows
// are stored pair by pair, [in / 2][lanes][2], so one address serves them all:
//
//   | r0i0 r0i1 r1i0 r1i1 … |   r: row, i: input
//   | r0i2 r0i3 r1i2 r1i3 … |
//   …
#ifndef MULTIRATE_FIXED_H
#define MULTIRATE_FIXED_H
#include "../weights/format.h"
#include "fixed_rows.h"

#if LANES == 16
#define FIXED_ROWS 24
#define SHORT_WEIGHTS 1
#else
#define FIXED_ROWS 6
#define SHORT_WEIGHTS 0
#endif

// Tiles have 1, 2, … 12, 14, 16, … 24 lanes.
static int fixed_lanes(int rows) {
    return rows <= 12 ? rows : (rows + 1) / 2 * 2;
}

#if LANES == 16
// What codes of four bits stand for: powers of two, and the same of negative weights. vpermw takes
// them from the lowest five bits of a word, of which the fifth is the next line's: so twice.
#define POWERS(sign) sign 1, sign 2, sign 4, sign 8, sign 16, sign 32, sign 64, sign 128
static const int16_t INT12_POWERS[32]
    __attribute__((aligned(64))) = {POWERS(+), POWERS(-), POWERS(+), POWERS(-)};
#endif

// A line of WEIGHTS_INT12, as one of WEIGHTS_INT16.
INLINE void line_of_twelve_bits(const char *weight, long line, int16_t *to) {
    const char *lines = weight + line / 4 * 192;
    int place = (int)(line % 4);
#if LANES == 16
    typedef uint16_t halves __attribute__((vector_size(64)));
    halves bytes, codes;
    memcpy(&bytes, lines + place / 2 * 64, 64);
    memcpy(&codes, lines + 128, 64);
    bytes = place % 2 ? bytes >> 8 : bytes & 255;
    codes = codes >> 4 * place;
    bytes *= (halves)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(INT12_POWERS));
    memcpy(to, &bytes, 64);
#else
    const uint8_t *bytes = (const uint8_t *)lines + place / 2 * 64,
                  *codes = (const uint8_t *)lines + 128;
    for (int i = 0; i < 32; i++) {
        int code = codes[2 * i + place / 2] >> 4 * (place % 2) & 15,
            size = bytes[2 * i + place % 2] << (code & 7);
        to[i] = (int16_t)(code & 8 ? -size : size);
    }
#endif
}

#if LANES > 4
// sum [PARTS] += w · the pair of a row's inputs at x. In assembly because compilers load rows apart
// from the products or all of them before, or hoist the products and then spill the sums.
INLINE void add_products(iv *sum, const iv *w, const int32_t *x) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %[x]%{1to16%}, %[w], %[a]" : [a] "+v"(*sum) : [w] "v"(*w), [x] "m"(*x));
#elif LANES == 16
    iv t;
    asm("vpbroadcastd %[x], %[t]\n\tvpmaddwd %[t], %[w], %[t]\n\tvpaddd %[t], %[a], %[a]"
        : [a] "+v"(*sum), [t] "=&v"(t)
        : [w] "v"(*w), [x] "m"(*x));
#elif defined(__AVXVNNI__)
    asm("vpdpwssd %[w], %[x], %[a]\n\tvpdpwssd %[v], %[x], %[b]"
        : [a] "+x"(sum[0]), [b] "+x"(sum[1])
        : [w] "x"(w[0]), [v] "x"(w[1]), [x] "x"(_mm256_set1_epi32(*x)));
#else
    iv t;
    asm("vpmaddwd %[w], %[x], %[t]\n\tvpaddd %[t], %[a], %[a]\n\t"
        "vpmaddwd %[v], %[x], %[t]\n\tvpaddd %[t], %[b], %[b]"
        : [a] "+x"(sum[0]), [b] "+x"(sum[1]), [t] "=&x"(t)
        : [w] "x"(w[0]), [v] "x"(w[1]), [x] "x"(_mm256_set1_epi32(*x)));
#endif
}

INLINE void add_line(iv (*sums)[PARTS], int lanes, int format, const char *weight, int line,
                     const int32_t *x) {
    iv w[PARTS];
    if (format == WEIGHTS_INT12)
        line_of_twelve_bits(weight, line, (int16_t *)w);
    else
        EACH (i, PARTS)
            memcpy(w + i, weight + line * LINE_BYTES + i * sizeof *w, sizeof *w);
    EACH (n, lanes)
        add_products(sums[n], w, x + line * lanes + n);
}

INLINE void fixed_pass(int lanes, int format, const char *weight, const int32_t *x, long pairs,
                       const Ahead *ahead, float *to) {
    // few rows have two sums each, as one would wait for its own last step
    const int sums = LANES == 16 && lanes <= 4 ? 2 : 1, twelve = format == WEIGHTS_INT12,
              step = twelve ? 4 : sums, lines = twelve ? 3 : step;
    iv sum[2][FIXED_ROWS][PARTS];
    EACH (n, lanes)
        EACH (i, PARTS)
            sum[0][n][i] = sum[1][n][i] = (iv){0};
    long k = 0, every = twelve ? pairs / 4 * 3 : pairs, last = every - lines;
    for (; k <= last; k += lines, x += step * lanes, weight += lines * LINE_BYTES) {
        EACH (line, lines)
            fetch_line(ahead, k + line, LANES == 8);
        EACH (line, step)
            add_line(sum[line % sums], lanes, format, weight, line, x);
    }
    if (step == 2 && k < every)
        add_line(sum[0], lanes, format, weight, 0, x);
    EACH (n, lanes)
        EACH (i, PARTS) {
            iv total = sums == 2 ? sum[0][n][i] + sum[1][n][i] : sum[0][n][i];
            store_v(to + n * GROUP_FLOATS + i * LANES, __builtin_convertvector(total, fv));
        }
}

INLINE void fixed_passes(int lanes, int format, const char *weight, const int32_t *x, long pairs,
                         const Ahead *ahead, float *to) {
    switch (lanes) {
#if LANES == 8
        CASES_TO_6(fixed_pass, format, weight, x, pairs, ahead, to)
#else
        CASES_TO_12(fixed_pass, format, weight, x, pairs, ahead, to)
        CASE(14, fixed_pass, format, weight, x, pairs, ahead, to)
        CASE(16, fixed_pass, format, weight, x, pairs, ahead, to)
        CASE(18, fixed_pass, format, weight, x, pairs, ahead, to)
        CASE(20, fixed_pass, format, weight, x, pairs, ahead, to)
        CASE(22, fixed_pass, format, weight, x, pairs, ahead, to)
        CASE(24, fixed_pass, format, weight, x, pairs, ahead, to)
#endif
    }
}
#endif

#if LANES < 16
// In plain C, of which compilers make vectors.
static void plain_tile(int count, int format, const char *weight, const int16_t *x, long pairs,
                       const Ahead *ahead, float *to) {
    int32_t sums[FIXED_ROWS][16] = {{0}};
    int16_t line[32];
    for (long k = 0; k < pairs; k++) {
        fetch_line(ahead, k, 0);
        if (format == WEIGHTS_INT12)
            line_of_twelve_bits(weight, k, line);
        else
            memcpy(line, weight + k * LINE_BYTES, LINE_BYTES);
        for (int n = 0; n < count; n++, x += 2)
            for (int o = 0; o < 16; o++)
                sums[n][o] += line[2 * o] * x[0] + line[2 * o + 1] * x[1];
    }
    for (int n = 0; n < count; n++)
        for (int o = 0; o < 16; o++)
            to[n * GROUP_FLOATS + o] = (float)sums[n][o];
}
#endif

static void fixed_tile(int count, int format, const char *weight, const int16_t *rows, long pairs,
                       const Ahead *ahead, float *to) {
#if LANES == 16
    const int32_t *x = (const int32_t *)rows;
    if (format == WEIGHTS_INT12)
        fixed_passes(fixed_lanes(count), WEIGHTS_INT12, weight, x, pairs, ahead, to);
    else
        fixed_passes(fixed_lanes(count), WEIGHTS_INT16, weight, x, pairs, ahead, to);
#elif LANES == 8
    if (format == WEIGHTS_INT16)
        fixed_passes(count, WEIGHTS_INT16, weight, (const int32_t *)rows, pairs, ahead, to);
    else
        plain_tile(count, WEIGHTS_INT12, weight, rows, pairs, ahead, to);
#else
    plain_tile(count, format, weight, rows, pairs, ahead, to);
#endif
}

// Σ w · outlier of 16 outputs, in their weights' units.
static f16 outlier_products(const Outliers *outliers, const char *weight, int format) {
    f16 sum = splat(0.0f);
    for (int i = 0; i < outliers->count; i++) {
        int at = outliers->at[i];
        i16 pairs;
        if (format == WEIGHTS_INT12)
            line_of_twelve_bits(weight, at / 2, (int16_t *)&pairs);
        else
            memcpy(&pairs, weight + (long)(at / 2) * LINE_BYTES, LINE_BYTES);
        i16 each = at % 2 ? pairs >> 16 : (pairs << 16) >> 16;
        sum = fma16(__builtin_convertvector(each, f16), splat(outliers->value[i]), sum);
    }
    return sum;
}

static void fixed_product(const Column *column, const int16_t *rows, int count, int pairs,
                          const float *scales, const Outliers *outliers, const Ahead *ahead,
                          float *to) {
    __builtin_prefetch(column->scale); // read behind the tile
    fixed_tile(count, column->format, column->weight, rows, pairs, ahead, to);
    f16 unit = load(column->scale);
    for (int r = 0; r < count; r++, to += GROUP_FLOATS) {
        f16 sum = load(to) * (unit * splat(scales[r]));
        if (outliers[r].count)
            sum = fma16(unit, outlier_products(outliers + r, column->weight, column->format), sum);
        store(to, sum);
    }
}
#endif
