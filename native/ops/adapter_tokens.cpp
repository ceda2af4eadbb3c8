// Bounds: the bytes of the rows that are used.
#include "ops/adapter_tokens.h"

#include <algorithm>
#include <span>

#include "ops/adapter_dot.h"
#include "ops/adapter_items.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

namespace {

using Item = AdapterItem<AdapterTokens>;

std::span<const AdapterTokens> tokens_of(const Adapter& adapter, int64_t op) {
    const AdapterTokens* tokens = adapter.tokens_of(op);
    return tokens == nullptr ? std::span<const AdapterTokens>() : std::span(tokens, 1);
}

void read_row(const AdapterWork& work, const Adapter& adapter, const Strips& rows, int32_t strip, int32_t row) {
    StripSpans spans;
    const F32x16 scale = F32x16::set1(work.scale);
    const float* bias = work.bias_of(row);
    float* out = work.out.f32(row);
    for (int32_t column = 0; column < rows.num_columns; column += kSpan) {
        const int32_t count = std::min(kSpan, rows.num_columns - column);
        spans.find(adapter, rows, strip, 1, column, count);
        each_vector(count, [&](int32_t i, int32_t lanes) {
            F32x16 y = load_strip(rows.type, spans[0], i) * scale;
            if (bias != nullptr) y = y + load_first(bias + column + i, lanes);
            store_first(y, out + column + i, lanes);
        });
    }
}

// Products of some rows with the rows of a block of tokens, from `first` on.
void multiply(const AdapterWork& work, const Adapter& adapter, const AdapterTokens& tokens, RowRange range,
              int32_t first) {
    const auto size = static_cast<int32_t>(tokens.token_ids.size());
    const int32_t num = std::min(kStripBlock, size - first);
    const StripLines own(adapter, tokens.rows, first, num, 0, tokens.rows.num_columns);
    const LinesAhead ahead(own, {}, tokens.rows.num_columns);
    Dots dots;
    for (int32_t place = range.first; place < range.last; place += kBlockRows) {
        const RowBlock rows(work.rows.rows + place, range.last - place);
        FactorRows x(work.x, rows, false);
        dot_strips(adapter, tokens.rows, first, num, x, own, ahead, dots);
        for (int32_t r = 0; r < rows.num; ++r)
            for (int32_t s = 0; s < num; ++s) {
                const int32_t token = tokens.token_of_strip[static_cast<size_t>(first + s)];
                const float* bias = work.bias_of(rows[r]);
                work.out.f32(rows[r])[token] = bias == nullptr ? dots[r][s] : dots[r][s] + bias[token];
            }
    }
}

}  // namespace

void adapter_embeddings(const AdapterWork& work, Worker& worker) {
    each_item<AdapterTokens>(
        work.rows, [&] { return worker.take(); }, [&](const Adapter& adapter) { return tokens_of(adapter, work.op); },
        [](const AdapterSegment& segment, const AdapterTokens&) { return int64_t{num_row_items(segment, kItemRows)}; },
        [&](const Item& item, const Item&) {
            const AdapterTokens& tokens = *item.part;
            const RowRange range(*item.segment, item.index, kItemRows);
            for (int32_t place = range.first; place < range.last; ++place) {
                const int32_t row = work.rows.rows[place], strip = tokens.strip_of(work.token_ids[row]);
                if (strip >= 0) read_row(work, item.adapter(), tokens.rows, strip, row);
            }
        });
}

void adapter_logits(const AdapterWork& work, Worker& worker) {
    each_item<AdapterTokens>(
        work.rows, [&] { return worker.take(); }, [&](const Adapter& adapter) { return tokens_of(adapter, work.op); },
        [](const AdapterSegment& segment, const AdapterTokens& tokens) {
            return int64_t{num_row_items(segment, kItemRows)} * ceil_div(tokens.rows.num_strips, kStripBlock);
        },
        [&](const Item& item, const Item&) {
            const int32_t num_ranges = num_row_items(*item.segment, kItemRows);
            const RowRange range(*item.segment, item.index % num_ranges, kItemRows);
            multiply(work, item.adapter(), *item.part, range, item.index / num_ranges * kStripBlock);
        });
}

}  // namespace kvarto::KVARTO_ISA
