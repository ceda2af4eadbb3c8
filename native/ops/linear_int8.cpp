#include "ops/linear_int8.h"

#include <algorithm>

#include "ops/linear_int8_panels.h"
#include "ops/linear_items.h"
#include "ops/quantise.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int64_t kBlockBytes = 640 << 10;  // of staged rows: weights and sums get the rest of a second-level cache

void stage_row(const QuantisedRow& row, int32_t num_groups, int32_t i, StagedGroup* tile) {
    for (int32_t group = 0; group < num_groups; ++group) {
        std::memcpy(tile[group].codes[i], row.codes + kGroup * group, kGroup);
        tile[group].scales[i] = row.scales[group];
        tile[group].sums[i] = row.sums[group];
        std::memcpy(tile[group].code_sums[i], row.code_sums + 2 * group, sizeof tile[group].code_sums[i]);
        tile[group].fine_rows |= static_cast<uint16_t>((row.is_fine[group] != 0) << i);
    }
}

void clear_row(int32_t num_groups, int32_t i, StagedGroup* tile) {
    for (int32_t group = 0; group < num_groups; ++group) {
        std::memset(tile[group].codes[i], 0, kGroup);
        tile[group].scales[i] = tile[group].sums[i] = 0.0F;
        tile[group].code_sums[i][0] = tile[group].code_sums[i][1] = 0;
    }
}

// Once all rows are known.
void stage_fine_codes(const Int8Rows& rows, int32_t first_row, int32_t group, StagedGroup& out) {
    std::memset(out.fine_codes, 0, sizeof out.fine_codes);
    std::memset(out.fine_sums, 0, sizeof out.fine_sums);
    for (int32_t i = 0; i < 16; ++i) out.scales[i] *= 1.0F / kFineSteps;
    for (int32_t i = 0; i < std::min(16, rows.num_rows - first_row); ++i) {
        const QuantisedRow row = rows.row(first_row + i);
        if (!row.is_fine[group]) continue;
        std::memcpy(out.fine_codes[i], row.fine_codes + kGroup * group, kGroup);
        std::memcpy(out.fine_sums[i], row.fine_sums + 2 * group, sizeof out.fine_sums[i]);
    }
}

bool pays_in_tiles(const Weight& weight, int32_t num_rows) {
    const bool has_8_bits = std::any_of(weight.parts.begin(), weight.parts.end(),
                                        [](const Part& part) { return part.format == Format::kQ8_0; });
    return kHasTiles && num_rows >= (has_8_bits ? kFewestInt8TileRowsOf8Bits : kFewestInt8TileRows);
}

// The rows of one op, quantised in its scratch where x is not.
Int8Rows rows_of(const LinearOp& op, const StepView& step) {
    const int32_t num_rows = step.num_rows(op.x);
    Int8Rows rows{.x = op.x, .num_rows = num_rows, .in_tiles = pays_in_tiles(op.weight, num_rows),
                  .staged = op.scratch, .out = op.out.f32(0),
                  .out_stride = op.out.row_bytes / int64_t{sizeof(float)}, .bias = op.bias};
    if (op.x.form == RowForm::kF32) {
        rows.x.data = op.scratch + staged_bytes(num_rows, op.x.width);
        rows.x.row_bytes = quantised_row_bytes(op.x.width);
        rows.x.form = RowForm::kInt8;
    }
    return rows;
}

// Sixteen rows at a time: quantised and staged by the same thread.
void prepare(const LinearOp& op, const Int8Rows& rows, Worker& worker) {
    const bool quantises = op.x.form == RowForm::kF32, stages = rows.in_tiles;
    if (!quantises && !stages) return;
    for (int64_t tile = worker.take(); tile < rows.num_tiles(); tile = worker.take()) {
        const auto first = static_cast<int32_t>(tile * 16), last = std::min(first + 16, rows.num_rows);
        if (quantises)
            for (int32_t row = first; row < last; ++row) quantise_row(op.x.f32(row), op.x.width, rows.x.int8(row));
        if (stages) stage_rows(rows, static_cast<int32_t>(tile));
    }
    worker.barrier();
}

// Rows that meet all panels before others do: as staged they stay in the second-level cache, from which every panel
// reads them again. Whole tiles, blocks of about one size.
int32_t rows_of_block(const Int8Rows& rows) {
    if (!rows.in_tiles) return rows.num_rows;
    const int64_t tile_bytes = staged_bytes(16, rows.x.width) * 11 / 20;  // without the fine codes, which few have
    const int32_t most = std::max(1, static_cast<int32_t>(kBlockBytes / tile_bytes));
    const int32_t num_blocks = (rows.num_tiles() + most - 1) / most;
    return (rows.num_tiles() + num_blocks - 1) / num_blocks * 16;
}

int32_t panels_of_item(const Part& part, int32_t, int32_t num_workers) {
    return std::max(1, part.num_panels() / (kItemsPerWorker * num_workers));
}

}  // namespace

Int8Rows prepared_rows(const LinearOp& op, const StepView& step, Worker& worker) {
    const Int8Rows rows = rows_of(op, step);
    prepare(op, rows, worker);
    return rows;
}

void stage_rows(const Int8Rows& rows, int32_t tile) {
    const int32_t num_groups = rows.x.width / kGroup;
    StagedGroup* out = reinterpret_cast<StagedGroup*>(rows.staged) + tile * num_groups;
    for (int32_t group = 0; group < num_groups; ++group) out[group].fine_rows = 0;
    for (int32_t i = 0; i < 16; ++i) {
        const int32_t row = 16 * tile + i;
        if (row < rows.num_rows)
            stage_row(rows.row(row), num_groups, i, out);
        else
            clear_row(num_groups, i, out);
    }
    for (int32_t group = 0; group < num_groups; ++group)
        if (out[group].fine_rows != 0) stage_fine_codes(rows, 16 * tile, group, out[group]);
}

void multiply_panels(const Part& part, const Int8Rows& rows, int32_t first, int32_t last) {
    if (rows.in_tiles)
        multiply_panels_by_tiles(part, rows, first, last);
    else
        multiply_panels_by_rows(part, rows, first, last);
}

void linear_int8(const LinearOp& op, const StepView& step, Worker& worker) {
    const Int8Rows rows = prepared_rows(op, step, worker);
    if (rows.num_rows == 0) return;
    each_item(op.weight, rows, rows_of_block(rows), panels_of_item, worker, multiply_panels);
}

}  // namespace kvarto::KVARTO_ISA
