// A pass over some layers (layers.c), as one thread of a call runs it.
#ifndef MULTIRATE_LAYERS_H
#define MULTIRATE_LAYERS_H
#include "gemm.h"

// The place of a call's rows among those that other threads run meanwhile (passes.c).
typedef struct {
    const Workspace *of; // whose threads these are; NULL: no others
    int part, threads;   // part `part`, of thread part % threads
    int layers;          // of the call
} Turn;

// Layers [start, stop) on at most MAX_ROWS rows.
typedef struct {
    const Shape *shape;
    const Layer *layers;
    const LayerCache *caches;
    const Adapter *const *adapters; // [layers], or NULL
    Rows rows;
    float *x; // [rows, hidden] the residual, updated in place
    int start, stop;
    int key_rows; // the first rows (or all) only leave their keys and values in layer `start`,
                  // which is then the only one
    const float *beside; // [rows, hidden] what attention reads beside x; NULL: nothing
    const int32_t *taps; // [tap_count] layers in [start, stop], rising, whose entering residuals …
    float *noted;        // … are noted: [rows, taps, hidden]
    int tap_count;
    Turn turn;
} LayerCall;

void run_layers(Workspace *work, void *context, int id, int threads);

// passes.c: the call on any number of rows.
void run_all_rows(Workspace *work, LayerCall call);

// Rows [begin, begin + count).
static inline Rows some_rows(const Rows *rows, int begin, int count) {
    return (Rows){rows->seq + begin,
                  rows->slot + begin,
                  rows->pos + begin,
                  rows->prefix + begin,
                  rows->tree + begin,
                  rows->adapted ? rows->adapted + begin : NULL,
                  count,
                  rows->capacity};
}

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
#endif
