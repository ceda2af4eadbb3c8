/* NVML, as far as it speaks of memory: what `nvidia-smi` and monitoring see inside the container. */
#pragma once

#include <stdbool.h>

#include "word.h"

/* Our function for this name, or NULL. */
void *nvml_hook(const char *name);

/* Bytes in use on the card by everybody, from NVML itself; false where NVML cannot tell. */
bool nvml_used_bytes(Word uuid, uint64_t *bytes);
