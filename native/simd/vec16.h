// Sixteen lanes of float32 or int32, whatever the machine has: one zmm, two ymm, or an array that the compiler
// vectorises. The logical width never changes, so sums have the same order, and the same bits, on every machine that
// has fused multiply-add.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)

struct I32x16;

struct F32x16 {
    __m512 v;
    static F32x16 zero() { return {_mm512_setzero_ps()}; }
    static F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
    static F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F32x16 load_f16(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static F32x16 load_bf16(const uint16_t* p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    static F32x16 load_i8(const int8_t* p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store_f16(uint16_t* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

struct I32x16 {
    __m512i v;
    static I32x16 zero() { return {_mm512_setzero_si512()}; }
    static I32x16 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
    static I32x16 load(const void* p) { return {_mm512_loadu_si512(p)}; }
    void store(void* p) const { _mm512_storeu_si512(p, v); }
};

inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The larger, lane by lane; b where either is NaN.
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline F32x16 to_f32(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Rounds to nearest even.
inline I32x16 to_i32(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline I32x16 bits_of(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
inline F32x16 from_bits(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I32x16 operator&(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32x16 operator|(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N> I32x16 shift_left(I32x16 a) { return {_mm512_slli_epi32(a.v, N)}; }
// Logical: zeros come in from the left.
template <int N> I32x16 shift_right(I32x16 a) { return {_mm512_srli_epi32(a.v, N)}; }
// The low bytes of the lanes, saturated to [-128, 127].
inline __m128i to_i8(I32x16 a) { return _mm512_cvtsepi32_epi8(a.v); }
inline void store_i8(I32x16 a, int8_t* p) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_i8(a)); }
// Lanes of `yes` where a < b, else of `no`.
inline F32x16 where_less(I32x16 a, I32x16 b, F32x16 yes, F32x16 no) {
    return {_mm512_mask_mov_ps(no.v, _mm512_cmplt_epi32_mask(a.v, b.v), yes.v)};
}

#elif defined(__AVX2__)

struct F32x16 {
    __m256 lo, hi;
    static F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F32x16 load_f16(const uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
    }
    static F32x16 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
    static F32x16 load_i8(const int8_t* p) { return {widen_i8(p), widen_i8(p + 8)}; }
    void store(float* p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
    void store_f16(uint16_t* p) const {
        constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, kNearest));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(hi, kNearest));
    }

private:
    static __m256 widen_bf16(const uint16_t* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static __m256 widen_i8(const int8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
};

struct I32x16 {
    __m256i lo, hi;
    static I32x16 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static I32x16 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    static I32x16 load(const void* p) {
        const auto* q = static_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
    }
    void store(void* p) const {
        auto* q = static_cast<__m256i*>(p);
        _mm256_storeu_si256(q, lo);
        _mm256_storeu_si256(q + 1, hi);
    }
};

inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 abs(F32x16 a) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F32x16 to_f32(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32x16 to_i32(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline I32x16 bits_of(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline F32x16 from_bits(I32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline I32x16 operator&(I32x16 a, I32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline I32x16 operator|(I32x16 a, I32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N> I32x16 shift_left(I32x16 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> I32x16 shift_right(I32x16 a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
inline __m128i to_i8(I32x16 a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0b11011000);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void store_i8(I32x16 a, int8_t* p) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_i8(a)); }
inline F32x16 where_less(I32x16 a, I32x16 b, F32x16 yes, F32x16 no) {
    const auto pick = [](__m256i x, __m256i y, __m256 one, __m256 other) {
        return _mm256_blendv_ps(other, one, _mm256_castsi256_ps(_mm256_cmpgt_epi32(y, x)));
    };
    return {pick(a.lo, b.lo, yes.lo, no.lo), pick(a.hi, b.hi, yes.hi, no.hi)};
}

#else

// Plain loops over sixteen elements: the compiler turns them into what the machine has.
// Exact for every value; NaN stays NaN.
inline float f16_to_f32(uint16_t bits) {
    const uint32_t sign = uint32_t{bits & 0x8000U} << 16, magnitude = bits & 0x7FFFU;
    if (magnitude >= 0x7C00U) return std::bit_cast<float>(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
    if (magnitude >= 0x400U) return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -subnormal : subnormal;
}

// Rounds to nearest even; from 65520 up infinite; NaN becomes quiet.
inline uint16_t f32_to_f16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFFU;
    const uint32_t sign = bits >> 16 & 0x8000U;
    if (magnitude > 0x7F800000U) return static_cast<uint16_t>(sign | 0x7E00U | (magnitude >> 13 & 0x3FFU));
    if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);
    if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24
        const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F);
        return static_cast<uint16_t>(sign | (sum - 0x3F000000U));
    }
    const uint32_t rounded = magnitude + 0xFFFU + (magnitude >> 13 & 1U) - (112U << 23);
    return static_cast<uint16_t>(sign | rounded >> 13);
}

struct F32x16 {
    float v[16];
    template <class F> static F32x16 each(F f) {
        F32x16 out;
        for (int i = 0; i < 16; ++i) out.v[i] = f(i);
        return out;
    }
    static F32x16 zero() { return each([](int) { return 0.0F; }); }
    static F32x16 set1(float x) { return each([x](int) { return x; }); }
    static F32x16 load(const float* p) { return each([p](int i) { return p[i]; }); }
    static F32x16 load_f16(const uint16_t* p) { return each([p](int i) { return f16_to_f32(p[i]); }); }
    static F32x16 load_bf16(const uint16_t* p) {
        return each([p](int i) {
            const uint32_t bits = uint32_t{p[i]} << 16;
            float value;
            std::memcpy(&value, &bits, 4);
            return value;
        });
    }
    static F32x16 load_i8(const int8_t* p) { return each([p](int i) { return static_cast<float>(p[i]); }); }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
    void store_f16(uint16_t* p) const {
        for (int i = 0; i < 16; ++i) p[i] = f32_to_f16(v[i]);
    }
};

struct I32x16 {
    int32_t v[16];
    template <class F> static I32x16 each(F f) {
        I32x16 out;
        for (int i = 0; i < 16; ++i) out.v[i] = f(i);
        return out;
    }
    static I32x16 zero() { return each([](int) { return 0; }); }
    static I32x16 set1(int32_t x) { return each([x](int) { return x; }); }
    static I32x16 load(const void* p) {
        I32x16 out;
        std::memcpy(out.v, p, sizeof out.v);
        return out;
    }
    void store(void* p) const { std::memcpy(p, v, sizeof v); }
};

inline F32x16 operator+(F32x16 a, F32x16 b) { return F32x16::each([&](int i) { return a.v[i] + b.v[i]; }); }
inline F32x16 operator-(F32x16 a, F32x16 b) { return F32x16::each([&](int i) { return a.v[i] - b.v[i]; }); }
inline F32x16 operator*(F32x16 a, F32x16 b) { return F32x16::each([&](int i) { return a.v[i] * b.v[i]; }); }
inline F32x16 operator/(F32x16 a, F32x16 b) { return F32x16::each([&](int i) { return a.v[i] / b.v[i]; }); }
// std::fma is slow where the machine lacks it; the product is then rounded too, and the fingerprint says `portable`.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return F32x16::each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
#else
    return a * b + c;
#endif
}
inline F32x16 max(F32x16 a, F32x16 b) { return F32x16::each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32x16 min(F32x16 a, F32x16 b) { return F32x16::each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32x16 abs(F32x16 a) { return F32x16::each([&](int i) { return std::fabs(a.v[i]); }); }
inline F32x16 to_f32(I32x16 a) { return F32x16::each([&](int i) { return static_cast<float>(a.v[i]); }); }
inline I32x16 to_i32(F32x16 a) { return I32x16::each([&](int i) { return static_cast<int32_t>(std::lrintf(a.v[i])); }); }
inline I32x16 bits_of(F32x16 a) { return I32x16::load(a.v); }
inline F32x16 from_bits(I32x16 a) {
    F32x16 out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
inline I32x16 operator+(I32x16 a, I32x16 b) {
    return I32x16::each([&](int i) { return static_cast<int32_t>(uint32_t(a.v[i]) + uint32_t(b.v[i])); });
}
inline I32x16 operator-(I32x16 a, I32x16 b) {
    return I32x16::each([&](int i) { return static_cast<int32_t>(uint32_t(a.v[i]) - uint32_t(b.v[i])); });
}
inline I32x16 operator&(I32x16 a, I32x16 b) { return I32x16::each([&](int i) { return a.v[i] & b.v[i]; }); }
inline I32x16 operator|(I32x16 a, I32x16 b) { return I32x16::each([&](int i) { return a.v[i] | b.v[i]; }); }
template <int N> I32x16 shift_left(I32x16 a) {
    return I32x16::each([&](int i) { return static_cast<int32_t>(uint32_t(a.v[i]) << N); });
}
template <int N> I32x16 shift_right(I32x16 a) {
    return I32x16::each([&](int i) { return static_cast<int32_t>(uint32_t(a.v[i]) >> N); });
}
inline void store_i8(I32x16 a, int8_t* p) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}
inline F32x16 where_less(I32x16 a, I32x16 b, F32x16 yes, F32x16 no) {
    return F32x16::each([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}

#endif

// The lanes by `f`, always in the same order: halves, quarters, pairs, one.
#if defined(__AVX2__)

struct Halves {
    __m256 low, high;
#if defined(__AVX512F__)
    explicit Halves(F32x16 a) : low(_mm512_castps512_ps256(a.v)), high(_mm512_extractf32x8_ps(a.v, 1)) {}
#else
    explicit Halves(F32x16 a) : low(a.lo), high(a.hi) {}
#endif
};

template <class F8, class F4> inline float folded(F32x16 a, F8 f8, F4 f4) {
    const Halves halves(a);
    const __m256 eight = f8(halves.low, halves.high);
    const __m128 four = f4(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = f4(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(f4(two, _mm_movehdup_ps(two)));
}

inline float sum(F32x16 a) {
    return folded(a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); },
                  [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
inline float largest(F32x16 a) {
    return folded(a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); },
                  [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}

#else

template <class F> inline float folded(F32x16 a, F f) {
    float lanes[16];
    a.store(lanes);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = f(lanes[i], lanes[i + width]);
    return lanes[0];
}

inline float sum(F32x16 a) { return folded(a, [](float x, float y) { return x + y; }); }
inline float largest(F32x16 a) { return folded(a, [](float x, float y) { return x > y ? x : y; }); }

#endif

// e^x to within 2 ulp; x is clamped to [-87.33, 88.37] first, so nothing becomes 0 or infinite; NaN stays NaN.
// x = n ln 2 + r (Cody and Waite's two-part ln 2), and a polynomial of r.
inline F32x16 exp(F32x16 x) {
    const F32x16 low = F32x16::set1(-87.33654F);
    const F32x16 clamped = min(F32x16::set1(88.37626F), max(low, x));
    const F32x16 n = to_f32(to_i32(clamped * F32x16::set1(1.44269504F)));
    F32x16 r = fma(n, F32x16::set1(-0.693359375F), clamped);
    r = fma(n, F32x16::set1(2.12194440e-4F), r);
    F32x16 p = F32x16::set1(1.9875691500e-4F);
    for (float c : {1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F})
        p = fma(p, r, F32x16::set1(c));
    p = fma(p, r * r, r) + F32x16::set1(1.0F);
    return p * from_bits(shift_left<23>(to_i32(n) + I32x16::set1(127)));
}

}  // namespace kvarto::KVARTO_ISA
