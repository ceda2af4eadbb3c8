// Products in matrix tiles: sixteen rows × sixteen rows of weights × 32 columns per instruction, which takes 16 cycles.
// Sums stay in tiles over all columns, so nothing is scaled: that is why weights are unpacked to bfloat16.
//
// Up to 32 rows, up to four tiles of sums advance together, each group of weights unpacked while the one before it is
// multiplied. Per group of a 4-bit panel that is 70 cycles to unpack and 20 to multiply; reading its 320 bytes takes
// about as long.
// With more rows two panels are unpacked a chunk of columns at a time, and multiplied with two tiles of rows at once.
// The matrix unit is then the bound, as long as the lines that sums go to are asked for in time: they cost as much.
#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "ops/activation.h"
#include "ops/linear_bf16_unpack.h"
#include "ops/prefetch.h"
#include "simd/tiles.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kChunk = 18;   // groups unpacked together: 18 KiB per panel
constexpr int32_t kAhead = 4096;  // bytes of a panel that are asked for before their turn
constexpr int64_t kTileBytes = kBF16TileBytes;
constexpr int kRowTile = 4;  // tiles 0..3 are sums, 4 and 5 rows, 6 and 7 weights
constexpr int kWeightTile = 6;

struct alignas(64) WeightTile {
    std::byte pairs[kTileBytes];
};

// A panel, and where in `out` the products with its part begin.
struct PanelAt {
    const Part* part;
    int32_t panel;
    int64_t first_column = 0;
};

// Groups of one panel, one after the other.
template <Format format> class Groups {
public:
    Groups(const PanelAt& at, int32_t width, int32_t first)
        : group_size_(at.part->group_size), in_block_(Block<format>::groups(group_size_)), group_(first % in_block_),
          share_(block_bytes(format, group_size_) / in_block_),
          next_(at.part->data + at.panel * panel_bytes(format, group_size_, width) +
                first / in_block_ * block_bytes(format, group_size_)),
          block_(next_, group_size_) {}

    KVARTO_INLINE void unpack_next(WeightTile& out) {
        if (group_ == in_block_) {
            group_ = 0;
            next_ += block_bytes(format, group_size_);
            block_ = Block<format>(next_, group_size_);
        }
        const std::byte* ahead = next_ + group_ * share_ + kAhead;
        for (int64_t i = 0; i < share_; i += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T1);
        unpack_pairs(block_, group_++, out.pairs);
    }

private:
    int32_t group_size_, in_block_, group_;
    int64_t share_;  // bytes of a group, about
    const std::byte* next_;
    Block<format> block_;
};

