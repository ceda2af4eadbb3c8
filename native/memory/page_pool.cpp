#include "memory/page_pool.h"

#include <algorithm>
#include <limits>
#include <string>

namespace kvarto {

namespace {

[[noreturn]] void break_law(const char* what, int32_t page) {
    throw BrokenLaw(std::string(what) + ": page " + std::to_string(page));
}

[[noreturn]] void refuse(int64_t page, size_t num_pages) {
    throw std::out_of_range("page " + std::to_string(page) + " of a pool of " + std::to_string(num_pages) + " pages");
}

size_t checked(int64_t num_pages) {
    if (num_pages < 0 || num_pages > std::numeric_limits<int32_t>::max())
        throw std::invalid_argument("a pool of " + std::to_string(num_pages) + " pages; ids have 31 bits");
    return static_cast<size_t>(num_pages);
}

}  // namespace

// Changes of counts, booked once per run of pages with the same owner instead of once per page.
class PagePool::Tally {
public:
    explicit Tally(PagePool& pool) : pool_(pool) {}
    ~Tally() { book(); }
    Tally(const Tally&) = delete;
    Tally& operator=(const Tally&) = delete;

    PageCounts& of(int32_t owner) {
        if (owner != owner_) {
            book();
            owner_ = owner;
        }
        return change_;
    }

private:
    void book() {
        if (owner_ == kNoOwner) return;
        for (PageCounts* counts : {&pool_.all_, &pool_.by_owner_[owner_]}) {
            counts->held += change_.held;
            counts->evictable += change_.evictable;
            counts->draining += change_.draining;
        }
        change_ = {};
    }

    PagePool& pool_;
    PageCounts change_;
    int32_t owner_ = kNoOwner;
};

PagePool::PagePool(int64_t num_pages)
    : free_(checked(num_pages)), ref_count_(free_.size()), pin_count_(free_.size()), owner_(free_.size(), kNoOwner),
      is_cached_(free_.size()), num_free_(num_pages) {
    for (int64_t i = 0; i < num_pages; ++i) free_[i] = static_cast<int32_t>(num_pages - 1 - i);
}

PageCounts PagePool::counts(int32_t owner) const {
    return owner >= 0 && static_cast<size_t>(owner) < by_owner_.size() ? by_owner_[owner] : PageCounts{};
}

bool PagePool::allocate(std::span<int32_t> pages, int32_t owner) {
    const auto count = static_cast<int64_t>(pages.size());
    if (count > num_free_) return false;
    if (owner < 0) throw std::invalid_argument("owners are numbered from 0");
    if (static_cast<size_t>(owner) >= by_owner_.size()) by_owner_.resize(owner + size_t{1});
    const int32_t* top = free_.data() + num_free_;
    for (int32_t& page : pages) {
        page = *--top;
        ref_count_[page] = 1;
        owner_[page] = owner;
    }
    num_free_ -= count;
    all_.held += count;
    by_owner_[owner].held += count;
    return true;
}

void PagePool::share(PageIds pages) {
    require_pages(pages);
    Tally tally(*this);
    for (const int32_t page : pages) {
        if (ref_count_[page] == 0) {
            if (!is_cached_[page]) break_law("shared a page that holds nothing", page);
            PageCounts& counts = tally.of(owner_[page]);
            --(pin_count_[page] > 0 ? counts.draining : counts.evictable);
            ++counts.held;
        }
        ++ref_count_[page];
    }
}

void PagePool::free(PageIds pages) {
    require_pages(pages);
    Tally tally(*this);
    for (size_t i = pages.size(); i-- > 0;) {
        const int32_t page = pages[i];
        if (ref_count_[page] == 0) break_law("freed a page that nobody holds", page);
        if (--ref_count_[page] > 0) continue;
        --tally.of(owner_[page]).held;
        settle(page, tally);
    }
}

void PagePool::pin(PageIds pages) {
    require_pages(pages);
    Tally tally(*this);
    for (const int32_t page : pages) {
        if (pin_count_[page] == 0 && ref_count_[page] == 0) {
            if (!is_cached_[page]) break_law("pinned a page that holds nothing", page);
            PageCounts& counts = tally.of(owner_[page]);
            --counts.evictable;
            ++counts.draining;
        }
        ++pin_count_[page];
    }
}

void PagePool::unpin(PageIds pages) {
    require_pages(pages);
    Tally tally(*this);
    for (size_t i = pages.size(); i-- > 0;) {
        const int32_t page = pages[i];
        if (pin_count_[page] == 0) break_law("unpinned a page that nobody pinned", page);
        if (--pin_count_[page] > 0 || ref_count_[page] > 0) continue;
        --tally.of(owner_[page]).draining;
        settle(page, tally);
    }
}

void PagePool::cache(PageIds pages) {
    require_pages(pages);
    for (const int32_t page : pages) {
        if (ref_count_[page] == 0) break_law("cached a page that nobody holds", page);
        is_cached_[page] = 1;
    }
}

void PagePool::uncache(PageIds pages) {
    require_pages(pages);
    Tally tally(*this);
    for (size_t i = pages.size(); i-- > 0;) {
        const int32_t page = pages[i];
        if (!is_cached_[page]) break_law("uncached a page that is not cached", page);
        is_cached_[page] = 0;
        if (ref_count_[page] > 0 || pin_count_[page] > 0) continue;
        --tally.of(owner_[page]).evictable;
        push(page);
    }
}

size_t PagePool::place(int64_t page) const {
    if (page < 0 || page >= num_pages()) refuse(page, free_.size());
    return static_cast<size_t>(page);
}

void PagePool::require_pages(PageIds pages) const {
    uint32_t highest = 0;  // unsigned, so that negative ids are the highest
    for (const int32_t page : pages) highest = std::max(highest, static_cast<uint32_t>(page));
    if (!pages.empty() && highest >= free_.size()) refuse(static_cast<int32_t>(highest), free_.size());
}

// A page that nobody uses any more goes where it belongs; it is counted nowhere when this is called.
void PagePool::settle(int32_t page, Tally& tally) {
    if (pin_count_[page] > 0) ++tally.of(owner_[page]).draining;
    else if (is_cached_[page]) ++tally.of(owner_[page]).evictable;
    else push(page);
}

void PagePool::push(int32_t page) {
    owner_[page] = kNoOwner;
    free_[num_free_++] = page;
}

}  // namespace kvarto
