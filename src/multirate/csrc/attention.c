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
#include "norm.h"

#define PATH_SLOTS (16 * 6) // a block that the prefix ends in, and MAX_NODES + 1 nodes

// The part of a path that is not contiguous in the cache, copied into cache layout.
typedef struct {
    int from; // virtual position (a multiple of 16) from which the copy replaces the cache; -1:
              // none
    bf16 k[PATH_SLOTS * MAX_HEAD_DIM], v[PATH_SLOTS * MAX_HEAD_DIM];
} PathCopy;

INLINE void write_k(bf16 *k, int slot, int dim, const float *value) {
    uint32_t *block = (uint32_t *)k + (size_t)(slot / 16) * dim * 8 + slot % 16;
    for (int i = 0; i < dim; i += 16) {
        uint32_t pairs[8];
        store_bf16((bf16 *)pairs, load(value + i));
        for (int j = 0; j < 8; j++)
            block[(i / 2 + j) * 16] = pairs[j];
    }
}
INLINE void write_v(bf16 *v, int slot, int dim, const float *value) {
    uint32_t *pair = (uint32_t *)v + (size_t)(slot / 2) * dim;
    for (int i = 0; i < dim; i += 16) {
        typedef uint16_t half __attribute__((vector_size(32)));
        half low;
        store_bf16((bf16 *)&low, load(value + i));
        u16 new = __builtin_convertvector(low, u16), old = load_pairs(pair + i);
        new = slot & 1 ? (old & 0xffffu) | new << 16 : (old & 0xffff0000u) | new;
        memcpy(pair + i, &new, sizeof new);
    }
}
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

// One query row of a tile. Virtual positions [low, visible) count.
typedef struct {
    const float *query; // [dim], already scaled
    float *out;         // [dim]
    const PathCopy *path;
    int low, visible;
} Query;

struct AttentionScratch {
    float *scores;  // [TILE_ROWS, capacity]
    float *weights; // [TILE_ROWS, capacity]
    float *queries; // [TILE_ROWS, MAX_HEAD_DIM]
    int capacity;
    PathCopy paths[TILE_ROWS];
};

INLINE int whole_blocks(int positions) {
    return (positions + 15) / 16 * 16;
}

// Scores [first, last) of `count` queries; `k` is where virtual position 0 would be.
static void score_blocks(const Query *query, int count, const bf16 *k, int dim, int first, int last,
                         float *const *scores) {
    const float *x[TILE_ROWS];
    for (int i = 0; i < count; i++)
        x[i] = query[i].query;
    int s = first;
#if !AVX2_TILE
    for (; s + 64 <= last; s += 64) {
        f16 acc[TILE_ROWS][4];
        memset(acc, 0, (size_t)count * sizeof *acc);
        tile_blocks((const uint32_t *)(k + (size_t)s * dim), x, count, dim / 2, acc);
        for (int i = 0; i < count; i++)
            for (int m = 0; m < 4; m++)
                store(scores[i] + s + 16 * m, acc[i][m]);
    }
#endif
    for (; s < last; s += 16) {
        const uint32_t *block = (const uint32_t *)(k + (size_t)s * dim);
        f16 acc[TILE_ROWS][4];
        for (int i = 0; i < count; i++)
            acc[i][0] = splat(0.0f);
        tile_fused(block, 16, x, count, dim / 2, 1, (const char *)(block + dim * 8), acc);
        for (int i = 0; i < count; i++)
            store(scores[i] + s, acc[i][0]);
    }
}

// Scores → softmax numerators (weights) over [start, end); returns one over their sum.
static float softmax_row(float *scores, float *weights, int start, int end, int low, int visible) {
    fv highest = all(-INFINITY);
    Sum sum = no_sum();
    iv lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    for (int s = start; s < end; s += LANES) {
        fv score = load_v(scores + s);
        if (s < low || s + LANES > visible) {
            iv position = lane + s;
            iv hidden = (position < low) | (position >= visible);
            score = (fv)(((iv)score & ~hidden) | ((iv)all(-INFINITY) & hidden));
            store_v(scores + s, score);
        }
        iv greater = score > highest;
        highest = (fv)(((iv)score & greater) | ((iv)highest & ~greater));
    }
    float top = max_v(highest);
    for (int s = start; s < end; s += 16)
        for (int j = 0; j < 16 / LANES; j++) {
            fv score = load_v(scores + s + j * LANES);
            iv hidden = score == all(-INFINITY);
            fv e = (fv)((iv)exp_vector(score - all(top)) & ~hidden);
            sum.of[j] += e;
            store_v(weights + s + j * LANES, e);
        }
    return 1.0f / total_of(sum);
}

// acc[i] += weights[i] V over [first, last), first even; `v` is where virtual position 0 would be.
static void add_values(int count, float *const *weights, const bf16 *v, int dim, int d0,
                       int vectors, int first, int last, f16 (*acc)[4]) {
    if (first >= last)
        return;
    const float *x[TILE_ROWS];
    for (int i = 0; i < count; i++)
        x[i] = weights[i] + first;
    const uint32_t *words = (const uint32_t *)(v + (size_t)first * dim) + d0;
    tile_fused(words, dim, x, count, (last - first + 1) / 2, vectors, (const char *)words, acc);
}

