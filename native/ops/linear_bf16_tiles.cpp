// Products in matrix tiles: sixteen rows × sixteen rows of weights × 32 columns per instruction, which takes 16 cycles.
// Sums stay in tiles over all columns, so nothing is scaled: that is why weights are unpacked to bfloat16.
//
// Up to 32 rows, four tiles of sums advance together, each group of weights unpacked just before its use. Per group of
// a 4-bit panel that is 70 cycles to unpack and 20 to multiply, one after the other: vectors and the matrix unit hardly
// overlap. Reading the 320 bytes takes about as long.
// With more rows two panels are unpacked a chunk of columns at a time, and multiplied with two tiles of rows at once;
// the matrix unit, and tiles that come from the second-level cache, are then the bound.
#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <array>
#include <utility>

#include "ops/linear_bf16_unpack.h"
#include "simd/tiles.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kChunk = 24;   // groups unpacked together: 24 KiB per panel
constexpr int32_t kAhead = 1536;  // bytes of a panel that are asked for before their turn
constexpr int64_t kTileBytes = kBF16TileBytes;
constexpr int kRowTile = 4;  // tiles 0..3 are sums, 4 and 5 rows, 6 and 7 weights
constexpr int kWeightTile = 6;

struct alignas(64) WeightTile {
    std::byte pairs[kTileBytes];
};

// Groups of one panel, from the first on.
template <Format format> class Groups {
public:
    Groups(const Part& part, int32_t panel, int32_t width)
        : group_size_(part.group_size), in_block_(Block<format>::groups(part.group_size)),
          share_(block_bytes(format, part.group_size) / in_block_),
          next_(part.data + panel * panel_bytes(format, part.group_size, width)), block_(next_, part.group_size) {}

    KVARTO_INLINE void unpack_next(WeightTile& out) {
        if (group_ == in_block_) {
            group_ = 0;
            next_ += block_bytes(format, group_size_);
            block_ = Block<format>(next_, group_size_);
        }
        const std::byte* ahead = next_ + group_ * share_ + kAhead;
        for (int64_t i = 0; i < share_; i += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T0);
        unpack_pairs(block_, group_++, out.pairs);
    }

private:
    int32_t group_size_, in_block_, group_ = 0;
    int64_t share_;  // bytes of a group, about
    const std::byte* next_;
    Block<format> block_;
};

template <Format format, int... p>
std::array<Groups<format>, sizeof...(p)> groups_of(const Part& part, int32_t panel, int32_t width,
                                                   std::integer_sequence<int, p...>) {
    return {Groups<format>(part, panel + p, width)...};
}

// One tile of sums: up to sixteen rows by a panel's lanes.
struct Place {
    float* out;
    int64_t stride;
    int32_t num_rows;
    int32_t num_lanes;
    const float* bias;  // of lane 0, or null

    Place(const Part& part, const BF16Rows& rows, int32_t panel, int32_t tile)
        : out(rows.out + int64_t{16} * tile * rows.out_stride + panel * kLanes), stride(rows.out_stride),
          num_rows(std::min(rows.num_rows - 16 * tile, 16)),
          num_lanes(std::min(part.num_rows - panel * kLanes, kLanes)),
          bias(rows.bias != nullptr ? rows.bias + panel * kLanes : nullptr) {}

    bool is_whole() const { return num_rows == 16 && num_lanes == kLanes; }
};

template <int tile> void load_sums(const Place& place) {
    if (place.is_whole()) return load_tile<tile>(place.out, place.stride * 4);
    alignas(64) float sums[16][16];
    for (int i = 0; i < place.num_rows; ++i)
        std::copy_n(place.out + i * place.stride, place.num_lanes, sums[i]);
    load_tile<tile>(sums, 64);
}

template <int tile> void store_sums(const Place& place, bool is_last) {
    const bool has_bias = is_last && place.bias != nullptr;
    if (place.is_whole() && !has_bias) return store_tile<tile>(place.out, place.stride * 4);
    alignas(64) float sums[16][16];
    store_tile<tile>(sums, 64);
    const auto lanes = static_cast<__mmask16>((1U << place.num_lanes) - 1);
    const __m512 bias = has_bias ? _mm512_maskz_loadu_ps(lanes, place.bias) : _mm512_setzero_ps();
    for (int i = 0; i < place.num_rows; ++i) {
        const __m512 row = _mm512_load_ps(sums[i]);
        _mm512_mask_storeu_ps(place.out + i * place.stride, lanes, has_bias ? _mm512_add_ps(row, bias) : row);
    }
}

