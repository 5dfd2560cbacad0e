// Linear layers in fixed point, on every processor that multiplies int16: 16-bit rows and weights,
// where the two bytes of a weight do twice the arithmetic of fp32; and 8-bit weights for drafts,
// which need not be exact.
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
// Packed int8 weights (WEIGHTS_INT8) have the same order in half the bytes; a line becomes int16 as
// it is read.
#include "fixed_tile.h"
#include "gemm.h"
#if INTEGER_PRODUCTS

#define ROW_NORM 32000.0f // ‖x‖ in units of the row's scale; packing.py keeps ‖w‖ ≤ 65000

INLINE fv load_element_v(const element *from) {
#if FIXED_POINT
    return load_v(from);
#else
    return load_bf16_v(from);
#endif
}
INLINE float element_value(element e) {
#if FIXED_POINT
    return e;
#else
    return from_bf16(e);
#endif
}
INLINE element element_of(float f) {
#if FIXED_POINT
    return f;
#else
    return to_bf16(f);
#endif
}

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

// q = round(x · unit); returns Σ q² over elements that hold at most 1/16 of ROW_NORM².
static float quantise(const element *x, float unit, int in, int16_t *q) {
    fv a_small = all(0.0f), b_small = a_small, by = all(unit);
    int i = 0;
    for (; i + 2 * LANES <= in; i += 2 * LANES) {
        fv a = load_element_v(x + i) * by, b = load_element_v(x + i + LANES) * by;
        a_small += square_of_small(a);
        b_small += square_of_small(b);
        store_rounded(q + i, a);
        store_rounded(q + i + LANES, b);
    }
    float rest = sum_v(a_small + b_small);
    for (; i < in; i++) {
        float v = element_value(x[i]) * unit;
        if (fabsf(v) <= ROW_NORM / 4)
            rest += v * v;
        q[i] = (int16_t)lrintf(v);
    }
    return rest;
}

static float norm_of(const element *x, int in) {
    fv a = all(0.0f), b = a;
    int i = 0;
    for (; i + 2 * LANES <= in; i += 2 * LANES) {
        fv u = load_element_v(x + i), v = load_element_v(x + i + LANES);
        a += u * u;
        b += v * v;
    }
    float total = sum_v(a + b);
    for (; i < in; i++)
        total += element_value(x[i]) * element_value(x[i]);
    return sqrtf(total);
}

// What quantising has left of x, in units of its own: q. Returns the unit; 0: nothing.
static float quantise_rest(const element *x, const int16_t *coarse, float scale, int in,
                           element *rest, int16_t *q) {
    for (int i = 0; i < in; i++)
        rest[i] = element_of(element_value(x[i]) - coarse[i] * scale);
    float norm = norm_of(rest, in);
    if (!(norm > 1e-30f))
        return 0.0f;
    quantise(rest, ROW_NORM / norm, in, q);
    return norm / ROW_NORM;
}

// Shares the rows, of which some have a finer one beside them, out among tiles of about equal size.
static void share_out(Operand *out, int rows) {
    int lanes = rows;
    for (int n = 0; n < rows; n++)
        lanes += out->fine_scale[n] != 0.0f;
    int tiles = (lanes + FIXED_LANES - 1) / FIXED_LANES, share = (lanes + tiles - 1) / tiles;
    out->tiles = 0;
    for (int n = 0; n < rows; out->tiles++) {
        out->begin[out->tiles] = n;
        for (int taken = 0; n < rows; n++) {
            int wanted = out->fine_scale[n] != 0.0f ? 2 : 1;
            if (taken && (taken + wanted > FIXED_LANES || taken >= share))
                break;
            taken += wanted;
        }
    }
    out->begin[out->tiles] = rows;
}

