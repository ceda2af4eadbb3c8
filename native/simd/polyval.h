// Vectors of elements of GF(2^128), and their sums of products; only where the processor multiplies without carries.
//
// The field is that of POLYVAL (RFC 8452, section 3): bit i of 16 bytes, read as a little-endian integer, belongs to
// x^i, modulo P = x^128 + x^127 + x^126 + x^121 + 1. A product here is dot(a, b) = a b x^-128, for dividing by x^128
// takes two additions of multiples of P, and no bit changes its place.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvarto::KVARTO_ISA {

#if defined(__VPCLMULQDQ__) && defined(__AVX512BW__)

constexpr int kFieldLanes = 4;
using FieldVec = __m512i;

[[gnu::always_inline]] inline FieldVec field_zero() { return _mm512_setzero_si512(); }
[[gnu::always_inline]] inline FieldVec field_load(const std::byte* from) { return _mm512_loadu_si512(from); }
[[gnu::always_inline]] inline FieldVec field_low(uint64_t low) {
    return _mm512_set_epi64(0, low, 0, low, 0, low, 0, low);
}
[[gnu::always_inline]] inline FieldVec field_add(FieldVec a, FieldVec b) { return _mm512_xor_si512(a, b); }
[[gnu::always_inline]] inline FieldVec field_add(FieldVec a, FieldVec b, FieldVec c) {
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}
// 128 bits: half kA of each a times half kB of each b.
template <int kA, int kB> [[gnu::always_inline]] inline FieldVec multiply_halves(FieldVec a, FieldVec b) {
    return _mm512_clmulepi64_epi128(a, b, kB << 4 | kA);
}
[[gnu::always_inline]] inline FieldVec swap_halves(FieldVec a) { return _mm512_shuffle_epi32(a, _MM_PERM_BADC); }
[[gnu::always_inline]] inline FieldVec half_up(FieldVec a) { return _mm512_bslli_epi128(a, 8); }
[[gnu::always_inline]] inline FieldVec half_down(FieldVec a) { return _mm512_bsrli_epi128(a, 8); }
[[gnu::always_inline]] inline __m128i sum_of_lanes(FieldVec a) {
    const __m256i sum = _mm256_xor_si256(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    return _mm_xor_si128(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
}

#else

constexpr int kFieldLanes = 1;
using FieldVec = __m128i;

[[gnu::always_inline]] inline FieldVec field_zero() { return _mm_setzero_si128(); }
[[gnu::always_inline]] inline FieldVec field_load(const std::byte* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
[[gnu::always_inline]] inline FieldVec field_low(uint64_t low) { return _mm_set_epi64x(0, low); }
[[gnu::always_inline]] inline FieldVec field_add(FieldVec a, FieldVec b) { return _mm_xor_si128(a, b); }
[[gnu::always_inline]] inline FieldVec field_add(FieldVec a, FieldVec b, FieldVec c) {
    return _mm_xor_si128(_mm_xor_si128(a, b), c);
}
template <int kA, int kB> [[gnu::always_inline]] inline FieldVec multiply_halves(FieldVec a, FieldVec b) {
    return _mm_clmulepi64_si128(a, b, kB << 4 | kA);
}
[[gnu::always_inline]] inline FieldVec swap_halves(FieldVec a) { return _mm_shuffle_epi32(a, 0x4E); }
[[gnu::always_inline]] inline FieldVec half_up(FieldVec a) { return _mm_slli_si128(a, 8); }
[[gnu::always_inline]] inline FieldVec half_down(FieldVec a) { return _mm_srli_si128(a, 8); }
[[gnu::always_inline]] inline __m128i sum_of_lanes(FieldVec a) { return a; }

#endif

// A sum of products, 256 bits a lane, that is reduced once.
class FieldSum {
public:
    [[gnu::always_inline]] void add_product(FieldVec a, FieldVec b) {
        low_ = field_add(low_, multiply_halves<0, 0>(a, b));
        middle_ = field_add(middle_, multiply_halves<0, 1>(a, b), multiply_halves<1, 0>(a, b));
        high_ = field_add(high_, multiply_halves<1, 1>(a, b));
    }

    // Divided by x^128: the low two words go, one after the other.
    [[gnu::always_inline]] FieldVec reduced() const {
        const FieldVec low = without_low_word(without_low_word(field_add(low_, half_up(middle_))));
        return field_add(low, high_, half_down(middle_));
    }

private:
    // P = 1 + q x^64 + x^128. Of words (w0, w1), adding w0 P leaves (0, w1 + low of w0 q, w0 + high of w0 q).
    [[gnu::always_inline]] static FieldVec without_low_word(FieldVec words) {
        const FieldVec q = field_low(0xC200'0000'0000'0000);
        return field_add(swap_halves(words), multiply_halves<0, 0>(words, q));
    }

    FieldVec low_ = field_zero(), middle_ = field_zero(), high_ = field_zero();
};

}  // namespace kvarto::KVARTO_ISA
