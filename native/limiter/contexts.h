/* The CUDA contexts of this process, as the limiter knows them: who made them where, and what is charged for each. */
#pragma once

#include "charge.h"

enum { NUM_SETTINGS = 3 }; /* stack, printf buffer, heap: CU_LIMIT_STACK_SIZE and the two behind it */

typedef struct Context {
    CUcontext handle;
    CUdevice ordinal;
    bool is_primary;
    int num_users;
    Charge charge;
    size_t first_settings[NUM_SETTINGS];
    uint64_t setting_units[NUM_SETTINGS];
    struct Context *next;
} Context;

void contexts_lock(void);
void contexts_unlock(void);

/* Under the lock. NULL if we do not know it. */
Context *find_context(CUcontext handle);

/* What a context on this device of the ledger is expected to take: what KVARTO_GPU_CONTEXT_SIZE says, what was
 * measured, or a common size. */
uint64_t context_expected_bytes(int device);

/* The card's used bytes before a context is made. False where a size is named, or where NVML cannot tell. */
bool context_measure(int device, uint64_t *used);

/* Correct the charge of a new context to the least that this ledger has measured: a neighbour's allocation at the same
 * moment can only be mistaken for ours upwards. What a neighbour gives back at that moment is mistaken downwards, which
 * only a size that was named avoids. */
void context_correct(Charge *charge, uint64_t used_before);
