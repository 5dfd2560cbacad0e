// Products of a few rows with packed weights (gemm.c), split among the threads of a call.
#ifndef MULTIRATE_GEMM_H
#define MULTIRATE_GEMM_H
#include "fixed_tile.h"
#include "threads.h"

// What threads share out: 16 outputs are a column, 64 a group. Integer weights lie column by
// column; those of bf16 group by group, so that their shares are whole groups.
#define GROUP_COLUMNS 4

// Packed outputs from 16 · column on; of bf16 weights, whole groups.
static inline const uint32_t *column_of(const Linear *linear, int column) {
    int words; // of 16 outputs, for each input
    switch (linear->format) {
    case WEIGHTS_BF16:
    case WEIGHTS_INT16:
        words = 8;
        break;
    case WEIGHTS_INT12:
        words = 6;
        break;
    case WEIGHTS_W4A8:
    case WEIGHTS_W4A16:
        words = 2;
        break;
    default:
        words = 4;
    }
    return linear->weight + (size_t)column * linear->inputs * words;
}

// The first column that thread `thread` of `threads` computes. whole: groups are not parted.
static inline int first_column(const Linear *linear, int whole, int thread, int threads) {
    int unit = whole || linear->format == WEIGHTS_BF16 ? GROUP_COLUMNS : 1;
    return (int)((long)linear->outputs / 16 / unit * thread / threads) * unit;
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
    const float *const *rows; // of bf16 weights
#if INTEGER_PRODUCTS
    // Of integer weights: each tile's rows as fixed_arrange, or prepare_bytes, leaves them.
    const int16_t *arranged[MAX_ROWS];
    int lanes[MAX_ROWS]; // of each tile: what its rows take
    float scale[MAX_ROWS];
    const Outliers *outliers;    // of the rows of WEIGHTS_INT16, INT12 and INT8
    float rounded_off[MAX_ROWS]; // of those of WEIGHTS_W8A8: the norm of what the copy lacks
#endif
} Operand;

void prepare(Operand *out, ThreadScratch *mine, const Linear *linear, const float *const *x,
             int rows);

#if INTEGER_PRODUCTS
// fixed_point.c: the same for integer weights with `in` inputs, and a tile's product.
void prepare_fixed(Operand *out, ThreadScratch *mine, const float *const *x, int rows, int in);
// Of columns [first, last) of one group; acc[.][m] is the group's m-th.
void product_fixed(const Linear *linear, int first, int last, const Operand *x, int tile,
                   const uint32_t *after, f16 (*acc)[4]);
#endif

#if BYTE_PRODUCTS
static inline int half_byte_weights(const Linear *linear) {
    return linear->format == WEIGHTS_W4A8 || linear->format == WEIGHTS_W4A16;
}
static inline int byte_weights(const Linear *linear) {
    return linear->format == WEIGHTS_W8A8 || linear->format == WEIGHTS_W8A16;
}
#define BYTE_LANES 12 // rows of a tile at most: each takes two registers
// byte_rows.c: rows of 8 bits for the weights of w8a8.c and w4a8.c.
void prepare_bytes(Operand *out, ThreadScratch *mine, const Linear *linear, const float *const *x,
                   int rows);
// w8a8.c, w4a8.c: a tile's product.
void product_bytes(const Linear *linear, int first, int last, const Operand *x, int tile,
                   const uint32_t *after, f16 (*acc)[4]);
void product_half_bytes(const Linear *linear, int first, int last, const Operand *x, int tile,
                        const uint32_t *after, f16 (*acc)[4]);
#endif

// What happens to the outputs; gates: of whole groups.
enum { STORE, ADD, SILU_GATE, GELU_GATE };

static inline int is_gate(int mode) {
    return mode == SILU_GATE || mode == GELU_GATE;
}
// How a model's gates are passed.
static inline int gate_of(const Shape *shape) {
    return shape->activation == ACTIVATION_GELU ? GELU_GATE : SILU_GATE;
}
INLINE fv gate_vector(int mode, fv gate) {
    return mode == GELU_GATE ? gelu_vector(gate) : silu_vector(gate);
}

typedef struct {
    float *y;          // STORE, ADD: [rows, stride]
    float *activation; // gates: [rows, stride]: gate_vector(gate) · up, 32 of each per group
    int stride;
} Output;

// Columns [begin, end) of the outputs. Row r of the result goes to output row `target[r]` (or r
// itself when target is NULL). `then`: the weights that come next, or NULL; they travel while
// these ones' last are multiplied.
void matmul_columns(const Linear *linear, const Operand *x, const int *target, int mode, Output out,
                    int begin, int end, const uint32_t *then);

// Thread `thread` of `threads` computes its share. x[n]: rows of length linear->inputs. `then`: the
// product that comes next, or NULL. whole: groups are not parted, for products that another one's
// share has to match, whatever the formats of both: where each thread goes on with its own outputs;
// and for gates.
void matmul(Workspace *work, const Linear *linear, const float *const *x, int rows,
            const int *target, int mode, int whole, Output out, const Linear *then, int thread,
            int threads);

// The same, but a thread that is done goes on with others' outputs (shares.c). All threads meet
// after it, before the next such product.
void matmul_balanced(Workspace *work, const Linear *linear, const float *const *x, int rows,
                     int mode, Output out, const Linear *then, int thread, int threads);

// to[n] = row index[n] (or n, when NULL) of `base`. Returns `to`.
const float **row_pointers(const float *base, int stride, const int *index, int count,
                           const float **to);

// First half of a low-rank site: work->low_in [count, rank] = A x (or SiLU of it) for the listed
// rows. Ends in a barrier.
void low_rank_in(Workspace *work, const LowRank *site, const float *base, int stride,
                 const int *index, int count, int id, int threads);
// Second half: y[index[n]] += B low_in[n]; every thread adds to the whole groups that it owns.
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
