#include "ops/adapter_dot.h"

#include <algorithm>

#include "ops/adapter_numbers.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

using Sums = F32x16[kBlockRows][kStripBlock];

// Calls `f(column, low, high)` for each group of columns [first, first + count) of an int8 row: whole groups.
template <class F> void each_group(const QuantisedRow& row, int32_t count, F f) {
    const F32x16 step = F32x16::set1(1.0F / kFineSteps);
    for (int32_t i = 0, group = 0; i < count; i += kGroup, ++group) {
        F32x16 low = F32x16::load_i8(row.codes + i), high = F32x16::load_i8(row.codes + i + kWide);
        if (row.is_fine[group]) {
            low = fma(F32x16::load_i8(row.fine_codes + i), step, low);
            high = fma(F32x16::load_i8(row.fine_codes + i + kWide), step, high);
        }
        const F32x16 scale = F32x16::set1(row.scales[group]);
        f(i, low * scale, high * scale);
    }
}

// Columns of a row in float32, filled up to whole vectors; `copy` has room for them.
const float* x_span(const Rows& x, int64_t row, int32_t first, int32_t count, float* copy) {
    if (x.form == RowForm::kF32) {
        const float* there = x.f32(row) + first;
        if (count % kWide == 0) return there;
        each_vector(count, [&](int32_t i, int32_t lanes) { load_first(there + i, lanes).store(copy + i); });
    } else if (x.form == RowForm::kInt8) {
        each_group(x.int8(row).from(first), count, [&](int32_t i, F32x16 low, F32x16 high) {
            low.store(copy + i);
            high.store(copy + i + kWide);
        });
    } else {
        for (int32_t i = 0; i < count; i += kWide) {
            const std::byte* group = x.bf16(row, (first + i) / kGroup);
            F32x16::load_bf16(reinterpret_cast<const uint16_t*>(group) + i % kGroup).store(copy + i);
        }
    }
    return copy;
}

#if defined(__AVX512BF16__)

// Columns of an int8 row as bfloat16.
void round_span(const Rows& x, int64_t row, int32_t first, int32_t count, std::byte* out) {
    each_group(x.int8(row).from(first), count, [&](int32_t i, F32x16 low, F32x16 high) {
        _mm512_store_si512(out + 2 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v)));
    });
}

#endif

using Sums = F32x16[kBlockRows][kStripBlock];

#if defined(__AVX512F__)

