// Only canonical packings are looked at: each buffer rests on another one or on the ground, and buffers are placed by
// ascending (offset, rank). Any packing can be pushed down into one, so nothing is lost, and a buffer that was passed
// over once can only come to rest on something that is placed later: that raises the lower bounds of its offset.
//
// At a node, `floor(j)` is the highest top among the placed buffers that overlap j in time, and bound(j) ≥ floor(j)
// the lowest offset that is still possible for it. A branch dies when in some section (a stretch of time in which
// nothing begins or ends) the lowest bound plus all that is still to be placed there exceeds the capacity. What falls
// apart in time is searched part by part. Which of several candidates is tried first is a matter of luck, so the search
// restarts with ranks by other measures, shaken more and more, and budgets of nodes by Luby's sequence.
//
// Sources: canonical solutions, dominance and sections as in MiniMalloc (Moffitt, ASPLOS 2023); restarts as in Luby,
// Sinclair and Zuckerman (1993). The bounds of passed-over buffers and the tie by rank are ours.
#include "planning/offset_search.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <numeric>
#include <random>

namespace kvarto {
namespace {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max() / 2;
constexpr int64_t kFirstBudget = 2000;  // nodes of the shortest run
constexpr int kNumMeasures = 5;
constexpr int kNumShakes = 6;          // strengths of the noise, from none on
constexpr double kStrongestShake = 0.4;

struct Item {
    int32_t first, last;  // sections
    int32_t size;
};

// The instance, in sections and units of the greatest common divisor; the same for all runs.
struct Instance {
    std::vector<Item> items;
    std::vector<std::vector<int32_t>> neighbours;  // items that overlap in time
    std::vector<int32_t> load;                     // by section: sum of sizes
    std::vector<int32_t> peak;                     // by item: the largest load of its sections
    int32_t capacity = 0;

    int32_t num_sections() const { return static_cast<int32_t>(load.size()); }
};

struct Placed {
    int32_t offset, rank;
};

// One run with fixed ranks and a budget of nodes.
class Run {
public:
    Run(const Instance& instance, std::vector<int32_t> ranks, int64_t budget)
        : in_(instance), rank_(std::move(ranks)), budget_(budget), floor_(in_.items.size(), 0),
          bound_(in_.items.size(), 0), offset_(in_.items.size(), -1), left_(in_.load), lowest_(in_.load.size()) {}

    bool search() {
        std::vector<int32_t> all(in_.items.size());
        std::iota(all.begin(), all.end(), 0);
        return search_parts(all, {0, -1});
    }
    bool is_out() const { return num_nodes_ > budget_; }
    int64_t num_nodes() const { return num_nodes_; }
    const std::vector<int32_t>& offsets() const { return offset_; }

private:
    bool is_placed(int32_t item) const { return offset_[item] >= 0; }

    // May still be placed where it would rest now; otherwise its turn has passed.
    bool is_ahead(int32_t item, Placed last) const {
        return floor_[item] > last.offset || (floor_[item] == last.offset && rank_[item] > last.rank);
    }

    int32_t lowest_offset(int32_t item, Placed last) const {
        if (is_ahead(item, last)) return floor_[item];
        int32_t lowest = kNever;  // it will rest on a neighbour that is still to come
        for (int32_t other : in_.neighbours[item]) {
            if (is_placed(other)) continue;
            lowest = std::min(lowest, std::max(floor_[other], last.offset) + in_.items[other].size);
        }
        return lowest;
    }

    bool set_bounds(const std::vector<int32_t>& rest, Placed last) {
        for (int32_t item : rest) {
            bound_[item] = lowest_offset(item, last);
            if (bound_[item] > in_.capacity - in_.items[item].size) return false;
        }
        return true;
    }

    // Whether in each section what is left fits above the lowest offset that anything there can have.
    bool has_room(const std::vector<int32_t>& rest) {
        int32_t first = in_.num_sections();
        int32_t last = 0;
        for (int32_t item : rest) {
            first = std::min(first, in_.items[item].first);
            last = std::max(last, in_.items[item].last);
        }
        std::fill(lowest_.begin() + first, lowest_.begin() + std::max(first, last), kNever);
        for (int32_t item : rest) {
            const int32_t bound = bound_[item];
            for (int32_t s = in_.items[item].first; s < in_.items[item].last; ++s) {
                lowest_[s] = lowest_[s] < bound ? lowest_[s] : bound;
            }
        }
        for (int32_t s = first; s < last; ++s) {
            if (left_[s] > 0 && lowest_[s] > in_.capacity - left_[s]) return false;
        }
        return true;
    }

