// Linear layers in fixed point, on every processor that multiplies int16: 16-bit rows and weights,
// where the two bytes of a weight do twice the arithmetic of fp32.
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
#include "fixed_tile.h"
#include "gemm.h"
#if INTEGER_PRODUCTS

#define ROW_NORM 32000.0f // ‖x‖ in units of the row's scale; packing.py keeps ‖w‖ ≤ 65000

INLINE void store_rounded(int16_t *to, fv v) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)v)));
#else
    __m256i words = _mm256_cvtps_epi32((__m256)v);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi32(_mm256_castsi256_si128(words),
                                                    _mm256_extracti128_si256(words, 1)));
#endif
}

// v² where |v| is at most ROW_NORM / 4, else 0.
INLINE fv square_of_small(fv v) {
    fv size = (fv)((iv)v & 0x7fffffff);
    return (fv)((iv)(v * v) & (size <= all(ROW_NORM / 4)));
}

// Both sums over a row have two Sums, whose additions overlap: 32 lanes.
INLINE float both(Sum a, Sum b) {
    for (int j = 0; j < 16 / LANES; j++)
        a.of[j] += b.of[j];
    return total_of(a);
}

// q = round(x · unit); returns Σ q² over elements that hold at most 1/16 of ROW_NORM².
static float quantise(const float *x, float unit, int in, int16_t *q) {
    Sum small[2] = {no_sum(), no_sum()};
    int i = 0;
    for (; i + 32 <= in; i += 32)
        for (int j = 0; j < 32 / LANES; j++) {
            fv v = load_v(x + i + j * LANES) * all(unit);
            small[j * LANES / 16].of[j % (16 / LANES)] += square_of_small(v);
            store_rounded(q + i + j * LANES, v);
        }
    float rest = both(small[0], small[1]);
    for (; i < in; i++) {
        float v = x[i] * unit;
        if (fabsf(v) <= ROW_NORM / 4)
            rest += v * v;
        q[i] = (int16_t)lrintf(v);
    }
    return rest;
}

static float norm_of(const float *x, int in) {
    Sum sum[2] = {no_sum(), no_sum()};
    int i = 0;
    for (; i + 32 <= in; i += 32)
        for (int j = 0; j < 32 / LANES; j++) {
            fv v = load_v(x + i + j * LANES), *to = &sum[j * LANES / 16].of[j % (16 / LANES)];
            *to = fma_v(v, v, *to);
        }
    float total = both(sum[0], sum[1]);
    for (; i < in; i++)
        total += x[i] * x[i];
    return sqrtf(total);
}

// Takes the few elements that hold most of a row's norm out of it: those above a quarter of it.
static void take_outliers(float *row, float unit, int in, Outliers *out) {
    for (int i = 0; i < in && out->count < MOST_OUTLIERS; i++) {
        float v = row[i];
        if (fabsf(v * unit) > ROW_NORM / 4) {
            out->at[out->count] = i;
            out->value[out->count++] = v;
            row[i] = 0.0f;
        }
    }
}

// q = row in steps of the returned scale, without its outliers.
static float quantise_row(const float *row, int in, float *rest, int16_t *q, Outliers *out) {
    out->count = 0;
    for (;;) {
        float norm = norm_of(row, in);
        int usable = norm > 1e-30f && norm < 1e30f; // zero, or about to overflow in any precision
        float unit = usable ? ROW_NORM / norm : 0.0f;
        float small = quantise(row, unit, in, q);
        if (!usable)
            return norm * 0.0f; // an infinity or NaN stays visible
        if (small > 0.25f * ROW_NORM * ROW_NORM || out->count == MOST_OUTLIERS)
            return 1.0f / unit;
        if (row != rest)
            memcpy(rest, row, (size_t)in * sizeof *rest);
        take_outliers(rest, unit, in, out);
        row = rest;
    }
}

// The thread's own fixed-point copy of the rows: a few percent of the product, and no barrier. A
// row whose norm sits in a few outliers (more than 3/4 of it squared) would leave too few steps for
// the others: these are multiplied in fp32, each with one line of every 16 outputs' weights.
void prepare_fixed(Operand *out, ThreadScratch *mine, const float *const *x, int rows, int in) {
    size_t all_rows = (size_t)rows * in;
    // rows, and tiles of them, each filled up by at most 3
    int16_t *copy = mine->fixed =
        grown(mine->fixed, &mine->fixed_size,
              (2 * all_rows + (size_t)(rows + 1) * 3 * in + 8) * sizeof *copy);
    float *rest = mine->rest = grown(mine->rest, &mine->rest_size, (size_t)in * sizeof *rest);
    Outliers *outliers = mine->outliers =
        grown(mine->outliers, &mine->outliers_size, (size_t)rows * sizeof *outliers);
    out->outliers = outliers;
    int16_t *to = copy + all_rows;
    for (int t = 0; t < out->tiles; t++) {
        const int16_t *of_tile[FIXED_LANES];
        int first = out->begin[t], taken = out->begin[t + 1] - first;
        for (int i = 0; i < taken; i++) {
            int n = first + i;
            int16_t *q = copy + (size_t)n * in;
            out->scale[n] = quantise_row(x[n], in, rest, q, outliers + n);
            of_tile[i] = q;
        }
        fixed_arrange(of_tile, taken, in, to);
        out->arranged[t] = to;
        to += (size_t)fixed_lanes(taken) * in;
    }
}

typedef int16_t Line __attribute__((vector_size(64))); // 16 outputs, 2 inputs each

// A line of 16 outputs' weights.
static Line line_of(const char *weight, int format, int line) {
    Line out;
#if INT12_PRODUCTS
    if (format == WEIGHTS_INT12) {
        fixed_line_12(weight, line, (int16_t *)&out);
        return out;
    }
#endif
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

// Where the rows take several tiles, each fetches a share of the next group's weights: otherwise
// memory would idle from the second tile on.
void product_fixed(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                   const char *after, f16 (*acc)[4]) {
    int first = x->begin[tile], lanes = x->begin[tile + 1] - first, m = first_of % GROUP_COLUMNS;
    for (int c = first_of; c < last_of; c++, m++) {
        Column column = column_of(linear, c);
        const char *weight = column.weight,
                   *next = c + 1 < last_of ? weights_of(linear, c + 1) : after;
        long pairs = linear->inputs / 2,
             lines = column.format == WEIGHTS_INT12 ? pairs / 4 * 3 : pairs,
             distance = lines_ahead(lanes, column.format);
        if (distance > lines)
            distance = lines;
        Ahead ahead = {weight + distance * LINE_BYTES, next - (lines - distance) * LINE_BYTES,
                       lines - distance, LINE_BYTES};
        if (x->tiles > 1) {
            long stride = (LINE_BYTES + x->tiles - 1) / x->tiles;
            ahead = (Ahead){after + (c - first_of) * lines * LINE_BYTES + tile * lines * stride,
                            NULL, lines, stride};
        }
        const float *units = column.scale;
        __builtin_prefetch(units); // read behind the tile
        fixed_tile(weight, column.format, x->arranged[tile], lanes, (int)pairs, &ahead,
                   (float *)&acc[0][m], 64);
        f16 unit = load(units);
        for (int r = 0; r < lanes; r++) {
            const Outliers *outliers = x->outliers + first + r;
            acc[r][m] *= unit * splat(x->scale[first + r]);
            if (outliers->count)
                acc[r][m] =
                    fma16(unit, outlier_products(outliers, weight, column.format), acc[r][m]);
        }
    }
}
#endif
