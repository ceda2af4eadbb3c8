/* Plain device memory: linear, pitched, managed, and what other processes share. */
#include "charge.h"

enum { PITCH_BYTES = 512 };

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    Charge charge;
    CUresult result = charge_here(&charge, size);
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuMemAlloc_v2, pointer, size);
    return charge_settle(&charge, result, KIND_POINTER, pointer);
}

/* In full: managed memory may live on the host, and come to the device at any time without a call. */
CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned flags) {
    Charge charge;
    CUresult result = charge_here(&charge, size);
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuMemAllocManaged, pointer, size, flags);
    return charge_settle(&charge, result, KIND_POINTER, pointer);
}

static size_t saturating_product(size_t a, size_t b) {
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

static size_t round_up(size_t size, size_t alignment) {
    size_t rest = size % alignment, missing = rest ? alignment - rest : 0;
    return size > SIZE_MAX - missing ? SIZE_MAX : size + missing;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element) {
    Charge charge;
    CUresult result = charge_here(&charge, saturating_product(round_up(width, PITCH_BYTES), height));
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuMemAllocPitch_v2, pointer, pitch, width, height, element);
    if (result == CUDA_SUCCESS && !charge_correct(&charge, units_of(saturating_product(*pitch, height)))) {
        DRIVER(cuMemFree_v2, *pointer);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return charge_settle(&charge, result, KIND_POINTER, pointer);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    Freeing freeing = free_begin(KIND_POINTER, pointer);
    return free_end(freeing, DRIVER(cuMemFree_v2, pointer));
}

/* ---- from other processes: it exists already, and stays for as long as anybody maps it ---- */

/* Where the memory lies, which need not be the current device, and how much it is, is known once it is mapped. */
static CUresult charge_import(CUdeviceptr pointer, Charge *charge) {
    size_t size = 0;
    int ordinal = 0;
    CUdeviceptr base;
    if (DRIVER(cuMemGetAddressRange_v2, &base, &size, pointer) != CUDA_SUCCESS ||
        DRIVER(cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer) != CUDA_SUCCESS) {
        return CUDA_ERROR_OUT_OF_MEMORY; /* what cannot be counted is not let in */
    }
    CUresult result = charge_device(charge, ordinal, size);
    DRIVER(cuCtxGetCurrent, &charge->context);
    return result;
}

static CUresult settle_import(CUresult result, CUdeviceptr *pointer, CUresult (*give_up)(CUdeviceptr)) {
    Charge charge = {.device = NO_LIMIT};
    if (result != CUDA_SUCCESS || limiter_state() == STATE_UNLIMITED) return result;
    result = charge_import(*pointer, &charge);
    if (result != CUDA_SUCCESS) give_up(*pointer);
    return charge_settle(&charge, result, KIND_POINTER, pointer);
}

static CUresult close_ipc(CUdeviceptr pointer) {
    return DRIVER(cuIpcCloseMemHandle, pointer);
}

static CUresult free_pointer(CUdeviceptr pointer) {
    return DRIVER(cuMemFree_v2, pointer);
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    limiter_state();
    return settle_import(DRIVER(cuIpcOpenMemHandle, pointer, handle, flags), pointer, close_ipc);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    limiter_state();
    return settle_import(DRIVER(cuIpcOpenMemHandle_v2, pointer, handle, flags), pointer, close_ipc);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    Freeing freeing = free_begin(KIND_POINTER, pointer);
    return free_end(freeing, DRIVER(cuIpcCloseMemHandle, pointer));
}

CUresult cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data) {
    limiter_state();
    return settle_import(DRIVER(cuMemPoolImportPointer, pointer, pool, data), pointer, free_pointer);
}

CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor) {
    Charge charge;
    CUresult result = charge_here(&charge, descriptor ? descriptor->size : 0);
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuImportExternalMemory, memory, descriptor);
    return charge_settle(&charge, result, KIND_EXTERNAL, memory);
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    Freeing freeing = free_begin(KIND_EXTERNAL, (uint64_t)(uintptr_t)memory);
    return free_end(freeing, DRIVER(cuDestroyExternalMemory, memory));
}
