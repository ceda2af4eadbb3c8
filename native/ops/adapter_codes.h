// What the codes of strips stand for (core/strip_type.h), in float32, and beside matrix tiles in bfloat16.
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

inline float block_scale(const std::byte* block) {
    uint16_t half;
    std::memcpy(&half, block, sizeof half);
#if defined(__AVX2__)
    return _cvtsh_ss(half);
#else
    return f16_to_f32(half);
#endif
}

inline void decode_q8(const std::byte* block, float* out) {
    const F32x16 scale = F32x16::set1(block_scale(block));
    const auto* codes = reinterpret_cast<const int8_t*>(block + kScaleBytes);
    for (int32_t i = 0; i < kCodeColumns; i += 16) nearest_bf16(F32x16::load_i8(codes + i) * scale).store(out + i);
}

inline void decode_q4(const std::byte* block, float* out) {
    const F32x16 scale = F32x16::set1(block_scale(block)), eight = F32x16::set1(8.0F);
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

#if defined(__AVX512BF16__)

// Sixteen codes times their scale; no product is a denormal number, which rounding would make zero.
inline __m512 products(__m128i codes, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), scale);
}

// A block as 32 bfloat16.
inline __m512i decode_block(StripType type, const std::byte* block) {
    const __m512 scale = _mm512_set1_ps(block_scale(block));
    const auto* codes = reinterpret_cast<const __m128i*>(block + kScaleBytes);
    __m128i low = _mm_loadu_si128(codes), high;
    if (type == StripType::kQ8) {
        high = _mm_loadu_si128(codes + 1);
    } else {
        const __m128i half = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
        high = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(low, 4), half), eight);
        low = _mm_sub_epi8(_mm_and_si128(low, half), eight);
    }
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(products(high, scale), products(low, scale)));
}

// `count` columns, whole blocks, to a multiple of 64 bytes.
inline void decode_bf16(StripType type, const std::byte* blocks, int32_t count, std::byte* out) {
    for (int32_t i = 0; i < count; i += kCodeColumns, blocks += block_bytes(type))
        _mm512_store_si512(out + 2 * i, decode_block(type, blocks));
}

#endif

}  // namespace kvarto::KVARTO_ISA
