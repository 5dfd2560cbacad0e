// The longest suffix of a text that occurred earlier in it (automaton.c).
#ifndef MULTIRATE_AUTOMATON_H
#define MULTIRATE_AUTOMATON_H
#include "include/speculate.h"

// Takes in `text` up to `count` tokens, the first `automaton->count` of which it knows.
void automaton_grow(Automaton *automaton, const int32_t *text, int count);

// The longest end of the text taken in and `drafted` [n] after it that ended before the text's last
// token: returns its length, and in *end the place after one of its occurrences. 0: there is none.
int automaton_match(const Automaton *automaton, const int32_t *drafted, int n, int *end);
#endif
