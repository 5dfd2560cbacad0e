// What followed the end of the text in other texts [REST, He et al. 2023]. GivenTexts
// (decoding/speculate/given_texts.py) is the same in Python; tests compare the two.
#include "given.h"

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

int given_match(const GivenTexts *texts, const int32_t *end, int count, int *place) {
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

void copy_given(const GivenTexts *texts, int place, int most, int64_t *to) {
    for (int j = 0; j < most; j++)
        to[j] = texts->tokens[(place + j) % texts->count];
}
