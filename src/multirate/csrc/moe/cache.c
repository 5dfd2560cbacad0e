// Which experts are in memory: slots and eviction, as in experts/expert_cache.py and policies.py
// for decoders that run in Python; a test compares the two. All of it runs on the computing thread.
#include "cache.h"

#include <math.h>

void *zeroed(Memory *memory, size_t count, size_t size) {
    void *made = calloc(count, size);
    memory->lacking |= !made;
    return memory->kept[memory->count++] = made;
}

void free_all(Memory *memory) {
    while (memory->count)
        free(memory->kept[--memory->count]);
}

void note_event(ExpertCache *e, int kind, double begin, double end, int row, int expert) {
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

void on_access(ExpertCache *e, Slot *slot) {
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

void on_evict(ExpertCache *e, Slot *slot) {
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

Slot *reserve(ExpertCache *e, int key, int speculative) {
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
