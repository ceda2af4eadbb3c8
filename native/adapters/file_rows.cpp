#include "adapters/file_rows.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "adapters/transpose.h"

namespace kvarto {

namespace {

using End = PackPlan::End;
using Result = PackPlan::Result;

Result read_bytes(int file, int64_t offset, int64_t count, std::byte* out) {
    while (count > 0) {
        const ssize_t got = pread(file, out, static_cast<size_t>(count), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return {End::kFailed, 0, errno};
        if (got == 0) return {End::kFileEnded};
        offset += got, out += got, count -= got;
    }
    return {};
}

// All ones in the exponent: infinite, or no number. Looks at every value, so that the loop has no branch.
template <class Bits> bool is_finite(const std::byte* values, int64_t count, Bits exponent) {
    const auto* bits = reinterpret_cast<const Bits*>(values);
    Bits found = 0;
    for (int64_t i = 0; i < count; ++i) found |= static_cast<Bits>((bits[i] & exponent) == exponent);
    return found == 0;
}

bool is_finite(FileType type, const std::byte* values, int64_t count) {
    if (type == FileType::kF16) return is_finite<uint16_t>(values, count, 0x7C00);
    if (type == FileType::kBF16) return is_finite<uint16_t>(values, count, 0x7F80);
    return is_finite<uint32_t>(values, count, 0x7F800000);
}

float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000U} << 16, rest = half & 0x7FFFU;
    if (rest >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000U | (rest & 0x3FFU) << 13);
    if (rest >= 0x0400) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000U));
    const float magnitude = static_cast<float>(rest) * 0x1p-24F;  // too small for an exponent; exact
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Blocks of a float16 and 32 bytes; each product is exact in float32.
void widen_q8_0(const std::byte* blocks, int64_t num_values, float* out) {
    for (int64_t first = 0; first < num_values; first += 32, blocks += 34) {
        uint16_t half;
        std::memcpy(&half, blocks, sizeof half);
        const float scale = half_to_float(half);
        for (int64_t i = 0; i < 32; ++i) out[first + i] = scale * static_cast<float>(static_cast<int8_t>(blocks[2 + i]));
    }
}

// A block of rows becomes pieces of columns.
template <class Item>
void put_columns(const std::byte* rows, const FileTensor& tensor, int64_t first, int64_t count, std::byte* target) {
    const auto* in = reinterpret_cast<const Item*>(rows);
    auto* out = reinterpret_cast<Item*>(target);
    if (tensor.num_heads == 0) return transpose(in, count, tensor.num_columns, out + first, tensor.num_rows);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t place = tensor.place_of(first + row);
        for (int64_t column = 0; column < tensor.num_columns; ++column)
            out[column * tensor.num_rows + place] = in[row * tensor.num_columns + column];
    }
}

// Rows [first, first + count) to their places.
void put(const std::byte* rows, const FileTensor& tensor, int64_t first, int64_t count, std::byte* target) {
    if (tensor.is_transposed && tensor.item_bytes() == 2) return put_columns<uint16_t>(rows, tensor, first, count, target);
    if (tensor.is_transposed) return put_columns<uint32_t>(rows, tensor, first, count, target);
    const int64_t row_bytes = tensor.row_bytes();
    if (tensor.num_heads == 0) {
        std::memcpy(target + first * row_bytes, rows, static_cast<size_t>(count * row_bytes));
        return;
    }
    for (int64_t row = 0; row < count; ++row)
        std::memcpy(target + tensor.place_of(first + row) * row_bytes, rows + row * row_bytes,
                    static_cast<size_t>(row_bytes));
}

// Straight to where it goes.
Result read_as_it_lies(int file, const FileTensor& tensor, std::byte* target) {
    const int64_t size_bytes = tensor.size_bytes();
    for (int64_t done = 0; done < size_bytes; done += kBlockBytes) {
        const int64_t here = std::min(kBlockBytes, size_bytes - done);
        const Result result = read_bytes(file, tensor.offset + done, here, target + done);
        if (result.end != End::kDone) return result;
        if (!is_finite(tensor.type, target + done, here / tensor.item_bytes())) return {End::kNotFinite};
    }
    return {};
}

// Some rows at a time, each to its place.
Result read_rows(int file, const FileTensor& tensor, std::byte* target) {
    thread_local std::vector<std::byte> raw(kBlockBytes);
    thread_local std::vector<float> widened(kBlockBytes / sizeof(float));
    const int64_t rows_at_once = kBlockBytes / tensor.row_bytes(), row_bytes = tensor.file_row_bytes();
    for (int64_t first = 0; first < tensor.num_rows; first += rows_at_once) {
        const int64_t here = std::min(rows_at_once, tensor.num_rows - first);
        const Result result = read_bytes(file, tensor.offset + first * row_bytes, here * row_bytes, raw.data());
        if (result.end != End::kDone) return result;
        const std::byte* rows = raw.data();
        if (tensor.type == FileType::kQ8_0) {
            widen_q8_0(raw.data(), here * tensor.num_columns, widened.data());
            rows = reinterpret_cast<const std::byte*>(widened.data());
        }
        if (!is_finite(tensor.type, rows, here * tensor.num_columns)) return {End::kNotFinite};
        put(rows, tensor, first, here, target);
    }
    return {};
}

}  // namespace

int64_t FileTensor::place_of(int64_t row) const {
    if (num_heads == 0) return row;
    const int64_t head_rows = num_rows / num_heads, head = row / head_rows, inside = row % head_rows;
    return head * head_rows + inside % 2 * (head_rows / 2) + inside / 2;
}

Result read_tensor(int file, const FileTensor& tensor, std::byte* target) {
    if (tensor.is_rearranged()) return read_rows(file, tensor, target);
    if (tensor.type != FileType::kQ8_0) return read_as_it_lies(file, tensor, target);
    FileTensor blocks = tensor;  // where order stays, a row may be as long as it likes
    blocks.num_rows = tensor.num_rows * tensor.num_columns / 32;
    blocks.num_columns = 32;
    return read_rows(file, blocks, target);
}

}  // namespace kvarto
