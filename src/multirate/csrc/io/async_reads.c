// Reads that the computing thread starts itself and later finds finished: Linux asynchronous I/O on
// a file opened with O_DIRECT. If all cores compute, a reading thread interrupts one of them twice
// per read, at its start and end; here no thread is woken. All of it runs on the caller's thread.
#include "records.h"

#include <errno.h>
#include <unistd.h>

// What the disk has at a time: it shares itself among all of that, so that a read needed soon ends
// as late as one needed later. Small reads gain by company (each spends more time on the way than
// on the disk), large ones do not.
#define MOST_FLYING 12
#define BYTES_FLYING (1 << 20)
#define MOST_AHEAD 4 // predictions: a demand waits behind these at most
#define BYTES_AHEAD (384 << 10)

static inline int at_a_time(int64_t size, int64_t bytes, int least, int most) {
    int64_t count = bytes / size;
    return count < least ? least : count > most ? most : (int)count;
}

#ifdef __linux__
#include <linux/aio_abi.h>
#include <sys/syscall.h>

// What the kernel maps at the context's address: ended reads are found here without a system call.
typedef struct {
    unsigned id, count;
    _Atomic unsigned head, tail;
    unsigned magic, compatible, incompatible, header;
    struct io_event events[];
} EventRing;

#define RING_MAGIC 0xa10a10a1u

struct Async {
    aio_context_t context;
    struct iocb *requests; // [slots]
    int32_t *landed;       // slots whose chunk is there before a throttled disk would have it
    int flying, landed_count;
};

int async_open(Reads *r) {
    Async *a = r->async = calloc(1, sizeof *a);
    if (!a)
        return 0;
    a->requests = calloc((size_t)r->slots, sizeof *a->requests);
    a->landed = calloc((size_t)r->slots, sizeof *a->landed);
    return a->requests && a->landed && !syscall(SYS_io_setup, 2 * MOST_FLYING, &a->context);
}

// Waits for what the system still writes into the slots.
void async_close(Reads *r) {
    if (!r->async)
        return;
    if (r->async->context)
        syscall(SYS_io_destroy, r->async->context);
    free(r->async->requests);
    free(r->async->landed);
    free(r->async);
    r->async = NULL;
}

// The rest of the chunk under way: one system call for all of `slots`.
static void async_request(Reads *r, const int32_t *slots, int count) {
    Async *a = r->async;
    struct iocb *list[MOST_FLYING];
    for (int i = 0; i < count; i++) {
        Read *one = &r->reads[slots[i]];
        int64_t at = one->done + one->got, left = chunk_at(r, one->done);
        list[i] = &a->requests[slots[i]];
        *list[i] = (struct iocb){
            .aio_data = (uint64_t)slots[i],
            .aio_lio_opcode = IOCB_CMD_PREAD,
            .aio_fildes = (uint32_t)r->fd,
            .aio_buf = (uint64_t)(uintptr_t)(r->base + (size_t)slots[i] * r->size + at),
            .aio_nbytes = (uint64_t)(left - one->got),
            .aio_offset = one->offset + at,
        };
    }
    a->flying += count;
    for (int sent = 0; sent < count;) {
        long n = syscall(SYS_io_submit, a->context, (long)(count - sent), list + sent);
        if (n > 0) {
            sent += (int)n;
            continue;
        }
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue; // full for a moment: the system's, not ours
        Read *one = &r->reads[slots[sent++]];
        a->flying--;
        chunk_read(r, (int)(one - r->reads), n < 0 ? errno : EIO);
    }
}

void async_begin(Reads *r) {
    int32_t taken[MOST_FLYING];
    int count = 0, most = r->rate > 0 ? 1 : at_a_time(r->size, BYTES_FLYING, 2, MOST_FLYING);
    int ahead = r->rate > 0 ? 1 : at_a_time(r->size, BYTES_AHEAD, 1, MOST_AHEAD);
    double now = 0;
    while (r->queue_count && r->async->flying + count < (r->queued_demands ? most : ahead)) {
        int slot = take_next(r);
        Read *one = &r->reads[slot];
        one->state = READ_RUNNING;
        if (!now)
            now = seconds_now();
        if (!one->done)
            one->began = now;
        if (r->rate > 0) {
            int64_t chunk = chunk_at(r, one->done);
            one->due = r->free_at = (r->free_at > now ? r->free_at : now) + (double)chunk / r->rate;
        }
        taken[count++] = slot;
    }
    if (count)
        async_request(r, taken, count);
}

// `result` bytes of a request have come, or -errno. Whether the chunk is whole or has failed.
static void async_landed(Reads *r, int slot, int64_t result) {
    Read *one = &r->reads[slot];
    int64_t chunk = chunk_at(r, one->done), before = one->got;
    int32_t status = result < 0 ? (int32_t)-result : 0;
    r->async->flying--;
    if (!status) {
        one->got += result;
        if (one->got < chunk) {
            one->got -= one->got % r->alignment; // a short direct read is resumed where it may be
            if (one->got > before) {
                int32_t again = slot;
                async_request(r, &again, 1);
                return;
            }
            status = ENODATA; // less than a block, twice over: the file ends in it
        } else {
            one->done += chunk;
        }
    }
    one->got = 0;
    if (chunk_read(r, slot, status) || one->state == READ_QUEUED)
        return;
    enqueue(r, slot); // its next chunk; async_begin takes whatever comes first
}

static void async_reap(Reads *r) {
    Async *a = r->async;
    EventRing *ring = (EventRing *)(uintptr_t)a->context;
    if (ring->magic == RING_MAGIC) {
        unsigned head = ring->head;
        while (head != atomic_load_explicit(&ring->tail, memory_order_acquire)) {
            struct io_event event = ring->events[head];
            head = (head + 1) % ring->count;
            atomic_store_explicit(&ring->head, head, memory_order_release);
            if (r->rate > 0 && seconds_now() < r->reads[event.data].due && event.res > 0) {
                r->reads[event.data].result = event.res;
                a->landed[a->landed_count++] = (int32_t)event.data;
            } else {
                async_landed(r, (int)event.data, event.res);
            }
        }
    } else {
        struct io_event events[MOST_FLYING];
        struct timespec none = {0, 0};
        long n = syscall(SYS_io_getevents, a->context, 0L, (long)MOST_FLYING, events, &none);
        for (long i = 0; i < n; i++)
            async_landed(r, (int)events[i].data, events[i].res);
    }
    for (int i = 0; i < a->landed_count;) {
        int slot = a->landed[i];
        if (seconds_now() < r->reads[slot].due) {
            i++;
            continue;
        }
        a->landed[i] = a->landed[--a->landed_count];
        async_landed(r, slot, r->reads[slot].result);
    }
}

void async_wait(Reads *r, double patience) {
    double until = 0, sleepy = 0;
    for (;;) {
        if (r->async->flying)
            async_reap(r);
        if (r->queue_count)
            async_begin(r);
        if (r->ended_count || patience <= 0 || !r->async->flying)
            return;
        double now = seconds_now();
        if (!until) {
            until = now + patience;
            sleepy = now + WAKING;
        }
        if (now >= until)
            return;
        if (now > sleepy) {
            struct timespec t = {0, 50000};
            nanosleep(&t, NULL);
        } else {
            for (int i = 0; i < 16; i++)
                RELAX();
        }
    }
}
#else
struct Async {
    int none;
};
int async_open(Reads *r) {
    (void)r;
    return 0;
}
void async_close(Reads *r) {
    (void)r;
}
void async_begin(Reads *r) {
    (void)r;
}
void async_wait(Reads *r, double patience) {
    (void)r;
    (void)patience;
}
#endif
