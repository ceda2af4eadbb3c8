// K-quants: 256 columns with two levels of scales. ggml mixes the nibbles of neighbouring sub-blocks in one byte and
// keeps high bits across sub-blocks; in a panel each sub-block of 32 stands alone.
#include "weights/file_blocks.h"

namespace kvarto {

namespace {

constexpr uint32_t kLowNibbles = 0x0F0F0F0FU;

// A `nib` quad of codes in the low (half = 0) or high nibbles of 32 bytes: k = 4j..4j+3, and 16 further.
uint32_t nib_word(const std::byte* bytes, int32_t j, int32_t half) {
    const uint32_t low = load<uint32_t>(bytes + 4 * j) >> 4 * half & kLowNibbles;
    const uint32_t high = load<uint32_t>(bytes + 16 + 4 * j) >> 4 * half & kLowNibbles;
    return low | high << 4;
}

// One sub-block's nib(0..3) from 32 bytes at `offset`.
void pack_nibbles(const BlockRows& rows, int64_t offset, int32_t half, std::byte* out) {
    for (int32_t j = 0; j < 4; ++j)
        for (int32_t lane = 0; lane < kLanes; ++lane)
            store(out + 4 * (j * kLanes + lane), nib_word(rows[lane] + offset, j, half));
}

// ggml's 12 bytes: the first four scales and minima have six bits in bytes 0..3 and 4..7; of the others the low four
// bits share bytes 8..11, and the high two fill the top of the first eight.
std::array<uint32_t, 16> read_scales(const std::byte* p) {
    std::array<uint32_t, 16> values;
    for (int32_t i = 0; i < 4; ++i) {
        const auto scale = load<uint8_t>(p + i), minimum = load<uint8_t>(p + 4 + i), low = load<uint8_t>(p + 8 + i);
        values[i] = scale & 63U;
        values[8 + i] = minimum & 63U;
        values[4 + i] = (low & 15U) | scale >> 6 << 4;
        values[12 + i] = uint32_t{low} >> 4 | minimum >> 6 << 4;
    }
    return values;
}

void pack_scales(const BlockRows& rows, int64_t offset, std::byte* out) {
    for (int32_t lane = 0; lane < kLanes; ++lane) {
        const std::array<uint32_t, 16> values = read_scales(rows[lane] + offset);
        uint32_t words[3] = {};
        for (int32_t v = 0; v < 15; ++v) words[v / 5] |= values[v] << 6 * (v % 5);
        for (int32_t i = 0; i < 3; ++i)
            store(out + 4 * (i * kLanes + lane), words[i] | (values[15] >> 2 * i & 3U) << 30);
    }
}

// The fifth bits of all sub-blocks, 64 bytes each: on file, sub-block s has bit s of each of 32 bytes.
void pack_fifth_bits(const BlockRows& rows, int64_t offset, std::byte* out) {
    for (int32_t lane = 0; lane < kLanes; ++lane)
        for (int32_t i = 0; i < 4; ++i) {
            const uint64_t by_sub = transpose_bits(load<uint64_t>(rows[lane] + offset + 8 * i));
            for (int32_t sub = 0; sub < 8; ++sub)
                store(out + 64 * sub + 4 * lane + i, static_cast<uint8_t>(by_sub >> 8 * sub));
        }
}

// Bits 4..5 of four sub-blocks of Q6_K, 128 bytes each: on file, sub-block s has pair s of each of 32 bytes.
void pack_high_pairs(const BlockRows& rows, int64_t offset, std::byte* out) {
    for (int32_t lane = 0; lane < kLanes; ++lane)
        for (int32_t i = 0; i < 4; ++i) {
            const uint64_t by_sub = transpose_pairs(load<uint64_t>(rows[lane] + offset + 8 * i));
            std::byte* halves = out + 64 * (i / 2) + 4 * lane + 2 * (i % 2);
            for (int32_t sub = 0; sub < 4; ++sub) {
                store(halves + 128 * sub, static_cast<uint8_t>(by_sub >> 8 * sub));
                store(halves + 128 * sub + 1, static_cast<uint8_t>(by_sub >> (32 + 8 * sub)));
            }
        }
}

}  // namespace

// d f16 | dmin f16 | scales 12 | nibbles 128: 32 bytes hold sub-block 2i low and 2i + 1 high.
void pack_q4_k(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 0, 2, out);
    pack_scales(rows, 4, out + 64);
    for (int32_t sub = 0; sub < 8; ++sub) pack_nibbles(rows, 16 + 32 * (sub / 2), sub % 2, out + 256 + 256 * sub);
}

// d f16 | dmin f16 | scales 12 | fifth bits 32 | nibbles 128
void pack_q5_k(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 0, 2, out);
    pack_scales(rows, 4, out + 64);
    pack_fifth_bits(rows, 16, out + 256);
    for (int32_t sub = 0; sub < 8; ++sub) pack_nibbles(rows, 48 + 32 * (sub / 2), sub % 2, out + 768 + 256 * sub);
}

// nibbles 128 | high pairs 64 | scales i8 16 | d f16: by halves of 128 columns, in each of which 64 bytes of nibbles
// hold sub-blocks 0 and 1 low, 2 and 3 high, and 32 bytes the pairs of all four.
void pack_q6_k(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 208, 1, out);
    interleave<uint8_t>(rows, 192, 16, out + 32);
    for (int32_t half = 0; half < 2; ++half) {
        pack_high_pairs(rows, 128 + 32 * half, out + 288 + 512 * half);
        for (int32_t quarter = 0; quarter < 4; ++quarter)
            pack_nibbles(rows, 64 * half + 32 * (quarter % 2), quarter / 2, out + 1312 + 256 * (4 * half + quarter));
    }
}

}  // namespace kvarto
