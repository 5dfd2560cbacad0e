// Quantised weights with NEON and its dot products: 16 bytes of a line (4 outputs, 4 inputs each)
// meet a word of each row in one instruction.
#include "../arch.h"

#include <arm_neon.h>

#define LANES_NEON 8 // rows of a tile at most: each takes two of 32 registers

typedef enum { SCALE, LEAST, FACTORS, HALVES } Kind; // how a block's scales lie

// Line k of a block, 4 of its outputs, as bytes. Those of Q8_0 have no zero then.
static inline __attribute__((always_inline)) int8x16_t line_of(const uint8_t *block, int bits,
                                                               int k) {
    if (bits == 8)
        return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(block + k * LINE_BYTES), vdupq_n_u8(128)));
    uint8x16_t two = vld1q_u8(block + k / 2 * LINE_BYTES),
               line = k % 2 ? vshrq_n_u8(two, 4) : vandq_u8(two, vdupq_n_u8(15));
    if (bits == 5) {
        uint8x16_t more = vld1q_u8(block + 4 * LINE_BYTES);
        line =
            vorrq_u8(line, vandq_u8(vshlq_u8(more, vdupq_n_s8((int8_t)(4 - k))), vdupq_n_u8(16)));
    }
    if (bits == 6) {
        uint8x16_t more = vld1q_u8(block + (4 + k / 4) * LINE_BYTES);
        line = vorrq_u8(
            line, vandq_u8(vshlq_u8(more, vdupq_n_s8((int8_t)(4 - 2 * (k % 4)))), vdupq_n_u8(48)));
    }
    return vreinterpretq_s8_u8(line);
}

