// A pass in which rows skip layers: each row runs its own layers and leaves no keys and values in
// the others.
//
// In the cache of a layer that rows may skip, the tokens that ran it are contiguous: a row's slot
// is the number of earlier tokens that ran the layer, and its position is its own.
#include "layers.h"

// Rows of `x` [count, d] that run a layer, one after the other.
typedef struct {
    int32_t seq[MAX_ROWS], slot[MAX_ROWS], pos[MAX_ROWS], prefix[MAX_ROWS];
    int64_t tree[MAX_ROWS];
    int at[MAX_ROWS];
    int count;
} Running;

static float score_of(const PassBy *by, const float *x, int d, float eps) {
    return vectors()->dot(by->weight, x, d) * vectors()->inverse_rms(x, d, eps) + by->bias;
}

// The rows that do not pass this layer by. A score that is not a number passes nothing by.
static void choose(const PassBy *by, float limit, float eps, const Rows *rows, const float *x,
                   int d, int32_t *ran, Running *running) {
    running->count = 0;
    for (int n = 0; n < rows->count; n++) {
        if (score_of(by, x + (size_t)n * d, d, eps) >= limit) {
            ran[n]--;
            continue;
        }
        int i = running->count++, slot = by->slots[rows->seq[n]]++;
        running->seq[i] = rows->seq[n], running->pos[i] = rows->pos[n];
        running->slot[i] = slot, running->prefix[i] = slot + 1;
        running->tree[i] = 0, running->at[i] = n;
    }
}

static void move_rows(float *to, const float *from, const Running *running, int d, int back) {
    for (int i = 0; i < running->count; i++) {
        size_t packed = (size_t)i * d, own = (size_t)running->at[i] * d;
        memcpy(to + (back ? own : packed), from + (back ? packed : own), (size_t)d * sizeof(float));
    }
}

static void pass(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches,
                 const PassBy *by, float limit, float eps, const Rows *rows, float *x, int count,
                 int32_t *ran) {
    int d = shape->hidden, from = 0;
    Running running;
    float *packed = malloc((size_t)rows->count * d * sizeof(float));
    if (!packed)
        abort();
    for (int n = 0; n < rows->count; n++)
        ran[n] = count;
    for (int l = 0; l < count; l++) {
        if (!by[l].weight)
            continue;
        if (from < l)
            mr_layers(work, shape, layers, caches, NULL, rows, x, from, l);
        from = l + 1;
        choose(&by[l], limit, eps, rows, x, d, ran, &running);
        if (!running.count)
            continue;
        Rows some = {running.seq,  running.slot, running.pos,   running.prefix,
                     running.tree, NULL,         running.count, rows->capacity};
        int every = running.count == rows->count;
        if (!every)
            move_rows(packed, x, &running, d, 0);
        mr_layers(work, shape, layers, caches, NULL, &some, every ? x : packed, l, l + 1);
        if (!every)
            move_rows(x, packed, &running, d, 1);
    }
    if (from < count)
        mr_layers(work, shape, layers, caches, NULL, rows, x, from, count);
    free(packed);
}

void mr_passing_layers(Workspace *work, const Shape *shape, const Layer *layers,
                       const LayerCache *caches, const PassBy *by, float limit, float eps,
                       const Rows *rows, float *x, int count, int32_t *ran) {
    for (int n = 0; n < rows->count; n += MAX_ROWS) {
        int take = rows->count - n < MAX_ROWS ? rows->count - n : MAX_ROWS;
        Rows some = some_rows(rows, n, take);
        pass(work, shape, layers, caches, by, limit, eps, &some, x + (size_t)n * shape->hidden,
             count, ran + n);
    }
}
