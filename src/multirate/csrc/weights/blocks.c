#include "blocks.h"

#include <string.h>

static void halves(const uint8_t *from, uint8_t *q) {
    for (int i = 0; i < BLOCK / 2; i++) {
        q[i] = from[i] & 15;
        q[i + BLOCK / 2] = from[i] >> 4;
    }
}

static void add_fifth_bits(const uint8_t *high, uint8_t *q) {
    for (int i = 0; i < BLOCK; i++)
        q[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
}

void read_q8_0(const void *row, long block, Unit *to) {
    const BlockQ8_0 *from = (const BlockQ8_0 *)row + block;
    for (int i = 0; i < BLOCK; i++)
        to->q[i] = (uint8_t)(from->q[i] + 128);
    to->scale = from->d;
}

void read_q4_0(const void *row, long block, Unit *to) {
    const BlockQ4_0 *from = (const BlockQ4_0 *)row + block;
    halves(from->q, to->q);
    to->scale = from->d;
}

void read_q4_1(const void *row, long block, Unit *to) {
    const BlockQ4_1 *from = (const BlockQ4_1 *)row + block;
    halves(from->q, to->q);
    to->scale = from->d;
    to->least = from->m;
}

void read_q5_0(const void *row, long block, Unit *to) {
    const BlockQ5_0 *from = (const BlockQ5_0 *)row + block;
    halves(from->q, to->q);
    add_fifth_bits(from->high, to->q);
    to->scale = from->d;
}

void read_q5_1(const void *row, long block, Unit *to) {
    const BlockQ5_1 *from = (const BlockQ5_1 *)row + block;
    halves(from->q, to->q);
    add_fifth_bits(from->high, to->q);
    to->scale = from->d;
    to->least = from->m;
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

// Two blocks of 32 share 32 bytes: the first has their lower halves.
static void halves_of_pair(const uint8_t *q, int b, uint8_t *to) {
    q += b / 2 * BLOCK;
    for (int i = 0; i < BLOCK; i++)
        to[i] = b % 2 ? q[i] >> 4 : q[i] & 15;
}

void read_q4_k(const void *row, long block, Unit *to) {
    const BlockQ4_K *from = (const BlockQ4_K *)row + block / 8;
    int b = (int)(block % 8);
    halves_of_pair(from->q, b, to->q);
    to->scale = from->d;
    to->least = from->dmin;
    read_six_bits(from->scales, b, to);
}

void read_q5_k(const void *row, long block, Unit *to) {
    const BlockQ5_K *from = (const BlockQ5_K *)row + block / 8;
    int b = (int)(block % 8);
    halves_of_pair(from->q, b, to->q);
    for (int i = 0; i < BLOCK; i++)
        to->q[i] |= (uint8_t)((from->high[i] >> b & 1) << 4);
    to->scale = from->d;
    to->least = from->dmin;
    read_six_bits(from->scales, b, to);
}

// Four blocks of 32 share 64 bytes of lower bits and 32 of upper ones.
void read_q6_k(const void *row, long block, Unit *to) {
    const BlockQ6_K *from = (const BlockQ6_K *)row + block / 8;
    int b = (int)(block % 8), quarter = b % 4;
    const uint8_t *low = from->q + b / 4 * 64 + quarter % 2 * BLOCK,
                  *high = from->high + b / 4 * BLOCK;
    for (int i = 0; i < BLOCK; i++) {
        int four = quarter / 2 ? low[i] >> 4 : low[i] & 15;
        to->q[i] = (uint8_t)(four | (high[i] >> 2 * quarter & 3) << 4);
    }
    to->scale = from->d;
    to->factor[0] = from->scales[2 * b];
    to->factor[1] = from->scales[2 * b + 1];
}
