/* One reservation from before the driver's call to after it.
 *
 *     Charge charge;
 *     CUresult result = charge_here(&charge, size);                      out of memory: the driver is not asked
 *     if (result == CUDA_SUCCESS) result = DRIVER(cuMemAlloc_v2, …);
 *     return charge_settle(&charge, result, KIND_POINTER, *pointer);     kept with what was allocated, or given back
 */
#pragma once

#include "cuda_api.h"
#include "driver.h"
#include "limiter.h"

typedef struct {
    int device; /* of the ledger, or NO_LIMIT */
    uint64_t units;
    CUcontext context;
} Charge;

/* Reserve on a device, or on the one of the current context. Without a context nothing is reserved: the driver will say
 * what is wrong. CUDA_ERROR_OUT_OF_MEMORY if it does not fit even after dead processes and our own pools gave back. */
CUresult charge_device(Charge *charge, CUdevice ordinal, size_t size_bytes);
CUresult charge_here(Charge *charge, size_t size_bytes);

/* Reserve on a device of the ledger, with the same efforts; false if it does not fit. */
bool charge_reserve(int device, uint64_t units);

/* `key` is read only after success. Returns `result`. */
CUresult charge_settle(Charge *charge, CUresult result, Kind kind, const void *key);

/* Change a charge that is held, before the driver takes more; false, and nothing changed, if it would not fit. */
bool charge_try(Charge *charge, uint64_t units);

/* Change a charge that is held to what the driver really took; true if the limit still holds. */
bool charge_correct(Charge *charge, uint64_t units);

void charge_release(int device, uint64_t units);

/* Free through `result = DRIVER(…)`: the record leaves before the driver's call, since the address may be somebody
 * else's right after it, and the bytes are given back only once the driver has them. */
typedef struct {
    Cell *cell;
    Record record;
    Kind kind;
    uint64_t key;
} Freeing;
Freeing free_begin(Kind kind, uint64_t key);
CUresult free_end(Freeing freeing, CUresult result);
