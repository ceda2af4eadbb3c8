// Six tile instructions of 16 cycles for sixteen rows × sixteen rows of weights × 32 columns: 85 multiply-adds a cycle
// at most, where vectors have 32.
//
// Weights become parts as they are needed: about 90 cycles for a group of a panel of float32. Up to 32 rows, a group is
// split while the one before it is multiplied; reading its 2 KiB from memory takes longer than either, and is the bound.
// Up to sixteen rows, four panels are read side by side. With many rows two panels are split a chunk of columns at a
// time, for two tiles of rows after the other.
#include "ops/linear_bf16x3.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <array>
#include <cassert>
#include <utility>

#include "ops/linear_bf16x3_parts.h"
#include "ops/linear_tile_sums.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int kLastTile = 7;            // of weights, where three tiles hold rows
constexpr int32_t kChunk = 6;           // groups split together: 18 KiB per panel of float32
constexpr int32_t kRowsAhead = 3;       // of sums, that are asked for with each group of a chunk
constexpr int64_t kAhead = 1024;        // bytes that are asked for before their turn

// A group of a panel, its parts one tile after the other.
template <int num_parts> struct WeightParts {
    WeightTile parts[num_parts];
};

// The groups of a panel.
template <Format format> class SplitGroups {
public:
    static constexpr int kParts = kWeightParts<format>;
    static constexpr int64_t kGroupBytes = kGroup / 2 * kPairBytes<format>;

    SplitGroups(const PanelAt& at, int32_t width)
        : data_(at.part->data + at.panel * panel_bytes(format, 0, width)) {}

    // The parts of a group, in `out` unless they are in memory as they are.
    KVARTO_INLINE const WeightParts<kParts>* split(int32_t group, WeightParts<kParts>& out) const {
        if constexpr (!kIsInPlace)
            unrolled<kGroup / 2>([&]<int i>() KVARTO_INLINE { split_pair<i>(group, out); });
        return parts(group, out);
    }
    // The same of a group that was `split` before.
    KVARTO_INLINE const WeightParts<kParts>* parts(int32_t group, const WeightParts<kParts>& split) const {
        return kIsInPlace ? reinterpret_cast<const WeightParts<kParts>*>(at(group)) : &split;
    }
    // Share i of `count` of the same. Lines are asked for `kAhead` bytes before their turn, behind this group those of the
    // `next` one that is split.
    template <int i, int count>
    KVARTO_INLINE void split_share(int32_t group, WeightParts<kParts>& out, const std::byte* next) const {
        constexpr int share = (kGroup / 2 + count - 1) / count, first = i * share;
        const std::byte* pairs = at(group);
        unrolled<std::max(0, std::min(share, kGroup / 2 - first))>([&]<int j>() KVARTO_INLINE {
            constexpr int64_t ahead = (first + j) * kPairBytes<format> + kAhead;
            for (int64_t line = 0; line < kPairBytes<format>; line += 64)
                _mm_prefetch(ahead < kGroupBytes ? pairs + ahead + line : next + (ahead - kGroupBytes) + line,
                             _MM_HINT_T0);
            if constexpr (!kIsInPlace) split_pair<first + j>(group, out);
        });
    }
    // Where a group lies.
    KVARTO_INLINE const std::byte* at(int32_t group) const { return data_ + group * kGroupBytes; }

private:
    static constexpr bool kIsInPlace = format == Format::kBF16;

    template <int i> KVARTO_INLINE void split_pair(int32_t group, WeightParts<kParts>& out) const {
        auto [first, second] = columns_at<format>(at(group) + i * kPairBytes<format>);
        unrolled<kParts>([&]<int part>() KVARTO_INLINE {
            pair_of(first, second).store(out.parts[part].pairs + 64 * i);
            if constexpr (part + 1 < kParts) {
                first = first - cut(first);
                second = second - cut(second);
            }
        });
    }

    const std::byte* data_;
};

