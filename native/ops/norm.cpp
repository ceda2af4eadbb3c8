// RMS and layer norm of rows, with the residual stream joined first where the op names one.
//
// Two passes over a row that is in the L1 cache by the second; three for layer norm. Bound: about 3 loads and 2 stores
// of 16 lanes per 16 elements. A row of 576 takes about 0.1 µs.
#include <cmath>

#include "ops/lanes.h"
#include "ops/row_ops.h"
#include "ops/write_row.h"

namespace kvarto::KVARTO_ISA {

namespace {

// residual += x, row by row; what is normalised then.
const float* joined(const NormOp& op, int64_t row) {
    const float* x = op.x.f32(row);
    if (op.residual.data == nullptr) return x;
    float* residual = op.residual.f32(row);
    each_vector(op.x.width, [&](int32_t i, int32_t count) {
        store_first(load_first(residual + i, count) + load_first(x + i, count), residual + i, count);
    });
    return residual;
}

float mean_of(const float* x, int32_t width) {
    const float total = sum_of(width, [&](int32_t i, int32_t count, F32x16 acc) { return acc + load_first(x + i, count); });
    return total / static_cast<float>(width);
}

// 1 / sqrt(mean((x - mean)²) + eps). Lanes beyond the row's end must not count, so they take the mean itself.
float scale_of(const float* x, int32_t width, float mean, float eps) {
    const F32x16 centre = F32x16::set1(mean);
    const float total = sum_of(width, [&](int32_t i, int32_t count, F32x16 acc) {
        float lanes[kWide];
        if (count < kWide) {
            centre.store(lanes);
            std::memcpy(lanes, x + i, static_cast<size_t>(count) * sizeof(float));
        }
        const F32x16 distance = F32x16::load(count < kWide ? lanes : x + i) - centre;
        return fma(distance, distance, acc);
    });
    return 1.0F / std::sqrt(total / static_cast<float>(width) + eps);
}

void norm_row(const NormOp& op, int64_t row) {
    const float* x = joined(op, row);
    const float mean = op.kind == NormKind::kLayer ? mean_of(x, op.x.width) : 0.0F;
    const F32x16 centre = F32x16::set1(mean), scale = F32x16::set1(scale_of(x, op.x.width, mean, op.eps));
    write_row(op.out, row, [&](int32_t first, int32_t count, float* out) {
        each_vector(count, [&](int32_t i, int32_t lanes) {
            F32x16 y = (load_first(x + first + i, lanes) - centre) * scale * load_first(op.weight + first + i, lanes);
            if (op.bias != nullptr) y = y + load_first(op.bias + first + i, lanes);
            store_first(y, out + i, lanes);
        });
    });
}

}  // namespace

void norm(const NormOp& op, const StepView&, int64_t first_row, int64_t last_row) {
    for (int64_t row = first_row; row < last_row; ++row) norm_row(op, row);
}

}  // namespace kvarto::KVARTO_ISA
