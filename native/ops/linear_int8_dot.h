// Products of unpacked weight codes with the codes of one activation row: exact sums in int32, sixteen rows of weights
// at a time, whatever instructions the set has for it.
#pragma once

#include <cstdint>
#include <cstring>

#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

inline int32_t load_word(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// The group's codes of a block, made ready once for any number of activation rows, and their products.
//
//   sums<first, count>(row): sum over k of (code - offset) * row code, for quads [first, first + count)
//
// `code_sums` are the row's two sums of sixteen codes: offset * sum is taken off again, which is exact.
template <Format format> struct GroupCodes {
    using B = Block<format>;
    Quads quads;

#if defined(__AVX512F__)

    // vpdpbusd takes one operand unsigned, so signed codes get 128 more. One per quad and row: two in a cycle.
    static constexpr int kOffset = B::kBits == 8 ? 128 : B::kOffset;

    GroupCodes(const B& block, int group) {
        block.codes(group, quads);
        if constexpr (B::kBits == 8)
            for (I32x16& quad : quads) quad.v = _mm512_xor_si512(quad.v, _mm512_set1_epi8(-128));
    }

    template <int first, int count> I32x16 sums(const int8_t* codes, const int16_t* code_sums) const {
        constexpr int32_t low = first == 0 ? -kOffset : 0, high = first + count == 8 ? -kOffset : 0;
        __m512i total = _mm512_setzero_si512();
        if constexpr (kOffset != 0) {
            const __m512i offsets = _mm512_set1_epi32(static_cast<int32_t>((low & 0xFFFF) | uint32_t(high) << 16));
            total = _mm512_dpwssd_epi32(total, offsets, _mm512_set1_epi32(load_word(code_sums)));
        }
        for (int j = first; j < first + count; ++j)
            total = _mm512_dpbusd_epi32(total, quads[j].v, _mm512_set1_epi32(load_word(codes + 4 * j)));
        return {total};
    }

#elif defined(__AVX2__)

    // vpmaddubsw adds two products in 16 bits. How many of those fit: 127 * 15 * 2 * 8, * 31 * 2 * 4, * 63 * 2 * 2.
    // Of 8-bit codes one pair fits when the sign moves to the row's codes: 127 * 128 * 2 = 32,512.
    static constexpr int kTogether = B::kBits == 4 ? 8 : B::kBits == 5 ? 4 : B::kBits == 6 ? 2 : 1;
    static constexpr int kOffset = B::kOffset;

    GroupCodes(const B& block, int group) { block.codes(group, quads); }

    static __m256i pairs(__m256i quad, __m256i codes) {
        if constexpr (B::kBits == 8) return _mm256_maddubs_epi16(_mm256_abs_epi8(quad), _mm256_sign_epi8(codes, quad));
        return _mm256_maddubs_epi16(quad, codes);
    }

    template <int first, int count> I32x16 sums(const int8_t* codes, const int16_t* code_sums) const {
        constexpr int together = kTogether < count ? kTogether : count;
        constexpr int32_t low = first == 0 ? -kOffset : 0, high = first + count == 8 ? -kOffset : 0;
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i lo = _mm256_setzero_si256(), hi = lo;
        if constexpr (kOffset != 0) {
            const __m256i offsets = _mm256_set1_epi32(static_cast<int32_t>((low & 0xFFFF) | uint32_t(high) << 16));
            lo = hi = _mm256_madd_epi16(offsets, _mm256_set1_epi32(load_word(code_sums)));
        }
        for (int j = first; j < first + count; j += together) {
            __m256i some_lo = _mm256_setzero_si256(), some_hi = some_lo;
            for (int i = j; i < j + together; ++i) {
                const __m256i word = _mm256_set1_epi32(load_word(codes + 4 * i));
                some_lo = _mm256_add_epi16(some_lo, pairs(quads[i].lo, word));
                some_hi = _mm256_add_epi16(some_hi, pairs(quads[i].hi, word));
            }
            lo = _mm256_add_epi32(lo, _mm256_madd_epi16(some_lo, ones));
            hi = _mm256_add_epi32(hi, _mm256_madd_epi16(some_hi, ones));
        }
        return {lo, hi};
    }

#else

    GroupCodes(const B& block, int group) { block.codes(group, quads); }

    template <int first, int count> I32x16 sums(const int8_t* codes, const int16_t*) const {
        I32x16 total = I32x16::zero();
        for (int j = first; j < first + count; ++j)
            for (int lane = 0; lane < 16; ++lane)
                for (int i = 0; i < 4; ++i) {
                    const int32_t byte = (quads[j].v[lane] >> 8 * i) & 0xFF;
                    const int32_t code = B::kBits == 8 ? static_cast<int8_t>(byte) : byte - B::kOffset;
                    total.v[lane] += code * codes[4 * j + i];
                }
        return total;
    }

#endif
};

}  // namespace kvarto::KVARTO_ISA
