// float16 to float32 where no vector unit is at hand.
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

}  // namespace kvarto
