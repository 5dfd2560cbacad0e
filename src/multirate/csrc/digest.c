// What the library was built from.
#include "abi.h"

const char *mr_source_digest(void) {
    return SOURCE_DIGEST;
}
