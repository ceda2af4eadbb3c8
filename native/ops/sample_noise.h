// Gumbel noise as a function of (seed, choice, position, vocabulary id); see kvarto/ops/reference/noise.py, whose law
// this is: the three numbers make a key, and id i draws the i-th number of the SplitMix64 stream that starts there. Its
// top 40 bits are u in (0, 1), and the noise is -log(-log(1 - u)).
// Source: Fast Splittable Pseudorandom Number Generators (doi:10.1145/2660193.2660195); the Gumbel-max trick.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15U;
inline constexpr uint64_t kFirstFactor = 0xBF58476D1CE4E5B9U;
inline constexpr uint64_t kSecondFactor = 0x94D049BB133111EBU;

inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * kFirstFactor;
    x = (x ^ x >> 27) * kSecondFactor;
    return x ^ x >> 31;
}

inline uint64_t noise_key(int64_t seed, int32_t choice, int32_t position) {
    uint64_t key = 0;
    for (const int64_t field : {seed, int64_t{choice}, int64_t{position}})
        key = mix((key ^ static_cast<uint64_t>(field)) + kGolden);
    return key;
}

inline uint64_t noise_hash(uint64_t key, int32_t id) { return mix(key + (static_cast<uint64_t>(id) + 1) * kGolden); }

// Every step is rounded to float32, as the reference does; the logarithms are those of float64, rounded.
inline float gumbel(uint64_t hash) {
    float u = (static_cast<float>(static_cast<int64_t>(hash >> 24)) + 0.5F) * 0x1p-40F;
    u = u < 1.0F - 0x1p-24F ? u : 1.0F - 0x1p-24F;
    const auto inner = static_cast<float>(std::log1p(-static_cast<double>(u)));
    return -static_cast<float>(std::log(-static_cast<double>(inner)));
}

// Eight words of 64 bits, so far as the mixing needs them.
#if defined(__AVX512F__) && defined(__AVX512DQ__)

struct U64x8 {
    __m512i v;
    static U64x8 set1(uint64_t x) { return {_mm512_set1_epi64(static_cast<int64_t>(x))}; }
    static U64x8 load(const uint64_t* p) { return {_mm512_loadu_si512(p)}; }
    static U64x8 widened(const int32_t* p) {
        return {_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
};
inline U64x8 operator+(U64x8 a, U64x8 b) { return {_mm512_add_epi64(a.v, b.v)}; }
inline U64x8 operator*(U64x8 a, uint64_t b) { return {_mm512_mullo_epi64(a.v, U64x8::set1(b).v)}; }
template <int N> U64x8 xor_shifted(U64x8 a) { return {_mm512_xor_si512(a.v, _mm512_srli_epi64(a.v, N))}; }
inline void store_tops(U64x8 a, int32_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi64_epi32(_mm512_srli_epi64(a.v, 32)));
}

#elif defined(__AVX2__)

struct U64x8 {
    __m256i lo, hi;
    static U64x8 set1(uint64_t x) {
        const __m256i v = _mm256_set1_epi64x(static_cast<int64_t>(x));
        return {v, v};
    }
    static U64x8 load(const uint64_t* p) {
        const auto* q = reinterpret_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
    }
    static U64x8 widened(const int32_t* p) {
        const auto* q = reinterpret_cast<const __m128i*>(p);
        return {_mm256_cvtepu32_epi64(_mm_loadu_si128(q)), _mm256_cvtepu32_epi64(_mm_loadu_si128(q + 1))};
    }
};
inline U64x8 operator+(U64x8 a, U64x8 b) { return {_mm256_add_epi64(a.lo, b.lo), _mm256_add_epi64(a.hi, b.hi)}; }
// By halves of 32 bits: low · low + (low · high + high · low) · 2^32.
inline __m256i multiply(__m256i a, __m256i b, __m256i b_high) {
    const __m256i a_high = _mm256_srli_epi64(a, 32);
    const __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(a, b_high), _mm256_mul_epu32(a_high, b));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(crossed, 32));
}
inline U64x8 operator*(U64x8 a, uint64_t b) {
    const __m256i all = U64x8::set1(b).lo, high = U64x8::set1(b >> 32).lo;
    return {multiply(a.lo, all, high), multiply(a.hi, all, high)};
}
template <int N> U64x8 xor_shifted(U64x8 a) {
    return {_mm256_xor_si256(a.lo, _mm256_srli_epi64(a.lo, N)), _mm256_xor_si256(a.hi, _mm256_srli_epi64(a.hi, N))};
}
inline void store_tops(U64x8 a, int32_t* p) {
    const __m256i order = _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7);  // upper halves side by side
    const __m256i lo = _mm256_permutevar8x32_epi32(a.lo, order), hi = _mm256_permutevar8x32_epi32(a.hi, order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi32(lo, hi, 0b11110000));
}

#else

struct U64x8 {
    uint64_t v[8];
    template <class F> static U64x8 each(F f) {
        U64x8 out;
        for (int i = 0; i < 8; ++i) out.v[i] = f(i);
        return out;
    }
    static U64x8 set1(uint64_t x) { return each([x](int) { return x; }); }
    static U64x8 load(const uint64_t* p) { return each([p](int i) { return p[i]; }); }
    static U64x8 widened(const int32_t* p) { return each([p](int i) { return static_cast<uint64_t>(p[i]); }); }
};
inline U64x8 operator+(U64x8 a, U64x8 b) { return U64x8::each([&](int i) { return a.v[i] + b.v[i]; }); }
inline U64x8 operator*(U64x8 a, uint64_t b) { return U64x8::each([&](int i) { return a.v[i] * b; }); }
template <int N> U64x8 xor_shifted(U64x8 a) { return U64x8::each([&](int i) { return a.v[i] ^ a.v[i] >> N; }); }
inline void store_tops(U64x8 a, int32_t* p) {
    for (int i = 0; i < 8; ++i) p[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i] >> 32));
}

#endif

inline U64x8 mix(U64x8 x) {
    return xor_shifted<31>(xor_shifted<27>(xor_shifted<30>(x) * kFirstFactor) * kSecondFactor);
}

// The upper 31 bits of the hashes of sixteen ids, as float32.
inline F32x16 noise_tops(const int32_t* ids, uint64_t key) {
    int32_t tops[16];
    for (int half = 0; half < 16; half += 8)
        store_tops(mix(U64x8::widened(ids + half) * kGolden + U64x8::set1(key + kGolden)), tops + half);
    return to_f32(shift_right<1>(I32x16::load(tops)));
}

// Those of ids first_id, first_id + 1, …: no product but the mixing's two.
inline F32x16 noise_tops_from(int32_t first_id, uint64_t key) {
    static constexpr auto kOffsets = [] {
        std::array<uint64_t, 16> offsets{};
        for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = i * kGolden;
        return offsets;
    }();
    const U64x8 start = U64x8::set1(key + (static_cast<uint64_t>(first_id) + 1) * kGolden);
    int32_t tops[16];
    for (int half = 0; half < 16; half += 8) store_tops(mix(start + U64x8::load(kOffsets.data() + half)), tops + half);
    return to_f32(shift_right<1>(I32x16::load(tops)));
}

}  // namespace kvarto::KVARTO_ISA
