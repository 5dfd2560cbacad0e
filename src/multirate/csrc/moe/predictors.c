// Predicts experts in passes that run in C (experts/predictors.py and accelerated.py explain each
// predictor) and chooses which predictions to read (experts/prefetch_filter.py).
#include "../workspace.h"
#include "cache.h"

#include <string.h>

#define MOST_AHEAD_ROWS 8
#define STREAM_ROWS 16 // at most for the stream: a longer call needs most experts anyway
#define RANKS 1024     // chances are told apart by hundredths, up to this many of them
#define FILTER_DECAY 0.99
#define FILTER_PRIOR 2.0 // right of as many: a rank that nothing is known of is trusted

struct Predictor {
    PredictorPlan plan;
    Memory memory;
    int32_t *last, *last_count;    // [rows][experts], of the last pass
    int64_t *popular;              // [keys]
    float *p[MOST_AHEAD_ROWS + 1]; // residuals, [n, hidden]; the last holds the accelerated state
    RoutedRows routed;             // of the routers that it asks; without parts
    int32_t room, state_rows;      // rows that these hold, and of the state; 0: none
    int32_t at;                    // the oracle's call
    Prediction *found;
    int32_t *open; // [keys] depth · RANKS + rank of what is predicted and was absent; -1
    double right[(MOST_AHEAD_ROWS + 1) * RANKS], every[(MOST_AHEAD_ROWS + 1) * RANKS];
};

static void room_for_rows(Predictor *f, const Routers *m, int n) {
    if (n <= f->room)
        return;
    f->room = n;
    f->state_rows = 0;
    RoutedRows *g = &f->routed;
    size_t row = (size_t)n * m->hidden * sizeof(float), chosen = (size_t)n * m->top_k;
    g->normed = grown(g->normed, row);
    g->logits = grown(g->logits, (size_t)n * m->routers[0]->outputs * sizeof *g->logits);
    g->weights = grown(g->weights, chosen * sizeof *g->weights);
    g->ids = grown(g->ids, chosen * sizeof *g->ids);
    for (int i = 0; i <= MOST_AHEAD_ROWS; i++)
        f->p[i] = grown(f->p[i], row);
}

void close_predictor(Predictor *f) {
    if (!f)
        return;
    RoutedRows *g = &f->routed;
    void *rows[] = {g->normed, g->logits, g->weights, g->ids};
    for (int i = 0; i < 4; i++)
        release(rows[i]);
    for (int i = 0; i <= MOST_AHEAD_ROWS; i++)
        release(f->p[i]);
    free_all(&f->memory);
    free(f);
}

Predictor *open_predictor(const ExpertCache *e, const PredictorPlan *plan) {
    Predictor *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    size_t keys = (size_t)e->plan.rows * (size_t)e->plan.experts;
    f->plan = *plan;
    f->last = zeroed(&f->memory, keys, sizeof *f->last);
    f->last_count = zeroed(&f->memory, (size_t)e->plan.rows, sizeof *f->last_count);
    f->popular = zeroed(&f->memory, keys, sizeof *f->popular);
    f->found = zeroed(&f->memory, keys, sizeof *f->found);
    f->open = zeroed(&f->memory, keys, sizeof *f->open);
    if (f->memory.lacking) {
        close_predictor(f);
        return NULL;
    }
    for (size_t key = 0; key < keys; key++)
        f->open[key] = -1;
    for (size_t i = 0; i < sizeof f->right / sizeof *f->right; i++)
        f->right[i] = f->every[i] = FILTER_PRIOR;
    return f;
}

static void add_prediction(ExpertCache *e, int row, int expert, double chance, int *count) {
    e->predictor->found[(*count)++] = (Prediction){row * e->plan.experts + expert, row, chance};
}

