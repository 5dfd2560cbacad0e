// Lays out a model's weights for the products of gemm.c, a column of 16 outputs at a time, on all
// threads. Each layout is drawn in the file that reads it (docs/kernel.md, Layouts).
#include "round_weights.h"
#include "threads.h"

#define COLUMN 16

typedef struct {
    const Unpacked *from;
    int format, nearest;
    char *to;
    void *scale;
    atomic_int refused;
} Packing;

// What a thread works on: a column's weights [COLUMN, in], and its integers; `halves`: of less than
// 16 bits, [COLUMN, in] or more.
typedef struct {
    float *weights;
    int16_t *wide;
    uint8_t *halves;
} Column;

static void *room_for(size_t size) {
    void *made = malloc(size);
    if (!made)
        abort();
    return made;
}

static void read_output(const Unpacked *from, int output, float *to) {
    int in = from->inputs;
    if (output >= from->outputs) {
        memset(to, 0, (size_t)in * sizeof *to);
        return;
    }
    if (from->wide) {
        memcpy(to, (const float *)from->values + (size_t)output * in, (size_t)in * sizeof *to);
        return;
    }
    const bf16 *values = (const bf16 *)from->values + (size_t)output * in;
    for (int i = 0; i < in; i++)
        to[i] = from_bf16(values[i]);
}

static inline bf16 bf16_of(float w) {
    return isnan(w) ? 0x7fc0 : to_bf16(w); // a NaN's bits may round to infinity, or to zero
}

static void lay_out_bf16(const Packing *p, const Column *column, int c) {
    int in = p->from->inputs;
    for (int o = 0; o < COLUMN; o++) {
        bf16 *to = (bf16 *)p->to + (size_t)(c / 4) * 64 * in + c % 4 * 32 + o * 2;
        for (int i = 0; i < in; i += 2, to += 128) {
            to[0] = bf16_of(column->weights[(size_t)o * in + i]);
            to[1] = bf16_of(column->weights[(size_t)o * in + i + 1]);
        }
    }
}

static void lay_out_int16(const Packing *p, const Column *column, int c) {
    int in = p->from->inputs;
    for (int o = 0; o < COLUMN; o++) {
        const int16_t *q = column->wide + (size_t)o * in;
        int16_t *to = (int16_t *)p->to + (size_t)c * COLUMN * in + o * 2;
        for (int i = 0; i < in; i += 2, to += 32)
            memcpy(to, q + i, 2 * sizeof *q);
    }
}

static void lay_out_int8(const Packing *p, const Column *column, int c) {
    int in = p->from->inputs;
    for (int o = 0; o < COLUMN; o++) {
        const int16_t *q = column->wide + (size_t)o * in;
        int8_t *to = (int8_t *)p->to + (size_t)c * COLUMN * in + o * 2;
        for (int i = 0; i < in; i += 2, to += 32) {
            to[0] = (int8_t)q[i];
            to[1] = (int8_t)q[i + 1];
        }
    }
}

// Weights of WEIGHTS_INT12 as bytes and codes, shift + 8 · sign. Returns 0 where one has more than
// eight significant bits. Without branches: a compiler makes vectors of it.
static int split_in_twelve(const int16_t *q, int in, uint8_t *bytes, uint8_t *codes) {
    uint16_t lost = 0;
    for (int i = 0; i < in; i++) {
        uint16_t sign = (uint16_t)(q[i] < 0 ? 0xffff : 0), size = (uint16_t)((q[i] ^ sign) - sign),
                 shift = 0;
        for (int step = 0; step < 7; step++) {
            uint16_t large = size > 255;
            lost |= size & large;
            size = (uint16_t)(size >> large);
            shift = (uint16_t)(shift + large);
        }
        bytes[i] = (uint8_t)size;
        codes[i] = (uint8_t)(shift | (sign & 8));
    }
    return !lost;
}

static inline uint32_t four_bytes(uint8_t a, uint8_t b, uint8_t c, uint8_t d) {
    return a | (uint32_t)b << 8 | (uint32_t)c << 16 | (uint32_t)d << 24;
}

static inline uint8_t two_codes(uint8_t low, uint8_t high) {
    return (uint8_t)(low | high << 4);
}

