// Decoder layers of a Llama-like model for a handful of rows, bf16 weights, fp32 residual stream.
//
// One call runs layers [start, stop) on up to MAX_ROWS rows. Rows of the accelerated residual stream go
// through the same matrix products as the slow ones, so every weight is read once for both (M2R2's
// "nearly free" second stream); low-rank adapters touch the accelerated rows only.
#include "kernel.h"
#include "matmul.h"
#include "threads.h"
#include "attention.h"

#define MAX_ROWS 60  // whole tiles of 6, and at most 64 (fixed_point.h)

typedef struct {
    const Shape *shape;
    const Layer *layers;
    const LayerCache *caches;
    const Adapter *const *adapters;  // per layer, or NULL
    Rows rows;
    float *x;  // [rows, d] residual, updated in place
    int start, stop;
    int key_rows;  // the first rows (or all) only leave their keys and values in layer `start`, which is then the only one
} Call;

// RMSNorm (epsilon inside the root), fp32, as the next product reads it.
static void rms_norm(const float *x, const float *weight, int d, float eps, element *out) {
    fv sum = all(0.0f);
    for (int i = 0; i < d; i += LANES) { fv v = load_v(x + i); sum += v * v; }
    float total = sum_v(sum);
    f16 scale = splat(1.0f / sqrtf(total / d + eps));
    for (int i = 0; i < d; i += 16) {
        store_elements(out + i, load(x + i) * scale * load(weight + i));
    }
}

static void scale_to_rms(float *x, const float *weight, int d, float eps) {
    float total = 0.0f;
    for (int i = 0; i < d; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / d + eps);
    for (int i = 0; i < d; i++) x[i] *= scale * weight[i];
}

// transformers' Llama convention: the halves of a head are rotated against each other.
static void rotate(float *x, const float *cos, const float *sin, int d) {
    int i = 0, h = d / 2;
    for (; i + 16 <= h; i += 16) {
        f16 a = load(x + i), b = load(x + i + h), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + i + h, b * c + a * s);
    }
    for (; i < h; i++) {
        float a = x[i], b = x[i + h];
        x[i] = a * cos[i] - b * sin[i];
        x[i + h] = b * cos[i] + a * sin[i];
    }
}

static const element **row_pointers(const element *base, int stride, const int *index, int count, const element **to) {
    for (int n = 0; n < count; n++) to[n] = base + (size_t)(index ? index[n] : n) * stride;
    return to;
}

// First half of a low-rank site: work->low_in [count, rank] = A x for the listed rows. Ends in a barrier.
static void low_rank_in(Workspace *work, const LowRank *site, const element *base, int stride, const int *index, int count, int id, int threads) {
    const element *from[MAX_ROWS];
    int width = site->a.out;
    matmul(work, &site->a, row_pointers(base, stride, index, count, from), count, NULL, STORE, (Output){.y = work->low, .stride = width}, NULL, id, threads);
    barrier(work, threads);
    for (int i = id * LANES; i < count * width; i += LANES * threads) {
        fv v = load_v(work->low + i);
        if (site->silu) v = silu_vector(v);
        store_element_v(work->low_in + i, v);
    }
    barrier(work, threads);
}

// Second half: y[index[n]] += B low_in[n]; every thread writes the outputs it owns.
static void low_rank_out(Workspace *work, const LowRank *site, float *y, int stride, const int *index, int count, int id, int threads) {
    const element *from[MAX_ROWS];
    matmul(work, &site->b, row_pointers(work->low_in, site->a.out, NULL, count, from), count, index, ADD, (Output){.y = y, .stride = stride}, NULL, id, threads);
}

// The K/V heads that thread `id` attends with, and queries grouped with them, are [first_head(id), first_head(id + 1)).
static inline int first_head(const Shape *s, int id, int threads) { return s->kv_heads * id / threads; }

// Whether a thread can compute the queries, keys and values of just its own heads: no barrier before attention then.
static inline int heads_are_groups(const Shape *s, int threads) {
    return s->head_dim % 64 == 0 && s->kv_heads % threads == 0;
}

