// Threads of a call. With OpenMP they are torch's own (one runtime per process: its workers spin for a while after
// every parallel torch operation, and a second pool would fight them for the cores). Without it, a small pool that
// spins briefly between calls: a decode step is far shorter than a thread wake-up.
#ifndef MULTIRATE_THREADS_H
#define MULTIRATE_THREADS_H
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MAX_THREADS 64
typedef void (*Job)(void *context, int thread, int threads);

#define SPINS_BEFORE_YIELD 20000  // about 0.3 ms: longer than the Python between two calls
#define YIELDS_BEFORE_SLEEP 1000

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

typedef struct {
    int threads, started;
    unsigned first_epoch[MAX_THREADS];  // a worker born late must not take the last job for a new one
    atomic_uint epoch, done, barrier_count, barrier_phase;
    atomic_int sleeping;
    Job job;
    void *context;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} Pool;

static Pool pool = {.threads = 1, .started = 1, .mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

// Everyone waits for everyone; yields when the machine is busy with other work.
static inline void barrier(int threads) {
    if (threads == 1) return;
    unsigned phase = atomic_load_explicit(&pool.barrier_phase, memory_order_relaxed);
    if (atomic_fetch_add(&pool.barrier_count, 1) + 1 == (unsigned)threads) {
        atomic_store_explicit(&pool.barrier_count, 0, memory_order_relaxed);
        atomic_store_explicit(&pool.barrier_phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&pool.barrier_phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPINS_BEFORE_YIELD) RELAX(); else sched_yield();
    }
}

#ifdef _OPENMP
#include <omp.h>

static void run_parallel(Job job, void *context) {
#pragma omp parallel num_threads(pool.threads)
    job(context, omp_get_thread_num(), omp_get_num_threads());
}

int mr_set_threads(int threads) {
    return pool.threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
}
#else

static void *worker(void *argument) {
    int id = (int)(intptr_t)argument;
    unsigned seen = pool.first_epoch[id];
    for (;;) {
        for (int waits = 0; atomic_load_explicit(&pool.epoch, memory_order_acquire) == seen; waits++) {
            if (waits < SPINS_BEFORE_YIELD) RELAX();
            else if (waits < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP) sched_yield();
            else {
                pthread_mutex_lock(&pool.mutex);
                atomic_fetch_add(&pool.sleeping, 1);
                while (atomic_load(&pool.epoch) == seen) pthread_cond_wait(&pool.wake, &pool.mutex);
                atomic_fetch_sub(&pool.sleeping, 1);
                pthread_mutex_unlock(&pool.mutex);
            }
        }
        seen = atomic_load(&pool.epoch);
        int threads = pool.threads;
        if (id < threads) {
            pool.job(pool.context, id, threads);
            atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
        }
    }
    return NULL;
}

static void run_parallel(Job job, void *context) {
    int threads = pool.threads;
    if (threads > 1) {
        pool.job = job;
        pool.context = context;
        atomic_store(&pool.done, 0);
        atomic_fetch_add(&pool.epoch, 1);
        if (atomic_load(&pool.sleeping)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_broadcast(&pool.wake);
            pthread_mutex_unlock(&pool.mutex);
        }
    }
    job(context, 0, threads);
    for (int spins = 0; threads > 1 && atomic_load_explicit(&pool.done, memory_order_acquire) != (unsigned)(threads - 1); spins++) {
        if (spins < SPINS_BEFORE_YIELD) RELAX(); else sched_yield();
    }
}

// fork() copies no threads: the child starts with its own alone.
static void after_fork(void) { pool.threads = pool.started = 1; }

// Not safe while a call is running; workers beyond `threads` stay asleep.
int mr_set_threads(int threads) {
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    static int registered = 0;
    if (!registered) registered = !pthread_atfork(NULL, NULL, after_fork);
    while (pool.started < threads) {
        pthread_t handle;
        pool.first_epoch[pool.started] = atomic_load(&pool.epoch);
        if (pthread_create(&handle, NULL, worker, (void *)(intptr_t)pool.started)) break;
        pthread_detach(handle);
        pool.started++;
    }
    pool.threads = threads < pool.started ? threads : pool.started;
    return pool.threads;
}
#endif  // _OPENMP
#endif
