// Drafts that continue an n-gram of the text (ngram.c).
#ifndef MULTIRATE_NGRAM_H
#define MULTIRATE_NGRAM_H
#include "abi.h"

// How many tokens of a continuation that matched `matched` tokens make a better draft below node
// `n`, the last of a chain, of path probability `here`, than going on with the stream, whose best
// token, of probability `own`, is the continuation's first. At most `most`; 0: the stream is
// better.
int worth_continuing(const DraftLimits *limits, int matched, int most, double here, double own,
                     int n);
#endif
