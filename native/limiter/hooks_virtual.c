/* Virtual memory management: an allocation lives while it has a holder (create, import, retain) or a mapping, and is
 * charged for as long. The record of a handle counts both in its `context`; the record of a mapping names its handle.
 *
 * One lock over the driver's call and the bookkeeping wherever a value that was just given back may be given out
 * again. */
#include "charge.h"

enum { SMALLEST_MAPPING_BYTES = 65536 };

static void lock(void) {
    pthread_mutex_lock(&limiter.virtual_lock);
}

static void unlock(void) {
    pthread_mutex_unlock(&limiter.virtual_lock);
}

static void put_handle(CUmemGenericAllocationHandle handle, int device, uint64_t units) {
    records_put(&limiter.records, KIND_HANDLE, handle, (Record){device, units, 1});
}

/* True if the handle is one that we count. */
static bool add_holder(CUmemGenericAllocationHandle handle) {
    Record record;
    Cell *cell = records_take(&limiter.records, KIND_HANDLE, handle, &record);
    if (!cell) return false;
    record.context++;
    records_put_back(cell, KIND_HANDLE, handle, record);
    return true;
}

static void drop_holder(CUmemGenericAllocationHandle handle) {
    Record record;
    Cell *cell = records_take(&limiter.records, KIND_HANDLE, handle, &record);
    if (!cell) return;
    if (--record.context > 0) {
        records_put_back(cell, KIND_HANDLE, handle, record);
        return;
    }
    records_drop(cell);
    charge_release(record.device, record.units);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    Charge charge = {.device = NO_LIMIT};
    CUdevice ordinal = prop ? location_device(prop->location) : -1;
    CUresult result = limiter_state() != STATE_UNLIMITED && ordinal >= 0 ? charge_device(&charge, ordinal, size) : 0;
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuMemCreate, handle, size, prop, flags);
    if (result != CUDA_SUCCESS) {
        charge_release(charge.device, charge.units);
    } else if (charge.device >= 0) {
        lock();
        put_handle(*handle, charge.device, charge.units);
        unlock();
    }
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuMemRelease, handle);
    lock();
    CUresult result = DRIVER(cuMemRelease, handle);
    if (result == CUDA_SUCCESS) drop_holder(handle);
    unlock();
    return result;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuMemRetainAllocationHandle, handle, address);
    lock();
    CUresult result = DRIVER(cuMemRetainAllocationHandle, handle, address);
    if (result == CUDA_SUCCESS) add_holder(*handle);
    unlock();
    return result;
}

/* Its size is not told here: nothing is charged until it is mapped. */
static void note_import(CUmemGenericAllocationHandle handle) {
    CUmemAllocationProp prop;
    if (DRIVER(cuMemGetAllocationPropertiesFromHandle, &prop, handle) != CUDA_SUCCESS) return;
    CUdevice ordinal = location_device(prop.location);
    int device = ordinal >= 0 ? limiter_device(ordinal) : NO_LIMIT;
    if (device >= 0) put_handle(handle, device, 0);
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, int type) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuMemImportFromShareableHandle, handle, os_handle, type);
    lock();
    CUresult result = DRIVER(cuMemImportFromShareableHandle, handle, os_handle, type);
    if (result == CUDA_SUCCESS && !add_holder(*handle)) note_import(*handle);
    unlock();
    return result;
}

/* An allocation of ours is charged in full; an imported one up to the end of what was ever mapped of it. */
static CUresult charge_extent(Record *record, uint64_t end_units) {
    Charge charge = {.device = record->device, .units = record->units};
    if (end_units > record->units && !charge_try(&charge, end_units)) return CUDA_ERROR_OUT_OF_MEMORY;
    record->units = charge.units;
    return CUDA_SUCCESS;
}

static CUresult map_counted(Cell *cell, Record record, CUdeviceptr pointer, size_t size, size_t offset,
                            CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CUresult result = charge_extent(&record, units_of(offset > SIZE_MAX - size ? SIZE_MAX : offset + size));
    if (result == CUDA_SUCCESS) result = DRIVER(cuMemMap, pointer, size, offset, handle, flags);
    if (result == CUDA_SUCCESS) {
        record.context++;
        records_put(&limiter.records, KIND_MAPPING, pointer, (Record){record.device, units_of(size), handle});
    }
    records_put_back(cell, KIND_HANDLE, handle, record);
    return result;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    Record record;
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuMemMap, pointer, size, offset, handle, flags);
    lock();
    Cell *cell = records_take(&limiter.records, KIND_HANDLE, handle, &record);
    CUresult result = cell ? map_counted(cell, record, pointer, size, offset, handle, flags)
                           : DRIVER(cuMemMap, pointer, size, offset, handle, flags);
    unlock();
    return result;
}

/* One call may undo several mappings that lie side by side. */
static void forget_mappings(CUdeviceptr pointer, size_t size) {
    CUdeviceptr end = pointer + size;
    while (pointer < end) {
        Record mapping;
        Cell *cell = records_take(&limiter.records, KIND_MAPPING, pointer, &mapping);
        if (!cell) {
            pointer += SMALLEST_MAPPING_BYTES; /* host memory, or a multicast object */
            continue;
        }
        records_drop(cell);
        drop_holder(mapping.context);
        pointer += mapping.units * UNIT_BYTES;
    }
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuMemUnmap, pointer, size);
    lock();
    CUresult result = DRIVER(cuMemUnmap, pointer, size);
    if (result == CUDA_SUCCESS) forget_mappings(pointer, size);
    unlock();
    return result;
}
