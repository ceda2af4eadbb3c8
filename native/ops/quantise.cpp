#include "ops/quantise.h"

#include <cstdlib>
#include <limits>

#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

namespace {

// Below it a scale by that of the least weight, by 1 / 128, would have fewer bits than a float; long before, 127 / largest
// would overflow.
constexpr float kLeast = 1e-26F;
constexpr int32_t kFineBelow = 14 * kGroup;  // and 45 or so is usual
constexpr float kLargestFinite = std::numeric_limits<float>::max();

#if defined(__AVX512F__)

// |x| as integers: they are ordered as floats are, with infinities and NaN above all.
float largest_magnitude(F32x16 a, F32x16 b) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    const __m512i x = _mm512_and_si512(_mm512_castps_si512(a.v), magnitude);
    const __m512i y = _mm512_and_si512(_mm512_castps_si512(b.v), magnitude);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_max_epi32(x, y)))));
}

#elif defined(__AVX2__)

float largest_magnitude(F32x16 a, F32x16 b) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    const auto bits = [&](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), magnitude); };
    const __m256i first = _mm256_max_epi32(bits(a.lo), bits(a.hi)), second = _mm256_max_epi32(bits(b.lo), bits(b.hi));
    const __m256i eight = _mm256_max_epi32(first, second);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01001110));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10110001));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

#else

float largest_magnitude(F32x16 a, F32x16 b) {
    uint32_t most = 0;
    for (const F32x16& x : {a, b})
        for (int i = 0; i < 16; ++i) {
            uint32_t bits;
            std::memcpy(&bits, &x.v[i], sizeof bits);
            bits &= 0x7FFFFFFFU;
            most = bits > most ? bits : most;
        }
    float value;
    std::memcpy(&value, &most, sizeof value);
    return value;
}

#endif

// The codes of a group, and sums of them. In a register: bytes that were just stored in two parts would be waited for.
class Codes {
public:
#if defined(__AVX2__)

    Codes(I32x16 low, I32x16 high) : codes_(_mm256_set_m128i(to_i8(high), to_i8(low))) {}

    void store(int8_t* out) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes_); }

    // Of codes 0..15 and 16..31: unsigned differences from -128, summed by eights.
    void store_sums(int16_t* sums) const {
        const __m256i shifted = _mm256_xor_si256(codes_, _mm256_set1_epi8(-128));
        const __m256i eights = _mm256_sad_epu8(shifted, _mm256_setzero_si256());
        const __m256i sixteens = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0b01001110));
        sums[0] = static_cast<int16_t>(_mm256_extract_epi32(sixteens, 0) - 16 * 128);
        sums[1] = static_cast<int16_t>(_mm256_extract_epi32(sixteens, 4) - 16 * 128);
    }

    int32_t sum_of_magnitudes() const {
        const __m256i eights = _mm256_sad_epu8(_mm256_abs_epi8(codes_), _mm256_setzero_si256());
        const __m128i pairs = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
        return _mm_cvtsi128_si32(pairs) + _mm_extract_epi32(pairs, 2);
    }

private:
    __m256i codes_;

#else

    Codes(I32x16 low, I32x16 high) {
        store_i8(low, codes_);
        store_i8(high, codes_ + 16);
    }

    void store(int8_t* out) const { std::memcpy(out, codes_, kGroup); }

    void store_sums(int16_t* sums) const {
        for (int half = 0; half < 2; ++half) {
            int32_t total = 0;
            for (int i = 0; i < 16; ++i) total += codes_[16 * half + i];
            sums[half] = static_cast<int16_t>(total);
        }
    }

    int32_t sum_of_magnitudes() const {
        int32_t total = 0;
        for (const int8_t code : codes_) total += std::abs(code);
        return total;
    }

private:
    int8_t codes_[kGroup];

#endif
};

void fill_group(QuantisedRow out, float scale) {
    std::memset(out.codes, 0, kGroup);
    *out.scales = *out.sums = scale;
    out.code_sums[0] = out.code_sums[1] = 0;
    *out.is_fine = 0;
}

// What rounding left of x / scale, and the sum of both kinds of codes in steps of fine ones.
int32_t add_fine_codes(F32x16 low_left, F32x16 high_left, QuantisedRow out) {
    const F32x16 steps = F32x16::set1(kFineSteps);
    const Codes codes(to_i32(low_left * steps), to_i32(high_left * steps));
    codes.store(out.fine_codes);
    codes.store_sums(out.fine_sums);
    return kFineSteps * (out.code_sums[0] + out.code_sums[1]) + out.fine_sums[0] + out.fine_sums[1];
}

void quantise_group(const float* x, QuantisedRow out) {
    const F32x16 x_low = F32x16::load(x), x_high = F32x16::load(x + 16);
    const float largest = largest_magnitude(x_low, x_high);
    if (!(largest <= kLargestFinite)) return fill_group(out, std::numeric_limits<float>::quiet_NaN());
    if (largest < kLeast) return fill_group(out, 0.0F);
    const F32x16 inverse = F32x16::set1(127.0F / largest), low = x_low * inverse, high = x_high * inverse;
    const I32x16 low_codes = to_i32(low), high_codes = to_i32(high);
    const Codes codes(low_codes, high_codes);
    codes.store(out.codes);
    codes.store_sums(out.code_sums);
    auto total = static_cast<float>(out.code_sums[0] + out.code_sums[1]);
    *out.is_fine = codes.sum_of_magnitudes() < kFineBelow;
    if (*out.is_fine) {
        const int32_t steps = add_fine_codes(low - to_f32(low_codes), high - to_f32(high_codes), out);
        total = static_cast<float>(steps) * (1.0F / kFineSteps);
    }
    *out.scales = largest / 127.0F;
    *out.sums = *out.scales * total;
}

}  // namespace

void quantise_row(const float* x, int32_t width, QuantisedRow out) {
    for (int32_t first = 0; first < width; first += kGroup) quantise_group(x + first, out.from(first));
}

}  // namespace kvarto::KVARTO_ISA
