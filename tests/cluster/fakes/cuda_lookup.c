/* `cuGetProcAddress`: the newest variant that the caller's version knows, per-thread variants on request. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

typedef struct {
    const char *base;
    int since;
    const char *symbol;
} Variant;

/* Families with more than one member; every other symbol stands for itself. */
static const Variant variants[] = {
    {"cuMemAlloc", 2000, "cuMemAlloc"}, {"cuMemAlloc", 3020, "cuMemAlloc_v2"},
    {"cuMemAllocPitch", 3020, "cuMemAllocPitch_v2"}, {"cuMemFree", 3020, "cuMemFree_v2"},
    {"cuMemGetInfo", 2000, "cuMemGetInfo"}, {"cuMemGetInfo", 3020, "cuMemGetInfo_v2"},
    {"cuDeviceTotalMem", 2000, "cuDeviceTotalMem"}, {"cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"},
    {"cuArrayCreate", 3020, "cuArrayCreate_v2"}, {"cuArray3DCreate", 3020, "cuArray3DCreate_v2"},
    {"cuCtxCreate", 2000, "cuCtxCreate"}, {"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    {"cuCtxCreate", 11040, "cuCtxCreate_v3"}, {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxDestroy", 2000, "cuCtxDestroy"}, {"cuCtxDestroy", 4000, "cuCtxDestroy_v2"},
    {"cuDevicePrimaryCtxRelease", 7000, "cuDevicePrimaryCtxRelease"},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuDevicePrimaryCtxReset", 7000, "cuDevicePrimaryCtxReset"},
    {"cuDevicePrimaryCtxReset", 11000, "cuDevicePrimaryCtxReset_v2"},
    {"cuIpcOpenMemHandle", 4010, "cuIpcOpenMemHandle"}, {"cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2"},
    {"cuGraphInstantiate", 10000, "cuGraphInstantiate"}, {"cuGraphInstantiate", 11000, "cuGraphInstantiate_v2"},
    {"cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"},
    {"cuGetProcAddress", 11030, "cuGetProcAddress"}, {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"},
};

/* Functions of its own that do what the symbols do: a driver whose addresses are not those of its symbols. */
static CUresult another_mem_alloc(CUdeviceptr *pointer, size_t size) {
    return cuMemAlloc_v2(pointer, size);
}

static CUresult another_instantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t log_size) {
    return cuGraphInstantiate_v2(exec, graph, error, log, log_size);
}

static CUresult another_instantiate_with_flags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return cuGraphInstantiateWithFlags(exec, graph, flags);
}

static void *other_address(void *function) {
    if (function == (void *)cuMemAlloc_v2) return (void *)another_mem_alloc;
    if (function == (void *)cuGraphInstantiate_v2) return (void *)another_instantiate;
    return function == (void *)cuGraphInstantiateWithFlags ? (void *)another_instantiate_with_flags : function;
}

static const char *symbol_of(const char *base, int version) {
    const char *symbol = base;
    for (size_t index = 0; index < sizeof variants / sizeof *variants; index++) {
        const Variant *variant = &variants[index];
        if (strcmp(variant->base, base) == 0 && variant->since <= version) symbol = variant->symbol;
    }
    return symbol;
}

