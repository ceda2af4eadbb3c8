// Rows by a matrix, in the products that the op names.
#pragma once

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto::KVARTO_ISA {

// out = x · weight.T + bias. All workers of the team enter it; its products are float32, or every part is quantised.
void linear(const LinearOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