template <Format format, size_t panels, int... p>
std::array<Groups<format>, panels> groups_of(const std::array<PanelAt, panels>& at, int32_t width, int32_t first,
                                             std::integer_sequence<int, p...>) {
    return {Groups<format>(at[p], width, first)...};
}

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
        : at(at), rows(rows), tile(tile), groups_bytes_(rows.num_groups() * kTileBytes),
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
    KVARTO_INLINE void load_rows(int32_t group) const {
        const std::byte* first = first_ + group * kTileBytes;
        unrolled<tiles>([&]<int t>() KVARTO_INLINE { load_passing_tile<kRowTile + t>(first + t * groups_bytes_, 64); });
    }
    template <int p> KVARTO_INLINE static void multiply(const WeightTile& weights) {
        constexpr int b = kWeightTile + p % 2;
        load_tile<b>(weights.pairs, 64);
        unrolled<tiles>([&]<int t>() KVARTO_INLINE { multiply_tiles_bf16<p * tiles + t, kRowTile + t, b>(); });
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

// What becomes of sums that are whole: they go to `out`. A sink is told of every group of columns before it is
// multiplied, so that it can ask for lines in time.
struct ToOut {
    static constexpr bool kIsOut = true;
    template <class Sums> KVARTO_INLINE void at_group(const Sums& sums, int32_t i) const {
        if (i < sums.num_rows()) sums.prefetch(i, 0);
    }
    template <class Sums> KVARTO_INLINE void take(const Sums& sums) const { sums.finish(true); }
};

// act(gate) · up, from the tiles of a gate's panel and of the up panel beside it, to `op.gated`. Sums are set aside, and
// activated while the next ones are multiplied: vectors have little to do then.
class ToGated {
public:
    static constexpr bool kIsOut = false;
    ToGated(const LinearOp& op, int32_t first_column) : op_(op), first_column_(first_column) {}

    template <class Sums> KVARTO_INLINE void at_group(const Sums&, int32_t) {
        if (next_ < end_) activate(next_++);
        if (next_ < end_) activate(next_++);
    }
    template <int tiles> void take(const SumTiles<tiles, 2>& sums) {
        flush();
        unrolled<2 * tiles>([&]<int t>() KVARTO_INLINE { store_tile<t>(sums_[t / tiles][t % tiles * 16], 64); });
        first_row_ = 16 * sums.tile;
        next_ = 0;
        end_ = std::min(sums.rows.num_rows - first_row_, 16 * tiles);
        for (int32_t i = 0; i < end_; ++i) prefetch_to_write(place(i));
    }
    void flush() {
        while (next_ < end_) activate(next_++);
    }

private:
    std::byte* place(int32_t i) const {
        return op_.gated.bf16(first_row_ + i, first_column_ / kGroup) + 2 * (first_column_ % kGroup);
    }
    void activate(int32_t i) const {
        const F32x16 product = activated(op_.activation, F32x16::load(sums_[0][i])) * F32x16::load(sums_[1][i]);
        const __m256bh rounded = _mm512_cvtneps_pbh(product.v);
        std::memcpy(place(i), &rounded, sizeof rounded);
    }

    const LinearOp& op_;
    const int32_t first_column_;
    alignas(64) float sums_[2][32][16];
    int32_t first_row_ = 0, next_ = 0, end_ = 0;
};

// All rows, at most 16 · tiles of them.
template <Format format, int tiles, size_t panels, class Sink>
void multiply_at_once(const std::array<PanelAt, panels>& at, const BF16Rows& rows, Sink& sink) {
    const SumTiles<tiles, panels> sums{at, rows, 0};
    WeightTile weights[2][panels];
    auto groups = groups_of<format>(at, rows.x.width, 0, std::make_integer_sequence<int, panels>{});
    const int32_t num_groups = rows.num_groups();
    sums.start(true);
    for (auto i = size_t{0}; i < panels; ++i) groups[i].unpack_next(weights[0][i]);
    for (int32_t group = 0; group < num_groups; ++group) {
        sink.at_group(sums, group);
        sums.load_rows(group);
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            // A tile is not loaded from stores that are still under way, so it is one that was unpacked a turn ago.
            if (group + 1 < num_groups) groups[p].unpack_next(weights[(group + 1) % 2][p]);
            sums.template multiply<p>(weights[group % 2][p]);
        });
    }
    sink.take(sums);
}

template <Format format, size_t panels, class Sink>
void multiply_few(const std::array<PanelAt, panels>& at, const BF16Rows& rows, Sink& sink) {
    rows.num_rows > 16 ? multiply_at_once<format, 2>(at, rows, sink) : multiply_at_once<format, 1>(at, rows, sink);
}

template <int tiles, size_t panels, class Sink>
void multiply_chunk(const SumTiles<tiles, panels>& sums, const WeightTile (&weights)[panels][kChunk], int32_t first,
                    int32_t last, Sink& sink) {
    const bool is_last = last == sums.rows.num_groups();
    const bool has_next = 16 * (sums.tile + 2 * tiles) <= sums.rows.num_rows;
    const bool stores_first = first == 0 && !(is_last && !Sink::kIsOut);  // lines that were not loaded before
    sums.start(first == 0);
    for (int32_t group = first; group < last; ++group) {
        const int32_t i = group - first;
        if (i < 16 && stores_first) sums.prefetch(i, 0);
        if (i < 16 && first > 0 && has_next) sums.prefetch(i, tiles);
        if constexpr (!Sink::kIsOut) sink.at_group(sums, i);
        sums.load_rows(group);
        unrolled<panels>([&]<int p>() KVARTO_INLINE { sums.template multiply<p>(weights[p][i]); });
    }
    if (is_last)
        sink.take(sums);
    else
        sums.finish(false);
}

