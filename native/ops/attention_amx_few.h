// What the tile products of attention_amx.h compute, for up to four queries, bit by bit, without tiles: a tile works on
// sixteen rows however few there are, and for a token that is decoded that takes longer than reading its keys.
//
// A tile product adds up even and odd elements of 32 apart, each in a chain of fused multiply-adds that flushes
// denormal numbers, then both together, then that to what was there (Intel's manual, TDPBF16PS).
//
// Reading and multiplying take about as long, so lines are asked for in between, some groups before their turn and over
// the ends of strips and heads: all at once would be more than the machine keeps track of, and the rest is forgotten.
//
// Cost of 64 keys of dim 64 for three queries: about 1,000 operations for scores, a third of which turns keys over, and
// 900 for values, two a cycle.
#pragma once

#if defined(__AMX_BF16__)

#include "ops/attention_amx_softmax.h"
#include "ops/flush_denormals.h"
#include "ops/kv_page.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kFewQueries = 4;
inline constexpr int32_t kGroupKeys = 16;

// Sixteen keys and values that follow each other in a page.
struct KeyGroup {
    const std::byte *keys = nullptr, *values = nullptr;  // null where there are none
    int32_t num_keys = 0;                                // before the context's end
};

// The elements of 32 bfloat16 with even and with odd indices.
inline __m512 even_elements(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline __m512 odd_elements(__m512i x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000U))));
}

// Bfloat16 as float32, in their order; `count` is a multiple of 32.
inline void widen_bf16(const uint16_t* from, int32_t count, float* to) {
    for (int32_t i = 0; i < count; i += 16) F32x16::load_bf16(from + i).store(to + i);
}

// What a strip reads: keys of its groups, their values, and then the keys of what comes next.
struct ReadOrder {
    const KeyGroup *groups, *next;
    int32_t num_groups;

    // What is read `kGroupsAhead` later than that; where nothing is, `otherwise`.
    const std::byte* ahead_of_keys(int32_t group, const std::byte* otherwise) const {
        return place(group + kGroupsAhead, otherwise);
    }
    const std::byte* ahead_of_values(int32_t group, const std::byte* otherwise) const {
        return place(num_groups + group + kGroupsAhead, otherwise);
    }

private:
    static constexpr int32_t kGroupsAhead = 6;

    const std::byte* place(int32_t index, const std::byte* otherwise) const {
        const std::byte* found = index < num_groups       ? groups[index].keys
                                 : index < 2 * num_groups ? groups[index - num_groups].values
                                                          : next[index - 2 * num_groups].keys;
        return found != nullptr ? found : otherwise;
    }
};

inline void ask_for_line(const std::byte* first, int32_t line) { _mm_prefetch(first + int64_t{line} * 64, _MM_HINT_T1); }

// Scores of sixteen keys: [key][4], 0 for queries that there are not. `queries` are [R, width]. Asks for as many keys at
// `ahead`.
template <int R>
void score_few(const std::byte* keys, int32_t width, const float* queries, float* scores, const std::byte* ahead) {
    __m512 sums[kFewQueries];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    for (int32_t i = 0; i < width; i += 32) {
        F32x16 pairs[kGroupKeys];
        for (int key = 0; key < kGroupKeys; ++key)
            pairs[key].v = _mm512_loadu_ps(keys + (int64_t{key} * width + i) * 2);
        transpose16(pairs);
        __m512 even[R], odd[R];
        unrolled<R>([&]<int r>() { even[r] = odd[r] = _mm512_setzero_ps(); });
        unrolled<16>([&]<int pair>() {
            ask_for_line(ahead, i / 2 + pair);
            const __m512i both = _mm512_castps_si512(pairs[pair].v);
            const __m512 first = even_elements(both), second = odd_elements(both);
            unrolled<R>([&]<int r>() {
                const float* query = queries + r * width + i + 2 * pair;
                even[r] = _mm512_fmadd_ps(first, _mm512_set1_ps(query[0]), even[r]);
                odd[r] = _mm512_fmadd_ps(second, _mm512_set1_ps(query[1]), odd[r]);
            });
        });
        unrolled<R>([&]<int r>() { sums[r] = _mm512_add_ps(sums[r], _mm512_add_ps(even[r], odd[r])); });
    }
    // From a query's sixteen keys to four keys of four queries.
    const __m512 low_a = _mm512_unpacklo_ps(sums[0], sums[1]), low_b = _mm512_unpacklo_ps(sums[2], sums[3]);
    const __m512 high_a = _mm512_unpackhi_ps(sums[0], sums[1]), high_b = _mm512_unpackhi_ps(sums[2], sums[3]);
    const auto together = [](__m512 a, __m512 b, bool high) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
    };
    // Of each quarter of the keys the first, second, third and fourth.
    const __m512 a = together(low_a, low_b, false), b = together(low_a, low_b, true);
    const __m512 c = together(high_a, high_b, false), d = together(high_a, high_b, true);
    const __m512 ab_low = _mm512_shuffle_f32x4(a, b, 0x44), ab_high = _mm512_shuffle_f32x4(a, b, 0xEE);
    const __m512 cd_low = _mm512_shuffle_f32x4(c, d, 0x44), cd_high = _mm512_shuffle_f32x4(c, d, 0xEE);
    _mm512_store_ps(scores, _mm512_shuffle_f32x4(ab_low, cd_low, 0x88));
    _mm512_store_ps(scores + 16, _mm512_shuffle_f32x4(ab_low, cd_low, 0xDD));
    _mm512_store_ps(scores + 32, _mm512_shuffle_f32x4(ab_high, cd_high, 0x88));
    _mm512_store_ps(scores + 48, _mm512_shuffle_f32x4(ab_high, cd_high, 0xDD));
}

