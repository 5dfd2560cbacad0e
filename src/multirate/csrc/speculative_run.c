// Several rounds of one sequence in one call. The caller decides how the first one drafts; the
// length of the match in the text decides for the others.
#include "noise.h"
#include "speculative.h"

static int among(const int64_t *tokens, int count, const int64_t *wanted, int wanted_count) {
    for (int i = 0; i < count; i++)
        for (int n = 0; n < wanted_count; n++)
            if (tokens[i] == wanted[n])
                return 1;
    return 0;
}

// What the next step drafts with, by what the text has after the tokens it ends in.
// Returns 0 where the steps end instead.
static int choose_draft(const SpeculativeStep *step, const Steps *steps, int left,
                        DraftLimits *limits) {
    int64_t next;
    int longest = limits->ngram.longest,
        matched = longest ? mr_look_up(&step->text, 0, longest, 1, &next) : 0,
        copied = steps->by_match[matched], deepest = copied < 0 ? steps->deepest : copied;
    if (copied == STEPS_END)
        return 0;
    limits->stream = copied < 0;
    limits->depth = steps->depth < left ? steps->depth : left;
    limits->deepest = deepest < left ? deepest : left;
    return 1;
}

int mr_speculative_run(Workspace *work, SpeculativeStep *step, int length, int entering,
                       const DraftLimits *limits, Steps *steps) {
    SpeculativeStep told;
    size_t d = (size_t)step->stream->shape->hidden;
    int64_t *ids = step->ids;
    float *carried = step->carried;
    const Noise *noise = step->noise, *draft_noise = limits->noise;
    Noise here;
    DraftLimits those = *limits;
    int all = 0, emitted = 0, further = 0;
    steps->count = 0;
    for (;;) {
        // without the stream's draft the tokens that it has not read stay before what is emitted
        int stay = steps->waits && !those.stream ? entering : 0,
            first = steps->waits && those.stream ? 0 : entering - 1;
        Part part = part_of(step, &those, length + all, first, entering - first);
        step->ids = ids + stay;
        step->carried = carried ? carried + (size_t)stay * d : NULL;
        emitted = run_step(work, &part);
        if (emitted > 0) {
            StepDone *done = &steps->done[steps->count++];
            *done = (StepDone){emitted, step->drafted, step->levels, step->again, step->unverified};
            memcpy(steps->emitted + all, step->ids, (size_t)emitted * sizeof *ids);
        }
        step->ids = ids;
        step->carried = carried;
        if (emitted < 0)
            break;
        entering = stay + emitted;
        all += emitted;
        if (all >= steps->tokens || steps->count == MAX_STEPS || entering > steps->most ||
            among(steps->emitted + all - emitted, emitted, steps->ends, steps->end_count))
            break;
        if (!choose_draft(step, steps, steps->limit - all, &those) ||
            (those.stream && !steps->streams))
            break;
        if (!further++) { // the first one's draft stays as it is
            told = *step;
            step->tokens = steps->draft;
            step->parents = steps->parents;
            step->confidence = steps->confidence;
        }
        if (noise) {
            here = noise_ahead(noise, all);
            step->noise = &here;
            those.noise = draft_noise ? &here : NULL;
        }
    }
    steps->entering = entering;
    if (further) {
        told.text.count = step->text.count;
        told.refused = step->refused;
        *step = told;
    }
    return emitted < 0 ? -1 : all;
}
