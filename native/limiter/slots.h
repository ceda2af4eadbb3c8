/* Who holds which slot of the ledger, and whether they still live. */
#pragma once

#include "ledger.h"

/* Map the ledger at `path`, made if it is not there, and take a slot. NULL and a sentence in `error` if that fails. */
Ledger *slots_join(const char *path, uint32_t *slot, char *error, size_t error_bytes);

/* Give back what dead processes hold on `device`; true if that was anything. */
bool slots_sweep(Ledger *ledger, int device, uint32_t own);
