// A mixture-of-experts block around attention: the router, one expert at a time as its weights arrive, and the sum.
#ifndef MULTIRATE_EXPERTS_H
#define MULTIRATE_EXPERTS_H

typedef struct {
    Linear gate_up, down;  // as a layer's
} Expert;

#define FEW_ROWS 4  // a router or a low-rank product of these is done before another thread has begun

// normed [n, d] = RMSNorm(x). Then the router's choice for each row: ids [n, k], the likeliest first (ties: lower id), and
// weights [n, k]: softmax over all experts, or over the chosen ones where `normalise`. logits: scratch [n, router->out].
void mr_route(Workspace *work, const Linear *router, const float *norm, float eps, const float *x, int n, int experts, int k, int normalise,
              float *normed, float *logits, int64_t *ids, float *weights) {
    int d = router->in;
    for (int r = 0; r < n; r++) {
        memcpy(normed + (size_t)r * d, x + (size_t)r * d, (size_t)d * sizeof(float));
        scale_to_rms(normed + (size_t)r * d, norm, d, eps);
    }
    Product few = {router, normed, NULL, logits, n, STORE, eps};
    if (n > FEW_ROWS) mr_linear(work, router, normed, NULL, eps, n, logits, 0);
    else run_product(work, &few, 0, 1);
    for (int r = 0; r < n; r++) {
        const float *row = logits + (size_t)r * router->out;
        float total = 0.0f, chosen = 0.0f, highest = row[0];
        for (int e = 1; e < experts; e++) highest = row[e] > highest ? row[e] : highest;
        for (int e = 0; e < experts; e++) total += expf(row[e] - highest);
        for (int j = 0; j < k; j++) {
            int best = -1;
            for (int e = 0; e < experts; e++) {
                int taken = 0;
                for (int i = 0; i < j; i++) taken |= ids[r * k + i] == e;
                if (!taken && (best < 0 || row[e] > row[best])) best = e;
            }
            ids[r * k + j] = best;
            weights[r * k + j] = expf(row[best] - highest) / total;
            chosen += weights[r * k + j];
        }
        for (int j = 0; normalise && j < k; j++) weights[r * k + j] /= chosen;
    }
}

// Some rows of one expert: of the call's uses, [begin, begin + count).
typedef struct {
    const Expert *expert;
    int begin, count;
} Portion;

typedef struct {
    const Portion *portions;
    int count, uses;  // uses <= MAX_ROWS
    const float *normed;
    const int32_t *rows, *places;
    float *parts;
} ExpertCall;

static void run_experts(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const ExpertCall *call = context;
    const Portion *portions = call->portions;
    int d = portions->expert->gate_up.in, inner = portions->expert->down.in, last = call->count - 1;
    mine->normed = grown(mine->normed, &mine->normed_size, (size_t)MAX_ROWS * d * sizeof(element));
    const element *from[MAX_ROWS];
    for (int u = 0; u < call->uses; u++) {
        element *to = mine->normed + (size_t)u * d;
        from[u] = to;
        if (u && call->rows[u] == call->rows[u - 1]) from[u] = from[u - 1];  // a single row's experts all read it
        else for (int i = 0; i < d; i += 16) store_elements(to + i, load(call->normed + (size_t)call->rows[u] * d + i));
    }
    for (int p = 0; p <= last; p++) {
        const Portion *one = portions + p;
        Output out = {.activation = work->activation + (size_t)one->begin * inner, .stride = inner};
        const Linear *then = p < last ? &portions[p + 1].expert->gate_up : &portions->expert->down;
        matmul(work, &one->expert->gate_up, from + one->begin, one->count, NULL, SILU_GATE, out, then, id, threads);
    }
    barrier(work, threads);
    for (int p = 0; p <= last; p++) {
        const Portion *one = portions + p;
        row_pointers(work->activation + (size_t)one->begin * inner, inner, NULL, one->count, from);
        const Linear *then = p < last ? &portions[p + 1].expert->down : NULL;
        matmul(work, &one->expert->down, from, one->count, call->places + one->begin, STORE, (Output){.y = call->parts, .stride = d},
               then, id, threads);
    }
}

// For each expert e, its next uses[e] rows u of `rows` and `places`: parts[places[u]] = expert(normed[rows[u]]).
void mr_experts(Workspace *work, const Expert *const *experts, const int32_t *uses, int count, const float *normed, const int32_t *rows,
                const int32_t *places, float *parts) {
    work->activation = grown(work->activation, &work->activation_size, MAX_ROWS * (size_t)experts[0]->down.in * sizeof(element));
    Portion portions[MAX_ROWS];
    ExpertCall call = {portions, 0, 0, normed, rows, places, parts};
    for (int e = 0; e < count; e++)
        for (int left = uses[e], take; left; left -= take) {
            take = left < MAX_ROWS - call.uses ? left : MAX_ROWS - call.uses;
            portions[call.count++] = (Portion){experts[e], call.uses, take};
            call.uses += take;
            if (call.uses < MAX_ROWS && !(e == count - 1 && take == left)) continue;
            run_parallel(work, run_experts, &call);
            call.rows += call.uses;
            call.places += call.uses;
            call.count = call.uses = 0;
        }
}

// A few rows for each expert (methods/m2r2_experts/modules.py): down [E, rows, d], up [E, rows, d] of each depth, bf16.
typedef struct {
    const bf16 *down, *near, *far;
    int32_t rows, pad;
} Sketch;

typedef struct {
    const LowRank *near, *far;
    const Sketch *sketch;  // or NULL
    const int64_t *ids;    // [n, k] with weights [n, k]: the experts of the layer
    const float *weights;
    const float *ones, *residual, *state;
    float *p_near, *p_far;
    float eps;
    int count, k;
    float *drawn;  // [n, k · rows]: what each row of a sketch adds
} ResidualRows;

