// Bounds. Few rows per adapter: its bytes, which are asked for line by line while those before them are multiplied; a
// tile of A is multiplied as it lies in the pages, with a single row beside it. Many rows: reading and writing what the
// base made of them, 8 bytes per row and column, as sixteen rows, columns and 32 ranks are multiplied in 16 cycles.
#include "ops/adapter_tiles.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cstring>

#include "ops/adapter_span.h"
#include "ops/flush_denormals.h"
#include "ops/prefetch.h"
#include "ops/transpose16.h"
#include "simd/tiles.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kFewRows = 4;  // and fewer go one by one
constexpr int32_t kLineBytes = 64;

struct alignas(64) Tile {
    std::byte bytes[kBF16TileBytes];
};

// Sixteen rows of sixteen sums.
struct alignas(64) SumsTile {
    float rows[16][16];
};

float* sums_of(const AdapterWork& work, const AdapterUpdate& update, int32_t place) {
    return work.sums.f32(place) + update.first_rank;
}

// A run of columns of up to sixteen strips, at equal distances.
class StripsAt {
public:
    StripsAt(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num, int32_t column, int32_t count)
        : first_(adapter.at(strips.place(first, 0), num * strips.strip_bytes())), stride_(strips.strip_bytes()) {
        if (first_ != nullptr) {
            first_ += column * strips.item_bytes();
            return;
        }
        for (int32_t s = 0; s < num; ++s)
            adapter.copy(strips.place(first + s, column), count * strips.item_bytes(), copies_[s]);
        first_ = copies_[0];
        stride_ = sizeof copies_[0];
    }
    int64_t stride() const { return stride_; }
    // The 32 columns of a group of strip s.
    const std::byte* group(int32_t s, int32_t group) const { return first_ + s * stride_ + group * kLineBytes; }

private:
    const std::byte* first_;
    int64_t stride_;
    alignas(64) std::byte copies_[kTileStrips][kSpan * 2 + kLineBytes];  // not all in the same sets of the cache
};

// The lines of what follows in the stream, in its order.
class LinesAhead {
public:
    LinesAhead() = default;
    LinesAhead(const Adapter& adapter, int64_t start, int64_t bytes) : next_(adapter.at(start, bytes)), left_(bytes) {
        if (next_ == nullptr) left_ = 0;
    }
    void ask(int32_t lines) {
        for (int32_t i = 0; i < lines && left_ > 0; ++i, next_ += kLineBytes, left_ -= kLineBytes)
            _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T1);
    }

private:
    const std::byte* next_ = nullptr;
    int64_t left_ = 0;
};

// Rows of an item, and the first of its strips of A.
struct Shrink {
    RowRange rows;
    int32_t strip, num_strips;

    explicit Shrink(const UpdateItem& item, int32_t num_ranges)
        : rows(*item.segment, item.index % num_ranges, kTileItemRows),
          strip(item.index / num_ranges * kTileStrips), num_strips(std::min(kTileStrips, item.part->rank() - strip)) {}
    explicit Shrink(const UpdateItem& item) : Shrink(item, num_row_items(*item.segment, kTileItemRows)) {}
};

// The lines of an item of A.
LinesAhead lines_of(const AdapterWork& work, const UpdateItem& item) {
    if (!item || !uses_tiles(work, *item.part)) return {};
    const Shrink shrink(item);
    const Strips& a = item.part->a;
    return {item.adapter(), a.place(shrink.strip, 0), shrink.num_strips * a.strip_bytes()};
}

// R rows, each a column beside the strips: a group of a row is sixteen pairs, just as tiles want them.
template <int R>
void shrink_few(const AdapterWork& work, const UpdateItem& item, const Shrink& shrink, LinesAhead ahead) {
    const Strips& a = item.part->a;
    const int32_t place = shrink.rows.first, num = shrink.num_strips;
    TileConfig config;
    for (int tile = 0; tile < R; ++tile) config.set(tile, num, 4);
    config.set(4, num, kLineBytes);
    for (int tile = 5; tile < 8; ++tile) config.set(tile, 16, 4);
    configure_tiles(config);
    unrolled<R>([&]<int r>() KVARTO_INLINE { zero_tile<r>(); });
    for (int32_t column = 0; column < a.num_columns; column += kSpan) {
        const int32_t count = std::min(kSpan, a.num_columns - column);
        const StripsAt at(item.adapter(), a, shrink.strip, num, column, count);
        for (int32_t group = 0; group < count / kGroup; ++group) {
            load_tile<4>(at.group(0, group), at.stride());
            ahead.ask(kTileStrips);
            unrolled<R>([&]<int r>() KVARTO_INLINE {
                constexpr int x = 5 + r % 3;
                load_tile<x>(work.x.bf16(work.rows.rows[place + r], column / kGroup + group), 4);
                multiply_tiles_bf16<r, 4, x>();
            });
        }
    }
    alignas(64) float t[R][16];
    unrolled<R>([&]<int r>() KVARTO_INLINE { store_tile<r>(t[r], 4); });
    for (int r = 0; r < R; ++r) std::copy_n(t[r], num, sums_of(work, *item.part, place + r) + shrink.strip);
}

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

