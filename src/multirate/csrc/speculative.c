// Rounds: draft, verify, accept, and move the accepted path into place. It is one call for
// sequences whose tokens are the argmax of the logits, with or without noise; for others the caller
// chooses the tokens between two calls.
#include "drafts.h"
#include "heads.h"

// What verification leaves of rows: [rows, hidden], [rows, taps, hidden], [rows, head->outputs].
typedef struct {
    float *hidden, *features, *logits;
    int first;    // which row of the last screen_rows the first is
    int screened; // logits are upper bounds
} Verified;

static Verified all_rows(const SpeculativeStep *step) {
    return (Verified){step->hidden, step->features, step->scratch, 0, 0};
}

// The target model's token after a node `ahead` levels below the last token, by its row of logits;
// -1: it is drawn, and the logits are not finite.
static int64_t target_token(Workspace *work, const SpeculativeStep *step, const Verified *rows,
                            int node, int ahead) {
    int vocab = step->branch->shape->vocab, stride = step->head->outputs;
    float *logits = rows->logits + (size_t)node * stride;
    Noise noise = {0};
    if (step->noise)
        noise = noise_ahead(step->noise, ahead);
    if (rows->screened)
        return screened_token(work, step->head, step->screen, rows->first + node, logits, vocab,
                              step->noise ? &noise : NULL);
    if (!step->noise)
        return vectors()->argmax(logits, vocab);
    int64_t token;
    mr_noisy_argmax(logits, 1, vocab, stride, &noise, &token);
    return token;
}

// The first child of a node with this token, or, token -1, its unverified child; drafted + 1: none.
static int child_of(const SpeculativeStep *step, int node, int64_t token) {
    int child = node + 1;
    for (; child <= step->drafted; child++) {
        int is_it = token < 0 ? step->unverified_nodes >> (child - 1) & 1
                              : step->tokens[child - 1] == token;
        if (step->parents[child - 1] == node && is_it)
            break;
    }
    return child;
}

// Down from the last token as long as the target model's own token is a child, or a child is
// unverified (decoding/speculate/acceptance.py, Descent): only rows that are reached are read.
// Fills path, which begins with node 0, and what is emitted after each of its nodes; returns their
// number, or -1 as target_token. A child comes after its parent.
static int accepted_path(Workspace *work, SpeculativeStep *step, const Verified *rows,
                         int64_t *tokens, int32_t *path) {
    int length = 0;
    for (int node = 0; node <= step->drafted; length++) {
        path[length] = node;
        int child = child_of(step, node, -1);
        if (child <= step->drafted) {
            tokens[length] = step->tokens[child - 1];
            step->unverified_tokens |= (int64_t)1 << length;
        } else {
            tokens[length] = target_token(work, step, rows, node, length);
            if (tokens[length] < 0)
                return -1;
            child = child_of(step, node, tokens[length]);
        }
        node = child;
    }
    return length;
}

// Without the branch: what must follow, or what the text's last tokens were followed by before.
static int draft_from_text(SpeculativeStep *step) {
    const Branch *branch = step->branch;
    const DraftLimits *limits = step->limits;
    Text *text = &step->text;
    int most = limits->deepest, d = branch->shape->hidden;
    if (step->forced)
        memcpy(step->tokens, step->forced, (size_t)most * sizeof *step->forced);
    else
        text->matched = mr_look_up(text, 0, limits->ngram.longest, most, step->tokens);
    int n = step->forced || text->matched ? most : 0;
    for (int i = 0; i < n; i++) {
        step->parents[i] = i;
        if (step->confidence)
            step->confidence[i] = -1.0;
    }
    text->continued = n;
    embed(branch, step->ids + step->first + step->backfill, 1, step->hidden);
    embed(branch, step->tokens, n, step->hidden + d);
    return n;
}

// The rows that verify a draft; returns how many levels it has.
static int verification_rows(const SpeculativeStep *step, RowTable *table) {
    int32_t depth[MAX_NODES + 1];
    int length = step->length, nodes = step->drafted, chain = 1, levels = 0;
    set_row(table, 0, step->sequence, length, length, length + 1, 0);
    depth[0] = 0;
    for (int node = 1; node <= nodes; node++) {
        int parent = step->parents[node - 1];
        chain &= parent == node - 1;
        depth[node] = depth[parent] + 1;
        if (depth[node] > levels)
            levels = depth[node];
        set_row(table, node, step->sequence, length + node, length + depth[node], length + 1,
                table->tree[parent] | (int64_t)1 << (node - 1));
    }
    if (chain) // plain causal rows: no path to gather
        for (int node = 0; node <= nodes; node++) {
            table->prefix[node] = table->slot[node] + 1;
            table->tree[node] = 0;
        }
    return levels;
}

