// The best of a row of logits, and bounds of them.
#ifndef MULTIRATE_LOGITS_H
#define MULTIRATE_LOGITS_H
#include "simd.h"

#define PIECE 64 // tokens that are passed over together where none can be of use

INLINE float largest_of(const float *x, int count) {
    f16 highest = splat(-INFINITY);
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        f16 v = load(x + i);
        i16 greater = v > highest;
        highest = (f16)(((i16)v & greater) | ((i16)highest & ~greater));
    }
    float top = -INFINITY;
    for (int j = 0; j < 16; j++)
        top = highest[j] > top ? highest[j] : top;
    for (; i < count; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}
static int argmax_of(const float *x, int count) {
    float top = -INFINITY;
    int from = 0;
    for (int i = 0; i < count; i += 1024) { // equal ones are looked for in one piece alone
        float here = largest_of(x + i, count - i < 1024 ? count - i : 1024);
        if (here > top) {
            top = here;
            from = i;
        }
    }
    while (from < count - 1 && x[from] != top)
        from++;
    return from;
}

static int best_of(const float *row, int vocab, int k, int64_t *ids) {
    int found = 0;
    float least = -INFINITY; // what a token has to exceed
    for (int begin = 0; begin < vocab; begin += PIECE) {
        int end = begin + PIECE < vocab ? begin + PIECE : vocab;
        if (end == begin + PIECE) {
            iv better = {0};
            for (int i = begin; i < end; i += LANES)
                better |= load_v(row + i) > all(least);
            if (!any_of(better))
                continue;
        }
        for (int i = begin; i < end; i++) {
            if (!(row[i] > least))
                continue;
            int j = found < k ? found++ : k - 1;
            for (; j > 0 && row[i] > row[ids[j - 1]]; j--)
                ids[j] = ids[j - 1];
            ids[j] = i;
            if (found == k)
                least = row[ids[k - 1]];
        }
    }
    for (int j = found; j < k; j++)
        ids[j] = 0;
    return found;
}

static void likeliest(const float *row, int vocab, int k, float sharpness, int64_t *ids,
                      float *of) {
    int found = best_of(row, vocab, k, ids);
    Sum sum = no_sum();
    float top = found ? row[ids[0]] : -INFINITY;
    int i = 0;
    for (; i + 16 <= vocab; i += 16)
        for (int j = 0; j < 16 / LANES; j++)
            sum.of[j] += exp_vector((load_v(row + i + j * LANES) - all(top)) * all(sharpness));
    float total = total_of(sum);
    for (; i < vocab; i++)
        total += exp_of(sharpness * (row[i] - top));
    for (int j = 0; j < k; j++) {
        of[j] = j < found ? exp_of(sharpness * (row[ids[j]] - top)) / total : 0.0f;
        if (!(of[j] >= 0.0f)) // the logits are no numbers
            of[j] = 0.0f;
    }
}

static float raise(float *y, const float *error, const float *norm, int outputs, int vocab,
                   Reach reach) {
    fv highest = all(-INFINITY);
    for (int i = 0; i < outputs; i += LANES) {
        fv v = load_v(y + i), size = (fv)((iv)v & 0x7fffffff);
        v = fma_v(load_v(error + i), all(reach.of_error), v);
        v = fma_v(load_v(norm + i), all(reach.of_norm), v);
        v = fma_v(size, all(1e-6f), v);
        store_v(y + i, v);
        iv larger = v > highest;
        highest = (fv)(((iv)v & larger) | ((iv)highest & ~larger));
    }
    return vocab < outputs ? y[argmax_of(y, vocab)] : max_v(highest);
}
#endif
