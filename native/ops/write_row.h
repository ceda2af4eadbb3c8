// Writes a row of a buffer in the form that the buffer has.
#pragma once

#include "core/rows.h"
#include "ops/quantise.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kPiece = 512;  // elements on the stack at a time; a multiple of a group

// `fill(first, count, out)` computes elements [first, first + count) of the row. It is called once for a float32 row,
// and piece by piece for a quantised one, which never lies in memory as float32.
template <class Fill> inline void write_row(const Rows& rows, int64_t row, Fill fill) {
    if (rows.form == RowForm::kF32) return fill(0, rows.width, rows.f32(row));
    const QuantisedRow out = rows.int8(row);
    alignas(64) float piece[kPiece];
    for (int32_t first = 0; first < rows.width; first += kPiece) {
        const int32_t count = rows.width - first < kPiece ? rows.width - first : kPiece;
        fill(first, count, piece);
        quantise_row(piece, count, out.from(first));
    }
}

}  // namespace kvarto::KVARTO_ISA
