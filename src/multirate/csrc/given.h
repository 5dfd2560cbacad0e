// Drafts copied from other texts (given.c).
#ifndef MULTIRATE_GIVEN_H
#define MULTIRATE_GIVEN_H
#include "include/speculate.h"

// The longest end of the `count` tokens up to `end` (exclusive) that occurs in the texts, of
// GIVEN_LEAST to GIVEN_LONGEST tokens: returns its length, and in *place where its continuation
// begins. 0: there is none.
int given_match(const GivenTexts *texts, const int32_t *end, int count, int *place);
// What the texts have from a place on, going round at their end.
void copy_given(const GivenTexts *texts, int place, int most, int64_t *to);
#endif
