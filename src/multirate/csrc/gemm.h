// Products of a few rows with packed weights (gemm.c), shared out among the threads of a call.
#ifndef MULTIRATE_GEMM_H
#define MULTIRATE_GEMM_H
#include "fixed_tile.h"
#include "threads.h"

// Packed outputs [64 · group, 64 · (group + 1)).
static inline const uint32_t *group_of(const Linear *linear, int group) {
    return linear->weight +
           (size_t)group * linear->inputs * (linear->format == WEIGHTS_INT8 ? 16 : 32);
}

// The first group that thread `thread` of `threads` computes.
static inline int first_group(const Linear *linear, int thread, int threads) {
    return linear->outputs / 64 * thread / threads;
}

// How many of `left` rows the next tile takes: even parts, 8 rows as 4 + 4.
INLINE int tile_share(int left) {
    int parts = (left + TILE_ROWS - 1) / TILE_ROWS;
    return (left + parts - 1) / parts;
}

// Rows of a tile at most, whatever the format.
#if INTEGER_PRODUCTS
#define PRODUCT_ROWS (FIXED_LANES > TILE_ROWS ? FIXED_LANES : TILE_ROWS)
#else
#define PRODUCT_ROWS TILE_ROWS
#endif

// The rows of a product as its weights need them, in tiles of rows [begin[t], begin[t + 1]).
typedef struct {
    int tiles;
    int begin[MAX_ROWS + 1];
    const element *const *rows; // of bf16 weights
#if INTEGER_PRODUCTS
    // Of integer weights: each tile's rows and then, in the same order, the finer ones of those
    // whose fine_scale is not zero, as fixed_arrange leaves them.
    const int16_t *arranged[MAX_ROWS];
    int lanes[MAX_ROWS]; // rows and finer rows of each tile
    float scale[MAX_ROWS], fine_scale[MAX_ROWS];
#endif
} Operand;

void prepare(Operand *out, ThreadScratch *mine, const Linear *linear, const element *const *x,
             int rows);

#if INTEGER_PRODUCTS
// fixed_point.c: the same for integer weights with `in` inputs, and a tile's product.
void prepare_fixed(Operand *out, ThreadScratch *mine, const element *const *x, int rows, int in);
void product_fixed(const Linear *linear, int group, const Operand *x, int tile,
                   const uint32_t *after, f16 (*acc)[4]);
#endif

enum { STORE, ADD, SILU_GATE }; // what happens to the 64 outputs of a group

typedef struct {
    float *y;            // STORE, ADD: [rows, stride]
    element *activation; // SILU_GATE: [rows, stride]: silu(gate)·up, 32 of each per group
    int stride;
} Output;

// Groups [begin, end) of the outputs. Row r of the result goes to output row `target[r]` (or r
// itself when target is NULL). `then`: the weights that come next, or NULL; they travel while
// these ones' last are multiplied.
void matmul_groups(const Linear *linear, const Operand *x, const int *target, int mode, Output out,
                   int begin, int end, const uint32_t *then);

// Thread `thread` of `threads` computes its share. x[n]: rows of length linear->inputs. `then`: the
// product that comes next, shared out the same way, or NULL.
void matmul(Workspace *work, const Linear *linear, const element *const *x, int rows,
            const int *target, int mode, Output out, const Linear *then, int thread, int threads);

// to[n] = row index[n] (or n, when NULL) of `base`. Returns `to`.
const element **row_pointers(const element *base, int stride, const int *index, int count,
                             const element **to);

// First half of a low-rank site: work->low_in [count, rank] = A x (or SiLU of it) for the listed
// rows. Ends in a barrier.
void low_rank_in(Workspace *work, const LowRank *site, const element *base, int stride,
                 const int *index, int count, int id, int threads);
// Second half: y[index[n]] += B low_in[n]; every thread writes the outputs it owns.
void low_rank_out(Workspace *work, const LowRank *site, float *y, int stride, const int *index,
                  int count, int id, int threads);

// A product by itself (mr_linear), of at most MAX_ROWS rows.
typedef struct {
    const Linear *linear;
    const float *x, *norm;
    float *y;
    int count, mode;
    float eps;
} Product;

void run_product(Workspace *work, void *context, int id, int threads);
// The same where y is x: no thread writes before all have read.
void run_product_in_place(Workspace *work, const Product *p, int id, int threads);
#endif