// share · SiLU(down n(residual)) of row n's experts.
static void draw_sketches(const ResidualRows *f, int n, int d) {
    const Sketch *s = f->sketch;
    const float *x = f->residual + (size_t)n * d, *weights = f->weights + (size_t)n * f->k;
    float *z = f->drawn + (size_t)n * f->k * s->rows;
    fv squares = all(0.0f);
    for (int i = 0; i < d; i += LANES) { fv v = load_v(x + i); squares += v * v; }
    float scale = 1.0f / sqrtf(sum_v(squares) / d + f->eps), total = 0.0f;
    for (int j = 0; j < f->k; j++) total += weights[j];
    for (int j = 0; j < f->k; j++)
        for (int row = 0; row < s->rows; row++) {
            const bf16 *down = s->down + ((size_t)f->ids[(size_t)n * f->k + j] * s->rows + row) * d;
            fv dot = all(0.0f);
            for (int i = 0; i < d; i += LANES) dot += load_v(x + i) * load_bf16_v(down + i);
            float inner = sum_v(dot) * scale;
            *z++ = inner / (1.0f + expf(-inner)) * weights[j] / total;
        }
}

// p[begin … end) += Σ drawn · up of row n's experts.
static void add_sketches(const ResidualRows *f, const bf16 *ups, float *p, int n, int d, int begin, int end) {
    int rows = f->sketch->rows;
    const float *z = f->drawn + (size_t)n * f->k * rows;
    for (int j = 0; j < f->k; j++)
        for (int row = 0; row < rows; row++) {
            const bf16 *up = ups + ((size_t)f->ids[(size_t)n * f->k + j] * rows + row) * d;
            fv share = all(*z++);
            for (int i = begin; i < end; i += LANES) store_v(p + (size_t)n * d + i, load_v(p + (size_t)n * d + i) + share * load_bf16_v(up + i));
        }
}

static void run_residual(Workspace *work, void *context, int id, int threads) {
    ThreadScratch *mine = &work->own[id];
    const ResidualRows *f = context;
    int d = f->near->a.in / 2;
    mine->normed = grown(mine->normed, &mine->normed_size, (size_t)MAX_ROWS * 2 * d * sizeof(element));
    for (int n = 0; n < f->count; n++) {
        element *to = mine->normed + (size_t)n * 2 * d;
        rms_norm(f->residual + (size_t)n * d, f->ones, d, f->eps, to);
        if (f->state) rms_norm(f->state + (size_t)n * d, f->ones, d, f->eps, to + d);
        else memset(to + d, 0, (size_t)d * sizeof(element));
    }
    size_t bytes = (size_t)f->count * d * sizeof(float);
    if (!id) {
        memcpy(f->p_near, f->residual, bytes);
        if (f->far) memcpy(f->p_far, f->residual, bytes);
    }
    // The last thread draws first: of a product with few outputs the first does most.
    for (int n = f->sketch ? threads - 1 - id : f->count; n < f->count; n += threads) draw_sketches(f, n, d);
    low_rank_in(work, f->near, mine->normed, 2 * d, NULL, f->count, id, threads);
    low_rank_out(work, f->near, f->p_near, d, NULL, f->count, id, threads);
    if (f->far) low_rank_out(work, f->far, f->p_far, d, NULL, f->count, id, threads);
    if (!f->sketch) return;
    barrier(work, threads);
    int begin = d / LANES * id / threads * LANES, end = d / LANES * (id + 1) / threads * LANES;
    for (int n = 0; n < f->count; n++) {
        add_sketches(f, f->sketch->near, f->p_near, n, d, begin, end);
        if (f->far) add_sketches(f, f->sketch->far, f->p_far, n, d, begin, end);
    }
}

// The accelerated residual (methods/m2r2_experts/modules.py): p = residual + U SiLU(D [n(residual); n(state)]) for the U of
// `near` and, unless NULL, that of `far`, whose D is the same; and the experts' sketches, unless NULL. residual, state (or
// NULL), p [n, d]; ones [d]; ids, weights [n, k].
void mr_accelerated_residual(Workspace *work, const LowRank *near, const LowRank *far, const Sketch *sketch, const int64_t *ids, const float *weights,
                int k, const float *ones, float eps, const float *residual, const float *state, int n, float *p_near,
                float *p_far) {
    size_t d = near->a.in / 2;
    room_for_adapters(work);
    size_t drawn = sketch ? MAX_ROWS * (size_t)k * (size_t)sketch->rows * sizeof(float) : 0;
    work->drawn = grown(work->drawn, &work->drawn_size, drawn);
    for (int r = 0; r < n; r += MAX_ROWS) {
        size_t at = r * d;
        size_t use = (size_t)r * (size_t)k;
        ResidualRows f = {near, far, sketch, ids ? ids + use : NULL, weights ? weights + use : NULL, ones, residual + at,
                       state ? state + at : NULL, p_near + at, far ? p_far + at : NULL, eps,
                       n - r < MAX_ROWS ? n - r : MAX_ROWS, k, work->drawn};
        run_parallel(work, run_residual, &f);
    }
}

// x [n, d] += Σ_j weights[r, j] · parts[r · k + j], in the router's order.
void mr_combine(const float *parts, const float *weights, int n, int k, int d, float *x) {
    for (int r = 0; r < n; r++)
        for (int i = 0; i < d; i += 16) {
            f16 sum = splat(0.0f);
            for (int j = 0; j < k; j++) sum += splat(weights[r * k + j]) * load(parts + ((size_t)r * k + j) * d + i);
            store(x + (size_t)r * d + i, load(x + (size_t)r * d + i) + sum);
        }
}
#endif
