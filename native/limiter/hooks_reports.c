/* What a program is told: the limit as the card's size, and what is left of it, never more than the card has free. */
#include <stdint.h>

#include "charge.h"

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static bool is_limited(CUdevice ordinal, int *device) {
    return limiter_state() == STATE_LIMITED && (*device = limiter_device(ordinal)) >= 0;
}

CUresult cuInit(unsigned flags) {
    State state = limiter_state();
    return state == STATE_REFUSED ? CUDA_ERROR_OPERATING_SYSTEM : DRIVER(cuInit, flags);
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    size_t free_bytes, total_bytes;
    CUdevice ordinal;
    int device;
    limiter_state();
    CUresult result = DRIVER(cuMemGetInfo_v2, &free_bytes, &total_bytes);
    if (result != CUDA_SUCCESS) return result;
    if (DRIVER(cuCtxGetDevice, &ordinal) == CUDA_SUCCESS && is_limited(ordinal, &device)) {
        View view = limiter_view(device);
        free_bytes = smaller(free_bytes, view.free_bytes);
        total_bytes = smaller(total_bytes, view.total_bytes);
    }
    if (free) *free = free_bytes;
    if (total) *total = total_bytes;
    return result;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal) {
    int device;
    limiter_state();
    CUresult result = DRIVER(cuDeviceTotalMem_v2, bytes, ordinal);
    if (result != CUDA_SUCCESS || !is_limited(ordinal, &device)) return result;
    *bytes = smaller(*bytes, limiter_view(device).total_bytes);
    return result;
}

/* The 32-bit interface tells what 32 bits can hold. */
CUresult cuMemGetInfo(unsigned *free, unsigned *total) {
    size_t free_bytes, total_bytes;
    CUresult result = cuMemGetInfo_v2(&free_bytes, &total_bytes);
    if (result != CUDA_SUCCESS) return result;
    if (free) *free = (unsigned)smaller(free_bytes, UINT32_MAX);
    if (total) *total = (unsigned)smaller(total_bytes, UINT32_MAX);
    return result;
}

CUresult cuDeviceTotalMem(unsigned *bytes, CUdevice ordinal) {
    size_t total_bytes;
    CUresult result = cuDeviceTotalMem_v2(&total_bytes, ordinal);
    if (result == CUDA_SUCCESS) *bytes = (unsigned)smaller(total_bytes, UINT32_MAX);
    return result;
}
