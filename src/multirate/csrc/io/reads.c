// Reads records into memory slots without an interpreter. experts/reads.py has the contract. Either
// threads read, or the caller starts reads that the system completes (async_reads.c), which takes
// no core from computing.
#include "records.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#ifdef __linux__
#define READS_CLOCK CLOCK_MONOTONIC
#else
#define READS_CLOCK CLOCK_REALTIME // what condition variables wait by elsewhere
#endif

// Until *count is not zero, `patience` seconds at most.
static void look_for(atomic_int *count, double patience) {
    double until = seconds_now() + patience;
    while (!atomic_load_explicit(count, memory_order_relaxed) && seconds_now() < until)
        for (int i = 0; i < 16; i++)
            RELAX();
}

// One chunk, past the mutex. Returns its bytes, or 0 with *status set.
static int64_t read_chunk(Reads *r, int slot, int64_t offset, int64_t done, int32_t *status) {
    int64_t want = chunk_at(r, done), got = 0;
    while (got < want) {
        ssize_t n = pread(r->fd, r->base + (size_t)slot * r->size + done + got,
                          (size_t)(want - got), offset + done + got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            *status = n < 0 ? errno : ENODATA;
            return 0;
        }
        int64_t before = got;
        got += n;
        if (got == want)
            break;
        got -= got % r->alignment; // a short direct read is resumed where it may be
        if (got == before) {       // less than a block, twice over: the file ends in it
            *status = ENODATA;
            return 0;
        }
    }
    return want;
}

// The read of `slot`, just taken from the queue, to its end or until it gives way; with the mutex,
// which it lets go.
static void run_read(Reads *r, int slot) {
    Read *one = &r->reads[slot];
    one->state = READ_RUNNING;
    if (!one->done)
        one->began = seconds_now();
    while (one->state == READ_RUNNING && !r->closed) {
        int64_t offset = one->offset, done = one->done;
        int32_t status = 0;
        double began = seconds_now();
        pthread_mutex_unlock(&r->mutex);
        int64_t got = read_chunk(r, slot, offset, done, &status);
        pthread_mutex_lock(&r->mutex);
        if (r->rate > 0 && got) {
            r->free_at = (r->free_at > began ? r->free_at : began) + (double)got / r->rate;
            double wait = r->free_at - seconds_now();
            if (wait > 0) {
                struct timespec t = {(time_t)wait, (long)(1e9 * (wait - (double)(time_t)wait))};
                pthread_mutex_unlock(&r->mutex);
                nanosleep(&t, NULL);
                pthread_mutex_lock(&r->mutex);
            }
        }
        one->done = done + got;
        if (!chunk_read(r, slot, status) && one->state == READ_QUEUED)
            pthread_cond_signal(&r->work);
    }
}

static void fine_timer(void) {
#ifdef PR_SET_TIMERSLACK
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0,
          0); // a throttled read of 0.1 ms must not oversleep by half
#endif
}

static void *reading(void *argument) {
    Reads *r = argument;
    fine_timer();
    pthread_mutex_lock(&r->mutex);
    for (;;) {
        int slot;
        while (!r->closed && (slot = take_next(r)) < 0) {
            if (r->spin > 0) { // a thread that sleeps takes longer to wake than a small read
                pthread_mutex_unlock(&r->mutex);
                look_for(&r->queue_count, r->spin);
                pthread_mutex_lock(&r->mutex);
                if (r->queue_count)
                    continue;
            }
            pthread_cond_wait(&r->work, &r->mutex);
        }
        if (r->closed)
            break;
        run_read(r, slot);
        pthread_cond_signal(&r->finished);
    }
    pthread_mutex_unlock(&r->mutex);
    return NULL;
}

void mr_reads_close(Reads *r) {
    async_close(r);
    pthread_mutex_lock(&r->mutex);
    r->closed = 1;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->mutex);
    for (int i = 0; i < r->threads; i++)
        pthread_join(r->handles[i], NULL);
    pthread_mutex_destroy(&r->mutex);
    pthread_cond_destroy(&r->work);
    pthread_cond_destroy(&r->finished);
    free(r->reads);
    free(r->queue);
    free(r->ended);
    free(r);
}

