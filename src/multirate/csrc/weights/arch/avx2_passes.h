// Passes of 8 outputs with registers of 256 bits, for x86_avx2.c and x86_avx_vnni.c, which define
// ADD_PAIR(n) and ADD_PAIR_8(n): what lines w and v (8 outputs, 4 inputs each) add to a##n.
#include <immintrin.h>

#include "../arch.h"
#include "rows_of_tile.h"

#define LANES_256 6 // rows of a tile at most: each takes two of 16 registers

#define LINE(k) _mm256_loadu_si256((const __m256i *)(weight + (k) * LINE_BYTES))
#define LOWER(w) _mm256_and_si256(w, _mm256_set1_epi8(15))
#define UPPER(w) LOWER(_mm256_srli_epi16(w, 4))
#define WITH_BITS(byte, more, mask)                                                                \
    _mm256_or_si256(byte, _mm256_and_si256(more, _mm256_set1_epi8(mask)))
#define UP(v, bits) _mm256_slli_epi16(v, bits)
#define DOWN(v, bits) _mm256_srli_epi16(v, bits)
#define WORD(at) _mm256_set1_epi32(at)

#define REGISTER __m256i
#include "pairs_of_lines.h"

#define HALVES(at) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at)))
#define UNSIGNED(at)                                                                               \
    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at))))
#define SIGNED(at) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at))))

// A block's unit and least weights, and on to the next ones.
#define UNITS_SCALE                                                                                \
    __m256 unit = HALVES(scales + 2 * first);                                                      \
    scales += 32;
#define UNITS_LEAST                                                                                \
    __m256 unit = HALVES(scales + 2 * first), least = HALVES(scales + 32 + 2 * first);             \
    scales += 64;
#define UNITS_FACTORS                                                                              \
    if (b % 8 == 0) {                                                                              \
        shared = HALVES(scales + 2 * first);                                                       \
        shared_least = _mm256_sub_ps(_mm256_setzero_ps(), HALVES(scales + 32 + 2 * first));        \
        scales += 64;                                                                              \
    }                                                                                              \
    __m256 unit = _mm256_mul_ps(shared, UNSIGNED(scales + first)),                                 \
           least = _mm256_mul_ps(shared_least, UNSIGNED(scales + 16 + first));                     \
    scales += 32;

#define TOTAL(n) __m256 total##n = _mm256_setzero_ps();
#define ZERO(n) __m256i a##n = _mm256_setzero_si256();
#define START(n) __m256i a##n = WORD(((const int32_t *)start)[n]);
#define ADD_PAIR_4 ADD_PAIR
#define ADD_PAIR_5 ADD_PAIR
#define ADD_PAIR_6 ADD_PAIR
#define ADD_SUM(n)                                                                                 \
    total##n = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a##n),                                           \
                               _mm256_mul_ps(unit, _mm256_set1_ps(row_scales[n])), total##n);
#define ADD_BLOCK_LEAST(n)                                                                         \
    ADD_SUM(n)                                                                                     \
    total##n = _mm256_fmadd_ps(least, _mm256_set1_ps(((const float *)start)[n]), total##n);
#define KEEP(n) _mm256_storeu_ps(to + (long)(n) * stride, total##n);

#define STEP(ROWS, BITS, j)                                                                        \
    {                                                                                              \
        PAIR_##BITS(j) N_##ROWS(ADD_PAIR_##BITS) x += 2 * lanes;                                   \
    }
#define FETCH_BLOCK(LINES)                                                                         \
    if (first == 0)                                                                                \
        for (int line = 0; line < LINES; line++, k++)                                              \
            _mm_prefetch((k < ahead->own ? ahead->here : ahead->next) + k * ahead->stride,         \
                         _MM_HINT_T0);

// A block, by how its zero enters.
#define BLOCK_WITH(ROWS, BITS, UNITS, BEGIN, ADD)                                                  \
    N_##ROWS(BEGIN) STEP(ROWS, BITS, 0) STEP(ROWS, BITS, 1) STEP(ROWS, BITS, 2)                    \
        STEP(ROWS, BITS, 3) UNITS_##UNITS N_##ROWS(ADD) start += 4 * lanes;
