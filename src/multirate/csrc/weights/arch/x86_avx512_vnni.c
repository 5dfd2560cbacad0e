// Quantised weights with VNNI and registers of 512 bits.
#include "passes.h"

// Lane b of the result: the largest lane of the b-th of 16 vectors.
static inline __m512i largest_of_each(const __m512i *v) {
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

// Sixteen blocks at a time. As integers a NaN's bits are larger than infinity's.
static void quantise(const float *x, int inputs, int8_t *q, float *scales) {
    for (int begin = 0; begin < inputs; begin += 16 * BLOCK) {
        int vectors = (inputs - begin) / 16 < 32 ? (inputs - begin) / 16 : 32,
            blocks = (vectors + 1) / 2;
        __m512i size[32], most[16];
        float by[16];
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
        _mm512_storeu_ps(by, _mm512_maskz_div_ps(usable, steps, largest));
        _mm512_mask_storeu_ps(scales, (__mmask16)((1u << blocks) - 1), scale);
        for (int i = 0; i < vectors; i++) {
            __m512 v = _mm512_loadu_ps(x + begin + 16 * i), factor = _mm512_set1_ps(by[i / 2]);
            __mmask16 known = usable >> (i / 2) & 1 ? 0xffff : 0;
            __m512i words = _mm512_maskz_cvtps_epi32(known, _mm512_mul_ps(v, factor));
            _mm_storeu_si128((__m128i *)(q + begin + 16 * i), _mm512_cvtsepi32_epi8(words));
        }
        scales += blocks;
    }
}

const Bytes avx512_vnni_bytes = {MOST_ROWS, quantise, PRODUCTS};
