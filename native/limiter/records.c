#include "records.h"

#include <sys/mman.h>

struct Cell {
    uint64_t key; /* EMPTY, DROPPED, IN_HAND, or kind and key; with DYING set while its context is being destroyed */
    uint64_t charge;
    uint64_t context;
    uint64_t reserved;
};

#define EMPTY UINT64_C(0)
#define DROPPED UINT64_C(1)
#define IN_HAND UINT64_C(2)
#define DYING (UINT64_C(1) << 59)

static uint64_t key_of(Kind kind, uint64_t key) {
    return (uint64_t)kind << 60 | (key & (DYING - 1));
}

static size_t segment_cells(int segment) {
    return (size_t)4096 << (2 * segment);
}

static size_t start_of(uint64_t key, int segment) {
    return (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 20) & (segment_cells(segment) - 1);
}

static Cell *cell_at(Cell *cells, int segment, size_t index) {
    return &cells[index & (segment_cells(segment) - 1)];
}

static Cell *load_segment(const Records *records, int segment) {
    return __atomic_load_n(&records->segments[segment], __ATOMIC_ACQUIRE);
}

static int newest_segment(const Records *records) {
    int segment = RECORD_SEGMENTS - 1;
    while (segment >= 0 && !load_segment(records, segment)) segment--;
    return segment;
}

static bool swap_key(Cell *cell, uint64_t from, uint64_t to) {
    return __atomic_compare_exchange_n(&cell->key, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static Record read_record(const Cell *cell) {
    return (Record){.device = (int)(cell->charge >> 40) - 1,
                    .units = cell->charge & ((UINT64_C(1) << 40) - 1),
                    .context = cell->context};
}

static void write_record(Cell *cell, uint64_t key, Record record) {
    cell->charge = (uint64_t)(record.device + 1) << 40 | record.units;
    cell->context = record.context;
    __atomic_store_n(&cell->key, key, __ATOMIC_RELEASE);
}

static bool put_into(Cell *cells, int segment, uint64_t key, Record record) {
    size_t start = start_of(key, segment);
    for (size_t step = 0; step < RECORD_WINDOW; step++) {
        Cell *cell = cell_at(cells, segment, start + step);
        uint64_t found = __atomic_load_n(&cell->key, __ATOMIC_RELAXED);
        if (found > DROPPED || !swap_key(cell, found, IN_HAND)) continue;
        write_record(cell, key, record);
        return true;
    }
    return false;
}

/* A child must not share these pages by copy: the parent would pay for it at every write, and the child has no use. */
static bool add_segment(Records *records, int segment) {
    if (segment == RECORD_SEGMENTS) return false;
    size_t size_bytes = segment_cells(segment) * sizeof(Cell);
    Cell *cells = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) return false;
    madvise(cells, size_bytes, MADV_DONTFORK);
    Cell *none = NULL;
    if (!__atomic_compare_exchange_n(&records->segments[segment], &none, cells, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED)) {
        munmap(cells, size_bytes); /* another thread was faster */
    }
    return true;
}

bool records_put(Records *records, Kind kind, uint64_t key, Record record) {
    for (;;) {
        int newest = newest_segment(records);
        for (int segment = newest; segment >= 0; segment--) {
            if (put_into(load_segment(records, segment), segment, key_of(kind, key), record)) return true;
        }
        if (!add_segment(records, newest + 1)) return false;
    }
}

Cell *records_take(Records *records, Kind kind, uint64_t raw_key, Record *record) {
    uint64_t key = key_of(kind, raw_key);
    for (int segment = newest_segment(records); segment >= 0; segment--) {
        Cell *cells = load_segment(records, segment);
        size_t start = start_of(key, segment);
        for (size_t step = 0; step < RECORD_WINDOW; step++) {
            Cell *cell = cell_at(cells, segment, start + step);
            uint64_t found = __atomic_load_n(&cell->key, __ATOMIC_RELAXED);
            if (found == EMPTY) break;
            if (found != key || !swap_key(cell, key, IN_HAND)) continue;
            *record = read_record(cell);
            return cell;
        }
    }
    return NULL;
}

void records_drop(Cell *cell) {
    __atomic_store_n(&cell->key, DROPPED, __ATOMIC_RELEASE);
}

void records_put_back(Cell *cell, Kind kind, uint64_t key, Record record) {
    write_record(cell, key_of(kind, key), record);
}

typedef void Visit(Cell *cell, uint64_t key, void *argument);

static void for_each(Records *records, Visit *visit, void *argument) {
    for (int segment = newest_segment(records); segment >= 0; segment--) {
        Cell *cells = load_segment(records, segment);
        for (size_t index = 0; index < segment_cells(segment); index++) {
            uint64_t key = __atomic_load_n(&cells[index].key, __ATOMIC_ACQUIRE);
            if (key > IN_HAND) visit(&cells[index], key, argument);
        }
    }
}

typedef struct {
    uint64_t context;
    bool is_gone;
    Release *release;
} Ending;

static bool dies_with(uint64_t key, const Cell *cell, uint64_t context) {
    Kind kind = (Kind)(key >> 60);
    return kind < KIND_EXTERNAL && cell->context == context;
}

static void mark_dying(Cell *cell, uint64_t key, void *argument) {
    const Ending *ending = argument;
    if (dies_with(key, cell, ending->context)) swap_key(cell, key, key | DYING);
}

static void end_dying(Cell *cell, uint64_t key, void *argument) {
    const Ending *ending = argument;
    if (!(key & DYING) || cell->context != ending->context) return;
    Record record = read_record(cell);
    __atomic_store_n(&cell->key, ending->is_gone ? DROPPED : key & ~DYING, __ATOMIC_RELEASE);
    if (ending->is_gone) ending->release(record.device, record.units);
}

void records_take_context(Records *records, uint64_t context) {
    for_each(records, mark_dying, &(Ending){.context = context});
}

void records_end_context(Records *records, uint64_t context, bool is_gone, Release *release) {
    for_each(records, end_dying, &(Ending){context, is_gone, release});
}
