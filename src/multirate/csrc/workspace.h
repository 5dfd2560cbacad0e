// The scratch memory of kernel calls. Each decoder owns one, so calls of different decoders may run
// at the same time; calls with the same workspace must not.
#ifndef MULTIRATE_WORKSPACE_H
#define MULTIRATE_WORKSPACE_H
#include <stdatomic.h>

#include "thread_choice.h"
#include "vectors.h"

#define MAX_THREADS 64

// What attention of a tile's queries works in.
typedef struct {
    float *scores, *weights; // [TILE_ROWS, capacity]
    float *queries;          // [TILE_ROWS, MAX_HEAD_DIM]
    PathCopy *paths;         // [TILE_ROWS]
} AttentionScratch;

// One thread's own part. Fixed-point products (fixed_point.c) keep their copy of the rows in
// `fixed`, what lacks its outliers in `rest` on the way; products with quantised weights theirs in
// `bytes`.
typedef struct {
    float *normed;
    AttentionScratch attention;
    int16_t *fixed;
    char *bytes;
    float *rest;
    Outliers *outliers;
    uint32_t call, pieces; // of that call's work that the threads balance (shares.c): so many
} ThreadScratch;

// What nobody has taken yet of a thread's share of a piece of work (shares.c).
typedef struct {
    _Alignas(64) _Atomic uint64_t left;
} Claims;

struct Workspace {
    // Written by every thread at every barrier: on a cache line of their own.
    _Alignas(64) atomic_uint barrier_count;
    atomic_uint barrier_phase;
    // Of a thread that runs rows of its own (passes.c): the layers whose keys and values it has
    // written, of all its parts.
    _Alignas(64) atomic_int reached;
    _Alignas(64) ThreadChoice choice;
    uint32_t calls;            // of run_parallel
    double spent[SPENT_KINDS]; // as mr_spent has it
    // Shared by the threads of a call; grown on demand, never shrunk.
    float *qkv, *low, *neurons, *beside;
    float *heads, *activation, *low_in;
    float *screened; // of the last screen_rows: its rows …
    Reach *reach;
    float *highest;  // … and the largest bounds
    void *trees;     // of draft_trees …
    float *levels;   // … and what their levels work in
    float *verified; // rows of several sequences
    int32_t *uses;
    ThreadScratch own[MAX_THREADS];
    Claims claims[MAX_THREADS];
    struct Workspace *apart[MAX_THREADS]; // those of threads that run rows of their own
};

double seconds_now(void);

// How many threads calls use, apart from trials.
static inline int threads_of(const Workspace *work) {
    return work->choice.in_use;
}

// Trials included.
static inline int most_threads_of(const Workspace *work) {
    const ThreadChoice *choice = &work->choice;
    return choice->threads > choice->in_use ? choice->threads : choice->in_use;
}

// `old` (from here, or NULL) if it has room for `want` bytes, else zeroed memory in its place.
void *grown(void *old, size_t want);
void release(void *grown); // or NULL

// The thread's `normed`, with room for MAX_ROWS rows of `width`.
float *room_for_normed(ThreadScratch *mine, int width);

// The shared activations, large enough for a call of MAX_ROWS rows of this shape.
void make_room(Workspace *work, const Shape *shape, int adapters);
void room_for_adapters(Workspace *work);
#endif
