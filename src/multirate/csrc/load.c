// Threads of a call meet many times a layer. Where other programs use the processors, too, a thread
// is often kept from running, and all others wait for it: beside four busy processes a pass on two
// threads of two processors took fifteen times as long as alone, where one thread takes five times
// as long. So a thread that did not run for most of a call's time is done without for a while.
//
//   wall      of the calls that are looked at, each on all threads
//   lost[t]   what of it thread t wanted to run and did not
//
// One thread in place of two is as fast where these lose half of their time, and faster beyond.
#include "abi.h"

#define LOOKED_AT 0.03 // seconds of calls before anything is decided
#define TOO_MUCH 0.6   // of them lost
#define FIRST_PAUSE 0.25
#define LONGEST_PAUSE 4.0

int mr_threads_under_load(const Load *load, int wanted, double now) {
    int all = !load->fewer || load->fewer > wanted || now >= load->until;
    return all ? wanted : load->fewer;
}

void mr_note_call(Load *load, int threads, double now, double wall, const double *lost) {
    if (threads == 1 || (load->fewer && now - wall < load->until))
        return; // says nothing of what all threads would have taken
    load->wall += wall;
    for (int t = 0; t < threads; t++)
        load->lost[t] += lost[t];
    if (load->wall < LOOKED_AT)
        return;
    int kept = 0;
    for (int t = 0; t < threads; t++) {
        kept += load->lost[t] < TOO_MUCH * load->wall;
        load->lost[t] = 0;
    }
    load->wall = 0;
    load->fewer = 0;
    if (kept == threads) {
        load->pause = 0;
        return;
    }
    double longer = 2 * load->pause;
    load->pause = longer == 0 ? FIRST_PAUSE : longer > LONGEST_PAUSE ? LONGEST_PAUSE : longer;
    load->until = now + load->pause;
    load->fewer = kept ? kept : 1;
}
