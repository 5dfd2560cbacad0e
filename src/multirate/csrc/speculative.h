// A round of one sequence, for calls that run several (speculative.c).
#ifndef MULTIRATE_SPECULATIVE_H
#define MULTIRATE_SPECULATIVE_H
#include "draft.h"

// step->ids [first, first + count) enter.
Part part_of(SpeculativeStep *step, const DraftLimits *limits, int length, int first, int count);

// Draft, verification, acceptance; returns how many tokens it emits, or -1 where they are drawn and
// the logits are not finite.
int run_step(Workspace *work, const Part *part);
#endif
