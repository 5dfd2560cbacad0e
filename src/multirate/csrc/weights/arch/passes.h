// Products with quantised weights, written once over registers that hold LANES outputs of a line,
// four inputs of each. What a pass sums for the rows of a tile stays in registers.
#ifndef MULTIRATE_PASSES_H
#define MULTIRATE_PASSES_H
#include "../../vectors/simd.h"
#include "../arch.h"

// Rows of a tile at most: each takes two registers.
#if LANES == 16
#define MOST_ROWS 12
#elif LANES == 8
#define MOST_ROWS 6
#else
#define MOST_ROWS 8
#endif

// Whether a block's 8-bit weights are multiplied as signed bytes, without their zero of 128.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define SIGNED_BYTES 0
#else
#define SIGNED_BYTES 1
#endif

// Whether the products of a block are summed in 16 bits, each lane's even and odd inputs apart:
// vpmaddubsw gives such sums, and 16 products of 4-bit weights are 16 · 15 · 127 at most.
#if LANES == 8 && !defined(__AVXVNNI__)
#define SHORT_SUMS(bits) ((bits) == 4)
#else
#define SHORT_SUMS(bits) 0
#endif

typedef uint16_t Line __attribute__((vector_size(4 * LANES))); // bytes, moved in pairs

INLINE Line load_line(const char *from) {
    Line line;
    memcpy(&line, from, sizeof line);
    return line;
}

// The bits of `more` that `mask` has, moved to the left, beside those of `line`.
INLINE Line with_bits(Line line, Line more, int left, int mask) {
    more = left < 0 ? more >> -left : more << left;
#if LANES == 16
    return (Line)_mm512_ternarylogic_epi32((__m512i)line, (__m512i)more,
                                           _mm512_set1_epi8((char)mask), 0xf8); // a | (b & c)
#else
    return line | (more & (uint16_t)(mask * 257));
#endif
}

// Line k of a block (format.h draws them).
INLINE Line line_of(const char *block, int bits, int k) {
    if (bits == 8)
        return load_line(block + k * LINE_BYTES) ^ (SIGNED_BYTES ? 0x8080 : 0);
    Line two = load_line(block + k / 2 * LINE_BYTES), line = (k % 2 ? two >> 4 : two) & 0x0f0f;
    const char *more = block + 4 * LINE_BYTES;
    if (bits == 5)
        line = with_bits(line, load_line(more), 4 - k, 16);
    if (bits == 6)
        line = with_bits(line, load_line(more + k / 4 * LINE_BYTES), 4 - 2 * (k % 4), 48);
    return line;
}

