// A round of one sequence: draft, verify, accept, and move the accepted path into place. It is one
// call if tokens are the argmax of the logits, with or without noise; otherwise the caller chooses
// the tokens between two calls.
#include "draft.h"
#include "screen.h"

// What verification leaves of rows: [rows, hidden], [rows, taps, hidden], [rows, head->outputs].
typedef struct {
    float *hidden, *features, *logits;
    int first; // which row of the last screen_rows the first is
} Verified;

static Verified all_rows(const SpeculativeStep *step) {
    return (Verified){step->hidden, step->features, step->scratch, 0};
}

// The target model's token after a node `ahead` levels below the last token, by its row of logits;
// -1: it is drawn, and the logits are not finite.
static int64_t target_token(Workspace *work, const SpeculativeStep *step, const Verified *rows,
                            int node, int ahead) {
    int vocab = step->stream->shape->vocab, stride = step->head->outputs;
    float *logits = rows->logits + (size_t)node * stride;
    Noise noise = {0};
    if (step->noise)
        noise = noise_ahead(step->noise, ahead);
    if (step->screen)
        return screened_token(work, step->head, step->screen, rows->first + node, logits, vocab,
                              step->noise ? &noise : NULL);
    if (!step->noise)
        return vectors()->argmax(logits, vocab);
    int64_t token;
    mr_noisy_argmax(logits, 1, vocab, stride, &noise, &token);
    return token;
}

// The first child of a node with this token, or, token -1, its trusted child; drafted + 1: none.
static int child_of(const SpeculativeStep *step, int node, int64_t token) {
    int child = node + 1;
    for (; child <= step->drafted; child++) {
        int is_it = token < 0 ? step->trusted >> (child - 1) & 1 : step->tokens[child - 1] == token;
        if (step->parents[child - 1] == node && is_it)
            break;
    }
    return child;
}

