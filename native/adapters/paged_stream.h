// Bytes in order that lie in pages which need not follow each other.
//
//     stream: | page 0 | page 1 | page 2 |        region: | . | 1 | . | . | 0 | . | 2 |
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvarto {

class PagedStream {
public:
    // `pages`: which page of the region is the stream's next one, each once. Throws std::invalid_argument where one is
    // not there, or where the region or a page begins inside a value of four bytes.
    PagedStream(std::span<std::byte> region, int64_t page_bytes, std::span<const int32_t> pages);

    int64_t size() const { return static_cast<int64_t>(pages_.size()) * page_bytes_; }
    // Bytes from there on that follow each other in memory too, at most `most` of them: all up to the page's end, at least.
    std::span<std::byte> run(int64_t start, int64_t most) const;
    // Copies past the caches, for what nobody looks at soon.
    void put(int64_t start, std::span<const std::byte> bytes) const;
    void clear(int64_t start, int64_t end) const;

private:
    std::byte* region_;
    int64_t page_bytes_;
    std::span<const int32_t> pages_;
};

}  // namespace kvarto