// Of a row: *sum += w · the four inputs at x, and *other, which may be the same, += v · those at y.
// In assembly where compilers differ in how they are asked for the instruction, or load rows apart
// from the products or all of them before.
INLINE void add_products(iv *sum, iv *other, int bits, Line w, Line v, const int32_t *x,
                         const int32_t *y) {
    (void)bits;
#if LANES == 16
    asm("vpdpbusd %[x]%{1to16%}, %[w], %[a]" : [a] "+v"(*sum) : [w] "v"(w), [x] "m"(*x));
    asm("vpdpbusd %[y]%{1to16%}, %[v], %[b]" : [b] "+v"(*other) : [v] "v"(v), [y] "m"(*y));
#elif defined(__AVXVNNI__)
    (void)other;
    *sum = (iv)_mm256_dpbusd_avx_epi32((__m256i)*sum, (__m256i)w, _mm256_set1_epi32(*x));
    *sum = (iv)_mm256_dpbusd_avx_epi32((__m256i)*sum, (__m256i)v, _mm256_set1_epi32(*y));
#elif LANES == 8
    // vpmaddubsw adds two products of unsigned and signed bytes in 16 bits, where four of 6 bits
    // fit and two of 8 bits do not: those are split into their sizes and signs
    const __m256i ones = _mm256_set1_epi16(1), early = (__m256i)w, late = (__m256i)v;
    __m256i a, b;
    (void)other;
    if (bits == 8) {
        __m256i row = _mm256_set1_epi32(*x), next = _mm256_set1_epi32(*y);
        a = _mm256_maddubs_epi16(_mm256_abs_epi8(early), _mm256_sign_epi8(row, early));
        b = _mm256_maddubs_epi16(_mm256_abs_epi8(late), _mm256_sign_epi8(next, late));
        *sum += (iv)_mm256_madd_epi16(a, ones) + (iv)_mm256_madd_epi16(b, ones);
        return;
    }
#define MULTIPLY                                                                                   \
    "vpbroadcastd %[x], %[a]\n\tvpmaddubsw %[a], %[w], %[a]\n\t"                                   \
    "vpbroadcastd %[y], %[b]\n\tvpmaddubsw %[b], %[v], %[b]\n\t"
#define TERMS [w] "x"(early), [v] "x"(late), [x] "m"(*x), [y] "m"(*y)
    if (SHORT_SUMS(bits))
        asm(MULTIPLY "vpaddw %[a], %[sum], %[sum]\n\tvpaddw %[b], %[sum], %[sum]"
            : [sum] "+x"(*sum), [a] "=&x"(a), [b] "=&x"(b)
            : TERMS);
    else
        asm(MULTIPLY "vpaddw %[b], %[a], %[a]\n\tvpmaddwd %[a], %[one], %[a]\n\t"
                     "vpaddd %[a], %[sum], %[sum]"
            : [sum] "+x"(*sum), [a] "=&x"(a), [b] "=&x"(b)
            : TERMS, [one] "x"(ones));
#else
    iv row = {*x, *x, *x, *x}, next = {*y, *y, *y, *y};
    __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
            : "+w"(*sum)
            : "w"(w), "w"(row));
    __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
            : "+w"(*other)
            : "w"(v), "w"(next));
#endif
}

// A block's sums in 32 bits.
INLINE iv whole_sums(iv sum, int bits) {
#if LANES == 8
    if (SHORT_SUMS(bits))
        return (iv)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
    (void)bits;
    return sum;
}

INLINE fv halves_at(const char *from) {
#if LANES == 16
    return (fv)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (fv)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    float16x4_t halves;
    memcpy(&halves, from, sizeof halves);
    return (fv)vcvt_f32_f16(halves);
#endif
}
INLINE fv bytes_at(const char *from) {
#if LANES == 16
    iv whole = (iv)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    iv whole = (iv)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    uint32_t four;
    memcpy(&four, from, sizeof four);
    iv whole = (iv)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#endif
    return __builtin_convertvector(whole, fv);
}
INLINE fv signed_bytes_at(const char *from) {
#if LANES == 16
    iv whole = (iv)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    iv whole = (iv)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    uint32_t four;
    memcpy(&four, from, sizeof four);
    iv whole = (iv)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
#endif
    return __builtin_convertvector(whole, fv);
}

// What a block's sums (of each half, where these have their own starts) are multiplied by, and its
// least weights.
typedef struct {
    fv shared, shared_least; // K-quants' for eight blocks
    fv unit[2], least;
} BlockScales;

// Reads those of outputs from `first` on; returns where the next block's are.
INLINE const char *next_scales(BlockScales *s, const char *from, int first, long b, int start_kind,
                               int factors) {
    const int has_least = start_kind == SCALED_SUM;
    if (!factors) {
        s->unit[0] = halves_at(from + 2 * first);
        if (has_least)
            s->least = halves_at(from + 32 + 2 * first);
        return from + (has_least ? 64 : 32);
    }
    if (b % 8 == 0) {
        s->shared = halves_at(from + 2 * first);
        if (has_least)
            s->shared_least = -halves_at(from + 32 + 2 * first);
        from += has_least ? 64 : 32;
    }
    const char *late = from + 16 + first;
    if (has_least) {
        s->unit[0] = s->shared * bytes_at(from + first);
        s->least = s->shared_least * bytes_at(late);
    } else {
        s->unit[0] = s->shared * signed_bytes_at(from + first);
        s->unit[1] = s->shared * signed_bytes_at(late);
    }
    return from + 32;
}

