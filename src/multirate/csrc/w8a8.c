// Linear layers with weights and rows of 8 bits, for passes that need not be exact: half the bytes
// of the other formats, and twice the products an instruction. Processors with VNNI and 512-bit
// registers.
//
// Both have a scale for each W8_BLOCK inputs, of an output or of a row: single channels of a
// residual may be hundreds of times the others. Sums of a block are exact integers and are added in
// fp32 from the first block to the last, so a row's bits do not depend on the tile's shape.
//
// A row of WEIGHTS_W8A16 is the sum of two: what rounding has left of it is a second row of the
// tile. Keys and values gain most by it.
//
// The instruction multiplies an unsigned number by a signed one: weights are stored plus 128, and
// every sum of a block begins with −128 · Σ q of the row's block.
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
//
// Rows of a tile, [inputs / 4][lanes] words of four int8, and beside them for each block
// [2][lanes]: the integers that its sums begin with, and its scales.
#include "gemm.h"
#if BYTE_PRODUCTS
#include <immintrin.h>

#define BLOCK_LINES (W8_BLOCK / 4)
#define BYTE_LANES 12 // two registers each: a block's sum and that of the blocks before

INLINE __m512 element_vector(const element *from) {
#if FIXED_POINT
    return _mm512_loadu_ps(from);
#else
    return (__m512)load_bf16_v(from);
#endif
}

// q = round(x / scale) of `in` ≤ W8_BLOCK inputs, a multiple of 16, of which x keeps what is
// rounded off. Returns the scale, and what the block's sums begin with to *begin.
static float quantise_block(float *x, int in, int8_t *q, int32_t *begin) {
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
    *begin = -128 * _mm512_reduce_add_epi32(total);
    return scale;
}

// NaN is lost in a maximum: whether every number of a row is finite.
static int finite_row(const element *x, int in) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < in; i += 16)
        sum = _mm512_fmadd_ps(element_vector(x + i), _mm512_setzero_ps(), sum);
    return _mm512_reduce_add_ps(sum) == 0.0f;
}

void prepare_bytes(Operand *out, ThreadScratch *mine, const element *const *x, int rows, int in,
                   int terms) {
    int blocks = (in + W8_BLOCK - 1) / W8_BLOCK, most = BYTE_LANES / terms,
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
                    float scale = quantise_block(rest, left, (int8_t *)words, place);
                    ((float *)place)[lanes] = finite ? scale : NAN;
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

#define DOT(sum, w, word)                                                                          \
    asm("vpdpbusd %[x]%{1to16%}, %[v], %[a]" : [a] "+v"(sum) : [v] "v"(w), [x] "m"(word));
#define LINE(k) _mm512_load_si512(weight + (k) * 64)
#define FETCH(k)                                                                                   \
    _mm_prefetch(((k) < ahead.own ? ahead.here : ahead.next) + (k) * ahead.stride, _MM_HINT_T1);
#define TOTAL(n) __m512 total##n = _mm512_setzero_ps();
#define BEGIN(n) __m512i a##n = _mm512_set1_epi32(beside[n]);
#define REST(n) __m512i b##n = _mm512_setzero_si512(), c##n = b##n, d##n = b##n;
#define DOT_A(n) DOT(a##n, w, x[n])
#define DOT_4(n)                                                                                   \
    DOT(a##n, w, x[n])                                                                             \
    DOT(b##n, w1, x[n + lanes]) DOT(c##n, w2, x[n + 2 * lanes]) DOT(d##n, w3, x[n + 3 * lanes])
#define JOIN(n) a##n = _mm512_add_epi32(_mm512_add_epi32(a##n, b##n), _mm512_add_epi32(c##n, d##n));
#define ADD_BLOCK(n)                                                                               \
    total##n = _mm512_fmadd_ps(                                                                    \
        _mm512_cvtepi32_ps(a##n),                                                                  \
        _mm512_mul_ps(_mm512_set1_ps(((const float *)beside)[lanes + n]), unit), total##n);
#define UNIT                                                                                       \
    __m512 unit = (__m512)_mm512_slli_epi32(                                                       \
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)units)), 16);                    \
    units += 16;
#define KEEP(n) _mm512_storeu_ps(to + (long)n * stride, total##n);

// 16 outputs for ROWS rows.
#define PASS(ROWS)                                                                                 \
    static void pass_##ROWS(const char *weight, const bf16 *units, const int32_t *x,               \
                            const int32_t *beside, long lines, Ahead ahead, float *to,             \
                            long stride) {                                                         \
        const long lanes = ROWS;                                                                   \
        N_##ROWS(TOTAL) for (long k = 0; k < lines; beside += 2 * lanes) {                         \
            long stop = k + BLOCK_LINES < lines ? k + BLOCK_LINES : lines;                         \
            N_##ROWS(BEGIN) for (; k < stop; k++, x += lanes) {                                    \
                FETCH(k)                                                                           \
                __m512i w = LINE(k);                                                               \
                N_##ROWS(DOT_A)                                                                    \
            }                                                                                      \
            UNIT N_##ROWS(ADD_BLOCK)                                                               \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
