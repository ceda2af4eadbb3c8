/* The lock is never held over a call to the driver: a thread that waits in there, or for a core, would make all the
 * others wait with it. A pool that somebody works on is kept by counting its users instead. */
#include "pools.h"

#include <stdlib.h>

#include "charge.h"

/* What a pool grows by at least, as far as is known of drivers up to now; it rises when one is seen to take more. */
#define GROWTH_BYTES (UINT64_C(32) << 20)

struct Pool {
    CUmemoryPool handle;
    int device; /* of the ledger, or NO_LIMIT for a pool that is not charged, which is remembered as such */
    uint64_t charged, tickets, growth_bytes;
    uint64_t num_settled, num_users;
    struct Pool *next;
};

static void lock(void) {
    pthread_mutex_lock(&limiter.pool_lock);
}

static void unlock(void) {
    pthread_mutex_unlock(&limiter.pool_lock);
}

/* ---- the list ---- */

static Pool *find_pool(CUmemoryPool handle) {
    Pool *pool = limiter.pools;
    while (pool && pool->handle != handle) pool = pool->next;
    return pool;
}

static Pool *add_pool(CUmemoryPool handle, int device) {
    Pool *pool = device != NO_DEVICE ? malloc(sizeof *pool) : NULL;
    if (!pool) return NULL;
    *pool = (Pool){.handle = handle, .device = device, .growth_bytes = GROWTH_BYTES, .next = limiter.pools};
    __atomic_store_n(&limiter.pools, pool, __ATOMIC_RELEASE); /* looked at without the lock: are there any? */
    return pool;
}

static void leave(Pool *pool) {
    if (--pool->num_users == 0) pthread_cond_broadcast(&limiter.pool_left);
}

void pools_add(CUmemoryPool handle, CUdevice ordinal, bool is_on_host) {
    int device = is_on_host ? NO_LIMIT : limiter_device(ordinal);
    lock();
    add_pool(handle, device);
    unlock();
}

/* ---- what a pool holds ---- */

/* False where the driver does not tell. */
static bool held_units(CUmemoryPool handle, uint64_t *units) {
    uint64_t held_bytes = 0;
    CUresult result = DRIVER(cuMemPoolGetAttribute, handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &held_bytes);
    *units = units_of(held_bytes);
    return result == CUDA_SUCCESS;
}

typedef struct {
    uint64_t before, after; /* the pool's charge */
    bool fits;
} Settled;

/* What the pool grew by beyond the caller's ticket may be what other tickets are out for, and is left to them as far as
 * they reach. */
static Settled apply(Pool *pool, uint64_t ticket, uint64_t held) {
    uint64_t before = pool->charged, have = before + ticket, others = pool->tickets - ticket;
    uint64_t beyond = held > others ? held - others : 0;
    Charge charge = {.device = pool->device, .units = have};
    pool->charged = held <= have ? held : (beyond > have ? beyond : have);
    pool->tickets = others;
    pool->num_settled++;
    bool fits = charge_correct(&charge, pool->charged);
    return (Settled){before, pool->charged, fits};
}

/* The charge becomes what the pool holds, and `ticket` units of the caller's are used up by it. Under the lock, which
 * is let go of while the driver is asked; its answer is of use unless somebody settled in between: what the pool grew
 * by since is covered by tickets that are still out. The caller is one of the pool's users. */
static Settled settle(Pool *pool, uint64_t ticket) {
    uint64_t turn, held;
    do {
        turn = pool->num_settled;
        unlock();
        bool is_known = held_units(pool->handle, &held);
        lock();
        if (!is_known) held = pool->charged;
    } while (turn != pool->num_settled);
    return apply(pool, ticket, held);
}

void pools_settle(CUmemoryPool handle) {
    lock();
    Pool *pool = find_pool(handle);
    if (pool) {
        pool->num_users++;
        settle(pool, 0);
        leave(pool);
    }
    unlock();
}

/* A pool that was not destroyed after all. An allocation in between has made it known again, without what it held. */
static void put_back(Pool *pool) {
    lock();
    Pool *known = find_pool(pool->handle);
    if (known) {
        known->charged += pool->charged;
        free(pool);
    } else {
        pool->next = limiter.pools;
        __atomic_store_n(&limiter.pools, pool, __ATOMIC_RELEASE);
    }
    unlock();
}

CUresult pools_destroy(CUmemoryPool handle, CUresult (*call)(CUmemoryPool)) {
    uint64_t used_bytes = 0;
    Pool *pool, **link = &limiter.pools;
    lock();
    while ((pool = find_pool(handle)) && pool->num_users) pthread_cond_wait(&limiter.pool_left, &limiter.pool_lock);
    while (pool && *link != pool) link = &(*link)->next;
    if (pool) __atomic_store_n(link, pool->next, __ATOMIC_RELEASE); /* the handle may soon be somebody else's */
    unlock();
    DRIVER(cuMemPoolGetAttribute, handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used_bytes);
    CUresult result = call(handle);
    if (!pool) return result;
    if (result == CUDA_SUCCESS) {
        Charge charge = {.device = pool->device, .units = pool->charged};
        charge_correct(&charge, units_of(used_bytes));
        free(pool);
        return result;
    }
    put_back(pool);
    return result;
}

/* ---- the pool of an allocation ---- */

