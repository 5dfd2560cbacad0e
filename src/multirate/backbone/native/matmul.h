// y = W x for a few rows of x, reading each packed weight once for all rows.
//
// Each output is summed over k in one fixed order by one accumulator, whatever the number of rows:
// a row's result is bit-identical alone or beside others. This is what makes bf16 verification exact.
#ifndef MULTIRATE_MATMUL_H
#define MULTIRATE_MATMUL_H
#include "kernel.h"

enum { STORE, ADD, SILU_GATE };  // what happens to the 64 outputs of a group

typedef struct {
    float *y;          // STORE, ADD: [rows, stride]
    bf16 *activation;  // SILU_GATE: [rows, stride]: silu(gate)·up, 32 of each per group
    int stride;
} Output;

// A tile is a group of 64 outputs (4 vectors) × up to 6 rows: 24 accumulators, all in registers. They have names
// instead of an array: compilers otherwise spill the array to the stack on every step. Half-groups × 12 rows, which
// would pass over the weights once for a dozen rows, measured slower (docs/experiments.md).
#define ZERO_ROW(n) f16 a##n##0 = splat(0.0f), a##n##1 = a##n##0, a##n##2 = a##n##0, a##n##3 = a##n##0;
#define STEP_ROW(n) { uint32_t pair = x[n][k]; \
    a##n##0 = dot_pairs(a##n##0, w0, pair); a##n##1 = dot_pairs(a##n##1, w1, pair); \
    a##n##2 = dot_pairs(a##n##2, w2, pair); a##n##3 = dot_pairs(a##n##3, w3, pair); }
#define KEEP_ROW(n) acc[n][0] = a##n##0; acc[n][1] = a##n##1; acc[n][2] = a##n##2; acc[n][3] = a##n##3;
#define EACH_1(F) F(0)
#define EACH_2(F) EACH_1(F) F(1)
#define EACH_3(F) EACH_2(F) F(2)
#define EACH_4(F) EACH_3(F) F(3)
#define EACH_5(F) EACH_4(F) F(4)
#define EACH_6(F) EACH_5(F) F(5)
#define TILE_ROWS 6
#define PREFETCH_STEPS 12  // steps of 256 bytes ahead
#define GROUP_ROWS(ROWS) \
    static void group_##ROWS(const uint32_t *weight, const uint32_t *const *rows, int pairs, f16 acc[TILE_ROWS][4]) { \
        const uint32_t *x[ROWS]; \
        for (int n = 0; n < ROWS; n++) x[n] = rows[n]; \
        EACH_##ROWS(ZERO_ROW) \
        for (int k = 0; k < pairs; k++, weight += 64) { \
            const uint32_t *ahead = weight + 64 * PREFETCH_STEPS; \
            __builtin_prefetch(ahead); __builtin_prefetch(ahead + 16); \
            __builtin_prefetch(ahead + 32); __builtin_prefetch(ahead + 48); \
            u16 w0 = load_pairs(weight), w1 = load_pairs(weight + 16); \
            u16 w2 = load_pairs(weight + 32), w3 = load_pairs(weight + 48); \
            EACH_##ROWS(STEP_ROW) \
        } \
        EACH_##ROWS(KEEP_ROW) \
    }
GROUP_ROWS(1)
GROUP_ROWS(2)
GROUP_ROWS(3)
GROUP_ROWS(4)
GROUP_ROWS(5)
GROUP_ROWS(6)

typedef void (*GroupRows)(const uint32_t *, const uint32_t *const *, int, f16[TILE_ROWS][4]);
static const GroupRows group_of[TILE_ROWS + 1] = {NULL, group_1, group_2, group_3, group_4, group_5, group_6};

// Thread `thread` of `threads` computes its groups. x[n]: bf16 rows of length linear->in; row r of the
// result goes to output row `target[r]` (or r itself when target is NULL).
static void matmul(const Linear *linear, const bf16 *const *x, int rows, const int *target, int mode, Output out,
                   int thread, int threads) {
    int groups = linear->out / 64, pairs = linear->in / 2;
    int first = groups * thread / threads, last = groups * (thread + 1) / threads;
    for (int g = first; g < last; g++) {
        const uint32_t *weight = linear->weight + (size_t)g * pairs * 64;
        for (int r0 = 0, take; r0 < rows; r0 += take) {
            // even parts, 8 rows as 4 + 4: the later ones find the group's weights in the core's own cache
            int left = rows - r0, parts = (left + TILE_ROWS - 1) / TILE_ROWS;
            take = (left + parts - 1) / parts;
            f16 acc[TILE_ROWS][4];
            group_of[take](weight, (const uint32_t *const *)(x + r0), pairs, acc);
            for (int r = 0; r < take; r++) {
                size_t row = target ? target[r0 + r] : r0 + r;
                if (linear->bias)
                    for (int m = 0; m < 4; m++) acc[r][m] += load(linear->bias + g * 64 + m * 16);
                if (mode == SILU_GATE) {
                    bf16 *to = out.activation + row * out.stride + g * 32;
                    for (int m = 0; m < 2; m++) store_bf16(to + m * 16, silu_vector(acc[r][m]) * acc[r][m + 2]);
                    continue;
                }
                float *to = out.y + row * out.stride + g * 64;
                for (int m = 0; m < 4; m++)
                    store(to + m * 16, mode == ADD ? load(to + m * 16) + acc[r][m] : acc[r][m]);
            }
        }
    }
}
#endif