// out = softmax(q·K) V of up to TILE_ROWS queries of one sequence over one K/V head, [.., dim]
// each.
//
// Every K/V block is read once for all of them. A query's own sums run over its virtual positions
// in order, and what the others make it pass over has weight zero: its bits do not depend on its
// neighbours.
static void attend(const Query *query, int count, const bf16 *k, const bf16 *v, int dim,
                   AttentionScratch *scratch) {
    int start = query[0].low, longest = 0, common = 0;
    for (int i = 0; i < count; i++) {
        if (query[i].low < start)
            start = query[i].low;
        if (query[i].visible > longest)
            longest = query[i].visible;
    }
    start = start / 16 * 16;
    common = whole_blocks(longest);
    for (int i = 0; i < count; i++)
        if (query[i].path->from >= 0 && query[i].path->from < common)
            common = query[i].path->from;
    if (common < start)
        common = start;
    float *scores[TILE_ROWS], scale[TILE_ROWS];
    float *weights[TILE_ROWS];
    for (int i = 0; i < count; i++) {
        scores[i] = scratch->scores + (size_t)i * scratch->capacity;
        weights[i] = scratch->weights + (size_t)i * scratch->capacity;
    }
    score_blocks(query, count, k, dim, start, common, scores);
    for (int i = 0; i < count; i++) {
        const PathCopy *path = query[i].path;
        int end = whole_blocks(query[i].visible),
            split = path->from >= 0 && path->from < end ? path->from : end;
        if (split < common)
            split = common;
        score_blocks(query + i, 1, k, dim, common, split, scores + i);
        if (split < end)
            score_blocks(query + i, 1, path->k - (size_t)path->from * dim, dim, split, end,
                         scores + i);
        scale[i] = softmax_row(scores[i], weights[i], start, end, query[i].low, query[i].visible);
        for (int s = end; s < common; s += 16)
            store(weights[i] + s, splat(0.0f));
    }
    for (int d0 = 0; d0 < dim; d0 += 64) {
        int vectors = dim - d0 >= 64 ? 4 : (dim - d0) / 16;
        f16 acc[TILE_ROWS][4];
        memset(acc, 0, sizeof acc);
        add_values(count, weights, v, dim, d0, vectors, start, common < longest ? common : longest,
                   acc);
        for (int i = 0; i < count; i++) {
            const PathCopy *path = query[i].path;
            int visible = query[i].visible,
                split = path->from >= 0 && path->from < visible ? path->from : visible;
            if (split < common)
                split = common;
            add_values(1, weights + i, v, dim, d0, vectors, common,
                       split < visible ? split : visible, acc + i);
            if (split < visible)
                add_values(1, weights + i, path->v - (size_t)path->from * dim, dim, d0, vectors,
                           split, visible, acc + i);
            for (int m = 0; m < vectors; m++)
                store(query[i].out + d0 + m * 16, acc[i][m] * splat(scale[i]));
        }
    }
}

// The thread's attention scratch, large enough for `capacity` cached positions and a tree.
static AttentionScratch *attention_scratch(ThreadScratch *mine, int capacity) {
    AttentionScratch *scratch = mine->attention;
    if (!scratch && !(scratch = mine->attention = calloc(1, sizeof *scratch)))
        abort();
    int want = whole_blocks(capacity + MAX_NODES + 16);
    if (scratch->capacity < want) {
        free(scratch->scores);
        free(scratch->weights);
        free(scratch->queries);
        size_t none = 0, zero = 0, nothing = 0;
        scratch->scores = grown(NULL, &none, (size_t)TILE_ROWS * want * sizeof(float));
        scratch->weights = grown(NULL, &zero, (size_t)TILE_ROWS * want * sizeof(float));
        scratch->queries = grown(NULL, &nothing, (size_t)TILE_ROWS * MAX_HEAD_DIM * sizeof(float));
        scratch->capacity = want;
    }
    return scratch;
}

void close_attention_scratch(AttentionScratch *scratch) {
    if (!scratch)
        return;
    free(scratch->scores);
    free(scratch->weights);
    free(scratch->queries);
    free(scratch);
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
            write_k(cache->k + at, rows->slot[n], dim, k);
            write_v(cache->v + at, rows->slot[n], dim, v);
        }
}

// Attention of queries [begin, end) of K/V head h. Query i: row i / group, head i % group of this
// K/V head.
static void attend_queries(Workspace *work, const Shape *s, const Layer *layer,
                           const LayerCache *cache, const Rows *rows, int h, int begin, int end,
                           AttentionScratch *scratch) {
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
            for (int d = 0; d < dim; d += 16)
                store(query + d, load(from + d) * splat(scale));
            one->query = query;
            one->out = work->heads + ((size_t)n * s->heads + q) * dim;
        }
        attend(tile_of, take, k, v, dim, scratch);
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
    AttentionScratch *scratch = attention_scratch(&work->own[id], rows->capacity);
    while (begin < end) {
        int h = (int)(begin / queries), first = (int)(begin % queries),
            last = end - begin < queries - first ? first + (int)(end - begin) : queries;
        attend_queries(work, s, layer, cache, rows, h, before + first, before + last, scratch);
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
