// Blocks of panels (weights/format.h) as codes, scales and minima, ready for products: w = scale * code + minimum.
//
// A group is 32 columns of a block. Its codes are eight quads: lane l of quad j holds the codes of k = 4j .. 4j + 3,
// one per byte. They are unsigned, with `kOffset` still to be subtracted, but for Q8_0, whose codes are signed bytes.
#pragma once

#include <cstdint>
#include <utility>

#include "simd/vec16.h"
#include "weights/format.h"

namespace kvarto::KVARTO_ISA {

using Quads = I32x16[8];

inline F32x16 load_halves(const std::byte* p) { return F32x16::load_f16(reinterpret_cast<const uint16_t*>(p)); }

// For lambdas that must not become calls: what they capture then stays in registers.
#define KVARTO_INLINE __attribute__((always_inline))

// Calls f.operator()<0>(), …, f.operator()<count - 1>().
template <int count, class F> KVARTO_INLINE inline void unrolled(F f) {
    [&]<int... i>(std::integer_sequence<int, i...>) KVARTO_INLINE { (f.template operator()<i>(), ...); }
    (std::make_integer_sequence<int, count>{});
}

inline void unpack_nibbles(const std::byte* nib, Quads& quads) {
    const I32x16 low = I32x16::set1(0x0F0F0F0F);
    unrolled<4>([&]<int j>() KVARTO_INLINE {
        const I32x16 both = I32x16::load(nib + 64 * j);
        quads[j] = both & low;
        quads[j + 4] = shift_right<4>(both) & low;
    });
}

// Bits 4j .. 4j + 3 of each lane, one at bit 4 of each byte.
template <int j> inline I32x16 fifth_bits(I32x16 words) {
#if defined(__AVX512F__)
    const __m512i spread = _mm512_setr_epi32(0, 0x10, 0x1000, 0x1010, 0x100000, 0x100010, 0x101000, 0x101010,
                                             0x10000000, 0x10000010, 0x10001000, 0x10001010, 0x10100000, 0x10100010,
                                             0x10101000, 0x10101010);
    return {_mm512_permutexvar_epi32(shift_right<4 * j>(words).v, spread)};
#else
    I32x16 x = shift_right<4 * j>(words) & I32x16::set1(0xF);
    x = (x | shift_left<14>(x)) & I32x16::set1(0x00030003);
    x = (x | shift_left<7>(x)) & I32x16::set1(0x01010101);
    return shift_left<4>(x);
#endif
}

// Bits 8j .. 8j + 7 of each lane, two at bits 4..5 of each byte.
template <int j> inline I32x16 high_pairs(I32x16 words) {
    I32x16 x = shift_right<8 * j>(words) & I32x16::set1(0xFF);
    x = (x | shift_left<12>(x)) & I32x16::set1(0x000F000F);
    x = (x | shift_left<6>(x)) & I32x16::set1(0x03030303);
    return shift_left<4>(x);
}

inline void add_fifth_bits(const std::byte* high, Quads& quads) {
    const I32x16 words = I32x16::load(high);
    unrolled<8>([&]<int j>() KVARTO_INLINE { quads[j] = quads[j] | fifth_bits<j>(words); });
}

inline void add_high_pairs(const std::byte* two, Quads& quads) {
    const I32x16 words[2] = {I32x16::load(two), I32x16::load(two + 64)};
    unrolled<8>([&]<int j>() KVARTO_INLINE { quads[j] = quads[j] | high_pairs<j % 4>(words[j / 4]); });
}

// What all blocks say of their format; those below say what differs.
struct BlockForm {
    static constexpr int kBits = 4;            // of a code
    static constexpr int kOffset = 0;          // weight = scale * (code - kOffset) + minimum
    static constexpr int kHalves = 1;          // scales of a group: one, or one for each 16 columns
    static constexpr bool kHasMinimum = false;
    static constexpr int groups(int32_t) { return 1; }
};

template <Format> struct Block;

template <> struct Block<Format::kQ8_0> : BlockForm {
    static constexpr int kBits = 8;
    const std::byte* p;
    Block(const std::byte* block, int32_t) : p(block) {}
    F32x16 scale(int, int) const { return load_halves(p); }
    const std::byte* bytes() const { return p + 32; }
    void codes(int, Quads& quads) const {
        unrolled<8>([&]<int j>() KVARTO_INLINE { quads[j] = I32x16::load(bytes() + 64 * j); });
    }
};

template <> struct Block<Format::kQ4_0> : BlockForm {
    static constexpr int kOffset = 8;
    const std::byte* p;
    Block(const std::byte* block, int32_t) : p(block) {}
    F32x16 scale(int, int) const { return load_halves(p); }
    const std::byte* nibbles(int) const { return p + 32; }
    void codes(int group, Quads& quads) const { unpack_nibbles(nibbles(group), quads); }
};

template <> struct Block<Format::kQ4_1> : BlockForm {
    static constexpr bool kHasMinimum = true;
    const std::byte* p;
    Block(const std::byte* block, int32_t) : p(block) {}
    F32x16 scale(int, int) const { return load_halves(p); }
    F32x16 minimum(int) const { return load_halves(p + 32); }
    const std::byte* nibbles(int) const { return p + 64; }
    void codes(int group, Quads& quads) const { unpack_nibbles(nibbles(group), quads); }
};

template <> struct Block<Format::kQ5_0> : BlockForm {
    static constexpr int kBits = 5, kOffset = 16;
    const std::byte* p;
    Block(const std::byte* block, int32_t) : p(block) {}
    F32x16 scale(int, int) const { return load_halves(p); }
    void codes(int, Quads& quads) const {
        unpack_nibbles(p + 96, quads);
        add_fifth_bits(p + 32, quads);
    }
};

template <> struct Block<Format::kQ5_1> : BlockForm {
    static constexpr int kBits = 5;
    static constexpr bool kHasMinimum = true;
    const std::byte* p;
    Block(const std::byte* block, int32_t) : p(block) {}
    F32x16 scale(int, int) const { return load_halves(p); }
    F32x16 minimum(int) const { return load_halves(p + 32); }
    void codes(int, Quads& quads) const {
        unpack_nibbles(p + 128, quads);
        add_fifth_bits(p + 64, quads);
    }
};

// The two-level scales of Q4_K and Q5_K, unpacked once for the eight groups of a block.
struct SixBitScales {
    alignas(64) float scales[8][16];
    alignas(64) float minima[8][16];

