// What followed the end of the text when it occurred before [prompt lookup, Saxena 2023], and whether a draft follows it.
#ifndef MULTIRATE_LOOKUP_H
#define MULTIRATE_LOOKUP_H

typedef struct {
    int32_t longest, deepest;       // tokens compared, 0: no lookup; the deepest node that is of use, at most `nodes`
    const double *agree, *onward;   // [longest + 1], by matched length: the chance that the first token holds given that the
                                    // stream's best is the same, and that each next one does
    double steady;                  // the chance that the next level of the stream's own draft is accepted
} Lookup;

// decoding/ngram.py, TextIndex: the longest suffix (at most `longest` tokens) of text [0, count) that ended at one of the
// first `known` < count tokens, the latest of equally long ones. to [most]: what followed, going round at the end of the text.
// Returns the suffix's length; 0: not even the last token occurred.
static int look_up(const int32_t *text, int known, int count, int longest, int most, int64_t *to) {
    int matched = 0, at = -1;
    const int32_t *last = text + count - 1;
    for (int p = known - 1; p >= 0 && matched < longest; p--) {
        if (text[p] != *last) continue;
        int n = 1;
        while (n < longest && n <= p && text[p - n] == last[-n]) n++;
        if (n > matched) matched = n, at = p;
    }
    int period = count - 1 - at;
    for (int j = 0; matched && j < most; j++) to[j] = j < period ? text[at + 1 + j] : to[j - period];
    return matched;
}

// methods/m2r2/tree.py, DraftTree.worth_following: how many tokens of a suggestion below node n, the last of a chain, reached by `reach`,
// make a better draft than going on with the stream, whose best token, of probability `own`, is the suggestion's first.
static int worth_following(const Lookup *lookup, int matched, int most, double reach, double own, int n, int nodes,
                           int depth_limit, const double *expand, const double *keep) {
    double gain = 0.0, other = 0.0, here = reach * lookup->agree[matched];
    int length = 0;
    for (; length < most && here >= keep[n + length]; length++) {
        gain += here - keep[n + length];
        here *= lookup->onward[matched];
    }
    here = reach * own;
    int i = n;
    for (; i < nodes && i + 1 < depth_limit && here >= expand[i]; i++) {
        other += here - expand[i];
        here *= lookup->steady;
    }
    if (i < nodes && here >= keep[i]) other += here - keep[i];
    return gain >= other ? length : 0;
}
#endif
