#include "round_weights.h"

// Largest norm of an output's integers: with fixed_point.c's ROW_NORM no sum leaves int32.
#define WEIGHT_NORM 65000.0f

typedef int32_t i8 __attribute__((vector_size(32)));

// What decides an output's unit. The norm is not finite where any weight is not.
typedef struct {
    double norm;
    float largest;
} Extent;

static Extent extent_of(const float *w, int in) {
    f8d sum = {0};
    f8 largest = {0};
    int i = 0;
    for (; i + 8 <= in; i += 8) {
        f8 v;
        memcpy(&v, w + i, sizeof v);
        f8d wide = __builtin_convertvector(v, f8d);
        sum += wide * wide;
        v = (f8)((i8)v & 0x7fffffff);
        i8 larger = v > largest;
        largest = (f8)(((i8)v & larger) | ((i8)largest & ~larger));
    }
    Extent found = {sum_of(sum), 0.0f};
    for (int lane = 0; lane < 8; lane++)
        found.largest = fmaxf(found.largest, largest[lane]);
    for (; i < in; i++) {
        found.norm += (double)w[i] * w[i];
        found.largest = fmaxf(found.largest, fabsf(w[i]));
    }
    found.norm = sqrt(found.norm);
    return found;
}

static void round_all(const float *w, float steps, int in, int16_t *q) {
    for (int i = 0; i < in; i++)
        q[i] = (int16_t)(int)rintf(w[i] * steps);
}

// How many integers a weight of 1 is, so that they keep to WEIGHT_NORM and to `most`; 0: they are
// not finite.
static float steps_for(const float *w, int in, float most) {
    Extent extent = extent_of(w, in);
    if (!isfinite(extent.norm))
        return 0.0f;
    if (extent.largest == 0.0f)
        return 1.0f;
    float by_norm = WEIGHT_NORM / fmaxf((float)extent.norm, 1e-30f),
          by_largest = most / fmaxf(extent.largest, 1e-30f);
    return fminf(by_norm, by_largest);
}

static float not_finite(int16_t *q, int in) {
    memset(q, 0, (size_t)in * sizeof *q);
    return NAN;
}

float round_to_int16(const float *w, int in, int16_t *q) {
    float steps = steps_for(w, in, INT16_MAX);
    if (steps == 0.0f)
        return not_finite(q, in);
    int exponent;
    frexpf(steps, &exponent);
    steps = ldexpf(1.0f, exponent - 1);
    round_all(w, steps, in, q);
    return 1.0f / steps;
}

float round_to_int8(const float *w, int in, int16_t *q) {
    float steps = steps_for(w, in, INT8_MAX);
    if (steps == 0.0f)
        return not_finite(q, in);
    round_all(w, steps, in, q);
    return 1.0f / steps;
}

// The bits of the largest size of 16 weights: as integers they are ordered as the sizes are, those
// that are not finite above all others.
INLINE i16 larger_size(i16 sizes, f16 w) {
    i16 size = (i16)w & 0x7fffffff, larger = size > sizes;
    return (size & larger) | (sizes & ~larger);
}
INLINE int32_t largest_lane(i16 v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t top = v[0];
    for (int lane = 1; lane < 16; lane++)
        top = v[lane] > top ? v[lane] : top;
    return top;
#endif
}
INLINE f16 within(f16 x, float most) {
    i16 above = x > splat(most), below = x < splat(-most);
    return (f16)(((i16)splat(most) & above) | ((i16)splat(-most) & below) |
                 ((i16)x & ~above & ~below));
}

float round_block_to_bytes(const float *w, int count, int16_t *q) {
    float block[W8_BLOCK] = {0};
    if (count < W8_BLOCK)
        w = memcpy(block, w, (size_t)count * sizeof *w);
    f16 low = load(w), high = load(w + 16);
    union {
        int32_t bits;
        float size;
    } largest = {largest_lane(larger_size(larger_size((i16){0}, low), high))};
    if (!isfinite(largest.size))
        return not_finite(q, count);
    float unit = from_bf16(to_bf16(largest.size / 127.0f));
    // Rounded to even by a number beside which fractions have no room.
    f16 step = splat(fmaxf(unit, 1e-30f)), whole = splat(0x1.8p23f);
    s16 found[2] = {
        __builtin_convertvector(within(low / step + whole - whole, 127.0f), s16),
        __builtin_convertvector(within(high / step + whole - whole, 127.0f), s16),
    };
    if (count < W8_BLOCK)
        memcpy(q, found, (size_t)count * sizeof *q);
    else
        memcpy(q, found, sizeof found);
    return unit;
}

