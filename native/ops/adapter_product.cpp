// Bounds. One row per adapter: the bytes of its A and B, each read once; items are a few strips, so that threads end
// together. Many rows: multiply-adds, sixteen per load of four strips with four rows.
#include "ops/adapter_product.h"

#include <algorithm>

#include "ops/adapter_dot.h"
#include "ops/adapter_items.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

float value_at(const Adapter& adapter, const Strips& strips, int32_t strip, int32_t column) {
    alignas(64) float copy[kWide] = {};
    auto* bytes = reinterpret_cast<std::byte*>(copy);
    adapter.copy(strips.place(strip, column), strips.item_bytes(), bytes);
    float lanes[kWide];
    load_strip(strips.type, bytes, 0).store(lanes);
    return lanes[0];
}

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
    }
    __builtin_unreachable();
}

// A span of a vector, widened; `out` has room for a span.
void read_vector(const Adapter& adapter, const Strips& vector, int32_t column, int32_t count, float* out) {
    StripSpans spans;
    spans.find(adapter, vector, 0, 1, column, count);
    for (int32_t i = 0; i < count; i += kWide) load_strip(vector.type, spans[0], i).store(out + i);
}

// Strips that come next are asked for while the present ones are multiplied: B is read in short runs, which the
// machine's own prefetching does not foresee.
void ask_for(const Adapter& adapter, const Strips& strips, int32_t first, int32_t column, int32_t count) {
    const int32_t last = std::min(first + kStripBlock, strips.num_strips);
    for (int32_t strip = first; strip < last; ++strip)
        if (const std::byte* span = adapter.at(strips.place(strip, column), count * strips.item_bytes()))
            for (int64_t byte = 0; byte < count * strips.item_bytes(); byte += 64) __builtin_prefetch(span + byte);
}

// Columns [column, column + count) of an update, at most a span, and its vectors there.
struct Span {
    const AdapterUpdate& update;
    int32_t column;
    int32_t count;
    bool has_bias, has_scale;
    alignas(64) float bias[kSpan];
    alignas(64) float scale[kSpan];

    Span(const Adapter& adapter, const AdapterUpdate& of, int32_t first)
        : update(of), column(first), count(std::min(kSpan, of.b.num_columns - first)),
          has_bias(of.bias.num_strips != 0), has_scale(of.magnitude.num_strips != 0) {
        if (has_bias) read_vector(adapter, of.bias, column, count, bias);
        if (has_scale) read_vector(adapter, of.magnitude, column, count, scale);
    }
};

// Joins a row's sums with what the base made of it.
void join(const AdapterWork& work, const Span& span, int32_t row, const float* acc) {
    const int32_t first = span.update.first_row + span.column;
    float* y = work.out.f32(row) + first;
    const float* base_bias = work.bias_of(row);
    const F32x16 scaling = F32x16::set1(span.update.scaling * work.scale);
    each_vector(span.count, [&](int32_t i, int32_t lanes) {
        F32x16 sum = F32x16::load(acc + i), base = load_first(y + i, lanes);
        if (span.has_bias) sum = sum + F32x16::load(span.bias + i);
        if (!span.has_scale) return store_first(fma(scaling, sum, base), y + i, lanes);
        const F32x16 scale = F32x16::load(span.scale + i);
        if (base_bias == nullptr) return store_first(scale * fma(scaling, sum, base), y + i, lanes);
        const F32x16 apart = load_first(base_bias + first + i, lanes);
        store_first(fma(scale, fma(scaling, sum, base - apart), apart), y + i, lanes);
    });
}

void expand_rows(const AdapterWork& work, const Adapter& adapter, const Span& span, int32_t place, int32_t count) {
    const AdapterUpdate& update = span.update;
    const RowBlock rows(work.rows.rows + place, count);
    alignas(64) float acc[kBlockRows][kSpan];
    Dots factors = {};
    StripSpans strips;
    const ExpandSpan expand = expand_of(update.b.type, rows.size() == 1);
    for (int32_t first = 0; first < update.rank(); first += kStripBlock) {
        const int32_t num = std::min(kStripBlock, update.rank() - first);
        ask_for(adapter, update.b, first + kStripBlock, span.column, span.count);
        strips.find(adapter, update.b, first, num, span.column, span.count);
        for (int32_t r = 0; r < rows.num; ++r) {
            const float* sums = sums_of(work, update, place + r) + first;
            for (int32_t s = 0; s < kStripBlock; ++s) factors[r][s] = s < num ? sums[s] : 0.0F;
        }
        expand(strips, factors, span.count, first == 0, acc);
    }
    for (int32_t r = 0; r < rows.num; ++r) join(work, span, rows[r], acc[r]);
}

}  // namespace

void adapter_shrink(const AdapterWork& work, Worker& worker) {
    each_item(
        work.rows, [&] { return worker.take_side(); },
        [&](const Adapter& adapter) { return adapter.updates_of(work.op); },
        [](const AdapterSegment& segment, const AdapterUpdate& update) {
            return int64_t{num_row_items(segment)} * ceil_div(update.rank(), kStripBlock);
        },
        [&](const AdapterSegment& segment, const AdapterUpdate& update, int32_t item) {
            const RowRange range(segment, item % num_row_items(segment));
            const int32_t strip = item / num_row_items(segment) * kStripBlock;
            const auto shrink = work.token_ids != nullptr ? gather_rows : shrink_rows;
            shrink(work, *segment.adapter, update, range, strip);
        });
}

void adapter_expand(const AdapterWork& work, Worker& worker) {
    each_item(
        work.rows, [&] { return worker.take(); },
        [&](const Adapter& adapter) { return adapter.updates_of(work.op); },
        [](const AdapterSegment& segment, const AdapterUpdate& update) {
            return int64_t{num_row_items(segment)} * ceil_div(update.b.num_columns, kSpan);
        },
        [&](const AdapterSegment& segment, const AdapterUpdate& update, int32_t item) {
            const RowRange range(segment, item % num_row_items(segment));
            const Span span(*segment.adapter, update, item / num_row_items(segment) * kSpan);
            for (int32_t place = range.first; place < range.last; place += kBlockRows)
                expand_rows(work, *segment.adapter, span, place, range.last - place);
        });
}

}  // namespace kvarto::KVARTO_ISA
