// Which item a search decides on next.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "planning/offset_bounds.h"
#include "planning/offset_instance.h"
#include "planning/partial_packing.h"

namespace kvarto {

// Which section is urgent.
enum class Urgency {
    kTightest,  // the least room to waste; of equals, the one with most left to place
    kLowest,    // the lowest bound
    kWeighted,  // much weight for the room to waste
};

// The items of the most urgent section come first, from its floor up: a dead end shows before much else is placed.
class Choice {
public:
    // `ranks` decide between items with the same floor. `weights`, by section, may change between calls.
    Choice(const Instance& instance, const PartialPacking& packing, const OffsetBounds& bounds, Urgency urgency,
           std::vector<int32_t> ranks, const std::vector<double>& weights)
        : in_(instance), packing_(packing), bounds_(bounds), urgency_(urgency), rank_(std::move(ranks)),
          weights_(weights), lowest_(in_.num_sections()) {}

    // One of `items` that may rest on its floor, while no neighbour can come to lie wholly below it any more: in all
    // packings that are left it rests there, below its neighbours that are not placed, or on one of them.
    int32_t next(const std::vector<int32_t>& items);

private:
    std::optional<int32_t> lowest(const std::vector<int32_t>& items, int32_t section) const;
    std::optional<int32_t> lowest(const std::vector<int32_t>& items) const;
    int32_t most_urgent_section(const std::vector<int32_t>& items);
    std::pair<double, double> urgency(int32_t section) const;
    std::vector<int32_t> neighbours_below(int32_t item) const;
    bool comes_before(int32_t item, std::optional<int32_t> other) const;

    const Instance& in_;
    const PartialPacking& packing_;
    const OffsetBounds& bounds_;
    Urgency urgency_;
    std::vector<int32_t> rank_;
    const std::vector<double>& weights_;
    std::vector<int32_t> lowest_;  // by section: the lowest bound of its items
};

}  // namespace kvarto
