// What adapters are multiplied in: float32, or pairs of bfloat16 where rows are int8 and the machine multiplies pairs.
#pragma once

#include <algorithm>
#include <cassert>

#include "core/adapters.h"
#include "ops/adapter_strips.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

// Whether an update is multiplied in pairs of bfloat16: it depends on what it is, and on no rows.
inline bool uses_pairs([[maybe_unused]] const AdapterWork& work, [[maybe_unused]] const AdapterUpdate& update) {
#if defined(__AVX512BF16__)
    return work.token_ids == nullptr && work.x.form == RowForm::kInt8 && stands_for_bf16(update.a.type) &&
           stands_for_bf16(update.b.type) && update.b.num_columns % kGroup == 0;
#else
    return false;
#endif
}

// Each strip widened.
template <StripType type> struct WideNumbers {
    static constexpr bool kArePairs = false;
    static constexpr int32_t kStrips = 1;        // whose columns are added at once
    static constexpr int32_t kColumns = kWide;   // of a row and a strip that are added at once
    using Vector = F32x16;

    static Vector row(const std::byte* x, int32_t column) {
        return F32x16::load(reinterpret_cast<const float*>(x) + column);
    }
    static Vector strip(const std::byte* span, int32_t column) { return load_strip<type>(span, column); }
    static F32x16 add(Vector a, Vector b, F32x16 sum) { return fma(a, b, sum); }

    // Sixteen columns of the strips of a term; and its factors in every lane.
    static Vector term(const std::byte* const* spans, int32_t column) { return load_strip<type>(spans[0], column); }
    static Vector stored_term(const float* from) { return F32x16::load(from); }
    static void store_term(Vector x, float* out) { x.store(out); }
    static Vector factor(const float* packed) { return F32x16::set1(*packed); }
    // Factors of `num` strips, a number for each term.
    static void pack(const float* factors, int32_t num, float* out) { std::copy_n(factors, num, out); }
};

#if defined(__AVX512BF16__)

// Two columns of a row, or two strips, in each lane: rounded to nearest even, denormals are zero.
struct PairsOfBF16 {
    static constexpr bool kArePairs = true;
    static constexpr int32_t kStrips = 2, kColumns = 2 * kWide;
    using Vector = __m512bh;

    static Vector row(const std::byte* x, int32_t column) { return load(x + 2 * column); }
    static Vector strip(const std::byte* span, int32_t column) { return load(span + 2 * column); }
    static F32x16 add(Vector a, Vector b, F32x16 sum) { return {_mm512_dpbf16_ps(sum.v, a, b)}; }

    static Vector term(const std::byte* const* spans, int32_t column) {
        const auto half = [&](int32_t s) {
            return _mm512_castsi256_si512(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(spans[s] + 2 * column)));
        };
        const __m512i first = _mm512_set1_epi32(0x00200000);
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i words = _mm512_add_epi32(first, _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16)));
        return reinterpret_cast<Vector>(_mm512_permutex2var_epi16(half(0), words, half(1)));
    }
    static Vector stored_term(const float* from) { return load(reinterpret_cast<const std::byte*>(from)); }
    static void store_term(Vector x, float* out) { _mm512_storeu_si512(out, reinterpret_cast<__m512i>(x)); }
    static Vector factor(const float* packed) {
        return reinterpret_cast<Vector>(_mm512_castps_si512(_mm512_set1_ps(*packed)));
    }
    static void pack(const float* factors, int32_t num, float* out) {
        for (int32_t s = 0; s < num; s += kWide) {
            const __m256bh words = _mm512_cvtneps_pbh(load_first(factors + s, std::min(kWide, num - s)).v);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + s / kStrips), reinterpret_cast<__m256i>(words));
        }
    }

private:
    static Vector load(const std::byte* from) { return reinterpret_cast<Vector>(_mm512_loadu_si512(from)); }
};

#endif

// f.operator()<Numbers>() of what an update is multiplied in; `type` is that of its strips.
template <class F> decltype(auto) with_numbers([[maybe_unused]] bool in_pairs, StripType type, F f) {
#if defined(__AVX512BF16__)
    if (in_pairs) return f.template operator()<PairsOfBF16>();
#endif
    assert(!in_pairs);
    switch (span_type(type)) {
        case StripType::kF32: return f.template operator()<WideNumbers<StripType::kF32>>();
        case StripType::kF16: return f.template operator()<WideNumbers<StripType::kF16>>();
        case StripType::kBF16: return f.template operator()<WideNumbers<StripType::kBF16>>();
        case StripType::kQ8:
        case StripType::kQ4: break;  // no type of spans
    }
    __builtin_unreachable();
}

}  // namespace kvarto::KVARTO_ISA