// Drafts into the steps; those whose branch drafts come first. Returns the layer that the rows
// enter which verify them.
static int draft(Workspace *work, SpeculativeStep *const *steps, int count) {
    const Branch *branch = steps[0]->branch;
    double begin = seconds_now();
    int drafting = 0;
    for (int s = 0; s < count; s++) {
        SpeculativeStep *step = steps[s];
        Text *text = &step->text;
        text->drafted = text->continued = text->matched = 0;
        step->best = -1;
        step->unverified_nodes = step->unverified_tokens = 0;
        drafting += step->draft_head && step->limits->own;
    }
    if (drafting)
        draft_trees(work, steps, drafting);
    int start = drafting ? entering_layer(branch) : 0;
    for (int s = drafting; s < count; s++) {
        SpeculativeStep *step = steps[s];
        RowTable table;
        step->drafted = draft_from_text(step);
        if (!start)
            continue;
        verification_rows(step, &table);
        Rows rows = rows_of(&table, 0, step->drafted + 1, step->capacity);
        mr_layers(work, branch->shape, branch->layers, step->caches, NULL, &rows, step->hidden, 0,
                  start);
    }
    double taken = seconds_now() - begin;
    for (int s = 0; s < count; s++)
        steps[s]->draft_seconds = taken;
    work->spent[SPENT_DRAFT] += taken;
    return start;
}

void mr_speculative_accept(SpeculativeStep *step, const int32_t *path, const int64_t *tokens,
                           int count) {
    const Shape *shape = step->branch->shape;
    Text *text = &step->text;
    int32_t from[MAX_NODES + 1], to[MAX_NODES + 1];
    int d = shape->hidden;
    for (int i = 0; i < count; i++) {
        int node = path[i];
        from[i] = step->length + node;
        to[i] = step->length + i;
        step->ids[i] = tokens[i];
        if (text->tokens)
            text->tokens[text->count++] = (int32_t)tokens[i];
        if (step->carried)
            memcpy(step->carried + (size_t)i * d, step->hidden + (size_t)node * d,
                   (size_t)d * sizeof(float));
    }
    if (path[count - 1] != count - 1)
        mr_move(step->caches, step->layers, shape->kv_heads, shape->head_dim, step->capacity,
                step->sequence, from, to, count);
}

// to.hidden: residuals that enter layer `start` → what is carried of the rows; to.logits: what the
// model says after each, or, with a screen, upper bounds of that.
static void run_rows(Workspace *work, const SpeculativeStep *step, const Screen *screen,
                     const RowTable *table, int count, int start, Verified to) {
    const Branch *branch = step->branch;
    const Shape *shape = branch->shape;
    double begin = seconds_now();
    run_all_rows(work, (LayerCall){.shape = shape,
                                   .layers = branch->layers,
                                   .caches = step->caches,
                                   .rows = rows_of(table, 0, count, step->capacity),
                                   .x = to.hidden,
                                   .start = start,
                                   .stop = step->layers,
                                   .taps = branch->taps,
                                   .noted = to.features,
                                   .tap_count = branch->tap_count});
    double layers_done = seconds_now();
    work->spent[SPENT_OWN] += layers_done - begin;
    if (screen)
        screen_rows(work, step->head, screen, to.hidden, step->norm, shape->eps, count,
                    shape->vocab, to.logits);
    else
        mr_linear(work, step->head, to.hidden, step->norm, shape->eps, count, to.logits, 0);
    double head_done = seconds_now();
    work->spent[SPENT_HEAD] += head_done - layers_done;
    if (branch->tap_count) // takes the place of h_L, or is added to it
        mr_linear(work, &branch->features, to.features, NULL, 0.0f, count, to.hidden,
                  branch->features_added);
    work->spent[SPENT_DRAFT] += seconds_now() - head_done;
}

