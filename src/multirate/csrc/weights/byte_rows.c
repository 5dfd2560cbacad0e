#include "byte_rows.h"

#include <math.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

static float largest_of_block(const float *x) {
    uint32_t largest = 0; // sizes are compared as integers: a NaN is above infinity
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float found;
    memcpy(&found, &largest, sizeof found);
    return found;
}

void quantise_inputs(const float *x, int inputs, int8_t *q, float *scales) {
    for (int b = 0; b < inputs / BLOCK; b++, x += BLOCK, q += BLOCK) {
        float largest = largest_of_block(x);
        int usable = largest > 1e-30f && largest < 1e30f;
        scales[b] = usable ? largest / 127.0f : largest * 0.0f;
        float by = usable ? 127.0f / largest : 0.0f;
        for (int i = 0; i < BLOCK; i++) // rounded to even by a number beside which fractions have
            q[i] = (int8_t)(usable ? x[i] * by + 0x1.8p23f - 0x1.8p23f : 0.0f); // no room
    }
}

static int words_of(int lanes, int inputs) {
    return inputs / 4 * lanes;
}

static int start_words(int kind) {
    return kind == START_HALVES ? 2 : 1;
}

size_t byte_rows_room(int lanes, int inputs, unsigned kinds) {
    int for_block = 1; // the scale
    for (int kind = 0; kind < START_KINDS; kind++)
        for_block += kinds >> kind & 1 ? start_words(kind) : 0;
    return sizeof(int32_t) *
           (words_of(lanes, inputs) + SPILLED_WORDS + (size_t)inputs / BLOCK * for_block * lanes);
}

typedef int32_t Four __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Four){__VA_ARGS__})
#endif
#define LOW(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#define FIRST(a, b) SHUFFLE(a, b, 0, 1, 4, 5)
#define LAST(a, b) SHUFFLE(a, b, 2, 3, 6, 7)

// Four rows' words from [4][4] to [4][4], transposed.

static inline void transpose_four(const int32_t *const *from, long k, int32_t *to, long lanes) {
    Four r[4];
    for (int j = 0; j < 4; j++)
        memcpy(&r[j], from[j] + k, sizeof r[j]);
    Four ab = LOW(r[0], r[1]), AB = HIGH(r[0], r[1]), cd = LOW(r[2], r[3]), CD = HIGH(r[2], r[3]);
    Four out[4] = {FIRST(ab, cd), LAST(ab, cd), FIRST(AB, CD), LAST(AB, CD)};
    for (int j = 0; j < 4; j++)
        memcpy(to + j * lanes, &out[j], sizeof out[j]);
}

// The last four lanes first: where there are fewer, what is written behind a word's lanes is the
// next one's beginning, which is written later.
void interleave(const int32_t *const *rows, int count, int lanes, long words, int32_t *to) {
    for (int n = (lanes - 1) / 4 * 4; n >= 0; n -= 4) {
        const int32_t *from[4];
        for (int j = 0; j < 4; j++)
            from[j] = rows[n + j < count ? n + j : count - 1];
        long k = 0;
        for (; k + 4 <= words; k += 4)
            transpose_four(from, k, to + k * lanes + n, lanes);
        for (; k < words; k++)
            for (int j = 0; j < 4 && n + j < lanes; j++)
                to[k * lanes + n + j] = from[j][k];
    }
}

static int sum_of_sixteen(const int8_t *q) {
#ifdef __SSE2__ // adds unsigned bytes in one instruction
    __m128i bytes = _mm_loadu_si128((const __m128i *)q),
            sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
#else
    int sum = 0;
    for (int i = 0; i < 16; i++)
        sum += q[i];
    return sum;
#endif
}

typedef struct {
    int32_t *zero[START_HALVES], *halves;
    float *scaled;
} Starts;

static void write_starts(const Starts *to, const int8_t *q, float scale, long b, int n, int lanes) {
    int early = sum_of_sixteen(q), late = sum_of_sixteen(q + 16);
    static const int zeros[START_HALVES] = {[START_8] = 8, [START_16] = 16, [START_128] = 128};
    for (int kind = 0; kind < START_HALVES; kind++)
        if (to->zero[kind])
            to->zero[kind][b * lanes + n] = -zeros[kind] * (early + late);
    if (to->halves) {
        to->halves[2 * b * lanes + n] = -32 * early;
        to->halves[(2 * b + 1) * lanes + n] = -32 * late;
    }
    if (to->scaled)
        to->scaled[b * lanes + n] = scale * (float)(early + late);
}

void lay_out_byte_rows(const int8_t *q, const float *scales, int lanes, int inputs, unsigned kinds,
                       void *room, ByteRows *to) {
    long blocks = inputs / BLOCK;
    int32_t *next = room;
    to->lanes = lanes;
    to->words = next;
    const int32_t *rows[MOST_BYTE_LANES];
    for (int n = 0; n < lanes; n++)
        rows[n] = (const int32_t *)(q + (size_t)n * inputs);
    interleave(rows, lanes, lanes, inputs / 4, next);
    next += words_of(lanes, inputs);
    float *arranged = (float *)next;
    to->scales = arranged;
    next += blocks * lanes;
    for (int kind = 0; kind < START_KINDS; kind++) {
        to->start[kind] = kinds >> kind & 1 ? next : NULL;
        next += kinds >> kind & 1 ? blocks * lanes * start_words(kind) : 0;
    }
    Starts starts = {{(int32_t *)to->start[START_8], (int32_t *)to->start[START_16],
                      (int32_t *)to->start[START_128]},
                     (int32_t *)to->start[START_HALVES],
                     (float *)to->start[SCALED_SUM]};
    for (int n = 0; n < lanes; n++, q += inputs, scales += blocks)
        for (long b = 0; b < blocks; b++) {
            arranged[b * lanes + n] = scales[b];
            write_starts(&starts, q + b * BLOCK, scales[b], b, n, lanes);
        }
}
