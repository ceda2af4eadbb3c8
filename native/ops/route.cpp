// Softmax over the logits of all experts, then the largest, the lower id first among equals.
#include <algorithm>
#include <limits>

#include "ops/experts.h"
#include "ops/linear_f32.h"
#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kRowsPerItem = 16;

// logits[0 .. width), a multiple of 16 of which `num_experts` count, become shares that add up to 1.
void softmax(float* logits, int32_t num_experts, int64_t width) {
    std::fill(logits + num_experts, logits + width, -std::numeric_limits<float>::max());
    F32x16 top = F32x16::load(logits);
    for (int64_t i = kLanes; i < width; i += kLanes) top = max(top, F32x16::load(logits + i));
    const F32x16 highest = F32x16::set1(largest(top));
    F32x16 total = F32x16::zero();
    for (int64_t i = 0; i < width; i += kLanes) {
        const F32x16 term = exp(F32x16::load(logits + i) - highest);  // 1e-38 for those that do not count
        term.store(logits + i);
        total = total + term;
    }
    const F32x16 sum_of_all = F32x16::set1(sum(total));
    for (int64_t i = 0; i < width; i += kLanes) (F32x16::load(logits + i) / sum_of_all).store(logits + i);
}

// top_k passes over few numbers: cheaper than sorting them. Takes what it chose out of `shares`.
void choose(float* shares, int32_t num_experts, const RouteOp& op, int32_t* ids, float* chosen) {
    float total = 0.0F;
    for (int32_t k = 0; k < op.top_k; ++k) {
        int32_t best = 0;
        for (int32_t e = 1; e < num_experts; ++e) best = shares[e] > shares[best] ? e : best;
        ids[k] = best;
        chosen[k] = shares[best];
        total += shares[best];
        shares[best] = -1.0F;
    }
    if (!op.normalise) return;
    for (int32_t k = 0; k < op.top_k; ++k) chosen[k] /= total;
}

}  // namespace

// Bound by the product, num_experts × width multiply-adds a row; the rest is a few hundred operations.
void route(const RouteOp& op, const StepView& step, Worker& worker) {
    const int32_t num_experts = op.weight.num_rows;
    const int64_t width = align_up(num_experts, kLanes);
    const int32_t num_rows = step.num_rows(op.x);
    auto* logits = reinterpret_cast<float*>(op.scratch);
    for (int64_t first; (first = worker.take() * kRowsPerItem) < num_rows;) {
        const int32_t count = static_cast<int32_t>(std::min<int64_t>(kRowsPerItem, num_rows - first));
        float* out = logits + first * width;
        for (const Part& part : op.weight.parts) {
            const ProductRows rows{.x = op.x.f32(first), .x_stride = op.x.row_bytes / int64_t{sizeof(float)},
                                   .out = out, .out_stride = width, .num_rows = count};
            product_f32(part, op.weight.num_columns, 0, part.num_panels(), rows, nullptr);
            out += part.num_rows;
        }
        for (int64_t row = first; row < first + count; ++row) {
            softmax(logits + row * width, num_experts, width);
            choose(logits + row * width, num_experts, op, op.ids.i32(row), op.shares.f32(row));
        }
    }
}

}  // namespace kvarto::KVARTO_ISA
