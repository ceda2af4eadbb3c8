// Sixteen staged rows × sixteen rows of weights × 32 columns in one instruction of matrix tiles (AMX).
//
// A group's exact sums come out as a tile of int32, go through the first-level cache, and are scaled into sixteen
// accumulators.
//
// Cost per 16 × 16 × 32 products: about 16 cycles to multiply, 16 to store a tile, and 24 to 32 of vectors to scale it
// (3 or 4 operations per row, two in a cycle). Vectors and the matrix unit hardly overlap, so the bound is their sum.
#pragma once

#if defined(__AMX_INT8__)

#include "ops/linear_int8_group.h"
#include "simd/tiles.h"

namespace kvarto::KVARTO_ISA {

inline constexpr bool kHasSignedWeights = true;  // codes of weights, without their offset
inline constexpr bool kHasShortTiles = false;  // a tile of fewer rows takes as long

// Tiles 0 and 1: sums. 2 and 3: codes of rows. 4 and 5: codes of weights. Q6_K takes half a group at a time.
template <int num_halves> void begin_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile)
        config.set(tile, tile < 4 ? 16 : 8 / num_halves, tile == 2 || tile == 3 ? kGroup / num_halves : 64);
    configure_tiles(config);
}

inline void end_tiles() { release_tiles(); }

template <int turn, int num_halves, int half>
[[gnu::always_inline]] inline void multiply_tile(const StagedGroup& rows, const WeightGroup<num_halves>& weights,
                                                 int32_t (&sums)[16][16]) {
    constexpr int first = half * kGroup / num_halves;
    zero_tile<turn>();
    load_tile<2 + turn>(&rows.codes[0][first], kGroup);
    load_tile<4 + turn>(weights.quads[half * 8 / num_halves], 64);
    multiply_tiles_int8<turn, 2 + turn, 4 + turn>();
    store_tile<turn>(sums, 64);
    if (rows.fine_rows == 0) return;
    alignas(64) int32_t fine_sums[16][16];
    zero_tile<turn>();
    load_tile<2 + turn>(&rows.fine_codes[0][first], kGroup);
    multiply_tiles_int8<turn, 2 + turn, 4 + turn>();
    store_tile<turn>(fine_sums, 64);
    for (int i = 0; i < 16; ++i) {
        const __m512i coarse = _mm512_slli_epi32(_mm512_load_si512(sums[i]), 7);
        _mm512_store_si512(sums[i], _mm512_add_epi32(coarse, _mm512_load_si512(fine_sums[i])));
    }
}

template <int num_halves, int half, bool has_minimum>
[[gnu::always_inline]] inline void scale_tile(const int32_t (&sums)[16][16], const StagedGroup& rows,
                                              const WeightGroup<num_halves>& weights, __m512 (&totals)[16]) {
    const __m512 scale = _mm512_load_ps(weights.scales[half]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[i]));
        totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[i])), both, totals[i]);
    }
    if constexpr (has_minimum && half == num_halves - 1) add_minima(rows, weights, totals);
}

// Groups [0, count) of one tile of rows and one panel, into sixteen accumulators; `ask(group)` is called for each.
// Inlined, so that the accumulators stay in registers.
template <Format format, int num_rows, class Ask>
[[gnu::always_inline]] inline void add_groups(const StagedGroup* rows,
                                              const WeightGroup<Block<format>::kHalves>* weights, int32_t count,
                                              __m512 (&totals)[num_rows], Ask ask) {
    static_assert(num_rows == 16);
    using B = Block<format>;
    constexpr int num_halves = B::kHalves;
    alignas(64) int32_t sums[2][16][16];
    if constexpr (num_halves == 2) {
        multiply_tile<0, 2, 0>(rows[0], weights[0], sums[0]);
        for (int32_t group = 0; group < count; ++group) {
            ask(group);
            multiply_tile<1, 2, 1>(rows[group], weights[group], sums[1]);
            scale_tile<2, 0, false>(sums[0], rows[group], weights[group], totals);
            if (group + 1 < count) multiply_tile<0, 2, 0>(rows[group + 1], weights[group + 1], sums[0]);
            scale_tile<2, 1, false>(sums[1], rows[group], weights[group], totals);
        }
    } else {
        multiply_tile<0, 1, 0>(rows[0], weights[0], sums[0]);
        for (int32_t group = 0; group < count; group += 2) {
            ask(group);
            if (group + 1 < count) ask(group + 1);
            if (group + 1 < count) multiply_tile<1, 1, 0>(rows[group + 1], weights[group + 1], sums[1]);
            scale_tile<1, 0, B::kHasMinimum>(sums[0], rows[group], weights[group], totals);
            if (group + 1 == count) break;
            if (group + 2 < count) multiply_tile<0, 1, 0>(rows[group + 2], weights[group + 2], sums[0]);
            scale_tile<1, 0, B::kHasMinimum>(sums[1], rows[group + 1], weights[group + 1], totals);
        }
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
