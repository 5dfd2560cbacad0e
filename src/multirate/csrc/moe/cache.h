// Which experts are in memory: slots and eviction, as in experts/expert_cache.py and policies.py
// for decoders that run in Python; a test compares the two. All of it runs on the computing thread.
#ifndef MULTIRATE_CACHE_H
#define MULTIRATE_CACHE_H

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

typedef struct Predictor Predictor;
#define MOST_PREDICTORS 4
void mr_predictor_close(Predictor *f);

struct ExpertCache {
    Controls controls;
    ExpertCachePlan plan;
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

static void note(ExpertCache *e, int kind, double begin, double end, int row, int expert) {
    Controls *c = &e->controls;
    if (!c->record)
        return;
    if (c->event_count == e->event_room) {
        int room = e->event_room ? 2 * e->event_room : 4096;
        Event *grown_events = realloc(c->events, (size_t)room * sizeof *grown_events);
        if (!grown_events)
            return;
        c->events = grown_events;
        e->event_room = room;
    }
    c->events[c->event_count++] = (Event){begin, end, kind, row, expert};
}

static inline int occupied(const ExpertCache *e) {
    return e->plan.slots - e->free_count;
}

// READY now, or used again: the last of its equals.
static inline void on_insert(ExpertCache *e, Slot *slot) {
    slot->when = ++e->number;
}

// A READY slot's expert is needed by the running layer.
static void on_access(ExpertCache *e, Slot *slot) {
    int key = slot->key;
    slot->token = e->controls.token;
    slot->fresh = 0;
    on_insert(e, slot);
    double before = e->rank[key];
    if (e->plan.policy ==
        EVICT_LRFU) { // ln(score) + loss · token: all scores fade alike, so ranks stand
        double faded = e->plan.loss * (double)e->controls.token;
        e->rank[key] = log(before == -INFINITY ? 1.0 : 1.0 + exp(before - faded)) + faded;
    }
    if (e->plan.policy == EVICT_BELADY && e->next_use[key] < e->plan.future_ends[key])
        e->next_use[key]++;
}

static inline int next_use_of(const ExpertCache *e, int key) {
    return e->next_use[key] < e->plan.future_ends[key] ? e->plan.future[e->next_use[key]]
                                                       : INT32_MAX;
}

// 0: an earlier token left it, of a layer that this one has passed; 1: of the running layer or one
// ahead; 2: of this token.
static inline int staleness(const ExpertCache *e, const Slot *s) {
    if (s->token >= e->controls.token)
        return 2;
    return s->key / e->plan.experts < e->controls.row ? 0 : 1;
}

static int leaves_before(const ExpertCache *e, const Slot *a, const Slot *b) {
    switch (e->plan.policy) {
    case EVICT_LRFU:
        if (e->rank[a->key] != e->rank[b->key])
            return e->rank[a->key] < e->rank[b->key];
        break;
    case EVICT_BELADY: {
        int first = next_use_of(e, a->key), second = next_use_of(e, b->key);
        if (first != second)
            return first > second;
        break;
    }
    case EVICT_LEAST_STALE: {
        int first = staleness(e, a), second = staleness(e, b);
        if (first != second)
            return first < second;
        if (first == 2)
            return a->when > b->when;
        int row = a->key / e->plan.experts, other = b->key / e->plan.experts;
        if (first == 1 && row != other)
            return row > other;
        break;
    }
    default:
        break;
    }
    return a->when < b->when;
}

static void on_evict(ExpertCache *e, Slot *slot) {
    if (slot->state == SLOT_READY)
        e->controls.counts.wasted += slot->fresh;
    e->slot_of[slot->key] = -1;
    slot->state = SLOT_FREE;
    slot->fresh = 0;
    e->free[e->free_count++] = (int32_t)(slot - e->slots);
}

// Whether a slot is free now. A prediction takes only what this token has not used; what is
// predicted for the next layers leaves for a demand only, and last.
static int evict(ExpertCache *e, int speculative) {
    Slot *best = NULL, *spared = NULL;
    for (int i = 0; i < e->plan.slots; i++) {
        Slot *slot = &e->slots[i];
        if (slot->state != SLOT_READY || e->pinned[slot->key] ||
            (speculative && slot->token >= e->controls.token))
            continue;
        Slot **first = e->protected[slot->key] ? &spared : &best;
        if (!*first || leaves_before(e, slot, *first))
            *first = slot;
    }
    if (!best && !speculative)
        best = spared;
    if (!best)
        return 0;
    on_evict(e, best);
    return 1;
}

// A slot for `key`, LOADING; NULL when none may be taken now.
static Slot *reserve(ExpertCache *e, int key, int speculative) {
    if (!e->free_count && !evict(e, speculative))
        return NULL;
    Slot *slot = &e->slots[e->free[--e->free_count]];
    *slot = (Slot){.state = SLOT_LOADING,
                   .key = key,
                   .fresh = speculative,
                   .demanded = !speculative,
                   .token = e->controls.token};
    e->slot_of[key] = (int32_t)(slot - e->slots);
    e->loading++;
    return slot;
}

static inline Slot *find(const ExpertCache *e, int key) {
    return e->slot_of[key] < 0 ? NULL : &e->slots[e->slot_of[key]];
}

static inline int is_ready(const ExpertCache *e, int key) {
    const Slot *slot = find(e, key);
    return slot && slot->state == SLOT_READY;
}

Controls *mr_expert_cache_controls(ExpertCache *e) {
    return &e->controls;
}

void mr_expert_cache_close(ExpertCache *e) {
    if (!e)
        return;
    for (int i = 0; i < e->predictor_count; i++)
        mr_predictor_close(e->predictors[i]);
    void *parts[] = {e->slots,       e->slot_of,     e->rank,       e->next_use,
                     e->pinned,      e->protected,   e->failed,     e->left,
                     e->free,        e->pending,     e->ended_slot, e->ended_status,
                     e->ended_bytes, e->ended_began, e->ended_over, e->controls.events};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    free(e);
}

// Everything in `plan` outlives the result. NULL: no memory.
ExpertCache *mr_expert_cache_open(const ExpertCachePlan *plan) {
    ExpertCache *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    size_t keys = (size_t)plan->rows * (size_t)plan->experts, slots = (size_t)plan->slots;
    e->plan = *plan;
    e->controls.last_row = plan->rows;
    e->controls.depth = e->controls.active = 1;
    e->slots = calloc(slots, sizeof *e->slots);
    e->free = calloc(slots, sizeof *e->free);
    e->left = calloc((size_t)plan->experts, sizeof *e->left);
    e->slot_of = calloc(keys, sizeof *e->slot_of);
    e->rank = calloc(keys, sizeof *e->rank);
    e->next_use = calloc(keys, sizeof *e->next_use);
    e->pinned = calloc(keys, 1);
    e->protected = calloc(keys, 1);
    e->failed = calloc(keys, sizeof *e->failed);
    e->pending = calloc(2 * keys, sizeof *e->pending);
    e->ended_slot = calloc(slots, sizeof *e->ended_slot);
    e->ended_status = calloc(slots, sizeof *e->ended_status);
    e->ended_bytes = calloc(slots, sizeof *e->ended_bytes);
    e->ended_began = calloc(slots, sizeof *e->ended_began);
    e->ended_over = calloc(slots, sizeof *e->ended_over);
    if (!e->slots || !e->free || !e->left || !e->slot_of || !e->rank || !e->next_use ||
        !e->pinned || !e->protected || !e->failed || !e->pending || !e->ended_slot ||
        !e->ended_status || !e->ended_bytes || !e->ended_began || !e->ended_over) {
        mr_expert_cache_close(e);
        return NULL;
    }
    for (size_t key = 0; key < keys; key++) {
        e->slot_of[key] = -1;
        e->rank[key] = -INFINITY;
        if (plan->policy == EVICT_BELADY)
            e->next_use[key] = key ? plan->future_ends[key - 1] : 0;
    }
    for (int i = plan->slots - 1; i >= 0; i--)
        e->free[e->free_count++] = i;
    return e;
}
#endif
