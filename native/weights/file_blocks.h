// Blocks as files keep them, and the small moves of bits that repacking is made of.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "weights/format.h"

namespace kvarto {

static_assert(std::endian::native == std::endian::little, "model files and panels are little-endian");

// The same block of sixteen rows.
using BlockRows = std::array<const std::byte*, kLanes>;

// Bytes of a block of block_columns(format, group_size) columns on file.
int64_t file_block_bytes(Format format, int32_t group_size);

template <class T> T load(const std::byte* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

template <class T> void store(std::byte* p, T value) { std::memcpy(p, &value, sizeof value); }

// out[i][lane] = the i-th T at `offset` of each row's block.
template <class T> void interleave(const BlockRows& rows, int64_t offset, int32_t count, std::byte* out) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    for (int32_t i = 0; i < count; ++i)
        for (int32_t lane = 0; lane < kLanes; ++lane)
            store(out + (i * kLanes + lane) * kSize, load<T>(rows[lane] + offset + i * kSize));
}

// Swaps the bits of `mask` with those `distance` above them.
inline uint64_t swap_bits(uint64_t x, uint64_t mask, int32_t distance) {
    const uint64_t difference = (x ^ x >> distance) & mask;
    return x ^ difference ^ difference << distance;
}

// Eight bytes as a matrix of 8 x 8 bits, transposed: bit i of byte j becomes bit j of byte i.
inline uint64_t transpose_bits(uint64_t x) {
    x = swap_bits(x, 0x00AA00AA00AA00AAU, 7);
    x = swap_bits(x, 0x0000CCCC0000CCCCU, 14);
    return swap_bits(x, 0x00000000F0F0F0F0U, 28);
}

// Twice four bytes as matrices of 4 x 4 pairs of bits, transposed each: pair i of byte j becomes pair j of byte i.
inline uint64_t transpose_pairs(uint64_t x) {
    x = swap_bits(x, 0x00CC00CC00CC00CCU, 6);
    return swap_bits(x, 0x0000F0F00000F0F0U, 12);
}

// K-quants with 256 columns; each writes one panel block.
void pack_q4_k(const BlockRows& rows, std::byte* out);
void pack_q5_k(const BlockRows& rows, std::byte* out);
void pack_q6_k(const BlockRows& rows, std::byte* out);

}  // namespace kvarto
