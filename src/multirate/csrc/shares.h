// Splits work evenly among the threads of a call, then balances it (shares.c).
#ifndef MULTIRATE_SHARES_H
#define MULTIRATE_SHARES_H
#include "workspace.h"

#define MOST_UNITS 4095 // of one piece of work

// A thread's view of a piece of work of `units` equal units.
typedef struct {
    Claims *claims; // of all threads
    uint64_t number;
    int units, thread, threads;
    int passed; // threads whose shares are known to be taken
} Shares;

// Every thread of a call (run_parallel) opens the same pieces of work in the same order, and all of
// them meet after each before the next. units <= MOST_UNITS.
Shares open_shares(Workspace *work, int units, int thread, int threads);

// Takes units for the thread: of its own share, from the first on, half of those that are left;
// when these are gone, one of another thread's, from the last on. Returns how many, from *first on;
// 0: none are left.
int take_units(Shares *shares, int *first);

// Whether those that were taken last are the thread's own share's.
static inline int own_units(const Shares *shares) {
    return shares->passed == 0;
}
#endif
