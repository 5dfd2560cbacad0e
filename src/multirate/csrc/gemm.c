// y = W x for a few rows of x, reading each packed weight once for all rows.
//
// Each output is summed over k in one fixed order by one accumulator, whatever the number of rows:
// a row's result is bit-identical alone or beside others. This is what makes bf16 verification
// exact.
//
// Packed bf16 weights (WEIGHTS_BF16): [outputs / 64][inputs / 2][4][16][2].
// oAiB is the weight of output A and input B:
//
//   group 0, inputs 0 and 1, 4 lines of 64 bytes (16 outputs, 2 inputs each):
//     | o0i0  o0i1  o1i0  o1i1  … o15i0 o15i1 |
//     | o16i0 o16i1 o17i0 o17i1 … o31i0 o31i1 |
//     | o32i0 o32i1 …             o47i0 o47i1 |
//     | o48i0 o48i1 …             o63i0 o63i1 |
//   group 0, inputs 2 and 3: 4 lines
//   …
//   group 1, inputs 0 and 1: outputs 64 … 127
//   …
//
// So a group is read from its first byte to its last, and a pair of a row's inputs, broadcast,
// meets 16 outputs in one instruction. gate_up has 32 gates and their 32 ups in each group, so that
// gate · up is formed, the gate through SiLU or GELU, as soon as a group's sums are there.
#include "gemm.h"

#include "shares.h"

// What the rows of a layer have to become: a bit for each ROWS_… and START_… of its formats.
typedef struct {
    unsigned rows, starts;
} Needs;

static void add_needs(Needs *needs, int format) {
    const Format *f = format_of(format);
    needs->rows |= 1u << f->rows;
    if (is_quantised(f))
        needs->starts |= 1u << f->start;
}

static Needs needs_of(const Linear *linear) {
    Needs needs = {0, 0};
    if (!linear->columns)
        add_needs(&needs, linear->format);
    else
        for (int c = 0; c < linear->outputs / COLUMN; c++)
            add_needs(&needs, linear->columns[c].format);
    return needs;
}

// Rows of a tile: as few tiles as there can be, which are even.
static int rows_of_tile(const Needs *needs, int rows) {
    int most = PRODUCT_ROWS;
    if (needs->rows >> ROWS_FLOAT & 1 && most > TILE_ROWS)
        most = TILE_ROWS;
    if (needs->rows >> ROWS_BYTES & 1 && most > arch()->bytes->lanes)
        most = arch()->bytes->lanes;
    if (needs->rows >> ROWS_FIXED & 1 && most > vectors()->fixed_rows)
        most = vectors()->fixed_rows;
    int tiles = (rows + most - 1) / most, share = (rows + tiles - 1) / tiles;
    if (tiles > 1 && needs->rows >> ROWS_FIXED & 1 && vectors()->fixed_lanes(share) <= most)
        share = vectors()->fixed_lanes(share); // lanes beyond a tile's rows are work for nothing:
                                               // only the last tile has some
    return share;
}

static void prepare_bytes(Operand *out, ThreadScratch *mine, unsigned starts, const float *const *x,
                          int in) {
    size_t row_room = byte_rows_room(1, in, starts);
    int rows = out->begin[out->tiles], most = 0;
    for (int t = 0; t < out->tiles; t++)
        most = out->begin[t + 1] - out->begin[t] > most ? out->begin[t + 1] - out->begin[t] : most;
    // the tiles, and a tile's rows and scales before they are arranged
    size_t tile_room = (size_t)most * ((size_t)in / BLOCK * sizeof(float) + (size_t)in);
    char *room = mine->bytes = grown(mine->bytes, rows * row_room + tile_room);
    float *scales = (float *)(room + rows * row_room);
    int8_t *q = (int8_t *)(scales + (size_t)most * (in / BLOCK));
    for (int t = 0; t < out->tiles; t++) {
        int first = out->begin[t], lanes = out->begin[t + 1] - first;
        for (int n = 0; n < lanes; n++)
            arch()->bytes->quantise(x[first + n], in, q + (size_t)n * in,
                                    scales + (size_t)n * (in / BLOCK));
        lay_out_byte_rows(q, scales, lanes, in, starts, room, &out->bytes[t]);
        room += lanes * row_room;
    }
}

void prepare(Operand *out, ThreadScratch *mine, const Linear *linear, const float *const *x,
             int rows) {
    Needs needs = needs_of(linear);
    int share = rows_of_tile(&needs, rows);
    out->tiles = 0;
    for (int n = 0; n < rows; n += share)
        out->begin[out->tiles++] = n;
    out->begin[out->tiles] = rows;
    out->rows = x;
    if (needs.rows >> ROWS_BYTES & 1)
        prepare_bytes(out, mine, needs.starts, x, linear->inputs);
    if (needs.rows >> ROWS_FIXED & 1)
        prepare_fixed(out, mine, x, rows, linear->inputs);
}

