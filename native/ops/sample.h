// One token per row of logits.
#pragma once

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto::KVARTO_ISA {

// Draws a token for each row as kvarto/core/step.py says, with its log-probability and the likeliest tokens where they
// are asked for (num_logprobs ≥ 0). Rows are items of work; all workers enter it. Scratch: ops/sample_scratch.h.
void sample(const SampleOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
