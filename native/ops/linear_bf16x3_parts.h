// Weights as sums of bfloat16, and which of their parts are multiplied with which of rows', in what order.
#pragma once

#include "ops/linear_bf16x3.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <array>
#include <cassert>
#include <utility>

#include "ops/linear_bf16_unpack.h"
#include "ops/linear_f32_block.h"

namespace kvarto::KVARTO_ISA {

template <Format format>
inline constexpr int kWeightParts = format == Format::kF32 ? 3 : format == Format::kF16 ? 2 : 1;

// Bytes of two columns of a panel.
template <Format format> inline constexpr int64_t kPairBytes = format == Format::kF32 ? 128 : 64;

// Columns k and k + 1 of sixteen rows.
template <Format format> KVARTO_INLINE inline std::pair<F32x16, F32x16> columns_at(const std::byte* pair) {
    if constexpr (format == Format::kF32) {
        return {F32x16::load(reinterpret_cast<const float*>(pair)),
                F32x16::load(reinterpret_cast<const float*>(pair) + kLanes)};
    } else if constexpr (format == Format::kF16) {
        const I32x16 both = I32x16::load(pair);
        return {widen_low_f16(both), widen_low_f16(shift_right<16>(both))};
    } else {
        const I32x16 both = I32x16::load(pair);
        return {from_bits(shift_left<16>(both)), cut(from_bits(both))};
    }
}

// A part of weights by a part of rows.
struct PartPair {
    int weight, row;
};

// In their order: of two that follow each other one part is the same, and stays in its tiles.
inline constexpr std::array<PartPair, 6> kPartPairs{{{0, 2}, {0, 1}, {1, 1}, {1, 0}, {0, 0}, {2, 0}}};

template <int parts> constexpr int num_products() {
    return static_cast<int>(std::ranges::count_if(kPartPairs, [](PartPair pair) { return pair.weight < parts; }));
}

template <int parts> constexpr auto products_of() {
    std::array<PartPair, num_products<parts>()> products{};
    std::ranges::copy_if(kPartPairs, products.begin(), [](PartPair pair) { return pair.weight < parts; });
    return products;
}

// Calls f<format>() for a format of floats.
template <class F> void with_float_format(Format format, F f) {
    switch (format) {
        case Format::kF32: return f.template operator()<Format::kF32>();
        case Format::kF16: return f.template operator()<Format::kF16>();
        case Format::kBF16: return f.template operator()<Format::kBF16>();
        default: assert(false && "a part of codes is multiplied in parts");
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
