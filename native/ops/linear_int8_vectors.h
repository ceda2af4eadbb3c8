// Staged rows, sixteen at most, × sixteen rows of weights in vectors: a row's codes, four at a time, with a quad of
// weights (VNNI).
//
// The rows share a group of weights that is loaded, and all of a group's numbers lie at constant places, so that
// accumulators and weights stay in registers, and what a row needs comes with the instruction that uses it.
//
// Cost per row of a group: 8 products, and 3 or 4 operations to scale them, of which multiplications take one unit: 10 or
// 11 cycles where it does sixteen lanes in a cycle; 9 more where the row has fine codes there.
#pragma once

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)

#include "ops/linear_int8_dot.h"
#include "ops/linear_int8_group.h"

namespace kvarto::KVARTO_ISA {

inline constexpr bool kHasSignedWeights = false;
inline constexpr bool kHasShortTiles = true;  // of 4, 8 or 12 rows

template <int num_halves> void begin_tiles() {}
inline void end_tiles() {}

// Exact sums of (code - offset) * row code over a half of a group, or all of it.
template <Format format, int half>
[[gnu::always_inline]] inline __m512i code_products(const __m512i* quads, const int8_t* codes, const int16_t* code_sums) {
    using B = Block<format>;
    constexpr int kOffset = GroupCodes<format>::kOffset, kQuads = 8 / B::kHalves, kFirst = half * kQuads;
    __m512i total = _mm512_setzero_si512();
    if constexpr (kOffset != 0) {
        constexpr uint32_t kLow = half == 0 ? -kOffset & 0xFFFF : 0, kHigh = kFirst + kQuads == 8 ? -kOffset & 0xFFFF : 0;
        const __m512i offsets = _mm512_set1_epi32(static_cast<int32_t>(kLow | kHigh << 16));
        total = _mm512_dpwssd_epi32(total, offsets, _mm512_set1_epi32(load_word(code_sums)));
    }
#pragma GCC unroll 8
    for (int j = 0; j < kQuads; ++j)
        total = _mm512_dpbusd_epi32(total, quads[j], _mm512_set1_epi32(load_word(codes + 4 * (kFirst + j))));
    return total;
}

template <Format format, int half, bool is_fine, int num_rows>
[[gnu::always_inline]] inline void add_half(const StagedGroup& rows, const WeightGroup<Block<format>::kHalves>& weights,
                                            __m512 (&totals)[num_rows]) {
    constexpr int kQuads = 8 / Block<format>::kHalves;
    __m512i quads[kQuads];
#pragma GCC unroll 8
    for (int j = 0; j < kQuads; ++j) quads[j] = _mm512_load_si512(weights.quads[half * kQuads + j]);
    const __m512 scale = _mm512_load_ps(weights.scales[half]);
    unrolled<num_rows>([&]<int i>() KVARTO_INLINE {
        __m512i products = code_products<format, half>(quads, rows.codes[i], rows.code_sums[i]);
        if constexpr (is_fine) {
            products = _mm512_slli_epi32(products, 7);
            if (rows.fine_rows >> i & 1)
                products = _mm512_add_epi32(products,
                                            code_products<format, half>(quads, rows.fine_codes[i], rows.fine_sums[i]));
        }
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[i]));
        totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), both, totals[i]);
    });
}

template <Format format, bool is_fine, int num_rows>
[[gnu::always_inline]] inline void add_group(const StagedGroup& rows, const WeightGroup<Block<format>::kHalves>& weights,
                                             __m512 (&totals)[num_rows]) {
    using B = Block<format>;
    add_half<format, 0, is_fine>(rows, weights, totals);
    if constexpr (B::kHalves == 2) add_half<format, 1, is_fine>(rows, weights, totals);
    if constexpr (B::kHasMinimum) add_minima(rows, weights, totals);
}

// Groups [0, count) of one tile of rows and one panel, into as many accumulators as the tile has rows; `ask(group)` is
// called before each. Inlined, so that the accumulators stay in registers.
template <Format format, int num_rows, class Ask>
[[gnu::always_inline]] inline void add_groups(const StagedGroup* rows,
                                              const WeightGroup<Block<format>::kHalves>* weights, int32_t count,
                                              __m512 (&totals)[num_rows], Ask ask) {
    for (int32_t group = 0; group < count; ++group) {
        ask(group);
        if (rows[group].fine_rows == 0)
            add_group<format, false>(rows[group], weights[group], totals);
        else
            add_group<format, true>(rows[group], weights[group], totals);
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
