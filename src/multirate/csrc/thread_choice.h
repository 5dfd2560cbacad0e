// How many threads a call uses (thread_choice.c).
#ifndef MULTIRATE_THREAD_CHOICE_H
#define MULTIRATE_THREAD_CHOICE_H
#include <stdint.h>

#define KINDS_OF_CALLS 64

// The usual time of calls of one kind, on the number of threads in use.
typedef struct {
    uint64_t kind; // 0: none yet
    int calls;     // so many have been timed, less those of others in its place
    double seconds;
} UsualTime;

// Blocks of calls on one number of threads. A block's time is in units of what its calls usually
// take; mean and square: of the blocks, the latest ones counting most.
typedef struct {
    int blocks;
    double mean, square;
} Times;

typedef struct {
    int most, threads;     // at most; of the next call of a known kind
    int fixed;             // always `most`
    int in_use;            // differs from `threads` in a trial alone
    int candidate;         // which number is tried next
    Times now, tried;      // on the number in use; on the one that is tried
    int calls;             // of the block so far
    double took, expected; // seconds of the block so far; what its calls usually take
    double cost;           // seconds that the trial's blocks took longer than usual
    double ended, due;     // when the last trial ended; when the next one begins
    double pause;          // from the one to the other, at least
    double slowdown;       // of the latest calls, against calls like them
    UsualTime usual[KINDS_OF_CALLS];
} ThreadChoice;

void open_thread_choice(ThreadChoice *choice, int most, int fixed);

// How many threads the next call uses, if it is of `kind`.
int threads_for(ThreadChoice *choice, uint64_t kind);

// A call of `kind` (calls of one kind do the same work) took `seconds` and ended at `now`.
void note_call(ThreadChoice *choice, uint64_t kind, double seconds, double now);
#endif
