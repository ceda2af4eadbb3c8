// Where the keys and values of a token lie in a page, and how they are read and written.
//
//   page  = [layer slot][plane k, v]
//   plane = [kv_head][token 0..page_size-1][dim], and for int8 then the scales, float32 [kv_head][token]
//
// int8: value = code * scale, codes in [-127, 127]; one scale per token, head and plane.
#pragma once

#include "core/ops.h"
#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kMaxHeadDim = 256;

constexpr int64_t element_bytes(KVType type) {
    return type == KVType::kF32 ? 4 : type == KVType::kInt8 ? 1 : 2;
}

enum class Plane : uint8_t { kKey, kValue };

// One plane of one head in one page. Tokens follow each other without gaps, elements and scales alike.
struct HeadPlane {
    std::byte* tokens;
    float* scales;  // of int8 only

    std::byte* token(int32_t offset, int64_t token_bytes) const { return tokens + offset * token_bytes; }
};

// Finds the planes of one layer in any page.
struct LayerPages {
    std::byte* first;  // of page 0, this layer
    int64_t page_bytes, token_bytes, head_bytes, codes_bytes, plane_bytes;
    int32_t page_size;
    KVType type;

    LayerPages(const KVPages& pages, int32_t layer_slot, const HeadShape& heads)
        : first(pages.data + layer_slot * pages.layer_bytes),
          page_bytes(pages.page_bytes),
          token_bytes(heads.head_dim * element_bytes(pages.type)),
          head_bytes(pages.page_size * token_bytes),
          codes_bytes(heads.num_kv_heads * head_bytes),
          plane_bytes(pages.layer_bytes / 2),
          page_size(pages.page_size),
          type(pages.type) {}

    HeadPlane plane(int64_t page, int32_t head, Plane which) const {
        std::byte* start = first + page * page_bytes + static_cast<int64_t>(which) * plane_bytes;
        auto* scales = reinterpret_cast<float*>(start + codes_bytes) + head * page_size;
        return {start + head * head_bytes, type == KVType::kInt8 ? scales : nullptr};
    }
};

// Sixteen elements as float32; int8 codes without their scale.
template <KVType kType> F32x16 load_elements(const std::byte* p) {
    if constexpr (kType == KVType::kF32) return F32x16::load(reinterpret_cast<const float*>(p));
    if constexpr (kType == KVType::kF16) return F32x16::load_f16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (kType == KVType::kBF16) return F32x16::load_bf16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (kType == KVType::kInt8) return F32x16::load_i8(reinterpret_cast<const int8_t*>(p));
}

// The same for the last `count` < 16 elements of a token: 0 behind them, and nothing behind them is read.
template <KVType kType> F32x16 load_last_elements(const std::byte* p, int32_t count) {
    alignas(64) std::byte padded[64] = {};
    std::memcpy(padded, p, static_cast<size_t>(count * element_bytes(kType)));
    return load_elements<kType>(padded);
}

// Rounds to nearest even; NaN becomes a quiet NaN. The same bits on every machine.
inline void store_bf16(F32x16 x, uint16_t* p) {
    const I32x16 bits = bits_of(x), one = I32x16::set1(1);
    const I32x16 magnitude = bits & I32x16::set1(0x7FFFFFFF);
    const I32x16 is_nan = I32x16::zero() - shift_right<31>(I32x16::set1(0x7F800000) - magnitude);  // all ones, or 0
    const I32x16 rounded = bits + I32x16::set1(0x7FFF) + (shift_right<16>(bits) & one);
    const I32x16 quiet = bits | I32x16::set1(0x00400000);
    const I32x16 high = shift_right<16>((quiet & is_nan) | (rounded & (I32x16::set1(-1) - is_nan)));
    alignas(64) int32_t words[16];
    high.store(words);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(words[i]);
}

}  // namespace kvarto::KVARTO_ISA
