// A mixture whose experts are not all in memory: the layers of a pass without the interpreter in
// between. experts/runtime.py explains what a layer does. The true router always decides. An
// expert's product for its rows and the sum over a row's experts have one fixed order, so the bits
// do not depend on what is loaded when.
#ifndef MULTIRATE_MIXTURE_H
#define MULTIRATE_MIXTURE_H

static void predict_ahead(Workspace *work, const Mixture *m, ExpertCache *e, const Pass *pass,
                          int row, const float *x, int n, const RoutedRows *g) {
    double began = now_seconds();
    int count = predict(work, e, &m->routers, pass, row, x, n, g->ids, g->weights);
    double now = now_seconds();
    e->controls.counts.predictor_seconds += now - began;
    note(e, EVENT_PREDICT, began, now, row, -1);
    if ((count = filter_predictions(e, row, count)))
        prefetch(e, e->predictor->found, count);
}

static int run_mixture_layer(Workspace *work, const Mixture *m, ExpertCache *e, const Pass *pass,
                             int row, const float *x, int n, const RoutedRows *g) {
    int experts = m->routers.experts, k = m->routers.top_k, all = n * k, base = row * experts,
        needed = 0, state = LAYER_DONE;
    work->uses =
        grown(work->uses, &work->uses_size, sizeof(int32_t) * (size_t)(6 * experts + 1 + 3 * all));
    int32_t *starts = work->uses, *list = starts + experts + 1, *keys = list + experts,
            *ready = keys + experts, *counts = ready + experts;
    int32_t *fill = counts + experts, *order = fill + experts, *rows = order + all,
            *places = rows + all;
    const Expert *chosen[experts];
    int waiting = 0, missing = 0;
    Counts *c = &e->controls.counts;

    memset(starts, 0, sizeof(int32_t) * (size_t)(experts + 1));
    for (int i = 0; i < all; i++)
        starts[g->ids[i] + 1]++;
    for (int expert = 0; expert < experts; expert++) {
        if (starts[expert + 1])
            list[needed++] = expert;
        starts[expert + 1] += starts[expert];
        fill[expert] = starts[expert];
    }
    for (int i = 0; i < all; i++)
        order[fill[g->ids[i]]++] = i;

    if (e->left_count) { // it was asked for before the pause
        waiting = e->left_count;
        memcpy(keys, e->left, (size_t)waiting * sizeof *keys);
        e->left_count = 0;
        goto compute;
    }
    if (row <= e->controls.last_row && e->predictor) {
        e->predictor = e->predictors[e->controls.predictor];
        forget_predictions(e);
    }
    enter_row(e, row);
    waiting = needed;
    c->calls++;
    c->uses += needed;
    for (int i = 0; i < needed; i++)
        e->pinned[keys[i] = base + list[i]] = 1;
    e->pinned_count = needed;
    for (int i = 0; i < needed; i++) {
        Slot *slot = find(e, keys[i]);
        if (!slot || slot->state != SLOT_READY) {
            missing++;
            continue;
        }
        c->hits++;
        c->timely += slot->fresh;
        on_access(e, slot);
    }
    if (missing)
        demand(e, keys, needed);
    if (e->predictor) {
        outcome(e, row, list, needed);
        if (e->controls.active && occupied(e) < e->plan.rows * experts)
            predict_ahead(work, m, e, pass, row, x, n, g);
    }

compute:
    while (waiting) {
        int count = 0, left = 0, total = 0;
        poll_loads(e, 0.0);
        for (int i = 0; i < waiting; i++) {
            if (is_ready(e, keys[i]))
                ready[count++] = keys[i];
            else
                keys[left++] = keys[i];
        }
        double began = now_seconds();
        if (!count) {
            state = wait_for(e, keys, left);
            double now = now_seconds();
            c->stall_seconds += now - began;
            note(e, EVENT_STALL, began, now, row, -1);
            if (state == PAUSED) {
                memcpy(e->left, keys, (size_t)left * sizeof *keys);
                e->left_count = left;
                return state;
            }
            if (state != LAYER_DONE)
                break;
            continue;
        }
        for (int i = 0; i < count; i++) {
            int expert = ready[i] - base;
            Slot *slot = find(e, ready[i]);
            slot->fresh = 0;
            chosen[i] = &m->experts[row][slot - e->slots];
            counts[i] = starts[expert + 1] - starts[expert];
            for (int u = starts[expert]; u < starts[expert + 1]; u++) {
                rows[total] = order[u] / k;
                places[total++] = order[u];
            }
        }
        mr_experts(work, chosen, counts, count, g->normed, rows, places, g->parts);
        for (int i = 0; i < count; i++) {
            if (e->pinned_count >=
                e->plan.slots) { // more than fit: one that is done with makes room
                e->pinned[ready[i]] = 0;
                e->pinned_count--;
            }
            if (e->plan.policy == EVICT_NONE)
                on_evict(e, find(e, ready[i]));
        }
        waiting = left;
        if (waiting)
            demand(e, keys, waiting); // slots have become free: for these first
        go_on(e);
        note(e, EVENT_COMPUTE, began, now_seconds(), row, count == 1 ? ready[0] - base : -1);
    }
    memset(e->pinned + base, 0, (size_t)experts);
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
            mr_route(work, routers->routers[row], routers->norms[row], routers->eps, x, n,
                     routers->experts, routers->top_k, routers->normalise, g->normed, g->logits,
                     g->ids, g->weights);
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
#endif
