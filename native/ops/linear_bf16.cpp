#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cstring>

#include "ops/round_bf16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kItemsPerWorker = 8;  // enough for workers to end together

// A row, group by group.
void stage_row(const BF16Rows& rows, int32_t row, std::byte* out) {
    for (int32_t group = 0; group < rows.num_groups(); ++group, out += kBF16TileBytes) {
        if (rows.x.form == RowForm::kF32)
            round_bf16(rows.x.f32(row) + kGroup * group, kGroup, out);
        else
            std::memcpy(out, rows.x.bf16(row) + 2 * kGroup * group, 2 * kGroup);
    }
}

BF16Rows rows_of(const LinearOp& op, const StepView& step) {
    return {.x = op.x, .num_rows = op.x.per_sample ? step.num_samples : step.num_tokens, .staged = op.scratch,
            .out = op.out.f32(0), .out_stride = op.out.row_bytes / int64_t{sizeof(float)}, .bias = op.bias};
}

void gated_panels(const LinearOp& op, const BF16Rows& rows, Worker& worker) {
    const int32_t num_panels = op.gated.width / kLanes;
    const int32_t share = std::max(2, num_panels / (kItemsPerWorker * worker.num_workers()));
    for (int64_t first = share * worker.take(); first < num_panels; first = share * worker.take())
        multiply_gated_bf16(op, rows, static_cast<int32_t>(first),
                            static_cast<int32_t>(std::min<int64_t>(first + share, num_panels)));
}

}  // namespace

void stage_rows_bf16(const BF16Rows& rows, int32_t tile) {
    std::byte* out = rows.staged + int64_t{tile} * rows.num_groups() * kBF16TileBytes;
    const int32_t first = 16 * tile, count = std::min(rows.num_rows - first, 16);
    for (int32_t i = 0; i < count; ++i) stage_row(rows, first + i, out + 64 * i);
    for (int32_t group = 0; group < rows.num_groups(); ++group)
        std::memset(out + group * kBF16TileBytes + 64 * count, 0, static_cast<size_t>(64 * (16 - count)));
}

void multiply_panels_bf16(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    if (rows.num_rows < kFewestTileRows)
        multiply_panels_bf16_by_rows(part, rows, first, last);
    else
        multiply_panels_bf16_by_tiles(part, rows, first, last);
}

void linear_bf16(const LinearOp& op, const StepView& step, Worker& worker) {
    BF16Rows rows = rows_of(op, step);
    if (rows.num_rows == 0) return;
    if (rows.num_rows >= kFewestTileRows) {
        for (int64_t tile = worker.take(); tile < rows.num_tiles(); tile = worker.take())
            stage_rows_bf16(rows, static_cast<int32_t>(tile));
        worker.barrier();
    }
    if (op.gated.data != nullptr && rows.num_rows >= kFewestGatedRows) return gated_panels(op, rows, worker);
    int64_t item = worker.take();
    int64_t first_item = 0;  // of this part
    for (const Part& part : op.weight.parts) {
        const int32_t share = part.num_panels() / (kItemsPerWorker * worker.num_workers());
        const auto panels = static_cast<int32_t>(align_up(std::max(1, share), 4));
        const int64_t num_items = (part.num_panels() + panels - 1) / panels;
        for (; item < first_item + num_items; item = worker.take()) {
            const auto first = static_cast<int32_t>((item - first_item) * panels);
            multiply_panels_bf16(part, rows, first, std::min(first + panels, part.num_panels()));
        }
        first_item += num_items;
        rows.out += part.num_rows;
        if (rows.bias != nullptr) rows.bias += part.num_rows;
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
