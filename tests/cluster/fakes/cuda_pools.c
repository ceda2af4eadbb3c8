/* Memory pools: they grow in pieces, keep what is freed, and give it back at a synchronisation or a trim. A freed piece
 * is only there for a trim once the device was synchronised. */
#include <stdlib.h>

#include "fake_cuda.h"

struct CUmemPoolHandle_st {
    int device; /* -1: of the host, which has room for everything */
    int allocation_type, location_type;
    uint64_t reserved, used, pending;
    uint64_t threshold;
    struct CUmemPoolHandle_st *next;
};

enum { RELEASE_THRESHOLD = 4 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static CUmemoryPool pools, default_pools[BOARD_DEVICES];

static CUmemoryPool make_pool(int device) {
    CUmemoryPool pool = calloc(1, sizeof *pool);
    pool->device = device;
    pool->allocation_type = CU_MEM_ALLOCATION_TYPE_PINNED;
    pool->location_type = device < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    pool->next = pools;
    pools = pool;
    return pool;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    if (device < 0 || (uint64_t)device >= board()->num_devices) return FAKE_INVALID_DEVICE;
    fake_lock(&mutex);
    if (!default_pools[device]) default_pools[device] = make_pool(device);
    *pool = default_pools[device];
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    return cuDeviceGetMemPool(pool, device);
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props) {
    if (!props) return CUDA_ERROR_INVALID_VALUE;
    fake_lock(&mutex);
    *pool = make_pool(location_device(props->location));
    (*pool)->allocation_type = props->allocType;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

static void shrink(CUmemoryPool pool, uint64_t keep) {
    uint64_t least = pool->used + pool->pending > keep ? pool->used + pool->pending : keep;
    if (pool->reserved <= least) return;
    if (pool->device >= 0) board_give(pool->device, pool->reserved - least);
    pool->reserved = least;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    fake_lock(&mutex);
    pool->pending = 0;
    shrink(pool, 0);
    for (CUmemoryPool *link = &pools; *link; link = &(*link)->next) {
        if (*link != pool) continue;
        *link = pool->next;
        break;
    }
    if (pool->used == 0) free(pool);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    fake_lock(&mutex);
    shrink(pool, keep);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
    fake_lock(&mutex);
    if (attribute == CU_MEMPOOL_ATTR_ALLOCATION_TYPE) *(int *)value = pool->allocation_type;
    else if (attribute == CU_MEMPOOL_ATTR_LOCATION_TYPE) *(int *)value = pool->location_type;
    else *(uint64_t *)value = attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT ? pool->used : pool->reserved;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
    if (attribute != RELEASE_THRESHOLD) return CUDA_ERROR_INVALID_VALUE;
    pool->threshold = *(uint64_t *)value;
    return CUDA_SUCCESS;
}

void fake_pools_synchronise(void) {
    fake_lock(&mutex);
    for (CUmemoryPool pool = pools; pool; pool = pool->next) {
        pool->pending = 0;
        shrink(pool, pool->threshold);
    }
    pthread_mutex_unlock(&mutex);
}

static bool grow(CUmemoryPool pool, size_t size) {
    uint64_t needed = pool->used + pool->pending + size;
    if (needed <= pool->reserved) return true;
    uint64_t piece = pool->device < 0 ? 512 : board()->devices[pool->device].growth_bytes;
    uint64_t more = round_to(needed - pool->reserved, piece);
    if (pool->device >= 0 && !board_take(pool->device, more)) return false;
    pool->reserved += more;
    return true;
}

static CUresult allocate(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream) {
    CUresult captured = fake_capture(stream, pointer, size);
    if (captured != CUDA_ERROR_NOT_FOUND) return captured;
    if (size == 0 || size > UINT64_C(1) << 40) return CUDA_ERROR_INVALID_VALUE;
    size = round_to(size, 512);
    fake_lock(&mutex);
    bool fits = grow(pool, size);
    if (fits) {
        *pointer = fake_allocate(NULL, pool->device, size, false);
        fake_memory(*pointer)->pool = pool;
        pool->used += size;
    }
    pthread_mutex_unlock(&mutex);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream) {
    return pool ? allocate(pointer, size, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream) {
    return cuMemAllocFromPoolAsync(pointer, size, pool, stream);
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) {
    CUmemoryPool pool;
    CUcontext context = (uintptr_t)stream > CU_STREAM_PER_THREAD ? stream->context : fake_current();
    if (!context) return FAKE_INVALID_CONTEXT;
    cuDeviceGetMemPool(&pool, context->device);
    return allocate(pointer, size, pool, stream);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t size, CUstream stream) {
    return cuMemAllocAsync(pointer, size, stream);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    Memory *memory = fake_memory(pointer);
    (void)stream;
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    if (!memory->pool) return cuMemFree_v2(pointer);
    fake_lock(&mutex);
    memory->pool->used -= memory->size;
    memory->pool->pending += memory->size;
    fake_free(memory);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    return cuMemFreeAsync(pointer, stream);
}
