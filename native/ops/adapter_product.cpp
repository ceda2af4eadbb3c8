// Bounds. One row per adapter: the bytes of its A and B, each read once; items are a few strips, so that threads end
// together. Many rows: multiply-adds, sixteen per load of four strips with four rows.
#include "ops/adapter_product.h"

#include <algorithm>

#include "ops/adapter_dot.h"
#include "ops/adapter_items.h"
#include "ops/adapter_span.h"
#include "ops/adapter_tiles.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kBlocksAhead = 2;  // of strips of B

// One column of a strip; of codes, one of the columns of its block.
float value_at(const Adapter& adapter, const Strips& strips, int32_t strip, int32_t column) {
    const int32_t inside = column % block_columns(strips.type);
    alignas(64) float copy[kWide] = {};
    auto* bytes = reinterpret_cast<std::byte*>(copy);
    adapter.copy(strips.place(strip, column - inside), block_bytes(strips.type), bytes);
    float values[kCodeColumns];
    if (has_codes(strips.type)) decode(strips.type, bytes, kCodeColumns, values);
    else load_strip(strips.type, bytes, 0).store(values);
    return values[inside];
}
static_assert(block_bytes(StripType::kQ8) <= kWide * int32_t{sizeof(float)}, "a block fits into a copy");

// Where a row's sums of an update begin.
float* sums_of(const AdapterWork& work, const AdapterUpdate& update, int32_t place) {
    return work.sums.f32(place) + update.first_rank;
}

void shrink_rows(const AdapterWork& work, const Adapter& adapter, const AdapterUpdate& update, RowRange range,
                 int32_t strip) {
    const int32_t num_strips = std::min(kStripBlock, update.rank() - strip);
    Dots dots;
    for (int32_t place = range.first; place < range.last; place += kBlockRows) {
        const RowBlock rows(work.rows.rows + place, range.last - place);
        dot_strips(adapter, update.a, strip, num_strips, work.x, rows, dots);
        for (int32_t r = 0; r < rows.num; ++r)
            std::copy_n(dots[r], num_strips, sums_of(work, update, place + r) + strip);
    }
}

// Of an embedding: the columns of A of the rows' tokens.
void gather_rows(const AdapterWork& work, const Adapter& adapter, const AdapterUpdate& update, RowRange range,
                 int32_t strip) {
    const int32_t last = std::min(strip + kStripBlock, update.rank());
    for (int32_t place = range.first; place < range.last; ++place) {
        const int32_t token = work.token_ids[work.rows.rows[place]];
        for (int32_t s = strip; s < last; ++s) sums_of(work, update, place)[s] = value_at(adapter, update.a, s, token);
    }
}

// Products with some strips, four at most, of a span of columns: acc [rows][kSpan] of a block.
template <StripType type, int R>
void expand_span(const StripSpans& strips, const Dots& t, int32_t count, bool is_first, float (*acc)[kSpan]) {
    F32x16 factors[R][kStripBlock];
    for (int32_t r = 0; r < R; ++r)
        for (int32_t s = 0; s < kStripBlock; ++s) factors[r][s] = F32x16::set1(t[r][s]);
    const std::byte *a = strips[0], *b = strips[1], *c = strips[2], *d = strips[3];
    for (int32_t i = 0; i < count; i += kWide) {
        const F32x16 w[kStripBlock] = {load_strip<type>(a, i), load_strip<type>(b, i), load_strip<type>(c, i),
                                       load_strip<type>(d, i)};
        for (int32_t r = 0; r < R; ++r) {
            F32x16 y = is_first ? F32x16::zero() : F32x16::load(acc[r] + i);
            for (int32_t s = 0; s < kStripBlock; ++s) y = fma(factors[r][s], w[s], y);
            y.store(acc[r] + i);
        }
    }
}

using ExpandSpan = void (*)(const StripSpans&, const Dots&, int32_t, bool, float (*)[kSpan]);

ExpandSpan expand_of(StripType type, bool is_one) {
    switch (type) {
        case StripType::kF32: return is_one ? expand_span<StripType::kF32, 1> : expand_span<StripType::kF32, kBlockRows>;
        case StripType::kF16: return is_one ? expand_span<StripType::kF16, 1> : expand_span<StripType::kF16, kBlockRows>;
        case StripType::kBF16:
            return is_one ? expand_span<StripType::kBF16, 1> : expand_span<StripType::kBF16, kBlockRows>;
        case StripType::kQ8:
        case StripType::kQ4: break;  // no type of spans
    }
    __builtin_unreachable();
}

// Strips that come next are asked for while the present ones are multiplied: runs of them are short, and the machine's own
// prefetching does not foresee them. Into the second-level cache, whose lines on their way are more than the first's.
void ask_for(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count) {
    const int32_t last = std::min(first + kStripBlock, strips.num_strips);
    for (int32_t strip = first; strip < last; ++strip)
        if (const std::byte* span = adapter.at(strips.place(strip, column), strips.bytes(count)))
            for (int64_t byte = 0; byte < strips.bytes(count); byte += 64) __builtin_prefetch(span + byte, 0, 2);
}