// Where the rows' keys and values will be written, fetched while their products are formed.
static void fetch_slots(const Shape *s, const LayerCache *cache, const Rows *rows, int id, int threads) {
    int dim = s->head_dim;
    for (int h = first_head(s, id, threads); h < first_head(s, id + 1, threads); h++)
        for (int n = 0, block = -1, pair = -1, seq = -1; n < rows->count; n++) {
            int slot = rows->slot[n], other = rows->seq[n] != seq;
            if (slot < 0) continue;
            size_t at = ((size_t)rows->seq[n] * s->kv_heads + h) * rows->capacity * dim;
            if (other || slot / 16 != block)
                for (int i = 0; i < dim / 2; i++) __builtin_prefetch(cache->k + at + (size_t)(slot / 16) * dim * 16 + i * 32, 1, 3);
            if (other || slot / 2 != pair)
                for (int i = 0; i < dim / 16; i++) __builtin_prefetch(cache->v + at + (size_t)(slot / 2) * dim * 2 + i * 32, 1, 3);
            block = slot / 16, pair = slot / 2, seq = rows->seq[n];
        }
}

static void qkv_of_heads(Workspace *work, const Shape *s, const Layer *layer, const element *const *x, int rows, Output out, int id, int threads) {
    Operand operands = operand(&work->own[id], x, rows, layer->qkv.in);
    int per_head = s->head_dim / 64, group = s->heads / s->kv_heads, first = first_head(s, id, threads), last = first_head(s, id + 1, threads);
    int starts[3] = {first * group, s->heads + first, s->heads + s->kv_heads + first};
    int ends[3] = {last * group, s->heads + last, s->heads + s->kv_heads + last};
    for (int part = 0; part < 3; part++)
        matmul_groups(&layer->qkv, &operands, rows, NULL, STORE, out, starts[part] * per_head, ends[part] * per_head,
                      part < 2 ? group_of(&layer->qkv, starts[part + 1] * per_head) : group_of(&layer->o, first_group(&layer->o, id, threads)));
}

// Nothing but keys and values is asked for: the outputs behind the queries', shared out among the threads.
static void keys_and_values(Workspace *work, const Shape *s, const Layer *layer, const element *const *x, int rows,
                            Output out, int id, int threads) {
    Operand operands = operand(&work->own[id], x, rows, layer->qkv.in);
    int begin = s->heads * s->head_dim / 64, groups = 2 * s->kv_heads * s->head_dim / 64;
    matmul_groups(&layer->qkv, &operands, rows, NULL, STORE, out, begin + groups * id / threads,
                  begin + groups * (id + 1) / threads, NULL);
    barrier(work, threads);
}

static void attention_of_heads(Workspace *work, const Call *call, const Layer *layer, const LayerCache *cache, AttentionScratch *scratch, int id,
                               int threads) {
    const Shape *s = call->shape;
    const Rows *rows = &call->rows;
    int dim = s->head_dim, group = s->heads / s->kv_heads, width = (s->heads + 2 * s->kv_heads) * dim;
    size_t per_head = (size_t)rows->capacity * dim;
    for (int h = first_head(s, id, threads); h < first_head(s, id + 1, threads); h++) {
        for (int n = 0; n < rows->count; n++) {
            float *row = work->qkv + (size_t)n * width;
            const float *cos = s->cos + (size_t)rows->pos[n] * (dim / 2), *sin = s->sin + (size_t)rows->pos[n] * (dim / 2);
            for (int q = h * group; q < (h + 1) * group && n >= call->key_rows; q++) {
                if (layer->q_norm) scale_to_rms(row + q * dim, layer->q_norm, dim, s->eps);
                rotate(row + q * dim, cos, sin, dim);
            }
            if (rows->slot[n] < 0) continue;  // an accelerated row reads the slow stream's keys and values
            float *k = row + (s->heads + h) * dim, *v = row + (s->heads + s->kv_heads + h) * dim;
            if (layer->k_norm) scale_to_rms(k, layer->k_norm, dim, s->eps);
            rotate(k, cos, sin, dim);
            size_t at = ((size_t)rows->seq[n] * s->kv_heads + h) * per_head;
            write_k(cache->k + at, rows->slot[n], dim, k);
            write_v(cache->v + at, rows->slot[n], dim, v);
        }
        int total = rows->count * group;  // query i: row i / group, head i % group of this K/V head
        for (int i = call->key_rows * group, take; i < total; i += take) {
            int seq = rows->seq[i / group], same = i;
            while (same < total && rows->seq[same / group] == seq) same++;
            take = tile_share(same - i);
            size_t at = ((size_t)seq * s->kv_heads + h) * per_head;
            const bf16 *k = cache->k + at, *v = cache->v + at;
            Query tile_of[TILE_ROWS];
            int gathered = -1;  // the row whose path was gathered last
            for (int j = 0; j < take; j++) {
                int n = (i + j) / group, q = h * group + (i + j) % group;
                Query *one = &tile_of[j];
                if (n == gathered) {
                    *one = tile_of[j - 1];
                } else {
                    PathCopy *path = &scratch->paths[j];
                    one->visible = gather_path(path, k, v, dim, rows->prefix[n], (uint64_t)rows->tree[n]);
                    one->path = path;
                    one->low = layer->window && rows->pos[n] - layer->window + 1 > 0 ? rows->pos[n] - layer->window + 1 : 0;
                    gathered = n;
                }
                element *query = scratch->queries + j * MAX_HEAD_DIM;
                const float *from = work->qkv + (size_t)n * width + q * dim;
                for (int d = 0; d < dim; d += 16) store_elements(query + d, load(from + d) * splat(s->attention_scale));
                one->query = query;
                one->out = work->heads + ((size_t)n * s->heads + q) * dim;
            }
            attend(tile_of, take, k, v, dim, scratch);
        }
    }
}

