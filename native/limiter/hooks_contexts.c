/* Contexts made, shared and destroyed. A context takes device memory of its own, hundreds of MiB on a large card, and
 * everything allocated in it goes with it. */
#include <stdlib.h>

#include "contexts.h"

void contexts_lock(void) {
    pthread_mutex_lock(&limiter.context_lock);
}

void contexts_unlock(void) {
    pthread_mutex_unlock(&limiter.context_lock);
}

Context *find_context(CUcontext handle) {
    Context *context = limiter.contexts;
    while (context && context->handle != handle) context = context->next;
    return context;
}

static Context *find_primary(CUdevice ordinal) {
    Context *context = limiter.contexts;
    while (context && !(context->is_primary && context->ordinal == ordinal)) context = context->next;
    return context;
}

/* ---- created and retained ---- */

static Context *add_context(CUcontext handle, CUdevice ordinal, bool is_primary, Charge charge) {
    Context *context = calloc(1, sizeof *context);
    if (!context) return NULL; /* stays charged to this process until it ends */
    *context = (Context){.handle = handle, .ordinal = ordinal, .is_primary = is_primary, .num_users = 1,
                         .charge = charge, .next = limiter.contexts};
    limiter.contexts = context;
    return context;
}

typedef struct {
    Charge charge;
    bool is_measured;
    uint64_t before;
} Making;

static CUresult begin(Making *making, CUdevice ordinal) {
    int device = limiter_state() == STATE_LIMITED ? limiter_device(ordinal) : NO_LIMIT;
    CUresult result = charge_device(&making->charge, ordinal, device >= 0 ? context_expected_bytes(device) : 0);
    making->is_measured = result == CUDA_SUCCESS && context_measure(making->charge.device, &making->before);
    return result;
}

static CUresult end(Making *making, CUresult result, const CUcontext *handle, CUdevice ordinal, bool is_primary) {
    if (result != CUDA_SUCCESS) charge_release(making->charge.device, making->charge.units);
    else if (making->charge.device >= 0) {
        if (making->is_measured) context_correct(&making->charge, making->before);
        add_context(*handle, ordinal, is_primary, making->charge);
    }
    return result;
}

#define CREATE(name, ...)                                                                       \
    Making making;                                                                              \
    CUresult result = begin(&making, device);                                                   \
    if (result != CUDA_SUCCESS) return result;                                                  \
    contexts_lock();                                                                            \
    result = end(&making, DRIVER(name, context, __VA_ARGS__, device), context, device, false);  \
    contexts_unlock();                                                                          \
    return result

CUresult cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device) {
    CREATE(cuCtxCreate, flags);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    CREATE(cuCtxCreate_v2, flags);
}

CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int num_affinity, unsigned flags, CUdevice device) {
    CREATE(cuCtxCreate_v3, affinity, num_affinity, flags);
}

CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned flags, CUdevice device) {
    CREATE(cuCtxCreate_v4, params, flags);
}

CUresult cuCtxAttach(CUcontext *context, unsigned flags) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuCtxAttach, context, flags);
    contexts_lock();
    CUresult result = DRIVER(cuCtxAttach, context, flags);
    Context *known = result == CUDA_SUCCESS ? find_context(*context) : NULL;
    if (known) known->num_users++;
    contexts_unlock();
    return result;
}

/* The first user makes it. Held over the driver's call, so that two first users do not both pay. */
static CUresult retain(CUcontext *context, CUdevice device) {
    Making making;
    Context *primary = find_primary(device);
    if (primary) {
        CUresult result = DRIVER(cuDevicePrimaryCtxRetain, context, device);
        if (result == CUDA_SUCCESS) primary->num_users++;
        return result;
    }
    CUresult result = begin(&making, device);
    if (result != CUDA_SUCCESS) return result;
    return end(&making, DRIVER(cuDevicePrimaryCtxRetain, context, device), context, device, true);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    State state = limiter_state();
    if (state == STATE_UNLIMITED) return DRIVER(cuDevicePrimaryCtxRetain, context, device);
    contexts_lock();
    CUresult result = retain(context, device);
    contexts_unlock();
    return result;
}

/* ---- destroyed and released ---- */

static void forget(Context *context) {
    uint64_t units = context->charge.units;
    for (int setting = 0; setting < NUM_SETTINGS; setting++) units += context->setting_units[setting];
    charge_release(context->charge.device, units);
    for (Context **link = &limiter.contexts; *link; link = &(*link)->next) {
        if (*link != context) continue;
        *link = context->next;
        break;
    }
    free(context);
}

