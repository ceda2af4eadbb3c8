/* Devices, contexts, streams, and the calls that nobody should hook. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

#define DEFAULT_LIMITS {1024, 1 << 20, 8 << 20}
enum { NUM_PROCESSORS = 4, NUM_THREADS = 256 };

static __thread CUcontext current, pushed;
static CUcontext primaries[BOARD_DEVICES];
static pthread_mutex_t primary_mutex = PTHREAD_MUTEX_INITIALIZER;

CUcontext fake_current(void) {
    return current;
}

static bool is_device(CUdevice device) {
    return device >= 0 && (uint64_t)device < board()->num_devices;
}

CUresult cuInit(unsigned flags) {
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = (int)board()->driver_version;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = (int)board()->num_devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return is_device(ordinal) ? CUDA_SUCCESS : FAKE_NO_DEVICE;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, (size_t)length, "Fake card %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    if (!is_device(device)) return FAKE_NO_DEVICE;
    memcpy(uuid, board()->devices[device].uuid, sizeof *uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    return cuDeviceGetUuid(uuid, device);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? NUM_PROCESSORS : NUM_THREADS;
    return is_device(device) ? CUDA_SUCCESS : FAKE_NO_DEVICE;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (!is_device(device)) return FAKE_NO_DEVICE;
    *bytes = board()->devices[device].capacity_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(unsigned *bytes, CUdevice device) {
    size_t whole;
    CUresult result = cuDeviceTotalMem_v2(&whole, device);
    if (result == CUDA_SUCCESS) *bytes = (unsigned)whole;
    return result;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    if (!current) return FAKE_INVALID_CONTEXT;
    const BoardDevice *device = &board()->devices[current->device];
    *free_bytes = device->capacity_bytes - device->used_bytes - device->others_bytes;
    *total_bytes = device->capacity_bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total_bytes) {
    size_t whole_free, whole_total;
    CUresult result = cuMemGetInfo_v2(&whole_free, &whole_total);
    *free_bytes = (unsigned)whole_free, *total_bytes = (unsigned)whole_total;
    return result;
}

/* ---- contexts ---- */

static CUresult make_context(CUcontext *context, CUdevice device) {
    if (!is_device(device)) return FAKE_NO_DEVICE;
    if (!board_take(device, board()->devices[device].context_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *context = malloc(sizeof **context);
    **context = (struct CUctx_st){.device = device, .num_users = 1, .limits = DEFAULT_LIMITS,
                                  .mutex = PTHREAD_MUTEX_INITIALIZER};
    return CUDA_SUCCESS;
}

static size_t limit_bytes(int limit, size_t value) {
    return round_to(limit == CU_LIMIT_STACK_SIZE ? value * NUM_PROCESSORS * NUM_THREADS : value, 512);
}

static void destroy_context(CUcontext context) {
    const size_t defaults[] = DEFAULT_LIMITS;
    while (context->memory) fake_free(context->memory);
    for (int limit = 0; limit < 3; limit++) {
        if (context->limits[limit] > defaults[limit])
            board_give(context->device, limit_bytes(limit, context->limits[limit] - defaults[limit]));
    }
    board_give(context->device, board()->devices[context->device].context_bytes);
    if (current == context) current = NULL;
    free(context);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    (void)flags;
    CUresult result = make_context(context, device);
    if (result == CUDA_SUCCESS) current = *context;
    return result;
}

CUresult cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device) {
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int num_affinity, unsigned flags, CUdevice device) {
    (void)affinity, (void)num_affinity;
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned flags, CUdevice device) {
    (void)params;
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxAttach(CUcontext *context, unsigned flags) {
    (void)flags;
    if (!current) return FAKE_INVALID_CONTEXT;
    current->num_users++;
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    if (!context) return FAKE_INVALID_CONTEXT;
    destroy_context(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context) {
    return cuCtxDestroy_v2(context);
}

CUresult cuCtxDetach(CUcontext context) {
    if (!context) return FAKE_INVALID_CONTEXT;
    if (--context->num_users == 0) destroy_context(context);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult result = CUDA_SUCCESS;
    if (!is_device(device)) return FAKE_NO_DEVICE;
    fake_lock(&primary_mutex);
    if (primaries[device]) primaries[device]->num_users++;
    else result = make_context(&primaries[device], device);
    *context = primaries[device];
    pthread_mutex_unlock(&primary_mutex);
    return result;
}

static CUresult drop_primary(CUdevice device, bool is_reset) {
    if (!is_device(device)) return FAKE_NO_DEVICE;
    fake_lock(&primary_mutex);
    CUcontext primary = primaries[device];
    if (primary && (is_reset || --primary->num_users == 0)) {
        primaries[device] = NULL;
        destroy_context(primary);
    }
    pthread_mutex_unlock(&primary_mutex);
    return primary ? CUDA_SUCCESS : FAKE_INVALID_CONTEXT;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return drop_primary(device, false);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return drop_primary(device, false);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return drop_primary(device, true);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return drop_primary(device, true);
}

CUresult cuGreenCtxCreate(CUgreenCtx *green, void *resources, CUdevice device, unsigned flags) {
    CUcontext primary;
    (void)resources, (void)flags;
    CUresult result = cuDevicePrimaryCtxRetain(&primary, device);
    *green = (CUgreenCtx)primary;
    return result;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    return drop_primary(((CUcontext)green)->device, false);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    pushed = current;
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    *context = current;
    current = pushed;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    if (!current) return FAKE_INVALID_CONTEXT;
    *device = current->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    fake_pools_synchronise();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, int limit) {
    if (!current || limit < 0 || limit > 2) return CUDA_ERROR_INVALID_VALUE;
    *value = current->limits[limit];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(int limit, size_t value) {
    const size_t defaults[] = DEFAULT_LIMITS;
    if (!current || limit < 0 || limit > 2) return CUDA_ERROR_INVALID_VALUE;
    size_t before = current->limits[limit], least = defaults[limit];
    size_t held = before > least ? limit_bytes(limit, before - least) : 0;
    size_t wanted = value > least ? limit_bytes(limit, value - least) : 0;
    if (wanted > held && !board_take(current->device, wanted - held)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (wanted < held) board_give(current->device, held - wanted);
    current->limits[limit] = value;
    return CUDA_SUCCESS;
}

/* ---- streams, and work ---- */

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    (void)flags;
    if (!current) return FAKE_INVALID_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    (*stream)->context = current;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    free(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    *context = stream->context;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    (void)stream;
    return cuCtxSynchronize();
}

static bool is_handle(CUstream stream) {
    return (uintptr_t)stream > CU_STREAM_PER_THREAD;
}

CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    *status = is_handle(stream) && stream->capturing;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing_ptsz(CUstream stream, int *status) {
    return cuStreamIsCapturing(stream, status);
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int own_mode;
    int before = own_mode;
    own_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    (void)mode;
    return cuGraphCreate(&stream->capturing, 0);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    *graph = stream->capturing;
    stream->capturing = NULL;
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size) {
    (void)target, (void)source, (void)size;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                        unsigned threads_z, unsigned shared_bytes, CUstream stream, void **arguments, void **extra) {
    (void)function, (void)x, (void)y, (void)z, (void)threads_x, (void)threads_y, (void)threads_z, (void)shared_bytes;
    (void)stream, (void)arguments, (void)extra;
    return CUDA_SUCCESS;
}
