// Linear layers in 16-bit fixed point, for processors that multiply no bf16: AVX2.
//
// AVX2 multiplies 16 pairs of int16 where it multiplies 8 fp32, and weights stay two bytes. Weights
// have one scale per output, rows one per row, chosen so that no sum can leave int32
// (Cauchy-Schwarz: |w·x| ≤ ‖w‖ ‖x‖ < 2³¹). The sums are exact, so a row's bits do not depend on the
// shape of the tile. Rounding error relative to the norms: 1.4e-4 at 256 inputs, 4e-4 at 2048;
// rounding rows to bf16, as the other path does, costs 1.1e-3.
//
// Packed int16 weights (where mr_fixed_point() is 1): [outputs / 64][4][inputs / 2][16][2].
// oAiB is the weight of output A and input B, in units of Linear.scale[A]:
//
//   group 0, outputs 0 … 15, a line of 64 bytes (16 outputs, 2 inputs each) after the other:
//     | o0i0 o0i1 o1i0 o1i1 … o15i0 o15i1 |
//     | o0i2 o0i3 o1i2 o1i3 … o15i2 o15i3 |
//     …
//   group 0, outputs 16 … 31; 32 … 47; 48 … 63
//   group 1
//   …
#include "gemm.h"
#if FIXED_POINT
#include <immintrin.h>

#define ROW_NORM 32000.0f // ‖x‖ in units of the row's scale; packing.py keeps ‖w‖ ≤ 65000

