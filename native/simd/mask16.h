// Comparisons of sixteen lanes as bits, lane 0 lowest, and what is done with such bits.
#pragma once

#include <bit>

#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)

// a ≥ b; false where either is NaN.
inline uint32_t at_least(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t equal(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline uint32_t is_nan(F32x16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
// The lanes of the mask, side by side; writes all sixteen places.
inline void compress(F32x16 a, uint32_t mask, float* out) {
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), a.v));
}
inline void compress(I32x16 a, uint32_t mask, int32_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), a.v));
}

#else

#if defined(__AVX2__)

namespace detail {
inline uint32_t bits(__m256 lo, __m256 hi) {
    return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
}  // namespace detail

inline uint32_t at_least(F32x16 a, F32x16 b) {
    return detail::bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
inline uint32_t equal(F32x16 a, F32x16 b) {
    return detail::bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
inline uint32_t is_nan(F32x16 a) {
    return detail::bits(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}

#else

namespace detail {
template <class F> uint32_t bits(F f) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(f(i)) << i;
    return mask;
}
}  // namespace detail

inline uint32_t at_least(F32x16 a, F32x16 b) { return detail::bits([&](int i) { return a.v[i] >= b.v[i]; }); }
inline uint32_t equal(F32x16 a, F32x16 b) { return detail::bits([&](int i) { return a.v[i] == b.v[i]; }); }
inline uint32_t is_nan(F32x16 a) { return detail::bits([&](int i) { return a.v[i] != a.v[i]; }); }

#endif

template <class Vector, class T> void compress(Vector a, uint32_t mask, T* out) {
    T lanes[16];
    a.store(lanes);
    for (; mask != 0; mask &= mask - 1) *out++ = lanes[std::countr_zero(mask)];
}

#endif

// 0, 1, …, 15.
inline I32x16 lane_numbers() {
    static constexpr int32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return I32x16::load(kNumbers);
}

}  // namespace kvarto::KVARTO_ISA
