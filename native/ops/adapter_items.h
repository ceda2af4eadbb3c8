// How the work of adapters is cut into items.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/adapters.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kItemRows = 32;

inline int32_t ceil_div(int32_t value, int32_t by) { return (value + by - 1) / by; }

// Items that the rows of a segment are.
inline int32_t num_row_items(const AdapterSegment& segment) { return ceil_div(segment.count, kItemRows); }

// Rows [first, last) of the list of rows, of an item.
struct RowRange {
    int32_t first, last;
    RowRange(const AdapterSegment& segment, int32_t item)
        : first(segment.first + item * kItemRows),
          last(segment.first + std::min(segment.count, (item + 1) * kItemRows)) {}
};

// Calls `f(segment, part, item of the part)` for each item that `take` gives: parts are what `parts_of(adapter)` lists,
// and each is `count(segment, part)` items. Numbers rise, so every worker walks the lists once.
template <class Take, class Parts, class Count, class F>
void each_item(const AdapterRows& rows, Take take, Parts parts_of, Count count, F f) {
    int64_t item = take(), first_item = 0;
    for (const AdapterSegment& segment : rows.segments)
        for (const auto& part : parts_of(*segment.adapter)) {
            const int64_t num_items = count(segment, part);
            for (; item < first_item + num_items; item = take())
                f(segment, part, static_cast<int32_t>(item - first_item));
            first_item += num_items;
        }
}

}  // namespace kvarto::KVARTO_ISA
