// Fixed-point products with 512-bit registers: one line of weights (16 outputs, a pair of inputs)
// meets up to 24 rows, whose sums all stay in registers. So 24 rows read the weights only once.
//
// A tile's rows are stored pair by pair, [in / 2][lanes][2], so one address serves them all:
//
//   | r0i0 r0i1 r1i0 r1i1 … |   r: row, i: input
//   | r0i2 r0i3 r1i2 r1i3 … |
//   …
#ifndef MULTIRATE_FIXED_AVX512_H
#define MULTIRATE_FIXED_AVX512_H
#include "fixed_rows.h"

#define FIXED_ROWS 24 // of a tile at most, in registers with their weights
#define SHORT_WEIGHTS 1

// Tiles of 1, 2, … 12, 14, 16, … 24 lanes. N_r(F) writes F(0) … F(r − 1).
#define N_14(F) N_12(F) F(12) F(13)
#define N_16(F) N_14(F) F(14) F(15)
#define N_18(F) N_16(F) F(16) F(17)
#define N_20(F) N_18(F) F(18) F(19)
#define N_22(F) N_20(F) F(20) F(21)
#define N_24(F) N_22(F) F(22) F(23)

static int fixed_lanes(int rows) {
    return rows <= 12 ? rows : (rows + 1) / 2 * 2;
}

// Four rows from [4][16 pairs] to [16 pairs][4], the pairs `lanes` words apart.
INLINE void arrange_four(const int32_t *const *rows, long k, int32_t *to, long lanes) {
    __m512i a = _mm512_loadu_si512(rows[0] + k), b = _mm512_loadu_si512(rows[1] + k),
            c = _mm512_loadu_si512(rows[2] + k), d = _mm512_loadu_si512(rows[3] + k);
    __m512i ab = _mm512_unpacklo_epi32(a, b), AB = _mm512_unpackhi_epi32(a, b),
            cd = _mm512_unpacklo_epi32(c, d), CD = _mm512_unpackhi_epi32(c, d);
    __m512i each[4] = {_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd),
                       _mm512_unpacklo_epi64(AB, CD), _mm512_unpackhi_epi64(AB, CD)};
    for (int j = 0; j < 4; j++, to += lanes) {
        _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128(each[j]));
        _mm_storeu_si128((__m128i *)(to + 4 * lanes), _mm512_extracti32x4_epi32(each[j], 1));
        _mm_storeu_si128((__m128i *)(to + 8 * lanes), _mm512_extracti32x4_epi32(each[j], 2));
        _mm_storeu_si128((__m128i *)(to + 12 * lanes), _mm512_extracti32x4_epi32(each[j], 3));
    }
}

static void fixed_arrange(const int16_t *const *rows, int count, int in, int16_t *to) {
    long lanes = fixed_lanes(count), pairs = in / 2;
    int32_t *words = (int32_t *)to;
    // the last four first: where there are fewer, what is written behind a pair's lanes is the next
    // one's beginning, which the first four then write
    for (int n = (count - 1) / 4 * 4; n >= 0; n -= 4) {
        int left = count - n < 4 ? count - n : 4, wide = lanes - n < 4 ? (int)lanes - n : 4;
        const int32_t *from[4];
        for (int j = 0; j < 4; j++) // lanes beyond the last row repeat it, and are not read
            from[j] = (const int32_t *)rows[n + (j < left ? j : left - 1)];
        long k = 0;
        if (lanes >= 4)
            for (; k + 16 <= pairs; k += 16)
                arrange_four(from, k, words + k * lanes + n, lanes);
        for (; k < pairs; k++)
            for (int j = 0; j < wide; j++)
                words[k * lanes + n + j] = from[j][k];
    }
}

// What codes of four bits stand for: powers of two, and the same of negative weights; twice.
#define POWERS(sign) sign 1, sign 2, sign 4, sign 8, sign 16, sign 32, sign 64, sign 128
static const int16_t INT12_POWERS[32]
    __attribute__((aligned(64))) = {POWERS(+), POWERS(-), POWERS(+), POWERS(-)};

