// bf16 numbers and fp32, one at a time.
#ifndef MULTIRATE_BF16_H
#define MULTIRATE_BF16_H
#include "include/model.h"

static inline float from_bf16(bf16 b) {
    union {
        uint32_t u;
        float f;
    } c = {.u = (uint32_t)b << 16};
    return c.f;
}
static inline bf16 to_bf16(float f) { // round to nearest even
    union {
        float f;
        uint32_t u;
    } c = {.f = f};
    return (bf16)((c.u + 0x7fffu + ((c.u >> 16) & 1)) >> 16);
}
#endif
