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

// Bit 0 of each of eight bytes, side by side. The product adds byte b, moved to bit 56 + b, without carries.
inline uint32_t gather_bits(uint64_t bytes) {
    return static_cast<uint32_t>(((bytes & 0x0101010101010101U) * 0x0102040810204080U) >> 56);
}

// Bits 0..1 of each of eight bytes, side by side: pairs, fours, eights.
inline uint32_t gather_pairs(uint64_t bytes) {
    uint64_t x = bytes & 0x0303030303030303U;
    x = (x | x >> 6) & 0x000F000F000F000FU;
    x = (x | x >> 12) & 0x000000FF000000FFU;
    return static_cast<uint32_t>((x | x >> 24) & 0xFFFFU);
}

// K-quants with 256 columns; each writes one panel block.
void pack_q4_k(const BlockRows& rows, std::byte* out);
void pack_q5_k(const BlockRows& rows, std::byte* out);
void pack_q6_k(const BlockRows& rows, std::byte* out);

}  // namespace kvarto
