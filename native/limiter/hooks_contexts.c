/* Contexts. A context takes device memory of its own, hundreds of MiB on a large card, and everything allocated in it
 * goes with it. What it takes is named by KVARTO_GPU_CONTEXT_SIZE, or measured: the card's used bytes before and after,
 * the least of what this ledger has seen, since a neighbour's allocation can only be mistaken for ours upwards. */
#include <stdlib.h>
#include <string.h>

#include "charge.h"
#include "nvml_hooks.h"

#define EXPECTED_CONTEXT_BYTES (UINT64_C(512) << 20)
#define SMALLEST_CONTEXT_BYTES (UINT64_C(32) << 20)
#define LARGEST_CONTEXT_BYTES (UINT64_C(2) << 30)

enum { NUM_LIMITS = 3 }; /* stack, printf buffer, heap */

typedef struct Context {
    CUcontext handle;
    CUdevice ordinal;
    bool is_primary;
    int num_users;
    Charge charge;
    size_t first_limits[NUM_LIMITS];
    uint64_t limit_units[NUM_LIMITS];
    struct Context *next;
} Context;

static void lock(void) {
    pthread_mutex_lock(&limiter.context_lock);
}

static void unlock(void) {
    pthread_mutex_unlock(&limiter.context_lock);
}

static Context *find_context(CUcontext handle) {
    Context *context = limiter.contexts;
    while (context && context->handle != handle) context = context->next;
    return context;
}

static Context *find_primary(CUdevice ordinal) {
    Context *context = limiter.contexts;
    while (context && !(context->is_primary && context->ordinal == ordinal)) context = context->next;
    return context;
}

/* ---- what one takes ---- */

static bool named_size(uint64_t *bytes) {
    const char *text = getenv("KVARTO_GPU_CONTEXT_SIZE");
    return text && size_parse(text, strlen(text), bytes);
}

static uint64_t expected_bytes(int device) {
    uint64_t bytes;
    if (named_size(&bytes)) return bytes;
    bytes = device >= 0 ? step_load(&limiter.ledger->devices[device].context_bytes) : 0;
    return bytes ? bytes : EXPECTED_CONTEXT_BYTES;
}

static void lower(uint64_t *cell, uint64_t bytes) {
    for (;;) {
        uint64_t known = step_load(cell);
        if ((known && known <= bytes) || step_swap(cell, known, bytes)) return;
    }
}

/* False where a size is named, so that nothing needs to be measured, or where NVML cannot tell. */
static bool measure(int device, uint64_t *used) {
    uint64_t named;
    return device >= 0 && !named_size(&named) && nvml_used_bytes(limiter.ledger->devices[device].uuid, used);
}

static void correct_to_measured(Charge *charge, uint64_t before) {
    uint64_t after;
    if (!measure(charge->device, &after)) return;
    if (after < before + SMALLEST_CONTEXT_BYTES || after > before + LARGEST_CONTEXT_BYTES) return;
    uint64_t *known = &limiter.ledger->devices[charge->device].context_bytes;
    lower(known, after - before);
    charge_correct(charge, units_of(step_load(known)));
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
    CUresult result = charge_device(&making->charge, ordinal, device >= 0 ? expected_bytes(device) : 0);
    making->is_measured = result == CUDA_SUCCESS && measure(making->charge.device, &making->before);
    return result;
}

static CUresult end(Making *making, CUresult result, const CUcontext *handle, CUdevice ordinal, bool is_primary) {
    if (result != CUDA_SUCCESS) charge_release(making->charge.device, making->charge.units);
    else if (making->charge.device >= 0) {
        if (making->is_measured) correct_to_measured(&making->charge, making->before);
        add_context(*handle, ordinal, is_primary, making->charge);
    }
    return result;
}

#define CREATE(name, ...)                                                                       \
    Making making;                                                                              \
    CUresult result = begin(&making, device);                                                   \
    if (result != CUDA_SUCCESS) return result;                                                  \
    lock();                                                                                     \
    result = end(&making, DRIVER(name, context, __VA_ARGS__, device), context, device, false);  \
    unlock();                                                                                   \
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
    lock();
    CUresult result = DRIVER(cuCtxAttach, context, flags);
    Context *known = result == CUDA_SUCCESS ? find_context(*context) : NULL;
    if (known) known->num_users++;
    unlock();
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
    lock();
    CUresult result = retain(context, device);
    unlock();
    return result;
}

