// Mixtures of experts: which experts a token goes to, and the products with those.
#pragma once

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto {

// Route's scratch: logits of all experts for up to `num_rows` rows.
inline constexpr int64_t route_scratch_bytes(int64_t num_rows, int32_t num_experts) {
    return num_rows * align_up(num_experts, kLanes) * int64_t{sizeof(float)};
}

// Experts' scratch for up to `num_rows` tokens: a row between the products for each pair of a token and one of its
// experts, and the order of the pairs.
inline constexpr int64_t experts_scratch_bytes(int64_t num_rows, int32_t top_k, int32_t num_experts, int32_t hidden,
                                               int32_t ffn) {
    const int64_t num_pairs = num_rows * top_k;
    const int64_t order = align_up((num_experts + 1 + 2 * num_pairs + num_experts) * int64_t{sizeof(int32_t)}, 64);
    return order + num_pairs * (2 * int64_t{ffn} + hidden) * int64_t{sizeof(float)};
}

}  // namespace kvarto

namespace kvarto::KVARTO_ISA {

// Entered by all workers of the team.
void route(const RouteOp& op, const StepView& step, Worker& worker);
void experts(const ExpertsOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
