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
}

// The head's `k` likeliest outputs for each row of p and their probabilities. logits: scratch [n, head->out].
void mr_head_top(const Linear *head, const float *norm, float eps, const float *p, int n, int vocab, int k, float *logits,
                 int64_t *ids, float *probabilities) {
    mr_linear(head, p, norm, eps, n, logits, 0);
    mr_top(logits, n, vocab, head->out, k, ids, probabilities);
}
#endif