// Sums of `tiles` tiles of rows by `panels` panels in tiles 0 .. tiles * panels - 1, panel by panel.
template <int tiles, int panels> struct SumTiles {
    const Part& part;
    const BF16Rows& rows;
    int32_t panel, tile;

    template <class F> void each(F f) const {
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            unrolled<tiles>([&]<int t>() KVARTO_INLINE {
                f.template operator()<p * tiles + t>(Place(part, rows, panel + p, tile + t));
            });
        });
    }
    void start(bool is_first) const {
        each([&]<int sums>(const Place& place) KVARTO_INLINE {
            is_first ? zero_tile<sums>() : load_sums<sums>(place);
        });
    }
    void finish(bool is_last) const {
        each([&]<int sums>(const Place& place) KVARTO_INLINE { store_sums<sums>(place, is_last); });
    }
    void load_rows(int32_t group) const {
        unrolled<tiles>([&]<int t>() KVARTO_INLINE {
            const int64_t at = int64_t{tile + t} * rows.num_groups() + group;
            load_tile<kRowTile + t>(rows.staged + at * kTileBytes, 64);
        });
    }
    template <int p> void multiply(const WeightTile& weights) const {
        constexpr int b = kWeightTile + p % 2;
        load_tile<b>(weights.pairs, 64);
        unrolled<tiles>([&]<int t>() KVARTO_INLINE { multiply_tiles_bf16<p * tiles + t, kRowTile + t, b>(); });
    }
};

// All rows, at most 16 · tiles of them.
template <Format format, int tiles, int panels>
void multiply_few(const Part& part, const BF16Rows& rows, int32_t panel) {
    const SumTiles<tiles, panels> sums{part, rows, panel, 0};
    WeightTile weights[2][panels];  // one is written while the other may still be read
    auto groups = groups_of<format>(part, panel, rows.x.width, std::make_integer_sequence<int, panels>{});
    sums.start(true);
    for (int32_t group = 0; group < rows.num_groups(); ++group) {
        sums.load_rows(group);
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            groups[p].unpack_next(weights[group % 2][p]);
            sums.template multiply<p>(weights[group % 2][p]);
        });
    }
    sums.finish(true);
}

template <int tiles, int panels>
void multiply_chunk(const SumTiles<tiles, panels>& sums, const WeightTile (&weights)[panels][kChunk], int32_t first,
                    int32_t last) {
    sums.start(first == 0);
    for (int32_t group = first; group < last; ++group) {
        sums.load_rows(group);
        unrolled<panels>([&]<int p>() KVARTO_INLINE { sums.template multiply<p>(weights[p][group - first]); });
    }
    sums.finish(last == sums.rows.num_groups());
}

template <Format format, int panels> void multiply_many(const Part& part, const BF16Rows& rows, int32_t panel) {
    WeightTile weights[panels][kChunk];
    auto groups = groups_of<format>(part, panel, rows.x.width, std::make_integer_sequence<int, panels>{});
    for (int32_t first = 0; first < rows.num_groups(); first += kChunk) {
        const int32_t last = std::min(first + kChunk, rows.num_groups());
        for (int p = 0; p < panels; ++p)
            for (int32_t group = first; group < last; ++group) groups[p].unpack_next(weights[p][group - first]);
        int32_t tile = 0;
        for (; tile + 2 <= rows.num_tiles(); tile += 2)
            multiply_chunk(SumTiles<2, panels>{part, rows, panel, tile}, weights, first, last);
        if (tile < rows.num_tiles())
            multiply_chunk(SumTiles<1, panels>{part, rows, panel, tile}, weights, first, last);
    }
}

void configure(int32_t num_rows) {
    TileConfig config;
    const int rows = std::min(num_rows, 16);
    for (int tile = 0; tile < 8; ++tile) config.set(tile, tile < kWeightTile ? rows : 16, 64);
    configure_tiles(config);
}

template <Format format, int panels>
int32_t multiply_by(const Part& part, const BF16Rows& rows, int32_t panel, int32_t last) {
    for (; panel + panels <= last; panel += panels) {
        if (rows.num_rows > 32)
            multiply_many<format, panels>(part, rows, panel);
        else if (rows.num_rows > 16)
            multiply_few<format, 2, panels>(part, rows, panel);
        else
            multiply_few<format, 1, panels>(part, rows, panel);
    }
    return panel;
}

template <Format format> void multiply(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    int32_t panel = first;
    if (rows.num_rows <= 16)
        for (; panel + 4 <= last; panel += 4) multiply_few<format, 1, 4>(part, rows, panel);
    panel = multiply_by<format, 2>(part, rows, panel, last);
    multiply_by<format, 1>(part, rows, panel, last);
}

}  // namespace

void multiply_panels_bf16(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    configure(rows.num_rows);
    with_format(part.format, [&]<Format format>() { multiply<format>(part, rows, first, last); });
    release_tiles();
}

}  // namespace kvarto::KVARTO_ISA

#endif
