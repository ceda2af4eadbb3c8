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
#include "ops/linear_tile_sums.h"
#include "ops/prefetch.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kChunk = 18;   // groups unpacked together: 18 KiB per panel
constexpr int32_t kAhead = 4096;  // bytes of a panel that are asked for before their turn

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
            sums.template load_weights<p>(weights[group % 2][p].pairs);
            sums.template multiply<p>();
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
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            sums.template load_weights<p>(weights[p][i].pairs);
            sums.template multiply<p>();
        });
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
    configure_product_tiles(rows.num_rows);
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
    configure_product_tiles(rows.num_rows);
    with_format(part.format, [&]<Format format>() {
        rows.num_rows < kFewestManyRows ? multiply_few<format>(part, rows, first, last)
                                  : multiply_many<format>(part, rows, first, last);
    });
    release_tiles();
}

}  // namespace kvarto::KVARTO_ISA

#endif
