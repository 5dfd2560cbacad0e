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

// The tokens of [begin, end) whose logit in `row` and noise sum to `least` or more, and these sums:
// the first `most` of them. Returns how many there are.
int noisy_above(const Noise *noise, const float *row, int begin, int end, float least, int most,
                int *tokens, float *sums);
#endif
