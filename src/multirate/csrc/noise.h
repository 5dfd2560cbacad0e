// The random numbers that sampling adds to logits (noise.c).
#ifndef MULTIRATE_NOISE_H
#define MULTIRATE_NOISE_H
#include "abi.h"

// Of the place `ahead` places after `noise`'s.
static inline Noise noise_ahead(const Noise *noise, int ahead) {
    Noise there = *noise;
    there.place += ahead;
    return there;
}

// Adds it to the outputs of each of `count` rows [count, stride]; ids [outputs]: their tokens, or
// NULL: these are the first ones.
void add_noise(const Noise *noise, const int64_t *ids, int outputs, float *rows, int count,
               int stride);
#endif