    // `items` ascend by first section. Parts that share no section are searched one after the other.
    bool search_parts(const std::vector<int32_t>& items, Placed last) {
        std::vector<std::vector<int32_t>> parts;
        int32_t end = -1;
        for (int32_t item : items) {
            if (in_.items[item].first >= end) parts.emplace_back();
            parts.back().push_back(item);
            end = std::max(end, in_.items[item].last);
        }
        std::sort(parts.begin(), parts.end(), [](auto& a, auto& b) { return a.size() < b.size(); });
        for (size_t done = 0; done < parts.size(); ++done) {
            if (search_part(parts[done], last)) continue;
            for (size_t i = 0; i < done; ++i) take_back(parts[i]);
            return false;
        }
        return true;
    }

    bool search_part(const std::vector<int32_t>& items, Placed last) {
        std::vector<int32_t> rest(items.size() - 1);
        for (int32_t item : candidates(items, last)) {
            if (++num_nodes_ > budget_) return false;
            const Placed placed{floor_[item], rank_[item]};
            const size_t mark = trail_.size();
            place(item);
            std::copy_if(items.begin(), items.end(), rest.begin(), [item](int32_t other) { return other != item; });
            if (set_bounds(rest, placed) && has_room(rest) && search_parts(rest, placed)) return true;
            lift(item, mark);
        }
        return false;
    }

    // Those whose turn may be next, lowest first: none that another could still be placed wholly below.
    std::vector<int32_t> candidates(const std::vector<int32_t>& items, Placed last) const {
        int32_t ceiling = kNever;
        for (int32_t item : items) ceiling = std::min(ceiling, lowest_offset(item, last) + in_.items[item].size);
        std::vector<int32_t> found;
        for (int32_t item : items) {
            if (is_ahead(item, last) && floor_[item] < ceiling) found.push_back(item);
        }
        std::sort(found.begin(), found.end(), [this](int32_t a, int32_t b) {
            return floor_[a] != floor_[b] ? floor_[a] < floor_[b] : rank_[a] < rank_[b];
        });
        return found;
    }

    void place(int32_t item) {
        const Item& it = in_.items[item];
        const int32_t top = floor_[item] + it.size;
        offset_[item] = floor_[item];
        for (int32_t s = it.first; s < it.last; ++s) left_[s] -= it.size;
        for (int32_t other : in_.neighbours[item]) {
            if (is_placed(other) || floor_[other] >= top) continue;
            trail_.push_back({other, floor_[other]});
            floor_[other] = top;
        }
    }

    void lift(int32_t item, size_t mark) {
        for (; trail_.size() > mark; trail_.pop_back()) floor_[trail_.back().first] = trail_.back().second;
        take_back({item});
    }

    void take_back(const std::vector<int32_t>& items) {
        for (int32_t item : items) {
            if (!is_placed(item)) continue;
            offset_[item] = -1;
            for (int32_t s = in_.items[item].first; s < in_.items[item].last; ++s) left_[s] += in_.items[item].size;
        }
    }

