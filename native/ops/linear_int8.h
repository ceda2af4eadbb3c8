// Products of quantised weights with quantised rows. The order of an output element's float steps is one everywhere,
// whatever the set, the rows beside it and the thread: per group of 32 columns, from the first to the last,
//
//   sum  = scale(weight) * scale(row) * (exact integer sum of codes) + sum       one fused step; the scales' product
//   sum  = minimum(weight) * (row's sum) + sum                                    is rounded first
//
// Where the row's group has fine codes, the integer is 128 times the sum of codes and the sum of fine ones, rounded to
// a float, and scale(row) is a 128th. For fine codes of 0 that gives the same bits, so that it does not matter whether
// they are left out.
// (Q6_K has two such groups of 16.) The bias is added last.
#pragma once

#include <algorithm>

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto {

// A group of sixteen rows as tiles multiply it. Where no row has fine codes there, they are not filled; where one has,
// those of others are 0, and the scales are 128ths.
struct alignas(64) StagedGroup {
    int8_t codes[16][kGroup];
    float scales[16];
    float sums[16];
    int16_t code_sums[16][2];
    int16_t fine_sums[16][2];
    int8_t fine_codes[16][kGroup];
    uint16_t fine_rows;  // bit i: row i has fine codes
};

// Bytes that `stage_rows` fills for up to `num_rows` rows: a copy of the rows in tiles of sixteen.
inline constexpr int64_t staged_bytes(int64_t num_rows, int32_t width) {
    return align_up(num_rows, 16) / 16 * (width / kGroup) * int64_t{sizeof(StagedGroup)};
}

// LinearOp's scratch for int8 products: staged rows, and quantised ones where x is float32.
inline constexpr int64_t linear_int8_scratch_bytes(int64_t num_rows, int32_t width, bool quantises) {
    return staged_bytes(num_rows, width) + (quantises ? num_rows * quantised_row_bytes(width) : 0);
}

// Rows that are multiplied together, and where their products go.
struct Int8Rows {
    Rows x;                          // form kInt8
    const int32_t* index = nullptr;  // [num_rows] rows of x, or null for 0, 1, 2, …
    int32_t num_rows = 0;
    bool in_tiles = false;           // multiplied by sixteens, and staged for it
    std::byte* staged = nullptr;     // staged_bytes(num_rows, x.width), 64-byte aligned; see stage_rows
    float* out = nullptr;            // product i of weight row w of the part: out[i * out_stride + w]
    int64_t out_stride = 0;
    const float* bias = nullptr;     // [num_rows of the part], or null

    QuantisedRow row(int32_t i) const { return x.int8(index != nullptr ? index[i] : i); }
    int32_t num_tiles() const { return (num_rows + 15) / 16; }

    // Those from `first` on, `count` at most; a multiple of sixteen where they are staged. Without index.
    Int8Rows from(int32_t first, int32_t count) const;
};

inline Int8Rows Int8Rows::from(int32_t first, int32_t count) const {
    Int8Rows some = *this;
    some.x.data += first * x.row_bytes;
    some.num_rows = std::min(count, num_rows - first);
    some.staged += staged_bytes(first, x.width);
    some.out += first * out_stride;
    return some;
}

}  // namespace kvarto

namespace kvarto::KVARTO_ISA {

// The rows of an op, quantised where x is float32 and staged where tiles are used. Entered by all workers; barriers lie
// inside, and a new phase of items begins.
Int8Rows prepared_rows(const LinearOp& op, const StepView& step, Worker& worker);

// Copies sixteen rows (tile 0, 1, …; the last one is filled up with zeros) to `rows.staged`, group by group.
void stage_rows(const Int8Rows& rows, int32_t tile);

// Products of all rows with panels [first, last) of a quantised part. No barrier, no allocation; any thread may take
// any panels.
void multiply_panels(const Part& part, const Int8Rows& rows, int32_t first, int32_t last);

// The whole op, entered by all workers.
void linear_int8(const LinearOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
