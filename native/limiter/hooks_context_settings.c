/* Memory that a context takes later, by a setting of its own. */
#include "contexts.h"

/* Bytes on the device for a value of the setting; the stack is for every thread that can be resident at once. */
static size_t setting_bytes(int setting, size_t value, CUdevice device) {
    int num_processors = 0, num_threads = 0;
    size_t bytes;
    if (setting != CU_LIMIT_STACK_SIZE) return value;
    DRIVER(cuDeviceGetAttribute, &num_processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    DRIVER(cuDeviceGetAttribute, &num_threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device);
    return __builtin_mul_overflow(value, (size_t)num_processors * (size_t)num_threads, &bytes) ? SIZE_MAX : bytes;
}

/* The value that the context came with is part of what a context takes; only what is above it is charged. */
static CUresult set_setting(Context *context, int setting, size_t value) {
    size_t *first = &context->first_settings[setting];
    if (*first == 0) DRIVER(cuCtxGetLimit, first, setting);
    size_t more = value > *first ? setting_bytes(setting, value - *first, context->ordinal) : 0;
    Charge charge = {.device = context->charge.device, .units = context->setting_units[setting]};
    uint64_t before = charge.units;
    if (!charge_try(&charge, units_of(more))) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuCtxSetLimit, setting, value);
    if (result != CUDA_SUCCESS) charge_correct(&charge, before);
    context->setting_units[setting] = charge.units;
    return result;
}

CUresult cuCtxSetLimit(int setting, size_t value) {
    CUcontext handle = NULL;
    bool is_counted = setting >= 0 && setting < NUM_SETTINGS;
    if (limiter_state() != STATE_LIMITED || !is_counted) return DRIVER(cuCtxSetLimit, setting, value);
    DRIVER(cuCtxGetCurrent, &handle);
    contexts_lock();
    Context *context = find_context(handle);
    CUresult result = context ? set_setting(context, setting, value) : DRIVER(cuCtxSetLimit, setting, value);
    contexts_unlock();
    return result;
}
