/* Memory pools of this process: charged for what they hold, whether or not it is handed out.
 *
 * A pool takes memory from the device in large pieces when an allocation does not fit into what it has, and returns
 * them at a synchronisation, at a trim, or never. So the charge is what the driver says that the pool holds, and before
 * a call that may make it grow, a ticket for the growth is reserved too:
 *
 *     ledger = sum over pools (charged + tickets)  >=  what the pools hold, at every moment
 */
#pragma once

#include <stdbool.h>

#include "cuda_api.h"

typedef struct Pool Pool;

/* A pool that was made on an ordinal, or on the host, where nothing is charged. */
void pools_add(CUmemoryPool handle, CUdevice ordinal, bool is_on_host);

/* Destroy a pool through `call`, once nobody here is about to ask the driver for it. What it has handed out lives on
 * without a pool that could be asked, and stays charged until the process ends. */
CUresult pools_destroy(CUmemoryPool handle, CUresult (*call)(CUmemoryPool));

/* One allocation from before the driver's call to after it. `handle` is NULL for the current pool of the stream's
 * device. */
typedef struct {
    Pool *pool; /* NULL: not counted */
    int device; /* of the ledger */
    uint64_t ticket;
} Growth;
CUresult growth_begin(Growth *growth, CUmemoryPool handle, size_t size, CUstream stream);

/* False: the driver took more than the limit allows. The allocation has to be undone. */
bool growth_end(Growth growth);

/* The charge of one pool becomes what it holds. */
void pools_settle(CUmemoryPool handle);

typedef enum { POOLS_SETTLE, POOLS_TRIM, POOLS_SYNCHRONISE } PoolEffort;

/* Make the charge of our pools on a device of the ledger what they hold; first let them give back what is free, or also
 * what is free once the device has caught up. True if a charge became smaller. */
bool pools_give_back(int device, PoolEffort effort);
