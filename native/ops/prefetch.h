// Lines of memory, asked for before their turn.
#pragma once

namespace kvarto::KVARTO_ISA {

// A line that will be written: no other core keeps it.
[[gnu::always_inline]] inline void prefetch_to_write(const void* line) { __builtin_prefetch(line, 1); }

}  // namespace kvarto::KVARTO_ISA
