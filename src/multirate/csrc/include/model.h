// The contract of the kernel, in three headers: every structure and function that Python uses is
// defined here or in speculate.h or experts.h, and nowhere else. Python parses them with cffi, in
// this order (runtime/native/abi.py). Use plain C only: structures, enumerations, prototypes and
// integer constants. Python drops all other preprocessor lines.
//
// [n, d] after a pointer is the shape of the array it points to, row-major. Sizes are in elements.
// The caller must keep pointed-to buffers alive. docs/kernel.md explains the words.
//
// This one: a model's weights, layers and head, and passes of rows through them.
#ifndef MULTIRATE_MODEL_H
#define MULTIRATE_MODEL_H
#include <stdint.h>
#pragma GCC visibility push(default)

#define MAX_ROWS 60   // of one slice; longer passes run in slices. Whole tiles of 6
#define MAX_NODES 63  // of a draft tree: the usable bits of Rows.tree
#define MAX_RANK 4096 // of a low-rank site with gate and up stacked
#define MAX_HEAD_DIM 256
#define NOISE_KNOTS 3970 // of half of Noise.table

typedef uint16_t bf16;

// ---- weights ------------------------------------------------------------------------------------

#define WEIGHTS_BF16 0  // gemm.c draws their layout
#define WEIGHTS_INT16 1 // fixed_point.c
#define WEIGHTS_INT12 2 // the same integers, where they fit
#define WEIGHTS_Q8_0 3  // these and the next are what GGUF files call so (weights/format.h)
#define WEIGHTS_Q4_0 4
#define WEIGHTS_Q4_1 5
#define WEIGHTS_Q5_0 6
#define WEIGHTS_Q5_1 7
#define WEIGHTS_Q4_K 8
#define WEIGHTS_Q5_K 9
#define WEIGHTS_Q6_K 10
#define WEIGHT_FORMATS 11

// 16 outputs of a linear layer, as the packer lays them out.
typedef struct {
    const void *weight, *scale;
    int32_t format;
} Column;

// A linear layer y = W x + bias. Outputs come in groups of 64.
typedef struct {
    const void *weight;
    const float *bias;       // [outputs] or NULL
    const void *scale;       // of integer weights [outputs] in fp32; of quantised ones format.h's
    const Column *columns;   // [outputs / 16] where these differ in format, or lie apart; NULL: all
                             // as above
    int32_t inputs, outputs; // outputs is padded to a multiple of 64 by the packer
    int32_t format;          // of the weights
} Linear;

// What weights of a format take, in bytes.
typedef struct {
    int64_t column, scales; // 16 packed outputs, and their scales
    int64_t row;            // an output's blocks in a GGUF file, of quantised weights
    int32_t piece;          // what a layer's inputs are a multiple of
} FormatSizes;

// Weights as they are in the model.
typedef struct {
    const void *values; // [outputs, inputs] bf16, or fp32 if `wide`
    int32_t wide, outputs, inputs;
} Unpacked;

// The embedding: bf16 [vocab, hidden], or the outputs of a quantised layer.
typedef struct {
    const bf16 *rows; // NULL: those of `packed`
    Linear packed;
    int32_t vocab;
} Table;

// An 8-bit copy of a head, with which screen.c finds the best token without reading the whole head.
// w: the weights of an output as the head multiplies them; ŵ: the copy's.
typedef struct {
    Linear linear;      // WEIGHTS_Q8_0, with the head's bias
    const float *error; // [outputs] an upper bound of ‖w − ŵ‖
    const float *norm;  // [outputs] an upper bound of ‖ŵ‖
} Screen;

// A low-rank update B(A x) beside a linear layer. rank 0: none.
typedef struct {
    Linear a, b;
    int32_t rank;
    int32_t silu; // whether SiLU is applied between A and B
} LowRank;

// The low-rank updates of one layer. mlp: beside the whole MLP.
typedef struct {
    LowRank q, o, gate_up, down, mlp; // gate_up: A stacks gate's and up's, B is block-diagonal
} Adapter;

// Tables indexed by a row's position. They may be replaced by longer ones between calls.
typedef struct {
    const float *cos, *sin;   // [positions, Shape.rotary / 2]; NULL: nothing is rotated
    const float *query_scale; // [positions] factors of queries; NULL: none
} Positions;

typedef struct {
    Linear qkv, o;                          // queries, then keys, then values
    Linear gate_up, down;                   // weight NULL: attention alone; 32 gates, 32 ups, …
    const float *norm_attention, *norm_mlp; // [hidden] norms of their inputs; NULL: none
    const float *norm_attention_out;        // [hidden] norm of what attention adds to x; NULL: none
    const float *norm_mlp_out;              // [hidden] norm of what the MLP adds
    const float *norm_beside; // [hidden] not NULL: attention reads a second row of `hidden` values,
                              // normed by this, and then x; qkv has 2 · hidden inputs
    const float *q_norm, *k_norm; // [head_dim] norms per head; NULL: none
    int32_t norm_all_heads;       // one norm over all heads of a row instead:
                                  // [heads · head_dim], [kv_heads · head_dim]
    int32_t norm_after_rotary;    // heads are normed after rotation
    const Positions *positions;   // covers all positions of the rows
    int32_t window;               // positions that a row sees; 0: all before it
} Layer;