// The thread's attention scratch, large enough for `capacity` cached positions and a tree.
static AttentionScratch *attention_scratch(ThreadScratch *mine, int capacity) {
    AttentionScratch *scratch = mine->attention;
    if (!scratch && !(scratch = mine->attention = calloc(1, sizeof *scratch))) abort();
    int want = whole_blocks(capacity + MAX_TREE + 16);
    if (scratch->capacity < want) {
        free(scratch->scores); free(scratch->weights); free(scratch->queries);
        size_t none = 0, zero = 0, nothing = 0;
        scratch->scores = grown(NULL, &none, (size_t)TILE_ROWS * want * sizeof(float));
        scratch->weights = grown(NULL, &zero, (size_t)TILE_ROWS * want * sizeof(element));
        scratch->queries = grown(NULL, &nothing, (size_t)TILE_ROWS * MAX_HEAD_DIM * sizeof(element));
        scratch->capacity = want;
    }
    return scratch;
}

static void run_layers(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const Call *call = context;
    const Shape *s = call->shape;
    int d = s->hidden, count = call->rows.count, dim = s->head_dim, heads = s->heads * dim;
    int width = (s->heads + 2 * s->kv_heads) * dim;
    mine->normed = grown(mine->normed, &mine->normed_size, (size_t)MAX_ROWS * d * sizeof(element));
    AttentionScratch *scratch = attention_scratch(mine, call->rows.capacity);
    int fast[MAX_ROWS], fast_count = 0;  // the accelerated rows
    if (call->adapters && call->rows.accelerated)
        for (int n = 0; n < count; n++) if (call->rows.accelerated[n]) fast[fast_count++] = n;
    const element *from[MAX_ROWS];

    for (int l = call->start; l < call->stop; l++) {
        const Layer *layer = &call->layers[l];
        const Adapter *adapter = fast_count ? call->adapters[l] : NULL;
        // Norms are recomputed by every thread: cheaper than a barrier for a few rows.
        for (int n = 0; n < count; n++) rms_norm(call->x + (size_t)n * d, layer->norm_attention, d, s->eps, mine->normed + (size_t)n * d);
        if (adapter && adapter->q.rank) low_rank_in(work, &adapter->q, mine->normed, d, fast, fast_count, id, threads);
        row_pointers(mine->normed, d, NULL, count, from);
        Output qkv = {.y = work->qkv, .stride = width};
        if (count <= TILE_ROWS * 3) fetch_slots(s, &call->caches[l], &call->rows, id, threads);
        if (call->key_rows == count) {
            keys_and_values(work, s, layer, from, count, qkv, id, threads);
        } else if (heads_are_groups(s, threads) && !(adapter && adapter->q.rank)) {
            qkv_of_heads(work, s, layer, from, count, qkv, id, threads);
        } else {
            matmul(work, &layer->qkv, from, count, NULL, STORE, qkv, &layer->o, id, threads);
            barrier(work, threads);
            if (adapter && adapter->q.rank) {
                low_rank_out(work, &adapter->q, work->qkv, width, fast, fast_count, id, threads);
                barrier(work, threads);
            }
        }
        attention_of_heads(work, call, layer, &call->caches[l], scratch, id, threads);
        if (call->key_rows == count) return;
        barrier(work, threads);
        const element *attended = work->heads + (size_t)call->key_rows * heads;
        float *x = call->x + (size_t)call->key_rows * d;
        count -= call->key_rows;
        if (adapter && adapter->o.rank) low_rank_in(work, &adapter->o, attended, heads, fast, fast_count, id, threads);
        matmul(work, &layer->o, row_pointers(attended, heads, NULL, count, from), count, NULL, ADD, (Output){.y = x, .stride = d}, layer->gate_up.weight ? &layer->gate_up : NULL, id, threads);
        if (adapter && adapter->o.rank) low_rank_out(work, &adapter->o, x, d, fast, fast_count, id, threads);
        barrier(work, threads);
        if (!layer->gate_up.weight) continue;  // attention alone
        for (int n = 0; n < count; n++) rms_norm(x + (size_t)n * d, layer->norm_mlp, d, s->eps, mine->normed + (size_t)n * d);
        int inner = s->intermediate;
        if (adapter && adapter->gate_up.rank) {
            // LoRA on gate and up needs their sums before SiLU, so this pass keeps raw sums for all rows.
            low_rank_in(work, &adapter->gate_up, mine->normed, d, fast, fast_count, id, threads);
            const element *low[MAX_ROWS];
            row_pointers(work->low_in, adapter->gate_up.a.out, NULL, fast_count, low);
            Output raw = {.y = work->qkv, .stride = 2 * inner};
            matmul(work, &layer->gate_up, row_pointers(mine->normed, d, NULL, count, from), count, NULL, STORE, raw, &layer->down, id, threads);
            matmul(work, &adapter->gate_up.b, low, fast_count, fast, ADD, raw, NULL, id, threads);
            int groups = 2 * inner / 64, first = groups * id / threads, last = groups * (id + 1) / threads;
            for (int n = 0; n < count; n++)
                for (int g = first; g < last; g++)
                    for (int i = 0; i < 32; i += LANES) {
                        const float *y = work->qkv + (size_t)n * 2 * inner + g * 64 + i;
                        store_element_v(work->activation + (size_t)n * inner + g * 32 + i, silu_vector(load_v(y)) * load_v(y + 32));
                    }
        } else {
            matmul(work, &layer->gate_up, row_pointers(mine->normed, d, NULL, count, from), count, NULL, SILU_GATE, (Output){.activation = work->activation, .stride = inner}, &layer->down, id, threads);
        }
        barrier(work, threads);
        if (adapter && adapter->down.rank) low_rank_in(work, &adapter->down, work->activation, inner, fast, fast_count, id, threads);
        if (adapter && adapter->mlp.rank && !adapter->down.rank) low_rank_in(work, &adapter->mlp, mine->normed, d, fast, fast_count, id, threads);
        matmul(work, &layer->down, row_pointers(work->activation, inner, NULL, count, from), count, NULL, ADD, (Output){.y = x, .stride = d}, l + 1 < call->stop ? &layer[1].qkv : NULL, id, threads);
        if (adapter && adapter->down.rank) low_rank_out(work, &adapter->down, x, d, fast, fast_count, id, threads);
        else if (adapter && adapter->mlp.rank) low_rank_out(work, &adapter->mlp, x, d, fast, fast_count, id, threads);
        barrier(work, threads);
    }
}

