/* `cuGetProcAddress` gives out the driver's addresses past the dynamic linker: the CUDA runtime takes everything there.
 * Which version of a function it chose is known by the address; a driver that gives out other addresses than its
 * symbols is understood by name and version, up to the version that our table knows. Beyond it, a function that
 * allocates and that we cannot tell is withheld rather than handed out unhooked. */
#include <string.h>

#include "charge.h"

enum { KNOWN_CUDA_VERSION = 13050, INSTANTIATE_BECAME_FLAGS = 12000 };

static void *hook_of_address(const void *address) {
    for (int index = 0; index < NUM_HOOKED; index++) {
        if (driver_functions[index] == address) return entries[index].hook;
    }
    return NULL;
}

static bool is_per_thread(const char *symbol) {
    size_t length = strlen(symbol);
    return length > 5 && strcmp(symbol + length - 5, "_ptsz") == 0;
}

/* The newest variant that a program of this version expects. A family of per-thread variants has one for each. One name
 * became another function's, with other arguments. */
static const Entry *variant(const char *base, int version, bool per_thread) {
    const Entry *best = NULL;
    if (version >= INSTANTIATE_BECAME_FLAGS && strcmp(base, "cuGraphInstantiate") == 0) {
        base = "cuGraphInstantiateWithFlags";
    }
    for (int pass = 0; pass < 2 && !best; pass++) {
        for (int index = 0; index < NUM_HOOKED; index++) {
            const Entry *entry = &entries[index];
            if (strcmp(entry->base, base) != 0 || entry->since > version) continue;
            if (is_per_thread(entry->symbol) != (per_thread && pass == 0)) continue;
            if (!best || entry->since > best->since) best = entry;
        }
    }
    return best;
}

static bool is_family(const char *base) {
    return variant(base, KNOWN_CUDA_VERSION, false) != NULL;
}

static bool replace(const char *symbol, void **function, int version, uint64_t flags) {
    if (!symbol || !function || !*function || limiter_state() == STATE_UNLIMITED) return true;
    void *hook = hook_of_address(*function);
    if (!hook && is_family(symbol)) {
        if (version > KNOWN_CUDA_VERSION) return false;
        const Entry *entry = variant(symbol, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
        hook = entry ? entry->hook : NULL;
    }
    if (hook) *function = hook;
    return true;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    limiter_state();
    CUresult result = DRIVER(cuGetProcAddress, symbol, function, version, flags);
    if (result != CUDA_SUCCESS || replace(symbol, function, version, flags)) return result;
    *function = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    limiter_state();
    CUresult result = DRIVER(cuGetProcAddress_v2, symbol, function, version, flags, status);
    if (result != CUDA_SUCCESS || replace(symbol, function, version, flags)) return result;
    *function = NULL;
    if (status) *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_ERROR_NOT_FOUND;
}
