// Passes of any number of rows over some layers: MAX_ROWS at a time, in parts, or without the rows
// that skip a layer.
#include "layers.h"

// A pass of many rows, such as a prompt, runs in slices ("parts") that one thread each takes
// through all layers.
//
// When all threads work on the same rows and split the outputs (layers.c), each thread norms and
// rounds every row, and they meet five times per layer. With dozens of rows that takes up to a
// quarter of the time, and more if one thread is delayed. Here each thread has its own rows and
// reads all weights for them. With this many rows, arithmetic takes longer than reading, and the
// threads share a cache, so what one has read the others find there.
//
//   rows     | part 0 | part 1 | part 2 | part 3 | …
//   thread   |   0    |   1    |   0    |   1    |       of two
//
// A row sees the keys and values of earlier rows. So a thread that has written those of its part in
// a layer signals it, and waits for the parts before it that other threads are working on. Those
// threads have already waited for everything further back.

#define PART_ROWS 48 // at most: whole tiles of 24, and of 12

// A part's rows, at least, so that all threads together read less than memory has for them:
// measured with two threads (lab/notes/threads.md), for more an estimate.
static int least_rows(int threads) {
    int least = 4 * threads;
    return least < PART_ROWS ? least : PART_ROWS;
}

// Whether there are enough rows, in the right order, for threads to take slices of them.
static int rows_go_in_parts(const Workspace *work, const Rows *rows) {
    int threads = threads_of(work);
    if (threads == 1 || rows->count < least_rows(threads) * threads || rows->slot[0] < 0)
        return 0;
    // the values of two slots share a word, which two threads must not write: only of rows in order
    // is it known which two these are
    for (int n = 1; n < rows->count; n++)
        if (rows->seq[n] < rows->seq[n - 1] ||
            (rows->seq[n] == rows->seq[n - 1] && rows->slot[n] <= rows->slot[n - 1]))
            return 0;
    return 1;
}

// Where part `part` of `parts` begins: they are even, but two slots of a word stay together.
static int begin_of(const Rows *rows, int part, int parts) {
    int n = (int)((long)rows->count * part / parts);
    int split = n > 0 && n < rows->count && rows->seq[n] == rows->seq[n - 1] &&
                rows->slot[n] / 2 == rows->slot[n - 1] / 2;
    return n - split;
}

static void run_parts(Workspace *work, void *context, int id, int threads) {
    const LayerCall *call = context;
    const Rows *rows = &call->rows;
    int rounds = (rows->count + PART_ROWS * threads - 1) / (PART_ROWS * threads),
        parts = rounds * threads;
    for (int part = id; part < parts; part += threads) {
        int begin = begin_of(rows, part, parts), end = begin_of(rows, part + 1, parts);
        LayerCall own = *call;
        own.rows = some_rows(rows, begin, end - begin);
        own.x += (size_t)begin * call->shape->hidden;
        if (own.tap_count)
            own.noted += (size_t)begin * call->tap_count * call->shape->hidden;
        own.turn = (Turn){work, part, threads, call->stop - call->start};
        run_layers(work->apart[id], &own, 0, 1);
    }
}

// The call, with any number of rows, in slices.
static void run_row_parts(Workspace *work, LayerCall *call) {
    for (int id = 0; id < most_threads_of(work); id++) {
        if (!work->apart[id] && !(work->apart[id] = mr_workspace_open(1)))
            abort();
        make_room(work->apart[id], call->shape, call->adapters != NULL);
        atomic_store(&work->apart[id]->reached, 0);
    }
    run_parallel(work, run_parts, call, call->layers + call->start, call->rows.count);
}

// MAX_ROWS at a time, where they do not go in parts.
void run_all_rows(Workspace *work, LayerCall call) {
    Rows rows = call.rows;
    if (rows_go_in_parts(work, &rows)) {
        run_row_parts(work, &call);
        return;
    }
    make_room(work, call.shape, call.adapters != NULL);
    for (int n = 0; n < rows.count; n += call.rows.count) {
        call.rows = some_rows(&rows, n, rows.count - n < MAX_ROWS ? rows.count - n : MAX_ROWS);
        run_parallel(work, run_layers, &call, call.layers + call.start,
                     call.rows.count << 12 | (call.stop - call.start));
        call.x += (size_t)call.rows.count * call.shape->hidden;
        if (call.tap_count)
            call.noted += (size_t)call.rows.count * call.tap_count * call.shape->hidden;
    }
}

void mr_layers(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches,
               const Adapter *const *adapters, const Rows *rows, float *x, int start, int stop) {
    run_all_rows(work, (LayerCall){.shape = shape,
                                   .layers = layers,
                                   .caches = caches,
                                   .adapters = adapters,
                                   .rows = *rows,
                                   .x = x,
                                   .start = start,
                                   .stop = stop});
}

void mr_fill_kv(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches,
                const Rows *rows, float *x, int start, int stop) {
    make_room(work, shape, 0);
    for (int n = 0; n < rows->count; n += MAX_ROWS) {
        int take = rows->count - n < MAX_ROWS ? rows->count - n : MAX_ROWS;
        for (int l = start; l < stop; l++) {
            LayerCall call = {.shape = shape,
                              .layers = layers,
                              .caches = caches,
                              .rows = some_rows(rows, n, take),
                              .x = x + (size_t)n * shape->hidden,
                              .start = l,
                              .stop = l + 1,
                              .key_rows = take};
            run_parallel(work, run_layers, &call, layers + l, take);
        }
    }
}

// ---- skipped layers
// ------------------------------------------------------------------------------ A pass in which
// rows skip layers: each row runs its own layers and leaves no keys and values in the others.
//
// In the cache of a layer that rows may skip, the tokens that ran it are contiguous: a row's slot
// is the number of earlier tokens that ran the layer, and its position is its own.

// Rows of `x` [count, d] that run a layer, one after the other.
typedef struct {
    RowTable table;
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
        set_row(&running->table, i, rows->seq[n], slot, rows->pos[n], slot + 1, 0);
        running->at[i] = n;
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
        Rows some = rows_of(&running.table, 0, running.count, rows->capacity);
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