// Returns 0 where a weight does not fit.
static int lay_out_int12(const Packing *p, const Column *column, int c) {
    int in = p->from->inputs;
    uint8_t *bytes = column->halves, *codes = bytes + in;
    for (int o = 0; o < COLUMN; o++) {
        if (!split_in_twelve(column->wide + (size_t)o * in, in, bytes, codes))
            return 0;
        uint8_t *to = (uint8_t *)p->to + (size_t)c * COLUMN * in / 2 * 3 + o * 4;
        for (int i = 0; i < in; i += 8, to += 192) {
            const uint8_t *w = bytes + i, *k = codes + i;
            uint32_t early = four_bytes(w[0], w[2], w[1], w[3]),
                     late = four_bytes(w[4], w[6], w[5], w[7]),
                     both = four_bytes(two_codes(k[0], k[2]), two_codes(k[4], k[6]),
                                       two_codes(k[1], k[3]), two_codes(k[5], k[7]));
            memcpy(to, &early, 4);
            memcpy(to + 64, &late, 4);
            memcpy(to + 128, &both, 4);
        }
    }
    return 1;
}

static void lay_out_bytes(const Packing *p, const Column *column, int c) {
    int in = p->from->inputs, blocks = (in + W8_BLOCK - 1) / W8_BLOCK;
    bf16 *units = (bf16 *)p->scale + (size_t)c * blocks * COLUMN;
    for (int o = 0; o < COLUMN; o++) {
        int16_t *q = column->wide + (size_t)o * in;
        for (int b = 0; b < blocks; b++) {
            int begin = b * W8_BLOCK, count = in - begin < W8_BLOCK ? in - begin : W8_BLOCK;
            float unit =
                round_block_to_bytes(column->weights + (size_t)o * in + begin, count, q + begin);
            units[b * COLUMN + o] = bf16_of(unit);
        }
        uint8_t *bytes = column->halves, *to = (uint8_t *)p->to + (size_t)c * COLUMN * in + o * 4;
        for (int i = 0; i < in; i++)
            bytes[i] = (uint8_t)(q[i] + 128); // as the instruction takes them
        for (int i = 0; i < in; i += 4, to += 64)
            memcpy(to, bytes + i, 4);
    }
}

#if BYTE_PRODUCTS
// Returns 0 where only such numbers are wanted and these are not.
static int lay_out_half_bytes(const Packing *p, const Column *column, int c) {
    int in = p->from->inputs, blocks = in / W8_BLOCK;
    uint16_t *scales = (uint16_t *)p->scale + (size_t)c * blocks * 2 * COLUMN;
    float lacking = 0.0f, size = 0.0f;
    for (int o = 0; o < COLUMN; o++) {
        uint8_t *q = column->halves + (size_t)o * in;
        for (int b = 0; b < blocks; b++) {
            const float *w = column->weights + (size_t)o * in + b * W8_BLOCK;
            HalfByteBlock found = p->nearest ? round_block_to_half_bytes(w, q + b * W8_BLOCK)
                                             : find_half_bytes_again(w, q + b * W8_BLOCK);
            scales[2 * b * COLUMN + o] = _cvtss_sh(found.unit, _MM_FROUND_TO_NEAREST_INT);
            scales[(2 * b + 1) * COLUMN + o] = _cvtss_sh(found.least, _MM_FROUND_TO_NEAREST_INT);
            lacking += found.lacking;
            size += found.size;
        }
        uint8_t *to = (uint8_t *)p->to + (size_t)c * COLUMN * in / 2 + o * 4;
        for (int i = 0; i < in; i += 8, to += 64)
            for (int j = 0; j < 4; j++)
                to[j] = (uint8_t)(q[i + j] | q[i + j + 4] << 4);
    }
    // a sum that is no number is not near, either
    return p->nearest || lacking <= HALF_BYTES_NEAR * HALF_BYTES_NEAR * size;
}
#else
static int lay_out_half_bytes(const Packing *p, const Column *column, int c) {
    (void)p;
    (void)column;
    (void)c;
    return 0; // nothing multiplies them
}
#endif

