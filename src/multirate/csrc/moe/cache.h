// Which experts are in memory: slots and eviction (cache.c).
#ifndef MULTIRATE_CACHE_H
#define MULTIRATE_CACHE_H
#include <stdlib.h>

#include "../include/experts.h"

enum { SLOT_FREE, SLOT_LOADING, SLOT_READY };
enum { EVICT_NONE, EVICT_LRU, EVICT_LRFU, EVICT_LEAST_STALE, EVICT_BELADY };
enum { EVENT_COMPUTE, EVENT_DEMAND, EVENT_SPECULATIVE, EVENT_STALL, EVENT_PREDICT, EVENT_TOKEN };

// A key is row · experts + expert, row that of the store's layers.
typedef struct {
    int32_t state, key;
    int32_t fresh;           // loaded ahead, not used yet
    int32_t demanded, early; // its load: needed now, and predicted before that
    int32_t deadline;        // the row that a load was predicted for, in pass
    int64_t load_token, token,
        when; // token: the pass that used or loaded it last; when: number of its last use
} Slot;

typedef struct {
    int32_t key, deadline;
    double chance;
} Prediction;

// Memory that is freed together.
typedef struct {
    void *kept[16];
    int32_t count, lacking; // lacking: there was not enough
} Memory;

typedef struct Predictor Predictor;
#define MOST_PREDICTORS 4

struct ExpertCache {
    Controls controls;
    ExpertCachePlan plan;
    Memory memory; // of what follows
    Slot *slots;
    int32_t *slot_of;            // [keys], -1: in none
    double *rank;                // [keys] of EVICT_LRFU
    int32_t *next_use;           // [keys] of EVICT_BELADY: index into future
    uint8_t *pinned, *protected; // [keys]: what the running layer computes with; predicted for the
                                 // next layers, evicted last
    int32_t *failed;             // [keys] errno of this layer's failed reads
    int32_t *left, left_count;   // keys that a paused layer still waits for; none: no layer is
    int32_t *free, free_count, pinned_count, loading, failures, event_room;
    int64_t number, numbers;
    double busy_until;   // the disk, by the reads that have ended
    Prediction *pending; // without a slot yet, in the order to read them
    int32_t pending_count;
    int32_t *ended_slot, *ended_status; // [slots] of a poll
    int64_t *ended_bytes;
    double *ended_began, *ended_over;
    Predictor *predictor; // that of controls.predictor, or NULL
    Predictor *predictors[MOST_PREDICTORS];
    int32_t predictor_count;
};

// Zeroed; NULL: there is not enough.
void *zeroed(Memory *memory, size_t count, size_t size);
void free_all(Memory *memory);

void note_event(ExpertCache *e, int kind, double begin, double end, int row, int expert);

// A READY slot's expert is needed by the running layer.
void on_access(ExpertCache *e, Slot *slot);
void on_evict(ExpertCache *e, Slot *slot);

// A slot for `key`, LOADING; NULL when none may be taken now. speculative: for a prediction.
Slot *reserve(ExpertCache *e, int key, int speculative);

// READY now, or used again: the last of its equals.
static inline void on_insert(ExpertCache *e, Slot *slot) {
    slot->when = ++e->number;
}

static inline int occupied(const ExpertCache *e) {
    return e->plan.slots - e->free_count;
}

static inline Slot *find(const ExpertCache *e, int key) {
    return e->slot_of[key] < 0 ? NULL : &e->slots[e->slot_of[key]];
}

static inline int is_ready(const ExpertCache *e, int key) {
    const Slot *slot = find(e, key);
    return slot && slot->state == SLOT_READY;
}
#endif
