/* A 16-byte word that changes as one: the only shared-memory primitive of the ledger.
 *
 * The high half of every word that changes more than once holds a sequence number that only grows, so two reads of the
 * high half around one of the low half are a consistent picture, and a compare-and-swap never meets an old value again.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* The model test schedules, kills and forks at every one of these; in the library they are nothing. */
#ifndef LIMITER_STEP
#define LIMITER_STEP() ((void)0)
#endif

/* The thread sanitizer replaces a 16-byte swap by a lock of its own, which other processes do not see. */
#ifdef __SANITIZE_THREAD__
#define REAL_SWAP __attribute__((no_sanitize_thread))
#else
#define REAL_SWAP
#endif

typedef union {
    struct {
        uint64_t low, high;
    };
    unsigned __int128 whole;
} Word;

static inline uint64_t step_load(const uint64_t *cell) {
    LIMITER_STEP();
    return __atomic_load_n(cell, __ATOMIC_SEQ_CST);
}

static inline void step_store(uint64_t *cell, uint64_t value) {
    LIMITER_STEP();
    __atomic_store_n(cell, value, __ATOMIC_SEQ_CST);
}

static inline bool step_swap(uint64_t *cell, uint64_t expected, uint64_t value) {
    LIMITER_STEP();
    return __atomic_compare_exchange_n(cell, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static inline Word word_load(const Word *cell) {
    Word word;
    for (;;) {
        word.high = step_load(&cell->high);
        word.low = step_load(&cell->low);
        if (step_load(&cell->high) == word.high) return word;
    }
}

REAL_SWAP static inline bool word_swap(Word *cell, Word expected, Word value) {
    LIMITER_STEP();
    return __sync_bool_compare_and_swap(&cell->whole, expected.whole, value.whole);
}