static int pack_column(const Packing *p, const Column *column, int c) {
    int in = p->from->inputs, format = p->format;
    for (int o = 0; o < COLUMN; o++)
        read_output(p->from, c * COLUMN + o, column->weights + (size_t)o * in);
    if (format == WEIGHTS_BF16) {
        lay_out_bf16(p, column, c);
        return 1;
    }
    if (format == WEIGHTS_W8A8 || format == WEIGHTS_W8A16) {
        lay_out_bytes(p, column, c);
        return 1;
    }
    if (format == WEIGHTS_W4A8 || format == WEIGHTS_W4A16)
        return lay_out_half_bytes(p, column, c);
    for (int o = 0; o < COLUMN; o++) {
        const float *w = column->weights + (size_t)o * in;
        int16_t *q = column->wide + (size_t)o * in;
        float unit = format == WEIGHTS_INT8 ? round_to_int8(w, in, q) : round_to_int16(w, in, q);
        ((float *)p->scale)[c * COLUMN + o] = unit;
    }
    if (format == WEIGHTS_INT8)
        lay_out_int8(p, column, c);
    else if (format == WEIGHTS_INT16)
        lay_out_int16(p, column, c);
    else
        return lay_out_int12(p, column, c);
    return 1;
}

static void pack_columns(Workspace *work, void *context, int id, int threads) {
    (void)work;
    Packing *p = context;
    size_t weights = (size_t)COLUMN * p->from->inputs;
    Column column = {room_for(weights * sizeof(float)), room_for(weights * sizeof(int16_t)),
                     room_for(weights)};
    int columns = (p->from->outputs + 63) / 64 * 4;
    for (int c = id; c < columns && !atomic_load_explicit(&p->refused, memory_order_relaxed);
         c += threads)
        if (!pack_column(p, &column, c))
            atomic_store_explicit(&p->refused, 1, memory_order_relaxed);
    free(column.weights);
    free(column.wide);
    free(column.halves);
}

int mr_pack(Workspace *work, const Unpacked *from, int format, int nearest, void *to, void *scale) {
    Packing packing = {from, format, nearest, to, scale, 0};
    run_parallel(work, pack_columns, &packing, from, 0);
    return !packing.refused;
}

typedef struct {
    const Unpacked *from;
    float *error, *norm;
} Screening;

// An output's bound, rounded up; none where it is not finite.
static float bound_of(double square) {
    return isfinite(square) ? (float)sqrt(square) * 1.0001f : INFINITY;
}

INLINE f16 numbers(const int16_t *q) {
    s16 found;
    memcpy(&found, q, sizeof found);
    return __builtin_convertvector(found, f16);
}
INLINE f8d squares(f16 v) {
    f8 halves[2];
    memcpy(halves, &v, sizeof v);
    f8d low = __builtin_convertvector(halves[0], f8d),
        high = __builtin_convertvector(halves[1], f8d);
    return low * low + high * high;
}

static void measure_outputs(Workspace *work, void *context, int id, int threads) {
    (void)work;
    const Screening *s = context;
    int in = s->from->inputs, whole = (in + W8_BLOCK - 1) / W8_BLOCK * W8_BLOCK;
    float *w = room_for((size_t)in * sizeof *w);
    size_t size = (size_t)whole * sizeof(int16_t);
    int16_t *q = memset(room_for(size), 0, size), *bytes = memset(room_for(size), 0, size);
    for (int o = id; o < s->from->outputs; o += threads) {
        f8d error = {0}, norm = {0};
        read_output(s->from, o, w);
        f16 fine = splat(round_to_int16(w, in, q));
        for (int begin = 0; begin < in; begin += W8_BLOCK) {
            int count = in - begin < W8_BLOCK ? in - begin : W8_BLOCK;
            f16 unit = splat(round_block_to_bytes(w + begin, count, bytes + begin));
            for (int i = begin; i < begin + W8_BLOCK; i += 16) {
                f16 copied = numbers(bytes + i) * unit;
                error += squares(numbers(q + i) * fine - copied);
                norm += squares(copied);
            }
        }
        s->error[o] = bound_of(sum_of(error));
        s->norm[o] = bound_of(sum_of(norm));
    }
    free(w);
    free(q);
    free(bytes);
}

void mr_screening_norms(Workspace *work, const Unpacked *from, float *error, float *norm) {
    Screening screening = {from, error, norm};
    run_parallel(work, measure_outputs, &screening, from, 0);
}
