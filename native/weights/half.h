// float16 to float32 and back where no vector unit is at hand. Ops have their own in simd/vec16.h: what is inline there is
// compiled once per instruction set, and must not be shared with plain code.
#pragma once

#include <bit>
#include <cstdint>

namespace kvarto {

// Exact for every value, subnormal and infinite too; NaN stays NaN.
inline float f16_to_f32(uint16_t bits) {
    const uint32_t sign = uint32_t{bits & 0x8000U} << 16;
    const uint32_t exponent = bits >> 10 & 31U, mantissa = bits & 0x3FFU;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000U | mantissa << 13);
    if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    const float value = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -value : value;
}

// Rounds to nearest even; from 65520 up infinite. Not for NaN.
inline uint16_t f32_to_f16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFFU;
    const uint32_t sign = bits >> 16 & 0x8000U;
    if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);
    if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24
        const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F);
        return static_cast<uint16_t>(sign | (sum - 0x3F000000U));
    }
    const uint32_t rounded = magnitude + 0xFFFU + (magnitude >> 13 & 1U) - (112U << 23);
    return static_cast<uint16_t>(sign | rounded >> 13);
}

}  // namespace kvarto
