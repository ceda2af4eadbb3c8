#include "ways.h"

#define PAGE_BYTES ((size_t)2 << 20)

static CUresult take_linear(const Place *place, Thing *thing, size_t size) {
    (void)place;
    return cuMemAlloc_v2(&thing->pointer, size);
}

static CUresult give_linear(const Place *place, Thing *thing) {
    (void)place;
    return cuMemFree_v2(thing->pointer);
}

static CUresult take_managed(const Place *place, Thing *thing, size_t size) {
    (void)place;
    return cuMemAllocManaged(&thing->pointer, size, 1);
}

static CUresult take_pitch(const Place *place, Thing *thing, size_t size) {
    size_t pitch;
    (void)place;
    return cuMemAllocPitch_v2(&thing->pointer, &pitch, size / 64 + 1, 64, 4);
}

static CUresult take_async(const Place *place, Thing *thing, size_t size) {
    return cuMemAllocAsync(&thing->pointer, size, place->stream);
}

static CUresult take_async_per_thread(const Place *place, Thing *thing, size_t size) {
    return cuMemAllocAsync_ptsz(&thing->pointer, size, place->stream);
}

static CUresult take_from_pool(const Place *place, Thing *thing, size_t size) {
    return cuMemAllocFromPoolAsync(&thing->pointer, size, place->pool, place->stream);
}

static CUresult give_async(const Place *place, Thing *thing) {
    return cuMemFreeAsync(thing->pointer, place->stream);
}

/* From a pool of its own, which goes with it. */
static CUresult take_pool(const Place *place, Thing *thing, size_t size) {
    CUmemPoolProps props = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemoryPool pool;
    CUresult result = cuMemPoolCreate(&pool, &props);
    if (result != CUDA_SUCCESS) return result;
    result = cuMemAllocFromPoolAsync(&thing->pointer, size, pool, place->stream);
    if (result != CUDA_SUCCESS) cuMemPoolDestroy(pool);
    thing->second = (CUdeviceptr)(uintptr_t)pool;
    return result;
}

static CUresult give_pool(const Place *place, Thing *thing) {
    CUresult result = cuMemFreeAsync(thing->pointer, place->stream);
    return result == CUDA_SUCCESS ? cuMemPoolDestroy((CUmemoryPool)(uintptr_t)thing->second) : result;
}

static CUresult take_array(const Place *place, Thing *thing, size_t size) {
    CUDA_ARRAY_DESCRIPTOR shape = {1024, size / 4096 + 1, 0x20, 1};
    (void)place;
    return cuArrayCreate_v2((CUarray *)&thing->pointer, &shape);
}

static CUresult take_array_3d(const Place *place, Thing *thing, size_t size) {
    CUDA_ARRAY3D_DESCRIPTOR shape = {256, 64, size / 65536 + 1, 0x20, 1, 0};
    (void)place;
    return cuArray3DCreate_v2((CUarray *)&thing->pointer, &shape);
}

static CUresult give_array(const Place *place, Thing *thing) {
    (void)place;
    return cuArrayDestroy((CUarray)(uintptr_t)thing->pointer);
}

static CUresult take_mipmap(const Place *place, Thing *thing, size_t size) {
    CUDA_ARRAY3D_DESCRIPTOR shape = {1024, size / 4096 + 1, 0, 0x20, 1, 0};
    (void)place;
    return cuMipmappedArrayCreate((CUmipmappedArray *)&thing->pointer, &shape, 4);
}

static CUresult give_mipmap(const Place *place, Thing *thing) {
    (void)place;
    return cuMipmappedArrayDestroy((CUmipmappedArray)(uintptr_t)thing->pointer);
}

/* Created, mapped in two halves, and released at once, as libraries do: the mappings keep it. */
static CUresult take_virtual(const Place *place, Thing *thing, size_t size) {
    CUmemAllocationProp prop = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle;
    (void)place;
    thing->size = round_to(size, 2 * PAGE_BYTES);
    CUresult result = cuMemCreate(&handle, thing->size, &prop, 0);
    if (result != CUDA_SUCCESS) return result;
    cuMemAddressReserve(&thing->pointer, thing->size, 0, 0, 0);
    cuMemMap(thing->pointer, thing->size / 2, 0, handle, 0);
    cuMemMap(thing->pointer + thing->size / 2, thing->size / 2, thing->size / 2, handle, 0);
    return cuMemRelease(handle);
}

static CUresult give_virtual(const Place *place, Thing *thing) {
    CUmemGenericAllocationHandle handle;
    (void)place;
    cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)thing->pointer);
    cuMemRelease(handle);
    return cuMemUnmap(thing->pointer, thing->size);
}

static CUresult take_ipc(const Place *place, Thing *thing, size_t size) {
    CUipcMemHandle handle;
    (void)place;
    CUresult result = cuMemAlloc_v2(&thing->second, size / 2 + 1);
    if (result != CUDA_SUCCESS) return result;
    cuIpcGetMemHandle(&handle, thing->second);
    result = cuIpcOpenMemHandle_v2(&thing->pointer, handle, 1);
    if (result != CUDA_SUCCESS) cuMemFree_v2(thing->second);
    return result;
}

