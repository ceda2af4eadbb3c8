#include "ops/linear_bf16x3.h"

#if defined(__AMX_BF16__)

#include <algorithm>

#include "ops/linear_items.h"
#include "ops/round_bf16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int64_t kBlockBytes = int64_t{900} << 10;  // of rows in parts: they should stay in a second-level cache
constexpr int32_t kFewestBlockRows = 96;             // below them, weights are split too often

// A group of a row to its three parts.
void split_group(const float* x, int64_t part_bytes, std::byte* out) {
    alignas(64) float left[kGroup];
    _mm512_store_ps(left, _mm512_loadu_ps(x));
    _mm512_store_ps(left + 16, _mm512_loadu_ps(x + 16));
    for (int part = 0; part < kRowParts; ++part, out += part_bytes) {
        round_group(left, out);
        for (int half = 0; half < 2; ++half)
            _mm512_store_ps(left + 16 * half,
                            _mm512_sub_ps(_mm512_load_ps(left + 16 * half), widen_bf16(out + 32 * half)));
    }
}

int32_t block_rows_for(int32_t width) {
    const auto rows = static_cast<int32_t>(kBlockBytes / bf16x3_bytes(32, width)) * 32;
    return std::max(rows, kFewestBlockRows);
}

}  // namespace

BF16x3Rows prepared_rows_bf16x3(const LinearOp& op, const StepView& step, Worker& worker) {
    const int32_t num_rows = step.num_rows(op.x);
    Rows first = op.x;
    first.data = op.scratch;
    first.form = RowForm::kBF16;
    const int64_t part_bytes = bf16_bytes(num_rows, op.x.width);
    for (int64_t row = worker.take(); row < num_rows; row = worker.take())
        for (int32_t group = 0; group < op.x.width / kGroup; ++group)
            split_group(op.x.f32(row) + group * kGroup, part_bytes, first.bf16(row, group));
    worker.barrier();
    return {{.x = first, .num_rows = num_rows, .out = op.out.f32(0),
             .out_stride = op.out.row_bytes / int64_t{sizeof(float)}, .bias = op.bias},
            part_bytes};
}

void multiply_panels_bf16x3(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last) {
    if (rows.first.num_rows == 1)
        multiply_panels_bf16x3_by_row(part, rows, first, last);
    else
        multiply_panels_bf16x3_by_tiles(part, rows, first, last);
}

void linear_bf16x3(const LinearOp& op, const StepView& step, Worker& worker) {
    const BF16x3Rows rows = prepared_rows_bf16x3(op, step, worker);
    if (rows.first.num_rows == 0) return;
    each_item(op.weight, rows.first, block_rows_for(op.x.width), panels_in_tiles, worker,
              [&](const Part& part, const BF16Rows& some, int32_t first, int32_t last) {
                  multiply_panels_bf16x3(part, {some, rows.part_bytes}, first, last);
              });
}

}  // namespace kvarto::KVARTO_ISA

#endif
