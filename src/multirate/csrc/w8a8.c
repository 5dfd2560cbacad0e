// Linear layers with 8-bit weights and 8-bit rows, for passes that need not be exact: half the
// bytes of int16, and twice the products per instruction. Needs VNNI and 512-bit registers.
//
// Both have a scale per W8_BLOCK inputs, of an output or of a row (byte_rows.c). Sums of a block
// are exact integers. They are added in fp32 from the first block to the last, so a row's bits do
// not depend on the shape of the tile.
//
// A row of WEIGHTS_W8A16 is the sum of two limbs. Keys and values gain most from it.
//
// The instruction multiplies unsigned by signed numbers, so weights are stored plus 128, and every
// sum of a block starts with −128 · Σ q of the row's block.
//
// Packed weights (WEIGHTS_W8A8): [outputs / 64][4][inputs / 4][16][4] of uint8. oAiB is the weight
// of output A and input B:
//
//   group 0, outputs 0 … 15, a line of 64 bytes (16 outputs, 4 inputs each) after the other:
//     | o0i0 o0i1 o0i2 o0i3 o1i0 … o15i3 |
//     | o0i4 o0i5 o0i6 o0i7 o1i4 … o15i7 |
//     …
//   group 0, outputs 16 … 31; 32 … 47; 48 … 63
//   group 1
//   …
//
// Linear.scale holds their scales in bf16: [outputs / 16][blocks][16].
#include "byte_tile.h"
#include "gemm.h"
#if BYTE_PRODUCTS

#define BLOCK_LINES (W8_BLOCK / 4)
#define UNITS_AHEAD (60 * 16) // blocks' units, which come after one another, are fetched meanwhile

#define BEGIN(n) __m512i a##n = _mm512_set1_epi32(beside[n]);
#define REST(n) __m512i b##n = _mm512_setzero_si512(), c##n = b##n, d##n = b##n;
#define DOT_A(n) DOT(a##n, w, x[n])
#define DOT_4(n)                                                                                   \
    DOT(a##n, w, x[n])                                                                             \
    DOT(b##n, w1, x[n + lanes]) DOT(c##n, w2, x[n + 2 * lanes]) DOT(d##n, w3, x[n + 3 * lanes])
#define UNIT                                                                                       \
    __m512 unit = (__m512)_mm512_slli_epi32(                                                       \
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)units)), 16);                    \
    _mm_prefetch((const char *)(units + UNITS_AHEAD), _MM_HINT_T1);                                \
    units += 16;

// A line a step, or four.
#define BLOCK_BY_ONE(ROWS)                                                                         \
    long stop = k + BLOCK_LINES < lines ? k + BLOCK_LINES : lines;                                 \
    N_##ROWS(BEGIN) for (; k < stop; k++, x += lanes) {                                            \
        FETCH(k)                                                                                   \
        __m512i w = LINE(k);                                                                       \
        N_##ROWS(DOT_A)                                                                            \
    }                                                                                              \
    UNIT N_##ROWS(ADD_SUM)
#define BLOCK_BY_FOUR(ROWS)                                                                        \
    long stop = k + BLOCK_LINES < lines ? k + BLOCK_LINES : lines;                                 \
    N_##ROWS(BEGIN) N_##ROWS(REST) for (; k < stop; k += 4, x += 4 * lanes) {                      \
        FETCH(k)                                                                                   \
        FETCH(k + 1)                                                                               \
        FETCH(k + 2)                                                                               \
        FETCH(k + 3)                                                                               \
        __m512i w = LINE(k), w1 = LINE(k + 1), w2 = LINE(k + 2), w3 = LINE(k + 3);                 \
        N_##ROWS(DOT_4)                                                                            \
    }                                                                                              \
    UNIT N_##ROWS(JOIN) N_##ROWS(ADD_SUM)
BYTE_PASSES(BLOCK_BY_FOUR, BLOCK_BY_ONE)

void product_bytes(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                   const uint32_t *after, f16 (*acc)[4]) {
    byte_product(linear, first_of, last_of, x, tile, after, acc, linear->inputs / 4, 16, passes);
}
#endif
