// Experts that are not all in memory: slots and eviction (cache.c), loads and predictions.
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
    int32_t fresh;                   // loaded ahead, not used yet
    int32_t demanded, early;         // its load: needed now, and predicted before that
    int32_t deadline;                // the row that a load was predicted for, in pass
    int64_t load_token, token, when; // token: the pass that used or loaded it last; when: number
                                     // of its last use
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
    EndedRead *ended;     // [slots] of a poll
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

// ---- loads.c: loads of experts into slots ----

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

// ---- predictors.c: predictions of experts ----

enum {
    PREDICT_BY_NOBODY,
    PREDICT_BY_LAST_TOKEN,
    PREDICT_BY_POPULARITY,
    PREDICT_BY_GATE,
    PREDICT_BY_RESIDUAL,
    PREDICT_BY_ORACLE,
    PREDICT_BY_STREAM
};

// A pass: the layers as mr_layers takes them.
typedef struct {
    const Shape *shape;
    const Layer *layers;
    const LayerCache *caches;
    Rows rows; // none with adapters
} Pass;

// NULL: no memory.
Predictor *open_predictor(const ExpertCache *e, const PredictorPlan *plan);
void close_predictor(Predictor *f);

// What layer `row` names: [count] of found_predictions. x [n, hidden]: the stream after its
// attention.
int predict_experts(Workspace *work, ExpertCache *e, const Routers *m, const Pass *pass, int row,
                    const float *x, int n, const RoutedRows *g);
// A pass over the layers begins.
void forget_predictions(ExpertCache *e);
// Layer `row` needs these: what a predictor learns from, and what was predicted comes true or not.
void note_outcome(ExpertCache *e, int row, const int32_t *needed, int count);
// Leaves of `count` predictions those that are there or worth a read.
int filter_predictions(ExpertCache *e, int row, int count);
const Prediction *found_predictions(const ExpertCache *e);
#endif
