// The numbers and the argmax with them, for Python.
#include "vectors.h"

void mr_noise(const Noise *noise, const int64_t *ids, int count, float *to) {
    memset(to, 0, (size_t)count * sizeof *to);
    vectors()->add_noise(noise, ids, count, to, 1, count);
}

void mr_noisy_argmax(const float *logits, int count, int vocab, int stride, const Noise *noise,
                     int64_t *tokens) {
    for (int n = 0; n < count; n++) {
        const float *row = logits + (size_t)n * stride;
        tokens[n] = adds(&noise[n]) ? vectors()->noisy_argmax(row, vocab, &noise[n])
                                    : vectors()->argmax(row, vocab);
    }
}
