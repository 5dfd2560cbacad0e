// Unpacking two lines of a block, in registers of any width: for x86_avx512_vnni.c and
// avx2_passes.h, which define REGISTER and LINE(k), LOWER(w), UPPER(w), UP(v, bits), DOWN(v, bits)
// and WITH_BITS(byte, more, mask) of it.
#ifndef MULTIRATE_PAIRS_OF_LINES_H
#define MULTIRATE_PAIRS_OF_LINES_H
// Lines 2j and 2j + 1 of a block, as w and v.
#define PAIR_8(j) REGISTER w = LINE(2 * (j)), v = LINE(2 * (j) + 1);
#define PAIR_4(j) REGISTER both = LINE(j), w = LOWER(both), v = UPPER(both);
#define FIFTH_0 UP(more, 4), UP(more, 3)
#define FIFTH_1 UP(more, 2), UP(more, 1)
#define FIFTH_2 more, DOWN(more, 1)
#define FIFTH_3 DOWN(more, 2), DOWN(more, 3)
#define ADD_FIFTH(early, late)                                                                     \
    w = WITH_BITS(w, early, 16);                                                                   \
    v = WITH_BITS(v, late, 16);
#define APPLY(F, ...) F(__VA_ARGS__)
#define PAIR_5(j)                                                                                  \
    PAIR_4(j) const REGISTER more = LINE(4);                                                       \
    APPLY(ADD_FIFTH, FIFTH_##j)
#define SIXTH_0 UP(more, 4), UP(more, 2)
#define SIXTH_1 more, DOWN(more, 2)
#define SIXTH_2 SIXTH_0
#define SIXTH_3 SIXTH_1
#define ADD_SIXTH(early, late)                                                                     \
    w = WITH_BITS(w, early, 48);                                                                   \
    v = WITH_BITS(v, late, 48);
#define PAIR_6(j)                                                                                  \
    PAIR_4(j) const REGISTER more = LINE(4 + (j) / 2);                                             \
    APPLY(ADD_SIXTH, SIXTH_##j)
#endif
