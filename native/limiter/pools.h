/* Memory pools of this process: charged for what they hold, whether or not it is handed out. */
#pragma once

#include <stdbool.h>

typedef enum { POOLS_SETTLE, POOLS_TRIM, POOLS_SYNCHRONISE } PoolEffort;

/* Make the charge of our pools on a device of the ledger what they hold; first let them give back what is free, or also
 * what is free once the device has caught up. True if the charge became smaller. */
bool pools_give_back(int device, PoolEffort effort);
