// Levels of a draft (branch.c), and whole trees (draft.c).
#ifndef MULTIRATE_DRAFTS_H
#define MULTIRATE_DRAFTS_H
#include "include/speculate.h"
#include "layers.h"

// What a level of a draft reads and writes besides its rows.
typedef struct {
    const LayerCache *caches, *block_cache;
    int capacity, block_capacity;
    const Linear *head; // NULL: the outputs are not read
    const float *head_norm;
    float *logits; // of the last rows [fresh, head->outputs]
    float head_eps;
} Surroundings;

// The embeddings of ids [count], as they enter layer 0.
static inline void embed(const Branch *branch, const int64_t *ids, int count, float *x) {
    const Shape *shape = branch->shape;
    mr_embed(branch->table, ids, count, shape->hidden, shape->embed_scale, x);
}

// Where the residuals that a draft leaves behind (`hidden`) go on: with merged layers the target
// model has not run yet.
static inline int entering_layer(const Branch *branch) {
    return branch->merged ? 0 : branch->exit_layer;
}

// ids [n]: rows of the branch. Of the last `fresh` the target model also runs a row: x is
// [fresh + n, d], its rows first, n + fresh <= MAX_ROWS. carried [n, d] or NULL. On return x holds
// the branch's outputs after the target rows' residuals at the exit layer; of a branch with merged
// layers the target rows leave their keys and values and stay as they enter layer 0.
void draft_level(Workspace *work, const Branch *branch, const Surroundings *around,
                 const int64_t *ids, const Rows *rows, int fresh, const float *carried, float *x);

// The noise of the place `ahead` places after `noise`'s.
static inline Noise noise_ahead(const Noise *noise, int ahead) {
    Noise there = *noise;
    there.place += ahead;
    return there;
}

// Whole draft trees of `count` sequences, which share their branch, head and caches: a level of all
// of them is one pass (the rules in Python: DraftTree; a test holds the two together). Fills each
// step's tokens, parents, hidden (the target model's residuals entering entering_layer), drafted
// and text. Uses (capacity + 1) * hidden floats of each step's scratch.
void draft_trees(Workspace *work, SpeculativeStep *const *steps, int count);
#endif
