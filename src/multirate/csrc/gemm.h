// Products of a few rows with packed weights (gemm.c), split among the threads of a call.
#ifndef MULTIRATE_GEMM_H
#define MULTIRATE_GEMM_H
#include "operand.h"
#include "threads.h"

// What threads share out: columns, or for gates and bf16 weights, which lie group by group, groups.
static inline int unit_of(const Linear *linear, int whole) {
    int by_groups = !linear->columns && format_of(linear->format)->rows == ROWS_FLOAT;
    return whole || by_groups ? GROUP_COLUMNS : 1;
}

// The first column that thread `thread` of `threads` computes. whole: groups are not parted.
static inline int first_column(const Linear *linear, int whole, int thread, int threads) {
    int unit = unit_of(linear, whole);
    return (int)((long)linear->outputs / COLUMN / unit * thread / threads) * unit;
}

// The rows x [rows] for a layer.
void prepare(Operand *out, ThreadScratch *mine, const Linear *linear, const float *const *x,
             int rows);

// How a model's gates are passed.
static inline int gate_of(const Shape *shape) {
    return shape->activation == ACTIVATION_GELU ? GELU_GATE : SILU_GATE;
}

// Columns [begin, end) of the outputs. Row r of the result goes to output row `target[r]` (or r
// itself when target is NULL). `then`: the weights that come next, or NULL; they travel while
// these ones' last are multiplied.
void matmul_columns(const Linear *linear, const Operand *x, const int *target, int mode, Output out,
                    int begin, int end, const char *then);

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
