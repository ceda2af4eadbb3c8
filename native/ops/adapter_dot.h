// Dot products of strips with rows of an activation buffer.
#pragma once

#include "core/adapters.h"
#include "core/rows.h"
#include "ops/adapter_strips.h"

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)
inline constexpr int32_t kBlockRows = 4;  // 4 x 4 sums stay in registers
static_assert(kStripBlock % kBlockRows == 0, "so much of a block at a time");
#else
inline constexpr int32_t kBlockRows = 1;
#endif

// Up to kBlockRows rows.
struct RowBlock {
    std::array<int32_t, kBlockRows> rows;  // those beyond `num` are the last again
    int32_t num;

    RowBlock(const int32_t* list, int32_t count) : num(count < kBlockRows ? count : kBlockRows) {
        for (int32_t r = 0; r < kBlockRows; ++r) rows[static_cast<size_t>(r)] = list[r < num ? r : num - 1];
    }
    int32_t operator[](int32_t r) const { return rows[static_cast<size_t>(r)]; }
    // Rows that are computed: one, or all.
    int32_t size() const { return num == 1 ? 1 : kBlockRows; }
};

using Dots = float[kBlockRows][kStripBlock];

using RowPlaces = std::array<const std::byte*, kBlockRows>;

// A block of rows of x in what strips are multiplied in: float32, or bfloat16 for pairs. Made once for all strips, unless
// a row is longer than there is room for.
class FactorRows {
public:
    FactorRows(const Rows& x, const RowBlock& rows, bool in_pairs);
    FactorRows(const FactorRows&) = delete;
    FactorRows& operator=(const FactorRows&) = delete;
    const RowBlock& rows() const { return rows_; }
    bool are_pairs() const { return in_pairs_; }
    // Columns [column, column + count) of each, filled up to whole vectors; until the next call. `count` is at most
    // `widest`.
    RowPlaces at(int32_t column, int32_t count);
    int32_t widest() const { return is_whole_ ? kWideSpan : kSpan; }

private:
    const std::byte* place(int32_t r, int32_t column, int32_t count);

    const Rows& x_;
    const RowBlock& rows_;
    const bool in_pairs_, is_whole_;
    RowPlaces whole_;
    alignas(64) float copies_[kBlockRows][kWideSpan];
};

// out[r][s] = strip first + s · row r of x, in the order of sums of adapter_product.h; what there is of `num_strips`.
// Meanwhile `ahead` is asked for.
void dot_strips(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num_strips, FactorRows& x,
                const StripLines& own, const LinesAhead& ahead, Dots& out);

}  // namespace kvarto::KVARTO_ISA
