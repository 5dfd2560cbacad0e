// Logits of a quantised head (head.c).
#ifndef MULTIRATE_HEAD_H
#define MULTIRATE_HEAD_H
#include "include/model.h"

// logits [vocab] are of a quantised copy of `exact` [vocab, d], for the row x [d], which it reads
// through `norm` [d] (NULL: as it is), with noise of the outputs' tokens in them (NULL: without).
// The likeliest ones become what `exact` says.
void refine_likeliest(const bf16 *exact, const float *x, const float *norm, float eps, int d,
                      int vocab, const Noise *noise, const int64_t *token_map, float *logits);
#endif