// ---- entry points -------------------------------------------------------------------------------

static void set_threads(Workspace *work, int threads) {
    work->threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
}

// A workspace for calls on `threads` threads; NULL: there is no memory.
Workspace *mr_workspace_open(int threads) {
    void *made = NULL;
    if (posix_memalign(&made, 64, sizeof(Workspace))) return NULL;
    memset(made, 0, sizeof(Workspace));
    set_threads(made, threads);
    return made;
}

void mr_workspace_set_threads(Workspace *work, int threads) { set_threads(work, threads); }

// In a process made by fork(): another thread may have been using it, and what it left is unknown. Begins anew.
void mr_workspace_after_fork(Workspace *work) {
    int threads = work->threads;
    memset(work, 0, sizeof *work);
    set_threads(work, threads);
}

void mr_workspace_close(Workspace *work) {
    if (!work) return;
    void *shared[] = {work->qkv, work->low, work->drawn, work->heads, work->activation, work->low_in, work->uses};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) free(shared[i]);
    for (int id = 0; id < MAX_THREADS; id++) {
        ThreadScratch *mine = &work->own[id];
        AttentionScratch *attention = mine->attention;
        if (attention) {
            free(attention->scores);
            free(attention->weights);
            free(attention->queries);
        }
        free(attention);
        free(mine->normed);
        free(mine->fixed);
        free(mine->rest);
    }
    free(work);
}

