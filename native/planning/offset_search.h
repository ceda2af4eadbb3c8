// Exact search for offsets: do buffers with lifespans fit into a capacity, and where? Branch and bound.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kvarto {

// Live in ops [first, last); `size` in units of the capacity.
struct SearchBuffer {
    int32_t first;
    int32_t last;
    int64_t size;
};

struct SearchResult {
    std::optional<std::vector<int64_t>> offsets;  // in the order given; none where nothing was found
    bool is_complete = false;                     // nothing was found because there is nothing
    int64_t num_nodes = 0;
};

// Offsets in [0, capacity - size], no two buffers overlapping in both time and space. Gives up after `time_limit_s`.
// Sizes and the capacity must be non-negative and below 2^31 once divided by their greatest common divisor (else
// nothing is found, and `is_complete` stays false).
SearchResult search_offsets(const std::vector<SearchBuffer>& buffers, int64_t capacity, double time_limit_s);

}  // namespace kvarto