static void product_floats(const Linear *linear, int first_of, int last_of, const Operand *x,
                           int part, const char *after, float (*acc)[GROUP_FLOATS]) {
    int pairs = linear->inputs / 2, parts = x->tiles, first = x->begin[part],
        rows = x->begin[part + 1] - first,
        lines = parts == 1  ? 0
                : parts < 4 ? 2
                            : 1;
    if (lines && part >= 4 / lines)
        lines = 0; // the tiles before have fetched it all
    int columns = last_of - first_of;
    float *to = acc[0] + COLUMN * (first_of % GROUP_COLUMNS);
    for (int r = 0; r < rows; r++)
        memset(to + r * GROUP_FLOATS, 0, (size_t)columns * COLUMN * sizeof *to);
    vectors()->tile((const uint32_t *)weights_of(linear, first_of), 64, x->rows + first, rows,
                    pairs, columns, after + (size_t)part * pairs * 64 * lines, lines, to);
}

// What the pass over column c fetches meanwhile, `next` being the weights behind it. Where the rows
// take several tiles, each fetches a share of the next group's weights: otherwise memory would idle
// from the second tile on.
static Ahead ahead_of(const Column *column, int inputs, const Operand *x, int part,
                      const char *next, const char *after) {
    long lines = (long)(column_bytes(format_of(column->format), inputs) / LINE_BYTES),
         distance = lines_ahead(x->begin[part + 1] - x->begin[part], column->format);
    if (x->tiles > 1) {
        long stride = (LINE_BYTES + x->tiles - 1) / x->tiles;
        return (Ahead){after + part * lines * stride, NULL, lines, stride};
    }
    if (distance > lines)
        distance = lines;
    return (Ahead){(const char *)column->weight + distance * LINE_BYTES,
                   next - (lines - distance) * LINE_BYTES, lines - distance, LINE_BYTES};
}

// acc[r][m] = the outputs of columns [first, last) of one group, all of one format, m counted in
// the group, for row r of a tile, without bias. after: the weights that the thread reads next.
static void product(const Linear *linear, int first, int last, const Operand *x, int part,
                    const char *after, float (*acc)[GROUP_FLOATS]) {
    const Format *f = format_of(column_of(linear, first).format);
    if (f->rows == ROWS_FLOAT) {
        product_floats(linear, first, last, x, part, after, acc);
        return;
    }
    int row = x->begin[part], inputs = linear->inputs;
    size_t bytes = column_bytes(f, inputs);
    for (int c = first; c < last; c++) {
        Column column = column_of(linear, c);
        Ahead ahead =
            ahead_of(&column, inputs, x, part, c + 1 < last ? weights_of(linear, c + 1) : after,
                     after + (size_t)(c - first) * bytes);
        float *to = acc[0] + COLUMN * (c % GROUP_COLUMNS);
        if (f->rows == ROWS_BYTES)
            arch()->bytes->product[column.format](&column, &x->bytes[part], inputs / BLOCK, &ahead,
                                                  to, GROUP_FLOATS);
        else
            vectors()->fixed_product(&column, x->arranged[part], x->begin[part + 1] - row,
                                     inputs / 2, x->scale + row, x->outliers + row, &ahead, to);
    }
}

// Where the run of columns from `first` on ends that have one format.
static int end_of_format(const Linear *linear, int first, int last) {
    int c = first + 1;
    if (!linear->columns)
        return last;
    while (c < last && linear->columns[c].format == linear->columns[first].format)
        c++;
    return c;
}

void matmul_columns(const Linear *linear, const Operand *x, const int *target, int mode, Output out,
                    int begin, int end, const char *then) {
    for (int c = begin, stop; c < end; c = stop) {
        int g = c / GROUP_COLUMNS, from = c % GROUP_COLUMNS, left = from + end - c,
            to = left < GROUP_COLUMNS ? left : GROUP_COLUMNS;
        stop = c + to - from;
        const char *after = stop < end ? weights_of(linear, stop)
                            : then     ? then
                                       : weights_of(linear, c);
        // the later tiles find the group's weights in the core's own cache
        for (int part = 0; part < x->tiles; part++) {
            _Alignas(64) float acc[PRODUCT_ROWS][GROUP_FLOATS];
            int first = x->begin[part], rows = x->begin[part + 1] - first;
            for (int run = c, ends; run < stop; run = ends) {
                ends = end_of_format(linear, run, stop);
                product(linear, run, ends, x, part, after, acc);
            }
            vectors()->put_sums(acc, rows, linear->bias, target, first, mode, out, g, from, to);
        }
    }
}

