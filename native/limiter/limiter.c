#include "limiter.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "pools.h"
#include "slots.h"

enum { PAGE_BYTES = 65536, SWEEP_INTERVAL_NS = 20000000 };

/* On pages of its own, at the largest page size in use, so that exactly they can be wiped. */
static union {
    Limiter limiter;
    char pages[(sizeof(Limiter) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES];
} storage __attribute__((aligned(PAGE_BYTES)));

extern Limiter limiter __attribute__((alias("storage")));

static void wipe(void) {
    memset(&storage, 0, sizeof storage);
}

__attribute__((constructor)) static void wipe_in_children(void) {
    if (madvise(&storage, sizeof storage, MADV_WIPEONFORK) != 0) pthread_atfork(NULL, NULL, wipe); /* Linux < 4.14 */
}

static void say(const char *sentence) {
    char line[512];
    int length = snprintf(line, sizeof line, "kvarto limiter: %s; no device memory is given out\n", sentence);
    if (length > (int)sizeof line) length = sizeof line;
    if (write(STDERR_FILENO, line, (size_t)length) < 0) return; /* nobody listens; cuInit still fails */
}

static State start(void) {
    char error[400] = "";
    if (!limits_are_configured()) return STATE_UNLIMITED;
    if (limits_read(&limiter.limits, error, sizeof error)) {
        limiter.ledger = slots_join(ledger_path(), &limiter.slot, error, sizeof error);
        if (limiter.ledger) return STATE_LIMITED;
    }
    say(error);
    return STATE_REFUSED;
}

/* The driver first, and outside of the start: while it is loaded it may look up, and call, functions of its own, and
 * come back here. */
State limiter_start(void) {
    State state = STATE_NEW;
    driver_load();
    bool is_first = __atomic_compare_exchange_n(&limiter.state, &state, STATE_STARTING, false, __ATOMIC_ACQUIRE,
                                                __ATOMIC_ACQUIRE);
    if (is_first) __atomic_store_n(&limiter.state, start(), __ATOMIC_RELEASE);
    while ((state = __atomic_load_n(&limiter.state, __ATOMIC_ACQUIRE)) == STATE_STARTING) sched_yield();
    return state;
}

/* Named here, or by a process before us: a program that lost its environment is limited all the same. */
static bool is_limited(Word uuid, uint64_t *bytes) {
    if (limits_find(&limiter.limits, uuid, bytes)) return true;
    for (int device = 0; device < LEDGER_DEVICES; device++) {
        if (word_load(&limiter.ledger->devices[device].uuid).whole != uuid.whole) continue;
        uint64_t limit_plus_one = step_load(&limiter.ledger->devices[device].limit_plus_one);
        *bytes = limit_plus_one - 1;
        return limit_plus_one != 0;
    }
    return false;
}

int limiter_device_of_uuid(Word uuid) {
    uint64_t bytes;
    if (!is_limited(uuid, &bytes)) return NO_LIMIT;
    int device = ledger_device(limiter.ledger, uuid);
    if (device < 0) return NO_DEVICE;
    ledger_lower_limit(limiter.ledger, device, bytes);
    return device;
}

static int find_device(CUdevice ordinal) {
    CUuuid bytes;
    Word uuid;
    if (DRIVER(cuDeviceGetUuid_v2, &bytes, ordinal) != CUDA_SUCCESS &&
        DRIVER(cuDeviceGetUuid, &bytes, ordinal) != CUDA_SUCCESS) {
        return NO_DEVICE;
    }
    memcpy(&uuid, &bytes, sizeof uuid);
    return limiter_device_of_uuid(uuid);
}

int limiter_device(CUdevice ordinal) {
    if (ordinal < 0 || ordinal >= MAX_ORDINALS) return NO_DEVICE;
    int known = __atomic_load_n(&limiter.devices[ordinal], __ATOMIC_RELAXED);
    if (known) return known - 2;
    int device = find_device(ordinal);
    if (device != NO_DEVICE) __atomic_store_n(&limiter.devices[ordinal], device + 2, __ATOMIC_RELAXED);
    return device;
}

static void sweep_sometimes(LedgerDevice *device, int index) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t now_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    uint64_t swept_ns = step_load(&device->swept_ns);
    if (now_ns - swept_ns < SWEEP_INTERVAL_NS && now_ns >= swept_ns) return;
    if (step_swap(&device->swept_ns, swept_ns, now_ns)) slots_sweep(limiter.ledger, index, limiter.slot);
}

View limiter_view(int index) {
    LedgerDevice *device = &limiter.ledger->devices[index];
    sweep_sometimes(device, index);
    pools_give_back(index, POOLS_SETTLE);
    uint64_t total = step_load(&device->limit_plus_one) - 1;
    uint64_t used = ledger_used_units(limiter.ledger, index) * UNIT_BYTES;
    return (View){.total_bytes = total, .used_bytes = used, .free_bytes = used < total ? total - used : 0};
}
