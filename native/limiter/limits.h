/* Which limit counts for which device, as the container was told.
 *
 *     KVARTO_GPU_MEMORY_LIMIT=8GiB                          every device
 *     KVARTO_GPU_MEMORY_LIMIT=GPU-…=8GiB,MIG-…=4GiB,2GiB    by UUID, and 2 GiB for all others
 *
 * The file /etc/kvarto/gpu-memory-limit, in the same form, counts instead where it exists, and then no variable counts
 * at all: mounted read-only by the node's agent, it survives `env -i`, `su` and `ssh`. Indexes are refused: they mean
 * another device under each CUDA_VISIBLE_DEVICES.
 */
#pragma once

#include "ledger.h"

enum { MAX_LIMITS = 32 };

typedef struct {
    int count;
    struct {
        Word uuid; /* zero: every device that is not named */
        uint64_t bytes;
    } items[MAX_LIMITS];
} Limits;

/* Whether this process is to be limited at all. */
bool limits_are_configured(void);

/* False and a sentence in `error` when the text cannot be read as limits. */
bool limits_read(Limits *limits, char *error, size_t error_bytes);

/* True and the limit in bytes if one was named for this device. */
bool limits_find(const Limits *limits, Word uuid, uint64_t *bytes);

/* `8-4-4-4-12` hexadecimal digits behind `GPU-` or `MIG-`; zero if it is not of that form. */
Word uuid_parse(const char *text, size_t length);

/* Bytes from `8GiB`, `8G` (binary), `8GB` (decimal), `1.5GiB` or a plain number. */
bool size_parse(const char *text, size_t length, uint64_t *bytes);

/* What one CUDA context takes, as KVARTO_GPU_CONTEXT_SIZE says; false when it does not. */
bool named_context_size(uint64_t *bytes);

/* Where the shared account is: KVARTO_GPU_MEMORY_LEDGER, or /run/kvarto/gpu-memory.ledger. */
const char *ledger_path(void);
