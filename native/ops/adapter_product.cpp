// Bounds. One row per adapter: the bytes of its A and B, each read once. A thread reads them as fast as memory gives them
// where lines are asked for all along, from one item into the next, and where an item is long beside what is done once for
// it. Many rows: multiply-adds, sixteen per load of four strips with four rows, or pairs of them; rows are made into what is
// multiplied once for all updates of an op, and B once for all rows of an item.
#include "ops/adapter_product.h"

#include <algorithm>
#include <optional>

#include "ops/adapter_dot.h"
#include "ops/adapter_items.h"
#include "ops/adapter_many_rows.h"
#include "ops/adapter_numbers.h"
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

// Strips of A of an item.
RowRange strips_of(const AdapterWork& work, const UpdateItem& item) {
    const int32_t num = item_strips(work);
    const int32_t first = item.index / num_row_items(*item.segment, kItemRows) * num;
    return {first, std::min(first + num, item.part->rank())};
}

// A block of A that begins with a strip; none beyond `end`.
StripLines block_of_a(const UpdateItem& item, int32_t strip, int32_t end) {
    const Strips& a = item.part->a;
    const int32_t num = std::min(kStripBlock, end - strip);
    return num > 0 ? StripLines(item.adapter(), a, strip, num, 0, a.num_columns) : StripLines();
}

// What is asked for while a block of rows is multiplied: its own strips, and those of the next item.
struct Asks {
    bool own = false;
    StripLines next = {};
};

// Strips of A by a block of rows, which begins at a place in the list of rows.
void shrink_block(const AdapterWork& work, const UpdateItem& item, FactorRows& x, int32_t place, RowRange strips,
                  const Asks& asks) {
    const AdapterUpdate& update = *item.part;
    StripLines own = block_of_a(item, strips.first, strips.last), following;
    for (int32_t strip = strips.first; strip < strips.last; strip += kStripBlock, own = following) {
        const int32_t num_strips = std::min(kStripBlock, strips.last - strip);
        following = block_of_a(item, strip + kStripBlock, strips.last);
        const StripLines& asked = following.num == 0 ? asks.next : asks.own ? following : StripLines();
        Dots dots;
        dot_strips(item.adapter(), update.a, strip, num_strips, x, own,
                   asks.own || asked.num != 0 ? LinesAhead(own, asked, update.a.num_columns) : LinesAhead(), dots);
        for (int32_t r = 0; r < x.rows().num; ++r)
            std::copy_n(dots[r], num_strips, sums_of(work, update, place + r) + strip);
    }
}

// By blocks of rows, each with all strips. The first block asks for them, and the last for the next item.
void shrink_rows(const AdapterWork& work, const UpdateItem& item, RowRange range, RowRange strips,
                 const StripLines& next) {
    for (int32_t place = range.first; place < range.last; place += kBlockRows) {
        const RowBlock rows(work.rows.rows + place, range.last - place);
        FactorRows x(work.x, rows, uses_pairs(work, *item.part));
        const bool is_last = place + kBlockRows >= range.last;
        shrink_block(work, item, x, place, strips, {place == range.first, is_last ? next : StripLines()});
    }
}

// Whether an item of A is so many rows by all updates of the op, which then share what rows are made into.
bool takes_all_updates(const AdapterWork& work, const AdapterSegment& segment) {
    if (work.token_ids != nullptr || segment.count <= kItemRows) return false;
#if defined(__AMX_BF16__)
    return std::ranges::none_of(segment.adapter->updates_of(work.op),
                                [&](const AdapterUpdate& update) { return uses_tiles(work, update); });
#else
    return true;
#endif
}

