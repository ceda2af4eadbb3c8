// Bounds. One row per adapter: the bytes of its A and B, each read once. A thread reads them as fast as memory gives them
// where lines are asked for all along, from one item into the next, and where an item is long beside what is done once for
// it. Many rows: multiply-adds, sixteen per load of four strips with four rows.
#include "ops/adapter_product.h"

#include <algorithm>

#include "ops/adapter_dot.h"
#include "ops/adapter_items.h"
#include "ops/adapter_span.h"
#include "ops/adapter_tiles.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

// Strips of A that an item is: where there are enough adapters for all threads, several blocks, for what is done once
// per item takes as long as to read a block.
int32_t item_strips(const AdapterWork& work) { return work.rows.segments.size() < 8 ? kStripBlock : 4 * kStripBlock; }

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

// Strips of A of an item.
RowRange strips_of(const AdapterWork& work, const UpdateItem& item) {
    const int32_t num = item_strips(work);
    const int32_t first = item.index / num_row_items(*item.segment, kItemRows) * num;
    return {first, std::min(first + num, item.part->rank())};
}

// A block of A that begins with a strip; none beyond the last of an item.
StripLines block_of_a(const AdapterWork& work, const UpdateItem& item, int32_t strip) {
    const Strips& a = item.part->a;
    const int32_t num = std::min(kStripBlock, strips_of(work, item).last - strip);
    return num > 0 ? StripLines(item.adapter(), a, strip, num, 0, a.num_columns) : StripLines();
}

void shrink_rows(const AdapterWork& work, const UpdateItem& item, RowRange range, RowRange strips,
                 const StripLines& next) {
    const AdapterUpdate& update = *item.part;
    for (int32_t strip = strips.first; strip < strips.last; strip += kStripBlock) {
        const int32_t num_strips = std::min(kStripBlock, strips.last - strip);
        const StripLines following = block_of_a(work, item, strip + kStripBlock);
        Dots dots;
        for (int32_t place = range.first; place < range.last; place += kBlockRows) {
            const RowBlock rows(work.rows.rows + place, range.last - place);
            dot_strips(item.adapter(), update.a, strip, num_strips, work.x, rows, following.num != 0 ? following : next,
                       dots);
            for (int32_t r = 0; r < rows.num; ++r)
                std::copy_n(dots[r], num_strips, sums_of(work, update, place + r) + strip);
        }
    }
}

// Of an embedding: the columns of A of the rows' tokens.
void gather_rows(const AdapterWork& work, const UpdateItem& item, RowRange range, RowRange strips) {
    const AdapterUpdate& update = *item.part;
    for (int32_t place = range.first; place < range.last; ++place) {
        const int32_t token = work.token_ids[work.rows.rows[place]];
        for (int32_t s = strips.first; s < strips.last; ++s)
            sums_of(work, update, place)[s] = value_at(item.adapter(), update.a, s, token);
    }
}

// Columns that are summed at a time: as many in all, whether one row takes them or four.
template <int R> constexpr int32_t kColumns = R == 1 ? kWideSpan : kSpan;

// Products with a block of strips, of the columns [column, column + count) of an item: acc [rows][kColumns].
template <StripType type, int R>
void expand_span(const StripSpans& spans, int32_t num_strips, const Dots& t, int32_t column, int32_t count,
                 const LinesAhead& ahead, bool is_first, float* acc) {
    constexpr int32_t kStrips = R == 1 ? kStripBlock : kBlockRows;
    for (int32_t first = 0; first < num_strips; first += kStrips) {
        F32x16 factors[R][kStrips];
        const std::byte* at[kStrips];
        for (int32_t s = 0; s < kStrips; ++s) at[s] = spans[first + s];
        for (int32_t r = 0; r < R; ++r)
            for (int32_t s = 0; s < kStrips; ++s) factors[r][s] = F32x16::set1(t[r][first + s]);
        for (int32_t i = 0; i < count; i += kWide) {
            if (first == 0 && i % line_columns(type) == 0) ahead.ask(column + i);
            F32x16 w[kStrips];
            for (int32_t s = 0; s < kStrips; ++s) w[s] = load_strip<type>(at[s], i);
            for (int32_t r = 0; r < R; ++r) {
                float* there = acc + r * kColumns<R> + i;
                F32x16 y = is_first && first == 0 ? F32x16::zero() : F32x16::load(there);
                for (int32_t s = 0; s < kStrips; ++s) y = fma(factors[r][s], w[s], y);
                y.store(there);
            }
        }
    }
}

