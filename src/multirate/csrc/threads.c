// The threads of a call. Where torch has GNU's OpenMP they are torch's: its workers spin for a
// while after every parallel torch operation, and a second pool would compete with them for the
// cores. Each calling thread has its own team. Its functions are looked up when they are first
// needed, so that the kernel can be built, and loaded, without it. Where they are missing, and in a
// process made by fork(), where OpenMP's threads are missing and waiting for them would never end,
// a small pool takes over. It spins briefly between calls, because a decode step is far shorter
// than a thread wake-up.
#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

#define YIELDS_BEFORE_SLEEP 1000

// One pool per process, used by one call at a time. `call` counts the jobs in its upper bits and
// holds the number of threads of the latest one in the lower: a worker learns both at once, so one
// that takes no part never looks at a job.
#define THREADS_OF(call) ((int)((call) % (2 * MAX_THREADS)))
typedef struct {
    int started;
    uint64_t first_call[MAX_THREADS]; // a worker born late must not take the last job for a new one
    _Atomic uint64_t call;
    atomic_uint done;
    atomic_int sleeping;
    Job job;
    Workspace *work;
    void *context;
    pthread_mutex_t busy, mutex;
    pthread_cond_t wake;
} Pool;

#define NEW_POOL                                                                                   \
    {.started = 1,                                                                                 \
     .busy = PTHREAD_MUTEX_INITIALIZER,                                                            \
     .mutex = PTHREAD_MUTEX_INITIALIZER,                                                           \
     .wake = PTHREAD_COND_INITIALIZER}
static Pool pool = NEW_POOL;

static void *worker(void *argument) {
    int id = (int)(intptr_t)argument;
    uint64_t seen = pool.first_call[id];
    for (;;) {
        for (int waits = 0; atomic_load_explicit(&pool.call, memory_order_acquire) == seen;
             waits++) {
            if (waits < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP)
                wait_a_little(waits);
            else {
                pthread_mutex_lock(&pool.mutex);
                atomic_fetch_add(&pool.sleeping, 1);
                while (atomic_load(&pool.call) == seen)
                    pthread_cond_wait(&pool.wake, &pool.mutex);
                atomic_fetch_sub(&pool.sleeping, 1);
                pthread_mutex_unlock(&pool.mutex);
            }
        }
        seen = atomic_load(&pool.call);
        if (id < THREADS_OF(seen)) {
            pool.job(pool.work, pool.context, id, THREADS_OF(seen));
            atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
        }
    }
    return NULL;
}

// How many threads of `wanted` the pool has; it starts those that are missing.
static int pool_threads(int wanted) {
    while (pool.started < wanted) {
        pthread_t handle;
        pool.first_call[pool.started] = atomic_load(&pool.call);
        if (pthread_create(&handle, NULL, worker, (void *)(intptr_t)pool.started))
            break;
        pthread_detach(handle);
        pool.started++;
    }
    return wanted < pool.started ? wanted : pool.started;
}

static void run_in_pool(Workspace *work, Job job, void *context, int threads) {
    pool.job = job;
    pool.work = work;
    pool.context = context;
    atomic_store(&pool.done, 0);
    uint64_t number = atomic_load(&pool.call) / (2 * MAX_THREADS) + 1;
    atomic_store(&pool.call, number * (2 * MAX_THREADS) + (uint64_t)threads);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.mutex);
    }
    job(work, context, 0, threads);
    unsigned others = (unsigned)threads - 1;
    for (int spins = 0; atomic_load_explicit(&pool.done, memory_order_acquire) != others; spins++)
        wait_a_little(spins);
}

static int forked;

// What compilers make of "#pragma omp parallel" and what it tells its threads.
static struct {
    void (*parallel)(void (*run)(void *), void *context, unsigned threads, unsigned flags);
    int (*thread)(void), (*threads)(void);
} openmp;

static void find_openmp(void) {
    void *process = dlopen(NULL, RTLD_LAZY); // torch opens its libraries for everyone in it
    if (!process)
        return;
    void *parallel = dlsym(process, "GOMP_parallel"),
         *thread = dlsym(process, "omp_get_thread_num"),
         *threads = dlsym(process, "omp_get_num_threads");
    if (!parallel || !thread || !threads)
        return;
    memcpy(&openmp.thread, &thread, sizeof thread);
    memcpy(&openmp.threads, &threads, sizeof threads);
    memcpy(&openmp.parallel, &parallel, sizeof parallel);
}

static int has_openmp(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_openmp);
    return openmp.parallel != NULL;
}

typedef struct {
    Workspace *work;
    Job job;
    void *context;
} Call;

static void run_in_team(void *context) {
    const Call *call = context;
    call->job(call->work, call->context, openmp.thread(), openmp.threads());
}

static void run_on(Workspace *work, Job job, void *context, int wanted) {
    if (wanted == 1) {
        job(work, context, 0, 1);
        return;
    }
    if (!forked && has_openmp()) {
        Call call = {work, job, context};
        openmp.parallel(run_in_team, &call, (unsigned)wanted, 0);
        return;
    }
    int free_pool = !pthread_mutex_trylock(
        &pool.busy); // taken: another call's threads are busy, this one needs none
    int threads = free_pool ? pool_threads(wanted) : 1;
    if (threads > 1)
        run_in_pool(work, job, context, threads);
    else
        job(work, context, 0, 1);
    if (free_pool)
        pthread_mutex_unlock(&pool.busy);
}

void run_parallel(Workspace *work, Job job, void *context, const void *of, int count) {
    work->calls++;
    if (work->choice.fixed) {
        run_on(work, job, context, threads_of(work));
        return;
    }
    uint64_t kind =
        ((uint64_t)(uintptr_t)job * 31 + (uint64_t)(uintptr_t)of) * 31 + (uint64_t)count;
    double begin = seconds_now();
    run_on(work, job, context, threads_for(&work->choice, kind));
    double end = seconds_now();
    note_call(&work->choice, kind, end - begin, end);
}

// In a process made by fork(), before any other call: it has no threads but the caller's, and other
// threads' locks.
void mr_after_fork(void) {
    forked = 1;
    pool = (Pool)NEW_POOL;
}