#define ACTIVATION_SILU 0
#define ACTIVATION_GELU 1 // by tanh

typedef struct {
    int32_t hidden, heads, kv_heads, head_dim, intermediate, vocab;
    int32_t rotary;     // so many first dimensions of a head are rotated
    int32_t activation; // of the gates
    float eps, attention_scale;
    float embed_scale;    // factor of embeddings as they enter layer 0
    float residual_scale; // factor of what attention and the MLP add to x
} Shape;

// Keys and values of one layer (attention.c draws them).
typedef struct {
    bf16 *k; // [sequences, kv_heads, capacity / 16, head_dim / 2, 16, 2]
    bf16 *v; // [sequences, kv_heads, capacity / 2, head_dim, 2]
} LayerCache;

// ---- rows ---------------------------------------------------------------------------------------

// What each row is, where it writes and what it sees (runtime/rows.py). Arrays: [count].
// No row sees a slot that a later row writes.
typedef struct {
    const int32_t *seq;     // sequence of the cache
    const int32_t *slot;    // where its keys and values go; -1: nowhere
    const int32_t *pos;     // rotary position
    const int32_t *prefix;  // it sees slots [0, prefix) of its sequence …
    const int64_t *tree;    // … and slot prefix + k for every bit k
    const uint8_t *adapted; // whether it is an adapter row; NULL: none is
    int32_t count;
    int32_t capacity; // slots per sequence in the cache
} Rows;

// Which rows skip a layer: those with weight · x / RMS(x) + bias of at least a limit.
typedef struct {
    const float *weight; // [hidden]; NULL: none does
    float bias;
    int32_t *slots; // [sequences] how many tokens have run the layer, which is the slot for the
                    // next one's keys and values
} PassBy;

// ---- sampling -----------------------------------------------------------------------------------

// The random numbers added to the logits at one place of a sequence before the argmax
// (runtime/noise.py defines them).
typedef struct {
    const int32_t *table; // [2, NOISE_KNOTS] indexed by a uniform number's distance to 0 and to 1
    uint64_t key;         // of the sequence
    int64_t place;        // in it
    float unit;           // of the table's numbers, a power of two
    float scale;          // the temperature, which the table's numbers include; 0: adds nothing
} Noise;

// ---- functions ----------------------------------------------------------------------------------

// A digest of the sources that the library was built from (runtime/native/build.py).
const char *mr_source_digest(void);

// workspace.c, threads.c. Calls with different workspaces may run at the same time.
typedef struct Workspace Workspace;
Workspace *mr_workspace_open(int threads); // NULL: no memory
// At most `threads`, fewer if that is faster; fixed: always this many.
void mr_workspace_set_threads(Workspace *work, int threads, int fixed);
int mr_workspace_threads(const Workspace *work); // in use, apart from trials
// For tests of thread_choice.c: a call of `kind` took `seconds` and ended at `now`; how many
// threads the next one of `kind` uses (perhaps in a trial).
void mr_note_call(Workspace *work, uint64_t kind, double seconds, double now);
int mr_next_threads(Workspace *work, uint64_t kind);
void mr_workspace_after_fork(Workspace *work);
void mr_workspace_close(Workspace *work);
// Seconds that its calls have spent so far; to [SPENT_KINDS]. Drafting; verification and plain
// passes in the model's layers; heads and choosing tokens.
#define SPENT_DRAFT 0
#define SPENT_OWN 1
#define SPENT_HEAD 2
#define SPENT_KINDS 3
void mr_spent(const Workspace *work, double *to);
void mr_after_fork(void);

// pack.c: lays out weights as WEIGHTS_BF16, INT16 or INT12, with outputs padded with zeros to a
// multiple of 64. to: room for them in whole cache lines. scale: room for Linear.scale, NULL for
// WEIGHTS_BF16. Returns 0, after writing a part, if the weights do not fit WEIGHTS_INT12.
int mr_pack(Workspace *work, const Unpacked *from, int format, void *to, void *scale);
// weights/pack_rows.c: lays out quantised weights. rows [count]: where a GGUF tensor's blocks of
// each output begin, in any order; NULL: an output whose weights are 0. Returns -1, or the first of
// them with a scale that is not finite, and so no finite product.
int mr_pack_rows(Workspace *work, const void *const *rows, int count, int inputs, int format,
                 void *to, void *scale);
