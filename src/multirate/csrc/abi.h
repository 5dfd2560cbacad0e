// The contract of the kernel: every structure and function that Python uses is defined here and
// nowhere else. Python parses this file with cffi (runtime/native/abi.py). Use plain C only:
// structures, enumerations, prototypes and integer constants. Python drops all other preprocessor
// lines.
//
// [n, d] after a pointer is the shape of the array it points to, row-major. Sizes are in elements.
// The caller must keep pointed-to buffers alive. docs/kernel.md explains the words.
#ifndef MULTIRATE_ABI_H
#define MULTIRATE_ABI_H
#include <stdint.h>
#pragma GCC visibility push(default)

#define MAX_ROWS 60            // of one slice; longer passes run in slices. Whole tiles of 6
#define MAX_NODES 63           // of a draft tree: the usable bits of Rows.tree
#define MAX_CANDIDATES 17      // tokens that one node of a draft may propose
#define CONFIDENCE_BINS 10     // of acceptance_statistics.py's Calibration …
#define CALIBRATION_STRENGTH 4 // … and the tries that its prior counts as
#define MAX_TAPS 4             // layers whose residuals a draft may read
#define MAX_RANK 4096          // of a low-rank site with gate and up stacked
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
    float scale;          // the temperature; the table's numbers include it
} Noise;

// ---- drafts and speculative steps ---------------------------------------------------------------

// A draft branch: the model's first layers with adapters, a carried residual, an extra block.
typedef struct {
    const Shape *shape;
    const Layer *layers;
    const Adapter *const *adapters; // [layers], or NULL: none
    const Table *table;             // the embedding
    Linear carry;                   // applied to the carried residual; weight NULL: none
    const float *carry_norm;        // [hidden]
    Linear fuse_stream;             // after the exit layer, x = fuse_stream(x) …
    Linear fuse_carried;            // … + fuse_carried(carried residual); weight NULL: no fusion
    const float *fuse_stream_norm, *fuse_carried_norm; // [hidden]
    const Shape *block_shape;                          // NULL: no block after the exit layer
    const Layer *block;                                // one layer with its own keys and values
    const float *norm_out; // [hidden] an RMSNorm after the block, or NULL
    const Layer *merged;   // for exit layer 1: layer 0 with the adapters added to its weights; its
                           // keys and values stay the model's, and the target rows of a draft
                           // leave only these. NULL: adapters run beside the layers
    float carry_eps;
    int32_t exit_layer; // layers [0, exit_layer) draft; verification continues from there
    int32_t taps[MAX_TAPS], tap_count; // a verified token carries not h_L but …
    Linear features;        // … features(residuals that enter the layers `taps`, concatenated) …
    int32_t features_added; // … or, if set, h_L plus that
    const float *norm_in;   // [hidden] norm of the carried residual where that is the block's x
                            // (its attention reads the embedding beside it); NULL: none
} Stream;

// Drafts from text lookup (ngram.c). Longer matches in the text are reported as `longest`; matches
// in given texts as `longest` + their length.
typedef struct {
    int32_t longest;              // 0: no lookup
    const double *first_accepted; // [longest + 1, and GIVEN_LONGEST more with given texts] by
                                  // reported length: the chance that the first token is accepted
                                  // if the branch's best token is the same …
    const double *first_against;  // … and if it is another one
    const double *next_accepted;  // the chance that each further token is accepted
    double draft_accepted;        // the chance for the next level of the branch's own draft
} NgramLimits;

// ARLA of one exit layer: the chance that the branch's best token is the model's, from its output
// x: sigmoid(out · silu(W n + bias) + out_bias) with n = x / rms(x).
typedef struct {
    const float *weight;     // [latent, hidden] W, the final norm's weights multiplied in
    const float *bias, *out; // [latent]
    float out_bias;
    int32_t latent;
} Arla;

// Which drafted tokens are accepted without verification (dynamic mode, lossy): the branch's best
// tokens whose score is at least `least`.
typedef struct {
    double least;
    const Arla *arla; // gives the score; NULL: the token's probability, before calibration
    int32_t nodes;    // at most so many such nodes on top of DraftLimits.nodes
} Trust;