// Adds a group's products to the sums of all panels. Between two products of a panel `f<i, p>()` is called, product i of
// panel p being under way: vectors and memory have nothing to do then.
template <int parts, int tiles, size_t panels, class F>
KVARTO_INLINE inline void multiply_group(const SumTiles<tiles, panels>& sums, int32_t group, int64_t part_bytes,
                                         const WeightParts<parts>* const* weights, F f) {
    static constexpr auto products = products_of<parts>();
    unrolled<static_cast<int>(products.size())>([&]<int i>() KVARTO_INLINE {
        if constexpr (i == 0 || products[i].row != products[i - 1].row)
            sums.load_rows(group, products[i].row * part_bytes);
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            if constexpr (i == 0 || products[i].weight != products[i - 1].weight)
                sums.template load_weights<p>(weights[p]->parts[products[i].weight].pairs);
            sums.template multiply<p>();
            f.template operator()<i, p>();
        });
    });
}

// The same of all rows in one tile: their parts stay in tiles for all panels, and weights pass through the last tile.
template <int parts, size_t panels, class F>
KVARTO_INLINE inline void multiply_group_of_few(const SumTiles<1, panels>& sums, int32_t group, int64_t part_bytes,
                                                const WeightParts<parts>* const* weights, F f) {
    static constexpr auto products = products_of<parts>();
    unrolled<kRowParts>([&]<int part>() KVARTO_INLINE {
        sums.template load_first_rows<kRowTile + part>(group, part * part_bytes);
    });
    unrolled<panels>([&]<int p>() KVARTO_INLINE {
        unrolled<static_cast<int>(products.size())>([&]<int i>() KVARTO_INLINE {
            if constexpr (i == 0 || products[i].weight != products[i - 1].weight)
                load_tile<kLastTile>(weights[p]->parts[products[i].weight].pairs, 64);
            multiply_tiles_bf16<p, kRowTile + products[i].row, kLastTile>();
            f.template operator()<i, p>();
        });
    });
}

template <Format format, size_t panels, int... p>
std::array<SplitGroups<format>, panels> groups_of(const std::array<PanelAt, panels>& at, int32_t width,
                                                  std::integer_sequence<int, p...>) {
    return {SplitGroups<format>(at[p], width)...};
}

// All rows, at most 16 · tiles of them, by some of the panels up to `last`.
template <Format format, int tiles, size_t panels>
void multiply_at_once(const std::array<PanelAt, panels>& at, const BF16x3Rows& rows, int32_t last) {
    constexpr int parts = kWeightParts<format>;
    const SumTiles<tiles, panels> sums{at, rows.first, 0};
    WeightParts<parts> weights[2][panels];
    const WeightParts<parts>*next[panels], *here[panels];
    const auto groups_here = groups_of<format>(at, rows.first.x.width, std::make_integer_sequence<int, panels>{});
    const SplitGroups<format>* groups = groups_here.data();
    const int32_t num_groups = rows.first.num_groups();
    // What lies behind the last panel is another worker's.
    const bool is_last = at[0].panel + 2 * static_cast<int32_t>(panels) > last;
    const int64_t to_next = is_last ? 0 : panels * panel_bytes(format, 0, rows.first.x.width);
    sums.start(true);
    for (size_t p = 0; p < panels; ++p) next[p] = groups[p].split(0, weights[0][p]);
    for (int32_t group = 0; group < num_groups; ++group) {
        std::copy_n(next, panels, here);
        // A tile is not loaded from stores that are still under way, so it is one that was split a turn ago.
        const int32_t coming = std::min(group + 1, num_groups - 1);
        const bool is_end = coming + 1 == num_groups;
        const auto meanwhile = [&]<int i, int p>() KVARTO_INLINE {
            // Panels take turns by groups where rows are few, by products otherwise.
            const SplitGroups<format>& follower = groups[tiles > 1 ? p : (p + 1) % panels];
            const bool is_in_turn = tiles == 1 && p + 1 < panels;
            const std::byte* then = is_in_turn ? follower.at(coming)
                                    : is_end   ? follower.at(0) + to_next
                                               : follower.at(coming + 1);
            groups[p].template split_share<i, num_products<parts>()>(coming, weights[(group + 1) % 2][p], then);
        };
        if constexpr (tiles == 1)
            multiply_group_of_few<parts>(sums, group, rows.part_bytes, here, meanwhile);
        else
            multiply_group<parts>(sums, group, rows.part_bytes, here, meanwhile);
        for (size_t p = 0; p < panels; ++p) next[p] = groups[p].parts(coming, weights[(group + 1) % 2][p]);
    }
    sums.finish(true);
}

