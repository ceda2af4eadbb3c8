/* A process lives while it holds the lock on its slot's byte of the file. The lock belongs to the open file
 * description (F_OFD_SETLK), and the mapping keeps that description open: the descriptor itself is closed at once, so
 * that a program which closes everything that it did not open loses nothing. The kernel lets go at exit, at SIGKILL and
 * at exec, in every pid namespace. A child does not inherit the mapping (MADV_DONTFORK), so it does not keep its parent
 * alive.
 *
 * The driver's own files close in no particular order with that: a process that lets go of its lock may still hold its
 * device memory for a moment. Where we can see it in /proc, we wait for the end of that moment.
 */
#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STAT_BYTES = 1024 };
#define PF_EXITING 0x4u

typedef struct {
    uint64_t start_ticks;
    unsigned flags;
    long num_threads;
    char state;
} ProcessStat;

static struct {
    char path[4096];
    dev_t device;
    ino_t inode;
    uint64_t pid_namespace;
} joined;

static uint64_t own_pid_namespace(void) {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

/* Fields of /proc/PID/stat, counted behind the name, which may hold anything; false if there is no such process. */
static bool read_process(uint64_t pid, ProcessStat *process) {
    char path[64], text[STAT_BYTES];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    if (length <= 0) return false;
    text[length] = '\0';
    const char *behind_name = strrchr(text, ')');
    unsigned long long start;
    return behind_name && sscanf(behind_name + 1,
                                 " %c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
                                 &process->state, &process->flags, &process->num_threads, &start) == 4 &&
           (process->start_ticks = start, true);
}

static bool lock_slot(int file, uint32_t slot) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

static bool is_locked(int file, uint32_t slot) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    return fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

/* The lock is free. Is the process that held it still on its way out, its device memory perhaps not yet returned? One
 * that neither exits nor is gone has replaced its program (exec): what the old one held is gone. */
static bool is_leaving(const LedgerSlot *slot) {
    ProcessStat process;
    uint64_t generation = step_load(&slot->generation);
    uint64_t pid = step_load(&slot->pid), start = step_load(&slot->start_ticks);
    uint64_t pid_namespace = step_load(&slot->pid_namespace);
    if (generation % 2 || pid_namespace == 0 || pid_namespace != joined.pid_namespace) return false;
    if (!read_process(pid, &process) || process.start_ticks != start) return false;
    if (process.state == 'Z' || process.state == 'X') return process.num_threads > 1;
    return process.flags & PF_EXITING;
}

static bool is_dead(const LedgerSlot *slot, uint32_t index, void *context) {
    return !is_locked(*(int *)context, index) && !is_leaving(slot);
}

bool slots_sweep(Ledger *ledger, int device, uint32_t own) {
    struct stat status;
    int file = open(joined.path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) return false;
    bool is_ours = fstat(file, &status) == 0 && status.st_dev == joined.device && status.st_ino == joined.inode;
    bool any = is_ours && ledger_sweep(ledger, device, own, is_dead, &file);
    close(file);
    return any;
}

/* Slots are tried from one that the pid chooses, so that many processes starting at once rarely meet. */
static bool take_any_slot(Ledger *ledger, int file, uint32_t *taken) {
    uint64_t pid = (uint64_t)getpid();
    char name[LEDGER_NAME_BYTES] = "";
    ProcessStat process = {0};
    read_process(pid, &process);
    prctl(PR_GET_NAME, name);
    for (uint32_t attempt = 0; attempt < LEDGER_SLOTS; attempt++) {
        uint32_t slot = (uint32_t)((pid + attempt) % LEDGER_SLOTS);
        if (is_locked(file, slot) || is_leaving(&ledger->slots[slot]) || !lock_slot(file, slot)) continue;
        ledger_take_slot(ledger, slot, pid, joined.pid_namespace, process.start_ticks, name);
        *taken = slot;
        return true;
    }
    return false;
}

/* With all of its blocks: a page that the file system has no room for would be a SIGBUS later. */
static bool make_whole(int file, const struct stat *status) {
    if (status->st_size >= (off_t)sizeof(Ledger) && status->st_blocks * 512 >= (off_t)sizeof(Ledger)) return true;
    if (fallocate(file, 0, 0, sizeof(Ledger)) == 0) return true;
    return errno == EOPNOTSUPP && (status->st_size >= (off_t)sizeof(Ledger) || ftruncate(file, sizeof(Ledger)) == 0);
}

static Ledger *map_ledger(int file, char *error, size_t error_bytes) {
    struct stat status;
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || !make_whole(file, &status)) {
        snprintf(error, error_bytes, "`%s` is not a file of %zu bytes: %s", joined.path, sizeof(Ledger),
                 strerror(errno));
        return NULL;
    }
    Ledger *ledger = mmap(NULL, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (ledger == MAP_FAILED) {
        snprintf(error, error_bytes, "`%s` cannot be mapped: %s", joined.path, strerror(errno));
        return NULL;
    }
    joined.device = status.st_dev;
    joined.inode = status.st_ino;
    joined.pid_namespace = own_pid_namespace();
    return ledger;
}

static Ledger *join(int file, uint32_t *slot, char *error, size_t error_bytes) {
    Ledger *ledger = map_ledger(file, error, error_bytes);
    if (!ledger) return NULL;
    bool is_ours = ledger_open(ledger);
    if (is_ours && madvise(ledger, sizeof(Ledger), MADV_DONTFORK) == 0 && take_any_slot(ledger, file, slot)) {
        return ledger;
    }
    if (!is_ours) snprintf(error, error_bytes, "`%s` was written by another version", joined.path);
    else snprintf(error, error_bytes, "all %d places of `%s` are taken", LEDGER_SLOTS, joined.path);
    munmap(ledger, sizeof(Ledger));
    return NULL;
}

/* As one that is there, first: in a folder like /tmp the kernel refuses O_CREAT on a file of another user. */
static int open_ledger(const char *path) {
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    int file = open(path, flags);
    if (file >= 0 || errno != ENOENT) return file;
    file = open(path, flags | O_CREAT, 0666);
    if (file < 0 && errno == EACCES && access(path, F_OK) == 0) file = open(path, flags); /* another user was faster */
    return file;
}

Ledger *slots_join(const char *path, uint32_t *slot, char *error, size_t error_bytes) {
    snprintf(joined.path, sizeof joined.path, "%s", path);
    int file = open_ledger(path);
    if (file < 0) {
        snprintf(error, error_bytes, "`%s` cannot be opened for writing: %s; mount a writable folder there, or name "
                 "another file in KVARTO_GPU_MEMORY_LEDGER", path, strerror(errno));
        return NULL;
    }
    fchmod(file, 0666); /* every user of the container counts, whatever the umask was; the maker's call is enough */
    Ledger *ledger = join(file, slot, error, error_bytes);
    close(file);
    return ledger;
}