// How far a draft tree grows. Thresholds are path probabilities: the product of the branch's
// probabilities from the last token down to a node, where unverified tokens (Trust) count as
// certain. capacity: nodes + trust->nodes.
typedef struct {
    int32_t depth, width, nodes;    // levels, nodes per level and nodes, at most, without Trust's
    int32_t deepest;                // the deepest useful node, at most capacity
    int32_t top;                    // candidates per node, at most MAX_CANDIDATES
    const double *draft_threshold;  // [capacity] least to draft from the n-th node …
    const double *verify_threshold; // [capacity] … and to verify it; not falling
    double sharpness;               // factor of the branch's logits
    double min_probability;         // a node whose own is lower is not drafted from
    const double *tries;            // [CONFIDENCE_BINS] drafted nodes by confidence, and how many
    const double *hits;             // of them were accepted (Calibration); NULL: probabilities
                                    // are used as they are
    const Noise *noise;             // for the token after the last one; each level adds its own to
                                    // the branch's logits. NULL: none
    int32_t stream;                 // 0: the draft is the text's continuation or nothing
    const Trust *trust;             // NULL: every token is verified
    NgramLimits ngram;
} DraftLimits;

// A suffix automaton of a text (automaton.c). The caller provides memory and room.
typedef struct {
    int32_t *memory;              // [mr_automaton_words(room)]
    int32_t room;                 // in tokens
    int32_t count, states, edges; // so far
    int32_t last;                 // the state of the whole text
} Automaton;

// Lengths of matches in given texts, in tokens; the same three are in
// decoding/speculate/given_texts.py.
#define GIVEN_LEAST 2
#define GIVEN_LONGEST 12
#define OWN_LEAST 2 // a match of so many tokens in the text itself takes precedence

// Other texts that drafts are copied from (given.c).
typedef struct {
    const int32_t *tokens; // [count] one text after another
    const int32_t *order;  // [count] positions, sorted by the tokens that begin there
    int32_t count;
} GivenTexts;

// The text that drafts are looked up in, and where the nodes of the last draft came from.
typedef struct {
    int32_t *tokens; // [count + nodes + 1 at least] all so far; drafts are written behind it
    int32_t count;
    Automaton *automaton;    // finds matches of any length; it reads new text when it is queried.
                             // NULL: the text is searched for n-grams
    const GivenTexts *given; // other texts to search as well, or NULL
    int32_t drafted;         // out: nodes that the branch drafted on from
    int32_t continued;       // out: nodes from the text, numbered after these
    int32_t matched;         // out: the length of the match; 0: none
} Text;

// A round of one sequence (speculative.c), and the memory it works in. The next round starts with
// what this one left in `ids` and `carried`.
typedef struct {
    const Stream *stream; // without a draft_head, only the text is looked up
    const LayerCache *caches, *block_cache;
    const Linear *draft_head, *head;
    const float *draft_norm, *norm; // [hidden] before each head
    const int64_t *token_map;       // [draft_vocab] the id of each output of draft_head, or NULL
    const bf16 *exact_head; // [draft_vocab, hidden] the bf16 rows of draft_head, with which the
                            // best tokens' logits are rescored. NULL: they are not
    int64_t *ids;     // [nodes + 1] in: pending tokens, then the last token; out: emitted tokens
    float *carried;   // [nodes + 1, hidden] in: for each of ids; out: for the accepted path. NULL:
                      // nothing is carried
    int64_t *tokens;  // [nodes] the draft
    int32_t *parents; // [nodes]
    double *confidence; // [nodes] out: the branch's probability of each node, before calibration;
                        // -1: a node from the text. NULL: not wanted
    float *hidden;      // [nodes + 1, hidden]
    float *features;    // [nodes + 1, taps, hidden] where the stream has taps
    float *scratch;     // for draft_tree, and [nodes + 1, head->outputs] logits of verification
    int32_t capacity, block_capacity, draft_vocab, layers, sequence;
    int64_t trusted;         // out: bit n - 1: node n is accepted without verification
    int64_t unverified;      // out: bit n: the n-th emitted token comes from such a node
    double refused;          // in, out: the highest score so far that was too low for Trust
    int32_t drafted, levels; // out: nodes and levels of the draft
    double draft_seconds;    // out: time for drafting
    int32_t accepted_drafted, accepted_continued; // out: of text.drafted and text.continued
    int64_t best;            // out: the branch's best token after the last one; -1: it did not run
    double best_probability; // out: its probability, before calibration
    Text text;               // tokens NULL: none. Emitted tokens are appended
    const Noise *noise;      // for the token after the last one. NULL: greedy
    const Screen *screen;    // of `head`, or NULL
} SpeculativeStep;

