#include "records.h"

#include <errno.h>

int take_next(Reads *r) {
    int best = -1;
    for (int i = 0; i < r->queue_count; i++) {
        const Read *one = &r->reads[r->queue[i]],
                   *other = best < 0 ? NULL : &r->reads[r->queue[best]];
        if (!other || one->demanded > other->demanded ||
            (one->demanded == other->demanded && one->order < other->order))
            best = i;
    }
    if (best < 0)
        return -1;
    int slot = r->queue[best];
    r->queue[best] = r->queue[--r->queue_count];
    r->queued_demands -= r->reads[slot].demanded;
    return slot;
}

void enqueue(Reads *r, int slot) {
    r->reads[slot].state = READ_QUEUED;
    r->queued_demands += r->reads[slot].demanded;
    r->queue[r->queue_count++] = slot;
}

int chunk_read(Reads *r, int slot, int32_t status) {
    Read *one = &r->reads[slot];
    int over = status || one->done >= r->size;
    if (!over && one->unwanted) {
        status = ECANCELED;
        over = 1;
    }
    if (over) {
        one->status = status;
        one->ended = seconds_now();
        one->state = READ_ENDED;
        r->ended[r->ended_count++] = slot;
    } else if (!one->demanded && r->queued_demands) {
        enqueue(r, slot); // gives way; goes on from here later
    }
    return over;
}
