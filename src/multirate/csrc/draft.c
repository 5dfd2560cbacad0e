// Draft trees: what a branch says of its nodes grows a tree of tokens, level by level.
#include "drafts.h"

#include "heads.h"
#include "texts.h"

typedef struct {
    double path_probability, own; // own: before calibration
    int32_t parent, unverified;
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
    int n; // nodes so far
    double path_probability[MAX_NODES + 1];
    int32_t depth[MAX_NODES + 1];
    int32_t levels[MAX_NODES + 1]; // depth, without unverified nodes
    int32_t unverified;            // nodes that are
    int64_t bits[MAX_NODES + 1];   // ancestors and itself, as Rows.tree has them
    Candidate leaves[MAX_NODES * MAX_CANDIDATES];
    int leaf_count;
    int32_t frontier[MAX_NODES + 1]; // nodes to draft from, [front], whose logits are rows …
    int front, at;                   // … [at, at + front) of the level's
    int ran;                         // nodes that the branch has run, the last token among them
} Tree;

// Nodes that it may have: unverified ones come on top.
static int node_budget(const Tree *t) {
    int wanted = t->step->limits->nodes + t->unverified, capacity = node_capacity(t->step->limits);
    return wanted < capacity ? wanted : capacity;
}

// confidence: the branch's own probability of the token; -1: it is not the branch's. An unverified
// node is its parent's only child.
static int add_node(Tree *t, int parent, int64_t token, double confidence, int unverified) {
    int node = ++t->n;
    t->step->tokens[node - 1] = token;
    t->step->parents[node - 1] = parent;
    if (t->step->confidence)
        t->step->confidence[node - 1] = confidence;
    t->depth[node] = t->depth[parent] + 1;
    t->levels[node] = t->levels[parent] + !unverified;
    t->unverified += unverified;
    t->step->unverified_nodes |= (int64_t)unverified << (node - 1);
    t->bits[node] = t->bits[parent] | (int64_t)1 << (node - 1);
    return node;
}

// The branch's output at a node.
static float *output_of(const SpeculativeStep *step, int node) {
    return step->scratch + (size_t)node * step->branch->shape->hidden;
}

// What is not a number would be any index: it counts as none.
static int confidence_bin(double confidence) {
    if (!(confidence > 0.0))
        return 0;
    return confidence < 1.0 ? (int)(confidence * CONFIDENCE_BINS) : CONFIDENCE_BINS - 1;
}

// The share of tokens of such confidence that were accepted lately (acceptance_statistics.py,
// Calibration).
static double calibrated(const DraftLimits *limits, double confidence) {
    if (!limits->tries)
        return confidence;
    int bin = confidence_bin(confidence);
    return (limits->hits[bin] + CALIBRATION_STRENGTH * confidence) /
           (limits->tries[bin] + CALIBRATION_STRENGTH);
}

static double score_of_output(const Scorer *scorer, float eps, int d, const float *row) {
    const Vectors *v = vectors();
    float scale = v->inverse_rms(row, d, eps), logit = scorer->out_bias;
    for (int i = 0; i < scorer->latent; i++) {
        float y = scale * v->dot(scorer->weight + (size_t)i * d, row, d) + scorer->bias[i];
        logit += scorer->out[i] * y * v->sigmoid(y);
    }
    return (double)v->sigmoid(logit);
}

void mr_scores(const Scorer *scorer, float eps, int d, const float *x, int count, double *scores) {
    for (int n = 0; n < count; n++)
        scores[n] = score_of_output(scorer, eps, d, x + (size_t)n * d);
}

// Whether the best token of the branch's output, of this probability, is emitted unverified.
static int passes(Tree *t, const float *output, float probability) {
    const Unverified *rule = t->step->limits->rule;
    double score = (double)probability;
    if (!rule)
        return 0;
    if (rule->scorer) {
        const Shape *shape = t->step->branch->shape;
        score = score_of_output(rule->scorer, shape->eps, shape->hidden, output);
    }
    if (score < rule->least && score > t->step->highest_rejected)
        t->step->highest_rejected = score;
    return score >= rule->least;
}

