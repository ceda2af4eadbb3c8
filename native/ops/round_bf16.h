// From float32 to bfloat16 and back. Rounding is to nearest even, and denormals become zero.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvarto::KVARTO_ISA {

// x[0 .. count - 1] to `out`; count is a multiple of 32.
inline void round_bf16(const float* x, int32_t count, std::byte* out) {
    for (int32_t i = 0; i < count; i += 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
        _mm512_storeu_si512(out + 2 * i, reinterpret_cast<__m512i>(both));
    }
}

// Sixteen values.
inline __m512 widen_bf16(const std::byte* x) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

}  // namespace kvarto::KVARTO_ISA

#endif
