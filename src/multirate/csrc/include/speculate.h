// The contract of the kernel (model.h): drafts, and rounds of speculative decoding.
#ifndef MULTIRATE_SPECULATE_H
#define MULTIRATE_SPECULATE_H
#include "model.h"
#pragma GCC visibility push(default)

#define MAX_CANDIDATES 17      // tokens that one node of a draft may propose
#define CONFIDENCE_BINS 10     // of acceptance_statistics.py's Calibration …
#define CALIBRATION_STRENGTH 4 // … and the tries that its prior counts as
#define MAX_TAPS 4             // layers whose residuals a draft may read

// A draft branch: the model's first layers with adapters, a carried residual, an extra block.
typedef struct {
    const Shape *shape;
    const Layer *layers;
    const Adapter *const *adapters; // [layers], or NULL: none
    const Table *table;             // the embedding
    Linear carry;                   // applied to the carried residual; weight NULL: none
    const float *carry_norm;        // [hidden]
    Linear fuse_branch;             // after the exit layer, x = fuse_branch(x) …
    Linear fuse_carried;            // … + fuse_carried(carried residual); weight NULL: no fusion
    const float *fuse_branch_norm, *fuse_carried_norm; // [hidden]
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
} Branch;

// Drafts from text lookup (lookup.c). Longer matches in the text are reported as `longest`; matches
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

// What an exit layer has learnt to judge: the chance that the branch's best token is the model's,
// from its output x: sigmoid(out · silu(W n + bias) + out_bias) with n = x / rms(x).
typedef struct {
    const float *weight;     // [latent, hidden] W, the final norm's weights multiplied in
    const float *bias, *out; // [latent]
    float out_bias;
    int32_t latent;
} Scorer;

// Which drafted tokens are accepted without verification (dynamic mode, lossy): the branch's best
// tokens whose score is at least `least`.
typedef struct {
    double least;
    const Scorer *scorer; // gives the score; NULL: the token's probability, before calibration
    int32_t nodes;        // at most so many such nodes on top of DraftLimits.nodes
} Unverified;

// How far a draft tree grows. Thresholds are path probabilities: the product of the branch's
// probabilities from the last token down to a node, where unverified tokens (Unverified) count as
// certain. capacity: nodes + rule->nodes.
typedef struct {
    int32_t depth, width, nodes; // levels, nodes per level and nodes, at most, without Unverified's
    int32_t deepest;             // the deepest useful node, at most capacity
    int32_t top;                 // candidates per node, at most MAX_CANDIDATES
    const double *draft_threshold;  // [capacity] least to draft from the n-th node …
    const double *verify_threshold; // [capacity] … and to verify it; not falling
    double sharpness;               // factor of the branch's logits
    double min_probability;         // a node whose own is lower is not drafted from
    const double *tries;            // [CONFIDENCE_BINS] drafted nodes by confidence, and how many
    const double *hits;             // of them were accepted (Calibration); NULL: probabilities
                                    // are used as they are
    const Noise *noise;             // for the token after the last one; each level adds its own to
                                    // the branch's logits. NULL: none
    int32_t own;                    // 0: the draft is the text's continuation or nothing
    const Unverified *rule;         // NULL: every token is verified
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

// Other texts that drafts are copied from (lookup.c).
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
    // inputs
    const Branch *branch;     // without a draft_head, only the text is looked up
    const LayerCache *caches; // the model's, and of the branch's block …
    const LayerCache *block_cache;
    int32_t capacity, block_capacity; // … with so many slots per sequence
    int32_t sequence, layers;         // the caches' sequence; the model's layers
    const Linear *draft_head, *head;
    const float *draft_norm, *norm; // [hidden] before each head
    const Screen *screen;           // of `head`, or NULL
    const int64_t *token_map;       // [draft_vocab] the id of each output of draft_head, or NULL
    int32_t draft_vocab;
    const bf16 *exact_head; // [draft_vocab, hidden] the bf16 rows of draft_head, with which the
                            // best tokens' logits are rescored. NULL: they are not
    const Noise *noise;     // for the token after the last one. NULL: greedy
    const DraftLimits *limits;
    const int64_t *forced;   // [limits->deepest] the draft, where the branch makes none; or NULL
    int32_t chooses;         // whether the tokens are the argmax, with or without noise
    int32_t length;          // committed tokens
    int32_t first, backfill; // of ids from `first` on, so many pending tokens fill the block, at
                             // most MAX_ROWS - 2; the next one is the last token
    // buffers
    Text text;          // tokens NULL: none. Emitted tokens are appended
    int64_t *ids;       // [nodes + 1] in: pending tokens, then the last token; out: emitted tokens
    float *carried;     // [nodes + 1, hidden] in: for each of ids; out: for the accepted path.
                        // NULL: nothing is carried
    int64_t *tokens;    // [nodes] the draft
    int32_t *parents;   // [nodes] of its nodes
    double *confidence; // [nodes] out: the branch's probability of each node, before calibration;
                        // -1: a node from the text. NULL: not wanted
    float *hidden;      // [nodes + 1, hidden]
    float *features;    // [nodes + 1, taps, hidden] where the branch has taps
    float *scratch;     // for draft_tree, and [nodes + 1, head->outputs] logits of verification
    // results
    int32_t drafted, levels;   // nodes and levels of the draft
    int64_t unverified_nodes;  // bit n - 1: node n is accepted without verification
    int64_t unverified_tokens; // bit n: the n-th emitted token comes from such a node
    double highest_rejected;   // in and out: the highest score that was too low for Unverified
    double draft_seconds;      // time for drafting
    int32_t emitted;           // tokens; -1: the logits to draw them from are not finite
    int64_t best;              // the branch's best token after the last one; -1: it did not run
    double best_probability;   // its probability, before calibration
} SpeculativeStep;

