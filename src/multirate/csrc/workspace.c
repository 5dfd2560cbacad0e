#include "workspace.h"

#include <time.h>

double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void mr_spent(const Workspace *work, double *to) {
    memcpy(to, work->spent, sizeof work->spent);
}

// The size lies a cache line before the memory.
#define LINE 64

void release(void *grown) {
    if (grown)
        free((char *)grown - LINE);
}

void *grown(void *old, size_t want) {
    if (old && *(size_t *)((char *)old - LINE) >= want)
        return old;
    release(old);
    void *made = NULL;
    if (posix_memalign(&made, LINE, LINE + want))
        abort();
    memset(made, 0, LINE + want);
    *(size_t *)made = want;
    return (char *)made + LINE;
}

float *room_for_normed(ThreadScratch *mine, int width) {
    size_t bytes = (size_t)MAX_ROWS * width * sizeof(float);
    return mine->normed = grown(mine->normed, bytes);
}

void room_for_adapters(Workspace *work) {
    work->low = grown(work->low, MAX_ROWS * MAX_RANK * sizeof(float));
    work->low_in = grown(work->low_in, MAX_ROWS * MAX_RANK * sizeof(float));
}

void make_room(Workspace *work, const Shape *shape, int adapters) {
    int width = (shape->heads + 2 * shape->kv_heads) * shape->head_dim;
    int widths[] = {2 * shape->intermediate, shape->hidden};
    for (int i = 0; i < 2; i++)
        width = width > widths[i] ? width : widths[i];
    size_t wide = MAX_ROWS * (size_t)width;
    size_t heads = MAX_ROWS * (size_t)shape->heads * shape->head_dim;
    size_t activation = MAX_ROWS * (size_t)shape->intermediate;
    work->qkv = grown(work->qkv, wide * sizeof(float));
    work->heads = grown(work->heads, heads * sizeof(float));
    work->activation = grown(work->activation, activation * sizeof(float));
    if (adapters)
        room_for_adapters(work);
}

void mr_workspace_set_threads(Workspace *work, int threads, int fixed) {
    int most = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    open_thread_choice(&work->choice, most, fixed);
}

// A workspace for calls on at most `threads` threads; NULL: there is no memory.
Workspace *mr_workspace_open(int threads) {
    void *made = NULL;
    if (posix_memalign(&made, 64, sizeof(Workspace)))
        return NULL;
    memset(made, 0, sizeof(Workspace));
    mr_workspace_set_threads(made, threads, 0);
    return made;
}

int mr_workspace_threads(const Workspace *work) {
    return threads_of(work);
}

void mr_note_call(Workspace *work, uint64_t kind, double seconds, double now) {
    note_call(&work->choice, kind, seconds, now);
}

int mr_next_threads(Workspace *work, uint64_t kind) {
    return threads_for(&work->choice, kind);
}

// In a process made by fork(): another thread may have been using it, and what it left is unknown.
// Begins anew.
void mr_workspace_after_fork(Workspace *work) {
    int threads = work->choice.most, fixed = work->choice.fixed;
    memset(work, 0, sizeof *work);
    mr_workspace_set_threads(work, threads, fixed);
}

void mr_workspace_close(Workspace *work) {
    if (!work)
        return;
    void *shared[] = {work->qkv,    work->low,   work->neurons, work->heads,    work->activation,
                      work->low_in, work->uses,  work->beside,  work->screened, work->highest,
                      work->reach,  work->trees, work->levels,  work->verified};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        release(shared[i]);
    for (int id = 0; id < MAX_THREADS; id++) {
        ThreadScratch *mine = &work->own[id];
        void *own[] = {mine->normed,
                       mine->fixed,
                       mine->bytes,
                       mine->rest,
                       mine->outliers,
                       mine->attention.scores,
                       mine->attention.weights,
                       mine->attention.queries,
                       mine->attention.paths};
        for (size_t i = 0; i < sizeof own / sizeof *own; i++)
            release(own[i]);
        mr_workspace_close(work->apart[id]);
    }
    free(work);
}