// LANES outputs from `first` on for the rows of a tile.
INLINE void pass(int rows, int bits, int start_kind, int factors, int first, const Column *column,
                 const ByteRows *x, long blocks, const Ahead *ahead, float *to, long stride) {
    const int halves = start_kind == START_HALVES, has_least = start_kind == SCALED_SUM,
              starts = !has_least && !(bits == 8 && SIGNED_BYTES), late = SHORT_SUMS(bits),
              parts = halves ? 2 : 1, pairs = 4 / parts,
              other = LANES == 16 && rows <= 4; // two sums: one would wait for its own last step
    const char *weight = (const char *)column->weight + 4 * first, *scales = column->scale;
    const int32_t *words = x->words, *start = x->start[start_kind];
    const float *row_scales = x->scales;
    BlockScales s = {0};
    fv total[MOST_ROWS];
    EACH (n, rows)
        total[n] = all(0.0f);
    long line = 0;
    for (long b = 0; b < blocks; b++, weight += bits * LINE_BYTES) {
        if (LANES > 4 && !first) // not yet measured on Arm
            EACH (i, bits)
                fetch_line(ahead, line++, LANES == 8);
        scales = next_scales(&s, scales, first, b, start_kind, factors);
        if (LANES == 16)
            fetch(scales + 60 * 32, 0);
        EACH (half, parts) {
            iv sum[2][MOST_ROWS];
            EACH (n, rows)
                sum[0][n] = starts && !late ? (iv){0} + start[n] : (iv){0}, sum[1][n] = (iv){0};
            EACH (pair, pairs) {
                int k = 4 * half + 2 * pair;
                Line w = line_of(weight, bits, k), v = line_of(weight, bits, k + 1);
                EACH (n, rows)
                    add_products(&sum[0][n], &sum[other][n], bits, w, v, words + n,
                                 words + rows + n);
                words += 2 * rows;
            }
            EACH (n, rows) {
                iv whole = other ? sum[0][n] + sum[1][n] : whole_sums(sum[0][n], bits);
                if (starts && late)
                    whole += start[n];
                total[n] = fma_v(__builtin_convertvector(whole, fv),
                                 s.unit[half] * all(row_scales[n]), total[n]);
                if (has_least)
                    total[n] = fma_v(s.least, all(((const float *)start)[n]), total[n]);
            }
            start += rows;
        }
        row_scales += rows;
    }
    EACH (n, rows)
        store_v(to + n * stride + first, total[n]);
}

#define PRODUCT(NAME, BITS, START, ZERO, FACTORS, BYTES)                                           \
    static void product_##NAME(const Column *column, const ByteRows *x, long blocks,               \
                               const Ahead *ahead, float *to, long stride) {                       \
        for (int first = 0; first < COLUMN; first += LANES)                                        \
            switch (x->lanes) {                                                                    \
                CASES(pass, BITS, START, FACTORS, first, column, x, blocks, ahead, to, stride)     \
            }                                                                                      \
    }
#if LANES == 16
#define CASES CASES_TO_12
#elif LANES == 8
#define CASES CASES_TO_6
#else
#define CASES(...) CASES_TO_6(__VA_ARGS__) CASE(7, __VA_ARGS__) CASE(8, __VA_ARGS__)
#endif
QUANTISED_FORMATS(PRODUCT)

#define ENTRY(NAME, ...) [WEIGHTS_##NAME] = product_##NAME,
#define PRODUCTS {QUANTISED_FORMATS(ENTRY)}
#endif
