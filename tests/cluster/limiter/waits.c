#include "waits.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_NS = 5000000 }; /* how often a waiting thread looks who has the lock now */

static _Thread_local uint64_t for_owners_ns;

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The second number of a thread's schedstat. */
static uint64_t read_delay(int file) {
    char text[96];
    ssize_t length = file < 0 ? 0 : pread(file, text, sizeof text - 1, 0);
    if (length <= 0) return 0;
    text[length] = 0;
    char *delay = strchr(text, ' ');
    return delay ? strtoull(delay, NULL, 10) : 0;
}

uint64_t waited_for_core_ns(void) {
    static _Thread_local int file = -2;
    if (file == -2) file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    return read_delay(file);
}

uint64_t waited_for_owners_ns(void) { return for_owners_ns; }

/* A sanitizer watches locks through the same symbol. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

static uint64_t delay_of(int thread) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    uint64_t delay = read_delay(file);
    if (file >= 0) close(file);
    return delay;
}

static bool is_of_limiter(const pthread_mutex_t *mutex) {
    Dl_info info;
    return dladdr(mutex, &info) && strstr(info.dli_fname, "libkvarto-limiter");
}

/* Wait while `owner` has the lock. 0 once it is ours, ETIMEDOUT when somebody else has it. */
static int wait_for_owner(pthread_mutex_t *mutex, int owner) {
    uint64_t start = now_ns(), before = delay_of(owner);
    int result = ETIMEDOUT;
    while (result == ETIMEDOUT && __atomic_load_n(&mutex->__data.__owner, __ATOMIC_RELAXED) == owner) {
        uint64_t end = now_ns() + LOOK_NS;
        struct timespec until = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};
        result = pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
    }
    uint64_t spent = now_ns() - start, delay = delay_of(owner) - before;
    for_owners_ns += delay < spent ? delay : spent;
    return result;
}

/* Takes the place of the C library's in this program and in the libraries that it loads. */
int pthread_mutex_lock(pthread_mutex_t *mutex) {
    static int (*real)(pthread_mutex_t *);
    if (!real) real = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    int result = pthread_mutex_trylock(mutex);
    if (result != EBUSY) return result;
    if (!is_of_limiter(mutex)) return real(mutex);
    do {
        result = wait_for_owner(mutex, __atomic_load_n(&mutex->__data.__owner, __ATOMIC_RELAXED));
    } while (result == ETIMEDOUT);
    return result;
}

#endif
