// RMS norm of each q and k head, in place. Bound: 2 loads and a store of 16 lanes per 16 elements, in the L1 cache.
#include <cmath>

#include "ops/lanes.h"
#include "ops/row_ops.h"

namespace kvarto::KVARTO_ISA {

namespace {

void norm_head(float* x, const float* weight, int32_t width, float eps) {
    const float total = sum_of(width, [&](int32_t i, int32_t count, F32x16 acc) {
        const F32x16 values = load_first(x + i, count);
        return fma(values, values, acc);
    });
    const F32x16 scale = F32x16::set1(1.0F / std::sqrt(total / static_cast<float>(width) + eps));
    each_vector(width, [&](int32_t i, int32_t count) {
        store_first(load_first(x + i, count) * scale * load_first(weight + i, count), x + i, count);
    });
}

}  // namespace

void head_norm(const HeadNormOp& op, const StepView&, int64_t first_row, int64_t last_row) {
    const auto [num_q, num_kv, head_dim] = op.heads;
    for (int64_t row = first_row; row < last_row; ++row) {
        float* head = op.qkv.f32(row);
        for (int32_t h = 0; h < num_q + num_kv; ++h, head += head_dim)
            norm_head(head, h < num_q ? op.q_weight : op.k_weight, head_dim, op.eps);
    }
}

}  // namespace kvarto::KVARTO_ISA
