// The argmax of a head's logits without reading most of the head. An 8-bit copy, with half the
// bytes and half the instructions, gives an upper bound of every token's logit. The few tokens that
// could still win are computed with the head itself, so the result is exactly the head's argmax.
//
// For an output with weights w, the copy's ŵ, a row x and its copy x̂ (Cauchy-Schwarz):
//
//   |w·x − ŵ·x̂| ≤ ‖w − ŵ‖ ‖x‖ + ‖ŵ‖ ‖x − x̂‖
//
// The norms of the weights are computed once, those of a row together with its copy. The head
// itself rounds as well: its 16-bit rows (fixed_point.c) are off by at most ‖x‖ √inputs / 64000.
#include "heads.h"

#include "gemm.h"
#include "shares.h"

#define CHUNK 512 // outputs whose bounds, and their maximum, are told while they are in the cache
#define MOST_COLUMNS 256     // that are computed one by one; after these the whole row is
#define MOST_CANDIDATES 1024 // that a token is drawn among; where there are more, the whole row is

typedef struct {
    const Linear *head;
    const Screen *screen;
    const float *x, *norm;
    Reach *reach;           // out: [count]
    float *rows;            // out: as the head reads them
    float *upper, *highest; // [count, outputs], [count, chunks]
    float eps;
    int count, vocab;
} ScreenCall;

static int chunks_of(const Linear *head) {
    return (head->outputs + CHUNK - 1) / CHUNK;
}

// The norm of what a row loses when it becomes bytes.
static float rounded_off(ThreadScratch *mine, const float *row, int in) {
    mine->rest = grown(mine->rest, (size_t)2 * in * sizeof *mine->rest);
    float *lost = mine->rest, *scales = lost + in;
    int8_t *q = (int8_t *)(scales + in / BLOCK);
    arch()->bytes->quantise(row, in, q, scales);
    for (int i = 0; i < in; i += BLOCK)
        for (int j = i; j < i + BLOCK; j++)
            lost[j] = row[j] - (float)q[j] * scales[i / BLOCK];
    return sqrtf(vectors()->dot(lost, lost, in));
}

static Reach reach_of(const float *row, int in, float rounded_off) {
    float norm = sqrtf(vectors()->dot(row, row, in));
    // the head's rows in 16 bits, and every sum in fp32: an addition a block, and the outliers'
    float rounding = sqrtf((float)in) / 64000.0f + (float)(in / BLOCK + 64) * 2.4e-7f;
    return (Reach){norm * (1.0f + rounding), rounded_off * (1.0f + 1e-5f) + norm * rounding};
}

static void run_screen(Workspace *work, void *context, int id, int threads) {
    const ScreenCall *call = context;
    const Linear *linear = &call->screen->linear;
    const float *from[MAX_ROWS];
    int in = linear->inputs, count = call->count, outputs = linear->outputs,
        chunks = chunks_of(call->head);
    float *normed = room_for_normed(&work->own[id], in);
    for (int n = 0; n < count; n++)
        vectors()->read_row(call->x + (size_t)n * in, call->norm, in, call->eps,
                            normed + (size_t)n * in);
    if (id == 0)
        memcpy(call->rows, normed, (size_t)count * in * sizeof *normed);
    row_pointers(normed, in, NULL, count, from);
    Operand operand;
    prepare(&operand, &work->own[id], linear, from, count);
    Reach reach[MAX_ROWS];
    for (int n = 0; n < count; n++)
        reach[n] = reach_of(from[n], in, rounded_off(&work->own[id], from[n], in));
    if (id == 0)
        memcpy(call->reach, reach, (size_t)count * sizeof *reach);
    Shares shares = open_shares(work, chunks, id, threads);
    for (int first, taken; (taken = take_units(&shares, &first));)
        for (int c = first; c < first + taken; c++) {
            int begin = c * CHUNK, width = outputs - begin < CHUNK ? outputs - begin : CHUNK;
            matmul_columns(linear, &operand, NULL, STORE,
                           (Output){.y = call->upper, .stride = outputs}, begin / 16,
                           (begin + width) / 16,
                           c + 1 < chunks ? weights_of(linear, (begin + CHUNK) / 16) : NULL);
            for (int n = 0; n < count; n++)
                call->highest[(size_t)n * chunks + c] = vectors()->raise(
                    call->upper + (size_t)n * outputs + begin, call->screen->error + begin,
                    call->screen->norm + begin, width, call->vocab - begin, reach[n]);
        }
}

