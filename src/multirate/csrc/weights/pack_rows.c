// Lays out rows of a GGUF tensor for the products (format.h draws the columns), on all threads.
#include "../threads.h"
#include "blocks.h"

typedef struct {
    const void *const *rows;
    int count, inputs, format;
    char *to, *scale;
    atomic_int bad; // the first row whose scales are not finite
} Packing;

// Puts 32 unsigned numbers where one output's are in a column's lines.
static void squeeze(const uint8_t *q, int bits, int output, uint8_t *lines) {
    uint8_t *to = lines + 4 * output, *more = to + 4 * LINE_BYTES;
    if (bits == 8) {
        for (int k = 0; k < 8; k++, to += LINE_BYTES)
            memcpy(to, q + 4 * k, 4);
        return;
    }
    for (int j = 0; j < 4; j++, to += LINE_BYTES)
        for (int i = 0; i < 4; i++)
            to[i] = (uint8_t)((q[8 * j + i] & 15) | q[8 * j + 4 + i] << 4);
    for (int i = 0; bits == 5 && i < 4; i++)
        for (int k = 0; k < 8; k++)
            more[i] |= (uint8_t)((q[4 * k + i] >> 4) << k);
    for (int i = 0; bits == 6 && i < 4; i++)
        for (int k = 0; k < 8; k++)
            more[k / 4 * LINE_BYTES + i] |= (uint8_t)((q[4 * k + i] >> 4) << 2 * (k % 4));
}

static int is_finite(fp16 half) {
    return (half & 0x7c00) != 0x7c00;
}

// A unit's scales. Returns whether they are finite.
static int put_scales(const Format *f, const Unit *unit, long b, int output, uint8_t *scales) {
    uint8_t *at = scales + scale_bytes(f, f->factors ? b / 8 * SUPER : b * BLOCK);
    size_t halves = COLUMN * sizeof(fp16);
    put_half(unit->scale, at + 2 * output);
    if (has_least(f))
        put_half(unit->least, at + halves + 2 * output);
    if (f->factors) {
        uint8_t *bytes = at + halves * (has_least(f) ? 2 : 1) + b % 8 * 2 * COLUMN;
        bytes[output] = (uint8_t)unit->factor[0];
        bytes[COLUMN + output] = (uint8_t)(has_least(f) ? unit->least_factor : unit->factor[1]);
    }
    return is_finite(unit->scale) && (!has_least(f) || is_finite(unit->least));
}

// One column; returns the first row of it with a scale that is not finite, or -1.
static int pack_column(const Packing *p, int c) {
    const Format *f = format_of(p->format);
    size_t bytes = column_bytes(f, p->inputs), scale_size = scale_bytes(f, p->inputs),
           lines = column_bytes(f, BLOCK);
    uint8_t *to = (uint8_t *)p->to + c * bytes, *scales = (uint8_t *)p->scale + c * scale_size;
    memset(to, 0, bytes);
    memset(scales, 0, scale_size);
    int bad = -1;
    for (int o = 0; o < COLUMN; o++) {
        int row = c * COLUMN + o;
        if (row >= p->count || !p->rows[row])
            continue; // no output: weights of zero, as the scale is
        for (long b = 0; b < p->inputs / BLOCK; b++) {
            Unit unit;
            read_unit(f, p->rows[row], b, &unit);
            squeeze(unit.q, f->bits, o, to + b * lines);
            if (!put_scales(f, &unit, b, o, scales) && bad < 0)
                bad = row;
        }
    }
    return bad;
}

static void pack_columns(Workspace *work, void *context, int id, int threads) {
    (void)work;
    Packing *p = context;
    for (int c = id; c < (p->count + COLUMN - 1) / COLUMN; c += threads) {
        int bad = pack_column(p, c), known = atomic_load(&p->bad);
        while (bad >= 0 && (known < 0 || bad < known) &&
               !atomic_compare_exchange_weak(&p->bad, &known, bad))
            continue;
    }
}

int mr_pack_rows(Workspace *work, const void *const *rows, int count, int inputs, int format,
                 void *to, void *scale) {
    Packing packing = {rows, count, inputs, format, to, scale, -1};
    run_parallel(work, pack_columns, &packing, rows, 0);
    return packing.bad;
}

typedef struct {
    const Unpacked *from;
    int format;
    char *blocks;
} Quantising;

static void quantise_rows(Workspace *work, void *context, int id, int threads) {
    (void)work;
    const Quantising *q = context;
    const Unpacked *from = q->from;
    const Format *f = format_of(q->format);
    size_t row_bytes = (size_t)from->inputs / f->piece * f->bytes;
    float *row = malloc((size_t)from->inputs * sizeof *row);
    if (!row)
        abort();
    for (int o = id; o < from->outputs; o += threads) {
        read_unpacked(from, o, row);
        quantise_row(q->format, row, from->inputs, q->blocks + o * row_bytes);
    }
    free(row);
}

void mr_quantise(Workspace *work, const Unpacked *from, int format, void *blocks) {
    Quantising quantising = {from, format, blocks};
    run_parallel(work, quantise_rows, &quantising, from, 0);
}
