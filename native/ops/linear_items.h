// Products in matrix tiles as items of work: panels of a part by all rows.
#pragma once

#include <algorithm>

#include "core/threads.h"
#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kItemsPerWorker = 8;  // enough for workers to end together

// Panels of an item, so that workers end together. Many rows are worth fewer, larger items: those of all its panels are
// read while they are near.
inline int32_t panels_per_item(const Part& part, int32_t num_rows, int32_t num_workers) {
    const int32_t num_panels = part.num_panels();
    if (num_rows < kFewestManyRows)
        return static_cast<int32_t>(align_up(std::max(1, num_panels / (kItemsPerWorker * num_workers)), 4));
    int32_t best = 4;
    const auto turns = [&](int32_t share) {  // panels of the worker that has most
        const int32_t round = share * num_workers;
        return (num_panels + round - 1) / round * share;
    };
    for (const int32_t share : {6, 8})
        if (turns(share) <= turns(best)) best = share;
    return best;
}

// Some of the rows: from a multiple of sixteen on.
inline BF16Rows block_of(const BF16Rows& rows, int32_t first_row, int32_t num_rows) {
    BF16Rows some = rows;
    some.x.data = rows.x.bf16(first_row, 0);
    some.num_rows = std::min(num_rows, rows.num_rows - first_row);
    some.out += first_row * rows.out_stride;
    return some;
}

// Calls f(part, rows, first, last) for each item that this worker takes: panels [first, last) of a part by at most
// `block_rows` rows, a multiple of sixteen, whose output begins with the part's.
template <class F> void each_item(const Weight& weight, const BF16Rows& rows, int32_t block_rows, Worker& worker, F f) {
    int64_t item = worker.take();
    int64_t first_item = 0;  // of this block and part
    for (int32_t row = 0; row < rows.num_rows; row += block_rows) {
        BF16Rows block = block_of(rows, row, block_rows);
        for (const Part& part : weight.parts) {
            const int32_t panels = panels_per_item(part, block.num_rows, worker.num_workers());
            const int64_t num_items = (part.num_panels() + panels - 1) / panels;
            for (; item < first_item + num_items; item = worker.take()) {
                const auto first = static_cast<int32_t>((item - first_item) * panels);
                f(part, block, first, std::min(first + panels, part.num_panels()));
            }
            first_item += num_items;
            block.out += part.num_rows;
            if (block.bias != nullptr) block.bias += part.num_rows;
        }
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