void screen_rows(Workspace *work, const Linear *head, const Screen *screen, const float *x,
                 const float *norm, float eps, int count, int vocab, float *upper) {
    int in = head->inputs, chunks = chunks_of(head);
    work->screened = grown(work->screened, (size_t)count * in * sizeof *work->screened);
    work->reach = grown(work->reach, (size_t)count * sizeof *work->reach);
    work->highest = grown(work->highest, (size_t)count * chunks * sizeof *work->highest);
    for (int n = 0; n < count; n += MAX_ROWS) {
        int take = count - n < MAX_ROWS ? count - n : MAX_ROWS;
        ScreenCall call = {head,
                           screen,
                           x + (size_t)n * in,
                           norm,
                           work->reach + n,
                           work->screened + (size_t)n * in,
                           upper + (size_t)n * head->outputs,
                           work->highest + (size_t)n * chunks,
                           eps,
                           take,
                           vocab};
        run_parallel(work, run_screen, &call, head, take);
    }
}

// The bounds of a row's logits, and what makes logits of them.
typedef struct {
    const Linear *head;
    const Screen *screen;
    float *upper, *highest;
    Reach reach;
    int vocab, chunks, count;
    int known[MOST_COLUMNS]; // columns [count] whose bounds are the head's own logits
    Operand row;
} Bounds;

// The token with the largest bound; -1: they are no numbers.
static int highest_token(const Bounds *bounds) {
    int chunk = vectors()->argmax(bounds->highest, bounds->chunks), begin = chunk * CHUNK,
        left = bounds->vocab - begin;
    if (bounds->highest[chunk] == -INFINITY)
        return -1;
    return begin + vectors()->argmax(bounds->upper + begin, left < CHUNK ? left : CHUNK);
}

static int settled(const Bounds *bounds, int token) {
    for (int i = 0; i < bounds->count; i++)
        if (bounds->known[i] == token / 16)
            return 1;
    return 0;
}

static void use_head(Bounds *bounds, int begin, int end) {
    matmul_columns(bounds->head, &bounds->row, NULL, STORE, (Output){.y = bounds->upper}, begin,
                   end, NULL);
}

// The head's own logits of a token's column take the place of their bounds. Returns 0 where there
// are too many of such columns.
static int settle(Bounds *bounds, int token) {
    if (bounds->count == MOST_COLUMNS)
        return 0;
    int column = token / 16, chunk = token / CHUNK, begin = chunk * CHUNK,
        left = bounds->vocab - begin;
    bounds->known[bounds->count++] = column;
    use_head(bounds, column, column + 1);
    const float *of = bounds->upper + begin;
    bounds->highest[chunk] = of[vectors()->argmax(of, left < CHUNK ? left : CHUNK)];
    return 1;
}

static int64_t likeliest(Bounds *bounds) {
    for (;;) {
        int token = highest_token(bounds);
        if (token >= 0 && settled(bounds, token))
            return token; // no other's bound is larger
        if (token < 0 || !settle(bounds, token)) {
            use_head(bounds, 0, bounds->head->outputs / 16);
            return vectors()->argmax(bounds->upper, bounds->vocab);
        }
    }
}

// Tokens that may have the largest sum of logit and noise, by the sums of bound and noise.
typedef struct {
    int count, token[MOST_CANDIDATES];
    float sum[MOST_CANDIDATES];
    float least; // what the largest sum is at least
} Candidates;

// The sums of a column that has been settled.
static void update_sums(Candidates *candidates, const Bounds *bounds, const Noise *noise,
                        int column) {
    for (int i = 0; i < candidates->count; i++) {
        int token = candidates->token[i];
        if (token / 16 != column)
            continue;
        int64_t id = token;
        float number;
        mr_noise(noise, &id, 1, &number);
        candidates->sum[i] = bounds->upper[token] + number;
    }
}

// Adds those of [begin, end); the likely winners among them become exact at once, for what they say
// keeps others out. Returns 0 where they are too many.
static int add_candidates(Candidates *candidates, Bounds *bounds, const Noise *noise, int begin,
                          int end) {
    int room = MOST_CANDIDATES - candidates->count, first = candidates->count;
    int found = vectors()->noisy_above(noise, bounds->upper, begin, end, candidates->least, room,
                                       candidates->token + first, candidates->sum + first);
    if (found > room)
        return 0;
    candidates->count += found;
    for (int i = first; i < candidates->count; i++) {
        int token = candidates->token[i], known = settled(bounds, token);
        float within = bounds->screen->error[token] * bounds->reach.of_error +
                       bounds->screen->norm[token] * bounds->reach.of_norm;
        if (!known && candidates->sum[i] - within > candidates->least) {
            if (!settle(bounds, token))
                return 0;
            update_sums(candidates, bounds, noise, token / 16);
            known = 1;
        }
        if (known && candidates->sum[i] > candidates->least)
            candidates->least = candidates->sum[i];
    }
    return 1;
}

// All tokens that may have the largest sum. Returns 0 where they are too many, or no numbers.
static int find_candidates(Candidates *candidates, Bounds *bounds, const Noise *noise) {
    int first = highest_token(bounds);
    if (first < 0 || !isfinite(bounds->upper[first]) || !settle(bounds, first))
        return 0;
    int begin = first / 16 * 16, left = bounds->vocab - begin;
    *candidates = (Candidates){.count = 0, .least = -INFINITY};
    if (!add_candidates(candidates, bounds, noise, begin, begin + (left < 16 ? left : 16)))
        return 0;
    candidates->count = 0;
    for (int c = 0; c < bounds->vocab; c += CHUNK) {
        int stop = c + CHUNK < bounds->vocab ? c + CHUNK : bounds->vocab;
        if (!add_candidates(candidates, bounds, noise, c, stop))
            return 0;
    }
    return isfinite(candidates->least);
}