void shrink_runs(const AdapterWork& work, const Adapter& adapter, const AdapterUpdate& update, const Shrink& shrink,
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

void configure_whole_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, kLineBytes);
    configure_tiles(config);
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
constexpr int32_t kStripsAtOnce = 8;

// Eight strips' columns of a span; zeros for those that there are not.
class StripColumns {
public:
    StripColumns() { std::fill_n(at, kStripsAtOnce, kZeros); }
    void find(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count) {
        for (int32_t s = 0; s < kStripsAtOnce; ++s)
            at[s] = first + s < strips.num_strips ? whole(adapter, strips, first + s, column, count, copies_[s]) : kZeros;
    }
    // Where they are as far as they lie on one page; what is not asked for is at zeros.
    void foresee(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count) {
        for (int32_t s = 0; s < kStripsAtOnce; ++s) {
            const bool is_there = first + s < strips.num_strips;
            const std::byte* found = is_there ? adapter.at(strips.place(first + s, column), 2 * count) : nullptr;
            at[s] = found != nullptr ? found : kZeros;
        }
    }
    const std::byte* at[kStripsAtOnce];

private:
    static const std::byte* whole(const Adapter& adapter, const Strips& strips, int32_t strip, int32_t column,
                                  int32_t count, std::byte* copy) {
        if (const std::byte* there = adapter.at(strips.place(strip, column), 2 * count)) return there;
        adapter.copy(strips.place(strip, column), 2 * count, copy);
        return copy;
    }
    alignas(64) static constexpr std::byte kZeros[2 * kSpan]{};
    alignas(64) std::byte copies_[kStripsAtOnce][2 * kSpan];
};

// even += t[r] · B[:, r] for even r of eight strips, odd likewise, over a span of columns of R rows.
template <int R>
void add_strips(const StripColumns& strips, const StripColumns& ahead, const float (*t)[kMaxTileRank], int32_t first,
                int32_t count, float (*even)[kSpan], float (*odd)[kSpan]) {
    const bool is_first = first % kGroup == 0;
    for (int32_t i = 0; i < count; i += kWide) {
        __m512 sums[R][2];
        for (int r = 0; r < R; ++r) {
            sums[r][0] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(even[r] + i);
            sums[r][1] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(odd[r] + i);
        }
        unrolled<kStripsAtOnce>([&]<int s>() KVARTO_INLINE {
            if ((i / kWide + s) % 2 == 0)  // a line of each strip in two turns
                _mm_prefetch(reinterpret_cast<const char*>(ahead.at[s] + 2 * i), _MM_HINT_T1);
            const F32x16 column = F32x16::load_bf16(reinterpret_cast<const uint16_t*>(strips.at[s]) + i);
            for (int r = 0; r < R; ++r)
                sums[r][s % 2] = _mm512_fmadd_ps(_mm512_set1_ps(t[r][first + s]), column.v, sums[r][s % 2]);
        });
        for (int r = 0; r < R; ++r) {
            _mm512_store_ps(even[r] + i, sums[r][0]);
            _mm512_store_ps(odd[r] + i, sums[r][1]);
        }
    }
}

