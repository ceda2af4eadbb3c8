#include "nvml_hooks.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "interpose.h"
#include "limiter.h"

typedef struct nvmlDevice_st *nvmlDevice_t;

enum { NVML_SUCCESS = 0, NVML_ERROR_FUNCTION_NOT_FOUND = 13, UUID_BYTES = 96 };

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

#pragma GCC visibility push(default)
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory);
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory);
#pragma GCC visibility pop

/* Loaded once a program asks for it, or a context is measured. Threads that do it at once find the same addresses. */
static void *nvml_function(const char *name) {
    static void *library;
    void *loaded = __atomic_load_n(&library, __ATOMIC_ACQUIRE);
    if (!loaded) {
        loaded = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
        if (!loaded) return NULL;
        __atomic_store_n(&library, loaded, __ATOMIC_RELEASE);
    }
    return libc_dlsym(loaded, name);
}

void *nvml_hook(const char *name) {
    if (strcmp(name, "nvmlDeviceGetMemoryInfo") == 0) return (void *)nvmlDeviceGetMemoryInfo;
    return strcmp(name, "nvmlDeviceGetMemoryInfo_v2") == 0 ? (void *)nvmlDeviceGetMemoryInfo_v2 : NULL;
}

/* The device's place in the ledger; below 0 where nothing is limited, also for the card around a MIG instance. */
static int device_of(nvmlDevice_t handle) {
    char text[UUID_BYTES] = "";
    int (*get_uuid)(nvmlDevice_t, char *, unsigned) = nvml_function("nvmlDeviceGetUUID");
    if (limiter_state() != STATE_LIMITED || !get_uuid || get_uuid(handle, text, sizeof text) != NVML_SUCCESS)
        return NO_LIMIT;
    Word uuid = uuid_parse(text, strlen(text));
    return uuid.whole ? limiter_device_of_uuid(uuid) : NO_LIMIT;
}

static unsigned long long smaller(unsigned long long a, unsigned long long b) {
    return a < b ? a : b;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
    int (*get)(nvmlDevice_t, nvmlMemory_t *) = nvml_function("nvmlDeviceGetMemoryInfo");
    int result = get ? get(handle, memory) : NVML_ERROR_FUNCTION_NOT_FOUND;
    int device = result == NVML_SUCCESS ? device_of(handle) : NO_LIMIT;
    if (device < 0) return result;
    View view = limiter_view(device);
    memory->total = smaller(memory->total, view.total_bytes);
    memory->free = smaller(memory->free, view.free_bytes);
    memory->used = view.used_bytes;
    return result;
}

/* What the driver keeps for itself is outside the limit, so none of it is reserved inside. */
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory) {
    int (*get)(nvmlDevice_t, nvmlMemory_v2_t *) = nvml_function("nvmlDeviceGetMemoryInfo_v2");
    int result = get ? get(handle, memory) : NVML_ERROR_FUNCTION_NOT_FOUND;
    int device = result == NVML_SUCCESS ? device_of(handle) : NO_LIMIT;
    if (device < 0) return result;
    View view = limiter_view(device);
    memory->total = smaller(memory->total, view.total_bytes);
    memory->free = smaller(memory->free, view.free_bytes);
    memory->used = view.used_bytes;
    memory->reserved = 0;
    return result;
}

static void write_uuid(char *text, size_t length, const char *prefix, Word uuid) {
    const unsigned char *bytes = (const unsigned char *)&uuid;
    int written = snprintf(text, length, "%s", prefix);
    for (int index = 0; index < 16; index++) {
        const char *dash = index == 4 || index == 6 || index == 8 || index == 10 ? "-" : "";
        written += snprintf(text + written, length - (size_t)written, "%s%02x", dash, bytes[index]);
    }
}

static bool handle_of(Word uuid, nvmlDevice_t *handle) {
    char text[UUID_BYTES];
    int (*init)(void) = nvml_function("nvmlInit_v2");
    int (*by_uuid)(const char *, nvmlDevice_t *) = nvml_function("nvmlDeviceGetHandleByUUID");
    if (!init || !by_uuid || init() != NVML_SUCCESS) return false;
    write_uuid(text, sizeof text, "GPU-", uuid);
    if (by_uuid(text, handle) == NVML_SUCCESS) return true;
    write_uuid(text, sizeof text, "MIG-", uuid);
    return by_uuid(text, handle) == NVML_SUCCESS;
}

bool nvml_used_bytes(Word uuid, uint64_t *bytes) {
    nvmlMemory_t memory;
    nvmlDevice_t handle;
    int (*get)(nvmlDevice_t, nvmlMemory_t *) = nvml_function("nvmlDeviceGetMemoryInfo");
    if (!get || !handle_of(uuid, &handle) || get(handle, &memory) != NVML_SUCCESS) return false;
    *bytes = memory.used;
    return true;
}
