// What this build is.
#include "tile.h"

int mr_has_dot_product(void) {
    return HAVE_DPBF16;
}

int mr_fixed_point(void) {
    return FIXED_POINT;
}

int mr_integer_products(void) {
    return INTEGER_PRODUCTS;
}
