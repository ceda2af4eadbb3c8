#include "planning/offset_run.h"

#include <algorithm>
#include <numeric>

namespace kvarto {

bool Run::search() {
    std::vector<int32_t> all(in_.num_items());
    std::iota(all.begin(), all.end(), 0);
    return has_room(all) && search_parts(all);
}

// `items` ascend by first section. Parts that share no section are searched one after the other, the smallest first.
bool Run::search_parts(const std::vector<int32_t>& items) {
    std::vector<std::vector<int32_t>> parts;
    int32_t end = -1;
    for (int32_t item : items) {
        if (in_.items[item].first >= end) parts.emplace_back();
        parts.back().push_back(item);
        end = std::max(end, in_.items[item].last);
    }
    std::sort(parts.begin(), parts.end(), [](auto& a, auto& b) { return a.size() < b.size(); });
    return std::all_of(parts.begin(), parts.end(), [this](auto& part) { return search_part(part); });
}

// Where nothing is found, the caller takes back what was decided.
bool Run::search_part(const std::vector<int32_t>& items) {
    std::vector<int32_t> rest(items.size() - 1);
    while (count_node()) {
        const int32_t item = choice_.next(items);
        const size_t mark = packing_.mark();
        packing_.place(item);
        std::copy_if(items.begin(), items.end(), rest.begin(), [item](int32_t other) { return other != item; });
        if (has_room(rest) && search_parts(rest)) return true;
        packing_.undo(mark);
        packing_.pass_over(item);
        if (!has_room(items)) return false;
    }
    return false;
}

bool Run::has_room(const std::vector<int32_t>& items) {
    if (bounds_.update(items)) return true;
    for (int32_t item : bounds_.stranded()) {
        const Item& it = in_.items[item];
        for (int32_t s = it.first; s < it.last; ++s) weights_[s] += 1.0 / it.num_sections();
    }
    return false;
}

bool Run::count_node() {
    is_out_ = is_out_ || ++num_nodes_ > limits_.num_nodes || Clock::now() >= limits_.end;
    return !is_out_;
}

}  // namespace kvarto
