// Rows of 8 bits, for weights of 8 bits (w8a8.c) and of 4 (w4a8.c): a scale for each W8_BLOCK
// inputs, as single channels of a residual may be hundreds of times the others.
//
// A row of two terms is the sum of two such: what rounding has left of it is a second row of the
// tile.
//
// Rows of a tile, [inputs / 4][lanes] words of four int8, and beside them for each block
// [2][lanes]: what the row's sum Σ q makes of the weights' offset (8 bits: the integers that sums
// begin with, −128 · Σ q; 4 bits: scale · Σ q), and the scales.
#include "byte_tile.h"
#include "gemm.h"
#if BYTE_PRODUCTS
#include <immintrin.h>

INLINE __m512 element_vector(const element *from) {
#if FIXED_POINT
    return _mm512_loadu_ps(from);
#else
    return (__m512)load_bf16_v(from);
#endif
}

// q = round(x / scale) of `in` ≤ W8_BLOCK inputs, a multiple of 16, of which x keeps what is
// rounded off. Returns the scale, and Σ q to *sum.
static float quantise_block(float *x, int in, int8_t *q, int32_t *sum) {
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < in; i += 16)
        most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    float largest = _mm512_reduce_max_ps(most);
    int usable = largest > 1e-30f && largest < 1e30f;
    float scale = usable ? largest / 127.0f : largest * 0.0f; // an infinity stays visible
    __m512 unit = _mm512_set1_ps(usable ? 127.0f / largest : 0.0f), back = _mm512_set1_ps(scale);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < in; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i);
        __m512 steps = _mm512_mul_ps(v, unit);
        // what is not a number would be the least integer, and sums of these leave int32
        __mmask16 known = _mm512_cmp_ps_mask(steps, steps, _CMP_ORD_Q);
        __m512i words = _mm512_maskz_cvtps_epi32(known, steps);
        _mm512_storeu_ps(x + i, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(words), back, v));
        total = _mm512_add_epi32(total, words);
        _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtsepi32_epi8(words));
    }
    *sum = _mm512_reduce_add_epi32(total);
    return scale;
}

// NaN is lost in a maximum: whether every number of a row is finite.
static int finite_row(const element *x, int in) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < in; i += 16)
        sum = _mm512_fmadd_ps(element_vector(x + i), _mm512_setzero_ps(), sum);
    return _mm512_reduce_add_ps(sum) == 0.0f;
}

void prepare_bytes(Operand *out, ThreadScratch *mine, const Linear *linear, const element *const *x,
                   int rows) {
    int in = linear->inputs, half_bytes = half_byte_weights(linear),
        terms = linear->format == WEIGHTS_W8A16 || linear->format == WEIGHTS_W4A16 ? 2 : 1,
        blocks = (in + W8_BLOCK - 1) / W8_BLOCK, most = BYTE_LANES / terms,
        tiles = (rows + most - 1) / most, share = (rows + tiles - 1) / tiles;
    size_t row_words = terms * ((size_t)in / 4 + 2 * (size_t)blocks);
    int32_t *to = (int32_t *)(mine->fixed = grown(mine->fixed, &mine->fixed_size,
                                                  rows * row_words * sizeof(int32_t)));
    out->tiles = 0;
    for (int first = 0; first < rows; first += share) {
        int taken = rows - first < share ? rows - first : share, lanes = taken * terms;
        int32_t *beside = to + (size_t)in / 4 * lanes;
        for (int n = 0; n < taken; n++) {
            const element *row = x[first + n];
            int finite = finite_row(row, in);
            __m512 lacking = _mm512_setzero_ps();
            for (int b = 0; b < blocks; b++) {
                int begin = b * W8_BLOCK, left = in - begin < W8_BLOCK ? in - begin : W8_BLOCK;
                float rest[W8_BLOCK];
                int32_t words[W8_BLOCK / 4];
                for (int i = 0; i < left; i += 16)
                    _mm512_storeu_ps(rest + i, element_vector(row + begin + i));
                for (int lane = terms * n; lane < terms * (n + 1); lane++) {
                    int32_t *place = beside + 2 * b * lanes + lane;
                    int32_t sum;
                    float scale = quantise_block(rest, left, (int8_t *)words, &sum);
                    if (!finite)
                        scale = NAN;
                    if (half_bytes)
                        *(float *)place = (float)sum * scale;
                    else
                        *place = -128 * sum;
                    ((float *)place)[lanes] = scale;
                    for (int k = 0; k < left / 4; k++)
                        to[(size_t)(begin / 4 + k) * lanes + lane] = words[k];
                }
                for (int i = 0; i < left; i += 16) {
                    __m512 v = _mm512_loadu_ps(rest + i);
                    lacking = _mm512_fmadd_ps(v, v, lacking);
                }
            }
            out->rounded_off[first + n] = sqrtf(_mm512_reduce_add_ps(lacking));
        }
        out->begin[out->tiles] = first;
        out->lanes[out->tiles] = lanes;
        out->arranged[out->tiles++] = (const int16_t *)to;
        to = beside + 2 * (size_t)blocks * lanes;
    }
    out->begin[out->tiles] = rows;
}

void byte_product(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                  const uint32_t *after, f16 (*acc)[4], long lines, long units_of,
                  const BytePass *passes) {
    int lanes = x->lanes[tile], begin = first_of % GROUP_COLUMNS, end = begin + last_of - first_of;
    long column = lines * 64, distance = lines_ahead(lanes, linear->format);
    if (distance > lines)
        distance = lines;
    const int32_t *words = (const int32_t *)x->arranged[tile],
                  *beside = words + (long)linear->inputs / 4 * lanes;
    const char *weight = (const char *)column_of(linear, first_of);
    long blocks = (linear->inputs + W8_BLOCK - 1) / W8_BLOCK;
    const bf16 *units = (const bf16 *)linear->scale + first_of * blocks * units_of;
    for (int m = begin; m < end; m++, weight += column) {
        const char *next = m + 1 < end ? weight + column : (const char *)after;
        Ahead ahead = {weight + distance * 64, next - (lines - distance) * 64, lines - distance,
                       64};
        if (x->tiles > 1) { // each tile fetches a share of the next group's weights
            long stride = (64 + x->tiles - 1) / x->tiles;
            ahead = (Ahead){(const char *)after + (m - begin) * column + tile * lines * stride,
                            NULL, lines, stride};
        }
        passes[lanes](weight, units, words, beside, lines, &ahead, (float *)&acc[0][m], 64);
        units += blocks * units_of;
    }
    int rows = x->begin[tile + 1] - x->begin[tile]; // of two terms each, where there are more lanes
    for (int r = 0; lanes > rows && r < rows; r++)
        for (int m = begin; m < end; m++)
            acc[r][m] = acc[2 * r][m] + acc[2 * r + 1][m];
}
#endif
