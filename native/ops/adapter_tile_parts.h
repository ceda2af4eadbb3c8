// What products of adapters by tiles are made of, for few rows and for many.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <algorithm>

#include "core/adapters.h"
#include "ops/adapter_strips.h"
#include "ops/adapter_tiles.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kLineBytes = 64;

struct alignas(64) Tile {
    std::byte bytes[kBF16TileBytes];
};

// Rows of an item of A, and the first of its strips.
struct ShrinkItem {
    RowRange rows;
    int32_t strip, num_strips;

    explicit ShrinkItem(const UpdateItem& item) : ShrinkItem(item, num_row_items(*item.segment, kTileItemRows)) {}

private:
    ShrinkItem(const UpdateItem& item, int32_t num_ranges)
        : rows(*item.segment, item.index % num_ranges, kTileItemRows),
          strip(item.index / num_ranges * kTileStrips), num_strips(std::min(kTileStrips, item.part->rank() - strip)) {}
};

// Rows of an item of B, and its columns.
struct ExpandItem {
    RowRange rows;
    int32_t column, num_columns;

    ExpandItem(const AdapterWork& work, const UpdateItem& item)
        : ExpandItem(item, num_row_items(*item.segment, kTileItemRows), span_columns(*item.part, widest_span(work))) {}

private:
    ExpandItem(const UpdateItem& item, int32_t num_ranges, int32_t columns)
        : rows(*item.segment, item.index % num_ranges, kTileItemRows), column(item.index / num_ranges * columns),
          num_columns(std::min(columns, item.part->b.num_columns - column)) {}
};

// Columns of a strip of codes, a span at most, as bfloat16.
inline void decode_columns(const Adapter& adapter, const Strips& strips, int32_t strip, int32_t column, int32_t count,
                           std::byte* out) {
    const CodeBlocks blocks(adapter, strips, strip, column, count);
    decode_bf16(strips.type, blocks.first(), count, out);
}

// Up to sixteen strips at equal distances, over a run of columns, as bfloat16.
class StripsAt {
public:
    StripsAt(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num, int32_t column, int32_t count)
        : StripsAt(adapter, strips, first, num, column, count, [](int32_t) {}) {}
    // Of codes, `ask(group)` is called before each group of columns is decoded.
    template <class Ask>
    StripsAt(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num, int32_t column, int32_t count,
             Ask ask)
        : first_(copies_[0]), stride_(sizeof copies_[0]) {
        const std::byte* there = adapter.at(strips.place(first, 0), num * strips.strip_bytes());
        if (there != nullptr && has_codes(strips.type)) {
            decode(there + strips.bytes(column), strips, num, count / kGroup, ask);
        } else if (there != nullptr) {
            first_ = there + strips.bytes(column);
            stride_ = strips.strip_bytes();
        } else if (has_codes(strips.type)) {
            for (int32_t s = 0; s < num; ++s) decode_columns(adapter, strips, first + s, column, count, copies_[s]);
        } else {
            for (int32_t s = 0; s < num; ++s)
                adapter.copy(strips.place(first + s, column), strips.bytes(count), copies_[s]);
        }
    }
    StripsAt(const StripsAt&) = delete;
    StripsAt& operator=(const StripsAt&) = delete;
    int64_t stride() const { return stride_; }
    // The 32 columns of a group of strip s.
    const std::byte* group(int32_t s, int32_t group) const { return first_ + s * stride_ + group * kLineBytes; }

private:
    template <class Ask>
    void decode(const std::byte* blocks, const Strips& strips, int32_t num, int32_t num_groups, Ask ask) {
        const int64_t stride = strips.strip_bytes();
        for (int32_t group = 0; group < num_groups; ++group, blocks += strips.bytes(kGroup)) {
            ask(group);
            for (int32_t s = 0; s < num; ++s)
                decode_bf16(strips.type, blocks + s * stride, kGroup, copies_[s] + group * kLineBytes);
        }
    }

    const std::byte* first_;
    int64_t stride_;
    alignas(64) std::byte copies_[kTileStrips][kSpan * 2 + kLineBytes];  // not all in the same sets of the cache
};

inline constexpr int32_t kStripsAtOnce = 8;

// Eight strips over a run of columns: bfloat16, or codes until StripCopies has them.
struct StripPlaces {
    alignas(64) static constexpr std::byte kZeros[2 * kWideSpan]{};
    const std::byte* at[kStripsAtOnce] = {kZeros, kZeros, kZeros, kZeros, kZeros, kZeros, kZeros, kZeros};
    int64_t group_bytes = 0;  // of 32 columns of a strip where it lies
    bool are_found = false;
    bool are_decoded = false;

    StripPlaces() = default;
    // Strips from `first` on where they lie, if they do so on one page; zeros for those that there are not.
    StripPlaces(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count)
        : group_bytes(strips.bytes(kGroup)) {
        const int32_t num = std::min(kStripsAtOnce, strips.num_strips - first);
        const int64_t bytes = (num - 1) * strips.strip_bytes() + strips.bytes(count);
        const std::byte* there = adapter.at(strips.place(first, column), bytes);
        are_found = there != nullptr;
        if (!are_found) return;
        for (int32_t s = 0; s < num; ++s) at[s] = there + s * strips.strip_bytes();
    }
};

// Copies of those that do not; and what codes stand for, of a span at most.
template <int32_t kColumns> struct StripCopies {
    alignas(64) std::byte columns[kStripsAtOnce][2 * kColumns];

    void find(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count,
              StripPlaces& places) {
        if (has_codes(strips.type)) return decode(adapter, strips, first, column, count, places);
        if (places.are_found) return;
        for (int32_t s = 0; s < std::min(kStripsAtOnce, strips.num_strips - first); ++s) {
            const int64_t place = strips.place(first + s, column);
            places.at[s] = adapter.at(place, 2 * count);
            if (places.at[s] != nullptr) continue;
            adapter.copy(place, 2 * count, columns[s]);
            places.at[s] = columns[s];
        }
    }

private:
    void decode(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count,
                StripPlaces& places) {
        for (int32_t s = 0; s < std::min(kStripsAtOnce, strips.num_strips - first); ++s) {
            decode_columns(adapter, strips, first + s, column, count, columns[s]);
            places.at[s] = columns[s];
        }
        places.are_decoded = true;
    }
};

}  // namespace kvarto::KVARTO_ISA

#endif
