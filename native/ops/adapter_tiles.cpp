// Bounds. Few rows per adapter: see adapter_tiles_few.cpp. Many rows: reading and writing what the base made of them, 8
// bytes per row and column, as sixteen rows, columns and 32 ranks are multiplied in 16 cycles.
#include "ops/adapter_tiles.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cstring>

#include "ops/adapter_span.h"
#include "ops/adapter_tile_parts.h"
#include "ops/adapter_tiles_few.h"
#include "ops/prefetch.h"
#include "ops/transpose16.h"
#include "simd/tiles.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

namespace {

// Sixteen rows of sixteen sums.
struct alignas(64) SumsTile {
    float rows[16][16];
};

// Places of the list of rows whose rows lie in one tile of x.
struct TileRun {
    int32_t tile, first, last;
};

constexpr int32_t kMaxRuns = kTileItemRows / 16 + 1;  // of rows that follow each other

// Up to kMaxRuns of places [first, last).
int32_t find_runs(const AdapterWork& work, int32_t first, int32_t last, TileRun (&runs)[kMaxRuns]) {
    int32_t num = 0;
    while (first < last && num < kMaxRuns) {
        TileRun run{work.rows.rows[first] / 16, first, first};
        while (run.last < last && work.rows.rows[run.last] / 16 == run.tile) ++run.last;
        runs[num++] = run;
        first = run.last;
    }
    return num;
}

constexpr int32_t kSpanGroups = kSpan / kGroup;

// Strips beside each other: pairs of columns, by strip.
void turn(const StripsAt& at, int32_t num, int32_t num_groups, Tile* out) {
    for (int32_t group = 0; group < num_groups; ++group) {
        F32x16 pairs[16];
        for (int32_t s = 0; s < 16; ++s)
            pairs[s].v = s < num ? _mm512_loadu_ps(at.group(s, group)) : _mm512_setzero_ps();
        transpose16(pairs);
        for (int32_t i = 0; i < 16; ++i) _mm512_store_ps(out[group].bytes + i * kLineBytes, pairs[i].v);
    }
}

template <int R>
void add_runs(const AdapterWork& work, const TileRun* runs, const Tile* strips, int32_t first_group,
              int32_t num_groups, SumsTile* sums) {
    unrolled<R>([&]<int r>() KVARTO_INLINE {
        if (first_group == 0) zero_tile<r>();
        else load_tile<r>(sums[r].rows, kLineBytes);
    });
    for (int32_t group = 0; group < num_groups; ++group) {
        load_tile<6>(strips[group].bytes, kLineBytes);
        unrolled<R>([&]<int r>() KVARTO_INLINE {
            load_tile<4 + r>(work.x.bf16(int64_t{16} * runs[r].tile, first_group + group), kLineBytes);
            multiply_tiles_bf16<r, 4 + r, 6>();
        });
    }
    unrolled<R>([&]<int r>() KVARTO_INLINE { store_tile<r>(sums[r].rows, kLineBytes); });
}

void shrink_runs(const AdapterWork& work, const Adapter& adapter, const AdapterUpdate& update, const ShrinkItem& shrink,
                 const TileRun* runs, int32_t num_runs) {
    const int32_t strip = shrink.strip, num = shrink.num_strips;
    SumsTile sums[kMaxRuns];
    Tile strips[kSpanGroups];
    for (int32_t column = 0; column < update.a.num_columns; column += kSpan) {
        const int32_t count = std::min(kSpan, update.a.num_columns - column);
        turn(StripsAt(adapter, update.a, strip, num, column, count), num, count / kGroup, strips);
        int32_t run = 0;
        for (; run + 2 <= num_runs; run += 2)
            add_runs<2>(work, runs + run, strips, column / kGroup, count / kGroup, sums + run);
        if (run < num_runs) add_runs<1>(work, runs + run, strips, column / kGroup, count / kGroup, sums + run);
    }
    for (int32_t run = 0; run < num_runs; ++run)
        for (int32_t place = runs[run].first; place < runs[run].last; ++place)
            std::copy_n(sums[run].rows[work.rows.rows[place] % 16], num, sums_of(work, update, place) + strip);
}

// t of a row, rounded, [groups][32]; zeros follow.
void round_sums(const float* sums, int32_t rank, std::byte* out, int64_t group_bytes) {
    const auto load = [&](int32_t first) {
        const int32_t num = std::clamp(rank - first, 0, 16);
        return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << num) - 1), sums + first);
    };
    for (int32_t first = 0; first < rank; first += kGroup, out += group_bytes)
        _mm512_storeu_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load(first + 16), load(first))));
}

constexpr int32_t kMaxGroups = kMaxTileRank / kGroup;
constexpr int32_t kBlockColumns = 128;
constexpr int32_t kBlockTiles = kBlockColumns / 16;

// Columns of B by pairs of ranks: [groups][tiles of sixteen columns].
using ColumnTiles = Tile[kMaxGroups][kBlockTiles];

