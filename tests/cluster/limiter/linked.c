/* A library that is linked with the driver, as most programs are: its calls are bound when it is loaded. */
#include "../fakes/fake_cuda.h"

__attribute__((visibility("default"))) int linked_allocate(size_t size);

int linked_allocate(size_t size) {
    CUdeviceptr pointer;
    return cuMemAlloc_v2(&pointer, size);
}
