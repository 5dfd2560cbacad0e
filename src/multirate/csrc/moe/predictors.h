// Predictions of experts (predictors.c).
#ifndef MULTIRATE_PREDICTORS_H
#define MULTIRATE_PREDICTORS_H
#include "cache.h"

enum {
    PREDICT_BY_NOBODY,
    PREDICT_BY_LAST_TOKEN,
    PREDICT_BY_POPULARITY,
    PREDICT_BY_GATE,
    PREDICT_BY_RESIDUAL,
    PREDICT_BY_ORACLE,
    PREDICT_BY_STREAM
};

// A pass: the layers as mr_layers takes them.
typedef struct {
    const Shape *shape;
    const Layer *layers;
    const LayerCache *caches;
    Rows rows; // none with adapters
} Pass;

// NULL: no memory.
Predictor *open_predictor(const ExpertCache *e, const PredictorPlan *plan);
void close_predictor(Predictor *f);

// What layer `row` names: [count] of found_predictions. x [n, hidden]: the stream after its
// attention.
int predict_experts(Workspace *work, ExpertCache *e, const Routers *m, const Pass *pass, int row,
                    const float *x, int n, const RoutedRows *g);
// A pass over the layers begins.
void forget_predictions(ExpertCache *e);
// Layer `row` needs these: what a predictor learns from, and what was predicted comes true or not.
void note_outcome(ExpertCache *e, int row, const int32_t *needed, int count);
// Leaves of `count` predictions those that are there or worth a read.
int filter_predictions(ExpertCache *e, int row, int count);
const Prediction *found_predictions(const ExpertCache *e);
#endif
