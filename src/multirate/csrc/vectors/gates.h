// What becomes of a product's sums.
#ifndef MULTIRATE_GATES_H
#define MULTIRATE_GATES_H
#include "simd.h"

INLINE fv gate_vector(int mode, fv gate) {
    return mode == GELU_GATE ? gelu_vector(gate) : silu_vector(gate);
}

static void gates(int mode, const float *y, int groups, float *to) {
    for (int g = 0; g < groups; g++, y += GROUP_FLOATS, to += GROUP_FLOATS / 2)
        for (int i = 0; i < 32; i += LANES)
            store_v(to + i, gate_vector(mode, load_v(y + i)) * load_v(y + 32 + i));
}

static void put_sums(float (*sums)[GROUP_FLOATS], int rows, const float *bias, const int *target,
                     int first, int mode, Output out, int group, int from, int end) {
    for (int r = 0; r < rows; r++) {
        size_t row = target ? target[first + r] : first + r;
        float *sum = sums[r];
        if (bias)
            for (int i = from * 16; i < end * 16; i += 16)
                store(sum + i, load(sum + i) + load(bias + group * GROUP_FLOATS + i));
        if (is_gate(mode)) {
            gates(mode, sum, 1, out.activation + row * out.stride + group * GROUP_FLOATS / 2);
            continue;
        }
        float *y = out.y + row * out.stride + group * GROUP_FLOATS;
        for (int i = from * 16; i < end * 16; i += 16)
            store(y + i, mode == ADD ? load(y + i) + load(sum + i) : load(sum + i));
    }
}
#endif