// What row `target`'s own router says of the stream x [n, hidden], the likeliest first: Σ 1 / (1 +
// rank) over rows.
static int routed(Workspace *work, ExpertCache *e, const Routers *m, int target, const float *x,
                  int n, int count) {
    Predictor *f = e->predictor;
    int first = count;
    mr_route(work, m, target, x, n, &f->routed);
    for (int i = 0; i < n * m->top_k; i++) {
        int expert = (int)f->routed.ids[i], key = target * m->experts + expert, at = first;
        double chance = 1.0 / (1 + i % m->top_k);
        while (at < count && f->found[at].key != key)
            at++;
        if (at < count)
            f->found[at].chance += chance;
        else
            add_prediction(e, target, expert, chance, &count);
    }
    return count;
}

// The accelerated residual of `depth` later rows: p[0 … depth - 1]; p[0] is the state for the next
// row.
static void predict_residual(Workspace *work, Predictor *f, const Routers *m, int row,
                             const float *x, int n, const RoutedRows *g, int depth) {
    const PredictorPlan *plan = &f->plan;
    int at = plan->layer_of[row] * plan->most_depth;
    float *state = f->p[MOST_AHEAD_ROWS];
    f->p[MOST_AHEAD_ROWS] = f->p[0];
    f->p[0] = state; // what was p[0] is read, the other written
    mr_predict_residual(work, plan->sites + at, plan->pairs ? plan->pairs + at : NULL,
                        plan->most_depth, g->ids, g->weights, m->top_k, plan->ones, plan->eps, x,
                        f->state_rows == n ? f->p[MOST_AHEAD_ROWS] : NULL, n, depth, f->p);
    f->state_rows = n;
}

// Whether the next layer is likely to lack nothing: the k + 2 experts that its router, asked with
// the stream as it is, ranks first are all there. A tenth of what running ahead costs, and where
// most experts are in memory mostly true.
static int lacks_nothing(Workspace *work, ExpertCache *e, const Routers *m, int target,
                         const float *x, int n) {
    Predictor *f = e->predictor;
    int out = m->routers[target]->outputs;
    mr_route(work, m, target, x, n, &f->routed);
    for (int r = 0; r < n; r++) {
        const float *row = f->routed.logits + (size_t)r * out;
        for (int expert = 0; expert < m->experts; expert++) {
            if (find(e, target * m->experts + expert))
                continue;
            int better = 0;
            for (int i = 0; i < m->experts; i++)
                better += row[i] > row[expert];
            if (better < m->top_k + 2)
                return 0;
        }
    }
    return 1;
}

// The accelerated stream: layer by layer what is thought to leave the experts, the next layers' own
// attention on it, and what their routers then choose. It sees the model's own keys and values,
// and leaves its own in the slots of its rows, where the model's own will be before anything
// else reads them.
static int run_ahead(Workspace *work, ExpertCache *e, const Routers *m, const Pass *pass, int row,
                     const float *x, int n, const RoutedRows *g, int depth) {
    Predictor *f = e->predictor;
    const PredictorPlan *plan = &f->plan;
    float *p = f->p[0];
    int count = 0;
    memcpy(p, x, (size_t)n * m->hidden * sizeof *p);
    for (int step = 1; step <= depth; step++) {
        int layer = plan->layer_of[row + step - 1], next = plan->layer_of[row + step];
        mr_pruned_experts(work, plan->pruned + layer, g->ids, g->weights, m->top_k, plan->ones,
                          plan->eps, p, n, m->hidden);
        mr_layers(work, pass->shape, pass->layers, pass->caches, NULL, &pass->rows, p, layer + 1,
                  next + 1);
        count = routed(work, e, m, row + step, p, n, count);
        g = &f->routed;
    }
    return count;
}

