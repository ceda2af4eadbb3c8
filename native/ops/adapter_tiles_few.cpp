// Bounds. One to four rows per adapter: its bytes. Lines are asked for some columns before their turn, in the order in
// which they are used, from one item into the next: so near that the first-level cache keeps them, and memory is asked for
// as much as it can give for as long as there is an item. So what is done once per item counts: what tiles look like is set
// where it changes, a strip's columns are widened in pairs (a shift and a mask for 32 of them), and lines that sums go
// to, which another core wrote, are asked for at the beginning.
#include "ops/adapter_tiles_few.h"

#if defined(__AMX_BF16__)

#include "ops/adapter_span.h"
#include "ops/adapter_tile_parts.h"
#include "ops/flush_denormals.h"
#include "ops/prefetch.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kGroupsAhead = 8;    // of a block of A
constexpr int32_t kColumnsAhead = 384;  // of a block of B

// Strips of A that an item of few rows is.
StripLines lines_of(const AdapterWork& work, const UpdateItem& item) {
    if (!item || !uses_tiles(work, *item.part)) return {};
    const ShrinkItem strips(item);
    const Strips& a = item.part->a;
    return {item.adapter(), a, strips.strip, strips.num_strips, 0, a.num_columns};
}

// R rows, each a column beside the strips: a group of a row is sixteen pairs, just as tiles want them.
template <int R>
void multiply_block(const AdapterWork& work, const UpdateItem& item, const ShrinkItem& strips, const StripLines& next) {
    const Strips& a = item.part->a;
    const StripLines own = lines_of(work, item);
    const int32_t place = strips.rows.first, num_groups = a.num_columns / kGroup;
    const bool is_decoded = has_codes(a.type);  // a span at a time
    unrolled<R>([&]<int r>() KVARTO_INLINE { zero_tile<r>(); });
    for (int32_t first = 0, count; first < num_groups; first += count) {
        count = own.num != 0 && !is_decoded ? num_groups : std::min(num_groups - first, kSpan / kGroup);
        const auto ask = [&](int32_t group) KVARTO_INLINE {
            const auto ask_for = [](const std::byte* line) { prefetch_to_first_level(line); };
            const int32_t ahead = first + group + kGroupsAhead;
            if (ahead < num_groups) own.each(ahead * kGroup, ask_for);
            else next.each((ahead - num_groups) * kGroup, ask_for);
        };
        const StripsAt at(item.adapter(), a, strips.strip, strips.num_strips, first * kGroup, count * kGroup, ask);
        for (int32_t group = 0; group < count; ++group) {
            load_tile<4>(at.group(0, group), at.stride());
            if (!is_decoded) ask(group);
            unrolled<R>([&]<int r>() KVARTO_INLINE {
                constexpr int x = 5 + r % 3;
                load_tile<x>(work.x.bf16(work.rows.rows[place + r], first + group), 4);
                multiply_tiles_bf16<r, 4, x>();
            });
        }
    }
    unrolled<R>([&]<int r>() KVARTO_INLINE { store_tile<r>(sums_of(work, *item.part, place + r) + strips.strip, 4); });
}

// Columns of a chunk as they are widened: of each 32 the even ones, then the odd ones.
template <int32_t kColumns> struct ChunkSums {
    // Not at a whole number of pages from each other, where a load would wait for a store.
    alignas(64) float even[kColumns + 16], odd[kColumns + 16], all[kColumns + 16];
};

template <int R> constexpr int32_t kChunk = R == 1 ? kWideSpan : R == 2 ? kWideSpan / 2 : kSpan;

// even += t[r] · B[:, r] for even r of eight strips, odd likewise, over a chunk of R rows.
template <int R>
void add_strips(const StripPlaces& strips, const StripPlaces& next, const float (*t)[kMaxTileRank], int32_t first,
                int32_t count, ChunkSums<kChunk<R>> (&sums)[R]) {
    const bool is_first = first % kGroup == 0;
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    const int32_t num_ahead = strips.are_decoded ? count : kColumnsAhead;  // what was decoded was there before
    for (int32_t i = 0; i < count; i += 2 * kWide) {
        const int32_t ahead = i + num_ahead;
        const StripPlaces& places = ahead < count ? strips : next;
        const std::byte* const* asked = places.at;
        const int64_t offset = (ahead < count ? ahead : ahead - count) / kGroup * places.group_bytes;
        __m512 sum[R][2][2];  // [row][strips][columns]
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half) {
                sum[r][0][half] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums[r].even + i + half * kWide);
                sum[r][1][half] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums[r].odd + i + half * kWide);
            }
        unrolled<kStripsAtOnce>([&]<int s>() KVARTO_INLINE {
            __builtin_prefetch(asked[s] + offset);
            const __m512i pairs = _mm512_loadu_si512(strips.at[s] + 2 * i);
            const __m512 columns[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                                       _mm512_castsi512_ps(_mm512_and_si512(pairs, high_half))};
            for (int r = 0; r < R; ++r)
                for (int half = 0; half < 2; ++half)
                    sum[r][s % 2][half] =
                        _mm512_fmadd_ps(_mm512_set1_ps(t[r][first + s]), columns[half], sum[r][s % 2][half]);
        });
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half) {
                _mm512_store_ps(sums[r].even + i + half * kWide, sum[r][0][half]);
                _mm512_store_ps(sums[r].odd + i + half * kWide, sum[r][1][half]);
            }
    }
}

