// The arithmetic of attention (attention.c): keys and values in the cache's layout, scores, softmax
// and the weighted sums.
#ifndef MULTIRATE_ATTEND_H
#define MULTIRATE_ATTEND_H
#include "tile.h"

static void write_key(bf16 *k, int slot, int dim, const float *value) {
    uint32_t *block = (uint32_t *)k + (size_t)(slot / 16) * dim * 8 + slot % 16;
    for (int i = 0; i < dim; i += 16) {
        uint32_t pairs[8];
        store_bf16((bf16 *)pairs, load(value + i));
        for (int j = 0; j < 8; j++)
            block[(i / 2 + j) * 16] = pairs[j];
    }
}
static void write_value(bf16 *v, int slot, int dim, const float *value) {
    uint32_t *pair = (uint32_t *)v + (size_t)(slot / 2) * dim;
    for (int i = 0; i < dim; i += 16) {
        typedef uint16_t halves __attribute__((vector_size(32)));
        halves low;
        store_bf16((bf16 *)&low, load(value + i));
        u16 new = __builtin_convertvector(low, u16), old = load_pairs(pair + i);
        new = slot & 1 ? (old & 0xffffu) | new << 16 : (old & 0xffff0000u) | new;
        memcpy(pair + i, &new, sizeof new);
    }
}

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
#if WIDE_TILES
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
        tile(block, 16, x, count, dim / 2, 1, (const char *)(block + dim * 8), 0, acc);
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
    tile(words, dim, x, count, (last - first + 1) / 2, vectors, (const char *)words, 0, acc);
}

// out = softmax(q·K) V of up to TILE_ROWS queries of one sequence over one K/V head, [.., dim]
// each.
//
// Every K/V block is read once for all of them. A query's own sums run over its virtual positions
// in order, and what the others make it pass over has weight zero: its bits do not depend on its
// neighbours.
static void attend(const Query *query, int count, const bf16 *k, const bf16 *v, int dim,
                   float *all_scores, float *all_weights, int capacity) {
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
        scores[i] = all_scores + (size_t)i * capacity;
        weights[i] = all_weights + (size_t)i * capacity;
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
#endif