// base: `slots` slots of `size` bytes. threads 0: the system reads (async_reads.c). NULL when that,
// threads or memory cannot be had.
Reads *mr_reads_open(int fd, void *base, int slots, int64_t size, int64_t chunk, int alignment,
                     double rate, int threads, double spin) {
    Reads *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    *r = (Reads){.fd = fd,
                 .base = base,
                 .slots = slots,
                 .size = size,
                 .chunk = chunk,
                 .alignment = alignment,
                 .rate = rate,
                 .spin = spin};
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
#ifdef __linux__
    pthread_condattr_setclock(&clock, READS_CLOCK);
#endif
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->work, NULL);
    pthread_cond_init(&r->finished, &clock);
    pthread_condattr_destroy(&clock);
    r->reads = calloc((size_t)slots, sizeof *r->reads);
    r->queue = calloc((size_t)slots, sizeof *r->queue);
    r->ended = calloc((size_t)slots, sizeof *r->ended);
    int begun = r->reads && r->queue && r->ended;
    if (begun && !threads && async_open(r))
        return r;
    for (int i = 0; begun && i < threads && i < 16; i++) {
        if (pthread_create(&r->handles[i], NULL, reading, r))
            break;
        r->threads++;
    }
    if (r->threads)
        return r;
    mr_reads_close(r);
    return NULL;
}

void reads_begin(Reads *r) {
    if (r->async)
        async_begin(r);
}

void reads_add(Reads *r, int slot, int64_t offset, int64_t order, int demanded) {
    if (!r->async)
        pthread_mutex_lock(&r->mutex);
    r->reads[slot] =
        (Read){.offset = offset, .order = demanded ? r->sequence++ : order, .demanded = demanded};
    enqueue(r, slot);
    if (r->async)
        return;
    pthread_mutex_unlock(&r->mutex);
    pthread_cond_signal(&r->work);
}

void mr_reads_submit(Reads *r, int slot, int64_t offset, int64_t order, int demanded) {
    reads_add(r, slot, offset, order, demanded);
    reads_begin(r);
}

// A prediction has become a demand.
void mr_reads_promote(Reads *r, int slot) {
    pthread_mutex_lock(&r->mutex);
    Read *one = &r->reads[slot];
    if (!one->demanded) {
        one->order = r->sequence++;
        r->queued_demands += one->state == READ_QUEUED;
    }
    one->demanded = 1;
    one->unwanted = 0;
    pthread_mutex_unlock(&r->mutex);
}

// 1: it will not be read (any more) and has left; 0: it is running or has ended, which
// mr_reads_ended will tell.
int mr_reads_cancel(Reads *r, int slot) {
    pthread_mutex_lock(&r->mutex);
    Read *one = &r->reads[slot];
    int waiting = one->state == READ_QUEUED;
    one->unwanted = 1;
    for (int i = 0; waiting && i < r->queue_count; i++)
        if (r->queue[i] == slot) {
            r->queue[i] = r->queue[--r->queue_count];
            r->queued_demands -= one->demanded;
            one->state = READ_NONE;
            break;
        }
    pthread_mutex_unlock(&r->mutex);
    return waiting;
}

// The reads that have ended since the last call, after waiting up to `patience` seconds for one.
// to: room for all slots.
int mr_reads_ended(Reads *r, double patience, EndedRead *to) {
    if (r->async)
        async_wait(r, patience);
    else if (patience > 0)
        look_for(&r->ended_count, WAKING < patience ? WAKING : patience);
    if (!r->ended_count && (r->async || patience <= 0))
        return 0;
    pthread_mutex_lock(&r->mutex);
    if (!r->ended_count && patience > 0) {
        struct timespec t;
        clock_gettime(READS_CLOCK, &t);
        double until = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec + patience;
        t = (struct timespec){(time_t)until, (long)(1e9 * (until - (double)(time_t)until))};
        while (!r->ended_count && pthread_cond_timedwait(&r->finished, &r->mutex, &t) != ETIMEDOUT)
            ;
    }
    int count = r->ended_count;
    for (int i = 0; i < count; i++) {
        Read *one = &r->reads[r->ended[i]];
        to[i] = (EndedRead){r->ended[i], one->status, one->done, one->began, one->ended};
        one->state = READ_NONE;
    }
    r->ended_count = 0;
    pthread_mutex_unlock(&r->mutex);
    return count;
}
