// Bounds. One row per adapter: the bytes of its A and B, each read once; items are a few strips, so that threads end
// together. Many rows: multiply-adds, sixteen per load of four strips with four rows.
#include "ops/adapter_product.h"

#include <algorithm>

#include "ops/adapter_strips.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int32_t kBlockRows = 4;  // 4 x 4 sums stay in registers
#else
constexpr int32_t kBlockRows = 1;
#endif
constexpr int32_t kItemRows = 32;

using Sums = F32x16[kBlockRows][kStripBlock];

int32_t ceil_div(int32_t value, int32_t by) { return (value + by - 1) / by; }

// Calls `f(segment, update, item of the update)` for what this worker takes; `count(segment, update)` says how many
// items an update is.
template <class Take, class Count, class F>
void each_item(const AdapterWork& work, Take take, Count count, F f) {
    int64_t item = take(), first_item = 0;
    for (const AdapterSegment& segment : work.rows.segments)
        for (const AdapterUpdate& update : segment.adapter->updates_of(work.op)) {
            const int64_t num_items = count(segment, update);
            for (; item < first_item + num_items; item = take())
                f(segment, update, static_cast<int32_t>(item - first_item));
            first_item += num_items;
        }
}

// Columns of a row in float32, filled up to whole vectors; `copy` has room for a span.
const float* x_span(const Rows& x, int64_t row, int32_t first, int32_t count, float* copy) {
    if (x.form == RowForm::kF32) {
        const float* there = x.f32(row) + first;
        if (count % kWide == 0) return there;
        each_vector(count, [&](int32_t i, int32_t lanes) { load_first(there + i, lanes).store(copy + i); });
    } else if (x.form == RowForm::kInt8) {
        const QuantisedRow there = x.int8(row).from(first);
        for (int32_t i = 0; i < count; i += kWide)
            (F32x16::load_i8(there.codes + i) * F32x16::set1(there.scales[i / kGroup])).store(copy + i);
    } else {
        for (int32_t i = 0; i < count; i += kWide) {
            const std::byte* group = x.bf16(row, (first + i) / kGroup);
            F32x16::load_bf16(reinterpret_cast<const uint16_t*>(group) + i % kGroup).store(copy + i);
        }
    }
    return copy;
}