// While the draft is a chain: tokens of the text's own continuation, where that is worth more than
// going on with the branch, whose best token is `best`. Adds them; returns how many.
static int continue_ngram(Tree *t, int64_t best, double own, int unverified) {
    const NgramLimits *ngram = &t->step->limits->ngram;
    SpeculativeStep *step = t->step;
    Text *text = &step->text;
    int64_t found[MAX_NODES];
    int n = t->n, budget = node_budget(t), following = 0;
    int most = (budget < t->step->limits->deepest ? budget : t->step->limits->deepest) - n;
    if (n)
        text->tokens[text->count + n - 1] = (int32_t)step->tokens[n - 1];
    int matched = mr_look_up(text, n, ngram->longest, most, found);
    int agrees = matched && found[0] == best;
    if (matched && most > 0 && (agrees || !unverified)) { // else nothing else can follow
        double first = agrees ? ngram->first_accepted[matched] : ngram->first_against[matched];
        following = worth_continuing(t->step->limits, unverified ? 1.0 : first,
                                     ngram->next_accepted[matched], most, t->path_probability[n],
                                     unverified ? 1.0 : own, n);
    }
    if (!following)
        return 0;
    text->matched = matched;
    for (int j = 0; j < following; j++)
        add_node(t, t->n, found[j], -1.0, unverified && !j);
    return following;
}

// The candidates of the `count` nodes of the frontier, whose logits are in `logits`: the best
// become nodes to draft from, the others leaves. Returns how many nodes; they are the new frontier.
static int grow(Tree *t, float *logits, int count) {
    SpeculativeStep *step = t->step;
    const DraftLimits *limits = t->step->limits;
    const int64_t *token_map = step->token_map;
    int vocab = step->draft_vocab, k = limits->top < vocab ? limits->top : vocab;
    int64_t best[MAX_CANDIDATES * MAX_CANDIDATES];
    float probs[MAX_CANDIDATES * MAX_CANDIDATES];
    Candidate found[MAX_CANDIDATES * MAX_CANDIDATES];
    int32_t *frontier = t->frontier;
    int candidates = 0, continued = 0, last = t->n;
    int unverified[MAX_CANDIDATES];
    Noise noise = {0};
    if (limits->noise) { // nodes of a level have one place
        noise = noise_ahead(limits->noise, t->depth[frontier[0]]);
        vectors()->add_noise(&noise, token_map, vocab, logits, count, step->draft_head->outputs);
    }
    for (int f = 0; step->exact_head && f < count; f++)
        refine_likeliest(step->exact_head, output_of(step, frontier[f]), step->draft_norm,
                         step->branch->shape->eps, step->branch->shape->hidden, vocab,
                         limits->noise ? &noise : NULL, token_map,
                         logits + (size_t)f * step->draft_head->outputs);
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
        unverified[f] = passes(t, output_of(step, frontier[f]), probs[f * k]);
    if (limits->ngram.longest && count == 1 && t->depth[last] == last)
        continued = continue_ngram(t, best[0], calibrated(limits, (double)probs[0]), unverified[0]);
    step->text.continued = continued;
    int agrees = continued && step->tokens[last] == best[0];
    for (int f = 0; f < count; f++) {
        int node = frontier[f];
        if (t->levels[node] >= limits->depth || t->depth[node] >= limits->deepest)
            continue;
        double least = 1.0;                // a candidate is worth no more than a likelier one
        int those = unverified[f] ? 1 : k; // an unverified one is the only one
        for (int j = agrees ? 1 : 0; j < those; j++) {
            double own = (double)probs[f * k + j], chance = calibrated(limits, own);
            if (!unverified[f])
                least = chance < least ? chance : least;
            double here = t->path_probability[node] * least;
            if (here < limits->verify_threshold[0])
                break;
            found[candidates++] = (Candidate){here, own, node, unverified[f], best[f * k + j]};
        }
    }
    sort_candidates(found, candidates);

    int width = continued ? 0 : limits->width, taken = 0; // what else may follow waits as leaves
    for (int c = 0; c < candidates; c++) {
        const Candidate *one = &found[c];
        int draft = taken < width && t->n < node_budget(t) &&
                    one->path_probability >= limits->draft_threshold[t->n] &&
                    one->own >= limits->min_probability &&
                    t->levels[one->parent] + !one->unverified < limits->depth &&
                    t->depth[one->parent] + 1 < limits->deepest;
        if (draft) {
            int node = add_node(t, one->parent, one->token, one->own, one->unverified);
            t->path_probability[node] = one->path_probability;
            frontier[taken++] = node;
        } else if (t->leaf_count < MAX_NODES * MAX_CANDIDATES) {
            t->leaves[t->leaf_count++] = *one;
        }
    }
    return taken;
}

// A level of several sequences: its rows, and where the residuals of the fresh ones, which are the
// last, go.
typedef struct {
    RowTable table;
    int64_t ids[MAX_NODES + 1];
    float *hidden[MAX_NODES + 1], *output[MAX_NODES + 1];
    int count, fresh;
} Together;

