// Writes a row of a buffer in the form that the buffer has.
#pragma once

#include "core/rows.h"
#include "ops/quantise.h"
#include "ops/round_bf16.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kPiece = 512;  // elements on the stack at a time; a multiple of a group

// Narrows x[0 .. count - 1] to columns [first, first + count) of a row that is not float32; whole groups.
inline void narrow_piece(const Rows& rows, int64_t row, int32_t first, int32_t count, const float* x) {
#if defined(__AVX512BF16__)
    if (rows.form == RowForm::kBF16) return round_bf16(x, count, rows.bf16(row, first / kGroup));
#endif
    quantise_row(x, count, rows.int8(row).from(first));
}

// `fill(first, count, out)` computes elements [first, first + count) of the row. It is called once for a float32 row,
// and piece by piece for a narrow one, which never lies in memory as float32.
template <class Fill> inline void write_row(const Rows& rows, int64_t row, Fill fill) {
    if (rows.form == RowForm::kF32) return fill(0, rows.width, rows.f32(row));
    alignas(64) float piece[kPiece];
    for (int32_t first = 0; first < rows.width; first += kPiece) {
        const int32_t count = rows.width - first < kPiece ? rows.width - first : kPiece;
        fill(first, count, piece);
        narrow_piece(rows, row, first, count, piece);
    }
}

}  // namespace kvarto::KVARTO_ISA
