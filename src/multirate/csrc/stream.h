// One drafting step of the accelerated residual stream (M2R2), in one call from Python.
#ifndef MULTIRATE_STREAM_H
#define MULTIRATE_STREAM_H

typedef struct {
    const Shape *shape;
    const Layer *layers;
    const Adapter *const *adapters;
    const bf16 *table;         // embedding [vocab, d]
    Linear carry;              // weight NULL: no carried residual
    const float *carry_norm;   // [d]
    const Shape *block_shape;  // NULL: no block at the gate
    const Layer *block;
    const float *norm_out;     // [d] an RMSNorm after the block (Kangaroo), or NULL
    const Layer *merged;       // of gate 1: layer 0 with the adapters added to its weights, its keys and values the slow
                               // stream's; then a slow row of a draft only leaves these. NULL: layers with adapters
    float carry_eps;
    int32_t gate;
} Stream;

// One level of a draft: the carry, both streams' layers below the gate, the block and the head, without returning to one
// thread in between.
typedef struct {
    Product carry, head;  // linear NULL: none
    Call layers, block;   // layers NULL: none
    const float *norm_out;
} Level;

static void run_level(Workspace *work, void *context, int id, int threads) {
    Level *level = context;
    if (level->carry.linear) {
        run_product(work, &level->carry, id, threads);
        barrier(work, threads);
    }
    run_layers(work, &level->layers, id, threads);
    if (level->block.layers) run_layers(work, &level->block, id, threads);
    if (level->norm_out) {
        const Call *block = &level->block;
        int d = block->shape->hidden;
        if (!id)
            for (int r = 0; r < block->rows.count; r++) scale_to_rms(block->x + (size_t)r * d, level->norm_out, d, block->shape->eps);
        barrier(work, threads);
    }
    if (level->head.linear) run_product(work, &level->head, id, threads);
}

// The rows of a level, and what it reads and writes besides.
typedef struct {
    const LayerCache *caches, *block_cache;
    int capacity, block_capacity;
    const Linear *head;  // NULL: the outputs are not read
    const float *head_norm;
    float *logits;       // of the last rows [fresh, head->out]
    float head_eps;
} Around;

// ids [n]: accelerated rows of these tokens, at rows (seq, slot, pos, prefix, tree). The last `fresh` of them are new
// to the slow stream: x is [fresh + n, d], slow rows first, n + fresh <= MAX_ROWS. carried [n, d] or NULL.
// On return x holds the stream's outputs p after the slow rows' residuals h_gate; of a stream with merged layers the slow
// rows leave their keys and values and stay as they enter layer 0.
static void level_rows(Workspace *work, const Stream *stream, const Around *around, const int64_t *ids, int n, int fresh, const int32_t *seq,
                       const int32_t *slot, const int32_t *pos, const int32_t *prefix, const int64_t *tree,
                       const float *carried, float *x) {
    int d = stream->shape->hidden, total = n + fresh, old = n - fresh;
    float *p = x + (size_t)fresh * d;
    int32_t columns[4][MAX_ROWS];
    int64_t trees[MAX_ROWS];
    uint8_t fast[MAX_ROWS];
    mr_embed(stream->table, ids, n, d, 1.0f, p);
    memcpy(x, p + (size_t)old * d, (size_t)fresh * d * sizeof(float));
    for (int r = 0; r < total; r++) {
        int from = r < fresh ? old + r : r - fresh;  // slow rows first: they write what the accelerated ones read
        columns[0][r] = seq[from];
        columns[1][r] = r < fresh ? slot[from] : -1;
        columns[2][r] = pos[from];
        columns[3][r] = prefix[from];
        trees[r] = tree[from];
        fast[r] = r >= fresh;
    }
    make_room(work, stream->shape, stream->adapters != NULL);
    Level level = {.norm_out = stream->norm_out};
    if (stream->carry.weight && carried)
        level.carry = (Product){&stream->carry, carried, stream->carry_norm, p, n, ADD, stream->carry_eps};
    level.layers = (Call){stream->shape, stream->layers, around->caches, stream->adapters,
                          {columns[0], columns[1], columns[2], columns[3], trees, fast, total, around->capacity}, x, 0, stream->gate, 0};
    if (stream->merged) {
        level.layers.layers = stream->merged;
        level.layers.adapters = NULL;
        level.layers.key_rows = fresh;
    }
    if (stream->block_shape) {
        make_room(work, stream->block_shape, 0);
        level.block = (Call){stream->block_shape, stream->block, around->block_cache, NULL,
                             {seq, slot, pos, prefix, tree, NULL, n, around->block_capacity}, p, 0, 1, 0};
    }
    if (around->head)
        level.head = (Product){around->head, p + (size_t)old * d, around->head_norm, around->logits, fresh, STORE, around->head_eps};
    run_parallel(work, run_level, &level);
}