// What tile products give, by vectors: columns are lanes.
template <int R>
void expand_few(const AdapterWork& work, const Adapter& adapter, const AdapterSpan& span, int32_t place,
                const StripColumns& first_of_next) {
    const Strips& b = span.update.b;
    const int32_t rank = span.update.rank();
    alignas(64) float acc[R][kSpan], even[R][kSpan], odd[R][kSpan], t[R][kMaxTileRank];
    for (int r = 0; r < R; ++r) {
        alignas(64) std::byte rounded[2 * kMaxTileRank];
        round_sums(sums_of(work, span.update, place + r), rank, rounded, kLineBytes);
        for (int32_t i = 0; i < rank; i += kWide)
            F32x16::load_bf16(reinterpret_cast<const uint16_t*>(rounded) + i).store(t[r] + i);
    }
    {
        const FlushDenormals flush;
        StripColumns strips, ahead;
        for (int32_t first = 0; first < rank; first += kGroup) {
            const int32_t last = std::min(rank, first + kGroup);
            for (int32_t strip = first; strip < last; strip += kStripsAtOnce) {
                strips.find(adapter, b, strip, span.column, span.count);
                const int32_t next = strip + kStripsAtOnce;
                if (next < rank) ahead.foresee(adapter, b, next, span.column, span.count);
                add_strips<R>(strips, next < rank ? ahead : first_of_next, t, strip, span.count, even, odd);
            }
            for (int r = 0; r < R; ++r)
                for (int32_t i = 0; i < span.count; i += kWide) {
                    const F32x16 sum = first == 0 ? F32x16::zero() : F32x16::load(acc[r] + i);
                    (sum + (F32x16::load(even[r] + i) + F32x16::load(odd[r] + i))).store(acc[r] + i);
                }
        }
    }
    for (int r = 0; r < R; ++r) span.join(work, work.rows.rows[place + r], 0, span.count, acc[r]);
}

constexpr int32_t kBlockColumns = 128;
constexpr int32_t kBlockTiles = kBlockColumns / 16;

// Columns of B by pairs of ranks: [groups][tiles of sixteen columns].
using ColumnTiles = Tile[kMaxGroups][kBlockTiles];

void pair_up(const Adapter& adapter, const Strips& b, int32_t column, int32_t count, ColumnTiles& out) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int32_t num_ranks = static_cast<int32_t>(align_up(b.num_strips, kGroup));
    StripColumns strips;
    for (int32_t first = 0; first < num_ranks; first += kStripsAtOnce) {
        strips.find(adapter, b, first, column, count);
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

// Calls f.template operator()<R>() for few rows.
template <class F> void with_count(RowRange few, F f) {
    switch (few.last - few.first) {
        case 1: return f.template operator()<1>();
        case 2: return f.template operator()<2>();
        case 3: return f.template operator()<3>();
        default: return f.template operator()<kFewRows>();
    }
}

bool are_few(RowRange range) { return range.last - range.first <= kFewRows; }

// Where an item of B begins.
void foresee(const AdapterWork& work, const UpdateItem& item, StripColumns& out) {
    if (!item || !uses_tiles(work, *item.part)) return;
    const int32_t column = item.index / num_row_items(*item.segment, kTileItemRows) * span_columns(*item.part);
    const int32_t count = std::min(span_columns(*item.part), item.part->b.num_columns - column);
    out.foresee(item.adapter(), item.part->b, 0, column, count);
}

}  // namespace

void shrink_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    const Shrink shrink(item);
    if (are_few(shrink.rows)) {
        with_count(shrink.rows, [&]<int R>() { shrink_few<R>(work, item, shrink, lines_of(work, next)); });
    } else {
        configure_whole_tiles();
        for (int32_t first = shrink.rows.first; first < shrink.rows.last;) {
            TileRun runs[kMaxRuns];
            const int32_t num_runs = find_runs(work, first, shrink.rows.last, runs);
            shrink_runs(work, item.adapter(), *item.part, shrink, runs, num_runs);
            first = runs[num_runs - 1].last;
        }
    }
    release_tiles();
}

void expand_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    const int32_t num_ranges = num_row_items(*item.segment, kTileItemRows);
    const RowRange rows(*item.segment, item.index % num_ranges, kTileItemRows);
    const AdapterSpan span(item.adapter(), *item.part, item.index / num_ranges);
    if (are_few(rows)) {
        StripColumns ahead;
        foresee(work, next, ahead);
        return with_count(rows, [&]<int R>() { expand_few<R>(work, item.adapter(), span, rows.first, ahead); });
    }
    configure_whole_tiles();
    expand_many(work, item.adapter(), span, rows);
    release_tiles();
}

}  // namespace kvarto::KVARTO_ISA

#endif