void pair_up(const Adapter& adapter, const Strips& b, int32_t column, int32_t count, ColumnTiles& out) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int32_t num_ranks = static_cast<int32_t>(align_up(b.num_strips, kGroup));
    StripCopies<kBlockColumns> copies;
    for (int32_t first = 0; first < num_ranks; first += kStripsAtOnce) {
        StripPlaces strips = first < b.num_strips ? StripPlaces(adapter, b, first, column, count) : StripPlaces();
        copies.find(adapter, b, first, column, count, strips);
        for (int32_t s = 0; s < kStripsAtOnce; s += 2) {
            Tile* tiles = out[first / kGroup];
            const int64_t place = (first % kGroup + s) / 2 * kLineBytes;
            for (int32_t i = 0; i < count; i += kGroup, tiles += 2) {
                const __m512i even = _mm512_loadu_si512(strips.at[s] + 2 * i);
                const __m512i odd = _mm512_loadu_si512(strips.at[s + 1] + 2 * i);
                _mm512_store_si512(tiles[0].bytes + place, _mm512_permutex2var_epi16(even, low, odd));
                _mm512_store_si512(tiles[1].bytes + place, _mm512_permutex2var_epi16(even, high, odd));
            }
        }
    }
}

// Sums of sixteen places, not all in the same sets of the cache.
struct BlockSums {
    alignas(64) float rows[16][kBlockColumns + 16];
};

// Sums of up to sixteen places; asks for what the base made of them.
void multiply_block(const AdapterWork& work, const AdapterSpan& span, int32_t from, int32_t num_tiles, RowRange places,
                    const Tile (&t)[kMaxGroups], const ColumnTiles& columns, BlockSums& out) {
    const int32_t num_groups = ceil_div(span.update.rank(), kGroup);
    const int64_t y = span.update.first_row + span.column + from;
    for (int32_t tile = 0; tile < num_tiles; tile += 2) {
        for (int32_t place = places.first; place < places.last; ++place) {
            const float* line = work.out.f32(work.rows.rows[place]) + y + 16 * tile;
            prefetch_to_write(line);
            prefetch_to_write(line + 16);
        }
        zero_tile<0>();
        zero_tile<1>();
        for (int32_t group = 0; group < num_groups; ++group) {
            load_tile<4>(t[group].bytes, kLineBytes);
            load_tile<6>(columns[group][tile].bytes, kLineBytes);
            load_tile<7>(columns[group][tile + 1].bytes, kLineBytes);
            multiply_tiles_bf16<0, 4, 6>();
            multiply_tiles_bf16<1, 4, 7>();
        }
        store_tile<0>(&out.rows[0][16 * tile], sizeof out.rows[0]);
        store_tile<1>(&out.rows[0][16 * tile + 16], sizeof out.rows[0]);
    }
}

void join_block(const AdapterWork& work, const AdapterSpan& span, int32_t from, int32_t count, RowRange places,
                const BlockSums& sums) {
    for (int32_t place = places.first; place < places.last; ++place)
        span.join(work, work.rows.rows[place], from, count, sums.rows[place - places.first]);
}

void expand_many(const AdapterWork& work, const Adapter& adapter, const AdapterSpan& span, RowRange range) {
    constexpr int32_t kRowTiles = kTileItemRows / 16;
    Tile t[kRowTiles][kMaxGroups];
    ColumnTiles columns;
    BlockSums sums[2];
    const auto places = [&](int32_t tile) {
        return RowRange(range.first + 16 * tile, std::min(range.first + 16 * tile + 16, range.last));
    };
    const int32_t num_tiles = ceil_div(range.last - range.first, 16);
    for (int32_t place = range.first; place < range.last; ++place) {
        const int32_t row = place - range.first;
        round_sums(sums_of(work, span.update, place), span.update.rank(), t[row / 16][0].bytes + row % 16 * kLineBytes,
                   kBF16TileBytes);
    }
    for (int32_t from = 0; from < span.count; from += kBlockColumns) {
        const int32_t count = std::min(kBlockColumns, span.count - from);
        pair_up(adapter, span.update.b, span.column + from, count, columns);
        for (int32_t tile = 0; tile < num_tiles; ++tile) {
            multiply_block(work, span, from, count / 16, places(tile), t[tile], columns, sums[tile % 2]);
            // Not what was just stored: to read that waits until all its lines have left for the cache.
            if (tile > 0) join_block(work, span, from, count, places(tile - 1), sums[(tile - 1) % 2]);
        }
        join_block(work, span, from, count, places(num_tiles - 1), sums[(num_tiles - 1) % 2]);
    }
}

}  // namespace

void shrink_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next, TileShapes& shapes) {
    const ShrinkItem strips(item);
    if (are_few(strips.rows)) return shrink_few(work, item, next, shapes);
    shapes.set_whole();
    for (int32_t first = strips.rows.first; first < strips.rows.last;) {
        TileRun runs[kMaxRuns];
        const int32_t num_runs = find_runs(work, first, strips.rows.last, runs);
        shrink_runs(work, item.adapter(), *item.part, strips, runs, num_runs);
        first = runs[num_runs - 1].last;
    }
}

void expand_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next, TileShapes& shapes) {
    const ExpandItem part(work, item);
    if (are_few(part.rows)) return expand_few(work, item, next);
    shapes.set_whole();
    expand_many(work, item.adapter(), AdapterSpan(item.adapter(), *item.part, part.column, part.num_columns), part.rows);
}

}  // namespace kvarto::KVARTO_ISA

#endif
