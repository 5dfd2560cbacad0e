// A speculative step of one sequence: draft, verify, accept, and move the accepted path into place.
// With the argmax of the logits, or of logits and noise, it is one call; of others the caller
// chooses the tokens between two.
#include "draft.h"
#include "noise.h"

// Down from the last token as long as the target model's own token is a child, or a child is
// trusted (decoding/acceptance.py, accept_greedy). Fills path, which begins with node 0, and
// returns its length. A child comes after its parent; the first of equal children counts.
static int accepted_path(const int64_t *tokens, const int32_t *parents, int nodes, int64_t trusted,
                         const int64_t *target, int32_t *path) {
    int length = 1;
    path[0] = 0;
    for (int node = 1; node <= nodes; node++) {
        int last = path[length - 1];
        int good = trusted >> (node - 1) & 1 || tokens[node - 1] == target[last];
        if (parents[node - 1] == last && good)
            path[length++] = node;
    }
    return length;
}

// The same where tokens are drawn: of the nodes that are reached alone, from their rows of logits
// in step->scratch. Fills tokens [length], too; -1: the logits are not finite.
static int drawn_path(const SpeculativeStep *step, int nodes, int64_t *tokens, int32_t *path) {
    int length = 0, vocab = step->stream->shape->vocab, stride = step->head->outputs, next = 0;
    do {
        Noise noise = noise_ahead(step->noise, length);
        path[length] = next;
        mr_noisy_argmax(step->scratch + (size_t)next * stride, 1, vocab, stride, &noise,
                        &tokens[length]);
        if (tokens[length] < 0)
            return -1;
        int node = next + 1;
        while (node <= nodes &&
               (step->parents[node - 1] != next || step->tokens[node - 1] != tokens[length]))
            node++;
        next = node;
        length++;
    } while (next <= nodes);
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
    mr_embed(stream->table, &last_token, 1, d, 1.0f, step->hidden);
    mr_embed(stream->table, step->tokens, n, d, 1.0f, step->hidden + d);
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

// Drafts into `step` and fills the rows that verify it, which enter layer *start.
static int draft(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                 const DraftLimits *limits, RowTable *table, int *start) {
    const Stream *stream = step->stream;
    Text *text = &step->text;
    text->drafted = text->continued = text->matched = 0;
    int drafts = step->draft_head && limits->stream;
    step->best = -1;
    step->trusted = 0;
    int nodes = drafts ? draft_tree(work, step, length, count - 1, step->ids + first,
                                    step->carried + (size_t)first * stream->shape->hidden, limits)
                       : draft_from_text(step, limits, step->ids[first + count - 1]);
    step->drafted = nodes;
    step->levels = verification_rows(step, length, nodes, table);
    *start = drafts ? entering_layer(stream) : 0;
    return nodes;
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
        memcpy(step->carried + (size_t)i * d, step->hidden + (size_t)node * d,
               (size_t)d * sizeof(float));
    }
    if (path[count - 1] != count - 1)
        mr_move(step->caches, step->layers, shape->kv_heads, shape->head_dim, step->capacity,
                step->sequence, from, to, count);
}

// Layers from `start` up to the last tap on the rows of step->hidden, what enters the taps noted.
// Returns the layer that comes next.
static int run_taps(Workspace *work, const SpeculativeStep *step, const Rows *rows, int start) {
    const Stream *stream = step->stream;
    int d = stream->shape->hidden, taps = stream->tap_count;
    for (int i = 0; i < taps; start = stream->taps[i++]) {
        mr_layers(work, stream->shape, stream->layers, step->caches, NULL, rows, step->hidden,
                  start, stream->taps[i]);
        for (int n = 0; n < rows->count; n++)
            memcpy(step->features + ((size_t)n * taps + i) * d, step->hidden + (size_t)n * d,
                   (size_t)d * sizeof(float));
    }
    return start;
}

// What is carried of the rows takes the place of h_L.
static void carry_features(Workspace *work, const SpeculativeStep *step, int count) {
    if (step->stream->tap_count)
        mr_linear(work, &step->stream->features, step->features, NULL, 0.0f, count, step->hidden,
                  0);
}

void mr_speculative_draft(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                          const DraftLimits *limits) {
    const Shape *shape = step->stream->shape;
    RowTable table;
    int start, nodes = draft(work, step, length, first, count, limits, &table, &start);
    Rows rows = rows_of(&table, 0, nodes + 1, step->capacity);
    start = run_taps(work, step, &rows, start);
    mr_layers(work, shape, step->stream->layers, step->caches, NULL, &rows, step->hidden, start,
              step->layers);
    mr_linear(work, step->head, step->hidden, step->norm, shape->eps, nodes + 1, step->scratch, 0);
    carry_features(work, step, nodes + 1);
}

int mr_speculative_step(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                        const DraftLimits *limits) {
    int32_t path[MAX_NODES + 1];
    int64_t tokens[MAX_NODES + 1];
    int emitted;
    if (step->noise) {
        mr_speculative_draft(work, step, length, first, count, limits);
        emitted = drawn_path(step, step->drafted, tokens, path);
        if (emitted < 0)
            return -1;
    } else {
        RowTable table;
        int64_t target[MAX_NODES + 1];
        int start, nodes = draft(work, step, length, first, count, limits, &table, &start);
        Rows rows = rows_of(&table, 0, nodes + 1, step->capacity);
        start = run_taps(work, step, &rows, start);
        mr_argmax_pass(work, step->stream->shape, step->stream->layers, step->caches, &rows, NULL,
                       NULL, step->hidden, start, step->layers, step->head, step->norm, NULL,
                       step->scratch, target);
        carry_features(work, step, nodes + 1);
        emitted = accepted_path(step->tokens, step->parents, nodes, step->trusted, target, path);
        for (int i = 0; i < emitted; i++)
            tokens[i] = i + 1 < emitted ? step->tokens[path[i + 1] - 1] : target[path[i]];
    }
    mr_speculative_accept(step, length, path, tokens, emitted);
    return emitted;
}
