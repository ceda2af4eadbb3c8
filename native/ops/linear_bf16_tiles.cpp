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
#include <cstring>
#include <utility>

#include "ops/activation.h"
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

// A panel, and where in `out` the products with its part begin.
struct PanelAt {
    const Part* part;
    int32_t panel;
    int64_t first_column = 0;
};

template <Format format, size_t panels, int... p>
std::array<Groups<format>, panels> groups_of(const std::array<PanelAt, panels>& at, int32_t width,
                                             std::integer_sequence<int, p...>) {
    return {Groups<format>(*at[p].part, at[p].panel, width)...};
}

template <int panels> std::array<PanelAt, panels> panels_from(const Part& part, int32_t panel) {
    std::array<PanelAt, panels> at;
    for (int p = 0; p < panels; ++p) at[p] = {&part, panel + p};
    return at;
}

// One tile of sums: up to sixteen rows by a panel's lanes.
struct Place {
    float* out;
    int64_t stride;
    int32_t num_rows;
    int32_t num_lanes;
    const float* bias;  // of lane 0, or null

    Place(const PanelAt& at, const BF16Rows& rows, int32_t tile)
        : out(rows.out + int64_t{16} * tile * rows.out_stride + at.first_column + at.panel * kLanes),
          stride(rows.out_stride), num_rows(std::min(rows.num_rows - 16 * tile, 16)),
          num_lanes(std::min(at.part->num_rows - at.panel * kLanes, kLanes)),
          bias(rows.bias != nullptr ? rows.bias + at.first_column + at.panel * kLanes : nullptr) {}

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
    const std::array<PanelAt, panels>& at;
    const BF16Rows& rows;
    int32_t tile;

    template <class F> void each(F f) const {
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            unrolled<tiles>([&]<int t>() KVARTO_INLINE {
                f.template operator()<p * tiles + t>(Place(at[p], rows, tile + t));
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
            load_passing_tile<kRowTile + t>(rows.staged + at * kTileBytes, 64);
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
    const auto at = panels_from<panels>(part, panel);
    const SumTiles<tiles, panels> sums{at, rows, 0};
    WeightTile weights[2][panels];  // one is written while the other may still be read
    auto groups = groups_of<format>(at, rows.x.width, std::make_integer_sequence<int, panels>{});
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

// `finish(sums)` takes the sums that are whole.
template <int tiles, int panels, class Finish>
void multiply_chunk(const SumTiles<tiles, panels>& sums, const WeightTile (&weights)[panels][kChunk], int32_t first,
                    int32_t last, Finish finish) {
    sums.start(first == 0);
    for (int32_t group = first; group < last; ++group) {
        sums.load_rows(group);
        unrolled<panels>([&]<int p>() KVARTO_INLINE { sums.template multiply<p>(weights[p][group - first]); });
    }
    if (last < sums.rows.num_groups())
        sums.finish(false);
    else
        finish(sums);
}

template <Format format, int panels, class Finish>
void multiply_many(const std::array<PanelAt, panels>& at, const BF16Rows& rows, Finish finish) {
    WeightTile weights[panels][kChunk];
    auto groups = groups_of<format>(at, rows.x.width, std::make_integer_sequence<int, panels>{});
    for (int32_t first = 0; first < rows.num_groups(); first += kChunk) {
        const int32_t last = std::min(first + kChunk, rows.num_groups());
        for (int p = 0; p < panels; ++p)
            for (int32_t group = first; group < last; ++group) groups[p].unpack_next(weights[p][group - first]);
        int32_t tile = 0;
        for (; tile + 2 <= rows.num_tiles(); tile += 2)
            multiply_chunk(SumTiles<2, panels>{at, rows, tile}, weights, first, last, finish);
        if (tile < rows.num_tiles())
            multiply_chunk(SumTiles<1, panels>{at, rows, tile}, weights, first, last, finish);
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
            multiply_many<format, panels>(panels_from<panels>(part, panel), rows,
                                          [](const auto& sums) { sums.finish(true); });
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

// act(gate) · up of sixteen rows, from the tiles of a gate's panel and of the up panel beside it.
template <int gate, int up>
void write_gated(const LinearOp& op, const Place& place, int32_t first_row, int32_t first_column) {
    alignas(64) float sums[2][16][16];
    store_tile<gate>(sums[0], 64);
    store_tile<up>(sums[1], 64);
    for (int32_t i = 0; i < place.num_rows; ++i) {
        const F32x16 product = activated(op.activation, F32x16::load(sums[0][i])) * F32x16::load(sums[1][i]);
        const __m256bh rounded = _mm512_cvtneps_pbh(product.v);
        std::memcpy(op.gated.bf16(first_row + i) + 2 * first_column, &rounded, sizeof rounded);
    }
}

}  // namespace

void multiply_gated_bf16(const LinearOp& op, const BF16Rows& rows, int32_t first, int32_t last) {
    const Part &gate_part = op.weight.parts.front(), &up_part = op.weight.parts.back();
    const int32_t num_panels = op.gated.width / kLanes;
    const bool is_one = op.weight.parts.size() == 1;
    configure(rows.num_rows);
    with_format(gate_part.format, [&]<Format format>() {
        for (int32_t panel = first; panel < last; ++panel) {
            const std::array<PanelAt, 2> at{PanelAt{&gate_part, panel},
                                            is_one ? PanelAt{&up_part, num_panels + panel}
                                                   : PanelAt{&up_part, panel, op.gated.width}};
            multiply_many<format, 2>(at, rows, [&]<int tiles>(const SumTiles<tiles, 2>& sums) {
                unrolled<tiles>([&]<int t>() KVARTO_INLINE {
                    const int32_t tile = sums.tile + t;
                    write_gated<t, tiles + t>(op, Place(at[0], rows, tile), 16 * tile, panel * kLanes);
                });
            });
        }
    });
    release_tiles();
}

void multiply_panels_bf16_by_tiles(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    configure(rows.num_rows);
    with_format(part.format, [&]<Format format>() { multiply<format>(part, rows, first, last); });
    release_tiles();
}

}  // namespace kvarto::KVARTO_ISA

#endif
