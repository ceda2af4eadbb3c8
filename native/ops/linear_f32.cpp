// Float32 products by panels: a group of panels over a run of k stays in a cache while a block of rows passes by.
//
// Bounds. One row: the weights' bytes. Many rows: 32 multiply-adds a cycle with AVX-512, 16 with AVX2; unpacking costs
// about one operation per weight and block of rows.
#include "ops/linear_f32.h"

#include <algorithm>
#include <cstring>

#include "ops/linear_f32_block.h"
#include "ops/linear_f32_tile.h"

namespace kvarto::KVARTO_ISA {

namespace {

// Of a run. Unpacked ones lie in the first-level cache: four panels take 24 KiB. Those that lie in memory as float32 come
// from the second: to read a panel's line takes less time than to multiply it with six rows, while each run more costs that
// sums are written and read. A multiple of 32.
constexpr int32_t kUnpackedColumns = 96;
constexpr int32_t kMostColumns = 768;
// Rows that share one reading of the weights.
constexpr int32_t kBlockRows = 192;
// An item of work: about 10 µs of reading for few rows, 30 µs of multiplying for many.
constexpr int64_t kItemBytes = int64_t{128} << 10;
constexpr int64_t kItemProducts = int64_t{2} << 20;

// One group of at most kTilePanels panels.
struct Group {
    const Part& part;
    int32_t first_panel;
    int32_t num_panels;
    int32_t num_columns;
    const float* bias;

    const std::byte* panel(int32_t p) const {
        return part.data + (first_panel + p) * panel_bytes(part.format, part.group_size, num_columns);
    }
    // Runs of about one length.
    int32_t run_columns() const {
        if (part.format != Format::kF32) return kUnpackedColumns;
        const int32_t num_runs = (num_columns + kMostColumns - 1) / kMostColumns;
        return static_cast<int32_t>(align_up((num_columns + num_runs - 1) / num_runs, 32));
    }
    int32_t num_lanes() const {
        return std::min(num_panels * kLanes, part.num_rows - first_panel * kLanes);
    }
};

// Runs the tile on whole panels and keeps the lanes that exist.
void run_edge(const Tile& tile, int32_t num_rows, const Group& group) {
    const size_t bytes = static_cast<size_t>(group.num_lanes()) * sizeof(float);
    alignas(64) float out[kTileRows][kTilePanels * kLanes], bias[kTilePanels * kLanes];
    Tile whole = tile;
    if (tile.bias != nullptr) {
        std::memcpy(bias, tile.bias, bytes);
        whole.bias = bias;
    }
    for (int32_t r = 0; r < num_rows; ++r) {
        if (!tile.is_first) std::memcpy(out[r], tile.out[r], bytes);
        whole.out[r] = out[r];
    }
    tile_of(num_rows, group.num_panels)(whole);
    for (int32_t r = 0; r < num_rows; ++r) std::memcpy(tile.out[r], out[r], bytes);
}

// The run that comes next, asked for while this one is multiplied: by each tile of rows a share of its panels. With one
// tile there is nothing between two runs, and memory is never idle.
struct Ahead {
    std::array<const std::byte*, kTilePanels> panel;
    int32_t num_panels = 0, num_tiles = 1, bytes = 0;

