// From scores of a strip to weights in bfloat16, as the tile products write and read them.
//
//   scores   [key][N] f32, N = 4, 8 or 16 queries: a vector holds 16 / N keys
//   weights  [query][key] bf16, rows of 256 bytes
//
// A query's sum of weights has four parts, by key modulo 4, and ((0 + 2) + (1 + 3)): the same for every N.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cfloat>
#include <limits>

#include "core/rows.h"
#include "ops/attention_bf16.h"
#include "ops/attention_factors.h"
#include "ops/transpose16.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kStripKeys = 128;

// The queries of a block, one to a lane, N of them again and again.
template <int N> struct QueryLanes {
    __m512i first_key, end_key;      // what they see
    __m512i key_of_lane;             // 0 .. 16 / N - 1
    int32_t last_first, least_end;   // keys from the one to the other are seen by all

    QueryLanes(const int32_t* first_keys, const int32_t* end_keys, int32_t num_rows)
        : last_first(*std::max_element(first_keys, first_keys + num_rows)),
          least_end(*std::min_element(end_keys, end_keys + num_rows)) {
        alignas(64) int32_t first[16] = {}, end[16] = {}, key[16];
        for (int lane = 0; lane < 16; ++lane) {
            key[lane] = lane / N;
            if (lane % N >= num_rows) continue;
            first[lane] = first_keys[lane % N];
            end[lane] = end_keys[lane % N];
        }
        first_key = _mm512_load_si512(first), end_key = _mm512_load_si512(end), key_of_lane = _mm512_load_si512(key);
    }
};

// Sets the scores of keys [begin, end) of the strip to -inf where a query does not see them.
template <int N>
inline void hide(float* scores, int32_t first_key, int32_t begin, int32_t end, const QueryLanes<N>& lanes) {
    const __m512 unseen = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512i key = _mm512_add_epi32(lanes.key_of_lane, _mm512_set1_epi32(first_key + begin));
    for (int32_t i = begin * N; i < end * N; i += 16) {
        const __mmask16 is_in_time = _mm512_cmplt_epi32_mask(key, lanes.end_key);
        const __mmask16 seen = _mm512_mask_cmpge_epi32_mask(is_in_time, key, lanes.first_key);
        _mm512_store_ps(scores + i, _mm512_mask_mov_ps(unseen, seen, _mm512_load_ps(scores + i)));
        key = _mm512_add_epi32(key, _mm512_set1_epi32(16 / N));
    }
}

template <int N>
inline void hide_unseen(float* scores, int32_t first_key, int32_t num_keys, const QueryLanes<N>& lanes) {
    const int32_t seen_by_all = std::clamp(lanes.last_first - first_key, 0, num_keys);
    const int32_t seen_end = std::clamp(lanes.least_end - first_key, seen_by_all, num_keys);
    hide<N>(scores, first_key, 0, static_cast<int32_t>(align_up(seen_by_all, 4)), lanes);
    hide<N>(scores, first_key, seen_end / 4 * 4, num_keys, lanes);
}

inline __m512 swap_halves(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0x4E); }
inline __m512 swap_quarters(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0xB1); }

// Of each query, in all its lanes; at least the lowest finite number.
template <int N> inline __m512 largest_scores(const float* scores, int32_t num_keys) {
    __m512 most[4];
    for (auto& part : most) part = _mm512_set1_ps(-FLT_MAX);
    for (int32_t i = 0; i < num_keys * N; i += 64)
        for (int j = 0; j < 4; ++j) most[j] = _mm512_max_ps(_mm512_load_ps(scores + i + 16 * j), most[j]);
    __m512 all = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    if constexpr (N <= 8) all = _mm512_max_ps(all, swap_halves(all));
    if constexpr (N <= 4) all = _mm512_max_ps(all, swap_quarters(all));
    return all;
}

// Words of a pair of vectors, [key][query], to [query][key].
template <int N> inline __m512i words_by_query() {
    alignas(64) uint16_t from[32];
    constexpr int kKeys = 32 / N;
    for (int word = 0; word < 32; ++word) from[word] = static_cast<uint16_t>(word % kKeys * N + word / kKeys);
    return _mm512_load_si512(from);
}