INLINE float sum_of(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// q = round(x · unit), 16 at a time; returns Σ q² over elements that hold at most 1/16 of
// ROW_NORM².
static float quantise(const float *x, float unit, int in, int16_t *q) {
    const __m256 by = _mm256_set1_ps(unit), most = _mm256_set1_ps(ROW_NORM / 4),
                 sign = _mm256_set1_ps(-0.0f);
    __m256 small = _mm256_setzero_ps();
    int i = 0;
    for (; i + 16 <= in; i += 16) {
        __m256 a = _mm256_mul_ps(_mm256_loadu_ps(x + i), by),
               b = _mm256_mul_ps(_mm256_loadu_ps(x + i + 8), by);
        __m256 a_small =
            _mm256_and_ps(a, _mm256_cmp_ps(_mm256_andnot_ps(sign, a), most, _CMP_LE_OQ));
        __m256 b_small =
            _mm256_and_ps(b, _mm256_cmp_ps(_mm256_andnot_ps(sign, b), most, _CMP_LE_OQ));
        small = _mm256_fmadd_ps(a_small, a_small, _mm256_fmadd_ps(b_small, b_small, small));
        __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
        _mm256_storeu_si256((__m256i *)(q + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    float rest = sum_of(small);
    for (; i < in; i++) {
        float v = x[i] * unit;
        if (fabsf(v) <= ROW_NORM / 4)
            rest += v * v;
        q[i] = (int16_t)lrintf(v);
    }
    return rest;
}

static float norm_of(const float *x, int in) {
    __m256 a = _mm256_setzero_ps(), b = a;
    int i = 0;
    for (; i + 16 <= in; i += 16) {
        __m256 u = _mm256_loadu_ps(x + i), v = _mm256_loadu_ps(x + i + 8);
        a = _mm256_fmadd_ps(u, u, a);
        b = _mm256_fmadd_ps(v, v, b);
    }
    float total = sum_of(_mm256_add_ps(a, b));
    for (; i < in; i++)
        total += x[i] * x[i];
    return sqrtf(total);
}

// The thread's own fixed-point copy of the rows: a few percent of the product, and no barrier. A
// row whose norm sits in a few outliers (more than 3/4 of it squared) leaves too few steps for the
// others: what was rounded off is kept as a second, finer row.
void prepare(Operand *out, ThreadScratch *mine, const element *const *x, int rows, int in) {
    size_t all = (size_t)rows * in;
    int16_t *copy = mine->fixed = grown(mine->fixed, &mine->fixed_size, 2 * all * sizeof *copy);
    float *rest = mine->rest = grown(mine->rest, &mine->rest_size, (size_t)in * sizeof *rest);
    out->coarse = copy;
    out->fine = copy + all;
    out->in = in;
    for (int n = 0; n < rows; n++) {
        int16_t *q = copy + (size_t)n * in;
        float norm = norm_of(x[n], in);
        int usable = norm > 1e-30f && norm < 1e30f; // zero, or about to overflow in any precision
        float unit = usable ? ROW_NORM / norm : 0.0f;
        float small = quantise(x[n], unit, in, q);
        out->scale[n] = usable ? 1.0f / unit : norm * 0.0f; // an infinity or NaN stays visible
        out->fine_scale[n] = 0.0f;
        if (!usable || small > 0.25f * ROW_NORM * ROW_NORM)
            continue;
        for (int i = 0; i < in; i++)
            rest[i] = x[n][i] - q[i] * out->scale[n];
        float rest_norm = norm_of(rest, in);
        if (!(rest_norm > 1e-30f))
            continue;
        quantise(rest, ROW_NORM / rest_norm, in, copy + all + (size_t)n * in);
        out->fine_scale[n] = rest_norm / ROW_NORM;
    }
}

// In assembly because compilers hoist the products and then spill the sums: 6 rows need all 16
// registers.
#ifdef __AVXVNNI__
#define DOT_ADD "vpdpwssd %[w], %[x], %[a]\n\tvpdpwssd %[v], %[x], %[b]"
#else
#define DOT_ADD                                                                                    \
    "vpmaddwd %[w], %[x], %[t]\n\tvpaddd %[t], %[a], %[a]\n\tvpmaddwd %[v], %[x], %[t]\n\tvpaddd " \
    "%[t], %[b], %[b]"
#endif
#define FIXED_ZERO(n) __m256i a##n = _mm256_setzero_si256(), b##n = a##n;
#define FIXED_ROW(n) const int *row##n = (const int *)(rows + (size_t)n * in);
#define FIXED_DOT(n)                                                                               \
    {                                                                                              \
        __m256i t, x = _mm256_set1_epi32(row##n[k]);                                               \
        asm(DOT_ADD                                                                                \
            : [a] "+x"(a##n), [b] "+x"(b##n), [t] "=&x"(t)                                         \
            : [w] "x"(w), [v] "x"(v), [x] "x"(x));                                                 \
    }
#define FIXED_KEEP(n)                                                                              \
    _mm256_storeu_ps((float *)acc[n], _mm256_cvtepi32_ps(a##n));                                   \
    _mm256_storeu_ps((float *)acc[n] + 8, _mm256_cvtepi32_ps(b##n));
// Lines of weights fetched ahead, by rows: with several rows to multiply the processor's own
// prefetching falls behind; one row waits for memory anyway, and does better alone.
#define AHEAD(rows) ((rows) == 1 ? 0 : (rows) <= 3 ? 12 : 64)

// 16 outputs for ROWS rows: 2 · ROWS accumulators of the 16 registers. One line of weights a step,
// in sequence; `next` is where the stream of weights goes on after these.
#define FIXED_PASS(ROWS)                                                                           \
    static void fixed_##ROWS(const uint32_t *weight, const int16_t *rows, int in,                  \
                             const uint32_t *next, f16(*acc)[4]) {                                 \
        N_##ROWS(FIXED_ROW) N_##ROWS(FIXED_ZERO) long pairs = in / 2, own = pairs - AHEAD(ROWS);   \
        for (long k = 0; k < pairs; k++) {                                                         \
            if (AHEAD(ROWS))                                                                       \
                _mm_prefetch(                                                                      \
                    (const char *)((k < own ? weight + AHEAD(ROWS) * 16 : next - own * 16) +       \
                                   k * 16),                                                        \
                    _MM_HINT_T0);                                                                  \
            __m256i w = _mm256_load_si256((const __m256i *)(weight + k * 16));                     \
            __m256i v = _mm256_load_si256((const __m256i *)(weight + k * 16 + 8));                 \
            N_##ROWS(FIXED_DOT)                                                                    \
        }                                                                                          \
        N_##ROWS(FIXED_KEEP)                                                                       \
    }
FIXED_PASS(1)
FIXED_PASS(2)
FIXED_PASS(3)
FIXED_PASS(4)
FIXED_PASS(5)
FIXED_PASS(6)

typedef void (*FixedPass)(const uint32_t *, const int16_t *, int, const uint32_t *, f16 (*)[4]);
static const FixedPass fixed_passes[] = {NULL,    fixed_1, fixed_2, fixed_3,
                                         fixed_4, fixed_5, fixed_6};

void product(const Linear *linear, int group, const Operand *x, int first, int rows, int part,
             int parts, const uint32_t *ahead, f16 (*acc)[4]) {
    (void)part;
    (void)parts;
    int in = x->in;
    const uint32_t *weight = group_of(linear, group);
    for (int m = 0; m < 4; m++, weight += in * 8)
        fixed_passes[rows](weight, x->coarse + (size_t)first * in, in,
                           m < 3 ? weight + in * 8 : ahead, (f16(*)[4]) & acc[0][m]);
    weight -= in * 32;
    const float *unit = linear->scale + group * 64;
    for (int r = 0; r < rows; r++) {
        float *out = (float *)acc[r];
        for (int i = 0; i < 64; i += LANES)
            store_v(out + i, load_v(out + i) * (load_v(unit + i) * all(x->scale[first + r])));
        if (x->fine_scale[first + r] == 0.0f)
            continue;
        f16 fine[1][4];
        for (int m = 0; m < 4; m++)
            fixed_1(weight + in * 8 * m, x->fine + (size_t)(first + r) * in, in, ahead,
                    (f16(*)[4]) & fine[0][m]);
        for (int m = 0; m < 4; m++)
            acc[r][m] += fine[0][m] * (load(unit + m * 16) * splat(x->fine_scale[first + r]));
    }
}
#endif
