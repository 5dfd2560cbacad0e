// Chooses how many threads a call uses: the number that is fastest at the moment.
//
// The threads of a call meet at a barrier several times per layer. When other processes are
// running, they often wait for a thread that is not, and fewer threads can be several times faster.
// So from time to time there is a trial: blocks of calls run on another number of threads until it
// is clear whether that is faster. A trial also starts soon after calls have become slower. Only
// calls of a known kind take part: of others nobody could tell whether they are faster. The number
// of threads never changes the result of a call.
#include "thread_choice.h"

#include <math.h>
#include <string.h>

#define NEWEST_SHARE 0.125  // of the latest call in a usual time
#define BLOCK_SECONDS 0.003 // what the calls of a block usually take, at least
#define BLOCK_CALLS 4       // at least, for each to be like the others
#define KNOWN 4             // calls of a kind, before it counts
#define MOST_CALLS 16       // that are counted: a kind lasts so long beside others in its place
#define FEWEST_BLOCKS 6     // on the number in use, before a trial
#define MOST_BLOCKS 16      // that count
#define GAIN 0.95           // a number of threads that takes at most this much of the time is kept
#define NOISE 0.05          // of a block's time, at least
#define MOST_COST 0.03      // seconds by which a trial may be slower before it fails
// Seconds from one trial to the next: four times as many after each failure, up to LONGEST_PAUSE,
// or LONGEST_PAUSE_UP while threads are unused, because nothing else shows that the machine has
// become idle; but at least PAUSE_PER_COST times what the trial has cost.
#define FIRST_PAUSE 0.05
#define LONGEST_PAUSE 8.0
#define LONGEST_PAUSE_UP 1.0
#define PAUSE_PER_COST 20.0
#define SLOWER 1.4 // the latest calls against usual ones: begin a trial

void open_thread_choice(ThreadChoice *choice, int most, int fixed) {
    memset(choice, 0, sizeof *choice);
    choice->most = choice->threads = choice->in_use = most;
    choice->fixed = fixed || most == 1;
    choice->pause = FIRST_PAUSE;
    choice->slowdown = 1;
}

static UsualTime *usual_time(ThreadChoice *choice, uint64_t kind) {
    return &choice->usual[kind * 0x9e3779b97f4a7c15u >> 58];
}

// The numbers that are tried by turns: half or twice as many threads, one more or less.
static int next_candidate(ThreadChoice *choice) {
    int now = choice->in_use, wanted[] = {now / 2, now + 1, now - 1, 2 * now};
    for (;; choice->candidate++) {
        int threads = wanted[choice->candidate % 4];
        if (threads >= 1 && threads <= choice->most)
            return threads;
    }
}

static void begin_trial(ThreadChoice *choice) {
    choice->threads = next_candidate(choice);
    choice->tried = (Times){0, 0, 0};
    choice->took = choice->expected = choice->cost = choice->calls = 0;
}

static void end_trial(ThreadChoice *choice, int success, double now) {
    if (success) { // the next trial goes on in the same direction
        for (int i = 0; i < KINDS_OF_CALLS; i++)
            choice->usual[i].seconds *= choice->tried.mean;
        choice->in_use = choice->threads;
        choice->now = (Times){0, 0, 0};
        choice->pause = FIRST_PAUSE;
    } else {
        double longest = choice->in_use < choice->most ? LONGEST_PAUSE_UP : LONGEST_PAUSE;
        choice->pause = fmin(4 * choice->pause, longest);
        choice->candidate++;
    }
    choice->threads = choice->in_use;
    choice->slowdown = 1;
    choice->ended = now;
    choice->due = now + fmax(choice->pause, fmin(PAUSE_PER_COST * choice->cost, LONGEST_PAUSE));
}

static void add_block(Times *times, double time) {
    times->blocks += times->blocks < MOST_BLOCKS;
    times->mean += (time - times->mean) / times->blocks;
    times->square += (time * time - times->square) / times->blocks;
}

// The square of the relative standard deviation.
static double spread(const Times *times) {
    return fmax(times->square / (times->mean * times->mean) - 1, 0);
}

// How many standard errors the means are apart. Times that were lucky so far are taken to vary as
// much as the others.
static double apart(const Times *a, const Times *b) {
    double variance = fmax(spread(a), spread(b)) + NOISE * NOISE;
    return fabs(log(a->mean / b->mean)) / sqrt(variance * (1.0 / a->blocks + 1.0 / b->blocks));
}

static void judge(ThreadChoice *choice, double now) {
    int blocks = choice->tried.blocks;
    double errors = apart(&choice->tried, &choice->now);
    int faster = choice->tried.mean < GAIN * choice->now.mean;
    if (choice->cost > MOST_COST)
        end_trial(choice, 0, now);
    else if (blocks == MOST_BLOCKS || (blocks > 1 && errors > 2 + 4.0 / blocks))
        end_trial(choice, faster && errors > 2, now);
}

static int is_known(const UsualTime *usual, uint64_t kind) {
    return usual->kind == kind && usual->calls >= KNOWN;
}

int threads_for(ThreadChoice *choice, uint64_t kind) {
    return is_known(usual_time(choice, kind), kind) ? choice->threads : choice->in_use;
}

static void add_call(UsualTime *usual, uint64_t kind, double seconds) {
    if (usual->kind != kind && usual->calls > 0) { // the rarer one of two goes
        usual->calls--;
        return;
    }
    if (usual->kind != kind || usual->calls == 1) // the first call often finds the caches cold
        *usual = (UsualTime){kind, usual->kind == kind ? 1 : 0, seconds};
    usual->calls += usual->calls < MOST_CALLS;
    usual->seconds += NEWEST_SHARE * (seconds - usual->seconds);
}

void note_call(ThreadChoice *choice, uint64_t kind, double seconds, double now) {
    if (choice->fixed)
        return;
    UsualTime *usual = usual_time(choice, kind);
    if (!is_known(usual, kind)) {
        add_call(usual, kind, seconds);
        return;
    }
    int trial = choice->threads != choice->in_use;
    choice->took += seconds;
    choice->expected += usual->seconds;
    if (!trial) {
        double ratio = fmin(seconds / usual->seconds, 4);
        choice->slowdown += 2 * NEWEST_SHARE * (ratio - choice->slowdown);
        add_call(usual, kind, seconds);
    }
    choice->calls++;
    if (choice->expected < BLOCK_SECONDS || choice->calls < BLOCK_CALLS)
        return;
    add_block(trial ? &choice->tried : &choice->now, choice->took / choice->expected);
    choice->cost += choice->took - choice->expected;
    choice->took = choice->expected = choice->calls = 0;
    if (!choice->due) // the first block
        choice->due = now + choice->pause;
    if (trial) {
        judge(choice, now);
        return;
    }
    int slower = choice->slowdown > SLOWER && now > choice->ended + FIRST_PAUSE;
    if (slower)
        choice->pause = FIRST_PAUSE;
    if (choice->now.blocks >= FEWEST_BLOCKS && (slower || now >= choice->due))
        begin_trial(choice);
}