// The same for any number of rows, from Python: x always ends with h_gate in the slow rows.
void mr_stream_step(Workspace *work, const Stream *stream, const LayerCache *caches, int capacity, const LayerCache *block_cache,
                    int block_capacity, const int64_t *ids, int n, int fresh, const int32_t *seq, const int32_t *slot,
                    const int32_t *pos, const int32_t *prefix, const int64_t *tree, const float *carried, float *x) {
    int d = stream->shape->hidden, old = n - fresh;
    Around around = {caches, block_cache, capacity, block_capacity, NULL, NULL, NULL, 0.0f};
    if (!stream->merged && n + fresh <= MAX_ROWS) {
        level_rows(work, stream, &around, ids, n, fresh, seq, slot, pos, prefix, tree, carried, x);
        return;
    }
    if (fresh) {
        mr_embed(stream->table, ids + old, fresh, d, 1.0f, x);
        mr_layers(work, stream->shape, stream->layers, caches, NULL, x, fresh, seq + old, slot + old, pos + old, prefix + old,
                  tree + old, NULL, capacity, 0, stream->gate);
    }
    for (int r = 0; r < n; r += MAX_ROWS)
        level_rows(work, stream, &around, ids + r, n - r < MAX_ROWS ? n - r : MAX_ROWS, 0, seq + r, slot + r, pos + r, prefix + r,
                   tree + r, carried ? carried + (size_t)r * d : NULL, x + (size_t)(fresh + r) * d);
}

// The head's `k` likeliest outputs for each row of p and their probabilities. logits: scratch [n, head->out].
void mr_head_top(Workspace *work, const Linear *head, const float *norm, float eps, const float *p, int n, int vocab, int k, float sharpness,
                 float *logits, int64_t *ids, float *probabilities) {
    mr_linear(work, head, p, norm, eps, n, logits, 0);
    mr_top(logits, n, vocab, head->out, k, sharpness, ids, probabilities);
}

#include "lookup.h"

#define MAX_NODES 63

typedef struct {
    double reach, own;
    int32_t parent;
    int64_t token;
} Candidate;

typedef struct {
    int32_t depth, width, nodes, top;
    const double *expand, *keep;  // [nodes] least reach of the n-th node to draft from it, and to verify it; not falling
    double sharpness;
    double least;  // a node whose own probability is lower is not drafted from (Kangaroo's stopping rule)
    Lookup lookup;
} TreeLimits;

// The text that drafts look themselves up in, and what came of it.
typedef struct {
    int32_t *tokens;    // [count + nodes + 1 at least] the text, the root last; drafts are written after it
    int32_t count;
    int32_t drawn;      // out: nodes that the stream drafted from
    int32_t followed;   // out: nodes that follow a suggestion, numbered after these
    int32_t matched;    // out: the length of the suggestion's match, 0: none was followed
} Text;

// Best first; equal reaches keep their order (as Python's sort does).
static void sort_candidates(Candidate *c, int count) {
    for (int i = 1; i < count; i++) {
        Candidate one = c[i];
        int j = i;
        for (; j > 0 && c[j - 1].reach < one.reach; j--) c[j] = c[j - 1];
        c[j] = one;
    }
}

