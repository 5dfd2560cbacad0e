// From tokens to residuals and back: embeddings, the likeliest tokens, a whole pass to the argmax.
#include "noise.h"
#include "simd.h"

void mr_embed(const bf16 *table, const int64_t *ids, int count, int d, float scale, float *x) {
    for (int n = 0; n < count; n++)
        for (int i = 0; i < d; i++)
            x[(size_t)n * d + i] = from_bf16(table[(size_t)ids[n] * d + i]) * scale;
}

void mr_top(const float *logits, int count, int vocab, int stride, int k, float sharpness,
            int64_t *ids, float *probabilities) {
    for (int n = 0; n < count; n++) {
        const float *row = logits + (size_t)n * stride;
        int64_t *id = ids + (size_t)n * k;
        float *best = probabilities + (size_t)n * k;
        for (int j = 0; j < k; j++) {
            best[j] = -INFINITY;
            id[j] = 0;
        }
        for (int i0 = 0; i0 < vocab; i0 += 16) {
            if (i0 + 16 <= vocab) { // skip blocks with nothing better than the k-th best
                i16 better = load(row + i0) > splat(best[k - 1]);
                int any = 0;
                for (int i = 0; i < 16; i++)
                    any |= better[i];
                if (!any)
                    continue;
            }
            for (int i = i0; i < i0 + 16 && i < vocab; i++) {
                if (!(row[i] > best[k - 1]))
                    continue;
                int j = k - 1;
                for (; j > 0 && row[i] > best[j - 1]; j--) {
                    best[j] = best[j - 1];
                    id[j] = id[j - 1];
                }
                best[j] = row[i];
                id[j] = i;
            }
        }
        fv sum = all(0.0f);
        float top = best[0];
        int i = 0;
        for (; i + LANES <= vocab; i += LANES)
            sum += exp_vector((load_v(row + i) - all(top)) * all(sharpness));
        float total = sum_v(sum);
        for (; i < vocab; i++)
            total += expf(sharpness * (row[i] - top));
        for (int j = 0; j < k; j++)
            best[j] = expf(sharpness * (best[j] - top)) / total;
    }
}

void mr_argmax_pass(Workspace *work, const Shape *shape, const Layer *layers,
                    const LayerCache *caches, const Rows *rows, const bf16 *table,
                    const int64_t *ids, float *x, int start, int stop, const Linear *head,
                    const float *norm, const Noise *noise, float *logits, int64_t *tokens) {
    int count = rows->count, vocab = shape->vocab;
    if (ids)
        mr_embed(table, ids, count, shape->hidden, 1.0f, x);
    mr_layers(work, shape, layers, caches, NULL, rows, x, start, stop);
    mr_linear(work, head, x, norm, shape->eps, count, logits, 0);
    if (noise) {
        mr_noisy_argmax(logits, count, vocab, head->outputs, noise, tokens);
        return;
    }
    for (int n = 0; n < count; n++)
        tokens[n] = argmax_of(logits + (size_t)n * head->outputs, vocab);
}

void mr_head_top(Workspace *work, const Linear *head, const float *norm, float eps, const float *x,
                 int count, int vocab, const Noise *noise, const int64_t *token_map, int k,
                 float sharpness, float *logits, int64_t *ids, float *probabilities) {
    mr_linear(work, head, x, norm, eps, count, logits, 0);
    for (int n = 0; noise && n < count; n++)
        add_noise(&noise[n], token_map, vocab, logits + (size_t)n * head->outputs, 1, 0);
    mr_top(logits, count, vocab, head->outputs, k, sharpness, ids, probabilities);
}
