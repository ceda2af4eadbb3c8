// Lines of memory, asked for before their turn. Not by what compilers offer for it: GCC takes a function that does
// nothing else for one without effects, and drops its calls.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvarto::KVARTO_ISA {

// A line that will be written: no other core keeps it.
[[gnu::always_inline]] inline void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetchw (%0)" ::"r"(line));
#else
    __builtin_prefetch(line, 1);
#endif
}

[[gnu::always_inline]] inline void prefetch_to_first_level(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetcht0 (%0)" ::"r"(line));
#else
    __builtin_prefetch(line);
#endif
}

// Of which more can be on their way than to the first level.
[[gnu::always_inline]] inline void prefetch_to_second_level(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 (%0)" ::"r"(line));
#else
    __builtin_prefetch(line, 0, 2);
#endif
}

}  // namespace kvarto::KVARTO_ISA