void shrink_all_updates(const AdapterWork& work, const UpdateItem& item) {
    const RowRange range(*item.segment, item.index, kItemRows);
    for (int32_t place = range.first; place < range.last; place += kBlockRows) {
        const RowBlock rows(work.rows.rows + place, range.last - place);
        std::optional<FactorRows> x;
        for (const AdapterUpdate& update : item.adapter().updates_of(work.op)) {
            const bool in_pairs = uses_pairs(work, update);
            if (!x || x->are_pairs() != in_pairs) x.emplace(work.x, rows, in_pairs);
            shrink_block(work, {item.segment, &update, 0}, *x, place, {0, update.rank()}, {place == range.first, {}});
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

using Factors = float[kBlockRows][kStripBlock];  // as `Numbers::pack` leaves them

// Products with a block of strips, of the columns [column, column + count) of an item: acc [rows][kColumns].
template <class Numbers, int R>
void expand_span(const StripSpans& spans, int32_t num_strips, const Factors& t, int32_t column, int32_t count,
                 int32_t line_columns, const LinesAhead& ahead, bool is_first, float* acc) {
    constexpr int32_t kStrips = R == 1 ? kStripBlock : kBlockRows, kTerms = kStrips / Numbers::kStrips;
    for (int32_t first = 0; first < num_strips; first += kStrips) {
        typename Numbers::Vector factors[R][kTerms];
        const std::byte* at[kStrips];
        for (int32_t s = 0; s < kStrips; ++s) at[s] = spans[first + s];
        for (int32_t r = 0; r < R; ++r)
            for (int32_t i = 0; i < kTerms; ++i) factors[r][i] = Numbers::factor(t[r] + first / Numbers::kStrips + i);
        for (int32_t i = 0; i < count; i += kWide) {
            if (first == 0 && i % line_columns == 0) ahead.ask(column + i);
            typename Numbers::Vector w[kTerms];
            for (int32_t term = 0; term < kTerms; ++term) w[term] = Numbers::term(at + term * Numbers::kStrips, i);
            for (int32_t r = 0; r < R; ++r) {
                float* there = acc + r * kColumns<R> + i;
                F32x16 y = is_first && first == 0 ? F32x16::zero() : F32x16::load(there);
                for (int32_t term = 0; term < kTerms; ++term) y = Numbers::add(factors[r][term], w[term], y);
                y.store(there);
            }
        }
    }
}

using ExpandSpan = void (*)(const StripSpans&, int32_t, const Factors&, int32_t, int32_t, int32_t, const LinesAhead&, bool,
                            float*);

ExpandSpan expand_of(bool in_pairs, StripType type, bool is_one) {
    return with_numbers(in_pairs, type, [&]<class Numbers>() -> ExpandSpan {
        return is_one ? expand_span<Numbers, 1> : expand_span<Numbers, kBlockRows>;
    });
}

using PackFactors = void (*)(const float*, int32_t, float*);

PackFactors pack_of(bool in_pairs, StripType type) {
    return with_numbers(in_pairs, type, []<class Numbers>() -> PackFactors { return Numbers::pack; });
}

// The columns of B that an item is.
RowRange columns_of(const AdapterWork& work, const UpdateItem& item) {
    const int32_t columns = span_columns(*item.part, widest_span(work));
    const int32_t first = item.index / num_row_items(*item.segment, kItemRows) * columns;
    return {first, std::min(first + columns, item.part->b.num_columns)};
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
    const bool is_one = rows.size() == 1, in_pairs = uses_pairs(work, update);
    const int32_t column = span.column + from;
    alignas(64) float acc[kWideSpan];
    Factors factors = {};
    StripSpans spans;
    const ExpandSpan expand = expand_of(in_pairs, update.b.type, is_one);
    const PackFactors pack = pack_of(in_pairs, update.b.type);
    StripLines own = block_of_b(item, {column, column + count}, 0), following;
    for (int32_t first = 0; first < update.rank(); first += kStripBlock, own = following) {
        const int32_t num = std::min(kStripBlock, update.rank() - first);
        following = block_of_b(item, {column, column + count}, first + kStripBlock);
        const LinesAhead ahead(own, following.num != 0 ? following : next, count);
        for (int32_t r = 0; r < rows.num; ++r) {
            float some[kStripBlock] = {};
            std::copy_n(sums_of(work, update, place + r) + first, num, some);
            pack(some, kStripBlock, factors[r]);
        }
        const bool is_there = own.hold_vectors(update.b.type, count);
        const int32_t widest = is_there ? count : kSpan;
        for (int32_t at = 0; at < count; at += widest) {
            const int32_t some = std::min(widest, count - at);
            if (is_there) spans.find(own, 0);
            else spans.find(item.adapter(), update.b, first, num, column + at, some, in_pairs);
            expand(spans, num, factors, at, some, line_columns(update.b.type), ahead, first == 0, acc + at);
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
    const auto block_of = [&](RowRange of_next) { return block_of_a(next, of_next.first, of_next.last); };
    shrink_rows(work, item, range, strips, next ? block_of(strips_of(work, next)) : StripLines());
}

// An item of B, by vectors.
void expand_by_vectors(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next) {
    const RowRange range(*item.segment, item.index % num_row_items(*item.segment, kItemRows), kItemRows);
    const RowRange columns = columns_of(work, item);
    const AdapterSpan span(item.adapter(), *item.part, columns.first, columns.last - columns.first);
    if constexpr (kBlockRows > 1)
        if (range.last - range.first > kBlockRows) return expand_many_rows(work, item, span, range, {next, next ? columns_of(work, next) : RowRange(0, 0)});
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
            if (takes_all_updates(work, segment)) {
                const bool is_first = &update == segment.adapter->updates_of(work.op).data();
                return is_first ? int64_t{num_row_items(segment, kItemRows)} : 0;
            }
            const Cut cut = cut_of(work, update);
            return int64_t{num_row_items(segment, cut.rows)} * ceil_div(update.rank(), cut.strips);
        },
        [&](const UpdateItem& item, const UpdateItem& next) {
#if defined(__AMX_BF16__)
            if (uses_tiles(work, *item.part)) return shrink_by_tiles(work, item, next, shapes);
#endif
            if (takes_all_updates(work, *item.segment)) return shrink_all_updates(work, item);
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