static CUresult give_ipc(const Place *place, Thing *thing) {
    (void)place;
    cuIpcCloseMemHandle(thing->pointer);
    return cuMemFree_v2(thing->second);
}

static CUresult take_external(const Place *place, Thing *thing, size_t size) {
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC descriptor = {.type = 1, .size = size};
    (void)place;
    return cuImportExternalMemory((CUexternalMemory *)&thing->pointer, &descriptor);
}

static CUresult give_external(const Place *place, Thing *thing) {
    (void)place;
    return cuDestroyExternalMemory((CUexternalMemory)(uintptr_t)thing->pointer);
}

static CUresult take_graph(const Place *place, Thing *thing, size_t size) {
    CUgraph graph;
    CUgraphExec exec;
    CUdeviceptr inside;
    CUstream stream;
    (void)place;
    if (cuStreamCreate(&stream, 0) != CUDA_SUCCESS) return CUDA_ERROR_OUT_OF_MEMORY;
    cuStreamBeginCapture_v2(stream, 0);
    cuMemAllocAsync(&inside, size, stream);
    cuStreamEndCapture(stream, &graph);
    CUresult result = cuGraphInstantiateWithFlags(&exec, graph, 0);
    cuGraphDestroy(graph);
    cuStreamDestroy_v2(stream);
    if (result != CUDA_SUCCESS) return result;
    thing->pointer = (CUdeviceptr)(uintptr_t)exec;
    if (cuGraphLaunch(exec, NULL) == CUDA_SUCCESS) return CUDA_SUCCESS;
    cuGraphExecDestroy(exec);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult give_graph(const Place *place, Thing *thing) {
    (void)place;
    return cuGraphExecDestroy((CUgraphExec)(uintptr_t)thing->pointer);
}

static CUresult take_context(const Place *place, Thing *thing, size_t size) {
    CUdeviceptr inside;
    CUresult result = cuCtxCreate_v2((CUcontext *)&thing->pointer, 0, 0);
    if (result != CUDA_SUCCESS) return result;
    cuMemAlloc_v2(&inside, size); /* never freed: goes with its context */
    cuCtxSetCurrent(place->context);
    return CUDA_SUCCESS;
}

static CUresult give_context(const Place *place, Thing *thing) {
    (void)place;
    return cuCtxDestroy_v2((CUcontext)(uintptr_t)thing->pointer);
}

static CUresult take_imported_pointer(const Place *place, Thing *thing, size_t size) {
    CUmemPoolPtrExportData data;
    CUresult result = cuMemAllocAsync(&thing->second, size / 2 + 1, place->stream);
    if (result != CUDA_SUCCESS) return result;
    cuMemPoolExportPointer(&data, thing->second);
    result = cuMemPoolImportPointer(&thing->pointer, place->pool, &data);
    if (result != CUDA_SUCCESS) cuMemFreeAsync(thing->second, place->stream);
    return result;
}

static CUresult give_imported_pointer(const Place *place, Thing *thing) {
    cuMemFree_v2(thing->pointer);
    return cuMemFreeAsync(thing->second, place->stream);
}

static CUresult take_stack(const Place *place, Thing *thing, size_t size) {
    CUresult result = cuCtxCreate_v2((CUcontext *)&thing->pointer, 0, 0);
    if (result != CUDA_SUCCESS) return result;
    cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, size);
    cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2048 + size / 65536);
    cuCtxSetCurrent(place->context);
    return CUDA_SUCCESS;
}

const Way ways[NUM_WAYS] = {
    {"cuMemAlloc", take_linear, give_linear},
    {"cuMemAllocManaged", take_managed, give_linear},
    {"cuMemAllocPitch", take_pitch, give_linear},
    {"cuMemAllocAsync", take_async, give_async},
    {"cuMemAllocAsync_ptsz", take_async_per_thread, give_linear},
    {"cuMemAllocFromPoolAsync", take_from_pool, give_async},
    {"cuMemPoolCreate", take_pool, give_pool},
    {"cuArrayCreate", take_array, give_array},
    {"cuArray3DCreate", take_array_3d, give_array},
    {"cuMipmappedArrayCreate", take_mipmap, give_mipmap},
    {"cuMemCreate", take_virtual, give_virtual},
    {"cuIpcOpenMemHandle", take_ipc, give_ipc},
    {"cuImportExternalMemory", take_external, give_external},
    {"cuGraphInstantiate", take_graph, give_graph},
    {"cuCtxCreate", take_context, give_context},
    {"cuMemPoolImportPointer", take_imported_pointer, give_imported_pointer},
    {"cuCtxSetLimit", take_stack, give_context},
};

CUresult place_open(Place *place) {
    CUmemPoolProps props = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUresult result = cuDevicePrimaryCtxRetain(&place->context, 0);
    if (result != CUDA_SUCCESS) return result;
    cuCtxSetCurrent(place->context);
    cuStreamCreate(&place->stream, 0);
    return cuMemPoolCreate(&place->pool, &props);
}
