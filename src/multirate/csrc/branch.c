// A level of a draft: the model's first layers run adapter rows with a carried residual beside the
// target rows.
#include "drafts.h"

// One level of a draft: the carry, the layers of both kinds of rows up to the exit layer, the
// fusion, the block and the head, without returning to one thread in between.
typedef struct {
    Product carry, fuse_branch, fuse_carried, head; // linear NULL: none
    LayerCall layers, block;                        // layers NULL: none
    const float *norm_out;
} Level;

static void run_level(Workspace *work, void *context, int id, int threads) {
    Level *level = context;
    if (level->carry.linear) {
        run_product(work, &level->carry, id, threads);
        barrier(work, threads);
    }
    run_layers(work, &level->layers, id, threads);
    if (level->fuse_branch.linear) {
        run_product_in_place(work, &level->fuse_branch, id, threads);
        // each thread adds to the outputs that it has just written
        if (level->fuse_carried.linear)
            run_product(work, &level->fuse_carried, id, threads);
        barrier(work, threads);
    }
    if (level->block.layers)
        run_layers(work, &level->block, id, threads);
    if (level->norm_out) {
        const LayerCall *block = &level->block;
        int d = block->shape->hidden;
        for (int r = 0; !id && r < block->rows.count; r++)
            mr_rms_norm(block->x + (size_t)r * d, level->norm_out, d, block->shape->eps);
        barrier(work, threads);
    }
    if (level->head.linear)
        run_product(work, &level->head, id, threads);
}

// The embeddings p [n, d] move aside for a block that reads them beside its x, which the carried
// residuals are.
static const float *put_aside(Workspace *work, const Branch *branch, const float *carried, int n,
                              float *p) {
    int d = branch->shape->hidden;
    size_t bytes = (size_t)n * d * sizeof(float);
    work->beside = grown(work->beside, MAX_ROWS * (size_t)d * sizeof(float));
    memcpy(work->beside, p, bytes);
    memcpy(p, carried, bytes);
    for (int r = 0; branch->norm_in && r < n; r++)
        mr_rms_norm(p + (size_t)r * d, branch->norm_in, d, branch->block_shape->eps);
    return work->beside;
}

void draft_level(Workspace *work, const Branch *branch, const Surroundings *around,
                 const int64_t *ids, const Rows *rows, int fresh, const float *carried, float *x) {
    int n = rows->count, d = branch->shape->hidden, total = n + fresh, old = n - fresh;
    float *p = x + (size_t)fresh * d;
    RowTable both;
    uint8_t adapted[MAX_ROWS];
    embed(branch, ids, n, p);
    memcpy(x, p + (size_t)old * d, (size_t)fresh * d * sizeof(float));
    for (int r = 0; r < total; r++) {
        int from = r < fresh ? old + r : r - fresh; // they write what the branch's rows read
        set_row(&both, r, rows->seq[from], r < fresh ? rows->slot[from] : -1, rows->pos[from],
                rows->prefix[from], rows->tree[from]);
        adapted[r] = r >= fresh;
    }
    make_room(work, branch->shape, branch->adapters != NULL);
    Level level = {.norm_out = branch->norm_out};
    if (branch->carry.weight && carried)
        level.carry =
            (Product){&branch->carry, carried, branch->carry_norm, p, n, ADD, branch->carry_eps};
    if (branch->fuse_branch.weight)
        level.fuse_branch = (Product){
            &branch->fuse_branch, p, branch->fuse_branch_norm, p, n, STORE, branch->carry_eps};
    if (branch->fuse_carried.weight && carried)
        level.fuse_carried =
            (Product){&branch->fuse_carried, carried, branch->fuse_carried_norm, p, n, ADD,
                      branch->carry_eps};
    Rows all = rows_of(&both, 0, total, around->capacity);
    all.adapted = adapted;
    level.layers = (LayerCall){.shape = branch->shape,
                               .layers = branch->layers,
                               .caches = around->caches,
                               .adapters = branch->adapters,
                               .rows = all,
                               .x = x,
                               .stop = branch->exit_layer};
    if (branch->merged) {
        level.layers.layers = branch->merged;
        level.layers.adapters = NULL;
        level.layers.key_rows = fresh;
    }
    if (branch->block_shape) {
        make_room(work, branch->block_shape, 0);
        Rows own = *rows;
        own.adapted = NULL;
        own.capacity = around->block_capacity;
        // of a token that is committed already the block's keys and values are all that is read
        level.block = (LayerCall){.shape = branch->block_shape,
                                  .layers = branch->block,
                                  .caches = around->block_cache,
                                  .rows = own,
                                  .x = p,
                                  .stop = 1,
                                  .key_rows = old};
        if (branch->block->norm_beside)
            level.block.beside = put_aside(work, branch, carried, n, p);
    }
    if (around->head)
        level.head =
            (Product){around->head, p + (size_t)old * d, around->head_norm, around->logits, fresh,
                      STORE,        around->head_eps};
    run_parallel(work, run_level, &level, around->head, n * MAX_ROWS + fresh);
}

// The same for any number of rows.
void mr_branch_step(Workspace *work, const Branch *branch, const LayerCache *caches,
                    const LayerCache *block_cache, int block_capacity, const Rows *rows, int fresh,
                    const int64_t *ids, const float *carried, float *x) {
    int n = rows->count, d = branch->shape->hidden, old = n - fresh;
    size_t row_bytes = (size_t)d * sizeof(float);
    Surroundings around = {.caches = caches,
                           .block_cache = block_cache,
                           .capacity = rows->capacity,
                           .block_capacity = block_capacity};
    if (n + fresh <= MAX_ROWS) {
        draft_level(work, branch, &around, ids, rows, fresh, carried, x);
        return;
    }
    for (int r = 0; r < old; r += MAX_ROWS) {
        int take = old - r < MAX_ROWS ? old - r : MAX_ROWS;
        Rows some = some_rows(rows, r, take);
        draft_level(work, branch, &around, ids + r, &some, 0,
                    carried ? carried + (size_t)r * d : NULL, x + (size_t)(fresh + r) * d);
    }
    float *both = fresh ? malloc(MAX_ROWS * row_bytes) : NULL;
    for (int r = 0; r < fresh; r += MAX_ROWS / 2) {
        int take = fresh - r < MAX_ROWS / 2 ? fresh - r : MAX_ROWS / 2;
        Rows some = some_rows(rows, old + r, take);
        draft_level(work, branch, &around, ids + old + r, &some, take,
                    carried ? carried + (size_t)(old + r) * d : NULL, both);
        memcpy(x + (size_t)r * d, both, take * row_bytes);
        memcpy(x + (size_t)(n + r) * d, both + (size_t)take * d, take * row_bytes);
    }
    free(both);
}
