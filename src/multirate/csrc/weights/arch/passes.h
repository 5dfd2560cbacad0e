// Products with quantised weights, written once over registers that hold LANES outputs of a line,
// four inputs of each. A pass keeps a block's sums of a tile's rows in registers where they fit.
#ifndef MULTIRATE_PASSES_H
#define MULTIRATE_PASSES_H
#include "../../vectors/simd.h"
#include "../arch.h"

// Rows of a tile at most: each takes two registers, for its sums and totals or, where a pass has
// two registers of outputs, for its sums.
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

// Registers of outputs that a pass sums. With AVX2 alone it sums two, so it loads a row's inputs
// once for both.
#if LANES == 8 && !defined(__AVXVNNI__)
#define OUTPUT_REGISTERS 2
#else
#define OUTPUT_REGISTERS 1
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

#if OUTPUT_REGISTERS == 2
#include "avx2_products.h"
#else
#define SHORT_SUMS(bits) 0
INLINE iv whole_sum(iv sum, int bits) {
    (void)bits;
    return sum;
}

// For each row, adds w · the four inputs at x to `sum`, and v · the next four to `more`, or to
// `sum` if `more` is NULL. In assembly where compilers differ in how they are asked for the
// instruction, or load the inputs too early.
INLINE void add_products(int rows, iv (*sum)[OUTPUT_REGISTERS], iv *more, int bits, const Line *w,
                         const Line *v, const int32_t *x) {
    (void)bits;
    EACH (n, rows) {
        const int32_t *y = x + rows + n;
        iv *early = sum[n], *late = more ? &more[n] : early;
#if LANES == 16
        asm("vpdpbusd %[x]%{1to16%}, %[w], %[a]" : [a] "+v"(*early) : [w] "v"(*w), [x] "m"(x[n]));
        asm("vpdpbusd %[y]%{1to16%}, %[v], %[b]" : [b] "+v"(*late) : [v] "v"(*v), [y] "m"(*y));
#elif defined(__AVXVNNI__)
        *early = (iv)_mm256_dpbusd_avx_epi32((__m256i)*early, (__m256i)*w, _mm256_set1_epi32(x[n]));
        *late = (iv)_mm256_dpbusd_avx_epi32((__m256i)*late, (__m256i)*v, _mm256_set1_epi32(*y));
#else
        iv row = {x[n], x[n], x[n], x[n]}, next = {*y, *y, *y, *y};
        __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
                : "+w"(*early)
                : "w"(*w), "w"(row));
        __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
                : "+w"(*late)
                : "w"(*v), "w"(next));
#endif
    }
}
#endif

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

// OUTPUT_REGISTERS · LANES outputs from `first` on for the rows of a tile.
INLINE void pass(int rows, int bits, int start_kind, int factors, int first, const Column *column,
                 const ByteRows *x, long blocks, const Ahead *ahead, float *to, long stride) {
    const int halves = start_kind == START_HALVES ? 2 : 1, pairs = 4 / halves,
              has_least = start_kind == SCALED_SUM,
              starts = !has_least && !(bits == 8 && SIGNED_BYTES),
              other = LANES == 16 && rows <= 4; // two sums: one would wait for its own last step
    const int late_start = starts && SHORT_SUMS(bits); // 16 bits have no room for it
    const char *weight = (const char *)column->weight + 4 * first, *scales = column->scale;
    const int32_t *words = x->words, *start = x->start[start_kind];
    const float *row_scales = x->scales;
    BlockScales s[OUTPUT_REGISTERS] = {0};
    fv total[MOST_ROWS][OUTPUT_REGISTERS];
    EACH (n, rows)
        EACH (p, OUTPUT_REGISTERS)
            total[n][p] = all(0.0f);
    long line = 0;
    for (long b = 0; b < blocks; b++, weight += bits * LINE_BYTES) {
        if (LANES > 4 && !first) // not yet measured on Arm
            EACH (i, bits)
                fetch_line(ahead, line++, LANES == 8);
        const char *next = scales;
        EACH (p, OUTPUT_REGISTERS)
            next = next_scales(&s[p], scales, first + p * LANES, b, start_kind, factors);
        scales = next;
        if (LANES == 16)
            fetch(scales + 60 * 32, 0);
        EACH (half, halves) {
            iv sum[MOST_ROWS][OUTPUT_REGISTERS], more[MOST_ROWS];
            EACH (n, rows) {
                EACH (p, OUTPUT_REGISTERS)
                    sum[n][p] = starts && !late_start ? (iv){0} + start[n] : (iv){0};
                more[n] = (iv){0};
            }
            EACH (pair, pairs) {
                int k = 4 * half + 2 * pair;
                Line w[OUTPUT_REGISTERS], v[OUTPUT_REGISTERS];
                EACH (p, OUTPUT_REGISTERS) {
                    w[p] = line_of(weight + 4 * LANES * p, bits, k);
                    v[p] = line_of(weight + 4 * LANES * p, bits, k + 1);
                }
                add_products(rows, sum, other ? more : NULL, bits, w, v, words);
                words += 2 * rows;
            }
            EACH (n, rows)
                EACH (p, OUTPUT_REGISTERS) {
                    iv whole = other ? sum[n][p] + more[n] : whole_sum(sum[n][p], bits);
                    if (late_start)
                        whole += start[n];
                    total[n][p] = fma_v(__builtin_convertvector(whole, fv),
                                        s[p].unit[half] * all(row_scales[n]), total[n][p]);
                    if (has_least)
                        total[n][p] =
                            fma_v(s[p].least, all(((const float *)start)[n]), total[n][p]);
                }
            start += rows;
        }
        row_scales += rows;
    }
    EACH (n, rows)
        EACH (p, OUTPUT_REGISTERS)
            store_v(to + n * stride + first + p * LANES, total[n][p]);
}

#define PRODUCT(NAME, BITS, START, ZERO, FACTORS, BYTES)                                           \
    static void product_##NAME(const Column *column, const ByteRows *x, long blocks,               \
                               const Ahead *ahead, float *to, long stride) {                       \
        for (int first = 0; first < COLUMN; first += OUTPUT_REGISTERS * LANES)                     \
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