// Down from the last token as long as the target model's own token is a child, or a child is
// trusted (decoding/speculate/acceptance.py, Descent): only rows that are reached are read. Fills
// path, which begins with node 0, and what is emitted after each of its nodes; returns their
// number, or -1 as target_token. A child comes after its parent.
static int accepted_path(Workspace *work, SpeculativeStep *step, const Verified *rows,
                         int64_t *tokens, int32_t *path) {
    int length = 0;
    for (int node = 0; node <= step->drafted; length++) {
        path[length] = node;
        int child = child_of(step, node, -1);
        if (child <= step->drafted) {
            tokens[length] = step->tokens[child - 1];
            step->unverified |= (int64_t)1 << length;
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

// Without the stream: what the text's last tokens were followed by before is the draft.
static int draft_from_text(SpeculativeStep *step, const DraftLimits *limits, int64_t last_token) {
    const Stream *stream = step->stream;
    Text *text = &step->text;
    int most = limits->deepest, d = stream->shape->hidden;
    text->matched = mr_look_up(text, 0, limits->ngram.longest, most, step->tokens);
    int n = text->matched ? most : 0;
    for (int i = 0; i < n; i++) {
        step->parents[i] = i;
        if (step->confidence)
            step->confidence[i] = -1.0;
    }
    text->continued = n;
    embed(stream, &last_token, 1, step->hidden);
    embed(stream, step->tokens, n, step->hidden + d);
    return n;
}

// The rows that verify a draft of `nodes`; returns how many levels it has.
static int verification_rows(const SpeculativeStep *step, int length, int nodes, RowTable *table) {
    int32_t depth[MAX_NODES + 1];
    int chain = 1, levels = 0;
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

// Drafts into the steps; those whose stream drafts come first. Returns the layer that the rows
// enter which verify them.
static int draft(Workspace *work, const Part *parts, int count) {
    const Stream *stream = parts->step->stream;
    double begin = seconds_now();
    int streaming = 0;
    for (int s = 0; s < count; s++) {
        SpeculativeStep *step = parts[s].step;
        Text *text = &step->text;
        text->drafted = text->continued = text->matched = 0;
        step->best = -1;
        step->trusted = step->unverified = 0;
        streaming += step->draft_head && parts[s].limits->stream;
    }
    if (streaming)
        draft_trees(work, parts, streaming);
    int start = streaming ? entering_layer(stream) : 0;
    for (int s = streaming; s < count; s++) {
        SpeculativeStep *step = parts[s].step;
        RowTable table;
        step->drafted = draft_from_text(step, parts[s].limits, parts[s].ids[parts[s].refresh]);
        if (!start)
            continue;
        verification_rows(step, parts[s].length, step->drafted, &table);
        Rows rows = rows_of(&table, 0, step->drafted + 1, step->capacity);
        mr_layers(work, stream->shape, stream->layers, step->caches, NULL, &rows, step->hidden, 0,
                  start);
    }
    double taken = seconds_now() - begin;
    for (int s = 0; s < count; s++)
        parts[s].step->draft_seconds = taken;
    work->spent[SPENT_DRAFT] += taken;
    return start;
}

// step->ids [first, first + count) enter.
static Part part_of(SpeculativeStep *step, const DraftLimits *limits, int length, int first,
                    int count) {
    const float *carried = step->carried;
    if (carried)
        carried += (size_t)first * step->stream->shape->hidden;
    return (Part){step, limits, length, count - 1, step->ids + first, carried};
}

void mr_speculative_accept(SpeculativeStep *step, int length, const int32_t *path,
                           const int64_t *tokens, int count) {
    const Shape *shape = step->stream->shape;
    Text *text = &step->text;
    int32_t from[MAX_NODES + 1], to[MAX_NODES + 1];
    int d = shape->hidden;
    step->accepted_drafted = step->accepted_continued = 0;
    for (int i = 0; i < count; i++) {
        int node = path[i];
        from[i] = length + node;
        to[i] = length + i;
        step->ids[i] = tokens[i];
        if (text->tokens)
            text->tokens[text->count++] = (int32_t)tokens[i];
        step->accepted_drafted += node > 0 && node <= text->drafted;
        step->accepted_continued += node > text->drafted && node <= text->drafted + text->continued;
        if (step->carried)
            memcpy(step->carried + (size_t)i * d, step->hidden + (size_t)node * d,
                   (size_t)d * sizeof(float));
    }
    if (path[count - 1] != count - 1)
        mr_move(step->caches, step->layers, shape->kv_heads, shape->head_dim, step->capacity,
                step->sequence, from, to, count);
}

// What is carried of the rows takes the place of h_L, or is added to it.
static void carry_features(Workspace *work, const SpeculativeStep *step, int count, Verified to) {
    if (step->stream->tap_count)
        mr_linear(work, &step->stream->features, to.features, NULL, 0.0f, count, to.hidden,
                  step->stream->features_added);
}

// to.hidden: residuals that enter layer `start` → what is carried of the rows; to.logits: what the
// model says after each, or, with a screen, upper bounds of that.
static void run_rows(Workspace *work, const SpeculativeStep *step, const Screen *screen,
                     const Rows *rows, int start, Verified to) {
    const Stream *stream = step->stream;
    const Shape *shape = stream->shape;
    double begin = seconds_now();
    run_all_rows(work, (LayerCall){.shape = shape,
                                   .layers = stream->layers,
                                   .caches = step->caches,
                                   .rows = *rows,
                                   .x = to.hidden,
                                   .start = start,
                                   .stop = step->layers,
                                   .taps = stream->taps,
                                   .noted = to.features,
                                   .tap_count = stream->tap_count});
    double layers_done = seconds_now();
    work->spent[SPENT_OWN] += layers_done - begin;
    if (screen)
        screen_rows(work, step->head, screen, to.hidden, step->norm, shape->eps, rows->count,
                    shape->vocab, to.logits);
    else
        mr_linear(work, step->head, to.hidden, step->norm, shape->eps, rows->count, to.logits, 0);
    double head_done = seconds_now();
    work->spent[SPENT_HEAD] += head_done - layers_done;
    carry_features(work, step, rows->count, to);
    work->spent[SPENT_DRAFT] += seconds_now() - head_done;
}

// The model on the rows that verify step->drafted nodes, from layer `start` on.
static void run_target(Workspace *work, const SpeculativeStep *step, const Screen *screen,
                       const RowTable *table, int start) {
    Rows rows = rows_of(table, 0, step->drafted + 1, step->capacity);
    run_rows(work, step, screen, &rows, start, all_rows(step));
}

// What the logits of run_target emit; the accepted path, from node 0 on, goes to path. Returns how
// many tokens, or -1 where they are drawn and the logits are not finite.
static int emit(Workspace *work, SpeculativeStep *step, const Verified *rows, int length,
                int32_t *path) {
    int64_t tokens[MAX_NODES + 1];
    double begin = seconds_now();
    int count = accepted_path(work, step, rows, tokens, path);
    work->spent[SPENT_HEAD] += seconds_now() - begin;
    if (count > 0)
        mr_speculative_accept(step, length, path, tokens, count);
    return count;
}

void mr_speculative_draft(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                          const DraftLimits *limits) {
    RowTable table;
    Part part = part_of(step, limits, length, first, count);
    int start = draft(work, &part, 1);
    step->levels = verification_rows(step, length, step->drafted, &table);
    run_target(work, step, NULL, &table, start); // the caller reads the logits
}

int mr_speculative_step(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                        const DraftLimits *limits) {
    int32_t path[MAX_NODES + 1];
    RowTable table;
    Verified rows = all_rows(step);
    Part part = part_of(step, limits, length, first, count);
    int start = draft(work, &part, 1);
    step->levels = verification_rows(step, length, step->drafted, &table);
    run_target(work, step, step->screen, &table, start);
    return emit(work, step, &rows, length, path);
}

// Room for what verification leaves of MAX_NODES + 1 rows of several sequences.
static Verified room_for_verified(Workspace *work, const SpeculativeStep *step) {
    size_t rows = MAX_NODES + 1, d = (size_t)step->stream->shape->hidden,
           taps = (size_t)step->stream->tap_count;
    work->verified = grown(work->verified, rows * (d + taps * d + (size_t)step->head->outputs) *
                                               sizeof *work->verified);
    float *features = work->verified + rows * d;
    return (Verified){work->verified, features, features + rows * taps * d, 0};
}

// Verifies the drafts of parts [first, last) in one pass over `rows` rows, and accepts. Returns 0
// where logits are not finite, and then emits nothing more.
static int verify_together(Workspace *work, const Part *parts, int first, int last, int start,
                           int rows, const RowTable *table, int32_t *emitted) {
    const SpeculativeStep *step = parts->step;
    size_t d = (size_t)step->stream->shape->hidden;
    Verified all = room_for_verified(work, step);
    float *x = all.hidden;
    for (int s = first; s < last; s++) {
        size_t count = (size_t)parts[s].step->drafted + 1;
        memcpy(x, parts[s].step->hidden, count * d * sizeof(float));
        x += count * d;
    }
    Rows those = rows_of(table, 0, rows, step->capacity);
    run_rows(work, step, step->screen, &those, start, all);
    for (int s = first; s < last; s++) {
        SpeculativeStep *one = parts[s].step;
        size_t count = (size_t)one->drafted + 1;
        int32_t path[MAX_NODES + 1];
        memcpy(one->hidden, all.hidden, count * d * sizeof(float));
        emitted[s] = emit(work, one, &all, parts[s].length, path);
        if (emitted[s] < 0)
            return 0;
        all.hidden += count * d;
        all.logits += count * (size_t)one->head->outputs;
        all.first += (int)count;
    }
    return 1;
}

int mr_speculative_steps(Workspace *work, SpeculativeStep *const *steps, int count,
                         const int32_t *lengths, const int32_t *first, const int32_t *entering,
                         const DraftLimits *const *limits, int32_t *emitted) {
    Part *parts = malloc((size_t)count * sizeof *parts);
    if (!parts)
        abort();
    for (int s = 0; s < count; s++)
        parts[s] = part_of(steps[s], limits[s], lengths[s], first[s], entering[s]);
    int start = draft(work, parts, count), finite = 1;
    RowTable table, one;
    for (int s = 0, begin = 0, rows = 0; finite && s <= count; s++) {
        if (s == count || rows + steps[s]->drafted + 1 > MAX_NODES + 1) {
            finite = verify_together(work, parts, begin, s, start, rows, &table, emitted);
            begin = s;
            rows = 0;
        }
        if (s == count)
            break;
        steps[s]->levels = verification_rows(steps[s], lengths[s], steps[s]->drafted, &one);
        for (int n = 0; n <= steps[s]->drafted; n++, rows++)
            set_row(&table, rows, one.seq[n], one.slot[n], one.pos[n], one.prefix[n], one.tree[n]);
    }
    free(parts);
    return finite;
}

int mr_verify_draft(Workspace *work, SpeculativeStep *step, int length, int nodes, int start, int k,
                    int64_t *best, int32_t *path) {
    const Stream *stream = step->stream;
    int d = stream->shape->hidden;
    RowTable table;
    step->drafted = nodes;
    step->trusted = step->unverified = 0;
    step->levels = verification_rows(step, length, nodes, &table);
    if (!start) {
        embed(stream, step->ids, 1, step->hidden);
        embed(stream, step->tokens, nodes, step->hidden + d);
    }
    run_target(work, step, step->screen, &table, start);
    double begin = seconds_now();
    if (k && step->screen)
        screened_best(work, step->head, step->screen, nodes + 1, step->scratch,
                      stream->shape->vocab, k, best);
    else if (k)
        mr_best(work, step->scratch, nodes + 1, stream->shape->vocab, step->head->outputs, k, best);
    work->spent[SPENT_DRAFT] += seconds_now() - begin; // what drafts are made of
    Verified rows = all_rows(step);
    return emit(work, step, &rows, length, path);
}
