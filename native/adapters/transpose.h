// Columns of a block of rows, one after the other: what becomes of B when its strips are its columns.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvarto {

// Sixteen bytes, which every processor that we know has registers for.
using U16x8 = uint16_t __attribute__((vector_size(16)));
using U32x4 = uint32_t __attribute__((vector_size(16)));

namespace detail {

inline void interleave(U16x8& a, U16x8& b) {
    const U16x8 low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    b = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    a = low;
}

inline void interleave(U32x4& a, U32x4& b) {
    const U32x4 low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    b = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    a = low;
}

// Interleaving the halves of a list of vectors, as often as there are bits in its length, transposes it. Strides in bytes.
template <class Vector, int kSide>
void transpose_tile(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride) {
    Vector rows[kSide];
    for (int row = 0; row < kSide; ++row) std::memcpy(&rows[row], in + row * in_stride, sizeof(Vector));
    for (int step = 1; step < kSide; step *= 2) {
        Vector next[kSide];
        for (int i = 0; i < kSide / 2; ++i) {
            next[2 * i] = rows[i], next[2 * i + 1] = rows[i + kSide / 2];
            interleave(next[2 * i], next[2 * i + 1]);
        }
        std::memcpy(rows, next, sizeof rows);
    }
    for (int column = 0; column < kSide; ++column) std::memcpy(out + column * out_stride, &rows[column], sizeof(Vector));
}

template <class Item> void transpose_tile(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride) {
    using Vector = std::conditional_t<sizeof(Item) == 2, U16x8, U32x4>;
    transpose_tile<Vector, 16 / sizeof(Item)>(in, in_stride, out, out_stride);
}

// What is written next to these columns: too many places at once for the processor to see it coming.
template <class Item> void prefetch_columns(const std::byte* out, int64_t rows, int64_t out_stride) {
    constexpr int64_t kItem = sizeof(Item), kSide = 16 / kItem, kLine = 64 / kItem;
    for (int64_t column = 0; column < kSide; ++column)
        for (int64_t row = 0; row < rows; row += kLine) __builtin_prefetch(out + column * out_stride + row * kItem, 1);
}

}  // namespace detail

// `in`: rows of `columns` values, aligned to nothing. Value (row, column) goes to place `column * out_stride + row`.
template <class Item>
void transpose(const std::byte* in, int64_t rows, int64_t columns, std::byte* out, int64_t out_stride) {
    constexpr int64_t kItem = sizeof(Item), kSide = 16 / kItem;
    constexpr int64_t kRows = 64;  // of a few columns at a time: whole cache lines are written, of few that may collide
    const int64_t whole_rows = rows - rows % kSide, whole_columns = columns - columns % kSide;
    const auto from = [&](int64_t row, int64_t column) { return in + (row * columns + column) * kItem; };
    const auto to = [&](int64_t row, int64_t column) { return out + (column * out_stride + row) * kItem; };
    for (int64_t first = 0; first < whole_rows; first += kRows) {
        const int64_t last = std::min(first + kRows, whole_rows);
        for (int64_t column = 0; column < whole_columns; column += kSide) {
            if (last < whole_rows) detail::prefetch_columns<Item>(to(last, column), kRows, out_stride * kItem);
            for (int64_t row = first; row < last; row += kSide)
                detail::transpose_tile<Item>(from(row, column), columns * kItem, to(row, column), out_stride * kItem);
        }
        for (int64_t column = whole_columns; column < columns; ++column)
            for (int64_t row = first; row < last; ++row) std::memcpy(to(row, column), from(row, column), kItem);
    }
    for (int64_t row = whole_rows; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column) std::memcpy(to(row, column), from(row, column), kItem);
}

}  // namespace kvarto
