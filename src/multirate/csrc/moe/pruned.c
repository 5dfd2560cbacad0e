// Predicts where the experts will move the residual before they are in memory: by a low-rank
// update, by a few neurons of each expert, or by most of its important ones (PrunedExperts).
#include "../include/experts.h"
#include "../layers.h"

typedef struct {
    const LowRank *near, *far;
    const PrunedPair *pruned; // or NULL
    const int64_t *ids;       // [n, k] with weights [n, k]: the experts of the layer
    const float *weights;
    const float *ones, *residual, *state;
    float *p_near, *p_far;
    float eps;
    int count, k;
    float *neurons; // [n, k · rows]: what each is multiplied by
} ResidualCall;

// share · SiLU(down n(residual)) of row n's experts.
static void pruned_neurons(const ResidualCall *f, int n, int d) {
    const PrunedPair *s = f->pruned;
    const float *x = f->residual + (size_t)n * d, *weights = f->weights + (size_t)n * f->k;
    float *z = f->neurons + (size_t)n * f->k * s->rows;
    float scale = vectors()->inverse_rms(x, d, f->eps), total = 0.0f;
    for (int j = 0; j < f->k; j++)
        total += weights[j];
    for (int j = 0; j < f->k; j++)
        for (int row = 0; row < s->rows; row++) {
            const bf16 *down = s->down + ((size_t)f->ids[(size_t)n * f->k + j] * s->rows + row) * d;
            float inner = vectors()->dot_bf16(x, NULL, down, d) * scale;
            *z++ = inner * vectors()->sigmoid(inner) * weights[j] / total;
        }
}

// p[begin … end) += Σ neurons · up of row n's experts.
static void add_neurons(const ResidualCall *f, const bf16 *ups, float *p, int n, int d, int begin,
                        int end) {
    int rows = f->pruned->rows;
    const float *z = f->neurons + (size_t)n * f->k * rows;
    for (int j = 0; j < f->k; j++)
        for (int row = 0; row < rows; row++) {
            const bf16 *up = ups + ((size_t)f->ids[(size_t)n * f->k + j] * rows + row) * d;
            vectors()->add_bf16(*z++, up + begin, end - begin, p + (size_t)n * d + begin);
        }
}

static void run_residual(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const ResidualCall *f = context;
    int d = f->near->a.inputs / 2;
    float *normed = room_for_normed(mine, 2 * d);
    for (int n = 0; n < f->count; n++) {
        float *to = normed + (size_t)n * 2 * d;
        vectors()->read_row(f->residual + (size_t)n * d, f->ones, d, f->eps, to);
        if (f->state)
            vectors()->read_row(f->state + (size_t)n * d, f->ones, d, f->eps, to + d);
        else
            memset(to + d, 0, (size_t)d * sizeof(float));
    }
    size_t bytes = (size_t)f->count * d * sizeof(float);
    if (!id) {
        memcpy(f->p_near, f->residual, bytes);
        if (f->far)
            memcpy(f->p_far, f->residual, bytes);
    }
    // The last thread begins with them: of a product with few outputs the first does most.
    for (int n = f->pruned ? threads - 1 - id : f->count; n < f->count; n += threads)
        pruned_neurons(f, n, d);
    low_rank_in(work, f->near, normed, 2 * d, NULL, f->count, id, threads);
    low_rank_out(work, f->near, f->p_near, d, NULL, f->count, id, threads);
    if (f->far)
        low_rank_out(work, f->far, f->p_far, d, NULL, f->count, id, threads);
    if (!f->pruned)
        return;
    barrier(work, threads);
    int begin = d / COLUMN * id / threads * COLUMN, end = d / COLUMN * (id + 1) / threads * COLUMN;
    for (int n = 0; n < f->count; n++) {
        add_neurons(f, f->pruned->near, f->p_near, n, d, begin, end);
        if (f->far)
            add_neurons(f, f->pruned->far, f->p_far, n, d, begin, end);
    }
}

