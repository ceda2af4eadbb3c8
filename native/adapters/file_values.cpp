#include "adapters/file_values.h"

#include <bit>
#include <cstring>

#include "weights/half.h"

namespace kvarto {

namespace {

using End = PackPlan::End;

uint16_t bits_at(const std::byte* values, int64_t index) {
    uint16_t bits;
    std::memcpy(&bits, values + index * sizeof bits, sizeof bits);
    return bits;
}

// Blocks of a float16 and 32 bytes; each product is exact in float32.
void widen_q8_0(const std::byte* blocks, int64_t num_values, float* out) {
    for (int64_t first = 0; first < num_values; first += 32, blocks += 34) {
        uint16_t half;
        std::memcpy(&half, blocks, sizeof half);
        const float scale = f16_to_f32(half);
        for (int64_t i = 0; i < 32; ++i) out[first + i] = scale * static_cast<float>(static_cast<int8_t>(blocks[2 + i]));
    }
}

// Finite ones, without a branch: the float16's exponent and mantissa as those of a float32 are 2^112 too small.
void widen_f16(const std::byte* in, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = bits_at(in, i);
        const float magnitude = std::bit_cast<float>((bits & 0x7FFFU) << 13) * 0x1p112F;
        out[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (bits & 0x8000U) << 16);
    }
}

void widen_bf16(const std::byte* in, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = std::bit_cast<float>(uint32_t{bits_at(in, i)} << 16);
}

}  // namespace

PackPlan::Result ended(const FileReader::Bytes& bytes) {
    if (bytes.end == FileReader::End::kFileEnded) return {End::kFileEnded};
    return {End::kFailed, 0, bytes.error};
}

void widen(FileType type, const std::byte* values, int64_t count, float* out) {
    switch (type) {
        case FileType::kF32: std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float)); return;
        case FileType::kF16: return widen_f16(values, count, out);
        case FileType::kBF16: return widen_bf16(values, count, out);
        case FileType::kQ8_0: return widen_q8_0(values, count, out);
    }
}

}  // namespace kvarto
