// From float32 to bfloat16 and back. Rounding is to nearest even, and denormals become zero.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvarto::KVARTO_ISA {

// A group of a row.
inline void round_group(const float* x, std::byte* out) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
    _mm512_storeu_si512(out, reinterpret_cast<__m512i>(both));
}

// x[0 .. count - 1], whole groups of one row, to where the first of them lies among bfloat16 rows.
inline void round_bf16(const float* x, int32_t count, std::byte* out) {
    for (int32_t i = 0; i < count; i += kGroup, out += kBF16TileBytes) round_group(x + i, out);
}

// Sixteen values.
inline __m512 widen_bf16(const std::byte* x) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Tiles take denormals for zero, whatever the thread's mode.
class DenormalsAreZero {
public:
    DenormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~DenormalsAreZero() { _mm_setcsr(before_); }
    DenormalsAreZero(const DenormalsAreZero&) = delete;
    DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

private:
    unsigned before_;
};

}  // namespace kvarto::KVARTO_ISA

#endif
