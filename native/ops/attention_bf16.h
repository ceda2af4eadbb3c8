// Keys and values as bfloat16, two to a pair, as products of pairs want them.
#pragma once

#if defined(__AVX512BF16__)

#include "ops/attention_keys.h"

namespace kvarto::KVARTO_ISA {

inline __m512 bf16_pair(__m512 low, __m512 high) {
    return _mm512_castsi512_ps(reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
}

// Elements [first, first + 32) of a token as bfloat16; 0 behind the head's end, and where there is no key.
template <KVType kType>
inline __m512i load_bf16(const TileTokens& tokens, int32_t key, int32_t first, int32_t head_dim) {
    if constexpr (kType == KVType::kBF16) {
        const std::byte* token = tokens.token[key];
        if (token == nullptr) return _mm512_setzero_si512();
        if (first + 32 <= head_dim) return _mm512_loadu_si512(token + 2 * first);
        return _mm512_maskz_loadu_epi16((1U << (head_dim - first)) - 1, token + 2 * first);
    } else {
        const F32x16 low = load_token<kType>(tokens, key, first, head_dim);
        const bool is_last = first + 16 >= head_dim;
        const F32x16 high = is_last ? F32x16::zero() : load_token<kType>(tokens, key, first + 16, head_dim);
        return _mm512_castps_si512(bf16_pair(low.v, high.v));
    }
}

// Words of two tokens alternate. Of 32 dims, dims 0..3, 8..11, 16..19 and 24..27 come first.
inline void store_pairs(__m512i even, __m512i odd, void* out) {
    auto* pairs = static_cast<__m512i*>(out);
    _mm512_store_si512(pairs, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(pairs + 1, _mm512_unpackhi_epi16(even, odd));
}

// Columns of products with such pairs, `width` of them, in the order of dims. 64-byte aligned.
inline void put_in_order(const float* columns, int32_t width, float* out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int32_t i = 0; i < width; i += 32) {
        const __m512 low = _mm512_load_ps(columns + i), high = _mm512_load_ps(columns + i + 16);
        _mm512_store_ps(out + i, _mm512_permutex2var_ps(low, first, high));
        _mm512_store_ps(out + i + 16, _mm512_permutex2var_ps(low, last, high));
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