void expand_rows(const AdapterWork& work, const Adapter& adapter, const AdapterSpan& span, int32_t place, int32_t count) {
    const AdapterUpdate& update = span.update;
    const RowBlock rows(work.rows.rows + place, count);
    alignas(64) float acc[kBlockRows][kSpan];
    Dots factors = {};
    StripSpans strips;
    const ExpandSpan expand = expand_of(span_type(update.b.type), rows.size() == 1);
    for (int32_t first = 0; first < update.rank(); first += kStripBlock) {
        const int32_t num = std::min(kStripBlock, update.rank() - first);
        ask_for(adapter, update.b, first + kBlocksAhead * kStripBlock, span.column, span.count);
        strips.find(adapter, update.b, first, num, span.column, span.count);
        for (int32_t r = 0; r < rows.num; ++r) {
            const float* sums = sums_of(work, update, place + r) + first;
            for (int32_t s = 0; s < kStripBlock; ++s) factors[r][s] = s < num ? sums[s] : 0.0F;
        }
        expand(strips, factors, span.count, first == 0, acc);
    }
    for (int32_t r = 0; r < rows.num; ++r) span.join(work, rows[r], 0, span.count, acc[r]);
}

// An item of A, by vectors.
void shrink_by_vectors(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    if (next && work.token_ids == nullptr) {
        const int32_t strip = next.index / num_row_items(*next.segment, kItemRows) * kStripBlock;
        ask_for(next.adapter(), next.part->a, strip, 0, next.part->a.num_columns);
    }
    const int32_t num_ranges = num_row_items(*item.segment, kItemRows);
    const RowRange range(*item.segment, item.index % num_ranges, kItemRows);
    const auto shrink = work.token_ids != nullptr ? gather_rows : shrink_rows;
    shrink(work, item.adapter(), *item.part, range, item.index / num_ranges * kStripBlock);
}

// The columns of B that an item is.
RowRange columns_of(const UpdateItem& item) {
    const int32_t columns = span_columns(*item.part, kSpan);
    const int32_t first = item.index / num_row_items(*item.segment, kItemRows) * columns;
    return {first, std::min(first + columns, item.part->b.num_columns)};
}

// An item of B, by vectors.
void expand_by_vectors(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    if (next) {
        const RowRange columns = columns_of(next);
        for (int32_t block = 0; block < kBlocksAhead; ++block)
            ask_for(next.adapter(), next.part->b, block * kStripBlock, columns.first, columns.last - columns.first);
    }
    const RowRange range(*item.segment, item.index % num_row_items(*item.segment, kItemRows), kItemRows);
    const RowRange columns = columns_of(item);
    const AdapterSpan span(item.adapter(), *item.part, columns.first, columns.last - columns.first);
    for (int32_t place = range.first; place < range.last; place += kBlockRows)
        expand_rows(work, item.adapter(), span, place, range.last - place);
}

// How an update is cut into items.
struct Cut {
    int32_t rows;
    int32_t strips;   // of A
    int32_t columns;  // of B, at most
};

Cut cut_of([[maybe_unused]] const AdapterWork& work, [[maybe_unused]] const AdapterUpdate& update) {
#if defined(__AMX_BF16__)
    if (uses_tiles(work, update)) return {kTileItemRows, kTileStrips, widest_span(work)};
#endif
    return {kItemRows, kStripBlock, kSpan};
}

}  // namespace

void adapter_shrink(const AdapterWork& work, Worker& worker) {
#if defined(__AMX_BF16__)
    TileShapes shapes;
#endif
    each_item<AdapterUpdate>(
        work.rows, [&] { return worker.take_side(); },
        [&](const Adapter& adapter) { return adapter.updates_of(work.op); },
        [&](const AdapterSegment& segment, const AdapterUpdate& update) {
            const Cut cut = cut_of(work, update);
            return int64_t{num_row_items(segment, cut.rows)} * ceil_div(update.rank(), cut.strips);
        },
        [&](const UpdateItem& item, const UpdateItem& next) {
#if defined(__AMX_BF16__)
            if (uses_tiles(work, *item.part)) return shrink_by_tiles(work, item, next, shapes);
#endif
            shrink_by_vectors(work, item, next);
        });
}

void adapter_expand(const AdapterWork& work, Worker& worker) {
#if defined(__AMX_BF16__)
    TileShapes shapes;
#endif
    each_item<AdapterUpdate>(
        work.rows, [&] { return worker.take(); },
        [&](const Adapter& adapter) { return adapter.updates_of(work.op); },
        [&](const AdapterSegment& segment, const AdapterUpdate& update) {
            const Cut cut = cut_of(work, update);
            return int64_t{num_row_items(segment, cut.rows)} * num_spans(update, cut.columns);
        },
        [&](const UpdateItem& item, const UpdateItem& next) {
#if defined(__AMX_BF16__)
            if (uses_tiles(work, *item.part)) return expand_by_tiles(work, item, next, shapes);
#endif
            expand_by_vectors(work, item, next);
        });
}

}  // namespace kvarto::KVARTO_ISA
