// The blocks of quantised weights as GGUF files have them, and one reader for all of them.
//
// A row of a tensor is a run of blocks. Every format comes down to the same thing, which is what
// the rest of the kernel knows of it: 32 inputs share a scale (of Q6_K 16 do), and a weight is
//
//   scale · (q − zero) + least        q: unsigned, of 4, 5, 6 or 8 bits
//
// with either a zero (Q4_0, Q5_0, Q6_K, Q8_0) or a least weight (Q4_1, Q5_1, Q4_K, Q5_K).
#ifndef MULTIRATE_BLOCKS_H
#define MULTIRATE_BLOCKS_H
#include <assert.h>
#include <stdint.h>

typedef uint16_t fp16;

#define BLOCK 32  // inputs that share a scale
#define SUPER 256 // inputs of a K-quant's block

typedef struct {
    fp16 d;
    int8_t q[BLOCK];
} BlockQ8_0;
typedef struct {
    fp16 d;
    uint8_t q[BLOCK / 2]; // input i in the lower half of byte i, input 16 + i in the upper
} BlockQ4_0;
typedef struct {
    fp16 d, m;
    uint8_t q[BLOCK / 2];
} BlockQ4_1;
typedef struct {
    fp16 d;
    uint8_t high[4]; // the fifth bit of input i is bit i
    uint8_t q[BLOCK / 2];
} BlockQ5_0;
typedef struct {
    fp16 d, m;
    uint8_t high[4];
    uint8_t q[BLOCK / 2];
} BlockQ5_1;
typedef struct {
    fp16 d, dmin;
    uint8_t scales[12]; // eight scales and eight mins of six bits
    uint8_t q[SUPER / 2];
} BlockQ4_K;
typedef struct {
    fp16 d, dmin;
    uint8_t scales[12];
    uint8_t high[SUPER / 8];
    uint8_t q[SUPER / 2];
} BlockQ5_K;
typedef struct {
    uint8_t q[SUPER / 2];
    uint8_t high[SUPER / 4];
    int8_t scales[SUPER / 16];
    fp16 d;
} BlockQ6_K;

static_assert(sizeof(BlockQ8_0) == 34, "Q8_0");
static_assert(sizeof(BlockQ4_0) == 18, "Q4_0");
static_assert(sizeof(BlockQ4_1) == 20, "Q4_1");
static_assert(sizeof(BlockQ5_0) == 22, "Q5_0");
static_assert(sizeof(BlockQ5_1) == 24, "Q5_1");
static_assert(sizeof(BlockQ4_K) == 144, "Q4_K");
static_assert(sizeof(BlockQ5_K) == 176, "Q5_K");
static_assert(sizeof(BlockQ6_K) == 210, "Q6_K");

// 32 inputs of an output. scale: fp16, of all of them or of a K-quant's whole block, in which case
// `factor` (of Q6_K one for each 16 inputs) multiplies it; so with least and least_factor, where
// the least weight is −least · least_factor.
typedef struct {
    uint8_t q[BLOCK];
    fp16 scale, least;
    int16_t factor[2], least_factor;
} Unit;

// Reads the 32 inputs from 32 · block on of a row.
typedef void (*ReadUnit)(const void *row, long block, Unit *to);
void read_q8_0(const void *row, long block, Unit *to);
void read_q4_0(const void *row, long block, Unit *to);
void read_q4_1(const void *row, long block, Unit *to);
void read_q5_0(const void *row, long block, Unit *to);
void read_q5_1(const void *row, long block, Unit *to);
void read_q4_k(const void *row, long block, Unit *to);
void read_q5_k(const void *row, long block, Unit *to);
void read_q6_k(const void *row, long block, Unit *to);
#endif
