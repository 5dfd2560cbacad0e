// Reads by the system (async_reads.c).
#ifndef MULTIRATE_ASYNC_READS_H
#define MULTIRATE_ASYNC_READS_H
#include "queue.h"

int async_open(Reads *r); // 0: it cannot here
void async_close(Reads *r);
void async_begin(Reads *r);
// Takes note of what has ended, after waiting up to `patience` seconds for something to; begins
// what may begin.
void async_wait(Reads *r, double patience);
#endif
