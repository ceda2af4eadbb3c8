// B of an update by many rows of an item: more than a block of them.
#pragma once

#include "core/adapters.h"
#include "ops/adapter_items.h"
#include "ops/adapter_span.h"
#include "ops/prefetch.h"

namespace kvarto::KVARTO_ISA {

// Columns of B that come next, of an item or of the one behind it; none where there is no item.
struct ColumnsAhead {
    const UpdateItem& item;
    RowRange columns;

    // Asks for a share of the strips: that of one of so many turns.
    void ask(int32_t turn, int32_t num_turns) const {
        if (!item) return;
        const Strips& b = item.part->b;
        const int64_t bytes = b.bytes(columns.last - columns.first);
        for (int32_t s = turn * b.num_strips / num_turns; s < (turn + 1) * b.num_strips / num_turns; ++s) {
            const std::byte* there = item.adapter().at(b.place(s, columns.first), bytes);
            for (int64_t i = 0; there != nullptr && i < bytes; i += 64) prefetch_to_second_level(there + i);
        }
    }
};

// The columns of a span, for the rows of an item; then those of `next` come.
void expand_many_rows(const AdapterWork& work, const UpdateItem& item, const AdapterSpan& span, RowRange range,
                      const ColumnsAhead& next);

}  // namespace kvarto::KVARTO_ISA
