/* Linear memory, arrays, virtual memory, and what crosses process borders. */
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

#define MAGIC UINT64_C(0x46414b454d454d31)
#define SMALLEST_BYTES 512
#define PAGE_BYTES (UINT64_C(2) << 20)

Memory *fake_memory(CUdeviceptr pointer) {
    Memory *memory = (Memory *)(uintptr_t)pointer;
    return memory && memory->magic == MAGIC ? memory : NULL;
}

CUdeviceptr fake_allocate(CUcontext context, int device, size_t size, bool is_charged) {
    size = round_to(size, SMALLEST_BYTES);
    if (is_charged && !board_take(device, size)) return 0;
    Memory *memory = malloc(sizeof *memory);
    *memory = (Memory){.magic = MAGIC, .device = device, .is_charged = is_charged, .size = size, .context = context};
    if (context) {
        fake_lock(&context->mutex);
        memory->next = context->memory;
        if (memory->next) memory->next->previous = memory;
        context->memory = memory;
        pthread_mutex_unlock(&context->mutex);
    }
    return (CUdeviceptr)(uintptr_t)memory;
}

static void unlink_memory(Memory *memory) {
    fake_lock(&memory->context->mutex);
    if (memory->next) memory->next->previous = memory->previous;
    if (memory->previous) memory->previous->next = memory->next;
    else memory->context->memory = memory->next;
    pthread_mutex_unlock(&memory->context->mutex);
}

void fake_free(Memory *memory) {
    if (memory->context) unlink_memory(memory);
    if (memory->is_charged) board_give(memory->device, memory->size);
    memory->magic = 0;
    free(memory);
}

static CUresult allocate(CUdeviceptr *pointer, size_t size) {
    CUcontext context = fake_current();
    if (!context) return FAKE_INVALID_CONTEXT;
    if (!pointer || size == 0) return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr allocated = fake_allocate(context, context->device, size, true);
    if (allocated) *pointer = allocated;
    return allocated ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    return allocate(pointer, size);
}