// Thirty-two keys of N queries, as bfloat16 pairs of vectors with the words of a query together: N rows of 64 bytes.
template <int N> inline void store_weights(__m512 (&pairs)[N], uint16_t* weights) {
    if constexpr (N == 16) {
        F32x16 rows[16];
        for (int i = 0; i < 16; ++i) rows[i].v = pairs[i];
        transpose16(rows);
        for (int q = 0; q < 16; ++q) _mm512_store_ps(weights + q * kStripKeys, rows[q].v);
    } else if constexpr (N == 8) {
        __m512d quads[8], blocks[8];
        for (int i = 0; i < 8; i += 2) {
            const __m512d a = _mm512_castps_pd(pairs[i]), b = _mm512_castps_pd(pairs[i + 1]);
            quads[i] = _mm512_unpacklo_pd(a, b);      // queries 0, 2, 4, 6
            quads[i + 1] = _mm512_unpackhi_pd(a, b);  // queries 1, 3, 5, 7
        }
        for (int odd = 0; odd < 2; ++odd) {
            for (int half = 0; half < 2; ++half) {
                const __m512d a = quads[4 * half + odd], b = quads[4 * half + 2 + odd];
                blocks[2 * half] = _mm512_shuffle_f64x2(a, b, 0x88);      // queries 0, 4
                blocks[2 * half + 1] = _mm512_shuffle_f64x2(a, b, 0xDD);  // queries 2, 6
            }
            for (int two = 0; two < 2; ++two) {
                const __m512d low = _mm512_shuffle_f64x2(blocks[two], blocks[2 + two], 0x88);
                const __m512d high = _mm512_shuffle_f64x2(blocks[two], blocks[2 + two], 0xDD);
                _mm512_store_pd(weights + (odd + 2 * two) * kStripKeys, low);
                _mm512_store_pd(weights + (odd + 2 * two + 4) * kStripKeys, high);
            }
        }
    } else {
        const __m512 even_a = _mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88);  // queries 0, 2
        const __m512 even_b = _mm512_shuffle_f32x4(pairs[2], pairs[3], 0x88);
        const __m512 odd_a = _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xDD);  // queries 1, 3
        const __m512 odd_b = _mm512_shuffle_f32x4(pairs[2], pairs[3], 0xDD);
        _mm512_store_ps(weights, _mm512_shuffle_f32x4(even_a, even_b, 0x88));
        _mm512_store_ps(weights + kStripKeys, _mm512_shuffle_f32x4(odd_a, odd_b, 0x88));
        _mm512_store_ps(weights + 2 * kStripKeys, _mm512_shuffle_f32x4(even_a, even_b, 0xDD));
        _mm512_store_ps(weights + 3 * kStripKeys, _mm512_shuffle_f32x4(odd_a, odd_b, 0xDD));
    }
}

// Weights relative to `most`, and each query's sum of them. About ten operations per vector: what the tile products
// leave to the vector units, and more than they cost.
template <int N> inline __m512 weigh(const float* scores, int32_t num_keys, __m512 most, uint16_t* weights) {
    constexpr int kParts = N / 4;
    const __m512i by_query = words_by_query<N>();
    __m512 sums[kParts];
    for (auto& part : sums) part = _mm512_setzero_ps();
    for (int32_t key = 0; key < num_keys; key += 32) {
        __m512 pairs[N];
        for (int i = 0; i < N; ++i) {
            const float* p = scores + key * N + 32 * i;
            const __m512 low = weight_of(_mm512_sub_ps(_mm512_load_ps(p), most));
            const __m512 high = weight_of(_mm512_sub_ps(_mm512_load_ps(p + 16), most));
            sums[2 * i % kParts] = _mm512_add_ps(sums[2 * i % kParts], low);
            sums[(2 * i + 1) % kParts] = _mm512_add_ps(sums[(2 * i + 1) % kParts], high);
            const __m512i words = _mm512_castps_si512(bf16_pair(low, high));
            pairs[i] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(by_query, words));
        }
        store_weights<N>(pairs, weights + key);
    }
    if constexpr (N == 16) return _mm512_add_ps(_mm512_add_ps(sums[0], sums[2]), _mm512_add_ps(sums[1], sums[3]));
    const __m512 all = N == 8 ? _mm512_add_ps(sums[0], sums[kParts - 1]) : _mm512_add_ps(sums[0], swap_halves(sums[0]));
    return _mm512_add_ps(all, N == 8 ? swap_halves(all) : swap_quarters(all));
}

}  // namespace kvarto::KVARTO_ISA

#endif