// Columns as tile products of values leave them (see `store_pairs`), from those of even and of odd dims.
inline void store_columns(__m512 even, __m512 odd, float* out) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, first, odd));
    _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, last, odd));
}

// out[r] = the sum over keys of weight times value. `weights` are [R, kStripKeys], float32 of bfloat16. Values are walked
// once per 32 dims; each time their share of what comes next is asked for.
template <int R>
void add_values_few(const ReadOrder& order, int32_t num_keys, int32_t width,
                    const float* weights, float* out, int64_t out_width) {
    for (int32_t i = 0; i < width; i += 32) {
        __m512 sums[R][2];
        unrolled<R>([&]<int r>() { sums[r][0] = sums[r][1] = _mm512_setzero_ps(); });
        for (int32_t block = 0; block < num_keys; block += 32) {
            __m512 even[R][2], odd[R][2];  // keys, by [even and odd dims]
            unrolled<R>([&]<int r>() {
                even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = _mm512_setzero_ps();
            });
            for (int32_t half = 0; half < 2; ++half) {
                const int32_t g = block / kGroupKeys + half;
                const KeyGroup& group = order.groups[g];
                if (group.values == nullptr) continue;
                const int32_t step = i / 32 * order.num_groups + g, lines = 16 * (step % (width / 32));
                const std::byte* next = order.ahead_of_values(step / (width / 32), group.values);
                const float* weight = weights + block + half * kGroupKeys;
                const std::byte* value = group.values + int64_t{i} * 2;
                for (int32_t key = 0; key < group.num_keys; key += 2, value += int64_t{width} * 4, weight += 2) {
                    ask_for_line(next, lines + key);
                    ask_for_line(next, lines + key + 1);
                    const __m512i of_even = _mm512_loadu_si512(value);
                    const __m512 low = even_elements(of_even), high = odd_elements(of_even);
                    unrolled<R>([&]<int r>() {
                        const __m512 factor = _mm512_set1_ps(weight[r * kStripKeys]);
                        even[r][0] = _mm512_fmadd_ps(factor, low, even[r][0]);
                        even[r][1] = _mm512_fmadd_ps(factor, high, even[r][1]);
                    });
                    if (key + 1 == group.num_keys) break;
                    const __m512i of_odd = _mm512_loadu_si512(value + int64_t{width} * 2);
                    const __m512 odd_low = even_elements(of_odd), odd_high = odd_elements(of_odd);
                    unrolled<R>([&]<int r>() {
                        const __m512 factor = _mm512_set1_ps(weight[r * kStripKeys + 1]);
                        odd[r][0] = _mm512_fmadd_ps(factor, odd_low, odd[r][0]);
                        odd[r][1] = _mm512_fmadd_ps(factor, odd_high, odd[r][1]);
                    });
                }
            }
            unrolled<R>([&]<int r>() {
                sums[r][0] = _mm512_add_ps(sums[r][0], _mm512_add_ps(even[r][0], odd[r][0]));
                sums[r][1] = _mm512_add_ps(sums[r][1], _mm512_add_ps(even[r][1], odd[r][1]));
            });
        }
        unrolled<R>([&]<int r>() { store_columns(sums[r][0], sums[r][1], out + r * out_width + i); });
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
