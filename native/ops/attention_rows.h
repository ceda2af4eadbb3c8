// The rows of a unit for one kv head, and their sums.
#pragma once

#include <cfloat>

#include "ops/attention_scratch.h"
#include "ops/write_row.h"

namespace kvarto::KVARTO_ISA {

struct UnitRows {
    int32_t num_rows = 0;
    int32_t token[kUnitRows];
    int32_t head[kUnitRows];       // query head
    int32_t first_key[kUnitRows];  // the keys that the row sees ...
    int32_t end_key[kUnitRows];    // ... as a half-open range

    UnitRows(const AttentionPlan& plan, const HeadShape& heads, const Unit& unit, int32_t kv_head) {
        const int32_t group_size = heads.num_qo_heads / heads.num_kv_heads;
        for (int32_t i = 0; i < unit.num_seqs; ++i) {
            const int32_t seq = plan.sequence(unit, i);
            const int32_t rows = unit.num_seqs == 1 ? unit.num_rows : plan.num_rows(seq);
            for (int32_t r = unit.first_row; r < unit.first_row + rows; ++r, ++num_rows) {
                const int32_t position = plan.position(seq, r);
                token[num_rows] = plan.token(seq, r);
                head[num_rows] = kv_head * group_size + r % group_size;
                first_key[num_rows] = plan.first_key(position);
                end_key[num_rows] = position + 1;
            }
        }
        for (int32_t r = num_rows; r < align_up(num_rows, 16); ++r) first_key[r] = end_key[r] = 0;  // see nothing
    }
};

// A span's sums of some rows, to be added to those of the spans before it.
struct SpanSums {
    const float *maximum, *total, *values;
    int64_t width;
};

// Softmax under way: the largest score, the sum of weights, the weighted sum of values, relative to that score.
struct Sums {
    float* maximum;  // [kUnitRows]
    float* total;    // [kUnitRows]
    float* values;   // [kUnitRows, width]
    int64_t width;

    Sums(Memory& memory, const HeadShape& heads)
        : maximum(memory.take<float>(kUnitRows)),
          total(memory.take<float>(kUnitRows)),
          values(memory.take<float>(kUnitRows * padded_dim(heads))),
          width(padded_dim(heads)) {}

    void clear(int32_t num_rows) {
        std::fill_n(maximum, kUnitRows, -FLT_MAX);
        std::fill_n(total, kUnitRows, 0.0F);
        std::fill_n(values, num_rows * width, 0.0F);
    }
    operator SpanSums() const { return {maximum, total, values, width}; }
};

// `factor` is the exponential of numbers up to 0. Sixteen rows at a time, of which the last may be beyond the end.
template <class Factor> inline void merge(Sums& sums, const SpanSums& span, int32_t num_rows, Factor factor) {
    for (int32_t row = 0; row < num_rows; row += 16) {
        const F32x16 before = F32x16::load(sums.maximum + row), added = F32x16::load(span.maximum + row);
        const F32x16 most = max(added, before), keep = factor(before - most), scale = factor(added - most);
        most.store(sums.maximum + row);
        fma(F32x16::load(span.total + row), scale, F32x16::load(sums.total + row) * keep).store(sums.total + row);
        float keeps[16], scales[16];
        keep.store(keeps), scale.store(scales);
        for (int32_t r = row; r < std::min(row + 16, num_rows); ++r) {
            const F32x16 kept = F32x16::set1(keeps[r - row]), scaled = F32x16::set1(scales[r - row]);
            const float* values = span.values + r * span.width;
            float* out = sums.values + r * sums.width;
            for (int64_t i = 0; i < sums.width; i += 16)
                fma(F32x16::load(values + i), scaled, F32x16::load(out + i) * kept).store(out + i);
        }
    }
}

// Writes values / total of one row where its head goes in `out`. Adding 0 makes every zero positive: tiles in which a
// row sees nothing may have changed its sign, and how many there are depends on the batch.
inline void write_out(const AttentionOp& op, int32_t token, int32_t head, float total, const float* values) {
    const int32_t dim = op.heads.head_dim;
    alignas(64) float row[kMaxHeadDim];
    const F32x16 inverse = F32x16::set1(1.0F / total);
    for (int32_t i = 0; i < dim; i += 16) fma(F32x16::load(values + i), inverse, F32x16::zero()).store(row + i);
    const int32_t first = head * dim;
    if (op.out.form == RowForm::kF32)
        std::copy_n(row, dim, op.out.f32(token) + first);
    else
        narrow_piece(op.out, token, first, dim, row);
}

}  // namespace kvarto::KVARTO_ISA
