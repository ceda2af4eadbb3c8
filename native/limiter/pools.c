/* A pool takes memory from the device in large pieces when an allocation does not fit into what it has, and returns
 * them at a synchronisation, at a trim, or never. So the charge is what the driver says that the pool holds, and before
 * a call that may make it grow, a ticket for the growth is reserved too:
 *
 *     ledger = sum over pools (charged + tickets)  >=  what the pools hold, at every moment
 *
 * The lock is held while the driver is asked for a number, never while it allocates. */
#include "pools.h"

#include <stdlib.h>

#include "charge.h"

/* What a pool grows by at least, as far as is known of drivers up to now; it rises when one is seen to take more. */
#define GROWTH_BYTES (UINT64_C(32) << 20)

typedef struct Pool {
    CUmemoryPool handle;
    int device;
    uint64_t charged, tickets, growth_bytes;
    struct Pool *next;
} Pool;

static void lock(void) {
    pthread_mutex_lock(&limiter.pool_lock);
}

static void unlock(void) {
    pthread_mutex_unlock(&limiter.pool_lock);
}

static Pool *find_pool(CUmemoryPool handle) {
    Pool *pool = limiter.pools;
    while (pool && pool->handle != handle) pool = pool->next;
    return pool;
}

/* `device` is the ledger's, or NO_LIMIT for a pool that is not charged, which is remembered as such. */
static Pool *add_pool(CUmemoryPool handle, int device) {
    Pool *pool = device != NO_DEVICE ? malloc(sizeof *pool) : NULL;
    if (!pool) return NULL;
    *pool = (Pool){.handle = handle, .device = device, .growth_bytes = GROWTH_BYTES, .next = limiter.pools};
    __atomic_store_n(&limiter.pools, pool, __ATOMIC_RELEASE); /* looked at without the lock: are there any? */
    return pool;
}

static uint64_t held_units(const Pool *pool) {
    uint64_t held_bytes = 0;
    CUresult result = DRIVER(cuMemPoolGetAttribute, pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &held_bytes);
    return result == CUDA_SUCCESS ? units_of(held_bytes) : pool->charged;
}

/* The charge becomes what the pool holds, and `ticket` units of the caller's are used up by it. What the pool grew by
 * beyond that may be what other tickets are out for, and is left to them as far as they reach. True if all stays within
 * the limit. */
static bool settle(Pool *pool, uint64_t ticket) {
    uint64_t held = held_units(pool), have = pool->charged + ticket, others = pool->tickets - ticket;
    uint64_t beyond = held > others ? held - others : 0;
    Charge charge = {.device = pool->device, .units = have};
    pool->charged = held <= have ? held : (beyond > have ? beyond : have);
    pool->tickets = others;
    return charge_correct(&charge, pool->charged);
}

static bool is_capturing(CUstream stream, bool per_thread) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = per_thread ? DRIVER(cuStreamIsCapturing_ptsz, stream, &status)
                                 : DRIVER(cuStreamIsCapturing, stream, &status);
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

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

/* Pinned memory of the host. A managed pool may be asked to start there, and its memory comes to the device all the
 * same. */
