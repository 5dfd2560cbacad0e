// A whole greedy round of one sequence: draft, verify, accept, and move the accepted path into place, in one call.
#ifndef MULTIRATE_ROUND_H
#define MULTIRATE_ROUND_H

typedef struct {
    const Stream *stream;        // without a draft_head: only the text is looked up
    const LayerCache *caches, *block_cache;
    const Linear *draft_head, *head;
    const float *norm;           // before both heads
    const int64_t *token_map;    // id of each output of draft_head, or NULL
    int64_t *ids;                // [nodes + 1] in: tokens to refresh, then the root; out: the emitted tokens
    float *carried;              // [nodes + 1, d] in: the carried residual of each; out: h_L of the accepted path.
                                 // So the next round enters with what this one left.
    int64_t *tokens;             // [nodes] the draft
    int32_t *parents;            // [nodes]
    float *hidden;               // [nodes + 1, d]
    float *scratch;              // draft_tree's, and (nodes + 1) * head->out floats
    int32_t capacity, block_capacity, draft_vocab, layers, sequence;
    int32_t drafted, levels;     // out: nodes and levels of the draft
    int32_t true_drawn, true_followed, pad;  // out: accepted nodes among text.drawn and text.followed
    Text text;                   // tokens NULL: none is kept. Emitted tokens are added
} Round;

// decoding/acceptance.py, accept_greedy: down from the root as long as the target's own token is a child. Fills path
// and returns its length; the root is path[0].
static int accepted_path(const int64_t *tokens, const int32_t *parents, int nodes, const int64_t *target, int32_t *path) {
    int length = 1;
    path[0] = 0;
    for (int node = 1; node <= nodes; node++) {  // a child comes after its parent; the first of equal children counts
        int last = path[length - 1];
        if (parents[node - 1] == last && tokens[node - 1] == target[last]) path[length++] = node;
    }
    return length;
}

// Without a stream: what the text's last tokens were followed by before is the draft.
static int draft_suggestion(const Stream *stream, const TreeLimits *limits, Text *text, int64_t root, int64_t *tokens,
                            int32_t *parents, float *hidden) {
    const Lookup *lookup = &limits->lookup;
    int most = lookup->deepest, d = stream->shape->hidden;
    text->matched = look_up(text->tokens, text->count - 1, text->count, lookup->longest, most, tokens);
    int n = text->matched ? most : 0;
    for (int i = 0; i < n; i++) parents[i] = i;
    text->followed = n;
    mr_embed(stream->table, &root, 1, d, 1.0f, hidden);
    mr_embed(stream->table, tokens, n, d, 1.0f, hidden + d);
    return n;
}

// `length`: committed tokens; ids [first, first + count) enter (all but the last refresh the block). Returns the number
// of tokens emitted; the K/V of the root and the accepted nodes then lie in slots length, length + 1, …, uncommitted.
int mr_round(Workspace *work, Round *round, int length, int first, int count, const TreeLimits *limits) {
    const Stream *stream = round->stream;
    const Shape *shape = stream->shape;
    int d = shape->hidden;
    Around around = {round->caches, round->block_cache, round->capacity, round->block_capacity, round->draft_head, round->norm,
                     NULL, shape->eps};
    Text *text = &round->text;
    text->drawn = text->followed = text->matched = 0;
    int nodes = round->draft_head
        ? draft_tree(work, stream, around, round->draft_vocab, round->token_map, round->sequence, length, count - 1, round->ids + first,
                     round->carried + (size_t)first * d, limits, text, round->tokens, round->parents, round->hidden, round->scratch)
        : draft_suggestion(stream, limits, text, round->ids[first + count - 1], round->tokens, round->parents, round->hidden);
    int32_t seq[MAX_NODES + 1], slot[MAX_NODES + 1], pos[MAX_NODES + 1], prefix[MAX_NODES + 1], depth[MAX_NODES + 1];
    int64_t bits[MAX_NODES + 1], target[MAX_NODES + 1];
    int chain = 1;
    depth[0] = 0; bits[0] = 0; round->levels = 0;
    for (int node = 0; node <= nodes; node++) {
        if (node) {
            int parent = round->parents[node - 1];
            chain &= parent == node - 1;
            depth[node] = depth[parent] + 1;
            bits[node] = bits[parent] | (int64_t)1 << (node - 1);
            if (depth[node] > round->levels) round->levels = depth[node];
        }
        seq[node] = round->sequence;
        slot[node] = length + node;
        pos[node] = length + depth[node];
        prefix[node] = length + 1;
    }
    if (chain)  // plain causal rows: no path to gather
        for (int node = 0; node <= nodes; node++) prefix[node] = slot[node] + 1, bits[node] = 0;
    mr_greedy(work, shape, stream->layers, round->caches, NULL, NULL, round->hidden, nodes + 1, seq, slot, pos, prefix, bits,
              round->capacity, entering_layer(stream), round->layers, round->head, round->norm, round->scratch, target);

    int32_t path[MAX_NODES + 1], from[MAX_NODES + 1], to[MAX_NODES + 1];
    int emitted = accepted_path(round->tokens, round->parents, nodes, target, path);
    round->true_drawn = round->true_followed = 0;
    for (int i = 0; i < emitted; i++) {
        from[i] = length + path[i];
        to[i] = length + i;
        round->ids[i] = target[path[i]];
        if (text->tokens) text->tokens[text->count++] = (int32_t)target[path[i]];
        round->true_drawn += path[i] > 0 && path[i] <= text->drawn;
        round->true_followed += path[i] > text->drawn && path[i] <= text->drawn + text->followed;
        memcpy(round->carried + (size_t)i * d, round->hidden + (size_t)path[i] * d, (size_t)d * sizeof(float));
    }
    if (path[emitted - 1] != emitted - 1)
        mr_move(round->caches, round->layers, shape->kv_heads, shape->head_dim, round->capacity, round->sequence, from, to,
                emitted);
    round->drafted = nodes;
    return emitted;
}
#endif