// ---- mixtures of experts ------------------------------------------------------------------------

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

// A digest of the sources that the library was built from (runtime/native/build.py).
const char *mr_source_digest(void);

// workspace.c, threads.c. Calls with different workspaces may run at the same time.
typedef struct Workspace Workspace;
Workspace *mr_workspace_open(int threads); // NULL: no memory
// At most `threads`, fewer if that is faster; fixed: always this many.
void mr_workspace_set_threads(Workspace *work, int threads, int fixed);
int mr_workspace_threads(const Workspace *work); // in use, apart from trials
// For tests of thread_choice.c: a call of `kind` took `seconds` and ended at `now`; how many
// threads the next call uses (perhaps in a trial).
void mr_note_call(Workspace *work, uint64_t kind, double seconds, double now);
int mr_next_threads(const Workspace *work);
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
// What the inputs of a layer in this format are a multiple of.
int mr_format_piece(int format);
// Bytes of 16 packed outputs' weights, and of their scales.
int64_t mr_column_bytes(int format, int inputs);
int64_t mr_scale_bytes(int format, int inputs);
// Bytes of an output's blocks in a GGUF file, of quantised weights.
int64_t mr_row_bytes(int format, int inputs);
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

// layers.c: layers [start, stop) on x [rows, hidden], in place.
void mr_layers(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches,
               const Adapter *const *adapters, const Rows *rows, float *x, int start, int stop);
// The keys and values of layers [start, stop) as if x entered each of them; x does not change.
void mr_fill_kv(Workspace *work, const Shape *shape, const Layer *layers, const LayerCache *caches,
                const Rows *rows, float *x, int start, int stop);
// passing.c: layers [0, count) on one row of each sequence, each row without those it skips.
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
// The same ids without probabilities, the rows shared among the threads.
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

// ngram.c: the longest suffix (at most `longest` tokens) of text [0, count) that ended at one of
// the first `known` < count tokens, the latest of equally long ones. to [most]: what followed,
// going round at the end of the text. Returns the suffix's length; 0: not even the last token.
int mr_ngram(const int32_t *text, int known, int count, int longest, int most, int64_t *to);
// The longest end of the text and the `drafted` tokens written after it that ended before the
// text's last token, by text->automaton or mr_ngram; `longest` and `to` as there. A longer match is
// reported as `longest`. If it has fewer than OWN_LEAST tokens and text->given has a longer one,
// `to` is what follows there, and the length is reported as `longest` more than it is.
int mr_look_up(const Text *text, int drafted, int longest, int most, int64_t *to);

// automaton.c: the memory that an automaton needs for a text of `room` tokens, in int32, and a
// fresh start in it.
int64_t mr_automaton_words(int room);
void mr_automaton_clear(Automaton *automaton);

// draft.c: one level of a draft. ids [rows]: tokens of adapter rows; the last `fresh` of them are
// new and get a target row as well. carried [rows, hidden] or NULL. x [fresh + rows, hidden] out:
// the target rows' residuals at the exit layer, then the branch's outputs, which are valid for new
// rows; the others only refresh the block's keys and values. With merged layers, target rows only
// leave their keys and values and enter layer 0 again later.
void mr_stream_step(Workspace *work, const Stream *stream, const LayerCache *caches,
                    const LayerCache *block_cache, int block_capacity, const Rows *rows, int fresh,
                    const int64_t *ids, const float *carried, float *x);

