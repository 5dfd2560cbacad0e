// What the library was built from.
#include "include/model.h"

const char *mr_source_digest(void) {
    return SOURCE_DIGEST;
}
