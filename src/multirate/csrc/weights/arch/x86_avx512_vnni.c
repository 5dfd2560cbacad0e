// Quantised weights with VNNI and registers of 512 bits: a line (16 outputs, 4 inputs) meets a word
// of each row in one instruction, and the sums of up to 12 rows stay in registers.
#include "../arch.h"

#include <immintrin.h>

#include "rows_of_tile.h"

#define LANES_512 12 // rows of a tile at most: each takes two registers

// sum[16] += four unsigned bytes of each of 16 outputs · four signed ones of a row. In assembly
// because compilers load rows apart from the products, or all of them before.
#define DOT(sum, w, word)                                                                          \
    asm("vpdpbusd %[x]%{1to16%}, %[v], %[a]" : [a] "+v"(sum) : [v] "v"(w), [x] "m"(word));

#define LINE(k) _mm512_load_si512(weight + (k) * LINE_BYTES)
#define AND(a, b) _mm512_and_si512(a, b)
#define LOWER(w) AND(w, _mm512_set1_epi8(15))
#define UPPER(w) LOWER(_mm512_srli_epi16(w, 4))
// The bits of `more` that `mask` has, beside those of a byte: a | (b & c)
#define WITH_BITS(byte, more, mask)                                                                \
    _mm512_ternarylogic_epi32(byte, more, _mm512_set1_epi8(mask), 0xf8)
#define UP(v, bits) _mm512_slli_epi16(v, bits)
#define DOWN(v, bits) _mm512_srli_epi16(v, bits)

#define REGISTER __m512i
#include "pairs_of_lines.h"

#define HALVES(at) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at)))
#define UNSIGNED(at)                                                                               \
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(at))))
#define SIGNED(at) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at))))
#define FETCH_SCALES(bytes) _mm_prefetch(scales + 60 * 32 + (bytes), _MM_HINT_T1);

// A block's unit and least weights, and on to the next ones.
#define UNITS_SCALE                                                                                \
    __m512 unit = HALVES(scales);                                                                  \
    FETCH_SCALES(0)                                                                                \
    scales += 32;
#define UNITS_LEAST                                                                                \
    __m512 unit = HALVES(scales), least = HALVES(scales + 32);                                     \
    FETCH_SCALES(0)                                                                                \
    scales += 64;
#define UNITS_FACTORS                                                                              \
    if (b % 8 == 0) {                                                                              \
        shared = HALVES(scales);                                                                   \
        shared_least = _mm512_sub_ps(_mm512_setzero_ps(), HALVES(scales + 32));                    \
        scales += 64;                                                                              \
    }                                                                                              \
    __m512 unit = _mm512_mul_ps(shared, UNSIGNED(scales)),                                         \
           least = _mm512_mul_ps(shared_least, UNSIGNED(scales + 16));                             \
    FETCH_SCALES(0)                                                                                \
    scales += 32;

#define TOTAL(n) __m512 total##n = _mm512_setzero_ps();
#define ZERO(n) __m512i a##n = _mm512_setzero_si512();
#define START(n) __m512i a##n = _mm512_set1_epi32(((const int32_t *)start)[n]);
#define REST(n) __m512i b##n = _mm512_setzero_si512();
#define DOT_PAIR(n) DOT(a##n, w, x[n]) DOT(a##n, v, x[n + lanes])
#define DOT_APART(n) DOT(a##n, w, x[n]) DOT(b##n, v, x[n + lanes])
#define JOIN(n) a##n = _mm512_add_epi32(a##n, b##n);
#define ADD_SUM(n)                                                                                 \
    total##n = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a##n),                                           \
                               _mm512_mul_ps(unit, _mm512_set1_ps(row_scales[n])), total##n);
#define ADD_BLOCK_LEAST(n)                                                                         \
    ADD_SUM(n)                                                                                     \
    total##n = _mm512_fmadd_ps(least, _mm512_set1_ps(((const float *)start)[n]), total##n);
#define KEEP(n) _mm512_storeu_ps(to + (long)(n) * stride, total##n);

// Two lines of a block for all rows. FEW: two sums a row, as one would wait for its own last step.
#define STEP_MANY(ROWS, BITS, j)                                                                   \
    {                                                                                              \
        PAIR_##BITS(j) N_##ROWS(DOT_PAIR) x += 2 * lanes;                                          \
    }
#define STEP_FEW(ROWS, BITS, j)                                                                    \
    {                                                                                              \
        PAIR_##BITS(j) N_##ROWS(DOT_APART) x += 2 * lanes;                                         \
    }
#define BEGIN_MANY(ROWS, FIRST) N_##ROWS(FIRST)
#define BEGIN_FEW(ROWS, FIRST) N_##ROWS(FIRST) N_##ROWS(REST)
#define END_MANY(ROWS)
#define END_FEW(ROWS) N_##ROWS(JOIN)
#define FETCH_BLOCK(LINES)                                                                         \
    for (int line = 0; line < LINES; line++, k++)                                                  \
        _mm_prefetch((k < ahead->own ? ahead->here : ahead->next) + k * ahead->stride, _MM_HINT_T1);

// A block, by how its zero enters.
#define BLOCK_WITH(ROWS, BITS, MANY, UNITS, FIRST, ADD)                                            \
    BEGIN_##MANY(ROWS, FIRST) STEP_##MANY(ROWS, BITS, 0) STEP_##MANY(ROWS, BITS, 1)                \
        STEP_##MANY(ROWS, BITS, 2) STEP_##MANY(ROWS, BITS, 3) END_##MANY(ROWS)                     \
            UNITS_##UNITS N_##ROWS(ADD) start += 4 * lanes;
