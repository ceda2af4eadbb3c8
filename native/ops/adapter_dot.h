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

// out[r][s] = strip first + s · row r of x, in the order of sums of adapter_product.h; what there is of `num_strips`.
// `next` is asked for meanwhile.
void dot_strips(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num_strips, const Rows& x,
                const RowBlock& rows, const StripLines& next, Dots& out);

}  // namespace kvarto::KVARTO_ISA
