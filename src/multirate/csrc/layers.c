// Decoder layers of a Llama-like model for a handful of rows: packed weights, fp32 residual stream.
//
// One call runs layers [start, stop) on up to MAX_ROWS rows. Rows with low-rank adapters go through
// the same matrix products as the others, so every weight is read once for both.
#include "layers.h"

#include "attention.h"

// Whether a thread can compute the queries, keys and values of just its own heads: no barrier
// before attention then.
static inline int heads_are_groups(const Shape *s, int threads) {
    return s->head_dim % 64 == 0 && s->kv_heads % threads == 0;
}

static void qkv_of_heads(Workspace *work, const Shape *s, const Layer *layer, const float *const *x,
                         int rows, Output out, int id, int threads) {
    Operand operands;
    prepare(&operands, &work->own[id], &layer->qkv, x, rows);
    int per_head = s->head_dim / 16, group = s->heads / s->kv_heads,
        first = first_head(s, id, threads), last = first_head(s, id + 1, threads);
    int starts[3] = {first * group, s->heads + first, s->heads + s->kv_heads + first};
    int ends[3] = {last * group, s->heads + last, s->heads + s->kv_heads + last};
    for (int part = 0; part < 3; part++)
        matmul_columns(&layer->qkv, &operands, NULL, STORE, out, starts[part] * per_head,
                       ends[part] * per_head,
                       part < 2 ? weights_of(&layer->qkv, starts[part + 1] * per_head)
                                : weights_of(&layer->o, first_column(&layer->o, 0, id, threads)));
}

// Nothing but keys and values is asked for: the outputs behind the queries', shared out among the
// threads.
static void keys_and_values(Workspace *work, const Shape *s, const Layer *layer,
                            const float *const *x, int rows, Output out, int id, int threads) {
    Operand operands;
    prepare(&operands, &work->own[id], &layer->qkv, x, rows);
    int begin = s->heads * s->head_dim / 64, groups = layer->qkv.outputs / 64 - begin;
    matmul_columns(&layer->qkv, &operands, NULL, STORE, out,
                   (begin + groups * id / threads) * GROUP_COLUMNS,
                   (begin + groups * (id + 1) / threads) * GROUP_COLUMNS, NULL);
    barrier(work, threads);
}

// The thread's share of the rows as they are.
static void note_residuals(const LayerCall *call, int tap, int id, int threads) {
    size_t d = (size_t)call->shape->hidden;
    for (int n = id; n < call->rows.count; n += threads)
        memcpy(call->noted + ((size_t)n * call->tap_count + tap) * d, call->x + (size_t)n * d,
               d * sizeof(float));
}

// Where attention or the MLP leaves its sums: in the residual, or, where they are normed or scaled
// before they are added to it, aside, where nobody needs queries and keys any more.
typedef struct {
    Output out;
    int aside;
    const float *norm;
} Sums;

static Sums sums_of(Workspace *work, const Shape *s, const float *norm, float *x) {
    int aside = norm || s->residual_scale != 1.0f;
    return (Sums){{.y = aside ? work->qkv : x, .stride = s->hidden}, aside, norm};
}

// whole: each thread goes on with its own outputs, as in matmul.
static void sum_up(Workspace *work, const Linear *linear, const float *const *x, int rows,
                   int whole, const Sums *sums, const Linear *then, int id, int threads) {
    int mode = sums->aside ? STORE : ADD;
    Output out = sums->out;
    if (whole)
        matmul(work, linear, x, rows, NULL, mode, 1, out, then, id, threads);
    else
        matmul_balanced(work, linear, x, rows, mode, out, then, id, threads);
}

// All sums are there: the residual with them. Ends in a barrier.
static void add_sums(Workspace *work, const Shape *s, const Sums *sums, int rows, float *x, int id,
                     int threads) {
    barrier(work, threads);
    if (!sums->aside)
        return;
    int d = s->hidden;
    for (int n = id; n < rows; n += threads)
        vectors()->add_normed(sums->out.y + (size_t)n * d, sums->norm, d, s->eps, s->residual_scale,
                              x + (size_t)n * d);
    barrier(work, threads);
}

