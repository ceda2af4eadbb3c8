// What the codes of strips stand for (core/strip_type.h), in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/strip_type.h"
#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

// To the nearest bfloat16, ties to even. Values are finite.
inline F32x16 nearest_bf16(F32x16 x) {
    const I32x16 bits = bits_of(x), odd = shift_right<16>(bits) & I32x16::set1(1);
    return from_bits((bits + (odd + I32x16::set1(0x7FFF))) & I32x16::set1(static_cast<int32_t>(0xFFFF0000U)));
}

inline float scale_of(const std::byte* block) {
    uint16_t half;
    std::memcpy(&half, block, sizeof half);
#if defined(__AVX2__)
    return _cvtsh_ss(half);
#else
    return f16_to_f32(half);
#endif
}

inline void decode_q8(const std::byte* block, float* out) {
    const F32x16 scale = F32x16::set1(scale_of(block));
    const auto* codes = reinterpret_cast<const int8_t*>(block + kScaleBytes);
    for (int32_t i = 0; i < kCodeColumns; i += 16) nearest_bf16(F32x16::load_i8(codes + i) * scale).store(out + i);
}

inline void decode_q4(const std::byte* block, float* out) {
    const F32x16 scale = F32x16::set1(scale_of(block)), eight = F32x16::set1(8.0F);
    int8_t halves[kCodeColumns];
    for (int32_t i = 0; i < 16; ++i) {
        const auto both = static_cast<uint8_t>(block[kScaleBytes + i]);
        halves[i] = static_cast<int8_t>(both & 15U);
        halves[16 + i] = static_cast<int8_t>(both >> 4U);
    }
    for (int32_t i = 0; i < kCodeColumns; i += 16)
        nearest_bf16((F32x16::load_i8(halves + i) - eight) * scale).store(out + i);
}

// `count` columns, whole blocks.
inline void decode(StripType type, const std::byte* blocks, int32_t count, float* out) {
    const auto decode_block = type == StripType::kQ8 ? decode_q8 : decode_q4;
    for (int32_t i = 0; i < count; i += kCodeColumns, blocks += block_bytes(type)) decode_block(blocks, out + i);
}

}  // namespace kvarto::KVARTO_ISA
