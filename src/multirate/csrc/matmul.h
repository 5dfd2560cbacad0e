// y = W x for a few rows of x, reading each packed weight once for all rows.
//
// Each output is summed over k in one fixed order by one accumulator, whatever the number of rows:
// a row's result is bit-identical alone or beside others. This is what makes bf16 verification exact.
#ifndef MULTIRATE_MATMUL_H
#define MULTIRATE_MATMUL_H
#include "kernel.h"
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__) && !defined(MULTIRATE_WIDE)
#include "tile_avx2.h"
#include "workspace.h"
#include "fixed_point.h"
#define FIXED_POINT 1
#else
#include "tile_wide.h"
#include "workspace.h"
#define FIXED_POINT 0
#endif

enum { STORE, ADD, SILU_GATE };  // what happens to the 64 outputs of a group

typedef struct {
    float *y;             // STORE, ADD: [rows, stride]
    element *activation;  // SILU_GATE: [rows, stride]: silu(gate)·up, 32 of each per group
    int stride;
} Output;

// How many of `left` rows the next tile takes: even parts, 8 rows as 4 + 4.
INLINE int tile_share(int left) {
    int parts = (left + TILE_ROWS - 1) / TILE_ROWS;
    return (left + parts - 1) / parts;
}

#if !FIXED_POINT
typedef struct {
    const element *const *rows;
} Operand;
static Operand operand(ThreadScratch *mine, const element *const *x, int rows, int in) {
    (void)mine; (void)rows; (void)in;
    return (Operand){x};
}
// acc[r] = the 64 outputs of `group` for rows first + r, without bias, as tile `part` of `parts`.
static void product(const Linear *linear, int group, const Operand *x, int first, int rows, int part, int parts,
                    const uint32_t *ahead, f16 (*acc)[4]) {
    int pairs = linear->in / 2, lines = parts == 1 ? 0 : parts < 4 ? 2 : 1;
    if (lines && part >= 4 / lines) lines = 0;  // the tiles before have fetched it all
    memset(acc, 0, (size_t)rows * sizeof *acc);
    tile(group_of(linear, group), 64, x->rows + first, rows, pairs, 4, (const char *)(ahead + (size_t)part * pairs * 16 * lines), lines, acc);
}
#endif

// Groups [begin, end) of the outputs. Row r of the result goes to output row `target[r]` (or r itself when target is
// NULL). `after`: the weights that come next, or NULL; they travel while these ones' last are multiplied.
static void matmul_groups(const Linear *linear, const Operand *x, int rows, const int *target, int mode, Output out,
                          int begin, int end, const uint32_t *after) {
    int parts = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int g = begin; g < end; g++) {
        const uint32_t *ahead = g + 1 < end ? group_of(linear, g + 1) : after ? after : group_of(linear, g);
        for (int r0 = 0, part = 0, take; r0 < rows; r0 += take, part++) {
            take = tile_share(rows - r0);  // the later ones find the group's weights in the core's own cache
            f16 acc[TILE_ROWS][4];
            product(linear, g, x, r0, take, part, parts, ahead, acc);
            for (int r = 0; r < take; r++) {
                size_t row = target ? target[r0 + r] : r0 + r;
                if (linear->bias)
                    for (int m = 0; m < 4; m++) acc[r][m] += load(linear->bias + g * 64 + m * 16);
                if (mode == SILU_GATE) {
                    element *to = out.activation + row * out.stride + g * 32;
                    const float *gate = (const float *)acc[r], *up = gate + 32;
                    for (int i = 0; i < 32; i += LANES) store_element_v(to + i, silu_vector(load_v(gate + i)) * load_v(up + i));
                    continue;
                }
                float *to = out.y + row * out.stride + g * 64;
                for (int m = 0; m < 4; m++)
                    store(to + m * 16, mode == ADD ? load(to + m * 16) + acc[r][m] : acc[r][m]);
            }
        }
    }
}

// The first group that thread `thread` of `threads` computes.
static inline int first_group(const Linear *linear, int thread, int threads) { return linear->out / 64 * thread / threads; }

// Thread `thread` of `threads` computes its share. x[n]: rows of length linear->in. `then`: the product that comes next,
// shared out the same way, or NULL.
static void matmul(Workspace *work, const Linear *linear, const element *const *x, int rows, const int *target, int mode, Output out,
                   const Linear *then, int thread, int threads) {
    Operand operands = operand(&work->own[thread], x, rows, linear->in);
    matmul_groups(linear, &operands, rows, target, mode, out, first_group(linear, thread, threads),
                  first_group(linear, thread + 1, threads), then ? group_of(then, first_group(then, thread, threads)) : NULL);
}
#endif