template <StripType type, int R>
void shrink_span(const StripSpans& strips, const std::array<const float*, kBlockRows>& x, int32_t count, Sums& sums) {
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

using ShrinkSpan = void (*)(const StripSpans&, const std::array<const float*, kBlockRows>&, int32_t, Sums&);

ShrinkSpan shrink_of(StripType type, bool is_one) {
    switch (type) {
        case StripType::kF32: return is_one ? shrink_span<StripType::kF32, 1> : shrink_span<StripType::kF32, kBlockRows>;
        case StripType::kF16: return is_one ? shrink_span<StripType::kF16, 1> : shrink_span<StripType::kF16, kBlockRows>;
        case StripType::kBF16:
            return is_one ? shrink_span<StripType::kBF16, 1> : shrink_span<StripType::kBF16, kBlockRows>;
    }
    __builtin_unreachable();
}

// Rows [first, first + num) of a segment, fewer than a block's filled up with the last.
struct Block {
    const AdapterSegment& segment;
    const AdapterUpdate& update;
    int32_t first;
    int32_t num;

    int32_t place(int32_t r) const { return segment.first + first + std::min(r, num - 1); }
    int32_t size() const { return num == 1 ? 1 : kBlockRows; }
};

void shrink_block(const AdapterWork& work, const Block& block, int32_t first_strip, int32_t num_strips) {
    const AdapterUpdate& update = block.update;
    alignas(64) float copies[kBlockRows][kSpan];
    StripSpans strips;
    Sums sums;
    for (auto& row : sums)
        for (F32x16& sum : row) sum = F32x16::zero();
    const ShrinkSpan shrink = shrink_of(update.a.type, block.size() == 1);
    for (int32_t column = 0; column < update.a.num_columns; column += kSpan) {
        const int32_t count = std::min(kSpan, update.a.num_columns - column);
        strips.find(*block.segment.adapter, update.a, first_strip, num_strips, column, count);
        std::array<const float*, kBlockRows> x;
        for (int32_t r = 0; r < block.size(); ++r)
            x[static_cast<size_t>(r)] = x_span(work.x, work.rows.rows[block.place(r)], column, count, copies[r]);
        shrink(strips, x, count, sums);
    }
    for (int32_t r = 0; r < block.num; ++r)
        for (int32_t s = 0; s < num_strips; ++s)
            work.sums.f32(block.place(r))[update.first_rank + first_strip + s] = sum(sums[r][s]);
}

// Products with some strips, four at most, of a span of columns: acc [rows][kSpan] of a block.
template <StripType type, int R>
void expand_span(const StripSpans& strips, const std::array<const float*, kBlockRows>& t, int32_t count, bool is_first,
                 float (*acc)[kSpan]) {
    F32x16 factors[R][kStripBlock];
    for (int32_t r = 0; r < R; ++r)
        for (int32_t s = 0; s < kStripBlock; ++s) factors[r][s] = F32x16::set1(t[static_cast<size_t>(r)][s]);
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

using ExpandSpan = void (*)(const StripSpans&, const std::array<const float*, kBlockRows>&, int32_t, bool,
                            float (*)[kSpan]);

ExpandSpan expand_of(StripType type, bool is_one) {
    switch (type) {
        case StripType::kF32: return is_one ? expand_span<StripType::kF32, 1> : expand_span<StripType::kF32, kBlockRows>;
        case StripType::kF16: return is_one ? expand_span<StripType::kF16, 1> : expand_span<StripType::kF16, kBlockRows>;
        case StripType::kBF16:
            return is_one ? expand_span<StripType::kBF16, 1> : expand_span<StripType::kBF16, kBlockRows>;
    }
    __builtin_unreachable();
}

// A span of a vector, widened; `out` has room for a span.
void read_vector(const Adapter& adapter, const Strips& vector, int32_t column, int32_t count, float* out) {
    StripSpans spans;
    spans.find(adapter, vector, 0, 1, column, count);
    for (int32_t i = 0; i < count; i += kWide) {
        const F32x16 value = vector.type == StripType::kF32   ? load_strip<StripType::kF32>(spans[0], i)
                             : vector.type == StripType::kF16 ? load_strip<StripType::kF16>(spans[0], i)
                                                              : load_strip<StripType::kBF16>(spans[0], i);
        value.store(out + i);
    }
}

// Four strips of the next ones are asked for while the present ones are multiplied: B is read in short runs, which the
// machine's own prefetching does not foresee.
void ask_for(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count) {
    const int32_t last = std::min(first + kStripBlock, strips.num_strips);
    for (int32_t strip = first; strip < last; ++strip)
        if (const std::byte* span = adapter.at(strips.place(strip, column), count * strips.item_bytes()))
            for (int64_t byte = 0; byte < count * strips.item_bytes(); byte += 64) __builtin_prefetch(span + byte);
}

void expand_block(const AdapterWork& work, const Block& block, int32_t column, int32_t count, const float* bias) {
    const AdapterUpdate& update = block.update;
    const Adapter& adapter = *block.segment.adapter;
    alignas(64) float acc[kBlockRows][kSpan];
    float factors[kBlockRows][kStripBlock] = {};
    std::array<const float*, kBlockRows> t;
    StripSpans strips;
    const ExpandSpan expand = expand_of(update.b.type, block.size() == 1);
    for (int32_t first = 0; first < update.rank(); first += kStripBlock) {
        const int32_t num = std::min(kStripBlock, update.rank() - first);
        ask_for(adapter, update.b, first + kStripBlock, column, count);
        strips.find(adapter, update.b, first, num, column, count);
        for (int32_t r = 0; r < block.size(); ++r) {
            const float* sums = work.sums.f32(block.place(r)) + update.first_rank + first;
            for (int32_t s = 0; s < kStripBlock; ++s) factors[r][s] = s < num ? sums[s] : 0.0F;
            t[static_cast<size_t>(r)] = factors[r];
        }
        expand(strips, t, count, first == 0, acc);
    }
    const F32x16 scaling = F32x16::set1(update.scaling);
    for (int32_t r = 0; r < block.num; ++r) {
        float* y = work.out.f32(work.rows.rows[block.place(r)]) + update.first_row + column;
        each_vector(count, [&](int32_t i, int32_t lanes) {
            F32x16 sum = F32x16::load(acc[r] + i);
            if (bias != nullptr) sum = sum + F32x16::load(bias + i);
            store_first(fma(scaling, sum, load_first(y + i, lanes)), y + i, lanes);
        });
    }
}

// Calls `f(block)` for the rows of an item.
template <class F>
void each_block(const AdapterSegment& segment, const AdapterUpdate& update, int32_t row_item, F f) {
    const int32_t last = std::min(segment.count, (row_item + 1) * kItemRows);
    for (int32_t first = row_item * kItemRows; first < last; first += kBlockRows)
        f(Block{segment, update, first, std::min(kBlockRows, last - first)});
}

}  // namespace

void adapter_shrink(const AdapterWork& work, Worker& worker) {
    const auto num_row_items = [](const AdapterSegment& segment) { return ceil_div(segment.count, kItemRows); };
    each_item(
        work, [&] { return worker.take_side(); },
        [&](const AdapterSegment& segment, const AdapterUpdate& update) {
            return int64_t{num_row_items(segment)} * ceil_div(update.rank(), kStripBlock);
        },
        [&](const AdapterSegment& segment, const AdapterUpdate& update, int32_t item) {
            const int32_t strip = item / num_row_items(segment) * kStripBlock;
            const int32_t num_strips = std::min(kStripBlock, update.rank() - strip);
            each_block(segment, update, item % num_row_items(segment),
                       [&](const Block& block) { shrink_block(work, block, strip, num_strips); });
        });
}

void adapter_expand(const AdapterWork& work, Worker& worker) {
    const auto num_row_items = [](const AdapterSegment& segment) { return ceil_div(segment.count, kItemRows); };
    each_item(
        work, [&] { return worker.take(); },
        [&](const AdapterSegment& segment, const AdapterUpdate& update) {
            return int64_t{num_row_items(segment)} * ceil_div(update.b.num_columns, kSpan);
        },
        [&](const AdapterSegment& segment, const AdapterUpdate& update, int32_t item) {
            const int32_t column = item / num_row_items(segment) * kSpan;
            const int32_t count = std::min(kSpan, update.b.num_columns - column);
            alignas(64) float bias[kSpan];
            const bool has_bias = update.bias.num_strips != 0;
            if (has_bias) read_vector(*segment.adapter, update.bias, column, count, bias);
            each_block(segment, update, item % num_row_items(segment), [&](const Block& block) {
                expand_block(work, block, column, count, has_bias ? bias : nullptr);
            });
        });
}

}  // namespace kvarto::KVARTO_ISA