#if BYTE_PRODUCTS
#include <immintrin.h>

typedef struct {
    __m512 low, high;
} Block;

static inline Block load_block(const float *w) {
    return (Block){_mm512_loadu_ps(w), _mm512_loadu_ps(w + 16)};
}
static inline Block less(Block a, float b) {
    __m512 all = _mm512_set1_ps(b);
    return (Block){_mm512_sub_ps(a.low, all), _mm512_sub_ps(a.high, all)};
}
static inline float sum_of_products(Block a, Block b) {
    return _mm512_reduce_add_ps(_mm512_fmadd_ps(a.low, b.low, _mm512_mul_ps(a.high, b.high)));
}
static inline float mean_of(Block a) {
    return _mm512_reduce_add_ps(_mm512_add_ps(a.low, a.high)) / W8_BLOCK;
}
static inline __m512 steps_in(__m512 w, __m512 least, __m512 unit) {
    __m512 q = _mm512_roundscale_ps(_mm512_div_ps(_mm512_sub_ps(w, least), unit),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_min_ps(_mm512_max_ps(q, _mm512_setzero_ps()), _mm512_set1_ps(15.0f));
}
static inline Block all_steps_in(Block w, float least, float unit) {
    __m512 from = _mm512_set1_ps(least), step = _mm512_set1_ps(fmaxf(unit, 1e-30f));
    return (Block){steps_in(w.low, from, step), steps_in(w.high, from, step)};
}
static inline float to_half_and_back(float v) {
    return _cvtsh_ss(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT));
}

// A block in `count` steps from the least to the largest, by least squares: what the weights were
// before they were rounded.
static HalfByteBlock in_steps(Block w, int count, Block *q) {
    float least = fminf(_mm512_reduce_min_ps(w.low), _mm512_reduce_min_ps(w.high)),
          most = fmaxf(_mm512_reduce_max_ps(w.low), _mm512_reduce_max_ps(w.high)),
          unit = (most - least) / count, mean = mean_of(w);
    Block rest = less(w, mean);
    for (int again = 0; again < 2; again++) {
        Block steps = all_steps_in(w, least, unit);
        float middle = mean_of(steps);
        Block off = less(steps, middle);
        float spread = sum_of_products(off, off), common = sum_of_products(off, rest);
        if (spread > 0.0f)
            unit = common / spread;
        least = mean - unit * middle;
    }
    HalfByteBlock found = {.unit = to_half_and_back(unit), .least = to_half_and_back(least)};
    *q = all_steps_in(w, found.least, found.unit);
    __m512 step = _mm512_set1_ps(found.unit), from = _mm512_set1_ps(found.least);
    Block lacking = {_mm512_sub_ps(_mm512_fmadd_ps(step, q->low, from), w.low),
                     _mm512_sub_ps(_mm512_fmadd_ps(step, q->high, from), w.high)};
    found.lacking = sum_of_products(lacking, lacking);
    found.size = sum_of_products(w, w);
    return found;
}

static void store_steps(Block q, uint8_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q.low)));
    _mm_storeu_si128((__m128i *)(to + 16), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q.high)));
}

HalfByteBlock round_block_to_half_bytes(const float *w, uint8_t *q) {
    Block steps;
    HalfByteBlock found = in_steps(load_block(w), 15, &steps);
    store_steps(steps, q);
    return found;
}

HalfByteBlock find_half_bytes_again(const float *w, uint8_t *q) {
    Block block = load_block(w), steps, others;
    HalfByteBlock best = in_steps(block, 15, &steps);
    for (int count = 14; count > 0 && best.lacking > HALF_BYTES_NEAR * HALF_BYTES_NEAR * best.size;
         count--) {
        HalfByteBlock found = in_steps(block, count, &others);
        if (found.lacking < best.lacking) {
            best = found;
            steps = others;
        }
    }
    store_steps(steps, q);
    return best;
}
#endif