static int64_t likeliest_with_noise(Bounds *bounds, const Noise *noise) {
    Candidates candidates;
    if (find_candidates(&candidates, bounds, noise))
        for (;;) {
            int best = 0;
            for (int i = 1; i < candidates.count; i++)
                if (candidates.sum[i] > candidates.sum[best])
                    best = i;
            int token = candidates.token[best];
            if (settled(bounds, token))
                return token;
            if (!settle(bounds, token))
                break;
            update_sums(&candidates, bounds, noise, token / 16);
        }
    int64_t token;
    use_head(bounds, 0, bounds->head->outputs / 16);
    mr_noisy_argmax(bounds->upper, 1, bounds->vocab, bounds->vocab, noise, &token);
    return token;
}

// Row `row` of the last screen_rows, on thread `id`.
static void open_row(Bounds *bounds, Workspace *work, const Linear *head, const Screen *screen,
                     int row, float *upper, int vocab, int id) {
    const float *x = work->screened + (size_t)row * head->inputs;
    bounds->head = head;
    bounds->screen = screen;
    bounds->upper = upper;
    bounds->chunks = chunks_of(head);
    bounds->highest = work->highest + (size_t)row * bounds->chunks;
    bounds->reach = work->reach[row];
    bounds->vocab = vocab;
    bounds->count = 0;
    prepare(&bounds->row, &work->own[id], head, &x, 1);
}

int64_t screened_token(Workspace *work, const Linear *head, const Screen *screen, int row,
                       float *upper, int vocab, const Noise *noise) {
    Bounds bounds;
    open_row(&bounds, work, head, screen, row, upper, vocab, 0);
    return noise ? likeliest_with_noise(&bounds, noise) : likeliest(&bounds);
}

// The columns of a chunk with a bound of `least` or more become exact. Returns 0 as settle.
static int settle_chunk(Bounds *bounds, int chunk, float least) {
    int stop = (chunk + 1) * CHUNK < bounds->vocab ? (chunk + 1) * CHUNK : bounds->vocab;
    for (int begin = chunk * CHUNK; begin < stop; begin += 16) {
        const float *of = bounds->upper + begin;
        int width = stop - begin < 16 ? stop - begin : 16;
        if (of[vectors()->argmax(of, width)] >= least && !settled(bounds, begin) &&
            !settle(bounds, begin))
            return 0;
    }
    return 1;
}

// All that may be among the k likeliest become exact: the k of the largest bounds, and then what is
// not below the least of these. Returns 0 where that is too much, or they are no numbers.
static int settle_best(Bounds *bounds, int k, int64_t *ids) {
    if (vectors()->best(bounds->upper, bounds->vocab, k, ids) < k)
        return 0;
    for (int i = 0; i < k; i++)
        if (!settled(bounds, (int)ids[i]) && !settle(bounds, (int)ids[i]))
            return 0;
    float least = INFINITY;
    for (int i = 0; i < k; i++)
        if (bounds->upper[ids[i]] < least)
            least = bounds->upper[ids[i]];
    for (int c = 0; c * CHUNK < bounds->vocab; c++)
        if (bounds->highest[c] >= least && !settle_chunk(bounds, c, least))
            return 0;
    return 1;
}

typedef struct {
    const Linear *head; // with its screen, or NULL: the rows are logits
    const Screen *screen;
    float *rows;
    int64_t *ids;
    int count, vocab, stride, k;
} BestCall;

static void run_best(Workspace *work, void *context, int id, int threads) {
    const BestCall *call = context;
    for (int n = id; n < call->count; n += threads) {
        float *row = call->rows + (size_t)n * call->stride;
        int64_t *ids = call->ids + (size_t)n * call->k;
        if (call->screen) {
            Bounds bounds;
            open_row(&bounds, work, call->head, call->screen, n, row, call->vocab, id);
            if (!settle_best(&bounds, call->k, ids))
                use_head(&bounds, 0, call->head->outputs / 16);
        }
        vectors()->best(row, call->vocab, call->k, ids);
    }
}

void mr_best(Workspace *work, const float *logits, int count, int vocab, int stride, int k,
             int64_t *ids) {
    BestCall call = {NULL, NULL, (float *)logits, ids, count, vocab, stride, k};
    run_parallel(work, run_best, &call, NULL, count);
}

void screened_best(Workspace *work, const Linear *head, const Screen *screen, int count,
                   float *upper, int vocab, int k, int64_t *ids) {
    BestCall call = {head, screen, upper, ids, count, vocab, head->outputs, k};
    run_parallel(work, run_best, &call, head, count);
}
