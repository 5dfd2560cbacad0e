// Quantised weights on AVX2. vpmaddubsw adds two products of unsigned and signed bytes in 16 bits,
// where four of 6 bits fit and two of 8 bits do not: those are split into their sizes and signs.
#include "../arch.h"

#define IN_32_BITS(pairs) _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
#define ADD_PAIR(n)                                                                                \
    a##n = _mm256_add_epi32(                                                                       \
        a##n, IN_32_BITS(_mm256_add_epi16(_mm256_maddubs_epi16(w, WORD(x[n])),                     \
                                          _mm256_maddubs_epi16(v, WORD(x[n + lanes])))));
#define SIGNED_LINE(w) _mm256_xor_si256(w, _mm256_set1_epi8(-128))
#define DOT_8(w, word)                                                                             \
    IN_32_BITS(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(word, w)))
#include "avx2_passes.h"
#undef PAIR_8
// without the zero of 128, which would not fit
#define PAIR_8(j) __m256i w = SIGNED_LINE(LINE(2 * (j))), v = SIGNED_LINE(LINE(2 * (j) + 1));
#define ADD_PAIR_8(n)                                                                              \
    a##n = _mm256_add_epi32(a##n,                                                                  \
                            _mm256_add_epi32(DOT_8(w, WORD(x[n])), DOT_8(v, WORD(x[n + lanes]))));
#define BLOCK_SIGNED(ROWS, BITS) BLOCK_WITH(ROWS, BITS, SCALE, ZERO, ADD_SUM)
FORMAT(q8_0, 8, 8, SIGNED, START_128)
FORMATS

const Bytes avx2_bytes = {LANES_256, quantise, PRODUCTS};
