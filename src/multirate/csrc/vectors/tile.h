// The innermost product: 16 to 64 outputs of bf16 weights for up to 6 rows.
//
// Weights become fp32 in registers (a mask, a shift), and a row's input is broadcast from memory.
// Outputs are summed k by k, the odd input of a pair first, in registers.
#ifndef MULTIRATE_TILE_H
#define MULTIRATE_TILE_H
#include "simd.h"

#if LANES == 16 || defined(__aarch64__)
#define WIDE_TILES 1 // 32 registers, which hold the sums of 4 vectors of 6 rows
#else
#define WIDE_TILES 0
#endif

// What a pass reads, and at each step fetches: `lines` lines, `gap` words apart, from `ahead` on,
// which goes on by `stride` words.
typedef struct {
    const uint32_t *weight, *ahead;
    long step, gap, stride; // words between pairs, and between the vectors of a pair
    const float *const *rows;
    int pairs, lines, near; // near: into the core's first cache, not its second
} TilePass;

INLINE uv load_words(const uint32_t *p) {
    uv words;
    memcpy(&words, p, sizeof words);
    return words;
}

INLINE void tile_pass(int rows, int vectors, TilePass p, f16 (*acc)[4]) {
    const float *row[TILE_ROWS];
    fv sum[TILE_ROWS][4 * PARTS];
    EACH (n, rows) {
        row[n] = p.rows[n];
        EACH (m, vectors * PARTS)
            sum[n][m] = load_v((const float *)acc[n] + m * LANES);
    }
    for (long k = 0; k < p.pairs; k++, p.weight += p.step, p.ahead += p.stride) {
        EACH (line, p.lines)
            fetch(p.ahead + p.gap * line, p.near);
        EACH (half, 2) {
            int odd = 1 - half;
            fv w[4 * PARTS];
            EACH (m, vectors * PARTS) {
                uv words = load_words(p.weight + m / PARTS * p.gap + m % PARTS * LANES);
                w[m] = (fv)(odd ? words & 0xffff0000u : words << 16);
            }
            EACH (n, rows) {
                fv x = all(row[n][2 * k + odd]);
                EACH (m, vectors * PARTS)
                    sum[n][m] = fma_v(w[m], x, sum[n][m]);
            }
        }
    }
    EACH (n, rows)
        EACH (m, vectors * PARTS)
            store_v((float *)acc[n] + m * LANES, sum[n][m]);
}

// The same pass, fetching so many lines one after the other.
INLINE TilePass lines_a_step(TilePass p, int lines) {
    p.lines = lines;
    p.stride = 16 * lines;
    return p;
}

// The pass for so many rows, with code of its own for each number.
INLINE void tile_passes(int rows, int vectors, TilePass p, f16 (*acc)[4]) {
    switch (rows) { CASES_TO_6(tile_pass, vectors, p, acc) }
}

#if WIDE_TILES
#define PREFETCH_STEPS 12 // steps of 256 bytes ahead

// Where a group's rows take several tiles, each fetches a share of the next group's weights:
// otherwise memory would idle from the second tile on. Into the second cache, as the first has no
// room for two groups.
static void tile(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                 int vectors, const char *ahead, int lines, f16 (*acc)[4]) {
    TilePass own = {weight, weight + PREFETCH_STEPS * (long)step, step, 16, step, x, pairs, 4, 1},
             next = {weight, (const uint32_t *)ahead, step, 16, 0, x, pairs, 0, 0};
    if (vectors == 4 && !lines) {
        tile_passes(rows, 4, own, acc);
    } else if (vectors == 4 && lines == 1) {
        tile_passes(rows, 4, lines_a_step(next, 1), acc);
    } else if (vectors == 4) {
        tile_passes(rows, 4, lines_a_step(next, 2), acc);
    } else {
        own.lines = 1;
        for (int m = 0; m < vectors; m++, own.weight += 16, own.ahead += 16)
            tile_passes(rows, 1, own, (f16(*)[4]) & acc[0][m]);
    }
}

// acc[n][m] += K · rows[n] for four consecutive blocks m of 16 keys, of `pairs` pairs each. Four
// blocks at once: one leaves each sum waiting for its own last step. What is fetched lies as far
// into the next four.
static void tile_blocks(const uint32_t *weight, const float *const *x, int rows, int pairs,
                        f16 (*acc)[4]) {
    long gap = (long)pairs * 16;
    tile_passes(rows, 4, (TilePass){weight, weight + 4 * gap, 16, gap, 16, x, pairs, 4, 1}, acc);
}
#elif LANES == 8
// As many vectors at a time as take at most 12 of the 16 registers, and where possible the 8 that
// hide a multiplication's latency. All fetch from `ahead` on.
static void tile(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                 int vectors, const char *ahead, int lines, f16 (*acc)[4]) {
    (void)lines;
    TilePass p = {weight, (const uint32_t *)ahead, step, 16, 0, x, pairs, 0, 0};
    for (int m = 0, take; m < vectors; m += take) {
        f16(*to)[4] = (f16(*)[4]) & acc[0][m]; // a pass addresses its vectors from 0
        take = rows == 1 && m + 4 <= vectors ? 4 : rows == 2 && m + 2 <= vectors ? 2 : 1;
        if (take == 4)
            tile_pass(1, 4, lines_a_step(p, 4), to);
        else if (take == 2)
            tile_pass(2, 2, lines_a_step(p, 2), to);
        else
            tile_passes(rows, 1, lines_a_step(p, 1), to);
        p.weight += 16 * take;
        p.ahead += (size_t)take * pairs * 16;
    }
}
#else
// Where no instruction multiplies and adds with one rounding, which is so slow that nothing else
// matters.
static void tile(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                 int vectors, const char *ahead, int lines, f16 (*acc)[4]) {
    (void)ahead;
    (void)lines;
    for (int n = 0; n < rows; n++)
        for (int m = 0; m < vectors; m++)
            tile_pass(1, 1, (TilePass){weight + m * 16, NULL, step, 16, 0, x + n, pairs, 0, 0},
                      (f16(*)[4]) & acc[n][m]);
}
#endif
#endif