// draft.c: scores [count] of the branch's outputs x [count, d].
void mr_arla(const Arla *arla, float eps, int d, const float *x, int count, double *scores);

// speculative.c: one round: draft, verify, accept, and move the accepted path into place. `length`:
// committed tokens; step->ids [first, first + count) enter (all but the last refresh the block).
// Returns the number of tokens emitted; the K/V of the last token and of the accepted nodes are
// then in slots length, length + 1, …, uncommitted. Returns -1, and emits nothing, if step->noise
// is set and the model's logits are not finite.
int mr_speculative_step(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                        const DraftLimits *limits);
// A round for each of `count` sequences, which share everything but their buffers: one pass per
// level of their drafts, and as few passes as hold all rows to verify them. Sequences whose branch
// drafts come before those that copy from the text. emitted [count] out. Returns 0 where a round
// would return -1.
int mr_speculative_steps(Workspace *work, SpeculativeStep *const *steps, int count,
                         const int32_t *lengths, const int32_t *first, const int32_t *entering,
                         const DraftLimits *const *limits, int32_t *emitted);
// A round in two calls, when the caller chooses the tokens. The first drafts and leaves the model's
// logits after each node in step->scratch. The second takes path [count], the accepted nodes from
// node 0 on, and tokens [count], what is emitted after each.
void mr_speculative_draft(Workspace *work, SpeculativeStep *step, int length, int first, int count,
                          const DraftLimits *limits);
void mr_speculative_accept(SpeculativeStep *step, int length, const int32_t *path,
                           const int64_t *tokens, int count);
// A round with the caller's draft: step->tokens and parents hold its `nodes` nodes, step->ids only
// the last token. start 0: tokens are embedded; otherwise step->hidden holds the residuals that
// enter that layer, and the layers below have the keys and values. best [nodes + 1, k] out: the
// best tokens after the last token and each node, as from mr_best, without noise. path [nodes + 1]
// out: the accepted nodes from node 0 on. step->hidden then holds h_L of all nodes. Returns as
// mr_speculative_step.
int mr_verify_draft(Workspace *work, SpeculativeStep *step, int length, int nodes, int start, int k,
                    int64_t *best, int32_t *path);

// moe/experts.c
void mr_route(Workspace *work, const Linear *router, const float *norm, float eps, const float *x,
              int n, int experts, int k, int normalise, float *normed, float *logits, int64_t *ids,
              float *weights);
void mr_experts(Workspace *work, const Expert *const *experts, const int32_t *uses, int count,
                const float *normed, const int32_t *rows, const int32_t *places, float *parts);
void mr_combine(const float *parts, const float *weights, int n, int k, int d, float *x);

// moe/pruned.c: where the experts will move the residual.
void mr_predict_residual(Workspace *work, const LowRank *near, const LowRank *far,
                         const PrunedPair *pruned, const int64_t *ids, const float *weights, int k,
                         const float *ones, float eps, const float *residual, const float *state,
                         int n, float *p_near, float *p_far);
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

// moe/loads.h: crc32 as zlib's. size: a multiple of 16, as records are.
uint32_t mr_crc32(const uint8_t *data, int64_t size);

// io/reads.c: records from a file into slots of memory.
Reads *mr_reads_open(int fd, void *base, int slots, int64_t size, int64_t chunk, int alignment,
                     double rate, int threads, double spin);
void mr_reads_close(Reads *r);
void mr_reads_submit(Reads *r, int slot, int64_t offset, int64_t order, int demanded);
void mr_reads_promote(Reads *r, int slot);
int mr_reads_cancel(Reads *r, int slot);
int mr_reads_ended(Reads *r, double patience, int32_t *slots, int32_t *status, int64_t *bytes,
                   double *began, double *ended);

#pragma GCC visibility pop
#endif
