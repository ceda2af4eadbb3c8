// How the work of adapters is cut into items.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/adapters.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kItemRows = 32;  // where vectors multiply

inline int32_t ceil_div(int32_t value, int32_t by) { return (value + by - 1) / by; }

// Items that the rows of a segment are, of so many rows each.
inline int32_t num_row_items(const AdapterSegment& segment, int32_t item_rows) {
    return ceil_div(segment.count, item_rows);
}

// Rows [first, last) of the list of rows, of an item.
struct RowRange {
    int32_t first, last;
    RowRange(int32_t first, int32_t last) : first(first), last(last) {}
    RowRange(const AdapterSegment& segment, int32_t item, int32_t item_rows)
        : first(segment.first + item * item_rows),
          last(segment.first + std::min(segment.count, (item + 1) * item_rows)) {}
};

// One item: a part of an adapter, and which of its items.
template <class Part> struct AdapterItem {
    const AdapterSegment* segment = nullptr;  // null: there is none
    const Part* part = nullptr;
    int32_t index = 0;

    explicit operator bool() const { return segment != nullptr; }
    const Adapter& adapter() const { return *segment->adapter; }
};

using UpdateItem = AdapterItem<AdapterUpdate>;

// Where a row's sums of an update begin.
inline float* sums_of(const AdapterWork& work, const AdapterUpdate& update, int32_t place) {
    return work.sums.f32(place) + update.first_rank;
}

// Calls `f(item, the one that this worker does next)` for each item that `take` gives: parts are what `parts_of(adapter)`
// lists, and each is `count(segment, part)` items. Numbers rise, so every worker walks the lists once.
template <class Part, class Take, class Parts, class Count, class F>
void each_item(const AdapterRows& rows, Take take, Parts parts_of, Count count, F f) {
    size_t at = 0, place = 0;
    int64_t first_item = 0;
    const auto next_item = [&]() -> AdapterItem<Part> {
        const int64_t item = take();
        for (; at < rows.segments.size(); ++at, place = 0) {
            const AdapterSegment& segment = rows.segments[at];
            for (const std::span<const Part> parts = parts_of(*segment.adapter); place < parts.size(); ++place) {
                const int64_t num_items = count(segment, parts[place]);
                if (item < first_item + num_items)
                    return {&segment, &parts[place], static_cast<int32_t>(item - first_item)};
                first_item += num_items;
            }
        }
        return {};
    };
    for (AdapterItem<Part> item = next_item(), next; item; item = next) {
        next = next_item();
        f(item, next);
    }
}

}  // namespace kvarto::KVARTO_ISA
