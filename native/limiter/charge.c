#include "charge.h"

#include "pools.h"
#include "slots.h"

static bool reserve(int device, uint64_t units) {
    return ledger_reserve(limiter.ledger, device, limiter.slot, units);
}

/* From the cheap to the dear: bytes of the dead, what our pools gave back by themselves, what they can give back. */
static bool make_room(int device, uint64_t units) {
    uint64_t limit_plus_one = step_load(&limiter.ledger->devices[device].limit_plus_one);
    if (units * UNIT_BYTES > limit_plus_one - 1) return false;
    if (slots_sweep(limiter.ledger, device, limiter.slot) && reserve(device, units)) return true;
    for (PoolEffort effort = POOLS_SETTLE; effort <= POOLS_SYNCHRONISE; effort++) {
        if (pools_give_back(device, effort) && reserve(device, units)) return true;
    }
    return false;
}

bool charge_reserve(int device, uint64_t units) {
    if (units == 0 || reserve(device, units) || make_room(device, units)) return true;
    ledger_count_refusal(limiter.ledger, device);
    return false;
}

CUresult charge_device(Charge *charge, CUdevice ordinal, size_t size_bytes) {
    *charge = (Charge){.device = NO_LIMIT};
    State state = limiter_state();
    if (state != STATE_LIMITED) return state == STATE_REFUSED ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    int device = limiter_device(ordinal);
    if (device < 0) return device == NO_LIMIT ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
    uint64_t units = units_of(size_bytes);
    if (!charge_reserve(device, units)) return CUDA_ERROR_OUT_OF_MEMORY;
    charge->device = device;
    charge->units = units;
    return CUDA_SUCCESS;
}

CUresult charge_here(Charge *charge, size_t size_bytes) {
    CUdevice ordinal;
    CUcontext context = NULL;
    *charge = (Charge){.device = NO_LIMIT};
    State state = limiter_state();
    if (state == STATE_UNLIMITED) return CUDA_SUCCESS;
    if (DRIVER(cuCtxGetCurrent, &context) != CUDA_SUCCESS || !context) return CUDA_SUCCESS;
    if (DRIVER(cuCtxGetDevice, &ordinal) != CUDA_SUCCESS) return CUDA_SUCCESS;
    CUresult result = charge_device(charge, ordinal, size_bytes);
    charge->context = context;
    return result;
}

void charge_release(int device, uint64_t units) {
    if (device >= 0 && units) ledger_release(limiter.ledger, device, limiter.slot, units);
}

/* Without host memory for the record, the bytes stay charged to this process until it ends. */
CUresult charge_settle(Charge *charge, CUresult result, Kind kind, const void *key) {
    if (result != CUDA_SUCCESS) charge_release(charge->device, charge->units);
    else if (charge->device >= 0) {
        Record record = {charge->device, charge->units, (uint64_t)(uintptr_t)charge->context};
        records_put(&limiter.records, kind, *(const uint64_t *)key, record);
    }
    return result;
}

bool charge_try(Charge *charge, uint64_t units) {
    if (units > charge->units && !charge_reserve(charge->device, units - charge->units)) return false;
    if (units < charge->units) charge_release(charge->device, charge->units - units);
    charge->units = units;
    return true;
}

bool charge_correct(Charge *charge, uint64_t units) {
    bool fits = true;
    if (charge->device < 0) return true;
    if (units < charge->units) charge_release(charge->device, charge->units - units);
    if (units > charge->units) {
        fits = reserve(charge->device, units - charge->units);
        if (!fits) ledger_charge(limiter.ledger, charge->device, limiter.slot, units - charge->units);
    }
    charge->units = units;
    return fits;
}

Freeing free_begin(Kind kind, uint64_t key) {
    Freeing freeing = {.kind = kind, .key = key};
    if (limiter_state() == STATE_LIMITED) freeing.cell = records_take(&limiter.records, kind, key, &freeing.record);
    return freeing;
}

CUresult free_end(Freeing freeing, CUresult result) {
    if (!freeing.cell) return result;
    if (result != CUDA_SUCCESS) {
        records_put_back(freeing.cell, freeing.kind, freeing.key, freeing.record);
        return result;
    }
    records_drop(freeing.cell);
    charge_release(freeing.record.device, freeing.record.units);
    return result;
}