/* One user less. With the last, the context goes and takes what was allocated in it, which is out of sight before the
 * driver may give its addresses out again. `known` is NULL for a context that we did not see being made. */
typedef struct {
    CUcontext handle;
    Context *known;
    bool is_last;
} Ending;

static Ending begin_end(CUcontext handle, Context *known, bool is_last) {
    if (is_last) records_take_context(&limiter.records, (uint64_t)(uintptr_t)handle);
    return (Ending){handle, known, is_last};
}

static CUresult finish_end(Ending ending, CUresult result) {
    bool is_gone = result == CUDA_SUCCESS;
    if (ending.is_last) {
        records_end_context(&limiter.records, (uint64_t)(uintptr_t)ending.handle, is_gone, charge_release);
        if (ending.known && is_gone) forget(ending.known);
    } else if (ending.known && is_gone) {
        ending.known->num_users--;
    }
    return result;
}

CUresult cuCtxDestroy(CUcontext handle) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuCtxDestroy, handle);
    contexts_lock();
    Ending ending = begin_end(handle, find_context(handle), true);
    CUresult result = finish_end(ending, DRIVER(cuCtxDestroy, handle));
    contexts_unlock();
    return result;
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuCtxDestroy_v2, handle);
    contexts_lock();
    Ending ending = begin_end(handle, find_context(handle), true);
    CUresult result = finish_end(ending, DRIVER(cuCtxDestroy_v2, handle));
    contexts_unlock();
    return result;
}

CUresult cuCtxDetach(CUcontext handle) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuCtxDetach, handle);
    contexts_lock();
    Context *known = find_context(handle);
    Ending ending = begin_end(handle, known, known && known->num_users == 1);
    CUresult result = finish_end(ending, DRIVER(cuCtxDetach, handle));
    contexts_unlock();
    return result;
}

static CUresult release_primary(CUdevice device, CUresult (*call)(CUdevice), bool is_reset) {
    if (limiter_state() != STATE_LIMITED) return call(device);
    contexts_lock();
    Context *primary = find_primary(device);
    bool is_last = primary && (is_reset || primary->num_users == 1);
    Ending ending = begin_end(primary ? primary->handle : NULL, primary, is_last);
    CUresult result = finish_end(ending, call(device));
    contexts_unlock();
    return result;
}

#define RELEASE(name, is_reset)                                  \
    static CUresult driver_##name(CUdevice device) {             \
        return DRIVER(name, device);                             \
    }                                                            \
    CUresult name(CUdevice device) {                             \
        return release_primary(device, driver_##name, is_reset); \
    }

RELEASE(cuDevicePrimaryCtxRelease, false)
RELEASE(cuDevicePrimaryCtxRelease_v2, false)
RELEASE(cuDevicePrimaryCtxReset, true)
RELEASE(cuDevicePrimaryCtxReset_v2, true)

/* A green context divides the primary one, which it brings up if nobody has: it is one more user of it. */
CUresult cuGreenCtxCreate(CUgreenCtx *green, void *resources, CUdevice device, unsigned flags) {
    CUcontext primary;
    if (limiter_state() == STATE_UNLIMITED) return DRIVER(cuGreenCtxCreate, green, resources, device, flags);
    CUresult result = cuDevicePrimaryCtxRetain(&primary, device);
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuGreenCtxCreate, green, resources, device, flags);
    if (result != CUDA_SUCCESS) {
        cuDevicePrimaryCtxRelease_v2(device);
        return result;
    }
    records_put(&limiter.records, KIND_GREEN, (uint64_t)(uintptr_t)*green, (Record){device, 0, 0});
    return result;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    Freeing freeing = free_begin(KIND_GREEN, (uint64_t)(uintptr_t)green);
    CUdevice device = freeing.record.device;
    freeing.record.device = NO_LIMIT;
    CUresult result = DRIVER(cuGreenCtxDestroy, green);
    if (freeing.cell && result == CUDA_SUCCESS) {
        records_drop(freeing.cell);
        cuDevicePrimaryCtxRelease_v2(device);
    } else if (freeing.cell) {
        freeing.record.device = device;
        records_put_back(freeing.cell, KIND_GREEN, (uint64_t)(uintptr_t)green, freeing.record);
    }
    return result;
}
