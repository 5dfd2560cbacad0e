// Drafts: the model's first layers once more, for rows with adapters and a carried residual beside
// the target model's own rows, and the tree of tokens that comes of it.
#include "draft.h"

#include "ngram.h"
#include "noise.h"
#include "norm.h"
#include "simd.h"

// One level of a draft: the carry, the layers of both kinds of rows up to the exit layer, the
// fusion, the block and the head, without returning to one thread in between.
typedef struct {
    Product carry, fuse_stream, fuse_carried, head; // linear NULL: none
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
    if (level->fuse_stream.linear) {
        run_product_in_place(work, &level->fuse_stream, id, threads);
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
static const float *put_aside(Workspace *work, const Stream *stream, const float *carried, int n,
                              float *p) {
    int d = stream->shape->hidden;
    size_t bytes = (size_t)n * d * sizeof(float);
    work->beside = grown(work->beside, &work->beside_size, MAX_ROWS * (size_t)d * sizeof(float));
    memcpy(work->beside, p, bytes);
    memcpy(p, carried, bytes);
    for (int r = 0; stream->norm_in && r < n; r++)
        mr_rms_norm(p + (size_t)r * d, stream->norm_in, d, stream->block_shape->eps);
    return work->beside;
}

// ids [n]: rows of the stream. Of the last `fresh` the target model runs a row, too: x is
// [fresh + n, d], its rows first, n + fresh <= MAX_ROWS. carried [n, d] or NULL. On return x holds
// the stream's outputs after the target rows' residuals at the exit layer; of a stream with merged
// layers the target rows leave their keys and values and stay as they enter layer 0.
static void draft_level(Workspace *work, const Stream *stream, const Surroundings *around,
                        const int64_t *ids, const Rows *rows, int fresh, const float *carried,
                        float *x) {
    int n = rows->count, d = stream->shape->hidden, total = n + fresh, old = n - fresh;
    float *p = x + (size_t)fresh * d;
    RowTable both;
    uint8_t adapted[MAX_ROWS];
    mr_embed(stream->table, ids, n, d, 1.0f, p);
    memcpy(x, p + (size_t)old * d, (size_t)fresh * d * sizeof(float));
    for (int r = 0; r < total; r++) {
        int from = r < fresh ? old + r : r - fresh; // they write what the stream's rows read
        set_row(&both, r, rows->seq[from], r < fresh ? rows->slot[from] : -1, rows->pos[from],
                rows->prefix[from], rows->tree[from]);
        adapted[r] = r >= fresh;
    }
    make_room(work, stream->shape, stream->adapters != NULL);
    Level level = {.norm_out = stream->norm_out};
    if (stream->carry.weight && carried)
        level.carry =
            (Product){&stream->carry, carried, stream->carry_norm, p, n, ADD, stream->carry_eps};
    if (stream->fuse_stream.weight)
        level.fuse_stream = (Product){
            &stream->fuse_stream, p, stream->fuse_stream_norm, p, n, STORE, stream->carry_eps};
    if (stream->fuse_carried.weight && carried)
        level.fuse_carried =
            (Product){&stream->fuse_carried, carried, stream->fuse_carried_norm, p, n, ADD,
                      stream->carry_eps};
    Rows all = rows_of(&both, 0, total, around->capacity);
    all.adapted = adapted;
    level.layers = (LayerCall){stream->shape,
                               stream->layers,
                               around->caches,
                               stream->adapters,
                               all,
                               x,
                               0,
                               stream->exit_layer,
                               0};
    if (stream->merged) {
        level.layers.layers = stream->merged;
        level.layers.adapters = NULL;
        level.layers.key_rows = fresh;
    }
    if (stream->block_shape) {
        make_room(work, stream->block_shape, 0);
        Rows own = *rows;
        own.adapted = NULL;
        own.capacity = around->block_capacity;
        level.block = (LayerCall){
            stream->block_shape, stream->block, around->block_cache, NULL, own, p, 0, 1, 0};
        if (stream->block->norm_beside)
            level.block.beside = put_aside(work, stream, carried, n, p);
    }
    if (around->head)
        level.head =
            (Product){around->head, p + (size_t)old * d, around->head_norm, around->logits, fresh,
                      STORE,        around->head_eps};
    run_parallel(work, run_level, &level);
}

// The same for any number of rows.
void mr_stream_step(Workspace *work, const Stream *stream, const LayerCache *caches,
                    const LayerCache *block_cache, int block_capacity, const Rows *rows, int fresh,
                    const int64_t *ids, const float *carried, float *x) {
    int n = rows->count, d = stream->shape->hidden, old = n - fresh;
    size_t row_bytes = (size_t)d * sizeof(float);
    Surroundings around = {.caches = caches,
                           .block_cache = block_cache,
                           .capacity = rows->capacity,
                           .block_capacity = block_capacity};
    if (n + fresh <= MAX_ROWS) {
        draft_level(work, stream, &around, ids, rows, fresh, carried, x);
        return;
    }
    for (int r = 0; r < old; r += MAX_ROWS) {
        int take = old - r < MAX_ROWS ? old - r : MAX_ROWS;
        Rows some = some_rows(rows, r, take);
        draft_level(work, stream, &around, ids + r, &some, 0,
                    carried ? carried + (size_t)r * d : NULL, x + (size_t)(fresh + r) * d);
    }
    float *both = fresh ? malloc(MAX_ROWS * row_bytes) : NULL;
    for (int r = 0; r < fresh; r += MAX_ROWS / 2) {
        int take = fresh - r < MAX_ROWS / 2 ? fresh - r : MAX_ROWS / 2;
        Rows some = some_rows(rows, old + r, take);
        draft_level(work, stream, &around, ids + old + r, &some, take,
                    carried ? carried + (size_t)(old + r) * d : NULL, both);
        memcpy(x + (size_t)r * d, both, take * row_bytes);
        memcpy(x + (size_t)(n + r) * d, both + (size_t)take * d, take * row_bytes);
    }
    free(both);
}

// ---- trees --------------------------------------------------------------------------------------

typedef struct {
    double path_probability, own; // own: before calibration
    int32_t parent, trusted;
    int64_t token;
} Candidate;

// Best first; equal ones keep their order (as Python's sort does).
static void sort_candidates(Candidate *c, int count) {
    for (int i = 1; i < count; i++) {
        Candidate one = c[i];
        int j = i;
        for (; j > 0 && c[j - 1].path_probability < one.path_probability; j--)
            c[j] = c[j - 1];
        c[j] = one;
    }
}

// A tree that grows. Node 0 is the last token.
typedef struct {
    SpeculativeStep *step;
    const DraftLimits *limits;
    int length, n; // committed tokens; nodes so far
    double path_probability[MAX_NODES + 1];
    int32_t depth[MAX_NODES + 1];
    int32_t levels[MAX_NODES + 1]; // depth without trusted nodes
    int32_t trusted;               // nodes that are
    int64_t bits[MAX_NODES + 1];   // ancestors and itself, as Rows.tree has them
    Candidate leaves[MAX_NODES * MAX_CANDIDATES];
    int leaf_count;
} Tree;

// Nodes that it may have: trusted ones come on top.
static int node_budget(const Tree *t) {
    int wanted = t->limits->nodes + t->trusted, capacity = node_capacity(t->limits);
    return wanted < capacity ? wanted : capacity;
}

// confidence: the stream's own probability of the token; -1: it is not the stream's. A trusted node
// is its parent's only child.
static int add_node(Tree *t, int parent, int64_t token, double confidence, int trusted) {
    int node = ++t->n;
    t->step->tokens[node - 1] = token;
    t->step->parents[node - 1] = parent;
    if (t->step->confidence)
        t->step->confidence[node - 1] = confidence;
    t->depth[node] = t->depth[parent] + 1;
    t->levels[node] = t->levels[parent] + !trusted;
    t->trusted += trusted;
    t->step->trusted |= (int64_t)trusted << (node - 1);
    t->bits[node] = t->bits[parent] | (int64_t)1 << (node - 1);
    return node;
}

static void set_node_row(const Tree *t, RowTable *table, int64_t *row_ids, int r, int node) {
    int length = t->length;
    set_row(table, r, t->step->sequence, length + node, length + t->depth[node], length + 1,
            t->bits[node]);
    row_ids[r] = t->step->tokens[node - 1];
}

// The share of tokens of such confidence that were accepted lately (acceptance_statistics.py,
// Calibration).
static double calibrated(const DraftLimits *limits, double confidence) {
    if (!limits->tries)
        return confidence;
    int bin = (int)(confidence * CONFIDENCE_BINS);
    bin = bin < CONFIDENCE_BINS - 1 ? bin : CONFIDENCE_BINS - 1;
    return (limits->hits[bin] + CALIBRATION_STRENGTH * confidence) /
           (limits->tries[bin] + CALIBRATION_STRENGTH);
}

// One body for all callers, so that none gets a score of other rounding.
static double __attribute__((noinline)) arla_score(const Arla *arla, float eps, int d,
                                                   const float *row) {
    float scale = inverse_rms(row, d, eps), logit = arla->out_bias;
    for (int i = 0; i < arla->latent; i++) {
        const float *weight = arla->weight + (size_t)i * d;
        fv sum = all(0.0f);
        for (int j = 0; j < d; j += LANES)
            sum += load_v(weight + j) * load_v(row + j);
        float y = scale * sum_v(sum) + arla->bias[i];
        logit += arla->out[i] * y / (1.0f + expf(-y));
    }
    return (double)(1.0f / (1.0f + expf(-logit)));
}

void mr_arla(const Arla *arla, float eps, int d, const float *x, int count, double *scores) {
    for (int n = 0; n < count; n++)
        scores[n] = arla_score(arla, eps, d, x + (size_t)n * d);
}

// Whether the best token of the stream's output, of this probability, is emitted unverified.
static int passes(Tree *t, const float *output, float probability) {
    const Trust *trust = t->limits->trust;
    double score = (double)probability;
    if (!trust)
        return 0;
    if (trust->arla) {
        const Shape *shape = t->step->stream->shape;
        score = arla_score(trust->arla, shape->eps, shape->hidden, output);
    }
    if (score < trust->least && score > t->step->refused)
        t->step->refused = score;
    return score >= trust->least;
}

// While the draft is a chain: tokens of the text's own continuation, where that is worth more than
// going on with the stream, whose best token is `best`. Adds them; returns how many.
static int continue_ngram(Tree *t, int64_t best, double own, int trusted) {
    const NgramLimits *ngram = &t->limits->ngram;
    SpeculativeStep *step = t->step;
    Text *text = &step->text;
    int64_t found[MAX_NODES];
    int n = t->n, budget = node_budget(t), following = 0;
    int most = (budget < t->limits->deepest ? budget : t->limits->deepest) - n;
    if (n)
        text->tokens[text->count + n - 1] = (int32_t)step->tokens[n - 1];
    int matched = mr_look_up(text, n, ngram->longest, most, found);
    int agrees = matched && found[0] == best;
    if (matched && most > 0 && (agrees || !trusted)) { // else nothing else can follow
        double first = agrees ? ngram->first_accepted[matched] : ngram->first_against[matched];
        following =
            worth_continuing(t->limits, trusted ? 1.0 : first, ngram->next_accepted[matched], most,
                             t->path_probability[n], trusted ? 1.0 : own, n);
    }
    if (!following)
        return 0;
    text->matched = matched;
    for (int j = 0; j < following; j++)
        add_node(t, t->n, found[j], -1.0, trusted && !j);
    return following;
}

// The candidates of `count` frontier nodes, whose logits are in `logits` and the stream's outputs,
// by node, in `outputs`: the best become nodes to draft from, the others leaves. Returns how many
// nodes; they are the new frontier.
static int grow(Tree *t, float *logits, const float *outputs, int32_t *frontier, int count) {
    SpeculativeStep *step = t->step;
    const DraftLimits *limits = t->limits;
    const int64_t *token_map = step->token_map;
    int vocab = step->draft_vocab, k = limits->top < vocab ? limits->top : vocab;
    int64_t best[MAX_CANDIDATES * MAX_CANDIDATES];
    float probs[MAX_CANDIDATES * MAX_CANDIDATES];
    Candidate found[MAX_CANDIDATES * MAX_CANDIDATES];
    int candidates = 0, continued = 0, last = t->n, d = step->stream->shape->hidden;
    int trusted[MAX_CANDIDATES];
    if (limits->noise) { // nodes of a level have one place
        Noise noise = noise_ahead(limits->noise, t->depth[frontier[0]]);
        add_noise(&noise, token_map, vocab, logits, count, step->draft_head->outputs);
    }
    mr_top(logits, count, vocab, step->draft_head->outputs, k, (float)limits->sharpness, best,
           probs);
    if (token_map)
        for (int i = 0; i < count * k; i++)
            best[i] = token_map[best[i]];

    if (!last) {
        step->best = best[0];
        step->best_probability = (double)probs[0];
    }
    for (int f = 0; f < count; f++)
        trusted[f] = passes(t, outputs + (size_t)frontier[f] * d, probs[f * k]);
    if (limits->ngram.longest && count == 1 && t->depth[last] == last)
        continued = continue_ngram(t, best[0], calibrated(limits, (double)probs[0]), trusted[0]);
    step->text.continued = continued;
    int agrees = continued && step->tokens[last] == best[0];
    for (int f = 0; f < count; f++) {
        int node = frontier[f];
        if (t->levels[node] >= limits->depth || t->depth[node] >= limits->deepest)
            continue;
        double least = 1.0;             // a candidate is worth no more than a likelier one
        int those = trusted[f] ? 1 : k; // a trusted one is the only one
        for (int j = agrees ? 1 : 0; j < those; j++) {
            double own = (double)probs[f * k + j], chance = calibrated(limits, own);
            if (!trusted[f])
                least = chance < least ? chance : least;
            double here = t->path_probability[node] * least;
            if (here < limits->verify_threshold[0])
                break;
            found[candidates++] = (Candidate){here, own, node, trusted[f], best[f * k + j]};
        }
    }
    sort_candidates(found, candidates);

    int width = continued ? 0 : limits->width, taken = 0; // what else may follow waits as leaves
    for (int c = 0; c < candidates; c++) {
        const Candidate *one = &found[c];
        int draft = taken < width && t->n < node_budget(t) &&
                    one->path_probability >= limits->draft_threshold[t->n] &&
                    one->own >= limits->min_probability &&
                    t->levels[one->parent] + !one->trusted < limits->depth &&
                    t->depth[one->parent] + 1 < limits->deepest;
        if (draft) {
            int node = add_node(t, one->parent, one->token, one->own, one->trusted);
            t->path_probability[node] = one->path_probability;
            frontier[taken++] = node;
        } else if (t->leaf_count < MAX_NODES * MAX_CANDIDATES) {
            t->leaves[t->leaf_count++] = *one;
        }
    }
    return taken;
}

int draft_tree(Workspace *work, SpeculativeStep *step, int length, int refresh, const int64_t *ids,
               const float *carried, const DraftLimits *limits) {
    const Stream *stream = step->stream;
    int d = stream->shape->hidden, rows = refresh + 1, nodes = node_capacity(limits);
    size_t row_bytes = (size_t)d * sizeof(float);
    float *outputs = step->scratch;               // [nodes + 1, d] of the stream, by node
    float *x = outputs + (size_t)(nodes + 1) * d; // [2 * (nodes + 1) + refresh + 2, d]
    float *carry = x + (size_t)(2 * (nodes + 1) + refresh + 2) * d; // [nodes + 1, d]
    Surroundings around = {.caches = step->caches,
                           .block_cache = step->block_cache,
                           .capacity = step->capacity,
                           .block_capacity = step->block_capacity,
                           .head = step->draft_head,
                           .head_norm = step->draft_norm,
                           .logits = carry + (size_t)(nodes + 1) * d,
                           .head_eps = stream->shape->eps};
    Tree tree;
    tree.step = step;
    tree.limits = limits;
    tree.length = length;
    tree.n = tree.leaf_count = tree.trusted = 0;
    tree.depth[0] = tree.levels[0] = 0;
    tree.bits[0] = 0;
    RowTable table;
    int64_t row_ids[MAX_NODES + 1];
    int32_t frontier[MAX_NODES + 1];
    int count = 1, ran = 1;

    for (int r = 0; r < rows; r++) {
        int slot = length - refresh + r;
        set_row(&table, r, step->sequence, slot, slot, slot + 1, 0);
    }
    int first = 0;
    if (rows + 1 > MAX_ROWS) { // the refreshed rows by themselves
        Surroundings silent = around;
        silent.head = NULL;
        for (int r = 0; r < refresh; r += MAX_ROWS) {
            int take = refresh - r < MAX_ROWS ? refresh - r : MAX_ROWS;
            Rows some = rows_of(&table, r, take, step->capacity);
            draft_level(work, stream, &silent, ids + r, &some, 0, carried + (size_t)r * d, x);
        }
        first = refresh;
    }
    Rows entering = rows_of(&table, first, rows - first, step->capacity);
    draft_level(work, stream, &around, ids + first, &entering, 1, carried + (size_t)first * d, x);
    memcpy(step->hidden, x, row_bytes);
    memcpy(outputs, x + (size_t)entering.count * d, row_bytes);
    tree.path_probability[0] = 1.0;
    frontier[0] = 0;

    while (count && limits->depth > 0) {
        count = grow(&tree, around.logits, outputs, frontier, count);
        if (!count)
            break;
        for (int f = 0; f < count; f++) {
            int node = frontier[f];
            set_node_row(&tree, &table, row_ids, f, node);
            const float *from = outputs + (size_t)step->parents[node - 1] * d;
            memcpy(carry + (size_t)f * d, from, row_bytes);
        }
        Rows level = rows_of(&table, 0, count, step->capacity);
        draft_level(work, stream, &around, row_ids, &level, count, carry, x);
        for (int f = 0; f < count; f++) {
            size_t node = (size_t)frontier[f];
            memcpy(step->hidden + node * d, x + (size_t)f * d, row_bytes);
            memcpy(outputs + node * d, x + (size_t)(count + f) * d, row_bytes);
        }
        ran = tree.n + 1;
    }
    step->text.drafted = ran - 1;

    sort_candidates(tree.leaves, tree.leaf_count);
    for (int c = 0; c < tree.leaf_count && tree.n < node_budget(&tree); c++) {
        const Candidate *leaf = &tree.leaves[c];
        if (!(leaf->path_probability >= limits->verify_threshold[tree.n]))
            break;
        add_node(&tree, leaf->parent, leaf->token, leaf->own, leaf->trusted);
    }
    int added = tree.n + 1 - ran;
    if (added > 0) { // leaves and continuations: the target model alone, up to the exit layer
        for (int f = 0; f < added; f++)
            set_node_row(&tree, &table, row_ids, f, ran + f);
        float *h = step->hidden + (size_t)ran * d;
        mr_embed(stream->table, row_ids, added, d, 1.0f, h);
        Rows leaves = rows_of(&table, 0, added, step->capacity);
        if (entering_layer(stream))
            mr_layers(work, stream->shape, stream->layers, step->caches, NULL, &leaves, h, 0,
                      stream->exit_layer);
    }
    return tree.n;
}