    explicit SixBitScales(const std::byte* block) {
        const F32x16 d = load_halves(block), minus_dmin = F32x16::zero() - load_halves(block + 32);
        const I32x16 words[3] = {I32x16::load(block + 64), I32x16::load(block + 128), I32x16::load(block + 192)};
        const I32x16 six = I32x16::set1(63), two = I32x16::set1(3);
        const I32x16 last = (shift_right<30>(words[0]) & two) | shift_left<2>(shift_right<30>(words[1])) |
                            shift_left<4>(shift_right<30>(words[2]));
        unrolled<8>([&]<int v>() KVARTO_INLINE {
            constexpr int w = v + 8;
            (d * to_f32(shift_right<6 * (v % 5)>(words[v / 5]) & six)).store(scales[v]);
            if constexpr (w < 15)
                (minus_dmin * to_f32(shift_right<6 * (w % 5)>(words[w / 5]) & six)).store(minima[v]);
            else
                (minus_dmin * to_f32(last)).store(minima[v]);
        });
    }
};

template <> struct Block<Format::kQ4_K> : BlockForm {
    static constexpr bool kHasMinimum = true;
    static constexpr int groups(int32_t) { return 8; }
    const std::byte* p;
    SixBitScales six;
    Block(const std::byte* block, int32_t) : p(block), six(block) {}
    F32x16 scale(int group, int) const { return F32x16::load(six.scales[group]); }
    F32x16 minimum(int group) const { return F32x16::load(six.minima[group]); }
    const std::byte* nibbles(int group) const { return p + 256 + 256 * group; }
    void codes(int group, Quads& quads) const { unpack_nibbles(nibbles(group), quads); }
};

template <> struct Block<Format::kQ5_K> : BlockForm {
    static constexpr int kBits = 5;
    static constexpr bool kHasMinimum = true;
    static constexpr int groups(int32_t) { return 8; }
    const std::byte* p;
    SixBitScales six;
    Block(const std::byte* block, int32_t) : p(block), six(block) {}
    F32x16 scale(int group, int) const { return F32x16::load(six.scales[group]); }
    F32x16 minimum(int group) const { return F32x16::load(six.minima[group]); }
    void codes(int group, Quads& quads) const {
        unpack_nibbles(p + 768 + 256 * group, quads);
        add_fifth_bits(p + 256 + 64 * group, quads);
    }
};

template <> struct Block<Format::kQ6_K> : BlockForm {
    static constexpr int kBits = 6, kOffset = 32, kHalves = 2;
    static constexpr int groups(int32_t) { return 8; }
    const std::byte* p;
    Block(const std::byte* block, int32_t) : p(block) {}
    F32x16 scale(int group, int half) const {
        return load_halves(p) * F32x16::load_i8(reinterpret_cast<const int8_t*>(p + 32 + 16 * (2 * group + half)));
    }
    void codes(int group, Quads& quads) const {
        unpack_nibbles(p + 1312 + 256 * group, quads);
        add_high_pairs(p + 288 + 128 * group, quads);
    }
};

template <> struct Block<Format::kInt4> : BlockForm {
    static constexpr bool kHasMinimum = true;
    static int groups(int32_t group_size) { return group_size / kGroup; }
    const std::byte* p;
    Block(const std::byte* block, int32_t) : p(block) {}
    F32x16 scale(int, int) const { return load_halves(p); }
    // Zero points are below 128: codes have four bits, and some files keep one more than the zero.
    F32x16 minimum(int) const {
        return F32x16::zero() - load_halves(p) * F32x16::load_i8(reinterpret_cast<const int8_t*>(p + 32));
    }
    const std::byte* nibbles(int group) const { return p + 48 + 256 * group; }
    void codes(int group, Quads& quads) const { unpack_nibbles(nibbles(group), quads); }
};

// The weights of a group as float32: out[k] holds column k of the sixteen rows, each fma(scale, code, minimum).
template <Format format> inline void unpack_f32(const Block<format>& block, int group, F32x16 (&out)[kGroup]) {
    using B = Block<format>;
    constexpr bool is_signed = B::kBits == 8;  // then the sign bit is turned, which adds 128
    const I32x16 sign = I32x16::set1(is_signed ? 0x80 : 0), byte = I32x16::set1(0xFF);
    const F32x16 offset = F32x16::set1(is_signed ? 128.0F : static_cast<float>(B::kOffset));
    Quads quads;
    block.codes(group, quads);
    unrolled<kGroup>([&]<int k>() KVARTO_INLINE {
        const I32x16 code = shift_right<8 * (k % 4)>(quads[k / 4]) & byte;
        const I32x16 turned = is_signed ? (code + sign) & byte : code;
        const F32x16 value = to_f32(turned) - offset, scale = block.scale(group, B::kHalves * k / kGroup);
        if constexpr (B::kHasMinimum)
            out[k] = fma(scale, value, block.minimum(group));
        else
            out[k] = scale * value;
    });
}

// Calls f.operator()<format>() with the format as a constant; it must be a quantised one.
template <class F> inline void with_format(Format format, F f) {
    switch (format) {
        case Format::kQ8_0: return f.template operator()<Format::kQ8_0>();
        case Format::kQ4_0: return f.template operator()<Format::kQ4_0>();
        case Format::kQ4_1: return f.template operator()<Format::kQ4_1>();
        case Format::kQ5_0: return f.template operator()<Format::kQ5_0>();
        case Format::kQ5_1: return f.template operator()<Format::kQ5_1>();
        case Format::kQ4_K: return f.template operator()<Format::kQ4_K>();
        case Format::kQ5_K: return f.template operator()<Format::kQ5_K>();
        case Format::kQ6_K: return f.template operator()<Format::kQ6_K>();
        case Format::kInt4: return f.template operator()<Format::kInt4>();
        case Format::kF32:
        case Format::kF16:
        case Format::kBF16: return;
    }
}

}  // namespace kvarto::KVARTO_ISA
