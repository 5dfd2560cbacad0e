// A mixture whose experts are not all in memory: the layers of a pass without the interpreter in
// between. experts/runtime.py explains what a layer does. The true router always decides. An
// expert's product for its rows and the sum over a row's experts have one fixed order, so the bits
// do not depend on what is loaded when.
#include <math.h>
#include <string.h>

#include "../workspace.h"
#include "cache.h"

Controls *mr_expert_cache_controls(ExpertCache *e) {
    return &e->controls;
}

static void close_predictors(ExpertCache *e) {
    for (int i = 0; i < e->predictor_count; i++)
        close_predictor(e->predictors[i]);
    e->predictor = NULL;
    e->predictor_count = e->controls.predictor = 0;
}

void mr_expert_cache_close(ExpertCache *e) {
    if (!e)
        return;
    close_predictors(e);
    free_all(&e->memory);
    free(e->controls.events);
    free(e);
}

// Everything in `plan` outlives the result. NULL: no memory.
ExpertCache *mr_expert_cache_open(const ExpertCachePlan *plan) {
    ExpertCache *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    size_t keys = (size_t)plan->rows * (size_t)plan->experts, slots = (size_t)plan->slots;
    Memory *memory = &e->memory;
    e->plan = *plan;
    e->controls.last_row = plan->rows;
    e->controls.depth = e->controls.active = 1;
    e->slots = zeroed(memory, slots, sizeof *e->slots);
    e->free = zeroed(memory, slots, sizeof *e->free);
    e->left = zeroed(memory, (size_t)plan->experts, sizeof *e->left);
    e->slot_of = zeroed(memory, keys, sizeof *e->slot_of);
    e->rank = zeroed(memory, keys, sizeof *e->rank);
    e->next_use = zeroed(memory, keys, sizeof *e->next_use);
    e->pinned = zeroed(memory, keys, 1);
    e->protected = zeroed(memory, keys, 1);
    e->failed = zeroed(memory, keys, sizeof *e->failed);
    e->pending = zeroed(memory, 2 * keys, sizeof *e->pending);
    e->ended = zeroed(memory, slots, sizeof *e->ended);
    if (memory->lacking) {
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

// For `e`, in place of its last ones: `count` predictors that controls.predictor chooses from,
// each of which keeps what it has learnt while another is asked. 0: no memory. Everything in
// `plans` outlives them.
int mr_expert_cache_predict(ExpertCache *e, const PredictorPlan *plans, int count) {
    close_predictors(e);
    for (int i = 0; i < count && i < MOST_PREDICTORS; i++) {
        if (plans[i].kind == PREDICT_BY_NOBODY)
            continue;
        if (!(e->predictors[e->predictor_count] = open_predictor(e, &plans[i])))
            return 0;
        e->predictor_count++;
    }
    if (e->predictor_count)
        e->predictor = e->predictors[0];
    return 1;
}

static void predict_ahead(Workspace *work, const Mixture *m, ExpertCache *e, const Pass *pass,
                          int row, const float *x, int n, const RoutedRows *g) {
    double began = seconds_now();
    int count = predict_experts(work, e, &m->routers, pass, row, x, n, g);
    double now = seconds_now();
    e->controls.counts.predictor_seconds += now - began;
    note_event(e, EVENT_PREDICT, began, now, row, -1);
    if ((count = filter_predictions(e, row, count)))
        load_ahead(e, found_predictions(e), count);
}

// A layer's uses of its experts, [n, top_k], expert by expert.
typedef struct {
    int32_t *starts;         // [experts + 1] where each expert's begin in `order`
    int32_t *order;          // [n · top_k] the uses
    int32_t *list, needed;   // [needed] the experts
    int32_t *keys, waiting;  // [waiting] those that have not been computed, as keys
    int32_t *ready, *counts; // [experts] those that are computed now, with how many uses …
    int32_t *rows, *places;  // … and of each use its row and place
} Uses;

static Uses uses_of(Workspace *work, const Routers *routers, const int64_t *ids, int n) {
    int experts = routers->experts, all = n * routers->top_k;
    work->uses = grown(work->uses, sizeof(int32_t) * (size_t)(6 * experts + 1 + 3 * all));
    int32_t *starts = work->uses, *fill = starts + experts + 1, *rest = fill + experts;
    Uses u = {.starts = starts,
              .list = rest,
              .keys = rest + experts,
              .ready = rest + 2 * experts,
              .counts = rest + 3 * experts,
              .order = rest + 4 * experts};
    u.rows = u.order + all;
    u.places = u.rows + all;
    memset(starts, 0, sizeof(int32_t) * (size_t)(experts + 1));
    for (int i = 0; i < all; i++)
        starts[ids[i] + 1]++;
    for (int expert = 0; expert < experts; expert++) {
        if (starts[expert + 1])
            u.list[u.needed++] = expert;
        starts[expert + 1] += starts[expert];
        fill[expert] = starts[expert];
    }
    for (int i = 0; i < all; i++)
        u.order[fill[ids[i]]++] = i;
    return u;
}

// Asks for the layer's experts, and for those of later layers that are predicted.
static void begin_row(Workspace *work, const Mixture *m, ExpertCache *e, const Pass *pass, int row,
                      const float *x, int n, const RoutedRows *g, Uses *u) {
    int experts = m->routers.experts, missing = 0;
    Counts *c = &e->controls.counts;
    if (row <= e->controls.last_row && e->predictor) {
        e->predictor = e->predictors[e->controls.predictor];
        forget_predictions(e);
    }
    enter_row(e, row);
    u->waiting = u->needed;
    c->calls++;
    c->uses += u->needed;
    for (int i = 0; i < u->needed; i++)
        e->pinned[u->keys[i] = row * experts + u->list[i]] = 1;
    e->pinned_count = u->needed;
    for (int i = 0; i < u->needed; i++) {
        Slot *slot = find(e, u->keys[i]);
        if (!slot || slot->state != SLOT_READY) {
            missing++;
            continue;
        }
        c->hits++;
        c->timely += slot->fresh;
        on_access(e, slot);
    }
    if (missing)
        demand_loads(e, u->keys, u->needed);
    if (e->predictor) {
        note_outcome(e, row, u->list, u->needed);
        if (e->controls.active && occupied(e) < e->plan.rows * experts)
            predict_ahead(work, m, e, pass, row, x, n, g);
    }
}

// Those of u->keys that are READY go to u->ready; returns how many.
static int take_ready(const ExpertCache *e, Uses *u) {
    int count = 0, left = 0;
    for (int i = 0; i < u->waiting; i++) {
        if (is_ready(e, u->keys[i]))
            u->ready[count++] = u->keys[i];
        else
            u->keys[left++] = u->keys[i];
    }
    u->waiting = left;
    return count;
}

static int wait_for_experts(ExpertCache *e, int row, const Uses *u) {
    double began = seconds_now();
    int state = wait_for_load(e, u->keys, u->waiting);
    double now = seconds_now();
    e->controls.counts.stall_seconds += now - began;
    note_event(e, EVENT_STALL, began, now, row, -1);
    if (state == PAUSED) {
        memcpy(e->left, u->keys, (size_t)u->waiting * sizeof *u->keys);
        e->left_count = u->waiting;
    }
    return state;
}

// The `count` experts that are ready, for all rows that use them.
static void compute_ready(Workspace *work, const Mixture *m, ExpertCache *e, int row, int count,
                          const RoutedRows *g, const Uses *u) {
    int base = row * m->routers.experts, total = 0;
    const Expert *chosen[count];
    for (int i = 0; i < count; i++) {
        int expert = u->ready[i] - base;
        Slot *slot = find(e, u->ready[i]);
        slot->fresh = 0;
        chosen[i] = &m->experts[row][slot - e->slots];
        u->counts[i] = u->starts[expert + 1] - u->starts[expert];
        for (int at = u->starts[expert]; at < u->starts[expert + 1]; at++) {
            u->rows[total] = u->order[at] / m->routers.top_k;
            u->places[total++] = u->order[at];
        }
    }
    mr_experts(work, chosen, u->counts, count, g->normed, u->rows, u->places, g->parts);
    for (int i = 0; i < count; i++) {
        if (e->pinned_count >= e->plan.slots) { // more than fit: one that is done with makes room
            e->pinned[u->ready[i]] = 0;
            e->pinned_count--;
        }
        if (e->plan.policy == EVICT_NONE)
            on_evict(e, find(e, u->ready[i]));
    }
}

static int run_mixture_layer(Workspace *work, const Mixture *m, ExpertCache *e, const Pass *pass,
                             int row, const float *x, int n, const RoutedRows *g) {
    int experts = m->routers.experts, state = LAYER_DONE;
    Uses u = uses_of(work, &m->routers, g->ids, n);
    if (e->left_count) { // it was asked for before the pause
        u.waiting = e->left_count;
        memcpy(u.keys, e->left, (size_t)u.waiting * sizeof *u.keys);
        e->left_count = 0;
    } else {
        begin_row(work, m, e, pass, row, x, n, g, &u);
    }
    while (u.waiting && state == LAYER_DONE) {
        poll_loads(e, 0.0);
        int count = take_ready(e, &u);
        if (!count) {
            state = wait_for_experts(e, row, &u);
            if (state == PAUSED)
                return state;
            continue;
        }
        double began = seconds_now();
        compute_ready(work, m, e, row, count, g, &u);
        if (u.waiting)
            demand_loads(e, u.keys, u.waiting); // slots have become free: for these first
        go_on_loading(e);
        note_event(e, EVENT_COMPUTE, began, seconds_now(), row,
                   count == 1 ? u.ready[0] - row * experts : -1);
    }
    memset(e->pinned + (size_t)row * experts, 0, (size_t)experts);
    return state;
}

// Layers [start, stop) as mr_layers, each mixture's router, experts and sum included. PAUSED: the
// same call with start = controls.paused_layer goes on, any other forgets it. READ_FAILED,
// NOTHING_LEFT: x is lost, and controls says of what.
int mr_mixture(Workspace *work, const Mixture *m, ExpertCache *e, const LayerCache *caches,
               const Adapter *const *adapters, const Rows *rows, float *x, int start, int stop,
               const RoutedRows *g) {
    int n = rows->count;
    const Routers *routers = &m->routers;
    Pass pass = {m->shape, m->layers, caches, *rows};
    pass.rows.adapted = NULL;
    int begin = start;
    if (start != e->controls.paused_layer)
        e->left_count = 0;
    for (int i = start; i < stop; i++) {
        int row = m->row_of[i];
        if (row < 0)
            continue;
        if (!e->left_count) {
            mr_layers(work, m->shape, m->layers, caches, adapters, rows, x, begin, i + 1);
            mr_route(work, routers, row, x, n, g);
        }
        begin = i + 1;
        int state = run_mixture_layer(work, m, e, &pass, row, x, n, g);
        e->controls.paused_layer = state == PAUSED ? i : -1;
        if (state != LAYER_DONE)
            return state;
        mr_combine(g->parts, g->weights, n, routers->top_k, routers->hidden, x);
    }
    if (begin < stop)
        mr_layers(work, m->shape, m->layers, caches, adapters, rows, x, begin, stop);
    return LAYER_DONE;
}
