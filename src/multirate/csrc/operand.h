// The rows of a product as its weights need them (gemm.c, fixed_point.c).
#ifndef MULTIRATE_OPERAND_H
#define MULTIRATE_OPERAND_H
#include "weights/arch.h"
#include "workspace.h"

#define GROUP_COLUMNS 4

// Where the weights of an output's column lie.
static inline const char *weights_of(const Linear *linear, int column) {
    return column_of(linear, column).weight;
}

// Rows of a tile at most, whatever the format.
#define PRODUCT_ROWS 24

// The rows of a product as its weights need them, in tiles of rows [begin[t], begin[t + 1]).
typedef struct {
    int tiles;
    int begin[MAX_ROWS + 1];
    const float *const *rows; // ROWS_FLOAT
    // ROWS_FIXED: each tile's rows as fixed_product reads them, and of each row its scale and
    // outliers
    const int16_t *arranged[MAX_ROWS];
    float scale[MAX_ROWS];
    const Outliers *outliers;
    ByteRows bytes[MAX_ROWS]; // ROWS_BYTES, of each tile
} Operand;

// fixed_point.c: the rows for integer weights with `in` inputs, in the operand's tiles.
void prepare_fixed(Operand *out, ThreadScratch *mine, const float *const *x, int rows, int in);
#endif
