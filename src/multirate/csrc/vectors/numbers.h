// The random numbers that sampling adds to logits, and the argmax with them. runtime/noise.py
// defines them and explains why every build gives the same bits; the two files match step by step.
#ifndef MULTIRATE_NUMBERS_H
#define MULTIRATE_NUMBERS_H
#include "logits.h"

#define FRACTION_BITS 16 // of a float's mantissa, below those that number a knot
#define FIRST_KNOT (127 << (23 - FRACTION_BITS))
// A place's numbers, ready for use.
typedef struct {
    const int32_t *table;
    uint32_t first, second;
    float unit;
} Place;

static Place place_of(const Noise *noise) {
    uint64_t z = noise->key + ((uint64_t)noise->place + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    return (Place){noise->table, (uint32_t)z, (uint32_t)(z >> 32), noise->unit};
}

// 32 bits of each of some tokens.
INLINE uv random_bits(Place place, uv tokens) {
    uv x = tokens + place.first;
    x = (x ^ (x >> 17)) * UINT32_C(0xED5AD4BB);
    x = (x ^ (x >> 11) ^ place.second) * UINT32_C(0xAC4C1B51);
    x = (x ^ (x >> 15)) * UINT32_C(0x31848BAB);
    return x ^ (x >> 14);
}

INLINE iv float_bits(iv numbers) {
    return (iv) __builtin_convertvector(numbers, fv);
}

INLINE iv look_up(const int32_t *table, iv index) {
#ifdef __AVX512F__
    return (iv)_mm512_i32gather_epi32((__m512i)index, table, 4);
#else
    iv found;
    for (int i = 0; i < LANES; i++)
        found[i] = table[index[i]];
    return found;
#endif
}

INLINE fv numbers_of(Place place, uv tokens) {
    iv bits = (iv)random_bits(place, tokens), half = bits >> 31;
    iv distance = float_bits((bits ^ half) | 1);
    iv knot = (distance >> FRACTION_BITS) - FIRST_KNOT + (half & NOISE_KNOTS);
    iv number = look_up(place.table, knot), step = look_up(place.table, knot + 1) - number;
    number += (step * (distance & ((1 << FRACTION_BITS) - 1))) >> FRACTION_BITS;
    return __builtin_convertvector(number, fv) * place.unit;
}

// At least the numbers, without their table. Of v up to 1/2, −ln(−ln(1 − v)) <= −ln v, and log2 of
// what lies between 1 and 2 is above its chord, which is what a float's bits are. Larger v count as
// 1/2.
typedef struct {
    float zero, slope;
} Bound;

static Bound bound_of(float scale) {
    double octave = 0.6931471805599453 * (double)scale;
    return (Bound){(float)(octave * (32 + 127) + 1e-3 * (double)scale), (float)(octave * 0x1p-23)};
}

INLINE fv at_least(Bound bound, Place place, uv tokens) {
    iv bits = (iv)random_bits(place, tokens);
    bits = float_bits(((bits | (bits >> 31)) & INT32_MAX) | 1);
    return bound.zero - bound.slope * __builtin_convertvector(bits, fv);
}

INLINE uv tokens_from(int begin) {
    uv tokens;
    for (int i = 0; i < LANES; i++)
        tokens[i] = (uint32_t)(begin + i);
    return tokens;
}

INLINE uv tokens_of(const int64_t *ids) {
    typedef int64_t longs __attribute__((vector_size(8 * LANES)));
    longs tokens;
    memcpy(&tokens, ids, sizeof tokens);
    return __builtin_convertvector(tokens, uv);
}

static void add_noise(const Noise *noise, const int64_t *ids, int outputs, float *rows, int count,
                      int stride) {
    Place place = place_of(noise);
    int begin = 0;
    for (; begin + LANES <= outputs; begin += LANES) {
        fv numbers = numbers_of(place, ids ? tokens_of(ids + begin) : tokens_from(begin));
        for (int n = 0; n < count; n++) {
            float *to = rows + (size_t)n * stride + begin;
            store_v(to, load_v(to) + numbers);
        }
    }
    for (; begin < outputs; begin++) {
        uint32_t token = (uint32_t)(ids ? ids[begin] : begin);
        float number = numbers_of(place, (uv){token})[0];
        for (int n = 0; n < count; n++)
            rows[(size_t)n * stride + begin] += number;
    }
}

static int noisy_above(const Noise *noise, const float *row, int begin, int end, float least,
                       int most, int *tokens, float *sums) {
    Place place = place_of(noise);
    Bound bound = bound_of(noise->scale);
    // what the bound and a sum may be off by
    float below = least - 1e-6f * (fabsf(least) + 64.0f * noise->scale);
    int found = 0;
    for (; begin < end; begin += LANES) {
        fv logits = all(-INFINITY);
        if (begin + LANES <= end)
            logits = load_v(row + begin);
        else
            for (int i = 0; begin + i < end; i++)
                logits[i] = row[begin + i];
        uv ids = tokens_from(begin);
        if (!any_of(logits + at_least(bound, place, ids) >= all(below)))
            continue;
        float all_sums[LANES];
        store_v(all_sums, logits + numbers_of(place, ids));
        for (int i = 0; i < LANES; i++) {
            if (!(all_sums[i] >= least) || begin + i >= end)
                continue;
            if (found < most) {
                tokens[found] = begin + i;
                sums[found] = all_sums[i];
            }
            found++;
        }
    }
    return found;
}

// The argmax of row + noise so far.
typedef struct {
    float sum;
    int token;
} Best;

// LANES tokens from begin on.
static void consider(Best *best, Place place, fv logits, int begin) {
    float sums[LANES];
    store_v(sums, logits + numbers_of(place, tokens_from(begin)));
    for (int i = 0; i < LANES; i++)
        if (sums[i] > best->sum)
            *best = (Best){sums[i], begin + i};
}

// Only where a bound of the noise lets a token win are numbers looked up.
static int64_t noisy_argmax(const float *row, int vocab, const Noise *noise) {
    Place place = place_of(noise);
    Bound bound = bound_of(noise->scale);
    float last[PIECE];
    int likeliest = argmax_of(row, vocab);
    float highest = row[likeliest];
    if (!isfinite(highest))
        return -1;
    // what the bound, the table and a sum may be off by
    float slack = 1e-6f * (fabsf(highest) + 64.0f * noise->scale);
    float least = highest + numbers_of(place, tokens_from(likeliest))[0] - slack;
    Best best = {-INFINITY, 0};
    iv missing = {0};
    for (int begin = 0; begin < vocab; begin += PIECE) {
        const float *logits = row + begin;
        if (begin + PIECE > vocab) {
            for (int i = 0; i < PIECE; i++)
                last[i] = begin + i < vocab ? logits[i] : -INFINITY;
            logits = last;
        }
        iv within = {0};
        for (int i = 0; i < PIECE; i += LANES) {
            fv v = load_v(logits + i);
            missing |= v != v;
            within |= v + at_least(bound, place, tokens_from(begin + i)) > least;
        }
        if (!any_of(within))
            continue;
        for (int i = 0; i < PIECE; i += LANES)
            consider(&best, place, load_v(logits + i), begin + i);
        least = best.sum - slack > least ? best.sum - slack : least;
    }
    return !any_of(missing) && isfinite(best.sum) ? best.token : -1;
}
#endif
