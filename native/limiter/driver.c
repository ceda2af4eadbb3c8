#include "driver.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "interpose.h"

const Entry entries[NUM_HOOKED] = {
#define ENTRY(symbol, base, since) {#symbol, base, since, (void *)symbol},
#include "entries.inc"
#undef ENTRY
};

void *driver_functions[NUM_FUNCTIONS];

static const char *const asked[] = {
#define ASK(name) #name,
    ASKED_OF_THE_DRIVER(ASK)
#undef ASK
};

/* Threads may do this at the same time: they write the same addresses. */
bool driver_load(void) {
    static bool is_loaded;
    if (__atomic_load_n(&is_loaded, __ATOMIC_ACQUIRE)) return true;
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) return false;
    for (int index = 0; index < NUM_FUNCTIONS; index++) {
        const char *symbol = index < NUM_HOOKED ? entries[index].symbol : asked[index - NUM_HOOKED];
        __atomic_store_n(&driver_functions[index], libc_dlsym(library, symbol), __ATOMIC_RELAXED);
    }
    __atomic_store_n(&is_loaded, true, __ATOMIC_RELEASE);
    return true;
}

static int compare_symbol(const void *symbol, const void *entry) {
    return strcmp(symbol, ((const Entry *)entry)->symbol);
}

const Entry *entry_named(const char *symbol) {
    return bsearch(symbol, entries, NUM_HOOKED, sizeof *entries, compare_symbol);
}