/* Every entry of this driver. Its own table, as a real one has: nothing here goes through the dynamic linker. */
#define ENTRIES(X) \
    X(cuArray3DCreate_v2) X(cuArrayCreate_v2) X(cuArrayDestroy) X(cuCtxAttach) X(cuCtxCreate) X(cuCtxCreate_v2) \
    X(cuCtxCreate_v3) X(cuCtxCreate_v4) X(cuCtxDestroy) X(cuCtxDestroy_v2) X(cuCtxDetach) X(cuCtxGetCurrent) \
    X(cuCtxGetDevice) X(cuCtxGetLimit) X(cuCtxPopCurrent_v2) X(cuCtxPushCurrent_v2) X(cuCtxSetCurrent) \
    X(cuCtxSetLimit) X(cuCtxSynchronize) X(cuDestroyExternalMemory) X(cuDeviceGet) X(cuDeviceGetAttribute) \
    X(cuDeviceGetCount) X(cuDeviceGetDefaultMemPool) X(cuDeviceGetGraphMemAttribute) X(cuDeviceGetMemPool) \
    X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceGetUuid_v2) X(cuDeviceGraphMemTrim) X(cuDevicePrimaryCtxRelease) \
    X(cuDevicePrimaryCtxRelease_v2) X(cuDevicePrimaryCtxReset) X(cuDevicePrimaryCtxReset_v2) \
    X(cuDevicePrimaryCtxRetain) X(cuDeviceTotalMem) X(cuDeviceTotalMem_v2) X(cuDriverGetVersion) \
    X(cuGraphAddChildGraphNode) X(cuGraphAddMemAllocNode) X(cuGraphChildGraphNodeGetGraph) X(cuGraphCreate) \
    X(cuGraphDestroy) X(cuGraphExecDestroy) X(cuGraphGetNodes) X(cuGraphInstantiate) X(cuGraphInstantiateWithFlags) \
    X(cuGraphInstantiateWithParams) X(cuGraphInstantiateWithParams_ptsz) X(cuGraphInstantiate_v2) X(cuGraphLaunch) \
    X(cuGraphMemAllocNodeGetParams) X(cuGraphNodeGetType) X(cuGreenCtxCreate) X(cuGreenCtxDestroy) \
    X(cuImportExternalMemory) X(cuInit) X(cuIpcCloseMemHandle) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) \
    X(cuIpcOpenMemHandle_v2) X(cuLaunchKernel) X(cuMemAddressFree) X(cuMemAddressReserve) X(cuMemAlloc) \
    X(cuMemAllocAsync) X(cuMemAllocAsync_ptsz) X(cuMemAllocFromPoolAsync) X(cuMemAllocFromPoolAsync_ptsz) \
    X(cuMemAllocManaged) X(cuMemAllocPitch_v2) X(cuMemAlloc_v2) X(cuMemCreate) X(cuMemExportToShareableHandle) \
    X(cuMemFreeAsync) X(cuMemFreeAsync_ptsz) X(cuMemFreeHost) X(cuMemFree_v2) X(cuMemGetAddressRange_v2) \
    X(cuMemGetAllocationPropertiesFromHandle) X(cuMemGetInfo) X(cuMemGetInfo_v2) X(cuMemHostAlloc) \
    X(cuMemImportFromShareableHandle) X(cuMemMap) X(cuMemPoolCreate) X(cuMemPoolDestroy) X(cuMemPoolExportPointer) \
    X(cuMemPoolGetAttribute) X(cuMemPoolImportPointer) X(cuMemPoolSetAttribute) X(cuMemPoolTrimTo) X(cuMemRelease) \
    X(cuMemRetainAllocationHandle) X(cuMemUnmap) X(cuMemcpyHtoD_v2) X(cuMipmappedArrayCreate) \
    X(cuMipmappedArrayDestroy) X(cuPointerGetAttribute) X(cuStreamBeginCapture_v2) X(cuStreamCreate) \
    X(cuStreamDestroy_v2) X(cuStreamEndCapture) X(cuStreamGetCtx) X(cuStreamIsCapturing) X(cuStreamIsCapturing_ptsz) \
    X(cuStreamSynchronize) X(cuThreadExchangeStreamCaptureMode)

static void *own_symbol(const char *symbol) {
    static const struct {
        const char *symbol;
        void *function;
    } own[] = {
#define OWN(name) {#name, (void *)name},
        ENTRIES(OWN) OWN(cuGetProcAddress) OWN(cuGetProcAddress_v2)
#undef OWN
    };
    for (size_t index = 0; index < sizeof own / sizeof *own; index++) {
        if (strcmp(own[index].symbol, symbol) == 0) return own[index].function;
    }
    return NULL;
}

CUresult cuGetProcAddress_v2(const char *base, void **function, int version, uint64_t flags, int *status) {
    char per_thread[128];
    const char *symbol = symbol_of(base, version);
    *function = NULL;
    if (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
        snprintf(per_thread, sizeof per_thread, "%s_ptsz", symbol);
        *function = own_symbol(per_thread);
    }
    if (!*function) *function = own_symbol(symbol);
    if (board()->other_addresses) *function = other_address(*function);
    if (status) *status = *function ? 0 : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* What newer drivers do while they are loaded: look up functions of their own, and call them. */
__attribute__((constructor)) static void call_itself(void) {
    size_t free_bytes, total_bytes;
    if (!getenv("KVARTO_FAKE_CALLS_ITSELF")) return;
    CUresult (*get_info)(size_t *, size_t *) = dlsym(RTLD_DEFAULT, "cuMemGetInfo_v2");
    if (get_info) get_info(&free_bytes, &total_bytes);
}

CUresult cuGetProcAddress(const char *base, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(base, function, version, flags, NULL);
}
