// Of all packings take the one with the least sum of offsets: each buffer rests on another one or on the ground, and
// none could move into a gap below. The search looks for such packings only. It decides on one buffer after another:
// either it rests on its floor, below all its neighbours that are not placed, or it is passed over, and will rest on one of
// those. After each decision a sweep raises the bounds of the offsets; a branch dies when a buffer finds no place. What
// falls apart in time is searched part by part. What to decide on next is a matter of luck, so the search restarts with
// other notions of urgent sections and other ranks, shaken more and more, and with budgets of nodes by Luby's sequence.
//
// Sources: sections, dominance and decomposition as in MiniMalloc (Moffitt, ASPLOS 2023); to place or to postpone as in
// Le Pape, Couronné, Vergamini and Gosselin (1994); weights where the search failed as in Boussemart, Hemery, Lecoutre
// and Sais (ECAI 2004); restarts as in Luby, Sinclair and Zuckerman (1993). That the most urgent section comes first,
// rather than the lowest buffer of all, is ours.
#include "planning/offset_search.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <random>

#include "planning/offset_instance.h"
#include "planning/offset_run.h"

namespace kvarto {
namespace {

constexpr int64_t kFirstSlack = 300;  // nodes of the shortest run beyond one per buffer, which is what pure luck needs
constexpr int kNumMeasures = 5;
constexpr std::array kUrgencies = {Urgency::kTightest, Urgency::kLowest, Urgency::kWeighted};
constexpr int kNumShakes = 6;  // strengths of the noise, from none on
constexpr double kStrongestShake = 0.4;

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

// Runs until one of them finds a packing or proves that there is none. `buffers` are those of the instance.
SearchResult search_with_restarts(const Instance& instance, const std::vector<SearchBuffer>& buffers,
                                  Clock::time_point end) {
    const int64_t first_budget = static_cast<int64_t>(instance.num_items()) + kFirstSlack;
    SearchResult result;
    std::mt19937 random(1);
    std::vector<double> weights(instance.num_sections(), 1.0);
    for (int64_t round = 0;; ++round) {
        const double shake = kStrongestShake * double(round % kNumShakes) / (kNumShakes - 1);
        for (size_t index = 0; index < kNumMeasures * kUrgencies.size(); ++index) {
            const int measure = static_cast<int>(index / kUrgencies.size());
            const Urgency urgency = kUrgencies[index % kUrgencies.size()];
            Run run(instance, urgency, make_ranks(instance, buffers, measure, shake, random), weights,
                    {first_budget * luby(round), end});
            const bool is_found = run.search();
            result.num_nodes += run.num_nodes();
            result.is_complete = !is_found && !run.is_out();
            if (is_found) result.offsets.emplace(run.offsets().begin(), run.offsets().end());
            if (is_found || result.is_complete || Clock::now() >= end) return result;
        }
    }
}

}  // namespace

SearchResult search_offsets(const std::vector<SearchBuffer>& buffers, int64_t capacity, double time_limit_s) {
    const auto limit = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(time_limit_s));
    const Clock::time_point end = Clock::now() + limit;
    SearchResult result;
    result.is_complete = std::any_of(buffers.begin(), buffers.end(), [&](auto& b) { return b.size > capacity; });
    if (result.is_complete) return result;
    std::vector<size_t> order;  // of those that take room
    int64_t unit = 0;
    for (size_t i = 0; i < buffers.size(); ++i) {
        unit = std::gcd(unit, buffers[i].size);
        if (buffers[i].size > 0) order.push_back(i);
    }
    std::vector<int64_t> offsets(buffers.size(), 0);
    if (!order.empty()) {
        std::stable_sort(order.begin(), order.end(),
                         [&](size_t a, size_t b) { return buffers[a].first < buffers[b].first; });
        std::vector<SearchBuffer> sorted;
        for (size_t i : order) sorted.push_back(buffers[i]);
        const std::optional<Instance> instance = make_instance(sorted, capacity, unit);
        if (!instance) return result;
        result = search_with_restarts(*instance, sorted, end);
        if (!result.offsets) return result;
        for (size_t i = 0; i < order.size(); ++i) offsets[order[i]] = (*result.offsets)[i] * unit;
    }
    result.offsets = std::move(offsets);
    return result;
}

}  // namespace kvarto
