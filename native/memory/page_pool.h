// Which pages of one tier are free, and who keeps the others. Ids and counts only, no bytes.
//
//     ref_count   users                                   free      = both counts 0, not cached
//     pin_count   copies that still read or write it      held      = ref_count > 0
//     is_cached   its content is worth keeping            evictable = both counts 0, cached
//                                                         draining  = ref_count 0, pin_count > 0
//
// Law: free + held + evictable + draining = total. kvarto/memory/page_pool.py checks it, from the arrays.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace kvarto {

// A page is not in a state that the call allows. Pages that were dealt with before it have been changed.
struct BrokenLaw : std::logic_error {
    using std::logic_error::logic_error;
};

// Pages that are not free, by state.
struct PageCounts {
    int64_t held = 0, evictable = 0, draining = 0;
};

using PageIds = std::span<const int32_t>;

// Nothing here allocates but the constructor, and the first allocation for an owner. Calls take O(pages named) and
// throw std::out_of_range, nothing changed, for ids that are no page.
class PagePool {
public:
    static constexpr int32_t kNoOwner = -1;

    explicit PagePool(int64_t num_pages);

    int64_t num_pages() const { return static_cast<int64_t>(free_.size()); }
    int64_t num_free() const { return num_free_; }
    // Owners are numbered from 0; those that never allocated have no pages.
    int64_t num_owners() const { return static_cast<int64_t>(by_owner_.size()); }
    const PageCounts& counts() const { return all_; }
    PageCounts counts(int32_t owner) const;

    // Fills `pages` with free ones, lowest or last freed first, ref_count 1. False, nothing taken, when there are fewer.
    bool allocate(std::span<int32_t> pages, int32_t owner);
    // One more user for each page, which is held or cached.
    void share(PageIds pages);
    // One user less. Unused pages stay while they are pinned or cached; those freed together come back in their order.
    void free(PageIds pages);
    // Whoever lets go of the page, it stays until as many `unpin`.
    void pin(PageIds pages);
    void unpin(PageIds pages);
    // The content of these held pages is worth keeping.
    void cache(PageIds pages);
    // The content of these cached pages is worth nothing; evictable ones become free.
    void uncache(PageIds pages);

    bool is_held(int64_t page) const { return ref_count_[place(page)] > 0; }
    bool is_pinned(int64_t page) const { return pin_count_[place(page)] > 0; }
    bool is_shared(int64_t page) const { return ref_count_[place(page)] > 1; }

    // [num_pages]. The stack's top is at `num_free`; what lies above it means nothing.
    std::span<int32_t> ref_count() { return ref_count_; }
    std::span<int32_t> pin_count() { return pin_count_; }
    std::span<uint8_t> is_cached() { return is_cached_; }
    std::span<int32_t> owner() { return owner_; }
    std::span<int32_t> free_stack() { return free_; }

private:
    class Tally;

    size_t place(int64_t page) const;
    void require_pages(PageIds pages) const;
    void settle(int32_t page, Tally& tally);
    void push(int32_t page);

    std::vector<int32_t> free_, ref_count_, pin_count_, owner_;
    std::vector<uint8_t> is_cached_;
    int64_t num_free_;
    PageCounts all_;
    std::vector<PageCounts> by_owner_;
};

}  // namespace kvarto
