// The inner loops for one instruction set, that of the compiler's flags, under the name that it
// gives as VECTORS.
#include "attend.h"
#include "fixed.h"
#include "logits.h"
#include "numbers.h"
#include "rounding.h"
#include "rows.h"

static void tile_of_floats(const uint32_t *weight, int step, const float *const *x, int rows,
                           int pairs, int vectors, const char *ahead, int lines, float *sums) {
    tile(weight, step, x, rows, pairs, vectors, ahead, lines, (f16(*)[4])sums);
}

const Vectors VECTORS = {
    .read_row = read_row,
    .add_normed = add_normed,
    .inverse_rms = inverse_rms,
    .rotate = rotate,
    .dot = dot,
    .dot_bf16 = dot_bf16,
    .add_bf16 = add_bf16,
    .combine = combine,
    .sigmoid = sigmoid,
    .silu = silu,
    .exp_below = exp_below,
    .tile = tile_of_floats,
    .fixed_rows = FIXED_ROWS,
    .fixed_lanes = fixed_lanes,
    .short_weights = SHORT_WEIGHTS,
    .quantise_row = quantise_row,
    .fixed_product = fixed_product,
    .put_sums = put_sums,
    .gates = gates,
    .write_key = write_key,
    .write_value = write_value,
    .attend = attend,
    .argmax = argmax_of,
    .best = best_of,
    .top = likeliest,
    .raise = raise,
    .add_noise = add_noise,
    .noisy_above = noisy_above,
    .noisy_argmax = noisy_argmax,
    .round_to_int16 = round_to_int16,
    .split_in_twelve = split_in_twelve,
};