#define BLOCK_START(ROWS, BITS) BLOCK_WITH(ROWS, BITS, SCALE, START, ADD_SUM)
#define BLOCK_LEAST(ROWS, BITS) BLOCK_WITH(ROWS, BITS, LEAST, ZERO, ADD_BLOCK_LEAST)
#define BLOCK_FACTORS(ROWS, BITS) BLOCK_WITH(ROWS, BITS, FACTORS, ZERO, ADD_BLOCK_LEAST)
#define HALF_BLOCK(ROWS, BITS, EARLY, LATE, AT)                                                    \
    {                                                                                              \
        N_##ROWS(START) STEP(ROWS, BITS, EARLY) STEP(ROWS, BITS, LATE) __m256 unit =               \
            _mm256_mul_ps(shared, SIGNED(scales + AT + first));                                    \
        N_##ROWS(ADD_SUM) start += 4 * lanes;                                                      \
    }
#define BLOCK_HALVES(ROWS, BITS)                                                                   \
    if (b % 8 == 0) {                                                                              \
        shared = HALVES(scales + 2 * first);                                                       \
        scales += 32;                                                                              \
    }                                                                                              \
    HALF_BLOCK(ROWS, BITS, 0, 1, 0) HALF_BLOCK(ROWS, BITS, 2, 3, 16) scales += 32;

#define PASS(NAME, ROWS, BITS, LINES, KIND)                                                        \
    static void NAME##_##ROWS(const char *weight, const char *scales, const int32_t *x,            \
                              const float *row_scales, const char *start, long blocks, int first,  \
                              const Ahead *ahead, float *to, long stride) {                        \
        const long lanes = ROWS;                                                                   \
        __m256 shared = _mm256_setzero_ps(), shared_least = shared;                                \
        (void)shared_least;                                                                        \
        (void)shared;                                                                              \
        long k = 0;                                                                                \
        N_##ROWS(TOTAL) for (long b = 0; b < blocks; b++) {                                        \
            FETCH_BLOCK(LINES)                                                                     \
            BLOCK_##KIND(ROWS, BITS) weight += LINES * LINE_BYTES;                                 \
            row_scales += lanes;                                                                   \
        }                                                                                          \
        N_##ROWS(KEEP)                                                                             \
    }
typedef void (*Pass)(const char *, const char *, const int32_t *, const float *, const char *, long,
                     int, const Ahead *, float *, long);

// Passes of a format for 1, 2, … 6 rows, and the product: the first 8 outputs, then the others.
#define FORMAT(NAME, BITS, LINES, KIND, START_KIND)                                                \
    PASS(NAME, 1, BITS, LINES, KIND)                                                               \
    PASS(NAME, 2, BITS, LINES, KIND)                                                               \
    PASS(NAME, 3, BITS, LINES, KIND)                                                               \
    PASS(NAME, 4, BITS, LINES, KIND)                                                               \
    PASS(NAME, 5, BITS, LINES, KIND)                                                               \
    PASS(NAME, 6, BITS, LINES, KIND)                                                               \
    static void NAME(const Column *column, const ByteRows *x, long blocks, const Ahead *ahead,     \
                     float *to, long stride) {                                                     \
        static const Pass passes[LANES_256 + 1] = {NULL,     NAME##_1, NAME##_2, NAME##_3,         \
                                                   NAME##_4, NAME##_5, NAME##_6};                  \
        for (int first = 0; first < COLUMN; first += 8)                                            \
            passes[x->lanes]((const char *)column->weight + 4 * first, column->scale, x->words,    \
                             x->scales, x->start[START_KIND], blocks, first, ahead, to + first,    \
                             stride);                                                              \
    }
// All but Q8_0.
#define FORMATS                                                                                    \
    FORMAT(q4_0, 4, 4, START, START_8)                                                             \
    FORMAT(q4_1, 4, 4, LEAST, SCALED_SUM)                                                          \
    FORMAT(q5_0, 5, 5, START, START_16)                                                            \
    FORMAT(q5_1, 5, 5, LEAST, SCALED_SUM)                                                          \
    FORMAT(q4_k, 4, 4, FACTORS, SCALED_SUM)                                                        \
    FORMAT(q5_k, 5, 5, FACTORS, SCALED_SUM)                                                        \
    FORMAT(q6_k, 6, 6, HALVES, START_HALVES)
#define PRODUCTS                                                                                   \
    {[WEIGHTS_Q8_0] = q8_0, [WEIGHTS_Q4_0] = q4_0, [WEIGHTS_Q4_1] = q4_1, [WEIGHTS_Q5_0] = q5_0,   \
     [WEIGHTS_Q5_1] = q5_1, [WEIGHTS_Q4_K] = q4_k, [WEIGHTS_Q5_K] = q5_k, [WEIGHTS_Q6_K] = q6_k}

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
