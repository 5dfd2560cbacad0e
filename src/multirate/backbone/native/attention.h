// Attention of one query row over one cached K/V head, in a fixed order over virtual positions.
//
// A row's visible slots, in path order, get virtual positions 0, 1, 2, …; scores and the weighted sum run
// over virtual positions, so a token reached through a draft tree gets the same bits as in plain decoding.
#ifndef MULTIRATE_ATTENTION_H
#define MULTIRATE_ATTENTION_H
#include "kernel.h"

#define MAX_TREE 63
#define PATH_SLOTS (16 * 6)

// The part of a path that is not contiguous in the cache, copied into cache layout.
typedef struct {
    int from;  // virtual position (a multiple of 16) from which the copy replaces the cache; -1: none
    bf16 k[PATH_SLOTS * 256], v[PATH_SLOTS * 256];
} PathCopy;

typedef struct {
    float *scores;      // [capacity + 64]
    bf16 *weights;      // [capacity + 64]
    PathCopy path;
} AttentionScratch;

INLINE void write_k(bf16 *k, int slot, int dim, const float *value) {
    bf16 *block = k + (size_t)(slot / 16) * dim * 16 + (slot % 16) * 2;
    for (int i = 0; i < dim; i += 2) {
        block[i * 16] = to_bf16(value[i]);
        block[i * 16 + 1] = to_bf16(value[i + 1]);
    }
}
INLINE void write_v(bf16 *v, int slot, int dim, const float *value) {
    bf16 *pair = v + (size_t)(slot / 2) * dim * 2 + (slot & 1);
    for (int i = 0; i < dim; i++) pair[i * 2] = to_bf16(value[i]);
}
static void copy_slot(bf16 *k_to, bf16 *v_to, int to, const bf16 *k_from, const bf16 *v_from, int from, int dim) {
    uint32_t *kt = (uint32_t *)k_to + (size_t)(to / 16) * dim * 8 + to % 16;
    const uint32_t *kf = (const uint32_t *)k_from + (size_t)(from / 16) * dim * 8 + from % 16;
    for (int i = 0; i < dim / 2; i++) kt[i * 16] = kf[i * 16];
    bf16 *vt = v_to + (size_t)(to / 2) * dim * 2 + (to & 1);
    const bf16 *vf = v_from + (size_t)(from / 2) * dim * 2 + (from & 1);
    for (int i = 0; i < dim; i++) vt[i * 2] = vf[i * 2];
}

// Returns the number of virtual positions; fills path->from when the tree slots are not contiguous.
static int gather_path(PathCopy *path, const bf16 *k, const bf16 *v, int dim, int prefix, uint64_t tree) {
    path->from = -1;
    int extra = __builtin_popcountll(tree);
    if (!extra || tree == (extra == 64 ? ~0ull : (1ull << extra) - 1)) return prefix + extra;
    path->from = prefix / 16 * 16;
    size_t at = (size_t)path->from * dim;
    memcpy(path->k, k + at, (size_t)16 * dim * sizeof(bf16));
    memcpy(path->v, v + at, (size_t)16 * dim * sizeof(bf16));
    int to = prefix - path->from;
    for (int bit = 0; tree; bit++, tree >>= 1)
        if (tree & 1) copy_slot(path->k, path->v, to++, k, v, prefix + bit, dim);
    return prefix + extra;
}

// out[dim] (bf16) = softmax(q·K) V over virtual positions [low, visible). q: bf16 pairs, already scaled.
static void attend(const uint32_t *q, const bf16 *k, const bf16 *v, const PathCopy *path, int dim, int low, int visible,
                   AttentionScratch *scratch, bf16 *out) {
    float *scores = scratch->scores;
    int start = low / 16 * 16;
    f16 highest = splat(-INFINITY);
    i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int s = start; s < visible; s += 16) {
        const bf16 *block = path->from >= 0 && s >= path->from ? path->k + (size_t)(s - path->from) * dim
                                                               : k + (size_t)s * dim;
        const uint32_t *words = (const uint32_t *)block;
        f16 even = splat(0.0f), odd = splat(0.0f);
        for (int i = 0; i < dim / 2; i += 2) {
            u16 a, b;
            memcpy(&a, words + i * 16, 64);
            memcpy(&b, words + i * 16 + 16, 64);
            even = dot_pairs(even, a, q[i]);
            odd = dot_pairs(odd, b, q[i + 1]);
        }
        f16 score = even + odd;
        if (s < low || s + 16 > visible) {
            i16 position = lane + s;
            i16 hidden = (position < low) | (position >= visible);
            score = (f16)(((i16)score & ~hidden) | ((i16)splat(-INFINITY) & hidden));
        }
        i16 greater = score > highest;
        highest = (f16)(((i16)score & greater) | ((i16)highest & ~greater));
        store(scores + s, score);
    }
    float top = highest[0];
    for (int i = 1; i < 16; i++) top = highest[i] > top ? highest[i] : top;
    f16 sum = splat(0.0f);
    for (int s = start; s < visible; s += 16) {
        f16 score = load(scores + s);
        i16 hidden = score == splat(-INFINITY);
        f16 e = (f16)((i16)exp_vector(score - splat(top)) & ~hidden);
        sum += e;
        store_bf16(scratch->weights + s, e);
    }
    float total = 0.0f;
    for (int i = 0; i < 16; i++) total += sum[i];
    float scale = 1.0f / total;
    const uint32_t *pair = (const uint32_t *)scratch->weights;
    for (int d0 = 0; d0 < dim; d0 += 64) {
        int vectors = dim - d0 >= 64 ? 4 : (dim - d0) / 16;
        f16 acc[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int s = start; s < visible; s += 2) {
            const bf16 *base = path->from >= 0 && s >= path->from ? path->v + (size_t)(s - path->from) * dim
                                                                  : v + (size_t)s * dim;
            const uint32_t *words = (const uint32_t *)base + d0;
            for (int m = 0; m < 4; m++) {
                if (m >= vectors) break;
                u16 w;
                memcpy(&w, words + m * 16, 64);
                acc[m] = dot_pairs(acc[m], w, pair[s / 2]);
            }
        }
        for (int m = 0; m < vectors; m++) store_bf16(out + d0 + m * 16, acc[m] * splat(scale));
    }
}
#endif
