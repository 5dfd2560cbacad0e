#include "blocks.h"

#include <string.h>

static fp16 half_at(const uint8_t *from) {
    fp16 half;
    memcpy(&half, from, sizeof half);
    return half;
}

// The scale, and the least weight where there is one; returns what lies behind them.
static const uint8_t *read_scales(const Format *f, const uint8_t *from, Unit *to) {
    to->scale = half_at(from);
    if (has_least(f))
        to->least = half_at(from + 2);
    return from + (has_least(f) ? 4 : 2);
}

static void read_small_block(const Format *f, const uint8_t *from, Unit *to) {
    from = read_scales(f, from, to);
    if (f->bits == 8) {
        for (int i = 0; i < BLOCK; i++)
            to->q[i] = from[i] ^ 128;
        return;
    }
    const uint8_t *high = from, *low = f->bits == 5 ? from + 4 : from;
    for (int i = 0; i < BLOCK / 2; i++) {
        to->q[i] = low[i] & 15;
        to->q[i + BLOCK / 2] = low[i] >> 4;
    }
    for (int i = 0; f->bits == 5 && i < BLOCK; i++)
        to->q[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
}

// The six-bit scale and min of block b of eight:
//
//   bytes 0 … 3: | s4: upper 2 bits | s0 … s3 |   4 … 7: | m4 … m7: upper 2 bits | m0 … m3 |
//   bytes 8 … 11: | m4 … m7: lower 4 bits | s4 … s7: lower 4 bits |
static void read_six_bits(const uint8_t *scales, int b, Unit *to) {
    const uint8_t *s = scales + b % 4;
    if (b < 4) {
        to->factor[0] = s[0] & 63;
        to->least_factor = s[4] & 63;
    } else {
        to->factor[0] = (int16_t)((s[8] & 15) | (s[0] >> 6) << 4);
        to->least_factor = (int16_t)((s[8] >> 4) | (s[4] >> 6) << 4);
    }
}

// Two blocks of 32 share 32 bytes of lower bits: the first has their lower halves.
static void read_k_block(const Format *f, const uint8_t *from, int b, Unit *to) {
    const uint8_t *factors = read_scales(f, from, to), *high = factors + 12,
                  *low = high + (f->bits == 5 ? BLOCK : 0) + b / 2 * BLOCK;
    for (int i = 0; i < BLOCK; i++) {
        to->q[i] = b % 2 ? low[i] >> 4 : low[i] & 15;
        if (f->bits == 5)
            to->q[i] |= (uint8_t)((high[i] >> b & 1) << 4);
    }
    read_six_bits(factors, b, to);
}

// Four blocks of 32 share 64 bytes of lower bits and 32 of upper ones.
static void read_q6_k_block(const uint8_t *from, int b, Unit *to) {
    int quarter = b % 4;
    const uint8_t *low = from + b / 4 * 64 + quarter % 2 * BLOCK,
                  *high = from + SUPER / 2 + b / 4 * BLOCK;
    const int8_t *factors = (const int8_t *)from + SUPER / 2 + SUPER / 4;
    for (int i = 0; i < BLOCK; i++) {
        int four = quarter / 2 ? low[i] >> 4 : low[i] & 15;
        to->q[i] = (uint8_t)(four | (high[i] >> 2 * quarter & 3) << 4);
    }
    to->scale = half_at((const uint8_t *)factors + SUPER / 16);
    to->factor[0] = factors[2 * b];
    to->factor[1] = factors[2 * b + 1];
}

void read_unit(const Format *f, const void *row, long block, Unit *to) {
    const uint8_t *from = (const uint8_t *)row + block * BLOCK / f->piece * f->bytes;
    int b = (int)(block % (SUPER / BLOCK));
    if (!f->factors)
        read_small_block(f, from, to);
    else if (has_least(f))
        read_k_block(f, from, b, to);
    else
        read_q6_k_block(from, b, to);
}
