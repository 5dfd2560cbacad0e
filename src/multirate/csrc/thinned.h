// A layer's experts in small: of each the neurons that matter most, and a constant for the others. It says where the experts
// will move the stream before they are there (methods/m2r2_experts/modules.py, with attention).
#ifndef MULTIRATE_THINNED_H
#define MULTIRATE_THINNED_H

typedef struct {
    const LowRank *site;                       // beside the experts, or NULL
    const bf16 *gate, *up, *down, *constants;  // [E, rows, d] each, and [E, d]
    int32_t rows, pad;
} PrunedExperts;

typedef struct {
    const PrunedExperts *layer;
    const int64_t *ids;    // [n, k] with weights [n, k]: the experts of the layer
    const float *weights, *ones;
    float *x, *drawn;      // [n, d]; [n, k · rows]
    float eps;
    int count, k, d;
} PrunedRows;

static float dot_bf16(const float *x, const bf16 *w, int d) {
    fv dot = all(0.0f);
    for (int i = 0; i < d; i += LANES) dot += load_v(x + i) * load_bf16_v(w + i);
    return sum_v(dot);
}

static inline float total_weight(const PrunedRows *t, int n) {
    float total = 0.0f;
    for (int j = 0; j < t->k; j++) total += t->weights[(size_t)n * t->k + j];
    return total;
}

static void run_pruned(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const PrunedRows *t = context;
    const PrunedExperts *s = t->layer;
    int d = t->d, rows = s->rows, each = t->k * rows;
    if (s->site) {
        mine->normed = grown(mine->normed, &mine->normed_size, (size_t)MAX_ROWS * d * sizeof(element));
        for (int n = 0; n < t->count; n++) rms_norm(t->x + (size_t)n * d, t->ones, d, t->eps, mine->normed + (size_t)n * d);
    }
    for (int n = 0; n < t->count; n++) {
        const float *x = t->x + (size_t)n * d;
        fv squares = all(0.0f);
        for (int i = 0; i < d; i += LANES) { fv v = load_v(x + i); squares += v * v; }
        float scale = 1.0f / sqrtf(sum_v(squares) / d + t->eps), total = total_weight(t, n);
        for (int u = each * id / threads; u < each * (id + 1) / threads; u++) {
            int use = n * t->k + u / rows;
            size_t at = ((size_t)t->ids[use] * rows + u % rows) * d;
            float gate = dot_bf16(x, s->gate + at, d) * scale, up = dot_bf16(x, s->up + at, d) * scale;
            t->drawn[(size_t)n * each + u] = gate / (1.0f + expf(-gate)) * up * t->weights[use] / total;
        }
    }
    if (s->site) {
        low_rank_in(work, s->site, mine->normed, d, NULL, t->count, id, threads);
        low_rank_out(work, s->site, t->x, d, NULL, t->count, id, threads);
    }
    barrier(work, threads);
    int begin = d / LANES * id / threads * LANES, end = d / LANES * (id + 1) / threads * LANES;
    for (int n = 0; n < t->count; n++) {
        float *x = t->x + (size_t)n * d, total = total_weight(t, n);
        for (int j = 0; j < t->k; j++) {
            size_t expert = (size_t)t->ids[n * t->k + j];
            fv share = all(t->weights[n * t->k + j] / total);
            for (int i = begin; i < end; i += LANES) store_v(x + i, load_v(x + i) + share * load_bf16_v(s->constants + expert * d + i));
            for (int row = 0; row < rows; row++) {
                const bf16 *down = s->down + (expert * rows + row) * d;
                fv z = all(t->drawn[(size_t)n * each + j * rows + row]);
                for (int i = begin; i < end; i += LANES) store_v(x + i, load_v(x + i) + z * load_bf16_v(down + i));
            }
        }
    }
}

// x [n, d], the stream after a layer's attention, becomes what is thought to leave that layer.
void mr_pruned_experts(Workspace *work, const PrunedExperts *layer, const int64_t *ids, const float *weights, int k, const float *ones, float eps, float *x,
                int n, int d) {
    work->drawn = grown(work->drawn, &work->drawn_size, MAX_ROWS * (size_t)k * (size_t)layer->rows * sizeof(float));
    if (layer->site) room_for_adapters(work);
    for (int r = 0; r < n; r += MAX_ROWS) {
        PrunedRows t = {layer, ids + (size_t)r * k, weights + (size_t)r * k, ones, x + (size_t)r * d, work->drawn, eps,
                      n - r < MAX_ROWS ? n - r : MAX_ROWS, k, d};
        run_parallel(work, run_pruned, &t);
    }
}
#endif
