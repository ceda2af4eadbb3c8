/* Allocations from memory pools, in the order of a stream. */
#include "charge.h"
#include "pools.h"

static bool is_capturing(CUstream stream, bool per_thread) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = per_thread ? DRIVER(cuStreamIsCapturing_ptsz, stream, &status)
                                 : DRIVER(cuStreamIsCapturing, stream, &status);
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
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
    CUresult result = growth_begin(&growth, pool, size, stream);
    if (result != CUDA_SUCCESS) return result;
    result = allocate(pointer, size, pool, stream, per_thread);
    if (growth_end(growth) || result != CUDA_SUCCESS) return result;
    DRIVER(cuMemFreeAsync, *pointer, stream);
    pools_give_back(growth.device, POOLS_SYNCHRONISE);
    return CUDA_ERROR_OUT_OF_MEMORY;
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
    if (is_host || ordinal >= 0) pools_add(*pool, ordinal, is_host);
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    State state = limiter_state();
    CUresult result = DRIVER(cuMemPoolTrimTo, handle, keep);
    if (state == STATE_LIMITED) pools_settle(handle);
    return result;
}

static CUresult destroy(CUmemoryPool handle) {
    return DRIVER(cuMemPoolDestroy, handle);
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    return limiter_state() == STATE_LIMITED ? pools_destroy(handle, destroy) : destroy(handle);
}
