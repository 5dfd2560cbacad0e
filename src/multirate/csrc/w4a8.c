// Linear layers with weights of 4 bits and rows of 8: for passes that need not be exact of models
// whose weights are numbers of 4 bits, as those of a quantised file are. Five bits a weight are
// read with their scales. Processors with VNNI and 512-bit registers.
//
// A weight is unit · q + least, q from 0 to 15, with a unit and a least one for each W8_BLOCK
// inputs of an output. Sums of a block are exact integers and are added in fp32 from the first
// block to the last, and after each the least weight times the block of the row, Σ x (byte_rows.c).
// A row of WEIGHTS_W4A16 is the sum of two.
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

#define FETCH(k)                                                                                   \
    _mm_prefetch(((k) < fetched->own ? fetched->here : fetched->next) + (k) * fetched->stride,     \
                 _MM_HINT_T1);
#define LINE(k) _mm512_load_si512(weight + (k) * 64)
#define LOWER(w) _mm512_and_si512(w, fifteen)
#define UPPER(w) _mm512_and_si512(_mm512_srli_epi16(w, 4), fifteen)
#define TOTAL(n) __m512 total##n = _mm512_setzero_ps();
#define BEGIN(n) __m512i a##n = _mm512_setzero_si512();
#define REST(n) __m512i b##n = a##n, c##n = a##n, d##n = a##n;
#define DOT_2(n) DOT(a##n, lower, x[n]) DOT(a##n, upper, x[n + lanes])
#define DOT_4(n)                                                                                   \
    DOT(a##n, lower, x[n])                                                                         \
    DOT(b##n, upper, x[n + lanes])                                                                 \
    DOT(c##n, lower1, x[n + 2 * lanes]) DOT(d##n, upper1, x[n + 3 * lanes])
#define JOIN(n) a##n = _mm512_add_epi32(_mm512_add_epi32(a##n, b##n), _mm512_add_epi32(c##n, d##n));
#define BESIDE(n) ((const float *)beside)[n]
#define ADD_BLOCK(n)                                                                               \
    total##n = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a##n),                                           \
                               _mm512_mul_ps(_mm512_set1_ps(BESIDE(lanes + n)), unit), total##n);  \
    total##n = _mm512_fmadd_ps(_mm512_set1_ps(BESIDE(n)), least, total##n);
#define UNITS                                                                                      \
    __m512 unit = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)units)),                     \
           least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(units + 16)));             \
    _mm_prefetch((const char *)(units + UNITS_AHEAD), _MM_HINT_T1);                                \
    units += 32;
#define KEEP(n) _mm512_storeu_ps(to + (long)n * stride, total##n);

// 16 outputs for ROWS rows. Whole blocks.
#define PASS(ROWS)                                                                                 \
    static void pass_##ROWS(const char *weight, const bf16 *units, const int32_t *x,               \
                            const int32_t *beside, long lines, const Ahead *fetched, float *to,    \
                            long stride) {                                                         \
        const long lanes = ROWS;                                                                   \
        const __m512i fifteen = _mm512_set1_epi8(15);                                              \
        N_##ROWS(TOTAL) for (long k = 0; k < lines; beside += 2 * lanes) {                         \
            N_##ROWS(BEGIN) for (long stop = k + BLOCK_LINES; k < stop; k++, x += 2 * lanes) {     \
                FETCH(k)                                                                           \
                __m512i w = LINE(k), lower = LOWER(w), upper = UPPER(w);                           \
                N_##ROWS(DOT_2)                                                                    \
            }                                                                                      \
            UNITS N_##ROWS(ADD_BLOCK)                                                              \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
// The same for few rows: two lines a step, as one sum would wait for its own last step.
#define PASS_BY_TWO(ROWS)                                                                          \
    static void pass_##ROWS(const char *weight, const bf16 *units, const int32_t *x,               \
                            const int32_t *beside, long lines, const Ahead *fetched, float *to,    \
                            long stride) {                                                         \
        const long lanes = ROWS;                                                                   \
        const __m512i fifteen = _mm512_set1_epi8(15);                                              \
        N_##ROWS(TOTAL) for (long k = 0; k < lines; beside += 2 * lanes) {                         \
            N_##ROWS(BEGIN) N_##ROWS(REST) for (long stop = k + BLOCK_LINES; k < stop;             \
                                                k += 2, x += 4 * lanes) {                          \
                FETCH(k)                                                                           \
                FETCH(k + 1)                                                                       \
                __m512i w = LINE(k), w1 = LINE(k + 1), lower = LOWER(w), upper = UPPER(w),         \
                        lower1 = LOWER(w1), upper1 = UPPER(w1);                                    \
                N_##ROWS(DOT_4)                                                                    \
            }                                                                                      \
            UNITS N_##ROWS(JOIN) N_##ROWS(ADD_BLOCK)                                               \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
PASS_BY_TWO(1)
PASS_BY_TWO(2)
PASS_BY_TWO(3)
PASS_BY_TWO(4)
PASS(5)
PASS(6)
PASS(7)
PASS(8)
PASS(9)
PASS(10)
PASS(11)
PASS(12)

static const BytePass passes[BYTE_LANES + 1] = {
    NULL,   pass_1, pass_2, pass_3,  pass_4,  pass_5,  pass_6,
    pass_7, pass_8, pass_9, pass_10, pass_11, pass_12,
};

void product_half_bytes(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                        const uint32_t *after, f16 (*acc)[4]) {
    byte_product(linear, first_of, last_of, x, tile, after, acc, linear->inputs / 8, 32, passes);
}
#endif
