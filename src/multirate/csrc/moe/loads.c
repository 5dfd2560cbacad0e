// Turns needs and predictions into reads, and finished reads into READY slots: experts/loader.py
// for decoders that run in C.
#include "cache.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "../io/records.h"

#define PATIENCE 0.1 // seconds of waiting for a read after which the interpreter may look at Ctrl-C

static void begin_load(ExpertCache *e, Slot *slot, int64_t order) {
    reads_add(e->plan.reads, (int)(slot - e->slots), e->plan.offsets[slot->key], order,
              slot->demanded);
}

static void forget_load(ExpertCache *e, Slot *slot) {
    e->loading--;
    on_evict(e, slot);
}

// A prediction's load is not wanted any more. Whether its slot is free now; a read that has begun
// ends with its chunk.
static int drop_load(ExpertCache *e, Slot *slot) {
    if (!mr_reads_cancel(e->plan.reads, (int)(slot - e->slots)))
        return 0;
    forget_load(e, slot);
    e->controls.counts.cancelled++;
    return 1;
}

static inline int is_speculative(const Slot *slot) {
    return slot->state == SLOT_LOADING && !slot->demanded;
}

static Slot *reserve_for_demand(ExpertCache *e, int key) {
    Slot *slot = reserve(e, key, 0);
    for (int i = 0; !slot && e->loading && i < e->plan.slots; i++)
        if (is_speculative(&e->slots[i]) && drop_load(e, &e->slots[i]))
            slot = reserve(e, key, 0);
    return slot;
}

void demand_loads(ExpertCache *e, const int32_t *keys, int count) {
    int added = 0;
    for (int i = 0; i < count; i++) {
        Slot *slot = find(e, keys[i]);
        if (slot) {
            if (is_speculative(slot)) {
                slot->demanded = slot->early = 1;
                e->controls.counts.late++;
                mr_reads_promote(e->plan.reads, (int)(slot - e->slots));
                added++;
            }
            continue;
        }
        if (!(slot = reserve_for_demand(e, keys[i])))
            break;
        begin_load(e, slot, 0);
        added++;
    }
    if (added)
        reads_begin(e->plan.reads);
}

void go_on_loading(ExpertCache *e) {
    int taken = 0, issued = 0;
    for (; taken < e->pending_count; taken++) {
        const Prediction *one = &e->pending[taken];
        if (find(e, one->key))
            continue;
        Slot *slot = reserve(e, one->key, 1);
        if (!slot)
            break;
        slot->deadline = one->deadline;
        slot->load_token = e->controls.token;
        e->controls.counts.issued++;
        begin_load(e, slot,
                   ((e->controls.token * e->plan.rows + one->deadline) << 32) + ++e->numbers);
        issued++;
    }
    e->pending_count -= taken;
    if (taken)
        memmove(e->pending, e->pending + taken, (size_t)e->pending_count * sizeof *e->pending);
    if (issued)
        reads_begin(e->plan.reads);
}

void load_ahead(ExpertCache *e, const Prediction *found, int count) {
    int experts = e->plan.experts, kept = 0, missing = 0;
    for (int i = 0; i < count; i++)
        memset(e->protected + (size_t)found[i].deadline * experts, 0, (size_t)experts);
    for (int i = 0; i < count; i++)
        e->protected[found[i].key] = 1;
    uint64_t rows[16] = {0}; // of the predictions: at most 1024 layers
    for (int i = 0; i < count; i++)
        rows[found[i].deadline / 64 % 16] |= (uint64_t)1 << found[i].deadline % 64;
    for (int i = 0; e->loading && i < e->plan.slots; i++) {
        Slot *slot = &e->slots[i];
        if (is_speculative(slot) && rows[slot->deadline / 64 % 16] >> slot->deadline % 64 & 1 &&
            !e->protected[slot->key])
            drop_load(e, slot);
    }
    for (int i = 0; i < e->pending_count; i++) {
        int deadline = e->pending[i].deadline;
        if (!(rows[deadline / 64 % 16] >> deadline % 64 & 1))
            e->pending[kept++] = e->pending[i];
    }
    e->pending_count = kept;
    for (int i = 0; i < count; i++) {
        if (find(e, found[i].key))
            continue;
        Prediction one = found[i];
        int at = e->pending_count++;
        missing++;
        for (; at > 0; at--) {
            const Prediction *before = &e->pending[at - 1];
            if (before->deadline < one.deadline ||
                (before->deadline == one.deadline && before->chance >= one.chance))
                break;
            e->pending[at] = *before;
        }
        e->pending[at] = one;
    }
    if (missing)
        go_on_loading(e);
}

// crc32 as zlib's: 16 bytes a step, each looked up in the table of its distance from the step's
// end.
static uint32_t crc_tables[16][256];
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;

static void make_crc_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? c >> 1 ^ 0xedb88320u : c >> 1;
        crc_tables[0][i] = c;
    }
    for (int t = 1; t < 16; t++)
        for (int i = 0; i < 256; i++) {
            uint32_t before = crc_tables[t - 1][i];
            crc_tables[t][i] = before >> 8 ^ crc_tables[0][before & 255];
        }
}

