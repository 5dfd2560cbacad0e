// What this build is.
#include "tile.h"

int mr_fixed_point(void) {
    return FIXED_POINT;
}
