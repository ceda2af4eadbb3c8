/* The interface of CUDA 2, whose device pointers have 32 bits. No card of today can be addressed through it, so it is
 * closed while a limit is set, rather than counted. */
#include "charge.h"

static CUresult refuse(void) {
    return limiter_state() == STATE_UNLIMITED ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemAlloc(unsigned *pointer, unsigned size) {
    CUresult result = refuse();
    return result ? result : DRIVER(cuMemAlloc, pointer, size);
}

CUresult cuMemAllocPitch(unsigned *pointer, unsigned *pitch, unsigned width, unsigned height, unsigned element) {
    CUresult result = refuse();
    return result ? result : DRIVER(cuMemAllocPitch, pointer, pitch, width, height, element);
}

CUresult cuArrayCreate(CUarray *array, const void *descriptor) {
    CUresult result = refuse();
    return result ? result : DRIVER(cuArrayCreate, array, descriptor);
}

CUresult cuArray3DCreate(CUarray *array, const void *descriptor) {
    CUresult result = refuse();
    return result ? result : DRIVER(cuArray3DCreate, array, descriptor);
}