// Groups [first, last), at most a chunk, of two tiles of rows at most.
template <int tiles, int parts, size_t panels>
void multiply_chunk(const SumTiles<tiles, panels>& sums, int64_t part_bytes, int32_t first, int32_t last,
                    const WeightParts<parts>* (&weights)[kChunk][panels]) {
    const bool has_next = 16 * (sums.tile + 2 * tiles) <= sums.rows.num_rows;
    sums.start(first == 0);
    for (int32_t group = first; group < last; ++group) {
        const int32_t i = group - first;
        for (int32_t row = kRowsAhead * i; row < std::min(kRowsAhead * (i + 1), 16); ++row) {
            if (first == 0) sums.prefetch(row, 0);
            else if (has_next) sums.prefetch(row, tiles);
        }
        multiply_group<parts>(sums, group, part_bytes, weights[i], []<int, int>() KVARTO_INLINE {});
    }
    sums.finish(last == sums.rows.num_groups());
}

// Columns of groups [first, last), at most a chunk, of more than 32 rows.
template <Format format, size_t panels>
void multiply_columns(const std::array<PanelAt, panels>& at, const BF16x3Rows& rows, int32_t first, int32_t last) {
    constexpr int parts = kWeightParts<format>;
    WeightParts<parts> room[kChunk][panels];
    const WeightParts<parts>* weights[kChunk][panels];
    const auto groups = groups_of<format>(at, rows.first.x.width, std::make_integer_sequence<int, panels>{});
    for (int32_t i = 0; i < last - first; ++i)
        for (size_t p = 0; p < panels; ++p) weights[i][p] = groups[p].split(first + i, room[i][p]);
    const int32_t num_tiles = rows.first.num_tiles();
    int32_t tile = 0;
    for (; tile + 2 <= num_tiles; tile += 2)
        multiply_chunk<2, parts>(SumTiles<2, panels>{at, rows.first, tile}, rows.part_bytes, first, last, weights);
    if (tile < num_tiles)
        multiply_chunk<1, parts>(SumTiles<1, panels>{at, rows.first, tile}, rows.part_bytes, first, last, weights);
}

// Calls f(panels) for pairs of panels, and one for what is left.
template <class F> void each_pair(const Part& part, int32_t first, int32_t last, F f) {
    int32_t panel = first;
    for (; panel + 2 <= last; panel += 2) f(panels_from<2>(part, panel));
    if (panel < last) f(panels_from<1>(part, panel));
}

template <Format format> void multiply_few(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last) {
    if (rows.first.num_rows > 16)
        return each_pair(part, first, last, [&](const auto& at) { multiply_at_once<format, 2>(at, rows, last); });
    int32_t panel = first;
    for (; panel + 4 <= last; panel += 4) multiply_at_once<format, 1>(panels_from<4>(part, panel), rows, last);
    each_pair(part, panel, last, [&](const auto& at) { multiply_at_once<format, 1>(at, rows, last); });
}

template <Format format> void multiply_many(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last) {
    for (int32_t group = 0; group < rows.first.num_groups(); group += kChunk)
        each_pair(part, first, last, [&](const auto& at) {
            multiply_columns<format>(at, rows, group, std::min(group + kChunk, rows.first.num_groups()));
        });
}

}  // namespace

void multiply_panels_bf16x3_by_tiles(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last) {
    configure_product_tiles(rows.first.num_rows, rows.first.num_rows <= 16 ? kLastTile : kWeightTile);
    with_float_format(part.format, [&]<Format format>() {
        rows.first.num_rows < kFewestManyRows ? multiply_few<format>(part, rows, first, last)
                                              : multiply_many<format>(part, rows, first, last);
    });
    release_tiles();
}

}  // namespace kvarto::KVARTO_ISA

#endif
