#include "adapters/coded_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "adapters/file_values.h"

namespace kvarto {

namespace {

using End = PackPlan::End;
using Result = PackPlan::Result;

// Values at hand, in float32. Memory that a thread keeps: it grows to kMostRowsBytes at most.
struct Scratch {
    std::vector<std::byte> raw;
    std::vector<float> rows, columns;

    void reserve(int64_t count) {
        const auto size = static_cast<size_t>(count);
        if (rows.size() < size) raw.resize(size * sizeof(float)), rows.resize(size), columns.resize(size);
    }
    const std::byte* raw_rows() const { return reinterpret_cast<const std::byte*>(rows.data()); }
    std::byte* raw_columns() { return reinterpret_cast<std::byte*>(columns.data()); }
};

Result read_bytes(FileReader& file, int64_t offset, int64_t count, std::byte* out) {
    while (count > 0) {
        const FileReader::Bytes found = file.at(offset, 1);
        if (found.end != FileReader::End::kDone) return ended(found);
        const int64_t here = std::min(found.count, count);
        std::memcpy(out, found.data, static_cast<size_t>(here));
        offset += here, out += here, count -= here;
    }
    return {};
}

Result read_floats(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, int64_t first, int64_t num_rows,
                   Scratch& scratch) {
    const int64_t count = num_rows * tensor.num_columns, row_bytes = tensor.file_row_bytes();
    const Result result = read_bytes(file, tensor.offset + first * row_bytes, num_rows * row_bytes, scratch.raw.data());
    if (result.end != End::kDone) return result;
    const bool is_widened_first = tensor.type == FileType::kQ8_0;
    if (!is_widened_first && !kernels.are_finite(tensor.value_type(), scratch.raw.data(), count)) return {End::kNotFinite};
    widen(tensor.type, scratch.raw.data(), count, scratch.rows.data());
    if (is_widened_first && !kernels.are_finite(StripType::kF32, scratch.raw_rows(), count)) return {End::kNotFinite};
    return {};
}

// A row of the file is a strip; those that stay in order are encoded together.
bool encode_rows(const FileTensor& tensor, const PackKernels& kernels, int64_t first, int64_t num_rows, const float* rows,
                 std::byte* target) {
    const int64_t strip = strip_bytes(tensor.strips, tensor.num_columns), blocks = tensor.num_columns / kCodeColumns;
    if (tensor.num_heads == 0) return kernels.encode(tensor.strips, rows, num_rows * blocks, target + first * strip);
    for (int64_t row = 0; row < num_rows; ++row, rows += tensor.num_columns)
        if (!kernels.encode(tensor.strips, rows, blocks, target + tensor.place_of(first + row) * strip)) return false;
    return true;
}

// Of rows [first, first + num_rows), which are whole blocks of each column, columns one after the other.
void find_columns(const FileTensor& tensor, const PackKernels& kernels, int64_t first, int64_t num_rows, Scratch& scratch) {
    if (tensor.num_heads == 0)
        return kernels.transpose({.in = scratch.raw_rows(), .num_rows = num_rows, .num_columns = tensor.num_columns,
                                  .item_bytes = sizeof(float), .out = scratch.raw_columns(), .out_stride = num_rows,
                                  .is_read_soon = true});
    const float* rows = scratch.rows.data();
    for (int64_t row = 0; row < num_rows; ++row, rows += tensor.num_columns) {
        float* to = scratch.columns.data() + tensor.place_of(first + row) - first;
        for (int64_t column = 0; column < tensor.num_columns; ++column, to += num_rows) *to = rows[column];
    }
}

// A column is a strip; those that are there as a whole are encoded together.
bool encode_columns(const FileTensor& tensor, const PackKernels& kernels, int64_t first, int64_t num_rows, Scratch& scratch,
                    std::byte* target) {
    find_columns(tensor, kernels, first, num_rows, scratch);
    const float* columns = scratch.columns.data();
    const int64_t strip = strip_bytes(tensor.strips, tensor.num_rows), blocks = num_rows / kCodeColumns;
    if (num_rows == tensor.num_rows) return kernels.encode(tensor.strips, columns, tensor.num_columns * blocks, target);
    target += strip_bytes(tensor.strips, first);
    for (int64_t column = 0; column < tensor.num_columns; ++column, target += strip, columns += num_rows)
        if (!kernels.encode(tensor.strips, columns, blocks, target)) return false;
    return true;
}

Result read_parts(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target) {
    thread_local Scratch scratch;
    const int64_t together = tensor.is_transposed ? rows_together(tensor) : 1;
    const int64_t fitting = kMostAtOnce / (tensor.num_columns * int64_t{sizeof(float)});
    const int64_t rows_at_once = std::max(fitting - fitting % together, together);
    scratch.reserve(std::min(rows_at_once, tensor.num_rows) * tensor.num_columns);
    for (int64_t first = 0; first < tensor.num_rows; first += rows_at_once) {
        const int64_t here = std::min(rows_at_once, tensor.num_rows - first);
        const Result result = read_floats(file, tensor, kernels, first, here, scratch);
        if (result.end != End::kDone) return result;
        const bool is_done = tensor.is_transposed
                                 ? encode_columns(tensor, kernels, first, here, scratch, target)
                                 : encode_rows(tensor, kernels, first, here, scratch.rows.data(), target);
        if (!is_done) return {End::kTooLarge};
    }
    return {};
}

}  // namespace

Result read_coded(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target) {
    if (tensor.is_rearranged()) return read_parts(file, tensor, kernels, target);
    FileTensor blocks = tensor;  // where order stays, a row may be as long as it likes
    blocks.num_rows = tensor.num_rows * (tensor.num_columns / kCodeColumns);
    blocks.num_columns = kCodeColumns;
    return read_parts(file, blocks, kernels, target);
}

}  // namespace kvarto
