// Attention of a few query rows over one cached K/V head, each in a fixed order over virtual
// positions.
//
// A row's visible slots, in path order, get virtual positions 0, 1, 2, …; scores and the weighted
// sum run over virtual positions, so a token reached through a draft tree gets the same bits as in
// plain decoding.
//
// The cache of a layer, for each sequence and K/V head:
//
//   K [capacity / 16][head_dim / 2][16 slots][2]      V [capacity / 2][head_dim][2 slots]
//
//   slots 0 … 15                                      slots 0, 1
//   | s0d0 s0d1  s1d0 s1d1 … s15d0 s15d1 |  64 bytes  | s0d0 s1d0  s0d1 s1d1 … s0dD s1dD |
//   | s0d2 s0d3  s1d2 s1d3 … s15d2 s15d3 |            slots 2, 3
//   | …                                  |            | s2d0 s3d0  s2d1 s3d1 … s2dD s3dD |
//   slots 16 … 31                                     …
//   | …
//
// Both are bf16 and read as weights are (gemm.c): a pair of a query's dimensions meets 16 keys, a
// pair of attention weights meets 16 dimensions of two values. Slots of one sequence:
//
//   | 0 … length − 1: committed, position = slot | length: the last token | its draft's nodes … |
#include "attention.h"

#include "gemm.h"

static void copy_slot(bf16 *k_to, bf16 *v_to, int to, const bf16 *k_from, const bf16 *v_from,
                      int from, int dim) {
    uint32_t *kt = (uint32_t *)k_to + (size_t)(to / 16) * dim * 8 + to % 16;
    const uint32_t *kf = (const uint32_t *)k_from + (size_t)(from / 16) * dim * 8 + from % 16;
    for (int i = 0; i < dim / 2; i++)
        kt[i * 16] = kf[i * 16];
    bf16 *vt = v_to + (size_t)(to / 2) * dim * 2 + (to & 1);
    const bf16 *vf = v_from + (size_t)(from / 2) * dim * 2 + (from & 1);
    for (int i = 0; i < dim; i++)
        vt[i * 2] = vf[i * 2];
}

// Returns the number of virtual positions; fills path->from when the tree slots are not contiguous.
static int gather_path(PathCopy *path, const bf16 *k, const bf16 *v, int dim, int prefix,
                       uint64_t tree) {
    path->from = -1;
    int extra = __builtin_popcountll(tree);
    if (!extra || tree == (extra == 64 ? ~0ull : (1ull << extra) - 1))
        return prefix + extra;
    path->from = prefix / 16 * 16;
    size_t at = (size_t)path->from * dim;
    memcpy(path->k, k + at, (size_t)16 * dim * sizeof(bf16));
    memcpy(path->v, v + at, (size_t)16 * dim * sizeof(bf16));
    int to = prefix - path->from;
    for (int bit = 0; tree; bit++, tree >>= 1)
        if (tree & 1)
            copy_slot(path->k, path->v, to++, k, v, prefix + bit, dim);
    return prefix + extra;
}

static int whole_blocks(int positions) {
    return (positions + 15) / 16 * 16;
}

// The thread's scratch, large enough for `capacity` cached positions and a tree; returns how many.
static int room_for_attention(AttentionScratch *scratch, int capacity) {
    int room = whole_blocks(capacity + MAX_NODES + 16);
    size_t bytes = (size_t)TILE_ROWS * room * sizeof(float);
    scratch->scores = grown(scratch->scores, bytes);
    scratch->weights = grown(scratch->weights, bytes);
    scratch->queries = grown(scratch->queries, (size_t)TILE_ROWS * MAX_HEAD_DIM * sizeof(float));
    scratch->paths = grown(scratch->paths, TILE_ROWS * sizeof(PathCopy));
    return room;
}

void fetch_slots(const Shape *s, const LayerCache *cache, const Rows *rows, int id, int threads) {
    int dim = s->head_dim;
    for (int h = first_head(s, id, threads); h < first_head(s, id + 1, threads); h++)
        for (int n = 0, block = -1, pair = -1, seq = -1; n < rows->count; n++) {
            int slot = rows->slot[n], other = rows->seq[n] != seq;
            if (slot < 0)
                continue;
            size_t at = ((size_t)rows->seq[n] * s->kv_heads + h) * rows->capacity * dim;
            if (other || slot / 16 != block)
                for (int i = 0; i < dim / 2; i++)
                    __builtin_prefetch(cache->k + at + (size_t)(slot / 16) * dim * 16 + i * 32, 1,
                                       3);
            if (other || slot / 2 != pair)
                for (int i = 0; i < dim / 16; i++)
                    __builtin_prefetch(cache->v + at + (size_t)(slot / 2) * dim * 2 + i * 32, 1, 3);
            block = slot / 16, pair = slot / 2, seq = rows->seq[n];
        }
}

void norm_all_heads(Workspace *work, const Shape *s, const Layer *layer, int rows, int keys_alone,
                    int id, int threads) {
    int queries = s->heads * s->head_dim, keys = s->kv_heads * s->head_dim;
    for (int n = id; n < rows; n += threads) {
        float *row = work->qkv + (size_t)n * (queries + 2 * keys);
        if (!keys_alone)
            mr_rms_norm(row, layer->q_norm, queries, s->eps);
        mr_rms_norm(row + queries, layer->k_norm, keys, s->eps);
    }
    barrier(work, threads);
}

