// The memory that a kernel call works in. Each decoder owns one, so that calls of different decoders may run side by
// side; calls with the same workspace must follow one another.
#ifndef MULTIRATE_WORKSPACE_H
#define MULTIRATE_WORKSPACE_H
#include <stdatomic.h>
#include "kernel.h"

#define MAX_THREADS 64

typedef struct AttentionScratch AttentionScratch;

// One thread's own part. Fixed-point products (fixed_point.h) keep their copy of the rows in `fixed` and `rest`.
typedef struct {
    element *normed;
    AttentionScratch *attention;
    int16_t *fixed;
    float *rest;
    size_t normed_size, fixed_size, rest_size;
} ThreadScratch;

typedef struct Workspace {
    // Written by every thread at every barrier: on a cache line of their own.
    _Alignas(64) atomic_uint barrier_count;
    atomic_uint barrier_phase;
    _Alignas(64) int threads;
    // Shared by the threads of a call; grown on demand, never shrunk.
    float *qkv, *low, *drawn;
    element *heads, *activation, *low_in;
    int32_t *uses;
    size_t qkv_size, low_size, drawn_size, heads_size, activation_size, low_in_size, uses_size;
    ThreadScratch own[MAX_THREADS];
} Workspace;

// `old` if it has room for `want` bytes, else zeroed memory in its place.
static void *grown(void *old, size_t *have, size_t want) {
    if (*have >= want) return old;
    free(old);
    *have = want;
    void *p = NULL;
    if (posix_memalign(&p, 64, want)) abort();
    memset(p, 0, want);
    return p;
}
#endif