// In assembly because compilers load rows apart from the products, or all of them before.
#ifdef __AVX512VNNI__
#define DOT(n, acc, w, word)                                                                       \
    asm("vpdpwssd %[x]%{1to16%}, %[v], %[a]" : [a] "+v"(acc##n) : [v] "v"(w), [x] "m"((word)[n]));
#else
#define DOT(n, acc, w, word)                                                                       \
    {                                                                                              \
        __m512i t;                                                                                 \
        asm("vpbroadcastd %[x], %[t]\n\tvpmaddwd %[t], %[v], %[t]\n\tvpaddd %[t], %[a], %[a]"      \
            : [a] "+v"(acc##n), [t] "=&v"(t)                                                       \
            : [v] "v"(w), [x] "m"((word)[n]));                                                     \
    }
#endif
#define ZERO(n) __m512i a##n = _mm512_setzero_si512();
#define ZERO_TWICE(n) __m512i a##n = _mm512_setzero_si512(), b##n = a##n;
#define DOT_A(n) DOT(n, a, w, x)
#define DOT_B(n) DOT(n, b, v, x + lanes)
#define JOIN(n) a##n = _mm512_add_epi32(a##n, b##n);
#define KEEP(n) _mm512_storeu_ps(to + (long)n * stride, _mm512_cvtepi32_ps(a##n));

#define LINE(k) _mm512_load_si512((const char *)weight + (k) * 64)

// 16 outputs for ROWS rows, one line of weights a step.
#define PASS(NAME, ROWS, WEIGHTS)                                                                  \
    static void NAME##_##ROWS(const void *weight, const int32_t *x, long pairs,                    \
                              const Ahead *fetched, float *to, long stride) {                      \
        const long lanes = ROWS;                                                                   \
        N_##ROWS(ZERO) for (long k = 0; k < pairs; k++, x += lanes) {                              \
            FETCH(k)                                                                               \
            __m512i w = WEIGHTS(k);                                                                \
            N_##ROWS(DOT_A)                                                                        \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
// The same for few rows: two lines a step, as one sum would wait for its own last step.
#define PASS_TWICE(NAME, ROWS, WEIGHTS)                                                            \
    static void NAME##_##ROWS(const void *weight, const int32_t *x, long pairs,                    \
                              const Ahead *fetched, float *to, long stride) {                      \
        const long lanes = ROWS;                                                                   \
        long k = 0;                                                                                \
        N_##ROWS(ZERO_TWICE) for (; k + 2 <= pairs; k += 2, x += 2 * lanes) {                      \
            FETCH(k)                                                                               \
            FETCH(k + 1)                                                                           \
            __m512i w = WEIGHTS(k), v = WEIGHTS(k + 1);                                            \
            N_##ROWS(DOT_A) N_##ROWS(DOT_B)                                                        \
        }                                                                                          \
        if (k < pairs) {                                                                           \
            __m512i w = WEIGHTS(k);                                                                \
            N_##ROWS(DOT_A)                                                                        \
        }                                                                                          \
        N_##ROWS(JOIN) N_##ROWS(KEEP)                                                              \
    }
#define PASSES(NAME, WEIGHTS)                                                                      \
    PASS_TWICE(NAME, 1, WEIGHTS)                                                                   \
    PASS_TWICE(NAME, 2, WEIGHTS)                                                                   \
    PASS_TWICE(NAME, 3, WEIGHTS)                                                                   \
    PASS_TWICE(NAME, 4, WEIGHTS)                                                                   \
    PASS(NAME, 5, WEIGHTS)                                                                         \
    PASS(NAME, 6, WEIGHTS)                                                                         \
    PASS(NAME, 7, WEIGHTS)                                                                         \
    PASS(NAME, 8, WEIGHTS)                                                                         \
    PASS(NAME, 9, WEIGHTS)                                                                         \
    PASS(NAME, 10, WEIGHTS)                                                                        \
    PASS(NAME, 11, WEIGHTS)                                                                        \
    PASS(NAME, 12, WEIGHTS)                                                                        \
    PASS(NAME, 14, WEIGHTS)                                                                        \
    PASS(NAME, 16, WEIGHTS)                                                                        \
    PASS(NAME, 18, WEIGHTS)                                                                        \
    PASS(NAME, 20, WEIGHTS)                                                                        \
    PASS(NAME, 22, WEIGHTS)                                                                        \
    PASS(NAME, 24, WEIGHTS)
PASSES(sixteen_bits, LINE)

// Four lines of WEIGHTS_INT12 from three. A code is the place in `powers` of what eight bits are
// multiplied by; vpermw takes it from the lowest five bits of a word, of which the fifth is the
// next line's: the table has each entry twice.
#define DECODED(bytes, code) _mm512_mullo_epi16(bytes, _mm512_permutexvar_epi16(code, powers))
#define LOWER(w) _mm512_and_si512(w, low_bytes)
#define UPPER(w) _mm512_srli_epi16(w, 8)
#define FOUR_LINES                                                                                 \
    __m512i early = LINE(0), late = LINE(1), codes = LINE(2), w0 = DECODED(LOWER(early), codes),   \
            w1 = DECODED(UPPER(early), _mm512_srli_epi16(codes, 4)),                               \
            w2 = DECODED(LOWER(late), _mm512_srli_epi16(codes, 8)),                                \
            w3 = DECODED(UPPER(late), _mm512_srli_epi16(codes, 12));
#define DOT_0(n) DOT(n, a, w0, x)
#define DOT_1(n) DOT(n, a, w1, x + lanes)
#define DOT_2(n) DOT(n, a, w2, x + 2 * lanes)
#define DOT_3(n) DOT(n, a, w3, x + 3 * lanes)
#define DOT_1B(n) DOT(n, b, w1, x + lanes)
#define DOT_3B(n) DOT(n, b, w3, x + 3 * lanes)
static void fixed_line_12(const void *weights, long line, int16_t *to) {
    const __m512i low_bytes = _mm512_set1_epi16(255), powers = _mm512_load_si512(INT12_POWERS);
    const char *weight = (const char *)weights + line / 4 * 192;
    __m512i bytes = LINE(line % 4 / 2), codes = LINE(2);
    bytes = line % 2 ? UPPER(bytes) : LOWER(bytes);
    codes = _mm512_srl_epi16(codes, _mm_cvtsi32_si128(4 * (int)(line % 4)));
    _mm512_storeu_si512(to, DECODED(bytes, codes));
}

// 16 outputs for ROWS rows, four lines of weights a step.
#define PASS_12(ROWS, BEGIN, DOTS_1, DOTS_3, END)                                                  \
    static void twelve_bits_##ROWS(const void *weights, const int32_t *x, long pairs,              \
                                   const Ahead *fetched, float *to, long stride) {                 \
        const long lanes = ROWS;                                                                   \
        const __m512i low_bytes = _mm512_set1_epi16(255),                                          \
                      powers = _mm512_load_si512(INT12_POWERS);                                    \
        const char *weight = weights;                                                              \
        N_##ROWS(BEGIN) for (long k = 0; k < pairs / 4 * 3; k += 3, weight += 192) {               \
            FETCH(k)                                                                               \
            FETCH(k + 1)                                                                           \
            FETCH(k + 2)                                                                           \
            FOUR_LINES                                                                             \
            N_##ROWS(DOT_0) N_##ROWS(DOTS_1) N_##ROWS(DOT_2) N_##ROWS(DOTS_3) x += 4 * lanes;      \
        }                                                                                          \
        N_##ROWS(END) N_##ROWS(KEEP)                                                               \
    }
