// Lines of memory, asked for before their turn.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvarto::KVARTO_ISA {

// A line that will be written: no other core keeps it.
[[gnu::always_inline]] inline void prefetch_to_write(const void* line) { __builtin_prefetch(line, 1); }

enum class Cache { kFirst, kSecond };

template <Cache cache> [[gnu::always_inline]] inline void prefetch_lines(const std::byte* first, int64_t num_bytes) {
    for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(first + byte, 0, cache == Cache::kFirst ? 3 : 2);
}

}  // namespace kvarto::KVARTO_ISA
