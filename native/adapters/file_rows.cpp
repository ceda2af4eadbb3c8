#include "adapters/file_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "adapters/coded_rows.h"
#include "adapters/file_values.h"

namespace kvarto {

namespace {

using End = PackPlan::End;
using Result = PackPlan::Result;

// Looked at at a time, and how far behind it the next is asked for: more at once than a core can wait for stops it.
constexpr int64_t kSeenBytes = 2 << 10, kAheadBytes = 4 << 10;
// Rearranged at a time, from the first-level cache.
constexpr int64_t kRearrangedBytes = 32 << 10;
// Whole lines of the target are written past the caches: so much of a row or a column at a time, but for its end.
constexpr int64_t kLineBytes = 64;

// What a disk has written lies in no cache near; asked for early, it comes while something else is done.
void prefetch(const FileReader::Bytes& bytes, int64_t first, int64_t count) {
    for (const int64_t last = std::min(first + count, bytes.count); first < last; first += 64)
        __builtin_prefetch(bytes.data + first, 0, 2);
}

// Values as the file has them, with those behind them asked for.
bool are_finite_ahead(const PackKernels& kernels, const FileTensor& tensor, const FileReader::Bytes& bytes, int64_t count) {
    for (int64_t done = 0; done < count; done += kSeenBytes) {
        const int64_t here = std::min(kSeenBytes, count - done);
        prefetch(bytes, done + kAheadBytes, here);
        if (!kernels.are_finite(tensor.value_type(), bytes.data + done, here / tensor.item_bytes())) return false;
    }
    return true;
}

// A block of rows becomes pieces of columns.
void put_columns(const PackKernels& kernels, const std::byte* rows, const FileTensor& tensor, int64_t first, int64_t count,
                 std::byte* target, bool is_read_soon) {
    const auto item = static_cast<size_t>(tensor.item_bytes());
    if (tensor.num_heads == 0)
        return kernels.transpose({.in = rows, .num_rows = count, .num_columns = tensor.num_columns,
                                  .item_bytes = tensor.item_bytes(), .out = target + first * tensor.item_bytes(),
                                  .out_stride = tensor.num_rows, .is_read_soon = is_read_soon});
    for (int64_t row = 0; row < count; ++row) {
        std::byte* to = target + tensor.place_of(first + row) * item;
        for (int64_t column = 0; column < tensor.num_columns; ++column, rows += item, to += tensor.num_rows * item)
            item == 2 ? std::memcpy(to, rows, 2) : std::memcpy(to, rows, 4);
    }
}

// Rows [first, first + count) to their places.
void put(const PackKernels& kernels, const std::byte* rows, const FileTensor& tensor, int64_t first, int64_t count,
         std::byte* target, bool is_read_soon) {
    if (tensor.is_transposed) return put_columns(kernels, rows, tensor, first, count, target, is_read_soon);
    const int64_t row_bytes = tensor.row_bytes();
    for (int64_t row = 0; row < count; ++row)
        std::memcpy(target + tensor.place_of(first + row) * row_bytes, rows + row * row_bytes,
                    static_cast<size_t>(row_bytes));
}

// Straight to where it goes.
Result read_as_it_lies(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target) {
    const int64_t size_bytes = tensor.size_bytes(), item_bytes = tensor.item_bytes();
    for (int64_t done = 0; done < size_bytes;) {
        const int64_t left = size_bytes - done;
        const FileReader::Bytes found = file.at(tensor.offset + done, std::min(left, kLineBytes));
        if (found.end != FileReader::End::kDone) return ended(found);
        const int64_t most = std::min({found.count, left, kSeenBytes});
        const int64_t here = most == left ? left : most / kLineBytes * kLineBytes;
        prefetch(found, kAheadBytes, here);
        const bool is_finite = kernels.copy_finite(tensor.value_type(), found.data, here / item_bytes, target + done);
        if (!is_finite) return {End::kNotFinite};
        done += here;
    }
    return {};
}

// So many that they fit the cache, in whole lines of columns where rows are not too long.
int64_t rows_at_once(const FileTensor& tensor) {
    const int64_t line = kLineBytes / tensor.item_bytes(), fitting = kRearrangedBytes / tensor.row_bytes();
    return std::min(std::max(fitting / line * line, line), kMostAtOnce / tensor.row_bytes());
}

// Some rows at a time, each to its place.
Result read_rows(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target,
                 bool is_read_soon) {
    thread_local std::vector<float> widened(kMostAtOnce / sizeof(float));
    const int64_t row_bytes = tensor.file_row_bytes(), most = rows_at_once(tensor);
    for (int64_t first = 0; first < tensor.num_rows;) {
        const int64_t wanted = std::min(most, tensor.num_rows - first);
        const int64_t line = std::min(wanted, kLineBytes / tensor.item_bytes());
        const FileReader::Bytes found = file.at(tensor.offset + first * row_bytes, line * row_bytes);
        if (found.end != FileReader::End::kDone) return ended(found);
        const int64_t there = found.count / row_bytes, here = there < wanted ? there / line * line : wanted;
        const std::byte* rows = found.data;
        if (tensor.type == FileType::kQ8_0) {
            widen(tensor.type, found.data, here * tensor.num_columns, widened.data());
            rows = reinterpret_cast<const std::byte*>(widened.data());
            if (!kernels.are_finite(StripType::kF32, rows, here * tensor.num_columns)) return {End::kNotFinite};
        } else if (!are_finite_ahead(kernels, tensor, found, here * row_bytes)) {
            return {End::kNotFinite};
        }
        put(kernels, rows, tensor, first, here, target, is_read_soon);
        first += here;
    }
    return {};
}

}  // namespace

int64_t FileTensor::place_of(int64_t row) const {
    if (num_heads == 0) return row;
    const int64_t head_rows = num_rows / num_heads, head = row / head_rows, inside = row % head_rows;
    return head * head_rows + inside % 2 * (head_rows / 2) + inside / 2;
}

Result read_tensor(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target,
                   bool is_read_soon) {
    if (has_codes(tensor.strips)) return read_coded(file, tensor, kernels, target);
    if (tensor.is_rearranged()) return read_rows(file, tensor, kernels, target, is_read_soon);
    if (tensor.stays_as_it_lies()) return read_as_it_lies(file, tensor, kernels, target);
    FileTensor blocks = tensor;  // where order stays, a row may be as long as it likes
    blocks.num_rows = tensor.num_rows * tensor.num_columns / 32;
    blocks.num_columns = 32;
    return read_rows(file, blocks, kernels, target, is_read_soon);
}

}  // namespace kvarto
