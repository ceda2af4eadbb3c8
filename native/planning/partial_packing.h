// What a search has decided so far: which items are placed, and which may not rest where they would rest now.
#pragma once

#include <cstdint>
#include <vector>

#include "planning/offset_instance.h"

namespace kvarto {

// An item's floor is the highest top among the placed items that overlap it in time. To place an item is to put it on
// its floor, below all its neighbours that are not placed yet; to pass it over is to say that it will rest on one of
// those.
class PartialPacking {
public:
    explicit PartialPacking(const Instance& instance)
        : in_(instance), floor_(in_.num_items(), 0), is_passed_over_(in_.num_items(), 0), offset_(in_.num_items(), -1),
          left_(in_.load) {}

    bool is_placed(int32_t item) const { return offset_[item] >= 0; }
    bool is_passed_over(int32_t item) const { return is_passed_over_[item]; }
    int32_t floor(int32_t item) const { return floor_[item]; }
    const std::vector<int32_t>& left() const { return left_; }  // by section: sizes still to be placed
    const std::vector<int32_t>& offsets() const { return offset_; }

    void place(int32_t item);
    void pass_over(int32_t item);

    // Takes back what was decided since `mark()` returned `mark`.
    size_t mark() const { return trail_.size(); }
    void undo(size_t mark);

private:
    struct Change {
        int32_t item;
        int32_t floor;  // before it
        char is_passed_over;
        bool is_placement;
    };

    void record(int32_t item, bool is_placement) {
        trail_.push_back({item, floor_[item], is_passed_over_[item], is_placement});
    }
    void add_to_left(int32_t item, int32_t size);

    const Instance& in_;
    std::vector<int32_t> floor_;
    std::vector<char> is_passed_over_;  // until the floor rises
    std::vector<int32_t> offset_;       // -1: not placed
    std::vector<int32_t> left_;
    std::vector<Change> trail_;
};

}  // namespace kvarto
