// Linear layers with 4-bit weights and 8-bit rows, for passes that need not be exact. With scales,
// five bits per weight are read. Needs VNNI and 512-bit registers.
//
// A weight is unit · q + least, with q from 0 to 15 and one unit and one least weight per W8_BLOCK
// inputs of an output. Sums of a block are exact integers. They are added in fp32 from the first
// block to the last, each followed by least · Σ x of the row's block (byte_rows.c). A row of
// WEIGHTS_W4A16 is the sum of two limbs.
//
// Packed weights: [outputs / 64][4][inputs / 8][16][4] of uint8, the first four of eight inputs in
// the lower halves, the last four in the upper ones. oAiB is the weight of output A and input B:
//
//   group 0, outputs 0 … 15, a line of 64 bytes (16 outputs, 8 inputs each) after the other:
//     | o0i0+o0i4 o0i1+o0i5 o0i2+o0i6 o0i3+o0i7 o1i0+o1i4 … o15i3+o15i7 |
//     | o0i8+o0i12 …                                                    |
//     …
//   group 0, outputs 16 … 31; 32 … 47; 48 … 63
//   group 1
//   …
//
// Linear.scale holds units and least weights in fp16: [outputs / 16][blocks][2][16].
#include "byte_tile.h"
#include "gemm.h"
#if BYTE_PRODUCTS

#define BLOCK_LINES (W8_BLOCK / 8)
#define UNITS_AHEAD (60 * 32) // blocks' units, which come after one another, are fetched meanwhile

#define LOWER(w) _mm512_and_si512(w, _mm512_set1_epi8(15))
#define UPPER(w) LOWER(_mm512_srli_epi16(w, 4))
#define BEGIN(n) __m512i a##n = _mm512_setzero_si512();
#define REST(n) __m512i b##n = a##n, c##n = a##n, d##n = a##n;
#define DOT_2(n) DOT(a##n, lower, x[n]) DOT(a##n, upper, x[n + lanes])
#define DOT_4(n)                                                                                   \
    DOT(a##n, lower, x[n])                                                                         \
    DOT(b##n, upper, x[n + lanes])                                                                 \
    DOT(c##n, lower1, x[n + 2 * lanes]) DOT(d##n, upper1, x[n + 3 * lanes])
#define ADD_BLOCK(n)                                                                               \
    ADD_SUM(n) total##n = _mm512_fmadd_ps(_mm512_set1_ps(BESIDE(n)), least, total##n);
#define UNITS                                                                                      \
    __m512 unit = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)units)),                     \
           least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(units + 16)));             \
    _mm_prefetch((const char *)(units + UNITS_AHEAD), _MM_HINT_T1);                                \
    units += 32;

// A line a step, or two. Whole blocks.
#define BLOCK_BY_ONE(ROWS)                                                                         \
    N_##ROWS(BEGIN) for (long stop = k + BLOCK_LINES; k < stop; k++, x += 2 * lanes) {             \
        FETCH(k)                                                                                   \
        __m512i w = LINE(k), lower = LOWER(w), upper = UPPER(w);                                   \
        N_##ROWS(DOT_2)                                                                            \
    }                                                                                              \
    UNITS N_##ROWS(ADD_BLOCK)
#define BLOCK_BY_TWO(ROWS)                                                                         \
    N_##ROWS(BEGIN)                                                                                \
        N_##ROWS(REST) for (long stop = k + BLOCK_LINES; k < stop; k += 2, x += 4 * lanes) {       \
        FETCH(k)                                                                                   \
        FETCH(k + 1)                                                                               \
        __m512i w = LINE(k), w1 = LINE(k + 1), lower = LOWER(w), upper = UPPER(w),                 \
                lower1 = LOWER(w1), upper1 = UPPER(w1);                                            \
        N_##ROWS(DOT_4)                                                                            \
    }                                                                                              \
    UNITS N_##ROWS(JOIN) N_##ROWS(ADD_BLOCK)
BYTE_PASSES(BLOCK_BY_TWO, BLOCK_BY_ONE)

void product_half_bytes(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                        const uint32_t *after, f16 (*acc)[4]) {
    byte_product(linear, first_of, last_of, x, tile, after, acc, linear->inputs / 8, 32, passes);
}
#endif
