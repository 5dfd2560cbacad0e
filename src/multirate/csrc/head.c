// From tokens to residuals and back: embeddings, the best tokens, a whole pass to the argmax.
#include "heads.h"
#include "threads.h"

void mr_embed(const Table *table, const int64_t *ids, int count, int d, float scale, float *x) {
    for (int n = 0; n < count; n++) {
        float *to = x + (size_t)n * d;
        int64_t id = ids[n];
        if (id < 0 || id >= table->vocab) { // a draft may hold anything
            memset(to, 0, (size_t)d * sizeof(float));
            continue;
        }
        if (table->rows)
            for (int i = 0; i < d; i++)
                to[i] = from_bf16(table->rows[(size_t)id * d + i]);
        else
            mr_decode_output(&table->packed, (int)id, to);
        for (int i = 0; i < d; i++)
            to[i] *= scale;
    }
}

void mr_top(const float *logits, int count, int vocab, int stride, int k, float sharpness,
            int64_t *ids, float *probabilities) {
    for (int n = 0; n < count; n++)
        vectors()->top(logits + (size_t)n * stride, vocab, k, sharpness, ids + (size_t)n * k,
                       probabilities + (size_t)n * k);
}

#define REFINED 8

void refine_likeliest(const bf16 *exact, const float *x, const float *norm, float eps, int d,
                      int vocab, const Noise *noise, const int64_t *token_map, float *logits) {
    int64_t best[REFINED];
    const Vectors *v = vectors();
    int found = v->best(logits, vocab, REFINED < vocab ? REFINED : vocab, best);
    float scale = norm ? v->inverse_rms(x, d, eps) : 1.0f;
    for (int j = 0; j < found; j++) {
        float dot = v->dot_bf16(x, norm, exact + (size_t)best[j] * d, d), number = 0.0f;
        int64_t id = token_map ? token_map[best[j]] : best[j];
        if (noise)
            mr_noise(noise, &id, 1, &number);
        logits[best[j]] = scale * dot + number;
    }
}

// The tokens after rows that have passed the layers, as mr_argmax_pass tells them.
static void argmax_of_rows(Workspace *work, int count, int vocab, float eps, const float *x,
                           const Linear *head, const Screen *screen, const float *norm,
                           const Noise *noise, float *logits, int64_t *tokens) {
    if (screen) {
        screen_rows(work, head, screen, x, norm, eps, count, vocab, logits);
        for (int n = 0; n < count; n++)
            tokens[n] = screened_token(work, head, screen, n, logits + (size_t)n * head->outputs,
                                       vocab, noise && adds(&noise[n]) ? &noise[n] : NULL);
        return;
    }
    mr_linear(work, head, x, norm, eps, count, logits, 0);
    if (noise) {
        mr_noisy_argmax(logits, count, vocab, head->outputs, noise, tokens);
        return;
    }
    for (int n = 0; n < count; n++)
        tokens[n] = vectors()->argmax(logits + (size_t)n * head->outputs, vocab);
}

void mr_argmax_pass(Workspace *work, const Shape *shape, const Layer *layers,
                    const LayerCache *caches, const Rows *rows, const Table *table,
                    const int64_t *ids, float *x, int start, int stop, const Linear *head,
                    const Screen *screen, const float *norm, const Noise *noise, float *logits,
                    int64_t *tokens) {
    double begin = seconds_now();
    if (ids)
        mr_embed(table, ids, rows->count, shape->hidden, shape->embed_scale, x);
    mr_layers(work, shape, layers, caches, NULL, rows, x, start, stop);
    double layers_done = seconds_now();
    argmax_of_rows(work, rows->count, shape->vocab, shape->eps, x, head, screen, norm, noise,
                   logits, tokens);
    work->spent[SPENT_OWN] += layers_done - begin;
    work->spent[SPENT_HEAD] += seconds_now() - layers_done;
}

void mr_head_top(Workspace *work, const Linear *head, const float *norm, float eps, const float *x,
                 int count, int vocab, const Noise *noise, const int64_t *token_map,
                 const bf16 *exact, int k, float sharpness, float *logits, int64_t *ids,
                 float *probabilities) {
    mr_linear(work, head, x, norm, eps, count, logits, 0);
    for (int n = 0; n < count; n++) {
        float *row = logits + (size_t)n * head->outputs;
        if (noise)
            vectors()->add_noise(&noise[n], token_map, vocab, row, 1, 0);
        if (exact)
            refine_likeliest(exact, x + (size_t)n * head->inputs, norm, eps, head->inputs, vocab,
                             noise ? &noise[n] : NULL, token_map, row);
    }
    mr_top(logits, count, vocab, head->outputs, k, sharpness, ids, probabilities);
}