// Signals that a slice's keys and values are in the call's `layer`-th layer, and waits until those
// of all earlier rows are (passes.c).
static void wait_for_earlier_rows(const Turn *turn, int layer) {
    Workspace *const *others = turn->of->apart;
    int threads = turn->threads, layers = turn->layers;
    atomic_store_explicit(&others[turn->part % threads]->reached,
                          turn->part / threads * layers + layer + 1, memory_order_release);
    for (int part = turn->part - 1; part >= 0 && part > turn->part - threads; part--) {
        int wanted = part / threads * layers + layer + 1;
        const atomic_int *reached = &others[part % threads]->reached;
        for (int spins = 0; atomic_load_explicit(reached, memory_order_acquire) < wanted; spins++)
            wait_a_little(spins);
    }
}

// A thread's part of a call.
typedef struct {
    Workspace *work;
    const LayerCall *call;
    int id, threads;
    float *normed; // [rows, wide] what a product reads
    int wide;
    int fast[MAX_ROWS], fast_count; // the rows with adapters
} LayerRun;

static void adapt_in(const LayerRun *r, const LowRank *site, const float *base, int stride) {
    low_rank_in(r->work, site, base, stride, r->fast, r->fast_count, r->id, r->threads);
}

static void adapt_out(const LayerRun *r, const LowRank *site, float *y, int stride) {
    low_rank_out(r->work, site, y, stride, r->fast, r->fast_count, r->id, r->threads);
}

// Queries, keys and values of all rows: to work->qkv.
static void project(const LayerRun *r, const Layer *layer, const Adapter *adapter, int count) {
    const LayerCall *call = r->call;
    const Shape *s = call->shape;
    Workspace *work = r->work;
    int d = s->hidden, id = r->id, threads = r->threads,
        width = (s->heads + 2 * s->kv_heads) * s->head_dim;
    const float *from[MAX_ROWS];
    // Norms are recomputed by every thread: cheaper than a barrier for a few rows.
    for (int n = 0; n < count; n++) {
        float *to = r->normed + (size_t)n * r->wide;
        if (call->beside)
            vectors()->read_row(call->beside + (size_t)n * d, layer->norm_beside, d, s->eps, to);
        vectors()->read_row(call->x + (size_t)n * d, layer->norm_attention, d, s->eps,
                            to + r->wide - d);
    }
    int adapted = adapter && adapter->q.rank;
    if (adapted)
        adapt_in(r, &adapter->q, r->normed, d);
    row_pointers(r->normed, r->wide, NULL, count, from);
    Output qkv = {.y = work->qkv, .stride = width};
    if (count <= TILE_ROWS * 3)
        fetch_slots(s, &call->caches[layer - call->layers], &call->rows, id, threads);
    if (call->key_rows == count) {
        keys_and_values(work, s, layer, from, count, qkv, id, threads);
    } else if (heads_are_groups(s, threads) && !layer->norm_all_heads && !adapted) {
        qkv_of_heads(work, s, layer, from, count, qkv, id, threads);
    } else {
        matmul_balanced(work, &layer->qkv, from, count, STORE, qkv, &layer->o, id, threads);
        barrier(work, threads);
        if (adapted) {
            adapt_out(r, &adapter->q, work->qkv, width);
            barrier(work, threads);
        }
    }
    if (layer->norm_all_heads)
        norm_all_heads(work, s, layer, count, call->key_rows == count, id, threads);
}

// Attention of the rows behind `key_rows`, added to x [count, hidden].
static void attend_and_add(const LayerRun *r, int l, const Adapter *adapter, int count, float *x) {
    const LayerCall *call = r->call;
    const Shape *s = call->shape;
    const Layer *layer = &call->layers[l];
    int heads = s->heads * s->head_dim;
    const float *attended = r->work->heads + (size_t)call->key_rows * heads, *from[MAX_ROWS];
    attention_of_heads(r->work, s, layer, &call->caches[l], &call->rows, call->key_rows, r->id,
                       r->threads);
    barrier(r->work, r->threads);
    int adapted = adapter && adapter->o.rank;
    if (adapted)
        adapt_in(r, &adapter->o, attended, heads);
    row_pointers(attended, heads, NULL, count, from);
    Sums sums = sums_of(r->work, s, layer->norm_attention_out, x);
    sum_up(r->work, &layer->o, from, count, adapter != NULL, &sums,
           layer->gate_up.weight ? &layer->gate_up : NULL, r->id, r->threads);
    if (adapted)
        adapt_out(r, &adapter->o, sums.out.y, s->hidden);
    add_sums(r->work, s, &sums, count, x, r->id, r->threads);
}

