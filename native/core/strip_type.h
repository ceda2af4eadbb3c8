// How the pages of an adapter have the columns of a strip. Mirrors kvarto/core/strip_type.py, which draws the blocks.
//
// A code stands for bfloat16(code * scale), rounded to nearest even: the product is exact in float32, so that a strip
// of codes is one of bfloat16 to all who multiply with it.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

namespace kvarto {

enum class StripType : uint8_t { kF32, kF16, kBF16, kQ8, kQ4 };

inline constexpr int32_t kCodeColumns = 32;  // of a block of codes
inline constexpr int32_t kScaleBytes = 2;

constexpr bool has_codes(StripType type) { return type >= StripType::kQ8; }
// Columns that lie together: strips are cut between blocks alone, and have whole ones.
constexpr int32_t block_columns(StripType type) { return has_codes(type) ? kCodeColumns : 1; }
constexpr int32_t block_bytes(StripType type) {
    switch (type) {
        case StripType::kF32: return 4;
        case StripType::kF16:
        case StripType::kBF16: return 2;
        case StripType::kQ8: return kScaleBytes + kCodeColumns;
        case StripType::kQ4: return kScaleBytes + kCodeColumns / 2;
    }
    __builtin_unreachable();
}
// Of which the start of every strip is a multiple.
constexpr int32_t alignment(StripType type) { return has_codes(type) ? kScaleBytes : block_bytes(type); }
// Bytes of whole blocks; there is no other place in a strip of codes.
inline int64_t strip_bytes(StripType type, int64_t columns) {
    if (!has_codes(type)) return columns * block_bytes(type);
    assert(columns % kCodeColumns == 0);
    return columns / kCodeColumns * block_bytes(type);
}

}  // namespace kvarto
