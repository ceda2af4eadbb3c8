// A register tile of a float32 product: R rows of x times P panels of 16 lanes over a run of k.
//
// Each k costs P loads of weights, R broadcasts of x and R × P fused multiply-adds. With AVX-512 (two of each a cycle)
// 6 × 4 is 10 loads to 24 multiply-adds in 29 registers, and 24 chains cover the latency of 4 cycles; with AVX2 6 × 1 is
// 8 loads to 12 in 15 registers. Few rows take more panels, to have more streams of memory in flight.
#pragma once

#include <array>
#include <utility>

#include "ops/prefetch.h"
#include "simd/vec16.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)
inline constexpr int32_t kTileRows = 6;
inline constexpr int32_t kTileVectors = 24;  // accumulators that stay in registers
#elif defined(__AVX2__)
inline constexpr int32_t kTileRows = 6;
inline constexpr int32_t kTileVectors = 6;
#elif defined(__ARM_NEON)
inline constexpr int32_t kTileRows = 5;
inline constexpr int32_t kTileVectors = 5;
#else
inline constexpr int32_t kTileRows = 2;
inline constexpr int32_t kTileVectors = 2;
#endif
inline constexpr int32_t kTilePanels = 4;

// Panels that a group of rows takes side by side.
inline constexpr int32_t panels_for(int32_t num_rows) {
    const int32_t rows = num_rows < kTileRows ? num_rows : kTileRows;
    const int32_t panels = kTileVectors / rows;
    return panels < 1 ? 1 : panels > kTilePanels ? kTilePanels : panels;
}

// All panels are whole: `out` has room for 16 lanes of each, and `bias` too.
struct Tile {
    std::array<const float*, kTileRows> x;        // at the run's first k
    std::array<float*, kTileRows> out;            // at the first panel's first lane
    std::array<const float*, kTilePanels> panel;  // [k][16] from the run's first k on
    const float* bias;                            // at the first panel's first lane; null before the last run of k
    int32_t num_k;
    bool is_first;  // of the runs of k: sums start at 0, otherwise at what `out` holds
    // What later tiles will read of memory, some bytes of it with each k: the first `num_ahead` are asked for.
    std::array<const std::byte*, kTilePanels> ahead;
    int32_t num_ahead;
    int32_t ahead_bytes;  // of one k
};

template <int R, int P> void run_tile(const Tile& tile) {
    F32x16 sums[R][P];
    unrolled<R>([&]<int r>() {
        unrolled<P>([&]<int p>() {
            sums[r][p] = tile.is_first ? F32x16::zero() : F32x16::load(tile.out[r] + p * kLanes);
        });
    });
    const std::array<const float*, kTileRows> x = tile.x;
    const std::array<const float*, kTilePanels> panel = tile.panel;
    for (int64_t k = 0; k < tile.num_k; ++k) {
        for (int32_t i = 0; i < tile.num_ahead; ++i) prefetch_to_second_level(tile.ahead[i] + k * tile.ahead_bytes);
        F32x16 w[P];
        unrolled<P>([&]<int p>() { w[p] = F32x16::load(panel[p] + k * kLanes); });
        unrolled<R>([&]<int r>() {
            const F32x16 value = F32x16::set1(x[r][k]);
            unrolled<P>([&]<int p>() { sums[r][p] = fma(value, w[p], sums[r][p]); });
        });
    }
    unrolled<R>([&]<int r>() {
        unrolled<P>([&]<int p>() {
            if (tile.bias != nullptr) sums[r][p] = sums[r][p] + F32x16::load(tile.bias + p * kLanes);
            sums[r][p].store(tile.out[r] + p * kLanes);
        });
    });
}

using RunTile = void (*)(const Tile&);

template <int P, int... I> constexpr std::array<RunTile, sizeof...(I)> tiles_of(std::integer_sequence<int, I...>) {
    return {&run_tile<I + 1, P>...};
}

// The tile of `num_rows` rows and `num_panels` panels.
inline RunTile tile_of(int32_t num_rows, int32_t num_panels) {
    static constexpr auto kRows = std::make_integer_sequence<int, kTileRows>{};
    static constexpr std::array<std::array<RunTile, kTileRows>, kTilePanels> kTable{
        tiles_of<1>(kRows), tiles_of<2>(kRows), tiles_of<3>(kRows), tiles_of<4>(kRows)};
    return kTable[num_panels - 1][num_rows - 1];
}

}  // namespace kvarto::KVARTO_ISA
