#include "board.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static Board uncounted = {
    .is_ready = 2,
    .num_devices = 1,
    .driver_version = 13050,
    .devices = {{.uuid = {1}, .capacity_bytes = UINT64_C(80) << 30, .growth_bytes = 32 << 20}},
};

static Board *shared;
static __thread BoardProcess *own;
static __thread pid_t own_pid;

static void make_ready(Board *mapped) {
    pthread_mutexattr_t attributes;
    uint64_t fresh = 0;
    if (__atomic_compare_exchange_n(&mapped->is_ready, &fresh, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&mapped->mutex, &attributes);
        __atomic_store_n(&mapped->is_ready, 2, __ATOMIC_SEQ_CST);
    }
    while (__atomic_load_n(&mapped->is_ready, __ATOMIC_SEQ_CST) != 2) sched_yield();
}

Board *board(void) {
    Board *known = __atomic_load_n(&shared, __ATOMIC_ACQUIRE);
    if (known) return known;
    const char *path = getenv("KVARTO_FAKE_BOARD");
    if (!path) return &uncounted;
    int file = open(path, O_RDWR | O_CLOEXEC);
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) abort();
    close(file);
    make_ready(mapped);
    __atomic_store_n(&shared, mapped, __ATOMIC_RELEASE);
    return mapped;
}

/* State and start of a process; a zombie whose threads are all gone is gone: its memory is free. */
static bool is_alive(uint64_t pid, uint64_t *start_ticks) {
    char path[64], text[1024], state;
    long num_threads;
    unsigned long long start;
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    if (length <= 0) return false;
    text[length] = '\0';
    const char *rest = strrchr(text, ')');
    if (!rest || sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
                        &state, &num_threads, &start) != 3) {
        return false;
    }
    *start_ticks = start;
    return !((state == 'Z' || state == 'X') && num_threads <= 1);
}

static uint64_t sum_of(const Board *mapped, int device) {
    uint64_t sum = 0;
    for (int index = 0; index < BOARD_PROCESSES; index++) sum += mapped->processes[index].bytes[device];
    return sum;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* When threads of this process wait for the fake's locks: as long as one does, others may wait for that thread, in
 * what is under test. */
static struct {
    pthread_mutex_t mutex;
    uint64_t total_ns, since_ns;
    int num_waiting;
} waits = {PTHREAD_MUTEX_INITIALIZER, 0, 0, 0};

/* A child has one thread, and may have been made while another held the lock. */
static void forget_waits(void) {
    pthread_mutex_init(&waits.mutex, NULL);
    waits.num_waiting = 0;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_waits); }

static uint64_t waited_until(uint64_t now) {
    return waits.total_ns + (waits.num_waiting ? now - waits.since_ns : 0);
}

uint64_t fake_waited_ns(void) {
    pthread_mutex_lock(&waits.mutex);
    uint64_t waited = waited_until(now_ns());
    pthread_mutex_unlock(&waits.mutex);
    return waited;
}

static void count_waiting(int change) {
    pthread_mutex_lock(&waits.mutex);
    uint64_t now = now_ns();
    waits.total_ns = waited_until(now);
    waits.since_ns = now;
    waits.num_waiting += change;
    pthread_mutex_unlock(&waits.mutex);
}

int fake_lock(pthread_mutex_t *mutex) {
    int result = pthread_mutex_trylock(mutex);
    if (result != EBUSY) return result;
    count_waiting(1);
    result = pthread_mutex_lock(mutex);
    count_waiting(-1);
    return result;
}

static void lock(Board *mapped) {
    if (fake_lock(&mapped->mutex) != EOWNERDEAD) return;
    for (int device = 0; device < BOARD_DEVICES; device++) mapped->devices[device].used_bytes = sum_of(mapped, device);
    pthread_mutex_consistent(&mapped->mutex);
}

static void forget_dead(Board *mapped) {
    for (int index = 0; index < BOARD_PROCESSES; index++) {
        BoardProcess *process = &mapped->processes[index];
        uint64_t start;
        if (process->pid == 0 || (is_alive(process->pid, &start) && start == process->start_ticks)) continue;
        memset(process, 0, sizeof *process);
    }
    for (int device = 0; device < BOARD_DEVICES; device++) mapped->devices[device].used_bytes = sum_of(mapped, device);
}

void fake_forget(uint64_t pid) {
    Board *mapped = board();
    lock(mapped);
    for (int index = 0; index < BOARD_PROCESSES; index++) {
        BoardProcess *process = &mapped->processes[index];
        if (process->pid != pid) continue;
        for (int device = 0; device < BOARD_DEVICES; device++)
            mapped->devices[device].used_bytes -= process->bytes[device];
        memset(process, 0, sizeof *process);
    }
    pthread_mutex_unlock(&mapped->mutex);
}

static BoardProcess *own_process(Board *mapped) {
    if (own && own_pid == getpid()) return own;
    own_pid = getpid();
    for (int attempt = 0; attempt < 2; attempt++) {
        BoardProcess *empty = NULL;
        for (int index = BOARD_PROCESSES - 1; index >= 0; index--) {
            if (mapped->processes[index].pid == (uint64_t)own_pid) return own = &mapped->processes[index];
            if (mapped->processes[index].pid == 0) empty = &mapped->processes[index];
        }
        if (empty) {
            is_alive((uint64_t)own_pid, &empty->start_ticks);
            empty->pid = (uint64_t)own_pid;
            return own = empty;
        }
        forget_dead(mapped);
    }
    abort();
}

static void watch(Board *mapped, BoardDevice *device) {
    if (device->watch_bytes && device->used_bytes > device->watch_bytes) forget_dead(mapped);
    if (device->watch_bytes && device->used_bytes > device->watch_bytes) {
        uint64_t overshoot = device->used_bytes - device->watch_bytes;
        device->num_overshoots++;
        if (overshoot > device->worst_overshoot_bytes) device->worst_overshoot_bytes = overshoot;
    }
    if (device->used_bytes > device->peak_bytes) device->peak_bytes = device->used_bytes;
}

static bool has_room(const BoardDevice *device, uint64_t bytes) {
    return device->used_bytes + device->others_bytes <= device->capacity_bytes &&
           bytes <= device->capacity_bytes - device->used_bytes - device->others_bytes;
}

bool board_take(int index, uint64_t bytes) {
    Board *mapped = board();
    if (mapped == &uncounted) return true;
    BoardDevice *device = &mapped->devices[index];
    lock(mapped);
    mapped->num_allocations++;
    bool is_fault = mapped->fail_every && mapped->num_allocations % mapped->fail_every == 0;
    if (!is_fault && !has_room(device, bytes)) forget_dead(mapped);
    bool is_taken = !is_fault && has_room(device, bytes);
    if (is_taken) {
        own_process(mapped)->bytes[index] += bytes;
        device->used_bytes += bytes;
        watch(mapped, device);
    }
    pthread_mutex_unlock(&mapped->mutex);
    return is_taken;
}

void board_give(int index, uint64_t bytes) {
    Board *mapped = board();
    if (mapped == &uncounted) return;
    lock(mapped);
    own_process(mapped)->bytes[index] -= bytes;
    mapped->devices[index].used_bytes -= bytes;
    pthread_mutex_unlock(&mapped->mutex);
}