// Four rows by four strips at once: halves, quarters, pairs and lanes are added as `sum` adds those of one vector.
void add_lanes_of_block(const Sums& sums, int32_t first, Dots& out) {
    static_assert(kBlockRows == 4);
    const auto low = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x44); };
    const auto high = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0xEE); };
    __m512 strips[kBlockRows];  // of each a quarter per row
    for (int32_t s = 0; s < kBlockRows; ++s) {
        const auto row = [&](int32_t r) { return sums[r][first + s].v; };
        const __m512 ab = _mm512_add_ps(low(row(0), row(1)), high(row(0), row(1)));
        const __m512 cd = _mm512_add_ps(low(row(2), row(3)), high(row(2), row(3)));
        strips[s] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    }
    const auto pairs = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    };
    const __m512 ab = pairs(strips[0], strips[1]), cd = pairs(strips[2], strips[3]);
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xDD));
    _mm_storeu_ps(out[0] + first, _mm512_castps512_ps128(all));
    _mm_storeu_ps(out[1] + first, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(out[2] + first, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(out[3] + first, _mm512_extractf32x4_ps(all, 3));
}

#endif

// Columns [column, column + count), where `spans` begin. One row takes all strips of a block side by side; several rows
// take as many strips as they are, whose sums fit into the registers.
template <class Numbers, int R>
void dot_span(const StripSpans& spans, int32_t num_strips, const RowPlaces& x, int32_t column, int32_t count,
              int32_t line_columns, const LinesAhead& ahead, Sums& sums) {
    constexpr int32_t kStrips = R == 1 ? kStripBlock : kBlockRows;
    for (int32_t first = 0; first < num_strips; first += kStrips) {
        F32x16 local[R][kStrips];
        const std::byte* at[kStrips];
        for (int32_t s = 0; s < kStrips; ++s) at[s] = spans[first + s];
        for (int32_t r = 0; r < R; ++r)
            for (int32_t s = 0; s < kStrips; ++s) local[r][s] = sums[r][first + s];
        for (int32_t i = 0; i < count; i += Numbers::kColumns) {
            if (first == 0 && i % line_columns == 0) ahead.ask(column + i);
            typename Numbers::Vector w[kStrips];
            for (int32_t s = 0; s < kStrips; ++s) w[s] = Numbers::strip(at[s], i);
            for (int32_t r = 0; r < R; ++r) {
                const auto value = Numbers::row(x[static_cast<size_t>(r)], i);
                for (int32_t s = 0; s < kStrips; ++s) local[r][s] = Numbers::add(value, w[s], local[r][s]);
            }
        }
        for (int32_t r = 0; r < R; ++r)
            for (int32_t s = 0; s < kStrips; ++s) sums[r][first + s] = local[r][s];
    }
}

using DotSpan = void (*)(const StripSpans&, int32_t, const RowPlaces&, int32_t, int32_t, int32_t, const LinesAhead&,
                         Sums&);

DotSpan dot_of(bool in_pairs, StripType type, bool is_one) {
    return with_numbers(in_pairs, type, [&]<class Numbers>() -> DotSpan {
        return is_one ? dot_span<Numbers, 1> : dot_span<Numbers, kBlockRows>;
    });
}

// out[r][s] = the sum of the lanes of sums[r][s].
void add_lanes(const Sums& sums, int32_t num_rows, int32_t num_strips, Dots& out) {
#if defined(__AVX512F__)
    if (num_rows > 1) {
        for (int32_t first = 0; first < num_strips; first += kBlockRows) add_lanes_of_block(sums, first, out);
        return;
    }
#endif
    for (int32_t r = 0; r < num_rows; ++r)
        for (int32_t s = 0; s < num_strips; ++s) out[r][s] = sum(sums[r][s]);
}

}  // namespace

FactorRows::FactorRows(const Rows& x, const RowBlock& rows, bool in_pairs)
    : x_(x), rows_(rows), in_pairs_(in_pairs), is_whole_(x.width <= kWideSpan) {
    for (int32_t r = 0; is_whole_ && r < rows.size(); ++r) whole_[static_cast<size_t>(r)] = place(r, 0, x.width);
}

const std::byte* FactorRows::place(int32_t r, int32_t column, int32_t count) {
#if defined(__AVX512BF16__)
    if (in_pairs_) {
        auto* copy = reinterpret_cast<std::byte*>(copies_[r]);
        return round_span(x_, rows_[r], column, count, copy), copy;
    }
#endif
    return reinterpret_cast<const std::byte*>(x_span(x_, rows_[r], column, count, copies_[r]));
}

RowPlaces FactorRows::at(int32_t column, int32_t count) {
    const int64_t offset = column * (in_pairs_ ? int64_t{sizeof(uint16_t)} : int64_t{sizeof(float)});
    RowPlaces there{};
    for (int32_t r = 0; r < rows_.size(); ++r) {
        const auto row = static_cast<size_t>(r);
        there[row] = is_whole_ ? whole_[row] + offset : place(r, column, count);
    }
    return there;
}

void dot_strips(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num_strips, FactorRows& x,
                const StripLines& own, const LinesAhead& ahead, Dots& out) {
    StripSpans spans;
    Sums sums;
    const RowBlock& rows = x.rows();
    for (int32_t r = 0; r < rows.size(); ++r)
        for (F32x16& sum : sums[r]) sum = F32x16::zero();
    const DotSpan dot = dot_of(x.are_pairs(), strips.type, rows.size() == 1);
    const bool is_there = own.hold_vectors(strips.type, strips.num_columns);
    const int32_t widest = is_there ? x.widest() : kSpan;
    for (int32_t column = 0; column < strips.num_columns; column += widest) {
        const int32_t count = std::min(widest, strips.num_columns - column);
        if (is_there) spans.find(own, strips.bytes(column));
        else spans.find(adapter, strips, first, num_strips, column, count, x.are_pairs());
        dot(spans, num_strips, x.at(column, count), column, count, line_columns(strips.type), ahead, sums);
    }
    add_lanes(sums, rows.size(), num_strips, out);
}

}  // namespace kvarto::KVARTO_ISA
