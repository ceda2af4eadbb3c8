// Pairs of bfloat16 in attention_vectors.h: an item is two dims of a key, or one dim of two values that follow each other,
// and a chain one of VDPBF16PS, which adds two products to a float32. Half of the operations of float32, and no
// conversion of what lies in pages as bfloat16. Scores are powers of two.
#pragma once

#if defined(__AVX512BF16__)

#include "ops/attention_bf16.h"
#include "ops/attention_factors.h"

namespace kvarto::KVARTO_ISA {

struct PairNumbers {
    static constexpr int32_t kTogether = 2;
    static constexpr KVType kItemType = KVType::kBF16;
    static constexpr float kScoreUnit = 1.44269504F;  // log2(e)
    using Factor = FastFactor;

    static constexpr int32_t num_items(int32_t head_dim) { return (head_dim + 31) / 32 * 16; }
    static constexpr int32_t num_used_items(int32_t head_dim) { return (head_dim + 1) / 2; }
    static constexpr int32_t num_columns(int32_t head_dim) { return 2 * num_items(head_dim); }

    static F32x16 add_product(F32x16 a, F32x16 b, F32x16 sum) {
        return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
    }
    static F32x16 weight(F32x16 x) { return {weight_of(x.v)}; }

    static void pack(const float* head, int32_t head_dim, float* out) {
        for (int32_t i = 0; i < head_dim; i += 32) {
            const __m512 high = i + 16 < head_dim ? _mm512_load_ps(head + i + 16) : _mm512_setzero_ps();
            _mm512_store_ps(out + i / 2, bf16_pair(_mm512_load_ps(head + i), high));
        }
    }
    template <KVType kType>
    static F32x16 load(const TileTokens& tokens, int32_t key, int32_t first, int32_t head_dim) {
        return {_mm512_castsi512_ps(load_bf16<kType>(tokens, key, first, head_dim))};
    }
    template <KVType kType>
    static void lay_out_values(const TileTokens& values, int32_t key, int32_t first, int32_t head_dim, float* out) {
        store_pairs(load_bf16<kType>(values, key, first, head_dim), load_bf16<kType>(values, key + 1, first, head_dim),
                    out);
    }
    static void store_weights(const F32x16 (&weights)[kTileKeys / 16], float* out) {
        for (int32_t i = 0; i < kTileKeys / 16; i += 2)
            _mm512_store_ps(out + 8 * i, bf16_pair(weights[i].v, weights[i + 1].v));
    }
    // The weights of two keys that follow each other, of sixteen rows: one pair a row.
    static void store_weights_of_two(F32x16 even, F32x16 odd, float* out) {
        alignas(64) static constexpr uint16_t kWords[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i words = _mm512_castps_si512(bf16_pair(even.v, odd.v));
        _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(kWords), words));
    }
    static const float* in_order(const float* columns, int32_t head_dim, float* out) {
        put_in_order(columns, num_columns(head_dim), out);
        return out;
    }
};

}  // namespace kvarto::KVARTO_ISA

#endif
