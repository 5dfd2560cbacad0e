// The contract of the kernel (model.h): mixtures of experts, and reads of those that are not in
// memory.
#ifndef MULTIRATE_EXPERTS_H
#define MULTIRATE_EXPERTS_H
#include "model.h"
#pragma GCC visibility push(default)

typedef struct {
    Linear gate_up, down; // as a layer's
} Expert;

// The most important neurons of each expert, and the mean of what the others add. They predict
// where the experts will move the residual before the experts are in memory.
typedef struct {
    const LowRank *site;                  // beside the experts, or NULL
    const bf16 *gate, *up, *down, *means; // [experts, rows, hidden] each, and [experts, hidden]
    int32_t rows;
} PrunedExperts;

// A few neurons of each expert, for two depths ahead.
typedef struct {
    const bf16 *down, *near, *far; // [experts, rows, hidden] each
    int32_t rows;
} PrunedPair;

typedef struct {
    int64_t calls, uses, hits, timely, late, wasted, issued, cancelled;
    int64_t demand_bytes, speculative_bytes, errors;
    double stall_seconds, predictor_seconds, read_seconds;
} Counts; // explained in experts/stats.py

typedef struct {
    double begin, end;
    int32_t kind, row, expert;
} Event;

// What Python reads and sets in an expert cache.
typedef struct {
    Counts counts;
    int64_t token;
    int32_t row, last_row;       // running, and of the last call
    int32_t depth, active;       // of the predictor, and whether it is used
    int32_t failed_key, failure; // after a failed read: its key and errno
    Event *events;               // [event_count] where record is set
    int32_t event_count, record;
    int32_t paused_layer; // the model's layer at which a pass that returned PAUSED continues
    int32_t predictor;    // which of several predictors to use from the next pass on
} Controls;

typedef struct Reads Reads;

typedef struct {
    int32_t slot, status; // 0, an errno, ECANCELED; ENODATA: the file ends there
    int64_t bytes;
    double began, ended;
} EndedRead;

typedef struct {
    int32_t rows, experts, slots, policy;
    double loss; // of EVICT_LRFU: -ln(decay)
    Reads *reads;
    const int64_t *offsets;              // [keys] of the records in the file
    const int32_t *future, *future_ends; // EVICT_BELADY: positions of each key's uses, rising;
                                         // where the next key's begin
    const uint32_t *checksums;           // [keys] crc32 of the records
    uint8_t *checked;                    // [keys] whether the record's checksum was correct
} ExpertCachePlan;

typedef struct {
    int32_t kind, most_depth;
    double threshold;               // the least share of a rank that must prove right; 0: read all
    const LowRank *const *sites;    // by residual: [layers][most_depth], near depth first
    const PrunedPair *const *pairs; // [layers][most_depth] or NULL
    const PrunedExperts *pruned;    // by stream: [layers]
    const int32_t *layer_of;        // [rows]
    const float *ones;              // [hidden]
    float eps;
    int32_t count;                                  // by popularity: how many of a row
    const int32_t *trace, *trace_ends, *trace_rows; // by oracle: experts of each call in turn
    int32_t trace_calls;
} PredictorPlan;

// The routers of a model, by row (MoE layer).
typedef struct {
    const Linear *const *routers;
    const float *const *norms;
    float eps;
    int32_t experts, top_k, normalise, hidden;
} Routers;

typedef struct {
    const Shape *shape;
    const Layer *layers;
    Routers routers;
    const int32_t *row_of;        // [layers], -1: not a mixture
    const Expert *const *experts; // [rows][slots]: what a slot holds, if it is of this row
} Mixture;

// Where a pass over n rows writes: normed [n, hidden], logits [n, router out], ids and weights
// [n, top_k], parts [n * top_k, hidden].
typedef struct {
    float *normed, *logits;
    int64_t *ids;
    float *weights, *parts;
} RoutedRows;

// ---- functions ----------------------------------------------------------------------------------

// moe/experts.c
void mr_route(Workspace *work, const Routers *m, int row, const float *x, int n,
              const RoutedRows *to);
void mr_experts(Workspace *work, const Expert *const *experts, const int32_t *uses, int count,
                const float *normed, const int32_t *rows, const int32_t *places, float *parts);
void mr_combine(const float *parts, const float *weights, int n, int k, int d, float *x);

// moe/pruned.c: where the experts will move the residual.
void mr_predict_residual(Workspace *work, const LowRank *const *sites,
                         const PrunedPair *const *pairs, int most_depth, const int64_t *ids,
                         const float *weights, int k, const float *ones, float eps,
                         const float *residual, const float *state, int n, int depth,
                         float *const *p);
void mr_pruned_experts(Workspace *work, const PrunedExperts *layer, const int64_t *ids,
                       const float *weights, int k, const float *ones, float eps, float *x, int n,
                       int d);

// moe/engine.c: layers of a model whose experts are not all in memory.
typedef struct ExpertCache ExpertCache;
ExpertCache *mr_expert_cache_open(const ExpertCachePlan *plan);
Controls *mr_expert_cache_controls(ExpertCache *e);
void mr_expert_cache_close(ExpertCache *e);
int mr_expert_cache_predict(ExpertCache *e, const PredictorPlan *plans, int count);
int mr_expert_cache_load(ExpertCache *e, const int32_t *keys, int count);
int mr_mixture(Workspace *work, const Mixture *m, ExpertCache *e, const LayerCache *caches,
               const Adapter *const *adapters, const Rows *rows, float *x, int start, int stop,
               const RoutedRows *g);

// moe/loads.c: crc32 as zlib's. size: a multiple of 16, as records are.
uint32_t mr_crc32(const uint8_t *data, int64_t size);

// io/reads.c: records from a file into slots of memory.
Reads *mr_reads_open(int fd, void *base, int slots, int64_t size, int64_t chunk, int alignment,
                     double rate, int threads, double spin);
void mr_reads_close(Reads *r);
void mr_reads_submit(Reads *r, int slot, int64_t offset, int64_t order, int demanded);
void mr_reads_promote(Reads *r, int slot);
int mr_reads_cancel(Reads *r, int slot);
int mr_reads_ended(Reads *r, double patience, EndedRead *to);

#pragma GCC visibility pop
#endif