#define BLOCK_START(ROWS, BITS, MANY) BLOCK_WITH(ROWS, BITS, MANY, SCALE, START, ADD_SUM)
#define BLOCK_LEAST(ROWS, BITS, MANY) BLOCK_WITH(ROWS, BITS, MANY, LEAST, ZERO, ADD_BLOCK_LEAST)
#define BLOCK_FACTORS(ROWS, BITS, MANY) BLOCK_WITH(ROWS, BITS, MANY, FACTORS, ZERO, ADD_BLOCK_LEAST)
#define HALF_BLOCK(ROWS, BITS, MANY, EARLY, LATE, AT)                                              \
    {                                                                                              \
        BEGIN_##MANY(ROWS, START) STEP_##MANY(ROWS, BITS, EARLY) STEP_##MANY(ROWS, BITS, LATE)     \
            END_##MANY(ROWS) __m512 unit = _mm512_mul_ps(shared, SIGNED(scales + AT));             \
        N_##ROWS(ADD_SUM) start += 4 * lanes;                                                      \
    }
#define BLOCK_HALVES(ROWS, BITS, MANY)                                                             \
    if (b % 8 == 0) {                                                                              \
        shared = HALVES(scales);                                                                   \
        scales += 32;                                                                              \
    }                                                                                              \
    FETCH_SCALES(0)                                                                                \
    HALF_BLOCK(ROWS, BITS, MANY, 0, 1, 0) HALF_BLOCK(ROWS, BITS, MANY, 2, 3, 16) scales += 32;

#define PASS(NAME, ROWS, BITS, LINES, MANY, KIND)                                                  \
    static void NAME##_##ROWS(const char *weight, const char *scales, const int32_t *x,            \
                              const float *row_scales, const char *start, long blocks,             \
                              const Ahead *ahead, float *to, long stride) {                        \
        const long lanes = ROWS;                                                                   \
        __m512 shared = _mm512_setzero_ps(), shared_least = shared;                                \
        (void)shared_least;                                                                        \
        (void)shared;                                                                              \
        long k = 0;                                                                                \
        N_##ROWS(TOTAL) for (long b = 0; b < blocks; b++) {                                        \
            FETCH_BLOCK(LINES)                                                                     \
            BLOCK_##KIND(ROWS, BITS, MANY) weight += LINES * LINE_BYTES;                           \
            row_scales += lanes;                                                                   \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
typedef void (*Pass)(const char *, const char *, const int32_t *, const float *, const char *, long,
                     const Ahead *, float *, long);

// Passes of a format for 1, 2, … 12 rows, and the product that takes the right one.
#define FORMAT(NAME, BITS, LINES, KIND, START_KIND)                                                \
    PASS(NAME, 1, BITS, LINES, FEW, KIND)                                                          \
    PASS(NAME, 2, BITS, LINES, FEW, KIND)                                                          \
    PASS(NAME, 3, BITS, LINES, FEW, KIND)                                                          \
    PASS(NAME, 4, BITS, LINES, FEW, KIND)                                                          \
    PASS(NAME, 5, BITS, LINES, MANY, KIND)                                                         \
    PASS(NAME, 6, BITS, LINES, MANY, KIND)                                                         \
    PASS(NAME, 7, BITS, LINES, MANY, KIND)                                                         \
    PASS(NAME, 8, BITS, LINES, MANY, KIND)                                                         \
    PASS(NAME, 9, BITS, LINES, MANY, KIND)                                                         \
    PASS(NAME, 10, BITS, LINES, MANY, KIND)                                                        \
    PASS(NAME, 11, BITS, LINES, MANY, KIND)                                                        \
    PASS(NAME, 12, BITS, LINES, MANY, KIND)                                                        \
    static void NAME(const Column *column, const ByteRows *x, long blocks, const Ahead *ahead,     \
                     float *to, long stride) {                                                     \
        static const Pass passes[LANES_512 + 1] = {                                                \
            NULL,     NAME##_1, NAME##_2, NAME##_3,  NAME##_4,  NAME##_5,  NAME##_6,               \
            NAME##_7, NAME##_8, NAME##_9, NAME##_10, NAME##_11, NAME##_12,                         \
        };                                                                                         \
        passes[x->lanes](column->weight, column->scale, x->words, x->scales, x->start[START_KIND], \
                         blocks, ahead, to, stride);                                               \
    }
FORMAT(q8_0, 8, 8, START, START_128)
FORMAT(q4_0, 4, 4, START, START_8)
FORMAT(q4_1, 4, 4, LEAST, SCALED_SUM)
FORMAT(q5_0, 5, 5, START, START_16)
FORMAT(q5_1, 5, 5, LEAST, SCALED_SUM)
FORMAT(q4_k, 4, 4, FACTORS, SCALED_SUM)
FORMAT(q5_k, 5, 5, FACTORS, SCALED_SUM)
FORMAT(q6_k, 6, 6, HALVES, START_HALVES)

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
            size[i] = i < vectors ? AND(_mm512_loadu_si512(x + begin + 16 * i),
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

const Bytes avx512_vnni_bytes = {
    LANES_512,
    quantise,
    {[WEIGHTS_Q8_0] = q8_0,
     [WEIGHTS_Q4_0] = q4_0,
     [WEIGHTS_Q4_1] = q4_1,
     [WEIGHTS_Q5_0] = q5_0,
     [WEIGHTS_Q5_1] = q5_1,
     [WEIGHTS_Q4_K] = q4_k,
     [WEIGHTS_Q5_K] = q5_k,
     [WEIGHTS_Q6_K] = q6_k},
};
