// A run of k of one panel as float32, [k][16]: in place where the panel is float32, otherwise unpacked.
#pragma once

#include <algorithm>

#include "simd/vec16.h"
#include "weights/format.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

// The low halves of the lanes.
inline void store_u16(I32x16 a, uint16_t* p) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
#elif defined(__AVX2__)
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    const __m256i both = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0b11011000));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(a.v[i]);
#endif
}

inline F32x16 widen_low_f16(I32x16 pair) {
    uint16_t halves[kLanes];
    store_u16(pair, halves);
    return F32x16::load_f16(halves);
}

// Two k a block, [lane][k 0..1]. Cost: a load, about six operations and two stores for 32 weights.
inline void unpack_f16(const std::byte* panel, int32_t first_k, int32_t num_k, float* out) {
    for (int32_t k = 0; k < num_k; k += 2) {
        const I32x16 pair = I32x16::load(panel + int64_t{first_k + k} * 32);
        widen_low_f16(pair).store(out + int64_t{k} * kLanes);
        if (k + 1 < num_k) widen_low_f16(shift_right<16>(pair)).store(out + int64_t{k + 1} * kLanes);
    }
}

inline void unpack_bf16(const std::byte* panel, int32_t first_k, int32_t num_k, float* out) {
    const I32x16 high = I32x16::set1(static_cast<int32_t>(0xFFFF0000U));
    for (int32_t k = 0; k < num_k; k += 2) {
        const I32x16 pair = I32x16::load(panel + int64_t{first_k + k} * 32);
        from_bits(shift_left<16>(pair)).store(out + int64_t{k} * kLanes);
        if (k + 1 < num_k) from_bits(pair & high).store(out + int64_t{k + 1} * kLanes);
    }
}

// Groups of 32 columns, block by block. Cost: about four operations and a store for 16 weights.
template <Format format>
void unpack_groups(const Part& part, const std::byte* panel, int32_t first_k, int32_t num_k, float* out) {
    const int32_t per_block = Block<format>::groups(part.group_size), last = (first_k + num_k) / kGroup;
    const int64_t bytes = block_bytes(format, part.group_size);
    for (int32_t group = first_k / kGroup; group < last;) {
        const Block<format> block(panel + group / per_block * bytes, part.group_size);
        const int32_t next = std::min((group / per_block + 1) * per_block, last);
        for (; group < next; ++group) {
            F32x16 weights[kGroup];
            unpack_f32(block, group % per_block, weights);
            for (const F32x16& row : weights) {
                row.store(out);
                out += kLanes;
            }
        }
    }
}

// first_k is a multiple of 32; num_k too, unless the run ends with the panel.
inline const float* panel_block(const Part& part, const std::byte* panel, int32_t first_k, int32_t num_k, float* out) {
    switch (part.format) {
        case Format::kF32: return reinterpret_cast<const float*>(panel) + int64_t{first_k} * kLanes;
        case Format::kF16: unpack_f16(panel, first_k, num_k, out); return out;
        case Format::kBF16: unpack_bf16(panel, first_k, num_k, out); return out;
        default: break;
    }
    with_format(part.format, [&]<Format format>() { unpack_groups<format>(part, panel, first_k, num_k, out); });
    return out;
}

}  // namespace kvarto::KVARTO_ISA
