// Products as items of work: panels of a part by a block of rows.
#pragma once

#include <algorithm>

#include "core/threads.h"
#include "ops/linear_bf16.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kItemsPerWorker = 8;  // enough for workers to end together

// Calls f(part, rows, first, last) for each item that this worker takes: panels [first, last) of a part by at most
// `block_rows` rows, a multiple of sixteen unless they are all, whose output begins with the part's. All panels meet one
// block of rows, then the next. An item has `panels_of(part, number of rows, number of workers)` panels.
template <class SomeRows, class PanelsOf, class F>
void each_item(const Weight& weight, const SomeRows& rows, int32_t block_rows, PanelsOf panels_of, Worker& worker, F f) {
    int64_t item = worker.take();
    int64_t first_item = 0;  // of this block and part
    for (int32_t row = 0; row < rows.num_rows; row += block_rows) {
        SomeRows block = rows.from(row, block_rows);
        for (const Part& part : weight.parts) {
            const int32_t panels = panels_of(part, block.num_rows, worker.num_workers());
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

#if defined(__AMX_BF16__)

// Panels of an item in matrix tiles, so that workers end together. Many rows are worth fewer, larger items: those of all
// its panels are read while they are near.
inline int32_t panels_in_tiles(const Part& part, int32_t num_rows, int32_t num_workers) {
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

#endif

}  // namespace kvarto::KVARTO_ISA
