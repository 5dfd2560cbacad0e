// What followed the end of the text when it occurred before [prompt lookup, Saxena 2023], or in
// other texts [REST, He et al. 2023], and whether a draft continues with it. TextIndex, GivenTexts
// (decoding/speculate/given_texts.py) and DraftTree are the same in Python; tests compare the two.
#include "texts.h"

// What followed place `at` of a text of `count` tokens, going round at its end.
static void copy_following(const int32_t *text, int count, int at, int most, int64_t *to) {
    int period = count - at;
    for (int j = 0; j < most; j++)
        to[j] = j < period ? text[at + j] : to[j - period];
}

int mr_ngram(const int32_t *text, int known, int count, int longest, int most, int64_t *to) {
    int matched = 0, at = -1;
    const int32_t *last = text + count - 1;
    for (int p = known - 1; p >= 0 && matched < longest; p--) {
        if (text[p] != *last)
            continue;
        int n = 1;
        while (n < longest && n <= p && text[p - n] == last[-n])
            n++;
        if (n > matched) {
            matched = n;
            at = p;
        }
    }
    if (matched)
        copy_following(text, count, at + 1, most, to);
    return matched;
}

// The texts' tokens from `place` on against these: negative where they come before; at the end of
// the texts, fewer tokens come first.
static int compared(const GivenTexts *texts, int place, const int32_t *tokens, int count) {
    for (int i = 0; i < count; i++) {
        if (place + i >= texts->count)
            return -1;
        int32_t here = texts->tokens[place + i];
        if (here != tokens[i])
            return here < tokens[i] ? -1 : 1;
    }
    return 0;
}

// The first place in order [low, count) that does not come before these tokens; after: that comes
// after them.
static int bound(const GivenTexts *texts, int low, const int32_t *tokens, int count, int after) {
    int high = texts->count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (compared(texts, texts->order[middle], tokens, count) < after)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The longest end of the `count` tokens up to `end` (exclusive) that occurs in the texts, of
// GIVEN_LEAST to GIVEN_LONGEST tokens: returns its length, and in *place where its continuation
// begins. 0: there is none.
static int given_match(const GivenTexts *texts, const int32_t *end, int count, int *place) {
    int matched = 0;
    for (int length = 1; length <= count && length <= GIVEN_LONGEST; length++) {
        int first = bound(texts, 0, end - length, length, 0),
            last = bound(texts, first, end - length, length, 1);
        if (first == last)
            break;
        matched = length;
        *place = texts->order[(first + last) / 2] + length;
    }
    return matched < GIVEN_LEAST ? 0 : matched;
}

// What the texts have from a place on, going round at their end.
static void copy_given(const GivenTexts *texts, int place, int most, int64_t *to) {
    for (int j = 0; j < most; j++)
        to[j] = texts->tokens[(place + j) % texts->count];
}

// As mr_look_up, in the text alone.
static int look_up_own(const Text *text, int drafted, int longest, int most, int64_t *to) {
    int end, count = text->count + drafted;
    if (!text->automaton)
        return mr_ngram(text->tokens, text->count - 1, count, longest, most, to);
    automaton_grow(text->automaton, text->tokens, text->count);
    int matched = automaton_match(text->automaton, text->tokens + text->count, drafted, &end);
    if (matched)
        copy_following(text->tokens, count, end, most, to);
    return matched < longest ? matched : longest;
}

int mr_look_up(const Text *text, int drafted, int longest, int most, int64_t *to) {
    int place, count = text->count + drafted;
    if (!longest)
        return 0;
    int matched = look_up_own(text, drafted, longest, most, to);
    if (!text->given || matched >= OWN_LEAST || matched == longest)
        return matched;
    int length = given_match(text->given, text->tokens + count, count, &place);
    if (length <= matched)
        return matched;
    copy_given(text->given, place, most, to);
    return longest + length;
}

// Either draft is worth the sum over its nodes of path probability less threshold.
int worth_continuing(const DraftLimits *limits, double first, double next, int most,
                     double path_probability, double own, int n) {
    const double *draft = limits->draft_threshold, *verify = limits->verify_threshold;
    double gain = 0.0, here = path_probability * first;
    int length = 0;
    for (; length < most && here >= verify[n + length]; length++) {
        gain += here - verify[n + length];
        here *= next;
    }
    double other = 0.0;
    here = path_probability * own;
    int i = n, room = node_capacity(limits);
    for (; i < room && i + 1 < limits->depth && here >= draft[i]; i++) {
        other += here - draft[i];
        here *= limits->ngram.draft_accepted;
    }
    if (i < room && here >= verify[i])
        other += here - verify[i];
    return gain >= other ? length : 0;
}