int predict_experts(Workspace *work, ExpertCache *e, const Routers *m, const Pass *pass, int row,
                    const float *x, int n, const RoutedRows *g) {
    Predictor *f = e->predictor;
    int experts = e->plan.experts, count = 0, depth = e->controls.depth;
    if (depth > f->plan.most_depth)
        depth = f->plan.most_depth;
    if (depth > e->plan.rows - 1 - row)
        depth = e->plan.rows - 1 - row;
    int by = f->plan.kind;
    if (by == PREDICT_BY_GATE || by == PREDICT_BY_RESIDUAL || by == PREDICT_BY_STREAM)
        room_for_rows(f, m, n);
    if (by == PREDICT_BY_STREAM && n <= STREAM_ROWS) { // more rows ask the gate, once
        if (depth == 1 && lacks_nothing(work, e, m, row + 1, x, n))
            return 0;
        return run_ahead(work, e, m, pass, row, x, n, g, depth);
    }
    if (by == PREDICT_BY_RESIDUAL && depth > 0)
        predict_residual(work, f, m, row, x, n, g, depth);
    for (int step = 1; step <= depth; step++) {
        int target = row + step;
        if (by == PREDICT_BY_GATE || by == PREDICT_BY_STREAM)
            count = routed(work, e, m, target, x, n, count);
        if (by == PREDICT_BY_RESIDUAL)
            count = routed(work, e, m, target, f->p[step - 1], n, count);
        if (by == PREDICT_BY_LAST_TOKEN)
            for (int i = 0; i < f->last_count[target]; i++)
                add_prediction(e, target, f->last[target * experts + i], 1.0, &count);
        if (by == PREDICT_BY_POPULARITY)
            for (int rank = 0; rank < f->plan.count; rank++) {
                int best = -1;
                const int64_t *uses = f->popular + (size_t)target * experts;
                for (int expert = 0; expert < experts; expert++) {
                    int taken = !uses[expert];
                    for (int i = count - rank; i < count; i++)
                        taken |= f->found[i].key == target * experts + expert;
                    if (!taken && (best < 0 || uses[expert] > uses[best]))
                        best = expert;
                }
                if (best < 0)
                    break;
                add_prediction(e, target, best, 1.0 / (1 + rank), &count);
            }
        int call = f->at - 1 + step;
        if (by == PREDICT_BY_ORACLE && call < f->plan.trace_calls && f->plan.trace_rows[call] > row)
            for (int i = call ? f->plan.trace_ends[call - 1] : 0; i < f->plan.trace_ends[call]; i++)
                add_prediction(e, f->plan.trace_rows[call], f->plan.trace[i], 1.0, &count);
    }
    return count;
}

void forget_predictions(ExpertCache *e) {
    size_t keys = (size_t)e->plan.rows * (size_t)e->plan.experts;
    e->predictor->state_rows = 0;
    memset(e->predictor->open, 0xff, keys * sizeof *e->predictor->open);
}

void note_outcome(ExpertCache *e, int row, const int32_t *needed, int count) {
    Predictor *f = e->predictor;
    int experts = e->plan.experts;
    f->at++;
    f->last_count[row] = count;
    memcpy(f->last + (size_t)row * experts, needed, (size_t)count * sizeof *needed);
    for (int i = 0; i < count; i++)
        f->popular[row * experts + needed[i]]++;
    if (f->plan.threshold <= 0)
        return;
    for (int expert = 0; expert < experts; expert++) {
        int key = row * experts + expert, rank = f->open[key];
        if (rank < 0)
            continue;
        f->right[rank] = f->right[rank] * FILTER_DECAY + e->pinned[key];
        f->every[rank] = f->every[rank] * FILTER_DECAY + 1;
        f->open[key] = -1;
    }
}

int filter_predictions(ExpertCache *e, int row, int count) {
    Predictor *f = e->predictor;
    int kept = 0;
    for (int i = 0; i < count; i++) {
        Prediction one = f->found[i];
        if (!find(e, one.key) && f->plan.threshold > 0) {
            int percent = (int)(100 * one.chance + 0.5), depth = one.deadline - row;
            int rank = (depth < MOST_AHEAD_ROWS ? depth : MOST_AHEAD_ROWS) * RANKS +
                       (percent < RANKS ? percent : RANKS - 1);
            f->open[one.key] = rank;
            if (f->right[rank] < f->plan.threshold * f->every[rank])
                continue;
        }
        f->found[kept++] = one;
    }
    return kept;
}

const Prediction *found_predictions(const ExpertCache *e) {
    return e->predictor->found;
}