static bool is_on_host(int allocation_type, int location_type) {
    return allocation_type == CU_MEM_ALLOCATION_TYPE_PINNED && location_type >= CU_MEM_LOCATION_TYPE_HOST &&
           location_type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
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

/* The pool that this allocation will grow. NULL: nothing to charge. */
static Pool *pool_of(CUmemoryPool handle, CUstream stream) {
    CUdevice ordinal;
    Pool *pool = handle ? find_pool(handle) : NULL;
    if (pool) return pool;
    if (stream_device(stream, &ordinal) != CUDA_SUCCESS) return NULL;
    if (!handle && DRIVER(cuDeviceGetMemPool, &handle, ordinal) != CUDA_SUCCESS) return NULL;
    pool = find_pool(handle);
    return pool ? pool : add_pool(handle, device_of_pool(handle, ordinal));
}

typedef struct {
    Pool *pool; /* NULL: not counted */
    uint64_t ticket;
} Growth;

/* Room is made without the lock: that asks all pools. */
static CUresult begin(Growth *growth, CUmemoryPool handle, size_t size, CUstream stream) {
    *growth = (Growth){0};
    State state = limiter_state();
    if (state != STATE_LIMITED) return state == STATE_REFUSED ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    lock();
    Pool *pool = pool_of(handle, stream);
    uint64_t growth_bytes = pool ? pool->growth_bytes : 0;
    unlock();
    if (!pool || pool->device < 0) return CUDA_SUCCESS;
    size_t missing = size % growth_bytes ? growth_bytes - size % growth_bytes : 0;
    uint64_t ticket = units_of(size > SIZE_MAX - missing ? SIZE_MAX : size + missing);
    if (!charge_reserve(pool->device, ticket)) return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    pool->tickets += ticket;
    unlock();
    *growth = (Growth){pool, ticket};
    return CUDA_SUCCESS;
}

/* The driver took more than was foreseen: remembered for the next time, and undone where it passes the limit. */
static CUresult end(Growth growth, CUresult result, CUdeviceptr *pointer, CUstream stream) {
    if (!growth.pool) return result;
    lock();
    uint64_t before = growth.pool->charged;
    bool fits = settle(growth.pool, growth.ticket);
    uint64_t grown_bytes = growth.pool->charged > before ? (growth.pool->charged - before) * UNIT_BYTES : 0;
    if (!fits && grown_bytes > growth.pool->growth_bytes) growth.pool->growth_bytes = grown_bytes;
    unlock();
    if (fits || result != CUDA_SUCCESS) return result;
    DRIVER(cuMemFreeAsync, *pointer, stream);
    pools_give_back(growth.pool->device, POOLS_SYNCHRONISE);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Waits for the current context's device also while some stream is being captured, without disturbing the capture. */
static void synchronise(void) {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult result = DRIVER(cuThreadExchangeStreamCaptureMode, &mode);
    DRIVER(cuCtxSynchronize);
    if (result == CUDA_SUCCESS) DRIVER(cuThreadExchangeStreamCaptureMode, &mode);
}

bool pools_give_back(int device, PoolEffort effort) {
    uint64_t before = 0, after = 0;
    if (!__atomic_load_n(&limiter.pools, __ATOMIC_ACQUIRE)) return false;
    if (effort == POOLS_SYNCHRONISE) synchronise();
    lock();
    for (Pool *pool = limiter.pools; pool; pool = pool->next) {
        if (pool->device != device) continue;
        before += pool->charged;
        if (effort != POOLS_SETTLE) DRIVER(cuMemPoolTrimTo, pool->handle, 0);
        settle(pool, 0);
        after += pool->charged;
    }
    unlock();
    return after < before;
}

static CUresult allocate(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream, bool per_thread) {
    return pool ? (per_thread ? DRIVER(cuMemAllocFromPoolAsync_ptsz, pointer, size, pool, stream)
                              : DRIVER(cuMemAllocFromPoolAsync, pointer, size, pool, stream))
                : (per_thread ? DRIVER(cuMemAllocAsync_ptsz, pointer, size, stream)
                              : DRIVER(cuMemAllocAsync, pointer, size, stream));
}

/* While the stream is captured, nothing is allocated: a node is added to a graph, and charged with the graph. */
static CUresult allocate_async(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream, bool per_thread) {
    Growth growth;
    if (limiter_state() == STATE_LIMITED && is_capturing(stream, per_thread))
        return allocate(pointer, size, pool, stream, per_thread);
    CUresult result = begin(&growth, pool, size, stream);
    if (result != CUDA_SUCCESS) return result;
    return end(growth, allocate(pointer, size, pool, stream, per_thread), pointer, stream);
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) {
    return allocate_async(pointer, size, NULL, stream, false);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t size, CUstream stream) {
    return allocate_async(pointer, size, NULL, stream, true);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream) {
    return allocate_async(pointer, size, pool, stream, false);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream) {
    return allocate_async(pointer, size, pool, stream, true);
}

/* From a pool: it goes back to the pool, which still holds it. Only plain and imported memory has a record. */
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    Freeing freeing = free_begin(KIND_POINTER, pointer);
    return free_end(freeing, DRIVER(cuMemFreeAsync, pointer, stream));
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    Freeing freeing = free_begin(KIND_POINTER, pointer);
    return free_end(freeing, DRIVER(cuMemFreeAsync_ptsz, pointer, stream));
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props) {
    State state = limiter_state();
    CUresult result = DRIVER(cuMemPoolCreate, pool, props);
    if (result != CUDA_SUCCESS || state != STATE_LIMITED || !props) return result;
    CUdevice ordinal = location_device(props->location);
    bool is_host = is_on_host(props->allocType, props->location.type);
    lock();
    if (is_host || ordinal >= 0) add_pool(*pool, is_host ? NO_LIMIT : limiter_device(ordinal));
    unlock();
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    State state = limiter_state();
    CUresult result = DRIVER(cuMemPoolTrimTo, handle, keep);
    if (state != STATE_LIMITED) return result;
    lock();
    Pool *pool = find_pool(handle);
    if (pool) settle(pool, 0);
    unlock();
    return result;
}

/* What is still handed out lives on without a pool that could be asked; it stays charged until the process ends. */
static void forget_pool(CUmemoryPool handle, uint64_t used_units) {
    for (Pool **link = &limiter.pools; *link; link = &(*link)->next) {
        Pool *pool = *link;
        if (pool->handle != handle) continue;
        Charge charge = {.device = pool->device, .units = pool->charged};
        charge_correct(&charge, used_units);
        *link = pool->next;
        free(pool);
        return;
    }
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    uint64_t used_bytes = 0;
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuMemPoolDestroy, handle);
    lock();
    DRIVER(cuMemPoolGetAttribute, handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used_bytes);
    CUresult result = DRIVER(cuMemPoolDestroy, handle);
    if (result == CUDA_SUCCESS) forget_pool(handle, units_of(used_bytes));
    unlock();
    return result;
}
