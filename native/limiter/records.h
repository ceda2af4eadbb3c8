/* What this process holds, by pointer or handle: where a freed thing was charged, and how much. No lock.
 *
 * Segments of open addressing, each four times the one before, never moved or given back. A thing sits within
 * RECORD_WINDOW cells of its hash; a cell that was once used is never empty again, so a search may stop at an empty
 * one.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { KIND_POINTER = 1, KIND_ARRAY, KIND_MIPMAP, KIND_EXTERNAL, KIND_HANDLE, KIND_MAPPING, KIND_GREEN } Kind;

typedef struct {
    int device; /* of the ledger; NO_LIMIT where nothing is charged */
    uint64_t units;
    uint64_t context; /* the CUDA context it dies with, or another number that belongs to its kind */
} Record;

enum { RECORD_SEGMENTS = 10, RECORD_WINDOW = 32 };

typedef struct Cell Cell;
typedef struct {
    Cell *segments[RECORD_SEGMENTS];
} Records;

/* False when the host has no memory left for it. */
bool records_put(Records *records, Kind kind, uint64_t key, Record record);

/* Take a record in hand: nobody else finds it until it is dropped or put back. NULL if there is none. */
Cell *records_take(Records *records, Kind kind, uint64_t key, Record *record);
void records_drop(Cell *cell);
void records_put_back(Cell *cell, Kind kind, uint64_t key, Record record);

/* Take all that die with `context` in hand, and then drop them, or put them back. `release` is told of each that is
 * dropped. */
typedef void Release(int device, uint64_t units);
void records_take_context(Records *records, uint64_t context);
void records_end_context(Records *records, uint64_t context, bool is_gone, Release *release);
