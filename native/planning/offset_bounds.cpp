#include "planning/offset_bounds.h"

#include <algorithm>
#include <functional>

namespace kvarto {

bool OffsetBounds::update(const std::vector<int32_t>& items) {
    if (items.empty()) return true;
    begin(items);
    size_t next = 0;
    while (next < starts_.size() || (!ends_.empty() && !waiting_.empty())) {
        const bool is_end = !ends_.empty() && (next == starts_.size() || ends_[0].first <= starts_[next].first);
        if (!is_end) {
            try_to_start(starts_[next++]);
        } else if (!end_first()) {
            return false;
        }
    }
    stranded_ = waiting_;
    return waiting_.empty() &&
           std::all_of(items.begin(), items.end(), [this](int32_t item) { return can_fill_hole_below(item); });
}

void OffsetBounds::begin(const std::vector<int32_t>& items) {
    starts_.clear();
    ends_.clear();
    waiting_.clear();
    int32_t last = 0;
    for (int32_t item : items) {
        last = std::max(last, in_.items[item].last);
        if (packing_.is_passed_over(item)) {
            waiting_.push_back(item);
            blocked_by_[item] = kNever;
        } else {
            starts_.emplace_back(packing_.floor(item), item);
        }
    }
    std::sort(starts_.begin(), starts_.end());
    const int32_t first = in_.items[items[0]].first;
    std::copy(packing_.left().begin() + first, packing_.left().begin() + last, above_.begin() + first);
}

void OffsetBounds::try_to_start(Event event) {
    const auto [time, item] = event;
    if (may_start(item, time)) {
        start(item, time);
    } else {
        waiting_.push_back(item);
    }
}

// The first item to end makes room, and something to rest on.
bool OffsetBounds::end_first() {
    const auto [time, ended] = ends_[0];
    std::pop_heap(ends_.begin(), ends_.end(), std::greater<>());
    ends_.pop_back();
    const Item& it = in_.items[ended];
    for (int32_t s = it.first; s < it.last; ++s) above_[s] -= it.size;
    size_t num_kept = 0;
    for (int32_t item : waiting_) {
        if (time > in_.capacity - in_.items[item].size) {
            stranded_ = {item};
            return false;
        }
        if (is_due(item, it, time) && may_start(item, time)) {
            start(item, time);
        } else {
            waiting_[num_kept++] = item;
        }
    }
    waiting_.resize(num_kept);
    return true;
}

// Whether it may have become possible to start `item`; cheaper than `may_start`.
bool OffsetBounds::is_due(int32_t item, const Item& ended, int32_t time) const {
    const int32_t section = blocked_by_[item];
    if (section == kNever) return ended.overlaps(in_.items[item]);
    return ended.is_live_in(section) && above_[section] <= in_.capacity - time;
}

bool OffsetBounds::may_start(int32_t item, int32_t time) {
    const Item& it = in_.items[item];
    const int32_t room = in_.capacity - time;
    for (int32_t s = it.first; s < it.last; ++s) {
        if (above_[s] <= room) continue;
        blocked_by_[item] = s;
        return false;
    }
    return true;
}

void OffsetBounds::start(int32_t item, int32_t time) {
    bound_[item] = time;
    ends_.emplace_back(top(item), item);
    std::push_heap(ends_.begin(), ends_.end(), std::greater<>());
}

// An item that is kept off its floor leaves a hole there; if no neighbour can reach into it, the item could move down.
bool OffsetBounds::can_fill_hole_below(int32_t item) const {
    if (bound_[item] == packing_.floor(item)) return true;
    const int32_t hole_top = packing_.floor(item) + in_.items[item].size;
    const std::vector<int32_t>& neighbours = in_.neighbours[item];
    return std::any_of(neighbours.begin(), neighbours.end(), [&](int32_t other) {
        return !packing_.is_placed(other) && bound_[other] < hole_top;
    });
}

}  // namespace kvarto
