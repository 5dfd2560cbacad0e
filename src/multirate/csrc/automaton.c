// A suffix automaton of a growing text [Blumer et al. 1985]. SuffixAutomaton
// (decoding/speculate/suffix_automaton.py) is the same in Python and explains states, links and
// ends; tests compare the two.
//
// Memory, in int32 arrays one after the other:
//   states:  length, link, end, first (its newest edge or -1)     [STATES(room)] each
//   edges:   from, token, to, next (of the same state, or -1)     [EDGES(room)] each
//   table:   open addressing from (state, token) to an edge, or -1 [slots(room)]
// Edges of a state are chained for copies of states, and hashed for everything else.
#include "texts.h"
#include <string.h>

#define MAX_NESTED                                                                                 \
    64 // of the ends of the text that a token renews; suffix_automaton.py has it, too
#define STATES(room) (2 * (int64_t)(room) + 2)
#define EDGES(room) (3 * (int64_t)(room) + 4)

typedef struct {
    int32_t *length, *link, *end, *first;
    int32_t *from, *token, *to, *next;
    int32_t *table;
    uint32_t mask;
} Parts;

static int64_t slots(int room) {
    int64_t count = 16;
    while (count < 2 * EDGES(room))
        count *= 2;
    return count;
}

static Parts parts_of(const Automaton *a) {
    int64_t states = STATES(a->room), edges = EDGES(a->room);
    int32_t *edge = a->memory + 4 * states;
    return (Parts){
        a->memory,
        a->memory + states,
        a->memory + 2 * states,
        a->memory + 3 * states,
        edge,
        edge + edges,
        edge + 2 * edges,
        edge + 3 * edges,
        edge + 4 * edges,
        (uint32_t)slots(a->room) - 1,
    };
}

int64_t mr_automaton_words(int room) {
    return 4 * STATES(room) + 4 * EDGES(room) + slots(room);
}

static int new_state(Automaton *a, const Parts *p, int length, int link, int end) {
    int state = a->states++;
    p->length[state] = length;
    p->link[state] = link;
    p->end[state] = end;
    p->first[state] = -1;
    return state;
}

void mr_automaton_clear(Automaton *a) {
    Parts p = parts_of(a);
    a->count = a->states = a->edges = a->last = 0;
    memset(p.table, -1, (size_t)slots(a->room) * sizeof(int32_t));
    new_state(a, &p, 0, -1, 0);
}

// The slot of the table that has the edge, or that it would have.
static uint32_t slot_of(const Parts *p, int state, int32_t token) {
    uint32_t h = ((uint32_t)state * 0x9E3779B1u + (uint32_t)token) * 0x85EBCA77u;
    h ^= h >> 15;
    for (h &= p->mask; p->table[h] >= 0; h = (h + 1) & p->mask) {
        int32_t edge = p->table[h];
        if (p->from[edge] == state && p->token[edge] == token)
            break;
    }
    return h;
}

static int edge_of(const Parts *p, int state, int32_t token) {
    return p->table[slot_of(p, state, token)];
}

static void add_edge(Automaton *a, const Parts *p, int state, int32_t token, int to) {
    int edge = a->edges++;
    p->table[slot_of(p, state, token)] = edge;
    p->from[edge] = state;
    p->token[edge] = token;
    p->to[edge] = to;
    p->next[edge] = p->first[state];
    p->first[state] = edge;
}

// The state of the parts that end in the longest one of `state` and a token, whose edge this is; a
// new one, if they shared a state with longer parts.
static int split(Automaton *a, const Parts *p, int state, int edge) {
    int shared = p->to[edge], length = p->length[state] + 1;
    int32_t token = p->token[edge];
    if (p->length[shared] == length)
        return shared;
    int copy = new_state(a, p, length, p->link[shared], p->end[shared]);
    for (int e = p->first[shared]; e >= 0; e = p->next[e])
        add_edge(a, p, copy, p->token[e], p->to[e]);
    for (; state >= 0; state = p->link[state]) {
        int e = edge_of(p, state, token);
        if (e < 0 || p->to[e] != shared)
            break;
        p->to[e] = copy;
    }
    return p->link[shared] = copy;
}

static void add(Automaton *a, const Parts *p, int32_t token) {
    // the ends of the text so far occurred at its end
    int state = p->link[a->last];
    for (int i = 0; i < MAX_NESTED && state > 0; i++, state = p->link[state])
        p->end[state] = a->count;
    a->count++;
    int made = new_state(a, p, a->count, 0, a->count), edge = -1;
    for (state = a->last; state >= 0; state = p->link[state]) {
        edge = edge_of(p, state, token);
        if (edge >= 0)
            break;
        add_edge(a, p, state, token, made);
    }
    if (state >= 0)
        p->link[made] = split(a, p, state, edge);
    a->last = made;
}

void automaton_grow(Automaton *a, const int32_t *text, int count) {
    Parts p = parts_of(a);
    while (a->count < count)
        add(a, &p, text[a->count]);
}

int automaton_match(const Automaton *a, const int32_t *drafted, int n, int *end) {
    Parts p = parts_of(a);
    int state = a->last ? p.link[a->last] : 0, matched = p.length[state];
    for (int i = 0; i < n; i++)
        for (;;) {
            int edge = edge_of(&p, state, drafted[i]);
            if (edge >= 0 && p.to[edge] != a->last) { // the last state's parts occur there alone
                state = p.to[edge];
                matched++;
                break;
            }
            if (!state) {
                matched = 0;
                break;
            }
            state = p.link[state];
            matched = p.length[state];
        }
    *end = p.end[state];
    return matched;
}
