// Vectors of fp32 and bf16 in GCC's vector extensions, and exp and SiLU of them.
//
// f16 is always 16 lanes: the compiler splits it on narrower processors. fv has the processor's own
// width, for functions in which it would otherwise spill registers.
#ifndef MULTIRATE_SIMD_H
#define MULTIRATE_SIMD_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f16 __attribute__((vector_size(64)));    // 16 fp32 lanes
typedef int32_t i16 __attribute__((vector_size(64)));  // 16 int32 lanes
typedef uint32_t u16 __attribute__((vector_size(64))); // 16 pairs of bf16
typedef int16_t s16 __attribute__((vector_size(32)));  // 16 int16 lanes
typedef float f8 __attribute__((vector_size(32)));     // 8 fp32 lanes
typedef double f8d __attribute__((vector_size(64)));   // 8 fp64 lanes

#define INLINE static inline __attribute__((always_inline))

INLINE float from_bf16(bf16 b) {
    union {
        uint32_t u;
        float f;
    } c = {.u = (uint32_t)b << 16};
    return c.f;
}
INLINE bf16 to_bf16(float f) { // round to nearest even
    union {
        float f;
        uint32_t u;
    } c = {.f = f};
    return (bf16)((c.u + 0x7fffu + ((c.u >> 16) & 1)) >> 16);
}
INLINE f16 splat(float f) {
    return (f16){f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f};
}
INLINE f16 load(const float *p) {
    f16 v;
    memcpy(&v, p, 64);
    return v;
}
INLINE u16 load_pairs(const uint32_t *p) {
    u16 v;
    memcpy(&v, p, 64);
    return v;
}
INLINE void store(float *p, f16 v) {
    memcpy(p, &v, 64);
}

// 16 fp32 → 16 bf16, round to nearest even.
INLINE void store_bf16(bf16 *to, f16 v) {
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    u16 bits = (u16)v;
    bits = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    u16x16 low = __builtin_convertvector(bits, u16x16);
    memcpy(to, &low, 32);
}

// The processor's own width, for functions that a compiler would otherwise spill.
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
typedef float fv __attribute__((vector_size(4 * LANES)));
typedef int32_t iv __attribute__((vector_size(4 * LANES)));
typedef uint32_t uv __attribute__((vector_size(4 * LANES)));
// Element by element, GCC makes it in memory, by stores that a load of the whole has to wait for.
INLINE fv all(float f) {
#if LANES == 16
    return (fv)_mm512_set1_ps(f);
#else
    return (fv){f, f, f, f, f, f, f, f};
#endif
}
INLINE fv load_bf16_v(const bf16 *p) {
    uint16_t __attribute__((vector_size(2 * LANES))) half;
    memcpy(&half, p, sizeof half);
    return (fv)(__builtin_convertvector(half, iv) << 16);
}
INLINE fv load_v(const float *p) {
    fv v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_v(float *p, fv v) {
    memcpy(p, &v, sizeof v);
}
INLINE float sum_v(fv v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0.0f;
    for (int i = 0; i < LANES; i++)
        total += v[i];
    return total;
#endif
}
INLINE double sum_of(f8d v) {
    double total = 0.0;
    for (int i = 0; i < 8; i++)
        total += v[i];
    return total;
}
INLINE float max_v(fv v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float top = v[0];
    for (int i = 1; i < LANES; i++)
        top = v[i] > top ? v[i] : top;
    return top;
#endif
}

INLINE int any_of(iv lanes) {
    typedef int64_t pairs __attribute__((vector_size(4 * LANES)));
    int64_t any = 0;
    for (int i = 0; i < LANES / 2; i++)
        any |= ((pairs)lanes)[i];
    return any != 0;
}

#define PIECE 64 // tokens that are passed over together where none can be of use

INLINE float largest_of(const float *x, int count) {
    f16 highest = splat(-INFINITY);
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        f16 v = load(x + i);
        i16 greater = v > highest;
        highest = (f16)(((i16)v & greater) | ((i16)highest & ~greater));
    }
    float top = -INFINITY;
    for (int j = 0; j < 16; j++)
        top = highest[j] > top ? highest[j] : top;
    for (; i < count; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}
// The first of the largest of x [count]; what is not a number does not count.
static inline int argmax_of(const float *x, int count) {
    float top = -INFINITY;
    int from = 0;
    for (int i = 0; i < count; i += 1024) { // equal ones are looked for in one piece alone
        float here = largest_of(x + i, count - i < 1024 ? count - i : 1024);
        if (here > top) {
            top = here;
            from = i;
        }
    }
    while (from < count - 1 && x[from] != top)
        from++;
    return from;
}

// exp for x <= 0 (softmax): 2^n · polynomial of the remainder; relative error below 2e-7.
INLINE fv exp_vector(fv x) {
#ifdef __AVX512F__
    // what is not a number stays so: of max it is the second
    __m512 within = _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x);
    fv n = (fv)_mm512_roundscale_ps(_mm512_mul_ps(within, _mm512_set1_ps(1.44269504f)), 8);
    fv r = (fv)within - n * all(0.693145752f) - n * all(1.42860677e-6f);
#else
    iv below = x < all(-87.0f);
    x = (fv)(((iv)x & ~below) | ((iv)all(-87.0f) & below));
    fv t = x * all(1.44269504f) + all(12582912.0f); // round to an integer
    fv n = t - all(12582912.0f);
    fv r = x - n * all(0.693145752f) - n * all(1.42860677e-6f);
#endif
    fv p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
#ifdef __AVX512F__
    return (fv)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    iv exponent = ((iv)t - (iv)all(12582912.0f)) << 23;
    return (fv)((iv)p + exponent);
#endif
}
INLINE fv sigmoid_vector(fv x) {
    // through exp(-|x|), so that the exponent never overflows
    iv negative = x < all(0.0f);
    fv e = exp_vector((fv)((iv)x | (iv)all(-0.0f)));
    fv s = all(1.0f) / (all(1.0f) + e); // sigmoid(|x|)
    fv n = e * s;                       // sigmoid(-|x|)
    return (fv)(((iv)n & negative) | ((iv)s & ~negative));
}
INLINE fv silu_vector(fv g) {
    return g * sigmoid_vector(g);
}
// x/2 · (1 + tanh(u)) = x · sigmoid(2u), u = √(2/π) · (x + 0.044715 x³)
INLINE fv gelu_vector(fv g) {
    return g * sigmoid_vector(all(1.5957691216f) * (g + all(0.044715f) * g * g * g));
}
#endif
