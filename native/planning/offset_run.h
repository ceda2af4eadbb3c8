// One run of the exact search for offsets: depth first, until a packing is found, none is left, or a limit is reached.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "planning/offset_bounds.h"
#include "planning/offset_choice.h"
#include "planning/offset_instance.h"
#include "planning/partial_packing.h"

namespace kvarto {

using Clock = std::chrono::steady_clock;

struct RunLimits {
    int64_t num_nodes;
    Clock::time_point end;  // of the whole search: apart from that, no clock decides what is searched
};

class Run {
public:
    // Adds to `weights`, by section, where items found no place, so that later runs look there first.
    Run(const Instance& instance, Urgency urgency, std::vector<int32_t> ranks, std::vector<double>& weights,
        RunLimits limits)
        : in_(instance), packing_(in_), bounds_(in_, packing_),
          choice_(in_, packing_, bounds_, urgency, std::move(ranks), weights), weights_(weights), limits_(limits) {}

    bool search();
    bool is_out() const { return is_out_; }  // stopped by its limits
    int64_t num_nodes() const { return num_nodes_; }
    const std::vector<int32_t>& offsets() const { return packing_.offsets(); }

private:
    bool search_parts(const std::vector<int32_t>& items);
    bool search_part(const std::vector<int32_t>& items);
    bool has_room(const std::vector<int32_t>& items);
    bool count_node();

    const Instance& in_;
    PartialPacking packing_;
    OffsetBounds bounds_;
    Choice choice_;
    std::vector<double>& weights_;
    RunLimits limits_;
    int64_t num_nodes_ = 0;
    bool is_out_ = false;
};

}  // namespace kvarto
