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

constexpr int32_t kChunk = 18;   // groups unpacked together: 18 KiB per panel
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

KVARTO_INLINE inline void prefetch_to_write(const std::byte* line) { asm volatile("prefetchw %0" ::"m"(*line)); }

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
template <int tiles, int panels> class SumTiles {
public:
    const std::array<PanelAt, panels>& at;
    const BF16Rows& rows;
    const int32_t tile;

    SumTiles(const std::array<PanelAt, panels>& at, const BF16Rows& rows, int32_t tile)
        : at(at), rows(rows), tile(tile), groups_bytes_(rows.num_groups() * kTileBytes),
          first_(rows.tile(tile)), row_bytes_(4 * rows.out_stride) {
        for (int p = 0; p < panels; ++p) {
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
    KVARTO_INLINE void load_rows(int32_t group) const {
        const std::byte* first = first_ + group * kTileBytes;
        unrolled<tiles>([&]<int t>() KVARTO_INLINE { load_passing_tile<kRowTile + t>(first + t * groups_bytes_, 64); });
    }
    template <int p> KVARTO_INLINE static void multiply(const WeightTile& weights) {
        constexpr int b = kWeightTile + p % 2;
        load_tile<b>(weights.pairs, 64);
        unrolled<tiles>([&]<int t>() KVARTO_INLINE { multiply_tiles_bf16<p * tiles + t, kRowTile + t, b>(); });
    }

    int32_t end_row() const { return 16 * (tile + tiles); }

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

// All rows, at most 16 · tiles of them.
template <Format format, int tiles, int panels>
void multiply_few(const Part& part, const BF16Rows& rows, int32_t panel) {
    const auto at = panels_from<panels>(part, panel);
    const SumTiles<tiles, panels> sums{at, rows, 0};
    WeightTile weights[2][panels];  // one is written while the other may still be read
    auto groups = groups_of<format>(at, rows.x.width, std::make_integer_sequence<int, panels>{});
    sums.start(true);
    const int32_t num_groups = rows.num_groups(), rows_of_tile = std::min(rows.num_rows, 16);
    for (int32_t group = 0; group < num_groups; ++group) {
        if (group < rows_of_tile) sums.prefetch(group, 0);
        sums.load_rows(group);
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            groups[p].unpack_next(weights[group % 2][p]);
            sums.template multiply<p>(weights[group % 2][p]);
        });
    }
    sums.finish(true);
}

// What becomes of sums that are whole: they go to `out`.
struct ToOut {
    static constexpr bool is_out = true;
    template <class Sums> KVARTO_INLINE void prefetch(const Sums& sums, int32_t i) const { sums.prefetch(i, 0); }
    template <class Sums> KVARTO_INLINE void operator()(const Sums& sums) const { sums.finish(true); }
};

template <int tiles, int panels, class Sink>
void multiply_chunk(const SumTiles<tiles, panels>& sums, const WeightTile (&weights)[panels][kChunk], int32_t first,
                    int32_t last, const Sink& sink) {
    const bool is_last = last == sums.rows.num_groups();
    const bool has_next = 16 * (sums.tile + 2 * tiles) <= sums.rows.num_rows;
    sums.start(first == 0);
    for (int32_t group = first; group < last; ++group) {
        if (const int32_t i = group - first; i < 16) {
            if (first > 0 && has_next) sums.prefetch(i, tiles);  // to be loaded; what is stored has been
            if (first == 0 && !is_last) sums.prefetch(i, 0);
            if (is_last && (first == 0 || !sink.is_out)) sink.prefetch(sums, i);
        }
        sums.load_rows(group);
        unrolled<panels>([&]<int p>() KVARTO_INLINE { sums.template multiply<p>(weights[p][group - first]); });
    }
    if (is_last)
        sink(sums);
    else
        sums.finish(false);
}

template <Format format, int panels, class Sink>
void multiply_many(const std::array<PanelAt, panels>& at, const BF16Rows& rows, const Sink& sink) {
    WeightTile weights[panels][kChunk];
    auto groups = groups_of<format>(at, rows.x.width, std::make_integer_sequence<int, panels>{});
    for (int32_t first = 0; first < rows.num_groups(); first += kChunk) {
        const int32_t last = std::min(first + kChunk, rows.num_groups());
        for (int p = 0; p < panels; ++p)
            for (int32_t group = first; group < last; ++group) groups[p].unpack_next(weights[p][group - first]);
        int32_t tile = 0;
        for (; tile + 2 <= rows.num_tiles(); tile += 2)
            multiply_chunk(SumTiles<2, panels>{at, rows, tile}, weights, first, last, sink);
        if (tile < rows.num_tiles())
            multiply_chunk(SumTiles<1, panels>{at, rows, tile}, weights, first, last, sink);
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
            multiply_many<format, panels>(panels_from<panels>(part, panel), rows, ToOut{});
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

// act(gate) · up, from the tiles of a gate's panel and of the up panel beside it.
struct ToGated {
    static constexpr bool is_out = false;
    const LinearOp& op;
    int32_t first_column;

    template <class Sums> KVARTO_INLINE void prefetch(const Sums& sums, int32_t i) const {
        for (int32_t row = 16 * sums.tile + i; row < std::min(sums.end_row(), sums.rows.num_rows); row += 16)
            prefetch_to_write(op.gated.bf16(row, first_column / kGroup));
    }
    template <int tiles> void operator()(const SumTiles<tiles, 2>& sums) const {
        alignas(64) float products[2][16 * tiles][16];
        unrolled<2 * tiles>([&]<int t>() KVARTO_INLINE { store_tile<t>(products[t / tiles][t % tiles * 16], 64); });
        const int32_t first = 16 * sums.tile, group = first_column / kGroup, count = std::min(sums.rows.num_rows - first, 16 * tiles);
        for (int32_t i = 0; i < count; ++i) {
            const F32x16 product = activated(op.activation, F32x16::load(products[0][i])) * F32x16::load(products[1][i]);
            const __m256bh rounded = _mm512_cvtneps_pbh(product.v);
            std::memcpy(op.gated.bf16(first + i, group) + 2 * (first_column % kGroup), &rounded, sizeof rounded);
        }
    }
};

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
            multiply_many<format, 2>(at, rows, ToGated{op, panel * kLanes});
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
