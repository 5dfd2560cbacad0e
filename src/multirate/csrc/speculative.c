// A round of one sequence: draft, verify, accept, and move the accepted path into place. It is one
// call if tokens are the argmax of the logits, with or without noise; otherwise the caller chooses
// the tokens between two calls.
#include "head.h"
#include "noise.h"
#include "screen.h"
#include "simd.h"
#include "speculative.h"

// Who verifies: the model, or its narrow copy.
typedef struct {
    const Layer *layers;
    const Linear *head;
    const Screen
        *screen; // logits that run_rows leaves are its upper bounds; NULL: they are the head's
    const bf16 *exact; // has the last word on the likeliest of these; or NULL
} Target;

static Target own_weights(const SpeculativeStep *step) {
    return (Target){step->stream->layers, step->head, NULL, NULL};
}

static Target narrow_copy(const SpeculativeStep *step) {
    return (Target){step->narrow->layers, step->narrow->head, NULL, step->narrow->exact_head};
}

// The same where all that is asked of the logits is the next token.
static Target own_tokens(const SpeculativeStep *step) {
    return (Target){step->stream->layers, step->head, step->screen, NULL};
}

// What verification leaves of rows: [rows, hidden], [rows, taps, hidden], [rows, head->outputs].
typedef struct {
    float *hidden, *features, *logits;
    int first; // which row of the last screen_rows the first is
} Verified;

// Rows that the narrow copy has verified: they may have to run again.
typedef struct {
    const RowTable *table;
    int64_t last_token;
    int64_t known; // bit n: row n has run with the model's own weights
} Doubtful;

static Verified all_rows(const SpeculativeStep *step) {
    return (Verified){step->hidden, step->features, step->scratch, 0};
}

// The target model's token after a node `ahead` levels below the last token, by its row of logits;
// -1: it is drawn, and the logits are not finite.
static int64_t target_token(Workspace *work, const SpeculativeStep *step, const Target *target,
                            const Verified *rows, int node, int ahead) {
    int vocab = step->stream->shape->vocab, stride = step->head->outputs;
    float *logits = rows->logits + (size_t)node * stride;
    Noise noise = {0};
    if (step->noise)
        noise = noise_ahead(step->noise, ahead);
    if (target->screen)
        return screened_token(work, target->head, target->screen, rows->first + node, logits, vocab,
                              step->noise ? &noise : NULL);
    if (!step->noise)
        return argmax_of(logits, vocab);
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

// How far a row's best logit is above the second: 0 where two are the same.
static float margin_of(const float *logits, int vocab) {
    int64_t best = argmax_of(logits, vocab);
    fv second = all(-INFINITY);
    int i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        fv v = load_v(logits + i);
        if (best >= i && best < i + LANES)
            v[best - i] = -INFINITY;
        iv larger = v > second;
        second = (fv)(((iv)v & larger) | ((iv)second & ~larger));
    }
    float most = max_v(second);
    for (; i < vocab; i++)
        if (i != best && logits[i] > most)
            most = logits[i];
    return logits[best] - most;
}

// Whether the narrow copy's logits after a node are to be believed.
static int sure_of(const SpeculativeStep *step, int node) {
    int vocab = step->stream->shape->vocab;
    const float *logits = step->scratch + (size_t)node * step->head->outputs;
    if (step->narrow->margin <= 0.0f)
        return isfinite(logits[0]); // where a row is not finite, none of its logits is
    return margin_of(logits, vocab) >= step->narrow->margin;
}

static void run_rows(Workspace *work, const SpeculativeStep *step, const Target *target,
                     const Rows *rows, int start, Verified to);

// The newest rows that wait for the model's own weights, `count` of them, into `to`.
static void take_pending(const SpeculativeStep *step, int count, RowTable *to) {
    Narrow *narrow = step->narrow;
    int d = step->stream->shape->hidden;
    narrow->pending_count -= count;
    for (int i = 0; i < count; i++) {
        int slot = narrow->slots[narrow->pending_count + i];
        embed(step->stream, &narrow->pending[narrow->pending_count + i], 1,
              narrow->hidden + (size_t)i * d);
        set_row(to, i, step->sequence, slot, slot, slot + 1, 0);
    }
}

