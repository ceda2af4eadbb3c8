#include "adapters/file_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <memory>
#include <new>

namespace kvarto {

namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kMostAlignment = 64 << 10;
constexpr size_t kHugeBytes = 2 << 20;
// A read begins up to an alignment before what is asked for, and may go on behind less than that.
constexpr int64_t kBufferBytes = 3 * kHugeBytes;
static_assert(kBufferBytes >= kDirectReadBytes + kMostAtOnce + kMostAlignment);

// Backed by huge pages where there are: a disk that writes into it is told of few places instead of many.
std::byte* buffer() {
    struct Free {
        void operator()(std::byte* bytes) const { operator delete[](bytes, std::align_val_t{kHugeBytes}); }
    };
    thread_local const std::unique_ptr<std::byte[], Free> bytes = [] {
        auto* const place = new (std::align_val_t{kHugeBytes}) std::byte[kBufferBytes];
#ifdef MADV_HUGEPAGE
        madvise(place, kBufferBytes, MADV_HUGEPAGE);
#endif
        return std::unique_ptr<std::byte[], Free>(place);
    }();
    return bytes.get();
}

#ifdef O_DIRECT
// To what the file system wants offsets aligned; 0 where it does not read past the page cache.
int64_t direct_alignment(int file) {
#ifdef STATX_DIOALIGN
    struct statx found;
    if (statx(file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0) {
        const int64_t wanted = std::max<int64_t>(found.stx_dio_offset_align, found.stx_dio_mem_align);
        const bool is_known = found.stx_dio_offset_align != 0 && wanted <= kMostAlignment;
        return is_known ? std::max(wanted, kPageBytes) : 0;
    }
#endif
    static_cast<void>(file);
    return kPageBytes;  // what is refused all the same is read in the usual way
}
#endif

// What the kernel has in memory; EAGAIN where it would have to wait.
int64_t read_without_waiting(int file, std::byte* out, int64_t most, int64_t offset) {
#ifdef RWF_NOWAIT
    const iovec place{out, static_cast<size_t>(most)};
    return preadv2(file, &place, 1, static_cast<off_t>(offset), RWF_NOWAIT);
#else
    static_cast<void>(file), static_cast<void>(out), static_cast<void>(most), static_cast<void>(offset);
    errno = EAGAIN;
    return -1;
#endif
}

}  // namespace

FileReader::FileReader(int file, int64_t end, bool may_be_direct)
    : file_(file), end_(end), mode_(may_be_direct ? Mode::kCached : Mode::kBuffered) {}

FileReader::~FileReader() { go_buffered(); }

FileReader::Bytes FileReader::at(int64_t offset, int64_t least) {
    assert(least > 0 && least <= kMostAtOnce && offset >= 0 && offset <= end_ - least);
    if (offset < first_ || offset + least > last_)
        if (const Bytes failed = fill(offset, least); failed.end != End::kDone) return failed;
    return {buffer() + (offset - first_), last_ - offset};
}

FileReader::Bytes FileReader::fill(int64_t offset, int64_t least) {
    begin_at(offset);
    while (last_ < offset + least) {
        const int64_t got = read_on();
        if (got == 0) return {.end = End::kFileEnded};
        if (got > 0) {
            last_ += got;
        } else if (const int error = errno; error != EINTR && !fall_back(offset, error)) {
            return {.end = End::kFailed, .error = error};
        }
    }
    return {};
}

void FileReader::begin_at(int64_t offset) {
    first_ = last_ = mode_ == Mode::kDirect ? offset / alignment_ * alignment_ : offset;
}

// As many bytes as a read has, behind what is in the buffer. As pread.
int64_t FileReader::read_on() {
    std::byte* const out = buffer() + (last_ - first_);
    if (mode_ == Mode::kDirect && last_ % alignment_ != 0) go_buffered();  // the file ends there, or so it seems
    if (mode_ == Mode::kDirect) {
        const int64_t wanted = (end_ - last_ + alignment_ - 1) / alignment_ * alignment_;
        const int64_t most = std::min(wanted, kDirectReadBytes);
        const int64_t got = pread(file_, out, static_cast<size_t>(most), static_cast<off_t>(last_));
        num_direct_bytes_ += std::max<int64_t>(got, 0);
        return got;
    }
    const int64_t most = std::min(end_ - last_, kCachedReadBytes);
    if (mode_ == Mode::kCached) return read_without_waiting(file_, out, most, last_);
    return pread(file_, out, static_cast<size_t>(most), static_cast<off_t>(last_));
}

// Another way to read, after one was refused. False where there is none.
bool FileReader::fall_back(int64_t offset, int error) {
    if (mode_ == Mode::kCached && (error == EAGAIN || error == EOPNOTSUPP || error == EINVAL || error == ENOSYS)) {
        mode_ = go_direct() ? Mode::kDirect : Mode::kBuffered;
        begin_at(offset);
        return true;
    }
    if (mode_ != Mode::kDirect || error != EINVAL) return false;
    go_buffered();
    return true;
}

bool FileReader::go_direct() {
#ifdef O_DIRECT
    alignment_ = direct_alignment(file_);
    const int flags = alignment_ == 0 ? -1 : fcntl(file_, F_GETFL);
    return flags >= 0 && fcntl(file_, F_SETFL, flags | O_DIRECT) == 0;
#else
    return false;
#endif
}

void FileReader::go_buffered() {
#ifdef O_DIRECT
    if (mode_ == Mode::kDirect) fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) & ~O_DIRECT);
#endif
    mode_ = Mode::kBuffered;
}

}  // namespace kvarto
