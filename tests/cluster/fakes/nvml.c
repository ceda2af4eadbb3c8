/* A fake NVML over the same boards: handles, UUIDs, memory in both versions. */
#include <stdio.h>
#include <string.h>

#include "board.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6 };

typedef struct {
    unsigned long long total, free, used;
} MemoryV1;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

#pragma GCC visibility push(default)
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, BoardDevice **device);
int nvmlDeviceGetHandleByUUID(const char *uuid, BoardDevice **device);
int nvmlDeviceGetUUID(BoardDevice *device, char *text, unsigned length);
int nvmlDeviceGetMemoryInfo(BoardDevice *device, MemoryV1 *memory);
int nvmlDeviceGetMemoryInfo_v2(BoardDevice *device, MemoryV2 *memory);
#pragma GCC visibility pop

int nvmlInit_v2(void) {
    board();
    return SUCCESS;
}

int nvmlShutdown(void) {
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)board()->num_devices;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, BoardDevice **device) {
    *device = &board()->devices[index % BOARD_DEVICES];
    return index < board()->num_devices ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetUUID(BoardDevice *device, char *text, unsigned length) {
    int written = snprintf(text, length, "GPU");
    for (int index = 0; index < 16; index++) {
        const char *dash = index == 0 || index == 4 || index == 6 || index == 8 || index == 10 ? "-" : "";
        written += snprintf(text + written, length - (unsigned)written, "%s%02x", dash, device->uuid[index]);
    }
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, BoardDevice **device) {
    char text[96];
    for (uint64_t index = 0; index < board()->num_devices; index++) {
        *device = &board()->devices[index];
        nvmlDeviceGetUUID(*device, text, sizeof text);
        if (strcmp(text, uuid) == 0) return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(BoardDevice *device, MemoryV1 *memory) {
    memory->total = device->capacity_bytes;
    memory->used = device->used_bytes + device->others_bytes;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(BoardDevice *device, MemoryV2 *memory) {
    if (memory->version != (sizeof *memory | 2u << 24)) return INVALID_ARGUMENT;
    memory->total = device->capacity_bytes;
    memory->reserved = UINT64_C(400) << 20;
    memory->used = device->used_bytes + device->others_bytes;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
