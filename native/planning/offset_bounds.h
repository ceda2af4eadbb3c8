// The lowest offsets that items can still have, by one sweep over the offsets from the ground up.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planning/offset_instance.h"
#include "planning/partial_packing.h"

namespace kvarto {

// Sections are machines, offsets are times, and the capacity is the deadline of a job shop whose jobs need several
// machines at once. An item may start at time t if in each of its sections all that cannot end by t, itself included,
// fits between t and the deadline (the not-first rule: Carlier and Pinson, Management Science 1989). An item that may
// not start at its floor starts on top of another one: when the first of its neighbours ends that lets it.
//
//     capacity  -------------------------------
//                 item and what cannot end by t   must fit; else the item is not below all of that
//            t  -------------------------------
//                 what can end by t
class OffsetBounds {
public:
    OffsetBounds(const Instance& instance, const PartialPacking& packing)
        : in_(instance), packing_(packing), bound_(in_.num_items(), 0), blocked_by_(in_.num_items()),
          above_(in_.num_sections()) {}

    // Whether each of `items`, which are all that is to be placed in their sections, may still have a place.
    bool update(const std::vector<int32_t>& items);

    int32_t bound(int32_t item) const { return bound_[item]; }
    int32_t top(int32_t item) const { return bound_[item] + in_.items[item].size; }
    bool may_rest_on_floor(int32_t item) const {
        return !packing_.is_passed_over(item) && bound_[item] == packing_.floor(item);
    }
    // Those that found no place in the last update.
    const std::vector<int32_t>& stranded() const { return stranded_; }

private:
    using Event = std::pair<int32_t, int32_t>;  // time, item

    void begin(const std::vector<int32_t>& items);
    void try_to_start(Event event);
    bool end_first();
    bool is_due(int32_t item, const Item& ended, int32_t time) const;
    bool may_start(int32_t item, int32_t time);
    void start(int32_t item, int32_t time);
    bool can_fill_hole_below(int32_t item) const;

    const Instance& in_;
    const PartialPacking& packing_;
    std::vector<int32_t> bound_;
    std::vector<int32_t> blocked_by_;  // by waiting item: a section without room for it, or kNever
    std::vector<int32_t> above_;       // by section: sizes of what cannot end by now
    std::vector<Event> starts_;        // ascending
    std::vector<Event> ends_;          // a heap, the first on top
    std::vector<int32_t> waiting_;
    std::vector<int32_t> stranded_;
};

}  // namespace kvarto