// Sizes of a layer with so many inputs.
FormatSizes mr_format_sizes(int format, int inputs);
// Makes blocks of WEIGHTS_Q8_0, Q4_0 or Q4_1 from floats, bit for bit as the package gguf does.
void mr_quantise(Workspace *work, const Unpacked *from, int format, void *blocks);
// Where column `column` of a layer lies.
void mr_column(const Linear *linear, int column, Column *to);
// The weights of an output of a quantised layer: to [inputs].
void mr_decode_output(const Linear *linear, int output, float *to);
// weights/arch.c: the instruction set in use, and another one, or NULL for the best; 0: this
// processor lacks it.
const char *mr_arch(void);
int mr_choose_arch(const char *name);
// Those that the kernel has code for, best first, NULL behind the last; whether this processor has
// one of them.
const char *mr_arch_name(int at);
int mr_has_arch(int at);
// Whether it is faster with WEIGHTS_INT12 than with WEIGHTS_INT16.
int mr_int12_products(void);
// For a head: Screen's error and norm, [outputs] each, rounded up.
void mr_screening_norms(Workspace *work, const Unpacked *from, float *error, float *norm);

// gemm.c: y [count, out] = (or += if add) W · RMSNorm(x), or W · x if norm is NULL.
void mr_linear(Workspace *work, const Linear *linear, const float *x, const float *norm, float eps,
               int count, float *y, int add);

// norm.c: in place. x [d]
void mr_rms_norm(float *x, const float *weight, int d, float eps);
void mr_rotate(float *x, const float *cos, const float *sin, int d);

// passes.c: layers [start, stop) on x [rows, hidden], in place.
void mr_layers(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches,
               const Adapter *const *adapters, const Rows *rows, float *x, int start, int stop);
// The keys and values of layers [start, stop) as if x entered each of them; x does not change.
void mr_fill_kv(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches,
                const Rows *rows, float *x, int start, int stop);
// Layers [0, count) on one row of each sequence, each row without those it skips.
// ran [rows]: how many layers each has run.
void mr_passing_layers(Workspace *work, const Shape *shape, const Layer *layers,
                       const LayerCache *caches, const PassBy *by, float limit, float eps,
                       const Rows *rows, float *x, int count, int32_t *ran);
// attention.c: moves cached tokens of a sequence, slot from[i] to slot to[i], in order.
void mr_move(const LayerCache *caches, int layers, int kv_heads, int head_dim, int capacity,
             int seq, const int32_t *from, const int32_t *to, int count);

// head.c: embeddings, best tokens, a whole greedy pass.
// A token's row of the table, [d]; zeros for ids outside the vocabulary.
void mr_embed(const Table *table, const int64_t *ids, int count, int d, float scale, float *x);
// The k best of each row of logits [count, stride], first `vocab` of them, best first (ties: lower
// id), and their probabilities under softmax(sharpness · logits): 0 where logits are no numbers.
void mr_top(const float *logits, int count, int vocab, int stride, int k, float sharpness,
            int64_t *ids, float *probabilities);
// screen.c: the same ids without probabilities, the rows shared among the threads.
void mr_best(Workspace *work, const float *logits, int count, int vocab, int stride, int k,
             int64_t *ids);
// mr_top of head · RMSNorm(x) + noise[row] of the outputs' tokens token_map [vocab] (NULL: the
// first ones); noise NULL: none. exact: as SpeculativeStep.exact_head. logits: scratch [count,
// head->outputs].
void mr_head_top(Workspace *work, const Linear *head, const float *norm, float eps, const float *x,
                 int count, int vocab, const Noise *noise, const int64_t *token_map,
                 const bf16 *exact, int k, float sharpness, float *logits, int64_t *ids,
                 float *probabilities);
// ids (or, where NULL, residuals x entering layer `start`) → x = h_stop and the argmax of each
// row's logits (ties: the lowest id), with noise [rows] as mr_noisy_argmax, NULL: without. logits:
// scratch [rows, head->outputs].
void mr_argmax_pass(Workspace *work, const Shape *shape, const Layer *layers,
                    const LayerCache *caches, const Rows *rows, const Table *table,
                    const int64_t *ids, float *x, int start, int stop, const Linear *head,
                    const Screen *screen, const float *norm, const Noise *noise, float *logits,
                    int64_t *tokens);

// noise.c: the numbers of tokens ids [count] (NULL: the first ones) → to [count].
void mr_noise(const Noise *noise, const int64_t *ids, int count, float *to);
// The argmax of each row of logits [count, stride], first `vocab` of them, plus noise[row] (ties:
// the lowest id). -1: a logit is not a number, or the largest sum not finite.
void mr_noisy_argmax(const float *logits, int count, int vocab, int stride, const Noise *noise,
                     int64_t *tokens);

#pragma GCC visibility pop
#endif