// From the normed rows to work->activation. Ends in a barrier.
static void run_gates(const LayerRun *r, const Layer *layer, const Adapter *adapter, int count) {
    const Shape *s = r->call->shape;
    Workspace *work = r->work;
    int d = s->hidden, inner = s->intermediate, gate = gate_of(s), id = r->id, threads = r->threads;
    const float *from[MAX_ROWS], *low[MAX_ROWS];
    row_pointers(r->normed, d, NULL, count, from);
    if (adapter && adapter->gate_up.rank) {
        // LoRA on gate and up needs the gates' sums as they are, so this pass keeps raw sums for
        // all rows.
        adapt_in(r, &adapter->gate_up, r->normed, d);
        row_pointers(work->low_in, adapter->gate_up.a.outputs, NULL, r->fast_count, low);
        Output raw = {.y = work->qkv, .stride = 2 * inner};
        matmul(work, &layer->gate_up, from, count, NULL, STORE, 1, raw, &layer->down, id, threads);
        matmul(work, &adapter->gate_up.b, low, r->fast_count, r->fast, ADD, 1, raw, NULL, id,
               threads);
        int groups = 2 * inner / 64, first = groups * id / threads,
            last = groups * (id + 1) / threads;
        for (int n = 0; n < count; n++)
            vectors()->gates(gate, work->qkv + (size_t)n * 2 * inner + first * 64, last - first,
                             work->activation + (size_t)n * inner + first * 32);
    } else {
        matmul_balanced(work, &layer->gate_up, from, count, gate,
                        (Output){.activation = work->activation, .stride = inner}, &layer->down, id,
                        threads);
    }
    barrier(work, threads);
}

// The MLP of x [count, hidden], added to it.
static void run_mlp(const LayerRun *r, int l, const Adapter *adapter, int count, float *x) {
    const LayerCall *call = r->call;
    const Shape *s = call->shape;
    const Layer *layer = &call->layers[l];
    int d = s->hidden, inner = s->intermediate;
    const float *from[MAX_ROWS];
    for (int n = 0; n < count; n++)
        vectors()->read_row(x + (size_t)n * d, layer->norm_mlp, d, s->eps,
                            r->normed + (size_t)n * d);
    run_gates(r, layer, adapter, count);
    const LowRank *site = !adapter             ? NULL
                          : adapter->down.rank ? &adapter->down
                          : adapter->mlp.rank  ? &adapter->mlp
                                               : NULL;
    if (site)
        adapt_in(r, site, site == &adapter->down ? r->work->activation : r->normed,
                 site == &adapter->down ? inner : d);
    row_pointers(r->work->activation, inner, NULL, count, from);
    Sums sums = sums_of(r->work, s, layer->norm_mlp_out, x);
    sum_up(r->work, &layer->down, from, count, adapter != NULL, &sums,
           l + 1 < call->stop ? &layer[1].qkv : NULL, r->id, r->threads);
    if (site)
        adapt_out(r, site, sums.out.y, d);
    add_sums(r->work, s, &sums, count, x, r->id, r->threads);
}

void run_layers(Workspace *work, void *context, int id, int threads) {
    const LayerCall *call = context;
    const Shape *s = call->shape;
    int d = s->hidden, count = call->rows.count, tap = 0;
    LayerRun r = {.work = work, .call = call, .id = id, .threads = threads};
    r.wide = call->beside ? 2 * d : d;
    r.normed = room_for_normed(&work->own[id], r.wide);
    for (int n = 0; call->adapters && call->rows.adapted && n < count; n++)
        if (call->rows.adapted[n])
            r.fast[r.fast_count++] = n;
    for (int l = call->start; l < call->stop; l++) {
        const Layer *layer = &call->layers[l];
        // what adapters add goes to the thread's own outputs
        const Adapter *adapter = r.fast_count ? call->adapters[l] : NULL;
        // nobody adds to x before attention's end
        if (tap < call->tap_count && call->taps[tap] == l)
            note_residuals(call, tap++, id, threads);
        project(&r, layer, adapter, count);
        write_keys_and_values(work, s, layer, &call->caches[l], &call->rows, id, threads);
        if (call->key_rows == count)
            return;
        if (call->turn.of)
            wait_for_earlier_rows(&call->turn, l - call->start);
        float *x = call->x + (size_t)call->key_rows * d;
        count -= call->key_rows;
        attend_and_add(&r, l, adapter, count, x);
        if (layer->gate_up.weight) // else attention alone
            run_mlp(&r, l, adapter, count, x);
    }
    if (tap < call->tap_count) // of the last layer's output
        note_residuals(call, tap, id, threads);
}
