// How many threads a call uses (thread_choice.c).
#ifndef MULTIRATE_THREAD_CHOICE_H
#define MULTIRATE_THREAD_CHOICE_H
#include <stdint.h>

#define KINDS_OF_CALLS 64

// The usual time of calls of one kind, on the number of threads in use.
typedef struct {
    uint64_t kind; // 0: none yet
    double seconds;
} UsualTime;

typedef struct {
    int most, threads; // at most; of the next call
    int fixed;         // always `most`
    int before;        // during a trial: the threads in use before it; otherwise 0
    int calls;         // calls of the trial so far
    int candidate;     // which number is tried next
    double tried;      // seconds that the calls of the trial took
    double expected;   // seconds that calls like them usually take
    double due, pause; // when the next trial begins; how long after this one
    double ended;      // when the last trial ended
    double slowdown;   // of the latest calls, against calls like them
    UsualTime usual[KINDS_OF_CALLS];
} ThreadChoice;

void open_thread_choice(ThreadChoice *choice, int most, int fixed);

// A call of `kind` (calls of one kind do the same work) took `seconds` and ended at `now`.
void note_call(ThreadChoice *choice, uint64_t kind, double seconds, double now);
#endif
