// The inner loops, as a table of functions. vectors/vectors.c has them and is compiled once for
// each instruction set (runtime/native/build.py); weights/arch.c chooses a table at run time.
// Everything else is compiled for the oldest processors and calls these, for a row or a tile at a
// time.
//
// All tables give the same bits (vectors/simd.h). No vectors are passed between the two: compilers
// do not agree on how.
#ifndef MULTIRATE_VECTORS_H
#define MULTIRATE_VECTORS_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "include/model.h"

// Whether a row's noise adds anything: a greedy sequence's, beside others that sample, does not.
static inline int adds(const Noise *noise) {
    return noise->scale > 0;
}

static inline float from_bf16(bf16 b) {
    union {
        uint32_t u;
        float f;
    } c = {.u = (uint32_t)b << 16};
    return c.f;
}
static inline bf16 to_bf16(float f) { // round to nearest even
    union {
        float f;
        uint32_t u;
    } c = {.f = f};
    return (bf16)((c.u + 0x7fffu + ((c.u >> 16) & 1)) >> 16);
}

// A tile of bf16 weights, keys or values has up to 6 rows; integer tiles have more.
#define TILE_ROWS 6
#define GROUP_FLOATS 64 // a row's sums of a group of outputs, one after the other

// What a pass over weights fetches meanwhile: at its step k, the line at k · stride bytes behind
// `here` while k < own, and behind `next` from then on.
typedef struct {
    const char *here, *next;
    long own, stride;
} Ahead;

#define MOST_OUTLIERS 32

// Elements of a row that are not in its fixed-point copy.
typedef struct {
    int count, at[MOST_OUTLIERS];
    float value[MOST_OUTLIERS];
} Outliers;

// How far a row's logits may be above those that Screen.linear gives: its factors of Screen.error
// and Screen.norm.
typedef struct {
    float of_error, of_norm;
} Reach;

// What happens to a product's outputs; gates: of whole groups.
enum { STORE, ADD, SILU_GATE, GELU_GATE };

static inline int is_gate(int mode) {
    return mode == SILU_GATE || mode == GELU_GATE;
}

typedef struct {
    float *y;          // STORE, ADD: [rows, stride]
    float *activation; // gates: [rows, stride]: act(gate) · up, 32 of each per group
    int stride;
} Output;

#define PATH_SLOTS (16 * 6) // a block that the prefix ends in, and MAX_NODES + 1 nodes

// The part of a path that is not contiguous in the cache, copied into cache layout.
typedef struct {
    int from; // virtual position (a multiple of 16) from which the copy replaces the cache; -1:
              // none
    bf16 k[PATH_SLOTS * MAX_HEAD_DIM], v[PATH_SLOTS * MAX_HEAD_DIM];
} PathCopy;

// One query row of a tile (attention.c). Virtual positions [low, visible) count.
typedef struct {
    const float *query; // [dim], already scaled
    float *out;         // [dim]
    const PathCopy *path;
    int low, visible;
} Query;

