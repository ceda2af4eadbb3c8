#include "adapters/paged_stream.h"

#include <algorithm>
#include <stdexcept>

#include "memory/stream_copy.h"

namespace kvarto {

namespace {

constexpr int64_t kValueBytes = 4;  // of the widest one that pages have

}  // namespace

PagedStream::PagedStream(std::span<std::byte> region, int64_t page_bytes, std::span<const int32_t> pages)
    : region_(region.data()), page_bytes_(page_bytes), pages_(pages) {
    if (page_bytes <= 0) throw std::invalid_argument("pages without bytes");
    const auto is_whole = [](int64_t bytes) { return bytes % kValueBytes == 0; };
    bool are_whole = is_whole(reinterpret_cast<intptr_t>(region_)) && (pages.size() < 2 || is_whole(page_bytes));
    const int64_t num_pages = static_cast<int64_t>(region.size()) / page_bytes;
    for (const int32_t page : pages) {
        if (page < 0 || page >= num_pages) throw std::invalid_argument("a page lies outside of its region");
        are_whole &= is_whole(page * page_bytes);
    }
    if (!are_whole) throw std::invalid_argument("a page has no room for whole values, for it begins inside one");
}

std::span<std::byte> PagedStream::run(int64_t start, int64_t most) const {
    size_t index = static_cast<size_t>(start / page_bytes_);
    const int64_t inside = start % page_bytes_;
    std::byte* const first = region_ + pages_[index] * page_bytes_ + inside;
    int64_t count = page_bytes_ - inside;
    for (; count < most && index + 1 < pages_.size() && pages_[index + 1] == pages_[index] + 1; ++index) count += page_bytes_;
    return {first, static_cast<size_t>(std::min(count, most))};
}

void PagedStream::put(int64_t start, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
        const std::span<std::byte> here = run(start, static_cast<int64_t>(bytes.size()));
        stream_copy(here.data(), bytes.data(), here.size());
        start += static_cast<int64_t>(here.size()), bytes = bytes.subspan(here.size());
    }
}

void PagedStream::clear(int64_t start, int64_t end) const {
    while (start < end) {
        const std::span<std::byte> here = run(start, end - start);
        std::ranges::fill(here, std::byte{0});
        start += static_cast<int64_t>(here.size());
    }
}

}  // namespace kvarto
