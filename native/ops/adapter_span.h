// The last step of an update, for some columns of it: sums join what the base made of a row.
#pragma once

#include <algorithm>

#include "ops/adapter_strips.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

static_assert(kGroup % kCodeColumns == 0, "a group of codes has whole blocks");

// How an update's columns are cut into spans, none wider than `widest`: alike, in whole groups, so that threads end
// together.
inline int32_t num_spans(const AdapterUpdate& update, int32_t widest) {
    return (update.b.num_columns + widest - 1) / widest;
}
inline int32_t span_columns(const AdapterUpdate& update, int32_t widest) {
    const int32_t spans = num_spans(update, widest);
    return static_cast<int32_t>(align_up((update.b.num_columns + spans - 1) / spans, kGroup));
}

// How wide an item of B may be: where there are enough adapters for all threads, all of most updates, so that what is
// read follows each other.
inline int32_t widest_span(const AdapterWork& work) { return work.rows.segments.size() < 8 ? kSpan : kWideSpan; }

// Columns [column, column + count) of an update, and its vectors there.
class AdapterSpan {
public:
    const AdapterUpdate& update;
    const int32_t column;
    const int32_t count;

    AdapterSpan(const Adapter& adapter, const AdapterUpdate& of, int32_t column, int32_t count)
        : update(of), column(column), count(count), has_bias_(of.bias.num_strips != 0),
          has_scale_(of.magnitude.num_strips != 0) {
        if (has_bias_) read_vector(adapter, of.bias, bias_);
        if (has_scale_) read_vector(adapter, of.magnitude, scale_);
    }

    // Columns [from, from + num) of the span, of one row; acc[0] is that of `from`.
    void join(const AdapterWork& work, int32_t row, int32_t from, int32_t num, const float* acc) const {
        const int32_t first = update.first_row + column + from;
        float* y = work.out.f32(row) + first;
        const float *base_bias = work.bias_of(row), *bias = bias_ + from, *scale = scale_ + from;
        const F32x16 scaling = F32x16::set1(update.scaling * work.scale);
        each_vector(num, [&](int32_t i, int32_t lanes) {
            F32x16 sum = F32x16::load(acc + i), base = load_first(y + i, lanes);
            if (has_bias_) sum = sum + F32x16::load(bias + i);
            if (!has_scale_) return store_first(fma(scaling, sum, base), y + i, lanes);
            const F32x16 factor = F32x16::load(scale + i);
            if (base_bias == nullptr) return store_first(factor * fma(scaling, sum, base), y + i, lanes);
            const F32x16 apart = load_first(base_bias + first + i, lanes);
            store_first(fma(factor, fma(scaling, sum, base - apart), apart), y + i, lanes);
        });
    }

private:
    // Widened, and filled up to whole vectors.
    void read_vector(const Adapter& adapter, const Strips& vector, float* out) const {
        StripSpans spans;
        for (int32_t from = 0; from < count; from += kSpan) {
            const int32_t num = std::min(kSpan, count - from);
            spans.find(adapter, vector, 0, 1, column + from, num);
            for (int32_t i = 0; i < num; i += kWide) load_strip(vector.type, spans[0], i).store(out + from + i);
        }
    }

    const bool has_bias_, has_scale_;
    alignas(64) float bias_[kWideSpan];
    alignas(64) float scale_[kWideSpan];
};

}  // namespace kvarto::KVARTO_ISA
