// Quantised weights with NEON and its dot products.
#include "passes.h"

const Bytes neon_bytes = {MOST_ROWS, quantise_inputs, PRODUCTS};
