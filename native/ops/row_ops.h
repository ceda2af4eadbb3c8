// Ops that work on each row alone. `rows` are [first_row, last_row) of the op's buffers; see core/kernels.h.
#pragma once

#include "core/ops.h"
#include "core/step.h"

namespace kvarto::KVARTO_ISA {

void embed(const EmbedOp& op, const StepView& step, int64_t first_row, int64_t last_row);
void norm(const NormOp& op, const StepView& step, int64_t first_row, int64_t last_row);
void head_norm(const HeadNormOp& op, const StepView& step, int64_t first_row, int64_t last_row);
void rope(const RopeOp& op, const StepView& step, int64_t first_row, int64_t last_row);
void gated_activation(const GatedActivationOp& op, const StepView& step, int64_t first_row, int64_t last_row);
void activate(const ActivateOp& op, const StepView& step, int64_t first_row, int64_t last_row);
void gather(const GatherOp& op, const StepView& step, int64_t first_row, int64_t last_row);

}  // namespace kvarto::KVARTO_ISA
