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

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto {

// Sixteen staged rows: for each group of 32 columns, 16 × 32 bfloat16.
inline constexpr int64_t kBF16TileBytes = 16 * kGroup * 2;

// Bytes that `stage_rows_bf16` fills for up to `num_rows` rows; also LinearOp's scratch.
inline constexpr int64_t linear_bf16_scratch_bytes(int64_t num_rows, int32_t width) {
    return align_up(num_rows, 16) / 16 * (width / kGroup) * kBF16TileBytes;
}

// Rows that are multiplied together, and where their products go.
struct BF16Rows {
    Rows x;                          // float32 or bfloat16; width a multiple of 32
    int32_t num_rows = 0;
    std::byte* staged = nullptr;     // linear_bf16_scratch_bytes(num_rows, x.width), 64-byte aligned
    float* out = nullptr;            // product i of weight row w of the part: out[i * out_stride + w]
    int64_t out_stride = 0;
    const float* bias = nullptr;     // [num_rows of the part], or null

    int32_t num_tiles() const { return (num_rows + 15) / 16; }
    int32_t num_groups() const { return x.width / kGroup; }
};

}  // namespace kvarto

#if defined(__AMX_BF16__)

namespace kvarto::KVARTO_ISA {

// Fewer rows are multiplied by vectors, and need not be staged.
inline constexpr int32_t kFewestTileRows = 3;

// Rounds sixteen rows (tile 0, 1, …) to `rows.staged`; all must be there before products.
void stage_rows_bf16(const BF16Rows& rows, int32_t tile);

// Products of all rows with panels [first, last) of a part that has whole groups of 32 columns. No barrier, no
// allocation; any thread may take any panels.
void multiply_panels_bf16(const Part& part, const BF16Rows& rows, int32_t first, int32_t last);

// Its two ways: one or two rows from where they lie, and staged ones.
void multiply_panels_bf16_by_rows(const Part& part, const BF16Rows& rows, int32_t first, int32_t last);
void multiply_panels_bf16_by_tiles(const Part& part, const BF16Rows& rows, int32_t first, int32_t last);

// Activated gates by what is gated, for panels [first, last) of gates, straight to `op.gated`: many staged rows.
void multiply_gated_bf16(const LinearOp& op, const BF16Rows& rows, int32_t first, int32_t last);

// The whole op, entered by all workers.
void linear_bf16(const LinearOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA

#endif
