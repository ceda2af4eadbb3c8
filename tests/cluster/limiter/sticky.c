/* Preloaded: what the kernel does in a folder like /tmp (fs.protected_regular): a file that is somebody else's is not
 * opened by who says that it may be created. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    unsigned mode = va_arg(more, unsigned);
    va_end(more);
    if ((flags & O_CREAT) && strstr(path, "ledger") && access(path, F_OK) == 0) {
        errno = EACCES;
        return -1;
    }
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