static void room_for_adapters(Workspace *work) {
    work->low = grown(work->low, &work->low_size, MAX_ROWS * 4096 * sizeof(float));
    work->low_in = grown(work->low_in, &work->low_in_size, MAX_ROWS * 4096 * sizeof(element));
}

// The shared activations, large enough for a call of MAX_ROWS rows of this shape.
static void make_room(Workspace *work, const Shape *shape, int adapters) {
    int width = (shape->heads + 2 * shape->kv_heads) * shape->head_dim, inner = 2 * shape->intermediate;
    size_t wide = (size_t)(width > inner ? width : inner);
    work->qkv = grown(work->qkv, &work->qkv_size, MAX_ROWS * wide * sizeof(float));
    work->heads = grown(work->heads, &work->heads_size, MAX_ROWS * (size_t)shape->heads * shape->head_dim * sizeof(element));
    work->activation = grown(work->activation, &work->activation_size, MAX_ROWS * (size_t)shape->intermediate * sizeof(element));
    if (adapters) room_for_adapters(work);
}

// Rows must be ordered so that none sees a slot written by a later one; longer calls run in chunks.
int mr_layers(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches, const Adapter *const *adapters,
              float *x, int count, const int32_t *seq, const int32_t *slot, const int32_t *pos, const int32_t *prefix,
              const int64_t *tree, const uint8_t *accelerated, int capacity, int start, int stop) {
    make_room(work, shape, adapters != NULL);
    for (int n = 0; n < count; n += MAX_ROWS) {
        int take = count - n < MAX_ROWS ? count - n : MAX_ROWS;
        Call call = {shape, layers, caches, adapters,
                     {seq + n, slot + n, pos + n, prefix + n, tree + n, accelerated ? accelerated + n : NULL, take, capacity},
                     x + (size_t)n * shape->hidden, start, stop, 0};
        run_parallel(work, run_layers, &call);
    }
    return 0;
}

// The keys and values of layers [start, stop) as if x [count, d] entered each of them; x stays as it is.
void mr_fill_kv(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches, float *x, int count, const int32_t *seq,
                const int32_t *slot, const int32_t *pos, int capacity, int start, int stop) {
    make_room(work, shape, 0);
    for (int n = 0; n < count; n += MAX_ROWS) {
        int take = count - n < MAX_ROWS ? count - n : MAX_ROWS;
        for (int l = start; l < stop; l++) {
            Call call = {shape, layers, caches, NULL, {seq + n, slot + n, pos + n, NULL, NULL, NULL, take, capacity},
                         x + (size_t)n * shape->hidden, l, l + 1, take};
            run_parallel(work, run_layers, &call);
        }
    }
}

typedef struct {
    const Linear *linear;
    const float *x, *norm;
    float *y;
    int count, mode;
    float eps;
} Product;

static void run_product(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const Product *p = context;
    int in = p->linear->in;
    mine->normed = grown(mine->normed, &mine->normed_size, (size_t)MAX_ROWS * in * sizeof(element));
    for (int n = 0; n < p->count; n++) {
        if (p->norm) rms_norm(p->x + (size_t)n * in, p->norm, in, p->eps, mine->normed + (size_t)n * in);
        else for (int i = 0; i < in; i += 16) store_elements(mine->normed + (size_t)n * in + i, load(p->x + (size_t)n * in + i));
    }
    const element *from[MAX_ROWS];
    matmul(work, p->linear, row_pointers(mine->normed, in, NULL, p->count, from), p->count, NULL, p->mode, (Output){.y = p->y, .stride = p->linear->out}, NULL, id, threads);
}

// y [count, out] (=, or += when add) W · (RMSNorm(x) or x): the LM head, and the carry projection.
void mr_linear(Workspace *work, const Linear *linear, const float *x, const float *norm, float eps, int count, float *y, int add) {
    for (int n = 0; n < count; n += MAX_ROWS) {
        int take = count - n < MAX_ROWS ? count - n : MAX_ROWS;
        Product p = {linear, x + (size_t)n * linear->in, norm, y + (size_t)n * linear->out, take, add ? ADD : STORE, eps};
        run_parallel(work, run_product, &p);
    }
}