static inline float32x4_t halves_at(const uint8_t *from) {
    float16x4_t halves;
    memcpy(&halves, from, sizeof halves);
    return vcvt_f32_f16(halves);
}
static inline float32x4_t bytes_at(const uint8_t *from) {
    uint32_t four;
    memcpy(&four, from, sizeof four);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
static inline float32x4_t signed_bytes_at(const uint8_t *from) {
    uint32_t four;
    memcpy(&four, from, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}

// In assembly, as compilers differ in how they are asked for the instruction.
static inline int32x4_t dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
    __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
}

// Adds lines [from, to) of a block to sums, for each row.
static inline __attribute__((always_inline)) void add_lines(const uint8_t *block, int bits,
                                                            int from, int to, const int32_t *words,
                                                            int rows, int32x4_t *sums) {
    for (int k = from; k < to; k++) {
        int8x16_t line = line_of(block, bits, k);
        for (int n = 0; n < rows; n++)
            sums[n] = dot(sums[n], line, vreinterpretq_s8_s32(vdupq_n_s32(words[k * rows + n])));
    }
}
static inline __attribute__((always_inline)) void begin_sums(const int32_t *start, int rows,
                                                             int32x4_t *sums) {
    for (int n = 0; n < rows; n++)
        sums[n] = vdupq_n_s32(start ? start[n] : 0);
}
static inline __attribute__((always_inline)) void add_sums(const int32x4_t *sums, float32x4_t unit,
                                                           const float *scales, int rows,
                                                           float32x4_t *totals) {
    for (int n = 0; n < rows; n++)
        totals[n] = vfmaq_f32(totals[n], vcvtq_f32_s32(sums[n]), vmulq_n_f32(unit, scales[n]));
}

// 4 outputs for `rows` rows; weight, scales: where these outputs' lie in the first line and the
// first fp16 scales.
static inline __attribute__((always_inline)) void pass(const uint8_t *weight, const uint8_t *scales,
                                                       int output, const ByteRows *x, long blocks,
                                                       int bits, Kind kind, int start_kind,
                                                       int rows, float *to, long stride) {
    float32x4_t totals[LANES_NEON], shared = vdupq_n_f32(0), shared_least = shared;
    const int32_t *words = x->words,
                  *start = kind == SCALE || kind == HALVES ? x->start[start_kind] : NULL;
    const float *row_scales = x->scales, *row_sums = x->start[SCALED_SUM];
    long block_bytes = bits * COLUMN * BLOCK / 8;
    for (int n = 0; n < rows; n++)
        totals[n] = vdupq_n_f32(0);
    for (long b = 0; b < blocks; b++, weight += block_bytes, words += 8 * rows) {
        int32x4_t sums[LANES_NEON];
        float32x4_t unit, least = vdupq_n_f32(0);
        if ((kind == FACTORS || kind == HALVES) && b % 8 == 0) {
            shared = halves_at(scales + 2 * output);
            scales += 32;
            if (kind == FACTORS) {
                shared_least = vnegq_f32(halves_at(scales + 2 * output));
                scales += 32;
            }
        }
        if (kind == HALVES) {
            for (int half = 0; half < 2; half++, scales += 16) {
                begin_sums(start + (2 * b + half) * rows, rows, sums);
                add_lines(weight, bits, 4 * half, 4 * half + 4, words, rows, sums);
                unit = vmulq_f32(shared, signed_bytes_at(scales + output));
                add_sums(sums, unit, row_scales + b * rows, rows, totals);
            }
            continue;
        }
        begin_sums(bits == 8 || !start ? NULL : start + b * rows, rows, sums);
        add_lines(weight, bits, 0, 8, words, rows, sums);
        if (kind == FACTORS) {
            unit = vmulq_f32(shared, bytes_at(scales + output));
            least = vmulq_f32(shared_least, bytes_at(scales + 16 + output));
        } else {
            unit = halves_at(scales + 2 * output);
            if (kind == LEAST)
                least = halves_at(scales + 32 + 2 * output);
        }
        scales += kind == LEAST ? 64 : 32;
        add_sums(sums, unit, row_scales + b * rows, rows, totals);
        if (kind != SCALE)
            for (int n = 0; n < rows; n++)
                totals[n] = vfmaq_n_f32(totals[n], least, row_sums[b * rows + n]);
    }
    for (int n = 0; n < rows; n++)
        vst1q_f32(to + n * stride, totals[n]);
}

#define ROWS(BITS, KIND, START_KIND, N)                                                            \
    case N:                                                                                        \
        pass(weight, scales, output, x, blocks, BITS, KIND, START_KIND, N, to + output, stride);   \
        break;
#define FORMAT(NAME, BITS, KIND, START_KIND)                                                       \
    static void NAME(const Column *column, const ByteRows *x, long blocks, const Ahead *ahead,     \
                     float *to, long stride) {                                                     \
        const uint8_t *scales = column->scale;                                                     \
        (void)ahead; /* no prefetching before it is measured */                                    \
        for (int output = 0; output < COLUMN; output += 4) {                                       \
            const uint8_t *weight = (const uint8_t *)column->weight + 4 * output;                  \
            switch (x->lanes) {                                                                    \
                ROWS(BITS, KIND, START_KIND, 1)                                                    \
                ROWS(BITS, KIND, START_KIND, 2)                                                    \
                ROWS(BITS, KIND, START_KIND, 3)                                                    \
                ROWS(BITS, KIND, START_KIND, 4)                                                    \
                ROWS(BITS, KIND, START_KIND, 5)                                                    \
                ROWS(BITS, KIND, START_KIND, 6)                                                    \
                ROWS(BITS, KIND, START_KIND, 7)                                                    \
                ROWS(BITS, KIND, START_KIND, 8)                                                    \
            }                                                                                      \
        }                                                                                          \
    }
FORMAT(q8_0, 8, SCALE, START_128)
FORMAT(q4_0, 4, SCALE, START_8)
FORMAT(q4_1, 4, LEAST, SCALED_SUM)
FORMAT(q5_0, 5, SCALE, START_16)
FORMAT(q5_1, 5, LEAST, SCALED_SUM)
FORMAT(q4_k, 4, FACTORS, SCALED_SUM)
FORMAT(q5_k, 5, FACTORS, SCALED_SUM)
FORMAT(q6_k, 6, HALVES, START_HALVES)

const Bytes neon_bytes = {
    LANES_NEON,
    quantise_inputs,
    {[WEIGHTS_Q8_0] = q8_0,
     [WEIGHTS_Q4_0] = q4_0,
     [WEIGHTS_Q4_1] = q4_1,
     [WEIGHTS_Q5_0] = q5_0,
     [WEIGHTS_Q5_1] = q5_1,
     [WEIGHTS_Q4_K] = q4_k,
     [WEIGHTS_Q5_K] = q5_k,
     [WEIGHTS_Q6_K] = q6_k},
};
