/* This process as one of those that share the limit. */
#pragma once

#include <pthread.h>

#include "cuda_api.h"
#include "ledger.h"
#include "limits.h"
#include "records.h"

typedef enum {
    STATE_NEW,      /* also what a forked child finds: it is another process, with an account of its own */
    STATE_STARTING,
    STATE_LIMITED,
    STATE_UNLIMITED,
    STATE_REFUSED,  /* a limit was named and cannot be kept: nothing is allocated */
} State;

enum { MAX_ORDINALS = 64, NO_LIMIT = -1, NO_DEVICE = -2 };

/* All of it is zero again in a forked child, also behind a bare `clone`: the kernel wipes these pages. */
typedef struct {
    State state;
    Ledger *ledger;
    uint32_t slot;
    Limits limits;
    int devices[MAX_ORDINALS]; /* per ordinal: 0 not asked yet, 1 no limit, 2 + index in the ledger */
    Records records;
    pthread_mutex_t virtual_lock, pool_lock, graph_lock, context_lock;
    pthread_cond_t pool_left; /* by its last user */
    struct Pool *pools;
    struct Exec *execs;
    uint64_t graph_units[MAX_ORDINALS]; /* charged for executable graphs, per ordinal */
    struct Context *contexts;
} Limiter;

extern Limiter limiter;

State limiter_start(void);

/* The state of this process, started when it has to be. */
static inline State limiter_state(void) {
    State state = __atomic_load_n(&limiter.state, __ATOMIC_ACQUIRE);
    return state > STATE_STARTING ? state : limiter_start();
}

/* The ledger's index of a device: NO_LIMIT when none was named for it, NO_DEVICE when the ledger is full. */
int limiter_device_of_uuid(Word uuid);

/* The same for an ordinal of this process. NO_DEVICE also when the driver does not know it. */
int limiter_device(CUdevice ordinal);

/* Bytes of the device's limit, and what is left of it, after a look at our pools and, once in a while, for the dead. */
typedef struct {
    uint64_t total_bytes, used_bytes, free_bytes;
} View;
View limiter_view(int device);
