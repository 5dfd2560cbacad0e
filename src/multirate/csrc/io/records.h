// Reads of records from a file into slots: those that wait, run or have ended.
#ifndef MULTIRATE_RECORDS_H
#define MULTIRATE_RECORDS_H
#include <pthread.h>
#include <time.h>

#include "../include/experts.h"
#include "../threads.h"

#define WAKING 5e-4 // seconds that the computing thread looks for a read to end before it sleeps

enum { READ_NONE, READ_QUEUED, READ_RUNNING, READ_ENDED };

typedef struct {
    int64_t offset, done, order;
    double began, ended;
    int32_t state, demanded, unwanted, status; // status: as of EndedRead
    int64_t got, result; // async_reads.c: of the chunk under way; what its request gave, held until
    double due;          // a throttled disk would have read it
} Read;

typedef struct Async Async;

struct Reads {
    int fd, slots, threads, closed, alignment, queued_demands;
    int64_t size, chunk, sequence;
    double rate, free_at; // bytes a second, 0: as fast as it goes
    uint8_t *base;
    Read *reads;
    int32_t *queue, *ended; // slots
    atomic_int queue_count, ended_count;
    double spin; // seconds that a reader looks for work before it sleeps
    pthread_mutex_t mutex;
    pthread_cond_t work, finished;
    pthread_t handles[16];
    Async *async; // or NULL: threads read
};

// Bytes of the chunk behind `done` ones of a record.
static inline int64_t chunk_at(const Reads *r, int64_t done) {
    return r->size - done < r->chunk ? r->size - done : r->chunk;
}

// The next read of the queue: demands in their order, then predictions in theirs. -1: none.
int take_next(Reads *r);
void enqueue(Reads *r, int slot);

// A chunk has been read up to `done`: whether the read is over, which its status then tells.
int chunk_read(Reads *r, int slot, int32_t status);

// A read for the queue; reads_begin afterwards, which begins what is the caller's to begin.
void reads_add(Reads *r, int slot, int64_t offset, int64_t order, int demanded);
void reads_begin(Reads *r);

// async_reads.c: reads by the system.
int async_open(Reads *r); // 0: it cannot here
void async_close(Reads *r);
void async_begin(Reads *r);
// Takes note of what has ended, after waiting up to `patience` seconds for something to; begins
// what may begin.
void async_wait(Reads *r, double patience);
#endif