    void share(int32_t index, Tile& tile) const {
        const int32_t first = index * num_panels / num_tiles, last = (index + 1) * num_panels / num_tiles;
        tile.num_ahead = last - first;
        tile.ahead_bytes = bytes;
        for (int32_t i = first; i < last; ++i) tile.ahead[i - first] = panel[i];
    }
};

Ahead ahead_of(const Group& group, int32_t next_k, const ProductRows& rows) {
    Ahead ahead;
    if (next_k == group.num_columns || rows.num_rows <= kTileRows) return ahead;
    const int64_t bytes = panel_bytes(group.part.format, group.part.group_size, group.num_columns);
    ahead.num_panels = group.num_panels;
    ahead.num_tiles = (rows.num_rows + kTileRows - 1) / kTileRows;
    ahead.bytes = static_cast<int32_t>(bytes / group.num_columns);
    for (int32_t p = 0; p < group.num_panels; ++p) ahead.panel[p] = group.panel(p) + next_k * bytes / group.num_columns;
    return ahead;
}

// Every tile of rows over one run of k.
void multiply_run(const Group& group, int32_t first_k, const ProductRows& rows, const Ahead& ahead, Tile& tile) {
    const bool is_whole = group.num_lanes() == group.num_panels * kLanes;
    for (int32_t first = 0; first < rows.num_rows; first += kTileRows) {
        ahead.share(first / kTileRows, tile);
        const int32_t count = std::min(kTileRows, rows.num_rows - first);
        for (int32_t r = 0; r < count; ++r) {
            const int64_t source = rows.index != nullptr ? rows.index[first + r] : first + r;
            tile.x[r] = rows.x + source * rows.x_stride + first_k;
            tile.out[r] = rows.out + (first + r) * rows.out_stride + int64_t{group.first_panel} * kLanes;
        }
        if (is_whole) {
            tile_of(count, group.num_panels)(tile);
        } else {
            run_edge(tile, count, group);
        }
    }
}

void multiply_group(const Group& group, const ProductRows& rows) {
    alignas(64) float blocks[kTilePanels][kUnpackedColumns * kLanes];
    const int32_t columns = group.run_columns();
    Tile tile;
    for (int32_t first_k = 0; first_k < group.num_columns; first_k += columns) {
        tile.num_k = std::min(columns, group.num_columns - first_k);
        tile.is_first = first_k == 0;
        const bool is_last = first_k + tile.num_k == group.num_columns;
        const Ahead ahead = ahead_of(group, first_k + tile.num_k, rows);
        tile.bias = is_last && group.bias != nullptr ? group.bias + int64_t{group.first_panel} * kLanes : nullptr;
        for (int32_t p = 0; p < group.num_panels; ++p)
            tile.panel[p] = panel_block(group.part, group.panel(p), first_k, tile.num_k, blocks[p]);
        multiply_run(group, first_k, rows, ahead, tile);
    }
}

// How one part is cut: its panels by spans, the rows by blocks; an item is one of each.
int32_t span_panels(const Part& part, int32_t num_columns, int32_t num_rows) {
    const int64_t bytes = panel_bytes(part.format, part.group_size, num_columns);
    const int64_t products = int64_t{num_rows} * num_columns * kLanes;
    const int64_t panels = std::min(kItemBytes / bytes, kItemProducts / products);
    const int64_t step = panels_for(num_rows);
    return static_cast<int32_t>(std::max(panels / step * step, step));
}

ProductRows block_of(const ProductRows& rows, int64_t block, int32_t block_rows) {
    const auto first = static_cast<int32_t>(block * block_rows);
    ProductRows some = rows;
    some.x += first * rows.x_stride;
    some.out += first * rows.out_stride;
    some.num_rows = std::min(block_rows, rows.num_rows - first);
    return some;
}

// Blocks of about equal size, whole tiles each.
int32_t block_rows_for(int32_t num_rows) {
    const int32_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    return static_cast<int32_t>(align_up((num_rows + num_blocks - 1) / num_blocks, kTileRows));
}

ProductRows rows_of(const LinearOp& op, const StepView& step) {
    ProductRows rows;
    rows.x = op.x.f32(0);
    rows.x_stride = op.x.row_bytes / int64_t{sizeof(float)};
    rows.out = op.out.f32(0);
    rows.out_stride = op.out.row_bytes / int64_t{sizeof(float)};
    rows.num_rows = step.num_rows(op.x);
    return rows;
}

}  // namespace

void product_f32(const Part& part, int32_t num_columns, int32_t first_panel, int32_t last_panel,
                 const ProductRows& rows, const float* bias) {
    if (rows.num_rows == 0) return;
    const int32_t step = panels_for(rows.num_rows);
    for (int32_t panel = first_panel; panel < last_panel; panel += step)
        multiply_group({part, panel, std::min(step, last_panel - panel), num_columns, bias}, rows);
}

void linear_f32(const LinearOp& op, const StepView& step, Worker& worker) {
    const ProductRows rows = rows_of(op, step);
    if (rows.num_rows == 0) return;
    const int32_t block_rows = block_rows_for(rows.num_rows), num_columns = op.weight.num_columns;
    const int64_t num_blocks = (rows.num_rows + block_rows - 1) / block_rows;
    int64_t item = worker.take(), first_item = 0, first_row = 0;
    for (const Part& part : op.weight.parts) {
        const int32_t span = span_panels(part, num_columns, std::min(block_rows, rows.num_rows));
        const int64_t num_spans = (part.num_panels() + span - 1) / span;
        const float* bias = op.bias != nullptr ? op.bias + first_row : nullptr;
        for (; item < first_item + num_spans * num_blocks; item = worker.take()) {
            const int64_t block = (item - first_item) / num_spans, place = (item - first_item) % num_spans;
            ProductRows some = block_of(rows, block, block_rows);
            some.out += first_row;
            const auto first_panel = static_cast<int32_t>(place * span);
            product_f32(part, num_columns, first_panel, std::min(first_panel + span, part.num_panels()), some, bias);
        }
        first_item += num_spans * num_blocks;
        first_row += part.num_rows;
    }
}

}  // namespace kvarto::KVARTO_ISA
