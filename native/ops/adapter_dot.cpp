#include "ops/adapter_dot.h"

#include <algorithm>

#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

using Sums = F32x16[kBlockRows][kStripBlock];

// Columns of a row in float32, filled up to whole vectors; `copy` has room for them.
const float* x_span(const Rows& x, int64_t row, int32_t first, int32_t count, float* copy) {
    if (x.form == RowForm::kF32) {
        const float* there = x.f32(row) + first;
        if (count % kWide == 0) return there;
        each_vector(count, [&](int32_t i, int32_t lanes) { load_first(there + i, lanes).store(copy + i); });
    } else if (x.form == RowForm::kInt8) {
        const QuantisedRow there = x.int8(row).from(first);
        for (int32_t i = 0; i < count; i += kWide) {
            F32x16 value = F32x16::load_i8(there.codes + i);
            if (there.is_fine[i / kGroup])
                value = fma(F32x16::load_i8(there.fine_codes + i), F32x16::set1(1.0F / kFineSteps), value);
            (value * F32x16::set1(there.scales[i / kGroup])).store(copy + i);
        }
    } else {
        for (int32_t i = 0; i < count; i += kWide) {
            const std::byte* group = x.bf16(row, (first + i) / kGroup);
            F32x16::load_bf16(reinterpret_cast<const uint16_t*>(group) + i % kGroup).store(copy + i);
        }
    }
    return copy;
}

// Columns [column, column + count), where `spans` begin. One row takes all strips of a block side by side; several rows
// take as many strips as they are, whose sums fit into the registers.
template <StripType type, int R>
void dot_span(const StripSpans& spans, int32_t num_strips, const std::array<const float*, kBlockRows>& x, int32_t column,
              int32_t count, const LinesAhead& ahead, Sums& sums) {
    constexpr int32_t kStrips = R == 1 ? kStripBlock : kBlockRows;
    for (int32_t first = 0; first < num_strips; first += kStrips) {
        F32x16 local[R][kStrips];
        const std::byte* at[kStrips];
        for (int32_t s = 0; s < kStrips; ++s) at[s] = spans[first + s];
        for (int32_t r = 0; r < R; ++r)
            for (int32_t s = 0; s < kStrips; ++s) local[r][s] = sums[r][first + s];
        for (int32_t i = 0; i < count; i += kWide) {
            if (first == 0 && i % line_columns(type) == 0) ahead.ask(column + i);
            F32x16 w[kStrips];
            for (int32_t s = 0; s < kStrips; ++s) w[s] = load_strip<type>(at[s], i);
            for (int32_t r = 0; r < R; ++r) {
                const F32x16 value = F32x16::load(x[static_cast<size_t>(r)] + i);
                for (int32_t s = 0; s < kStrips; ++s) local[r][s] = fma(value, w[s], local[r][s]);
            }
        }
        for (int32_t r = 0; r < R; ++r)
            for (int32_t s = 0; s < kStrips; ++s) sums[r][first + s] = local[r][s];
    }
}

using DotSpan = void (*)(const StripSpans&, int32_t, const std::array<const float*, kBlockRows>&, int32_t, int32_t,
                         const LinesAhead&, Sums&);

DotSpan dot_of(StripType type, bool is_one) {
    switch (type) {
        case StripType::kF32: return is_one ? dot_span<StripType::kF32, 1> : dot_span<StripType::kF32, kBlockRows>;
        case StripType::kF16: return is_one ? dot_span<StripType::kF16, 1> : dot_span<StripType::kF16, kBlockRows>;
        case StripType::kBF16:
            return is_one ? dot_span<StripType::kBF16, 1> : dot_span<StripType::kBF16, kBlockRows>;
        case StripType::kQ8:
        case StripType::kQ4: break;  // no type of spans
    }
    __builtin_unreachable();
}

}  // namespace

void dot_strips(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num_strips, const Rows& x,
                const RowBlock& rows, const StripLines& next, Dots& out) {
    static_assert(kBlockRows * kSpan <= kWideSpan);
    alignas(64) float copies[kWideSpan];
    StripSpans spans;
    Sums sums;
    for (int32_t r = 0; r < rows.size(); ++r)
        for (F32x16& sum : sums[r]) sum = F32x16::zero();
    const bool is_one = rows.size() == 1;
    const DotSpan dot = dot_of(span_type(strips.type), is_one);
    const StripLines own(adapter, strips, first, num_strips, 0, strips.num_columns);
    const LinesAhead ahead(own, next, strips.num_columns);
    const bool is_there = own.hold_vectors(strips.type, strips.num_columns);
    const int32_t widest = is_one && is_there ? kWideSpan : kSpan;
    for (int32_t column = 0; column < strips.num_columns; column += widest) {
        const int32_t count = std::min(widest, strips.num_columns - column);
        if (is_there) spans.find(own, strips.bytes(column));
        else spans.find(adapter, strips, first, num_strips, column, count);
        std::array<const float*, kBlockRows> at;
        for (int32_t r = 0; r < rows.size(); ++r)
            at[static_cast<size_t>(r)] = x_span(x, rows[r], column, count, copies + r * kSpan);
        dot(spans, num_strips, at, column, count, ahead, sums);
    }
    for (int32_t r = 0; r < rows.num; ++r)
        for (int32_t s = 0; s < num_strips; ++s) out[r][s] = sum(sums[r][s]);
}

}  // namespace kvarto::KVARTO_ISA
