#include "format.h"

#include <math.h>
#include <string.h>

#define QUANTISED(NAME, BITS, START, ZERO, FACTORS, BYTES)                                         \
    [WEIGHTS_##NAME] = {ROWS_BYTES, FACTORS ? SUPER : BLOCK, BITS, START, ZERO, FACTORS, BYTES},

const Format formats[WEIGHT_FORMATS] = {
    [WEIGHTS_BF16] = {.rows = ROWS_FLOAT, .piece = 2, .bits = 16},
    [WEIGHTS_INT16] = {.rows = ROWS_FIXED, .piece = 2, .bits = 16},
    [WEIGHTS_INT12] = {.rows = ROWS_FIXED, .piece = 8, .bits = 12},
    QUANTISED_FORMATS(QUANTISED) // a row each
};

float from_fp16(fp16 half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31,
             mantissa = half & 0x3ff;
    union {
        uint32_t bits;
        float f;
    } out;
    if (exponent == 31)
        out.bits = sign | 0x7f800000u | mantissa << 13;
    else if (exponent)
        out.bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else {
        out.f = (float)mantissa * 0x1p-24f;
        out.bits |= sign;
    }
    return out.f;
}

fp16 to_fp16(float f) {
    union {
        float f;
        uint32_t bits;
    } in = {f};
    uint32_t sign = in.bits >> 16 & 0x8000, size = in.bits & 0x7fffffffu;
    if (size > 0x7f800000u)
        return (fp16)(sign | 0x7e00); // not a number
    if (size >= 0x477ff000u)
        return (fp16)(sign | 0x7c00); // rounds to infinity
    if (size < 0x38800000u) {         // below the normal numbers: steps of 2^-24
        in.bits = size;
        return (fp16)(sign | (uint32_t)lrintf(in.f * 0x1p24f));
    }
    uint32_t rounded = size + 0xfff + (size >> 13 & 1);
    return (fp16)(sign | (rounded - (112u << 23)) >> 13);
}

uint8_t byte_of_line(const Format *f, const uint8_t *lines, int k, int at) {
    if (f->bits == 8)
        return lines[k * LINE_BYTES + at];
    unsigned byte = lines[k / 2 * LINE_BYTES + at], four = k % 2 ? byte >> 4 : byte & 15;
    const uint8_t *more = lines + 4 * LINE_BYTES;
    if (f->bits == 5)
        four |= (more[at] >> k & 1u) << 4;
    if (f->bits == 6)
        four |= (more[k / 4 * LINE_BYTES + at] >> 2 * (k % 4) & 3u) << 4;
    return (uint8_t)four;
}

static float half_at(const uint8_t *from) {
    fp16 half;
    memcpy(&half, from, sizeof half);
    return from_fp16(half);
}

Units units_of(const Format *f, const uint8_t *scales, long b, int output) {
    const uint8_t *at = scales + scale_bytes(f, f->factors ? b / 8 * SUPER : b * BLOCK);
    size_t halves = COLUMN * sizeof(fp16);
    float scale = half_at(at + 2 * output), least = 0.0f;
    if (has_least(f))
        least = half_at(at + halves + 2 * output);
    if (!f->factors)
        return (Units){{scale, scale}, least};
    const uint8_t *bytes = at + halves * (has_least(f) ? 2 : 1) + b % 8 * 2 * COLUMN;
    if (has_least(f)) {
        float unit = scale * bytes[output];
        return (Units){{unit, unit}, -(least * bytes[COLUMN + output])};
    }
    const int8_t *factors = (const int8_t *)bytes;
    return (Units){{scale * factors[output], scale * factors[COLUMN + output]}, least};
}

FormatSizes mr_format_sizes(int format, int inputs) {
    const Format *f = format_of(format);
    size_t scales = is_quantised(f)         ? scale_bytes(f, inputs)
                    : f->rows == ROWS_FIXED ? COLUMN * sizeof(float)
                                            : 0;
    return (FormatSizes){(int64_t)column_bytes(f, inputs), (int64_t)scales,
                         (int64_t)inputs / f->piece * f->bytes, f->piece};
}

void mr_decode_output(const Linear *linear, int output, float *to) {
    Column column = column_of(linear, output / COLUMN);
    const Format *f = format_of(column.format);
    const uint8_t *lines = column.weight;
    output %= COLUMN;
    for (long b = 0; b < linear->inputs / BLOCK;
         b++, lines += column_bytes(f, BLOCK), to += BLOCK) {
        Units units = units_of(f, column.scale, b, output);
        for (int i = 0; i < BLOCK; i++) {
            int q = byte_of_line(f, lines, i / 4, 4 * output + i % 4) - f->zero;
            float w = units.unit[i / 16] * (float)q;
            to[i] = has_least(f) ? w + units.least : w;
        }
    }
}

void mr_column(const Linear *linear, int column, Column *to) {
    *to = column_of(linear, column);
}
