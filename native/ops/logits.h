// The product with the vocabulary.
#pragma once

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto::KVARTO_ISA {

// out = softcap(scale * (x · weight.T + bias)), and a summary of each chunk of each row. All workers enter it.
// Where adapters update the op in this step, out = x · weight.T + bias: `finish_logits` does the rest once they have.
void logits(const LogitsOp& op, const StepView& step, Worker& worker);
void finish_logits(const LogitsOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