// What the levels of a call work in: [MAX_ROWS, hidden] each, and a row of the head's outputs for
// every node that may be drafted from at once.
typedef struct {
    float *x, *carry, *logits;
} Levels;

static Levels room_for_levels(Workspace *work, SpeculativeStep *const *steps, int count) {
    const SpeculativeStep *step = steps[0];
    size_t rows = MAX_ROWS * (size_t)step->branch->shape->hidden,
           logits = (size_t)count * steps[0]->limits->width * step->draft_head->outputs;
    work->levels = grown(work->levels, (2 * rows + logits) * sizeof *work->levels);
    return (Levels){work->levels, work->levels + rows, work->levels + 2 * rows};
}

static float *hidden_of(const SpeculativeStep *step, int node) {
    return step->hidden + (size_t)node * step->branch->shape->hidden;
}

// Adds a row of a sequence; carried: what it carries. fresh: of the node whose residuals are kept.
static void add_row(Together *level, const Levels *room, const Tree *t, int slot, int pos,
                    int64_t bits, int64_t id, const float *carried, int fresh) {
    int r = level->count++, d = t->step->branch->shape->hidden;
    int committed = fresh < 0; // a row of the text
    set_row(&level->table, r, t->step->sequence, slot, pos,
            committed ? slot + 1 : t->step->length + 1, bits);
    level->ids[r] = id;
    memcpy(room->carry + (size_t)r * d, carried, (size_t)d * sizeof(float));
    if (committed)
        return;
    level->hidden[level->fresh] = hidden_of(t->step, fresh);
    level->output[level->fresh++] = output_of(t->step, fresh);
}

// logits: of the fresh rows.
static void run_together(Workspace *work, const SpeculativeStep *step, Together *level,
                         const Levels *room, float *logits) {
    int d = step->branch->shape->hidden;
    size_t bytes = (size_t)d * sizeof(float);
    Surroundings around = {.caches = step->caches,
                           .block_cache = step->block_cache,
                           .capacity = step->capacity,
                           .block_capacity = step->block_capacity,
                           .head = step->draft_head,
                           .head_norm = step->draft_norm,
                           .logits = logits,
                           .head_eps = step->branch->shape->eps};
    Rows rows = rows_of(&level->table, 0, level->count, step->capacity);
    draft_level(work, step->branch, &around, level->ids, &rows, level->fresh, room->carry, room->x);
    for (int f = 0; f < level->fresh; f++) {
        memcpy(level->hidden[f], room->x + (size_t)f * d, bytes);
        memcpy(level->output[f], room->x + (size_t)(level->count + f) * d, bytes);
    }
    level->count = level->fresh = 0;
}

// The backfilled and the last tokens of trees [begin, end).
static void run_last_tokens(Workspace *work, const Tree *trees, int begin, int end,
                            const Levels *room) {
    const SpeculativeStep *first = trees->step;
    int d = first->branch->shape->hidden;
    Together level;
    level.count = level.fresh = 0;
    for (int s = begin; s < end; s++) {
        const SpeculativeStep *step = trees[s].step;
        for (int r = 0; r < step->backfill; r++) {
            int slot = step->length - step->backfill + r, id = step->first + r;
            add_row(&level, room, &trees[s], slot, slot, 0, step->ids[id],
                    step->carried + (size_t)id * d, -1);
        }
    }
    for (int s = begin; s < end; s++) {
        const SpeculativeStep *step = trees[s].step;
        int id = step->first + step->backfill;
        add_row(&level, room, &trees[s], step->length, step->length, 0, step->ids[id],
                step->carried + (size_t)id * d, 0);
    }
    run_together(work, first, &level, room,
                 room->logits + (size_t)begin * first->draft_head->outputs);
}

// The first level of all sequences: as many of them in a pass as fit.
static void begin_trees(Workspace *work, SpeculativeStep *const *steps, Tree *trees, int count,
                        const Levels *room) {
    int first = 0, rows = 0;
    for (int s = 0; s < count; s++) {
        Tree *t = &trees[s];
        t->step = steps[s];
        t->n = t->leaf_count = t->unverified = 0;
        t->depth[0] = t->levels[0] = 0;
        t->bits[0] = 0;
        t->path_probability[0] = 1.0;
        t->frontier[0] = 0;
        t->front = t->ran = 1;
        t->at = s;
        int taken = steps[s]->backfill + 2;
        if (rows + taken > MAX_ROWS) {
            run_last_tokens(work, trees, first, s, room);
            first = s;
            rows = 0;
        }
        rows += taken;
    }
    run_last_tokens(work, trees, first, count, room);
}

