// B is made into terms once for all rows, so few of its columns at a time that they stay in the first-level cache with the
// sums of a block of rows. Bound: multiply-adds, sixteen per four loads of terms and four of factors; and the lines of y,
// which the product has left in a cache far away, and which are asked for a block ahead.
#include "ops/adapter_many_rows.h"

#include <algorithm>
#include <array>

#include "ops/adapter_dot.h"
#include "ops/adapter_numbers.h"
#include "ops/adapter_strips.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kFewColumns = 16 * kWide, kFewTerms = 16;

using Terms = float[kFewTerms][kFewColumns];       // as `Numbers::store_term` leaves them
using ManyFactors = float[kBlockRows][kFewTerms];  // as `Numbers::pack` does
static_assert(kFewTerms % kStripBlock == 0, "whole blocks of strips");

// Terms of columns [column, column + count) of strips [first, first + num) of B, filled up to whole vectors.
template <class Numbers>
void find_terms(const UpdateItem& item, int32_t first, int32_t num, int32_t column, int32_t count, Terms& out) {
    StripSpans spans;
    for (int32_t block = 0; block < num; block += kStripBlock) {
        const int32_t some = std::min(kStripBlock, num - block);
        spans.find(item.adapter(), item.part->b, first + block, some, column, count, Numbers::kArePairs);
        for (int32_t s = 0; s < some; s += Numbers::kStrips) {
            const std::byte* at[Numbers::kStrips];
            for (int32_t i = 0; i < Numbers::kStrips; ++i) at[i] = spans[s + i];
            for (int32_t i = 0; i < count; i += kWide)
                Numbers::store_term(Numbers::term(at, i), out[(block + s) / Numbers::kStrips] + i);
        }
    }
}

// acc[r] = factors of a row times terms + acc[r], or + 0: four vectors of each row of a block stay in registers. Of those
// beyond `count` whatever was there.
template <class Numbers>
void add_terms(const ManyFactors& factors, const Terms& terms, int32_t num_terms, int32_t count, bool is_first,
               float (*acc)[kFewColumns]) {
    constexpr int32_t kVectors = 4;
    for (int32_t column = 0; column < count; column += kVectors * kWide) {
        F32x16 totals[kBlockRows][kVectors];
        for (int32_t r = 0; r < kBlockRows; ++r)
            for (int32_t v = 0; v < kVectors; ++v)
                totals[r][v] = is_first ? F32x16::zero() : F32x16::load(acc[r] + column + v * kWide);
        for (int32_t term = 0; term < num_terms; ++term)
            for (int32_t r = 0; r < kBlockRows; ++r) {
                const auto factor = Numbers::factor(factors[r] + term);
                for (int32_t v = 0; v < kVectors; ++v) {
                    const auto some = Numbers::stored_term(terms[term] + column + v * kWide);
                    totals[r][v] = Numbers::add(factor, some, totals[r][v]);
                }
            }
        for (int32_t r = 0; r < kBlockRows; ++r)
            for (int32_t v = 0; v < kVectors; ++v) totals[r][v].store(acc[r] + column + v * kWide);
    }
}

// Asks for columns of the rows of a block where sums will join them.
void ask_for_out(const AdapterWork& work, RowRange block, int32_t column, int32_t count) {
    for (int32_t place = block.first; place < block.last; ++place) {
        const float* out = work.out.f32(work.rows.rows[place]) + column;
        for (int32_t i = 0; i < count; i += kWide) prefetch_to_write(out + i);
    }
}

// Columns [from, from + count) of a span, for all rows of an item.
template <class Numbers>
void expand_few_columns(const AdapterWork& work, const UpdateItem& item, const AdapterSpan& span, RowRange range,
                        int32_t from, int32_t count, const ColumnsAhead& ahead) {
    alignas(64) Terms terms;
    alignas(64) float acc[kItemRows][kFewColumns];
    const AdapterUpdate& update = span.update;
    const auto block_at = [&](int32_t place) { return RowRange(place, std::min(place + kBlockRows, range.last)); };
    const auto ask_for = [&](RowRange block) { ask_for_out(work, block, update.first_row + span.column + from, count); };
    constexpr int32_t kStrips = kFewTerms * Numbers::kStrips;
    for (int32_t first = 0; first < update.rank(); first += kStrips) {
        const int32_t num = std::min(kStrips, update.rank() - first);
        const bool is_first = first == 0, is_last = first + num == update.rank();
        if (is_last) ask_for(block_at(range.first));
        find_terms<Numbers>(item, first, num, span.column + from, count, terms);
        for (int32_t place = range.first; place < range.last; place += kBlockRows) {
            const RowRange rows = block_at(place);
            if (is_last) ask_for(block_at(rows.last));
            if (is_last) ahead.ask((place - range.first) / kBlockRows, ceil_div(range.last - range.first, kBlockRows));
            ManyFactors factors;
            for (int32_t r = 0; r < kBlockRows; ++r)  // those beyond the last are the last again
                Numbers::pack(sums_of(work, update, std::min(place + r, rows.last - 1)) + first, num, factors[r]);
            float (*block)[kFewColumns] = acc + (is_first && is_last ? 0 : place - range.first);
            add_terms<Numbers>(factors, terms, ceil_div(num, Numbers::kStrips), count, is_first, block);
            for (int32_t r = place; is_last && r < rows.last; ++r)
                span.join(work, work.rows.rows[r], from, count, block[r - place]);
        }
    }
}

}  // namespace

void expand_many_rows(const AdapterWork& work, const UpdateItem& item, const AdapterSpan& span, RowRange range,
                      const ColumnsAhead& next) {
    const auto few_of = [](RowRange columns) {
        return RowRange(columns.first, std::min(columns.first + kFewColumns, columns.last));
    };
    with_numbers(uses_pairs(work, span.update), span.update.b.type, [&]<class Numbers>() {
        for (int32_t from = 0; from < span.count; from += kFewColumns) {
            const RowRange left(span.column + from + kFewColumns, span.column + span.count);
            const ColumnsAhead ahead = left.first < left.last ? ColumnsAhead{item, few_of(left)}
                                                              : ColumnsAhead{next.item, few_of(next.columns)};
            expand_few_columns<Numbers>(work, item, span, range, from, std::min(kFewColumns, span.count - from), ahead);
        }
    });
}

}  // namespace kvarto::KVARTO_ISA
