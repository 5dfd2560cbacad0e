// Splits work evenly among the threads of a call, then balances it. On a machine with other work,
// no core is always as fast as another: threads with equal shares spent a seventh of their time
// waiting for one another.
//
// Each thread's share is one word: the number of the piece of work, the first unit that nobody has
// taken, and the end. The first thread to reach new work writes the number, so a share can be taken
// before its owner arrives.
//
//   | number, 40 bits | first, 12 bits | behind the last, 12 bits |
#include "shares.h"

#define UNIT_BITS 12

Shares open_shares(Workspace *work, int units, int thread, int threads) {
    ThreadScratch *mine = &work->own[thread];
    if (mine->call != work->calls) {
        mine->call = work->calls;
        mine->pieces = 0;
    }
    uint64_t call = work->calls & 0xfffffff, piece = ++mine->pieces & MOST_UNITS;
    return (Shares){work->claims, call << UNIT_BITS | piece, units, thread, threads, 0};
}

// Of the share of thread `of`.
static int take_of(const Shares *shares, int of, int *first) {
    _Atomic uint64_t *word = &shares->claims[of].left;
    uint64_t seen = atomic_load_explicit(word, memory_order_relaxed), left;
    int own = of == shares->thread, take;
    do {
        int from = shares->units * of / shares->threads,
            to = shares->units * (of + 1) / shares->threads;
        if (seen >> (2 * UNIT_BITS) == shares->number) {
            from = (int)(seen >> UNIT_BITS) & MOST_UNITS;
            to = (int)seen & MOST_UNITS;
        }
        if (from == to)
            return 0;
        take = own ? (to - from + 1) / 2 : 1;
        *first = own ? from : to - 1;
        if (own)
            from += take;
        else
            to -= take;
        left = (shares->number << UNIT_BITS | (uint64_t)from) << UNIT_BITS | (uint64_t)to;
    } while (!atomic_compare_exchange_weak_explicit(word, &seen, left, memory_order_relaxed,
                                                    memory_order_relaxed));
    return take;
}

int take_units(Shares *shares, int *first) {
    for (; shares->passed < shares->threads; shares->passed++) {
        int take = take_of(shares, (shares->thread + shares->passed) % shares->threads, first);
        if (take)
            return take;
    }
    return 0;
}