    const Instance& in_;
    std::vector<int32_t> rank_;
    int64_t budget_;
    int64_t num_nodes_ = 0;
    std::vector<int32_t> floor_;
    std::vector<int32_t> bound_;
    std::vector<int32_t> offset_;  // -1: not placed
    std::vector<int32_t> left_;    // by section: sizes still to be placed
    std::vector<int32_t> lowest_;
    std::vector<std::pair<int32_t, int32_t>> trail_;  // floors to restore
};

// The instance in small numbers; none where they are not small.
std::optional<Instance> make_instance(const std::vector<SearchBuffer>& buffers, int64_t capacity, int64_t unit) {
    std::vector<int32_t> times;
    for (const SearchBuffer& b : buffers) times.insert(times.end(), {b.first, b.last});
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    const auto section = [&times](int32_t time) {
        return static_cast<int32_t>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
    };
    Instance in;
    if (capacity / unit >= kNever) return std::nullopt;
    in.capacity = static_cast<int32_t>(capacity / unit);
    std::vector<int64_t> load(times.size(), 0);
    for (const SearchBuffer& b : buffers) {
        if (b.size > capacity) return std::nullopt;
        in.items.push_back({section(b.first), section(b.last), static_cast<int32_t>(b.size / unit)});
        for (int32_t s = in.items.back().first; s < in.items.back().last; ++s) load[s] += b.size / unit;
    }
    if (std::any_of(load.begin(), load.end(), [](int64_t sum) { return sum >= kNever; })) return std::nullopt;
    in.load.assign(load.begin(), load.end());
    in.neighbours.resize(in.items.size());
    for (size_t i = 0; i < in.items.size(); ++i) {
        const Item& a = in.items[i];
        in.peak.push_back(*std::max_element(in.load.begin() + a.first, in.load.begin() + a.last));
        for (size_t j = 0; j < in.items.size(); ++j) {
            const Item& b = in.items[j];
            if (i != j && a.first < b.last && b.first < a.last) in.neighbours[i].push_back(static_cast<int32_t>(j));
        }
    }
    return in;
}

// Which of equals is tried first: by one of five measures, larger first, each shaken by up to ± `shake` / 2.
std::vector<int32_t> make_ranks(const Instance& in, const std::vector<SearchBuffer>& buffers, int measure, double shake,
                                std::mt19937& random) {
    std::uniform_real_distribution<double> noise(1.0 - shake / 2, 1.0 + shake / 2);
    std::vector<std::array<double, 3>> keys;
    for (size_t i = 0; i < in.items.size(); ++i) {
        const double width = double(buffers[i].last) - buffers[i].first;
        const double size = in.items[i].size;
        const double area = width * size;
        const double peak = in.peak[i];
        std::array<double, 3> key = measure == 0   ? std::array{width, area, peak}
                                    : measure == 1 ? std::array{peak, area, width}
                                    : measure == 2 ? std::array{peak, width, area}
                                    : measure == 3 ? std::array{area, width, peak}
                                                   : std::array{size, width, peak};
        for (double& value : key) value *= -noise(random);
        keys.push_back(key);
    }
    std::vector<int32_t> order(in.items.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&keys](int32_t a, int32_t b) { return keys[a] < keys[b]; });
    std::vector<int32_t> ranks(order.size());
    for (size_t i = 0; i < order.size(); ++i) ranks[order[i]] = static_cast<int32_t>(i);
    return ranks;
}

// 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 …, from 0 on.
int64_t luby(int64_t index) {
    int64_t size = 1;
    while (size < index + 1) size = 2 * size + 1;
    while (size - 1 != index) {
        size /= 2;
        index %= size;
    }
    return (size + 1) / 2;
}

}  // namespace

SearchResult search_offsets(const std::vector<SearchBuffer>& buffers, int64_t capacity, double time_limit_s) {
    SearchResult result;
    int64_t unit = 0;
    for (const SearchBuffer& b : buffers) unit = std::gcd(unit, b.size);
    if (unit == 0) {  // nothing takes room
        result.offsets.emplace(buffers.size(), 0);
        return result;
    }
    std::vector<size_t> order;
    for (size_t i = 0; i < buffers.size(); ++i) {
        if (buffers[i].size > 0) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return buffers[a].first < buffers[b].first; });
    std::vector<SearchBuffer> sorted;
    for (size_t i : order) sorted.push_back(buffers[i]);
    const std::optional<Instance> instance = make_instance(sorted, capacity, unit);
    if (!instance) return result;

    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(time_limit_s);
    std::mt19937 random(1);
    for (int64_t round = 0; round == 0 || Clock::now() < end; ++round) {
        const double shake = kStrongestShake * double(round % kNumShakes) / (kNumShakes - 1);
        for (int measure = 0; measure < kNumMeasures && (round == 0 || Clock::now() < end); ++measure) {
            Run run(*instance, make_ranks(*instance, sorted, measure, shake, random), kFirstBudget * luby(round));
            const bool is_found = run.search();
            result.num_nodes += run.num_nodes();
            if (is_found) {
                result.offsets.emplace(buffers.size(), 0);
                for (size_t i = 0; i < order.size(); ++i) (*result.offsets)[order[i]] = run.offsets()[i] * unit;
                return result;
            }
            if (!run.is_out()) {
                result.is_complete = true;
                return result;
            }
        }
    }
    return result;
}

}  // namespace kvarto