typedef struct {
    // ---- rows: vectors/rows.h ----
    // RMSNorm of x [d], of any size, to out, which may be x; weight NULL: x as it is.
    void (*read_row)(const float *x, const float *weight, int d, float eps, float *out);
    // x += factor · RMSNorm(y), all [d]; weight NULL: y as it is.
    void (*add_normed)(const float *y, const float *weight, int d, float eps, float factor,
                       float *x);
    float (*inverse_rms)(const float *x, int d, float eps); // 1 / RMS of x [d]
    void (*rotate)(float *x, const float *cos, const float *sin, int d);
    // Σ a · b, both [d]; Σ x · w, and Σ x · norm · w where norm is not NULL. From here on, rows are
    // multiples of 16.
    float (*dot)(const float *a, const float *b, int d);
    float (*dot_bf16)(const float *x, const float *norm, const bf16 *w, int d);
    // y [d] += factor · w.
    void (*add_bf16)(float factor, const bf16 *w, int d, float *y);
    // x [d] += Σ weights[j] · parts[j] of parts [k, d].
    void (*combine)(const float *parts, const float *weights, int k, int d, float *x);
    float (*sigmoid)(float x);
    void (*silu)(const float *x, int count, float *to);
    // to[i] = exp(x[i] − top), of any count.
    void (*exp_below)(const float *x, int count, float top, float *to);

    // ---- products: vectors/tile_….h, vectors/fixed_….h ----
    // sums[n][m] += Σ_k w[k][m] · rows[n][k], for `rows` rows and `vectors` (1 to 4) vectors of 16
    // outputs of bf16 weights. The words of pair k are at weight + k · step. ahead: weights that
    // will be read later, of which each step fetches `lines` (1 or 2) lines; lines 0: the tile
    // fetches its own.
    void (*tile)(const uint32_t *weight, int step, const float *const *x, int rows, int pairs,
                 int vectors, const char *ahead, int lines, float *sums);
    // Rows of a tile at most, and how many one of `rows` has with those that only fill it up.
    int fixed_rows;
    int (*fixed_lanes)(int rows);
    // Whether weights of 12 bits, which all take, are faster than the same ones in 16.
    int short_weights;
    // q = row [in] in steps of the returned scale, without its outliers. rest [in]: scratch.
    float (*quantise_row)(const float *row, int in, float *rest, int16_t *q, Outliers *out);
    // The 16 outputs of a column for the rows of a tile, [in / 2][fixed_lanes(count)][2], with
    // these scales and outliers: to has room for fixed_lanes(count) rows, GROUP_FLOATS apart.
    void (*fixed_product)(const Column *column, const int16_t *rows, int count, int pairs,
                          const float *scales, const Outliers *outliers, const Ahead *ahead,
                          float *to);
    // What becomes of a tile's sums in vectors [from, end) of group `group`, with bias where it is
    // not NULL. Row r of the tile is row first + r; row n goes to output row `target[n]`, or n.
    void (*put_sums)(float (*sums)[GROUP_FLOATS], int rows, const float *bias, const int *target,
                     int first, int mode, Output out, int group, int from, int end);
    // `groups` groups of 32 gates and 32 ups each: to [groups · 32].
    void (*gates)(int mode, const float *y, int groups, float *to);

    // ---- attention: vectors/attend.h ----
    void (*write_key)(bf16 *k, int slot, int dim, const float *value);
    void (*write_value)(bf16 *v, int slot, int dim, const float *value);
    // scores, weights: scratch [TILE_ROWS, capacity].
    void (*attend)(const Query *query, int count, const bf16 *k, const bf16 *v, int dim,
                   float *scores, float *weights, int capacity);

    // ---- logits: vectors/logits.h, vectors/numbers.h ----
    // The first of the largest of x [count]; what is not a number does not count.
    int (*argmax)(const float *x, int count);
    // The k best of row [vocab], best first (ties: the lower id). Returns how many there are that
    // are more than -inf; the other ids are 0.
    int (*best)(const float *row, int vocab, int k, int64_t *ids);
    // The same and their probabilities, as mr_top has them of one row.
    void (*top)(const float *row, int vocab, int k, float sharpness, int64_t *ids, float *of);
    // y[0 … outputs) of what a head's copy says: their upper bounds. Returns the largest of the
    // first `vocab`.
    float (*raise)(float *y, const float *error, const float *norm, int outputs, int vocab,
                   Reach reach);
    // Adds it to the outputs of each of `count` rows [count, stride]; ids [outputs]: their tokens,
    // or NULL: these are the first ones.
    void (*add_noise)(const Noise *noise, const int64_t *ids, int outputs, float *rows, int count,
                      int stride);
    // The tokens of [begin, end) whose logit in `row` and noise sum to `least` or more, and these
    // sums: the first `most` of them. Returns how many there are.
    int (*noisy_above)(const Noise *noise, const float *row, int begin, int end, float least,
                       int most, int *tokens, float *sums);
    // The argmax of row + noise; ties: the lowest id. -1: it is not a finite number, or one of the
    // logits is none.
    int64_t (*noisy_argmax)(const float *row, int vocab, const Noise *noise);

    // ---- packing: vectors/rounding.h ----
    // Integers of at most 16 bits, w ≈ unit · q, and no larger than a row in fixed point allows.
    // The unit is a power of two, so that bf16 numbers become integers of eight significant bits;
    // weights that are not finite have a unit that is none either. Returns the unit.
    float (*round_to_int16)(const float *w, int in, int16_t *q);
    // Weights of WEIGHTS_INT12 as bytes and codes, shift + 8 · sign. Returns 0 where one has more
    // than eight significant bits.
    int (*split_in_twelve)(const int16_t *q, int in, uint8_t *bytes, uint8_t *codes);
} Vectors;

// Those of the instruction set in use (weights/arch.c).
const Vectors *vectors(void);
#endif