CUresult cuMemAlloc(unsigned *pointer, unsigned size) {
    (void)pointer, (void)size;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned flags) {
    (void)flags;
    return allocate(pointer, size);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    if (!pitch || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
    *pitch = round_to(width, 256);
    return allocate(pointer, *pitch * height);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    Memory *memory = fake_memory(pointer);
    if (!memory) return pointer ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (memory->pool) return cuMemFreeAsync(pointer, NULL);
    fake_free(memory);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    *pointer = malloc(size);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *pointer) {
    free(pointer);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    Memory *memory = fake_memory(pointer);
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    *base = pointer;
    *size = memory->size;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr pointer) {
    Memory *memory = fake_memory(pointer);
    if (!memory || attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_INVALID_VALUE;
    *(int *)value = memory->device;
    return CUDA_SUCCESS;
}

/* ---- arrays: 64 bytes by 8 rows, as the card tiles them; sparse ones take nothing ---- */

static CUresult make_array(CUdeviceptr *pointer, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned num_levels) {
    size_t size = 0, width = shape->Width * 4 * shape->NumChannels, height = shape->Height;
    CUcontext context = fake_current();
    if (!context) return FAKE_INVALID_CONTEXT;
    for (unsigned level = 0; level < num_levels; level++) {
        size += round_to(width, 64) * (height ? round_to(height, 8) : 1) * (shape->Depth ? shape->Depth : 1);
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
    }
    bool is_sparse = shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING);
    *pointer = fake_allocate(context, context->device, is_sparse ? 0 : size, true);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    return shape ? make_array((CUdeviceptr *)array, shape, 1) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *shape) {
    if (!shape) return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR flat = {shape->Width, shape->Height, 0, shape->Format, shape->NumChannels, 0};
    return cuArray3DCreate_v2(array, &flat);
}

CUresult cuArrayDestroy(CUarray array) {
    return cuMemFree_v2((CUdeviceptr)(uintptr_t)array);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned num_levels) {
    return shape ? make_array((CUdeviceptr *)array, shape, num_levels) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    return cuMemFree_v2((CUdeviceptr)(uintptr_t)array);
}

/* ---- virtual memory: freed when neither a holder nor a mapping is left ---- */

typedef struct {
    CUmemLocation location;
    size_t size;
    int num_holders, num_mappings;
    bool is_imported;
} Allocation;

typedef struct Mapping {
    CUdeviceptr pointer;
    size_t size;
    Allocation *allocation;
    struct Mapping *next;
} Mapping;

static pthread_mutex_t virtual_mutex = PTHREAD_MUTEX_INITIALIZER;
static Mapping *mappings;
static CUdeviceptr next_address = UINT64_C(0x7f0000000000);

static bool is_on_device(const Allocation *allocation) {
    return location_device(allocation->location) >= 0 && !allocation->is_imported;
}

static void drop_if_unused(Allocation *allocation) {
    if (allocation->num_holders || allocation->num_mappings) return;
    if (is_on_device(allocation)) board_give(location_device(allocation->location), allocation->size);
    free(allocation);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    (void)flags;
    if (!prop || size == 0 || size % PAGE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    if (location_device(prop->location) >= 0 && !board_take(location_device(prop->location), size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    Allocation *allocation = malloc(sizeof *allocation);
    *allocation = (Allocation){.location = prop->location, .size = size, .num_holders = 1};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)allocation;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Allocation *allocation = (Allocation *)(uintptr_t)handle;
    if (!allocation) return CUDA_ERROR_INVALID_VALUE;
    fake_lock(&virtual_mutex);
    allocation->num_holders--;
    drop_if_unused(allocation);
    pthread_mutex_unlock(&virtual_mutex);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    Allocation *allocation = (Allocation *)(uintptr_t)handle;
    (void)flags;
    if (!allocation || offset + size > allocation->size || size == 0) return CUDA_ERROR_INVALID_VALUE;
    Mapping *mapping = malloc(sizeof *mapping);
    fake_lock(&virtual_mutex);
    *mapping = (Mapping){pointer, size, allocation, mappings};
    mappings = mapping;
    allocation->num_mappings++;
    pthread_mutex_unlock(&virtual_mutex);
    return CUDA_SUCCESS;
}

static bool is_inside(const Mapping *mapping, CUdeviceptr pointer, size_t size) {
    return mapping->pointer >= pointer && mapping->pointer + mapping->size <= pointer + size;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    bool any = false;
    fake_lock(&virtual_mutex);
    for (Mapping **link = &mappings; *link;) {
        Mapping *mapping = *link;
        if (!is_inside(mapping, pointer, size)) {
            link = &mapping->next;
            continue;
        }
        *link = mapping->next;
        mapping->allocation->num_mappings--;
        drop_if_unused(mapping->allocation);
        free(mapping);
        any = true;
    }
    pthread_mutex_unlock(&virtual_mutex);
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    fake_lock(&virtual_mutex);
    for (Mapping *mapping = mappings; mapping; mapping = mapping->next) {
        if (mapping->pointer != (CUdeviceptr)(uintptr_t)address) continue;
        mapping->allocation->num_holders++;
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)mapping->allocation;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&virtual_mutex);
    return result;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    *prop = (CUmemAllocationProp){.type = 1, .location = ((Allocation *)(uintptr_t)handle)->location};
    return CUDA_SUCCESS;
}

/* The "descriptor" is the size in pages: enough for another process to map as much. */
CUresult cuMemExportToShareableHandle(void *handle, CUmemGenericAllocationHandle allocation, int type,
                                      unsigned long long flags) {
    (void)type, (void)flags;
    *(int *)handle = (int)(((Allocation *)(uintptr_t)allocation)->size / PAGE_BYTES);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, int type) {
    (void)type;
    Allocation *allocation = malloc(sizeof *allocation);
    *allocation = (Allocation){.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, .num_holders = 1, .is_imported = true,
                               .size = (size_t)(uintptr_t)os_handle * PAGE_BYTES};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)allocation;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    (void)alignment, (void)address, (void)flags;
    *pointer = __atomic_fetch_add(&next_address, round_to(size, PAGE_BYTES), __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    (void)pointer, (void)size;
    return CUDA_SUCCESS;
}

/* ---- memory of other processes: its size travels in the handle ---- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    Memory *memory = fake_memory(pointer);
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    memcpy(handle, &memory->size, sizeof memory->size);
    return CUDA_SUCCESS;
}

static CUresult import(CUdeviceptr *pointer, const void *handle) {
    size_t size;
    CUcontext context = fake_current();
    if (!context) return FAKE_INVALID_CONTEXT;
    memcpy(&size, handle, sizeof size);
    *pointer = fake_allocate(context, context->device, size, false);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    (void)flags;
    return import(pointer, &handle);
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    return cuIpcOpenMemHandle_v2(pointer, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    return cuMemFree_v2(pointer);
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr pointer) {
    return cuIpcGetMemHandle((CUipcMemHandle *)data, pointer);
}

CUresult cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data) {
    (void)pool;
    return import(pointer, data);
}

CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor) {
    if (!descriptor) return CUDA_ERROR_INVALID_VALUE;
    return import((CUdeviceptr *)memory, &descriptor->size);
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    return cuMemFree_v2((CUdeviceptr)(uintptr_t)memory);
}
