// Logits of a head's copies: the best token by one in 8 bits (screen.c), and what a quantised one
// drafts with (head.c).
#ifndef MULTIRATE_HEADS_H
#define MULTIRATE_HEADS_H
#include "workspace.h"

// Upper bounds of what `head` says of rows x [count, inputs], after `norm` where there is one: to
// upper [count, head->outputs]. The workspace keeps the rows and what screened_token asks first.
// vocab: the outputs that count.
void screen_rows(Workspace *work, const Linear *head, const Screen *screen, const float *x,
                 const float *norm, float eps, int count, int vocab, float *upper);

// The argmax of what the head says of row `row` of the last screen_rows, and of the noise where
// there is some: as Vectors.argmax and mr_noisy_argmax have it of the head's own logits. Of
// `upper`, the row's bounds, those that could be the largest become the logits themselves.
int64_t screened_token(Workspace *work, const Linear *head, const Screen *screen, int row,
                       float *upper, int vocab, const Noise *noise);

// The k likeliest tokens of each row of the last screen_rows, upper [count, head->outputs], as
// mr_best has them of the head's own logits: to ids [count, k].
void screened_best(Workspace *work, const Linear *head, const Screen *screen, int count,
                   float *upper, int vocab, int k, int64_t *ids);

// logits [vocab] are of a quantised copy of `exact` [vocab, d], for the row x [d], which it reads
// through `norm` [d] (NULL: as it is), with noise of the outputs' tokens in them (NULL: without).
// The likeliest ones become what `exact` says.
void refine_likeliest(const bf16 *exact, const float *x, const float *norm, float eps, int d,
                      int vocab, const Noise *noise, const int64_t *token_map, float *logits);
#endif
