// The threads of a call (threads.c) and their barrier.
#ifndef MULTIRATE_THREADS_H
#define MULTIRATE_THREADS_H
#include <sched.h>

#include "workspace.h"

typedef void (*Job)(Workspace *work, void *context, int thread, int threads);

// Runs the job on threads_of(work) threads, on others in a trial, or on fewer if they cannot be
// started: the result does not depend on their number. `of` (weights, for example) and `count` (of
// rows, for example) tell calls of a job apart that take different times, see thread_choice.c.
void run_parallel(Workspace *work, Job job, void *context, const void *of, int count);

// 30 to 100 µs: longer than an idle machine's threads wait, and far shorter than the time that
// another process runs for.
#define SPINS_BEFORE_YIELD 2000

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

// Between two looks at what a thread waits for, the `spins`-th of which has just been in vain;
// yields when the machine is busy with other work.
static inline void wait_a_little(int spins) {
    if (spins < SPINS_BEFORE_YIELD)
        RELAX();
    else
        sched_yield();
}

// Everyone waits for everyone.
static inline void barrier(Workspace *work, int threads) {
    if (threads == 1)
        return;
    unsigned phase = atomic_load_explicit(&work->barrier_phase, memory_order_relaxed);
    if (atomic_fetch_add(&work->barrier_count, 1) + 1 == (unsigned)threads) {
        atomic_store_explicit(&work->barrier_count, 0, memory_order_relaxed);
        atomic_store_explicit(&work->barrier_phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&work->barrier_phase, memory_order_acquire) == phase;
         spins++)
        wait_a_little(spins);
}
#endif
