// 8-bit rows for 8-bit weights (w8a8.c) and 4-bit weights (w4a8.c). Each W8_BLOCK inputs have their
// own scale, because single channels of a residual can be hundreds of times larger than others.
//
// A 16-bit row is the sum of two such rows ("limbs"): the rounding error of the first is the second
// row of the tile.
//
// A tile's rows are [inputs / 4][lanes] words of four int8. Beside them are, for each block,
// [2][lanes]: the correction for the weights' offset (8 bits: the integers that sums start with,
// −128 · Σ q; 4 bits: scale · Σ q), and the scales.
#include "byte_tile.h"
#include "gemm.h"
#if BYTE_PRODUCTS
#include <immintrin.h>

// Lane b of the result: the largest lane of the b-th of 16 vectors.
INLINE __m512i largest_of_each(const __m512i *v) {
    __m512i four[4];
    for (int i = 0; i < 4; i++, v += 4) {
        __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(v[0], v[1]),
                                      _mm512_unpackhi_epi32(v[0], v[1])),
                cd = _mm512_max_epi32(_mm512_unpacklo_epi32(v[2], v[3]),
                                      _mm512_unpackhi_epi32(v[2], v[3]));
        four[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
    __m512i early = _mm512_max_epi32(_mm512_shuffle_i32x4(four[0], four[1], 0x44),
                                     _mm512_shuffle_i32x4(four[0], four[1], 0xee)),
            late = _mm512_max_epi32(_mm512_shuffle_i32x4(four[2], four[3], 0x44),
                                    _mm512_shuffle_i32x4(four[2], four[3], 0xee));
    return _mm512_max_epi32(_mm512_shuffle_i32x4(early, late, 0x88),
                            _mm512_shuffle_i32x4(early, late, 0xdd));
}

// q = round(x / scale), with a scale for each block, of which x keeps what is rounded off where
// keep_rest says so. Of a block with an infinity or NaN the scale is NaN: they are the largest
// integers that a float's bits can be.
static void quantise(float *x, int in, int8_t *q, float *scales, int keep_rest) {
    for (int begin = 0; begin < in; begin += 16 * W8_BLOCK) {
        int vectors = (in - begin) / 16 < 32 ? (in - begin) / 16 : 32, blocks = (vectors + 1) / 2;
        __m512i size[32], most[16];
        float unit[16];
        for (int i = 0; i < 32; i++)
            size[i] = i < vectors ? _mm512_and_si512(_mm512_loadu_si512(x + begin + 16 * i),
                                                     _mm512_set1_epi32(0x7fffffff))
                                  : _mm512_setzero_si512();
        for (int b = 0; b < 16; b++)
            most[b] = _mm512_max_epi32(size[2 * b], size[2 * b + 1]);
        __m512 largest = (__m512)largest_of_each(most), steps = _mm512_set1_ps(127.0f);
        __mmask16 usable = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e-30f), _CMP_GT_OQ) &
                           _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e30f), _CMP_LT_OQ);
        __m512 scale =
            _mm512_mask_div_ps(_mm512_mul_ps(largest, _mm512_setzero_ps()), usable, largest, steps);
        _mm512_storeu_ps(unit, _mm512_maskz_div_ps(usable, steps, largest));
        _mm512_mask_storeu_ps(scales, (__mmask16)((1u << blocks) - 1), scale);
        for (int i = 0; i < vectors; i++) {
            float *from = x + begin + 16 * i;
            __m512 v = _mm512_loadu_ps(from);
            __m512i words = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(unit[i / 2])));
            _mm_storeu_si128((__m128i *)(q + begin + 16 * i), _mm512_cvtsepi32_epi8(words));
            if (keep_rest)
                _mm512_storeu_ps(from, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(words),
                                                        _mm512_set1_ps(scales[i / 2]), v));
        }
        scales += blocks;
    }
}

static float norm_of(const float *x, int in) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < in; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return sqrtf(_mm512_reduce_add_ps(sum));
}

// What lies beside a tile's `words`, from these and from scales [lanes][blocks].
static void write_beside(int32_t *beside, const int32_t *words, const float *scales, int lanes,
                         int in, int half_bytes) {
    int blocks = (in + W8_BLOCK - 1) / W8_BLOCK;
    __mmask16 filled = (__mmask16)((1u << lanes) - 1);
    __m512i each =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(blocks));
    for (int b = 0; b < blocks; b++, beside += 2 * lanes) {
        __m512i sum = _mm512_setzero_si512();
        for (int stop = (b + 1) * W8_BLOCK < in ? (b + 1) * W8_BLOCK : in, i = b * W8_BLOCK;
             i < stop; i += 4, words += lanes)
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1),
                                      _mm512_maskz_loadu_epi32(filled, words));
        __m512 scale = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), filled, each, scales + b, 4);
        _mm512_mask_storeu_epi32(beside, filled,
                                 half_bytes ? (__m512i)_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale)
                                            : _mm512_mullo_epi32(sum, _mm512_set1_epi32(-128)));
        _mm512_mask_storeu_ps(beside + lanes, filled, scale);
    }
}

void prepare_bytes(Operand *out, ThreadScratch *mine, const Linear *linear, const float *const *x,
                   int rows) {
    int in = linear->inputs,
        terms = linear->format == WEIGHTS_W8A16 || linear->format == WEIGHTS_W4A16 ? 2 : 1,
        blocks = (in + W8_BLOCK - 1) / W8_BLOCK, most = BYTE_LANES / terms,
        tiles = (rows + most - 1) / most, share = (rows + tiles - 1) / tiles;
    size_t row_words = terms * ((size_t)in / 4 + 2 * (size_t)blocks),
           room = rows * row_words + (size_t)in + BYTE_LANES * ((size_t)in / 4 + blocks);
    int32_t *to =
        (int32_t *)(mine->fixed = grown(mine->fixed, &mine->fixed_size, room * sizeof *to));
    // a row, and a tile's rows and scales, one after the other
    float *row = (float *)(to + rows * row_words), *scales = row + in;
    int8_t *q = (int8_t *)(scales + (size_t)BYTE_LANES * blocks);
    out->tiles = 0;
    for (int first = 0; first < rows; first += share) {
        int taken = rows - first < share ? rows - first : share, lanes = taken * terms;
        const int16_t *of_tile[BYTE_LANES];
        for (int n = 0; n < taken; n++) {
            memcpy(row, x[first + n], (size_t)in * sizeof *row);
            for (int lane = terms * n; lane < terms * (n + 1); lane++) {
                int8_t *bytes = q + (size_t)lane * in;
                int rest = lane + 1 < terms * (n + 1) || linear->format == WEIGHTS_W8A8;
                quantise(row, in, bytes, scales + (size_t)lane * blocks, rest);
                of_tile[lane] = (const int16_t *)bytes;
            }
            if (linear->format == WEIGHTS_W8A8)
                out->rounded_off[first + n] = norm_of(row, in);
        }
        fixed_arrange(of_tile, lanes, in / 2, (int16_t *)to);
        int32_t *beside = to + (size_t)in / 4 * lanes;
        write_beside(beside, to, scales, lanes, in, half_byte_weights(linear));
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
