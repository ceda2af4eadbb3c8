// How a matrix [num_rows, num_columns] lies in the weights region: panels of 16 rows (output features), repacked once
// at load. Repacking permutes bits; every format keeps its content exactly and its size (rows padded to 16 apart).
//
// A panel is a run of blocks along the columns (k), each 16 rows wide. "lanes" are the 16 rows.
//
//   quad(j)  = 64 bytes: [lane 0..15][k = 4j .. 4j+3]       the operand of a 4-byte dot product, and a tile's row
//   nib(j)   = 64 bytes: low nibbles are quad(j), high nibbles are quad(j + 4), j = 0..3      (32 k in 256 bytes)
//
//   format  k    block                                                                      bytes  bits per weight
//   F32     1    f32[16]                                                                       64  32
//   F16     2    [lane][k 0..1] f16      (an odd last k is padded with 0)                       64  16
//   BF16    2    [lane][k 0..1] bf16     (likewise)                                             64  16
//   Q8_0    32   d f16[16] | quad(0..7), codes i8                                              544  8.5
//   Q4_0    32   d f16[16] | nib(0..3)                            w = d * (q - 8)               288  4.5
//   Q4_1    32   d f16[16] | m f16[16] | nib(0..3)                w = d * q + m                 320  5
//   Q5_0    32   d f16[16] | high | nib(0..3)                     w = d * (q - 16)              352  5.5
//   Q5_1    32   d f16[16] | m f16[16] | high | nib(0..3)         w = d * q + m                 384  6
//   Q4_K    256  d f16[16] | dmin f16[16] | six[3] u32[16] | 8 × nib(0..3)                     2304  4.5
//   Q5_K    256  d f16[16] | dmin f16[16] | six[3] u32[16] | 8 × high | 8 × nib(0..3)          2816  5.5
//   Q6_K    256  d f16[16] | sc i8[16 sub-blocks][16 lanes] | 8 × two | 8 × nib(0..3)          3360  6.5625
//   INT4    G    d f16[16] | zero u8[16] | G/32 × nib(0..3)       w = d * (q - zero) 48 + 8·G  4.19 at G = 128
//
//   high = 64 bytes, the fifth bits of 32 k: u32[16 lanes], bit k of lane's word is bit 4 of code k.
//   two  = 128 bytes, bits 4..5 of 32 k: u32[2][16 lanes], bits 2i..2i+1 of word h are bits 4..5 of code k = 16h + i.
//   six  = eight 6-bit scales then eight 6-bit minima of the sub-blocks of 32: values 0..14 lie five to a word from bit
//          0 up (value v in word v / 5 at bit 6 · (v % 5)); value 15 is the three words' bits 30..31, lowest word first.
//          w = d · scale · q - dmin · min.  Q6_K: sub-blocks of 16, w = d · sc · (q - 32).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/rows.h"

namespace kvarto {

inline constexpr int32_t kLanes = 16;  // rows of a panel

enum class Format : uint8_t { kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kInt4 };

// A band of rows in one format: fused projections may have several. Panels never straddle parts.
struct Part {
    Format format = Format::kF32;
    int32_t group_size = 0;  // of kInt4; 0 elsewhere
    int32_t num_rows = 0;    // without padding; the last panel is padded to 16 with zeros
    const std::byte* data = nullptr;  // 64-byte aligned

    int32_t num_panels() const { return (num_rows + kLanes - 1) / kLanes; }
};

// [num_rows, num_columns], its parts' rows one below the other.
struct Matrix {
    int32_t num_rows = 0;
    int32_t num_columns = 0;
    std::span<const Part> parts;
};

// k covered by one block, and its bytes.
int32_t block_columns(Format format, int32_t group_size);
int64_t block_bytes(Format format, int32_t group_size);
// Bytes of one panel of 16 rows: blocks × block_bytes, not padded between blocks.
int64_t panel_bytes(Format format, int32_t group_size, int32_t num_columns);
// Bytes of a part, a multiple of 64.
int64_t part_bytes(Format format, int32_t group_size, int32_t num_rows, int32_t num_columns);
// Whether int8 products exist for it: all but F32, F16 and BF16.
bool is_quantised(Format format);

}  // namespace kvarto