// The same for few rows: four lines a step, as one sum would wait for its own last step.
#define PASS_BY_FOUR(ROWS)                                                                         \
    static void pass_##ROWS(const char *weight, const bf16 *units, const int32_t *x,               \
                            const int32_t *beside, long lines, Ahead ahead, float *to,             \
                            long stride) {                                                         \
        const long lanes = ROWS;                                                                   \
        N_##ROWS(TOTAL) for (long k = 0; k < lines; beside += 2 * lanes) {                         \
            long stop = k + BLOCK_LINES < lines ? k + BLOCK_LINES : lines;                         \
            N_##ROWS(BEGIN) N_##ROWS(REST) for (; k < stop; k += 4, x += 4 * lanes) {              \
                FETCH(k)                                                                           \
                FETCH(k + 1)                                                                       \
                FETCH(k + 2)                                                                       \
                FETCH(k + 3)                                                                       \
                __m512i w = LINE(k), w1 = LINE(k + 1), w2 = LINE(k + 2), w3 = LINE(k + 3);         \
                N_##ROWS(DOT_4)                                                                    \
            }                                                                                      \
            UNIT N_##ROWS(JOIN) N_##ROWS(ADD_BLOCK)                                                \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
PASS_BY_FOUR(1)
PASS_BY_FOUR(2)
PASS_BY_FOUR(3)
PASS_BY_FOUR(4)
PASS(5)
PASS(6)
PASS(7)
PASS(8)
PASS(9)
PASS(10)
PASS(11)
PASS(12)

typedef void (*Pass)(const char *, const bf16 *, const int32_t *, const int32_t *, long, Ahead,
                     float *, long);
static const Pass passes[BYTE_LANES + 1] = {
    NULL,   pass_1, pass_2, pass_3,  pass_4,  pass_5,  pass_6,
    pass_7, pass_8, pass_9, pass_10, pass_11, pass_12,
};

// As in fixed_point.c.
static long ahead_lines(int lanes) {
    return !__builtin_cpu_is("amd") ? 64 : lanes <= 2 ? 0 : 160;
}

void product_bytes(const Linear *linear, int first_of, int last_of, const Operand *x, int tile,
                   const uint32_t *after, f16 (*acc)[4]) {
    int lanes = x->lanes[tile], begin = first_of % GROUP_COLUMNS, end = begin + last_of - first_of;
    long lines = linear->inputs / 4, column = lines * 64, distance = ahead_lines(lanes);
    if (distance > lines)
        distance = lines;
    const int32_t *words = (const int32_t *)x->arranged[tile], *beside = words + lines * lanes;
    const char *weight = (const char *)column_of(linear, first_of);
    long blocks = (linear->inputs + W8_BLOCK - 1) / W8_BLOCK;
    const bf16 *units = (const bf16 *)linear->scale + first_of * blocks * 16;
    for (int m = begin; m < end; m++, weight += column) {
        const char *next = m + 1 < end ? weight + column : (const char *)after;
        Ahead ahead = {weight + distance * 64, next - (lines - distance) * 64, lines - distance,
                       64};
        if (x->tiles > 1) { // each tile fetches a share of the next group's weights
            long stride = (64 + x->tiles - 1) / x->tiles;
            ahead = (Ahead){(const char *)after + (m - begin) * column + tile * lines * stride,
                            NULL, lines, stride};
        }
        passes[lanes](weight, units, words, beside, lines, ahead, (float *)&acc[0][m], 64);
        units += blocks * 16;
    }
    int rows = x->begin[tile + 1] - x->begin[tile];
    for (int r = 0; lanes > rows && r < rows; r++)
        for (int m = begin; m < end; m++)
            acc[r][m] = acc[2 * r][m] + acc[2 * r + 1][m];
}
#endif
