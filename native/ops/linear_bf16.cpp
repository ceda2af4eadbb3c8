#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

#include <algorithm>

#include "ops/linear_items.h"
#include "ops/round_bf16.h"

namespace kvarto::KVARTO_ISA {

namespace {

static_assert(kFewestGatedRows == kFewestTileRows, "gates are activated as they leave tiles");

// Float32 rows, rounded to the op's scratch.
Rows rounded(const LinearOp& op, int32_t num_rows, Worker& worker) {
    Rows narrow = op.x;
    narrow.data = op.scratch;
    narrow.form = RowForm::kBF16;
    for (int64_t row = worker.take(); row < num_rows; row = worker.take())
        round_bf16(op.x.f32(row), op.x.width, narrow.bf16(row, 0));
    worker.barrier();
    return narrow;
}

void gated_panels(const LinearOp& op, const BF16Rows& rows, Worker& worker) {
    const int32_t num_panels = op.gated.width / kLanes;
    const int32_t share = std::max(2, num_panels / (kItemsPerWorker * worker.num_workers()));
    for (int64_t first = share * worker.take(); first < num_panels; first = share * worker.take())
        multiply_gated_bf16(op, rows, static_cast<int32_t>(first),
                            static_cast<int32_t>(std::min<int64_t>(first + share, num_panels)));
}

}  // namespace

BF16Rows prepared_rows_bf16(const LinearOp& op, const StepView& step, Worker& worker) {
    const int32_t num_rows = step.num_rows(op.x);
    return {.x = op.x.form == RowForm::kF32 ? rounded(op, num_rows, worker) : op.x, .num_rows = num_rows,
            .out = op.out.f32(0), .out_stride = op.out.row_bytes / int64_t{sizeof(float)}, .bias = op.bias};
}

void multiply_panels_bf16(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    if (rows.num_rows < kFewestTileRows)
        multiply_panels_bf16_by_rows(part, rows, first, last);
    else
        multiply_panels_bf16_by_tiles(part, rows, first, last);
}

void linear_bf16(const LinearOp& op, const StepView& step, Worker& worker) {
    const BF16Rows rows = prepared_rows_bf16(op, step, worker);
    if (rows.num_rows == 0) return;
    const bool is_gated = op.gated.data != nullptr && !step.is_updated(op.index);
    if (is_gated && rows.num_rows >= kFewestGatedRows) return gated_panels(op, rows, worker);
    each_item(op.weight, rows, align_up(rows.num_rows, 16), panels_in_tiles, worker, multiply_panels_bf16);
}

}  // namespace kvarto::KVARTO_ISA

#endif