// What the logits of run_rows emit; the accepted path, from node 0 on, goes to path. Sets and
// returns step->emitted.
static int emit(Workspace *work, SpeculativeStep *step, const Verified *rows, int32_t *path) {
    int64_t tokens[MAX_NODES + 1];
    double begin = seconds_now();
    step->emitted = accepted_path(work, step, rows, tokens, path);
    work->spent[SPENT_HEAD] += seconds_now() - begin;
    if (step->emitted > 0)
        mr_speculative_accept(step, path, tokens, step->emitted);
    return step->emitted;
}

// Where verification leaves its rows: one sequence's in its own buffers, several ones' in room for
// MAX_NODES + 1 rows.
static Verified room_for_verified(Workspace *work, const SpeculativeStep *step, int sequences) {
    if (sequences == 1)
        return all_rows(step);
    size_t rows = MAX_NODES + 1, d = (size_t)step->branch->shape->hidden,
           taps = (size_t)step->branch->tap_count;
    work->verified = grown(work->verified, rows * (d + taps * d + (size_t)step->head->outputs) *
                                               sizeof *work->verified);
    float *features = work->verified + rows * d;
    return (Verified){work->verified, features, features + rows * taps * d, 0, 0};
}

// Verifies the drafts of steps [first, last) in one pass over `rows` rows, and accepts those whose
// tokens it is to choose. Returns 0 where logits are not finite, and then emits nothing more.
static int verify_together(Workspace *work, SpeculativeStep *const *steps, int first, int last,
                           int start, int rows, const RowTable *table) {
    const SpeculativeStep *step = steps[first];
    size_t d = (size_t)step->branch->shape->hidden;
    Verified all = room_for_verified(work, step, last - first);
    size_t outputs = (size_t)step->head->outputs;
    float *x = all.hidden;
    all.screened = step->screen != NULL;
    for (int s = first; s < last; s++) {
        size_t count = (size_t)steps[s]->drafted + 1;
        memmove(x, steps[s]->hidden, count * d * sizeof(float));
        x += count * d;
        all.screened &= steps[s]->chooses;
    }
    run_rows(work, step, all.screened ? step->screen : NULL, table, rows, start, all);
    for (int s = first; s < last; s++) {
        SpeculativeStep *one = steps[s];
        size_t count = (size_t)one->drafted + 1;
        int32_t path[MAX_NODES + 1];
        memmove(one->hidden, all.hidden, count * d * sizeof(float));
        if (!one->chooses)
            memmove(one->scratch, all.logits, count * outputs * sizeof(float));
        else if (emit(work, one, &all, path) < 0)
            return 0;
        all.hidden += count * d;
        all.logits += count * outputs;
        all.first += (int)count;
    }
    return 1;
}

int mr_speculative_steps(Workspace *work, SpeculativeStep *const *steps, int count) {
    int start = draft(work, steps, count), begin = 0, rows = 0;
    RowTable table, one;
    for (int s = 0; s < count; s++) {
        SpeculativeStep *step = steps[s];
        step->levels = verification_rows(step, &one);
        if (rows + step->drafted + 1 > MAX_NODES + 1) {
            if (!verify_together(work, steps, begin, s, start, rows, &table))
                return 0;
            begin = s;
            rows = 0;
        }
        for (int n = 0; n <= step->drafted; n++, rows++)
            set_row(&table, rows, one.seq[n], one.slot[n], one.pos[n], one.prefix[n], one.tree[n]);
    }
    return verify_together(work, steps, begin, count, start, rows, &table);
}

int mr_verify_draft(Workspace *work, SpeculativeStep *step, int nodes, int start, int k,
                    int64_t *best, int32_t *path) {
    const Branch *branch = step->branch;
    int d = branch->shape->hidden;
    RowTable table;
    Verified rows = all_rows(step);
    rows.screened = step->screen != NULL;
    step->drafted = nodes;
    step->unverified_nodes = step->unverified_tokens = 0;
    step->levels = verification_rows(step, &table);
    if (!start) {
        embed(branch, step->ids, 1, step->hidden);
        embed(branch, step->tokens, nodes, step->hidden + d);
    }
    run_rows(work, step, step->screen, &table, nodes + 1, start, rows);
    double begin = seconds_now();
    if (k && step->screen)
        screened_best(work, step->head, step->screen, nodes + 1, step->scratch,
                      branch->shape->vocab, k, best);
    else if (k)
        mr_best(work, step->scratch, nodes + 1, branch->shape->vocab, step->head->outputs, k, best);
    work->spent[SPENT_DRAFT] += seconds_now() - begin; // what drafts are made of
    return emit(work, step, &rows, path);
}
