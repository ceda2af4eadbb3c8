#include "ops/pack_values.h"

#include <algorithm>
#include <cstring>

#include "simd/byte_lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int64_t kLineBytes = 64;
constexpr int kRegisters = kLineBytes / kRegisterBytes;  // of a line

int64_t bytes_to_line(const std::byte* place) { return -reinterpret_cast<uintptr_t>(place) % kLineBytes; }

template <class Bits> Bits bits_at(const std::byte* values, int64_t index) {
    Bits bits;
    std::memcpy(&bits, values + index * sizeof(Bits), sizeof(Bits));
    return bits;
}

// All ones in the exponent: infinite, or no number. Looks at every value, so that the loop has no branch.
template <class Bits> bool are_finite(const std::byte* __restrict in, int64_t count, Bits exponent) {
    Bits found = 0;
    for (int64_t i = 0; i < count; ++i) found |= static_cast<Bits>((bits_at<Bits>(in, i) & exponent) == exponent);
    return found == 0;
}

template <class Bits>
bool copy_values(const std::byte* __restrict in, int64_t count, Bits exponent, std::byte* __restrict out) {
    std::memcpy(out, in, static_cast<size_t>(count) * sizeof(Bits));
    return are_finite(in, count, exponent);
}

template <class Bits> bool copy_lines(const std::byte* in, int64_t num_lines, Bits exponent, std::byte* out) {
    Register<Bits> found = {};
    for (const std::byte* const end = in + num_lines * kLineBytes; in < end; in += kRegisterBytes, out += kRegisterBytes) {
        const auto values = load_register<Bits>(in);
        found |= reinterpret_cast<Register<Bits>>((values & exponent) == exponent);
        stream_register(out, values);
    }
    Bits all = 0;
    for (size_t i = 0; i < kRegisterBytes / sizeof(Bits); ++i) all |= found[i];
    return all == 0;
}

template <class Bits> bool copy_finite(const std::byte* in, int64_t count, Bits exponent, std::byte* out) {
    constexpr int64_t kItem = sizeof(Bits), kItems = kLineBytes / kItem;
    const int64_t head = std::min(count, bytes_to_line(out) / kItem), lines = (count - head) / kItems;
    const int64_t tail = head + lines * kItems;
    const bool is_head_finite = copy_values(in, head, exponent, out);
    const bool are_lines_finite = copy_lines(in + head * kItem, lines, exponent, out + head * kItem);
    const bool is_tail_finite = copy_values(in + tail * kItem, count - tail, exponent, out + tail * kItem);
    return is_head_finite && are_lines_finite && is_tail_finite;
}

// Interleaving the halves of a list of vectors, as often as there are bits in its length, transposes each lane.
template <class Vector, int kSide> void transpose_lanes(Vector (&rows)[kSide]) {
    for (int step = 1; step < kSide; step *= 2) {
        Vector next[kSide];
        for (int i = 0; i < kSide / 2; ++i) {
            next[2 * i] = rows[i], next[2 * i + 1] = rows[i + kSide / 2];
            interleave(next[2 * i], next[2 * i + 1]);
        }
        std::copy_n(next, kSide, rows);
    }
}

// A line of each of a few columns, as many as a lane has items. The lanes of a register hold rows that follow each other.
template <class Item>
void transpose_lines(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride, bool is_streamed) {
    constexpr int kSide = kLaneBytes / sizeof(Item);
    Register<Item> parts[kRegisters][kSide];
    for (int part = 0; part < kRegisters; ++part) {
        for (int row = 0; row < kSide; ++row)
            parts[part][row] = load_lanes<Item>(in + (part * kByteLanes * kSide + row) * in_stride, kSide * in_stride);
        transpose_lanes(parts[part]);
    }
    for (int column = 0; column < kSide; ++column, out += out_stride)
        for (int part = 0; part < kRegisters; ++part) {
            std::byte* const place = out + part * kRegisterBytes;
            is_streamed ? stream_register(place, parts[part][column]) : store_register(place, parts[part][column]);
        }
}

template <class Item> void transpose(const Transposition& block) {
    constexpr int64_t kItem = sizeof(Item), kSide = kLaneBytes / kItem, kLine = kLineBytes / kItem;
    const int64_t in_stride = block.num_columns * kItem, out_stride = block.out_stride * kItem;
    const int64_t whole_rows = block.num_rows - block.num_rows % kLine;
    const int64_t whole_columns = block.num_columns - block.num_columns % kSide;
    const bool is_streamed = !block.is_read_soon && bytes_to_line(block.out) == 0 && out_stride % kLineBytes == 0;
    const auto from = [&](int64_t row, int64_t column) { return block.in + row * in_stride + column * kItem; };
    const auto to = [&](int64_t row, int64_t column) { return block.out + column * out_stride + row * kItem; };
    const auto move = [&](int64_t row, int64_t column) { std::memcpy(to(row, column), from(row, column), kItem); };
    for (int64_t first = 0; first < whole_rows; first += kLine) {
        for (int64_t column = 0; column < whole_columns; column += kSide)
            transpose_lines<Item>(from(first, column), in_stride, to(first, column), out_stride, is_streamed);
        for (int64_t column = whole_columns; column < block.num_columns; ++column)
            for (int64_t row = first; row < first + kLine; ++row) move(row, column);
    }
    for (int64_t row = whole_rows; row < block.num_rows; ++row)
        for (int64_t column = 0; column < block.num_columns; ++column) move(row, column);
}

}  // namespace

bool are_finite(StripType type, const std::byte* values, int64_t count) {
    if (type == StripType::kF16) return are_finite<uint16_t>(values, count, 0x7C00);
    if (type == StripType::kBF16) return are_finite<uint16_t>(values, count, 0x7F80);
    return are_finite<uint32_t>(values, count, 0x7F800000);
}

bool copy_finite(StripType type, const std::byte* values, int64_t count, std::byte* out) {
    if (type == StripType::kF16) return copy_finite<uint16_t>(values, count, 0x7C00, out);
    if (type == StripType::kBF16) return copy_finite<uint16_t>(values, count, 0x7F80, out);
    return copy_finite<uint32_t>(values, count, 0x7F800000, out);
}

void transpose(const Transposition& block) {
    block.item_bytes == 2 ? transpose<uint16_t>(block) : transpose<uint32_t>(block);
}

}  // namespace kvarto::KVARTO_ISA