void matmul(Workspace *work, const Linear *linear, const float *const *x, int rows,
            const int *target, int mode, int whole, Output out, const Linear *then, int thread,
            int threads) {
    int begin = first_column(linear, whole, thread, threads),
        end = first_column(linear, whole, thread + 1, threads);
    if (begin == end)
        return;
    Operand operands;
    prepare(&operands, &work->own[thread], linear, x, rows);
    matmul_columns(linear, &operands, target, mode, out, begin, end,
                   then ? weights_of(then, first_column(then, 0, thread, threads)) : NULL);
}

void matmul_balanced(Workspace *work, const Linear *linear, const float *const *x, int rows,
                     int mode, Output out, const Linear *then, int thread, int threads) {
    int whole = is_gate(mode), unit = unit_of(linear, whole), units = linear->outputs / 16 / unit;
    if (threads == 1 || units > MOST_UNITS) {
        matmul(work, linear, x, rows, NULL, mode, whole, out, then, thread, threads);
        return;
    }
    Operand operands;
    prepare(&operands, &work->own[thread], linear, x, rows);
    int end = first_column(linear, whole, thread + 1, threads), first, count;
    const char *later = then ? weights_of(then, first_column(then, 0, thread, threads)) : NULL;
    Shares shares = open_shares(work, units, thread, threads);
    while ((count = take_units(&shares, &first) * unit)) {
        first *= unit;
        int more = own_units(&shares) && first + count < end;
        matmul_columns(linear, &operands, NULL, mode, out, first, first + count,
                       more ? weights_of(linear, first + count) : later);
    }
}

const float **row_pointers(const float *base, int stride, const int *index, int count,
                           const float **to) {
    for (int n = 0; n < count; n++)
        to[n] = base + (size_t)(index ? index[n] : n) * stride;
    return to;
}

void low_rank_in(Workspace *work, const LowRank *site, const float *base, int stride,
                 const int *index, int count, int id, int threads) {
    const float *from[MAX_ROWS];
    int width = site->a.outputs;
    matmul(work, &site->a, row_pointers(base, stride, index, count, from), count, NULL, STORE, 0,
           (Output){.y = work->low, .stride = width}, NULL, id, threads);
    barrier(work, threads);
    int begin = (int)((long)count * width / COLUMN * id / threads) * COLUMN,
        end = (int)((long)count * width / COLUMN * (id + 1) / threads) * COLUMN;
    if (site->silu)
        vectors()->silu(work->low + begin, end - begin, work->low_in + begin);
    else
        memcpy(work->low_in + begin, work->low + begin, (size_t)(end - begin) * sizeof *work->low);
    barrier(work, threads);
}

void low_rank_out(Workspace *work, const LowRank *site, float *y, int stride, const int *index,
                  int count, int id, int threads) {
    const float *from[MAX_ROWS];
    matmul(work, &site->b, row_pointers(work->low_in, site->a.outputs, NULL, count, from), count,
           index, ADD, 1, (Output){.y = y, .stride = stride}, NULL, id, threads);
}

// The thread's own copy of a product's rows, normed where it says so.
static void read_product(Workspace *work, const Product *p, int id, const float **from) {
    int in = p->linear->inputs;
    float *normed = room_for_normed(&work->own[id], in);
    for (int n = 0; n < p->count; n++)
        vectors()->read_row(p->x + (size_t)n * in, p->norm, in, p->eps, normed + (size_t)n * in);
    row_pointers(normed, in, NULL, p->count, from);
}

static void multiply_product(Workspace *work, const Product *p, const float **from, int id,
                             int threads) {
    matmul(work, p->linear, from, p->count, NULL, p->mode, 0,
           (Output){.y = p->y, .stride = p->linear->outputs}, NULL, id, threads);
}

void run_product(Workspace *work, void *context, int id, int threads) {
    const float *from[MAX_ROWS];
    read_product(work, context, id, from);
    multiply_product(work, context, from, id, threads);
}

void run_product_in_place(Workspace *work, const Product *p, int id, int threads) {
    const float *from[MAX_ROWS];
    read_product(work, p, id, from);
    barrier(work, threads);
    multiply_product(work, p, from, id, threads);
}

void mr_linear(Workspace *work, const Linear *linear, const float *x, const float *norm, float eps,
               int count, float *y, int add) {
    for (int n = 0; n < count; n += MAX_ROWS) {
        int take = count - n < MAX_ROWS ? count - n : MAX_ROWS;
        Product p = {linear, x + (size_t)n * linear->inputs,
                     norm,   y + (size_t)n * linear->outputs,
                     take,   add ? ADD : STORE,
                     eps};
        run_parallel(work, run_product, &p, linear, take);
    }
}
