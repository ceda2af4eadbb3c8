#include "planning/offset_instance.h"

#include <algorithm>

namespace kvarto {
namespace {

std::vector<Item> make_items(const std::vector<SearchBuffer>& buffers, int64_t unit) {
    std::vector<int32_t> times;
    for (const SearchBuffer& b : buffers) times.insert(times.end(), {b.first, b.last});
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    const auto section = [&times](int32_t time) {
        return static_cast<int32_t>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
    };
    std::vector<Item> items;
    for (const SearchBuffer& b : buffers) {
        items.push_back({section(b.first), section(b.last), static_cast<int32_t>(b.size / unit)});
    }
    return items;
}

std::vector<int64_t> sum_sizes(const std::vector<Item>& items) {
    int32_t num_sections = 0;
    for (const Item& item : items) num_sections = std::max(num_sections, item.last);
    std::vector<int64_t> load(num_sections, 0);
    for (const Item& item : items) {
        for (int32_t s = item.first; s < item.last; ++s) load[s] += item.size;
    }
    return load;
}

std::vector<std::vector<int32_t>> find_neighbours(const std::vector<Item>& items) {
    std::vector<std::vector<int32_t>> neighbours(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
        for (size_t j = 0; j < items.size(); ++j) {
            if (i != j && items[i].overlaps(items[j])) neighbours[i].push_back(static_cast<int32_t>(j));
        }
    }
    return neighbours;
}

}  // namespace

std::optional<Instance> make_instance(const std::vector<SearchBuffer>& buffers, int64_t capacity, int64_t unit) {
    const auto is_large = [](int64_t value) { return value >= kNever; };
    if (is_large(capacity / unit)) return std::nullopt;  // and no size is above the capacity
    Instance in;
    in.capacity = static_cast<int32_t>(capacity / unit);
    in.items = make_items(buffers, unit);
    const std::vector<int64_t> load = sum_sizes(in.items);
    if (std::any_of(load.begin(), load.end(), is_large)) return std::nullopt;
    in.load.assign(load.begin(), load.end());
    in.neighbours = find_neighbours(in.items);
    for (const Item& item : in.items) {
        in.peak.push_back(*std::max_element(in.load.begin() + item.first, in.load.begin() + item.last));
    }
    return in;
}

}  // namespace kvarto