// all += even + odd, of a group of ranks.
template <int32_t kColumns> void add_group(ChunkSums<kColumns>& sums, int32_t count, bool is_first) {
    for (int32_t i = 0; i < count; i += kWide) {
        const F32x16 before = is_first ? F32x16::zero() : F32x16::load(sums.all + i);
        (before + (F32x16::load(sums.even + i) + F32x16::load(sums.odd + i))).store(sums.all + i);
    }
}

// Columns in their order.
template <int32_t kColumns> const float* in_order(ChunkSums<kColumns>& sums, int32_t count) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int32_t i = 0; i < count; i += 2 * kWide) {
        const __m512 even = _mm512_load_ps(sums.all + i), odd = _mm512_load_ps(sums.all + i + kWide);
        _mm512_store_ps(sums.all + i, _mm512_permutex2var_ps(even, low, odd));
        _mm512_store_ps(sums.all + i + kWide, _mm512_permutex2var_ps(even, high, odd));
    }
    return sums.all;
}

// t of a row, rounded as tiles want it; zeros follow.
void round_row(const float* sums, int32_t rank, float* out) {
    for (int32_t first = 0; first < rank; first += kWide) {
        const auto there = static_cast<__mmask16>((1U << std::min(rank - first, kWide)) - 1);
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, sums + first));
        const __m512i wide = _mm512_cvtepu16_epi32(reinterpret_cast<const __m256i&>(rounded));
        _mm512_store_si512(out + first, _mm512_slli_epi32(wide, 16));
    }
}

void ask_for_rows(const AdapterWork& work, const AdapterSpan& span, RowRange rows) {
    for (int32_t place = rows.first; place < rows.last; ++place) {
        const float* y = work.out.f32(work.rows.rows[place]) + span.update.first_row + span.column;
        for (int32_t i = 0; i < span.count; i += kWide) prefetch_to_write(y + i);
    }
}

// Where an item of B begins.
StripPlaces first_of(const AdapterWork& work, const UpdateItem& item) {
    if (!item || !uses_tiles(work, *item.part)) return {};
    const ExpandItem part(work, item);
    return {item.adapter(), item.part->b, 0, part.column, part.num_columns};
}

// What tile products give, by vectors: columns are lanes.
template <int R>
void expand(const AdapterWork& work, const UpdateItem& item, const ExpandItem& part, const StripPlaces& first_of_next) {
    const AdapterSpan span(item.adapter(), *item.part, part.column, part.num_columns);
    const Strips& b = item.part->b;
    const int32_t rank = item.part->rank(), place = part.rows.first;
    ask_for_rows(work, span, part.rows);
    alignas(64) float t[R][kMaxTileRank];
    for (int r = 0; r < R; ++r) round_row(sums_of(work, *item.part, place + r), rank, t[r]);
    ChunkSums<kChunk<R>> sums[R];
    StripCopies<kChunk<R>> copies;
    const int32_t most = has_codes(b.type) ? std::min(kChunk<R>, kSpan) : kChunk<R>;
    for (int32_t from = 0, count; from < span.count; from += count) {
        count = std::min(most, span.count - from);
        const auto places = [&](int32_t strip) {
            if (strip < rank) return StripPlaces(item.adapter(), b, strip, span.column + from, count);
            const int32_t after = from + count;
            if (after == span.count) return first_of_next;
            return StripPlaces(item.adapter(), b, 0, span.column + after, std::min(most, span.count - after));
        };
        StripPlaces here = places(0), next;
        {
            const FlushDenormals flush;
            for (int32_t strip = 0, after; strip < rank; strip = after, here = next) {
                after = strip + kStripsAtOnce;
                next = places(after);
                copies.find(item.adapter(), b, strip, span.column + from, count, here);
                add_strips<R>(here, next, t, strip, count, sums);
                if (after % kGroup == 0 || after >= rank)
                    for (int r = 0; r < R; ++r) add_group(sums[r], count, strip < kGroup);
            }
        }
        for (int r = 0; r < R; ++r) span.join(work, work.rows.rows[place + r], from, count, in_order(sums[r], count));
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

}  // namespace

void shrink_few(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next, TileShapes& shapes) {
    const ShrinkItem strips(item);
    shapes.set_few(strips.num_strips);
    const StripLines after = lines_of(work, next);
    with_count(strips.rows, [&]<int R>() { multiply_block<R>(work, item, strips, after); });
}

void expand_few(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    const ExpandItem part(work, item);
    const StripPlaces after = first_of(work, next);
    with_count(part.rows, [&]<int R>() { expand<R>(work, item, part, after); });
}

}  // namespace kvarto::KVARTO_ISA

#endif
