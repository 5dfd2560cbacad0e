// A mixture-of-experts block around attention: the router, one expert at a time as its weights arrive, and the sum.
#ifndef MULTIRATE_EXPERTS_H
#define MULTIRATE_EXPERTS_H

typedef struct {
    Linear gate_up, down;  // as a layer's
} Expert;

// normed [n, d] = RMSNorm(x). Then the router's choice for each row: ids [n, k], the likeliest first (ties: lower id), and
// weights [n, k]: softmax over all experts, or over the chosen ones where `normalise`. logits: scratch [n, router->out].
void mr_route(const Linear *router, const float *norm, float eps, const float *x, int n, int experts, int k, int normalise,
              float *normed, float *logits, int64_t *ids, float *weights) {
    int d = router->in;
    for (int r = 0; r < n; r++) {
        memcpy(normed + (size_t)r * d, x + (size_t)r * d, (size_t)d * sizeof(float));
        scale_to_rms(normed + (size_t)r * d, norm, d, eps);
    }
    mr_linear(router, normed, NULL, eps, n, logits, 0);
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

typedef struct {
    const Expert *expert;
    const float *normed;
    const int32_t *rows, *places;
    int count;
    float *parts;
} ExpertCall;

static void run_expert(void *context, int id, int threads) {
    const ExpertCall *call = context;
    const Expert *expert = call->expert;
    int d = expert->gate_up.in, inner = expert->down.in;
    mine.normed = grown(mine.normed, &mine.normed_size, (size_t)MAX_ROWS * d * sizeof(element));
    const element *from[MAX_ROWS];
    for (int n = 0; n < call->count; n++)
        for (int i = 0; i < d; i += 16) store_elements(mine.normed + (size_t)n * d + i, load(call->normed + (size_t)call->rows[n] * d + i));
    matmul(&expert->gate_up, row_pointers(mine.normed, d, NULL, call->count, from), call->count, NULL, SILU_GATE,
           (Output){.activation = work.activation, .stride = inner}, &expert->down, id, threads);
    barrier(threads);
    matmul(&expert->down, row_pointers(work.activation, inner, NULL, call->count, from), call->count, call->places, STORE,
           (Output){.y = call->parts, .stride = d}, NULL, id, threads);
}

// parts[places[i]] = expert(normed[rows[i]]), for count rows.
void mr_expert(const Expert *expert, const float *normed, const int32_t *rows, const int32_t *places, int count, float *parts) {
    size_t bytes = MAX_ROWS * (size_t)expert->down.in * sizeof(element);
    work.activation = grown(work.activation, &work.act_size, bytes);
    for (int n = 0; n < count; n += MAX_ROWS) {
        ExpertCall call = {expert, normed, rows + n, places + n, count - n < MAX_ROWS ? count - n : MAX_ROWS, parts};
        run_parallel(run_expert, &call);
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