// The accelerated residual (experts/accelerated.py) at each of `depth` depths i: p[i] = residual +
// U SiLU(D [n(residual); n(state)]) for the U of sites[i], whose D is the same, and the experts'
// pruned neurons of pairs [most_depth], unless NULL. residual, state (or NULL), p[i] [n, d];
// ones [d]; ids, weights [n, k]. Two depths at a time share the product with D.
void mr_predict_residual(Workspace *work, const LowRank *const *sites,
                         const PrunedPair *const *pairs, int most_depth, const int64_t *ids,
                         const float *weights, int k, const float *ones, float eps,
                         const float *residual, const float *state, int n, int depth,
                         float *const *p) {
    size_t d = sites[0]->a.inputs / 2;
    room_for_adapters(work);
    size_t bytes = pairs ? MAX_ROWS * (size_t)k * (size_t)pairs[0]->rows * sizeof(float) : 0;
    work->neurons = grown(work->neurons, bytes);
    for (int i = 1; i < (depth > 2 ? depth : 2); i++)
        for (int r = 0; r < n; r += MAX_ROWS) {
            size_t at = r * d, use = (size_t)r * (size_t)k;
            ResidualCall f = {.near = sites[0],
                              .far = i < depth ? sites[i] : NULL,
                              .pruned = pairs ? pairs[i < most_depth ? i : most_depth - 1] : NULL,
                              .ids = ids ? ids + use : NULL,
                              .weights = weights ? weights + use : NULL,
                              .ones = ones,
                              .residual = residual + at,
                              .state = state ? state + at : NULL,
                              .p_near = p[0] + at,
                              .p_far = i < depth ? p[i] + at : NULL,
                              .eps = eps,
                              .count = n - r < MAX_ROWS ? n - r : MAX_ROWS,
                              .k = k,
                              .neurons = work->neurons};
            run_parallel(work, run_residual, &f, sites[0], f.count);
        }
}

typedef struct {
    const PrunedExperts *layer;
    const int64_t *ids; // [n, k] with weights [n, k]: the experts of the layer
    const float *weights, *ones;
    float *x, *neurons; // [n, d]; [n, k · rows]
    float eps;
    int count, k, d;
} PrunedCall;

static inline float total_weight(const PrunedCall *t, int n) {
    float total = 0.0f;
    for (int j = 0; j < t->k; j++)
        total += t->weights[(size_t)n * t->k + j];
    return total;
}

static void run_pruned(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const PrunedCall *t = context;
    const PrunedExperts *s = t->layer;
    int d = t->d, rows = s->rows, each = t->k * rows;
    float *normed = NULL;
    if (s->site) {
        normed = room_for_normed(mine, d);
        for (int n = 0; n < t->count; n++)
            vectors()->read_row(t->x + (size_t)n * d, t->ones, d, t->eps, normed + (size_t)n * d);
    }
    for (int n = 0; n < t->count; n++) {
        const float *x = t->x + (size_t)n * d;
        float scale = vectors()->inverse_rms(x, d, t->eps), total = total_weight(t, n);
        for (int u = each * id / threads; u < each * (id + 1) / threads; u++) {
            int use = n * t->k + u / rows;
            size_t at = ((size_t)t->ids[use] * rows + u % rows) * d;
            float gate = vectors()->dot_bf16(x, NULL, s->gate + at, d) * scale,
                  up = vectors()->dot_bf16(x, NULL, s->up + at, d) * scale;
            t->neurons[(size_t)n * each + u] =
                gate * vectors()->sigmoid(gate) * up * t->weights[use] / total;
        }
    }
    if (s->site) {
        low_rank_in(work, s->site, normed, d, NULL, t->count, id, threads);
        low_rank_out(work, s->site, t->x, d, NULL, t->count, id, threads);
    }
    barrier(work, threads);
    int begin = d / COLUMN * id / threads * COLUMN, end = d / COLUMN * (id + 1) / threads * COLUMN;
    for (int n = 0; n < t->count; n++) {
        float *x = t->x + (size_t)n * d, total = total_weight(t, n);
        for (int j = 0; j < t->k; j++) {
            size_t expert = (size_t)t->ids[n * t->k + j];
            vectors()->add_bf16(t->weights[n * t->k + j] / total, s->means + expert * d + begin,
                                end - begin, x + begin);
            for (int row = 0; row < rows; row++) {
                const bf16 *down = s->down + (expert * rows + row) * d;
                vectors()->add_bf16(t->neurons[(size_t)n * each + j * rows + row], down + begin,
                                    end - begin, x + begin);
            }
        }
    }
}

// x [n, d], the stream after a layer's attention, becomes what is thought to leave that layer.
void mr_pruned_experts(Workspace *work, const PrunedExperts *layer, const int64_t *ids,
                       const float *weights, int k, const float *ones, float eps, float *x, int n,
                       int d) {
    work->neurons =
        grown(work->neurons, MAX_ROWS * (size_t)k * (size_t)layer->rows * sizeof(float));
    if (layer->site)
        room_for_adapters(work);
    for (int r = 0; r < n; r += MAX_ROWS) {
        PrunedCall t = {layer,
                        ids + (size_t)r * k,
                        weights + (size_t)r * k,
                        ones,
                        x + (size_t)r * d,
                        work->neurons,
                        eps,
                        n - r < MAX_ROWS ? n - r : MAX_ROWS,
                        k,
                        d};
        run_parallel(work, run_pruned, &t, layer, t.count);
    }
}
