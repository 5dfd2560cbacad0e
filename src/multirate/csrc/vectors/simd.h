// Vectors of fp32 and bf16 in GCC's vector extensions, and exp and SiLU of them.
//
// f16 is always 16 lanes: the compiler splits it on narrower processors. fv has the processor's own
// width, for functions in which it would otherwise spill registers.
//
// All processors get the same bits: the compiler fuses no multiplication with an addition
// (-ffp-contract=off) but those that fma_v and fma16 name, sums over a row have 16 lanes and one
// order (Sum), and exp has one formula.
#ifndef MULTIRATE_SIMD_H
#define MULTIRATE_SIMD_H
#include "../vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float f16 __attribute__((vector_size(64)));    // 16 fp32 lanes
typedef int32_t i16 __attribute__((vector_size(64)));  // 16 int32 lanes
typedef uint32_t u16 __attribute__((vector_size(64))); // 16 pairs of bf16
typedef float f8 __attribute__((vector_size(32)));     // 8 fp32 lanes

#define INLINE static inline __attribute__((always_inline))

// A loop over n = 0 … count − 1 that is written out, as compilers keep an array in registers only
// where all its indices are constants. count: a constant where the function is inlined.
#ifdef __clang__
#define EACH(n, count) _Pragma("clang loop unroll(full)") for (int n = 0; n < (count); n++)
#else
#define EACH(n, count) _Pragma("GCC unroll 32") for (int n = 0; n < (count); n++)
#endif

// Cases of a switch, which call f(n, …): for functions to be inlined.
#define CASE(n, f, ...)                                                                            \
    case n:                                                                                        \
        f(n, __VA_ARGS__);                                                                         \
        break;
#define CASES_TO_6(...)                                                                            \
    CASE(1, __VA_ARGS__)                                                                           \
    CASE(2, __VA_ARGS__)                                                                           \
    CASE(3, __VA_ARGS__) CASE(4, __VA_ARGS__) CASE(5, __VA_ARGS__) CASE(6, __VA_ARGS__)
#define CASES_TO_12(...)                                                                           \
    CASES_TO_6(__VA_ARGS__)                                                                        \
    CASE(7, __VA_ARGS__)                                                                           \
    CASE(8, __VA_ARGS__)                                                                           \
    CASE(9, __VA_ARGS__) CASE(10, __VA_ARGS__) CASE(11, __VA_ARGS__) CASE(12, __VA_ARGS__)

// Into the core's first cache (near) or its second.
INLINE void fetch(const void *line, int near) {
    if (near)
        __builtin_prefetch(line, 0, 3);
    else
        __builtin_prefetch(line, 0, 2);
}
INLINE void fetch_line(const Ahead *ahead, long k, int near) {
    fetch((k < ahead->own ? ahead->here : ahead->next) + k * ahead->stride, near);
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
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define PARTS (16 / LANES) // registers of 16 lanes
typedef float fv __attribute__((vector_size(4 * LANES)));
typedef int32_t iv __attribute__((vector_size(4 * LANES)));
typedef uint32_t uv __attribute__((vector_size(4 * LANES)));
// Element by element, GCC makes it in memory, by stores that a load of the whole has to wait for.
INLINE fv all(float f) {
#if LANES == 16
    return (fv)_mm512_set1_ps(f);
#elif LANES == 8
    return (fv){f, f, f, f, f, f, f, f};
#else
    return (fv){f, f, f, f};
#endif
}
// a · b + c, rounded once. Where no instruction does it: in fp64, where the product is exact, and
// the sum rounded to odd, which leaves the one rounding to fp32.
INLINE fv fma_v(fv a, fv b, fv c) {
#if LANES == 16
    return (fv)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (fv)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (fv)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    typedef double wide __attribute__((vector_size(8 * LANES)));
    typedef int64_t longs __attribute__((vector_size(8 * LANES)));
    wide product = __builtin_convertvector(a, wide) * __builtin_convertvector(b, wide),
         other = __builtin_convertvector(c, wide), sum = product + other, back = sum - product,
         lost = (product - (sum - back)) + (other - back);
    longs bits = (longs)sum, even = (bits & 1) - 1, inexact = (lost > 0.0) | (lost < 0.0),
          smaller = (lost > 0.0) ^ (sum > 0.0);
    return __builtin_convertvector((wide)(bits + ((1 | smaller) & inexact & even)), fv);
#endif
}
INLINE f16 fma16(f16 a, f16 b, f16 c) {
#if LANES == 16
    return fma_v(a, b, c);
#else
    fv x[16 / LANES], y[16 / LANES], sum[16 / LANES];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(sum, &c, sizeof c);
    for (int i = 0; i < 16 / LANES; i++)
        sum[i] = fma_v(x[i], y[i], sum[i]);
    memcpy(&c, sum, sizeof c);
    return c;
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
// A sum over a row, whose inputs [16] go to 16 lanes. Its total adds the upper half of the lanes to
// the lower one until one is left.
typedef struct {
    fv of[16 / LANES];
} Sum;
INLINE Sum no_sum(void) {
    Sum sum;
    for (int i = 0; i < 16 / LANES; i++)
        sum.of[i] = all(0.0f);
    return sum;
}
INLINE float total_of(Sum sum) {
    typedef float f4 __attribute__((vector_size(16)));
    typedef float f2 __attribute__((vector_size(8)));
    f8 eight[2];
    f4 four[2];
    f2 two[2];
    memcpy(eight, &sum, sizeof eight);
    eight[0] += eight[1];
    memcpy(four, eight, sizeof four);
    four[0] += four[1];
    memcpy(two, four, sizeof two);
    two[0] += two[1];
    return two[0][0] + two[0][1];
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

// exp for x <= 0 (softmax): 2^n · polynomial of the remainder; relative error below 2e-7. 0 below
// -87, where the result would be near the least normal number. What is not a number stays so.
INLINE fv exp_vector(fv x) {
    fv t = fma_v(x, all(1.44269504f), all(12582912.0f)); // rounds to an integer, its last bits
    fv n = t - all(12582912.0f);
    fv r = fma_v(n, all(-1.42860677e-6f), fma_v(n, all(-0.693145752f), x));
    fv p = fma_v(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
    p = fma_v(p, r, all(8.3334519073e-3f));
    p = fma_v(p, r, all(4.1665795894e-2f));
    p = fma_v(p, r, all(1.6666665459e-1f));
    p = fma_v(p, r, all(5.0000001201e-1f));
    p = fma_v(p * r, r, r) + all(1.0f);
    fv power = (fv)(((uv)t << 23) + (uv)all(1.0f));
    iv far_below = x < all(-87.0f);
    return (fv)((iv)(p * power) & ~far_below);
}
INLINE float exp_of(float x) {
    return exp_vector(all(x))[0];
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
    return g * sigmoid_vector(all(1.5957691216f) * fma_v(all(0.044715f) * g * g, g, g));
}
#endif