// ---- functions ----------------------------------------------------------------------------------

// lookup.c: the longest suffix (at most `longest` tokens) of text [0, count) that ended at one of
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

// branch.c: one level of a draft. ids [rows]: tokens of adapter rows; the last `fresh` of them are
// new and get a target row as well. carried [rows, hidden] or NULL. x [fresh + rows, hidden] out:
// the target rows' residuals at the exit layer, then the branch's outputs, which are valid for new
// rows; the others only refresh the block's keys and values. With merged layers, target rows only
// leave their keys and values and enter layer 0 again later.
void mr_branch_step(Workspace *work, const Branch *branch, const LayerCache *caches,
                    const LayerCache *block_cache, int block_capacity, const Rows *rows, int fresh,
                    const int64_t *ids, const float *carried, float *x);

// draft.c: scores [count] of the branch's outputs x [count, d].
void mr_scores(const Scorer *scorer, float eps, int d, const float *x, int count, double *scores);

// speculative.c: a round for each of `count` sequences, which share everything but their buffers:
// draft, verify, accept, and move the accepted path into place. One pass per level of their drafts,
// and as few passes as hold all rows to verify them. Sequences whose branch drafts come before
// those that copy from the text. The K/V of the last token and of the accepted nodes are then in
// slots length, length + 1, …, uncommitted. Stops where a step's `emitted` is -1, and returns 0.
// Where a step does not choose, the caller does: the model's logits after each node are left in its
// scratch, and mr_speculative_accept ends the round.
int mr_speculative_steps(Workspace *work, SpeculativeStep *const *steps, int count);
// path [count]: the accepted nodes from node 0 on; tokens [count]: what is emitted after each.
void mr_speculative_accept(SpeculativeStep *step, const int32_t *path, const int64_t *tokens,
                           int count);
// A round with the caller's draft: step->tokens and parents hold its `nodes` nodes, step->ids only
// the last token. start 0: tokens are embedded; otherwise step->hidden holds the residuals that
// enter that layer, and the layers below have the keys and values. best [nodes + 1, k] out: the
// best tokens after the last token and each node, as from mr_best, without noise. path [nodes + 1]
// out: the accepted nodes from node 0 on. step->hidden then holds h_L of all nodes. Returns
// step->emitted.
int mr_verify_draft(Workspace *work, SpeculativeStep *step, int nodes, int start, int k,
                    int64_t *best, int32_t *path);

#pragma GCC visibility pop
#endif