// Columns of groups [first, last), at most a chunk, of more than 32 rows. Those of rows, of all of them, should be found
// in the second-level cache by the panels that come next: so it goes chunk by chunk, and not panel by panel.
template <Format format, size_t panels, class Sink>
void multiply_columns(const std::array<PanelAt, panels>& at, const BF16Rows& rows, int32_t first, int32_t last,
                      Sink& sink) {
    WeightTile weights[panels][kChunk];
    auto groups = groups_of<format>(at, rows.x.width, first, std::make_integer_sequence<int, panels>{});
    for (size_t p = 0; p < panels; ++p)
        for (int32_t group = first; group < last; ++group) groups[p].unpack_next(weights[p][group - first]);
    int32_t tile = 0;
    for (; tile + 2 <= rows.num_tiles(); tile += 2)
        multiply_chunk(SumTiles<2, panels>{at, rows, tile}, weights, first, last, sink);
    if (tile < rows.num_tiles())
        multiply_chunk(SumTiles<1, panels>{at, rows, tile}, weights, first, last, sink);
}

// Calls f(first, last) for chunks of groups.
template <class F> void each_chunk(const BF16Rows& rows, F f) {
    for (int32_t first = 0; first < rows.num_groups(); first += kChunk)
        f(first, std::min(first + kChunk, rows.num_groups()));
}

void configure(int32_t num_rows) {
    TileConfig config;
    const int rows = std::min(num_rows, 16);
    for (int tile = 0; tile < 8; ++tile) config.set(tile, tile < kWeightTile ? rows : 16, 64);
    configure_tiles(config);
}

template <Format format> void multiply_few(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    ToOut out;
    int32_t panel = first;
    if (rows.num_rows <= 16)
        for (; panel + 4 <= last; panel += 4) multiply_at_once<format, 1>(panels_from<4>(part, panel), rows, out);
    for (; panel + 2 <= last; panel += 2) multiply_few<format>(panels_from<2>(part, panel), rows, out);
    if (panel < last) multiply_few<format>(panels_from<1>(part, panel), rows, out);
}

template <Format format> void multiply_many(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    ToOut out;
    each_chunk(rows, [&](int32_t first_group, int32_t last_group) {
        int32_t panel = first;
        for (; panel + 2 <= last; panel += 2)
            multiply_columns<format, 2>(panels_from<2>(part, panel), rows, first_group, last_group, out);
        if (panel < last)
            multiply_columns<format, 1>(panels_from<1>(part, panel), rows, first_group, last_group, out);
    });
}

// A panel of gates, and the one of what they gate.
std::array<PanelAt, 2> gate_and_up(const LinearOp& op, int32_t panel) {
    const Part &gate = op.weight.parts.front(), &up = op.weight.parts.back();
    if (op.weight.parts.size() == 1) return {PanelAt{&gate, panel}, PanelAt{&up, op.gated.width / kLanes + panel}};
    return {PanelAt{&gate, panel}, PanelAt{&up, panel, op.gated.width}};
}

// Calls f(panels, gated) for panels [first, last) of gates.
template <class F> void each_gate(const LinearOp& op, int32_t first, int32_t last, F f) {
    for (int32_t panel = first; panel < last; ++panel) {
        ToGated gated(op, panel * kLanes);
        f(gate_and_up(op, panel), gated);
        gated.flush();
    }
}

}  // namespace

void multiply_gated_bf16(const LinearOp& op, const BF16Rows& rows, int32_t first, int32_t last) {
    configure(rows.num_rows);
    with_format(op.weight.parts.front().format, [&]<Format format>() {
        if (rows.num_rows < kFewestManyRows)
            each_gate(op, first, last, [&](const auto& at, ToGated& gated) { multiply_few<format>(at, rows, gated); });
        else
            each_chunk(rows, [&](int32_t first_group, int32_t last_group) {
                each_gate(op, first, last, [&](const auto& at, ToGated& gated) {
                    multiply_columns<format>(at, rows, first_group, last_group, gated);
                });
            });
    });
    release_tiles();
}

void multiply_panels_bf16_by_tiles(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    configure(rows.num_rows);
    with_format(part.format, [&]<Format format>() {
        rows.num_rows < kFewestManyRows ? multiply_few<format>(part, rows, first, last)
                                  : multiply_many<format>(part, rows, first, last);
    });
    release_tiles();
}

}  // namespace kvarto::KVARTO_ISA

#endif
