// Products of a matrix with rows in bfloat16, summed in float32: for machines with matrix tiles, and only there.
//
// Rows are rounded to bfloat16 (to nearest even), weights as linear_bf16_unpack.h says. Per group of 32 columns, from
// the first to the last, and whatever the rows beside it and the thread:
//
//   even, odd = 0; for pairs of columns (k, k + 1), ascending: even = x[k] w[k] + even, odd = x[k + 1] w[k + 1] + odd
//   sum = sum + (even + odd)
//
// each step fused and rounded once; denormals count as zero. This is what the tile instruction does. The bias is added
// last.
#pragma once

#include <algorithm>

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto {

// Rows that are multiplied together, and where their products go.
struct BF16Rows {
    Rows x;                          // bfloat16; width a multiple of 32
    int32_t num_rows = 0;
    float* out = nullptr;            // product i of weight row w of the part: out[i * out_stride + w]
    int64_t out_stride = 0;
    const float* bias = nullptr;     // [num_rows of the part], or null

    int32_t num_tiles() const { return (num_rows + 15) / 16; }
    int32_t num_groups() const { return x.width / kGroup; }
    const std::byte* tile(int32_t tile) const { return x.bf16(int64_t{16} * tile, 0); }

    // Those from `first` on, a multiple of sixteen; `count` at most.
    BF16Rows from(int32_t first, int32_t count) const {
        BF16Rows some = *this;
        some.x.data = x.bf16(first, 0);
        some.num_rows = std::min(count, num_rows - first);
        some.out += first * out_stride;
        return some;
    }
};

}  // namespace kvarto

#if defined(__AMX_BF16__)

namespace kvarto::KVARTO_ISA {

// Fewer rows are multiplied by vectors.
inline constexpr int32_t kFewestTileRows = 3;
// From here on weights are unpacked chunk by chunk, before they are multiplied.
inline constexpr int32_t kFewestManyRows = 33;

// Products of all rows with panels [first, last) of a part that has whole groups of 32 columns. No barrier, no
// allocation; any thread may take any panels.
void multiply_panels_bf16(const Part& part, const BF16Rows& rows, int32_t first, int32_t last);

// Its two ways: for one or two rows, and for more.
void multiply_panels_bf16_by_rows(const Part& part, const BF16Rows& rows, int32_t first, int32_t last);
void multiply_panels_bf16_by_tiles(const Part& part, const BF16Rows& rows, int32_t first, int32_t last);

// Activated gates by what is gated, for panels [first, last) of gates, straight to `op.gated`: many rows.
void multiply_gated_bf16(const LinearOp& op, const BF16Rows& rows, int32_t first, int32_t last);

// The rows of an op, rounded where x is float32; entered by all workers.
BF16Rows prepared_rows_bf16(const LinearOp& op, const StepView& step, Worker& worker);

// The whole op, entered by all workers.
void linear_bf16(const LinearOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA

#endif
