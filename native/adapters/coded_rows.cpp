#include "adapters/coded_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "adapters/file_values.h"
#include "adapters/strip_codes.h"
#include "adapters/transpose.h"

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

Result read_floats(FileReader& file, const FileTensor& tensor, int64_t first, int64_t num_rows, Scratch& scratch) {
    const int64_t count = num_rows * tensor.num_columns, row_bytes = tensor.file_row_bytes();
    const Result result = read_bytes(file, tensor.offset + first * row_bytes, num_rows * row_bytes, scratch.raw.data());
    if (result.end != End::kDone) return result;
    const bool is_widened_first = tensor.type == FileType::kQ8_0;
    if (!is_widened_first && !are_finite(tensor.type, scratch.raw.data(), count)) return {End::kNotFinite};
    widen(tensor.type, scratch.raw.data(), count, scratch.rows.data());
    const auto* widened = reinterpret_cast<const std::byte*>(scratch.rows.data());
    if (is_widened_first && !are_finite(FileType::kF32, widened, count)) return {End::kNotFinite};
    return {};
}

// A row of the file is a strip.
bool encode_rows(const FileTensor& tensor, int64_t first, int64_t num_rows, const float* rows, std::byte* target) {
    const int64_t strip = strip_bytes(tensor.strips, tensor.num_columns), blocks = tensor.num_columns / kCodeColumns;
    for (int64_t row = 0; row < num_rows; ++row, rows += tensor.num_columns)
        if (!encode(tensor.strips, rows, blocks, target + tensor.place_of(first + row) * strip)) return false;
    return true;
}

// A column is one; rows [first, first + num_rows) are whole blocks of each.
bool encode_columns(const FileTensor& tensor, int64_t first, int64_t num_rows, Scratch& scratch, std::byte* target) {
    const float* rows = scratch.rows.data();
    float* columns = scratch.columns.data();
    if (tensor.num_heads == 0) {
        transpose<float>(reinterpret_cast<const std::byte*>(rows), num_rows, tensor.num_columns,
                         reinterpret_cast<std::byte*>(columns), num_rows);
    } else {
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t column = 0; column < tensor.num_columns; ++column)
                columns[column * num_rows + tensor.place_of(first + row) - first] = rows[row * tensor.num_columns + column];
    }
    const int64_t strip = strip_bytes(tensor.strips, tensor.num_rows);
    target += strip_bytes(tensor.strips, first);
    for (int64_t column = 0; column < tensor.num_columns; ++column, target += strip, columns += num_rows)
        if (!encode(tensor.strips, columns, num_rows / kCodeColumns, target)) return false;
    return true;
}

Result read_parts(FileReader& file, const FileTensor& tensor, std::byte* target) {
    thread_local Scratch scratch;
    const int64_t together = tensor.is_transposed ? rows_together(tensor) : 1;
    const int64_t fitting = kMostAtOnce / (tensor.num_columns * int64_t{sizeof(float)});
    const int64_t rows_at_once = std::max(fitting - fitting % together, together);
    scratch.reserve(std::min(rows_at_once, tensor.num_rows) * tensor.num_columns);
    for (int64_t first = 0; first < tensor.num_rows; first += rows_at_once) {
        const int64_t here = std::min(rows_at_once, tensor.num_rows - first);
        const Result result = read_floats(file, tensor, first, here, scratch);
        if (result.end != End::kDone) return result;
        const bool is_done = tensor.is_transposed ? encode_columns(tensor, first, here, scratch, target)
                                                  : encode_rows(tensor, first, here, scratch.rows.data(), target);
        if (!is_done) return {End::kTooLarge};
    }
    return {};
}

}  // namespace

Result read_coded(FileReader& file, const FileTensor& tensor, std::byte* target) {
    if (tensor.is_rearranged()) return read_parts(file, tensor, target);
    FileTensor blocks = tensor;  // where order stays, a row may be as long as it likes
    blocks.num_rows = tensor.num_rows * (tensor.num_columns / kCodeColumns);
    blocks.num_columns = kCodeColumns;
    return read_parts(file, blocks, target);
}

}  // namespace kvarto
