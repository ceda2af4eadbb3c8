#include "ledger.h"

#include <string.h>

typedef struct {
    uint64_t used, size, sequence;
    uint32_t slot;
    bool is_release;
} Change;

static Change unpack(Word word) {
    return (Change){
        .used = word.low & MAX_UNITS,
        .size = word.low >> 32,
        .sequence = word.high >> 16,
        .slot = word.high >> 1 & 0x7fff,
        .is_release = word.high & 1,
    };
}

static Word pack(Change change) {
    return (Word){.low = change.used | change.size << 32,
                  .high = change.sequence << 16 | (uint64_t)change.slot << 1 | change.is_release};
}

/* Make the change that `total` speaks of also on its account, exactly once, whoever gets there first. An account whose
 * sequence is not behind has it; a stale helper fails on the sequence or on the swap. */
static void write_through(Ledger *ledger, int device, Change change) {
    Word *account = &ledger->slots[change.slot % LEDGER_SLOTS].accounts[device];
    for (;;) {
        Word before = word_load(account);
        if (before.high >= change.sequence) return;
        Word after = {.low = change.is_release ? before.low - change.size : before.low + change.size,
                      .high = change.sequence};
        if (word_swap(account, before, after)) return;
    }
}

/* One attempt to follow `last` with `next`; the change before is on its account by now, so nothing is lost. */
static bool replace_total(Ledger *ledger, int device, Word last, Change next) {
    if (!word_swap(&ledger->devices[device].total, last, pack(next))) return false;
    write_through(ledger, device, next);
    return true;
}

static Word settled_total(Ledger *ledger, int device) {
    Word last = word_load(&ledger->devices[device].total);
    write_through(ledger, device, unpack(last));
    return last;
}

static void raise_peak(LedgerDevice *device, uint64_t used) {
    uint64_t peak = __atomic_load_n(&device->peak_units, __ATOMIC_RELAXED);
    while (used > peak &&
           !__atomic_compare_exchange_n(&device->peak_units, &peak, used, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

static bool add(Ledger *ledger, int device, uint32_t slot, uint64_t units, uint64_t limit_units) {
    for (;;) {
        Word last = settled_total(ledger, device);
        Change change = unpack(last);
        if (units > limit_units || change.used > limit_units - units) return false;
        change = (Change){change.used + units, units, change.sequence + 1, slot, false};
        if (!replace_total(ledger, device, last, change)) continue;
        raise_peak(&ledger->devices[device], change.used);
        return true;
    }
}

bool ledger_reserve(Ledger *ledger, int device, uint32_t slot, uint64_t units) {
    uint64_t limit_plus_one = step_load(&ledger->devices[device].limit_plus_one);
    uint64_t limit_units = (limit_plus_one - 1) / UNIT_BYTES; /* no limit yet: everything */
    return add(ledger, device, slot, units, limit_units < MAX_UNITS ? limit_units : MAX_UNITS);
}

void ledger_count_refusal(Ledger *ledger, int device) {
    __atomic_fetch_add(&ledger->devices[device].num_refused, 1, __ATOMIC_RELAXED);
}

void ledger_charge(Ledger *ledger, int device, uint32_t slot, uint64_t units) {
    add(ledger, device, slot, units, MAX_UNITS);
}

void ledger_release(Ledger *ledger, int device, uint32_t slot, uint64_t units) {
    for (;;) {
        Word last = settled_total(ledger, device);
        Change change = unpack(last);
        uint64_t size = units < change.used ? units : change.used;
        change = (Change){change.used - size, size, change.sequence + 1, slot, true};
        if (replace_total(ledger, device, last, change)) return;
    }
}

uint64_t ledger_used_units(const Ledger *ledger, int device) {
    return step_load(&ledger->devices[device].total.low) & MAX_UNITS;
}

bool ledger_open(Ledger *ledger) {
    step_swap(&ledger->magic, 0, LEDGER_MAGIC);
    return step_load(&ledger->magic) == LEDGER_MAGIC;
}

int ledger_device(Ledger *ledger, Word uuid) {
    for (int device = 0; device < LEDGER_DEVICES; device++) {
        Word *place = &ledger->devices[device].uuid;
        if (word_load(place).whole == 0) word_swap(place, (Word){.whole = 0}, uuid);
        if (word_load(place).whole == uuid.whole) return device;
    }
    return -1;
}

void ledger_lower_limit(Ledger *ledger, int device, uint64_t limit_bytes) {
    uint64_t *cell = &ledger->devices[device].limit_plus_one;
    uint64_t wanted = limit_bytes < UINT64_MAX ? limit_bytes + 1 : UINT64_MAX;
    for (;;) {
        uint64_t current = step_load(cell);
        if ((current != 0 && current <= wanted) || step_swap(cell, current, wanted)) return;
    }
}

/* Give back everything that `slot` holds, provided that it is still at `generation`: a slot taken over since keeps its
 * bytes. With the total settled, the account is exact for as long as the total stays what it was, for no one changes an
 * account except by a change of the total; so a swap that succeeds gave back exactly what the dead process held. */
static bool reclaim(Ledger *ledger, int device, uint32_t slot, uint64_t generation) {
    for (;;) {
        Word last = settled_total(ledger, device);
        uint64_t units = word_load(&ledger->slots[slot].accounts[device]).low;
        if (units == 0 || step_load(&ledger->slots[slot].generation) != generation) return false;
        Change change = unpack(last);
        uint64_t size = units < change.used ? units : change.used;
        change = (Change){change.used - size, size, change.sequence + 1, slot, true};
        if (replace_total(ledger, device, last, change)) return true;
    }
}

/* The generation is read before the verdict and checked again at the moment of giving back: a verdict on one owner
 * never touches the next. */
bool ledger_sweep(Ledger *ledger, int device, uint32_t own,
                  bool (*is_dead)(const LedgerSlot *slot, uint32_t index, void *context), void *context) {
    bool any = false;
    settled_total(ledger, device);
    uint64_t num_slots = step_load(&ledger->num_slots_seen);
    for (uint32_t index = 0; index < num_slots && index < LEDGER_SLOTS; index++) {
        LedgerSlot *slot = &ledger->slots[index];
        uint64_t generation = step_load(&slot->generation);
        if (index == own || step_load(&slot->accounts[device].low) == 0 || !is_dead(slot, index, context)) continue;
        any |= reclaim(ledger, device, index, generation);
    }
    return any;
}

static void count_slot(Ledger *ledger, uint32_t slot) {
    for (;;) {
        uint64_t seen = step_load(&ledger->num_slots_seen);
        if (seen > slot || step_swap(&ledger->num_slots_seen, seen, slot + 1)) return;
    }
}

void ledger_take_slot(Ledger *ledger, uint32_t slot, uint64_t pid, uint64_t pid_namespace, uint64_t start_ticks,
                      const char *name) {
    LedgerSlot *mine = &ledger->slots[slot];
    count_slot(ledger, slot);
    uint64_t taking = (step_load(&mine->generation) + 1) | 1; /* odd also when the owner before died half way */
    step_store(&mine->generation, taking);
    for (int device = 0; device < LEDGER_DEVICES && word_load(&ledger->devices[device].uuid).whole != 0; device++) {
        reclaim(ledger, device, slot, taking);
    }
    step_store(&mine->pid, pid);
    step_store(&mine->pid_namespace, pid_namespace);
    step_store(&mine->start_ticks, start_ticks);
    strncpy(mine->name, name, sizeof mine->name - 1);
    step_store(&mine->generation, taking + 1);
}