// A query's or a key's head, in place. norm: of each head, NULL: none.
static void norm_and_rotate(const Shape *s, const Layer *layer, const float *norm, int pos,
                            float *head) {
    int own_norm = norm && !layer->norm_all_heads;
    if (own_norm && !layer->norm_after_rotary)
        mr_rms_norm(head, norm, s->head_dim, s->eps);
    const Positions *tables = layer->positions;
    if (tables->cos) {
        size_t at = (size_t)pos * (s->rotary / 2);
        mr_rotate(head, tables->cos + at, tables->sin + at, s->rotary);
    }
    if (own_norm && layer->norm_after_rotary)
        mr_rms_norm(head, norm, s->head_dim, s->eps);
}

void write_keys_and_values(Workspace *work, const Shape *s, const Layer *layer,
                           const LayerCache *cache, const Rows *rows, int id, int threads) {
    int dim = s->head_dim, width = (s->heads + 2 * s->kv_heads) * dim;
    for (int h = first_head(s, id, threads); h < first_head(s, id + 1, threads); h++)
        for (int n = 0; n < rows->count; n++) {
            if (rows->slot[n] < 0)
                continue; // it reads what others have left
            float *row = work->qkv + (size_t)n * width, *k = row + (s->heads + h) * dim,
                  *v = row + (s->heads + s->kv_heads + h) * dim;
            norm_and_rotate(s, layer, layer->k_norm, rows->pos[n], k);
            size_t at = ((size_t)rows->seq[n] * s->kv_heads + h) * rows->capacity * dim;
            vectors()->write_key(cache->k + at, rows->slot[n], dim, k);
            vectors()->write_value(cache->v + at, rows->slot[n], dim, v);
        }
}

// How many of `left` queries the next tile takes: even parts, 8 as 4 + 4.
static int tile_share(int left) {
    int parts = (left + TILE_ROWS - 1) / TILE_ROWS;
    return (left + parts - 1) / parts;
}

// Attention of queries [begin, end) of K/V head h. Query i: row i / group, head i % group of this
// K/V head.
static void attend_queries(Workspace *work, const Shape *s, const Layer *layer,
                           const LayerCache *cache, const Rows *rows, int h, int begin, int end,
                           const AttentionScratch *scratch, int room) {
    int dim = s->head_dim, group = s->heads / s->kv_heads,
        width = (s->heads + 2 * s->kv_heads) * dim;
    for (int i = begin, take; i < end; i += take) {
        int seq = rows->seq[i / group], same = i;
        while (same < end && rows->seq[same / group] == seq)
            same++;
        take = tile_share(same - i);
        size_t at = ((size_t)seq * s->kv_heads + h) * rows->capacity * dim;
        const bf16 *k = cache->k + at, *v = cache->v + at;
        Query tile_of[TILE_ROWS];
        int gathered = -1; // the row whose path was gathered last
        for (int j = 0; j < take; j++) {
            int n = (i + j) / group, q = h * group + (i + j) % group;
            Query *one = &tile_of[j];
            if (n == gathered) {
                *one = tile_of[j - 1];
            } else {
                PathCopy *path = &scratch->paths[j];
                one->visible =
                    gather_path(path, k, v, dim, rows->prefix[n], (uint64_t)rows->tree[n]);
                one->path = path;
                one->low = layer->window && rows->pos[n] - layer->window + 1 > 0
                               ? rows->pos[n] - layer->window + 1
                               : 0;
                gathered = n;
            }
            float *query = scratch->queries + j * MAX_HEAD_DIM;
            float *from = work->qkv + (size_t)n * width + q * dim;
            norm_and_rotate(s, layer, layer->q_norm, rows->pos[n], from);
            float scale = s->attention_scale;
            if (layer->positions->query_scale)
                scale *= layer->positions->query_scale[rows->pos[n]];
            for (int d = 0; d < dim; d++)
                query[d] = from[d] * scale;
            one->query = query;
            one->out = work->heads + ((size_t)n * s->heads + q) * dim;
        }
        vectors()->attend(tile_of, take, k, v, dim, scratch->scores, scratch->weights, room);
    }
}

void attention_of_heads(Workspace *work, const Shape *s, const Layer *layer,
                        const LayerCache *cache, const Rows *rows, int key_rows, int id,
                        int threads) {
    int before = key_rows * (s->heads / s->kv_heads),
        queries = rows->count * (s->heads / s->kv_heads) - before; // of a K/V head
    // All K/V heads' queries one after the other: where the heads themselves cannot be shared out
    // evenly, they are, and a thread may need keys that another one writes.
    long all_queries = (long)queries * s->kv_heads, begin = all_queries * id / threads,
         end = all_queries * (id + 1) / threads;
    if (s->kv_heads % threads)
        barrier(work, threads);
    AttentionScratch *scratch = &work->own[id].attention;
    int room = room_for_attention(scratch, rows->capacity);
    while (begin < end) {
        int h = (int)(begin / queries), first = (int)(begin % queries),
            last = end - begin < queries - first ? first + (int)(end - begin) : queries;
        attend_queries(work, s, layer, cache, rows, h, before + first, before + last, scratch,
                       room);
        begin += last - first;
    }
}

void mr_move(const LayerCache *caches, int layers, int kv_heads, int dim, int capacity, int seq,
             const int32_t *from, const int32_t *to, int count) {
    for (int l = 0; l < layers; l++)
        for (int h = 0; h < kv_heads; h++) {
            size_t at = ((size_t)seq * kv_heads + h) * capacity * dim;
            bf16 *k = caches[l].k + at, *v = caches[l].v + at;
            for (int i = 0; i < count; i++)
                if (from[i] != to[i])
                    copy_slot(k, v, to[i], k, v, from[i], dim);
        }
}