void mr_embed(const bf16 *table, const int64_t *ids, int count, int d, float scale, float *x) {
    for (int n = 0; n < count; n++)
        for (int i = 0; i < d; i++) x[(size_t)n * d + i] = from_bf16(table[(size_t)ids[n] * d + i]) * scale;
}

// Best `k` of each row, highest first (ties: lower id), and their probabilities under softmax(sharpness · logits).
void mr_top(const float *logits, int count, int vocab, int stride, int k, float sharpness, int64_t *ids,
            float *probabilities) {
    for (int n = 0; n < count; n++) {
        const float *row = logits + (size_t)n * stride;
        int64_t *id = ids + (size_t)n * k;
        float *best = probabilities + (size_t)n * k;
        for (int j = 0; j < k; j++) { best[j] = -INFINITY; id[j] = 0; }
        for (int i0 = 0; i0 < vocab; i0 += 16) {
            if (i0 + 16 <= vocab) {  // skip blocks with nothing better than the k-th best
                i16 better = load(row + i0) > splat(best[k - 1]);
                int any = 0;
                for (int i = 0; i < 16; i++) any |= better[i];
                if (!any) continue;
            }
            for (int i = i0; i < i0 + 16 && i < vocab; i++) {
                if (!(row[i] > best[k - 1])) continue;
                int j = k - 1;
                for (; j > 0 && row[i] > best[j - 1]; j--) { best[j] = best[j - 1]; id[j] = id[j - 1]; }
                best[j] = row[i];
                id[j] = i;
            }
        }
        fv sum = all(0.0f);
        float top = best[0];
        int i = 0;
        for (; i + LANES <= vocab; i += LANES) sum += exp_vector((load_v(row + i) - all(top)) * all(sharpness));
        float total = sum_v(sum);
        for (; i < vocab; i++) total += expf(sharpness * (row[i] - top));
        for (int j = 0; j < k; j++) best[j] = expf(sharpness * (best[j] - top)) / total;
    }
}

// One decoding pass: ids (or, where NULL, residuals x entering layer `start`) → x = h_L [count, d] and the argmax of each
// row's logits (ties: the lowest id). logits: scratch [count, head->out].
void mr_greedy(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches, const bf16 *table, const int64_t *ids, float *x,
               int count, const int32_t *seq, const int32_t *slot, const int32_t *pos, const int32_t *prefix,
               const int64_t *tree, int capacity, int start, int stop, const Linear *head, const float *norm,
               float *logits, int64_t *tokens) {
    if (ids) mr_embed(table, ids, count, shape->hidden, 1.0f, x);
    mr_layers(work, shape, layers, caches, NULL, x, count, seq, slot, pos, prefix, tree, NULL, capacity, start, stop);
    mr_linear(work, head, x, norm, shape->eps, count, logits, 0);
    for (int n = 0; n < count; n++) {
        const float *row = logits + (size_t)n * head->out;
        f16 highest = splat(-INFINITY);
        int i = 0, vocab = shape->vocab;
        for (; i + 16 <= vocab; i += 16) {
            f16 v = load(row + i);
            i16 greater = v > highest;
            highest = (f16)(((i16)v & greater) | ((i16)highest & ~greater));
        }
        float top = -INFINITY;
        for (int j = 0; j < 16; j++) top = highest[j] > top ? highest[j] : top;
        for (; i < vocab; i++) top = row[i] > top ? row[i] : top;
        for (i = 0; i < vocab - 1 && row[i] != top; i++) {}
        tokens[n] = i;
    }
}

// Moves cached tokens: slot from[i] → slot to[i] of sequence `seq`, in order (an accepted tree path).
void mr_move(const LayerCache *caches, int layers, int kv_heads, int dim, int capacity, int seq, const int32_t *from,
             const int32_t *to, int count) {
    for (int l = 0; l < layers; l++)
        for (int h = 0; h < kv_heads; h++) {
            size_t at = ((size_t)seq * kv_heads + h) * capacity * dim;
            bf16 *k = caches[l].k + at, *v = caches[l].v + at;
            for (int i = 0; i < count; i++)
                if (from[i] != to[i]) copy_slot(k, v, to[i], k, v, from[i], dim);
        }
}

int mr_has_dot_product(void) { return HAVE_DPBF16; }
int mr_fixed_point(void) { return FIXED_POINT; }

#include "experts.h"
#include "reads.h"
#include "residency.h"
#include "loads.h"
#include "thinned.h"
#include "forecasts.h"
#include "mixture.h"
#include "stream.h"
#include "round.h"