// Row r of the next pass is tree node `node`: Rows.draft_tree's columns, and the node's token.
#define NODE_ROW(r, node) \
    (seq[r] = sequence, slot[r] = length + (node), pos[r] = length + depth[node], prefix[r] = length + 1, \
     tree[r] = bits[node], row_ids[r] = tokens[(node) - 1])

// Where the residuals that a draft leaves behind (`hidden`) go on: with merged layers the slow stream has not run yet.
static inline int entering_layer(const Stream *stream) { return stream->merged ? 0 : stream->gate; }

// A whole greedy draft tree of one sequence (methods/m2r2/tree.py states the rules; a test holds the two together).
// ids, carried: `refresh` committed tokens to refresh, then the root, which goes to slot `length`.
// token_map: id of each head output, or NULL. Fills tokens, parents [nodes] and hidden [nodes + 1, d] (the slow residuals
// entering entering_layer); returns the number of nodes. around.logits is set here. scratch: (refresh + 2 + (4 * (nodes + 1)))
// * d + width * head->out floats. text: what drafts look themselves up in, if limits->lookup says so.
static int draft_tree(Workspace *work, const Stream *stream, Around around, int vocab, const int64_t *token_map, int sequence, int length,
                      int refresh, const int64_t *ids, const float *carried, const TreeLimits *limits, Text *text,
                      int64_t *tokens, int32_t *parents, float *hidden, float *scratch) {
    int d = stream->shape->hidden, n = 0, rows = refresh + 1;
    size_t row_bytes = (size_t)d * sizeof(float);
    int32_t seq[MAX_NODES + 1], slot[MAX_NODES + 1], pos[MAX_NODES + 1], prefix[MAX_NODES + 1];
    int64_t bits[MAX_NODES + 1], tree[MAX_NODES + 1], row_ids[MAX_NODES + 1];
    double reach[MAX_NODES + 1];
    int32_t depth[MAX_NODES + 1], frontier[MAX_NODES + 1], count = 1, ran = 1;
    Candidate leaves[MAX_NODES * 17], found[17 * 17];
    int leaf_count = 0;
    float *p_nodes = scratch;                              // [nodes + 1, d]
    float *x = p_nodes + (size_t)(limits->nodes + 1) * d;  // [2 * (nodes + 1) or refresh + 2, d]
    float *carry = x + (size_t)(2 * (limits->nodes + 1) + refresh + 2) * d;
    around.logits = carry + (size_t)(limits->nodes + 1) * d;
    const Linear *head = around.head;

    for (int r = 0; r < rows; r++) {
        seq[r] = sequence;
        slot[r] = pos[r] = length - refresh + r;
        prefix[r] = slot[r] + 1;
        tree[r] = 0;
    }
    if (rows + 1 > MAX_ROWS) {  // the refreshed rows by themselves
        Around silent = around;
        silent.head = NULL;
        for (int r = 0; r < refresh; r += MAX_ROWS)
            level_rows(work, stream, &silent, ids + r, refresh - r < MAX_ROWS ? refresh - r : MAX_ROWS, 0, seq + r, slot + r, pos + r,
                       prefix + r, tree + r, carried + (size_t)r * d, x);
        ids += refresh; carried += (size_t)refresh * d; rows = 1;
        seq[0] = seq[refresh]; slot[0] = slot[refresh]; pos[0] = pos[refresh]; prefix[0] = prefix[refresh]; tree[0] = 0;
    }
    level_rows(work, stream, &around, ids, rows, 1, seq, slot, pos, prefix, tree, carried, x);
    memcpy(hidden, x, row_bytes);
    memcpy(p_nodes, x + (size_t)rows * d, row_bytes);
    reach[0] = 1.0; depth[0] = 0; bits[0] = 0; frontier[0] = 0;

    while (count && limits->depth > 0) {
        int64_t best[17 * 17];
        float probs[17 * 17];
        int k = limits->top < vocab ? limits->top : vocab, candidates = 0;
        mr_top(around.logits, count, vocab, head->out, k, (float)limits->sharpness, best, probs);
        int64_t suggested[MAX_NODES];
        int following = 0;
        if (limits->lookup.longest && count == 1 && depth[n] == n) {  // a chain so far
            const Lookup *lookup = &limits->lookup;
            int most = lookup->deepest - n;
            if (n) text->tokens[text->count + n - 1] = (int32_t)tokens[n - 1];
            int matched = look_up(text->tokens, text->count - 1, text->count + n, lookup->longest, most, suggested);
            if (matched && most > 0 && suggested[0] == (token_map ? token_map[best[0]] : best[0]))
                following = worth_following(lookup, matched, most, reach[n], (double)probs[0], n, limits->nodes, limits->depth,
                                            limits->expand, limits->keep);
            if (following) text->matched = matched;
        }
        for (int f = 0; f < count; f++) {
            int node = frontier[f];
            if (depth[node] >= limits->depth) continue;
            for (int j = following ? 1 : 0; j < k; j++) {
                double here = reach[node] * (double)probs[f * k + j];
                if (here < limits->keep[0]) break;
                int64_t token = best[f * k + j];
                found[candidates++] = (Candidate){here, (double)probs[f * k + j], node, token_map ? token_map[token] : token};
            }
        }
        sort_candidates(found, candidates);
        int room = limits->nodes - n, width = limits->width < room ? limits->width : room, from = n;
        if (following) width = 0;  // what else may follow waits as leaves
        for (int j = 0; j < following; j++) {
            int parent = n++;
            tokens[parent] = suggested[j];
            parents[parent] = parent;
            depth[n] = depth[parent] + 1;
            bits[n] = bits[parent] | (int64_t)1 << parent;
        }
        text->followed = n - from;
        count = 0;
        for (int c = 0; c < candidates; c++) {
            int parent = found[c].parent;
            if (count < width && found[c].reach >= limits->expand[n] && found[c].own >= limits->least && depth[parent] + 1 < limits->depth) {
                int node = ++n;
                tokens[node - 1] = found[c].token;
                parents[node - 1] = parent;
                reach[node] = found[c].reach;
                depth[node] = depth[parent] + 1;
                bits[node] = bits[parent] | (int64_t)1 << (node - 1);
                frontier[count++] = node;
            } else if (leaf_count < MAX_NODES * 17) {
                leaves[leaf_count++] = found[c];
            }
        }
        if (!count) break;
        for (int f = 0; f < count; f++) {
            int node = frontier[f];
            NODE_ROW(f, node);
            memcpy(carry + (size_t)f * d, p_nodes + (size_t)parents[node - 1] * d, row_bytes);
        }
        level_rows(work, stream, &around, row_ids, count, count, seq, slot, pos, prefix, tree, carry, x);
        for (int f = 0; f < count; f++) {
            memcpy(hidden + (size_t)frontier[f] * d, x + (size_t)f * d, row_bytes);
            memcpy(p_nodes + (size_t)frontier[f] * d, x + (size_t)(count + f) * d, row_bytes);
        }
        ran = n + 1;
    }
    text->drawn = ran - 1;

    sort_candidates(leaves, leaf_count);
    for (int c = 0; c < leaf_count && n < limits->nodes && leaves[c].reach >= limits->keep[n]; c++) {
        int node = ++n, parent = leaves[c].parent;
        tokens[node - 1] = leaves[c].token;
        parents[node - 1] = parent;
        depth[node] = depth[parent] + 1;
        bits[node] = bits[parent] | (int64_t)1 << (node - 1);
    }
    int added = n + 1 - ran;
    if (added > 0) {  // leaves: the slow stream alone, up to the gate
        for (int f = 0; f < added; f++) NODE_ROW(f, ran + f);
        float *h = hidden + (size_t)ran * d;
        mr_embed(stream->table, row_ids, added, d, 1.0f, h);
        if (entering_layer(stream))
            mr_layers(work, stream->shape, stream->layers, around.caches, NULL, h, added, seq, slot, pos, prefix, tree, NULL,
                      around.capacity, 0, stream->gate);
    }
    return n;
}
#endif
