// Panels back to float32 rows, one weight at a time: the statement of each format, slow and plain. Sums and products
// are rounded one by one and in ggml's order, so that its bits come out.

#include "weights/file_blocks.h"
#include "weights/half.h"
#include "weights/repack.h"

namespace kvarto {

namespace {

float half_at(const std::byte* halves, int32_t lane) { return f16_to_f32(load<uint16_t>(halves + 2 * lane)); }

uint32_t word_at(const std::byte* words, int32_t index, int32_t lane) {
    return load<uint32_t>(words + 4 * (index * kLanes + lane));
}

// The low four bits of code k of a lane, k < 32.
int32_t nibble_at(const std::byte* nib, int32_t lane, int32_t k) {
    const auto byte = load<uint8_t>(nib + 64 * (k % 16 / 4) + 4 * lane + k % 4);
    return k < 16 ? byte & 15 : byte >> 4;
}

int32_t fifth_bit_at(const std::byte* high, int32_t lane, int32_t k) {
    return static_cast<int32_t>(word_at(high, 0, lane) >> k & 1U) << 4;
}

int32_t high_pair_at(const std::byte* two, int32_t lane, int32_t k) {
    return static_cast<int32_t>(word_at(two, k / 16, lane) >> 2 * (k % 16) & 3U) << 4;
}

// Value v of the sixteen 6-bit scales and minima.
float six_at(const std::byte* six, int32_t lane, int32_t v) {
    if (v < 15) return static_cast<float>(word_at(six, v / 5, lane) >> 6 * (v % 5) & 63U);
    uint32_t value = 0;
    for (int32_t i = 0; i < 3; ++i) value |= word_at(six, i, lane) >> 30 << 2 * i;
    return static_cast<float>(value);
}

float plain_at(const RowShape& shape, const std::byte* block, int32_t lane, int32_t k) {
    if (shape.format == Format::kF32) return load<float>(block + 4 * lane);
    const auto bits = load<uint16_t>(block + 4 * lane + 2 * k);
    return shape.format == Format::kF16 ? f16_to_f32(bits) : std::bit_cast<float>(uint32_t{bits} << 16);
}

float affine(float d, int32_t code, float m) {
    const float product = d * static_cast<float>(code);
    return product + m;
}

float k_quant_at(const std::byte* block, int32_t lane, int32_t k, int32_t code) {
    const std::byte* six = block + 64;
    const float scale = half_at(block, lane) * six_at(six, lane, k / 32);
    const float minimum = half_at(block + 32, lane) * six_at(six, lane, 8 + k / 32);
    return affine(scale, code, -minimum);
}

float q6_k_at(const std::byte* block, int32_t lane, int32_t k) {
    const float scale = half_at(block, lane) * load<int8_t>(block + 32 + k / 16 * kLanes + lane);
    const int32_t sub = k / 32, at = k % 32;
    const int32_t code = nibble_at(block + 1312 + 256 * sub, lane, at) + high_pair_at(block + 288 + 128 * sub, lane, at);
    return scale * static_cast<float>(code - 32);
}

float int4_at(const std::byte* block, int32_t lane, int32_t k) {
    const int32_t zero = load<uint8_t>(block + 32 + lane);
    return half_at(block, lane) * static_cast<float>(nibble_at(block + 48 + 256 * (k / 32), lane, k % 32) - zero);
}

float weight_at(const RowShape& shape, const std::byte* block, int32_t lane, int32_t k) {
    const float d = half_at(block, lane);
    switch (shape.format) {
        case Format::kF32:
        case Format::kF16:
        case Format::kBF16: return plain_at(shape, block, lane, k);
        case Format::kQ8_0: return d * load<int8_t>(block + 32 + 64 * (k / 4) + 4 * lane + k % 4);
        case Format::kQ4_0: return d * static_cast<float>(nibble_at(block + 32, lane, k) - 8);
        case Format::kQ4_1: return affine(d, nibble_at(block + 64, lane, k), half_at(block + 32, lane));
        case Format::kQ5_0:
            return d * static_cast<float>(nibble_at(block + 96, lane, k) + fifth_bit_at(block + 32, lane, k) - 16);
        case Format::kQ5_1:
            return affine(d, nibble_at(block + 128, lane, k) + fifth_bit_at(block + 64, lane, k), half_at(block + 32, lane));
        case Format::kQ4_K: return k_quant_at(block, lane, k, nibble_at(block + 256 + 256 * (k / 32), lane, k % 32));
        case Format::kQ5_K:
            return k_quant_at(block, lane, k,
                              nibble_at(block + 768 + 256 * (k / 32), lane, k % 32) +
                                  fifth_bit_at(block + 256 + 64 * (k / 32), lane, k % 32));
        case Format::kQ6_K: return q6_k_at(block, lane, k);
        case Format::kInt4: return int4_at(block, lane, k);
    }
    return 0;
}

void unpack_row(const RowShape& shape, const std::byte* panel, int32_t lane, float* out) {
    const int32_t columns = block_columns(shape.format, shape.group_size);
    const int64_t bytes = block_bytes(shape.format, shape.group_size);
    for (int32_t k = 0; k < shape.num_columns; ++k)
        out[k] = weight_at(shape, panel + k / columns * bytes, lane, k % columns);
}

}  // namespace

void unpack_rows(const RowShape& shape, const std::byte* panels, int64_t first, int64_t last, float* out) {
    const int64_t bytes = panel_bytes(shape.format, shape.group_size, shape.num_columns);
    for (int64_t row = first; row < last; ++row)
        unpack_row(shape, panels + row / kLanes * bytes, static_cast<int32_t>(row % kLanes),
                   out + (row - first) * shape.num_columns);
}

}  // namespace kvarto
