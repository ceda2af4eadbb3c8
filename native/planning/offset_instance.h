// The instance of an exact search for offsets, in small numbers; the same for all of its runs.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "planning/offset_search.h"

namespace kvarto {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max() / 2;

// Live in sections [first, last): stretches of time in which nothing begins or ends.
struct Item {
    int32_t first, last;
    int32_t size;

    int32_t num_sections() const { return last - first; }
    bool is_live_in(int32_t section) const { return first <= section && section < last; }
    bool overlaps(const Item& other) const { return first < other.last && other.first < last; }
};

struct Instance {
    std::vector<Item> items;                       // ascending by first section
    std::vector<std::vector<int32_t>> neighbours;  // items that overlap in time
    std::vector<int32_t> load;                     // by section: sum of sizes
    std::vector<int32_t> peak;                     // by item: the largest load of its sections
    int32_t capacity = 0;

    size_t num_items() const { return items.size(); }
    size_t num_sections() const { return load.size(); }
};

// `buffers` ascend by `first`; sizes are positive multiples of `unit`, at most `capacity`. None where the numbers are
// not small.
std::optional<Instance> make_instance(const std::vector<SearchBuffer>& buffers, int64_t capacity, int64_t unit);

}  // namespace kvarto