// Before a node's logits are read: where they are not sure, it and all such rows below it run again
// with the model's own weights.
static void make_sure(Workspace *work, SpeculativeStep *step, Doubtful *rows_seen, int node) {
    const RowTable *table = rows_seen->table;
    Narrow *narrow = step->narrow;
    const Shape *shape = step->stream->shape;
    int stride = step->head->outputs, d = shape->hidden, taps = step->stream->tap_count;
    if (rows_seen->known >> node & 1 || sure_of(step, node))
        return;
    RowTable again;
    int nodes[MAX_NODES + 1], doubted = 0;
    int64_t below = (int64_t)1 << node;
    for (int n = node; n <= step->drafted; n++) {
        if (n > node && below >> step->parents[n - 1] & 1)
            below |= (int64_t)1 << n;
        if (!(below >> n & 1) || rows_seen->known >> n & 1)
            continue;
        if (n > node && sure_of(step, n))
            continue;
        rows_seen->known |= (int64_t)1 << n;
        nodes[doubted++] = n;
    }
    int old = narrow->refresh > doubted ? narrow->refresh - doubted : 0;
    if (old > narrow->pending_count)
        old = narrow->pending_count;
    take_pending(step, old, &again);
    for (int i = 0; i < doubted; i++) {
        int n = nodes[i];
        int64_t token = n ? step->tokens[n - 1] : rows_seen->last_token;
        embed(step->stream, &token, 1, narrow->hidden + (size_t)(old + i) * d);
        set_row(&again, old + i, step->sequence, table->slot[n], table->pos[n], table->prefix[n],
                table->tree[n]);
    }
    Rows rows = rows_of(&again, 0, old + doubted, step->capacity);
    Target target = own_weights(step);
    Verified to = {narrow->hidden, narrow->features, narrow->logits, 0};
    run_rows(work, step, &target, &rows, 0, to);
    for (int i = 0; i < doubted; i++) {
        size_t n = (size_t)nodes[i], row = (size_t)(old + i);
        memcpy(step->scratch + n * stride, to.logits + row * stride,
               (size_t)stride * sizeof(float));
        memcpy(step->hidden + n * d, to.hidden + row * d, (size_t)d * sizeof(float));
        if (taps)
            memcpy(step->features + n * taps * d, to.features + row * taps * d,
                   (size_t)taps * d * sizeof(float));
    }
    step->again += doubted;
}

