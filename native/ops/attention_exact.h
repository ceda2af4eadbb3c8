// Float32 in attention_vectors.h: an item is an element, and a chain one of fused multiply-adds.
#pragma once

#include "ops/attention_factors.h"
#include "ops/attention_keys.h"

namespace kvarto::KVARTO_ISA {

struct ExactNumbers {
    static constexpr int32_t kTogether = 1;    // elements of an item
    static constexpr KVType kItemType = KVType::kF32;  // whose elements make items as they lie
    static constexpr float kScoreUnit = 1.0F;  // what scores are multiplied with before the exponential
    using Factor = ExactFactor;

    // Items of a head: whole vectors, those that are multiplied, and columns of its values.
    static constexpr int32_t num_items(int32_t head_dim) { return (head_dim + 15) / 16 * 16; }
    static constexpr int32_t num_used_items(int32_t head_dim) { return head_dim; }
    static constexpr int32_t num_columns(int32_t head_dim) { return num_items(head_dim); }

    static F32x16 add_product(F32x16 a, F32x16 b, F32x16 sum) { return fma(a, b, sum); }
    F32x16 weight(F32x16 x) const { return factor(x); }

    // The items of a head whose last vector is whole.
    static void pack(const float* head, int32_t head_dim, float* out) { std::copy_n(head, num_items(head_dim), out); }
    // Sixteen items of a token, from dim `first` on.
    template <KVType kType>
    static F32x16 load(const TileTokens& tokens, int32_t key, int32_t first, int32_t head_dim) {
        return load_token<kType>(tokens, key, first, head_dim);
    }
    // Items of values [key, key + kTogether), sixteen dims for each element of an item from `first` on.
    template <KVType kType>
    static void lay_out_values(const TileTokens& values, int32_t key, int32_t first, int32_t head_dim, float* out) {
        load_token<kType>(values, key, first, head_dim).store(out);
    }
    // The items of a row of weights, front to back.
    static void store_weights(const F32x16 (&weights)[kTileKeys / 16], float* out) {
        for (int32_t i = 0; i < kTileKeys / 16; ++i) weights[i].store(out + 16 * i);
    }
    // The weights of two keys that follow each other, of sixteen rows.
    static void store_weights_of_two(F32x16 even, F32x16 odd, float* out) {
        even.store(out);
        odd.store(out + 16);
    }
    // Columns of values in the order of dims.
    static const float* in_order(const float* columns, int32_t, float*) { return columns; }

    ExactFactor factor;
};

}  // namespace kvarto::KVARTO_ISA
