// A mixture of experts: the router, the experts as their weights arrive, and the sum.
#include "../include/experts.h"
#include "../layers.h"

#define FEW_ROWS 4 // a router of these is done before another thread has begun

// What the row-th router chooses for x [n, hidden], which it reads through RMSNorm, to->normed: the
// likeliest experts first (ties: lower id), their weights softmax over all experts, or over the
// chosen ones where `normalise`.
void mr_route(Workspace *work, const Routers *m, int row, const float *x, int n,
              const RoutedRows *to) {
    const Linear *router = m->routers[row];
    int d = m->hidden, experts = m->experts, k = m->top_k;
    float eps = m->eps, *normed = to->normed, *logits = to->logits, *weights = to->weights;
    int64_t *ids = to->ids;
    for (int r = 0; r < n; r++) {
        memcpy(normed + (size_t)r * d, x + (size_t)r * d, (size_t)d * sizeof(float));
        mr_rms_norm(normed + (size_t)r * d, m->norms[row], d, eps);
    }
    Product few = {router, normed, NULL, logits, n, STORE, eps};
    if (n > FEW_ROWS)
        mr_linear(work, router, normed, NULL, eps, n, logits, 0);
    else
        run_product(work, &few, 0, 1);
    for (int r = 0; r < n; r++) {
        const float *of = logits + (size_t)r * router->outputs;
        float chances[experts], total = 0.0f, chosen = 0.0f, highest = of[0];
        for (int e = 1; e < experts; e++)
            highest = of[e] > highest ? of[e] : highest;
        vectors()->exp_below(of, experts, highest, chances);
        for (int e = 0; e < experts; e++)
            total += chances[e];
        for (int j = 0; j < k; j++) {
            int best = -1;
            for (int e = 0; e < experts; e++) {
                int taken = 0;
                for (int i = 0; i < j; i++)
                    taken |= ids[r * k + i] == e;
                if (!taken && (best < 0 || of[e] > of[best]))
                    best = e;
            }
            ids[r * k + j] = best;
            weights[r * k + j] = chances[best] / total;
            chosen += weights[r * k + j];
        }
        for (int j = 0; m->normalise && j < k; j++)
            weights[r * k + j] /= chosen;
    }
}

// Some rows of one expert: of the call's uses, [begin, begin + count).
typedef struct {
    const Expert *expert;
    int begin, count;
} Portion;

typedef struct {
    const Portion *portions;
    int count, uses; // uses <= MAX_ROWS
    const float *normed;
    const int32_t *rows, *places;
    float *parts;
} ExpertCall;

// Whether two portions are of the same rows, which then become what the weights need only once. A
// single row's experts all are.
static int same_rows(const ExpertCall *call, const Portion *a, const Portion *b) {
    size_t bytes = (size_t)a->count * sizeof *call->rows;
    return a->count == b->count && !memcmp(call->rows + a->begin, call->rows + b->begin, bytes);
}

static void run_experts(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const ExpertCall *call = context;
    const Portion *portions = call->portions;
    int d = portions->expert->gate_up.inputs, inner = portions->expert->down.inputs,
        last = call->count - 1;
    float *normed = room_for_normed(mine, d);
    const float *from[MAX_ROWS];
    for (int u = 0; u < call->uses; u++) {
        float *to = normed + (size_t)u * d;
        from[u] = to;
        if (u && call->rows[u] == call->rows[u - 1])
            from[u] = from[u - 1]; // a single row's experts all read it
        else
            memcpy(to, call->normed + (size_t)call->rows[u] * d, (size_t)d * sizeof *to);
    }
    Operand operands; // of the last portion that had other rows than the one before it
    for (int p = 0; p <= last; p++) {
        const Portion *one = portions + p;
        const Linear *gate_up = &one->expert->gate_up,
                     *then = p < last ? &one[1].expert->gate_up : &portions->expert->down;
        Output out = {.activation = work->activation + (size_t)one->begin * inner, .stride = inner};
        if (!p || !same_rows(call, one - 1, one))
            prepare(&operands, mine, gate_up, from + one->begin, one->count);
        matmul_columns(gate_up, &operands, NULL, SILU_GATE, out,
                       first_column(gate_up, 1, id, threads),
                       first_column(gate_up, 1, id + 1, threads),
                       weights_of(then, first_column(then, 1, id, threads)));
    }
    barrier(work, threads);
    for (int p = 0; p <= last; p++) {
        const Portion *one = portions + p;
        row_pointers(work->activation + (size_t)one->begin * inner, inner, NULL, one->count, from);
        const Linear *then = p < last ? &portions[p + 1].expert->down : NULL;
        matmul(work, &one->expert->down, from, one->count, call->places + one->begin, STORE, 1,
               (Output){.y = call->parts, .stride = d}, then, id, threads);
    }
}

// Experts of one layer: their weights have the same formats. For each expert e, its next uses[e]
// rows u of `rows` and `places`: parts[places[u]] = expert(normed[rows[u]]).
void mr_experts(Workspace *work, const Expert *const *experts, const int32_t *uses, int count,
                const float *normed, const int32_t *rows, const int32_t *places, float *parts) {
    work->activation =
        grown(work->activation, MAX_ROWS * (size_t)experts[0]->down.inputs * sizeof(float));
    Portion portions[MAX_ROWS];
    ExpertCall call = {portions, 0, 0, normed, rows, places, parts};
    for (int e = 0; e < count; e++)
        for (int left = uses[e], take; left; left -= take) {
            take = left < MAX_ROWS - call.uses ? left : MAX_ROWS - call.uses;
            portions[call.count++] = (Portion){experts[e], call.uses, take};
            call.uses += take;
            if (call.uses < MAX_ROWS && !(e == count - 1 && take == left))
                continue;
            run_parallel(work, run_experts, &call, NULL, call.uses * MAX_ROWS + call.count);
            call.rows += call.uses;
            call.places += call.uses;
            call.count = call.uses = 0;
        }
}

// x [n, d] += Σ_j weights[r, j] · parts[r · k + j], in the router's order.
void mr_combine(const float *parts, const float *weights, int n, int k, int d, float *x) {
    for (int r = 0; r < n; r++)
        vectors()->combine(parts + (size_t)r * k * d, weights + r * k, k, d, x + (size_t)r * d);
}