/* ---- destroyed and released ---- */

static void forget(Context *context) {
    uint64_t units = context->charge.units;
    for (int limit = 0; limit < NUM_LIMITS; limit++) units += context->limit_units[limit];
    charge_release(context->charge.device, units);
    for (Context **link = &limiter.contexts; *link; link = &(*link)->next) {
        if (*link != context) continue;
        *link = context->next;
        break;
    }
    free(context);
}

/* What was allocated in it is out of sight before the driver may give its addresses out again. */
static void begin_end(const Context *context) {
    if (context) records_take_context(&limiter.records, (uint64_t)(uintptr_t)context->handle);
}

static void finish_end(Context *context, bool is_gone) {
    if (!context) return;
    records_end_context(&limiter.records, (uint64_t)(uintptr_t)context->handle, is_gone, charge_release);
    if (is_gone) forget(context);
}

#define END(context, is_last, call)                     \
    do {                                                \
        bool is_end = (is_last) && (context);           \
        if (is_end) begin_end(context);                 \
        result = (call);                                \
        if (is_end) finish_end(context, result == CUDA_SUCCESS); \
        else if (result == CUDA_SUCCESS && (context)) (context)->num_users--; \
    } while (0)

CUresult cuCtxDestroy(CUcontext handle) {
    CUresult result;
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuCtxDestroy, handle);
    lock();
    Context *context = find_context(handle);
    END(context, true, DRIVER(cuCtxDestroy, handle));
    unlock();
    return result;
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
    CUresult result;
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuCtxDestroy_v2, handle);
    lock();
    Context *context = find_context(handle);
    END(context, true, DRIVER(cuCtxDestroy_v2, handle));
    unlock();
    return result;
}

CUresult cuCtxDetach(CUcontext handle) {
    CUresult result;
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuCtxDetach, handle);
    lock();
    Context *context = find_context(handle);
    END(context, context->num_users == 1, DRIVER(cuCtxDetach, handle));
    unlock();
    return result;
}

static CUresult release_primary(CUdevice device, CUresult (*call)(CUdevice), bool is_reset) {
    CUresult result;
    if (limiter_state() != STATE_LIMITED) return call(device);
    lock();
    Context *primary = find_primary(device);
    END(primary, is_reset || primary->num_users == 1, call(device));
    unlock();
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

/* ---- memory that a context takes later, by a setting ---- */

/* Bytes on the device for a value of the setting; the stack is for every thread that can be resident at once. */
static size_t setting_bytes(int limit, size_t value, CUdevice device) {
    int num_processors = 0, num_threads = 0;
    size_t bytes;
    if (limit != CU_LIMIT_STACK_SIZE) return value;
    DRIVER(cuDeviceGetAttribute, &num_processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    DRIVER(cuDeviceGetAttribute, &num_threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device);
    return __builtin_mul_overflow(value, (size_t)num_processors * (size_t)num_threads, &bytes) ? SIZE_MAX : bytes;
}

/* The value that the context came with is part of what a context takes; only what is above it is charged. */
static CUresult set_limit(Context *context, int limit, size_t value) {
    size_t *first = &context->first_limits[limit];
    if (*first == 0) DRIVER(cuCtxGetLimit, first, limit);
    size_t more = value > *first ? setting_bytes(limit, value - *first, context->ordinal) : 0;
    Charge charge = {.device = context->charge.device, .units = context->limit_units[limit]};
    uint64_t before = charge.units;
    if (!charge_try(&charge, units_of(more))) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuCtxSetLimit, limit, value);
    if (result != CUDA_SUCCESS) charge_correct(&charge, before);
    context->limit_units[limit] = charge.units;
    return result;
}

CUresult cuCtxSetLimit(int limit, size_t value) {
    CUcontext handle = NULL;
    if (limiter_state() != STATE_LIMITED || limit < 0 || limit >= NUM_LIMITS) return DRIVER(cuCtxSetLimit, limit, value);
    DRIVER(cuCtxGetCurrent, &handle);
    lock();
    Context *context = find_context(handle);
    CUresult result = context ? set_limit(context, limit, value) : DRIVER(cuCtxSetLimit, limit, value);
    unlock();
    return result;
}
