// The innermost product with 512-bit registers, and on every other processor: 64 outputs × up to 6
// rows.
#ifndef MULTIRATE_TILE_WIDE_H
#define MULTIRATE_TILE_WIDE_H
#include "../weights/arch/rows_of_tile.h"
#include "simd.h"

// 4 vectors × 6 rows are 24 accumulators, all in registers. They have names instead of an array:
// compilers otherwise spill the array to the stack on every step. Half-groups × 12 rows, which
// would pass over the weights once for a dozen rows, measured slower (lab/notes/decode-loop.md).
#define LOAD(n, m) f16 a##n##m = acc[n][m];
#define KEEP_SUM(n, m) acc[n][m] = a##n##m;
#define M_1(F, n) F(n, 0)
#define M_4(F, n) M_1(F, n) F(n, 1) F(n, 2) F(n, 3)
#define W_1(F) F(0)
#define W_4(F) W_1(F) F(1) F(2) F(3)
#define LOADS_1(n) M_1(LOAD, n)
#define LOADS_4(n) M_4(LOAD, n)
// The weights become fp32 in registers, the odd one of a pair first.
#define FLOATS(n) const float *row##n = rows[n];
#define ODD(m) f16 w##m = (f16)(load_pairs(weight + m * gap) & 0xffff0000u);
#define EVEN(m) f16 w##m = (f16)(load_pairs(weight + m * gap) << 16);
#define ADD_PRODUCT(n, m) a##n##m = fma16(w##m, x, a##n##m);
#define ODDS_1(n)                                                                                  \
    {                                                                                              \
        f16 x = splat(row##n[2 * k + 1]);                                                          \
        M_1(ADD_PRODUCT, n)                                                                        \
    }
#define ODDS_4(n)                                                                                  \
    {                                                                                              \
        f16 x = splat(row##n[2 * k + 1]);                                                          \
        M_4(ADD_PRODUCT, n)                                                                        \
    }
#define EVENS_1(n)                                                                                 \
    {                                                                                              \
        f16 x = splat(row##n[2 * k]);                                                              \
        M_1(ADD_PRODUCT, n)                                                                        \
    }
#define EVENS_4(n)                                                                                 \
    {                                                                                              \
        f16 x = splat(row##n[2 * k]);                                                              \
        M_4(ADD_PRODUCT, n)                                                                        \
    }
#define STEP(ROWS, VECTORS)                                                                        \
    {                                                                                              \
        W_##VECTORS(ODD) N_##ROWS(ODDS_##VECTORS)                                                  \
    }                                                                                              \
    {W_##VECTORS(EVEN) N_##ROWS(EVENS_##VECTORS)}
#define KEEPS_1(n) M_1(KEEP_SUM, n)
#define KEEPS_4(n) M_4(KEEP_SUM, n)
#define PREFETCH_STEPS 12 // steps of 256 bytes ahead
// GAP: words between the vectors of a step. FETCH: where step k fetches LINES lines. HINT: 3 into
// the core's first cache, 2 into its second.
#define TILE_PASS(NAME, ROWS, VECTORS, GAP, FETCH, LINES, HINT)                                    \
    static void NAME##_##ROWS(const uint32_t *weight, int step, const float *const *rows,          \
                              int pairs, const uint32_t *next, f16(*acc)[4]) {                     \
        (void)next;                                                                                \
        const long gap = GAP;                                                                      \
        N_##ROWS(FLOATS)                                                                           \
            N_##ROWS(LOADS_##VECTORS) for (long k = 0; k < pairs; k++, weight += step) {           \
            const uint32_t *ahead = FETCH;                                                         \
            for (int line = 0; line < LINES; line++)                                               \
                __builtin_prefetch(ahead + gap * line, 0, HINT);                                   \
            STEP(ROWS, VECTORS)                                                                    \
        }                                                                                          \
        N_##ROWS(KEEPS_##VECTORS)                                                                  \
    }
#define TILE_PASSES(NAME, VECTORS, GAP, FETCH, LINES, HINT)                                        \
    TILE_PASS(NAME, 1, VECTORS, GAP, FETCH, LINES, HINT)                                           \
    TILE_PASS(NAME, 2, VECTORS, GAP, FETCH, LINES, HINT)                                           \
    TILE_PASS(NAME, 3, VECTORS, GAP, FETCH, LINES, HINT)                                           \
    TILE_PASS(NAME, 4, VECTORS, GAP, FETCH, LINES, HINT)                                           \
    TILE_PASS(NAME, 5, VECTORS, GAP, FETCH, LINES, HINT)                                           \
    TILE_PASS(NAME, 6, VECTORS, GAP, FETCH, LINES, HINT)
#define OWN_WEIGHTS weight + step *PREFETCH_STEPS
// Keys and values. Four blocks of 16 keys at once: one block leaves each sum waiting for its own
// last step. What is fetched lies as far into the next four.
TILE_PASSES(narrow, 1, 16, OWN_WEIGHTS, 1, 3)
TILE_PASSES(wide, 4, 16, OWN_WEIGHTS, 4, 3)
TILE_PASSES(blocks, 4, (long)pairs * 16, weight + 4 * gap, 4, 3)
// Where a group's rows take several tiles, each fetches a share of the next group's weights:
// otherwise memory would idle from the second tile on. Into the second cache, as the first has no
// room for two groups.
TILE_PASSES(half, 4, 16, next + 32 * k, 2, 2)
TILE_PASSES(quarter, 4, 16, next + 16 * k, 1, 2)

typedef void (*TilePass)(const uint32_t *, int, const float *const *, int, const uint32_t *,
                         f16 (*)[4]);
#define PASSES_OF(NAME) {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6}
static const TilePass narrow_pass[TILE_ROWS + 1] = PASSES_OF(narrow);
static const TilePass blocks_pass[TILE_ROWS + 1] = PASSES_OF(blocks);
static const TilePass wide_pass[3][TILE_ROWS + 1] = {PASSES_OF(wide), PASSES_OF(quarter),
                                                     PASSES_OF(half)};

static void tile(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                 int vectors, const char *ahead, int lines, f16 (*acc)[4]) {
    if (vectors == 4) {
        wide_pass[lines][rows](weight, step, x, pairs, (const uint32_t *)ahead, acc);
        return;
    }
    for (int m = 0; m < vectors; m++)
        narrow_pass[rows](weight + m * 16, step, x, pairs, NULL, (f16(*)[4]) & acc[0][m]);
}

// acc[n][m] += K · rows[n] for four consecutive blocks m of 16 keys, of `pairs` pairs each.
#define HAVE_TILE_BLOCKS
static void tile_blocks(const uint32_t *weight, const float *const *x, int rows, int pairs,
                        f16 (*acc)[4]) {
    blocks_pass[rows](weight, 16, x, pairs, NULL, acc);
}
#endif
