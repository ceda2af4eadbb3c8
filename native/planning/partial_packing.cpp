#include "planning/partial_packing.h"

namespace kvarto {

void PartialPacking::add_to_left(int32_t item, int32_t size) {
    for (int32_t s = in_.items[item].first; s < in_.items[item].last; ++s) left_[s] += size;
}

void PartialPacking::place(int32_t item) {
    record(item, true);
    offset_[item] = floor_[item];
    add_to_left(item, -in_.items[item].size);
    const int32_t top = floor_[item] + in_.items[item].size;
    for (int32_t other : in_.neighbours[item]) {
        if (is_placed(other) || floor_[other] >= top) continue;
        record(other, false);
        floor_[other] = top;
        is_passed_over_[other] = 0;
    }
}

void PartialPacking::pass_over(int32_t item) {
    record(item, false);
    is_passed_over_[item] = 1;
}

void PartialPacking::undo(size_t mark) {
    for (; trail_.size() > mark; trail_.pop_back()) {
        const Change& change = trail_.back();
        floor_[change.item] = change.floor;
        is_passed_over_[change.item] = change.is_passed_over;
        if (!change.is_placement) continue;
        offset_[change.item] = -1;
        add_to_left(change.item, in_.items[change.item].size);
    }
}

}  // namespace kvarto
