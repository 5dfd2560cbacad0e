// Draft trees (draft.c).
#ifndef MULTIRATE_DRAFT_H
#define MULTIRATE_DRAFT_H
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

// Rows in arrays of their own, filled one by one.
typedef struct {
    int32_t seq[MAX_NODES + 1], slot[MAX_NODES + 1], pos[MAX_NODES + 1], prefix[MAX_NODES + 1];
    int64_t tree[MAX_NODES + 1];
} RowTable;

static inline void set_row(RowTable *t, int r, int seq, int slot, int pos, int prefix,
                           int64_t tree) {
    t->seq[r] = seq;
    t->slot[r] = slot;
    t->pos[r] = pos;
    t->prefix[r] = prefix;
    t->tree[r] = tree;
}

static inline Rows rows_of(const RowTable *t, int begin, int count, int capacity) {
    return (Rows){
        t->seq + begin, t->slot + begin, t->pos + begin, t->prefix + begin, t->tree + begin,
        NULL,           count,           capacity};
}

// The embeddings of ids [count], as they enter layer 0.
static inline void embed(const Stream *stream, const int64_t *ids, int count, float *x) {
    const Shape *shape = stream->shape;
    mr_embed(stream->table, ids, count, shape->hidden, shape->embed_scale, x);
}

// Where the residuals that a draft leaves behind (`hidden`) go on: with merged layers the target
// model has not run yet.
static inline int entering_layer(const Stream *stream) {
    return stream->merged ? 0 : stream->exit_layer;
}

// A sequence's part of a step that several take together.
typedef struct {
    SpeculativeStep *step;
    const DraftLimits *limits;
    int length, refresh;  // committed tokens; how many of ids are refreshed
    const int64_t *ids;   // [refresh + 1] the last token last, which goes to slot `length`
    const float *carried; // [refresh + 1, hidden]
} Part;

// Whole draft trees of `count` sequences, which share their stream, head and caches: a level of all
// of them is one pass (the rules in Python: DraftTree; a test holds the two together). Fills each
// step's tokens, parents, hidden (the target model's residuals entering entering_layer), drafted
// and text. Uses (capacity + 1) * hidden floats of each step's scratch.
void draft_trees(Workspace *work, const Part *parts, int count);
#endif
