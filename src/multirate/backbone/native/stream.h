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
    float carry_eps;
    int32_t gate;
} Stream;

// ids [n]: accelerated rows of these tokens, at rows (seq, slot, pos, prefix, tree). The last `fresh` of them are new
// to the slow stream, which runs beside them: x is [fresh + n, d], slow rows first. carried [n, d] or NULL.
// On return x holds h_gate of the slow rows, then the stream's outputs p.
void mr_stream_step(const Stream *stream, const LayerCache *caches, int capacity, const LayerCache *block_cache,
                    int block_capacity, const int64_t *ids, int n, int fresh, const int32_t *seq, const int32_t *slot,
                    const int32_t *pos, const int32_t *prefix, const int64_t *tree, const float *carried, float *x) {
    int d = stream->shape->hidden, total = n + fresh, old = n - fresh;
    float *p = x + (size_t)fresh * d;
    mr_embed(stream->table, ids, n, d, 1.0f, p);
    memcpy(x, p + (size_t)old * d, (size_t)fresh * d * sizeof(float));
    if (stream->carry.weight && carried) mr_linear(&stream->carry, carried, stream->carry_norm, stream->carry_eps, n, p, 1);
    int32_t *columns = malloc((size_t)total * 4 * sizeof(int32_t));
    int64_t *trees = malloc((size_t)total * sizeof(int64_t));
    uint8_t *fast = malloc(total);
    if (!columns || !trees || !fast) abort();
    for (int r = 0; r < total; r++) {
        int from = r < fresh ? old + r : r - fresh;  // slow rows first: they write what the accelerated ones read
        columns[r] = seq[from];
        columns[total + r] = r < fresh ? slot[from] : -1;
        columns[2 * total + r] = pos[from];
        columns[3 * total + r] = prefix[from];
        trees[r] = tree[from];
        fast[r] = r >= fresh;
    }
    mr_layers(stream->shape, stream->layers, caches, stream->adapters, x, total, columns, columns + total,
              columns + 2 * total, columns + 3 * total, trees, fast, capacity, 0, stream->gate);
    free(columns); free(trees); free(fast);
    if (stream->block_shape)
        mr_layers(stream->block_shape, stream->block, block_cache, NULL, p, n, seq, slot, pos, prefix, tree, NULL,
                  block_capacity, 0, 1);
    if (stream->norm_out)
        for (int r = 0; r < n; r++) scale_to_rms(p + (size_t)r * d, stream->norm_out, d, stream->block_shape->eps);
}

// The head's `k` likeliest outputs for each row of p and their probabilities. logits: scratch [n, head->out].
void mr_head_top(const Linear *head, const float *norm, float eps, const float *p, int n, int vocab, int k, float sharpness,
                 float *logits, int64_t *ids, float *probabilities) {
    mr_linear(head, p, norm, eps, n, logits, 0);
    mr_top(logits, n, vocab, head->out, k, sharpness, ids, probabilities);
}

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
} TreeLimits;

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

// A whole greedy draft tree of one sequence (methods/m2r2/tree.py states the rules; a test holds the two together).
// ids, carried: `refresh` committed tokens to refresh, then the root, which goes to slot `length`.
// token_map: id of each head output, or NULL. Fills tokens, parents [nodes] and hidden [nodes + 1, d]; returns the
// number of nodes. scratch: (refresh + 2 + (3 * (nodes + 1) + 1)) * d + width * head->out floats.
int mr_draft_tree(const Stream *stream, const LayerCache *caches, int capacity, const LayerCache *block_cache,
                  int block_capacity, const Linear *head, const float *head_norm, float head_eps, int vocab,
                  const int64_t *token_map, int sequence, int length, int refresh, const int64_t *ids,
                  const float *carried, const TreeLimits *limits, int64_t *tokens, int32_t *parents, float *hidden,
                  float *scratch) {
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
    float *logits = carry + (size_t)(limits->nodes + 1) * d;

    for (int r = 0; r < rows; r++) {
        seq[r] = sequence;
        slot[r] = pos[r] = length - refresh + r;
        prefix[r] = slot[r] + 1;
        tree[r] = 0;
    }
    mr_stream_step(stream, caches, capacity, block_cache, block_capacity, ids, rows, 1, seq, slot, pos, prefix, tree,
                   carried, x);
    memcpy(hidden, x, row_bytes);
    memcpy(p_nodes, x + (size_t)rows * d, row_bytes);
    reach[0] = 1.0; depth[0] = 0; bits[0] = 0; frontier[0] = 0;

    while (count && limits->depth > 0) {
        int64_t best[17 * 17];
        float probs[17 * 17];
        int k = limits->top < vocab ? limits->top : vocab, candidates = 0;
        for (int f = 0; f < count; f++) memcpy(x + (size_t)f * d, p_nodes + (size_t)frontier[f] * d, row_bytes);
        mr_head_top(head, head_norm, head_eps, x, count, vocab, k, (float)limits->sharpness, logits, best, probs);
        for (int f = 0; f < count; f++) {
            int node = frontier[f];
            if (depth[node] >= limits->depth) continue;
            for (int j = 0; j < k; j++) {
                double here = reach[node] * (double)probs[f * k + j];
                if (here < limits->keep[0]) break;
                int64_t token = best[f * k + j];
                found[candidates++] = (Candidate){here, (double)probs[f * k + j], node, token_map ? token_map[token] : token};
            }
        }
        sort_candidates(found, candidates);
        int room = limits->nodes - n, width = limits->width < room ? limits->width : room;
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
        mr_stream_step(stream, caches, capacity, block_cache, block_capacity, row_ids, count, count, seq, slot, pos,
                       prefix, tree, carry, x);
        for (int f = 0; f < count; f++) {
            memcpy(hidden + (size_t)frontier[f] * d, x + (size_t)f * d, row_bytes);
            memcpy(p_nodes + (size_t)frontier[f] * d, x + (size_t)(count + f) * d, row_bytes);
        }
        ran = n + 1;
    }

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
        mr_layers(stream->shape, stream->layers, caches, NULL, h, added, seq, slot, pos, prefix, tree, NULL, capacity, 0,
                  stream->gate);
    }
    return n;
}
#endif
