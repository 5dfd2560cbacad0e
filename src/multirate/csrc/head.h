// The best tokens of a row of logits (head.c).
#ifndef MULTIRATE_HEAD_H
#define MULTIRATE_HEAD_H
#include "abi.h"

// The k best of row [vocab], best first (ties: the lower id). Returns how many there are that are
// more than -inf; the other ids are 0.
int best_of(const float *row, int vocab, int k, int64_t *ids);

// logits [vocab] are of a quantised copy of `exact` [vocab, d], for the row x [d], which it reads
// through `norm` [d] (NULL: as it is), with noise of the outputs' tokens in them (NULL: without).
// The likeliest ones become what `exact` says.
void refine_likeliest(const bf16 *exact, const float *x, const float *norm, float eps, int d,
                      int vocab, const Noise *noise, const int64_t *token_map, float *logits);
#endif
