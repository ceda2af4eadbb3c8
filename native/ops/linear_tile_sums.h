// Sums of products in matrix tiles: up to sixteen rows by the sixteen lanes of a panel each, and where they go.
//
// Tiles 0..3 are sums, 4 and 5 rows, 6 and 7 weights.
#pragma once

#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <array>
#include <utility>

#include "ops/prefetch.h"
#include "simd/tiles.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int kRowTile = 4;
inline constexpr int kWeightTile = 6;

struct alignas(64) WeightTile {
    std::byte pairs[kBF16TileBytes];
};

// A panel, and where in `out` the products with its part begin.
struct PanelAt {
    const Part* part;
    int32_t panel;
    int64_t first_column = 0;
};

template <size_t panels> std::array<PanelAt, panels> panels_from(const Part& part, int32_t panel) {
    std::array<PanelAt, panels> at;
    for (size_t p = 0; p < panels; ++p) at[p] = {&part, panel + static_cast<int32_t>(p)};
    return at;
}

// One tile of sums: up to sixteen rows by a panel's lanes.
struct Place {
    float* out;
    int64_t row_bytes;
    int32_t num_rows;
    int32_t num_lanes;
    const float* bias;  // of lane 0, or null

    Place(const PanelAt& at, const BF16Rows& rows, int32_t tile)
        : out(rows.out + int64_t{16} * tile * rows.out_stride + at.first_column + at.panel * kLanes),
          row_bytes(4 * rows.out_stride), num_rows(std::min(rows.num_rows - 16 * tile, 16)),
          num_lanes(std::min(at.part->num_rows - at.panel * kLanes, kLanes)),
          bias(rows.bias != nullptr ? rows.bias + at.first_column + at.panel * kLanes : nullptr) {}

    bool is_whole() const { return num_rows == 16 && num_lanes == kLanes; }
};

// What is not whole goes through memory beside it.
template <int tile> [[gnu::noinline]] void load_some_sums(const Place& place) {
    alignas(64) float sums[16][16];
    for (int i = 0; i < place.num_rows; ++i)
        std::copy_n(place.out + i * place.row_bytes / 4, place.num_lanes, sums[i]);
    load_tile<tile>(sums, 64);
}

template <int tile> [[gnu::noinline]] void store_some_sums(const Place& place, bool has_bias) {
    alignas(64) float sums[16][16];
    store_tile<tile>(sums, 64);
    const auto lanes = static_cast<__mmask16>((1U << place.num_lanes) - 1);
    const __m512 bias = has_bias ? _mm512_maskz_loadu_ps(lanes, place.bias) : _mm512_setzero_ps();
    for (int i = 0; i < place.num_rows; ++i) {
        const __m512 row = _mm512_load_ps(sums[i]);
        float* out = place.out + i * place.row_bytes / 4;
        _mm512_mask_storeu_ps(out, lanes, has_bias ? _mm512_add_ps(row, bias) : row);
    }
}

// Sums of `tiles` tiles of rows by `panels` panels in tiles 0 .. tiles * panels - 1, panel by panel.
//
// Where they go is known before they are made: to read just after tiles were stored what was written just before waits
// until all those lines have left for the cache.
template <int tiles, size_t panels> class SumTiles {
public:
    const std::array<PanelAt, panels>& at;
    const BF16Rows& rows;
    const int32_t tile;

    SumTiles(const std::array<PanelAt, panels>& at, const BF16Rows& rows, int32_t tile)
        : at(at), rows(rows), tile(tile), groups_bytes_(rows.num_groups() * kBF16TileBytes),
          first_(rows.tile(tile)), row_bytes_(4 * rows.out_stride) {
        for (size_t p = 0; p < panels; ++p) {
            const Place last(at[p], rows, tile + tiles - 1);
            out_[p] = Place(at[p], rows, tile).out;
            are_whole_ = are_whole_ && last.is_whole();
        }
    }

    // Asks for row i of each tile of sums, `ahead` tiles further down: to load or store a line that is not near costs as
    // much as several products, and 64 of them wait for each other.
    KVARTO_INLINE void prefetch(int32_t i, int ahead) const {
        each([&]<int, int p, int t>() KVARTO_INLINE { prefetch_to_write(whole(p, t + ahead) + i * row_bytes_); });
    }
    void start(bool is_first) const {
        if (is_first)
            unrolled<tiles * panels>([&]<int sums>() KVARTO_INLINE { zero_tile<sums>(); });
        else if (are_whole_)
            each([&]<int sums, int p, int t>() KVARTO_INLINE { load_tile<sums>(whole(p, t), row_bytes_); });
        else
            each([&]<int sums, int p, int t>() KVARTO_INLINE { load_some_sums<sums>(Place(at[p], rows, tile + t)); });
    }
    void finish(bool is_last) const {
        const bool has_bias = is_last && rows.bias != nullptr;
        if (are_whole_ && !has_bias)
            each([&]<int sums, int p, int t>() KVARTO_INLINE { store_tile<sums>(whole(p, t), row_bytes_); });
        else
            each([&]<int sums, int p, int t>() KVARTO_INLINE {
                store_some_sums<sums>(Place(at[p], rows, tile + t), has_bias);
            });
    }
    // `offset`: bytes from the rows that are multiplied to their form in another part.
    KVARTO_INLINE void load_rows(int32_t group, int64_t offset = 0) const {
        const std::byte* first = first_ + offset + group * kBF16TileBytes;
        unrolled<tiles>([&]<int t>() KVARTO_INLINE { load_passing_tile<kRowTile + t>(first + t * groups_bytes_, 64); });
    }
    // Of the first tile of rows alone, to any tile.
    template <int to> KVARTO_INLINE void load_first_rows(int32_t group, int64_t offset) const {
        load_tile<to>(first_ + offset + group * kBF16TileBytes, 64);
    }
    template <int p> KVARTO_INLINE static void load_weights(const std::byte* pairs) {
        load_tile<kWeightTile + p % 2>(pairs, 64);
    }
    template <int p> KVARTO_INLINE static void multiply() {
        unrolled<tiles>([&]<int t>() KVARTO_INLINE {
            multiply_tiles_bf16<p * tiles + t, kRowTile + t, kWeightTile + p % 2>();
        });
    }

    // Of the first tile: no other has more.
    int32_t num_rows() const { return std::min(rows.num_rows - 16 * tile, 16); }

private:
    template <class F> KVARTO_INLINE static void each(F f) {
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            unrolled<tiles>([&]<int t>() KVARTO_INLINE { f.template operator()<p * tiles + t, p, t>(); });
        });
    }
    std::byte* whole(int p, int t) const {
        return reinterpret_cast<std::byte*>(out_[p]) + t * 16 * row_bytes_;
    }

    const int64_t groups_bytes_;  // from one tile of rows to the next
    const std::byte* const first_;
    const int64_t row_bytes_;
    float* out_[panels];
    bool are_whole_ = true;
};

// Tiles from `weight_tile` on hold weights.
inline void configure_product_tiles(int32_t num_rows, int weight_tile = kWeightTile) {
    TileConfig config;
    const int rows = std::min(num_rows, 16);
    for (int tile = 0; tile < 8; ++tile) config.set(tile, tile < weight_tile ? rows : 16, 64);
    configure_tiles(config);
}

}  // namespace kvarto::KVARTO_ISA

#endif
