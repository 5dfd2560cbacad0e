// Attention over the cache (attention.c): rotates queries and keys, stores keys and values,
// attends.
#ifndef MULTIRATE_ATTENTION_H
#define MULTIRATE_ATTENTION_H
#include "workspace.h"

// The K/V heads whose keys and values thread `id` writes are [first_head(id), first_head(id + 1)).
// Where the threads divide the heads, it attends with the queries of the same ones.
static inline int first_head(const Shape *s, int id, int threads) {
    return s->kv_heads * id / threads;
}

// Of a layer with norm_all_heads: the queries of all heads of a row, and its keys, in work->qkv.
// Every one of them has been written before. Ends in a barrier.
void norm_all_heads(Workspace *work, const Shape *s, const Layer *layer, int rows, int keys_alone,
                    int id, int threads);

// Norms, rotates and writes the keys and values of the thread's K/V heads, which lie in work->qkv
// [rows, heads + 2 kv_heads, head_dim].
void write_keys_and_values(Workspace *work, const Shape *s, const Layer *layer,
                           const LayerCache *cache, const Rows *rows, int id, int threads);

// From work->qkv to work->heads [rows, heads, head_dim], for the thread's share of the queries of
// all rows but the first `key_rows`. The keys and values that it sees have been written, but for
// those of other threads' heads.
void attention_of_heads(Workspace *work, const Shape *s, const Layer *layer,
                        const LayerCache *cache, const Rows *rows, int key_rows, int id,
                        int threads);

// Brings the slots that the rows will write closer.
void fetch_slots(const Shape *s, const LayerCache *cache, const Rows *rows, int id, int threads);
#endif
