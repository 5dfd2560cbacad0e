// What this build is.
#include "tile.h"

int mr_int12_products(void) {
    return INT12_PRODUCTS;
}

int mr_integer_products(void) {
    return INTEGER_PRODUCTS;
}
