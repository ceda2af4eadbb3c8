/* Instead of the limiter's own lookup, in programs that it is linked into: the dynamic linker's. */
#include <dlfcn.h>

#include "../../../native/limiter/interpose.h"

void *libc_dlsym(void *handle, const char *name) {
    return dlsym(handle, name);
}
