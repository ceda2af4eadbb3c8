#include "adapters/file_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "adapters/coded_rows.h"
#include "adapters/file_values.h"
#include "adapters/transpose.h"

namespace kvarto {

namespace {

using End = PackPlan::End;
using Result = PackPlan::Result;

// Looked at at a time, and how far behind it the next is asked for: more at once than a core can wait for stops it.
constexpr int64_t kSeenBytes = 2 << 10, kAheadBytes = 4 << 10;
// Rearranged at a time, from the first-level cache.
constexpr int64_t kRearrangedBytes = 32 << 10;

// What a disk has written lies in no cache near; asked for early, it comes while something else is done.
void prefetch(const FileReader::Bytes& bytes, int64_t first, int64_t count) {
    for (const int64_t last = std::min(first + count, bytes.count); first < last; first += 64)
        __builtin_prefetch(bytes.data + first, 0, 2);
}

// Values as the file has them, with those behind them asked for.
bool are_finite_ahead(FileType type, const FileReader::Bytes& bytes, int64_t count) {
    const int64_t item_bytes = type == FileType::kF32 ? 4 : 2;
    for (int64_t done = 0; done < count; done += kSeenBytes) {
        const int64_t here = std::min(kSeenBytes, count - done);
        prefetch(bytes, done + kAheadBytes, here);
        if (!are_finite(type, bytes.data + done, here / item_bytes)) return false;
    }
    return true;
}

// A block of rows becomes pieces of columns.
template <class Item>
void put_columns(const std::byte* rows, const FileTensor& tensor, int64_t first, int64_t count, std::byte* target) {
    constexpr int64_t kItem = sizeof(Item);
    if (tensor.num_heads == 0)
        return transpose<Item>(rows, count, tensor.num_columns, target + first * kItem, tensor.num_rows);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t place = tensor.place_of(first + row);
        for (int64_t column = 0; column < tensor.num_columns; ++column)
            std::memcpy(target + (column * tensor.num_rows + place) * kItem,
                        rows + (row * tensor.num_columns + column) * kItem, kItem);
    }
}

// Rows [first, first + count) to their places.
void put(const std::byte* rows, const FileTensor& tensor, int64_t first, int64_t count, std::byte* target) {
    if (tensor.is_transposed && tensor.item_bytes() == 2) return put_columns<uint16_t>(rows, tensor, first, count, target);
    if (tensor.is_transposed) return put_columns<uint32_t>(rows, tensor, first, count, target);
    const int64_t row_bytes = tensor.row_bytes();
    for (int64_t row = 0; row < count; ++row)
        std::memcpy(target + tensor.place_of(first + row) * row_bytes, rows + row * row_bytes,
                    static_cast<size_t>(row_bytes));
}

// Straight to where it goes.
Result read_as_it_lies(FileReader& file, const FileTensor& tensor, std::byte* target) {
    const int64_t size_bytes = tensor.size_bytes(), item_bytes = tensor.item_bytes();
    for (int64_t done = 0; done < size_bytes;) {
        const FileReader::Bytes found = file.at(tensor.offset + done, item_bytes);
        if (found.end != FileReader::End::kDone) return ended(found);
        const int64_t here = std::min({found.count, size_bytes - done, kSeenBytes}) / item_bytes * item_bytes;
        prefetch(found, kAheadBytes, here);
        if (!copy_finite(tensor.type, found.data, here / item_bytes, target + done)) return {End::kNotFinite};
        done += here;
    }
    return {};
}

// So many that they fit the cache; whole cache lines of columns where there are several.
int64_t rows_at_once(const FileTensor& tensor) {
    const int64_t wanted = std::max<int64_t>(64, kRearrangedBytes / tensor.row_bytes());
    return std::min(wanted, kMostAtOnce / tensor.row_bytes());
}

// Some rows at a time, each to its place.
Result read_rows(FileReader& file, const FileTensor& tensor, std::byte* target) {
    thread_local std::vector<float> widened(kMostAtOnce / sizeof(float));
    const int64_t row_bytes = tensor.file_row_bytes(), most = rows_at_once(tensor);
    for (int64_t first = 0; first < tensor.num_rows;) {
        const FileReader::Bytes found = file.at(tensor.offset + first * row_bytes, row_bytes);
        if (found.end != FileReader::End::kDone) return ended(found);
        const int64_t here = std::min({most, tensor.num_rows - first, found.count / row_bytes});
        const std::byte* rows = found.data;
        if (tensor.type == FileType::kQ8_0) {
            widen(tensor.type, found.data, here * tensor.num_columns, widened.data());
            rows = reinterpret_cast<const std::byte*>(widened.data());
            if (!are_finite(tensor.type, rows, here * tensor.num_columns)) return {End::kNotFinite};
        } else if (!are_finite_ahead(tensor.type, found, here * row_bytes)) {
            return {End::kNotFinite};
        }
        put(rows, tensor, first, here, target);
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

Result read_tensor(FileReader& file, const FileTensor& tensor, std::byte* target) {
    if (has_codes(tensor.strips)) return read_coded(file, tensor, target);
    if (tensor.is_rearranged()) return read_rows(file, tensor, target);
    if (tensor.type != FileType::kQ8_0) return read_as_it_lies(file, tensor, target);
    FileTensor blocks = tensor;  // where order stays, a row may be as long as it likes
    blocks.num_rows = tensor.num_rows * tensor.num_columns / 32;
    blocks.num_columns = 32;
    return read_rows(file, blocks, target);
}

}  // namespace kvarto
