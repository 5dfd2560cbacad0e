// How many threads a call uses: as many as have been fastest for calls like it.
//
// The threads of a call meet at a barrier several times in each layer. Beside other processes they
// often wait for one that is not running, and fewer threads can be several times as fast as all.
// So a few calls now and then run on another number of threads (a trial). Where these take less
// time than calls like them usually do, the new number is kept. A trial also begins soon after
// calls have become slower. The result of a call does not depend on its threads.
#include "thread_choice.h"

#include <string.h>

#define NEWEST_SHARE 0.125     // of the latest call in a usual time
#define SHORTEST_TRIAL 0.02    // seconds of calls like those that are tried
#define SHORTEST_TRIAL_UP 0.04 // more threads run well at first, until they have used up their time
#define FEWEST_CALLS 3         // of a trial
#define MOST_CALLS 200         // of a trial, those of unknown kinds included
#define GAIN 0.95              // of the usual time: a trial that took less is a success
#define GIVE_UP 1.3            // of the usual time: a trial ends early …
#define GIVE_UP_SECONDS 0.003  // … where it took this much longer, too
#define FIRST_PAUSE 0.1        // seconds between trials: doubled after each failure, up to …
#define LONGEST_PAUSE_UP                                                                           \
    1.0                   // … this while threads are unused, as nothing else shows that the
                          // machine has become idle
#define LONGEST_PAUSE 8.0 // … and this while all are in use
#define SLOWER 1.4        // calls against usual ones: begin a trial

void open_thread_choice(ThreadChoice *choice, int most, int fixed) {
    memset(choice, 0, sizeof *choice);
    choice->most = choice->threads = most;
    choice->fixed = fixed || most == 1;
    choice->pause = FIRST_PAUSE;
    choice->slowdown = 1;
}

static UsualTime *usual_time(ThreadChoice *choice, uint64_t kind) {
    return &choice->usual[kind * 0x9e3779b97f4a7c15u >> 58];
}

// The numbers that are tried by turns: one thread less or more, half or twice as many.
static int next_candidate(ThreadChoice *choice) {
    int now = choice->threads, wanted[] = {now - 1, now + 1, now / 2, 2 * now};
    for (int tries = 0; tries < 4; tries++) {
        int threads = wanted[choice->candidate++ % 4];
        if (threads >= 1 && threads <= choice->most && threads != now)
            return threads;
    }
    return now == 1 ? choice->most : 1;
}

static void begin_trial(ThreadChoice *choice) {
    choice->before = choice->threads;
    choice->threads = next_candidate(choice);
    choice->calls = 0;
    choice->tried = choice->expected = 0;
}

static void end_trial(ThreadChoice *choice, double now) {
    double ratio = choice->expected > 0 ? choice->tried / choice->expected : 1;
    if (ratio < GAIN) {
        for (int i = 0; i < KINDS_OF_CALLS; i++)
            choice->usual[i].seconds *= ratio;
        choice->pause = FIRST_PAUSE;
    } else {
        choice->threads = choice->before;
        double longest = choice->threads < choice->most ? LONGEST_PAUSE_UP : LONGEST_PAUSE;
        choice->pause = 2 * choice->pause < longest ? 2 * choice->pause : longest;
    }
    choice->before = 0;
    choice->slowdown = 1;
    choice->ended = now;
    choice->due = now + choice->pause;
}

static void note_trial(ThreadChoice *choice, const UsualTime *usual, uint64_t kind, double seconds,
                       double now) {
    choice->calls++;
    if (usual->kind == kind) {
        choice->tried += seconds;
        choice->expected += usual->seconds;
    }
    double shortest = choice->threads > choice->before ? SHORTEST_TRIAL_UP : SHORTEST_TRIAL;
    int enough = choice->calls >= FEWEST_CALLS && choice->expected >= shortest;
    int failed = choice->tried > GIVE_UP * choice->expected + GIVE_UP_SECONDS;
    if (enough || failed || choice->calls >= MOST_CALLS)
        end_trial(choice, now);
}

void note_call(ThreadChoice *choice, uint64_t kind, double seconds, double now) {
    if (choice->fixed)
        return;
    UsualTime *usual = usual_time(choice, kind);
    if (choice->before) {
        note_trial(choice, usual, kind, seconds, now);
        return;
    }
    if (usual->kind != kind) {
        *usual = (UsualTime){kind, seconds};
        return;
    }
    if (!choice->due) // the first call of a known kind
        choice->due = now + choice->pause;
    double ratio = seconds / usual->seconds;
    choice->slowdown += NEWEST_SHARE * 2 * ((ratio < 4 ? ratio : 4) - choice->slowdown);
    usual->seconds += NEWEST_SHARE * (seconds - usual->seconds);
    int slower = choice->slowdown > SLOWER && now > choice->ended + FIRST_PAUSE;
    if (slower)
        choice->pause = FIRST_PAUSE;
    if (slower || now >= choice->due)
        begin_trial(choice);
}
