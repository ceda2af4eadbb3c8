// Groups of 32 columns of a panel as bfloat16 pairs: 64 bytes hold columns 2p and 2p + 1 of the sixteen rows, one after
// the other in each lane. That is a tile's row.
//
// A weight w = scale · code + minimum becomes bfloat16 by cutting w · (1 + 2^-8.5) off behind seven bits of mantissa:
// the factor puts the mean of what is cut off at zero, costs nothing (it goes into scale and minimum) and leaves what
// is a bfloat16 already as it is.
#pragma once

#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

inline constexpr float kRounding = 1.0027621F;

// The upper halves of two vectors, side by side in each lane: `first` below `second`.
KVARTO_INLINE inline I32x16 pair_of(F32x16 first, F32x16 second) {
#if defined(__AVX512BW__)
    const __m512i upper = _mm512_set4_epi32(0x0F0E, 0x0B0A, 0x0706, 0x0302);
    return {_mm512_mask_shuffle_epi8(_mm512_castps_si512(second.v), 0x3333333333333333,
                                     _mm512_castps_si512(first.v), upper)};
#else
    return (bits_of(second) & I32x16::set1(static_cast<int32_t>(0xFFFF0000))) | shift_right<16>(bits_of(first));
#endif
}

// As a bfloat16, cut off.
KVARTO_INLINE inline F32x16 cut(F32x16 x) {
    return from_bits(bits_of(x) & I32x16::set1(static_cast<int32_t>(0xFFFF0000)));
}

// Byte i of each lane as a float32: plus 128 for codes of up to 7 bits, times 2^24 for signed bytes.
template <int i, bool is_signed> KVARTO_INLINE inline F32x16 byte_as_f32(I32x16 quad) {
    constexpr int target = is_signed ? 24 : 16, from = 8 * i;
    I32x16 x = quad;
    if constexpr (from < target) x = shift_left<target - from>(x);
    if constexpr (from > target) x = shift_right<from - target>(x);
    if constexpr (is_signed) return to_f32(x & I32x16::set1(static_cast<int32_t>(0xFF000000)));
    const I32x16 mask = I32x16::set1(0x007F0000), exponent = I32x16::set1(0x43000000);
#if defined(__AVX512F__)
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(x.v, mask.v, exponent.v, 0xEA))};
#else
    return from_bits((x & mask) | exponent);
#endif
}

// The codes of a group, one column at a time as `byte_as_f32` gives them. Four and eight bits come straight from where
// they lie: codes of several panels would not fit in registers.
template <Format format> class ColumnCodes {
    using B = Block<format>;

public:
    ColumnCodes(const B& block, int group) {
        if constexpr (B::kBits == 4)
            packed_ = block.nibbles(group);
        else if constexpr (B::kBits == 8)
            packed_ = block.bytes();
        else
            block.codes(group, quads_);
    }
    template <int k> KVARTO_INLINE F32x16 column() const {
        if constexpr (B::kBits == 8) return byte_as_f32<k % 4, true>(I32x16::load(packed_ + 64 * (k / 4)));
        if constexpr (B::kBits != 4) return byte_as_f32<k % 4, false>(quads_[k / 4]);
        constexpr int from = 8 * (k % 4) + 4 * (k / 16);
        I32x16 x = I32x16::load(packed_ + 64 * (k / 4 % 4));
        if constexpr (from < 16) x = shift_left<16 - from>(x);
        if constexpr (from > 16) x = shift_right<from - 16>(x);
        const I32x16 mask = I32x16::set1(0x000F0000), exponent = I32x16::set1(0x43000000);
        return from_bits((x & mask) | exponent);
    }

private:
    const std::byte* packed_ = nullptr;
    Quads quads_;
};

// The factors that turn what `byte_as_f32` gives into weights.
template <Format format> struct Affine {
    using B = Block<format>;
    static constexpr bool kIsSigned = B::kBits == 8;
    F32x16 scale, minimum;

    Affine(const B& block, int group, int half) {
        const F32x16 d = block.scale(group, half) * F32x16::set1(kRounding);
        scale = d * F32x16::set1(kIsSigned ? 0x1p-24F : 1.0F);
        minimum = d * F32x16::set1(kIsSigned ? 0.0F : -128.0F - B::kOffset);
        if constexpr (B::kHasMinimum) minimum = fma(block.minimum(group), F32x16::set1(kRounding), minimum);
    }

    template <int i> KVARTO_INLINE F32x16 weight(I32x16 quad) const { return of(byte_as_f32<i, kIsSigned>(quad)); }
    KVARTO_INLINE F32x16 of(F32x16 code) const {
        if constexpr (kIsSigned) return scale * code;
        return fma(scale, code, minimum);
    }
};

// Sixteen pairs of 64 bytes. Cost for 4-bit codes: 105 vector operations, about 60 cycles for 512 weights.
template <Format format>
KVARTO_INLINE inline void unpack_pairs(const Block<format>& block, int group, std::byte* pairs) {
    constexpr int quads_per_half = 8 / Block<format>::kHalves;
    Quads quads;
    block.codes(group, quads);
    unrolled<Block<format>::kHalves>([&]<int half>() KVARTO_INLINE {
        const Affine<format> affine(block, group, half);
        unrolled<quads_per_half>([&]<int i>() KVARTO_INLINE {
            constexpr int j = half * quads_per_half + i;
            const I32x16 quad = quads[j];
            const I32x16 first = pair_of(affine.template weight<0>(quad), affine.template weight<1>(quad));
            const I32x16 second = pair_of(affine.template weight<2>(quad), affine.template weight<3>(quad));
            first.store(pairs + 128 * j);
            second.store(pairs + 128 * j + 64);
        });
    });
}

}  // namespace kvarto::KVARTO_ISA
