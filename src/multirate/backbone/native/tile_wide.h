// The innermost product with 512-bit registers, and on every other processor: 64 outputs × up to 6 rows.
#ifndef MULTIRATE_TILE_WIDE_H
#define MULTIRATE_TILE_WIDE_H
#include "kernel.h"

typedef bf16 element;  // of the rows of a product
INLINE void store_elements(element *to, f16 v) { store_bf16(to, v); }
INLINE void store_element_v(element *to, fv v) {
#if LANES == 16
    store_bf16(to, (f16)v);
#else
    for (int i = 0; i < LANES; i++) to[i] = to_bf16(v[i]);
#endif
}

// 4 vectors × 6 rows are 24 accumulators, all in registers. They have names instead of an array: compilers otherwise
// spill the array to the stack on every step. Half-groups × 12 rows, which would pass over the weights once for a
// dozen rows, measured slower (docs/experiments.md).
#define ROW(n) const uint32_t *row##n = (const uint32_t *)rows[n];
#define LOAD(n, m) f16 a##n##m = acc[n][m];
#define DOT(n, m) a##n##m = dot_pairs(a##n##m, w##m, pair);
#define KEEP(n, m) acc[n][m] = a##n##m;
#define WEIGHT(m) u16 w##m = load_pairs(weight + m * 16);
#define M_1(F, n) F(n, 0)
#define M_4(F, n) M_1(F, n) F(n, 1) F(n, 2) F(n, 3)
#define W_1(F) F(0)
#define W_4(F) W_1(F) F(1) F(2) F(3)
#define LOADS_1(n) M_1(LOAD, n)
#define LOADS_4(n) M_4(LOAD, n)
#define DOTS_1(n) { uint32_t pair = row##n[k]; M_1(DOT, n) }
#define DOTS_4(n) { uint32_t pair = row##n[k]; M_4(DOT, n) }
#define KEEPS_1(n) M_1(KEEP, n)
#define KEEPS_4(n) M_4(KEEP, n)
#define PREFETCH_STEPS 12  // steps of 256 bytes ahead
#define PASS(ROWS, VECTORS) \
    static void pass_##ROWS##_##VECTORS(const uint32_t *weight, int step, const element *const *rows, int pairs, f16 (*acc)[4]) { \
        N_##ROWS(ROW) \
        N_##ROWS(LOADS_##VECTORS) \
        for (long k = 0; k < pairs; k++, weight += step) { \
            const uint32_t *ahead = weight + step * PREFETCH_STEPS; \
            for (int line = 0; line < VECTORS; line++) __builtin_prefetch(ahead + 16 * line); \
            W_##VECTORS(WEIGHT) \
            N_##ROWS(DOTS_##VECTORS) \
        } \
        N_##ROWS(KEEPS_##VECTORS) \
    }
PASS(1, 4) PASS(2, 4) PASS(3, 4) PASS(4, 4) PASS(5, 4) PASS(6, 4)
PASS(1, 1) PASS(2, 1) PASS(3, 1) PASS(4, 1) PASS(5, 1) PASS(6, 1)

typedef void (*Pass)(const uint32_t *, int, const element *const *, int, f16 (*)[4]);
static const Pass pass_of[TILE_ROWS + 1][2] = {
    {NULL, NULL}, {pass_1_1, pass_1_4}, {pass_2_1, pass_2_4}, {pass_3_1, pass_3_4},
    {pass_4_1, pass_4_4}, {pass_5_1, pass_5_4}, {pass_6_1, pass_6_4},
};

// acc[n][m] += Σ_k w[k][m] · rows[n][k], for `rows` rows and `vectors` (1 to 4) vectors of 16 outputs. The words of
// pair k are at weight + k · step. `ahead` (memory that will be read next) is for narrower tiles.
static void tile(const uint32_t *weight, int step, const element *const *x, int rows, int pairs, int vectors,
                 const char *ahead, f16 (*acc)[4]) {
    (void)ahead;
    if (vectors == 4) { pass_of[rows][1](weight, step, x, pairs, acc); return; }
    for (int m = 0; m < vectors; m++) pass_of[rows][0](weight + m * 16, step, x, pairs, (f16 (*)[4])&acc[0][m]);
}
#endif
