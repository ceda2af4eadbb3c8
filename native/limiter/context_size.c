#include "contexts.h"
#include "nvml_hooks.h"

#define EXPECTED_CONTEXT_BYTES (UINT64_C(512) << 20)
#define SMALLEST_CONTEXT_BYTES (UINT64_C(32) << 20)
#define LARGEST_CONTEXT_BYTES (UINT64_C(2) << 30)

uint64_t context_expected_bytes(int device) {
    uint64_t bytes;
    if (named_context_size(&bytes)) return bytes;
    bytes = device >= 0 ? step_load(&limiter.ledger->devices[device].context_bytes) : 0;
    return bytes ? bytes : EXPECTED_CONTEXT_BYTES;
}

static void lower(uint64_t *cell, uint64_t bytes) {
    for (;;) {
        uint64_t known = step_load(cell);
        if ((known && known <= bytes) || step_swap(cell, known, bytes)) return;
    }
}

bool context_measure(int device, uint64_t *used) {
    uint64_t named;
    return device >= 0 && !named_context_size(&named) && nvml_used_bytes(limiter.ledger->devices[device].uuid, used);
}

void context_correct(Charge *charge, uint64_t before) {
    uint64_t after;
    if (!context_measure(charge->device, &after)) return;
    if (after < before + SMALLEST_CONTEXT_BYTES || after > before + LARGEST_CONTEXT_BYTES) return;
    uint64_t *known = &limiter.ledger->devices[charge->device].context_bytes;
    lower(known, after - before);
    charge_correct(charge, units_of(step_load(known)));
}
