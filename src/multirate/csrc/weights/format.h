// Every format of packed weights: one row of a table (format.c) each.
//
// Outputs come in columns of 16 and groups of 64. A column of quantised weights holds, for every 32
// inputs, the lines of 64 bytes that a processor multiplies: 16 outputs × 4 inputs of unsigned
// bytes, or several such lines squeezed into fewer:
//
//   8 bits  8 lines, line k: | o0i4k o0i4k+1 o0i4k+2 o0i4k+3  o1i4k … o15i4k+3 |
//   4 bits  4 lines, line j: line 2j of these in the lower halves of the bytes, 2j + 1 in the upper
//   5 bits  those 4, and one with the fifth bits: those of line k are bit k of each byte
//   6 bits  those 4, and two with bits 5 and 6: those of line k are bits 2k and 2k + 1 of each byte
//           of the first, or, from line 4 on, bits 2(k − 4) and 2(k − 4) + 1 of the second
//
// Beside them are the scales, in fp16 and bytes, 16 outputs of each:
//
//   Q8_0, Q4_0, Q5_0   scale, for each 32 inputs
//   Q4_1, Q5_1         scale, least
//   Q4_K, Q5_K         for each 256 inputs: scale, least; 8 × (factors, least factors) in bytes
//   Q6_K               for each 256 inputs: scale; 8 × (factors of the first and last 16) in bytes
//
// Integer and bf16 weights are drawn in fixed_point.c and gemm.c.
#ifndef MULTIRATE_FORMAT_H
#define MULTIRATE_FORMAT_H
#include <stddef.h>

#include "../include/model.h"

typedef uint16_t fp16;

#define BLOCK 32  // inputs that share a scale
#define SUPER 256 // inputs of a K-quant's block
#define COLUMN 16
#define LINE_BYTES 64

// What a row of inputs becomes before it is multiplied.
enum { ROWS_FLOAT, ROWS_FIXED, ROWS_BYTES, ROW_KINDS };

// How the zero of quantised weights enters a block's sum: as a start of −zero · Σ x, or, of Q6_K,
// as one for each 16 inputs; formats with a least weight add least · Σ x instead.
enum { START_8, START_16, START_128, START_HALVES, SCALED_SUM, START_KINDS };

// The quantised formats: bits of a weight, how its zero enters, the zero, whether K-quant factors
// multiply the scales, and the bytes of a block in a GGUF file.
#define QUANTISED_FORMATS(F)                                                                       \
    F(Q8_0, 8, START_128, 128, 0, 34)                                                              \
    F(Q4_0, 4, START_8, 8, 0, 18)                                                                  \
    F(Q4_1, 4, SCALED_SUM, 0, 0, 20)                                                               \
    F(Q5_0, 5, START_16, 16, 0, 22)                                                                \
    F(Q5_1, 5, SCALED_SUM, 0, 0, 24)                                                               \
    F(Q4_K, 4, SCALED_SUM, 0, 1, 144)                                                              \
    F(Q5_K, 5, SCALED_SUM, 0, 1, 176)                                                              \
    F(Q6_K, 6, START_HALVES, 32, 1, 210)

typedef struct {
    int rows;          // ROWS_…
    int piece;         // a layer's inputs are a multiple of this
    int bits;          // of a weight, without its scales
    int start;         // START_…, of quantised weights
    int zero, factors; // whether K-quant factors multiply the scales
    int bytes;         // of a block of `piece` inputs in a GGUF file
} Format;

extern const Format formats[WEIGHT_FORMATS];

static inline const Format *format_of(int format) {
    return &formats[format];
}
static inline int is_quantised(const Format *f) {
    return f->rows == ROWS_BYTES;
}
static inline int has_least(const Format *f) {
    return f->start == SCALED_SUM;
}

// Bytes of a column's weights, and of the scales of quantised ones.
static inline size_t column_bytes(const Format *f, long inputs) {
    return (size_t)inputs * COLUMN * f->bits / 8;
}
static inline size_t scale_bytes(const Format *f, long inputs) {
    size_t halves = (has_least(f) ? 2 : 1) * COLUMN * sizeof(fp16);
    return f->factors ? (size_t)inputs / SUPER * (halves + SUPER / BLOCK * 2 * COLUMN)
                      : (size_t)inputs / BLOCK * halves;
}

// The packed outputs from 16 · column on; scale: NULL for bf16 weights.
static inline Column column_of(const Linear *linear, int column) {
    if (linear->columns)
        return linear->columns[column];
    const Format *f = format_of(linear->format);
    size_t scales = is_quantised(f) ? scale_bytes(f, linear->inputs) : COLUMN * sizeof(float),
           bytes = column_bytes(f, linear->inputs), at = column * bytes;
    if (f->rows == ROWS_FLOAT) // the lines of a group's four columns take turns
        at = column / 4 * 4 * bytes + column % 4 * LINE_BYTES;
    return (Column){
        (const char *)linear->weight + at,
        linear->scale ? (const char *)linear->scale + column * scales : NULL,
        linear->format,
    };
}

// fp16 and fp32, rounded to nearest even.
float from_fp16(fp16 half);
fp16 to_fp16(float f);

// Byte `at` of line k of a column's 32 inputs, as it is multiplied.
uint8_t byte_of_line(const Format *f, const uint8_t *lines, int k, int at);

// What the sums of an output's 32 inputs from 32 · b on are multiplied by, the first 16 and the
// last 16, and its least weight.
typedef struct {
    float unit[2], least;
} Units;
Units units_of(const Format *f, const uint8_t *scales, long b, int output);
#endif