// Down from the last token as long as the target model's own token is a child, or a child is
// trusted (decoding/acceptance.py, Descent): only rows that are reached are read. Fills path, which
// begins with node 0, and what is emitted after each of its nodes; returns their number, or -1 as
// target_token. A child comes after its parent. doubtful: the rows, where step->narrow has
// verified them; else NULL.
static int accepted_path(Workspace *work, SpeculativeStep *step, const Target *target,
                         const Verified *rows, Doubtful *doubtful, int64_t *tokens, int32_t *path) {
    int length = 0;
    for (int node = 0; node <= step->drafted; length++) {
        path[length] = node;
        int child = child_of(step, node, -1);
        if (child <= step->drafted) {
            tokens[length] = step->tokens[child - 1];
            step->unverified |= (int64_t)1 << length;
        } else {
            if (doubtful)
                make_sure(work, step, doubtful, node);
            tokens[length] = target_token(work, step, target, rows, node, length);
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
        step->again = 0;
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

Part part_of(SpeculativeStep *step, const DraftLimits *limits, int length, int first, int count) {
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
// target says after each.
static void run_rows(Workspace *work, const SpeculativeStep *step, const Target *target,
                     const Rows *rows, int start, Verified to) {
    const Stream *stream = step->stream;
    const Shape *shape = stream->shape;
    double begin = seconds_now();
    layers_with_taps(work, shape, target->layers, step->caches, rows, to.hidden, start,
                     step->layers, stream->taps, stream->tap_count, to.features);
    double layers_done = seconds_now();
    work->spent[target->layers == stream->layers ? SPENT_OWN : SPENT_NARROW] += layers_done - begin;
    if (target->screen)
        screen_rows(work, target->head, target->screen, to.hidden, step->norm, shape->eps,
                    rows->count, shape->vocab, to.logits);
    else
        mr_linear(work, target->head, to.hidden, step->norm, shape->eps, rows->count, to.logits, 0);
    if (target->exact)
        refine_rows(work, target->exact, to.hidden, step->norm, shape->eps, shape->hidden,
                    rows->count, shape->vocab, target->head->outputs, to.logits);
    double head_done = seconds_now();
    work->spent[SPENT_HEAD] += head_done - layers_done;
    carry_features(work, step, rows->count, to);
    work->spent[SPENT_DRAFT] += seconds_now() - head_done;
}

// The target on the rows that verify step->drafted nodes, from layer `start` on.
static void run_target(Workspace *work, const SpeculativeStep *step, const Target *target,
                       const RowTable *table, int start) {
    Rows rows = rows_of(table, 0, step->drafted + 1, step->capacity);
    run_rows(work, step, target, &rows, start, all_rows(step));
}

// The accepted rows that only the narrow copy has run wait for a pass of the model's own weights.
static void note_pending(SpeculativeStep *step, const Doubtful *rows_seen, int length,
                         const int32_t *path, const int64_t *tokens, int count) {
    Narrow *narrow = step->narrow;
    for (int i = 0; i < count; i++) {
        if (rows_seen->known >> path[i] & 1)
            continue;
        if (narrow->pending_count == NARROW_PENDING) {
            narrow->pending_count--;
            memmove(narrow->pending, narrow->pending + 1,
                    (NARROW_PENDING - 1) * sizeof *narrow->pending);
            memmove(narrow->slots, narrow->slots + 1, (NARROW_PENDING - 1) * sizeof *narrow->slots);
        }
        narrow->pending[narrow->pending_count] = i ? tokens[i - 1] : rows_seen->last_token;
        narrow->slots[narrow->pending_count++] = length + i;
    }
}

static double all_spent(const Workspace *work) {
    double sum = 0.0;
    for (int kind = 0; kind < SPENT_KINDS; kind++)
        sum += work->spent[kind];
    return sum;
}

// What the logits of run_target emit; the accepted path, from node 0 on, goes to path. Returns how
// many tokens, or -1 where they are drawn and the logits are not finite.
static int emit(Workspace *work, SpeculativeStep *step, const Target *target, const Verified *rows,
                Doubtful *doubtful, int length, int32_t *path) {
    int64_t tokens[MAX_NODES + 1];
    double begin = seconds_now(), before = all_spent(work);
    int count = accepted_path(work, step, target, rows, doubtful, tokens, path);
    // without the passes of rows that ran again
    work->spent[SPENT_HEAD] += seconds_now() - begin - (all_spent(work) - before);
    if (count > 0)
        mr_speculative_accept(step, length, path, tokens, count);
    if (count > 0 && doubtful)
        note_pending(step, doubtful, length, path, tokens, count);
    return count;
}

void mr_speculative_draft(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                          const DraftLimits *limits) {
    RowTable table;
    Target target = own_weights(step);
    Part part = part_of(step, limits, length, first, count);
    int start = draft(work, &part, 1);
    step->levels = verification_rows(step, length, step->drafted, &table);
    run_target(work, step, &target, &table, start);
}

int mr_draft(Workspace *work, SpeculativeStep *step, int length, int first, int count,
             const DraftLimits *limits) {
    Part part = part_of(step, limits, length, first, count);
    draft(work, &part, 1);
    return step->drafted;
}

int run_step(Workspace *work, const Part *part) {
    SpeculativeStep *step = part->step;
    int32_t path[MAX_NODES + 1];
    RowTable table;
    int narrow = step->narrow && (!step->noise || step->narrow->drawn);
    Target target = narrow ? narrow_copy(step) : own_tokens(step);
    Doubtful doubtful = {&table, part->ids[part->refresh], 0};
    Verified rows = all_rows(step);
    int start = draft(work, part, 1);
    step->levels = verification_rows(step, part->length, step->drafted, &table);
    run_target(work, step, &target, &table, start);
    return emit(work, step, &target, &rows, narrow ? &doubtful : NULL, part->length, path);
}

int mr_speculative_step(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                        const DraftLimits *limits) {
    Part part = part_of(step, limits, length, first, count);
    return run_step(work, &part);
}

// Room for what verification leaves of MAX_NODES + 1 rows of several sequences.
static Verified room_for_verified(Workspace *work, const SpeculativeStep *step) {
    size_t rows = MAX_NODES + 1, d = (size_t)step->stream->shape->hidden,
           taps = (size_t)step->stream->tap_count;
    work->verified =
        grown(work->verified, &work->verified_size,
              rows * (d + taps * d + (size_t)step->head->outputs) * sizeof *work->verified);
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
    Target target = own_tokens(step);
    float *x = all.hidden;
    for (int s = first; s < last; s++) {
        size_t count = (size_t)parts[s].step->drafted + 1;
        memcpy(x, parts[s].step->hidden, count * d * sizeof(float));
        x += count * d;
    }
    Rows those = rows_of(table, 0, rows, step->capacity);
    run_rows(work, step, &target, &those, start, all);
    for (int s = first; s < last; s++) {
        SpeculativeStep *one = parts[s].step;
        size_t count = (size_t)one->drafted + 1;
        int32_t path[MAX_NODES + 1];
        memcpy(one->hidden, all.hidden, count * d * sizeof(float));
        emitted[s] = emit(work, one, &target, &all, NULL, parts[s].length, path);
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
    Target target = step->narrow ? narrow_copy(step) : own_tokens(step);
    step->drafted = nodes;
    step->trusted = step->unverified = 0;
    step->levels = verification_rows(step, length, nodes, &table);
    if (!start) {
        embed(stream, step->ids, 1, step->hidden);
        embed(stream, step->tokens, nodes, step->hidden + d);
    }
    run_target(work, step, &target, &table, start);
    double begin = seconds_now();
    if (k && target.screen)
        screened_best(work, step->head, step->screen, nodes + 1, step->scratch,
                      stream->shape->vocab, k, best);
    else if (k)
        mr_best(work, step->scratch, nodes + 1, stream->shape->vocab, step->head->outputs, k, best);
    work->spent[SPENT_DRAFT] += seconds_now() - begin; // what drafts are made of
    Verified rows = all_rows(step);
    return emit(work, step, &target, &rows, NULL, length, path);
}
