/* The driver's own functions, behind the hooks that carry the same names. */
#pragma once

#include <stdbool.h>

#include "cuda_api.h"

#define ASKED_OF_THE_DRIVER(ASK) \
    ASK(cuCtxGetCurrent) ASK(cuCtxGetDevice) ASK(cuCtxPushCurrent_v2) ASK(cuCtxPopCurrent_v2) ASK(cuCtxSynchronize) \
    ASK(cuCtxGetLimit) ASK(cuDeviceGetUuid) ASK(cuDeviceGetUuid_v2) ASK(cuDeviceGetAttribute) \
    ASK(cuDeviceGetMemPool) ASK(cuDeviceGetDefaultMemPool) ASK(cuDeviceGetGraphMemAttribute) \
    ASK(cuMemPoolGetAttribute) ASK(cuMemGetAllocationPropertiesFromHandle) ASK(cuMemGetAddressRange_v2) \
    ASK(cuPointerGetAttribute) ASK(cuStreamGetCtx) ASK(cuStreamIsCapturing) ASK(cuStreamIsCapturing_ptsz) \
    ASK(cuThreadExchangeStreamCaptureMode) \
    ASK(cuGraphGetNodes) ASK(cuGraphNodeGetType) ASK(cuGraphChildGraphNodeGetGraph) ASK(cuGraphMemAllocNodeGetParams)

enum {
#define ENTRY(symbol, base, since) INDEX_##symbol,
#include "entries.inc"
#undef ENTRY
    NUM_HOOKED,
    BEFORE_ASKED = NUM_HOOKED - 1,
#define ASK(name) INDEX_##name,
    ASKED_OF_THE_DRIVER(ASK)
#undef ASK
    NUM_FUNCTIONS,
};

typedef struct {
    const char *symbol, *base;
    int since;
    void *hook;
} Entry;

extern const Entry entries[NUM_HOOKED]; /* sorted by symbol */
extern void *driver_functions[NUM_FUNCTIONS];

/* Call the driver's function `name`, not the hook; an older driver may lack it. */
#define DRIVER(name, ...)                                                                  \
    (driver_functions[INDEX_##name]                                                        \
         ? ((__typeof__(&name))driver_functions[INDEX_##name])(__VA_ARGS__)                \
         : CUDA_ERROR_NOT_FOUND)

/* Find libcuda and its functions; false if there is none. Cheap once done. */
bool driver_load(void);

/* The entry with this symbol, or NULL. */
const Entry *entry_named(const char *symbol);
