// The likeliest tokens of a row of logits (head.c).
#ifndef MULTIRATE_HEAD_H
#define MULTIRATE_HEAD_H
#include <stdint.h>

// The k best of row [vocab], best first (ties: the lower id). Returns how many there are that are
// more than -inf; the other ids are 0.
int best_of(const float *row, int vocab, int k, int64_t *ids);
#endif
