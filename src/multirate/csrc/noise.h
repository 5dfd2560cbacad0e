// The random numbers that sampling adds to logits (noise.c).
#ifndef MULTIRATE_NOISE_H
#define MULTIRATE_NOISE_H
#include "include/model.h"

// Of the place `ahead` places after `noise`'s.
static inline Noise noise_ahead(const Noise *noise, int ahead) {
    Noise there = *noise;
    there.place += ahead;
    return there;
}
#endif
