/* The shared account of a container's device memory: one file, mapped by every process in it. No lock, no pointer.
 *
 *     header | device 0 .. 15: uuid, total, limit | slot 0 .. 1023: who, one account per device
 *
 * Law: for each device, `total` = the sum of its accounts, once the last change is written through. `total` holds that
 * change itself (who, how much, which way, a sequence number), so whoever comes next can write it through: a process
 * that is killed between the two steps leaves nothing half done. A file of zeros is an empty ledger, so creating it
 * needs no step that could be interrupted either.
 *
 *     total   = low: used (32 bits) | size of the last change (32)      high: sequence (48) | slot (15) | release (1)
 *     account = low: bytes of one process, in units                     high: sequence of the last change applied
 *
 * This file knows nothing of CUDA, files or processes; `slots.c` decides who is alive.
 */
#pragma once

#include <stddef.h>

#include "word.h"

enum { LEDGER_DEVICES = 16, LEDGER_SLOTS = 1024, LEDGER_NAME_BYTES = 16 };
#define LEDGER_MAGIC UINT64_C(0x31524744454c564b) /* "KVLEDGR1": layout and protocol, version 1 */

/* The driver hands out nothing smaller than this; sizes are rounded up to it. */
#define UNIT_BYTES UINT64_C(512)
#define MAX_UNITS UINT64_C(0xffffffff)

typedef struct {
    Word uuid;               /* zero: free; set once */
    Word total;
    uint64_t limit_plus_one; /* bytes; zero: nobody has named a limit yet */
    uint64_t peak_units;
    uint64_t num_refused;
    uint64_t context_bytes;  /* what one CUDA context takes, the least of what was measured; zero: unknown */
    uint64_t swept_ns;       /* when somebody last looked for dead processes */
    uint64_t reserved[7];
} LedgerDevice;

typedef struct {
    uint64_t generation; /* odd: being taken over; even and not zero: the four fields below are valid */
    uint64_t pid;
    uint64_t pid_namespace;
    uint64_t start_ticks;
    char name[LEDGER_NAME_BYTES];
    uint64_t reserved[2];
    Word accounts[LEDGER_DEVICES];
} LedgerSlot;

typedef struct {
    uint64_t magic;
    uint64_t num_slots_seen; /* slots at and above this were never used */
    uint64_t reserved[510];
    LedgerDevice devices[LEDGER_DEVICES];
    LedgerSlot slots[LEDGER_SLOTS];
} Ledger;

_Static_assert(sizeof(LedgerDevice) == 128 && sizeof(LedgerSlot) == 320, "the layout is read by other programs");
_Static_assert(offsetof(Ledger, devices) == 4096 && offsetof(Ledger, slots) == 6144, "the layout is read by others");

/* Whole units that hold `size_bytes`; above any limit when it is absurd, so that it is refused and never wraps. */
static inline uint64_t units_of(size_t size_bytes) {
    uint64_t units = size_bytes / UNIT_BYTES + (size_bytes % UNIT_BYTES != 0);
    return units <= MAX_UNITS ? units : MAX_UNITS + 1;
}

/* False: the file is another version's. */
bool ledger_open(Ledger *ledger);

/* The index of this device, entered if it is new; -1 when all places are taken. */
int ledger_device(Ledger *ledger, Word uuid);

/* The smallest limit that any process has brought counts for all. */
void ledger_lower_limit(Ledger *ledger, int device, uint64_t limit_bytes);

/* Add `units` to the account of `slot` if the total stays at or below the limit; false, and nothing changed, if not. */
bool ledger_reserve(Ledger *ledger, int device, uint32_t slot, uint64_t units);

/* For people: an allocation was refused. */
void ledger_count_refusal(Ledger *ledger, int device);

/* Add `units` though the limit is passed: the driver has taken them already, and the account tells the truth. */
void ledger_charge(Ledger *ledger, int device, uint32_t slot, uint64_t units);

void ledger_release(Ledger *ledger, int device, uint32_t slot, uint64_t units);

uint64_t ledger_used_units(const Ledger *ledger, int device);

/* The caller holds the slot's lock. First frees what a dead owner left; then the slot is the caller's. */
void ledger_take_slot(Ledger *ledger, uint32_t slot, uint64_t pid, uint64_t pid_namespace, uint64_t start_ticks,
                      const char *name);

/* Give back, on one device, what every slot but `own` holds whose owner `is_dead`. True if anything was given back. */
bool ledger_sweep(Ledger *ledger, int device, uint32_t own,
                  bool (*is_dead)(const LedgerSlot *slot, uint32_t index, void *context), void *context);
