#include "ops/adapter_dot.h"

#include <algorithm>

#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

using Sums = F32x16[kBlockRows][kStripBlock];

// Columns of a row in float32, filled up to whole vectors; `copy` has room for a span.
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

template <StripType type, int R>
void dot_span(const StripSpans& strips, const std::array<const float*, kBlockRows>& x, int32_t count, Sums& sums) {
    F32x16 local[R][kStripBlock];
    for (int32_t r = 0; r < R; ++r)
        for (int32_t s = 0; s < kStripBlock; ++s) local[r][s] = sums[r][s];
    const std::byte *a = strips[0], *b = strips[1], *c = strips[2], *d = strips[3];
    for (int32_t i = 0; i < count; i += kWide) {
        const F32x16 w[kStripBlock] = {load_strip<type>(a, i), load_strip<type>(b, i), load_strip<type>(c, i),
                                       load_strip<type>(d, i)};
        for (int32_t r = 0; r < R; ++r) {
            const F32x16 value = F32x16::load(x[static_cast<size_t>(r)] + i);
            for (int32_t s = 0; s < kStripBlock; ++s) local[r][s] = fma(value, w[s], local[r][s]);
        }
    }
    for (int32_t r = 0; r < R; ++r)
        for (int32_t s = 0; s < kStripBlock; ++s) sums[r][s] = local[r][s];
}

using DotSpan = void (*)(const StripSpans&, const std::array<const float*, kBlockRows>&, int32_t, Sums&);

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
                const RowBlock& rows, Dots& out) {
    alignas(64) float copies[kBlockRows][kSpan];
    StripSpans spans;
    Sums sums;
    for (auto& row : sums)
        for (F32x16& sum : row) sum = F32x16::zero();
    const DotSpan dot = dot_of(span_type(strips.type), rows.size() == 1);
    for (int32_t column = 0; column < strips.num_columns; column += kSpan) {
        const int32_t count = std::min(kSpan, strips.num_columns - column);
        spans.find(adapter, strips, first, num_strips, column, count);
        std::array<const float*, kBlockRows> at;
        for (int32_t r = 0; r < rows.size(); ++r)
            at[static_cast<size_t>(r)] = x_span(x, rows[r], column, count, copies[r]);
        dot(spans, at, count, sums);
    }
    for (int32_t r = 0; r < rows.num; ++r)
        for (int32_t s = 0; s < num_strips; ++s) out[r][s] = sum(sums[r][s]);
}

}  // namespace kvarto::KVARTO_ISA
