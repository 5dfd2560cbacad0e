// Loads of experts into slots (loads.c).
#ifndef MULTIRATE_LOADS_H
#define MULTIRATE_LOADS_H
#include "cache.h"

enum { LAYER_DONE, READ_FAILED, PAUSED, NOTHING_LEFT };

// These experts are needed now, in this order. What finds no slot is asked for again when one is
// free.
void demand_loads(ExpertCache *e, const int32_t *keys, int count);
// Slots may have become free: reads what was predicted and found none.
void go_on_loading(ExpertCache *e);
// These may be needed. What was predicted for the same layers before and is not again is dropped,
// unless its read has begun; what is there or asked for already is left alone.
void load_ahead(ExpertCache *e, const Prediction *found, int count);
// Takes note of reads that have ended, after waiting up to `patience` seconds for one. How many
// have.
int poll_loads(ExpertCache *e, double patience);
// Until one of `keys` is READY.
int wait_for_load(ExpertCache *e, const int32_t *keys, int count);
// Layer `row` begins: what was predicted for it and earlier ones, and is not there, is dropped
// unless it is demanded.
void enter_row(ExpertCache *e, int row);
#endif
