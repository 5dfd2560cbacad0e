// Reads of records into slots (reads.c).
#ifndef MULTIRATE_READS_H
#define MULTIRATE_READS_H
#include "queue.h"

// A read for the queue; reads_begin afterwards, which begins what is the caller's to begin.
void reads_add(Reads *r, int slot, int64_t offset, int64_t order, int demanded);
void reads_begin(Reads *r);
#endif
