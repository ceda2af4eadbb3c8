// Gumbel noise as a function of (seed, choice, position, vocabulary id); see kvarto/ops/reference/noise.py, whose law
// this is: the three numbers make a key, and id i draws the i-th number of the SplitMix64 stream that starts there. Its
// top 40 bits are u in (0, 1), and the noise is -log(-log(1 - u)).
// Source: Fast Splittable Pseudorandom Number Generators (doi:10.1145/2660193.2660195); the Gumbel-max trick.
#pragma once

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

#if defined(__AVX512F__) && defined(__AVX512DQ__)

namespace detail {
inline __m512i mix(__m512i x) {
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)),
                           _mm512_set1_epi64(static_cast<int64_t>(kFirstFactor)));
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)),
                           _mm512_set1_epi64(static_cast<int64_t>(kSecondFactor)));
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}
inline __m512i top_halves(__m256i ids, uint64_t key) {
    const __m512i wide = _mm512_cvtepi32_epi64(ids);
    const __m512i steps = _mm512_mullo_epi64(wide, _mm512_set1_epi64(static_cast<int64_t>(kGolden)));
    const __m512i start = _mm512_set1_epi64(static_cast<int64_t>(key + kGolden));
    return _mm512_srli_epi64(mix(_mm512_add_epi64(start, steps)), 32);
}
}  // namespace detail

// The upper 32 bits of the hashes of sixteen ids.
inline I32x16 noise_tops(I32x16 ids, uint64_t key) {
    const __m256i low = _mm512_cvtepi64_epi32(detail::top_halves(_mm512_castsi512_si256(ids.v), key));
    const __m256i high = _mm512_cvtepi64_epi32(detail::top_halves(_mm512_extracti64x4_epi64(ids.v, 1), key));
    return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}

#else

inline I32x16 noise_tops(I32x16 ids, uint64_t key) {
    int32_t lanes[16];
    ids.store(lanes);
    for (int32_t& lane : lanes) lane = static_cast<int32_t>(static_cast<uint32_t>(noise_hash(key, lane) >> 32));
    return I32x16::load(lanes);
}

#endif

}  // namespace kvarto::KVARTO_ISA
