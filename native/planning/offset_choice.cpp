#include "planning/offset_choice.h"

#include <algorithm>

namespace kvarto {

int32_t Choice::next(const std::vector<int32_t>& items) {
    // Never empty: what the sweep starts first is on its floor. And with the lowest floor, nothing can lie below it.
    const int32_t lowest_of_all = *lowest(items);
    std::optional<int32_t> item = lowest(items, most_urgent_section(items));
    while (item) {
        const std::vector<int32_t> below = neighbours_below(*item);
        if (below.empty()) return *item;
        item = lowest(below);
    }
    return lowest_of_all;
}

std::optional<int32_t> Choice::lowest(const std::vector<int32_t>& items) const {
    std::optional<int32_t> best;
    for (int32_t item : items) {
        if (bounds_.may_rest_on_floor(item) && comes_before(item, best)) best = item;
    }
    return best;
}

std::optional<int32_t> Choice::lowest(const std::vector<int32_t>& items, int32_t section) const {
    std::optional<int32_t> best;
    for (int32_t item : items) {
        if (!in_.items[item].is_live_in(section)) continue;
        if (bounds_.may_rest_on_floor(item) && comes_before(item, best)) best = item;
    }
    return best;
}

bool Choice::comes_before(int32_t item, std::optional<int32_t> other) const {
    if (!other) return true;
    const int32_t floor = packing_.floor(item);
    const int32_t other_floor = packing_.floor(*other);
    return floor != other_floor ? floor < other_floor : rank_[item] < rank_[*other];
}

std::vector<int32_t> Choice::neighbours_below(int32_t item) const {
    std::vector<int32_t> below;
    for (int32_t other : in_.neighbours[item]) {
        if (!packing_.is_placed(other) && bounds_.top(other) <= packing_.floor(item)) below.push_back(other);
    }
    return below;
}

int32_t Choice::most_urgent_section(const std::vector<int32_t>& items) {
    const int32_t first = in_.items[items[0]].first;
    int32_t last = first;
    for (int32_t item : items) last = std::max(last, in_.items[item].last);
    std::fill(lowest_.begin() + first, lowest_.begin() + last, kNever);
    for (int32_t item : items) {
        const int32_t bound = bounds_.bound(item);
        for (int32_t s = in_.items[item].first; s < in_.items[item].last; ++s) lowest_[s] = std::min(lowest_[s], bound);
    }
    int32_t best = first;  // the first item is live in it
    for (int32_t s = first + 1; s < last; ++s) {
        if (packing_.left()[s] > 0 && urgency(s) > urgency(best)) best = s;
    }
    return best;
}

std::pair<double, double> Choice::urgency(int32_t section) const {
    const int32_t left = packing_.left()[section];
    const int32_t room_to_waste = in_.capacity - lowest_[section] - left;
    switch (urgency_) {
        case Urgency::kTightest: return {-room_to_waste, left};
        case Urgency::kLowest: return {-lowest_[section], 0};
        case Urgency::kWeighted: return {weights_[section] / (room_to_waste + 1), 0};
    }
    return {0, 0};
}

}  // namespace kvarto
