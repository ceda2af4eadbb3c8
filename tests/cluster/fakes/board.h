/* The scripted boards behind the fake driver and the fake NVML: what the cards really hold, whatever anybody counts.
 *
 * One file per test, named by KVARTO_FAKE_BOARD, mapped by every process and by `board.py`, which writes the script
 * (sizes, faults, what to watch) and reads the truth. Without the variable there is one card of 80 GiB that nobody
 * counts. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum { BOARD_DEVICES = 4, BOARD_PROCESSES = 2048 };

typedef struct {
    unsigned char uuid[16];
    uint64_t capacity_bytes;
    uint64_t context_bytes;     /* what one context takes */
    uint64_t growth_bytes;      /* what a pool grows by at least */
    uint64_t others_bytes;      /* taken by neighbours outside the container */
    uint64_t watch_bytes;       /* more than this is an overshoot; 0: not watched */
    uint64_t used_bytes;        /* the truth, without the neighbours */
    uint64_t peak_bytes, num_overshoots, worst_overshoot_bytes;
} BoardDevice;

typedef struct {
    uint64_t pid, start_ticks, bytes[BOARD_DEVICES];
} BoardProcess;

typedef struct {
    uint64_t is_ready, num_devices, driver_version;
    uint64_t fail_every;        /* this many allocations, and one fails; 0: none */
    uint64_t other_addresses;   /* cuGetProcAddress gives out addresses that are not those of the symbols */
    uint64_t num_allocations, num_calls;
    BoardDevice devices[BOARD_DEVICES];
    BoardProcess processes[BOARD_PROCESSES];
    pthread_mutex_t mutex;
} Board;

Board *board(void);

/* Take device memory, or not: the card is full, or the script says so. */
bool board_take(int device, uint64_t bytes);
void board_give(int device, uint64_t bytes);

/* The card frees what this dead process held. It would find out by itself, more slowly, when it is full. */
__attribute__((visibility("default"))) void fake_forget(uint64_t pid);

/* Lock one of the fake's own mutexes, counting the time that this takes. */
int fake_lock(pthread_mutex_t *mutex);

/* How long a thread of this process, any of them, has waited for the fake's locks: what a measurement of the limiter must
 * leave out, since threads wait for each other in there. */
__attribute__((visibility("default"))) uint64_t fake_waited_ns(void);