// The thread's own fixed-point copy of the rows: a few percent of the product, and no barrier. A
// row whose norm sits in a few outliers (more than 3/4 of it squared) leaves too few steps for the
// others: what was rounded off is kept as a second, finer row.
void prepare_fixed(Operand *out, ThreadScratch *mine, const element *const *x, int rows, int in) {
    size_t all_rows = (size_t)rows * in;
    // coarse rows, fine rows, and tiles of both, each filled up by at most 3
    int16_t *copy = mine->fixed =
        grown(mine->fixed, &mine->fixed_size,
              (4 * all_rows + (size_t)(rows + 1) * 3 * in) * sizeof *copy);
    element *rest = mine->rest = grown(mine->rest, &mine->rest_size, (size_t)in * sizeof *rest);
    for (int n = 0; n < rows; n++) {
        int16_t *q = copy + (size_t)n * in;
        float norm = norm_of(x[n], in);
        int usable = norm > 1e-30f && norm < 1e30f; // zero, or about to overflow in any precision
        float unit = usable ? ROW_NORM / norm : 0.0f;
        float small = quantise(x[n], unit, in, q);
        out->scale[n] = usable ? 1.0f / unit : norm * 0.0f; // an infinity or NaN stays visible
        out->fine_scale[n] = 0.0f;
        if (usable && small <= 0.25f * ROW_NORM * ROW_NORM)
            out->fine_scale[n] =
                quantise_rest(x[n], q, out->scale[n], in, rest, copy + all_rows + (size_t)n * in);
    }
    share_out(out, rows);
    int16_t *to = copy + 2 * all_rows;
    for (int t = 0; t < out->tiles; t++) {
        const int16_t *of_tile[FIXED_LANES];
        int lanes = 0;
        for (int n = out->begin[t]; n < out->begin[t + 1]; n++)
            of_tile[lanes++] = copy + (size_t)n * in;
        for (int n = out->begin[t]; n < out->begin[t + 1]; n++)
            if (out->fine_scale[n] != 0.0f)
                of_tile[lanes++] = copy + all_rows + (size_t)n * in;
        fixed_arrange(of_tile, lanes, in, to);
        out->arranged[t] = to;
        out->lanes[t] = lanes;
        to += (size_t)fixed_lanes(lanes) * in;
    }
}

// Lines of weights fetched ahead, by rows: the processor's own prefetching falls behind several
// rows' products, and with registers of 512 bits even behind one row's.
#ifdef __AVX512F__
#define AHEAD_LINES(lanes) 64L
#else
#define AHEAD_LINES(lanes) ((lanes) == 1 ? 0L : (lanes) <= 3 ? 12L : 64L)
#endif

// Where the rows take several tiles, each fetches a share of the next group's weights: otherwise
// memory would idle from the second tile on.
void product_fixed(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                   const uint32_t *after, f16 (*acc)[4]) {
    int narrow = linear->format == WEIGHTS_INT8, first = x->begin[tile],
        rows = x->begin[tile + 1] - first, lanes = x->lanes[tile], begin = first_of % GROUP_COLUMNS,
        end = begin + last_of - first_of;
    long pairs = linear->inputs / 2, line = narrow ? 32 : 64, column = pairs * line,
         distance = AHEAD_LINES(lanes) * 64 / line;
    if (distance > pairs)
        distance = pairs;
    const char *weight = (const char *)column_of(linear, first_of);
    for (int m = begin; m < end; m++, weight += column) {
        const char *next = m + 1 < end ? weight + column : (const char *)after;
        Ahead ahead = {weight + distance * line, next - (pairs - distance) * line, pairs - distance,
                       line};
        if (x->tiles > 1) {
            long stride = (line + x->tiles - 1) / x->tiles;
            ahead = (Ahead){(const char *)after + (m - begin) * column + tile * pairs * stride,
                            NULL, pairs, stride};
        }
        fixed_tile(weight, narrow, x->arranged[tile], lanes, (int)pairs, &ahead,
                   (float *)&acc[0][m], 64);
    }
    const float *unit = linear->scale + (first_of - begin) * 16;
    for (int r = 0, fine = rows; r < rows; r++) {
        float scale = x->scale[first + r], fine_scale = x->fine_scale[first + r];
        for (int m = begin; m < end; m++)
            acc[r][m] = acc[r][m] * (load(unit + m * 16) * splat(scale));
        if (fine_scale == 0.0f)
            continue;
        for (int m = begin; m < end; m++)
            acc[r][m] += acc[fine][m] * (load(unit + m * 16) * splat(fine_scale));
        fine++;
    }
}
#endif
