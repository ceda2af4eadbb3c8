/* What the parts of the fake driver share, and the entries that the limiter does not know but programs call. */
#pragma once

#include "board.h"

#pragma GCC visibility push(default)

#include "../../../native/limiter/cuda_api.h"

CUresult cuDriverGetVersion(int *version);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetName(char *name, int length, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags);
CUresult cuMemFreeHost(void *pointer);
CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size);
CUresult cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                        unsigned threads_z, unsigned shared_bytes, CUstream stream, void **arguments, void **extra);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphCreate(CUgraph *graph, unsigned flags);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *params);
CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                  CUgraph child);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr address,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size);
CUresult cuMemExportToShareableHandle(void *handle, CUmemGenericAllocationHandle allocation, int type,
                                      unsigned long long flags);
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer);
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value);
CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr pointer);

#pragma GCC visibility pop

enum { FAKE_NOT_INITIALISED = 3, FAKE_INVALID_CONTEXT = 201, FAKE_NO_DEVICE = 100, FAKE_INVALID_DEVICE = 101 };

/* An allocation is its own address: the host memory that describes it. Addresses come back as fast as malloc's do. */
typedef struct Memory {
    uint64_t magic;
    int device;
    bool is_charged; /* false: somebody else's, mapped here */
    size_t size;     /* as the card sees it */
    CUmemoryPool pool;
    struct Memory *next, *previous;
    struct CUctx_st *context;
} Memory;

struct CUctx_st {
    CUdevice device;
    int num_users;
    Memory *memory;
    size_t limits[3];
    pthread_mutex_t mutex;
};

struct CUstream_st {
    CUcontext context;
    CUgraph capturing;
};

/* The current context of this thread. */
CUcontext fake_current(void);

/* Allocate in the current context, or on a device without one. 0 when the card says no. */
CUdeviceptr fake_allocate(CUcontext context, int device, size_t size, bool is_charged);
Memory *fake_memory(CUdeviceptr pointer);
void fake_free(Memory *memory);

CUresult fake_capture(CUstream stream, CUdeviceptr *pointer, size_t size);
void fake_pools_synchronise(void);

/* Sizes as the card rounds them. */
static inline size_t round_to(size_t size, size_t multiple) {
    return size > SIZE_MAX - multiple ? SIZE_MAX / multiple * multiple : (size + multiple - 1) / multiple * multiple;
}