// The nodes to draft from, of all sequences: as many in a pass as fit. Returns whether there were
// any.
static int run_frontiers(Workspace *work, Tree *trees, int count, const Levels *room) {
    const SpeculativeStep *step = trees->step;
    Together level;
    int rows = 0, begin = 0; // of the level's; those that are in passes
    level.count = level.fresh = 0;
    for (int s = 0; s < count; s++) {
        Tree *t = &trees[s];
        t->at = rows;
        for (int f = 0; f < t->front; f++, rows++) {
            int node = t->frontier[f], parent = t->step->parents[node - 1];
            if (level.count == MAX_ROWS / 2) {
                run_together(work, step, &level, room,
                             room->logits + (size_t)begin * step->draft_head->outputs);
                begin = rows;
            }
            add_row(&level, room, t, t->step->length + node, t->step->length + t->depth[node],
                    t->bits[node], t->step->tokens[node - 1], output_of(t->step, parent), node);
        }
        if (t->front)
            t->ran = t->n + 1;
    }
    if (level.count)
        run_together(work, step, &level, room,
                     room->logits + (size_t)begin * step->draft_head->outputs);
    return rows > 0;
}

// The leaves that are worth verifying; those and continuations have not run yet.
static void add_leaves(Tree *t) {
    const DraftLimits *limits = t->step->limits;
    sort_candidates(t->leaves, t->leaf_count);
    for (int c = 0; c < t->leaf_count && t->n < node_budget(t); c++) {
        const Candidate *leaf = &t->leaves[c];
        if (!(leaf->path_probability >= limits->verify_threshold[t->n]))
            break;
        add_node(t, leaf->parent, leaf->token, leaf->own, leaf->unverified);
    }
    t->step->drafted = t->n;
    t->step->text.drafted = t->ran - 1;
}

// `rows` rows of the target model, in room->x, through its first `layers` layers: to[r].
static void run_first_layers(Workspace *work, const SpeculativeStep *step, const RowTable *table,
                             int rows, int layers, const Levels *room, float *const *to) {
    size_t d = (size_t)step->branch->shape->hidden;
    Rows those = rows_of(table, 0, rows, step->capacity);
    mr_layers(work, step->branch->shape, step->branch->layers, step->caches, NULL, &those, room->x,
              0, layers);
    for (int r = 0; r < rows; r++)
        memcpy(to[r], room->x + r * d, d * sizeof(float));
}

// Nodes that the branch has not run: the target model alone, up to the layer that verification
// enters.
static void run_leaves(Workspace *work, const Tree *trees, int count, const Levels *room) {
    const SpeculativeStep *step = trees->step;
    const Branch *branch = step->branch;
    int d = branch->shape->hidden, rows = 0, layers = entering_layer(branch);
    RowTable table;
    float *to[MAX_ROWS];
    for (int s = 0; s < count; s++) {
        const Tree *t = &trees[s];
        for (int node = t->ran; node <= t->n; node++) {
            float *x = hidden_of(t->step, node);
            embed(branch, t->step->tokens + node - 1, 1, x);
            if (!layers)
                continue;
            if (rows == MAX_ROWS) {
                run_first_layers(work, step, &table, rows, layers, room, to);
                rows = 0;
            }
            set_row(&table, rows, t->step->sequence, t->step->length + node,
                    t->step->length + t->depth[node], t->step->length + 1, t->bits[node]);
            memcpy(room->x + (size_t)rows * d, x, (size_t)d * sizeof(float));
            to[rows++] = x;
        }
    }
    if (rows)
        run_first_layers(work, step, &table, rows, layers, room, to);
}

void draft_trees(Workspace *work, SpeculativeStep *const *steps, int count) {
    const SpeculativeStep *first = steps[0];
    Levels room = room_for_levels(work, steps, count);
    work->trees = grown(work->trees, (size_t)count * sizeof(Tree));
    Tree *trees = work->trees;
    begin_trees(work, steps, trees, count, &room);
    for (int s = 0; s < count; s++)
        if (steps[s]->limits->depth <= 0)
            trees[s].front = 0;
    do {
        for (int s = 0; s < count; s++) {
            Tree *t = &trees[s];
            if (t->front)
                t->front =
                    grow(t, room.logits + (size_t)t->at * first->draft_head->outputs, t->front);
        }
    } while (run_frontiers(work, trees, count, &room));
    for (int s = 0; s < count; s++)
        add_leaves(&trees[s]);
    run_leaves(work, trees, count, &room);
}
