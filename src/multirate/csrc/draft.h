// Draft trees (draft.c).
#ifndef MULTIRATE_DRAFT_H
#define MULTIRATE_DRAFT_H
#include "stream.h"

// The noise of the place `ahead` places after `noise`'s.
static inline Noise noise_ahead(const Noise *noise, int ahead) {
    Noise there = *noise;
    there.place += ahead;
    return there;
}

// Whole draft trees of `count` sequences, which share their stream, head and caches: a level of all
// of them is one pass (the rules in Python: DraftTree; a test holds the two together). Fills each
// step's tokens, parents, hidden (the target model's residuals entering entering_layer), drafted
// and text. Uses (capacity + 1) * hidden floats of each step's scratch.
void draft_trees(Workspace *work, SpeculativeStep *const *steps, int count);
#endif
