// Lays out a model's weights for the products of gemm.c, a column of 16 outputs at a time, on all
// threads. Each layout is drawn in the file that reads it (docs/kernel.md, Layouts).
#include "threads.h"
#include "weights/blocks.h"

typedef struct {
    const Unpacked *from;
    int format;
    char *to;
    float *scale;
    atomic_int refused;
} Packing;

// What a thread works on: a column's weights [COLUMN, in], its integers, and the bytes and codes of
// WEIGHTS_INT12.
typedef struct {
    float *weights;
    int16_t *wide;
    uint8_t *halves;
} PlainColumn;

static void *room_for(size_t size) {
    void *made = malloc(size);
    if (!made)
        abort();
    return made;
}

static inline bf16 bf16_of(float w) {
    return isnan(w) ? 0x7fc0 : to_bf16(w); // a NaN's bits may round to infinity, or to zero
}

static void lay_out_bf16(const Packing *p, const PlainColumn *column, int c) {
    int in = p->from->inputs;
    for (int o = 0; o < COLUMN; o++) {
        bf16 *to = (bf16 *)p->to + (size_t)(c / 4) * 64 * in + c % 4 * 32 + o * 2;
        for (int i = 0; i < in; i += 2, to += 128) {
            to[0] = bf16_of(column->weights[(size_t)o * in + i]);
            to[1] = bf16_of(column->weights[(size_t)o * in + i + 1]);
        }
    }
}

static void lay_out_int16(const Packing *p, const PlainColumn *column, int c) {
    int in = p->from->inputs;
    for (int o = 0; o < COLUMN; o++) {
        const int16_t *q = column->wide + (size_t)o * in;
        int16_t *to = (int16_t *)p->to + (size_t)c * COLUMN * in + o * 2;
        for (int i = 0; i < in; i += 2, to += 32)
            memcpy(to, q + i, 2 * sizeof *q);
    }
}

static inline uint32_t four_bytes(uint8_t a, uint8_t b, uint8_t c, uint8_t d) {
    return a | (uint32_t)b << 8 | (uint32_t)c << 16 | (uint32_t)d << 24;
}

static inline uint8_t two_codes(uint8_t low, uint8_t high) {
    return (uint8_t)(low | high << 4);
}

// Returns 0 where a weight does not fit.
static int lay_out_int12(const Packing *p, const PlainColumn *column, int c) {
    int in = p->from->inputs;
    uint8_t *bytes = column->halves, *codes = bytes + in;
    for (int o = 0; o < COLUMN; o++) {
        if (!vectors()->split_in_twelve(column->wide + (size_t)o * in, in, bytes, codes))
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

static int pack_column(const Packing *p, const PlainColumn *column, int c) {
    int in = p->from->inputs, format = p->format;
    for (int o = 0; o < COLUMN; o++)
        read_unpacked(p->from, c * COLUMN + o, column->weights + (size_t)o * in);
    if (format == WEIGHTS_BF16) {
        lay_out_bf16(p, column, c);
        return 1;
    }
    for (int o = 0; o < COLUMN; o++)
        p->scale[c * COLUMN + o] = vectors()->round_to_int16(column->weights + (size_t)o * in, in,
                                                             column->wide + (size_t)o * in);
    if (format == WEIGHTS_INT12)
        return lay_out_int12(p, column, c);
    lay_out_int16(p, column, c);
    return 1;
}

static void pack_columns(Workspace *work, void *context, int id, int threads) {
    (void)work;
    Packing *p = context;
    size_t weights = (size_t)COLUMN * p->from->inputs;
    PlainColumn column = {room_for(weights * sizeof(float)), room_for(weights * sizeof(int16_t)),
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

int mr_pack(Workspace *work, const Unpacked *from, int format, void *to, void *scale) {
    Packing packing = {from, format, to, scale, 0};
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

// The squares of 16 numbers, in eight sums.
static void add_squares(const float *v, double *sums) {
    for (int l = 0; l < 8; l++)
        sums[l] += (double)v[l] * v[l] + (double)v[l + 8] * v[l + 8];
}

static float bound_of_sums(const double *sums) {
    double total = 0.0;
    for (int l = 0; l < 8; l++)
        total += sums[l];
    return bound_of(total);
}

// An output's bounds: of what its 8-bit copy lacks, and of the copy.
static void measure(const void *blocks, const int16_t *q, float fine, int in, float *error,
                    float *norm) {
    double lost[8] = {0}, kept[8] = {0};
    for (int b = 0; b < in / BLOCK; b++, q += BLOCK) {
        Unit unit;
        read_unit(format_of(WEIGHTS_Q8_0), blocks, b, &unit);
        float copied[BLOCK], missing[BLOCK], scale = from_fp16(unit.scale);
        for (int i = 0; i < BLOCK; i++) {
            copied[i] = (float)(unit.q[i] - 128) * scale;
            missing[i] = (float)q[i] * fine - copied[i];
        }
        for (int i = 0; i < BLOCK; i += 16) {
            add_squares(missing + i, lost);
            add_squares(copied + i, kept);
        }
    }
    *error = bound_of_sums(lost);
    *norm = bound_of_sums(kept);
}

static void measure_outputs(Workspace *work, void *context, int id, int threads) {
    (void)work;
    const Screening *s = context;
    int in = s->from->inputs;
    float *w = room_for((size_t)in * sizeof *w);
    int16_t *q = room_for((size_t)in * sizeof *q);
    void *blocks = room_for((size_t)in / BLOCK * format_of(WEIGHTS_Q8_0)->bytes);
    for (int o = id; o < s->from->outputs; o += threads) {
        read_unpacked(s->from, o, w);
        quantise_row(WEIGHTS_Q8_0, w, in, blocks);
        measure(blocks, q, vectors()->round_to_int16(w, in, q), in, s->error + o, s->norm + o);
    }
    free(w);
    free(q);
    free(blocks);
}

void mr_screening_norms(Workspace *work, const Unpacked *from, float *error, float *norm) {
    Screening screening = {from, error, norm};
    run_parallel(work, measure_outputs, &screening, from, 0);
}