uint32_t mr_crc32(const uint8_t *data, int64_t size) {
    pthread_once(&crc_once, make_crc_tables);
    uint32_t crc = ~0u;
    for (int64_t at = 0; at + 16 <= size; at += 16) {
        const uint8_t *d = data + at;
        uint32_t next = 0;
        for (int i = 0; i < 4; i++)
            next ^= crc_tables[15 - i][d[i] ^ (crc >> 8 * i & 255)];
        for (int i = 4; i < 16; i++)
            next ^= crc_tables[15 - i][d[i]];
        crc = next;
    }
    return ~crc;
}

// Whether the record read into `slot` is what was packed. Looked at when a record is first read.
static int is_intact(ExpertCache *e, const Slot *slot) {
    int key = slot->key;
    if (e->plan.checked[key])
        return 1;
    const Reads *r = e->plan.reads;
    const uint8_t *record = r->base + (size_t)(slot - e->slots) * (size_t)r->size;
    return e->plan.checked[key] = mr_crc32(record, r->size) == e->plan.checksums[key];
}

static void load_over(ExpertCache *e, const EndedRead *read) {
    Slot *slot = &e->slots[read->slot];
    Counts *counts = &e->controls.counts;
    int ahead = slot->early || !slot->demanded, status = read->status, key = slot->key;
    if (!status && !is_intact(e, slot))
        status = EBADMSG;
    *(ahead ? &counts->speculative_bytes : &counts->demand_bytes) += read->bytes;
    // two reads at a time count once
    double began = read->began > e->busy_until ? read->began : e->busy_until;
    if (read->ended > began) {
        counts->read_seconds += read->ended - began;
        e->busy_until = read->ended;
    }
    note_event(e, ahead ? EVENT_SPECULATIVE : EVENT_DEMAND, read->began, read->ended,
               key / e->plan.experts, key % e->plan.experts);
    if (!status) {
        e->loading--;
        slot->state = SLOT_READY;
        slot->fresh = !slot->demanded;
        on_insert(e, slot);
        if (slot->demanded)
            on_access(e, slot);
        return;
    }
    int demanded = slot->demanded;
    forget_load(e, slot);
    if (status == ECANCELED) {
        counts->cancelled++;
        return;
    }
    counts->errors++;
    if (demanded) {
        e->failed[key] = status;
        e->failures++;
    }
}

int poll_loads(ExpertCache *e, double patience) {
    if (!e->loading)
        return 0;
    int count = mr_reads_ended(e->plan.reads, patience, e->ended);
    for (int i = 0; i < count; i++)
        load_over(e, &e->ended[i]);
    return count;
}

int wait_for_load(ExpertCache *e, const int32_t *keys, int count) {
    for (;;) {
        for (int i = 0; i < count; i++) {
            if (is_ready(e, keys[i]))
                return LAYER_DONE;
            if (!e->failed[keys[i]])
                continue;
            e->controls.failed_key = keys[i];
            e->controls.failure = e->failed[keys[i]];
            return READ_FAILED;
        }
        demand_loads(e, keys, count);
        if (!e->loading)
            return NOTHING_LEFT;
        if (!poll_loads(e, PATIENCE))
            return PAUSED;
    }
}

void enter_row(ExpertCache *e, int row) {
    Controls *c = &e->controls;
    int experts = e->plan.experts, kept = 0, begun = row <= c->last_row;
    c->token += begun;
    c->row = c->last_row = row;
    if (begun) {
        e->pending_count = e->left_count = 0;
        memset(e->pinned, 0, (size_t)e->plan.rows * experts); // of a pass that was given up
        memset(e->protected, 0, (size_t)e->plan.rows * experts);
        double now = seconds_now();
        note_event(e, EVENT_TOKEN, now, now, row, -1);
    }
    for (int i = 0; i < e->pending_count; i++)
        if (e->pending[i].deadline > row)
            e->pending[kept++] = e->pending[i];
    e->pending_count = kept;
    memset(e->protected, 0, (size_t)(row + 1) * experts);
    if (e->failures)
        memset(e->failed, 0, (size_t)e->plan.rows * experts * sizeof *e->failed);
    e->failures = 0;
    poll_loads(e, 0.0);
    for (int i = 0; e->loading && i < e->plan.slots; i++) {
        Slot *slot = &e->slots[i];
        if (is_speculative(slot) && (slot->load_token < c->token || slot->deadline < row))
            drop_load(e, slot);
    }
}

// All of `keys` READY, one after the other (experts/runtime.py's preload); PAUSED: to be called
// again.
int mr_expert_cache_load(ExpertCache *e, const int32_t *keys, int count) {
    int state = LAYER_DONE;
    for (int i = 0; i < count && state == LAYER_DONE; i++)
        if (!is_ready(e, keys[i]))
            state = wait_for_load(e, keys + i, 1);
    return state;
}
