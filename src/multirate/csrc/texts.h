// Drafts that continue what the text, or another one, had before (lookup.c).
#ifndef MULTIRATE_TEXTS_H
#define MULTIRATE_TEXTS_H
#include "include/speculate.h"

// Nodes of a draft at most, unverified ones included.
static inline int node_capacity(const DraftLimits *limits) {
    return limits->nodes + (limits->rule ? limits->rule->nodes : 0);
}

// How many tokens of a continuation make a better draft below node `n`, the last of a chain, of
// path probability `here`, than going on with the branch, whose best token has probability `own`.
// first, next: the chance that its first token, and each later one, is accepted. At most `most`; 0:
// the branch is better.
int worth_continuing(const DraftLimits *limits, double first, double next, int most, double here,
                     double own, int n);

// ---- automaton.c: the longest suffix of a text that occurred earlier in it ----

// Takes in `text` up to `count` tokens, the first `automaton->count` of which it knows.
void automaton_grow(Automaton *automaton, const int32_t *text, int count);

// The longest end of the text taken in and `drafted` [n] after it that ended before the text's last
// token: returns its length, and in *end the place after one of its occurrences. 0: there is none.
int automaton_match(const Automaton *automaton, const int32_t *drafted, int n, int *end);
#endif