#define DONE(n)
#define PASS_12_ONCE(ROWS) PASS_12(ROWS, ZERO, DOT_1, DOT_3, DONE)
#define PASS_12_TWICE(ROWS) PASS_12(ROWS, ZERO_TWICE, DOT_1B, DOT_3B, JOIN)
PASS_12_TWICE(1)
PASS_12_TWICE(2)
PASS_12_TWICE(3)
PASS_12_TWICE(4)
PASS_12_ONCE(5)
PASS_12_ONCE(6)
PASS_12_ONCE(7)
PASS_12_ONCE(8)
PASS_12_ONCE(9)
PASS_12_ONCE(10)
PASS_12_ONCE(11)
PASS_12_ONCE(12)
PASS_12_ONCE(14)
PASS_12_ONCE(16)
PASS_12_ONCE(18)
PASS_12_ONCE(20)
PASS_12_ONCE(22)
PASS_12_ONCE(24)

typedef void (*Pass)(const void *, const int32_t *, long, const Ahead *, float *, long);
#define OF_LANES(NAME)                                                                             \
    {NULL,                                                                                         \
     NAME##_1,                                                                                     \
     NAME##_2,                                                                                     \
     NAME##_3,                                                                                     \
     NAME##_4,                                                                                     \
     NAME##_5,                                                                                     \
     NAME##_6,                                                                                     \
     NAME##_7,                                                                                     \
     NAME##_8,                                                                                     \
     NAME##_9,                                                                                     \
     NAME##_10,                                                                                    \
     NAME##_11,                                                                                    \
     NAME##_12,                                                                                    \
     [14] = NAME##_14,                                                                             \
     [16] = NAME##_16,                                                                             \
     [18] = NAME##_18,                                                                             \
     [20] = NAME##_20,                                                                             \
     [22] = NAME##_22,                                                                             \
     [24] = NAME##_24}
static const Pass passes[2][FIXED_ROWS + 1] = {OF_LANES(sixteen_bits), OF_LANES(twelve_bits)};

static void fixed_tile(const void *weight, int format, const int16_t *rows, int count, int pairs,
                       const Ahead *ahead, float *to, int stride) {
    passes[format == WEIGHTS_INT12][fixed_lanes(count)](weight, (const int32_t *)rows, pairs, ahead,
                                                        to, stride);
}
#endif
