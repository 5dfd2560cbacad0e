// Quantised weights with registers of 256 bits, with VNNI (x86_avx_vnni.c) and without.
#include "passes.h"

// Eight of a block's inputs: the largest size, as an integer.
static inline __m256i size_of(__m256 v) {
    return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}

static inline float largest_of(__m256i a) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

static void quantise(const float *x, int inputs, int8_t *q, float *scales) {
    for (int b = 0; b < inputs / BLOCK; b++, x += BLOCK, q += BLOCK) {
        __m256 v[4];
        for (int i = 0; i < 4; i++)
            v[i] = _mm256_loadu_ps(x + 8 * i);
        float largest =
            largest_of(_mm256_max_epi32(_mm256_max_epi32(size_of(v[0]), size_of(v[1])),
                                        _mm256_max_epi32(size_of(v[2]), size_of(v[3]))));
        int usable = largest > 1e-30f && largest < 1e30f;
        scales[b] = usable ? largest / 127.0f : largest * 0.0f;
        if (!usable) {
            _mm256_storeu_si256((__m256i *)q, _mm256_setzero_si256());
            continue;
        }
        __m256 by = _mm256_set1_ps(127.0f / largest);
        __m256i whole[4];
        for (int i = 0; i < 4; i++)
            whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], by));
        // packing takes from both halves of its registers by turns
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                           _mm256_packs_epi32(whole[2], whole[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(bytes, order));
    }
}

#ifdef __AVXVNNI__
const Bytes avx_vnni_bytes = {MOST_ROWS, quantise, PRODUCTS};
#else
const Bytes avx2_bytes = {MOST_ROWS, quantise, PRODUCTS};
#endif
