// An activation buffer in the arena: one row per token or per sample, float32 or narrowed in place.
//
//   float32 row    [width] f32
//   quantised row  [width] i8 codes | [width] i8 fine codes | pad to 64 bytes | [width / 32] f32 scales
//                  | [width / 32] f32 sums | [width / 16] i16 sums of codes | [width / 16] i16 sums of fine codes
//                  | [width / 32] u8, whether the group has fine codes
//   bfloat16      sixteen rows together: [width / 32 groups][16 rows][32] bf16. A group of them is a matrix tile
//
// The narrow forms take less than the float32 rows' bytes (bfloat16: from eight rows on), so a buffer that only such
// products read is written in that form at once, by whoever makes it, in the very place that was planned for float32.
//
// Quantised:
// value = scale of its group of 32 * (code + fine code / 128). Codes are in [-127, 127]: scale = max |x| / 127, codes
// round to nearest even. Where one value of a group towers over the others, codes of the others are small, and what
// rounding takes from them is most of a row's error: such a group, one in ten or so, has fine codes in [-64, 64],
// which say what rounding left. The fine codes of other groups count as 0, and are not there to be read.
// sum = scale * (sum of the group's codes, fine ones by 1 / 128), rounded once: what a weight's minimum is multiplied
// with. The sums of each 16 codes undo the offset of weight codes that are kept unsigned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvarto {

inline constexpr int32_t kGroup = 32;  // elements that share a scale, of activations and of most weights
inline constexpr int32_t kFineSteps = 128;  // of a fine code, to one of a code

inline constexpr int64_t align_up(int64_t value, int64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

enum class RowForm : uint8_t { kF32, kInt8, kBF16 };

struct QuantisedRow {
    int8_t* codes;
    int8_t* fine_codes;
    float* scales;
    float* sums;
    int16_t* code_sums;
    int16_t* fine_sums;
    uint8_t* is_fine;

    // The same row from a column on, a multiple of 32.
    QuantisedRow from(int32_t column) const {
        const int32_t group = column / kGroup;
        return {codes + column,        fine_codes + column,   scales + group,  sums + group,
                code_sums + 2 * group, fine_sums + 2 * group, is_fine + group};
    }
};

// Bytes of one quantised row, a multiple of 64.
inline constexpr int64_t quantised_row_bytes(int32_t width) {
    return align_up(align_up(2 * int64_t{width}, 64) + int64_t{width / kGroup} * 17, 64);
}

inline QuantisedRow quantised_row(std::byte* row, int32_t width) {
    const int32_t num_groups = width / kGroup;
    auto* codes = reinterpret_cast<int8_t*>(row);
    auto* scales = reinterpret_cast<float*>(row + align_up(2 * int64_t{width}, 64));
    float* sums = scales + num_groups;
    auto* code_sums = reinterpret_cast<int16_t*>(sums + num_groups);
    int16_t* fine_sums = code_sums + 2 * num_groups;
    return {codes, codes + width, scales, sums, code_sums, fine_sums,
            reinterpret_cast<uint8_t*>(fine_sums + 2 * num_groups)};
}

// A matrix tile of sixteen bfloat16 rows by a group.
inline constexpr int64_t kBF16TileBytes = 16 * kGroup * 2;

// Bytes of bfloat16 rows.
inline constexpr int64_t bf16_bytes(int64_t num_rows, int32_t width) {
    return align_up(num_rows, 16) / 16 * (width / kGroup) * kBF16TileBytes;
}

inline constexpr int kRowParts = 3;  // of bfloat16, that a float32 is the sum of

// Bytes of float32 rows in parts: the first part of all rows, then the second, then the third.
inline constexpr int64_t bf16x3_bytes(int64_t num_rows, int32_t width) {
    return kRowParts * bf16_bytes(num_rows, width);
}

struct Rows {
    std::byte* data = nullptr;
    int64_t row_bytes = 0;  // from one row to the next; of no meaning for bfloat16
    int32_t width = 0;      // elements
    RowForm form = RowForm::kF32;
    bool per_sample = false;

    float* f32(int64_t row) const { return reinterpret_cast<float*>(data + row * row_bytes); }
    int32_t* i32(int64_t row) const { return reinterpret_cast<int32_t*>(data + row * row_bytes); }
    QuantisedRow int8(int64_t row) const { return quantised_row(data + row * row_bytes, width); }
    // A group of one row.
    std::byte* bf16(int64_t row, int32_t group) const {
        return data + (row / 16 * (width / kGroup) + group) * kBF16TileBytes + row % 16 * 64;
    }
};

}  // namespace kvarto