using ExpandSpan = void (*)(const StripSpans&, int32_t, const Dots&, int32_t, int32_t, const LinesAhead&, bool, float*);

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

// A block of B that begins with a strip, over the columns of an item; none beyond the last strip.
StripLines block_of_b(const UpdateItem& item, RowRange columns, int32_t strip) {
    const Strips& b = item.part->b;
    const int32_t num = std::min(kStripBlock, b.num_strips - strip);
    return num > 0 ? StripLines(item.adapter(), b, strip, num, columns.first, columns.last - columns.first) : StripLines();
}

// Columns [from, from + count) of a span, for a block of rows.
void expand_rows(const AdapterWork& work, const UpdateItem& item, const AdapterSpan& span, const RowBlock& rows,
                 int32_t place, int32_t from, int32_t count, const StripLines& next) {
    const AdapterUpdate& update = span.update;
    const bool is_one = rows.size() == 1;
    const int32_t column = span.column + from;
    alignas(64) float acc[kWideSpan];
    Dots factors = {};
    StripSpans spans;
    const ExpandSpan expand = expand_of(span_type(update.b.type), is_one);
    StripLines own = block_of_b(item, {column, column + count}, 0), following;
    for (int32_t first = 0; first < update.rank(); first += kStripBlock, own = following) {
        const int32_t num = std::min(kStripBlock, update.rank() - first);
        following = block_of_b(item, {column, column + count}, first + kStripBlock);
        const LinesAhead ahead(own, following.num != 0 ? following : next, count);
        for (int32_t r = 0; r < rows.num; ++r) {
            const float* sums = sums_of(work, update, place + r) + first;
            for (int32_t s = 0; s < kStripBlock; ++s) factors[r][s] = s < num ? sums[s] : 0.0F;
        }
        const bool is_there = own.hold_vectors(update.b.type, count);
        const int32_t widest = is_there ? count : kSpan;
        for (int32_t at = 0; at < count; at += widest) {
            const int32_t some = std::min(widest, count - at);
            if (is_there) spans.find(own, 0);
            else spans.find(item.adapter(), update.b, first, num, column + at, some);
            expand(spans, num, factors, at, some, ahead, first == 0, acc + at);
        }
    }
    const int32_t stride = is_one ? kColumns<1> : kColumns<kBlockRows>;
    for (int32_t r = 0; r < rows.num; ++r) span.join(work, rows[r], from, count, acc + r * stride);
}

// An item of A, by vectors.
void shrink_by_vectors(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    const RowRange range(*item.segment, item.index % num_row_items(*item.segment, kItemRows), kItemRows);
    const RowRange strips = strips_of(work, item);
    if (work.token_ids != nullptr) return gather_rows(work, item, range, strips);
    shrink_rows(work, item, range, strips, next ? block_of_a(work, next, strips_of(work, next).first) : StripLines());
}

// The columns of B that an item is.
RowRange columns_of(const AdapterWork& work, const UpdateItem& item) {
    const int32_t columns = span_columns(*item.part, widest_span(work));
    const int32_t first = item.index / num_row_items(*item.segment, kItemRows) * columns;
    return {first, std::min(first + columns, item.part->b.num_columns)};
}

// An item of B, by vectors.
void expand_by_vectors(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    const RowRange range(*item.segment, item.index % num_row_items(*item.segment, kItemRows), kItemRows);
    const RowRange columns = columns_of(work, item);
    const AdapterSpan span(item.adapter(), *item.part, columns.first, columns.last - columns.first);
    const StripLines after = next ? block_of_b(next, columns_of(work, next), 0) : StripLines();
    for (int32_t place = range.first; place < range.last; place += kBlockRows) {
        const RowBlock rows(work.rows.rows + place, range.last - place);
        const int32_t widest = rows.size() == 1 ? kColumns<1> : kColumns<kBlockRows>;
        for (int32_t from = 0; from < span.count; from += widest)
            expand_rows(work, item, span, rows, place, from, std::min(widest, span.count - from), after);
    }
}

// How an update is cut into items.
struct Cut {
    int32_t rows;
    int32_t strips;   // of A
    int32_t columns;  // of B, at most
};

Cut cut_of(const AdapterWork& work, [[maybe_unused]] const AdapterUpdate& update) {
#if defined(__AMX_BF16__)
    if (uses_tiles(work, update)) return {kTileItemRows, kTileStrips, widest_span(work)};
#endif
    return {kItemRows, item_strips(work), widest_span(work)};
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
