// A file's bytes from front to back, through a buffer that each thread keeps.
//
//     file:   |......|######################|......|
//     buffer:        |  one read            |          `at` gives what is there, or reads on from where it is asked
//
// What the kernel has in memory is copied from there. The rest is read past it, where that is asked and can be: the
// disk then writes into the buffer, and neither a copy nor the eviction of other files' pages costs time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvarto {

// Of it, more is read at a time past the page cache than through it: what was copied is to be in the second-level
// cache still, what a disk has written is not there anyway, and a thread that waits seldom waits less.
inline constexpr int64_t kCachedReadBytes = 256 << 10;
inline constexpr int64_t kDirectReadBytes = 4 << 20;
// The most that is asked for at once.
inline constexpr int64_t kMostAtOnce = 256 << 10;

class FileReader {
public:
    // `end`: nothing behind it is asked for. `may_be_direct`: past the page cache where it has not what is asked.
    FileReader(int file, int64_t end, bool may_be_direct);
    // The descriptor is as it was.
    ~FileReader();
    FileReader(const FileReader&) = delete;
    FileReader& operator=(const FileReader&) = delete;

    enum class End { kDone, kFileEnded, kFailed };
    struct Bytes {
        const std::byte* data = nullptr;  // aligned to nothing; valid until the next call
        int64_t count = 0;
        End end = End::kDone;
        int error = 0;  // errno, where reading failed
    };

    // At least `least` bytes from there on, 1 to kMostAtOnce, and what follows them in the buffer.
    Bytes at(int64_t offset, int64_t least);
    // So many bytes came past the page cache.
    int64_t num_direct_bytes() const { return num_direct_bytes_; }

private:
    enum class Mode { kCached, kDirect, kBuffered };

    Bytes fill(int64_t offset, int64_t least);
    void begin_at(int64_t offset);
    int64_t read_on();
    bool fall_back(int64_t offset, int error);
    bool go_direct();
    void go_buffered();

    int file_;
    int64_t end_;
    Mode mode_;
    int64_t alignment_ = 1;
    int64_t first_ = 0, last_ = 0;  // of the file, what is in the buffer
    int64_t num_direct_bytes_ = 0;
};

}  // namespace kvarto