/* The device of a stream; of the current context for the default streams. */
static CUresult stream_device(CUstream stream, CUdevice *ordinal) {
    CUcontext context = NULL, current = NULL, popped;
    CUresult result = DRIVER(cuCtxGetCurrent, &current);
    if (result != CUDA_SUCCESS) return result;
    if ((uintptr_t)stream > CU_STREAM_PER_THREAD) result = DRIVER(cuStreamGetCtx, stream, &context);
    if (result != CUDA_SUCCESS || !context || context == current) return DRIVER(cuCtxGetDevice, ordinal);
    result = DRIVER(cuCtxPushCurrent_v2, context);
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuCtxGetDevice, ordinal);
    DRIVER(cuCtxPopCurrent_v2, &popped);
    return result;
}

/* The device that a pool belongs to which we did not see being made, given the device of the stream: a stream may take
 * from any device's default pool, or from the host's. Drivers before CUDA 13 have no pools of the host to ask about. */
static int device_of_pool(CUmemoryPool handle, CUdevice ordinal) {
    int allocation_type = 0, location_type = 0;
    CUmemoryPool pool;
    if (DRIVER(cuMemPoolGetAttribute, handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &allocation_type) == CUDA_SUCCESS &&
        DRIVER(cuMemPoolGetAttribute, handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &location_type) == CUDA_SUCCESS &&
        is_on_host(allocation_type, location_type)) {
        return NO_LIMIT;
    }
    for (CUdevice other = 0; other < MAX_ORDINALS; other++) {
        if (DRIVER(cuDeviceGetDefaultMemPool, &pool, other) != CUDA_SUCCESS) break;
        if (pool == handle) return limiter_device(other);
    }
    return limiter_device(ordinal);
}

/* One more user of the pool, if we know it. */
static Pool *enter(CUmemoryPool handle) {
    lock();
    Pool *pool = find_pool(handle);
    if (pool) pool->num_users++;
    unlock();
    return pool;
}

static Pool *enter_new(CUmemoryPool handle, int device) {
    lock();
    Pool *pool = find_pool(handle); /* another thread may have been faster */
    if (!pool) pool = add_pool(handle, device);
    if (pool) pool->num_users++;
    unlock();
    return pool;
}

/* The pool that this allocation will grow, with one user more. NULL: nothing to charge. */
static Pool *enter_pool_of(CUmemoryPool handle, CUstream stream) {
    CUdevice ordinal;
    Pool *pool = handle ? enter(handle) : NULL;
    if (pool) return pool;
    if (stream_device(stream, &ordinal) != CUDA_SUCCESS) return NULL;
    if (!handle && DRIVER(cuDeviceGetMemPool, &handle, ordinal) != CUDA_SUCCESS) return NULL;
    pool = enter(handle);
    return pool ? pool : enter_new(handle, device_of_pool(handle, ordinal));
}

static void leave_unlocked(Pool *pool) {
    lock();
    leave(pool);
    unlock();
}

static uint64_t ticket_for(const Pool *pool, size_t size) {
    uint64_t growth_bytes = __atomic_load_n(&pool->growth_bytes, __ATOMIC_RELAXED);
    size_t missing = size % growth_bytes ? growth_bytes - size % growth_bytes : 0;
    return units_of(size > SIZE_MAX - missing ? SIZE_MAX : size + missing);
}

CUresult growth_begin(Growth *growth, CUmemoryPool handle, size_t size, CUstream stream) {
    *growth = (Growth){0};
    State state = limiter_state();
    if (state != STATE_LIMITED) return state == STATE_REFUSED ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    Pool *pool = enter_pool_of(handle, stream);
    if (!pool) return CUDA_SUCCESS;
    uint64_t ticket = ticket_for(pool, size);
    bool is_counted = pool->device >= 0;
    if (!is_counted || !charge_reserve(pool->device, ticket)) {
        leave_unlocked(pool);
        return is_counted ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    }
    lock();
    pool->tickets += ticket;
    unlock();
    *growth = (Growth){pool, pool->device, ticket};
    return CUDA_SUCCESS;
}

/* Where the driver took more than was foreseen, that is remembered for the next time. */
bool growth_end(Growth growth) {
    Pool *pool = growth.pool;
    if (!pool) return true;
    lock();
    Settled settled = settle(pool, growth.ticket);
    uint64_t grown_bytes = settled.after > settled.before ? (settled.after - settled.before) * UNIT_BYTES : 0;
    if (!settled.fits && grown_bytes > pool->growth_bytes) {
        __atomic_store_n(&pool->growth_bytes, grown_bytes, __ATOMIC_RELAXED);
    }
    leave(pool);
    unlock();
    return settled.fits;
}

/* ---- given back ---- */

/* Waits for the current context's device also while some stream is being captured, without disturbing the capture. */
static void synchronise(void) {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult result = DRIVER(cuThreadExchangeStreamCaptureMode, &mode);
    DRIVER(cuCtxSynchronize);
    if (result == CUDA_SUCCESS) DRIVER(cuThreadExchangeStreamCaptureMode, &mode);
}

/* Under the lock, with the pool's user counted: its place in the list holds while the lock is let go of. */
static bool give_back(Pool *pool, PoolEffort effort) {
    if (effort != POOLS_SETTLE) {
        unlock();
        DRIVER(cuMemPoolTrimTo, pool->handle, 0);
        lock();
    }
    Settled settled = settle(pool, 0);
    return settled.after < settled.before;
}

bool pools_give_back(int device, PoolEffort effort) {
    bool any = false;
    if (!__atomic_load_n(&limiter.pools, __ATOMIC_ACQUIRE)) return false;
    if (effort == POOLS_SYNCHRONISE) synchronise();
    lock();
    for (Pool *pool = limiter.pools, *next; pool; pool = next) {
        pool->num_users++;
        if (pool->device == device) any |= give_back(pool, effort);
        next = pool->next;
        leave(pool);
    }
    unlock();
    return any;
}
